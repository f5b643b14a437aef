#include "server/sessions/redis_store.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/host_lookup.h"
#include "server/sessions/redis_connection.h"
#include "tests/server/redis_server.h"
#include "tests/server/store_example.h"

namespace efla {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

TEST(RedisAddressTest, ParsesWhatItSays) {
  const auto parse = [](const std::string& url) {
    const auto address = RedisAddress::Parse(url);
    if (!address.ok()) return address.status().ToString();
    return absl::StrFormat("%s|%d|%s|%s|%d", address->host, address->port, address->user, address->password,
                           address->database);
  };
  EXPECT_EQ(parse("redis://localhost"), "localhost|6379|||0");
  EXPECT_EQ(parse("redis://10.0.0.1:1"), "10.0.0.1|1|||0");
  EXPECT_EQ(parse("redis://my-redis.svc_1:65535/15"), "my-redis.svc_1|65535|||15");
  EXPECT_EQ(parse("redis://[::1]:6380/0"), "::1|6380|||0");
  EXPECT_EQ(parse("redis://[fe80::1]"), "fe80::1|6379|||0");
  EXPECT_EQ(parse("redis://user:pass@host"), "host|6379|user|pass|0");
  EXPECT_EQ(parse("redis://:pass@host:7/2"), "host|7||pass|2");
  EXPECT_EQ(parse("redis://us%3Aer:p%40%2f%25:s@host"), "host|6379|us:er|p@/%:s|0");
}

TEST(RedisAddressTest, RefusesEverythingElseAndNeverShowsThePassword) {
  for (const std::string url : {"",
                                "redis:/host",
                                "redis://",
                                "rediss://host",
                                "http://host",
                                "redis://host:",
                                "redis://host:0",
                                "redis://host:65536",
                                "redis://host:-1",
                                "redis://host:6379x",
                                "redis://host: 1",
                                "redis://host:+1",
                                "redis://host/",
                                "redis://host/x",
                                "redis://host/-1",
                                "redis://host/1/2",
                                "redis://host?a=b",
                                "redis://host/0?a=b",
                                "redis://host#x",
                                "redis://ho st",
                                "redis://host:1:2",
                                "redis://::1",
                                "redis://[::1",
                                "redis://[::1]x",
                                "redis://[]",
                                "redis://[host name]",
                                "redis://secret@host",
                                "redis://user:@host",
                                "redis://:@host",
                                "redis://user:secret%4@host",
                                "redis://user:secret%zz@host",
                                "redis://user:secret%-1@host",
                                "redis://a:secret@b@host",
                                "redis://a:secret/b@host",
                                "redis://a:secret@",
                                "redis://a:secret@:1"}) {
    const auto address = RedisAddress::Parse(url);
    EXPECT_EQ(address.status().code(), StatusCode::kInvalidArgument) << url;
    EXPECT_EQ(address.status().ToString().find("secret"), std::string::npos) << address.status();
  }
}

TEST(RedisReplyTest, AnErrorIsKnownByItsFirstWord) {
  const std::vector<std::pair<std::string, StatusCode>> cases = {
      {"NOAUTH Authentication required.", StatusCode::kPermissionDenied},
      {"WRONGPASS invalid username-password pair or user is disabled.", StatusCode::kPermissionDenied},
      {"NOPERM this user has no permissions to run the 'set' command", StatusCode::kPermissionDenied},
      {"DENIED Redis is running in protected mode because", StatusCode::kPermissionDenied},
      {"ERR AUTH <password> called without any password configured", StatusCode::kPermissionDenied},
      {"ERR unknown command 'X', with args beginning with: 'AUTHOR'", StatusCode::kInternal},
      {"ERR user_script:1: NOAUTH script: f2053626, on @user_script:1.", StatusCode::kInternal},
      {"NOAUTHOR is no word of Redis", StatusCode::kInternal},
      {"LOADING the data of AUTHOR", StatusCode::kUnavailable},
      {"READONLY You can't write against a read only replica.", StatusCode::kUnavailable},
      {"OOM command not allowed when used memory > 'maxmemory'.", StatusCode::kResourceExhausted},
      {"ERR Error running script: -OOM command not allowed", StatusCode::kResourceExhausted}};
  RedisReply reply;
  for (const auto& [text, code] : cases) {
    reply.type = RedisReply::Type::kError;
    reply.text = text;
    EXPECT_EQ(reply.status().code(), code) << text;
    reply.type = RedisReply::Type::kText;
    EXPECT_TRUE(reply.status().ok()) << text;
  }
}

SteadyClock::time_point After(milliseconds time) { return SteadyClock::now() + time; }

SocketAddress Loopback(int port) {
  sockaddr_in plain{};
  plain.sin_family = AF_INET;
  plain.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  plain.sin_port = htons(static_cast<uint16_t>(port));
  SocketAddress address;
  std::memcpy(&address.bytes, &plain, sizeof(plain));
  address.size = sizeof(plain);
  return address;
}

TEST(HostLookupTest, FindsNumbersAndNames) {
  const auto found = HostLookup("127.0.0.1", 4321).Find(After(std::chrono::seconds(10)));
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->size(), 1u);
  EXPECT_EQ(found->front().size, sizeof(sockaddr_in));
  const SocketAddress wanted = Loopback(4321);
  EXPECT_EQ(std::memcmp(&found->front().bytes, &wanted.bytes, sizeof(sockaddr_in)), 0);
  HostLookup name("localhost", 1);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(name.Find(After(std::chrono::seconds(10))).ok());
  const auto none = HostLookup(std::string(70, 'x'), 1).Find(After(std::chrono::seconds(10)));
  EXPECT_EQ(none.status().code(), StatusCode::kUnavailable) << "no name is as long";
}

