// Embed, Project, AddLinear, GatedMlp: against the reference, and row by row against themselves.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/kernels/device_test.h"

namespace efla {
namespace {

struct Shape {
  int64_t hidden, intermediate, projected, coefs;
};

class ProductsTest : public testing::TestWithParam<std::tuple<std::string, DType, Shape>> {
 protected:
  const std::string& kind() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  const Shape& shape() const { return std::get<2>(GetParam()); }
  TestRandom random_;
};

constexpr int kMaxTokens = 150;

MixLayer SmallMix() {
  MixLayer layer;
  layer.num_heads = 1;
  layer.d_k = layer.d_v = 64;
  return layer;
}

Device::Limits LimitsFor(const Shape& shape) {
  return {.max_tokens = kMaxTokens,
          .max_decode = kMaxTokens,
          .max_samples = 1,
          .hidden_size = shape.hidden,
          .intermediate_size = shape.intermediate,
          .vocab_size = 64,
          .mix = SmallMix()};
}

// All products of a model's layer over one set of rows, at fixed addresses.
class Layer {
 public:
  Layer(Device& device, TestRandom& random, DType dtype, const Shape& shape)
      : device_(device),
        shape_(shape),
        x_(device, kMaxTokens * shape.hidden),
        projected_(device, kMaxTokens * shape.projected),
        coefs_(device, kMaxTokens * shape.coefs),
        wide_(device, kMaxTokens * shape.intermediate),
        norm_(device, shape.hidden) {
    norm = random.Normals(shape.hidden);
    norm_.Write(norm);
    const int64_t first = shape.projected / 3;
    parts[0] = RandomWeight(random, first, shape.hidden, dtype);
    parts[1] = RandomWeight(random, shape.projected - first, shape.hidden, dtype);
    coef = RandomWeight(random, shape.coefs, shape.hidden, dtype);
    gate = RandomWeight(random, shape.intermediate, shape.hidden, dtype);
    up = RandomWeight(random, shape.intermediate, shape.hidden, dtype);
    down = RandomWeight(random, shape.hidden, shape.intermediate, dtype);
    project_ = Load({parts[0].host, parts[1].host}, MatrixUse::kLinear);
    coef_ = Load({coef.host}, MatrixUse::kLinear);
    gate_up_ = Load({gate.host, up.host}, MatrixUse::kGateUp);
    down_ = Load({down.host}, MatrixUse::kLinear);
  }

  struct Results {
    std::vector<float> projected, coefs, wide, x;
  };

  Results Run(std::span<const float> x) {
    const int rows = static_cast<int>(x.size() / shape_.hidden);
    projected_.Poison();
    coefs_.Poison();
    wide_.Poison();
    x_.Write(x);
    RunStep(device_, DecodeRows(rows).input, [&] {
      device_.Project({.num_tokens = rows,
                       .x = x_.get(),
                       .norm = norm_.get(),
                       .norm_eps = kEps,
                       .weight = project_.get(),
                       .out = projected_.get(),
                       .coef_weight = coef_.get(),
                       .coef_out = coefs_.get()});
      device_.GatedMlp({.num_tokens = rows,
                        .x = x_.get(),
                        .norm = norm_.get(),
                        .norm_eps = kEps,
                        .gate_up = gate_up_.get(),
                        .out = wide_.get()});
      device_.AddLinear({.num_tokens = rows, .in = wide_.get(), .weight = down_.get(), .x = x_.get()});
    });
    return {projected_.Read(rows * shape_.projected), coefs_.Read(0, rows * shape_.coefs),
            wide_.Read(rows * shape_.intermediate), x_.Read(0, rows * shape_.hidden)};
  }

  static constexpr float kEps = 1e-5f;
  std::vector<float> norm;
  TestWeight parts[2], coef, gate, up, down;

 private:
  std::unique_ptr<Matrix> Load(std::vector<HostMatrix> hosts, MatrixUse use) {
    DeviceStatus status;
    std::unique_ptr<Matrix> matrix = device_.LoadMatrix(hosts, use, status);
    EXPECT_TRUE(status.ok()) << status.message;
    return matrix;
  }

