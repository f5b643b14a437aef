#include "tests/e2e/fuzzed_server.h"

#include <openssl/sha.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "efla/v1/admin.pb.h"
#include "efla/v1/generation.pb.h"
#include "efla/v1/models.pb.h"
#include "efla/v1/sessions.pb.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"

namespace efla::e2e {
namespace {

using google::protobuf::Message;
using google::protobuf::ServiceDescriptor;

constexpr char kChatTemplate[] =
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

std::string AuthFileText() {
  const auto token = [](const char* name, const char* role, int max_priority) {
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>(name), std::strlen(name), digest);
    const std::string bytes(reinterpret_cast<const char*>(digest), sizeof(digest));
    return nlohmann::json{{"name", name},
                          {"sha256", absl::BytesToHexString(bytes)},
                          {"tenant", name},
                          {"roles", {role}},
                          {"max_priority", max_priority}};
  };
  nlohmann::json file;
  file["tokens"] = {token(kKnownToken, "user", 8), token(kFreeToken, "user", 8),
                    token(kLimitedToken, "user", 2), token(kExpiredToken, "user", 8),
                    token(kAdminToken, "admin", 0)};
  file["tokens"][3]["expires"] = "2020-01-01T00:00:00Z";
  file["tenants"][kLimitedToken] = {{"requests_per_second", 20}, {"burst", 20},
                                    {"tokens_per_minute", 6000}, {"max_concurrent", 2},
                                    {"max_queued", 1},           {"max_sessions", 5}};
  return file.dump();
}

const std::vector<FuzzedServer::Setup>& Setups() {
  static const std::vector<FuzzedServer::Setup> kSetups = {
      {"few slots",
       "efla_basic",
       false,
       false,
       false,
       {"--state-slots", "24", "--max-running", "8", "--max-new-tokens", "250", "--max-prompt-tokens", "3000",
        "--session-host-bytes", "64MiB", "--debug-poison"}},
      {"text and disk",
       nullptr,
       false,
       true,
       false,
       {"--state-slots", "20", "--max-running", "8", "--max-new-tokens", "80", "--max-prompt-tokens", "3000",
        "--session-host-bytes", "32MiB", "--session-dir-bytes", "200MiB", "--session-device-idle", "0.2",
        "--session-host-idle", "0.5", "--debug-poison"}},
      {"tenants",
       nullptr,
       true,
       false,
       false,
       {"--state-slots", "32", "--max-running", "12", "--max-new-tokens", "80", "--max-prompt-tokens", "3000",
        "--session-host-bytes", "64MiB", "--session-device-idle", "0.5", "--log-format", "json"}},
      {"hardly anything",
       nullptr,
       false,
       false,
       false,
       {"--state-slots",        "5",  "--max-running",        "2",     "--max-batch-tokens",    "64",
        "--max-queue",          "4",  "--max-queue-tokens",   "900",   "--max-message-mib",     "1",
        "--max-sessions",       "60", "--session-host-bytes", "24MiB", "--slow-reader-timeout", "0.3",
        "--prefix-cache-slots", "0",  "--max-new-tokens",     "60",    "--max-prompt-tokens",   "500",
        "--debug-poison"}},
      {"tenants and disk",
       "gated_efla",
       true,
       true,
       true,
       {"--state-slots", "24", "--max-running", "8", "--max-new-tokens", "250", "--max-prompt-tokens", "3000",
        "--session-host-bytes", "16MiB", "--session-device-idle", "0.2", "--session-host-idle", "0.3",
        "--debug-poison"}},
  };
  return kSetups;
}

}  // namespace

const std::vector<const ServiceDescriptor*>& Services() {
  static const std::vector<const ServiceDescriptor*> kServices = {
      v1::GenerateRequest::descriptor()->file()->service(0),
      v1::GetModelRequest::descriptor()->file()->service(0),
      v1::CreateSessionRequest::descriptor()->file()->service(0),
      v1::GetServerInfoRequest::descriptor()->file()->service(0)};
  return kServices;
}

FuzzedServer::FuzzedServer(uint32_t seed) : seed_(seed), setup_(Setups()[seed % Setups().size()]) {}

