#include "tests/e2e/fuzz_call.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"

namespace efla::e2e {
namespace {

using SystemClock = std::chrono::system_clock;  // gRPC's deadlines

constexpr int kPausedReads = 3;

sockaddr_in AddressOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  return to;
}

int ConnectTo(const std::string& address) {
  const sockaddr_in to = AddressOf(address);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0) return fd;
  close(fd);
  return -1;
}

void CloseWithReset(int fd) {
  const linger now = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(fd);
}

bool Forward(int from, int to) {
  char part[16384];
  const ssize_t size = recv(from, part, sizeof(part), 0);
  for (ssize_t sent = 0; sent < size;) {
    const ssize_t more = send(to, part + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return size > 0;
}

// One call; each operation is waited for, and the interruption comes while it is.
class Running {
 public:
  Running(const std::shared_ptr<grpc::Channel>& channel, const FuzzCall& call, Relay* relay)
      : call_(call), relay_(relay), stub_(channel) {
    const SystemClock::time_point deadline = begin_ + call.timeout;
    context_.set_deadline(deadline);
    for (const auto& [key, value] : call.metadata) context_.AddMetadata(key, value);
    ends_ = deadline;
    if (call.interrupt_after) interrupts_ = begin_ + *call.interrupt_after;
  }
  ~Running() {
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  FuzzResult Run() {
    const auto stream = stub_.PrepareCall(&context_, call_.method, &queue_);
    stream->StartCall(this);
    bool good = Wait();
    for (size_t i = 0; good && i < call_.messages.size(); ++i) {
      const grpc::Slice slice(call_.messages[i]);
      stream->Write(grpc::ByteBuffer(&slice, 1), this);
      good = Wait();
    }
    if (good && call_.half_closes) {
      stream->WritesDone(this);
      Wait();
    }
    // Also where a write has failed, since the server has answered before it: the status comes behind what it
    // sent.
    for (int reads = 0;; ++reads) {
      if (reads < kPausedReads) std::this_thread::sleep_for(call_.pause);
      grpc::ByteBuffer buffer;
      stream->Read(&buffer, this);
      if (!Wait()) break;
      result_.replies.push_back(Bytes(buffer));
    }
    stream->Finish(&result_.status, this);
    Wait();
    result_.elapsed = std::chrono::duration_cast<milliseconds>(SystemClock::now() - begin_);
    return std::move(result_);
  }

 private:
  // The operation's result.
  bool Wait() {
    for (;;) {
      const bool interrupts = interrupts_ && !result_.interrupted;
      const SystemClock::time_point until =
          interrupts ? std::min(*interrupts_, ends_ + kHangBound) : ends_ + kHangBound;
      void* tag = nullptr;
      bool ok = false;
      switch (queue_.AsyncNext(&tag, &ok, until)) {
        case grpc::CompletionQueue::GOT_EVENT:
          return ok;
        case grpc::CompletionQueue::SHUTDOWN:
          return false;
        case grpc::CompletionQueue::TIMEOUT:
          break;
      }
      const SystemClock::time_point now = SystemClock::now();
      if (interrupts && now >= *interrupts_) {
        result_.interrupted = true;
        ends_ = std::min(ends_, now);
        relay_ != nullptr ? relay_->Cut() : context_.TryCancel();
      } else if (now >= ends_ + kHangBound) {
        result_.hung = true;
        ends_ = now;
        context_.TryCancel();
      }
    }
  }

  static std::string Bytes(const grpc::ByteBuffer& buffer) {
    std::vector<grpc::Slice> slices;
    std::string bytes;
    if (!buffer.Dump(&slices).ok()) return bytes;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return bytes;
  }

  const FuzzCall& call_;
  Relay* const relay_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  const SystemClock::time_point begin_ = SystemClock::now();
  SystemClock::time_point ends_;  // when nothing may come any more
  std::optional<SystemClock::time_point> interrupts_;
  FuzzResult result_;
};

}  // namespace

FuzzResult MakeCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& address,
                    const FuzzCall& call) {
  if (!call.cuts_connection) return Running(channel, call, nullptr).Run();
  Relay relay(address);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  const auto own = grpc::CreateCustomChannel(relay.address(), grpc::InsecureChannelCredentials(), arguments);
  return Running(own, call, &relay).Run();
}

Relay::Relay(const std::string& address) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in here = AddressOf("127.0.0.1:0");
  socklen_t size = sizeof(here);
  EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&here), sizeof(here)), 0);
  EXPECT_EQ(listen(listener_, 1), 0);
  EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&here), &size), 0);
  address_ = "127.0.0.1:" + std::to_string(ntohs(here.sin_port));
  thread_ = std::thread([this, address] { Run(address); });
}

Relay::~Relay() {
  Cut();
  thread_.join();
  close(listener_);
}

void Relay::Cut() {
  const std::scoped_lock lock(mutex_);
  cut_ = true;
  shutdown(listener_, SHUT_RDWR);
  for (const int fd : {client_, server_}) {
    if (fd >= 0) shutdown(fd, SHUT_RDWR);  // ends the thread's waiting
  }
}

void Relay::Run(const std::string& to) {
  const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client < 0) return;
  const int server = ConnectTo(to);
  bool goes_on = server >= 0;
  {
    const std::scoped_lock lock(mutex_);
    goes_on = goes_on && !cut_;
    client_ = client;
    server_ = server;
  }
  pollfd ends[] = {{.fd = client, .events = POLLIN, .revents = 0},
                   {.fd = server, .events = POLLIN, .revents = 0}};
  while (goes_on && poll(ends, 2, -1) > 0) {
    for (int i = 0; i < 2 && goes_on; ++i) {
      if (ends[i].revents != 0) goes_on = Forward(ends[i].fd, ends[1 - i].fd);
    }
  }
  const std::scoped_lock lock(mutex_);
  CloseWithReset(client);
  if (server >= 0) CloseWithReset(server);
  client_ = server_ = -1;
}

void SendToPort(const std::string& address, const std::string& bytes) {
  const int fd = ConnectTo(address);
  if (fd < 0) return;
  const timeval patience = {.tv_sec = 0, .tv_usec = 100'000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  char part[4096];
  while (recv(fd, part, sizeof(part), 0) > 0) {
  }
  close(fd);
}

}  // namespace efla::e2e
