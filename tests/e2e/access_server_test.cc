// Who may call a server, and how much: TLS, tokens, tenants, limits, priorities, Admin, and what the logs say
// of it.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/client_interceptor.h>
#include <openssl/sha.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "efla/v1/admin.grpc.pb.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/session_calls.h"

namespace efla::e2e {
namespace {

using Json = nlohmann::json;
using Extra = std::multimap<std::string, std::string>;

constexpr uint32_t kEndless = 1'000'000;
const Ids kPrompt = {5, 6, 7};

// ---- Metadata on every call of a channel ----

class Metadata final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit Metadata(Extra extra) : extra_(std::move(extra)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new ForOneCall(extra_);
  }

 private:
  class ForOneCall final : public grpc::experimental::Interceptor {
   public:
    explicit ForOneCall(const Extra& extra) : extra_(extra) {}
    void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
      if (methods->QueryInterceptionHookPoint(
              grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
        for (const auto& entry : extra_) methods->GetSendInitialMetadata()->insert(entry);
      }
      methods->Proceed();
    }

   private:
    const Extra extra_;
  };
  const Extra extra_;
};

std::shared_ptr<grpc::Channel> ChannelWith(
    const ServerProcess& server, Extra extra,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials = grpc::InsecureChannelCredentials()) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<Metadata>(std::move(extra)));
  return grpc::experimental::CreateCustomChannelWithInterceptors(server.grpc_address(), credentials,
                                                                 arguments, std::move(interceptors));
}

std::shared_ptr<grpc::Channel> As(const ServerProcess& server, const std::string& token) {
  return ChannelWith(server, {{"authorization", "Bearer " + token}});
}

// ---- The auth file ----

std::string Sha256(const std::string& text) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  std::string hex;
  for (const unsigned char byte : digest) hex += absl::StrFormat("%02x", byte);
  return hex;
}

Json Token(const std::string& token, const std::string& tenant,
           const std::vector<std::string>& roles = {"user"}) {
  return {{"name", token + "-name"}, {"sha256", Sha256(token)}, {"tenant", tenant}, {"roles", roles}};
}

class Auth {
 public:
  Auth() {
    Json expired = Token("old", "acme");
    expired["expires"] = "2020-01-01T00:00:00Z";
    Json eager = Token("eager", "acme");
    eager["max_priority"] = 8;
    file["tokens"] = {Token("one", "acme"),
                      Token("two", "other"),
                      Token("ops", "operators", {"admin"}),
                      Token("limited", "limited"),
                      expired,
                      eager};
    file["tenants"] = Json::object();
  }
  // Makes the file what `file` says.
  std::vector<std::string> Write() {
    Replace(file.dump());
    return {"--auth-file", path()};
  }
  void Replace(const std::string& text) {
    std::ofstream(dir_.path() / "new") << text;
    std::filesystem::rename(dir_.path() / "new", path());
  }
  std::string path() const { return (dir_.path() / "auth.json").string(); }

  Json file;

 private:
  TempDir dir_;
};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

grpc::Status GetModel(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  SetTimeout(context, seconds(20));
  v1::Model model;
  return v1::Models::NewStub(channel)->GetModel(&context, {}, &model);
}

template <typename Request, typename Response>
grpc::Status CallAdmin(const std::shared_ptr<grpc::Channel>& channel,
                       grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                       Response& response, const Request& request = {}) {
  grpc::ClientContext context;
  SetTimeout(context, seconds(20));
  const auto stub = v1::Admin::NewStub(channel);
  return (stub.get()->*method)(&context, request, &response);
}

void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& reason) {
  EXPECT_EQ(status.error_code(), code) << ToString(status);
  EXPECT_EQ(InfoOf(status).reason, reason) << ToString(status);
}

double Gauge(const ServerProcess& server, const std::string& name,
             const std::vector<std::string>& labels = {}) {
  return Metrics::Read(server.admin_address()).Sum(name, labels);
}

// ---- Credentials ----

TEST(AccessTest, EveryMethodWantsAToken) {
  Auth auth;
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  const auto channel = server->NewChannel();
  for (const char* method :
       {"Generation/Generate", "Generation/Complete", "Generation/Score",    "Models/GetModel",
        "Models/Tokenize",     "Models/Detokenize",   "Models/RenderChat",   "Sessions/Create",
        "Sessions/Get",        "Sessions/List",       "Sessions/Append",     "Sessions/Fork",
        "Sessions/Mark",       "Sessions/Rewind",     "Sessions/Delete",     "Sessions/Move",
        "Sessions/Export",     "Sessions/Import",     "Admin/GetServerInfo", "Admin/GetLoad",
        "Admin/Drain",         "Admin/SetLogLevel"}) {
    SCOPED_TRACE(method);
    ExpectRefused(SendBytes(channel, std::string("/efla.v1.") + method, ""),
                  grpc::StatusCode::UNAUTHENTICATED, "NO_CREDENTIAL");
  }
  EXPECT_GE(Gauge(*server, "efla_auth_failures_total", {"reason=\"missing\""}), 21);
  EXPECT_EQ(HealthOf(channel, ""), 1);
  EXPECT_EQ(HealthOf(channel, "efla.v1.Generation"), 1);
  EXPECT_TRUE(SendBytes(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "").ok());
}

TEST(AccessTest, WhatIsWrongWithATokenIsSaidByCodeAndReason) {
  Auth auth;
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  using enum grpc::StatusCode;
  ExpectRefused(GetModel(As(*server, "three")), UNAUTHENTICATED, "INVALID_CREDENTIAL");
  ExpectRefused(GetModel(As(*server, Sha256("one"))), UNAUTHENTICATED, "INVALID_CREDENTIAL");
  ExpectRefused(GetModel(As(*server, "old")), UNAUTHENTICATED, "CREDENTIAL_EXPIRED");
  ExpectRefused(GetModel(As(*server, "ops")), PERMISSION_DENIED, "ROLE_MISSING");
  ExpectRefused(GetModel(ChannelWith(*server, {{"authorization", "Basic b25l"}})), UNAUTHENTICATED,
                "NO_CREDENTIAL");
  v1::ServerInfo info;
  ExpectRefused(CallAdmin(As(*server, "one"), &v1::Admin::Stub::GetServerInfo, info), PERMISSION_DENIED,
                "ROLE_MISSING");
  for (const Extra& good : {Extra{{"authorization", "Bearer one"}}, Extra{{"authorization", "bearer one"}},
                            Extra{{"authorization", "Bearer  one "}}, Extra{{"x-api-key", "one"}},
                            Extra{{"x-api-key", " one"}}}) {
    const grpc::Status status = GetModel(ChannelWith(*server, good));
    EXPECT_TRUE(status.ok()) << ToString(status);
  }
  const Reply reply = Generate(*v1::Generation::NewStub(As(*server, "one")), GreedyRequest(kPrompt, 3));
  EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
  const Metrics metrics = Metrics::Read(server->admin_address());
  EXPECT_EQ(metrics.Sum("efla_auth_failures_total", {"reason=\"unknown\""}), 2);
  EXPECT_EQ(metrics.Sum("efla_auth_failures_total", {"reason=\"expired\""}), 1);
  EXPECT_EQ(metrics.Sum("efla_auth_failures_total", {"reason=\"role\""}), 2);
  EXPECT_EQ(metrics.Sum("efla_tenant_calls_total", {"tenant=\"acme\""}), 6);
}

