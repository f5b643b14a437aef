#include "tests/e2e/fuzzer.h"

#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "efla/v1/generation.pb.h"
#include "efla/v1/sessions.pb.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"

namespace efla::e2e {
namespace {

using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

constexpr size_t kMostSnapshots = 8;

std::string PathOf(const MethodDescriptor& method) {
  return absl::StrFormat("/%s/%s", method.service()->full_name(), method.name());
}
std::unique_ptr<Message> New(const google::protobuf::Descriptor& type) {
  return std::unique_ptr<Message>(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type)->New());
}

const MethodDescriptor* DrainMethod() {
  static const MethodDescriptor* const kDrain = Services()[3]->FindMethodByName("Drain");
  return kDrain;
}

}  // namespace

std::pair<std::string, std::string> Snapshots::Two(RandomMessages& random) {
  const std::scoped_lock lock(mutex_);
  if (snapshots_.empty()) return {};
  std::string one = snapshots_[random.Below(snapshots_.size())];
  std::string other = snapshots_[random.Below(snapshots_.size())];
  return {std::move(one), std::move(other)};
}

void Snapshots::Keep(std::string snapshot, RandomMessages& random) {
  const std::scoped_lock lock(mutex_);
  if (snapshots_.size() < kMostSnapshots) {
    snapshots_.push_back(std::move(snapshot));
  } else {
    snapshots_[random.Below(kMostSnapshots)] = std::move(snapshot);
  }
}

Fuzzer::Fuzzer(FuzzedServer& server, Tally& tally, Snapshots& snapshots, int number)
    : server_(server),
      tally_(tally),
      snapshots_(snapshots),
      number_(number),
      messages_(server.facts(), server.seed() * 64 + static_cast<uint32_t>(number)),
      channel_(server.process().NewChannel()) {}

void Fuzzer::Act() {
  ++acts_;
  if (OneIn(60)) {
    channel_ = OneIn(2) ? server_.process().NewChannel() : server_.process().NewSmallWindowChannel();
  }
  const size_t what = messages_.Below(100);
  if (what < 68) {
    const char* const methods[] = {"Generate", "Generate", "Generate", "Complete", "Complete", "Score"};
    Typed(*Services()[0]->FindMethodByName(methods[messages_.Below(what < 64 ? 5 : 6)]), /*spoilt=*/6);
  } else if (what < 84) {
    const ServiceDescriptor& service = *Services()[OneIn(4) ? messages_.Below(4) : 2];
    const MethodDescriptor& method =
        *service.method(static_cast<int>(messages_.Below(service.method_count())));
    method.client_streaming() ? Import() : Typed(method, /*spoilt=*/3);
  } else if (what < 94) {
    Bytes();
  } else if (what < 97) {
    Import();
  } else {
    Elsewhere();
  }
}

void Fuzzer::Typed(const MethodDescriptor& method, size_t spoilt) {
  if (&method == DrainMethod()) return;
  const std::unique_ptr<Message> request = New(*method.input_type());
  messages_.FillValid(*request);
  const bool spoils = OneIn(spoilt);
  if (spoils) messages_.Spoil(*request, OneIn(3) ? 8 : 2);
  FuzzCall call{.method = PathOf(method), .messages = {request->SerializeAsString()}};
  Disturb(call, /*gently=*/!spoils);
  const FuzzResult result = Make(call, request->ShortDebugString());
  if (&method == Services()[2]->FindMethodByName("Export")) Keep(result);
  const auto* generate = dynamic_cast<const v1::GenerateRequest*>(request.get());
  if (generate != nullptr) {
    CheckGenerated(call, *generate, result, Where(call, generate->ShortDebugString()), tally_);
  }
}

void Fuzzer::Bytes() {
  const ServiceDescriptor& service = *Services()[messages_.Below(4)];
  const MethodDescriptor* method = service.method(static_cast<int>(messages_.Below(service.method_count())));
  if (OneIn(3)) method = Services()[0]->method(static_cast<int>(messages_.Below(3)));
  if (method == DrainMethod()) return;
  std::string bytes[2];
  for (std::string& one : bytes) {
    const std::unique_ptr<Message> request = New(*method->input_type());
    messages_.FillValid(*request);
    one = request->SerializeAsString();
  }
  FuzzCall call{.method = PathOf(*method), .messages = {messages_.Mutate(bytes[0], bytes[1])}};
  if (OneIn(12)) call.messages.clear();
  if (OneIn(12)) call.messages.push_back(bytes[1]);
  if (OneIn(20)) {
    const char* const paths[] = {"/efla.v1.Generation/NoSuch", "/no.such.Service/Method",     "/", "//",
                                 "/efla.v1.Generation/",       "/efla.v2.Generation/Generate"};
    call.method = paths[messages_.Below(std::size(paths))];
  }
  if (OneIn(30)) {
    call.half_closes = false;
    call.timeout = milliseconds(500);
  }
  Disturb(call, /*gently=*/false);
  Make(call, "bytes " + absl::BytesToHexString(call.messages.empty() ? "" : call.messages[0].substr(0, 300)));
}

