// The claim of the method: with raw keys of any size the exact update stays bounded, where the first-order
// one (erase = write = b, which the exact coefficient replaces) blows up.
#include <gtest/gtest.h>

#include <cstdio>

#include "kernels/efla_math.h"
#include "tests/kernels/mix_fixture.h"

namespace efla {
namespace {

constexpr int kTokens = 100000;
constexpr int kHead = 32;
constexpr int kStep = 640;

MixLayer StiffLayer() {
  MixLayer layer;
  layer.type = ModelType::kEfla;
  layer.qk_activation = QkActivation::kIdentity;
  layer.num_heads = 1;
  layer.d_k = layer.d_v = kHead;
  layer.conv_size = 0;
  return layer;
}

// Keys of norms 1e-6 to 1e3, even in their logarithm.
TokenInput StiffToken(TestRandom& random) {
  TokenInput token{random.Normals(3 * kHead), {random.Normal(2)}};
  double squares = 0;
  for (int i = 0; i < kHead; ++i) squares += std::pow(static_cast<double>(token.proj[kHead + i]), 2);
  const double scale = std::pow(10, random.Uniform(-6, 3)) / std::sqrt(squares);
  for (int i = 0; i < kHead; ++i) token.proj[kHead + i] *= static_cast<float>(scale);
  return token;
}

double Norm(std::span<const double> values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

double RelativeDistance(std::span<const double> a, std::span<const double> b) {
  reference::Vector difference(a.begin(), a.end());
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= b[i];
  return Norm(difference) / Norm(b);
}

class StabilityTest : public testing::TestWithParam<std::string> {};

TEST_P(StabilityTest, StateStaysBoundedForRawKeysOfAnySize) {
  TestRandom random;
  SCOPED_TRACE(testing::Message() << "seed " << random.seed());
  EFLA_CREATE_DEVICE_OR_SKIP(device, GetParam());
  EFLA_PREPARE_OR_SKIP(device, MixBench::LimitsOf(StiffLayer()));
  MixBench bench(*device, random, StiffLayer());
  // The recurrent form for the first tokens only: one step each is slow where a step is not a function call.
  const int recurrent_tokens = GetParam() == "cpu" ? 20 * kStep : 3 * kStep;

  reference::MixState exact = bench.StateOf(bench.ReadSlot(0));
  std::vector<float> euler(kHead * kHead, 0.0f);
  double greatest = 0;
  int euler_overflow = -1;
  std::printf("%8s  %12s  %12s  %14s  %12s\n", "tokens", "|S| float64", "greatest", "chunk error",
              "|S| Euler");
  int next_line = 64, count = 0;
  double recurrent_error = std::numeric_limits<double>::infinity();  // until it is compared
  for (int begin = 0; begin < kTokens; begin += count) {
    count = std::min(begin < kStep ? kChunkTokens : kStep, kTokens - begin);
    std::vector<TokenInput> tokens;
    for (int t = 0; t < count; ++t) tokens.push_back(StiffToken(random));
    tokens = bench.AsStored(tokens);
    bench.Run(tokens, {}, {{0, count, begin == 0 ? 0 : 1, 1}});
    for (int t = 0; t < count; ++t) {
      if (begin + t < recurrent_tokens) bench.Run({tokens[t]}, {{begin + t == 0 ? 0 : 2, 2}}, {});
      reference::MixToken(bench.reference(), ToDouble(tokens[t].proj), ToDouble(tokens[t].coef), exact);
      greatest = std::max(greatest, Norm(exact.recurrent));
      const float b = Sigmoid(tokens[t].coef[0]);
      const float* k = &tokens[t].proj[kHead];
      for (int c = 0; c < kHead; ++c) {
        float key_state = 0;
        for (int i = 0; i < kHead; ++i) key_state += k[i] * euler[i * kHead + c];
        for (int i = 0; i < kHead; ++i)
          euler[i * kHead + c] += b * k[i] * (tokens[t].proj[2 * kHead + c] - key_state);
      }
      bool finite = true;
      for (const float value : euler) finite = finite && std::isfinite(value);
      if (!finite && euler_overflow < 0) euler_overflow = begin + t;
    }
    if (begin + count == recurrent_tokens) {
      recurrent_error = RelativeDistance(bench.StateOf(bench.ReadSlot(2)).recurrent, exact.recurrent);
    }
    if (begin + count >= next_line || begin + count == kTokens) {
      const reference::MixState chunk = bench.StateOf(bench.ReadSlot(1));
      std::printf("%8d  %12.4g  %12.4g  %14.3g  %12s\n", begin + count, Norm(exact.recurrent), greatest,
                  RelativeDistance(chunk.recurrent, exact.recurrent),
                  euler_overflow >= 0 ? "overflow" : std::to_string(Norm(ToDouble(euler))).c_str());
      next_line = std::max(next_line * 4, begin + count + 1);
    }
  }
  const reference::MixState chunk = bench.StateOf(bench.ReadSlot(1));
  std::printf("recurrent form: error %.3g at token %d; the first-order update overflowed at token %d\n",
              recurrent_error, recurrent_tokens, euler_overflow);
  EXPECT_LT(greatest, 100);
  EXPECT_LE(RelativeDistance(chunk.recurrent, exact.recurrent), Tolerance(*device));
  EXPECT_LE(recurrent_error, 1e-4);
  EXPECT_GE(euler_overflow, 0) << "the first-order update was expected to overflow";
}

INSTANTIATE_TEST_SUITE_P(Devices, StabilityTest, testing::Values("cpu", "cuda"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace efla