TEST(HostLookupTest, WaitsNoLongerThanItMayAndALateAnswerIsTheNextCallers) {
  std::promise<void> answers;
  const std::shared_future<void> answered = answers.get_future().share();
  std::atomic<int> asked = 0;
  HostLookup host([&asked, answered]() -> HostLookup::Answer {
    ++asked;
    answered.wait();
    return std::vector<SocketAddress>{Loopback(1)};
  });
  const auto begin = SteadyClock::now();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 3; ++i) {
        const auto late = host.Find(After(milliseconds(50)));
        EXPECT_EQ(late.status().code(), StatusCode::kUnavailable) << late.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(SteadyClock::now() - begin, milliseconds(150));
  EXPECT_LT(SteadyClock::now() - begin, milliseconds(5000));
  EXPECT_EQ(asked, 1) << "one at a time";
  answers.set_value();
  EXPECT_TRUE(host.Find(After(std::chrono::seconds(10))).ok());
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(host.Find(After(std::chrono::seconds(10))).ok());
  EXPECT_EQ(asked, 2) << "the next one asks anew";
}

class RedisStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { EFLA_SKIP_WITHOUT_REDIS(); }

  void Start(std::vector<std::string> options = {}) {
    server_ = std::make_unique<RedisServer>(std::move(options));
  }
  std::unique_ptr<RedisStore> Connect(const RedisAddress& address) {
    auto store = RedisStore::Create(address, options_);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  std::unique_ptr<RedisStore> Connect() { return Connect(server_->address()); }

  // A command of the test's own.
  RedisReply Command(const std::vector<std::string_view>& words) {
    const auto deadline = SteadyClock::now() + std::chrono::seconds(10);
    if (direct_ == nullptr) {
      HostLookup host("127.0.0.1", server_->port());
      auto connection = RedisConnection::Connect(server_->address(), host, deadline);
      EXPECT_TRUE(connection.ok()) << connection.status();
      direct_ = *std::move(connection);
    }
    auto reply = direct_->Call(words, deadline);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return *std::move(reply);
  }
  std::vector<std::string> Keys() {
    std::vector<std::string> keys;
    for (const RedisReply& key : Command({"KEYS", "*"}).elements) keys.push_back(key.text);
    std::sort(keys.begin(), keys.end());
    return keys;
  }
  int64_t MsToLive(const std::string& key) { return Command({"PTTL", key}).integer; }
  static int64_t UnixMsFromNow(milliseconds later) {
    const auto at = std::chrono::system_clock::now() + later;
    return std::chrono::duration_cast<milliseconds>(at.time_since_epoch()).count();
  }
  static SessionRecord Expiring(SessionRecord record, milliseconds later) {
    record.expires_unix_ms = UnixMsFromNow(later);
    return record;
  }

  RedisStoreOptions options_;
  std::unique_ptr<RedisServer> server_;
  std::unique_ptr<RedisConnection> direct_;
};

