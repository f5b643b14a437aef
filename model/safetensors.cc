#include "model/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "model/strict_json.h"

namespace efla {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors bytes are used as they lie");

constexpr size_t kLengthBytes = 8;
constexpr size_t kHeaderAlignment = 8;
constexpr size_t kMaxDimensions = 8;
constexpr size_t kMaxNameBytes = 512;
constexpr int64_t kWriteBytes = 64 << 20;  // a write call's size: Linux takes less than 2 GiB at once

std::optional<DType> FindDType(std::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (SafetensorsName(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// One entry of the header before its place is known to be good.
struct Entry {
  TensorInfo tensor;
  int64_t begin = 0, end = 0;
};

bool IsSize(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
}

// The message is about the tensor; the caller adds file and name.
absl::StatusOr<Entry> ParseEntry(const json& fields, int64_t data_bytes) {
  const auto bad = [](const std::string& message) { return absl::InvalidArgumentError(message); };
  if (!fields.is_object()) return bad("its header entry is not an object");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!fields.contains(key)) return bad(absl::StrFormat("%s is missing", key));
  }
  Entry entry;
  const json& dtype = fields["dtype"];
  const std::optional<DType> known = dtype.is_string() ? FindDType(dtype.get<std::string>()) : std::nullopt;
  if (!known) {
    return bad(absl::StrFormat("dtype is %s; F32, F16 or BF16 is needed", Printable(dtype.dump(), 40)));
  }
  entry.tensor.dtype = *known;

  const json& shape = fields["shape"];
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return bad(absl::StrFormat("shape is %s; a list of at most %d sizes is needed",
                               Printable(shape.dump(), 60), kMaxDimensions));
  }
  int64_t bytes = static_cast<int64_t>(ByteSize(*known));
  for (const json& size : shape) {
    if (!IsSize(size)) return bad(absl::StrFormat("shape holds %s", Printable(size.dump(), 40)));
    entry.tensor.shape.push_back(size.get<int64_t>());
    if (__builtin_mul_overflow(bytes, size.get<int64_t>(), &bytes)) {
      return bad(absl::StrFormat("shape %s is larger than any file", Printable(shape.dump(), 60)));
    }
  }

  const json& offsets = fields["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !IsSize(offsets[0]) || !IsSize(offsets[1])) {
    return bad(absl::StrFormat("data_offsets is %s; [begin, end] is needed", Printable(offsets.dump(), 60)));
  }
  entry.begin = offsets[0].get<int64_t>();
  entry.end = offsets[1].get<int64_t>();
  if (entry.begin > entry.end) {
    return bad(absl::StrFormat("data_offsets end at %d, before they begin at %d", entry.end, entry.begin));
  }
  if (entry.end > data_bytes) {
    return absl::DataLossError(
        absl::StrFormat("data_offsets end at %d; the file holds %d bytes of data", entry.end, data_bytes));
  }
  if (entry.end - entry.begin != bytes) {
    return bad(absl::StrFormat("data_offsets span %d bytes; shape %s of %s takes %d", entry.end - entry.begin,
                               ShapeText(entry.tensor.shape), SafetensorsName(*known), bytes));
  }
  return entry;
}

// The tensors must cover the data exactly, each byte once.
absl::Status CheckPlaces(std::vector<Entry>& entries, int64_t data_bytes, std::string_view name) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = 0;
  std::string_view before = "the header";
  for (const Entry& entry : entries) {
    if (entry.begin != covered) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s begins at byte %d of the data, but %s ends at %d: tensors may "
                          "neither overlap nor leave "
                          "gaps",
                          name, Printable(entry.tensor.name), entry.begin, Printable(before), covered));
    }
    covered = entry.end;
    before = entry.tensor.name;
  }
  if (covered != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %d bytes of data, but the tensors end at %d", name, data_bytes, covered));
  }
  return absl::OkStatus();
}

absl::Status WriteAll(int descriptor, const std::string& path, const void* data, int64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = write(descriptor, next, static_cast<size_t>(std::min(bytes, kWriteBytes)));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const std::string message = absl::StrFormat("%s: cannot write: %s", path, std::strerror(errno));
      return errno == ENOSPC || errno == EDQUOT ? absl::ResourceExhaustedError(message)
                                                : absl::InternalError(message);
    }
    next += wrote;
    bytes -= wrote;
  }
  return absl::OkStatus();
}

// A value is NaN or infinite when all bits of its exponent are set. -1: none is.
template <typename Bits>
int64_t FirstNotFinite(const TensorInfo& tensor, Bits exponent) {
  constexpr int64_t kBlock = 4096;  // one branch a block, so that the compiler can use vectors inside
  const auto* const bits = static_cast<const Bits*>(tensor.data);
  const int64_t count = tensor.bytes() / static_cast<int64_t>(sizeof(Bits));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    Bits found = 0;
    for (int64_t i = begin; i < end; ++i) {
      found |= static_cast<Bits>(static_cast<Bits>(bits[i] & exponent) == exponent);
    }
    if (found == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (static_cast<Bits>(bits[i] & exponent) == exponent) return i;
    }
  }
  return -1;
}

}  // namespace

