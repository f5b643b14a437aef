// What an expression of a template is worth.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_VALUE_H_
#define EFLA_MODEL_CHAT_TEMPLATE_VALUE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "model/chat_template/text.h"

namespace efla::jinja {

class Value;
struct Statement;

// A list and what else can be iterated over, but for strings and dicts.
struct Sequence {
  enum class Form {
    kList,
    kTuple,
    kRange,      // as a list, without a text form
    kView,       // of a dict: has a length, but no places
    kGenerator,  // gives each item once; always true
  };
  Form form = Form::kList;
  int depth = 1;  // levels of containers
  std::vector<Value> items;
  size_t next = 0;    // of a generator: the first item that has not been given
  std::string error;  // of a generator: what its items end with, when they are asked for; empty: nothing
};

struct Dict {
  int depth = 1;
  std::vector<std::pair<Value, Value>> entries;  // in the order of insertion; keys are all different
};

// What namespace() makes: the one thing that changes. Owned by the run.
struct Namespace {
  std::map<std::string, Value, std::less<>> attributes;
};

// `loop` inside a for.
struct Loop {
  std::shared_ptr<const Sequence> items;
  size_t index = 0;
};

enum class Builtin {
  kRange,
  kNamespace,
  kDict,
  kRaiseException,
  kStrftimeNow,
  kMethod,  // a method that is not called: true, and nothing else can be done with it
};

class Value {
 public:
  struct Undefined {
    std::shared_ptr<const std::string> what;  // "'name' is undefined", for errors; may be null
  };
  struct None {};
  using TextPointer = std::shared_ptr<const Text>;
  using SequencePointer = std::shared_ptr<Sequence>;
  using DictPointer = std::shared_ptr<const Dict>;
  using LoopPointer = std::shared_ptr<Loop>;
  using Macro = const Statement*;

  Value() = default;  // undefined
  explicit Value(bool value) : data_(value) {}
  explicit Value(int64_t value) : data_(value) {}
  explicit Value(double value) : data_(value) {}
  explicit Value(Text text) : data_(std::make_shared<const Text>(std::move(text))) {}
  explicit Value(SequencePointer sequence) : data_(std::move(sequence)) {}
  explicit Value(DictPointer dict) : data_(std::move(dict)) {}
  explicit Value(Namespace* space) : data_(space) {}
  explicit Value(LoopPointer loop) : data_(std::move(loop)) {}
  explicit Value(Macro macro) : data_(macro) {}
  explicit Value(Builtin builtin) : data_(builtin) {}
  static Value OfNone() { return Value(Data(None())); }
  static Value OfUndefined(std::string what);
  static Value Markup(std::string_view text) { return Value(Text::Markup(std::string(text))); }
  // Their depth is set.
  static Value OfItems(std::vector<Value> items, Sequence::Form form = Sequence::Form::kList);
  static Value OfEntries(std::vector<std::pair<Value, Value>> entries);

  template <typename T>
  bool Is() const {
    return std::holds_alternative<T>(data_);
  }
  // Null when it is another kind.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&data_);
  }

  bool is_undefined() const { return Is<Undefined>(); }
  bool is_none() const { return Is<None>(); }
  const Text* text() const { return Is<TextPointer>() ? std::get<TextPointer>(data_).get() : nullptr; }
  Sequence* sequence() const {
    return Is<SequencePointer>() ? std::get<SequencePointer>(data_).get() : nullptr;
  }
  const Dict* dict() const { return Is<DictPointer>() ? std::get<DictPointer>(data_).get() : nullptr; }
  int depth() const;  // levels of containers; 0 for what is none
  // "int", "str", as Python calls the type.
  std::string_view type_name() const;

 private:
  using Data = std::variant<Undefined, None, bool, int64_t, double, TextPointer, SequencePointer, DictPointer,
                            Namespace*, LoopPointer, Macro, Builtin>;
  explicit Value(Data data) : data_(std::move(data)) {}

  Data data_;
};

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_VALUE_H_
