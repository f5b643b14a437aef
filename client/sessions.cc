// efla sessions: contexts that the server keeps between calls.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/file_output.h"
#include "client/session_flags.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

struct SessionsFlags {
  ServerFlags server;
  PromptFlags prompt;
  ChangeFlags change;
  std::string id, name, file, tier, mark, prefix;
  std::optional<std::string> new_id;
  std::optional<double> ttl_seconds;
  std::optional<uint64_t> revision;
  std::optional<uint32_t> count;
  std::vector<std::string> children;
  bool json = false;
  bool durable = true;  // afterwards: what was changed is as durable as asked
};

Json SessionJson(const v1::Session& session) {
  Json json{{"session_id", session.session_id()},
            {"revision", session.revision()},
            {"durable_revision", session.durable_revision()},
            {"tokens", session.tokens()},
            {"waiting_tokens", session.waiting_tokens()},
            {"tier", TierName(session.tier())},
            {"damaged", session.damaged()},
            {"busy", session.busy()},
            {"marks", Json::array()},
            {"kept_revisions", Json::array()},
            {"created_unix_ms", session.created_unix_ms()},
            {"expires_unix_ms", session.expires_unix_ms()}};
  for (const v1::SessionMark& mark : session.marks()) {
    json["marks"].push_back(
        {{"name", mark.name()}, {"revision", mark.revision()}, {"tokens", mark.tokens()}});
  }
  for (const uint64_t revision : session.kept_revisions()) json["kept_revisions"].push_back(revision);
  if (session.has_usage()) {
    json["usage"] = {{"prompt_tokens", session.usage().prompt_tokens()},
                     {"cached_tokens", session.usage().cached_tokens()}};
  }
  return json;
}

void NoteDurability(SessionsFlags& flags, const v1::Session& session) {
  if (flags.durable) flags.durable = IsAsDurable(flags.change.Durability(), session);
}

absl::Status Print(SessionsFlags& flags, const v1::Session& session) {
  NoteDurability(flags, session);
  return WriteOut((flags.json ? SessionJson(session).dump() : SessionLine(session)) + "\n");
}

absl::Status Print(SessionsFlags& flags, const absl::StatusOr<v1::Session>& session) {
  return session.ok() ? Print(flags, *session) : session.status();
}

uint64_t TtlMs(const SessionsFlags& flags) {
  return flags.ttl_seconds ? static_cast<uint64_t>(*flags.ttl_seconds * 1e3) : 0;
}

absl::Status RunCreate(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::CreateSessionRequest request;
  request.set_session_id(flags.new_id.value_or(""));
  request.set_request_id(flags.change.request_id);
  request.set_durability(flags.change.Durability());
  request.set_ttl_ms(TtlMs(flags));
  if (flags.prompt.given()) {
    absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
    if (!prompt.ok()) return prompt.status();
    SetPrompt(*std::move(prompt), request);
  }
  return Print(flags, client.CreateSession(request, options));
}

absl::Status RunGet(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::GetSessionRequest request;
  request.set_session_id(flags.id);
  return Print(flags, client.GetSession(request, options));
}

