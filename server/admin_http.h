// The plain HTTP listener beside gRPC: the status page, probes, metrics, and for that page a completion.
#ifndef EFLA_SERVER_ADMIN_HTTP_H_
#define EFLA_SERVER_ADMIN_HTTP_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/listen_address.h"

namespace efla {

struct HttpReply {
  int status = 200;
  std::string body;
};

// Sends the data of one server-sent event, a text without line ends; false when nobody reads any more.
using HttpStream = std::function<bool(std::string_view data)>;

// What the pages say; called from the listener's threads, several at once.
struct AdminPages {
  std::function<HttpReply()> live, ready, metrics;
  // /lbz, for balancers that tell a server that leaves (404) from one that is dead (all but 200 and 404).
  std::function<HttpReply()> balancer;
  // POST /v1/generate with the request's body: a refusal, or nullopt once all events have been sent. Null:
  // there is no such page. Only programs on this machine reach it, and no web page but the status page.
  std::function<std::optional<HttpReply>(std::string_view body, const HttpStream& stream)> generate;
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
