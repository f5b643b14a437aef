// The tests of values, "is defined", by the names that templates give them.
#include "model/chat_template/operations.h"
#include "model/chat_template/runtime.h"

namespace efla::jinja {
namespace {

template <typename T>
Value TestIs(Runtime&, const Value& subject, Arguments) {
  return Value(subject.Is<T>());
}

template <bool kValue>
Value TestBool(Runtime&, const Value& subject, Arguments) {
  return Value(subject.Is<bool>() && *subject.As<bool>() == kValue);
}

Value TestDefined(Runtime&, const Value& subject, Arguments) { return Value(!subject.is_undefined()); }

Value TestNumber(Runtime&, const Value& subject, Arguments) {
  return Value(Runtime::AsNumber(subject).has_value());
}

Value TestIterable(Runtime& run, const Value& subject, Arguments) { return Value(run.IsIterable(subject)); }

Value TestSequence(Runtime& run, const Value& subject, Arguments) {
  const Sequence* const items = subject.sequence();
  const bool has_places =
      items == nullptr || (items->form != Sequence::Form::kView && items->form != Sequence::Form::kGenerator);
  return Value(run.IsIterable(subject) && has_places);
}

Value TestRemainder(Runtime& run, const Value& subject, const Value& divisor, int64_t wanted) {
  const Value remainder = run.Binary("%", subject, divisor);
  return run.ok() ? Value(run.Equal(remainder, Value(wanted))) : Value();
}

template <int64_t kRemainder>
Value TestParity(Runtime& run, const Value& subject, Arguments) {
  return TestRemainder(run, subject, Value(int64_t{2}), kRemainder);
}

Value TestDivisible(Runtime& run, const Value& subject, Arguments arguments) {
  return TestRemainder(run, subject, *arguments[0], 0);
}

Value TestIn(Runtime& run, const Value& subject, Arguments arguments) {
  return Value(run.Contains(*arguments[0], subject));
}

template <bool kNegated = false>
Value TestEqual(Runtime& run, const Value& subject, Arguments arguments) {
  return Value(run.Equal(subject, *arguments[0]) != kNegated);
}
Value TestLess(Runtime& run, const Value& s, Arguments a) { return Value(run.Compare(s, *a[0]) < 0); }
Value TestAtMost(Runtime& run, const Value& s, Arguments a) { return Value(run.Compare(s, *a[0]) <= 0); }
Value TestGreater(Runtime& run, const Value& s, Arguments a) { return Value(run.Compare(s, *a[0]) > 0); }
Value TestAtLeast(Runtime& run, const Value& s, Arguments a) { return Value(run.Compare(s, *a[0]) >= 0); }

const std::vector<Operation>& Tests() {
  static const std::vector<Operation> tests = {
      {"defined", {}, 0, TestDefined},
      {"undefined", {}, 0, TestIs<Value::Undefined>},
      {"none", {}, 0, TestIs<Value::None>},
      {"string", {}, 0, TestIs<Value::TextPointer>},
      {"mapping", {}, 0, TestIs<Value::DictPointer>},
      {"iterable", {}, 0, TestIterable},
      {"sequence", {}, 0, TestSequence},
      {"number", {}, 0, TestNumber},
      {"integer", {}, 0, TestIs<int64_t>},
      {"float", {}, 0, TestIs<double>},
      {"boolean", {}, 0, TestIs<bool>},
      {"true", {}, 0, TestBool<true>},
      {"false", {}, 0, TestBool<false>},
      {"odd", {}, 0, TestParity<1>},
      {"even", {}, 0, TestParity<0>},
      {"divisibleby", {"num"}, 1, TestDivisible},
      {"in", {"seq"}, 1, TestIn},
      {"equalto", {"other"}, 1, TestEqual<>},
      {"eq", {"other"}, 1, TestEqual<>},
      {"==", {"other"}, 1, TestEqual<>},
      {"ne", {"other"}, 1, TestEqual<true>},
      {"!=", {"other"}, 1, TestEqual<true>},
      {"lt", {"other"}, 1, TestLess},
      {"<", {"other"}, 1, TestLess},
      {"lessthan", {"other"}, 1, TestLess},
      {"le", {"other"}, 1, TestAtMost},
      {"<=", {"other"}, 1, TestAtMost},
      {"gt", {"other"}, 1, TestGreater},
      {">", {"other"}, 1, TestGreater},
      {"greaterthan", {"other"}, 1, TestGreater},
      {"ge", {"other"}, 1, TestAtLeast},
      {">=", {"other"}, 1, TestAtLeast},
  };
  return tests;
}

}  // namespace

const Operation* FindTest(std::string_view name) { return FindByName(Tests(), name); }

}  // namespace efla::jinja