void Fuzzer::Import() {
  const auto [snapshot, other] = snapshots_.Two(messages_);
  std::string sent = OneIn(3) ? snapshot : messages_.Mutate(snapshot, other);
  v1::ImportOptions options;
  messages_.FillValid(options);
  if (OneIn(6)) messages_.Spoil(options, 2);
  FuzzCall call{.method = "/efla.v1.Sessions/Import"};
  const auto add = [&call](const v1::ImportRequest& request) {
    call.messages.push_back(request.SerializeAsString());
  };
  v1::ImportRequest part;
  *part.mutable_options() = options;
  if (!OneIn(15)) add(part);
  if (OneIn(30)) add(part);
  const size_t chunk = OneIn(10) ? 2'000'000 : OneIn(3) ? 1 + messages_.Below(60'000) : size_t{1} << 20;
  for (size_t begin = 0; begin < sent.size() && call.messages.size() < 200; begin += chunk) {
    part.set_chunk(sent.substr(begin, chunk));
    add(part);
    if (OneIn(40)) add({});
  }
  if (OneIn(12) && !call.messages.empty()) {
    std::string& one = call.messages[messages_.Below(call.messages.size())];
    one = messages_.Mutate(one, "");
  }
  Disturb(call, /*gently=*/false);
  const FuzzResult result =
      Make(call, absl::StrFormat("options {%s}, %d bytes in %d messages", options.ShortDebugString(),
                                 sent.size(), call.messages.size()));
  // A repetition is answered as what it repeats, whatever it brings.
  if (result.status.ok() && options.request_id().empty()) {
    EXPECT_TRUE(sent == snapshot || sent == other)
        << "a changed snapshot was taken" << Where(call, options.ShortDebugString());
  }
}

void Fuzzer::Elsewhere() {
  switch (messages_.Below(6)) {
    case 0:
    case 1: {
      const char* const paths[] = {"/grpc.health.v1.Health/Check",
                                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
      FuzzCall call{.method = paths[messages_.Below(2)]};
      std::string bytes(
          "\x0a\x12"
          "efla.v1.Generation",
          20);
      if (!OneIn(3)) bytes = messages_.Mutate(bytes, messages_.RandomBytes(20));
      call.messages = {bytes};
      Disturb(call, /*gently=*/false);
      Make(call, "bytes " + absl::BytesToHexString(bytes));
      break;
    }
    case 2: {
      const char* const paths[] = {"/metrics",          "/",   "/livez", "/readyz", "/v1/generate",
                                   "/../../etc/passwd", "/%00"};
      const HttpReply reply =
          HttpGet(server_.process().admin_address(), paths[messages_.Below(std::size(paths))]);
      EXPECT_TRUE(reply.status >= 200 && reply.status < 500) << reply.status;
      break;
    }
    case 3:
      SendToPort(server_.process().admin_address(),
                 "GET " + messages_.RandomBytes(messages_.Below(3000)) + "\r\n\r\n");
      break;
    case 4: {
      // With HTTP/2's greeting and an empty SETTINGS frame before it: more of it is read.
      const std::string greeting("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
      SendToPort(server_.process().grpc_address(),
                 (OneIn(2) ? greeting : "") + messages_.RandomBytes(messages_.Below(3000)));
      break;
    }
    default:
      if (OneIn(4)) {
        server_.process().process().Signal(SIGHUP);  // reads its files again
      } else {
        server_.DeleteSessions(kFreeToken, /*all=*/false);
      }
  }
}

void Fuzzer::Disturb(FuzzCall& call, bool gently) {
  const bool is_short = call.timeout < kAmple;
  if (!is_short && OneIn(gently ? 20 : 8)) {
    const milliseconds timeouts[] = {milliseconds(-1000), milliseconds(0), milliseconds(messages_.Below(30)),
                                     milliseconds(messages_.Below(1500))};
    call.timeout = timeouts[messages_.Below(4)];
  }
  if (OneIn(gently ? 9 : 5)) {
    call.interrupt_after = milliseconds(messages_.Below(OneIn(2) ? 20 : 400));
    call.cuts_connection = OneIn(5);
  }
  if (OneIn(12)) call.pause = milliseconds(messages_.Below(300));
  if (server_.setup().auth) AddToken(call, gently);
  if (OneIn(5)) AddMetadata(call);
}

void Fuzzer::AddToken(FuzzCall& call, bool gently) {
  std::string token = OneIn(6) ? kLimitedToken : kFreeToken;
  if (!gently || OneIn(20)) {
    switch (messages_.Below(10)) {
      case 0:
        token = kExpiredToken;
        break;
      case 1:
        token = kAdminToken;
        break;
      case 2:
        token = std::string(messages_.Below(300), 'z');
        break;
      default:
        break;
    }
  }
  if (OneIn(30)) return;
  OneIn(5) ? call.metadata.emplace("x-api-key", token)
           : call.metadata.emplace("authorization", (OneIn(10) ? "bEARER " : "Bearer ") + token);
}

void Fuzzer::AddMetadata(FuzzCall& call) {
  std::string printable;
  for (size_t i = messages_.Below(80); i > 0; --i) printable += static_cast<char>(' ' + messages_.Below(95));
  switch (messages_.Below(7)) {
    case 0:
      call.metadata.emplace("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
      break;
    case 1:
      call.metadata.emplace("traceparent", printable);
      break;
    case 2:
      call.metadata.emplace("x-session-id", OneIn(2) ? printable : std::string(300, '/'));
      break;
    case 3:
      if (!server_.setup().auth) call.metadata.emplace("authorization", printable);
      break;
    case 4:
      call.metadata.emplace("x-wild-bin", messages_.RandomBytes(messages_.Below(200)));
      break;
    case 5:
      for (int i = 0; i < 60; ++i) call.metadata.emplace(absl::StrFormat("x-%d", i), printable);
      break;
    default:
      call.metadata.emplace(kHugeHeader, std::string(OneIn(2) ? 7000 : 60'000, 'h'));
  }
}

FuzzResult Fuzzer::Make(const FuzzCall& call, const std::string& request) {
  const std::string where = Where(call, request);
  server_.NoteCall(number_, where);
  const auto channel = call.metadata.count(kHugeHeader) > 0 ? server_.process().NewChannel() : channel_;
  const FuzzResult result = MakeCall(channel, server_.process().grpc_address(), call);
  tally_.Count(result);
  if (result.status.error_code() == grpc::RESOURCE_EXHAUSTED) {
    std::this_thread::sleep_for(milliseconds(messages_.Below(60)));  // as a client would, though sooner
  }
  EXPECT_FALSE(result.hung) << "a call hung" << where;
  EXPECT_LT(result.elapsed, std::max(call.timeout, milliseconds(0)) + kHangBound) << where;
  const std::string problem =
      server_.MetConnectionsEnd(result) ? "" : Problem(call, result, server_.setup().auth);
  EXPECT_EQ(problem, "") << ToString(result.status) << " after " << result.elapsed.count() << " ms" << where;
  return result;
}

std::string Fuzzer::Where(const FuzzCall& call, const std::string& request) const {
  std::string metadata;
  for (const auto& [key, value] : call.metadata) {
    metadata += absl::StrFormat(" %s=%s", key, absl::CHexEscape(value.substr(0, 60)));
  }
  return absl::StrFormat(
      "\n  %s, client %d, call %d: %s with a deadline of %d ms%s%s\n  %s", server_.Repeat(), number_, acts_,
      call.method, call.timeout.count(),
      call.interrupt_after
          ? absl::StrFormat(", %s after %d ms", call.cuts_connection ? "cut off" : "cancelled",
                            call.interrupt_after->count())
          : "",
      metadata.empty() ? "" : ", metadata" + metadata, Short(request));
}

void Fuzzer::Keep(const FuzzResult& result) {
  if (!result.status.ok()) return;
  std::string snapshot;
  for (const std::string& bytes : result.replies) {
    v1::ExportResponse part;
    EXPECT_TRUE(part.ParseFromString(bytes));
    snapshot += part.chunk();
  }
  snapshots_.Keep(std::move(snapshot), messages_);
}

}  // namespace efla::e2e
