#include "model/text_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "model/utf8.h"

namespace efla {
namespace {

// A tokenizer whose pieces are any bytes: id i adds pieces[i]. A piece "▁..." is "dummy-prefixed": it begins
// with a space that a text's first piece loses. Control tokens are spelled "<c>".
class FakeTokenizer final : public Tokenizer {
 public:
  explicit FakeTokenizer(std::vector<std::string> pieces, std::vector<TokenId> controls = {})
      : pieces_(std::move(pieces)), controls_(std::move(controls)) {}
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view, bool) const override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeContinuation(std::string_view, bool) const override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeMarked(std::string_view, std::span<const TextRange>, bool,
                                                    const EncodeLimits&) const override {
    return absl::UnimplementedError("fake");
  }
  std::string_view PieceBytes(TokenId id, bool at_start) const override {
    if (id < 0 || id >= vocab_size() || is_control(id)) return {};
    std::string_view bytes = pieces_[static_cast<size_t>(id)];
    if (at_start && bytes.starts_with(' ')) bytes.remove_prefix(1);
    return bytes;
  }
  int vocab_size() const override { return static_cast<int>(pieces_.size()); }
  TokenId bos_id() const override { return -1; }
  TokenId eos_id() const override { return -1; }
  bool is_control(TokenId id) const override {
    return std::find(controls_.begin(), controls_.end(), id) != controls_.end();
  }
  std::string_view Piece(TokenId id) const override { return pieces_[static_cast<size_t>(id)]; }
  TokenId ControlId(std::string_view) const override { return -1; }
  const std::string& fingerprint() const override { return fingerprint_; }

