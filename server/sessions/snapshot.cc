#include "server/sessions/snapshot.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/types.h"
#include "model/state_pool.h"

namespace efla {
namespace {

static_assert(std::endian::native == std::endian::little, "snapshots are little-endian and read in place");

constexpr uint16_t kMajor = 1, kMinor = 0;
constexpr uint32_t kByteOrderMark = 0x01020304;
constexpr uint32_t kFloat32 = 1, kHeadKeyValue = 1, kColumnChannel = 1, kNoEncoding = 0;
constexpr uint32_t kMustUnderstand = 1;
constexpr uint64_t kKnownFeatures = 0;
constexpr uint32_t kMaxSections = 64;
constexpr size_t kPieceBytes = 1 << 20;
constexpr size_t kAlignment = 64;
constexpr std::array<char, 8> kMagic = {'E', 'F', 'L', 'S', '\r', '\n', '\x1a', '\n'};
constexpr std::array<char, 8> kEndMagic = {'E', 'F', 'L', 'S', 'E', 'N', 'D', '\n'};
constexpr size_t kMaxPendingPrompt = kChunkTokens;
// Far beyond what any context can reach, far below where sums of counts would overflow.
constexpr int64_t kMaxFedTokens = int64_t{1} << 48;

struct Header {
  std::array<char, 8> magic = kMagic;
  uint16_t major = kMajor, minor = kMinor;
  uint32_t byte_order = kByteOrderMark;
  uint32_t header_bytes = 512;
  uint32_t sections = 0;
  uint64_t total_bytes = 0;
  uint64_t must_understand = 0, may_ignore = 0;
  std::array<char, 64> weights = {}, tokenizer = {};
  std::array<char, 192> numerics = {};
  std::array<char, 16> model_type = {};
  uint32_t layers = 0, heads = 0, d_k = 0, d_v = 0;
  uint32_t conv_columns = 0, q_channels = 0, k_channels = 0, v_channels = 0;
  uint32_t dtype = kFloat32, recurrent_order = kHeadKeyValue, conv_order = kColumnChannel;
  uint32_t vocab_size = 0;
  int64_t fed_tokens = 0;
  uint32_t pending_tokens = 0, pending_prompt = 0, tail = 0;
  std::array<std::byte, 60> zero = {};
};
static_assert(sizeof(Header) == 512 && std::has_unique_object_representations_v<Header>);

enum SectionId : uint32_t { kTokens = 1, kRecurrent = 2, kConvQ = 3, kConvK = 4, kConvV = 5 };

struct SectionEntry {
  uint32_t id = 0, flags = kMustUnderstand;
  uint64_t offset = 0, bytes = 0;
  uint32_t encoding = kNoEncoding, zero = 0;
};
static_assert(sizeof(SectionEntry) == 32 && std::has_unique_object_representations_v<SectionEntry>);

struct Footer {
  uint64_t hash_low = 0, hash_high = 0;
  uint64_t total_bytes = 0;
  std::array<char, 8> magic = kEndMagic;
};
static_assert(sizeof(Footer) == 32 && std::has_unique_object_representations_v<Footer>);

// A section of this model's snapshots.
struct SectionSize {
  SectionId id;
  const char* name;
  size_t bytes;
};

constexpr size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
constexpr size_t Pieces(size_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

template <typename T>
T ReadAt(std::span<const std::byte> bytes, size_t offset) {
  EFLA_CHECK(offset <= bytes.size() && sizeof(T) <= bytes.size() - offset);
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// Fills memory from its beginning on.
class Writer {
 public:
  explicit Writer(std::span<std::byte> bytes) : bytes_(bytes) {}
  size_t at() const { return at_; }
  template <typename T>
  void Append(std::span<const T> values) {
    const auto raw = std::as_bytes(values);
    EFLA_CHECK(raw.size() <= bytes_.size() - at_);
    if (!raw.empty()) std::memcpy(bytes_.data() + at_, raw.data(), raw.size());
    at_ += raw.size();
  }
  void ZeroUntil(size_t offset) {
    EFLA_CHECK(at_ <= offset && offset <= bytes_.size());
    std::memset(bytes_.data() + at_, 0, offset - at_);
    at_ = offset;
  }

 private:
  const std::span<std::byte> bytes_;
  size_t at_ = 0;
};

// REQUIRES: the text fits.
template <size_t N>
void SetText(std::array<char, N>& field, std::string_view text) {
  EFLA_CHECK(text.size() <= N);
  std::copy(text.begin(), text.end(), field.begin());
}

template <size_t N>
std::string_view Text(const std::array<char, N>& field) {
  const std::string_view text(field.data(), N);
  return text.substr(0, text.find('\0'));
}

bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

template <size_t N>
bool IsPadded(const std::array<char, N>& field) {
  return AllZero(std::as_bytes(std::span(field)).subspan(Text(field).size()));
}

// The position of the first NaN or infinity, or -1: their exponents have all bits set.
int64_t FindNonFinite(std::span<const std::byte> state) {
  constexpr uint32_t kExponent = 0x7f800000;
  constexpr size_t kBlock = 1024;  // one branch a block, so that the compiler can use vectors inside
  const size_t count = state.size() / sizeof(uint32_t);
  std::array<uint32_t, kBlock> words;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::memcpy(words.data(), state.data() + begin * sizeof(uint32_t), n * sizeof(uint32_t));
    uint32_t found = 0;
    for (size_t i = 0; i < n; ++i) found |= static_cast<uint32_t>((words[i] & kExponent) == kExponent);
    if (found == 0) continue;
    for (size_t i = 0; i < n; ++i) {
      if ((words[i] & kExponent) == kExponent) return static_cast<int64_t>(begin + i);
    }
  }
  return -1;
}

// `first`: the number of the state's element that `part` begins with.
absl::Status CheckFinite(std::span<const std::byte> part, size_t first = 0) {
  const int64_t found = FindNonFinite(part);
  if (found < 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrFormat("element %d of the state is not a finite number", found + static_cast<int64_t>(first)));
}

XXH128_hash_t MetadataHash(std::span<const std::byte> bytes, size_t metadata_bytes) {
  return XXH3_128bits(bytes.data(), metadata_bytes);
}

uint64_t PieceHash(std::span<const std::byte> section, size_t piece) {
  const auto bytes = section.subspan(piece * kPieceBytes);
  return XXH3_64bits(bytes.data(), std::min(bytes.size(), kPieceBytes));
}

// A header with the model's type and shape, and nothing of a context.
Header ShapeOf(const ModelConfig& config) {
  Header header;
  SetText(header.model_type, ModelTypeName(config.type));
  header.layers = static_cast<uint32_t>(config.num_layers);
  header.heads = static_cast<uint32_t>(config.num_heads);
  header.d_k = static_cast<uint32_t>(config.d_k);
  header.d_v = static_cast<uint32_t>(config.d_v);
  header.conv_columns = static_cast<uint32_t>(std::max(config.conv_size - 1, 0));
  const bool has_conv = header.conv_columns > 0;
  header.q_channels = header.k_channels = has_conv ? static_cast<uint32_t>(config.q_channels()) : 0;
  header.v_channels = has_conv ? static_cast<uint32_t>(config.v_channels()) : 0;
  header.vocab_size = static_cast<uint32_t>(config.vocab_size);
  return header;
}

absl::Status CheckTexts(const SnapshotIdentity& identity) {
  const auto fits = [](const char* name, const std::string& text, size_t limit) -> absl::Status {
    if (text.size() <= limit && text.find('\0') == std::string::npos) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "the %s of %d bytes cannot be written into a snapshot; it is a text of at most %d bytes", name,
        text.size(), limit));
  };
  absl::Status status = fits("weights' fingerprint", identity.weights_fingerprint, sizeof(Header::weights));
  status.Update(fits("tokenizer's fingerprint", identity.tokenizer_fingerprint, sizeof(Header::tokenizer)));
  status.Update(fits("numerics", identity.numerics, sizeof(Header::numerics)));
  return status;
}

// Counts, ids, and that the tail is the context's end.
absl::Status CheckTokens(const ContextTokens& tokens, int64_t vocab_size) {
  if (tokens.fed_tokens < 0 || tokens.fed_tokens > kMaxFedTokens) {
    return absl::InvalidArgumentError(
        absl::StrFormat("fed_tokens is %d; the range is 0 to %d", tokens.fed_tokens, kMaxFedTokens));
  }
  if (tokens.pending_prompt.size() > kMaxPendingPrompt) {
    return absl::InvalidArgumentError(absl::StrFormat("pending_prompt has %d tokens; the limit is %d",
                                                      tokens.pending_prompt.size(), kMaxPendingPrompt));
  }
  if (tokens.pending_token && tokens.fed_tokens == 0) {
    return absl::InvalidArgumentError("there is a pending token, but no token has been fed to draw it from");
  }
  const int64_t tail_tokens = std::min(tokens.total_tokens(), ContextTokens::kMaxTail);
  if (static_cast<int64_t>(tokens.tail.size()) != tail_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("the tail has %d tokens; a context of %d has one of %d",
                                                      tokens.tail.size(), tokens.total_tokens(),
                                                      tail_tokens));
  }
  std::vector<TokenId> waiting;
  if (tokens.pending_token) waiting.push_back(*tokens.pending_token);
  waiting.insert(waiting.end(), tokens.pending_prompt.begin(), tokens.pending_prompt.end());
  if (!std::equal(waiting.rbegin(), waiting.rend(), tokens.tail.rbegin())) {
    return absl::InvalidArgumentError("the tail does not end with the pending tokens");
  }
  for (const TokenId id : tokens.tail) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token id %d is outside the vocabulary of %d", id, vocab_size));
    }
  }
  return absl::OkStatus();
}

