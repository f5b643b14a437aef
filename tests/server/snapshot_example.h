// Small models, contexts and states for tests of snapshots; the golden snapshots are made of them.
#ifndef EFLA_TESTS_SERVER_SNAPSHOT_EXAMPLE_H_
#define EFLA_TESTS_SERVER_SNAPSHOT_EXAMPLE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/state_pool.h"
#include "server/sessions/snapshot.h"

namespace efla {

inline ModelConfig ExampleConfig() {
  ModelConfig config;
  config.vocab_size = 300;
  config.hidden_size = 16;
  config.intermediate_size = 16;
  config.num_layers = 2;
  config.num_heads = 2;
  config.d_k = 3;
  config.d_v = 5;
  config.conv_size = 4;
  return config;
}

inline SnapshotIdentity ExampleIdentity() {
  return {.weights_fingerprint = std::string(63, 'a') + "1",
          .tokenizer_fingerprint = std::string(63, 'b') + "2",
          .numerics = "cpu, float32, test build"};
}

// Numbers that differ from each other, from the model's sizes only.
inline std::vector<std::byte> ExampleState(const ModelConfig& config) {
  const auto bytes = static_cast<size_t>(StateLayout::Of(config).state_bytes());
  std::vector<float> state(bytes / sizeof(float));
  for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(i + 1) * 0.37f - 40.0f;
  const auto raw = std::as_bytes(std::span(state));
  return {raw.begin(), raw.end()};
}

// A context of `fed` tokens, with a pending one or not, and `prompt` more that wait.
inline ContextTokens ExampleTokens(int64_t fed, bool pending, int64_t prompt, int64_t vocab_size) {
  const auto id = [&](int64_t i) { return static_cast<TokenId>((7 * i + 3) % vocab_size); };
  ContextTokens tokens;
  tokens.fed_tokens = fed;
  int64_t next = fed;
  if (pending) tokens.pending_token = id(next++);
  for (int64_t i = 0; i < prompt; ++i) tokens.pending_prompt.push_back(id(next++));
  for (int64_t i = std::max<int64_t>(0, next - ContextTokens::kMaxTail); i < next; ++i) {
    tokens.tail.push_back(id(i));
  }
  return tokens;
}

inline bool SameTokens(const ContextTokens& a, const ContextTokens& b) {
  return a.fed_tokens == b.fed_tokens && a.pending_token == b.pending_token &&
         a.pending_prompt == b.pending_prompt && a.tail == b.tail;
}

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_SNAPSHOT_EXAMPLE_H_
