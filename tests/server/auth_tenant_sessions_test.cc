// Two tenants and one session manager: nobody sees, touches or finds out about another's sessions.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/rpc/tenant_sessions.h"
#include "server/sessions/session_key.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

struct Tenants {
  SessionRig rig;
  int limit = 0;
  TenantSessions acme{*rig.manager, "acme", [this] { return limit; }};
  TenantSessions other{*rig.manager, "other", [] { return 0; }};
  TenantSessions nobody{*rig.manager, "", [] { return 0; }};

  static std::vector<std::string> Names(TenantSessions& tenant, const std::string& prefix = "",
                                        int limit = 100) {
    std::vector<std::string> names;
    const std::vector<SessionInfo> listed = tenant.List(prefix, "", limit).value();
    for (const SessionInfo& info : listed) names.push_back(info.session_id);
    return names;
  }
  static absl::StatusOr<SessionInfo> Make(TenantSessions& tenant, const std::string& name,
                                          const std::string& request_id = "") {
    return tenant.Create(name, std::chrono::milliseconds(0), request_id, Durability::kNone);
  }
};

using Names = std::vector<std::string>;

TEST(SessionKeyTest, NamesBehindTenants) {
  EXPECT_EQ(NameOf("a"), "a");
  EXPECT_EQ(NameOf("t~a"), "a");
  EXPECT_TRUE(WantsName(""));
  EXPECT_TRUE(WantsName("t~"));
  EXPECT_FALSE(WantsName("t~a"));
  EXPECT_TRUE(HasGoodTenant("a"));
  EXPECT_TRUE(HasGoodTenant("t.A-9_~a"));
  EXPECT_FALSE(HasGoodTenant("~a"));
  EXPECT_FALSE(HasGoodTenant("a b~a"));
  EXPECT_TRUE(HasGoodTenant(std::string(64, 't') + "~a"));
  EXPECT_FALSE(HasGoodTenant(std::string(65, 't') + "~a"));
}

TEST(TenantSessionsTest, OneNameIsASessionOfEachTenant) {
  Tenants t;
  ASSERT_TRUE(Tenants::Make(t.acme, "chat").ok());
  ASSERT_TRUE(Tenants::Make(t.other, "chat").ok());
  ASSERT_TRUE(Tenants::Make(t.nobody, "chat").ok());
  EXPECT_EQ(t.rig.Get("acme~chat").session_id, "acme~chat");
  EXPECT_EQ(t.acme.Get("chat")->session_id, "chat");
  ASSERT_TRUE(t.acme.Mark(ChangeOf("chat"), "here").ok());
  EXPECT_EQ(t.acme.Get("chat")->revision, 2u);
  EXPECT_EQ(t.other.Get("chat")->revision, 1u);
  EXPECT_EQ(t.nobody.Get("chat")->revision, 1u);
  ASSERT_TRUE(t.acme.Delete(ChangeOf("chat")).ok());
  EXPECT_TRUE(t.other.Get("chat").ok());
}

TEST(TenantSessionsTest, ListShowsOwnSessionsOnlyPageByPage) {
  Tenants t;
  for (const char* name : {"b", "a", "aa"}) ASSERT_TRUE(Tenants::Make(t.acme, name).ok());
  for (const char* name : {"0", "a", "z"}) ASSERT_TRUE(Tenants::Make(t.other, name).ok());
  for (const char* name : {"acme", "zz", "b"}) ASSERT_TRUE(Tenants::Make(t.nobody, name).ok());
  EXPECT_EQ(Tenants::Names(t.acme), (Names{"a", "aa", "b"}));
  EXPECT_EQ(Tenants::Names(t.acme, "a"), (Names{"a", "aa"}));
  EXPECT_EQ(Tenants::Names(t.acme, "", 2), (Names{"a", "aa"}));
  EXPECT_EQ(t.acme.List("", "aa", 5)->front().session_id, "b");
  EXPECT_EQ(Tenants::Names(t.other), (Names{"0", "a", "z"}));
  EXPECT_EQ(Tenants::Names(t.nobody), (Names{"acme", "b", "zz"}));
  EXPECT_EQ(Tenants::Names(t.nobody, "", 2), (Names{"acme", "b"})) << "others' do not take places in a page";
}

