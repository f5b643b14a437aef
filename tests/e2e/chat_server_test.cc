// Chats from outside: a checkpoint with a chat template behind the real server and the command line.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/calls.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using nlohmann::json;

constexpr char kTemplate[] =
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role: ' ~ m.role) "
    "}}{% endif %}"
    "{{ m.role }}: {{ m.content | trim }}{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}";

// The demo model with another file beside it.
class ChatCheckpoint {
 public:
  explicit ChatCheckpoint(const std::string& chat_template) {
    for (const auto& file : std::filesystem::directory_iterator(SourceDir() / "model/demo")) {
      std::filesystem::create_symlink(std::filesystem::canonical(file.path()),
                                      folder_.path() / file.path().filename());
    }
    std::ofstream(folder_.path() / "tokenizer_config.json")
        << json({{"chat_template", chat_template}}).dump();
  }
  std::filesystem::path path() const { return folder_.path(); }

 private:
  TempDir folder_;
};

class ChatServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    checkpoint_ = new ChatCheckpoint(kTemplate);
    server_ = ServerProcess::Start(checkpoint_->path()).release();
  }
  static void TearDownTestSuite() {
    delete server_;
    delete checkpoint_;
  }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    Use(*server_);
  }
  void Use(const ServerProcess& server) {
    generation_ = v1::Generation::NewStub(server.NewChannel());
    models_ = v1::Models::NewStub(server.NewChannel());
  }

  static v1::Chat Messages(const std::vector<std::pair<std::string, std::string>>& messages) {
    v1::Chat chat;
    for (const auto& [role, content] : messages) {
      v1::ChatMessage& message = *chat.add_messages();
      message.set_role(role);
      message.set_content(content);
    }
    return chat;
  }
  static v1::GenerateRequest ChatRequest(const v1::Chat& chat, uint32_t max_tokens = 8) {
    v1::GenerateRequest request = GreedyRequest({}, max_tokens);
    request.clear_token_ids();
    *request.mutable_chat() = chat;
    return request;
  }
  static v1::GenerateRequest IdsRequest(const std::vector<uint32_t>& ids, uint32_t max_tokens = 8) {
    return GreedyRequest(ids, max_tokens);
  }
  grpc::Status Render(const v1::Chat& chat, v1::RenderChatResponse& response) {
    v1::RenderChatRequest request;
    *request.mutable_chat() = chat;
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    return models_->RenderChat(&context, request, &response);
  }
  std::vector<uint32_t> Ids(const v1::Chat& chat) {
    v1::RenderChatResponse response;
    const grpc::Status status = Render(chat, response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    return {response.token_ids().begin(), response.token_ids().end()};
  }
  std::vector<uint32_t> IdsAfterAnswer(const v1::Chat& chat) {
    v1::RenderChatRequest request;
    *request.mutable_chat() = chat;
    request.set_after_answer(true);
    v1::RenderChatResponse response;
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const grpc::Status status = models_->RenderChat(&context, request, &response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    EXPECT_FALSE(response.alone());
    return {response.token_ids().begin(), response.token_ids().end()};
  }
  static v1::GenerateRequest TextRequest(const std::string& text, uint32_t max_tokens) {
    v1::GenerateRequest request = GreedyRequest({}, max_tokens);
    request.clear_token_ids();
    request.set_text(text);
    request.set_parse_special_tokens(true);
    return request;
  }
  // Of a session that is made where there is none.
  Reply Turn(const std::string& session, v1::GenerateRequest request) {
    request.mutable_session()->set_session_id(session);
    request.mutable_session()->set_create_if_missing(true);
    Reply reply = Generate(*generation_, request);
    EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
    return reply;
  }
  void ExpectRefused(const v1::GenerateRequest& request, grpc::StatusCode code, const std::string& words) {
    const Reply reply = Generate(*generation_, request);
    EXPECT_EQ(reply.status.error_code(), code) << ToString(reply.status);
    EXPECT_NE(reply.status.error_message().find(words), std::string::npos) << ToString(reply.status);
    EXPECT_TRUE(reply.events.empty());
  }
  static ProgramResult Efla(std::vector<std::string> words, const ServerProcess& server = *server_) {
    words.insert(words.begin(), ProgramPath("efla"));
    words.insert(words.end(), {"--target", server.grpc_address()});
    return RunProgram(words);
  }

  static ChatCheckpoint* checkpoint_;
  static ServerProcess* server_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
};

ChatCheckpoint* ChatServerTest::checkpoint_ = nullptr;
ServerProcess* ChatServerTest::server_ = nullptr;

TEST_F(ChatServerTest, AChatIsWhatItsTemplateWrites) {
  v1::Model model;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->GetModel(&context, {}, &model).ok());
  EXPECT_TRUE(model.has_chat_template());

  const v1::Chat chat = Messages({{"system", "Be brief."}, {"user", " Tell me about the dog </s> "}});
  v1::RenderChatResponse rendered;
  const grpc::Status status = Render(chat, rendered);
  ASSERT_TRUE(status.ok()) << ToString(status);
  EXPECT_EQ(rendered.text(), "<s>system: Be brief.\nuser: Tell me about the dog </s>\nassistant:");
  const std::vector<uint32_t> ids(rendered.token_ids().begin(), rendered.token_ids().end());
  EXPECT_EQ(ids.front(), model.bos_token_id());
  EXPECT_EQ(std::count(ids.begin(), ids.end(), model.bos_token_id()), 1);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), model.eos_token_ids(0)), 0) << "the message's </s> is text";

  const Reply chatted = Generate(*generation_, ChatRequest(chat));
  ASSERT_TRUE(chatted.status.ok()) << ToString(chatted.status);
  EXPECT_EQ(chatted.accepted.prompt_tokens(), ids.size());
  ExpectSameTokens(chatted, Generate(*generation_, IdsRequest(ids)), "a chat and its ids");

  v1::CompleteResponse complete;
  grpc::ClientContext complete_context;
  ASSERT_TRUE(generation_->Complete(&complete_context, ChatRequest(chat), &complete).ok());
  EXPECT_EQ(std::vector<uint32_t>(complete.token_ids().begin(), complete.token_ids().end()),
            chatted.token_ids);
}