// The sections of a context in this model, in the order in which they are written.
std::vector<SectionSize> Sections(const ModelConfig& config, const Header& header) {
  const size_t token_count = size_t{header.pending_tokens} + header.pending_prompt + header.tail;
  std::vector<SectionSize> sections = {{kTokens, "TOKENS", token_count * sizeof(TokenId)}};
  if (header.fed_tokens == 0) return sections;
  const StateLayout layout = StateLayout::Of(config);
  const auto layers = static_cast<size_t>(layout.num_layers);
  sections.push_back(
      {kRecurrent, "RECURRENT", layers * static_cast<size_t>(layout.recurrent_floats) * sizeof(float)});
  if (layout.conv_floats > 0) {
    const Header shape = ShapeOf(config);
    const size_t rows = layers * shape.conv_columns * sizeof(float);
    sections.push_back({kConvQ, "CONV_Q", rows * shape.q_channels});
    sections.push_back({kConvK, "CONV_K", rows * shape.k_channels});
    sections.push_back({kConvV, "CONV_V", rows * shape.v_channels});
  }
  return sections;
}

// The convolution states: in memory [layer, column, q|k|v channel], in a snapshot one [layer, column,
// channel] for each part.
struct ConvParts {
  explicit ConvParts(const ModelConfig& config) {
    const Header shape = ShapeOf(config);
    rows = size_t{shape.layers} * shape.conv_columns;
    row_bytes = {shape.q_channels * sizeof(float), shape.k_channels * sizeof(float),
                 shape.v_channels * sizeof(float)};
  }
  size_t rows = 0;
  std::array<size_t, 3> row_bytes = {};  // of q, k, v
};

