// Tiles of float16 in shared memory as the chunk kernels keep them, and how the matrix units' fragments are
// read.
#ifndef EFLA_KERNELS_CUDA_CHUNK_TILE_CUH_
#define EFLA_KERNELS_CUDA_CHUNK_TILE_CUH_

#include <cuda_fp16.h>

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {

inline constexpr int kTileVector = 8;  // elements of the 16 bytes that move as one
inline constexpr int kFragment = 16;   // rows and columns of a fragment

// Two floats as float16, the first in the low half; beyond float16's range its largest value, NaN stays NaN.
__device__ inline uint32_t PackHalves(float first, float second) {
  uint32_t word;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// Row-major [rows, kColumns] with its 16-byte vectors permuted within a row, so that 8 rows' vectors of one
// column meet every bank once.
template <int kColumns>
struct HalfTile {
  static constexpr int kVectors = kColumns / kTileVector;
  static_assert(kVectors >= 2 && (kVectors & (kVectors - 1)) == 0);
  // Rows that together fill the 128 bytes of all banks.
  static constexpr int kRowsPerLine = kVectors >= 8 ? 1 : 8 / kVectors;

  __half* base;

  __device__ __half* Vector(int row, int vector) const {
    const int mask = (kVectors >= 8 ? 8 : kVectors) - 1;
    return base + row * kColumns + ((vector ^ (row / kRowsPerLine & mask)) * kTileVector);
  }
  __device__ __half* At(int row, int column) const {
    return Vector(row, column / kTileVector) + column % kTileVector;
  }

  // Fragment A[m][k] = tile[row + m][column + k].
  __device__ void LoadA(uint32_t (&a)[4], int row, int column, int lane) const {
    LdMatrix4(a, Vector(row + lane % 16, column / kTileVector + lane / 16));
  }
  // Fragment A[m][k] = tile[row + k][column + m].
  __device__ void LoadATransposed(uint32_t (&a)[4], int row, int column, int lane) const {
    LdMatrix4Trans(a, Vector(row + lane % 8 + lane / 16 * 8, column / kTileVector + lane / 8 % 2));
  }
  // Fragments B[k][n] = tile[row + n][column + k], n < 16: (b[0], b[1]) for n < 8, (b[2], b[3]) for the
  // others.
  __device__ void LoadB(uint32_t (&b)[4], int row, int column, int lane) const {
    LdMatrix4(b, Vector(row + lane % 8 + lane / 16 * 8, column / kTileVector + lane / 8 % 2));
  }
  // Fragments B[k][n] = tile[row + k][column + n], n < 16.
  __device__ void LoadBTransposed(uint32_t (&b)[4], int row, int column, int lane) const {
    LdMatrix4Trans(b, Vector(row + lane % 16, column / kTileVector + lane / 16));
  }
};

// Two neighbouring 8-column results as the 16 x 16 left operand of the next product.
__device__ inline void ToFragmentA(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = PackPair<__half>(low[0], low[1]);
  a[1] = PackPair<__half>(low[2], low[3]);
  a[2] = PackPair<__half>(high[0], high[1]);
  a[3] = PackPair<__half>(high[2], high[3]);
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_CHUNK_TILE_CUH_
