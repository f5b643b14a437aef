#include "kernels/cpu/matrix.h"

#include <algorithm>
#include <cstring>

#include "kernels/check.h"

namespace efla {
namespace {

// Packs at most kPanelOutputs rows of elements of `kBytes` bytes; the places of missing rows become zero. A
// checkpoint's tensors need not be aligned to their elements.
template <size_t kBytes>
void PackPanel(const std::byte* const* rows, int num_rows, int64_t cols, std::byte* packed) {
  if (num_rows < kPanelOutputs) std::memset(packed, 0, cols * kPanelOutputs * kBytes);
  for (int64_t k = 0; k < cols; ++k) {
    for (int r = 0; r < num_rows; ++r) {
      std::memcpy(packed + (k * kPanelOutputs + r) * kBytes, rows[r] + k * kBytes, kBytes);
    }
  }
}

// Row `row` of the stacked parts, by bytes.
const std::byte* StackedRow(std::span<const HostMatrix> parts, int64_t row) {
  for (const HostMatrix& part : parts) {
    if (row < part.rows) {
      return static_cast<const std::byte*>(part.data) +
             row * part.cols * static_cast<int64_t>(ByteSize(part.dtype));
    }
    row -= part.rows;
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<PackedMatrix> PackedMatrix::Pack(std::span<const HostMatrix> parts, MatrixUse use,
                                                 ThreadPool& pool) {
  EFLA_CHECK(!parts.empty() && use != MatrixUse::kEmbedding);
  int64_t rows = 0;
  for (const HostMatrix& part : parts) {
    EFLA_CHECK(part.data != nullptr && part.rows > 0 && part.cols > 0);
    EFLA_CHECK(part.dtype == parts[0].dtype && part.cols == parts[0].cols);
    rows += part.rows;
  }
  const bool gate_up = use == MatrixUse::kGateUp;
  EFLA_CHECK(!gate_up || (parts.size() == 2 && parts[0].rows == parts[1].rows));
  const int64_t part_rows = gate_up ? rows / 2 : rows;
  const int64_t part_panels = (part_rows + kPanelOutputs - 1) / kPanelOutputs;
  std::unique_ptr<PackedMatrix> matrix(new PackedMatrix(rows, parts[0].cols, parts[0].dtype, gate_up,
                                                        gate_up ? 2 * part_panels : part_panels));
  matrix->packed_ = AllocateBlock<std::byte>(matrix->num_panels() * matrix->panel_bytes());
  if (matrix->packed_ == nullptr) return nullptr;
  pool.ParallelFor(matrix->num_panels(), [&](int64_t panel, int) {
    const int64_t first = (gate_up ? panel / 2 : panel) * kPanelOutputs;
    const int num_rows = static_cast<int>(std::min<int64_t>(kPanelOutputs, part_rows - first));
    const int64_t stacked = gate_up ? panel % 2 * part_rows + first : first;
    const std::byte* row_data[kPanelOutputs] = {};
    for (int r = 0; r < num_rows; ++r) row_data[r] = StackedRow(parts, stacked + r);
    std::byte* packed = matrix->packed_.get() + panel * matrix->panel_bytes();
    if (matrix->dtype() == DType::kF32) {
      PackPanel<4>(row_data, num_rows, matrix->cols(), packed);
    } else {
      PackPanel<2>(row_data, num_rows, matrix->cols(), packed);
    }
  });
  return matrix;
}

}  // namespace efla