// What another tenant's session answers must be what one that is not there answers, to the letter.
TEST(TenantSessionsTest, ProbingTellsNothing) {
  Tenants t;
  ASSERT_TRUE(Tenants::Make(t.acme, "secret").ok());
  ASSERT_TRUE(t.acme.Mark(ChangeOf("secret"), "mark").ok());
  const auto same = [](const absl::Status& there, const absl::Status& missing) {
    EXPECT_FALSE(there.ok());
    EXPECT_EQ(there.code(), missing.code());
    std::string text(missing.message());
    const size_t at = text.find("nosuch");
    ASSERT_NE(at, std::string::npos) << text;
    text.replace(at, 6, "secret");
    EXPECT_EQ(std::string(there.message()), text);
    EXPECT_EQ(ReasonOf(there), ReasonOf(missing));
  };
  for (TenantSessions* tenant : {&t.other, &t.nobody}) {
    const auto all = [&](const std::string& name) {
      std::vector<absl::Status> statuses;
      statuses.push_back(tenant->Get(name).status());
      statuses.push_back(tenant->Mark(ChangeOf(name), "m").status());
      statuses.push_back(tenant->Rewind(ChangeOf(name), "mark", std::nullopt).status());
      statuses.push_back(tenant->Fork(ChangeOf(name), {"child"}, "").status());
      statuses.push_back(tenant->Export(name, "").status());
      statuses.push_back(tenant->Move(name, SessionTier::kHost).status());
      statuses.push_back(tenant->Delete(ChangeOf(name)));
      statuses.push_back(tenant->BeginTurn(ChangeOf(name), OnCancel::kRollback, false).status());
      return statuses;
    };
    const std::vector<absl::Status> there = all("secret"), missing = all("nosuch");
    for (size_t i = 0; i < there.size(); ++i) {
      SCOPED_TRACE(i);
      same(there[i], missing[i]);
    }
  }
  EXPECT_EQ(t.acme.Get("secret")->revision, 2u);
}

TEST(TenantSessionsTest, NoMessageOrDetailHoldsTheTenantsName) {
  Tenants t;
  ASSERT_TRUE(Tenants::Make(t.acme, "chat").ok());
  SessionChange stale = ChangeOf("chat");
  stale.expected_revision = 7;
  const absl::Status statuses[] = {t.acme.Get("none").status(), Tenants::Make(t.acme, "chat").status(),
                                   t.acme.Mark(stale, "m").status(),
                                   t.acme.Rewind(ChangeOf("chat"), "no-mark", std::nullopt).status(),
                                   t.acme.Fork(ChangeOf("chat"), {"chat"}, "").status()};
  for (const absl::Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.ToString().find('~'), std::string::npos) << status;
    EXPECT_EQ(status.ToString().find("acme"), std::string::npos) << status;
    EXPECT_NE(ReasonOf(status), "") << "the reason is kept: " << status;
  }
}

TEST(TenantSessionsTest, MadeNamesAndRepeatedRequestsStayWithTheTenant) {
  Tenants t;
  const auto first = Tenants::Make(t.acme, "", "request");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->session_id.empty());
  EXPECT_EQ(first->session_id.find('~'), std::string::npos);
  const auto again = Tenants::Make(t.acme, "", "request");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->session_id, first->session_id);
  const auto others = Tenants::Make(t.other, "", "request");
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_NE(others->session_id, first->session_id)
      << "another tenant's request of the same id is another request";
  const auto children = t.acme.Fork(ChangeOf(first->session_id), {"", "child"}, "");
  ASSERT_TRUE(children.ok()) << children.status();
  EXPECT_EQ((*children)[1].session_id, "child");
  EXPECT_EQ((*children)[0].session_id.find('~'), std::string::npos);
  EXPECT_EQ(Tenants::Names(t.acme).size(), 3u);
  EXPECT_EQ(Tenants::Names(t.nobody).size(), 0u);
}

TEST(TenantSessionsTest, TurnsCommitUnderTheTenantsName) {
  Tenants t;
  auto begun = t.acme.BeginTurn(ChangeOf("chat"), OnCancel::kRollback, /*create=*/true);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(begun->turn->before().session_id, "chat");
  GenerationRequest request;
  const auto computes = begun->turn->Prepare({5, 6, 7}, /*generates=*/false, request);
  ASSERT_TRUE(computes.ok()) << computes.status();
  ASSERT_FALSE(*computes) << "a few tokens wait for the next turn";
  const auto after = begun->turn->Commit(std::nullopt, false, "reply");
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->session_id, "chat");
  EXPECT_EQ(after->tokens, 3);
  EXPECT_EQ(t.rig.Get("acme~chat").tokens, 3);
}

TEST(TenantSessionsTest, LimitOfSessionsHoldsForEveryWayToMakeOne) {
  Tenants t;
  t.limit = 2;
  ASSERT_TRUE(Tenants::Make(t.acme, "a", "request").ok());
  ASSERT_TRUE(Tenants::Make(t.acme, "b").ok());
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status), "SESSION_LIMIT");
    EXPECT_NE(status.message().find("the limit is 2"), absl::string_view::npos) << status;
  };
  refused(Tenants::Make(t.acme, "c").status());
  refused(t.acme.Fork(ChangeOf("a"), {"c"}, "").status());
  refused(t.acme.BeginTurn(ChangeOf("c"), OnCancel::kRollback, true).status());
  refused(t.acme.Import("c", std::chrono::milliseconds(0), {}, "", Durability::kNone).status());
  EXPECT_TRUE(t.acme.BeginTurn(ChangeOf("a"), OnCancel::kRollback, true).ok()) << "one that is there";
  EXPECT_TRUE(Tenants::Make(t.acme, "a", "request").ok()) << "a repetition";
  EXPECT_EQ(Tenants::Make(t.acme, "b").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Tenants::Make(t.other, "c").ok()) << "another tenant's own limit";
  ASSERT_TRUE(t.acme.Delete(ChangeOf("b")).ok());
  EXPECT_TRUE(Tenants::Make(t.acme, "c").ok());
}

