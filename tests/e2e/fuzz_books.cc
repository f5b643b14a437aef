#include "tests/e2e/fuzz_books.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <vector>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"

namespace efla::e2e {

void Tally::Count(const FuzzResult& result) {
  ++calls;
  const grpc::StatusCode code = result.status.error_code();
  ++codes[static_cast<size_t>(code)];
  if (result.interrupted) ++interrupted;
  if (code == grpc::RESOURCE_EXHAUSTED) ++limited;
  if (code == grpc::INVALID_ARGUMENT || code == grpc::UNIMPLEMENTED || code == grpc::FAILED_PRECONDITION ||
      code == grpc::NOT_FOUND || code == grpc::UNAUTHENTICATED || code == grpc::PERMISSION_DENIED) {
    ++refused;
  }
}

void Tally::Report(const char* setup) const {
  std::string named_codes;
  for (size_t code = 0; code < codes.size(); ++code) {
    if (codes[code] > 0) named_codes += absl::StrFormat(" %d:%d", code, codes[code].load());
  }
  std::printf(
      "  \"%s\": %d calls, %d of them generated text, %d had no room, %d interrupted; codes%s; "
      "neighbours made %d calls and %d turns\n",
      setup, calls.load(), generated.load(), limited.load(), interrupted.load(), named_codes.c_str(),
      neighbours.load(), turns.load());
  std::fflush(stdout);
}

void Tally::CheckShares() const {
  // Chance decides a short slice's shares, such as a sanitizer's on a busy machine.
  constexpr int kEnoughCalls = 200;
  if (calls >= kEnoughCalls) {
    // Some four in ten are expected. Calls that only lacked room were valid, too.
    EXPECT_GT((generated + limited) * 4, calls);
    EXPECT_GT(refused * 10, calls - limited) << "too few invalid ones";
  }
  EXPECT_GT(generated, 0);
  EXPECT_GT(neighbours, 0);
  EXPECT_GT(turns, 0);
  EXPECT_GT(codes[grpc::OK], 0);
}

std::string Problem(const FuzzCall& call, const FuzzResult& result, bool has_auth) {
  const grpc::StatusCode code = result.status.error_code();
  const bool ours = call.method.rfind("/efla.v1.", 0) == 0;
  const bool of_sessions = call.method.rfind("/efla.v1.Sessions/", 0) == 0 ||
                           call.method == "/efla.v1.Generation/Generate" ||
                           call.method == "/efla.v1.Generation/Complete";
  const bool is_import = call.method == "/efla.v1.Sessions/Import";
  const bool is_transfer = is_import || call.method == "/efla.v1.Sessions/Export";
  switch (code) {
    case grpc::OK:
    case grpc::UNIMPLEMENTED:
      return "";
    case grpc::CANCELLED:
      // A transfer that stands still gives way.
      return result.interrupted || is_transfer ? "" : "nobody has cancelled it";
    case grpc::DEADLINE_EXCEEDED:
      return call.timeout < kAmple ? "" : "its deadline was ample";
    case grpc::UNAVAILABLE:
      return call.cuts_connection || call.metadata.count(kHugeHeader) > 0 ? "" : "the server is there";
    case grpc::INVALID_ARGUMENT:
    case grpc::NOT_FOUND:
    case grpc::FAILED_PRECONDITION:
    case grpc::RESOURCE_EXHAUSTED:
      return result.status.error_message().empty() && ours ? "it does not say why" : "";
    case grpc::UNAUTHENTICATED:
    case grpc::PERMISSION_DENIED:
      return has_auth ? "" : "there is no auth file";
    case grpc::ALREADY_EXISTS:
    case grpc::ABORTED:
    case grpc::OUT_OF_RANGE:
    case grpc::DATA_LOSS:
      return of_sessions ? "" : "it has no session";
    case grpc::INTERNAL:
      // What gRPC says itself of a call that is not one message, or of its own services' messages.
      return !ours || (!is_import && call.messages.size() != 1) ? "" : "not documented";
    default:
      return "not documented";
  }
}

void CheckGenerated(const FuzzCall& call, const v1::GenerateRequest& request, const FuzzResult& result,
                    const std::string& where, Tally& tally) {
  std::map<uint32_t, std::string> texts;
  std::map<uint32_t, v1::FinishReason> ends;
  std::map<uint32_t, size_t> num_tokens;
  bool replayed = false;
  if (call.method == "/efla.v1.Generation/Complete") {
    if (!result.status.ok()) return;
    v1::CompleteResponse response;
    ASSERT_EQ(result.replies.size(), 1u) << where;
    ASSERT_TRUE(response.ParseFromString(result.replies[0])) << where;
    replayed = response.replayed();
    const auto take = [&](const auto& part) {
      const auto sample = static_cast<uint32_t>(ends.size());
      texts[sample] = part.text();
      ends[sample] = part.finish_reason();
      num_tokens[sample] = static_cast<size_t>(part.token_ids_size());
    };
    take(response);
    for (const v1::CompletedSample& sample : response.more_samples()) take(sample);
  } else {
    for (size_t i = 0; i < result.replies.size(); ++i) {
      v1::GenerateResponse event;
      ASSERT_TRUE(event.ParseFromString(result.replies[i])) << where;
      ASSERT_EQ(event.has_accepted(), i == 0) << "event " << i << where;
      if (event.has_accepted()) replayed = event.accepted().replayed();
      const auto take = [&](const auto& part) {
        EXPECT_EQ(ends.count(part.sample()), 0u) << "an event after the finished one" << where;
        texts[part.sample()] += part.text();
        num_tokens[part.sample()] += static_cast<size_t>(part.token_ids_size());
      };
      if (event.has_delta()) take(event.delta());
      if (event.has_finished()) {
        take(event.finished());
        ends[event.finished().sample()] = event.finished().finish_reason();
      }
    }
  }
  for (const auto& [sample, count] : num_tokens) {
    if (count == 0) continue;
    ++tally.generated;
    break;
  }
  if (!result.status.ok() || replayed) return;
  EXPECT_EQ(ends.size(), std::max<size_t>(request.samples(), 1)) << where;
  for (const auto& [sample, reason] : ends) {
    if (!request.output().echo() && request.stopping().has_max_tokens()) {
      EXPECT_LE(num_tokens[sample], request.stopping().max_tokens()) << where;
    }
    if (!request.has_constraint() || request.output().echo() || request.output().has_skip_special_tokens())
      continue;
    if (reason != v1::FINISH_REASON_CONSTRAINT_COMPLETE && reason != v1::FINISH_REASON_EOS) continue;
    const v1::Constraint& constraint = request.constraint();
    const std::string& text = texts[sample];
    if (constraint.has_choices()) {
      const auto& choices = constraint.choices().choices();
      EXPECT_TRUE(std::find(choices.begin(), choices.end(), text) != choices.end()) << text << where;
    } else if (constraint.has_json_object() || constraint.kind_case() == v1::Constraint::kJsonSchema) {
      EXPECT_TRUE(nlohmann::json::accept(text)) << text << where;
    }
  }
}

void CheckGivenBack(FuzzedServer& server) {
  const std::string idle[] = {"efla_requests_waiting",        "efla_requests_running",
                              "efla_requests_parked",         "efla_queue_prompt_tokens",
                              "efla_grpc_streams_active",     "efla_session_turns_active",
                              "efla_tenant_requests_running", "efla_tenant_requests_waiting"};
  const std::vector<std::string> unused = {"efla_sessions", "efla_session_contexts",
                                           "efla_session_host_bytes"};
  const auto all_zero = [&](const auto& names, std::string& not_zero) {
    const Metrics metrics = Metrics::Read(server.process().admin_address());
    not_zero.clear();
    for (const std::string& name : names) {
      if (metrics.Sum(name) != 0) not_zero += absl::StrFormat(" %s is %g", name, metrics.Sum(name));
    }
    return not_zero.empty();
  };
  std::string not_zero;
  ASSERT_TRUE(Eventually([&] { return all_zero(idle, not_zero); }, kHangBound))
      << not_zero << server.InFlight();
  for (const char* token : {kKnownToken, kFreeToken, kLimitedToken}) {
    server.DeleteSessions(token, /*all=*/true);
    if (!server.setup().auth) break;
  }
  ASSERT_TRUE(Eventually([&] { return all_zero(unused, not_zero); }, kHangBound))
      << not_zero << server.InFlight();
  ExpectIdle(server.process().admin_address());

  const Metrics metrics = Metrics::Read(server.process().admin_address());
  for (const auto& service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) {
      const std::string method = absl::StrFormat("method=\"%s\"", service->method(i)->name());
      EXPECT_EQ(metrics.Sum("efla_grpc_calls_started_total", {method}),
                metrics.Sum("efla_grpc_calls_handled_total", {method}))
          << method;
      EXPECT_EQ(metrics.Sum("efla_grpc_calls_handled_total", {method, "code=\"UNKNOWN\""}), 0) << method;
      EXPECT_EQ(metrics.Sum("efla_grpc_calls_handled_total", {method, "code=\"INTERNAL\""}), 0) << method;
    }
  }
  EXPECT_EQ(metrics.Sum("efla_request_duration_seconds_count"), metrics.Sum("efla_requests_total"));
}

std::string Short(std::string text) {
  constexpr size_t kMost = 700;
  if (text.size() > kMost) text = absl::StrFormat("%s... (%d bytes)", text.substr(0, kMost), text.size());
  return text;
}

}  // namespace efla::e2e
