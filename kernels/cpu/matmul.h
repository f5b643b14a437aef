// Products of activations and packed weights.
//
// Every output is one chain of fused multiply-adds over k, ascending, in float32, from zero. So its bits
// depend on its own row and its own weights alone: not on the number of rows, the tiling or the threads.
#ifndef EFLA_KERNELS_CPU_MATMUL_H_
#define EFLA_KERNELS_CPU_MATMUL_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/machine.h"
#include "kernels/cpu/matrix.h"
#include "kernels/cpu/thread_pool.h"

namespace efla {

// What happens to a finished product.
enum class ProductUse {
  kStore,      // out = product
  kAdd,        // out += product
  kSiluTimes,  // out = silu(gate product) * up product; the weight is a gate-up matrix
};

struct Product {
  const PackedMatrix* weight = nullptr;
  ProductUse use = ProductUse::kStore;
  float* out = nullptr;    // [num_rows, out_stride]
  int64_t out_stride = 0;  // floats
};

// Rows of activations, laid out for the inner loop of MatMul: blocks of a few rows, in each block k by k.
class PackedRows {
 public:
  // Room for max_rows rows of max_cols floats; false when there is no memory.
  bool Reserve(int64_t max_rows, int64_t max_cols);

  // Packs row i from x + i * stride, or from x + row_index[i] * stride; with `norm` (may be null), RMSNorm
  // first.
  struct Source {
    const float* x = nullptr;
    int64_t stride = 0;
    const int32_t* row_index = nullptr;
    const float* norm = nullptr;  // [cols]
    float norm_eps = 0;
  };
  void Pack(const Source& from, int64_t num_rows, int64_t cols, ThreadPool& pool);

  int64_t num_rows() const { return num_rows_; }
  int64_t cols() const { return cols_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_begin(int64_t block) const { return block * num_rows_ / num_blocks_; }
  const float* block(int64_t block) const { return packed_.get() + block_begin(block) * cols_; }

 private:
  MemoryBlock<float> packed_;
  int64_t capacity_ = 0;
  int64_t num_rows_ = 0, cols_ = 0, num_blocks_ = 0;
};

// All products of the same rows, in one parallel loop.
void MatMul(const PackedRows& rows, std::span<const Product> products, ThreadPool& pool);

// The vector instructions chosen on this machine: "AVX3", "AVX2", ...
const char* VectorTargetName();

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_MATMUL_H_