TEST(AccessTest, AChangedAuthFileIsTakenUpWhileCallsGoOn) {
  Auth auth;
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  BackgroundStream running(As(*server, "one"), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));

  auth.file["tokens"] = {Token("new", "acme"), Token("ops", "operators", {"admin"})};
  auth.Write();
  EXPECT_TRUE(Eventually([&] { return GetModel(As(*server, "new")).ok(); }));
  ExpectRefused(GetModel(As(*server, "one")), grpc::StatusCode::UNAUTHENTICATED, "INVALID_CREDENTIAL");
  const size_t events = running.num_events();
  EXPECT_TRUE(running.WaitForEvents(events + 3)) << "a call that has begun is not cut";

  auth.Replace("{ not json");
  EXPECT_TRUE(
      Eventually([&] { return Gauge(*server, "efla_auth_reloads_total", {"result=\"failed\""}) == 1; }));
  EXPECT_TRUE(GetModel(As(*server, "new")).ok()) << "the old file stays in force";
  EXPECT_NE(server->process().err().find("auth_file_refused"), std::string::npos);
  auth.file["tokens"] = {Token("newer", "acme")};
  auth.Write();
  server->process().Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return GetModel(As(*server, "newer")).ok(); }));
  running.Cancel();
}

TEST(AccessTest, ABadAuthFileStopsTheStart) {
  Auth auth;
  auth.file["tokens"][0]["sha256"] = "one";
  const ProgramResult result = RunProgram(ServerProcess::Command(GoldenDir("efla_basic"), auth.Write()));
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_NE(result.err.find("--auth-file: " + auth.path() + ": tokens[0]"), std::string::npos) << result.err;
  const ProgramResult missing =
      RunProgram(ServerProcess::Command(GoldenDir("efla_basic"), {"--auth-file", "/nowhere/auth.json"}));
  EXPECT_EQ(missing.exit_status, 1);
  EXPECT_NE(missing.err.find("cannot read /nowhere/auth.json"), std::string::npos) << missing.err;
}

// ---- Tenants ----

