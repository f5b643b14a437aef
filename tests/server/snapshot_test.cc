#include "server/sessions/snapshot.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/server/snapshot_example.h"
#include "tests/source_path.h"

namespace efla {
namespace {

using Bytes = std::vector<std::byte>;

// Offsets as the head of snapshot.h has them; the tests know the format from there only.
constexpr size_t kHeaderBytes = 512, kFooterBytes = 32, kEntryBytes = 32;
constexpr uint32_t kTokensId = 1, kRecurrentId = 2, kConvQId = 3;

template <typename T>
T Get(const Bytes& bytes, size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}
template <typename T>
void Set(Bytes& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}
void SetText(Bytes& bytes, size_t offset, const std::string& text) {
  std::memcpy(bytes.data() + offset, text.data(), text.size());
}

uint32_t SectionCount(const Bytes& bytes) { return Get<uint32_t>(bytes, 20); }
size_t EntryOffset(size_t section) { return kHeaderBytes + section * kEntryBytes; }
size_t EntryOf(const Bytes& bytes, uint32_t id) {
  for (uint32_t i = 0; i < SectionCount(bytes); ++i) {
    if (Get<uint32_t>(bytes, EntryOffset(i)) == id) return EntryOffset(i);
  }
  ADD_FAILURE() << "no section " << id;
  return kHeaderBytes;
}
size_t SectionOffset(const Bytes& bytes, uint32_t id) { return Get<uint64_t>(bytes, EntryOf(bytes, id) + 8); }

// Makes all checksums right, as somebody would who forges a snapshot. False: the tables make no sense to do
// so.
bool Seal(Bytes& bytes) {
  if (bytes.size() < kHeaderBytes + kFooterBytes || SectionCount(bytes) > 1000) return false;
  const size_t limit = bytes.size() - kFooterBytes;
  size_t piece_entry = EntryOffset(SectionCount(bytes));
  if (piece_entry > limit) return false;
  for (uint32_t section = 0; section < SectionCount(bytes); ++section) {
    const auto offset = Get<uint64_t>(bytes, EntryOffset(section) + 8);
    const auto size = Get<uint64_t>(bytes, EntryOffset(section) + 16);
    if (offset > bytes.size() || size > bytes.size() - offset) return false;
    for (size_t begin = 0; begin < size; begin += 1 << 20) {
      if (piece_entry + 8 > limit) return false;
      Set(bytes, piece_entry,
          static_cast<uint64_t>(
              XXH3_64bits(bytes.data() + offset + begin, std::min<size_t>(size - begin, 1 << 20))));
      piece_entry += 8;
    }
  }
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), piece_entry);
  Set<uint64_t>(bytes, limit, hash.low64);
  Set<uint64_t>(bytes, limit + 8, hash.high64);
  Set<uint64_t>(bytes, limit + 16, bytes.size());
  return true;
}

// One more section behind the others, empty or of one byte.
Bytes WithSection(const Bytes& from, uint32_t id, uint32_t flags) {
  const uint32_t count = SectionCount(from);
  const size_t old_metadata = EntryOffset(count) + 8 * count;  // one piece a section in the example
  const size_t new_metadata = old_metadata + kEntryBytes + 8;
  const auto aligned = [](size_t n) { return (n + 63) / 64 * 64; };
  const size_t shift = aligned(new_metadata) - aligned(old_metadata);
  const size_t begin = aligned(old_metadata), end = from.size() - kFooterBytes;
  Bytes bytes(from.begin(), from.begin() + static_cast<ptrdiff_t>(EntryOffset(count)));
  for (uint32_t i = 0; i < count; ++i) {
    Set<uint64_t>(bytes, EntryOffset(i) + 8, Get<uint64_t>(from, EntryOffset(i) + 8) + shift);
  }
  bytes.resize(aligned(new_metadata));
  bytes.insert(bytes.end(), from.begin() + static_cast<ptrdiff_t>(begin),
               from.begin() + static_cast<ptrdiff_t>(end));
  Set<uint32_t>(bytes, EntryOffset(count), id);
  Set<uint32_t>(bytes, EntryOffset(count) + 4, flags);
  Set<uint64_t>(bytes, EntryOffset(count) + 8, bytes.size());
  Set<uint64_t>(bytes, EntryOffset(count) + 16, 1);
  bytes.push_back(std::byte{42});
  bytes.resize(aligned(bytes.size()));
  bytes.insert(bytes.end(), from.end() - kFooterBytes, from.end());
  Set<uint32_t>(bytes, 20, count + 1);
  Set<uint64_t>(bytes, 24, bytes.size());
  EXPECT_TRUE(Seal(bytes));
  return bytes;
}

