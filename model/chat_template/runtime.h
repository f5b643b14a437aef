// What operators do with values, as Python does it, within the bounds of one run.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_RUNTIME_H_
#define EFLA_MODEL_CHAT_TEMPLATE_RUNTIME_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "model/chat_template/template.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

// One run's errors, bounds and values. After the first error every call returns something, which means
// nothing; whoever loops asks ok().
class Runtime {
 public:
  explicit Runtime(const RenderOptions& options) : options_(options) {}

  const RenderOptions& options() const { return options_; }
  bool ok() const { return error_.ok(); }
  const absl::Status& error() const { return error_; }
  // Remembers "line N: what" unless an error is there already. Undefined. Of Fail it is FAILED_PRECONDITION,
  // of the others, which the input may be the reason for, INVALID_ARGUMENT.
  Value Fail(std::string_view what);
  Value FailBound(std::string_view what);  // no generator puts it off
  Value Refuse(std::string_view what);     // raise_exception
  void set_line(int line) { line_ = line; }
  int line() const { return line_; }

  // False, and an error, where the run takes too many steps.
  bool Charge(size_t steps = 1);
  // A value that counts against what the run may make; an error where it is too large.
  Value Make(Text text);
  Value Make(std::vector<Value> items, Sequence::Form form = Sequence::Form::kList);
  Value Make(std::vector<std::pair<Value, Value>> entries);
  Value MakeNamespace(Namespace attributes);
  // The generator of what `fill` puts into the list. Python computes a generator's items when they are asked
  // for: an error of `fill` is an error then, and none where they never are.
  Value MakeGenerator(const std::function<void(std::vector<Value>& items)>& fill);
  // The next item of a generator; nothing at its end, or after an error.
  std::optional<Value> Next(Sequence& generator);

  // An error for what is undefined: "'x' is undefined".
  Value FailUndefined(const Value& value);

  bool Truthy(const Value& value) const;
  bool Equal(const Value& a, const Value& b);
  // Below, equal to, above 0, as a to b; an error where the two have no order.
  int Compare(const Value& a, const Value& b);
  bool Contains(const Value& container, const Value& item);
  // nullopt for what has no length, without an error.
  std::optional<size_t> Length(const Value& value) const;
  // All items: characters, keys of a dict. An error for what cannot be iterated over. A generator is used up.
  std::vector<Value> Items(const Value& value);
  bool IsIterable(const Value& value) const;
  std::vector<Value> Entries(const Dict& dict);  // as tuples of key and value

  Text Str(const Value& value);
  // As in source: strings in quotes.
  Text Repr(const Value& value);

  Value Attribute(const Value& object, const std::string& name);  // object.name
  Value Item(const Value& object, const Value& key);              // object[key]
  // Bounds that are absent are undefined.
  Value Slice(const Value& object, const Value& start, const Value& stop, const Value& step);
  Value Binary(std::string_view op, const Value& a, const Value& b);
  Value Negate(const Value& value);
  Value Plus(const Value& value);

  // Null when there is no such key.
  const Value* Find(const Dict& dict, const Value& key);
  // bools count as numbers.
  static std::optional<int64_t> AsInteger(const Value& value);
  static std::optional<double> AsNumber(const Value& value);

 private:
  Value Arithmetic(std::string_view op, int64_t a, int64_t b);
  Value Arithmetic(std::string_view op, double a, double b);
  Value Repeat(const Value& sequence, int64_t times);
  void AppendRepr(const Value& value, Text& out);
  void AppendItems(const Sequence& items, Text& out);

  const RenderOptions& options_;
  absl::Status error_;
  bool beyond_bounds_ = false;
  int line_ = 0;
  size_t steps_ = 0;
  size_t bytes_made_ = 0;
  std::deque<Namespace> namespaces_;
};

// As Python writes it: the shortest digits that read back as the same number.
std::string FloatText(double value);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_RUNTIME_H_
