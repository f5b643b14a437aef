#include "model/sentencepiece_adapter.h"

#include <sentencepiece_processor.h>

#include <optional>

namespace efla {
namespace {

// Walks the fields of one serialised protobuf message: enough of the wire format for the few settings that
// the library does not hand out.
class ProtoFields {
 public:
  explicit ProtoFields(std::string_view message) : rest_(message) {}

  // False at the end, or where the bytes make no sense (the library has accepted them before).
  bool Next() {
    const std::optional<uint64_t> tag = Varint();
    if (!tag) return false;
    number_ = static_cast<int>(*tag >> 3);
    value_ = 0;
    bytes_ = {};
    switch (*tag & 7) {
      case 0: {
        const std::optional<uint64_t> value = Varint();
        value_ = value.value_or(0);
        return value.has_value();
      }
      case 1:
        return Skip(8);
      case 2: {
        const std::optional<uint64_t> size = Varint();
        if (!size || *size > rest_.size()) return false;
        bytes_ = rest_.substr(0, *size);
        return Skip(*size);
      }
      case 5:
        return Skip(4);
      default:
        return false;
    }
  }
  int number() const { return number_; }
  uint64_t value() const { return value_; }
  std::string_view bytes() const { return bytes_; }

 private:
  bool Skip(uint64_t bytes) {
    if (bytes > rest_.size()) return false;
    rest_.remove_prefix(bytes);
    return true;
  }
  std::optional<uint64_t> Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

  std::string_view rest_;
  int number_ = 0;
  uint64_t value_ = 0;
  std::string_view bytes_;
};

// Field numbers of sentencepiece_model.proto.
constexpr int kTrainerSpec = 2, kNormalizerSpec = 3;
constexpr int kModelType = 3, kSpaceAsSuffix = 24;
constexpr int kCharsMap = 2, kAddDummyPrefix = 3, kRemoveExtraSpaces = 4, kEscapeSpaces = 5;
constexpr uint64_t kBpe = 2;

// A second normalizer_spec of {add_dummy_prefix: false}: parsers merge it into the first.
constexpr std::string_view kWithoutPrefix("\x1a\x02\x18\x00", 4);

SentencePieceAdapter::Traits ReadTraits(std::string_view model) {
  SentencePieceAdapter::Traits traits;
  bool charsmap = false, remove_extra_spaces = true, escape_spaces = true;
  for (ProtoFields fields(model); fields.Next();) {
    if (fields.number() == kTrainerSpec) {
      for (ProtoFields trainer(fields.bytes()); trainer.Next();) {
        if (trainer.number() == kModelType) traits.is_bpe = trainer.value() == kBpe;
        if (trainer.number() == kSpaceAsSuffix) traits.space_is_suffix = trainer.value() != 0;
      }
    } else if (fields.number() == kNormalizerSpec) {
      for (ProtoFields normalizer(fields.bytes()); normalizer.Next();) {
        if (normalizer.number() == kCharsMap) charsmap = !normalizer.bytes().empty();
        if (normalizer.number() == kAddDummyPrefix) traits.add_dummy_prefix = normalizer.value() != 0;
        if (normalizer.number() == kRemoveExtraSpaces) remove_extra_spaces = normalizer.value() != 0;
        if (normalizer.number() == kEscapeSpaces) escape_spaces = normalizer.value() != 0;
      }
    }
  }
  traits.rewrites_text = charsmap || remove_extra_spaces || !escape_spaces;
  traits.strips_first_space = traits.add_dummy_prefix || remove_extra_spaces;
  return traits;
}

class Adapter final : public SentencePieceAdapter {
 public:
  bool Load(std::string_view model, std::string& error) {
    traits_ = ReadTraits(model);
    std::string without_prefix(model);
    without_prefix += kWithoutPrefix;
    for (const auto& status :
         {processor_.LoadFromSerializedProto(model), continuing_.LoadFromSerializedProto(without_prefix)}) {
      if (status.ok()) continue;
      error = status.ToString();
      return false;
    }
    if (vocab_size() <= 0) {
      error = "it has no pieces";
      return false;
    }
    if (processor_.unk_id() >= 0) unknown_surface_ = processor_.DecodeIds({processor_.unk_id()});
    return true;
  }

  bool Encode(std::string_view text, bool with_prefix, std::vector<int32_t>& ids,
              std::string& error) const override {
    const auto status = (with_prefix ? processor_ : continuing_).Encode(text, &ids);
    if (!status.ok()) error = status.ToString();
    return status.ok();
  }
  int vocab_size() const override { return processor_.GetPieceSize(); }
  int bos_id() const override { return processor_.bos_id(); }
  int eos_id() const override { return processor_.eos_id(); }
  const std::string& Piece(int32_t id) const override { return processor_.IdToPiece(id); }
  Kind KindOf(int32_t id) const override {
    if (processor_.IsControl(id)) return Kind::kControl;
    if (processor_.IsUnknown(id)) return Kind::kUnknown;
    return processor_.IsByte(id) ? Kind::kByte : Kind::kText;
  }
  const std::string& unknown_surface() const override { return unknown_surface_; }
  const Traits& traits() const override { return traits_; }

 private:
  sentencepiece::SentencePieceProcessor processor_;
  sentencepiece::SentencePieceProcessor continuing_;  // the same pieces, no dummy prefix
  std::string unknown_surface_;
  Traits traits_;
};

}  // namespace

std::unique_ptr<const SentencePieceAdapter> SentencePieceAdapter::Load(std::string_view model,
                                                                       std::string& error) {
  auto adapter = std::make_unique<Adapter>();
  if (!adapter->Load(model, error)) return nullptr;
  return adapter;
}

}  // namespace efla