TEST_F(ChatServerTest, SpecialTokensOfTheMessagesAreParsedOnlyWhereAsked) {
  v1::GenerateRequest request = ChatRequest(Messages({{"user", "a</s>b"}, {"assistant", "c"}}));
  const uint64_t plain = Generate(*generation_, request).accepted.prompt_tokens();
  request.set_parse_special_tokens(true);
  const uint64_t parsed = Generate(*generation_, request).accepted.prompt_tokens();
  EXPECT_LT(parsed, plain);
}

TEST_F(ChatServerTest, ThereAreNeverTwoBos) {
  v1::GenerateRequest request = ChatRequest(Messages({{"user", "Hello"}}));
  const Reply as_it_is = Generate(*generation_, request);
  request.set_add_bos(true);
  const Reply asked_for = Generate(*generation_, request);
  EXPECT_EQ(as_it_is.accepted.prompt_tokens(), asked_for.accepted.prompt_tokens());
  ExpectSameTokens(as_it_is, asked_for, "add_bos with a template that writes one");
}

TEST_F(ChatServerTest, TheLastMessageCanBeContinued) {
  v1::Chat chat = Messages({{"user", "Hello"}, {"assistant", "Once upon"}});
  chat.set_continue_final_message(true);
  v1::RenderChatResponse rendered;
  ASSERT_TRUE(Render(chat, rendered).ok());
  EXPECT_EQ(rendered.text(), "<s>user: Hello\nassistant: Once upon");
  chat.set_add_generation_prompt(false);
  EXPECT_EQ(Ids(chat), std::vector<uint32_t>(rendered.token_ids().begin(), rendered.token_ids().end()));
  chat.set_add_generation_prompt(true);
  ExpectRefused(ChatRequest(chat), grpc::StatusCode::INVALID_ARGUMENT, "chat.continue_final_message");
}