TEST(AccessTest, TenantsNeitherTouchNorFindOutAboutEachOthersSessions) {
  Auth auth;
  TempDir dir;
  const std::vector<std::string> flags =
      auth.Write() + std::vector<std::string>{"--session-dir", dir.path().string()};
  auto server = ServerProcess::Start(GoldenDir("efla_basic"), flags);
  ASSERT_NE(server, nullptr);
  std::string snapshot;
  {
    SessionClient one(As(*server, "one")), two(As(*server, "two"));
    const auto made = one.Create("secret", kPrompt);
    ASSERT_TRUE(made.status.ok()) << ToString(made.status);
    EXPECT_EQ(made->session_id(), "secret");
    ASSERT_TRUE(one.Turn("secret", {8, 9}, 4).status.ok());
    ASSERT_TRUE(one.Mark("secret", "here").status.ok());
    const auto exported = one.Export("secret");
    ASSERT_TRUE(exported.status.ok()) << ToString(exported.status);
    snapshot = exported.value;

    // Word for word what a session that is not there answers.
    const auto all = [&](SessionClient& client, const std::string& name) {
      std::vector<grpc::Status> statuses;
      statuses.push_back(client.Get(name).status);
      statuses.push_back(client.Append(name, {1}).status);
      statuses.push_back(client.Fork(name, "child").status);
      statuses.push_back(client.Mark(name, "m").status);
      statuses.push_back(client.Rewind(name, "here").status);
      statuses.push_back(client.Move(name, v1::TIER_HOST).status);
      statuses.push_back(client.Export(name).status);
      statuses.push_back(client.Delete(name));
      statuses.push_back(client.Turn(name, {1}, 1).status);
      return statuses;
    };
    const auto there = all(two, "secret"), missing = all(two, "nosuch");
    for (size_t i = 0; i < there.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(there[i].error_code(), grpc::StatusCode::NOT_FOUND) << ToString(there[i]);
      std::string text = missing[i].error_message();
      const size_t at = text.find("nosuch");
      ASSERT_NE(at, std::string::npos) << text;
      EXPECT_EQ(there[i].error_message(), text.replace(at, 6, "secret"));
      EXPECT_EQ(InfoOf(there[i]).reason, InfoOf(missing[i]).reason);
      EXPECT_EQ(InfoOf(there[i]).metadata, InfoOf(missing[i]).metadata);
    }
    EXPECT_EQ(two.List({})->sessions_size(), 0);
    EXPECT_TRUE(two.Create("secret").status.ok()) << "the name is free for the other tenant";
    EXPECT_EQ(two.List({})->sessions_size(), 1);
    EXPECT_EQ(one.Get("secret")->tokens(), kPrompt.size() + 2 + 4);
    ExpectRefused(two.Get("acme~secret").status, grpc::StatusCode::INVALID_ARGUMENT, "");
    EXPECT_TRUE(two.Import("taken", snapshot).status.ok()) << "who has the bytes has the context";
    const auto busy = one.Create("secret").status;
    EXPECT_EQ(busy.error_message().find("acme"), std::string::npos) << ToString(busy);
  }
  EXPECT_EQ(server->Terminate(), 0);
  server = ServerProcess::Start(GoldenDir("efla_basic"), flags);
  ASSERT_NE(server, nullptr);
  SessionClient one(As(*server, "one")), two(As(*server, "two"));
  const auto kept = one.Get("secret");
  EXPECT_TRUE(kept.status.ok()) << ToString(kept.status);
  EXPECT_EQ(kept->tokens(), kPrompt.size() + 2 + 4);
  EXPECT_EQ(two.Get("secret")->tokens(), 0u);
  EXPECT_EQ(server->Terminate(), 0);

  // Without the auth file: sessions that belong to nobody, and only these.
  server = ServerProcess::Start(GoldenDir("efla_basic"), {"--session-dir", dir.path().string()});
  ASSERT_NE(server, nullptr);
  SessionClient nobody(*server);
  EXPECT_EQ(nobody.List({})->sessions_size(), 0);
  EXPECT_EQ(nobody.Get("secret").status.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST(AccessTest, ThePrefixCacheIsEachTenantsOwn) {
  Auth auth;
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  Ids prompt;
  for (uint32_t i = 0; i < 200; ++i) prompt.push_back(3 + i % 50);
  const auto cached = [&](const std::string& token) {
    const Reply reply = Generate(*v1::Generation::NewStub(As(*server, token)), GreedyRequest(prompt, 2));
    EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
    return reply.finished.usage().cached_tokens();
  };
  EXPECT_EQ(cached("one"), 0u);
  EXPECT_GT(cached("one"), 0u);
  EXPECT_EQ(cached("two"), 0u);
  EXPECT_GT(cached("eager"), 0u) << "another token of the first tenant";
}

// ---- Limits ----

TEST(AccessTest, ATenantsRatesRefuseWithTheRealWait) {
  Auth auth;
  auth.file["tenants"]["limited"] = {{"requests_per_second", 2}, {"burst", 3}};
  auth.file["tenants"]["acme"] = {{"tokens_per_minute", 600}};
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  const auto limited = As(*server, "limited");
  grpc::Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) status = GetModel(limited);
  ExpectRefused(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_REQUEST_RATE");
  const std::optional<double> wait = RetryDelaySeconds(status);
  ASSERT_TRUE(wait) << ToString(status);
  EXPECT_GT(*wait, 0);
  EXPECT_LE(*wait, 0.51);
  std::this_thread::sleep_for(std::chrono::duration<double>(*wait));
  EXPECT_TRUE(GetModel(limited).ok()) << "after the wait that was told";

  const auto stub = v1::Generation::NewStub(As(*server, "one"));
  const Ids prompt(500, 9);
  EXPECT_TRUE(Generate(*stub, GreedyRequest(prompt, 80)).status.ok());
  const Reply refused = Generate(*stub, GreedyRequest(prompt, 1));
  ExpectRefused(refused.status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_TOKEN_RATE");
  ASSERT_TRUE(RetryDelaySeconds(refused.status));
  EXPECT_NEAR(*RetryDelaySeconds(refused.status), 48, 3);  // 480 tokens are missing, ten come a second
  EXPECT_TRUE(Generate(*stub, GreedyRequest(kPrompt, 1)).status.ok()) << "a short one passes";
  EXPECT_TRUE(GetModel(As(*server, "two")).ok()) << "others are not concerned";
  EXPECT_TRUE(Eventually(
      [&] { return Gauge(*server, "efla_tenant_tokens_total", {"tenant=\"acme\""}) == 500 + 80 + 3 + 1; }));
  const Metrics metrics = Metrics::Read(server->admin_address());
  EXPECT_GE(metrics.Sum("efla_tenant_refusals_total", {"tenant=\"limited\"", "limit=\"requests\""}), 1);
  EXPECT_EQ(metrics.Sum("efla_tenant_refusals_total", {"tenant=\"acme\"", "limit=\"tokens\""}), 1);
  EXPECT_EQ(metrics.Sum("efla_requests_rejected_total", {"reason=\"tenant_limit\""}), 1);
  EXPECT_EQ(metrics.Sum("efla_requests_rejected_total", {"reason=\"queue_full\""}), 0);
}

TEST(AccessTest, ATenantsConcurrentAndQueuedCallsAreBounded) {
  Auth auth;
  auth.file["tenants"]["acme"] = {{"max_concurrent", 2}};
  auth.file["tenants"]["limited"] = {{"max_queued", 1}};
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"),
                                           auth.Write() + std::vector<std::string>{"--max-running", "2"});
  ASSERT_NE(server, nullptr);
  BackgroundStream first(As(*server, "one"), GreedyRequest(kPrompt, kEndless));
  BackgroundStream second(As(*server, "one"), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(first.WaitForEvents(3) && second.WaitForEvents(3));
  const auto one = v1::Generation::NewStub(As(*server, "one"));
  const Reply third = Generate(*one, GreedyRequest(kPrompt, 1));
  ExpectRefused(third.status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_CONCURRENCY");
  EXPECT_TRUE(RetryDelaySeconds(third.status));
  EXPECT_EQ(Gauge(*server, "efla_tenant_requests_running", {"tenant=\"acme\""}), 2);

  BackgroundStream waiting(As(*server, "limited"), GreedyRequest(kPrompt, 1));
  ASSERT_TRUE(Eventually(
      [&] { return Gauge(*server, "efla_tenant_requests_waiting", {"tenant=\"limited\""}) == 1; }));
  const Reply refused = Generate(*v1::Generation::NewStub(As(*server, "limited")), GreedyRequest(kPrompt, 1));
  ExpectRefused(refused.status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_QUEUE_FULL");
  first.Cancel();
  EXPECT_TRUE(waiting.Join().ok());
  EXPECT_TRUE(Eventually([&] { return Generate(*one, GreedyRequest(kPrompt, 1)).status.ok(); }))
      << "an ended call makes room";
  second.Cancel();
  EXPECT_TRUE(Eventually([&] { return Gauge(*server, "efla_tenant_requests_running") == 0; }));
  EXPECT_EQ(Gauge(*server, "efla_tenant_requests_waiting"), 0);
}

TEST(AccessTest, SessionsOfATenantAreBoundedAndCountedAsSuch) {
  Auth auth;
  auth.file["tenants"]["acme"] = {{"max_sessions", 2}};
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"),
                                           auth.Write() + std::vector<std::string>{"--max-sessions", "3"});
  ASSERT_NE(server, nullptr);
  SessionClient one(As(*server, "one")), two(As(*server, "two"));
  ASSERT_TRUE(one.Create("a").status.ok());
  ASSERT_TRUE(one.Create("b").status.ok());
  const auto refused = one.Create("c", kPrompt);
  ExpectRefused(refused.status, grpc::StatusCode::RESOURCE_EXHAUSTED, "SESSION_LIMIT");
  ASSERT_TRUE(two.Create("a").status.ok());
  ExpectRefused(two.Create("b", kPrompt).status, grpc::StatusCode::RESOURCE_EXHAUSTED, "SESSION_LIMIT");
  EXPECT_EQ(Gauge(*server, "efla_requests_rejected_total", {"reason=\"session_limit\""}), 2);
  EXPECT_EQ(Gauge(*server, "efla_requests_rejected_total", {"reason=\"queue_full\""}), 0);
}

TEST(AccessTest, TheQueueIsBoundedInTokensToo) {
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"), {"--max-running", "1", "--max-queue-tokens", "100"});
  ASSERT_NE(server, nullptr);
  BackgroundStream running(server->NewChannel(), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));
  BackgroundStream waiting(server->NewChannel(), GreedyRequest(Ids(80, 5), 1));
  ASSERT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") == 1; }));
  const Reply refused =
      Generate(*v1::Generation::NewStub(server->NewChannel()), GreedyRequest(Ids(30, 5), 1));
  ExpectRefused(refused.status, grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL");
  EXPECT_NE(refused.status.error_message().find("the limit is 100"), std::string::npos)
      << ToString(refused.status);
  running.Cancel();
  EXPECT_TRUE(waiting.Join().ok());
}

TEST(AccessTest, ADeadlineThatCannotBeMetIsRefusedAtOnce) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), {"--prefix-cache-slots", "0"});
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  const Reply measured = Generate(*stub, GreedyRequest(Ids(20'000, 5), 1));  // the speed is known now
  ASSERT_TRUE(measured.status.ok()) << ToString(measured.status);
  // The long prompt needs fifty times as long; a third of that is too little, even where the best step was
  // twice as fast as the others.
  const milliseconds deadline(measured.finished.timing().prefill_us() / 1000 * 50 / 3 + 300);
  const Ids longer(1'000'000, 5);
  const auto asked = std::chrono::steady_clock::now();
  const Reply refused = Generate(*stub, GreedyRequest(longer, 1), deadline);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, deadline / 2);
  ExpectRefused(refused.status, grpc::StatusCode::DEADLINE_EXCEEDED, "DEADLINE_UNMEETABLE");
  EXPECT_NE(refused.status.error_message().find("1000000 prompt tokens"), std::string::npos)
      << ToString(refused.status);
  EXPECT_EQ(Gauge(*server, "efla_requests_rejected_total", {"reason=\"deadline\""}), 1);
  EXPECT_TRUE(Generate(*stub, GreedyRequest(kPrompt, 1), seconds(20)).status.ok());
}

// ---- Priorities ----

TEST(AccessTest, PriorityIsAllowedByTheTokenAndOrdersTheQueue) {
  Auth auth;
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"),
                                           auth.Write() + std::vector<std::string>{"--max-running", "1"});
  ASSERT_NE(server, nullptr);
  v1::GenerateRequest high = GreedyRequest(kPrompt, kEndless);
  high.set_priority(5);
  ExpectRefused(Generate(*v1::Generation::NewStub(As(*server, "one")), high).status,
                grpc::StatusCode::PERMISSION_DENIED, "PRIORITY_TOO_HIGH");
  for (const int priority : {-9, 9, 1 << 30}) {
    v1::GenerateRequest request = GreedyRequest(kPrompt, 1);
    request.set_priority(priority);
    const Reply reply = Generate(*v1::Generation::NewStub(As(*server, "eager")), request);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(reply.status.error_message().find("priority is " + std::to_string(priority)), std::string::npos)
        << ToString(reply.status);
  }
  BackgroundStream running(As(*server, "eager"), high);
  ASSERT_TRUE(running.WaitForEvents(3));
  v1::GenerateRequest low = high;
  low.set_priority(-8);
  BackgroundStream first(As(*server, "eager"), low);
  ASSERT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") == 1; }));
  BackgroundStream second(As(*server, "eager"), high);
  ASSERT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") == 2; }));
  running.Cancel();
  EXPECT_TRUE(second.WaitForEvents(1)) << "it came later and goes first";
  EXPECT_EQ(first.num_events(), 0u);
  second.Cancel();
  EXPECT_TRUE(first.WaitForEvents(1));
}

// ---- Admin ----

TEST(AccessTest, AdminAnswersAdministrators) {
  Auth auth;
  const auto server = ServerProcess::Start(
      GoldenDir("efla_basic"), auth.Write() + std::vector<std::string>{"--replica-name", "rep-1"});
  ASSERT_NE(server, nullptr);
  const auto ops = As(*server, "ops");
  v1::ServerInfo info;
  ASSERT_TRUE(CallAdmin(ops, &v1::Admin::Stub::GetServerInfo, info).ok());
  EXPECT_EQ(info.api(), "efla.v1");
  EXPECT_FALSE(info.version().empty());
  EXPECT_EQ(info.replica(), "rep-1");
  EXPECT_EQ(info.model(), server->model());
  EXPECT_EQ(info.device(), server->device());
  EXPECT_TRUE(info.ready());
  EXPECT_FALSE(info.draining());
  EXPECT_EQ(info.log_level(), "info");
  const std::set<std::string> features(info.features().begin(), info.features().end());
  EXPECT_TRUE(features.contains("auth") && features.contains("sessions") && !features.contains("tls"));

  BackgroundStream running(As(*server, "one"), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(1));
  v1::Load load;
  ASSERT_TRUE(CallAdmin(ops, &v1::Admin::Stub::GetLoad, load).ok());
  EXPECT_EQ(load.requests_running(), 1u);
  EXPECT_EQ(load.requests_waiting(), 0u);
  EXPECT_GT(load.state_slots(), load.state_slots_free());

  v1::SetLogLevelRequest level;
  v1::SetLogLevelResponse previous;
  level.set_level("debug");
  ASSERT_TRUE(CallAdmin(ops, &v1::Admin::Stub::SetLogLevel, previous, level).ok());
  EXPECT_EQ(previous.previous(), "info");
  ASSERT_TRUE(CallAdmin(ops, &v1::Admin::Stub::GetServerInfo, info).ok());
  EXPECT_EQ(info.log_level(), "debug");
  level.set_level("loud");
  EXPECT_EQ(CallAdmin(ops, &v1::Admin::Stub::SetLogLevel, previous, level).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  running.Cancel();
  v1::DrainResponse drained;
  ASSERT_TRUE(CallAdmin(ops, &v1::Admin::Stub::Drain, drained).ok());
  EXPECT_EQ(server->WaitForExit(), 0);
}

TEST(AccessTest, AdminWithoutAnAuthFileIsForThisMachineAndTheClientSpeaksIt) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"));
  ASSERT_NE(server, nullptr);
  const auto admin = [&](const std::vector<std::string>& command) {
    return RunProgram(std::vector<std::string>{ProgramPath("efla"), "admin"} + command +
                      std::vector<std::string>{"--target", server->grpc_address()});
  };
  const ProgramResult info = admin({"info", "--json"});
  ASSERT_EQ(info.exit_status, 0) << info.err;
  EXPECT_EQ(Json::parse(info.out)["model"], server->model());
  const ProgramResult load = admin({"load"});
  ASSERT_EQ(load.exit_status, 0) << load.err;
  EXPECT_NE(load.out.find("state_slots_free"), std::string::npos) << load.out;
  const ProgramResult level = admin({"log-level", "warning"});
  ASSERT_EQ(level.exit_status, 0) << level.err;
  EXPECT_EQ(admin({"log-level", "loud"}).exit_status, 2);
  EXPECT_EQ(admin({"drain"}).exit_status, 0);
  EXPECT_EQ(server->WaitForExit(), 0);
}

// ---- The client's token ----

TEST(AccessTest, TheClientSendsItsTokenFromAFileOrTheEnvironment) {
  const ProgramResult made = RunProgram({ProgramPath("efla"), "token", "--json"});
  ASSERT_EQ(made.exit_status, 0) << made.err;
  const Json token = Json::parse(made.out);
  const std::string text = token["token"];
  EXPECT_EQ(token["sha256"], Sha256(text));
  EXPECT_GE(text.size(), 43u) << "256 bits";
  EXPECT_NE(RunProgram({ProgramPath("efla"), "token"}).out.find("sha256"), std::string::npos);

  TempDir dir;
  const std::string file = (dir.path() / "token").string();
  std::ofstream(file) << text << "\n";
  const ProgramResult hash = RunProgram({ProgramPath("efla"), "token", "--hash-file", file});
  EXPECT_EQ(hash.out, Sha256(text) + "\n") << hash.err;

  Auth auth;
  auth.file["tokens"].push_back(
      {{"name", "cli"}, {"sha256", token["sha256"]}, {"tenant", "acme"}, {"roles", {"user"}}});
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), auth.Write());
  ASSERT_NE(server, nullptr);
  const std::vector<std::string> command = {ProgramPath("efla"),    "generate",    "--target",
                                            server->grpc_address(), "--token-ids", "5,6,7",
                                            "--max-tokens",         "3",           "--json"};
  const ProgramResult without = RunProgram(command);
  EXPECT_EQ(without.exit_status, 1);
  EXPECT_NE(without.err.find("UNAUTHENTICATED"), std::string::npos) << without.err;
  const ProgramResult from_file = RunProgram(command + std::vector<std::string>{"--token-file", file});
  EXPECT_EQ(from_file.exit_status, 0) << from_file.err;
  const ProgramResult from_variable = RunProgram(command, seconds(60), {"EFLA_TOKEN=" + text});
  EXPECT_EQ(from_variable.exit_status, 0) << from_variable.err;
  const ProgramResult load = RunProgram({ProgramPath("efla"), "load", "--target", server->grpc_address(),
                                         "--requests", "4", "--max-tokens", "2", "--token-file", file});
  EXPECT_EQ(load.exit_status, 0) << load.err;
  std::ofstream(file) << "two words\n";
  const ProgramResult bad = RunProgram(command + std::vector<std::string>{"--token-file", file});
  EXPECT_EQ(bad.exit_status, 1);
  EXPECT_EQ(bad.err.find("two words"), std::string::npos) << bad.err;
}