std::string_view SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
  }
  return "?";
}

absl::Status CheckFinite(const TensorInfo& tensor) {
  int64_t at = -1;
  switch (tensor.dtype) {
    case DType::kF32:
      at = FirstNotFinite<uint32_t>(tensor, 0x7F800000);
      break;
    case DType::kF16:
      at = FirstNotFinite<uint16_t>(tensor, 0x7C00);
      break;
    case DType::kBF16:
      at = FirstNotFinite<uint16_t>(tensor, 0x7F80);
      break;
  }
  if (at < 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("tensor %s: element %d is NaN or infinite", tensor.name, at));
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += absl::StrFormat("%s%d", i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(std::string_view file, std::string_view name) {
  if (file.size() < kLengthBytes) {
    return absl::DataLossError(
        absl::StrFormat("%s: %d bytes; a safetensors file has at least %d", name, file.size(), kLengthBytes));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: a header of %d bytes; at most %d are allowed",
                                                      name, header_bytes, kMaxSafetensorsHeaderBytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return absl::DataLossError(
        absl::StrFormat("%s: a header of %d bytes in a file of %d", name, header_bytes, file.size()));
  }
  const std::string_view data = file.substr(kLengthBytes + header_bytes);
  const auto data_bytes = static_cast<int64_t>(data.size());

  absl::StatusOr<json> header =
      ParseJsonObject(file.substr(kLengthBytes, header_bytes), absl::StrFormat("%s: header", name));
  if (!header.ok()) return header.status();
  std::vector<Entry> entries;
  for (const auto& [tensor_name, fields] : header->items()) {
    if (tensor_name == "__metadata__") {
      if (fields.is_object()) continue;
      return absl::InvalidArgumentError(absl::StrFormat("%s: __metadata__ is not an object", name));
    }
    absl::StatusOr<Entry> entry =
        tensor_name.size() > kMaxNameBytes
            ? absl::InvalidArgumentError(absl::StrFormat("its name has %d bytes; at most %d are allowed",
                                                         tensor_name.size(), kMaxNameBytes))
            : ParseEntry(fields, data_bytes);
    if (!entry.ok()) {
      return absl::Status(entry.status().code(),
                          absl::StrFormat("%s: tensor %s: %s", name, Printable(tensor_name),
                                          std::string(entry.status().message())));
    }
    entry->tensor.name = tensor_name;
    entries.push_back(*std::move(entry));
  }
  if (absl::Status status = CheckPlaces(entries, data_bytes, name); !status.ok()) return status;

  std::vector<TensorInfo> tensors;
  for (Entry& entry : entries) {
    entry.tensor.data = data.data() + entry.begin;
    if (reinterpret_cast<uintptr_t>(entry.tensor.data) % ByteSize(entry.tensor.dtype) != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s lies at byte %d, which is not a multiple of its %d-byte elements; write the file "
          "again with a writer that aligns tensors",
          name, Printable(entry.tensor.name),
          kLengthBytes + header_bytes + static_cast<uint64_t>(entry.begin), ByteSize(entry.tensor.dtype)));
    }
    tensors.push_back(std::move(entry.tensor));
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<const SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  absl::StatusOr<std::unique_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<std::vector<TensorInfo>> tensors = ParseSafetensors((*file)->contents(), path);
  if (!tensors.ok()) return tensors.status();
  return std::unique_ptr<const SafetensorsFile>(new SafetensorsFile(*std::move(file), *std::move(tensors)));
}

absl::Status WriteSafetensors(const std::string& path, std::span<const TensorInfo> tensors,
                              const std::function<void(const TensorInfo&)>& written) {
  std::vector<TensorInfo> ordered(tensors.begin(), tensors.end());
  std::stable_partition(ordered.begin(), ordered.end(),
                        [](const TensorInfo& tensor) { return tensor.dtype == DType::kF32; });
  json header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (const TensorInfo& tensor : ordered) {
    header[tensor.name] = {{"dtype", std::string(SafetensorsName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const uint64_t header_bytes = text.size();

  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) {
    return absl::InternalError(absl::StrFormat("%s: cannot create: %s", path, std::strerror(errno)));
  }
  const absl::Cleanup closer = [&] { close(descriptor); };
  if (absl::Status status = WriteAll(descriptor, path, &header_bytes, kLengthBytes); !status.ok())
    return status;
  if (absl::Status status = WriteAll(descriptor, path, text.data(), static_cast<int64_t>(text.size()));
      !status.ok()) {
    return status;
  }
  for (const TensorInfo& tensor : ordered) {
    if (absl::Status status = WriteAll(descriptor, path, tensor.data, tensor.bytes()); !status.ok()) {
      return status;
    }
    if (written) written(tensor);
  }
  if (fsync(descriptor) != 0) {
    return absl::InternalError(absl::StrFormat("%s: cannot sync: %s", path, std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace efla
