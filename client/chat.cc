// efla chat: a session on the terminal, line by line.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/file_output.h"
#include "client/generation_flags.h"
#include "client/line_reader.h"
#include "client/session_flags.h"

namespace efla {
namespace {

constexpr char kHelp[] =
    "  TEXT          continue the session with it; an empty line lets the model go on\n"
    "  /undo         back to before the last turn\n"
    "  /mark NAME    name this place\n"
    "  /rewind NAME  back to that place\n"
    "  /fork NAME    go on in a copy; the session so far stays under its own name\n"
    "  /info         the session's revision, length and tier\n"
    "  /save FILE    write a snapshot\n"
    "  /load FILE    go on in a new session made of a snapshot\n"
    "  /quit         leave; the session stays on the server\n"
    "  //TEXT        a text that begins with /\n";

struct ChatFlags {
  ServerFlags server;
  GenerationFlags generation;
  std::optional<std::string> session;
  std::string prefix, suffix, system, durability = "async";
  bool plain = false;
};

class Chat {
 public:
  Chat(const ChatFlags& flags, Client& client, Interrupt& interrupt)
      : flags_(flags), client_(client), interrupt_(interrupt) {}

  // The exit status. On a terminal an error is shown and the chat goes on; a script ends with it.
  int Run() {
    if (absl::Status status = FindTemplate(); !status.ok()) return CallExitStatus(status, interrupt_);
    if (absl::Status status = Open(); !status.ok()) return CallExitStatus(status, interrupt_);
    int exit_status = 0;
    for (std::string line; !leaving_ && ReadLine(line);) {
      const absl::Status status = Take(line);
      if (status.ok()) continue;
      exit_status = CallExitStatus(status, interrupt_);
      if (!lines_.terminal()) return exit_status;
      exit_status = 0;
    }
    return durable_ ? exit_status : kExitFailure;
  }

 private:
  CallOptions Options() const { return {.timeout = flags_.server.timeout(), .stop = interrupt_.token()}; }

  // Whether lines are a user's messages by the model's template, or plain text.
  absl::Status FindTemplate() {
    if (flags_.plain) return absl::OkStatus();
    const absl::StatusOr<v1::Model> model = client_.GetModel({}, Options());
    if (!model.ok() && !absl::IsUnimplemented(model.status())) return model.status();
    uses_template_ = model.ok() && model->has_chat_template();
    if (!uses_template_ && !flags_.system.empty()) {
      return absl::FailedPreconditionError(
          "--system needs a model with a chat template, and this one has none");
    }
    return absl::OkStatus();
  }

  // The session that the flags name, made when there is none, or a new one.
  absl::Status Open() {
    v1::GetSessionRequest get;
    get.set_session_id(flags_.session.value_or(""));
    absl::StatusOr<v1::Session> session = absl::NotFoundError("");
    if (flags_.session) session = client_.GetSession(get, Options());
    if (session.ok() && session->tokens() > 0 && !flags_.system.empty()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("--system is given and session %s holds %d tokens already; a system message comes "
                          "first, so begin another session, or leave it out",
                          session->session_id(), session->tokens()));
    }
    if (absl::IsNotFound(session.status())) {
      v1::CreateSessionRequest create;
      create.set_session_id(get.session_id());
      create.set_durability(Durability());
      session = NoteDurability(client_.CreateSession(create, Options()));
    }
    if (absl::Status status = Adopt(session); !status.ok()) return status;
    if (lines_.terminal()) std::fputs("  /help shows the commands, Ctrl-C cancels an answer\n", stderr);
    return absl::OkStatus();
  }

  bool ReadLine(std::string& line) {
    interrupt_.EndAtOnce([this] { lines_.Restore(); });
    const bool read = lines_.Read("> ", line);
    interrupt_.Renew();
    return read;
  }

