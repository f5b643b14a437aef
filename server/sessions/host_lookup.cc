#include "server/sessions/host_lookup.h"

#include <netdb.h>

#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"

namespace efla {
namespace {

HostLookup::Answer Resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) return absl::UnavailableError(gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.bytes, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
  }
  return addresses;
}

bool IsReady(const std::shared_future<HostLookup::Answer>& future) {
  return future.valid() && future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

HostLookup::HostLookup(std::string host, int port)
    : HostLookup([host = std::move(host), port] { return Resolve(host, port); }) {}

HostLookup::Answer HostLookup::Find(TimePoint deadline) {
  std::shared_future<Answer> answer;
  {
    const std::lock_guard lock(mutex_);
    if (!under_way_.valid()) {
      std::packaged_task<Answer()> task(resolver_);
      under_way_ = task.get_future().share();
      std::thread(std::move(task)).detach();
    }
    answer = under_way_;
  }
  if (answer.wait_until(deadline) != std::future_status::ready) {
    return absl::UnavailableError("its name was not resolved in time");
  }
  const std::lock_guard lock(mutex_);
  if (IsReady(under_way_)) under_way_ = {};  // not ready: the next one, which others wait for
  return answer.get();
}

}  // namespace efla
