// The status page: one HTML file, server/admin_page.html, taken into the program by the build.
#ifndef EFLA_SERVER_ADMIN_PAGE_H_
#define EFLA_SERVER_ADMIN_PAGE_H_

#include <string>

namespace efla {

// With the box that asks /v1/generate for completions, or with that box hidden.
std::string AdminPageHtml(bool has_completions);

}  // namespace efla

#endif  // EFLA_SERVER_ADMIN_PAGE_H_
