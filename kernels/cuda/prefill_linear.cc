#include "kernels/cuda/prefill_linear.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_status.h"

namespace efla::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kSmallestBucket = 64;
constexpr int kMaxCandidates = 8;  // asked of the heuristic for a bucket
constexpr int kMaxTimedCandidates = 3;
// Timing one shape stops after this; a bucket then takes its first choice with the right bits.
constexpr double kTimedSeconds = 0.1;
constexpr int kTimedRuns = 3;
constexpr int kTrialRows = 16;  // different ones

DeviceStatus CublasError(const char* what, cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {DeviceStatus::Code::kInternal, std::string(what) + ": " + cublasLtGetStatusString(status)};
}

// The problem in cublasLt's column-major terms: out^T [outputs, rows] = weight^T^T [outputs, cols] y^T [cols,
// rows].
struct Problem {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t weight, y, out;
  float beta;
};

DeviceStatus MakeProblem(ActType act, int64_t outputs, int64_t cols, PrefillOutput output, int64_t rows,
                         Problem& problem) {
  const cudaDataType_t act_type = act == ActType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
  const cublasOperation_t transposed = CUBLAS_OP_T;
  cublasStatus_t status = cublasLtMatmulDescInit(&problem.matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulDescSetAttribute(&problem.matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                            sizeof(transposed));
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatrixLayoutInit(&problem.weight, act_type, cols, outputs, cols);
  }
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatrixLayoutInit(&problem.y, act_type, cols, rows, cols);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatrixLayoutInit(&problem.out, output == PrefillOutput::kAct ? act_type : CUDA_R_32F,
                                      outputs, rows, outputs);
  }
  problem.beta = output == PrefillOutput::kAct ? 0.0f : 1.0f;
  return CublasError("cublasLt product descriptors", status);
}

// Whether one block sums a whole output, so that no other row count can change its order.
bool SumsInOnePiece(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t split_k = 1;
  uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split_k,
                                           sizeof(split_k), &written) != CUBLAS_STATUS_SUCCESS ||
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction,
                                           sizeof(reduction), &written) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  return split_k >= 0 && split_k <= 1 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

// Whether its tile is too small to be any use to a prompt (the generic 16 x 16 kernels).
bool HasTinyTile(const cublasLtMatmulAlgo_t& algorithm) {
  uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
  size_t written = 0;
  return cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof(tile),
                                              &written) == CUBLAS_STATUS_SUCCESS &&
         tile != CUBLASLT_MATMUL_TILE_UNDEFINED && tile < CUBLASLT_MATMUL_TILE_32x64;
}

// Device memory and events of one Tune call.
struct Trial {
  void* y = nullptr;
  void* weight = nullptr;
  void* out = nullptr;
  void* expected = nullptr;
  void* mismatches = nullptr;  // int32
  cudaEvent_t begin = nullptr, end = nullptr;

  Trial() = default;
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  ~Trial() {
    for (void* memory : {y, weight, out, expected, mismatches}) cudaFree(memory);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
};

}  // namespace

struct PrefillLinear::Handle {
  cublasLtHandle_t lt = nullptr;
  void* workspaces[kMaxLanes] = {};

  ~Handle() {
    if (lt != nullptr) cublasLtDestroy(lt);
    for (void* workspace : workspaces) cudaFree(workspace);
  }

  // The heuristic's choices for a row count that sum in one piece, best first; those with tiny tiles only
  // where there is no other.
  DeviceStatus Candidates(Problem& problem, std::vector<cublasLtMatmulAlgo_t>& candidates) const {
    cublasLtMatmulPreferenceOpaque_t preference;
    const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasStatus_t status = cublasLtMatmulPreferenceInit(&preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kWorkspaceBytes, sizeof(kWorkspaceBytes));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                    &no_reduction, sizeof(no_reduction));
    }
    std::vector<cublasLtMatmulAlgo_t> tiny;
    cublasLtMatmulHeuristicResult_t results[kMaxCandidates];
    int count = 0;
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(lt, &problem.matmul, &problem.weight, &problem.y, &problem.out,
                                              &problem.out, &preference, kMaxCandidates, results, &count);
    }
    for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS && SumsInOnePiece(results[i].algo)) {
        (HasTinyTile(results[i].algo) ? tiny : candidates).push_back(results[i].algo);
      }
    }
    if (candidates.empty()) candidates = std::move(tiny);
    return CublasError("cublasLt heuristic", status);
  }

  cublasStatus_t Matmul(const LaunchContext& context, Problem& problem, const void* y, const void* weight,
                        void* out, const cublasLtMatmulAlgo_t& algorithm) const {
    const float alpha = 1.0f;
    return cublasLtMatmul(lt, &problem.matmul, &alpha, weight, &problem.weight, y, &problem.y, &problem.beta,
                          out, &problem.out, out, &problem.out, &algorithm, workspaces[context.lane],
                          kWorkspaceBytes, context.stream);
  }
};