class SnapshotTest : public ::testing::Test {
 protected:
  const ModelConfig config_ = ExampleConfig();
  const SnapshotFormat format_{ExampleIdentity(), config_};
  const Bytes state_ = ExampleState(config_);
  const ContextTokens tokens_ = ExampleTokens(1000, true, 17, config_.vocab_size);

  Bytes Encoded() const {
    auto bytes = format_.Encode(tokens_, state_);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return {bytes->span().begin(), bytes->span().end()};
  }
};

TEST_F(SnapshotTest, DecodeGivesWhatWasEncoded) {
  for (const int64_t fed : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{4096}, int64_t{1} << 40}) {
    for (const bool pending : {false, true}) {
      for (const int64_t prompt : {0, 1, 64}) {
        if (pending && fed == 0) continue;
        SCOPED_TRACE(absl::StrFormat("fed %d, pending %d, prompt %d", fed, pending, prompt));
        const ContextTokens tokens = ExampleTokens(fed, pending, prompt, config_.vocab_size);
        const Bytes state = fed == 0 ? Bytes() : state_;
        const auto bytes = format_.Encode(tokens, state);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        EXPECT_LE(static_cast<int64_t>(bytes->size()), format_.max_bytes());
        const auto snapshot = format_.Decode(*bytes);
        ASSERT_TRUE(snapshot.ok()) << snapshot.status();
        EXPECT_TRUE(SameTokens(snapshot->tokens, tokens));
        EXPECT_EQ(snapshot->state, state);
      }
    }
  }
}

TEST_F(SnapshotTest, StatesOfManyMebibytesAndModelsWithoutConvolutionsToo) {
  ModelConfig config = ExampleConfig();
  config.num_layers = 3;
  config.num_heads = 5;
  config.d_k = 128;
  config.d_v = 128;
  for (const int conv_size : {0, 2, 4}) {
    config.conv_size = conv_size;
    const SnapshotFormat format(ExampleIdentity(), config);
    const Bytes state = ExampleState(config);
    const auto bytes = format.Encode(tokens_, state);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto snapshot = format.Decode(*bytes);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_EQ(snapshot->state, state);
  }
}

// The offsets are written out from snapshot.h's description, so that code and description cannot part.
TEST_F(SnapshotTest, BytesLieWhereTheDescriptionSays) {
  const Bytes bytes = Encoded();
  EXPECT_EQ(std::memcmp(bytes.data(), "EFLS\r\n\x1a\n", 8), 0);
  EXPECT_EQ(Get<uint16_t>(bytes, 8), 1);
  EXPECT_EQ(Get<uint16_t>(bytes, 10), 0);
  EXPECT_EQ(bytes[12], std::byte{4});
  EXPECT_EQ(Get<uint32_t>(bytes, 16), 512u);
  EXPECT_EQ(SectionCount(bytes), 5u);
  EXPECT_EQ(Get<uint64_t>(bytes, 24), bytes.size());
  EXPECT_EQ(Get<char>(bytes, 48 + 63), '1');
  EXPECT_EQ(Get<char>(bytes, 112 + 63), '2');
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(&bytes[176])), ExampleIdentity().numerics);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(&bytes[368])), "efla");
  const std::vector<uint32_t> numbers = {2, 2, 3, 5, 3, 6, 6, 10, 1, 1, 1, 300};
  for (size_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(Get<uint32_t>(bytes, 384 + 4 * i), numbers[i]) << i;
  EXPECT_EQ(Get<int64_t>(bytes, 432), 1000);
  EXPECT_EQ(Get<uint32_t>(bytes, 440), 1u);
  EXPECT_EQ(Get<uint32_t>(bytes, 444), 17u);
  EXPECT_EQ(Get<uint32_t>(bytes, 448), 1018u);

  const size_t tokens = SectionOffset(bytes, kTokensId);
  EXPECT_EQ(tokens % 64, 0u);
  EXPECT_EQ(Get<TokenId>(bytes, tokens), *tokens_.pending_token);
  EXPECT_EQ(Get<TokenId>(bytes, tokens + 4), tokens_.pending_prompt[0]);
  EXPECT_EQ(Get<TokenId>(bytes, tokens + 4 * 18), tokens_.tail[0]);
  const auto in_state = [&](size_t i) { return Get<float>(state_, 4 * i); };
  EXPECT_EQ(Get<float>(bytes, SectionOffset(bytes, kRecurrentId) + 4 * 37), in_state(37));
  // Layer 1, column 2, channel 4 of k. In memory: 2 x 2 x 15 recurrent floats, then rows of 6 + 6 + 10.
  const size_t in_section = ((1 * 3 + 2) * 6 + 4) * 4;
  EXPECT_EQ(Get<float>(bytes, SectionOffset(bytes, kConvQId + 1) + in_section),
            in_state(2 * 2 * 15 + (1 * 3 + 2) * 22 + 6 + 4));
  EXPECT_EQ(std::memcmp(&bytes[bytes.size() - 8], "EFLSEND\n", 8), 0);
}