 private:
  std::vector<std::string> pieces_;
  std::vector<TokenId> controls_;
  std::string fingerprint_;
};

// The whole text at once, independent of Utf8Repair: tries each length of well-formed sequence by decoding
// it. `prefix`: how much of it comes from what ends within the first `first_bytes` bytes.
std::string RepairedBytes(std::string_view bytes, size_t first_bytes = 0, size_t* prefix = nullptr) {
  const auto well_formed_start = [](std::string_view s) -> std::pair<size_t, bool> {
    // How many bytes of `s` begin a character, and whether they finish it.
    const auto at = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
    struct Form {
      unsigned low, high, second_low, second_high;
      size_t length;
    };
    static constexpr Form kForms[] = {
        {0x00, 0x7F, 0, 0, 1},       {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
        {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
        {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
    for (const Form& form : kForms) {
      if (at(0) < form.low || at(0) > form.high) continue;
      size_t good = 1;
      while (good < form.length && good < s.size()) {
        const unsigned low = good == 1 ? form.second_low : 0x80, high = good == 1 ? form.second_high : 0xBF;
        if (at(good) < low || at(good) > high) break;
        ++good;
      }
      return {good, good == form.length};
    }
    return {1, false};
  };
  std::string out;
  size_t taken = 0;
  while (!bytes.empty()) {
    const auto [length, whole] = well_formed_start(bytes);
    out += whole ? bytes.substr(0, length) : kReplacementCharacter;
    bytes.remove_prefix(length);
    taken += length;
    if (prefix != nullptr && taken <= first_bytes) *prefix = out.size();
  }
  return out;
}

TEST(Utf8RepairTest, FollowsTheMaximalSubpartPractice) {
  const auto repaired = [](std::string_view bytes) {
    Utf8Repair repair;
    std::string out;
    for (size_t i = 0; i < bytes.size();) i += repair.Push(bytes[i], out) ? 1 : 0;
    repair.Finish(out);
    return out;
  };
  const std::string bad(kReplacementCharacter);
  EXPECT_EQ(repaired("\xE2\x82\xAC"), "\xE2\x82\xAC");
  EXPECT_EQ(repaired("\xE2\x82"), bad);
  EXPECT_EQ(repaired("\xE2\x82z"), bad + "z");
  EXPECT_EQ(repaired("\xF0\x90\x80"), bad);
  EXPECT_EQ(repaired("\xC0\xAF"), bad + bad);
  EXPECT_EQ(repaired("\xE0\x80\x80"), bad + bad + bad);  // overlong: no byte may follow E0 80
  EXPECT_EQ(repaired("\xED\xA0\x80"), bad + bad + bad);  // surrogate
  EXPECT_EQ(repaired("\xF4\x90\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(repaired("\xFF\xFE"), bad + bad);
  EXPECT_EQ(repaired("\xE2\xE2\x82\xAC"), bad + "\xE2\x82\xAC");
  EXPECT_EQ(repaired("a\x80z"), "a" + bad + "z");
}

TEST(Utf8RepairTest, AgreesWithATableOnAllShortSequences) {
  // Every border of the tables, in all combinations of four bytes.
  const unsigned char borders[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2,
                                   0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF};
  for (unsigned char a : borders) {
    for (unsigned char b : borders) {
      for (unsigned char c : borders) {
        for (unsigned char d : borders) {
          const char raw[] = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(c),
                              static_cast<char>(d)};
          const std::string_view bytes(raw, 4);
          Utf8Repair repair;
          std::string out;
          for (size_t i = 0; i < 4;) i += repair.Push(bytes[i], out) ? 1 : 0;
          ASSERT_LE(repair.pending().size(), 3u);
          repair.Finish(out);
          ASSERT_EQ(out, RepairedBytes(bytes)) << int{a} << " " << int{b} << " " << int{c} << " " << int{d};
          ASSERT_EQ(FindInvalidUtf8(bytes).has_value(), out != bytes);
        }
      }
    }
  }
}

TEST(Utf8Test, FindsTheFirstBadByte) {
  EXPECT_EQ(FindInvalidUtf8("plain \xE2\x82\xAC \xEF\xBF\xBD"), std::nullopt);
  EXPECT_EQ(FindInvalidUtf8("ab\xE2\x82"), 2u);
  EXPECT_EQ(FindInvalidUtf8("ab\xE2\x82"
                            "c"),
            2u);
  EXPECT_EQ(FindInvalidUtf8("\xE2\x82\xAC\x80"), 3u);
  EXPECT_EQ(FindInvalidUtf8(std::string("a\0b\xFF", 4)), 3u);
}

// Where the first match ends, and which stop it is: the longest of those that end there.
std::optional<std::pair<size_t, int>> FirstStop(std::string_view text,
                                                const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    int best = -1;
    for (size_t s = 0; s < stops.size(); ++s) {
      if (!text.substr(0, end).ends_with(stops[s])) continue;
      if (best < 0 || stops[s].size() > stops[static_cast<size_t>(best)].size()) best = static_cast<int>(s);
    }
    if (best >= 0) return std::pair(end, best);
  }
  return std::nullopt;
}

size_t LongestPrefixAtEnd(std::string_view text, const std::vector<std::string>& stops) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t n = 1; n < stop.size() && n <= text.size(); ++n) {
      if (text.ends_with(std::string_view(stop).substr(0, n))) longest = std::max(longest, n);
    }
  }
  return longest;
}

TEST(StopMatcherTest, AgreesWithPlainSearch) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(random() % 5);
    for (std::string& stop : stops) {
      stop.resize(1 + random() % 5);
      for (char& c : stop) c = static_cast<char>('a' + random() % 2);
    }
    std::string text(random() % 40, ' ');
    for (char& c : text) c = static_cast<char>('a' + random() % 3);
    const auto expected = FirstStop(text, stops);
    StopMatcher matcher(stops);
    size_t fed = 0;
    std::optional<StopMatcher::Match> match;
    while (fed < text.size() && !match) {
      const size_t bytes = std::min<size_t>(text.size() - fed, 1 + random() % 4);
      match = matcher.Feed(std::string_view(text).substr(fed, bytes));
      if (match) {
        fed += match->end_in_input;
      } else {
        fed += bytes;
        ASSERT_EQ(matcher.held(), LongestPrefixAtEnd(std::string_view(text).substr(0, fed), stops));
        const StopMatcher copy = matcher;
        ASSERT_EQ(copy.held(), matcher.held());
      }
    }
    ASSERT_EQ(match.has_value(), expected.has_value());
    if (match) {
      ASSERT_EQ(fed, expected->first);
      ASSERT_EQ(stops[static_cast<size_t>(match->stop_index)], stops[static_cast<size_t>(expected->second)]);
    }
  }
}