#define ASSERT_OK(expression)                    \
  do {                                           \
    const absl::Status ok_status = (expression); \
    ASSERT_TRUE(ok_status.ok()) << ok_status;    \
  } while (false)

TEST_F(RedisStoreTest, TwoStoresSeeTheSame) {
  Start();
  const auto one = Connect(), two = Connect();
  ASSERT_OK(one->PutSnapshot("x", BytesOf("x", 5'000'000)));
  ASSERT_OK(one->PutRecord(RecordOf("s", 1, 1, "one", {"x"}), 0));
  EXPECT_TRUE(SameRecord(*two->GetRecord("s"), RecordOf("s", 1, 1, "one", {"x"})));
  EXPECT_TRUE(*two->GetSnapshot("x") == BytesOf("x", 5'000'000));
  ASSERT_OK(two->PutRecord(RecordOf("s", 2, 1, "two", {"x"}), 1));
  EXPECT_EQ(one->PutRecord(RecordOf("s", 1, 2, "one", {"x"}), 1).code(), StatusCode::kAborted);
  ASSERT_OK(one->RenewLease("one", "host:1", std::chrono::seconds(5)));
  EXPECT_EQ(*two->GetLease("one"), "host:1");
  options_.key_prefix = "other*[:";
  const auto other = Connect();
  EXPECT_FALSE(other->GetRecord("s").ok());
  ASSERT_OK(other->PutRecord(RecordOf("s", 1, 1, ""), 0));
  EXPECT_EQ(IdsIn(*other), std::vector<std::string>{"s"});
}

TEST_F(RedisStoreTest, ValuesAreOfAtMostAMebibyteAndEveryKeyExpires) {
  Start();
  const auto store = Connect();
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 13'485'024)));
  ASSERT_OK(store->PutSnapshot("unnamed", BytesOf("unnamed", 2'000'000)));
  ASSERT_OK(store->PutRecord(RecordOf("s", 1, 1, "a", {"x"}), 0));
  ASSERT_OK(store->PutRecord(TombstoneOf("t", 1), 0));
  ASSERT_OK(store->RenewLease("a", "host:1", std::chrono::seconds(5)));
  const std::vector<std::string> keys = Keys();
  EXPECT_EQ(keys.size(), 1u + 13 + 1 + 2 + 2 + 1);
  for (const std::string& key : keys) {
    EXPECT_GT(MsToLive(key), 0) << key;
    if (Command({"TYPE", key}).text == "string") {
      EXPECT_LE(Command({"STRLEN", key}).integer, 1 << 20) << key;
    }
  }
  EXPECT_EQ(Command({"STRLEN", "efla:snapshot:x:12"}).integer, 13'485'024 - 12 * (1 << 20));
}

TEST_F(RedisStoreTest, SnapshotsLiveAsLongAsTheRecordsThatNameThem) {
  Start();
  options_.unnamed_grace = std::chrono::seconds(30);
  const auto store = Connect();
  const int64_t grace = 30'000, slack = 5'000;
  const auto lives = [&](const std::string& id, int64_t ms) {
    EXPECT_NEAR(static_cast<double>(MsToLive("efla:snapshot:" + id)), static_cast<double>(ms), slack) << id;
    EXPECT_GE(MsToLive("efla:snapshot:" + id + ":0"), MsToLive("efla:snapshot:" + id)) << id;
    EXPECT_GE(MsToLive("efla:snapshot:" + id + ":1"), MsToLive("efla:snapshot:" + id)) << id;
  };
  const auto hours = [](int n) { return milliseconds(std::chrono::hours(n)); };
  for (const char* id : {"x", "y"}) ASSERT_OK(store->PutSnapshot(id, BytesOf(id, 1'100'000)));
  lives("x", grace);
  ASSERT_OK(store->PutRecord(Expiring(RecordOf("s", 1, 1, "", {"x"}), hours(1)), 0));
  EXPECT_NEAR(static_cast<double>(MsToLive("efla:record:s")), 3'600'000, slack);
  lives("x", 3'600'000 + grace);
  ASSERT_OK(store->PutRecord(Expiring(RecordOf("t", 1, 1, "", {"x", "y"}), hours(2)), 0));  // a fork
  lives("x", 7'200'000 + grace);
  ASSERT_OK(store->PutRecord(Expiring(RecordOf("s", 1, 2, "", {"x"}), hours(3)), 1));  // used again
  lives("x", 10'800'000 + grace);
  lives("y", 7'200'000 + grace);
  ASSERT_OK(store->PutRecord(Expiring(RecordOf("s", 1, 3, "", {"y"}), hours(3)), 1));
  lives("x", 7'200'000 + grace);
  ASSERT_OK(store->PutRecord(TombstoneOf("t", 2), 1));
  lives("x", grace);
  lives("y", 10'800'000 + grace);
  ASSERT_OK(store->PutSnapshot("y", BytesOf("y", 1'100'000)));  // a put again shortens nothing
  lives("y", 10'800'000 + grace);
}

