#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/efla_math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h.
#include "kernels/cpu/vector_math-inl.h"

#ifndef EFLA_MATMUL_ONCE
#define EFLA_MATMUL_ONCE
namespace efla {

// Most rows of a block. With 32 vector registers a tile is 12 rows by 2 vectors (24 sums, 2 weights, 1
// activation); with 16 it is 6 by 2.
constexpr int kMaxBlockRows = 12;
// Panels that one claim of a single row takes: 4 panels of 2 vectors give 8 sums, enough to hide the latency
// of the multiply-add.
constexpr int kMaxTilePanels = 4;

struct TileTask {
  const float* rows;  // one block of PackedRows
  int num_rows;
  const std::byte* weights;  // first of the panels
  int64_t panel_bytes;
  int64_t cols;
  DType dtype;
};

}  // namespace efla
#endif  // EFLA_MATMUL_ONCE

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

constexpr int kTileVectors = 2;  // of one panel that a tile takes at once
constexpr int kTileOutputs = kTileVectors * static_cast<int>(kLanes);
constexpr int kBlockRows = kManyRegisters ? kMaxBlockRows : 6;

struct BF16 {
  using Bits = uint16_t;
  static HWY_INLINE hn::Vec<FloatTag> Load(FloatTag d, const Bits* from) {
    const hn::Rebind<uint16_t, FloatTag> d16;
    const hn::RebindToUnsigned<FloatTag> d32;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
  }
};

struct F16 {
  using Bits = uint16_t;
  static HWY_INLINE hn::Vec<FloatTag> Load(FloatTag d, const Bits* from) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
  }
};

struct F32 {
  using Bits = float;
  static HWY_INLINE hn::Vec<FloatTag> Load(FloatTag d, const Bits* from) { return hn::LoadU(d, from); }
};

// tile[panel][row][32] = rows x panels.
template <class Weight, int kRows, int kPanels>
void ComputeTile(const TileTask& task, float* HWY_RESTRICT tile) {
  using Bits = typename Weight::Bits;
  const FloatTag d;
  const int64_t cols = task.cols;
  for (int first = 0; first < kPanelOutputs; first += kTileOutputs) {
    const float* HWY_RESTRICT row = task.rows;
    const Bits* HWY_RESTRICT weight[kPanels];
    hn::Vec<FloatTag> sum[kPanels][kRows][kTileVectors];
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      weight[p] = reinterpret_cast<const Bits*>(task.weights + p * task.panel_bytes) + first;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sum[p][r][0] = hn::Zero(d);
        sum[p][r][1] = hn::Zero(d);
      }
    }
    for (int64_t k = 0; k < cols; ++k) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const auto weight0 = Weight::Load(d, weight[p] + k * kPanelOutputs);
        const auto weight1 = Weight::Load(d, weight[p] + k * kPanelOutputs + kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto activation = hn::Set(d, row[r]);
          sum[p][r][0] = hn::MulAdd(activation, weight0, sum[p][r][0]);
          sum[p][r][1] = hn::MulAdd(activation, weight1, sum[p][r][1]);
        }
      }
      row += kRows;
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* to = tile + (p * kRows + r) * kPanelOutputs + first;
        hn::StoreU(sum[p][r][0], d, to);
        hn::StoreU(sum[p][r][1], d, to + kLanes);
      }
    }
  }
}

// Panels a tile of this many rows takes: enough sums to hide latency, few enough for the registers.
constexpr int TilePanels(int num_rows) {
  if (num_rows == 1) return kMaxTilePanels;
  return num_rows * 2 <= kBlockRows ? 2 : 1;
}

template <class Weight, int kRows = kBlockRows>
void TileOfRows(const TileTask& task, int num_panels, float* tile) {
  if constexpr (kRows > 1) {
    if (task.num_rows < kRows) return TileOfRows<Weight, kRows - 1>(task, num_panels, tile);
  }
  constexpr int kPanels = TilePanels(kRows);
  if (num_panels == kPanels) return ComputeTile<Weight, kRows, kPanels>(task, tile);
  TileTask one = task;
  for (int p = 0; p < num_panels; ++p, one.weights += one.panel_bytes) {
    ComputeTile<Weight, kRows, 1>(one, tile + p * kRows * kPanelOutputs);
  }
}

