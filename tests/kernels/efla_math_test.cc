// The scalars of the recurrence against double precision, over all of their range.
#include "kernels/efla_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/kernels/reference.h"

namespace efla {
namespace {

constexpr ModelType kTypes[] = {ModelType::kEfla, ModelType::kGatedEfla, ModelType::kDeltaNet,
                                ModelType::kGatedDeltaNet};

double RelativeError(float value, double expected) {
  const double error = std::abs(static_cast<double>(value) - expected);
  return expected == 0 ? error : error / std::abs(expected);
}

TEST(EflaScalarsTest, MatchDoublePrecisionForEveryKeyNormAndGate) {
  for (const ModelType type : kTypes) {
    for (double norm_log10 = -16; norm_log10 <= 36; norm_log10 += 0.25) {
      for (const float b : {1e-6f, 0.01f, 0.5f, 0.999f, 1.0f, 2.0f}) {
        for (const float log_a : {0.0f, -1e-7f, -1e-3f, -0.5f, -5.0f, -80.0f}) {
          const float squared = static_cast<float>(std::pow(10, norm_log10));
          const MixScalars scalars = EflaScalars(type, squared, b, log_a);
          const reference::Scalars expected = reference::CoefficientsOf(
              type, static_cast<double>(squared), static_cast<double>(b), static_cast<double>(log_a));
          SCOPED_TRACE(testing::Message() << "type " << static_cast<int>(type) << " |k|^2 " << squared
                                          << " b " << b << " log_a " << log_a);
          ASSERT_LE(RelativeError(scalars.write, expected.write), 1e-6);
          // A gate of exp(-80) times a tiny key leaves the normal range of float32.
          ASSERT_LE(std::abs(static_cast<double>(scalars.erase) - expected.erase),
                    1e-6 * expected.erase + 1e-36);
          const bool gated = IsGated(type);
          ASSERT_LE(RelativeError(scalars.log_decay, gated ? std::log(expected.decay) : 0), gated ? 1e-5 : 0);
        }
      }
    }
  }
}

// erase |k|^2 < 1 up to rounding is what keeps the state from blowing up.
TEST(EflaScalarsTest, EraseNeverOvershoots) {
  for (double norm_log10 = -20; norm_log10 <= 38; norm_log10 += 0.01) {
    const float squared = static_cast<float>(std::pow(10, norm_log10));
    for (const float b : {0.001f, 0.5f, 1.0f, 2.0f}) {
      EXPECT_LE(EflaScalars(ModelType::kEfla, squared, b, 0).erase * squared, 1 + 3e-7f) << squared;
      EXPECT_LE(EflaScalars(ModelType::kGatedEfla, squared, b, -0.1f).erase * squared, 1 + 3e-7f) << squared;
    }
  }
}

TEST(EflaScalarsTest, ExtremesStayNumbers) {
  for (const ModelType type : kTypes) {
    for (const float squared :
         {0.0f, 1e-45f, std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()}) {
      for (const float b : {0.0f, 1.0f}) {
        const MixScalars scalars = EflaScalars(type, squared, b, -1e4f);
        EXPECT_TRUE(std::isfinite(scalars.erase) && std::isfinite(scalars.write) &&
                    std::isfinite(scalars.log_decay))
            << "type " << static_cast<int>(type) << " |k|^2 " << squared << " b " << b;
      }
    }
  }
  EXPECT_TRUE(std::isnan(EflaScalars(ModelType::kEfla, std::nanf(""), 0.5f, 0).erase));
}

TEST(EflaMathTest, LimitsOfTheSmallFunctions) {
  EXPECT_EQ(Sigmoid(200), 1);
  EXPECT_EQ(Sigmoid(-200), 0);
  EXPECT_EQ(Softplus(1000), 1000);
  EXPECT_NEAR(Softplus(0), std::log(2.0f), 1e-7);
  EXPECT_LE(RelativeError(Softplus(-20), std::log1p(std::exp(-20.0))), 1e-6);
  EXPECT_EQ(LogForget(-200, 0, 0), 0);
  EXPECT_EQ(WriteStrength(0, true), 1);
  EXPECT_EQ(L2NormScale(0), 1 / std::sqrt(1e-6f));
}

}  // namespace
}  // namespace efla