TEST_F(RedisStoreTest, WhatNoRecordNamesIsGoneAfterTheGrace) {
  Start();
  options_.unnamed_grace = milliseconds(60);
  options_.tombstone_ttl = milliseconds(100);
  const auto store = Connect();
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 1'100'000)));
  ASSERT_OK(store->PutRecord(TombstoneOf("t", 1), 0));
  for (int i = 0; i < 1000 && !Keys().empty(); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(Keys().empty());
  EXPECT_EQ(store->GetSnapshot("x").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store->PutRecord(RecordOf("s", 1, 1, "", {"x"}), 0).code(), StatusCode::kFailedPrecondition);
}

TEST_F(RedisStoreTest, AnEvictedPieceIsDataLossAndAPutHealsIt) {
  Start();
  const auto store = Connect();
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 3'000'000)));
  ASSERT_OK(store->PutRecord(Expiring(RecordOf("s", 1, 1, "", {"x"}), std::chrono::hours(1)), 0));
  Command({"DEL", "efla:snapshot:x:1"});
  const auto bytes = store->GetSnapshot("x");
  EXPECT_EQ(bytes.status().code(), StatusCode::kDataLoss) << bytes.status();
  EXPECT_EQ(store->PutRecord(RecordOf("t", 1, 1, "", {"x"}), 0).code(), StatusCode::kFailedPrecondition);
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 3'000'000)));
  EXPECT_TRUE(*store->GetSnapshot("x") == BytesOf("x", 3'000'000));
  EXPECT_GT(MsToLive("efla:snapshot:x:1"), 3'600'000);
  Command({"SETRANGE", "efla:snapshot:x:1", "77", "!!!"});
  EXPECT_EQ(store->GetSnapshot("x").status().code(), StatusCode::kDataLoss);
}

TEST_F(RedisStoreTest, ADamagedRecordCanBeDeletedAndMadeAnew) {
  Start();
  const auto store = Connect();
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 100)));
  for (const char* field : {"epoch", "revision"}) {
    ASSERT_OK(store->PutRecord(RecordOf(field, 3, 1, "a", {"x"}), 0));
    Command({"HSET", std::string("efla:record:") + field, field, "7 or so"});
    const absl::Status status = store->GetRecord(field).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status;
    EXPECT_NE(status.ToString().find(field), std::string::npos) << status;
    EXPECT_EQ(store->PutRecord(RecordOf(field, 3, 2, "a", {"x"}), 3).code(), StatusCode::kAborted);
    ASSERT_OK(store->PutRecord(TombstoneOf(field, 1), 0));
    EXPECT_TRUE(store->GetRecord(field)->deleted);
    EXPECT_EQ(Command({"HEXISTS", "efla:snapshot:x", std::string("r:") + field}).integer, 0);
    ASSERT_OK(store->PutRecord(RecordOf(field, 2, 1, "b", {"x"}), 0));
  }
}

TEST_F(RedisStoreTest, AFullServerIsResourceExhaustedAndStillTakesDeletions) {
  Start({"--maxmemory", "8mb", "--maxmemory-policy", "noeviction"});
  const auto store = Connect();
  ASSERT_OK(store->PutRecord(RecordOf("s", 1, 1, "a"), 0));
  const absl::Status status = store->PutSnapshot("x", BytesOf("x", 13'485'024));
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(store->GetSnapshot("x").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Keys(), std::vector<std::string>{"efla:record:s"});  // nothing is left to fill it
  Command({"CONFIG", "SET", "maxmemory", "100kb"});
  EXPECT_EQ(store->PutRecord(RecordOf("t", 1, 1, "a"), 0).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store->GetRecord("t").status().code(), StatusCode::kNotFound);
  ASSERT_OK(store->PutRecord(TombstoneOf("s", 2), 1));
  EXPECT_TRUE(store->GetRecord("s")->deleted);
  EXPECT_EQ(store->stats().breaker, RedisStore::Breaker::kClosed);
}