  Device& device_;
  Shape shape_;
  FloatArray x_;
  ActArray projected_;
  FloatArray coefs_;
  ActArray wide_;
  FloatArray norm_;
  std::unique_ptr<Matrix> project_, coef_, gate_up_, down_;
};

template <typename T>
std::span<const T> Row(const std::vector<T>& all, int64_t row, int64_t width) {
  return std::span<const T>(all).subspan(row * width, width);
}

TEST_P(ProductsTest, EveryRowMatchesTheReference) {
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed());
  EFLA_CREATE_DEVICE_OR_SKIP(device, kind());
  EFLA_PREPARE_OR_SKIP(device, LimitsFor(shape()));
  Layer layer(*device, random_, dtype(), shape());
  const double tolerance = Tolerance(*device);
  for (const int rows : {1, 2, 3, 5, 13, 37}) {
    const std::vector<float> x = random_.Normals(rows * shape().hidden, 3);
    const Layer::Results results = layer.Run(x);
    for (int row = 0; row < rows; ++row) {
      SCOPED_TRACE(testing::Message() << "row " << row << " of " << rows);
      const reference::Vector in = ToDouble(Row(x, row, shape().hidden));
      const reference::Vector y =
          reference::RmsNorm(in, ToDouble(layer.norm), static_cast<double>(Layer::kEps));
      reference::Vector projected = reference::Linear(layer.parts[0].values, y);
      const reference::Vector rest = reference::Linear(layer.parts[1].values, y);
      projected.insert(projected.end(), rest.begin(), rest.end());
      EXPECT_LE(WorstError(Row(results.projected, row, shape().projected), projected), tolerance);
      EXPECT_LE(WorstError(Row(results.coefs, row, shape().coefs), reference::Linear(layer.coef.values, y)),
                tolerance);
      const reference::Vector wide =
          reference::SwiGlu(reference::Linear(layer.gate.values, y), reference::Linear(layer.up.values, y));
      EXPECT_LE(WorstError(Row(results.wide, row, shape().intermediate), wide), tolerance);
      // The last product on its own: from the activations that the device really has.
      reference::Vector out =
          reference::Linear(layer.down.values, ToDouble(Row(results.wide, row, shape().intermediate)));
      for (int64_t i = 0; i < shape().hidden; ++i) out[i] += in[i];
      EXPECT_LE(WorstError(Row(results.x, row, shape().hidden), out), tolerance);
    }
  }
}

TEST_P(ProductsTest, ARowAloneHasTheBitsItHasInABatch) {
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed());
  EFLA_CREATE_DEVICE_OR_SKIP(device, kind());
  EFLA_PREPARE_OR_SKIP(device, LimitsFor(shape()));
  Layer layer(*device, random_, dtype(), shape());
  const std::vector<float> all = random_.Normals(kMaxTokens * shape().hidden, 3);
  std::vector<Layer::Results> alone;
  for (int row = 0; row < kMaxTokens; ++row) {
    const auto x = Row(all, row, shape().hidden);
    alone.push_back(layer.Run(x));
  }
  for (const int rows : {2, 3, 4, 7, 12, 13, 25, 31, 64, 149, kMaxTokens}) {
    const int first = random_.Integer(0, kMaxTokens - rows);
    const Layer::Results batch =
        layer.Run(std::span<const float>(all).subspan(first * shape().hidden, rows * shape().hidden));
    for (int row = 0; row < rows; ++row) {
      const Layer::Results& one = alone[first + row];
      ASSERT_TRUE(SameBits(Row(batch.projected, row, shape().projected), one.projected))
          << row << " of " << rows;
      ASSERT_TRUE(SameBits(Row(batch.coefs, row, shape().coefs), one.coefs)) << row << " of " << rows;
      ASSERT_TRUE(SameBits(Row(batch.wide, row, shape().intermediate), one.wide)) << row << " of " << rows;
      ASSERT_TRUE(SameBits(Row(batch.x, row, shape().hidden), one.x)) << row << " of " << rows;
    }
  }
}

TEST_P(ProductsTest, EmbedCopiesTheTablesRows) {
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed());
  EFLA_CREATE_DEVICE_OR_SKIP(device, kind());
  EFLA_PREPARE_OR_SKIP(device, LimitsFor(shape()));
  constexpr int kVocab = 61, kTokens = 40;
  const TestWeight table = RandomWeight(random_, kVocab, shape().hidden, dtype());
  DeviceStatus status;
  const std::unique_ptr<Matrix> matrix = device->LoadMatrix({&table.host, 1}, MatrixUse::kEmbedding, status);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(matrix->rows(), kVocab);
  EXPECT_EQ(matrix->cols(), shape().hidden);
  FloatArray x(*device, kTokens * shape().hidden);
  std::vector<TokenId> tokens;
  for (int i = 0; i < kTokens; ++i) tokens.push_back(random_.Integer(0, kVocab - 1));
  tokens.front() = 0;
  tokens.back() = kVocab - 1;
  const DecodeRows rows(kTokens);
  StepInput input = rows.input;
  input.tokens = tokens;
  RunStep(*device, input, [&] { device->Embed({.table = matrix.get(), .x = x.get()}); });
  const std::vector<float> embedded = x.Read(0, kTokens * shape().hidden);
  for (int i = 0; i < kTokens; ++i) {
    for (int64_t c = 0; c < shape().hidden; ++c) {
      ASSERT_EQ(static_cast<double>(embedded[i * shape().hidden + c]),
                table.values[tokens[i] * shape().hidden + c])
          << "token " << i << " column " << c;
    }
  }
}

std::string CaseName(const testing::TestParamInfo<ProductsTest::ParamType>& tested) {
  const auto& [kind, dtype, shape] = tested.param;
  const char* const dtypes[] = {"F32", "F16", "BF16"};
  return kind + dtypes[static_cast<int>(dtype)] + "Hidden" + std::to_string(shape.hidden);
}

INSTANTIATE_TEST_SUITE_P(Devices, ProductsTest,
                         testing::Combine(testing::ValuesIn(TestedDevices()),
                                          testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                                          testing::Values(Shape{128, 256, 320, 8}, Shape{256, 512, 776, 3},
                                                          Shape{192, 200, 104, 16},
                                                          Shape{584, 3000, 4120, 5})),
                         CaseName);

}  // namespace
}  // namespace efla
