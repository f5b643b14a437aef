// One step's input on the GPU, at addresses that stay the same from step to step.
#ifndef EFLA_KERNELS_CUDA_STEP_ARRAYS_H_
#define EFLA_KERNELS_CUDA_STEP_ARRAYS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/launchers.h"
#include "kernels/op_args.h"

namespace efla::cuda {

// The arrays lie in one block, those of decode steps first, so that a step is one copy of the block's used
// part. Lists and masks of draws, large and rare, lie behind it and are copied on their own, where there are
// any.
class StepArrays {
 public:
  // Segments that one round of the chunk kernels serves.
  struct Pass {
    int segment_begin, num_segments;
    int chunk_begin, num_chunks;
  };

  StepArrays() = default;
  StepArrays(const StepArrays&) = delete;
  StepArrays& operator=(const StepArrays&) = delete;
  ~StepArrays();

  cudaError_t Allocate(int max_tokens, int max_decode, int max_samples, int64_t vocab_size);

  // Fills the staging memory. Decode rows and sample rows are padded to the numbers given, with token 0 and
  // row 0. `segments` are the step's, possibly cut further. `passes` receives them in order, at most
  // `chunk_capacity` chunks a pass, none that goes past segment `boundary`, and no segment in the pass of the
  // one that it follows.
  void Fill(const StepInput& input, std::span<const Segment> segments, int padded_decode, int padded_samples,
            int chunk_capacity, int boundary, std::vector<Pass>& passes);
  // Copies what Fill wrote.
  cudaError_t Upload(cudaStream_t stream) const;

  // Alternatives that the sample rows of the last Fill ask for, together.
  int num_top() const { return num_top_; }

  const int32_t* num_decode() const { return At<int32_t>(device_, 0); }
  const int32_t* num_samples() const { return At<int32_t>(device_, 0) + 1; }
  const int32_t* read_slot() const { return At<int32_t>(device_, read_slot_); }
  const int32_t* write_slot() const { return At<int32_t>(device_, write_slot_); }
  const int32_t* sample_token_row() const { return At<int32_t>(device_, sample_token_row_); }
  const int32_t* top_begin() const { return At<int32_t>(device_, top_begin_); }
  const int32_t* tokens() const { return At<int32_t>(device_, tokens_); }
  const SampleRow* samples() const { return At<SampleRow>(device_, samples_); }
  const Segment* segments() const { return At<Segment>(device_, segments_); }
  const LogitAdjustment* adjustments() const { return At<LogitAdjustment>(device_, adjustments_); }
  const uint32_t* masks() const { return At<uint32_t>(device_, masks_); }
  const int32_t* first_chunk() const { return At<int32_t>(device_, first_chunk_); }
  const Chunk* chunks() const { return At<Chunk>(device_, chunks_); }

 private:
  cudaError_t UploadPart(size_t offset, size_t bytes, cudaStream_t stream) const;

  template <typename T>
  static T* At(void* base, size_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
  }

  void* device_ = nullptr;
  void* staging_ = nullptr;  // pinned
  size_t read_slot_ = 0, write_slot_ = 0, sample_token_row_ = 0, top_begin_ = 0, tokens_ = 0, samples_ = 0;
  size_t segments_ = 0, first_chunk_ = 0, chunks_ = 0;  // offsets
  size_t adjustments_ = 0, masks_ = 0;                  // likewise
  size_t used_bytes_ = 0, adjustment_bytes_ = 0, mask_bytes_ = 0;
  int num_top_ = 0;
};

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_STEP_ARRAYS_H_
