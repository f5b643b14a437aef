// The plain HTTP listener for probes and metrics: /livez, /readyz, /metrics.
#ifndef EFLA_SERVER_ADMIN_HTTP_H_
#define EFLA_SERVER_ADMIN_HTTP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/listen_address.h"

namespace efla {

struct HttpReply {
  int status = 200;
  std::string body;
};

// What the pages say; called from the listener's threads, several at once.
struct AdminPages {
  std::function<HttpReply()> live, ready, metrics;
};

class AdminHttp {
 public:
  // UNAVAILABLE with the reason when nothing can listen there.
  static absl::StatusOr<std::unique_ptr<AdminHttp>> Start(const ListenAddress& address, AdminPages pages);
  virtual ~AdminHttp() = default;  // ends open requests, then stops listening

  virtual ListenAddress address() const = 0;  // as bound
};

}  // namespace efla

#endif  // EFLA_SERVER_ADMIN_HTTP_H_