void FuzzedServer::Start() {
  std::filesystem::path checkpoint;
  if (setup_.golden != nullptr) {
    checkpoint = GoldenDir(setup_.golden);
  } else {
    checkpoint = folder_.path() / "demo";
    std::filesystem::create_directory(checkpoint);
    for (const auto& file : std::filesystem::directory_iterator(SourceDir() / "model/demo")) {
      std::filesystem::create_symlink(std::filesystem::canonical(file.path()),
                                      checkpoint / file.path().filename());
    }
    std::ofstream(checkpoint / "tokenizer_config.json") << nlohmann::json{{"chat_template", kChatTemplate}};
  }
  std::vector<std::string> flags = setup_.flags;
  if (setup_.disk) flags.insert(flags.end(), {"--session-dir", (folder_.path() / "sessions").string()});
  if (setup_.auth) {
    std::ofstream(folder_.path() / "auth.json") << AuthFileText();
    flags.insert(flags.end(), {"--auth-file", (folder_.path() / "auth.json").string()});
  }
  if (setup_.connections_end) flags.insert(flags.end(), {"--max-connection-age", "4"});
  process_ = ServerProcess::Start(checkpoint, flags);
  ASSERT_NE(process_, nullptr);
  channel_ = process_->NewChannel();
  v1::Model model;
  ASSERT_TRUE(AskFor(model, "Models/GetModel", v1::GetModelRequest()).ok());
  facts_ = {.model = model.name(),
            .vocab_size = model.vocab_size(),
            .has_tokenizer = model.has_tokenizer(),
            .has_chat_template = model.has_chat_template(),
            .has_store = setup_.disk,
            .max_samples = model.limits().max_samples(),
            .max_priority = setup_.auth ? 2 : 8};
}

void FuzzedServer::End() {
  if (seed_ % 2 == 0) {
    EXPECT_EQ(process_->Terminate(), 0) << Repeat();
  } else {
    v1::DrainResponse response;
    const grpc::Status status = AskFor(response, "Admin/Drain", v1::DrainRequest(), kAdminToken);
    EXPECT_TRUE(status.ok()) << ToString(status);
    EXPECT_EQ(process_->WaitForExit(), 0) << Repeat();
  }
}

FuzzResult FuzzedServer::Ask(const std::string& method, const Message& request, const char* token) const {
  FuzzCall call{.method = "/efla.v1." + method, .messages = {request.SerializeAsString()}};
  if (setup_.auth) call.metadata.emplace("authorization", absl::StrFormat("Bearer %s", token));
  FuzzResult result;
  Eventually([&] {
    result = MakeCall(channel_, process_->grpc_address(), call);
    return !MetConnectionsEnd(result);
  });
  return result;
}

bool FuzzedServer::MetConnectionsEnd(const FuzzResult& result) const {
  return setup_.connections_end && result.replies.empty() &&
         result.status.error_code() == grpc::StatusCode::UNAVAILABLE;
}

grpc::Status FuzzedServer::AskFor(Message& response, const std::string& method, const Message& request,
                                  const char* token) const {
  FuzzResult result = Ask(method, request, token);
  if (result.status.ok()) {
    EXPECT_TRUE(result.replies.size() == 1 && response.ParseFromString(result.replies[0])) << method;
  }
  return result.status;
}

void FuzzedServer::DeleteSessions(const char* token, bool all) {
  v1::ListSessionsRequest list;
  list.set_page_size(1000);
  do {
    v1::ListSessionsResponse page;
    grpc::Status status;
    Eventually([&] {
      status = AskFor(page, "Sessions/List", list, token);
      return status.error_code() != grpc::RESOURCE_EXHAUSTED;
    });
    ASSERT_TRUE(status.ok()) << ToString(status);
    list.set_page_token(page.next_page_token());
    for (const v1::Session& session : page.sessions()) {
      if (!all && session.session_id().rfind(kNeighbourPrefix, 0) == 0) continue;
      v1::DeleteSessionRequest request;
      request.set_session_id(session.session_id());
      Eventually([&] {
        status = Ask("Sessions/Delete", request, token).status;
        return status.error_code() != grpc::RESOURCE_EXHAUSTED;
      });
      EXPECT_TRUE(status.ok() || status.error_code() == grpc::NOT_FOUND ||
                  (!all && status.error_code() == grpc::ABORTED))
          << session.ShortDebugString() << ": " << ToString(status) << InFlight();
    }
  } while (!list.page_token().empty() && !testing::Test::HasFailure());
}

std::string FuzzedServer::Repeat() const {
  return absl::StrFormat("EFLA_FUZZ_SEED=%u (\"%s\")", seed_, setup_.name);
}

void FuzzedServer::NoteCall(int fuzzer, const std::string& call) {
  const std::scoped_lock lock(mutex_);
  last_calls_[fuzzer] = call;
}

std::string FuzzedServer::InFlight() {
  std::string text = "\n  " + Repeat();
  const std::scoped_lock lock(mutex_);
  for (const auto& [fuzzer, call] : last_calls_) text += absl::StrFormat("\n  client %d: %s", fuzzer, call);
  return text;
}

}  // namespace efla::e2e