// Where the states' first convolution state begins.
size_t RecurrentBytes(const ModelConfig& config) {
  const StateLayout layout = StateLayout::Of(config);
  return static_cast<size_t>(layout.num_layers * layout.recurrent_floats) * sizeof(float);
}

// With the hash of each piece to `hashes`: each is checked, copied and hashed while it is in the caches.
absl::Status WriteRecurrent(std::span<const std::byte> recurrent, Writer& out,
                            std::vector<uint64_t>& hashes) {
  for (size_t begin = 0; begin < recurrent.size(); begin += kPieceBytes) {
    const auto piece = recurrent.subspan(begin, std::min(kPieceBytes, recurrent.size() - begin));
    if (absl::Status status = CheckFinite(piece, begin / sizeof(float)); !status.ok()) return status;
    out.Append(piece);
    hashes.push_back(PieceHash(piece, 0));
  }
  return absl::OkStatus();
}

// Any other one.
void WriteSection(const ModelConfig& config, const ContextTokens& tokens, std::span<const std::byte> state,
                  SectionId id, Writer& out) {
  if (id == kTokens) {
    if (tokens.pending_token) out.Append(std::span<const TokenId>(&*tokens.pending_token, 1));
    out.Append(std::span<const TokenId>(tokens.pending_prompt));
    out.Append(std::span<const TokenId>(tokens.tail));
    return;
  }
  const ConvParts conv(config);
  const size_t part = id - kConvQ;
  std::span<const std::byte> from = state.subspan(RecurrentBytes(config));
  for (size_t row = 0; row < conv.rows; ++row) {
    for (size_t i = 0; i < conv.row_bytes.size(); ++i) {
      if (i == part) out.Append(from.first(conv.row_bytes[i]));
      from = from.subspan(conv.row_bytes[i]);
    }
  }
}