TEST_F(ChatServerTest, BadChatsAreRefusedByField) {
  using grpc::StatusCode;
  ExpectRefused(ChatRequest({}), StatusCode::INVALID_ARGUMENT, "chat.messages is empty");
  ExpectRefused(ChatRequest(Messages({{"user", "a"}, {"", "b"}})), StatusCode::INVALID_ARGUMENT,
                "chat.messages[1].role is empty");
  ExpectRefused(ChatRequest(Messages({{"robot", "a"}})), StatusCode::INVALID_ARGUMENT,
                "chat cannot be rendered by the chat template: line 1: no such role: robot");
  v1::GenerateRequest both = ChatRequest(Messages({{"user", "a"}}));
  both.set_text("b");
  ExpectRefused(both, StatusCode::INVALID_ARGUMENT, "chat and text are both given");
  both.clear_text();
  both.mutable_token_ids()->add_ids(5);
  ExpectRefused(both, StatusCode::INVALID_ARGUMENT, "chat and token_ids are both given");
}

TEST_F(ChatServerTest, ASessionTakesTheNewMessagesOnly) {
  const v1::Chat first = Messages({{"system", "Be brief."}, {"user", "Hello"}}),
                 second = Messages({{"user", "And?"}});
  const Reply a1 = Turn("chat", ChatRequest(first)), a2 = Turn("chat", ChatRequest(second));
  EXPECT_EQ(a1.accepted.prompt_tokens(), Ids(first).size());
  // The second turn closes the answer and goes on: no BOS, and no space in front.
  const Reply b1 = Turn("ids", IdsRequest(Ids(first))),
              b2 = Turn("ids", TextRequest("</s>\nuser: And?\nassistant:", 8));
  ExpectSameTokens(a1, b1, "the first turn");
  ExpectSameTokens(a2, b2, "the second turn");
  EXPECT_EQ(a2.accepted.prompt_tokens(), b2.accepted.prompt_tokens());
  EXPECT_EQ(a2.finished.session().tokens(), b2.finished.session().tokens());
}

TEST_F(ChatServerTest, TurnsOfASessionAreTheWholeConversation) {
  const std::vector<std::string> templates = {
      // Ends with an end token and a line's end; a system message of its own.
      "{% if messages[0].role != 'system' %}[system]\nBe kind.</s>\n{% endif %}{% for m in messages %}"
      "[{{ m.role }}]\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif "
      "%}",
      // No special token at the end of an answer.
      "{{ bos_token }}{% if messages[0].role != 'system' %}[SYS default]{% endif %}{% for m in messages %}"
      "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}",
      // Trims.
      "{{ bos_token }}{% for m in messages %}({{ m.role }})\n{{ m.content | trim }}{{ eos_token }}\n{% "
      "endfor %}"
      "{% if add_generation_prompt %}(assistant)\n{% endif %}",
  };
  for (const std::string& source : templates) {
    const ChatCheckpoint checkpoint(source);
    const auto server = ServerProcess::Start(checkpoint.path());
    ASSERT_NE(server, nullptr);
    Use(*server);
    std::vector<std::pair<std::string, std::string>> all = {{"user", "Once upon a time"}};
    std::vector<uint32_t> fed;
    Reply reply = Turn("s", ChatRequest(Messages(all)));
    for (const uint32_t id : Ids(Messages(all))) fed.push_back(id);
    for (const std::string question : {"And then?", "What did she do?"}) {
      fed.insert(fed.end(), reply.token_ids.begin(), reply.token_ids.end());
      all.emplace_back("assistant", reply.text);
      all.emplace_back("user", question);
      const v1::Chat next = Messages({all.back()});
      const std::vector<uint32_t> ids = IdsAfterAnswer(next);
      fed.insert(fed.end(), ids.begin(), ids.end());
      EXPECT_EQ(fed, Ids(Messages(all))) << source << reply.text;

      reply = Turn("s", ChatRequest(next));
      EXPECT_EQ(reply.accepted.prompt_tokens(), ids.size()) << source;
      EXPECT_EQ(reply.finished.session().tokens(), fed.size() + reply.token_ids.size()) << source;
      const Reply at_once = Generate(*generation_, IdsRequest(Ids(Messages(all))));
      EXPECT_EQ(reply.token_ids, at_once.token_ids) << source;
    }
  }
}