  absl::Status Take(const std::string& line) {
    if (absl::Status status = CheckUtf8("the line", line); !status.ok()) return status;
    if (line.empty() || line[0] != '/') return Say(line);
    if (line.compare(0, 2, "//") == 0) return Say(line.substr(1));
    const size_t space = line.find(' ');
    const std::string command = line.substr(0, space);
    const std::string word = space == std::string::npos ? "" : line.substr(space + 1);
    const bool takes_word = command == "/mark" || command == "/rewind" || command == "/fork" ||
                            command == "/save" || command == "/load";
    if (takes_word == word.empty()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s %s; /help shows the commands", command,
                                                        takes_word ? "needs a name" : "takes no name"));
    }
    if (command == "/undo") return Rewind("");
    if (command == "/rewind") return Rewind(word);
    if (command == "/mark") return Mark(word);
    if (command == "/fork") return Fork(word);
    if (command == "/info") return Info();
    if (command == "/save") return Save(word);
    if (command == "/load") return Load(word);
    if (command == "/help") std::fputs(kHelp, stderr);
    if (command == "/quit") leaving_ = true;
    if (command == "/help" || command == "/quit") return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("there is no command %s; /help shows them", command));
  }

  absl::Status Say(const std::string& line) {
    v1::GenerateRequest request;
    flags_.generation.Fill(request);
    if (!line.empty()) SetLine(line, request);
    request.mutable_session()->set_session_id(session_.session_id());
    request.mutable_session()->set_expected_revision(session_.revision());
    request.mutable_session()->set_durability(Durability());
    v1::Finished finished;
    absl::Status written;
    bool at_line_start = true;
    const auto write = [&](const std::string& text) {
      if (text.empty()) return;
      at_line_start = text.back() == '\n';
      written = WriteOut(text);
    };
    const std::stop_token stop = interrupt_.token();
    const absl::Status status = client_.Generate(request, Options(), [&](const v1::GenerateResponse& event) {
      if (event.has_delta()) write(event.delta().text());
      if (event.has_finished()) {
        write(event.finished().text());
        finished = event.finished();
      }
      return written.ok();
    });
    if (!at_line_start) write("\n");
    if (!written.ok()) return written;
    if (absl::IsCancelled(status) && stop.stop_requested()) return AfterCancel();
    if (!status.ok()) return AfterFailure(status);
    const v1::SessionAfterTurn& after = finished.session();
    session_.set_revision(after.revision());
    session_.set_tokens(after.tokens());
    const std::optional<double> rate = TokensPerSecond(finished);
    std::fputs(absl::StrFormat("  [%s: revision %d, %d tokens, %s; %d new%s]\n", after.session_id(),
                               after.revision(), after.tokens(), TierName(after.tier()),
                               finished.usage().completion_tokens(),
                               rate ? absl::StrFormat(" at %.0f tokens/s", *rate) : "")
                   .c_str(),
               stderr);
    durable_ = IsAsDurable(Durability(), after) && durable_;
    return absl::OkStatus();
  }

  // The session holds what has been said: only what is new is sent.
  void SetLine(const std::string& line, v1::GenerateRequest& request) const {
    const std::string text = flags_.prefix + line + flags_.suffix;
    if (!uses_template_) return request.set_text(text);
    const auto add = [&](const char* role, const std::string& content) {
      v1::ChatMessage& message = *request.mutable_chat()->add_messages();
      message.set_role(role);
      message.set_content(content);
    };
    if (session_.tokens() == 0 && !flags_.system.empty()) add("system", flags_.system);
    add("user", text);
  }

  // The server has noticed the cancellation a moment later.
  absl::Status AfterCancel() {
    interrupt_.Renew();
    constexpr std::chrono::milliseconds kPatience{2000}, kInterval{10};
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    do {
      std::this_thread::sleep_for(kInterval);
      if (absl::Status status = Refresh(); !status.ok()) return status;
    } while (session_.busy() && std::chrono::steady_clock::now() < deadline);
    std::fputs(absl::StrFormat("  [cancelled; %s]\n", SessionLine(session_)).c_str(), stderr);
    return absl::OkStatus();
  }

  // Another program may have changed the session.
  absl::Status AfterFailure(const absl::Status& status) {
    if (absl::IsAborted(status)) Refresh().IgnoreError();
    return status;
  }

  absl::Status Adopt(const absl::StatusOr<v1::Session>& session) {
    if (!session.ok()) return AfterFailure(session.status());
    session_ = *session;
    std::fputs(absl::StrFormat("  [%s]\n", SessionLine(session_)).c_str(), stderr);
    return absl::OkStatus();
  }

  v1::Durability Durability() const { return ParseDurability(flags_.durability); }

  // Of a session that this chat has changed.
  absl::StatusOr<v1::Session> NoteDurability(absl::StatusOr<v1::Session> session) {
    if (session.ok()) durable_ = IsAsDurable(Durability(), *session) && durable_;
    return session;
  }

  absl::Status Refresh() {
    v1::GetSessionRequest request;
    request.set_session_id(session_.session_id());
    absl::StatusOr<v1::Session> session = client_.GetSession(request, Options());
    if (session.ok()) session_ = *std::move(session);
    return session.status();
  }

  absl::Status Info() {
    if (absl::Status status = Refresh(); !status.ok()) return status;
    return Adopt(v1::Session(session_));
  }

  template <typename Request>
  Request ChangeRequest() const {
    Request request;
    request.set_session_id(session_.session_id());
    request.set_expected_revision(session_.revision());
    if constexpr (requires { request.set_durability(Durability()); }) request.set_durability(Durability());
    return request;
  }

  absl::Status Rewind(const std::string& mark) {
    auto request = ChangeRequest<v1::RewindRequest>();
    if (!mark.empty()) request.set_mark(mark);
    return Adopt(NoteDurability(client_.Rewind(request, Options())));
  }

  absl::Status Mark(const std::string& name) {
    auto request = ChangeRequest<v1::MarkRequest>();
    request.set_name(name);
    return Adopt(NoteDurability(client_.Mark(request, Options())));
  }

  absl::Status Fork(const std::string& name) {
    auto request = ChangeRequest<v1::ForkRequest>();
    request.add_child_ids(name);
    const absl::StatusOr<v1::ForkResponse> reply = client_.Fork(request, Options());
    if (!reply.ok()) return AfterFailure(reply.status());
    return Adopt(NoteDurability(reply->children(0)));
  }

  absl::Status Save(const std::string& file) {
    v1::ExportRequest request;
    request.set_session_id(session_.session_id());
    const absl::StatusOr<std::string> snapshot = client_.Export(request, Options());
    if (!snapshot.ok()) return snapshot.status();
    if (absl::Status status = WriteFile(file, *snapshot); !status.ok()) return status;
    std::fputs(absl::StrFormat("  [%s: %d bytes]\n", file, snapshot->size()).c_str(), stderr);
    return absl::OkStatus();
  }

  absl::Status Load(const std::string& file) {
    v1::ImportOptions import;
    import.set_durability(Durability());
    return Adopt(NoteDurability(ImportFile(client_, import, file, Options())));
  }

  const ChatFlags& flags_;
  Client& client_;
  Interrupt& interrupt_;
  LineReader lines_;
  bool uses_template_ = false;
  bool leaving_ = false;
  bool durable_ = true;  // every change so far, as asked
  v1::Session session_;
};

int RunChat(const ChatFlags& flags) {
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  return Chat(flags, *client, interrupt).Run();
}

}  // namespace

Command AddChat(CLI::App& program) {
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* app = program.add_subcommand("chat",
                                         "Talk line by line in a session, by the model's chat template where "
                                         "it has one, with undo, marks and forks");
  AddServerFlags(*app, flags->server);
  app->add_option("--session", flags->session,
                  "The session, made when there is none; a new one when left out")
      ->check(Utf8());
  app->add_option("--prefix", flags->prefix, "Text put in front of each line")->check(Utf8());
  app->add_option("--suffix", flags->suffix, "Text put after each line")->check(Utf8());
  CLI::Option* system =
      app->add_option("--system", flags->system, "The system message; the session must hold nothing yet")
          ->check(Utf8());
  app->add_flag("--plain", flags->plain, "Lines are plain text, though the model has a chat template")
      ->excludes(system);
  AddDurabilityFlag(*app, flags->durability);
  AddGenerationFlags(*app, flags->generation);
  app->footer(kHelp);
  return {app, [flags] { return RunChat(*flags); }};
}

}  // namespace efla
