#include "server/options.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace efla {
namespace {

std::variant<Options, ExitStatus> Parse(std::vector<const char*> flags) {
  flags.insert(flags.begin(), "efla_server");
  return ParseOptions(static_cast<int>(flags.size()), flags.data());
}

Options Good(const std::vector<const char*>& flags) {
  std::variant<Options, ExitStatus> parsed = Parse(flags);
  EXPECT_TRUE(std::holds_alternative<Options>(parsed));
  return std::holds_alternative<Options>(parsed) ? std::get<Options>(parsed) : Options{};
}

// The one line on stderr.
std::string Refusal(const std::vector<const char*>& flags) {
  testing::internal::CaptureStderr();
  const std::variant<Options, ExitStatus> parsed = Parse(flags);
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(std::holds_alternative<ExitStatus>(parsed));
  if (std::holds_alternative<ExitStatus>(parsed)) {
    EXPECT_EQ(std::get<ExitStatus>(parsed).code, 2);
  }
  EXPECT_EQ(line.find('\n'), line.size() - 1) << line;
  return line;
}

TEST(OptionsTest, DirectoryNamesTheModel) {
  EXPECT_EQ(Good({"--checkpoint", "/models/efla-340m"}).model_name, "efla-340m");
  EXPECT_EQ(Good({"--checkpoint", "/models/efla-340m/"}).model_name, "efla-340m");
  EXPECT_EQ(Good({"--checkpoint", "/models/x", "--model-name", "mine"}).model_name, "mine");
  EXPECT_EQ(Good({"--load-format", "dummy", "--preset", "340m"}).model_name, "340m");
}

TEST(OptionsTest, TypedValues) {
  const Options options =
      Good({"--checkpoint=c", "--listen=[::1]:0", "--admin=127.0.0.1:1", "--drain-timeout=1.5",
            "--drain-delay=0.25", "--max-connection-age=0", "--keepalive-time=2", "--admin-generate",
            "--model-type=gated_efla", "--log-format=json", "--max-message-mib=3", "--debug-poison"});
  EXPECT_EQ(options.listen.host, "::1");
  EXPECT_EQ(options.listen.ToString(), "[::1]:0");
  EXPECT_EQ(options.admin.port, 1);
  EXPECT_EQ(options.drain_timeout.count(), 1500);
  EXPECT_EQ(options.drain_delay.count(), 250);
  EXPECT_EQ(options.max_connection_age.count(), 0);
  EXPECT_EQ(options.keepalive_time.count(), 2000);
  EXPECT_TRUE(options.admin_generate);
  EXPECT_EQ(options.model_type, ModelType::kGatedEfla);
  EXPECT_EQ(options.log_format, LogFormat::kJson);
  EXPECT_EQ(options.max_message_bytes, 3 << 20);
  EXPECT_TRUE(options.debug_poison);
}

TEST(OptionsTest, FileBeatsEnvironmentAndFlagBeatsFile) {
  const std::string file = testing::TempDir() + "/efla_options_test.toml";
  std::ofstream(file) << "checkpoint = \"/from/file\"\nmax-queue = 7\n";
  setenv("EFLA_SERVER_MAX_QUEUE", "5", 1);
  setenv("EFLA_SERVER_MAX_RUNNING", "6", 1);
  const Options options = Good({"--config", file.c_str()});
  EXPECT_EQ(options.checkpoint, "/from/file");
  EXPECT_EQ(options.max_queue, 7);
  EXPECT_EQ(options.max_running, 6);
  EXPECT_EQ(Good({"--config", file.c_str(), "--max-queue=9"}).max_queue, 9);
  EXPECT_EQ(Good({"--checkpoint=c"}).max_queue, 5);
  std::ofstream(file) << "max-qeue = 7\n";
  EXPECT_EQ(Refusal({"--config", file.c_str(), "--checkpoint=c"}),
            "efla_server: " + file + ": has the key \"max-qeue\", which is not known; see --help\n");
  std::ofstream(file) << "max-queue = 7\nfoo\n";
  EXPECT_EQ(Refusal({"--config", file.c_str(), "--checkpoint=c"}),
            "efla_server: " + file + ": has the key \"foo\", which is not known; see --help\n");
  std::ofstream(file) << "[server]\nmax-queue = 7\n";
  EXPECT_EQ(Refusal({"--config", file.c_str(), "--checkpoint=c"}),
            "efla_server: " + file + ": has a section [server]; there are none\n");
  std::ofstream(file) << "config = other.toml\n";
  EXPECT_EQ(Refusal({"--config", file.c_str(), "--checkpoint=c"}),
            "efla_server: " + file + ": has the key \"config\", which is for the command line only\n");
  unsetenv("EFLA_SERVER_MAX_QUEUE");
  unsetenv("EFLA_SERVER_MAX_RUNNING");
  std::filesystem::remove(file);
}

TEST(OptionsTest, ProtectionThatWasLeftEmptyIsRefused) {
  const std::string file = testing::TempDir() + "/efla_options_empty_test.toml";
  for (const std::string flag : {"auth-file", "tls-cert", "tls-key", "tls-client-ca"}) {
    std::string variable = "EFLA_SERVER_" + flag;
    for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
    setenv(variable.c_str(), "", 1);
    EXPECT_NE(Refusal({"--checkpoint=c"}).find(variable + ": is empty"), std::string::npos) << flag;
    unsetenv(variable.c_str());
    std::ofstream(file) << "checkpoint = \"c\"\n" << flag << " = \"\"\n";
    EXPECT_NE(Refusal({"--config", file.c_str()}).find("--" + flag), std::string::npos) << flag;
  }
  std::filesystem::remove(file);
}

TEST(OptionsTest, BadValuesAreNamedInOneLine) {
  EXPECT_NE(Refusal({}).find("--checkpoint"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--max-queue=0"}).find("--max-queue"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--max-batch-tokens=100"}).find("multiple of 64"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--listen=here"}).find("HOST:PORT"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--device=tpu"}).find("--device"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--nonsense"}).find("--nonsense"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--preset=340m"}).find("--preset"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--state-slots=1"}).find("--state-slots: is 1"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--state-slots=4", "--max-running=5"}).find("--state-slots is 4"),
            std::string::npos);
}