void Tile(const TileTask& task, int num_panels, float* tile) {
  switch (task.dtype) {
    case DType::kBF16:
      return TileOfRows<BF16>(task, num_panels, tile);
    case DType::kF16:
      return TileOfRows<F16>(task, num_panels, tile);
    case DType::kF32:
      return TileOfRows<F32>(task, num_panels, tile);
  }
}

// Moves one panel's worth of outputs to its place: `width` of them are real.
void FinishRow(ProductUse use, const float* product, const float* up, float* out, int64_t width) {
  ForEachVector(width, [&](auto d, size_t i) HWY_ATTR {
    auto value = hn::LoadU(d, product + i);
    if (use == ProductUse::kAdd) value = hn::Add(hn::LoadU(d, out + i), value);
    if (use == ProductUse::kSiluTimes) value = hn::Mul(VectorSilu(d, value), hn::LoadU(d, up + i));
    hn::StoreU(value, d, out + i);
  });
}

// The rows [block_begin, block_end) of `rows` times `num_panels` panels from first_panel on.
void MultiplyPanels(const PackedRows& rows, int64_t block_begin, int64_t block_end, const Product& product,
                    int64_t first_panel, int num_panels) {
  HWY_ALIGN float tile[std::max(kMaxTilePanels, 2 * kMaxBlockRows) * kPanelOutputs];
  const PackedMatrix& weight = *product.weight;
  const bool paired = product.use == ProductUse::kSiluTimes;
  const int64_t outputs = paired ? weight.rows() / 2 : weight.rows();
  TileTask task = {nullptr,       0, weight.panel(first_panel), weight.panel_bytes(), weight.cols(),
                   weight.dtype()};
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t first_row = rows.block_begin(block);
    task.rows = rows.block(block);
    task.num_rows = static_cast<int>(rows.block_begin(block + 1) - first_row);
    Tile(task, num_panels, tile);
    const int step = paired ? 2 : 1;
    for (int p = 0; p < num_panels; p += step) {
      const int64_t first_output = (first_panel + p) / step * kPanelOutputs;
      const int64_t width = std::min<int64_t>(kPanelOutputs, outputs - first_output);
      for (int r = 0; r < task.num_rows; ++r) {
        const float* sums = tile + (p * task.num_rows + r) * kPanelOutputs;
        FinishRow(product.use, sums, sums + task.num_rows * kPanelOutputs,
                  product.out + (first_row + r) * product.out_stride + first_output, width);
      }
    }
  }
}

// Packs one block: RMSNorm when `from.norm` is given, then [cols][num_rows].
void PackBlock(const PackedRows::Source& from, int64_t first_row, int num_rows, int64_t cols, float* packed) {
  constexpr int64_t kStrip = 64;
  HWY_ALIGN float strip[kMaxBlockRows][kStrip];
  const float* x[kMaxBlockRows];
  float scale[kMaxBlockRows];
  for (int r = 0; r < num_rows; ++r) {
    x[r] = from.x + (from.row_index != nullptr ? from.row_index[first_row + r] : first_row + r) * from.stride;
    if (from.norm != nullptr) {
      scale[r] = RmsNormScale(Dot(x[r], x[r], cols) / static_cast<float>(cols), from.norm_eps);
    }
  }
  for (int64_t begin = 0; begin < cols; begin += kStrip) {
    const int64_t width = std::min(kStrip, cols - begin);
    for (int r = 0; r < num_rows; ++r) {
      ForEachVector(width, [&](auto d, size_t i) HWY_ATTR {
        auto value = hn::LoadU(d, x[r] + begin + i);
        if (from.norm != nullptr) {
          value = hn::Mul(hn::Mul(value, hn::Set(d, scale[r])), hn::LoadU(d, from.norm + begin + i));
        }
        hn::StoreU(value, d, (num_rows == 1 ? packed + begin : strip[r]) + i);
      });
    }
    if (num_rows == 1) continue;
    for (int64_t k = 0; k < width; ++k) {
      for (int r = 0; r < num_rows; ++r) packed[(begin + k) * num_rows + r] = strip[r][k];
    }
  }
}

