#include "server/admin_http.h"

#include <CivetServer.h>

#include <chrono>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr char kTextPage[] = "text/plain; charset=utf-8";
constexpr char kMetricsPage[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kIndex[] =
    "efla_server\n\n"
    "/metrics  Prometheus metrics\n"
    "/livez    200 while the process and its engine work\n"
    "/readyz   200 while new requests are welcome\n";

const char* Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    default:
      return "Service Unavailable";
  }
}

class Page : public CivetHandler {
 public:
  // Answers its own path only: civetweb sends it everything below that path, too.
  Page(std::string path, const char* content_type, std::function<HttpReply()> reply)
      : path_(std::move(path)), content_type_(content_type), reply_(std::move(reply)) {}

  bool handleGet(CivetServer*, mg_connection* connection) override { return Answer(connection, true); }
  bool handleHead(CivetServer*, mg_connection* connection) override { return Answer(connection, false); }

 private:
  bool Answer(mg_connection* connection, bool with_body) {
    const bool own_path = path_ == mg_get_request_info(connection)->local_uri;
    const HttpReply reply = own_path ? reply_() : HttpReply{404, "no such page\n"};
    mg_printf(connection,
              "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
              "Connection: close\r\n\r\n",
              reply.status, Reason(reply.status), own_path ? content_type_ : kTextPage, reply.body.size());
    if (with_body) mg_write(connection, reply.body.data(), reply.body.size());
    return true;
  }

  const std::string path_;
  const char* const content_type_;
  const std::function<HttpReply()> reply_;
};

class CivetAdminHttp : public AdminHttp {
 public:
  // Throws CivetException when nothing can listen there.
  CivetAdminHttp(const ListenAddress& address, AdminPages pages)
      : address_(address),
        live_("/livez", kTextPage, std::move(pages.live)),
        ready_("/readyz", kTextPage, std::move(pages.ready)),
        metrics_("/metrics", kMetricsPage, std::move(pages.metrics)),
        index_("/", kTextPage,
               [] {
                 return HttpReply{200, kIndex};
               }),
        server_(std::vector<std::string>{"listening_ports", address.ToString(), "num_threads", "4",
                                         "request_timeout_ms", "10000", "enable_directory_listing", "no"}) {
    server_.addHandler("/livez", live_);
    server_.addHandler("/readyz", ready_);
    server_.addHandler("/metrics", metrics_);
    server_.addHandler("/", index_);
    if (const std::vector<int> ports = server_.getListeningPorts(); !ports.empty())
      address_.port = ports.front();
  }

  // civetweb notices that it should stop when a connection comes or after two seconds: connections are made.
  ~CivetAdminHttp() override {
    const std::jthread caller([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        TouchListener(address_);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    server_.close();
  }

  ListenAddress address() const override { return address_; }

 private:
  ListenAddress address_;
  Page live_, ready_, metrics_, index_;
  CivetServer server_;  // last: its threads use the pages
};

}  // namespace

absl::StatusOr<std::unique_ptr<AdminHttp>> AdminHttp::Start(const ListenAddress& address, AdminPages pages) {
  try {
    return std::make_unique<CivetAdminHttp>(address, std::move(pages));
  } catch (const CivetException&) {
    return absl::UnavailableError(
        absl::StrFormat("cannot listen on %s: %s", address.ToString(), WhyNotListening(address)));
  }
}

}  // namespace efla