TEST_F(RedisStoreTest, LoginsAreCheckedAndPasswordsNeverShown) {
  Start({"--requirepass", "right", "--user", "app", "on", ">secret", "~efla:*", "+@all"});
  RedisAddress address = server_->address();
  for (const auto& [user, password] : std::vector<std::pair<std::string, std::string>>{
           {"", ""}, {"", "wrong-secret"}, {"app", "wrong-secret"}, {"nobody", "secret"}}) {
    address.user = user;
    address.password = password;
    const absl::Status status = Connect(address)->Ping();
    EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << status;
    EXPECT_EQ(status.ToString().find("secret"), std::string::npos) << status;
  }
  address.user = "";
  address.password = "right";
  address.database = 3;
  ASSERT_OK(Connect(address)->Ping());
  address = *RedisAddress::Parse(absl::StrFormat("redis://app:secret@127.0.0.1:%d", server_->port()));
  const auto store = Connect(address);
  ASSERT_OK(store->PutSnapshot("x", BytesOf("x", 100)));
  ASSERT_OK(store->PutRecord(RecordOf("s", 1, 1, "", {"x"}), 0));
  options_.key_prefix = "elsewhere:";
  EXPECT_EQ(Connect(address)->GetRecord("s").status().code(), StatusCode::kPermissionDenied);
  address.database = 9999;
  EXPECT_FALSE(Connect(address)->Ping().ok());
}

TEST_F(RedisStoreTest, APasswordThatNobodyAsksForIsRefused) {
  Start();
  RedisAddress address = server_->address();
  address.host = "localhost";
  ASSERT_OK(Connect(address)->Ping());
  address.password = "secret";
  const absl::Status status = Connect(address)->Ping();
  EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << status;
  EXPECT_EQ(status.ToString().find("secret"), std::string::npos) << status;
}

TEST_F(RedisStoreTest, OptionsOutOfRangeAreRefused) {
  options_.max_connections = 1;
  const auto store = RedisStore::Create({}, options_);
  EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(store.status().ToString().find("max_connections is 1; the least is 2"), std::string::npos);
}

// ---- A server that goes, comes, waits, or cannot be reached ----

TEST_F(RedisStoreTest, AServerThatIsNotThereOpensTheBreakerUntilItComes) {
  Start();
  server_->Kill();
  options_.breaker_open = milliseconds(1000);
  options_.breaker_failures = 3;
  const auto store = Connect();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(store->stats().breaker, RedisStore::Breaker::kClosed);
    const absl::Status status = store->Ping();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.ToString().find(absl::StrFormat("redis://127.0.0.1:%d/0", server_->port())),
              std::string::npos)
        << status;
  }
  EXPECT_EQ(store->stats().breaker, RedisStore::Breaker::kOpen);
  const absl::Status refused = store->Ping();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.ToString().find("next try in"), std::string::npos) << refused;
  EXPECT_EQ(store->stats().failures, 3u);
  EXPECT_EQ(store->stats().refused_by_breaker, 1u);

  std::this_thread::sleep_for(milliseconds(1050));
  EXPECT_FALSE(store->Ping().ok());  // the probe, which opens it again
  EXPECT_EQ(store->stats().failures, 4u);
  EXPECT_FALSE(store->Ping().ok());
  EXPECT_EQ(store->stats().failures, 4u);

  server_->Start();
  std::this_thread::sleep_for(milliseconds(1050));
  ASSERT_OK(store->Ping());
  EXPECT_EQ(store->stats().breaker, RedisStore::Breaker::kClosed);
}