// "the snapshot's d_k is 64, this model's is 128"
template <typename T>
absl::Status Same(const char* name, const T& there, const T& here) {
  if (there == here) return absl::OkStatus();
  if constexpr (std::is_arithmetic_v<T>) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the snapshot's %s is %d, this server's is %d", name, there, here));
  } else {
    const auto shown = [](std::string_view text) {  // untrusted, and perhaps no text at all
      std::string printable(text);
      for (char& c : printable) {
        if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
      }
      return printable;
    };
    return absl::FailedPreconditionError(absl::StrFormat(
        "the snapshot's %s is \"%s\", this server's is \"%s\"", name, shown(there), shown(here)));
  }
}

// Magic, version and length: what must hold before anything else can be looked at.
absl::Status CheckFrame(std::span<const std::byte> bytes) {
  const size_t compared = std::min(bytes.size(), kMagic.size());
  if (compared == 0 || std::memcmp(bytes.data(), kMagic.data(), compared) != 0) {
    return absl::InvalidArgumentError("not a snapshot: it does not begin with the mark of EFLS files");
  }
  if (bytes.size() < sizeof(Header)) {
    return absl::DataLossError(
        absl::StrFormat("the snapshot is cut off: %d bytes, less than a header", bytes.size()));
  }
  const auto header = ReadAt<Header>(bytes, 0);
  if (header.byte_order != kByteOrderMark) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the snapshot's byte order mark is %08x, this server's is %08x", header.byte_order, kByteOrderMark));
  }
  if (header.major != kMajor) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the snapshot has format version %d.%d, this server reads %d.x", header.major, header.minor, kMajor));
  }
  if (header.total_bytes != bytes.size()) {
    return absl::DataLossError(
        absl::StrFormat("the snapshot has %d bytes, its header says %d", bytes.size(), header.total_bytes));
  }
  if (header.header_bytes != sizeof(Header) || header.sections > kMaxSections) {
    return absl::DataLossError(absl::StrFormat(
        "the snapshot's header says %d bytes of header and %d sections; there are %d, at most %d",
        header.header_bytes, header.sections, sizeof(Header), kMaxSections));
  }
  return absl::OkStatus();
}

