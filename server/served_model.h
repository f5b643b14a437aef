// What the services answer from once the model is loaded. Immutable; views only.
#ifndef EFLA_SERVER_SERVED_MODEL_H_
#define EFLA_SERVER_SERVED_MODEL_H_

#include <cstdint>
#include <string>

#include "model/chat.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/constraint/constraint.h"
#include "model/tokenizer.h"
#include "server/engine/engine.h"
#include "server/sessions/session_manager.h"

namespace efla {

struct RequestLimits {
  int64_t max_prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  int64_t max_reply_bytes = int64_t{64} << 20;  // of one message that carries a whole answer
  int max_queue = 0;
  int64_t max_session_ttl_ms = 0;
};

// Values for requests that have none.
struct RequestDefaults {
  float temperature = 1, top_p = 1, min_p = 0, typical_p = 1, repetition_penalty = 1;
  int32_t top_k = 0, no_repeat_ngram_size = 0;
  int64_t max_tokens = 256;
};

struct ServedModel {
  std::string name;
  const ModelConfig* config = nullptr;
  const Tokenizer* tokenizer = nullptr;             // null: token ids only
  const ConstraintCompiler* constraints = nullptr;  // null without a tokenizer
  const ChatTemplate* chat_template = nullptr;      // null: chats are refused
  std::string no_chat_template;                     // because of this: "the checkpoint has none"
  Engine* engine = nullptr;
  SessionManager* sessions = nullptr;
  bool has_disk_store = false, has_shared_store = false;
  int64_t max_snapshot_bytes = 0;
  RequestLimits limits;
  RequestDefaults defaults;
  int max_piece_bytes = 0;  // longest token text

  // For descriptions.
  int64_t state_bytes = 0;  // a sequence's whole context
  int64_t slot_bytes = 0;   // what it takes in the pool
  int state_slots = 0;
  std::string device;
  std::string weight_dtype;
  std::string replica;  // this server's name
};

}  // namespace efla

#endif  // EFLA_SERVER_SERVED_MODEL_H_
