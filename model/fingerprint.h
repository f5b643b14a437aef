// SHA-256, and what a model's fingerprint is made of.
#ifndef EFLA_MODEL_FINGERPRINT_H_
#define EFLA_MODEL_FINGERPRINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "model/checkpoint.h"
#include "model/config.h"

namespace efla {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Add(std::string_view bytes);
  std::string Hex();  // lower-case; once, at the end

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

// A model's fingerprint: BeginModel, then for each tensor in order of name BeginTensor and its bytes.
// Token ids with a meaning (BOS, EOS) are no part of it: they change no state.
void BeginModel(Sha256& hash, const ModelConfig& config);
void BeginTensor(Sha256& hash, const TensorInfo& tensor);

}  // namespace efla

#endif  // EFLA_MODEL_FINGERPRINT_H_
