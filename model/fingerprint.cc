#include "model/fingerprint.h"

#include <openssl/evp.h>

#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace efla {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  EFLA_CHECK(context_->evp != nullptr);
  EFLA_CHECK(EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Add(std::string_view bytes) {
  EFLA_CHECK(EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()) == 1);
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int bytes = 0;
  EFLA_CHECK(EVP_DigestFinal_ex(context_->evp, digest, &bytes) == 1);
  std::string hex;
  for (unsigned int i = 0; i < bytes; ++i) hex += absl::StrFormat("%02x", digest[i]);
  return hex;
}

void BeginModel(Sha256& hash, const ModelConfig& config) {
  hash.Add(
      absl::StrFormat("efla model 1\ntype %s\nvocab %d\nhidden %d\nintermediate %d\nlayers %d\nheads %d\n"
                      "d_k %d\nd_v %d\nconv %d\nbeta %d\ngate %d\nneg_eigval %d\ntied %d\n"
                      "activation %d\neps %a\n",
                      ModelTypeName(config.type), config.vocab_size, config.hidden_size,
                      config.intermediate_size, config.num_layers, config.num_heads, config.d_k, config.d_v,
                      config.conv_size, config.use_beta, config.use_gate, config.allow_neg_eigval,
                      config.tie_word_embeddings, static_cast<int>(config.qk_activation), config.norm_eps));
}

void BeginTensor(Sha256& hash, const TensorInfo& tensor) {
  std::string header = absl::StrFormat("tensor %d %s dtype %d shape", tensor.name.size(), tensor.name,
                                       static_cast<int>(tensor.dtype));
  for (int64_t size : tensor.shape) header += absl::StrFormat(" %d", size);
  hash.Add(header + "\n");
}

}  // namespace efla
