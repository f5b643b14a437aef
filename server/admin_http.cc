#include "server/admin_http.h"

#include <CivetServer.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/admin_page.h"

namespace efla {
namespace {

// Connections that say nothing must hold up no probe: a thread for each of many, and not for long.
constexpr char kThreads[] = "256";
constexpr char kPatienceMs[] = "1000";  // for a request's headers, and for a reader that stands still
constexpr unsigned kFeatureIpv6 = 8;    // civetweb's number

constexpr char kHtmlPage[] = "text/html; charset=utf-8";
constexpr char kGeneratePath[] = "/v1/generate";
constexpr char kTextPage[] = "text/plain; charset=utf-8";
constexpr char kMetricsPage[] = "text/plain; version=0.0.4; charset=utf-8";
const char* Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 411:
      return "Length Required";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    default:
      return "Service Unavailable";
  }
}

void Write(mg_connection* connection, const HttpReply& reply, const char* content_type, bool with_body) {
  // The page needs nothing from elsewhere, and nothing else may use it.
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'\r\n"
            "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            reply.status, Reason(reply.status), content_type, reply.body.size());
  if (with_body) mg_write(connection, reply.body.data(), reply.body.size());
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
    Write(connection, reply, own_path ? content_type_ : kTextPage, with_body);
    return true;
  }

  const std::string path_;
  const char* const content_type_;
  const std::function<HttpReply()> reply_;
};

// POST /v1/generate. A browser on this machine may have any web page open: a page from elsewhere cannot send
// JSON without asking first (and nobody answers that question), and one whose name has been pointed at this
// machine shows by its Host.
class GeneratePage : public CivetHandler {
 public:
  explicit GeneratePage(decltype(AdminPages::generate) generate) : generate_(std::move(generate)) {}

  bool handleGet(CivetServer*, mg_connection* connection) override {
    Write(connection, {405, "use POST\n"}, kTextPage, true);
    return true;
  }

  bool handlePost(CivetServer*, mg_connection* connection) override {
    std::string body;
    std::optional<HttpReply> reply = Check(connection, body);
    bool begun = false;
    if (!reply) {
      reply = generate_(body, [&](std::string_view data) {
        if (!std::exchange(begun, true)) {
          mg_printf(connection,
                    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
                    "Connection: close\r\n\r\n");
        }
        const std::string event = absl::StrFormat("data: %s\n\n", data);
        return mg_write(connection, event.data(), event.size()) == static_cast<int>(event.size());
      });
    }
    if (reply) Write(connection, *reply, kTextPage, true);
    return true;
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{1} << 20;

  static std::optional<HttpReply> Check(mg_connection* connection, std::string& body) {
    const mg_request_info& info = *mg_get_request_info(connection);
    if (std::string_view(info.local_uri) != kGeneratePath) return HttpReply{404, "no such page\n"};
    const std::string_view peer = info.remote_addr;
    if (!peer.starts_with("127.") && peer != "::1" && !peer.starts_with("::ffff:127.")) {
      return HttpReply{403, "completions are for programs on the server's own machine\n"};
    }
    const char* const host = mg_get_header(connection, "Host");
    if (host == nullptr || !IsLoopback(host)) {
      return HttpReply{403, "ask for localhost or 127.0.0.1\n"};
    }
    const char* const type = mg_get_header(connection, "Content-Type");
    if (type == nullptr || !std::string_view(type).starts_with("application/json")) {
      return HttpReply{415, "the Content-Type must be application/json\n"};
    }
    if (info.content_length < 0) return HttpReply{411, "a Content-Length is needed\n"};
    if (info.content_length > kMostBytes) return HttpReply{413, "the request is larger than 1 MiB\n"};
    body.resize(static_cast<size_t>(info.content_length));
    for (size_t read = 0; read < body.size();) {
      const int n = mg_read(connection, body.data() + read, body.size() - read);
      if (n <= 0) return HttpReply{400, "the request is shorter than its Content-Length\n"};
      read += static_cast<size_t>(n);
    }
    return std::nullopt;
  }

  static bool IsLoopback(std::string_view host) {
    if (host.starts_with('[')) return host.starts_with("[::1]");
    const std::string_view name = host.substr(0, host.find(':'));
    return name == "localhost" ||
           (name.starts_with("127.") && name.find_first_not_of("0123456789.") == std::string_view::npos);
  }

  const decltype(AdminPages::generate) generate_;
};

class CivetAdminHttp : public AdminHttp {
 public:
  // Throws CivetException when nothing can listen there.
  CivetAdminHttp(const ListenAddress& address, AdminPages pages)
      : address_(address),
        has_generate_(pages.generate != nullptr),
        live_("/livez", kTextPage, std::move(pages.live)),
        ready_("/readyz", kTextPage, std::move(pages.ready)),
        balancer_("/lbz", kTextPage, std::move(pages.balancer)),
        metrics_("/metrics", kMetricsPage, std::move(pages.metrics)),
        generate_(std::move(pages.generate)),
        index_("/", kHtmlPage,
               [has_generate = has_generate_] {
                 return HttpReply{200, AdminPageHtml(has_generate)};
               }),
        server_(std::vector<std::string>{"listening_ports", address.ToString(), "num_threads", kThreads,
                                         "request_timeout_ms", kPatienceMs, "enable_directory_listing",
                                         "no"}) {
    server_.addHandler("/livez", live_);
    server_.addHandler("/readyz", ready_);
    server_.addHandler("/lbz", balancer_);
    server_.addHandler("/metrics", metrics_);
    if (has_generate_) server_.addHandler(kGeneratePath, generate_);
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
  const bool has_generate_;
  Page live_, ready_, balancer_, metrics_;
  GeneratePage generate_;
  Page index_;
  CivetServer server_;  // last: its threads use the pages
};

}  // namespace

absl::StatusOr<std::unique_ptr<AdminHttp>> AdminHttp::Start(const ListenAddress& address, AdminPages pages) {
  const bool is_ipv6 = address.host.find(':') != std::string::npos;
  if (is_ipv6 && mg_check_feature(kFeatureIpv6) == 0) {
    return absl::UnavailableError(
        absl::StrFormat("cannot listen on %s: civetweb, the admin port's HTTP library, is built without "
                        "IPv6; give an IPv4 address",
                        address.ToString()));
  }
  try {
    return std::make_unique<CivetAdminHttp>(address, std::move(pages));
  } catch (const CivetException&) {
    return absl::UnavailableError(
        absl::StrFormat("cannot listen on %s: %s", address.ToString(), WhyNotListening(address)));
  }
}

}  // namespace efla
