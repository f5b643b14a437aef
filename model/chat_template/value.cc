#include "model/chat_template/value.h"

#include <algorithm>

namespace efla::jinja {

Value Value::OfUndefined(std::string what) {
  return Value(Data(Undefined{std::make_shared<const std::string>(std::move(what))}));
}

Value Value::OfItems(std::vector<Value> items, Sequence::Form form) {
  auto sequence = std::make_shared<Sequence>();
  sequence->form = form;
  for (const Value& item : items) sequence->depth = std::max(sequence->depth, item.depth() + 1);
  sequence->items = std::move(items);
  return Value(std::move(sequence));
}

Value Value::OfEntries(std::vector<std::pair<Value, Value>> entries) {
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, value] : entries) {
    dict->depth = std::max({dict->depth, key.depth() + 1, value.depth() + 1});
  }
  dict->entries = std::move(entries);
  return Value(DictPointer(std::move(dict)));
}

int Value::depth() const {
  if (const Sequence* items = sequence()) return items->depth;
  if (const Dict* entries = dict()) return entries->depth;
  if (const auto* loop = As<LoopPointer>()) return (*loop)->items->depth + 1;
  return 0;
}

std::string_view Value::type_name() const {
  if (is_undefined()) return "undefined";
  if (is_none()) return "none";
  if (Is<bool>()) return "bool";
  if (Is<int64_t>()) return "int";
  if (Is<double>()) return "float";
  if (text() != nullptr) return "str";
  if (dict() != nullptr) return "dict";
  if (Is<Namespace*>()) return "namespace";
  if (Is<LoopPointer>()) return "loop";
  if (Is<Macro>()) return "macro";
  if (Is<Builtin>()) return "function";
  switch (sequence()->form) {
    case Sequence::Form::kList:
      return "list";
    case Sequence::Form::kTuple:
      return "tuple";
    case Sequence::Form::kRange:
      return "range";
    case Sequence::Form::kView:
      return "view of a dict";
    case Sequence::Form::kGenerator:
      return "generator";
  }
  return "";
}

}  // namespace efla::jinja
