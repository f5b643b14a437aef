#include "kernels/cuda/step_arrays.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace efla::cuda {

StepArrays::~StepArrays() {
  cudaFree(device_);
  cudaFreeHost(staging_);
}

cudaError_t StepArrays::Allocate(int max_tokens, int max_decode, int max_samples, int64_t vocab_size) {
  constexpr size_t kAlignment = 64;
  size_t bytes = kAlignment;  // the counts
  const auto place = [&bytes](size_t count, size_t element_bytes) {
    const size_t offset = bytes;
    bytes = (bytes + count * element_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  read_slot_ = place(max_decode, sizeof(int32_t));
  write_slot_ = place(max_decode, sizeof(int32_t));
  sample_token_row_ = place(max_samples, sizeof(int32_t));
  top_begin_ = place(max_samples, sizeof(int32_t));
  tokens_ = place(max_tokens, sizeof(int32_t));
  samples_ = place(max_samples, sizeof(SampleRow));
  // As many segments, and chunks, as tokens at the most.
  segments_ = place(max_tokens, sizeof(Segment));
  first_chunk_ = place(max_tokens, sizeof(int32_t));
  chunks_ = place(max_tokens, sizeof(Chunk));
  adjustments_ = place(static_cast<size_t>(max_decode) * kMaxAdjustments, sizeof(LogitAdjustment));
  masks_ = place(static_cast<size_t>(max_decode) * MaskWords(vocab_size), sizeof(uint32_t));
  cudaFree(std::exchange(device_, nullptr));
  cudaFreeHost(std::exchange(staging_, nullptr));
  const cudaError_t error = cudaMalloc(&device_, bytes);
  return error != cudaSuccess ? error : cudaHostAlloc(&staging_, bytes, cudaHostAllocDefault);
}

void StepArrays::Fill(const StepInput& input, std::span<const Segment> segments, int padded_decode,
                      int padded_samples, int chunk_capacity, int boundary, std::vector<Pass>& passes) {
  const int num_samples = static_cast<int>(input.samples.size());
  EFLA_CHECK(input.num_decode <= padded_decode && num_samples <= padded_samples);
  EFLA_CHECK(segments.empty() || input.num_decode == padded_decode);  // tokens of segments follow
  int32_t* counts = At<int32_t>(staging_, 0);
  counts[0] = input.num_decode;
  counts[1] = num_samples;
  const auto copy_padded = [](auto from, auto* to, size_t padded) {
    to = std::copy(from.begin(), from.end(), to);
    std::fill_n(to, padded - std::min(padded, from.size()), 0);
  };
  copy_padded(input.decode_read_slot, At<int32_t>(staging_, read_slot_), padded_decode);
  copy_padded(input.decode_write_slot, At<int32_t>(staging_, write_slot_), padded_decode);
  copy_padded(input.tokens, At<int32_t>(staging_, tokens_), padded_decode);
  SampleRow* samples = At<SampleRow>(staging_, samples_);
  int32_t* sample_token_row = At<int32_t>(staging_, sample_token_row_);
  int32_t* top_begin = At<int32_t>(staging_, top_begin_);
  num_top_ = 0;
  for (int i = 0; i < padded_samples; ++i) {
    samples[i] = i < num_samples ? input.samples[i] : SampleRow{};
    sample_token_row[i] = samples[i].token_row;
    top_begin[i] = num_top_;
    num_top_ += samples[i].num_top;
  }
  used_bytes_ = samples_ + padded_samples * sizeof(SampleRow);
  adjustment_bytes_ = input.adjustments.size_bytes();
  std::copy(input.adjustments.begin(), input.adjustments.end(), At<LogitAdjustment>(staging_, adjustments_));
  mask_bytes_ = input.masks.size_bytes();
  std::copy(input.masks.begin(), input.masks.end(), At<uint32_t>(staging_, masks_));

  passes.clear();
  if (segments.empty()) return;
  std::copy(segments.begin(), segments.end(), At<Segment>(staging_, segments_));
  int32_t* first_chunk = At<int32_t>(staging_, first_chunk_);
  Chunk* chunks = At<Chunk>(staging_, chunks_);
  int num_chunks = 0;
  for (int index = 0; index < static_cast<int>(segments.size()); ++index) {
    const Segment& segment = segments[index];
    first_chunk[index] = num_chunks;
    const int segment_chunks = (segment.num_tokens + kChunkTokens - 1) / kChunkTokens;
    EFLA_CHECK(segment_chunks <= chunk_capacity);
    if (passes.empty() || index == boundary || segment.follows >= passes.back().segment_begin ||
        passes.back().num_chunks + segment_chunks > chunk_capacity) {
      passes.push_back({index, 0, num_chunks, 0});
    }
    ++passes.back().num_segments;
    passes.back().num_chunks += segment_chunks;
    for (int begin = 0; begin < segment.num_tokens; begin += kChunkTokens) {
      chunks[num_chunks++] = {.segment = index,
                              .token_begin = segment.token_begin + begin,
                              .num_tokens = std::min(kChunkTokens, segment.num_tokens - begin)};
    }
  }
  used_bytes_ = chunks_ + num_chunks * sizeof(Chunk);
}

cudaError_t StepArrays::UploadPart(size_t offset, size_t bytes, cudaStream_t stream) const {
  if (bytes == 0) return cudaSuccess;
  return cudaMemcpyAsync(At<char>(device_, offset), At<char>(staging_, offset), bytes, cudaMemcpyHostToDevice,
                         stream);
}

cudaError_t StepArrays::Upload(cudaStream_t stream) const {
  cudaError_t error = UploadPart(0, used_bytes_, stream);
  if (error == cudaSuccess) error = UploadPart(adjustments_, adjustment_bytes_, stream);
  if (error == cudaSuccess) error = UploadPart(masks_, mask_bytes_, stream);
  return error;
}

}  // namespace efla::cuda
