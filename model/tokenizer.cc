#include "model/tokenizer.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <charconv>
#include <map>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/files.h"
#include "model/fingerprint.h"
#include "model/sentencepiece_adapter.h"
#include "model/text_stream.h"
#include "model/utf8.h"

namespace efla {
namespace {

constexpr int64_t kMaxModelBytes = 256 << 20;
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581
// SentencePiece's BPE takes n log n steps through memory that leaves the cache: texts are cut into parts of
// at least so many bytes where no piece can cross the cut. 1 MB of English: 0.38 s instead of 2.1 s.
constexpr size_t kPartBytes = 512;

constexpr int kNumBytes = 256;

absl::Status CheckCount(int64_t tokens, const EncodeLimits& limits) {
  if (tokens <= limits.max_tokens) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrFormat("has at least %d tokens", tokens));
}

// Of a text of `bytes`, where no token stands for more than `token_bytes`; 0: not known.
absl::Status CheckBytes(size_t bytes, size_t token_bytes, const EncodeLimits& limits) {
  if (token_bytes == 0) return absl::OkStatus();
  return CheckCount(static_cast<int64_t>((bytes + token_bytes - 1) / token_bytes), limits);
}

// Of text that is tokenised in one go.
absl::Status CheckStretch(size_t bytes, const EncodeLimits& limits) {
  if (bytes <= limits.max_stretch_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%d bytes have no place to split them, such as a space between words; the limit is %d",
                      bytes, limits.max_stretch_bytes));
}

// What one id adds to a text.
struct PieceEntry {
  uint32_t begin = 0, bytes = 0;   // in the table's text
  bool begins_with_space = false;  // which a text's first piece loses
  bool control = false;
};

std::string WithSpaces(std::string_view piece) {
  std::string text;
  while (!piece.empty()) {
    const bool mark = piece.starts_with(kSpaceMark);
    text += mark ? ' ' : piece.front();
    piece.remove_prefix(mark ? kSpaceMark.size() : 1);
  }
  return text;
}

