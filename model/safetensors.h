// The safetensors file format: 8 bytes of header length (little-endian), a JSON header that gives each
// tensor's dtype, shape and place, then the tensors' bytes without gaps.
#ifndef EFLA_MODEL_SAFETENSORS_H_
#define EFLA_MODEL_SAFETENSORS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/checkpoint.h"
#include "model/files.h"

namespace efla {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// "F32", "F16", "BF16".
std::string_view SafetensorsName(DType dtype);
// DATA_LOSS, naming the tensor and the place of its first NaN or infinity in it.
absl::Status CheckFinite(const TensorInfo& tensor);
// "[4096, 256]"
std::string ShapeText(std::span<const int64_t> shape);

// The tensors of a whole file's bytes, in order of place; their data points into `file`, which must lie
// aligned to 8 bytes. `name` stands in messages. DATA_LOSS when the file is shorter than it says,
// INVALID_ARGUMENT for any other fault: dtypes other than F32, F16 and BF16, overlapping or missing bytes, a
// size that is not the shape's, a tensor that does not lie aligned to its element size.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(std::string_view file, std::string_view name);

// A file, mapped.
class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<const SafetensorsFile>> Open(const std::string& path);
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

 private:
  SafetensorsFile(std::unique_ptr<const MappedFile> file, std::vector<TensorInfo> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}
  std::unique_ptr<const MappedFile> file_;
  std::vector<TensorInfo> tensors_;
};

// Writes the tensors in order of place (float32 first, so that all lie aligned) and syncs the file.
// `written` is called after each: its memory is not needed any more.
absl::Status WriteSafetensors(const std::string& path, std::span<const TensorInfo> tensors,
                              const std::function<void(const TensorInfo&)>& written = {});

}  // namespace efla

#endif  // EFLA_MODEL_SAFETENSORS_H_