TEST_F(RedisStoreTest, AServerThatLoadsItsDataIsWaitedFor) {
  // 3 ms for each key that it loads, and an answer between any two.
  Start({"--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024"});
  const std::string value(2000, 'x');
  for (int i = 0; i < 500; ++i) Command({"SET", absl::StrFormat("key%d", i), value});
  Command({"SAVE"});
  direct_.reset();
  server_->Kill();
  server_->Start();
  const auto store = Connect();
  int waits = 0;
  const absl::Status loading = store->PingLoaded(milliseconds(0), [&] { ++waits; });
  EXPECT_EQ(loading.code(), StatusCode::kUnavailable);
  EXPECT_NE(loading.ToString().find("LOADING"), std::string::npos) << loading;
  EXPECT_EQ(waits, 0) << "no patience";
  ASSERT_OK(store->PingLoaded(std::chrono::seconds(60), [&] { ++waits; }));
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(store->stats().failures, 0u);
  ASSERT_OK(store->PingLoaded(milliseconds(0), [&] { ++waits; }));
  EXPECT_EQ(waits, 1);
}

TEST_F(RedisStoreTest, AServerThatIsNotThereIsNotWaitedFor) {
  Start();
  server_->Kill();
  const auto begin = SteadyClock::now();
  const absl::Status status =
      Connect()->PingLoaded(std::chrono::seconds(60), [] { ADD_FAILURE() << "waits"; });
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
  EXPECT_LT(SteadyClock::now() - begin, std::chrono::seconds(10));
}

TEST_F(RedisStoreTest, TellsWhatAFullServerForgets) {
  Start({"--maxmemory-policy", "allkeys-lru", "--user", "app", "on", ">secret", "~efla:*", "+ping"});
  EXPECT_EQ(*Connect()->MaxMemoryPolicy(), "allkeys-lru");
  Command({"CONFIG", "SET", "maxmemory-policy", "noeviction"});
  EXPECT_EQ(*Connect()->MaxMemoryPolicy(), "noeviction");
  RedisAddress address = server_->address();
  address.user = "app";
  address.password = "secret";
  const auto store = Connect(address);
  ASSERT_OK(store->Ping());
  EXPECT_EQ(store->MaxMemoryPolicy().status().code(), StatusCode::kPermissionDenied);
}

TEST_F(RedisStoreTest, ConnectionsThatARestartHasEndedAreReplacedUnseen) {
  Start();
  const auto store = Connect();
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) threads.emplace_back([&] { EXPECT_TRUE(store->Ping().ok()); });
  for (std::thread& thread : threads) thread.join();
  server_->Kill();
  server_->Start();
  for (int i = 0; i < 10; ++i) ASSERT_OK(store->Ping());
  EXPECT_EQ(store->stats().failures, 0u);
}

TEST_F(RedisStoreTest, APausedServerCostsTheTimeOutThenNothing) {
  Start();
  options_.command_timeout = milliseconds(150);
  options_.breaker_failures = 2;
  options_.breaker_open = milliseconds(200);
  const auto store = Connect();
  ASSERT_OK(store->PutRecord(RecordOf("s", 1, 1, "a"), 0));
  server_->Pause();
  const auto begin = SteadyClock::now();
  const absl::Status put = store->PutRecord(RecordOf("s", 2, 1, "b"), 1);
  const auto took = SteadyClock::now() - begin;
  EXPECT_EQ(put.code(), StatusCode::kUnavailable);
  EXPECT_NE(put.ToString().find("may have been done"), std::string::npos) << put;
  EXPECT_GE(took, milliseconds(150));
  EXPECT_LT(took, milliseconds(2000));
  EXPECT_FALSE(store->GetSnapshot("x").ok());
  const auto breaker_begin = SteadyClock::now();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(store->Ping().code(), StatusCode::kUnavailable);
  EXPECT_LT(SteadyClock::now() - breaker_begin, milliseconds(500));
  server_->Resume();
  std::this_thread::sleep_for(milliseconds(220));
  // What timed out was carried out after all; the record says so.
  const auto record = store->GetRecord("s");
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->epoch, 2u);
  EXPECT_EQ(record->owner, "b");
}

