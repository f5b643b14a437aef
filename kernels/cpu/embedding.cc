#include "kernels/cpu/embedding.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h.
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

void WidenRow(DType dtype, const std::byte* from, int64_t count, float* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  // A checkpoint's tensors need not be aligned to their elements.
  ForEachVector(count, [&](auto d, size_t i) HWY_ATTR {
    using D = decltype(d);
    const hn::Rebind<uint16_t, D> d16;
    uint16_t bits[hn::MaxLanes(d)];
    std::memcpy(bits, from + i * sizeof(uint16_t), sizeof bits);
    if (dtype == DType::kBF16) {
      const hn::RebindToUnsigned<D> d32;
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, bits)))), d, to + i);
    } else {
      const hn::Rebind<hwy::float16_t, D> half;
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(bits))), d, to + i);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla {
namespace {
HWY_EXPORT(WidenRow);
}

void EmbedTokens(const RowMatrix& table, std::span<const TokenId> tokens, float* x, ThreadPool& pool) {
  pool.ParallelFor(static_cast<int64_t>(tokens.size()), [&](int64_t i, int) {
    HWY_DYNAMIC_DISPATCH(WidenRow)(table.dtype(), table.row(tokens[i]), table.cols(), x + i * table.cols());
  });
}

}  // namespace efla
#endif  // HWY_ONCE