TEST(StopMatcherTest, TheLargestStopListIsCheap) {
  std::vector<std::string> stops(64, std::string(1024, 'a'));
  for (size_t i = 0; i < stops.size(); ++i) stops[i].back() = static_cast<char>('b' + i);
  StopMatcher matcher(stops);
  const std::string text(1 << 20, 'a');
  EXPECT_FALSE(matcher.Feed(text).has_value());
  EXPECT_EQ(matcher.held(), 1023u);
  EXPECT_EQ(matcher.Feed("c")->stop_index, 1);
}

struct Outcome {
  std::string text;
  int released = 0;
  bool stopped = false;
  int stop_index = -1;
};

// Streams `ids` and checks at each step that what is held is what must be held, and no more.
Outcome Stream(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
               const std::vector<std::string>& stops, bool continues, bool include_stop) {
  Outcome outcome;
  TextStream stream(&tokenizer, stops, continues, include_stop);
  std::string bytes;
  std::vector<size_t> ends;  // of each token, in bytes
  bool at_start = !continues;
  const auto take = [&](const TextStream::Push& push) {
    outcome.text += push.text;
    outcome.released += push.tokens_released;
    outcome.stopped = push.stopped;
    outcome.stop_index = push.stop_index;
    EXPECT_EQ(FindInvalidUtf8(push.text), std::nullopt);
  };
  for (size_t i = 0; i < ids.size() && !outcome.stopped; ++i) {
    bytes += tokenizer.PieceBytes(ids[i], at_start);
    at_start = at_start && tokenizer.PieceBytes(ids[i], false).empty();
    ends.push_back(bytes.size());
    take(stream.Add(ids[i]));
    if (outcome.stopped) break;
    // The certain text: everything but an unfinished character.
    size_t settled = bytes.size();
    for (size_t tail = 1; tail <= 3 && tail <= bytes.size(); ++tail) {
      const std::string_view end = std::string_view(bytes).substr(bytes.size() - tail);
      const std::string repaired = RepairedBytes(std::string(end) + "");
      if (repaired == kReplacementCharacter && RepairedBytes(bytes).ends_with(kReplacementCharacter)) {
        // One unfinished character only if some byte would finish or lengthen it.
        for (int next = 0x80; next < 0xC0; ++next) {
          const std::string longer = RepairedBytes(std::string(end) + static_cast<char>(next));
          if (longer == kReplacementCharacter ||
              FindInvalidUtf8(std::string(end) + static_cast<char>(next)) == std::nullopt) {
            settled = bytes.size() - tail;
          }
        }
      }
    }
    const std::string certain = RepairedBytes(std::string_view(bytes).substr(0, settled));
    const std::string pending = bytes.substr(settled);
    const auto held_with = [&](std::string_view next) {
      // Suffixes of certain+next that begin in `certain` and are a prefix of a stop (or a whole one).
      size_t most = 0;
      const std::string all = certain + std::string(next);
      for (const std::string& stop : stops) {
        for (size_t n = next.size() + 1; n <= stop.size() && n <= all.size(); ++n) {
          if (n == stop.size() && next.empty()) continue;
          if (all.ends_with(std::string_view(stop).substr(0, n))) most = std::max(most, n - next.size());
        }
      }
      return most;
    };
    const size_t must_hold =
        pending.empty() ? held_with("") : std::max(held_with(pending), held_with(kReplacementCharacter));
    EXPECT_EQ(outcome.text, certain.substr(0, certain.size() - must_hold));
    // Tokens whose last byte is covered, in whole characters.
    int covered = 0;
    for (size_t end : ends) {
      if (end > settled) break;
      // The text's length once this byte is out: a byte inside a character comes with the whole character.
      size_t units = end;
      std::string text = RepairedBytes(std::string_view(bytes).substr(0, units));
      while (!certain.starts_with(text) && units < settled) {
        text = RepairedBytes(std::string_view(bytes).substr(0, ++units));
      }
      if (text.size() > outcome.text.size()) break;
      ++covered;
    }
    EXPECT_EQ(outcome.released, covered) << "bytes " << bytes.size();
  }
  if (!outcome.stopped) take(stream.Finish());
  EXPECT_EQ(outcome.released, static_cast<int>(ends.size()));
  return outcome;
}