TEST_F(RedisStoreTest, APartitionIsATimeOut) {
  options_.command_timeout = milliseconds(100);
  options_.connect_timeout = milliseconds(100);
  RedisAddress address;
  address.host = "127.0.0.1";
  {
    FreePort silent(16);  // takes connections and says nothing
    address.port = silent.port();
    const auto begin = SteadyClock::now();
    EXPECT_EQ(Connect(address)->Ping().code(), StatusCode::kUnavailable);
    EXPECT_LT(SteadyClock::now() - begin, milliseconds(1500));
    const auto store = Connect(address);
    EXPECT_EQ(store->PutSnapshot("x", BytesOf("x", 13'485'024)).code(), StatusCode::kUnavailable);
  }
  FreePort full(0);  // takes no connection once its queue is full
  address.port = full.port();
  std::vector<int> waiting;
  absl::Status status;
  for (int i = 0; i < 8 && status.ToString().find("cannot connect") == std::string::npos; ++i) {
    std::vector<std::unique_ptr<RedisConnection>> connections;
    const auto begin = SteadyClock::now();
    status = Connect(address)->Ping();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
    EXPECT_LT(SteadyClock::now() - begin, milliseconds(1500));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(full.port()));
    (void)!connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to));
    waiting.push_back(fd);
  }
  EXPECT_NE(status.ToString().find("timed out"), std::string::npos) << status;
  for (const int fd : waiting) close(fd);
}

TEST_F(RedisStoreTest, AnAddressThatDoesNotAnswerLeavesTheOthersTheirTime) {
  Start();
  FreePort full(0);  // takes no connection once its queue is full
  const SocketAddress silent = Loopback(full.port());
  std::vector<int> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    (void)!connect(waiting.back(), reinterpret_cast<const sockaddr*>(&silent.bytes), silent.size);
  }
  const auto connect_by = [&](const std::vector<SocketAddress>& addresses, milliseconds time) {
    HostLookup host([addresses] { return addresses; });
    return RedisConnection::Connect(server_->address(), host, After(time)).status();
  };
  auto begin = SteadyClock::now();
  ASSERT_OK(connect_by({silent, silent, Loopback(server_->port())}, milliseconds(900)));
  EXPECT_GE(SteadyClock::now() - begin, milliseconds(600)) << "two shares of three";
  begin = SteadyClock::now();
  const absl::Status none = connect_by({silent, silent}, milliseconds(300));
  EXPECT_EQ(none.code(), StatusCode::kUnavailable);
  EXPECT_NE(none.ToString().find("timed out"), std::string::npos) << none;
  EXPECT_LT(SteadyClock::now() - begin, milliseconds(1500));
  EXPECT_NE(connect_by({}, milliseconds(300)).ToString().find("no address"), std::string::npos);
  for (const int fd : waiting) close(fd);
}

TEST_F(RedisStoreTest, ManyTransfersLeaveRoomForShortCalls) {
  Start();
  options_.max_connections = 4;
  const auto store = Connect();
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      const auto bytes = BytesOf("bulk", 6'000'000);
      for (int i = 0; !done; ++i) {
        EXPECT_TRUE(store->PutSnapshot(absl::StrFormat("s%d.%d", t, i % 3), bytes).ok());
        EXPECT_TRUE(store->GetSnapshot(absl::StrFormat("s%d.%d", t, i % 3)).ok());
      }
    });
  }
  auto longest = SteadyClock::duration::zero();
  for (int i = 0; i < 50; ++i) {
    const auto begin = SteadyClock::now();
    EXPECT_TRUE(store->RenewLease("a", "host:1", std::chrono::seconds(10)).ok());
    longest = std::max(longest, SteadyClock::now() - begin);
    EXPECT_LE(store->stats().connections, 4);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(longest, milliseconds(1000));
}

