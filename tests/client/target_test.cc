#include "client/target.h"

#include "gtest/gtest.h"

namespace efla {
namespace {

TEST(TargetTest, TakesHostAndPortApart) {
  const auto v4 = ParseHostPort("10.0.0.1:80"), v6 = ParseHostPort("[::1]:50051");
  ASSERT_TRUE(v4 && v6);
  EXPECT_EQ(v4->host, "10.0.0.1");
  EXPECT_EQ(v4->port, "80");
  EXPECT_EQ(v6->host, "::1");
  for (const char* bad :
       {"", "host", "host:", ":80", "host:0", "host:65536", "host:1x", "::1:80", "[]:1", "a/b:1"}) {
    EXPECT_FALSE(ParseHostPort(bad)) << bad;
  }
}

TEST(TargetTest, KnowsWhatStaysOnThisMachine) {
  for (const char* here :
       {"127.0.0.1:50051", "127.255.0.3:1", "localhost:50051", "LocalHost", "[::1]:50051", "::1",
        "[::ffff:127.0.0.1]:1", "unix:/run/efla", "unix:///run/efla", "unix-abstract:efla", "dns:localhost:1",
        "dns:///127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1"}) {
    EXPECT_TRUE(IsOnThisMachine(here)) << here;
  }
  for (const char* elsewhere :
       {"", "10.0.0.1:50051", "128.0.0.1:1", "0.0.0.0:1", "[::]:1", "[::2]:1", "[::ffff:10.0.0.1]:1",
        "localhost.example:1", "127.0.0.1.example:1", "dns:///efla:1", "dns://10.0.0.1/localhost:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1", "ipv4:127.0.0.1:1,", "xds:///localhost"}) {
    EXPECT_FALSE(IsOnThisMachine(elsewhere)) << elsewhere;
  }
}

}  // namespace
}  // namespace efla