absl::Status RunList(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::ListSessionsRequest request;
  request.set_prefix(flags.prefix);
  request.set_page_size(1000);
  do {
    absl::StatusOr<v1::ListSessionsResponse> page = client.ListSessions(request, options);
    if (!page.ok()) return page.status();
    for (const v1::Session& session : page->sessions()) {
      if (absl::Status status = Print(flags, session); !status.ok()) return status;
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return absl::OkStatus();
}

absl::Status RunAppend(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::AppendRequest request;
  request.set_session_id(flags.id);
  flags.change.Fill(request);
  absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
  if (!prompt.ok()) return prompt.status();
  SetPrompt(*std::move(prompt), request);
  absl::StatusOr<v1::AppendResponse> reply = client.Append(request, options);
  if (!reply.ok()) return reply.status();
  NoteDurability(flags, reply->session());
  if (!flags.json) {
    return WriteOut(absl::StrFormat("%s; %d appended%s\n", SessionLine(reply->session()),
                                    reply->appended_tokens(), reply->replayed() ? " before" : ""));
  }
  Json json = SessionJson(reply->session());
  json["appended_tokens"] = reply->appended_tokens();
  json["cached_tokens"] = reply->cached_tokens();
  json["replayed"] = reply->replayed();
  return WriteOut(json.dump() + "\n");
}

absl::Status RunFork(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::ForkRequest request;
  request.set_session_id(flags.id);
  flags.change.Fill(request);
  request.set_mark(flags.mark);
  request.mutable_child_ids()->Assign(flags.children.begin(), flags.children.end());
  request.set_count(flags.count.value_or(0));
  absl::StatusOr<v1::ForkResponse> reply = client.Fork(request, options);
  if (!reply.ok()) return reply.status();
  for (const v1::Session& child : reply->children()) {
    if (absl::Status status = Print(flags, child); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RunMark(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::MarkRequest request;
  request.set_session_id(flags.id);
  flags.change.Fill(request);
  request.set_name(flags.name);
  return Print(flags, client.Mark(request, options));
}

absl::Status RunRewind(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::RewindRequest request;
  request.set_session_id(flags.id);
  flags.change.Fill(request);
  if (!flags.mark.empty()) request.set_mark(flags.mark);
  if (flags.revision) request.set_revision(*flags.revision);
  return Print(flags, client.Rewind(request, options));
}

absl::Status RunDelete(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::DeleteSessionRequest request;
  request.set_session_id(flags.id);
  flags.change.Fill(request);
  if (absl::Status status = client.DeleteSession(request, options); !status.ok()) return status;
  return WriteOut(flags.json ? Json{{"session_id", flags.id}, {"deleted", true}}.dump() + "\n" : "");
}

absl::Status RunMove(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::MoveSessionRequest request;
  request.set_session_id(flags.id);
  request.set_tier(flags.tier == "device" ? v1::TIER_DEVICE
                   : flags.tier == "host" ? v1::TIER_HOST
                   : flags.tier == "disk" ? v1::TIER_DISK
                                          : v1::TIER_SHARED);
  return Print(flags, client.MoveSession(request, options));
}

absl::Status RunExport(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::ExportRequest request;
  request.set_session_id(flags.id);
  request.set_mark(flags.mark);
  absl::StatusOr<std::string> snapshot = client.Export(request, options);
  if (!snapshot.ok()) return snapshot.status();
  if (absl::Status status = WriteFile(flags.file, *snapshot); !status.ok()) return status;
  if (flags.file == "-") return absl::OkStatus();
  return WriteOut(
      flags.json
          ? Json{{"session_id", flags.id}, {"file", flags.file}, {"bytes", snapshot->size()}}.dump() + "\n"
          : absl::StrFormat("%s: %d bytes\n", flags.file, snapshot->size()));
}

absl::Status RunImport(SessionsFlags& flags, Client& client, const CallOptions& options) {
  v1::ImportOptions import;
  import.set_session_id(flags.new_id.value_or(""));
  import.set_request_id(flags.change.request_id);
  import.set_durability(flags.change.Durability());
  import.set_ttl_ms(TtlMs(flags));
  return Print(flags, ImportFile(client, import, flags.file, options));
}

using Run = absl::Status (*)(SessionsFlags&, Client&, const CallOptions&);

int RunSubcommand(SessionsFlags& flags, Run run) {
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  const absl::Status status =
      run(flags, *client, {.timeout = flags.server.timeout(), .stop = interrupt.token()});
  if (status.ok() && !flags.durable) return kExitFailure;
  return CallExitStatus(status, interrupt);
}

}  // namespace

Command AddSessions(CLI::App& program) {
  auto flags = std::make_shared<SessionsFlags>();
  CLI::App* app = program.add_subcommand("sessions", "Contexts that the server keeps between calls");
  app->require_subcommand(1);
  auto subcommands = std::make_shared<std::vector<std::pair<CLI::App*, Run>>>();
  const auto add = [&](const char* name, const char* help, Run run) {
    CLI::App* one = app->add_subcommand(name, help);
    AddServerFlags(*one, flags->server);
    one->add_flag("--json", flags->json, "One JSON object a line");
    subcommands->emplace_back(one, run);
    return one;
  };
  const auto add_id = [&](CLI::App* one) {
    one->add_option("ID", flags->id, "The session")->required()->check(Utf8());
  };
  // Of commands that make a session: there is no revision yet.
  const auto add_new = [&](CLI::App* one) {
    one->add_option("--id", flags->new_id, "Its name; the server makes one when left out")->check(Utf8());
    one->add_option("--ttl", flags->ttl_seconds,
                    "Seconds without use until it is gone; the server's longest when left out")
        ->check(Number(kShortestSeconds, kLongestSeconds));
    one->add_option("--request-id", flags->change.request_id,
                    "A repetition with the same id is answered with the first one's result")
        ->check(Utf8());
    AddDurabilityFlag(*one, flags->change.durability);
  };

  CLI::App* create = add("create", "Make a session, empty or with a prompt", RunCreate);
  AddPromptFlags(*create, flags->prompt);
  add_new(create);

  add_id(add("get", "Show a session", RunGet));

  add("list", "Show all sessions, one a line", RunList)
      ->add_option("--prefix", flags->prefix, "Only those whose names begin so")
      ->check(Utf8());

  CLI::App* append = add("append", "Add a prompt without generating", RunAppend);
  add_id(append);
  AddPromptFlags(*append, flags->prompt);
  append->callback([flags] { RequirePrompt(flags->prompt); });
  AddChangeFlags(*append, flags->change);

  CLI::App* fork = add("fork", "Make sessions that go on from the same context", RunFork);
  add_id(fork);
  AddRepeatedFlag(*fork, "--child", flags->children, "A child's name")->check(Utf8());
  fork->add_option("--count", flags->count, "Children, named by the server unless --child names them")
      ->check(WholeNumber(1, kMaxUint32));
  fork->add_option("--mark", flags->mark, "Fork there instead of at the head")->check(Utf8());
  AddChangeFlags(*fork, flags->change);

  CLI::App* mark = add("mark", "Name the present context", RunMark);
  add_id(mark);
  mark->add_option("NAME", flags->name, "The mark; an existing one moves")->required()->check(Utf8());
  AddChangeFlags(*mark, flags->change);

  CLI::App* rewind = add("rewind", "Go back to before the last turn, or where the flags say", RunRewind);
  add_id(rewind);
  CLI::Option* const to_mark = rewind->add_option("--mark", flags->mark, "To this mark")->check(Utf8());
  rewind->add_option("--revision", flags->revision, "To this revision, one of those that `get` shows")
      ->check(WholeNumber(1, kMaxUint64))
      ->excludes(to_mark);
  AddChangeFlags(*rewind, flags->change);

  CLI::App* remove = add("delete", "Forget a session", RunDelete);
  add_id(remove);
  AddRevisionFlags(*remove, flags->change);

  CLI::App* move = add(
      "move", "Put a session to rest in a lower tier, or lift it to the device or to host memory", RunMove);
  add_id(move);
  move->add_option("TIER", flags->tier, "device, host, disk or shared")
      ->required()
      ->check(CLI::IsMember({"device", "host", "disk", "shared"}));

  CLI::App* export_ = add("export", "Write a session's snapshot to a file", RunExport);
  add_id(export_);
  export_->add_option("FILE", flags->file, "The file; - is standard output")->required();
  export_->add_option("--mark", flags->mark, "That context instead of the head")->check(Utf8());

  CLI::App* import = add("import", "Make a session from a snapshot", RunImport);
  import->add_option("FILE", flags->file, "The file; - is standard input")->required();
  add_new(import);

  return {app, [flags, subcommands] {
            for (const auto& [one, run] : *subcommands) {
              if (one->parsed()) return RunSubcommand(*flags, run);
            }
            return kExitUsage;  // not reached: one subcommand is required
          }};
}

}  // namespace efla
