// Sets of Unicode scalar values (code points without surrogates).
#ifndef EFLA_MODEL_CONSTRAINT_CODE_POINTS_H_
#define EFLA_MODEL_CONSTRAINT_CODE_POINTS_H_

#include <string>
#include <string_view>
#include <vector>

namespace efla {

inline constexpr char32_t kLastCodePoint = 0x10FFFF;

struct CodePointRange {
  char32_t first = 0, last = 0;  // both belong to it
};

class CodePointSet {
 public:
  CodePointSet() = default;
  // In any order, overlapping or not; surrogates are left out.
  explicit CodePointSet(std::vector<CodePointRange> ranges);
  static CodePointSet All() { return CodePointSet({{0, kLastCodePoint}}); }

  CodePointSet Union(const CodePointSet& other) const;
  CodePointSet Complement() const;
  CodePointSet Intersection(const CodePointSet& other) const;
  CodePointSet Minus(const CodePointSet& other) const { return Intersection(other.Complement()); }
  bool Contains(char32_t c) const;
  bool empty() const { return ranges_.empty(); }
  const std::vector<CodePointRange>& ranges() const { return ranges_; }  // ascending, with gaps between them

 private:
  std::vector<CodePointRange> ranges_;
};

// The character that valid UTF-8 begins with, which is taken off `text`.
char32_t TakeCodePoint(std::string_view& text);
void AppendUtf8(char32_t c, std::string& text);

// Bytes between first[i] and last[i] at place i, for each i: characters of one length.
struct ByteRanges {
  int length = 0;
  unsigned char first[4] = {}, last[4] = {};
};
// UTF-8 of the range, which holds no surrogates: every character matches exactly one of the sequences.
std::vector<ByteRanges> Utf8Ranges(CodePointRange range);

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_CODE_POINTS_H_