// One algorithm for each power of two of rows from kSmallestBucket on; the last serves all that is larger.
struct PrefillLinear::Plan {
  std::vector<cublasLtMatmulAlgo_t> algorithms;

  const cublasLtMatmulAlgo_t& For(int rows) const {
    size_t bucket = 0;
    for (int64_t size = kSmallestBucket; size < rows; size *= 2) ++bucket;
    return algorithms[std::min(bucket, algorithms.size() - 1)];
  }
};

PrefillLinear::PrefillLinear() = default;
PrefillLinear::~PrefillLinear() = default;

DeviceStatus PrefillLinear::Open() {
  handle_ = std::make_unique<Handle>();
  DeviceStatus status = CublasError("cublasLtCreate", cublasLtCreate(&handle_->lt));
  for (void*& workspace : handle_->workspaces) {
    if (status.ok()) status = CudaStatus("cublasLt workspace", cudaMalloc(&workspace, kWorkspaceBytes));
  }
  return status;
}

DeviceStatus PrefillLinear::Tune(const LaunchContext& context, int64_t outputs, int64_t cols,
                                 PrefillOutput output, int max_rows) {
  EFLA_CHECK(handle_ != nullptr && max_rows > 0);
  std::unique_ptr<Plan>& place = plans_[{outputs, cols, output}];
  if (place != nullptr) return {};
  auto plan = std::make_unique<Plan>();

  // The trial input repeats kTrialRows rows, so every result must repeat theirs.
  constexpr size_t kActBytes = 2;
  const size_t out_bytes = output == PrefillOutput::kAct ? kActBytes : sizeof(float);
  const size_t row_bytes = outputs * out_bytes;
  EFLA_CHECK(row_bytes % sizeof(uint32_t) == 0);
  const int trial_rows = std::min(kTrialRows, max_rows);
  std::vector<uint16_t> inputs(kTrialRows * cols);
  uint32_t random = 1;
  for (uint16_t& value : inputs) {
    // +-[1, 2) in either type: the sign, the exponent of 1, random upper mantissa bits.
    random = random * 1664525u + 1013904223u;
    const uint32_t sign = random >> 31 << 15;
    value = static_cast<uint16_t>(context.act == ActType::kF16 ? sign | 0x3c00u | (random >> 8 & 0x3ffu)
                                                               : sign | 0x3f80u | (random >> 8 & 0x7fu));
  }
  Trial trial;
  const auto allocate = [](void** memory, size_t bytes) {
    return CudaStatus("a trial", cudaMalloc(memory, bytes));
  };
  DeviceStatus status;
  // Fills [rows, cols] with the first `count` rows of inputs, repeated.
  const auto fill = [&](void* to, int64_t rows, int count) {
    const size_t bytes = rows * cols * kActBytes;
    size_t filled = std::min<int64_t>(rows, count) * cols * kActBytes;
    DeviceStatus result = CudaStatus(
        "a trial", cudaMemcpyAsync(to, inputs.data(), filled, cudaMemcpyHostToDevice, context.stream));
    for (; result.ok() && filled < bytes; filled *= 2) {
      result = CudaStatus(
          "a trial", cudaMemcpyAsync(static_cast<char*>(to) + filled, to, std::min(filled, bytes - filled),
                                     cudaMemcpyDeviceToDevice, context.stream));
    }
    return result;
  };
  status = allocate(&trial.y, max_rows * cols * kActBytes);
  if (status.ok()) status = allocate(&trial.weight, outputs * cols * kActBytes);
  if (status.ok()) status = allocate(&trial.out, max_rows * row_bytes);
  if (status.ok()) status = allocate(&trial.expected, trial_rows * row_bytes);
  if (status.ok()) status = allocate(&trial.mismatches, sizeof(int32_t));
  if (status.ok()) status = CudaStatus("a trial", cudaEventCreate(&trial.begin));
  if (status.ok()) status = CudaStatus("a trial", cudaEventCreate(&trial.end));
  if (status.ok()) status = fill(trial.y, max_rows, trial_rows);
  if (status.ok()) status = fill(trial.weight, outputs, kTrialRows);

  // The result of `algorithm` for this many rows, its time, and whether its rows repeat `trial.expected`.
  const auto run = [&](const cublasLtMatmulAlgo_t& algorithm, int rows, bool compare, int timed_runs,
                       bool& equal, float& seconds) {
    equal = false;
    Problem problem;
    DeviceStatus result = MakeProblem(context.act, outputs, cols, output, rows, problem);
    if (result.ok())
      result = CudaStatus("trial", cudaMemsetAsync(trial.out, 0, rows * row_bytes, context.stream));
    // An algorithm that does not take these sizes is none of ours, not an error.
    if (!result.ok() || handle_->Matmul(context, problem, trial.y, trial.weight, trial.out, algorithm) !=
                            CUBLAS_STATUS_SUCCESS) {
      return result;
    }
    if (!compare) {
      equal = true;
      return CudaStatus("trial", cudaMemcpyAsync(trial.expected, trial.out, trial_rows * row_bytes,
                                                 cudaMemcpyDeviceToDevice, context.stream));
    }
    int32_t mismatches = 0;
    result = CudaStatus("trial", cudaMemsetAsync(trial.mismatches, 0, sizeof(int32_t), context.stream));
    if (result.ok()) {
      result = CudaStatus(
          "trial", LaunchCompareRows(context, trial.out, rows, row_bytes / sizeof(uint32_t), trial.expected,
                                     trial_rows, static_cast<int32_t*>(trial.mismatches)));
    }
    if (result.ok()) result = CudaStatus("trial", cudaEventRecord(trial.begin, context.stream));
    for (int i = 0; i < timed_runs && result.ok(); ++i) {
      result = CublasError("trial",
                           handle_->Matmul(context, problem, trial.y, trial.weight, trial.out, algorithm));
    }
    if (result.ok()) result = CudaStatus("trial", cudaEventRecord(trial.end, context.stream));
    if (result.ok()) {
      result = CudaStatus("trial", cudaMemcpyAsync(&mismatches, trial.mismatches, sizeof(mismatches),
                                                   cudaMemcpyDeviceToHost, context.stream));
    }
    if (result.ok()) result = CudaStatus("trial", cudaStreamSynchronize(context.stream));
    float milliseconds = 0;
    if (result.ok())
      result = CudaStatus("trial", cudaEventElapsedTime(&milliseconds, trial.begin, trial.end));
    seconds = timed_runs > 0 ? milliseconds / 1000 / static_cast<float>(timed_runs) : 0.0f;
    equal = result.ok() && mismatches == 0;
    return result;
  };

  // The reference: the first choice for the most rows whose rows all agree.
  std::vector<int> buckets;
  for (int64_t rows = kSmallestBucket; rows < max_rows; rows *= 2) buckets.push_back(static_cast<int>(rows));
  buckets.push_back(max_rows);
  Problem largest;
  if (status.ok()) status = MakeProblem(context.act, outputs, cols, output, max_rows, largest);
  std::vector<cublasLtMatmulAlgo_t> candidates;
  if (status.ok()) status = handle_->Candidates(largest, candidates);
  const cublasLtMatmulAlgo_t* reference = nullptr;
  for (size_t i = 0; i < candidates.size() && status.ok() && reference == nullptr; ++i) {
    bool equal = false;
    float seconds = 0;
    status = run(candidates[i], max_rows, false, 0, equal, seconds);
    if (status.ok() && equal) status = run(candidates[i], max_rows, true, 0, equal, seconds);
    if (status.ok() && equal) reference = &candidates[i];
  }
  if (!status.ok()) return status;
  if (reference == nullptr) {
    return {DeviceStatus::Code::kInternal, "cublasLt has no product for [" + std::to_string(outputs) + ", " +
                                               std::to_string(cols) +
                                               "] whose rows do not depend on each other"};
  }

  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(kTimedSeconds);
  for (const int rows : buckets) {
    Problem problem;
    status = MakeProblem(context.act, outputs, cols, output, rows, problem);
    std::vector<cublasLtMatmulAlgo_t> choices;
    if (status.ok()) status = handle_->Candidates(problem, choices);
    if (!status.ok()) return status;
    choices.resize(std::min<size_t>(choices.size(), kMaxTimedCandidates));
    const cublasLtMatmulAlgo_t* best = reference;
    float best_seconds = 0;
    for (const cublasLtMatmulAlgo_t& choice : choices) {
      if (best != reference && std::chrono::steady_clock::now() - begin > limit) break;
      // The bucket's most rows last, for its time; its fewest only for their bits.
      bool equal_fewest = false, equal_most = false;
      float seconds = 0;
      status = run(choice, rows / 2 + 1, true, 0, equal_fewest, seconds);
      if (status.ok() && equal_fewest) status = run(choice, rows, true, kTimedRuns, equal_most, seconds);
      if (!status.ok()) return status;
      if (equal_fewest && equal_most && (best == reference || seconds < best_seconds)) {
        best = &choice;
        best_seconds = seconds;
      }
    }
    plan->algorithms.push_back(*best);
  }
  place = std::move(plan);
  return {};
}

DeviceStatus PrefillLinear::Run(const LaunchContext& context, const void* y, int num_rows, const void* weight,
                                int64_t outputs, int64_t cols, PrefillOutput output, void* out) {
  const auto plan = plans_.find({outputs, cols, output});
  EFLA_CHECK(plan != plans_.end() && plan->second != nullptr);
  Problem problem;
  DeviceStatus status = MakeProblem(context.act, outputs, cols, output, num_rows, problem);
  if (!status.ok()) return status;
  return CublasError("cublasLtMatmul",
                     handle_->Matmul(context, problem, y, weight, out, plan->second->For(num_rows)));
}

}  // namespace efla::cuda