FakeTokenizer BytePieces() {
  std::vector<std::string> pieces;
  for (int byte = 0; byte < 256; ++byte) pieces.emplace_back(1, static_cast<char>(byte));
  for (const char* piece : {" the", "ab", "abc", " a", "\xE2\x82", "\xAC", "\xE2\x82\xAC", "\xF0\x9F\x99\x82",
                            "b\xE2", "\xEF\xBF\xBD", "<c>", "", "a\xF0\x9F", " "}) {
    pieces.emplace_back(piece);
  }
  return FakeTokenizer(std::move(pieces), {266});
}

TEST(TextStreamTest, RandomIdsGiveExactlyTheirText) {
  const FakeTokenizer tokenizer = BytePieces();
  std::mt19937 random(4);
  const TokenId favourites[] = {'a', 'b', 'c', 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 256, 257, 258,
                                259, 260, 261, 262,  263,  264,  265,  266,  267,  268, 269};
  const std::vector<std::string> stop_pool = {"abc",
                                              "bc",
                                              "a",
                                              "\xE2\x82\xAC",
                                              "b\xE2\x82\xAC",
                                              "\xEF\xBF\xBD",
                                              "ab\xEF\xBF\xBD",
                                              "\xF0\x9F\x99\x82",
                                              " the",
                                              "bab",
                                              "ccc",
                                              "a\xF0\x9F\x99\x82z",
                                              "\xE2\x82\xAC\xE2\x82\xAC",
                                              "zzz"};
  int stopped = 0;
  for (int round = 0; round < 6000; ++round) {
    std::vector<TokenId> ids(random() % 24);
    for (TokenId& id : ids) {
      id = random() % 4 == 0 ? static_cast<TokenId>(random() % 280) - 2
                             : favourites[random() % std::size(favourites)];
    }
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) stop = stop_pool[random() % stop_pool.size()];
    const bool continues = random() % 2 == 0, include_stop = random() % 2 == 0;

    std::string bytes;
    bool at_start = !continues;
    for (TokenId id : ids) {
      bytes += tokenizer.PieceBytes(id, at_start);
      at_start = at_start && tokenizer.PieceBytes(id, false).empty();
    }
    std::string whole = RepairedBytes(bytes);
    if (!continues && stops.empty()) {
      ASSERT_EQ(tokenizer.Decode(ids), whole);
    }
    const Outcome outcome = Stream(tokenizer, ids, stops, continues, include_stop);
    const auto stop = FirstStop(whole, stops);
    ASSERT_EQ(outcome.stopped, stop.has_value());
    if (stop) {
      ++stopped;
      const std::string& found = stops[static_cast<size_t>(stop->second)];
      ASSERT_EQ(stops[static_cast<size_t>(outcome.stop_index)], found);
      whole.resize(include_stop ? stop->first : stop->first - found.size());
    }
    ASSERT_EQ(outcome.text, whole);
    if (HasFailure()) FAIL() << "round " << round;
  }
  EXPECT_GT(stopped, 1000);
  EXPECT_LT(stopped, 5000);
}

TEST(TextStreamTest, ACharacterIsNeverSplit) {
  const FakeTokenizer tokenizer = BytePieces();
  TextStream stream(&tokenizer, {}, false);
  for (TokenId id : {0xF0, 0x9F, 0x99}) {
    const auto push = stream.Add(id);
    EXPECT_EQ(push.text, "");
    EXPECT_EQ(push.tokens_released, 0);
  }
  const auto push = stream.Add(0x82);
  EXPECT_EQ(push.text, "\xF0\x9F\x99\x82");
  EXPECT_EQ(push.tokens_released, 4);
}

TEST(TextStreamTest, ADanglingTailIsOneReplacementCharacter) {
  const FakeTokenizer tokenizer = BytePieces();
  TextStream stream(&tokenizer, {}, false);
  stream.Add(0xF0);
  stream.Add(0x9F);
  const auto push = stream.Finish();
  EXPECT_EQ(push.text, kReplacementCharacter);
  EXPECT_EQ(push.tokens_released, 2);
  EXPECT_EQ(stream.Finish().text, "");
}

