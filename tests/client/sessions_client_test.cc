#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
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

TEST_F(SessionsClientTest, AnIdThatMetadataCannotCarryIsForTheServerToRefuse) {
  server_.sessions.answer = [](const std::string&, const std::string& id, v1::Session&) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "session_id is \"" + id + "\"");
  };
  for (const std::string id : {"\u00fc", "a\nb", "a b", "\x7f"}) {
    v1::GetSessionRequest get;
    get.set_session_id(id);
    const absl::Status status = client_.GetSession(get, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status.ToString();
  }
}

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

TEST_F(SessionsClientTest, AnImportAsksForNoMoreAfterARefusalOrAnError) {
  server_.sessions.import_limit = 1 << 20;
  const auto endless = [] { return absl::StatusOr<std::string>(std::string(1 << 20, 'a')); };
  EXPECT_EQ(client_.Import({}, endless, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const auto unreadable = [] { return absl::StatusOr<std::string>(absl::NotFoundError("no file")); };
  EXPECT_EQ(client_.Import({}, unreadable, {}).status(), absl::NotFoundError("no file"));
}

TEST(FileOutputTest, ALinkStaysAndItsTargetIsReplaced) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(testing::TempDir()) / "efla_file_output_links";
  fs::remove_all(folder);
  fs::create_directories(folder / "other");
  fs::create_symlink("other/file", folder / "link");
  for (const std::string bytes : {"made", "replaced"}) {
    ASSERT_TRUE(WriteFile(folder / "link", bytes).ok());
    EXPECT_TRUE(fs::is_symlink(folder / "link"));
    std::ifstream file(folder / "other/file");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "other"), {}), 1) << "nothing unfinished";
  fs::create_symlink("loop", folder / "loop");
  EXPECT_EQ(WriteFile(folder / "loop", "x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(WriteFile(folder, "x").code(), absl::StatusCode::kFailedPrecondition);
  fs::remove_all(folder);
}

TEST(FileOutputTest, PipesAndDevicesAreWrittenInto) {
  const std::string path = testing::TempDir() + "/efla_file_output_fifo";
  std::remove(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] {
    std::ifstream file(path);
    read.assign(std::istreambuf_iterator<char>(file), {});
  });
  EXPECT_TRUE(WriteFile(path, "through").ok());
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(std::filesystem::is_fifo(path));
  std::remove(path.c_str());
  const absl::Status full = WriteFile("/dev/full", "x");
  EXPECT_EQ(full.code(), absl::StatusCode::kFailedPrecondition) << full;
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
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
