// From token ids to text that may be sent: UTF-8 characters never split, stop strings found across token
// borders, nothing past a stop ever released.
#ifndef EFLA_MODEL_TEXT_STREAM_H_
#define EFLA_MODEL_TEXT_STREAM_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/types.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

namespace efla {

// Finds the first end of any of several byte strings in a stream (Aho-Corasick). Copyable; one per stream.
class StopMatcher {
 public:
  explicit StopMatcher(const std::vector<std::string>& stops);  // each non-empty
  struct Match {
    int stop_index;       // which string
    size_t end_in_input;  // bytes of the last input up to and including the match's end
    size_t stop_bytes;    // the string's length
  };
  // Feeds bytes; the first match, if any, and the matcher must not be fed further then. Where several end at
  // one byte, the longest.
  std::optional<Match> Feed(std::string_view bytes);
  // Bytes at the end of all input so far that may be the beginning of a stop string.
  size_t held() const;
  // held() as it would be after `bytes` more.
  size_t HeldAfter(std::string_view bytes) const;

 private:
  struct Automaton;
  std::shared_ptr<const Automaton> automaton_;  // shared by the copies; null when there are no stops
  int32_t node_ = 0;
};

// One sequence's output text. Stops are searched in the text as it is sent (after repair), and must be UTF-8
// themselves. A control token has no text, so a stop string that spells one is never found here: the engine
// must treat it as a stop token as well (Tokenizer::ControlId). Not thread-safe.
class TextStream {
 public:
  // `continues` is true when the text goes on after other text, so that the first piece keeps its space.
  // `tokenizer` may be null: then there is no text, only ids; it must outlive the stream. `include_stop`
  // keeps the matched stop string. Without `skip_special_tokens` a control token's text is its spelling.
  TextStream(const Tokenizer* tokenizer, const std::vector<std::string>& stops, bool continues,
             bool include_stop = false, bool skip_special_tokens = true);

  struct Push {
    std::string text;         // may be sent now
    int tokens_released = 0;  // how many of the tokens held so far (oldest first) that text completes
    bool stopped = false;     // a stop string ended the text; push no more
    int stop_index = -1;
  };
  // Adds one token. Held bytes: an unfinished character (at most 3 bytes), and the longest suffix that is a
  // proper prefix of a stop string. A token is released with the text that covers its last byte, one without
  // bytes together with the token before it; a stop releases them all.
  Push Add(TokenId id);
  // The same for a token of the prompt that the output is to begin with, and for one that is drawn before a
  // stop string may end the output: no stop string is looked for in it, nor in a character that it leaves
  // unfinished and nothing finishes. Before the first Add.
  Push Echo(TokenId id);
  // The generation ended otherwise: everything held, an unfinished character as one U+FFFD.
  Push Finish();

 private:
  // Text goes through these in turn: repair_ (bytes to characters), stops_, held_ (characters not yet sent).
  void Take(std::string_view character, Push& push);
  void Release(size_t text_end, Push& push);
  size_t HeldBytes() const;

  const Tokenizer* tokenizer_;
  bool at_start_;
  bool include_stop_;
  bool skip_special_tokens_;
  bool ended_ = false;
  StopMatcher stops_;
  Utf8Repair repair_;
  std::string held_;

  // The tokens held, oldest first: where each one's last byte lies, counted from the stream's beginning in
  // bytes as they come from the tokens (before repair) and, once known, as they are sent.
  struct HeldToken {
    size_t bytes_end;
    size_t text_end;
  };
  std::deque<HeldToken> tokens_;
  size_t placed_ = 0;    // of tokens_: how many know their text_end
  size_t echo_end_ = 0;  // of the bytes from tokens: where those of Echo end
  size_t bytes_in_ = 0;  // bytes from tokens that repair_ has taken
  size_t text_out_ = 0;  // bytes sent so far; held_ begins here
};

}  // namespace efla

#endif  // EFLA_MODEL_TEXT_STREAM_H_
