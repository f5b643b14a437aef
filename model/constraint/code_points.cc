#include "model/constraint/code_points.h"

#include <algorithm>

namespace efla {
namespace {

constexpr char32_t kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;

}  // namespace

CodePointSet::CodePointSet(std::vector<CodePointRange> ranges) {
  std::vector<CodePointRange> pieces;
  for (CodePointRange range : ranges) {
    range.last = std::min(range.last, kLastCodePoint);
    if (range.first > range.last) continue;
    if (range.last < kFirstSurrogate || range.first > kLastSurrogate) {
      pieces.push_back(range);
      continue;
    }
    if (range.first < kFirstSurrogate) pieces.push_back({range.first, kFirstSurrogate - 1});
    if (range.last > kLastSurrogate) pieces.push_back({kLastSurrogate + 1, range.last});
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const CodePointRange& a, const CodePointRange& b) { return a.first < b.first; });
  for (const CodePointRange& piece : pieces) {
    if (!ranges_.empty() && piece.first <= ranges_.back().last + 1) {
      ranges_.back().last = std::max(ranges_.back().last, piece.last);
    } else {
      ranges_.push_back(piece);
    }
  }
}

CodePointSet CodePointSet::Union(const CodePointSet& other) const {
  std::vector<CodePointRange> both = ranges_;
  both.insert(both.end(), other.ranges_.begin(), other.ranges_.end());
  return CodePointSet(std::move(both));
}

CodePointSet CodePointSet::Complement() const {
  std::vector<CodePointRange> gaps;
  char32_t next = 0;
  for (const CodePointRange& range : ranges_) {
    if (range.first > next) gaps.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodePoint) gaps.push_back({next, kLastCodePoint});
  return CodePointSet(std::move(gaps));
}

CodePointSet CodePointSet::Intersection(const CodePointSet& other) const {
  std::vector<CodePointRange> common;
  auto a = ranges_.begin();
  auto b = other.ranges_.begin();
  while (a != ranges_.end() && b != other.ranges_.end()) {
    const CodePointRange overlap{std::max(a->first, b->first), std::min(a->last, b->last)};
    if (overlap.first <= overlap.last) common.push_back(overlap);
    if (a->last < b->last) {
      ++a;
    } else {
      ++b;
    }
  }
  return CodePointSet(std::move(common));
}

bool CodePointSet::Contains(char32_t c) const {
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), c,
                       [](char32_t value, const CodePointRange& r) { return value < r.first; });
  return after != ranges_.begin() && c <= std::prev(after)->last;
}

char32_t TakeCodePoint(std::string_view& text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  char32_t c = length == 1 ? lead : lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length && i < text.size(); ++i) {
    c = c << 6 | (static_cast<unsigned char>(text[i]) & 0x3F);
  }
  text.remove_prefix(std::min(length, text.size()));
  return c;
}

void AppendUtf8(char32_t c, std::string& text) {
  if (c < 0x80) {
    text += static_cast<char>(c);
    return;
  }
  const int continuations = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  const char32_t lead_mark = 0xFF00U >> (continuations + 1) & 0xFF;  // 110..., 1110..., 11110...
  text += static_cast<char>(lead_mark | c >> (6 * continuations));
  for (int i = continuations - 1; i >= 0; --i) text += static_cast<char>(0x80 | (c >> (6 * i) & 0x3F));
}

// Cuts the range where the length changes, and then wherever a continuation byte would not run through all of
// its 64 values for each value of the bytes before it.
std::vector<ByteRanges> Utf8Ranges(CodePointRange range) {
  std::vector<ByteRanges> out;
  std::vector<CodePointRange> rest = {range};
  while (!rest.empty()) {
    const CodePointRange part = rest.back();
    rest.pop_back();
    bool cut = false;
    const auto cut_before = [&](char32_t at) {
      rest.push_back({at, part.last});  // the lower half is looked at first
      rest.push_back({part.first, at - 1});
      cut = true;
    };
    for (const char32_t at : {char32_t{0x80}, char32_t{0x800}, char32_t{0x10000}}) {
      if (!cut && part.first < at && part.last >= at) cut_before(at);
    }
    for (int i = 1; i <= 3 && !cut && part.last >= 0x80; ++i) {
      const char32_t low = (char32_t{1} << (6 * i)) - 1;
      if ((part.first & ~low) == (part.last & ~low)) continue;
      if ((part.first & low) != 0) {
        cut_before((part.first | low) + 1);
      } else if ((part.last & low) != low) {
        cut_before(part.last & ~low);
      }
    }
    if (cut) continue;
    std::string first, last;
    AppendUtf8(part.first, first);
    AppendUtf8(part.last, last);
    ByteRanges bytes;
    bytes.length = static_cast<int>(first.size());
    for (size_t i = 0; i < first.size(); ++i) {
      bytes.first[i] = static_cast<unsigned char>(first[i]);
      bytes.last[i] = static_cast<unsigned char>(last[i]);
    }
    out.push_back(bytes);
  }
  return out;
}

}  // namespace efla
