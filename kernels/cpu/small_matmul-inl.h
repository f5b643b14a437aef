// Products of small float32 matrices that lie in a core's own caches, for the chunkwise form. As in matmul.h,
// every output is one chain of multiply-adds over k, ascending.
#if defined(EFLA_KERNELS_CPU_SMALL_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_SMALL_MATMUL_INL_H_
#undef EFLA_KERNELS_CPU_SMALL_MATMUL_INL_H_
#else
#define EFLA_KERNELS_CPU_SMALL_MATMUL_INL_H_
#endif

#include <cstdint>

#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

// c = init c + a b, for `rows` x `cols` outputs and `depth` products each; cols is a multiple of kLanes.
struct SmallProduct {
  const float* a;  // a(r, k) at r * a_row + k * a_depth
  int64_t a_row, a_depth;
  const float* b;  // b(k, c) at k * b_stride + c
  int64_t b_stride;
  float* c;  // c(r, c) at r * c_stride + c
  int64_t c_stride;
  float init = 0;  // 0: c is not read
};

template <int kRows, int kVectors>
HWY_INLINE void SmallTile(const SmallProduct& product, int64_t row, int64_t col, int64_t depth) {
  const FloatTag d;
  hn::Vec<FloatTag> sum[kRows][kVectors];
  float* c = product.c + row * product.c_stride + col;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = product.init == 0 ? hn::Zero(d)
                                    : hn::Mul(hn::Set(d, product.init),
                                              hn::LoadU(d, c + r * product.c_stride + v * kLanes));
    }
  }
  const float* a = product.a + row * product.a_row;
  const float* b = product.b + col;
  for (int64_t k = 0; k < depth; ++k, a += product.a_depth, b += product.b_stride) {
    hn::Vec<FloatTag> right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto left = hn::Set(d, a[r * product.a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, c + r * product.c_stride + v * kLanes);
  }
}

template <int kRows>
void SmallRows(const SmallProduct& product, int64_t row, int64_t cols, int64_t depth) {
  constexpr int kWide = kManyRegisters ? 4 : 2;
  constexpr int64_t kWidth = kLanes;
  int64_t col = 0;
  for (; col + kWide * kWidth <= cols; col += kWide * kWidth)
    SmallTile<kRows, kWide>(product, row, col, depth);
  for (; col < cols; col += kWidth) SmallTile<kRows, 1>(product, row, col, depth);
}

// Rows [row_begin, row_end).
HWY_INLINE void MultiplyRows(const SmallProduct& product, int64_t row_begin, int64_t row_end, int64_t cols,
                             int64_t depth) {
  int64_t row = row_begin;
  for (; row + 6 <= row_end; row += 6) SmallRows<6>(product, row, cols, depth);
  for (; row + 2 <= row_end; row += 2) SmallRows<2>(product, row, cols, depth);
  for (; row < row_end; ++row) SmallRows<1>(product, row, cols, depth);
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