TEST_F(ChatServerTest, AnEndTokenThatTheModelDrewIsNotRepeated) {
  v1::Model model;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->GetModel(&context, {}, &model).ok());
  const v1::Chat first = Messages({{"user", "Once upon a time"}}), second = Messages({{"user", "And then?"}});
  const Reply answer = Turn("ended", ChatRequest(first));
  v1::GenerateRequest end = IdsRequest({}, 4);
  end.mutable_sampling()->add_allowed_token_ids(model.eos_token_ids(0));
  end.mutable_stopping()->set_ignore_eos(false);
  const Reply ended = Turn("ended", end);
  ASSERT_EQ(ended.finished.finish_reason(), v1::FINISH_REASON_EOS);
  const Reply next = Turn("ended", ChatRequest(second));
  EXPECT_EQ(next.accepted.prompt_tokens() + 1, IdsAfterAnswer(second).size());
  std::vector<uint32_t> whole = Ids(first);
  for (const std::vector<uint32_t>& part : {answer.token_ids, IdsAfterAnswer(second)}) {
    whole.insert(whole.end(), part.begin(), part.end());
  }
  EXPECT_EQ(next.finished.session().tokens(), whole.size() + next.token_ids.size());
  EXPECT_EQ(next.token_ids, Generate(*generation_, IdsRequest(whole)).token_ids);
}

TEST_F(ChatServerTest, WhatTheClientHasClosedIsNotClosedAgain) {
  const v1::Chat first = Messages({{"user", "Once upon a time"}}), second = Messages({{"user", "And then?"}});
  const Reply answer = Turn("closed", ChatRequest(first));
  const Reply closed = Turn("closed", TextRequest("</s>\n", 0));
  EXPECT_EQ(closed.accepted.prompt_tokens(), 2u);
  const Reply next = Turn("closed", ChatRequest(second));
  EXPECT_EQ(next.accepted.prompt_tokens() + 2, IdsAfterAnswer(second).size());
  const Reply same1 = Turn("open", ChatRequest(first)), same2 = Turn("open", ChatRequest(second));
  EXPECT_EQ(next.token_ids, same2.token_ids);
  EXPECT_EQ(next.finished.session().tokens(), same2.finished.session().tokens());
  // Messages alone, closed as they come.
  v1::Chat both = Messages({{"user", "Once upon a time"}, {"assistant", answer.text}});
  both.set_add_generation_prompt(false);
  Turn("given", ChatRequest(both, 0));
  const Reply after_given = Turn("given", ChatRequest(second));
  EXPECT_EQ(after_given.accepted.prompt_tokens(), next.accepted.prompt_tokens());
  EXPECT_EQ(after_given.finished.session().tokens(),
            Ids(both).size() + next.accepted.prompt_tokens() + after_given.token_ids.size());
}

TEST_F(ChatServerTest, AddBosBeginsAConversationInTheSession) {
  const v1::Chat chat = Messages({{"user", "Hello"}});
  Turn("bos", ChatRequest(chat));
  v1::GenerateRequest request = ChatRequest(chat);
  request.set_add_bos(true);
  EXPECT_EQ(Turn("bos", request).accepted.prompt_tokens(), Ids(chat).size());
  // So does a message that is an answer, without the BOS.
  v1::Chat answer = Messages({{"assistant", "Yes"}});
  answer.set_add_generation_prompt(false);
  EXPECT_EQ(Turn("bos", ChatRequest(answer)).accepted.prompt_tokens(),
            Turn("bos", TextRequest("assistant: Yes</s>\n", 1)).accepted.prompt_tokens());
}

TEST_F(ChatServerTest, WhatIsOnlyGoodAfterAnAnswerIsRefusedBeforeOne) {
  const ChatCheckpoint checkpoint(
      "{% if messages[0].role == 'tool' %}{{ raise_exception('no question') }}{% endif %}"
      "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
      "{% if add_generation_prompt %}[assistant]{% endif %}");
  const auto server = ServerProcess::Start(checkpoint.path());
  ASSERT_NE(server, nullptr);
  Use(*server);
  v1::GenerateRequest result = ChatRequest(Messages({{"tool", "42"}}));
  ExpectRefused(result, grpc::StatusCode::INVALID_ARGUMENT, "no question");
  result.mutable_session()->set_session_id("s");
  result.mutable_session()->set_create_if_missing(true);
  ExpectRefused(result, grpc::StatusCode::INVALID_ARGUMENT, "no question");
  Turn("s", ChatRequest(Messages({{"user", "How much?"}})));
  EXPECT_EQ(Turn("s", result).accepted.prompt_tokens(), IdsAfterAnswer(Messages({{"tool", "42"}})).size());
}