// The limit is looked at without loading a session: what making one asks the store for does not grow with how
// many there are.
TEST(TenantSessionsTest, TheLimitCostsOneListingOfTheTenantsRecords) {
  const auto contents = std::make_shared<MemoryStoreContents>();
  const auto replica = [&](const std::string& name) {
    SessionRigOptions options;
    options.sessions.replica = name;
    options.shared = std::make_unique<MemoryStore>(contents, /*shared=*/true);
    return std::make_unique<SessionRig>(std::move(options));
  };
  const std::unique_ptr<SessionRig> one = replica("one"), two = replica("two");
  TenantSessions acme(*two->manager, "acme", [] { return 10; });
  const auto make = [&](SessionRig& rig, const std::string& id) {
    const auto made = rig.manager->Create(id, std::chrono::milliseconds(0), "", Durability::kSync);
    ASSERT_TRUE(made.ok()) << made.status();
  };
  // Records read, and listed, while acme makes a session.
  const auto asked = [&](const std::string& name) {
    {
      const std::lock_guard lock(contents->mutex);
      contents->record_gets = contents->records_listed = 0;
    }
    const absl::StatusOr<SessionInfo> made = Tenants::Make(acme, name);
    EXPECT_TRUE(made.ok()) << made.status();
    const std::lock_guard lock(contents->mutex);
    return std::pair(contents->record_gets, contents->records_listed);
  };
  for (int i = 0; i < 20; ++i) make(*one, Numbered("other~", i));
  const auto [gets_of_first, listed_for_first] = asked("first");
  EXPECT_EQ(listed_for_first, 0);
  for (int i = 0; i < 8; ++i) make(*one, Numbered("acme~", i));
  const auto [gets_of_last, listed_for_last] = asked("last");
  EXPECT_EQ(listed_for_last, 9);
  EXPECT_EQ(gets_of_last, gets_of_first);
  const absl::Status refused = Tenants::Make(acme, "more").status();
  EXPECT_EQ(ReasonOf(refused), "SESSION_LIMIT") << refused;
  EXPECT_EQ(acme.Count(""), 10);
  EXPECT_EQ(acme.Count("f"), 1);
}

// A repetition makes nothing: it is answered, whatever the limit is by now.
TEST(TenantSessionsTest, ARepetitionIsAnsweredBeforeTheLimitIsLookedAt) {
  Tenants t;
  t.limit = 5;
  const absl::StatusOr<SessionInfo> created = Tenants::Make(t.acme, "", "create");
  ASSERT_TRUE(created.ok()) << created.status();
  const std::string parent = created->session_id;
  const absl::StatusOr<HostBuffer> snapshot = t.acme.Export(parent, "");
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  const auto import_as = [&](const std::string& request_id) {
    return t.acme.Import("", std::chrono::milliseconds(0), snapshot->span(), request_id, Durability::kNone);
  };
  const absl::StatusOr<SessionInfo> imported = import_as("import");
  ASSERT_TRUE(imported.ok()) << imported.status();
  const auto fork = [&](const std::string& request_id) {
    return t.acme.Fork(ChangeOf(parent, Durability::kNone, request_id), {"", "named", ""}, "");
  };
  const absl::StatusOr<std::vector<SessionInfo>> forked = fork("fork");
  ASSERT_TRUE(forked.ok()) << forked.status();

  const absl::StatusOr<std::vector<SessionInfo>> again = fork("fork");
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(again->size(), 3u);
  for (size_t i = 0; i < again->size(); ++i) EXPECT_EQ((*again)[i].session_id, (*forked)[i].session_id);
  const absl::StatusOr<SessionInfo> created_again = Tenants::Make(t.acme, "", "create");
  ASSERT_TRUE(created_again.ok()) << created_again.status();
  EXPECT_EQ(created_again->session_id, parent);
  const absl::StatusOr<SessionInfo> imported_again = import_as("import");
  ASSERT_TRUE(imported_again.ok()) << imported_again.status();
  EXPECT_EQ(imported_again->session_id, imported->session_id);
  EXPECT_EQ(Tenants::Names(t.acme).size(), 5u);

  for (const absl::Status& status : {fork("another").status(), import_as("another").status(),
                                     Tenants::Make(t.acme, "", "another").status()}) {
    EXPECT_EQ(ReasonOf(status), "SESSION_LIMIT") << status;
  }
  EXPECT_EQ(Tenants::Names(t.acme).size(), 5u);
  // What was refused has left nothing that would answer for it.
  ASSERT_TRUE(t.acme.Delete(ChangeOf("named")).ok());
  EXPECT_TRUE(Tenants::Make(t.acme, "", "another").ok());
}

}  // namespace
}  // namespace efla