TEST_F(SnapshotTest, EncodeRefusesWhatContradictsItself) {
  const auto expect = [&](ContextTokens tokens, const Bytes& state, absl::StatusCode code, const char* part) {
    const auto bytes = format_.Encode(tokens, state);
    EXPECT_EQ(bytes.status().code(), code) << part;
    EXPECT_NE(bytes.status().ToString().find(part), std::string::npos) << bytes.status();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  Bytes shorter = state_;
  shorter.pop_back();
  expect(tokens_, shorter, kInvalid, absl::StrFormat("%d bytes", shorter.size()).c_str());
  expect(ExampleTokens(0, false, 3, 300), state_, kInvalid, "0 fed tokens");
  ContextTokens tokens = tokens_;
  tokens.tail[5] = 300;
  expect(tokens, state_, kInvalid, "token id 300 is outside the vocabulary of 300");
  tokens.tail[5] = -1;
  expect(tokens, state_, kInvalid, "token id -1");
  tokens = tokens_;
  tokens.tail.back() ^= 1;
  expect(tokens, state_, kInvalid, "does not end with the pending tokens");
  tokens = tokens_;
  tokens.tail.erase(tokens.tail.begin());
  expect(tokens, state_, kInvalid, "the tail has 1017 tokens");
  expect(ExampleTokens(1000, false, 65, 300), state_, kInvalid,
         "pending_prompt has 65 tokens; the limit is 64");
  tokens = tokens_;
  tokens.fed_tokens = -1;
  expect(tokens, state_, kInvalid, "fed_tokens is -1");
  tokens = ExampleTokens(0, false, 1, 300);
  tokens.pending_token = std::exchange(tokens.pending_prompt, {}).front();
  expect(tokens, {}, kInvalid, "no token has been fed");

  SnapshotIdentity talking = ExampleIdentity();
  talking.numerics = std::string(193, 'n');
  const SnapshotFormat talkative(talking, config_);
  EXPECT_EQ(talkative.Encode(tokens_, state_).status().code(), kInvalid);
}

TEST_F(SnapshotTest, NonFiniteStatesAreNeitherWrittenNorRead) {
  const Bytes bytes = Encoded();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), -std::nanf("1")}) {
    for (const size_t place : {size_t{0}, state_.size() / 8, state_.size() / 4 - 1}) {
      Bytes state = state_;
      Set(state, 4 * place, bad);
      const auto encoded = format_.Encode(tokens_, state);
      EXPECT_EQ(encoded.status().code(), absl::StatusCode::kDataLoss);
      EXPECT_NE(encoded.status().ToString().find(absl::StrFormat("element %d ", place)), std::string::npos);
    }
    for (const uint32_t section : {2u, 3u, 4u, 5u}) {
      Bytes forged = bytes;
      Set(forged, SectionOffset(bytes, section), bad);
      ASSERT_TRUE(Seal(forged));
      EXPECT_EQ(format_.Decode(forged).status().code(), absl::StatusCode::kDataLoss) << section;
    }
  }
  Bytes large = bytes;  // the largest numbers are numbers
  Set(large, SectionOffset(bytes, kRecurrentId), std::numeric_limits<float>::max());
  ASSERT_TRUE(Seal(large));
  EXPECT_TRUE(format_.Decode(large).ok());
}

