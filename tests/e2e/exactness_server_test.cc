// The product's claim: a request's tokens and log-probabilities do not change with what else the server does.
#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr int kTrafficStreams = 32;

// Streams of random prompts, lengths and sampling, a fifth of them cancelled on the way, until it goes.
class Traffic {
 public:
  Traffic(const ServerProcess& server, uint32_t vocab_size) {
    for (int i = 0; i < kTrafficStreams; ++i) {
      threads_.emplace_back(
          [this, channel = server.NewChannel(), vocab_size, i] { Run(channel, vocab_size, i); });
    }
  }
  ~Traffic() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  int num_ok() const { return num_ok_; }

 private:
  void Run(const std::shared_ptr<grpc::Channel>& channel, uint32_t vocab_size, int index) {
    std::mt19937 random(index);
    const auto stub = v1::Generation::NewStub(channel);
    while (!stop_) {
      std::vector<uint32_t> prompt(1 + random() % (index % 4 == 0 ? 300 : 20));
      for (uint32_t& id : prompt) id = random() % vocab_size;
      v1::GenerateRequest request = GreedyRequest(prompt, 1 + random() % 60);
      request.mutable_sampling()->set_temperature(static_cast<float>(random() % 3));
      grpc::ClientContext context;
      SetTimeout(context, kCallTimeout);
      const auto reader = stub->Generate(&context, request);
      const bool cancel = random() % 5 == 0;
      v1::GenerateResponse event;
      for (int events = 0; reader->Read(&event); ++events) {
        if (cancel && events == 3) context.TryCancel();
      }
      if (reader->Finish().ok()) ++num_ok_;
    }
  }

  std::atomic<bool> stop_ = false;
  std::atomic<int> num_ok_ = 0;
  std::vector<std::thread> threads_;
};

struct Probe {
  std::string name;
  v1::GenerateRequest request;
};

std::vector<Probe> Probes(const std::vector<int>& lengths, uint32_t vocab_size, uint32_t max_tokens) {
  std::mt19937 random(20);
  std::vector<Probe> probes;
  for (int length : lengths) {
    std::vector<uint32_t> prompt(length);
    for (uint32_t& id : prompt) id = random() % vocab_size;
    v1::GenerateRequest request = GreedyRequest(prompt, max_tokens);
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(4);
    probes.push_back({absl::StrFormat("greedy, prompt of %d", length), request});
    request.mutable_sampling()->set_temperature(0.8f);
    request.mutable_sampling()->set_seed(length);
    probes.push_back({absl::StrFormat("sampled, prompt of %d", length), request});
    request.mutable_sampling()->set_top_k(40);
    request.mutable_sampling()->set_top_p(0.9f);
    request.mutable_sampling()->set_min_p(0.01f);
    probes.push_back({absl::StrFormat("sampled with cuts, prompt of %d", length), request});
  }
  return probes;
}

std::vector<Reply> Ask(const ServerProcess& server, const std::vector<Probe>& probes) {
  const auto stub = v1::Generation::NewStub(server.NewChannel());
  std::vector<Reply> replies;
  for (const Probe& probe : probes) replies.push_back(Generate(*stub, probe.request));
  return replies;
}

v1::ScoreResponse ScoreOf(const ServerProcess& server, const v1::GenerateRequest& of) {
  v1::ScoreRequest request;
  *request.mutable_token_ids() = of.token_ids();
  request.set_top_logprobs(3);
  v1::ScoreResponse response;
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  const grpc::Status status =
      v1::Generation::NewStub(server.NewChannel())->Score(&context, request, &response);
  EXPECT_TRUE(status.ok()) << ToString(status);
  return response;
}

void ExpectSameScores(const v1::ScoreResponse& a, const v1::ScoreResponse& b, const std::string& what) {
  ASSERT_EQ(a.logprobs_size(), b.logprobs_size()) << what;
  ASSERT_GT(a.logprobs_size(), 0) << what;
  for (int i = 0; i < a.logprobs_size(); ++i) {
    ASSERT_TRUE(SameBits(a.logprobs(i), b.logprobs(i)))
        << what << ", position " << i << ": " << a.logprobs(i).ShortDebugString() << " and "
        << b.logprobs(i).ShortDebugString();
  }
}

struct ExactnessCase {
  std::string name;
  std::string folder;
  uint32_t vocab_size;
  uint32_t max_tokens;
  std::vector<int> prompt_lengths;
};

void PrintTo(const ExactnessCase& exactness, std::ostream* out) { *out << exactness.name; }

const std::vector<int> kAllLengths = {1, 9, 64, 65, 200, 777};

class ExactnessServerTest : public ::testing::TestWithParam<ExactnessCase> {
 protected:
  static std::unique_ptr<ServerProcess> Start(int max_batch_tokens) {
    return ServerProcess::Start(SourceDir() / GetParam().folder,
                                {"--max-batch-tokens", std::to_string(max_batch_tokens), "--state-slots",
                                 "48", "--max-running", "40"});
  }
  const std::vector<Probe> probes_ =
      Probes(GetParam().prompt_lengths, GetParam().vocab_size, GetParam().max_tokens);
};

TEST_P(ExactnessServerTest, ARequestIsTheSameAloneAndAmongOthersBitForBit) {
  const auto server = Start(512);
  ASSERT_NE(server, nullptr);
  const std::vector<Reply> alone = Ask(*server, probes_);
  const v1::ScoreResponse score_alone = ScoreOf(*server, probes_.back().request);
  Traffic traffic(*server, GetParam().vocab_size);
  double busiest = 0;
  ASSERT_TRUE(Eventually([&] {
    busiest = std::max(busiest, Metrics::Read(server->admin_address()).Sum("efla_requests_running"));
    return busiest >= kTrafficStreams / 2;
  })) << "the traffic never ran together; at most "
      << busiest << " at once";
  const std::vector<Reply> among_others = Ask(*server, probes_);
  for (size_t i = 0; i < probes_.size(); ++i) ExpectSameTokens(alone[i], among_others[i], probes_[i].name);
  ExpectSameScores(score_alone, ScoreOf(*server, probes_.back().request), "score among others");
  EXPECT_GT(traffic.num_ok(), kTrafficStreams);
}

TEST_P(ExactnessServerTest, ARequestIsTheSameForEveryStepBudgetAndAfterARestart) {
  std::vector<Reply> first;
  v1::ScoreResponse first_score;
  for (int max_batch_tokens : {512, 64, 128}) {
    const auto server = Start(max_batch_tokens);
    ASSERT_NE(server, nullptr);
    std::vector<Reply> replies = Ask(*server, probes_);
    const v1::ScoreResponse score = ScoreOf(*server, probes_.back().request);
    if (first.empty()) {
      first = std::move(replies);
      first_score = score;
      continue;
    }
    const std::string what = absl::StrFormat(", step budget %d", max_batch_tokens);
    for (size_t i = 0; i < probes_.size(); ++i)
      ExpectSameTokens(first[i], replies[i], probes_[i].name + what);
    ExpectSameScores(first_score, score, "score" + what);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, ExactnessServerTest,
    ::testing::Values(ExactnessCase{"Efla", "tests/golden/efla_basic", 320, 40, kAllLengths},
                      ExactnessCase{"GatedEfla", "tests/golden/gated_efla", 300, 40, kAllLengths},
                      ExactnessCase{"DeltaNet", "tests/golden/delta_net", 300, 40, kAllLengths},
                      ExactnessCase{"Demo", "model/demo", 4096, 10, {9, 65, 200}}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace efla::e2e
