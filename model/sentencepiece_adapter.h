// The one door to the SentencePiece library. Its header puts std::string_view into namespace absl, where
// Abseil has a class of that name: the two cannot meet in one file, so this interface is plain C++.
#ifndef EFLA_MODEL_SENTENCEPIECE_ADAPTER_H_
#define EFLA_MODEL_SENTENCEPIECE_ADAPTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace efla {

// Immutable; safe to use from any thread.
class SentencePieceAdapter {
 public:
  enum class Kind { kText, kUnknown, kControl, kByte };

  // What the model file says about how text becomes pieces.
  struct Traits {
    bool is_bpe = false;
    bool rewrites_text = false;      // normalisation tables, or spaces merged or kept as they are
    bool space_is_suffix = false;    // the space mark ends a word instead of beginning it
    bool add_dummy_prefix = true;    // a space is put before a text
    bool strips_first_space = true;  // decoding drops a text's first space
  };

  // `model` is a model file's contents. Null, and why in `error`, when it is not one.
  static std::unique_ptr<const SentencePieceAdapter> Load(std::string_view model, std::string& error);
  virtual ~SentencePieceAdapter() = default;

  // False when the library fails. `with_prefix` false: no dummy prefix, whatever the model says.
  virtual bool Encode(std::string_view text, bool with_prefix, std::vector<int32_t>& ids,
                      std::string& error) const = 0;
  virtual int vocab_size() const = 0;
  virtual int bos_id() const = 0;  // -1: none
  virtual int eos_id() const = 0;  // -1: none
  virtual const std::string& Piece(int32_t id) const = 0;
  virtual Kind KindOf(int32_t id) const = 0;
  virtual const std::string& unknown_surface() const = 0;  // what an unknown piece decodes to
  virtual const Traits& traits() const = 0;
};

}  // namespace efla

#endif  // EFLA_MODEL_SENTENCEPIECE_ADAPTER_H_