TEST_F(SnapshotTest, SectionsAreFoundByIdInAnyOrder) {
  const Bytes bytes = Encoded();
  const size_t count = SectionCount(bytes);
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = (i + 2) % count;
  Bytes shuffled = bytes;
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(&shuffled[EntryOffset(i)], &bytes[EntryOffset(order[i])], kEntryBytes);
  }
  ASSERT_TRUE(Seal(shuffled));
  EXPECT_NE(shuffled, bytes);
  const auto in_place = format_.DecodeInPlace(HostBuffer::CopyOf(shuffled));
  ASSERT_TRUE(in_place.ok()) << in_place.status();
  EXPECT_EQ(in_place->state, state_);
  const auto snapshot = format_.Decode(shuffled);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->state, state_);
  EXPECT_TRUE(SameTokens(snapshot->tokens, tokens_));
}

TEST_F(SnapshotTest, UnknownSectionsAreSkippedOrRefusedAsTheySay) {
  const Bytes bytes = Encoded();
  const auto skipped = format_.Decode(WithSection(bytes, 77, 0));
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_EQ(skipped->state, state_);
  const auto refused = format_.Decode(WithSection(bytes, 77, 1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.status().ToString().find("section 77"), std::string::npos) << refused.status();
  EXPECT_EQ(format_.Decode(WithSection(bytes, kTokensId, 1)).status().code(),
            absl::StatusCode::kInvalidArgument);

  Bytes damaged = WithSection(bytes, 77, 0);  // skipped, and its checksum compared all the same
  damaged[SectionOffset(damaged, 77)] ^= std::byte{1};
  EXPECT_EQ(format_.Decode(damaged).status().code(), absl::StatusCode::kDataLoss);
}

struct Wrong {
  const char* what;
  absl::StatusCode code;
  std::vector<const char*> parts;  // of the message: what is wrong, and both sides
  std::function<void(Bytes&)> change;
  bool seal = true;
};

TEST_F(SnapshotTest, EverythingWrongIsRefusedNamingBothSides) {
  constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
  const auto number = [](size_t offset, auto value) {
    return [=](Bytes& bytes) { Set(bytes, offset, value); };
  };
  const auto in_entry = [](uint32_t id, size_t offset, auto value) {
    return [=](Bytes& bytes) { Set(bytes, EntryOf(bytes, id) + offset, value); };
  };
  const std::vector<Wrong> table = {
      {"major version", kPrecondition, {"format version 2.0", "reads 1.x"}, number(8, uint16_t{2})},
      {"byte order", kPrecondition, {"04030201", "01020304"}, number(12, uint32_t{0x04030201})},
      {"feature", kPrecondition, {"features 0x4", "0"}, number(32, uint64_t{4})},
      {"weights",
       kPrecondition,
       {"weights' fingerprint", "baa", "aaa"},
       [](Bytes& b) { SetText(b, 48, "b"); }},
      {"tokenizer",
       kPrecondition,
       {"tokenizer's fingerprint", "abb", "bbb"},
       [](Bytes& b) { SetText(b, 112, "a"); }},
      {"no tokenizer",
       kPrecondition,
       {"tokenizer's fingerprint is \"\"", "bbb"},
       [](Bytes& b) { std::fill_n(b.begin() + 112, 64, std::byte{0}); }},
      {"numerics", kPrecondition, {"gpu, float32", "cpu, float32"}, [](Bytes& b) { SetText(b, 176, "gpu"); }},
      {"model type",
       kPrecondition,
       {"\"delta_net\"", "\"efla\""},
       [](Bytes& b) { SetText(b, 368, "delta_net"); }},
      {"text that is none",
       kPrecondition,
       {"\"?[2J\"", "\"efla\""},
       [](Bytes& b) { SetText(b, 368, "\x1b[2J"); }},
      {"layers", kPrecondition, {"layers is 24", "is 2"}, number(384, uint32_t{24})},
      {"heads", kPrecondition, {"heads is 8", "is 2"}, number(388, uint32_t{8})},
      {"d_k", kPrecondition, {"d_k is 128", "is 3"}, number(392, uint32_t{128})},
      {"d_v", kPrecondition, {"d_v is 128", "is 5"}, number(396, uint32_t{128})},
      {"columns", kPrecondition, {"columns is 4", "is 3"}, number(400, uint32_t{4})},
      {"q channels", kPrecondition, {"q channels is 7", "is 6"}, number(404, uint32_t{7})},
      {"k channels", kPrecondition, {"k channels is 7", "is 6"}, number(408, uint32_t{7})},
      {"v channels", kPrecondition, {"v channels is 7", "is 10"}, number(412, uint32_t{7})},
      {"dtype", kPrecondition, {"element type is 2", "is 1"}, number(416, uint32_t{2})},
      {"axis order", kPrecondition, {"recurrent state is 2", "is 1"}, number(420, uint32_t{2})},
      {"conv order", kPrecondition, {"convolution state is 2", "is 1"}, number(424, uint32_t{2})},
      {"vocabulary", kPrecondition, {"vocabulary size is 301", "is 300"}, number(428, uint32_t{301})},
      {"encoding",
       kPrecondition,
       {"RECURRENT", "encoding 1", "reads 0"},
       in_entry(kRecurrentId, 24, uint32_t{1})},
      {"not a snapshot", kInvalid, {"not a snapshot"}, [](Bytes& b) { SetText(b, 0, "PK\3\4"); }},
      {"text mode transfer", kInvalid, {"not a snapshot"}, [](Bytes& b) { SetText(b, 4, "\n"); }},
      {"negative count", kInvalid, {"counts -1"}, number(432, int64_t{-1})},
      {"absurd count", kInvalid, {"counts 9223372036854775807"}, number(432, INT64_MAX)},
      {"two pending", kInvalid, {"2 pending"}, number(440, uint32_t{2})},
      {"long prompt", kInvalid, {"4294967295 of a pending prompt"}, number(444, uint32_t{UINT32_MAX})},
      {"long tail", kInvalid, {"4097 of a tail"}, number(448, uint32_t{4097})},
      {"tail of another length", kInvalid, {"TOKENS", "4144", "4140"}, number(448, uint32_t{1017})},
      {"no fed tokens but a state", kPrecondition, {"section 2"}, number(432, int64_t{0})},
      {"id beyond the vocabulary",
       kInvalid,
       {"token id 300", "vocabulary of 300"},
       [](Bytes& b) { Set(b, SectionOffset(b, kTokensId) + 4 * 18, TokenId{300}); }},
      {"pending not in the tail",
       kInvalid,
       {"does not end with"},
       [](Bytes& b) { Set(b, SectionOffset(b, kTokensId), TokenId{1}); }},
      {"reserved", kInvalid, {"zero"}, number(460, uint8_t{1})},
      {"text behind text", kInvalid, {"zero"}, number(367, uint8_t{1})},
      {"section flags", kInvalid, {"RECURRENT", "0x3"}, in_entry(kRecurrentId, 4, uint32_t{3})},
      {"section missing",
       kInvalid,
       {"lacks section CONV_Q"},
       [](Bytes& b) {
         Set(b, EntryOf(b, kConvQId) + 4, uint32_t{0});
         Set(b, EntryOf(b, kConvQId), uint32_t{99});
       }},
      {"section inflated", kInvalid, {"section 3", "5376"}, in_entry(kRecurrentId, 16, uint64_t{400})},
      {"section moved",
       kInvalid,
       {"section 2"},
       [](Bytes& b) { Set(b, EntryOf(b, kRecurrentId) + 8, SectionOffset(b, kRecurrentId) - 64); }},
      {"section shared",
       kInvalid,
       {"section "},
       [](Bytes& b) { Set(b, EntryOf(b, kConvQId) + 8, SectionOffset(b, kConvQId + 1)); }},
      {"section beyond all",
       kDataLoss,
       {"section 2", "18446744073709551615"},
       in_entry(kRecurrentId, 16, UINT64_MAX),
       false},
      {"many sections", kDataLoss, {"65 sections", "at most 64"}, number(20, uint32_t{65}), false},
      {"length", kDataLoss, {"its header says 1"}, number(24, uint64_t{1})},
      {"one byte short", kDataLoss, {"its header says"}, [](Bytes& b) { b.pop_back(); }, false},
      {"one byte more", kDataLoss, {"its header says"}, [](Bytes& b) { b.push_back({}); }, false},
      {"empty", kInvalid, {"not a snapshot"}, [](Bytes& b) { b.clear(); }, false},
      {"beginning only", kDataLoss, {"less than a header"}, [](Bytes& b) { b.resize(511); }, false},
      {"checksum of a piece",
       kDataLoss,
       {"MiB 0", "section 2"},
       [](Bytes& b) { b[SectionOffset(b, kRecurrentId)] ^= std::byte{1}; },
       false},
      {"checksum of all", kDataLoss, {"header or tables"}, number(432, int64_t{999}), false},
  };
  for (const Wrong& wrong : table) {
    Bytes bytes = Encoded();
    wrong.change(bytes);
    if (wrong.seal) {
      ASSERT_TRUE(Seal(bytes)) << wrong.what;
    }
    const absl::Status status = format_.Decode(bytes).status();
    EXPECT_EQ(status.code(), wrong.code) << wrong.what << ": " << status;
    for (const char* part : wrong.parts) {
      EXPECT_NE(status.ToString().find(part), std::string::npos)
          << wrong.what << ": " << part << " in " << status;
    }
  }
}

TEST_F(SnapshotTest, LaterMinorVersionsAndIgnorableFeaturesAreRead) {
  Bytes bytes = Encoded();
  Set(bytes, 10, uint16_t{7});
  Set(bytes, 40, uint64_t{1} << 63);
  ASSERT_TRUE(Seal(bytes));
  EXPECT_TRUE(format_.Decode(bytes).ok());
}

TEST_F(SnapshotTest, OtherNumericsAreReadOnlyWhereAllowed) {
  SnapshotIdentity identity = ExampleIdentity();
  identity.numerics = "another device";
  const SnapshotFormat other(identity, config_);
  EXPECT_EQ(other.Decode(Encoded()).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(other.Decode(Encoded(), /*allow_other_numerics=*/true).ok());
  identity.weights_fingerprint = std::string(64, 'f');
  EXPECT_EQ(SnapshotFormat(identity, config_).Decode(Encoded(), true).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(SnapshotTest, EveryTruncationIsRefused) {
  const Bytes bytes = Encoded();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto cut = std::span(bytes).first(size);
    EXPECT_FALSE(format_.Decode(cut).ok()) << size;
  }
}

TEST_F(SnapshotTest, EveryFlippedBitIsRefused) {
  Bytes bytes = Encoded();
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto mask = std::byte{1} << (bit % 8);
    bytes[bit / 8] ^= mask;
    // The minor version and ignorable features may say anything, but not behind the checksum's back.
    EXPECT_FALSE(format_.Decode(bytes).ok()) << "bit " << bit;
    bytes[bit / 8] ^= mask;
  }
}

// Damage of all sorts, without new checksums: refused. With new checksums: refused, or a context that this
// model could have.
TEST_F(SnapshotTest, MutationsAreRefusedOrWhole) {
  const Bytes original = Encoded();
  const size_t metadata = SectionOffset(original, kTokensId);
  std::mt19937_64 random(4);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const uint64_t kTelling[] = {0,
                               1,
                               63,
                               64,
                               65,
                               4096,
                               4097,
                               0x7fffffff,
                               0x80000000,
                               UINT32_MAX,
                               uint64_t{1} << 48,
                               INT64_MAX,
                               UINT64_MAX - 63,
                               UINT64_MAX};
  int accepted = 0, sealed = 0;
  for (int round = 0; round < 200'000; ++round) {
    Bytes bytes = original;
    for (size_t edits = 1 + below(3); edits > 0 && !bytes.empty(); --edits) {
      const size_t at = below(2) != 0 ? below(std::min(metadata, bytes.size())) : below(bytes.size());
      switch (below(8)) {
        case 0:
          bytes[at] ^= std::byte{1} << below(8);
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(below(256));
          break;
        case 2:
        case 3: {  // a telling number in some field
          const size_t field = at / 4 * 4;
          const uint64_t value = kTelling[below(std::size(kTelling))];
          const size_t width = below(2) != 0 ? 4 : 8;
          std::memcpy(&bytes[field], &value, std::min(width, bytes.size() - field));
          break;
        }
        case 4:  // two pieces change places
          for (size_t i = 0, other = below(bytes.size()); i < 32; ++i) {
            if (std::max(at, other) + i < bytes.size()) std::swap(bytes[at + i], bytes[other + i]);
          }
          break;
        case 5: {  // two table entries change places, or become one
          const size_t one = EntryOffset(below(5)), other = EntryOffset(below(5));
          if (bytes.size() < metadata) break;
          std::memcpy(&bytes[one], &bytes[other], kEntryBytes);
          break;
        }
        case 6:
          bytes.resize(below(bytes.size() + 1));
          break;
        default: {  // something is put in or taken out, and the length told
          const size_t count = below(130);
          if (below(2) != 0) {
            bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), count, static_cast<std::byte>(below(3)));
          } else {
            bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at),
                        bytes.begin() + static_cast<ptrdiff_t>(std::min(at + count, bytes.size())));
          }
          if (bytes.size() >= 32) Set<uint64_t>(bytes, 24, bytes.size());
        }
      }
    }
    if (bytes == original) continue;
    const bool sealing = below(2) != 0 && Seal(bytes);
    sealed += sealing;
    const auto snapshot = format_.Decode(bytes);
    const auto in_place = format_.DecodeInPlace(HostBuffer::CopyOf(bytes));
    EXPECT_EQ(in_place.status(), snapshot.status()) << "round " << round;
    if (snapshot.ok() && in_place.ok()) {
      EXPECT_TRUE(SameTokens(in_place->tokens, snapshot->tokens)) << "round " << round;
      EXPECT_TRUE(in_place->state == snapshot->state) << "round " << round;
    }
    if (!sealing) {
      EXPECT_FALSE(snapshot.ok()) << "round " << round;
      continue;
    }
    if (!snapshot.ok()) continue;
    ++accepted;
    const auto again = format_.Encode(snapshot->tokens, snapshot->state);
    ASSERT_TRUE(again.ok()) << "round " << round << ": " << again.status();
    EXPECT_TRUE(format_.Decode(*again).ok());
  }
  EXPECT_GT(sealed, 50'000);
  EXPECT_GT(accepted, 1000);  // of states and tokens that are others, but possible
}