TEST_F(ChatServerTest, WithoutAnAnswerInItsTextATemplateRendersTurnsAlone) {
  const ChatCheckpoint checkpoint("{{ bos_token }}Q: {{ messages[-1].content }}\nA:");
  const auto server = ServerProcess::Start(checkpoint.path());
  ASSERT_NE(server, nullptr);
  Use(*server);
  EXPECT_NE(server->process().err().find("chat_template_alone"), std::string::npos);
  const v1::Chat chat = Messages({{"user", "Hello"}});
  v1::RenderChatRequest request;
  *request.mutable_chat() = chat;
  request.set_after_answer(true);
  v1::RenderChatResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->RenderChat(&context, request, &response).ok());
  EXPECT_TRUE(response.alone());
  EXPECT_EQ(response.text(), "<s>Q: Hello\nA:");
  Turn("s", ChatRequest(chat));
  EXPECT_EQ(Turn("s", ChatRequest(chat)).accepted.prompt_tokens(), Ids(chat).size() - 1);
  EXPECT_EQ(static_cast<size_t>(response.token_ids_size()), Ids(chat).size() - 1);
}

TEST_F(ChatServerTest, ATemplateThatFailsForAllIsToldAtTheStart) {
  const ChatCheckpoint checkpoint("{{ foo.bar.baz }}");
  const auto server = ServerProcess::Start(checkpoint.path());
  ASSERT_NE(server, nullptr);
  Use(*server);
  v1::Model model;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->GetModel(&context, {}, &model).ok());
  EXPECT_FALSE(model.has_chat_template());
  EXPECT_NE(server->process().err().find("chat_template_failed"), std::string::npos)
      << server->process().err();
  ExpectRefused(ChatRequest(Messages({{"user", "Hello"}})), grpc::StatusCode::FAILED_PRECONDITION,
                "the checkpoint's cannot be used: line 1: \"foo\" is undefined");
}

TEST_F(ChatServerTest, ATemplateThatFailsLaterIsLoggedWithoutTheMessages) {
  const ChatCheckpoint checkpoint(
      "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\n"
      "{{ messages[2].name.first if messages | length == 3 and messages[0].role == 'system' }}");
  const auto server = ServerProcess::Start(checkpoint.path());
  ASSERT_NE(server, nullptr);
  Use(*server);
  EXPECT_EQ(server->process().err().find("chat_template"), std::string::npos) << server->process().err();
  EXPECT_TRUE(Generate(*generation_, ChatRequest(Messages({{"user", "Hello"}}))).status.ok());
  const v1::GenerateRequest request =
      ChatRequest(Messages({{"system", "quokka"}, {"user", "wombat"}, {"user", "numbat"}}));
  ExpectRefused(request, grpc::StatusCode::FAILED_PRECONDITION, "the chat template fails: line 2: ");
  const Reply reply = Generate(*generation_, request);
  EXPECT_NE(reply.status.error_details().find("CHAT_TEMPLATE_FAILED"), std::string::npos);
  const auto log = [&] { return server->process().err(); };
  EXPECT_TRUE(Eventually([&] { return log().find("chat_template_failed") != std::string::npos; })) << log();
  for (const char* word : {"quokka", "wombat", "numbat"}) {
    EXPECT_EQ(log().find(word), std::string::npos) << log();
  }
}

