#include <string>
#include <vector>

#include "client/client.h"
#include "client/file_output.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace efla {
namespace {

class SessionsClientTest : public ::testing::Test {
 protected:
  FakeServer server_;
  Client client_{ClientOptions{.target = server_.target()}};
};

TEST_F(SessionsClientTest, EveryCallReachesItsMethod) {
  server_.sessions.answer = [](const std::string& method, const std::string& id, v1::Session& session) {
    session.set_session_id(method + " " + id);
    return grpc::Status::OK;
  };
  v1::CreateSessionRequest create;
  create.set_session_id("s");
  EXPECT_EQ(client_.CreateSession(create, {})->session_id(), "Create s");
  v1::GetSessionRequest get;
  get.set_session_id("s");
  EXPECT_EQ(client_.GetSession(get, {})->session_id(), "Get s");
  v1::ListSessionsRequest list;
  list.set_prefix("p");
  EXPECT_EQ(client_.ListSessions(list, {})->sessions(0).session_id(), "List p");
  v1::AppendRequest append;
  append.set_session_id("s");
  EXPECT_EQ(client_.Append(append, {})->session().session_id(), "Append s");
  v1::ForkRequest fork;
  fork.set_session_id("s");
  EXPECT_EQ(client_.Fork(fork, {})->children(0).session_id(), "Fork s");
  v1::MarkRequest mark;
  mark.set_session_id("s");
  EXPECT_EQ(client_.Mark(mark, {})->session_id(), "Mark s");
  v1::RewindRequest rewind;
  rewind.set_session_id("s");
  EXPECT_EQ(client_.Rewind(rewind, {})->session_id(), "Rewind s");
  v1::MoveSessionRequest move;
  move.set_session_id("s");
  EXPECT_EQ(client_.MoveSession(move, {})->session_id(), "Move s");
  v1::DeleteSessionRequest remove;
  remove.set_session_id("s");
  EXPECT_TRUE(client_.DeleteSession(remove, {}).ok());
}

TEST_F(SessionsClientTest, AServersStatusKeepsItsCodeAndMessage) {
  server_.sessions.answer = [](const std::string&, const std::string&, v1::Session&) {
    return grpc::Status(grpc::StatusCode::ABORTED, "session s has revision 7; the call expects 6");
  };
  const absl::Status status = client_.GetSession({}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "session s has revision 7; the call expects 6");
  EXPECT_EQ(client_.DeleteSession({}, {}).code(), absl::StatusCode::kAborted);
}

TEST_F(SessionsClientTest, ASnapshotComesWholeOrNotAtAll) {
  server_.sessions.snapshot = std::string((5 << 20) + 3, 'x');
  server_.sessions.snapshot[1 << 20] = 'y';
  absl::StatusOr<std::string> snapshot = client_.Export({}, {});
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(*snapshot, server_.sessions.snapshot);
  server_.sessions.export_end = grpc::Status(grpc::StatusCode::DATA_LOSS, "damaged");
  EXPECT_EQ(client_.Export({}, {}).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SessionsClientTest, ASnapshotIsSentInChunksAfterItsOptions) {
  std::string bytes((3 << 20) + 17, 'a');
  bytes.back() = 'z';
  v1::ImportOptions options;
  options.set_session_id("s");
  absl::StatusOr<v1::Session> session = client_.Import(options, bytes, {});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(session->session_id(), "s");
  EXPECT_EQ(server_.sessions.imported, bytes);
  EXPECT_LE(server_.sessions.largest_chunk, size_t{1} << 20);
  EXPECT_EQ(server_.sessions.options_at, 0) << "first";
}

TEST_F(SessionsClientTest, ARefusalEndsAnImportEarly) {
  server_.sessions.import_limit = 1 << 20;
  absl::StatusOr<v1::Session> session = client_.Import({}, std::string(64 << 20, 'a'), {});
  EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(server_.sessions.imported.size(), size_t{3} << 20);
}

TEST(FileOutputTest, AFileIsWholeOrAsItWas) {
  const std::string path = testing::TempDir() + "/efla_file_output_test";
  ASSERT_TRUE(WriteFile(path, std::string("a\0b", 3)).ok());
  ASSERT_TRUE(WriteFile(path, "second").ok());
  std::FILE* file = std::fopen(path.c_str(), "rb");
  char read[16] = {};
  EXPECT_EQ(std::fread(read, 1, sizeof(read), file), 6u);
  std::fclose(file);
  EXPECT_STREQ(read, "second");
  std::remove(path.c_str());
  const absl::Status status = WriteFile("/no/such/folder/file", "x");
  EXPECT_NE(status.message().find("/no/such/folder/file"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace efla