// Between a client and the server: passes on what comes, until told to swallow a reply and hang up.
class Proxy {
 public:
  explicit Proxy(int server_port) : server_port_(server_port), thread_([this] { Run(); }) {}
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }
  int port() const { return listener_.port(); }
  void SwallowNextReply() { swallow_ = true; }
  bool swallowed() const { return !swallow_; }

 private:
  struct Pair {
    int client = -1, server = -1;
  };
  static bool Forward(int from, int to) {
    char bytes[65536];
    const ssize_t count = recv(from, bytes, sizeof(bytes), 0);
    return count > 0 && send(to, bytes, static_cast<size_t>(count), MSG_NOSIGNAL) == count;
  }
  void Run() {
    std::vector<Pair> pairs;
    const auto hang_up = [](Pair& pair) {
      close(pair.client);
      close(pair.server);
      pair.client = -1;
    };
    while (!stop_) {
      std::vector<pollfd> waiting = {{listener_.fd(), POLLIN, 0}};
      for (const Pair& pair : pairs) {
        waiting.push_back({pair.client, POLLIN, 0});
        waiting.push_back({pair.server, POLLIN, 0});
      }
      if (poll(waiting.data(), waiting.size(), 5) <= 0) continue;
      for (size_t i = 0; i < pairs.size(); ++i) {
        Pair& pair = pairs[i];
        if (waiting[1 + 2 * i].revents != 0 && !Forward(pair.client, pair.server)) {
          hang_up(pair);
        } else if (waiting[2 + 2 * i].revents != 0 &&
                   (swallow_.exchange(false) || !Forward(pair.server, pair.client))) {
          hang_up(pair);
        }
      }
      std::erase_if(pairs, [](const Pair& pair) { return pair.client < 0; });
      if (waiting[0].revents != 0) {
        pairs.push_back({accept(listener_.fd(), nullptr, nullptr), ConnectTo(server_port_)});
      }
    }
    for (Pair& pair : pairs) hang_up(pair);
  }

  const int server_port_;
  FreePort listener_{16};
  std::atomic<bool> stop_ = false, swallow_ = false;
  std::thread thread_;
};

// A claim raises the epoch. Sent once more after its reply was lost, it must not lose against itself.
TEST_F(RedisStoreTest, APutWhoseReplyWasLostIsDoneOnce) {
  Start();
  Proxy proxy(server_->port());
  RedisAddress address = server_->address();
  address.port = proxy.port();
  const auto store = Connect(address);
  ASSERT_OK(store->PutRecord(RecordOf("s", 1, 1, "a"), 0));
  for (uint64_t epoch = 1; epoch <= 20; ++epoch) {
    proxy.SwallowNextReply();
    ASSERT_OK(store->PutRecord(RecordOf("s", epoch + 1, 1, absl::StrFormat("owner%d", epoch)), epoch));
    ASSERT_TRUE(proxy.swallowed());
  }
  EXPECT_EQ(store->GetRecord("s")->epoch, 21u);
}

TEST_F(RedisStoreTest, KilledAtAnyMomentNothingAcknowledgedIsLost) {
  Start({"--appendonly", "yes", "--appendfsync", "always"});
  options_.breaker_open = milliseconds(20);
  const auto store = Connect();
  std::mutex mutex;
  std::map<std::string, uint64_t> acknowledged;
  std::atomic<bool> done = false;
  std::atomic<int> other_errors = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string session = absl::StrFormat("s%d", t);
      for (uint64_t revision = 1; !done;) {
        const std::string snapshot = absl::StrFormat("%s.%d", session, revision);
        absl::Status status = store->PutSnapshot(snapshot, BytesOf(snapshot, 1'500'000));
        if (status.ok()) {
          status = store->PutRecord(RecordOf(session, 1, revision, "a", {snapshot}), 1);
          if (absl::IsAborted(status) && revision == 1) {
            status = store->PutRecord(RecordOf(session, 1, revision, "a", {snapshot}), 0);
          }
        }
        if (status.ok()) {
          const std::lock_guard lock(mutex);
          acknowledged[session] = revision++;
        } else if (!absl::IsUnavailable(status)) {
          ADD_FAILURE() << status;
          ++other_errors;
          return;
        }
      }
    });
  }
  std::mt19937 random(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(milliseconds(50 + random() % 150));
    server_->Kill();
    std::this_thread::sleep_for(milliseconds(random() % 50));
    server_->Start();
  }
  std::this_thread::sleep_for(milliseconds(300));
  for (int i = 0; i < 600; ++i) {  // a busy machine takes longer until each has had its first
    {
      const std::lock_guard lock(mutex);
      if (acknowledged.size() == 4) break;
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(other_errors, 0);
  EXPECT_EQ(acknowledged.size(), 4u);
  for (const auto& [session, revision] : acknowledged) {
    absl::StatusOr<SessionRecord> record = store->GetRecord(session);
    for (int i = 0; i < 100 && absl::IsUnavailable(record.status()); ++i) {  // it may be loading still
      std::this_thread::sleep_for(milliseconds(50));
      record = store->GetRecord(session);
    }
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_GE(record->revision, revision);
    const auto bytes = store->GetSnapshot(record->snapshots.at(0));
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_TRUE(*bytes == BytesOf(record->snapshots.at(0), 1'500'000));
  }
}

}  // namespace
}  // namespace efla