TEST_F(ChatServerTest, AModelWithoutATemplateRefusesChats) {
  const auto plain = ServerProcess::Start(SourceDir() / "model/demo");
  ASSERT_NE(plain, nullptr);
  Use(*plain);
  const v1::Chat chat = Messages({{"user", "Hello"}});
  const Reply reply = Generate(*generation_, ChatRequest(chat));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(reply.status.error_details().find("NO_CHAT_TEMPLATE"), std::string::npos);
  EXPECT_EQ(reply.status.error_message(),
            "chat needs a chat template: the checkpoint has none; give text or token ids");
  v1::RenderChatResponse response;
  EXPECT_EQ(Render(chat, response).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  const ProgramResult cli = Efla({"generate", "--user", "Hello"}, *plain);
  EXPECT_EQ(cli.exit_status, 1);
  EXPECT_NE(cli.err.find("chat template"), std::string::npos) << cli.err;
}

TEST_F(ChatServerTest, ATemplateThatIsNotSupportedCostsTheChatsAlone) {
  const ChatCheckpoint checkpoint("line one\n{% include 'other' %}");
  const auto server = ServerProcess::Start(checkpoint.path());
  ASSERT_NE(server, nullptr);
  Use(*server);
  ExpectRefused(ChatRequest(Messages({{"user", "Hello"}})), grpc::StatusCode::FAILED_PRECONDITION,
                "line 2: the statement \"include\" is not supported");
  EXPECT_TRUE(Generate(*generation_, IdsRequest({1, 5, 6})).status.ok());
}

TEST_F(ChatServerTest, TheCommandLineChats) {
  const std::vector<std::string> end = {"--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--json"};
  const auto words = [&](std::vector<std::string> first) {
    first.insert(first.begin(), "generate");
    first.insert(first.end(), end.begin(), end.end());
    return first;
  };
  TempDir folder;
  const std::string file = folder.path() / "chat.json";
  std::ofstream(file)
      << R"([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])";
  const ProgramResult from_file = Efla(words({"--chat", file}));
  const ProgramResult from_flags = Efla(words({"--system", "Be brief.", "--user", "Hello"}));
  EXPECT_EQ(from_file.exit_status, 0) << from_file.err;
  EXPECT_EQ(from_flags.exit_status, 0) << from_flags.err;
  const auto all_ids = [](const std::string& lines) {
    std::vector<uint32_t> ids;
    for (size_t begin = 0; begin < lines.size(); begin = lines.find('\n', begin) + 1) {
      const json line = json::parse(lines.substr(begin, lines.find('\n', begin) - begin));
      for (uint32_t id : line.at("token_ids")) ids.push_back(id);
    }
    return ids;
  };
  const Reply expected =
      Generate(*generation_, ChatRequest(Messages({{"system", "Be brief."}, {"user", "Hello"}})));
  EXPECT_EQ(all_ids(from_file.out), expected.token_ids);
  EXPECT_EQ(all_ids(from_flags.out), expected.token_ids);
  EXPECT_EQ(Efla(words({"--user", "a", "--prompt", "b"})).exit_status, 2);
  EXPECT_EQ(Efla(words({"--user", "a", "--chat", file})).exit_status, 2);
}

TEST_F(ChatServerTest, TheInteractiveChatUsesTheTemplate) {
  const auto chat = [&](const std::string& name, const std::string& flags) {
    return RunProgram({"/bin/sh", "-c",
                       "printf 'Hello\\nAnd?\\n' | " + ProgramPath("efla") + " chat --session " + name +
                           " --temperature 0 --max-tokens 6 --target " + server_->grpc_address() + flags});
  };
  const ProgramResult templated = chat("cli", " --system 'Be brief.'"), plain = chat("plain", " --plain");
  EXPECT_EQ(templated.exit_status, 0) << templated.err;
  EXPECT_EQ(plain.exit_status, 0) << plain.err;
  const auto turn = [&](const v1::Chat& messages) {
    v1::GenerateRequest request = ChatRequest(messages, 6);
    request.mutable_stopping()->set_ignore_eos(false);
    request.mutable_session()->set_session_id("calls");
    request.mutable_session()->set_create_if_missing(true);
    return Generate(*generation_, request);
  };
  const Reply first = turn(Messages({{"system", "Be brief."}, {"user", "Hello"}}));
  const Reply second = turn(Messages({{"user", "And?"}}));
  EXPECT_NE(templated.err.find(std::to_string(second.finished.session().tokens()) + " tokens"),
            std::string::npos)
      << templated.err;
  EXPECT_EQ(templated.out.substr(0, first.text.size()), first.text);
  EXPECT_EQ(plain.err.find(std::to_string(second.finished.session().tokens()) + " tokens"),
            std::string::npos);

  const ProgramResult again = chat("cli", " --system 'Be long.'");
  EXPECT_EQ(again.exit_status, 1);
  EXPECT_EQ(again.out, "");
  EXPECT_NE(again.err.find("FAILED_PRECONDITION: --system is given and session cli holds"), std::string::npos)
      << again.err;
  EXPECT_NE(Efla({"sessions", "get", "cli"}).out.find("revision 3,"), std::string::npos)
      << "nothing was said";
}

}  // namespace
}  // namespace efla::e2e