// ---- Snapshots of released versions ----

struct Golden {
  const char* file;
  int conv_size;
  int64_t fed, prompt;
  bool pending;
};
void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.file; }
constexpr Golden kGolden[] = {
    {"v1_0_turn.efls", 4, 1000, 17, true},
    {"v1_0_no_convolution.efls", 0, 5000, 0, false},
    {"v1_0_only_waiting.efls", 4, 0, 40, false},
};

class GoldenSnapshotTest : public ::testing::TestWithParam<Golden> {
 protected:
  ModelConfig Config() const {
    ModelConfig config = ExampleConfig();
    config.conv_size = GetParam().conv_size;
    return config;
  }
  SnapshotFormat Format() const { return SnapshotFormat(ExampleIdentity(), Config()); }
  ContextTokens Tokens() const {
    return ExampleTokens(GetParam().fed, GetParam().pending, GetParam().prompt, Config().vocab_size);
  }
  Bytes State() const { return GetParam().fed == 0 ? Bytes() : ExampleState(Config()); }
  std::string Path() const {
    return SourcePath("tests/server/golden_snapshots/") + std::string(GetParam().file);
  }
  Bytes File() const {
    std::ifstream file(Path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto raw = std::as_bytes(std::span(text));
    return {raw.begin(), raw.end()};
  }
};

TEST_P(GoldenSnapshotTest, IsReadAndWrittenAsEver) {
  const Bytes bytes = File();
  if (bytes.empty()) {  // a new case: its file is to be looked at and added; those of before stay
    const std::string path = ::testing::TempDir() + GetParam().file;
    const auto encoded = Format().Encode(Tokens(), State());
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(encoded->data()), static_cast<std::streamsize>(encoded->size()));
    FAIL() << "there is no " << Path() << "; this version would write " << path;
  }
  const auto snapshot = Format().Decode(bytes);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_TRUE(SameTokens(snapshot->tokens, Tokens()));
  EXPECT_EQ(snapshot->state, State());
  const auto again = Format().Encode(snapshot->tokens, snapshot->state);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, bytes);
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenSnapshotTest, ::testing::ValuesIn(kGolden), [](const auto& test) {
  const std::string file = test.param.file;
  return file.substr(0, file.find('.'));
});

}  // namespace
}  // namespace efla