absl::Status CheckIdentity(const Header& header, const SnapshotIdentity& identity, const ModelConfig& config,
                           bool allow_other_numerics) {
  if (const uint64_t unknown = header.must_understand & ~kKnownFeatures; unknown != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the snapshot needs the features %#x, this server has %#x", header.must_understand, kKnownFeatures));
  }
  const Header here = ShapeOf(config);
  absl::Status status = Same("model type", Text(header.model_type), Text(here.model_type));
  status.Update(Same("number of layers", header.layers, here.layers));
  status.Update(Same("number of heads", header.heads, here.heads));
  status.Update(Same("d_k", header.d_k, here.d_k));
  status.Update(Same("d_v", header.d_v, here.d_v));
  status.Update(Same("number of convolution columns", header.conv_columns, here.conv_columns));
  status.Update(Same("number of q channels", header.q_channels, here.q_channels));
  status.Update(Same("number of k channels", header.k_channels, here.k_channels));
  status.Update(Same("number of v channels", header.v_channels, here.v_channels));
  status.Update(Same("element type", header.dtype, here.dtype));
  status.Update(Same("order of the recurrent state", header.recurrent_order, here.recurrent_order));
  status.Update(Same("order of the convolution state", header.conv_order, here.conv_order));
  status.Update(Same("vocabulary size", header.vocab_size, here.vocab_size));
  status.Update(
      Same("weights' fingerprint", Text(header.weights), std::string_view(identity.weights_fingerprint)));
  status.Update(Same("tokenizer's fingerprint", Text(header.tokenizer),
                     std::string_view(identity.tokenizer_fingerprint)));
  if (!allow_other_numerics) {
    status.Update(Same("arithmetic", Text(header.numerics), std::string_view(identity.numerics)));
  }
  if (status.ok() && !(AllZero(header.zero) && IsPadded(header.weights) && IsPadded(header.tokenizer) &&
                       IsPadded(header.numerics) && IsPadded(header.model_type))) {
    return absl::InvalidArgumentError("the snapshot's header has bytes set that are to be zero");
  }
  return status;
}

absl::Status CheckCounts(const Header& header) {
  if (header.fed_tokens < 0 || header.fed_tokens > kMaxFedTokens || header.pending_tokens > 1 ||
      header.pending_prompt > kMaxPendingPrompt || header.tail > ContextTokens::kMaxTail) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the snapshot counts %d fed tokens, %d pending, %d of a pending prompt, %d of a "
                        "tail; the limits are %d, "
                        "1, %d, %d",
                        header.fed_tokens, header.pending_tokens, header.pending_prompt, header.tail,
                        kMaxFedTokens, kMaxPendingPrompt, ContextTokens::kMaxTail));
  }
  return absl::OkStatus();
}

// Header, table and piece table, found whole.
struct Metadata {
  Header header;
  std::vector<SectionEntry> sections;
  size_t piece_table = 0;     // its offset
  size_t sections_begin = 0;  // unaligned: the end of the metadata
};