int BlockRows() { return kBlockRows; }
int PanelsForRows(int num_rows) { return TilePanels(num_rows); }
const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla {
namespace {

HWY_EXPORT(MultiplyPanels);
HWY_EXPORT(PackBlock);
HWY_EXPORT(BlockRows);
HWY_EXPORT(PanelsForRows);
HWY_EXPORT(TargetName);

// Rows are taken in groups whose packed activations stay in a core's second-level cache while panels pass by.
constexpr int64_t kGroupBytes = 512 << 10;

}  // namespace

bool PackedRows::Reserve(int64_t max_rows, int64_t max_cols) {
  capacity_ = max_rows * max_cols;
  packed_ = AllocateBlock<float>(capacity_);
  return packed_ != nullptr;
}

void PackedRows::Pack(const Source& from, int64_t num_rows, int64_t cols, ThreadPool& pool) {
  EFLA_CHECK(num_rows > 0 && cols > 0 && num_rows * cols <= capacity_);
  const int64_t block_rows = HWY_DYNAMIC_DISPATCH(BlockRows)();
  num_rows_ = num_rows;
  cols_ = cols;
  num_blocks_ = (num_rows + block_rows - 1) / block_rows;
  pool.ParallelFor(num_blocks_, [&](int64_t b, int) {
    HWY_DYNAMIC_DISPATCH(PackBlock)
    (from, block_begin(b), static_cast<int>(block_begin(b + 1) - block_begin(b)), cols,
     packed_.get() + block_begin(b) * cols);
  });
}

void MatMul(const PackedRows& rows, std::span<const Product> products, ThreadPool& pool) {
  constexpr size_t kMaxProducts = 2;
  EFLA_CHECK(products.size() <= kMaxProducts);
  const int64_t num_blocks = rows.num_blocks();
  const int64_t max_rows = (rows.num_rows() + num_blocks - 1) / num_blocks;  // of a block
  const int64_t block_bytes = max_rows * rows.cols() * static_cast<int64_t>(sizeof(float));
  const int64_t group_blocks = std::clamp<int64_t>(kGroupBytes / block_bytes, 1, num_blocks);
  const int64_t num_groups = (num_blocks + group_blocks - 1) / group_blocks;
  const int panels = HWY_DYNAMIC_DISPATCH(PanelsForRows)(static_cast<int>(max_rows));
  int64_t begin[kMaxProducts + 1] = {};  // of each product's panel sets
  int step[kMaxProducts] = {};           // panels in one of them
  for (size_t i = 0; i < products.size(); ++i) {
    const PackedMatrix& weight = *products[i].weight;
    EFLA_CHECK(weight.cols() == rows.cols());
    EFLA_CHECK(weight.is_gate_up() == (products[i].use == ProductUse::kSiluTimes));
    step[i] = weight.is_gate_up() ? std::max(panels, 2) : panels;
    begin[i + 1] = begin[i] + (weight.num_panels() + step[i] - 1) / step[i];
  }
  const int64_t num_sets = begin[products.size()];
  pool.ParallelFor(num_groups * num_sets, [&](int64_t index, int) {
    const int64_t group = index / num_sets, set = index % num_sets;
    const size_t i = set < begin[1] ? 0 : 1;
    const int64_t first_panel = (set - begin[i]) * step[i];
    const int64_t count = std::min<int64_t>(step[i], products[i].weight->num_panels() - first_panel);
    HWY_DYNAMIC_DISPATCH(MultiplyPanels)
    (rows, group * group_blocks, std::min(num_blocks, (group + 1) * group_blocks), products[i], first_panel,
     static_cast<int>(count));
  });
}

const char* VectorTargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

}  // namespace efla
#endif  // HWY_ONCE