// "<0x0A>" to 10; -1 for anything else.
int ByteValue(std::string_view piece) {
  int value = -1;
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece.back() != '>') return -1;
  const auto [end, error] = std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
  return error == std::errc() && end == piece.data() + 5 ? value : -1;
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::unique_ptr<const SentencePieceAdapter> pieces, std::string fingerprint)
      : pieces_(std::move(pieces)), fingerprint_(std::move(fingerprint)) {
    const SentencePieceAdapter::Traits& traits = pieces_->traits();
    bool has_space_piece = false;
    int byte_pieces = 0;
    for (TokenId id = 0; id < pieces_->vocab_size(); ++id) {
      AddEntry(id, traits.strips_first_space);
      has_space_piece |= pieces_->Piece(id) == kSpaceMark;
      byte_pieces += pieces_->KindOf(id) == SentencePieceAdapter::Kind::kByte ? 1 : 0;
      // As it is spelled: a text may hold the space mark too.
      max_token_bytes_ = std::max(max_token_bytes_, pieces_->Piece(id).size());
    }
    // A text that is rewritten may lose any number of bytes, and without a piece for each byte an unknown
    // piece may stand for as many.
    if (traits.rewrites_text || byte_pieces < kNumBytes) max_token_bytes_ = 0;
    // Without a space piece, an unknown piece could reach across the cut.
    can_cut_ = traits.is_bpe && !traits.rewrites_text && !traits.space_is_suffix && has_space_piece;
    for (auto& ids : controls_by_byte_) {
      std::stable_sort(ids.begin(), ids.end(),
                       [&](TokenId a, TokenId b) { return Piece(a).size() > Piece(b).size(); });
    }
  }

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool parse_special) const override {
    return EncodeAny(text, parse_special, /*with_prefix=*/true, {});
  }
  absl::StatusOr<std::vector<TokenId>> EncodeContinuation(std::string_view text,
                                                          bool parse_special) const override {
    return EncodeAny(text, parse_special, /*with_prefix=*/false, {});
  }
  absl::StatusOr<std::vector<TokenId>> EncodeWithin(std::string_view text, bool parse_special, bool continues,
                                                    const EncodeLimits& limits) const override {
    return EncodeAny(text, parse_special, !continues, limits);
  }
  size_t max_token_bytes() const override { return max_token_bytes_; }
  absl::StatusOr<std::vector<TokenId>> EncodeMarked(std::string_view text, std::span<const TextRange> plain,
                                                    bool continues,
                                                    const EncodeLimits& limits) const override {
    return EncodeAny(text, /*parse_special=*/true, !continues, limits, plain);
  }

  std::string_view PieceBytes(TokenId id, bool at_start) const override {
    if (!Known(id)) return {};
    const PieceEntry& entry = entries_[static_cast<size_t>(id)];
    std::string_view bytes = std::string_view(text_).substr(entry.begin, entry.bytes);
    if (at_start && entry.begins_with_space) bytes.remove_prefix(1);
    return bytes;
  }

  int vocab_size() const override { return static_cast<int>(entries_.size()); }
  TokenId bos_id() const override { return pieces_->bos_id(); }
  TokenId eos_id() const override { return pieces_->eos_id(); }
  bool is_control(TokenId id) const override {
    return Known(id) && entries_[static_cast<size_t>(id)].control;
  }
  std::string_view Piece(TokenId id) const override {
    return Known(id) ? std::string_view(pieces_->Piece(id)) : std::string_view();
  }
  TokenId ControlId(std::string_view piece) const override {
    const auto found = controls_.find(piece);
    return found == controls_.end() ? -1 : found->second;
  }
  const std::string& fingerprint() const override { return fingerprint_; }

 private:
  bool Known(TokenId id) const { return id >= 0 && static_cast<size_t>(id) < entries_.size(); }

  void AddEntry(TokenId id, bool strips_first_space) {
    const std::string& piece = pieces_->Piece(id);
    PieceEntry entry;
    std::string bytes;
    switch (pieces_->KindOf(id)) {
      case SentencePieceAdapter::Kind::kControl:
        entry.control = true;
        if (piece.empty()) break;
        controls_.emplace(piece, id);
        controls_by_byte_[static_cast<unsigned char>(piece.front())].push_back(id);
        break;
      case SentencePieceAdapter::Kind::kUnknown:
        bytes = pieces_->unknown_surface();
        break;
      case SentencePieceAdapter::Kind::kByte:
        if (const int value = ByteValue(piece); value >= 0) bytes = static_cast<char>(value);
        break;
      case SentencePieceAdapter::Kind::kText:
        bytes = WithSpaces(piece);
        entry.begins_with_space = strips_first_space && piece.starts_with(kSpaceMark);
        for (size_t at = piece.find(kSpaceMark, 1); at != std::string::npos;
             at = piece.find(kSpaceMark, at + 1)) {
          const auto before = static_cast<unsigned char>(piece[at - 1]);
          joins_space_.set(before);
          if (before == static_cast<unsigned char>(kSpaceMark.back())) joins_space_.set(' ');
        }
        break;
    }
    entry.begin = static_cast<uint32_t>(text_.size());
    entry.bytes = static_cast<uint32_t>(bytes.size());
    text_ += bytes;
    entries_.push_back(entry);
  }

  // Special tokens are not looked for in the ranges of `plain`.
  absl::StatusOr<std::vector<TokenId>> EncodeAny(std::string_view text, bool parse_special, bool with_prefix,
                                                 const EncodeLimits& limits,
                                                 std::span<const TextRange> plain = {}) const {
    if (absl::Status status = CheckBytes(text.size(), max_token_bytes_, limits); !status.ok()) return status;
    if (const auto bad = FindInvalidUtf8(text)) {
      return absl::InvalidArgumentError(absl::StrFormat("text is not UTF-8 at byte %d", *bad));
    }
    absl::Status status;
    if (text.size() > limits.max_stretch_bytes) {
      status = ForEachPlain(text, parse_special, plain, [&](std::string_view between, TokenId) {
        return CheckStretches(between, limits);
      });
      if (!status.ok()) return status;
    }
    std::vector<TokenId> ids;
    status = ForEachPlain(text, parse_special, plain, [&](std::string_view between, TokenId control) {
      absl::Status encoded = EncodePlain(between, with_prefix, limits, ids);
      if (encoded.ok() && control >= 0) ids.push_back(control);
      return encoded;
    });
    if (status.ok()) status = CheckCount(static_cast<int64_t>(ids.size()), limits);
    if (!status.ok()) return status;
    return ids;
  }

  // Calls visit(text before a special token, that token) for each of them, and at last visit(text after all,
  // -1), until it returns an error.
  template <typename Visit>
  absl::Status ForEachPlain(std::string_view text, bool parse_special, std::span<const TextRange> plain,
                            const Visit& visit) const {
    size_t plain_begin = 0;
    for (size_t at = 0; parse_special && at < text.size();) {
      if (!plain.empty() && at >= plain.front().begin) {
        at = plain.front().end;
        plain = plain.subspan(1);
        continue;
      }
      const TokenId control =
          ControlAt(text.substr(at, plain.empty() ? text.npos : plain.front().begin - at));
      if (control < 0) {
        ++at;
        continue;
      }
      absl::Status status = visit(text.substr(plain_begin, at - plain_begin), control);
      if (!status.ok()) return status;
      at += Piece(control).size();
      plain_begin = at;
    }
    return visit(text.substr(plain_begin), -1);
  }

  absl::Status CheckStretches(std::string_view text, const EncodeLimits& limits) const {
    while (text.size() > limits.max_stretch_bytes) {
      const size_t part = PartEnd(text);
      if (absl::Status status = CheckStretch(part, limits); !status.ok()) return status;
      text.remove_prefix(part);
    }
    return absl::OkStatus();
  }

  // The longest control piece that `text` begins with, or -1.
  TokenId ControlAt(std::string_view text) const {
    for (TokenId id : controls_by_byte_[static_cast<unsigned char>(text.front())]) {
      if (text.starts_with(Piece(id))) return id;
    }
    return -1;
  }

  // Appends to `ids`. `with_prefix` is taken by the first text that is not empty.
  absl::Status EncodePlain(std::string_view text, bool& with_prefix, const EncodeLimits& limits,
                           std::vector<TokenId>& ids) const {
    std::vector<int32_t> part_ids;
    std::string error;
    while (!text.empty()) {
      absl::Status status = CheckCount(static_cast<int64_t>(ids.size()), limits);
      if (status.ok() && limits.check) status = limits.check();
      if (!status.ok()) return status;
      const std::string_view part = text.substr(0, PartEnd(text));
      text.remove_prefix(part.size());
      if (!pieces_->Encode(part, std::exchange(with_prefix, false), part_ids, error)) {
        return absl::InternalError(absl::StrFormat("tokenizer: %s", error));
      }
      ids.insert(ids.end(), part_ids.begin(), part_ids.end());
    }
    return absl::OkStatus();
  }

  // Pieces are joined only into pieces, so a space can be cut off from the byte before it when no piece holds
  // the two: each side then encodes as it would in the whole text.
  size_t PartEnd(std::string_view text) const {
    if (!can_cut_) return text.size();
    for (size_t at = text.find(' ', kPartBytes); at != std::string_view::npos; at = text.find(' ', at + 1)) {
      if (!joins_space_.test(static_cast<unsigned char>(text[at - 1]))) return at;
    }
    return text.size();
  }

  const std::unique_ptr<const SentencePieceAdapter> pieces_;
  const std::string fingerprint_;
  std::string text_;  // all pieces' bytes, one after the other
  std::vector<PieceEntry> entries_;
  std::map<std::string, TokenId, std::less<>> controls_;
  std::array<std::vector<TokenId>, 256> controls_by_byte_;  // longest first
  size_t max_token_bytes_ = 0;
  bool can_cut_ = false;
  std::bitset<256> joins_space_;  // bytes that stand before a space inside some piece
};

}  // namespace

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeWithin(std::string_view text, bool parse_special,
                                                             bool continues,
                                                             const EncodeLimits& limits) const {
  absl::Status status = CheckBytes(text.size(), max_token_bytes(), limits);
  if (status.ok()) status = CheckStretch(text.size(), limits);
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<TokenId>> ids =
      continues ? EncodeContinuation(text, parse_special) : Encode(text, parse_special);
  if (!ids.ok()) return ids;
  if (status = CheckCount(static_cast<int64_t>(ids->size()), limits); !status.ok()) return status;
  return ids;
}

std::string Tokenizer::Decode(std::span<const TokenId> ids) const {
  TextStream stream(this, {}, /*continues=*/false);
  std::string text;
  for (TokenId id : ids) text += stream.Add(id).text;
  return text + stream.Finish().text;
}

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Open(const std::string& model_file) {
  absl::StatusOr<std::string> model = ReadFile(model_file, kMaxModelBytes);
  if (!model.ok()) return model.status();
  std::string error;
  std::unique_ptr<const SentencePieceAdapter> pieces = SentencePieceAdapter::Load(*model, error);
  if (pieces == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: not a SentencePiece model: %s", model_file, error));
  }
  Sha256 hash;
  hash.Add(*model);
  return std::make_unique<SentencePieceTokenizer>(std::move(pieces), hash.Hex());
}

}  // namespace efla