// REQUIRES: CheckFrame. That sections and footer fill the snapshot without gap or overlap, and that the
// metadata's hash is right.
absl::StatusOr<Metadata> ReadMetadata(std::span<const std::byte> bytes) {
  Metadata read;
  read.header = ReadAt<Header>(bytes, 0);
  const size_t total = bytes.size();
  read.piece_table = sizeof(Header) + read.header.sections * sizeof(SectionEntry);
  if (total < read.piece_table + sizeof(Footer)) {
    return absl::DataLossError("the snapshot is cut off in its section table");
  }
  const size_t footer_offset = total - sizeof(Footer);
  const auto footer = ReadAt<Footer>(bytes, footer_offset);
  if (footer.magic != kEndMagic || footer.total_bytes != total) {
    return absl::DataLossError("the snapshot has no footer: it was not written to its end");
  }
  size_t pieces = 0;
  for (uint32_t i = 0; i < read.header.sections; ++i) {
    read.sections.push_back(ReadAt<SectionEntry>(bytes, sizeof(Header) + i * sizeof(SectionEntry)));
    if (read.sections.back().bytes > total) {
      return absl::DataLossError(absl::StrFormat("section %d of the snapshot has %d bytes, the whole has %d",
                                                 read.sections.back().id, read.sections.back().bytes, total));
    }
    pieces += Pieces(read.sections.back().bytes);
  }
  read.sections_begin = read.piece_table + pieces * sizeof(uint64_t);
  if (read.sections_begin > footer_offset) {
    return absl::DataLossError("the snapshot is cut off in its piece table");
  }
  const XXH128_hash_t hash = MetadataHash(bytes, read.sections_begin);
  if (hash.low64 != footer.hash_low || hash.high64 != footer.hash_high) {
    return absl::DataLossError("the snapshot's header or tables are damaged: their checksum differs");
  }

  std::vector<SectionEntry> by_place = read.sections;
  std::sort(by_place.begin(), by_place.end(), [](const SectionEntry& a, const SectionEntry& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  size_t end = read.sections_begin;
  const auto zero_until = [&](size_t next) { return AllZero(bytes.subspan(end, next - end)); };
  for (const SectionEntry& section : by_place) {
    if (section.offset != AlignUp(end) || section.offset > footer_offset ||
        section.bytes > footer_offset - section.offset) {
      return absl::InvalidArgumentError(
          absl::StrFormat("section %d of the snapshot is %d bytes at %d; %d to %d is free for it", section.id,
                          section.bytes, section.offset, AlignUp(end), footer_offset));
    }
    if (!zero_until(section.offset)) return absl::DataLossError("a gap between sections is not zero");
    end = section.offset + section.bytes;
  }
  if (AlignUp(end) != footer_offset) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the snapshot's sections end at %d, its footer begins at %d", AlignUp(end), footer_offset));
  }
  if (!zero_until(footer_offset)) return absl::DataLossError("the gap before the footer is not zero");
  return read;
}

// The bytes of each of `expected`, in that order. Hashes of sections that may be skipped are compared too.
absl::StatusOr<std::vector<std::span<const std::byte>>> FindSections(std::span<const std::byte> bytes,
                                                                     const Metadata& metadata,
                                                                     std::span<const SectionSize> expected) {
  std::vector<std::span<const std::byte>> found(expected.size());
  std::vector<bool> seen(expected.size());
  size_t piece = 0;
  for (const SectionEntry& section : metadata.sections) {
    const auto content = bytes.subspan(section.offset, section.bytes);
    const size_t first_piece = piece;
    piece += Pieces(section.bytes);
    const auto known = std::find_if(expected.begin(), expected.end(),
                                    [&](const SectionSize& one) { return one.id == section.id; });
    if (known == expected.end()) {
      if (section.flags != 0) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "the snapshot has a section %d (flags %#x, %d bytes) that must be understood; this "
            "server knows none such for this model and this number of fed tokens",
            section.id, section.flags, section.bytes));
      }
    } else {
      const auto index = static_cast<size_t>(known - expected.begin());
      if (seen[index]) {
        return absl::InvalidArgumentError(absl::StrFormat("the snapshot has section %s twice", known->name));
      }
      if (section.encoding != kNoEncoding) {
        return absl::FailedPreconditionError(
            absl::StrFormat("the snapshot's section %s has encoding %d, this server reads %d", known->name,
                            section.encoding, kNoEncoding));
      }
      if (section.bytes != known->bytes || section.flags != kMustUnderstand || section.zero != 0) {
        return absl::InvalidArgumentError(
            absl::StrFormat("the snapshot's section %s has %d bytes, flags %#x; it must have %d, %#x",
                            known->name, section.bytes, section.flags, known->bytes, kMustUnderstand));
      }
      seen[index] = true;
      found[index] = content;
    }
    for (size_t i = 0; i < Pieces(section.bytes); ++i) {
      const size_t at = metadata.piece_table + (first_piece + i) * sizeof(uint64_t);
      if (PieceHash(content, i) != ReadAt<uint64_t>(bytes, at)) {
        return absl::DataLossError(
            absl::StrFormat("MiB %d of the snapshot's section %d is damaged: its checksum "
                            "differs",
                            i, section.id));
      }
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!seen[i]) {
      return absl::InvalidArgumentError(absl::StrFormat("the snapshot lacks section %s", expected[i].name));
    }
  }
  return found;
}

ContextTokens ReadTokens(const Header& header, std::span<const std::byte> section) {
  std::vector<TokenId> ids(section.size() / sizeof(TokenId));
  if (!ids.empty()) std::memcpy(ids.data(), section.data(), section.size());
  ContextTokens tokens;
  tokens.fed_tokens = header.fed_tokens;
  auto next = ids.begin();
  if (header.pending_tokens > 0) tokens.pending_token = *next++;
  tokens.pending_prompt.assign(next, next + header.pending_prompt);
  next += header.pending_prompt;
  tokens.tail.assign(next, ids.end());
  return tokens;
}