TEST(TextStreamTest, AStopInsideATokenCutsTheTextAndReleasesTheToken) {
  const FakeTokenizer tokenizer({"one ", "twoEN", "D three"});
  TextStream stream(&tokenizer, {"END"}, true);
  EXPECT_EQ(stream.Add(0).text, "one ");
  const auto held = stream.Add(1);
  EXPECT_EQ(held.text, "two");
  EXPECT_EQ(held.tokens_released, 0);  // its last bytes are held
  const auto push = stream.Add(2);
  EXPECT_EQ(push.text, "");
  EXPECT_TRUE(push.stopped);
  EXPECT_EQ(push.stop_index, 0);
  EXPECT_EQ(push.tokens_released, 2);
}

TEST(TextStreamTest, IncludeStopKeepsItAndNothingAfterIt) {
  const FakeTokenizer tokenizer({"one EN", "D three"});
  TextStream stream(&tokenizer, {"END"}, true, /*include_stop=*/true);
  std::string text = stream.Add(0).text;
  text += stream.Add(1).text;
  EXPECT_EQ(text, "one END");
}

TEST(TextStreamTest, AFinishThatIsNoStopReleasesWhatWasHeld) {
  const FakeTokenizer tokenizer({"one EN"});
  TextStream stream(&tokenizer, {"END"}, true);
  EXPECT_EQ(stream.Add(0).text, "one ");
  const auto push = stream.Finish();
  EXPECT_EQ(push.text, "EN");
  EXPECT_EQ(push.tokens_released, 1);
  EXPECT_FALSE(push.stopped);
}

TEST(TextStreamTest, FinishCanMeetAStop) {
  const FakeTokenizer tokenizer({"a\xE2"});
  TextStream stream(&tokenizer, {"a\xEF\xBF\xBD"}, true);
  EXPECT_EQ(stream.Add(0).text, "");
  const auto push = stream.Finish();
  EXPECT_TRUE(push.stopped);
  EXPECT_EQ(push.text, "");
}

TEST(TextStreamTest, OnlyTheVeryFirstPieceLosesItsSpace) {
  const FakeTokenizer tokenizer({" the", " ", "<c>"}, {2});
  const auto text = [&](bool continues, const std::vector<TokenId>& ids) {
    TextStream stream(&tokenizer, {}, continues);
    std::string all;
    for (TokenId id : ids) all += stream.Add(id).text;
    return all;
  };
  EXPECT_EQ(text(false, {0, 0}), "the the");
  EXPECT_EQ(text(true, {0, 0}), " the the");
  EXPECT_EQ(text(false, {2, 0}), "the");   // a control token is no text
  EXPECT_EQ(text(false, {1, 0}), " the");  // the space alone was the first piece
}

TEST(TextStreamTest, ControlTokensShowTheirSpellingOnlyWhenAsked) {
  const FakeTokenizer tokenizer({" the", "<c>"}, {1});
  TextStream skipping(&tokenizer, {}, false);
  const auto silent = skipping.Add(1);
  EXPECT_EQ(silent.text, "");
  EXPECT_EQ(silent.tokens_released, 1);
  TextStream showing(&tokenizer, {}, false, false, /*skip_special_tokens=*/false);
  EXPECT_EQ(showing.Add(1).text, "<c>");
  EXPECT_EQ(showing.Add(0).text, "the");
}

TEST(TextStreamTest, WithoutATokenizerThereAreOnlyIds) {
  TextStream stream(nullptr, {"stop"}, false);
  const auto push = stream.Add(5);
  EXPECT_EQ(push.text, "");
  EXPECT_EQ(push.tokens_released, 1);
  EXPECT_EQ(stream.Finish().tokens_released, 0);
}

