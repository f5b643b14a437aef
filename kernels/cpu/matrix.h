// Weights of the CPU device.
#ifndef EFLA_KERNELS_CPU_MATRIX_H_
#define EFLA_KERNELS_CPU_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/cpu/machine.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"

namespace efla {

inline constexpr int kPanelOutputs = 32;

// A weight packed for MatMul: panels of kPanelOutputs outputs, in each panel k by k, [panel][cols][32], in
// the stored type; outputs past the last row are zero. For kGateUp, panel 2i holds gate outputs [32i, 32i +
// 32) and panel 2i + 1 the up outputs of the same numbers.
class PackedMatrix final : public Matrix {
 public:
  // Null when there is no memory.
  static std::unique_ptr<PackedMatrix> Pack(std::span<const HostMatrix> parts, MatrixUse use,
                                            ThreadPool& pool);

  DType dtype() const { return dtype_; }
  bool is_gate_up() const { return is_gate_up_; }
  int64_t num_panels() const { return num_panels_; }
  const std::byte* panel(int64_t index) const { return packed_.get() + index * panel_bytes(); }
  int64_t panel_bytes() const { return cols() * kPanelOutputs * static_cast<int64_t>(ByteSize(dtype_)); }

 private:
  PackedMatrix(int64_t rows, int64_t cols, DType dtype, bool is_gate_up, int64_t num_panels)
      : Matrix(rows, cols), dtype_(dtype), is_gate_up_(is_gate_up), num_panels_(num_panels) {}

  DType dtype_;
  bool is_gate_up_;
  int64_t num_panels_;
  MemoryBlock<std::byte> packed_;
};

// An embedding table: a view of the checkpoint's own memory, row-major.
class RowMatrix final : public Matrix {
 public:
  explicit RowMatrix(const HostMatrix& from) : Matrix(from.rows, from.cols), host_(from) {}

  DType dtype() const { return host_.dtype; }
  const std::byte* row(int64_t index) const {
    return static_cast<const std::byte*>(host_.data) +
           index * cols() * static_cast<int64_t>(ByteSize(host_.dtype));
  }

 private:
  HostMatrix host_;
};

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_MATRIX_H_