// The convolution states of the sections q, k, v, as they lie in memory.
void JoinConv(const ModelConfig& config, std::span<const std::span<const std::byte>> parts, Writer& out) {
  const ConvParts conv(config);
  for (size_t row = 0; row < conv.rows; ++row) {
    for (size_t i = 0; i < parts.size(); ++i) {
      out.Append(parts[i].subspan(row * conv.row_bytes[i], conv.row_bytes[i]));
    }
  }
}

// `sections`: RECURRENT and the convolutions'. `own`: null, or the buffer that these lie in, which may be
// written over: the state then stays where it is, if there is room behind it for the convolutions'.
HostBuffer JoinState(const ModelConfig& config, std::span<const std::span<const std::byte>> sections,
                     HostBuffers& buffers, HostBuffer* own) {
  const auto state_bytes = static_cast<size_t>(StateLayout::Of(config).state_bytes());
  const std::span<const std::byte> recurrent = sections[0];
  const auto parts = sections.subspan(1);
  const size_t offset = own == nullptr ? 0 : static_cast<size_t>(recurrent.data() - own->data());
  if (own == nullptr || own->size() - offset < state_bytes) {
    HostBuffer state = buffers.Take(state_bytes);
    Writer out(state.span());
    out.Append(recurrent);
    JoinConv(config, parts, out);
    return state;
  }
  HostBuffer conv = buffers.Take(state_bytes - recurrent.size());
  Writer out(conv.span());
  JoinConv(config, parts, out);
  own->Narrow(offset, state_bytes);
  if (!conv.empty()) std::memcpy(own->data() + recurrent.size(), conv.data(), conv.size());
  return std::move(*own);
}

}  // namespace

SnapshotFormat::SnapshotFormat(SnapshotIdentity identity, const ModelConfig& config,
                               std::shared_ptr<HostBuffers> buffers)
    : identity_(std::move(identity)),
      config_(config),
      buffers_(buffers != nullptr ? std::move(buffers) : HostBuffers::Create(0)) {}

absl::StatusOr<HostBuffer> SnapshotFormat::Encode(const ContextTokens& tokens,
                                                  std::span<const std::byte> state) const {
  if (absl::Status status = CheckTexts(identity_); !status.ok()) return status;
  if (absl::Status status = CheckTokens(tokens, config_.vocab_size); !status.ok()) return status;
  const auto state_bytes = static_cast<size_t>(StateLayout::Of(config_).state_bytes());
  const size_t expected_bytes = tokens.fed_tokens == 0 ? 0 : state_bytes;
  if (state.size() != expected_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state has %d bytes; with %d fed tokens this model's has %d", state.size(),
                        tokens.fed_tokens, expected_bytes));
  }
  const auto recurrent = state.first(state.empty() ? 0 : RecurrentBytes(config_));
  const auto convolutions = state.subspan(recurrent.size());
  if (absl::Status status = CheckFinite(convolutions, recurrent.size() / sizeof(float)); !status.ok()) {
    return status;
  }

  Header header = ShapeOf(config_);
  SetText(header.weights, identity_.weights_fingerprint);
  SetText(header.tokenizer, identity_.tokenizer_fingerprint);
  SetText(header.numerics, identity_.numerics);
  header.fed_tokens = tokens.fed_tokens;
  header.pending_tokens = tokens.pending_token ? 1 : 0;
  header.pending_prompt = static_cast<uint32_t>(tokens.pending_prompt.size());
  header.tail = static_cast<uint32_t>(tokens.tail.size());
  const std::vector<SectionSize> sections = Sections(config_, header);
  header.sections = static_cast<uint32_t>(sections.size());

  size_t pieces = 0;
  for (const SectionSize& section : sections) pieces += Pieces(section.bytes);
  const size_t piece_table = sizeof(Header) + sections.size() * sizeof(SectionEntry);
  const size_t metadata_bytes = piece_table + pieces * sizeof(uint64_t);
  std::vector<SectionEntry> table;
  size_t end = metadata_bytes;
  for (const SectionSize& section : sections) {
    const size_t offset = AlignUp(end);
    table.push_back({.id = section.id, .offset = offset, .bytes = section.bytes});
    end = offset + section.bytes;
  }
  header.total_bytes = AlignUp(end) + sizeof(Footer);

  HostBuffer bytes = buffers_->Take(header.total_bytes);
  Writer out(bytes.span());
  out.Append(std::span<const Header>(&header, 1));
  out.Append(std::span<const SectionEntry>(table));
  out.ZeroUntil(metadata_bytes);
  std::vector<uint64_t> hashes;
  for (const SectionEntry& section : table) {
    out.ZeroUntil(section.offset);
    if (section.id == kRecurrent) {
      if (absl::Status status = WriteRecurrent(recurrent, out, hashes); !status.ok()) return status;
    } else {
      WriteSection(config_, tokens, state, static_cast<SectionId>(section.id), out);
      const auto content = bytes.span().subspan(section.offset, section.bytes);
      for (size_t i = 0; i < Pieces(section.bytes); ++i) hashes.push_back(PieceHash(content, i));
    }
    EFLA_CHECK(out.at() == section.offset + section.bytes);
  }
  out.ZeroUntil(AlignUp(out.at()));
  EFLA_CHECK(hashes.size() == pieces);
  std::ranges::copy(std::as_bytes(std::span(hashes)), bytes.data() + piece_table);
  const XXH128_hash_t hash = MetadataHash(bytes, metadata_bytes);
  const Footer footer{.hash_low = hash.low64, .hash_high = hash.high64, .total_bytes = header.total_bytes};
  out.Append(std::span<const Footer>(&footer, 1));
  return bytes;
}

