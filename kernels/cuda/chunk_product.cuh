// The chunk scan's products: a warp's 16 rows in registers times a tile in shared memory.
//
// Four neighbouring warps (a warp group) run in step and read the same tile, each with left operands and sums
// of its own, which lie as in Mma (ptx.cuh). On Hopper the products are asynchronous: between
// ProductsBegin and the ProductsWait that covers them nobody may touch their sums or left operands. Elsewhere
// they are complete at once and the waits do nothing.
#ifndef EFLA_KERNELS_CUDA_CHUNK_PRODUCT_CUH_
#define EFLA_KERNELS_CUDA_CHUNK_PRODUCT_CUH_

#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/ptx.cuh"

// Instructions of compute capability 9.0 alone; only code for 90a has them.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EFLA_GROUP_PRODUCTS 1
#endif

namespace efla::cuda {

inline constexpr int kGroupWarps = 4;
inline constexpr int kGroupTile = 64;                // columns of a tile: 128 bytes, the swizzle's span
inline constexpr int kGroupTileAlign = 1024;         // bytes; the swizzle follows the address
inline constexpr uint32_t kHalfSigns = 0x80008000u;  // of a pair
using GroupTile = HalfTile<kGroupTile>;

// Two neighbouring 8-column sums as the left operand of the next product.
__device__ inline void PackLeft(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = PackHalves(low[0], low[1]);
  a[1] = PackHalves(low[2], low[3]);
  a[2] = PackHalves(high[0], high[1]);
  a[3] = PackHalves(high[2], high[3]);
}

// Makes what this thread wrote to shared memory visible to the asynchronous products; a barrier follows.
__device__ inline void SharedWritesToProducts() {
#ifdef EFLA_GROUP_PRODUCTS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Keeps the compiler from moving what it does with these sums over the place where this stands.
template <int kTiles>
__device__ inline void PinSums(float (&sums)[kTiles][4]) {
#ifdef EFLA_GROUP_PRODUCTS
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[n][i])::"memory");
  }
#endif
}

#ifdef EFLA_GROUP_PRODUCTS
#define EFLA_SUMS(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])

template <bool kNegate, bool kTransposed>
__device__ inline void GroupMma64(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, %38, 1, %39;\n}\n"
      : EFLA_SUMS(d, 0), EFLA_SUMS(d, 1), EFLA_SUMS(d, 2), EFLA_SUMS(d, 3), EFLA_SUMS(d, 4), EFLA_SUMS(d, 5),
        EFLA_SUMS(d, 6), EFLA_SUMS(d, 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kNegate ? -1 : 1),
        "n"(kTransposed ? 1 : 0));
}

#undef EFLA_SUMS
#endif  // EFLA_GROUP_PRODUCTS

// sums (+)= +-A B for 64 columns, B[k][n] = tile[n][column + k]. Overwrites sums unless `accumulate`.
template <bool kNegate>
__device__ inline void MultiplyRows(float (&sums)[8][4], const uint32_t (&a)[4], const GroupTile& tile,
                                    int column, bool accumulate, int lane) {
#ifdef EFLA_GROUP_PRODUCTS
  GroupMma64<kNegate, false>(sums, a, TileDescriptor(tile.base + column, 0), accumulate);
#else
  uint32_t left[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) left[i] = kNegate ? a[i] ^ kHalfSigns : a[i];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint32_t b[4];
    tile.LoadB(b, n * kFragment, column, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&sum)[4] = sums[2 * n + half];
      if (!accumulate) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      Mma<__half>(sum, left, b[2 * half], b[2 * half + 1]);
    }
  }
#endif
}

// sums (+)= A B for 64 columns, B[k][n] = tile[row + k][n].
__device__ inline void MultiplyColumns(float (&sums)[8][4], const uint32_t (&a)[4], const GroupTile& tile,
                                       int row, bool accumulate, int lane) {
#ifdef EFLA_GROUP_PRODUCTS
  GroupMma64<false, true>(sums, a, TileDescriptor(tile.base + row * kGroupTile, 0), accumulate);
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint32_t b[4];
    tile.LoadBTransposed(b, row, n * kFragment, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&sum)[4] = sums[2 * n + half];
      if (!accumulate) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      Mma<__half>(sum, a, b[2 * half], b[2 * half + 1]);
    }
  }
#endif
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_CHUNK_PRODUCT_CUH_