// ---- Logs ----

std::vector<Json> Lines(const std::string& log) {
  std::vector<Json> lines;
  std::istringstream text(log);
  for (std::string line; std::getline(text, line);) {
    const Json parsed = Json::parse(line, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << "not one JSON object: " << line;
    lines.push_back(parsed);
  }
  return lines;
}

TEST(AccessTest, LogsNameEveryCallAndHoldNoSecretOrText) {
  Auth auth;
  auth.file["tenants"]["limited"] = {{"requests_per_second", 0.01}, {"burst", 1}};
  TempDir dir;
  const auto server = ServerProcess::Start(
      SourceDir() / "model" / "demo",
      auth.Write() + std::vector<std::string>{"--log-format", "json", "--log-level", "debug", "--session-dir",
                                              dir.path().string()});
  ASSERT_NE(server, nullptr);
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  const std::string parent = "00-" + trace + "-00f067aa0ba902b7-01";
  const auto channel = ChannelWith(*server, {{"authorization", "Bearer one"}, {"traceparent", parent}});
  const auto stub = v1::Generation::NewStub(channel);

  v1::GenerateRequest request;
  request.set_request_id("call-1");
  request.set_text("canaryprompt is a word");
  request.mutable_stopping()->set_max_tokens(3);
  request.mutable_stopping()->add_stop("canarystop");
  request.mutable_session()->set_session_id("talk");
  request.mutable_session()->set_create_if_missing(true);
  {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const auto reader = stub->Generate(&context, request);
    for (v1::GenerateResponse event; reader->Read(&event);) {
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << ToString(status);
    const auto echoed = context.GetServerInitialMetadata().find("x-trace-id");
    ASSERT_NE(echoed, context.GetServerInitialMetadata().end());
    EXPECT_EQ(std::string(echoed->second.data(), echoed->second.size()), trace);
  }
  {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    v1::ScoreRequest score;
    score.set_request_id("score-1");
    score.set_text("canaryprompt");
    v1::ScoreResponse response;
    const grpc::Status status = stub->Score(&context, score, &response);
    EXPECT_TRUE(status.ok()) << ToString(status);
  }
  // A turn that fails, a field that is not valid, whose value the client is told, and refusals of each kind.
  request.set_request_id("call-2");
  request.mutable_session()->set_expected_revision(99);
  {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    v1::CompleteResponse response;
    const grpc::Status status = stub->Complete(&context, request, &response);
    ExpectRefused(status, grpc::StatusCode::ABORTED, "REVISION_MISMATCH");
    EXPECT_FALSE(context.GetServerInitialMetadata().contains("x-trace-id")) << "a refusal has no headers";
    EXPECT_TRUE(context.GetServerTrailingMetadata().contains("x-trace-id"));
  }
  SessionClient sessions(channel);
  EXPECT_EQ(sessions.Get("canary name").status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(sessions.Get("talk").status.error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(GetModel(As(*server, "canarytoken")).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(GetModel(ChannelWith(*server, {{"x-api-key", "canarykey"}})).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(GetModel(As(*server, "limited")).ok());
  EXPECT_EQ(GetModel(As(*server, "limited")).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(server->Terminate(), 0);

  const std::string log = server->process().err();
  EXPECT_EQ(log.find("canary"), std::string::npos) << log.substr(log.find("canary") - 200, 400);
  EXPECT_EQ(log.find("Bearer"), std::string::npos);
  std::map<std::string, Json> by_request;
  int refusals = 0, calls = 0;
  for (const Json& line : Lines(log)) {
    if (line["event"] == "access_refused") {
      ++refusals;
      EXPECT_TRUE(line.contains("reason") && line.contains("peer") && line.contains("method")) << line;
    }
    if (line["event"] != "request_end") continue;
    ++calls;
    for (const char* field :
         {"request_id", "tenant", "method", "code", "reason", "session", "trace_id", "peer"}) {
      EXPECT_TRUE(line.contains(field)) << field << " of " << line;
    }
    if (line["request_id"] != "") by_request[line["request_id"]] = line;
  }
  EXPECT_EQ(refusals, 3);
  EXPECT_EQ(calls, 9);
  EXPECT_EQ(by_request["call-1"]["code"], "OK");
  EXPECT_EQ(by_request["call-1"]["tenant"], "acme");
  EXPECT_EQ(by_request["call-1"]["credential"], "one-name");
  EXPECT_EQ(by_request["call-1"]["trace_id"], trace);
  EXPECT_EQ(by_request["call-1"]["session"], "talk");
  EXPECT_EQ(by_request["call-1"]["finish_reason"], "FINISH_REASON_MAX_TOKENS");
  EXPECT_EQ(by_request["score-1"]["code"], "OK");
  EXPECT_FALSE(by_request["score-1"].contains("finish_reason")) << "it generates nothing";
  EXPECT_EQ(by_request["call-2"]["code"], "ABORTED");
  EXPECT_EQ(by_request["call-2"]["reason"], "REVISION_MISMATCH");
  EXPECT_EQ(by_request["call-2"]["session"], "talk") << "a failed turn names its session";
}

// ---- TLS ----

// Certificates of authorities of the test's own.
class Certificates {
 public:
  // An authority, and what it signs: NAME.pem and NAME.key.
  void Authority(const std::string& name) {
    Run({"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=" + name, "-keyout", key(name), "-out", pem(name)});
  }
  void Sign(const std::string& name, const std::string& authority, int days = 2) {
    const std::string extensions = File("extensions"), request = File("request");
    std::ofstream(extensions) << "subjectAltName=DNS:localhost,DNS:efla.test,IP:127.0.0.1\n";
    Run({"req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=" + name,
         "-keyout", key(name), "-out", request});
    Run({"x509", "-req", "-in", request, "-CA", pem(authority), "-CAkey", key(authority), "-CAcreateserial",
         "-days", std::to_string(days), "-extfile", extensions, "-out", pem(name)});
  }
  std::string pem(const std::string& name) const { return File(name + ".pem"); }
  std::string key(const std::string& name) const { return File(name + ".key"); }
  // Puts NAME's certificate and key in the place of the server's, one after the other.
  void Serve(const std::string& name) const {
    for (const char* kind : {".key", ".pem"}) {
      std::filesystem::copy_file(File(name + kind), File("next"),
                                 std::filesystem::copy_options::overwrite_existing);
      std::filesystem::rename(File("next"), File(std::string("server") + kind));
    }
  }
  static std::string Text(const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::shared_ptr<grpc::ChannelCredentials> Client(const std::string& authority,
                                                   const std::string& own = "") const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Text(pem(authority));
    if (!own.empty()) {
      options.pem_cert_chain = Text(pem(own));
      options.pem_private_key = Text(key(own));
    }
    return grpc::SslCredentials(options);
  }
  std::string File(const std::string& name) const { return (dir_.path() / name).string(); }

 private:
  static void Run(const std::vector<std::string>& arguments) {
    const ProgramResult result = RunProgram(std::vector<std::string>{"/usr/bin/openssl"} + arguments);
    ASSERT_EQ(result.exit_status, 0) << result.err;
  }
  TempDir dir_;
};

class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/usr/bin/openssl")) GTEST_SKIP() << "there is no openssl program";
    certificates_.Authority("ca");
    certificates_.Authority("stranger");
    certificates_.Sign("first", "ca");
    certificates_.Serve("first");
  }
  std::vector<std::string> Flags(const std::vector<std::string>& more = {}) const {
    return std::vector<std::string>{"--tls-cert", certificates_.pem("server"), "--tls-key",
                                    certificates_.key("server")} +
           more;
  }
  grpc::StatusCode CodeOf(const ServerProcess& server,
                          const std::shared_ptr<grpc::ChannelCredentials>& credentials) const {
    return GetModel(ChannelWith(server, {}, credentials)).error_code();
  }
  Certificates certificates_;
};

TEST_F(TlsTest, ServesThoseWhoTrustItsAuthorityOnly) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), Flags());
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca")), grpc::StatusCode::OK);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("stranger")), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(CodeOf(*server, grpc::InsecureChannelCredentials()), grpc::StatusCode::UNAVAILABLE);
  const Reply reply = Generate(*v1::Generation::NewStub(ChannelWith(*server, {}, certificates_.Client("ca"))),
                               GreedyRequest(kPrompt, 5));
  EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.token_ids.size(), 5u);
  const double ends = Gauge(*server, "efla_tls_cert_not_after_timestamp_seconds", {"usage=\"server\""});
  EXPECT_NEAR(ends, static_cast<double>(time(nullptr)) + 2 * 86400, 600);
}

TEST_F(TlsTest, ACertificateIsReplacedUnderTraffic) {
  certificates_.Authority("next-ca");
  certificates_.Sign("second", "next-ca");
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), Flags());
  ASSERT_NE(server, nullptr);
  BackgroundStream running(ChannelWith(*server, {}, certificates_.Client("ca")),
                           GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));
  // New connections all the time, which trust both authorities: none may fail.
  std::ofstream(certificates_.pem("both"))
      << Certificates::Text(certificates_.pem("ca")) << Certificates::Text(certificates_.pem("next-ca"));
  std::atomic<bool> stop = false;
  std::atomic<int> good = 0, bad = 0;
  std::thread traffic([&] {
    while (!stop) ++(CodeOf(*server, certificates_.Client("both")) == grpc::StatusCode::OK ? good : bad);
  });
  certificates_.Serve("second");
  EXPECT_TRUE(
      Eventually([&] { return CodeOf(*server, certificates_.Client("next-ca")) == grpc::StatusCode::OK; }));
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca")), grpc::StatusCode::UNAVAILABLE);
  const int before = good;
  EXPECT_TRUE(Eventually([&] { return good > before + 3; }));

  // A key of another certificate: the old pair stays in use.
  std::ofstream(certificates_.File("server.key")) << Certificates::Text(certificates_.key("first"));
  EXPECT_TRUE(
      Eventually([&] { return Gauge(*server, "efla_tls_reloads_total", {"result=\"failed\""}) >= 1; }));
  EXPECT_EQ(CodeOf(*server, certificates_.Client("next-ca")), grpc::StatusCode::OK);
  stop = true;
  traffic.join();
  EXPECT_EQ(bad, 0) << good << " were good";
  const size_t events = running.num_events();
  EXPECT_TRUE(running.WaitForEvents(events + 3)) << "connections stay as they are";
  running.Cancel();
}