absl::StatusOr<Snapshot> SnapshotFormat::Decode(std::span<const std::byte> bytes,
                                                bool allow_other_numerics) const {
  return Decode(bytes, allow_other_numerics, nullptr);
}

absl::StatusOr<Snapshot> SnapshotFormat::DecodeInPlace(HostBuffer bytes, bool allow_other_numerics) const {
  return Decode(bytes, allow_other_numerics, &bytes);
}

absl::StatusOr<Snapshot> SnapshotFormat::Decode(std::span<const std::byte> bytes, bool allow_other_numerics,
                                                HostBuffer* own) const {
  if (absl::Status status = CheckFrame(bytes); !status.ok()) return status;
  absl::StatusOr<Metadata> metadata = ReadMetadata(bytes);
  if (!metadata.ok()) return metadata.status();
  const Header& header = metadata->header;
  absl::Status status = CheckIdentity(header, identity_, config_, allow_other_numerics);
  if (!status.ok()) return status;
  if (status = CheckCounts(header); !status.ok()) return status;
  const std::vector<SectionSize> expected = Sections(config_, header);
  const auto sections = FindSections(bytes, *metadata, expected);
  if (!sections.ok()) return sections.status();

  Snapshot snapshot;
  snapshot.tokens = ReadTokens(header, sections->front());
  if (status = CheckTokens(snapshot.tokens, config_.vocab_size); !status.ok()) return status;
  if (sections->size() > 1) {
    snapshot.state = JoinState(config_, std::span(*sections).subspan(1), *buffers_, own);
    if (status = CheckFinite(snapshot.state); !status.ok()) return status;
  }
  return snapshot;
}

int64_t SnapshotFormat::max_bytes() const {
  Header fullest;
  fullest.fed_tokens = 1;
  fullest.pending_tokens = 1;
  fullest.pending_prompt = kMaxPendingPrompt;
  fullest.tail = ContextTokens::kMaxTail;
  size_t bytes = sizeof(Header) + sizeof(Footer) + kAlignment;
  for (const SectionSize& section : Sections(config_, fullest)) {
    bytes += sizeof(SectionEntry) + Pieces(section.bytes) * sizeof(uint64_t) + AlignUp(section.bytes);
  }
  return static_cast<int64_t>(bytes);
}

int64_t SnapshotFormat::state_bytes() const { return StateLayout::Of(config_).state_bytes(); }

}  // namespace efla
