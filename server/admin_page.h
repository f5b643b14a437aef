// The status page: one HTML file, server/admin_page.html, taken into the program by the build.
#ifndef EFLA_SERVER_ADMIN_PAGE_H_
#define EFLA_SERVER_ADMIN_PAGE_H_

#include <string_view>

namespace efla {

std::string_view AdminPageHtml();

}  // namespace efla

#endif  // EFLA_SERVER_ADMIN_PAGE_H_