TEST(OptionsTest, SessionsHaveDefaultsForOneMachine) {
  const Options options = Good({"--checkpoint=c"});
  EXPECT_EQ(options.session_dir, "");
  EXPECT_EQ(options.session_store, "");
  EXPECT_EQ(options.session_host_bytes, int64_t{1} << 30);
  EXPECT_EQ(options.session_device_idle.count(), 15'000);
  EXPECT_LT(options.prefix_cache_slots, 0) << "a share of the state slots";
}

TEST(OptionsTest, BytesMayHaveUnits) {
  EXPECT_EQ(Good({"--checkpoint=c", "--session-host-bytes=12345"}).session_host_bytes, 12345);
  EXPECT_EQ(Good({"--checkpoint=c", "--session-host-bytes=2GiB"}).session_host_bytes, int64_t{2} << 30);
  EXPECT_EQ(Good({"--checkpoint=c", "--session-host-bytes=1.5 mb"}).session_host_bytes, 1'500'000);
  EXPECT_EQ(Good({"--checkpoint=c", "--session-dir=d", "--session-dir-bytes=1TiB"}).session_dir_bytes,
            int64_t{1} << 40);
  for (const char* bad : {"--session-host-bytes=much", "--session-host-bytes=-1", "--session-host-bytes=1XB",
                          "--session-host-bytes=2000TiB", "--session-host-bytes=nan"}) {
    EXPECT_NE(Refusal({"--checkpoint=c", bad}).find("--session-host-bytes"), std::string::npos) << bad;
  }
}

TEST(OptionsTest, BadSessionFlagsAreNamed) {
  EXPECT_NE(Refusal({"--checkpoint=c", "--session-store=http://x"}).find("--session-store"),
            std::string::npos);
  const std::string secret = Refusal({"--checkpoint=c", "--session-store=redis://:hunter2@host:port"});
  EXPECT_EQ(secret.find("hunter2"), std::string::npos) << secret;
  EXPECT_NE(Refusal({"--checkpoint=c", "--session-dir-bytes=5"}).find("--session-dir"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--prefix-cache-slots=-1"}).find("auto"), std::string::npos);
  EXPECT_NE(
      Refusal({"--checkpoint=c", "--state-slots=8", "--prefix-cache-slots=9"}).find("--state-slots is 8"),
      std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--replica-name=a b"}).find("--replica-name"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--advertise=here"}).find("--advertise"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--advertise=here:0"}).find("1 to 65535"), std::string::npos);
  EXPECT_NE(Refusal({"--checkpoint=c", "--session-ttl=0"}).find("--session-ttl"), std::string::npos);
}

TEST(OptionsTest, AnAdvertisedIpv6AddressNeedsNoBrackets) {
  const auto advertised = [](const char* flag) { return Good({"--checkpoint=c", flag}).advertise; };
  EXPECT_EQ(advertised("--advertise=10.0.0.7:50051"), "10.0.0.7:50051");
  EXPECT_EQ(advertised("--advertise=fd00::1:50051"), "[fd00::1]:50051");
  EXPECT_EQ(advertised("--advertise=[fd00::1]:50051"), "[fd00::1]:50051");
  EXPECT_EQ(advertised("--advertise=1:2:3:4:5:6:7:8:9090"), "[1:2:3:4:5:6:7:8]:9090");
  EXPECT_EQ(advertised("--advertise=::ffff:10.0.0.7:80"), "[::ffff:10.0.0.7]:80");
  for (const char* bad : {"--advertise=fd00::1", "--advertise=a:b:1", "--advertise=fd00::1:65536",
                          "--advertise=fd00::1:", "--advertise=1:2:3:4:5:6:7:8"}) {
    EXPECT_NE(Refusal({"--checkpoint=c", bad}).find("HOST:PORT"), std::string::npos) << bad;
  }
  EXPECT_NE(Refusal({"--checkpoint=c", "--advertise=fd00::1:0"}).find("1 to 65535"), std::string::npos);
}

TEST(OptionsTest, RefusalsAreJsonWhereTheLogIs) {
  const std::string line = Refusal({"--checkpoint=c", "--log-format=json", "--max-queue=0"});
  EXPECT_EQ(line.find("{\"ts\":\""), 0u) << line;
  EXPECT_NE(line.find("\"event\":\"bad_usage\",\"msg\":\"--max-queue"), std::string::npos) << line;
  EXPECT_EQ(line.substr(line.size() - 2), "}\n") << line;
  EXPECT_EQ(Refusal({"--checkpoint=c", "--nonsense", "--log-format", "json"}).find('{'), 0u);
  EXPECT_EQ(Refusal({"--log-format=json", "--log-format=text", "--max-queue=0"}).find('{'),
            std::string::npos);
  setenv("EFLA_SERVER_LOG_FORMAT", "json", 1);
  EXPECT_EQ(Refusal({"--checkpoint=c", "--max-queue=0"}).find('{'), 0u);
  EXPECT_EQ(Refusal({"--log-format=text", "--max-queue=0"}).find('{'), std::string::npos);
  unsetenv("EFLA_SERVER_LOG_FORMAT");
}

TEST(ListenAddressTest, RefusesWhatIsNotHostAndPort) {
  for (const char* text :
       {"", ":", "host", "host:", ":80", "host:-1", "host:65536", "host:1x", "a:b:1", "[]:1"}) {
    EXPECT_FALSE(ListenAddress::Parse(text).ok()) << text;
  }
  EXPECT_EQ(ListenAddress::Parse("0.0.0.0:50051")->port, 50051);
}

}  // namespace
}  // namespace efla