// The identity of a stream, with everything that may be asked of one: what comes out, however it is cut, is
// the whole text of echoed and drawn tokens, up to the first stop string in what was drawn.
TEST(TextStreamTest, EchoStopsAndSpecialTokensKeepTheIdentity) {
  const FakeTokenizer tokenizer = BytePieces();
  constexpr TokenId kControl = 266;
  const std::string kAlphabet[] = {"a", "b", "c", "z", "\xE2\x82\xAC", "\xEF\xBF\xBD", "\xF0\x9F\x99\x82",
                                   " "};
  std::mt19937 random(20);
  const auto one_of = [&](const auto& choices) { return choices[random() % std::size(choices)]; };
  int stopped = 0, completed_by_output = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<TokenId> ids(random() % 20);
    for (TokenId& id : ids) {
      const TokenId likely[] = {'a', 'b', 'c', 'z', 0xE2, 0x82, 0xAC, 0xF0, 0x9F,
                                256, 257, 258, 259, 260,  262,  264,  266,  269};
      id = random() % 5 == 0 ? static_cast<TokenId>(random() % 270) : one_of(likely);
    }
    const size_t echoed = random() % (ids.size() + 1);
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) {
      for (size_t i = 1 + random() % 3; i > 0; --i) stop += one_of(kAlphabet);
    }
    const bool continues = random() % 2 == 0, include_stop = random() % 2 == 0,
               skip_special = random() % 2 == 0;

    std::string bytes;
    size_t echoed_bytes = 0;
    bool at_start = !continues;
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool shows = ids[i] == kControl && !skip_special;
      bytes += shows ? tokenizer.Piece(ids[i]) : tokenizer.PieceBytes(ids[i], at_start);
      at_start = at_start && tokenizer.PieceBytes(ids[i], false).empty();
      if (i + 1 == echoed) echoed_bytes = bytes.size();
    }
    size_t prefix = 0;
    std::string expected = RepairedBytes(bytes, echoed_bytes, &prefix);
    completed_by_output += RepairedBytes(bytes.substr(0, echoed_bytes)).size() != prefix ? 1 : 0;
    const auto match = FirstStop(std::string_view(expected).substr(prefix), stops);
    if (match) {
      const size_t stop_bytes = stops[static_cast<size_t>(match->second)].size();
      expected.resize(prefix + match->first - (include_stop ? 0 : stop_bytes));
    }

    TextStream stream(&tokenizer, stops, continues, include_stop, skip_special);
    std::string text;
    size_t added = 0, released = 0;
    bool has_stopped = false;
    const auto take = [&](const TextStream::Push& push) {
      ASSERT_EQ(FindInvalidUtf8(push.text), std::nullopt);
      ASSERT_TRUE(expected.starts_with(text + push.text))
          << "round " << round << ": nothing is taken back or past a stop";
      text += push.text;
      released += static_cast<size_t>(push.tokens_released);
      ASSERT_LE(released, added);
      has_stopped = push.stopped;
    };
    for (; added < ids.size() && !has_stopped && !HasFatalFailure();) {
      const bool is_echoed = added < echoed;
      const TokenId id = ids[added++];
      take(is_echoed ? stream.Echo(id) : stream.Add(id));
      ASSERT_FALSE(has_stopped && is_echoed) << "round " << round << ": a stop in what is echoed";
    }
    if (!has_stopped) take(stream.Finish());
    ASSERT_EQ(text, expected) << "round " << round;
    ASSERT_EQ(has_stopped, match.has_value()) << "round " << round;
    ASSERT_EQ(released, added) << "round " << round;
    stopped += has_stopped ? 1 : 0;
  }
  EXPECT_GT(stopped, 1000);
  EXPECT_GT(completed_by_output, 100) << "characters begun in the prompt and finished by the output";
}

TEST(TextStreamTest, AStopIsNotFoundInAnEchoNorAcrossItsEnd) {
  const FakeTokenizer tokenizer = BytePieces();
  TextStream stream(&tokenizer, {"ab"}, /*continues=*/true);
  EXPECT_EQ(stream.Echo('a').text, "a");
  EXPECT_EQ(stream.Echo('b').text, "b") << "nothing is held for a stop either";
  EXPECT_EQ(stream.Echo('a').text, "a");
  EXPECT_EQ(stream.Add('b').text, "b") << "it would begin in the prompt";
  EXPECT_EQ(stream.Add('a').text, "");
  EXPECT_TRUE(stream.Add('b').stopped);
}

}  // namespace
}  // namespace efla