TEST_F(TlsTest, ClientsCertificatesAreChecked) {
  certificates_.Sign("client", "ca");
  certificates_.Sign("expired", "ca", -1);
  certificates_.Sign("foreign", "stranger");
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"),
                           Flags({"--tls-client-ca", certificates_.pem("ca"), "--tls-require-client-cert"}));
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca", "client")), grpc::StatusCode::OK);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca")), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca", "expired")), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(CodeOf(*server, certificates_.Client("ca", "foreign")), grpc::StatusCode::UNAVAILABLE);

  const auto lenient =
      ServerProcess::Start(GoldenDir("efla_basic"), Flags({"--tls-client-ca", certificates_.pem("ca")}));
  ASSERT_NE(lenient, nullptr);
  EXPECT_EQ(CodeOf(*lenient, certificates_.Client("ca")), grpc::StatusCode::OK);
  EXPECT_EQ(CodeOf(*lenient, certificates_.Client("ca", "client")), grpc::StatusCode::OK);
  EXPECT_EQ(CodeOf(*lenient, certificates_.Client("ca", "expired")), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, BadFilesAndFlagsStopTheStartWithTheirNames) {
  certificates_.Sign("second", "ca");
  certificates_.Sign("late", "ca", -1);
  std::ofstream(certificates_.pem("empty")) << "nothing\n";
  const std::string first = certificates_.pem("first"), key = certificates_.key("first");
  const std::tuple<std::vector<std::string>, int, std::string> cases[] = {
      {{"--tls-cert", first}, 2, "--tls-key"},
      {{"--tls-key", key}, 2, "--tls-cert"},
      {{"--tls-client-ca", first}, 2, "--tls-cert"},
      {{"--tls-cert", first, "--tls-key", key, "--tls-require-client-cert"}, 2, "--tls-client-ca"},
      {{"--tls-cert", "/nowhere/c.pem", "--tls-key", key}, 1, "cannot read /nowhere/c.pem"},
      {{"--tls-cert", first, "--tls-key", "/nowhere/k.pem"}, 1, "cannot read /nowhere/k.pem"},
      {{"--tls-cert", first, "--tls-key", certificates_.key("second")},
       1,
       "is not the key of the certificate in " + first},
      {{"--tls-cert", certificates_.pem("empty"), "--tls-key", key}, 1, "holds no certificate"},
      {{"--tls-cert", first, "--tls-key", certificates_.pem("empty")}, 1, "holds no private key"},
      {{"--tls-cert", certificates_.pem("late"), "--tls-key", certificates_.key("late")}, 1, "has expired"},
      {{"--tls-cert", first, "--tls-key", key, "--tls-client-ca", certificates_.pem("empty")},
       1,
       "holds no certificate"},
  };
  for (const auto& [flags, exit_status, part] : cases) {
    const ProgramResult result = RunProgram(ServerProcess::Command(GoldenDir("efla_basic"), flags));
    EXPECT_EQ(result.exit_status, exit_status) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST_F(TlsTest, TheClientSpeaksIt) {
  certificates_.Sign("client", "ca");
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"),
                           Flags({"--tls-client-ca", certificates_.pem("ca"), "--tls-require-client-cert"}));
  ASSERT_NE(server, nullptr);
  const std::string port = server->grpc_address().substr(server->grpc_address().rfind(':'));
  const auto generate = [&](const std::vector<std::string>& flags) {
    return RunProgram(std::vector<std::string>{ProgramPath("efla"), "generate", "--token-ids", "5,6,7",
                                               "--max-tokens", "2", "--json", "--target"} +
                      flags);
  };
  const std::vector<std::string> own = {"--tls",
                                        "--tls-ca",
                                        certificates_.pem("ca"),
                                        "--tls-cert",
                                        certificates_.pem("client"),
                                        "--tls-key",
                                        certificates_.key("client")};
  const ProgramResult good = generate(std::vector<std::string>{"127.0.0.1" + port} + own);
  EXPECT_EQ(good.exit_status, 0) << good.err;
  const ProgramResult named = generate(std::vector<std::string>{"127.0.0.1" + port} + own +
                                       std::vector<std::string>{"--tls-server-name", "efla.test"});
  EXPECT_EQ(named.exit_status, 0) << named.err;
  const ProgramResult wrong_name = generate(std::vector<std::string>{"127.0.0.1" + port} + own +
                                            std::vector<std::string>{"--tls-server-name", "other.test"});
  EXPECT_EQ(wrong_name.exit_status, 1);
  EXPECT_NE(wrong_name.err.find("--tls-server-name"), std::string::npos) << wrong_name.err;
  const ProgramResult plain = generate({"127.0.0.1" + port});
  EXPECT_EQ(plain.exit_status, 1);
  EXPECT_NE(plain.err.find("--tls"), std::string::npos) << plain.err;
  EXPECT_EQ(generate({"127.0.0.1" + port, "--tls-ca", certificates_.pem("ca")}).exit_status, 2)
      << "without --tls";
  EXPECT_EQ(generate({"127.0.0.1" + port, "--tls", "--tls-ca", "/nowhere"}).exit_status, 1);
}

TEST_F(TlsTest, TheClientTakesItsServerFromTheEnvironment) {
  certificates_.Sign("client", "ca");
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"),
                           Flags({"--tls-client-ca", certificates_.pem("ca"), "--tls-require-client-cert"}));
  const auto plain = ServerProcess::Start(GoldenDir("efla_basic"));
  ASSERT_NE(server, nullptr);
  ASSERT_NE(plain, nullptr);
  const std::map<std::string, std::string> all = {
      {"EFLA_TARGET", server->grpc_address()},       {"EFLA_TLS", "true"},
      {"EFLA_TLS_CA", certificates_.pem("ca")},      {"EFLA_TLS_CERT", certificates_.pem("client")},
      {"EFLA_TLS_KEY", certificates_.key("client")}, {"EFLA_TLS_SERVER_NAME", "efla.test"}};
  // `efla` with all variables, but for those in `other`.
  const auto run = [&](const std::map<std::string, std::string>& other,
                       const std::vector<std::string>& words) {
    std::map<std::string, std::string> variables = other;
    variables.insert(all.begin(), all.end());
    std::vector<std::string> environment;
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    return RunProgram(std::vector<std::string>{ProgramPath("efla")} + words, seconds(60), environment);
  };
  const auto health = [&](const std::map<std::string, std::string>& other,
                          const std::vector<std::string>& flags = {}) {
    return run(other, std::vector<std::string>{"health"} + flags);
  };
  const auto expect = [](const ProgramResult& result, int exit_status,
                         const std::vector<std::string>& words) {
    EXPECT_EQ(result.exit_status, exit_status) << result.out << result.err;
    EXPECT_EQ(result.out, exit_status == 0 ? "serving\n" : "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), exit_status == 0 ? 0 : 1) << result.err;
    for (const std::string& word : words) EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
  };
  expect(health({}), 0, {});
  for (const char* yes : {"1", "yes", "on", "TRUE"}) expect(health({{"EFLA_TLS", yes}}), 0, {});
  expect(health({{"EFLA_TLS_SERVER_NAME", ""}}), 0, {});  // the certificate is for 127.0.0.1 as well

  // Each is used, and its flag beats it.
  const std::string foreign = certificates_.pem("stranger"), nobody = "127.0.0.1:1";
  expect(health({{"EFLA_TARGET", nobody}}), 1, {nobody});
  expect(health({{"EFLA_TARGET", nobody}}, {"--target", server->grpc_address()}), 0, {});
  expect(health({{"EFLA_TLS_CA", foreign}}), 1, {"UNAVAILABLE"});
  expect(health({{"EFLA_TLS_CA", foreign}}, {"--tls-ca", certificates_.pem("ca")}), 0, {});
  expect(health({{"EFLA_TLS_CERT", ""}, {"EFLA_TLS_KEY", ""}}), 1, {"UNAVAILABLE"});
  expect(health({{"EFLA_TLS_CERT", foreign}, {"EFLA_TLS_KEY", "/nowhere"}},
                {"--tls-cert", certificates_.pem("client"), "--tls-key", certificates_.key("client")}),
         0, {});
  expect(health({{"EFLA_TLS_SERVER_NAME", "other.test"}}), 1, {"UNAVAILABLE"});
  expect(health({{"EFLA_TLS_SERVER_NAME", "other.test"}}, {"--tls-server-name", "efla.test"}), 0, {});
  expect(health({{"EFLA_TLS", "maybe"}}, {"--tls"}), 0, {});
  expect(health({}, {"--target", plain->grpc_address()}), 1, {"UNAVAILABLE"});
  expect(health({}, {"--target", plain->grpc_address(), "--tls=false"}), 0, {});
  expect(
      health({{"EFLA_TOKEN", "t"}}, {"--target", plain->grpc_address(), "--tls=false", "--insecure-token"}),
      0, {});
  expect(health({{"EFLA_TARGET", plain->grpc_address()}, {"EFLA_TLS", "false"}}), 0, {});

  // What is wrong names its variable, as it would name its flag.
  expect(health({{"EFLA_TLS", "maybe"}}), 2, {"EFLA_TLS", "maybe", "true"});
  expect(health({}, {"--tls=maybe"}), 2, {"--tls", "maybe"});
  expect(health({{"EFLA_TARGET", "host"}}), 2, {"EFLA_TARGET", "host", "HOST:PORT"});
  expect(health({{"EFLA_TLS", ""}}), 2, {"EFLA_TLS_CA needs --tls or EFLA_TLS"});
  expect(health({{"EFLA_TLS", ""}}, {"--tls=false", "--tls-ca", foreign}), 2, {"--tls-ca"});
  expect(health({{"EFLA_TLS_KEY", ""}}), 2, {"EFLA_TLS_CERT", "EFLA_TLS_KEY"});
  expect(health({{"EFLA_TLS_CERT", ""}}), 2, {"EFLA_TLS_KEY", "EFLA_TLS_CERT"});
  expect(health({{"EFLA_TLS_CA", "/nowhere"}}), 1, {"EFLA_TLS_CA", "cannot open /nowhere"});
  std::ofstream(certificates_.pem("empty")) << "nothing\n";
  expect(health({{"EFLA_TLS_CERT", certificates_.pem("empty")}}), 1, {"EFLA_TLS_CERT", "PEM"});
  // Other subcommands take them as well, but for those that talk to no server.
  for (const char* words :
       {"generate --token-ids 5 --max-tokens 1 --json", "sessions list", "score --token-ids 5,6",
        "load --requests 1 --max-tokens 1 --quiet", "admin load"}) {
    const std::vector<std::string> command = absl::StrSplit(words, ' ');
    const ProgramResult good = run({}, command), bad = run({{"EFLA_TLS", "maybe"}}, command);
    EXPECT_EQ(good.exit_status, 0) << words << good.err;
    EXPECT_EQ(bad.exit_status, 2) << words << bad.err;
  }
  EXPECT_NE(
      run({}, {"load", "--requests", "1", "--max-tokens", "1", "--quiet"}).out.find(all.at("EFLA_TARGET")),
      std::string::npos);
  EXPECT_EQ(run({{"EFLA_TLS", "maybe"}}, {"token"}).exit_status, 0);
  EXPECT_EQ(run({{"EFLA_TLS", "maybe"}}, {"health", "--help"}).exit_status, 0);
}

}  // namespace
}  // namespace efla::e2e
