// What hostile specifications cost: processor time, memory, stack, and how long nobody asks whether they are
// still wanted. Each is compiled in a process of its own, on a thread with a small stack.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

using Kind = ConstraintSpec::Kind;
using Json = nlohmann::ordered_json;

// Sanitizers take several times as much of each: with them only crashes and their own findings count.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMeasures = false;
constexpr size_t kStackBytes = 8 << 20;
#else
constexpr bool kMeasures = true;
constexpr size_t kStackBytes = 512 << 10;
#endif
constexpr double kMaxSeconds = 1.0, kMaxSecondsBetweenChecks = 0.2;
constexpr long kMaxKilobytes = 100 << 10;

const ConstraintRig& Rig() {
  static const ConstraintRig rig;
  return rig;
}

double ThreadSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Cost {
  double seconds = 0, seconds_between_checks = 0;  // of the compiling thread's processor time
  bool ok = false;
};

void RunOnSmallStack(std::function<void()> work) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_t thread;
  const auto run = [](void* function) -> void* {
    (*static_cast<std::function<void()>*>(function))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &work), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

Cost Compile(Kind kind, const std::string& text) {
  Cost cost;
  RunOnSmallStack([&] {
    const double begin = ThreadSeconds();
    double last = begin;
    const auto check = [&] {
      const double now = ThreadSeconds();
      cost.seconds_between_checks = std::max(cost.seconds_between_checks, now - std::exchange(last, now));
      return absl::OkStatus();
    };
    cost.ok = CompileConstraint({.kind = kind, .text = text, .choices = {}}, Rig().vocabulary, check).ok();
    static_cast<void>(check());  // of the time since the last one
    cost.seconds = last - begin;
  });
  return cost;
}

// The most memory, in kilobytes, that a process of its own has while it does that; -1: it crashed.
long PeakKilobytes(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  rusage usage{};
  if (wait4(child, &status, 0, &usage) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) return -1;
  return usage.ru_maxrss;
}

struct Hostile {
  std::string name;
  Kind kind;
  std::string text;
};

std::string Name(const std::string& prefix, int number) { return absl::StrFormat("%s%d", prefix, number); }
Json Numbered(const std::string& prefix, int count, const std::function<Json(int)>& value) {
  Json object = Json::object();
  for (int i = 0; i < count; ++i) object[Name(prefix, i)] = value(i);
  return object;
}
Json Listed(int count, const std::function<Json(int)>& value) {
  Json list = Json::array();
  for (int i = 0; i < count; ++i) list.push_back(value(i));
  return list;
}
Json ReferenceTo(const std::string& name) { return Json::object({{"$ref", "#/$defs/" + name}}); }

std::string ClassOfEverySecond() {
  std::string text = "[";
  for (int c = '0'; c < 0x7F; c += 2) {
    if (c != '\\' && c != '^') text += static_cast<char>(c);
  }
  return text + "]";
}

std::string OptionalCalls() {
  std::string root = "root ::= (", rules;
  for (int i = 0; i < 600; ++i) {
    root += Name("r", i) + "? ";
    rules += Name("r", i) + " ::= \"a\"?\n";
  }
  return root + "){1,100}\n" + rules;
}

std::vector<Hostile> HostileSchemas() {
  std::vector<Hostile> all;
  const auto add = [&](const std::string& name, const Json& schema) {
    all.push_back({name, Kind::kJsonSchema, schema.dump()});
  };
  const std::string long_text(30'000, 'b');
  const Json long_pattern = {{"a", {{"pattern", long_text}}}};
  add("prefixItems", {{"prefixItems", Listed(8'100, [](int) { return true; })}});
  add("many required, one long pattern", {{"type", "object"},
                                          {"required", Listed(300, [](int i) { return Name("k", i); })},
                                          {"additionalProperties", {{"pattern", long_text}}}});
  add("references to a long pattern", {{"$defs", long_pattern}, {"properties", Numbered("p", 200, [](int) {
                                                                   Json schema = ReferenceTo("a");
                                                                   schema["type"] = "string";
                                                                   return schema;
                                                                 })}});
  add("alternatives with a long pattern",
      {{"$defs", long_pattern}, {"anyOf", Listed(300, [](int) { return ReferenceTo("a"); })}});
  add("a long value beside alternatives",
      {{"enum", {long_text}}, {"anyOf", Listed(8'000, [](int) { return Json::object(); })}});
  add("a pattern of dots", {{"pattern", std::string(20'000, '.')}});
  add("the same type over and over",
      {{"type", Listed(6'000, [](int) { return "integer"; })}, {"minimum", -7654321}, {"maximum", 12345678}});
  Json long_names = Json::object();
  for (int i = 0; i < 230; ++i) long_names[Name(std::string(240, 'x'), i)] = Json::object();
  add("long names beside others", {{"additionalProperties", true}, {"properties", long_names}});
  Json chain = Numbered("a", 60, [](int i) {
    return Json{{"type", "object"}, {"anyOf", {ReferenceTo(Name("a", i + 1))}}};
  });
  const Json first = {{"$ref", "#/$defs/a0"}, {"type", "object"}};
  chain["a60"] = {{"type", "object"}, {"properties", {{"x", first}}}};
  add("chains of anyOf", {{"$defs", chain}, {"properties", {{"r", first}}}});
  add("oneOf with many required names",
      {{"$defs",
        {{"a", {{"type", "object"}, {"required", Listed(1'500, [](int i) { return Name("p", i); })}}}}},
       {"oneOf", Listed(150, [](int i) {
          Json branch = ReferenceTo("a");
          branch["properties"] = {{"z", {{"const", i + 0.5}}}};
          branch["required"] = {"z"};
          return branch;
        })}});
  return all;
}

TEST(ConstraintCostTest, HostileSpecificationsStayWithinTheBounds) {
  std::vector<Hostile> all = HostileSchemas();
  all.push_back({"repeated classes", Kind::kRegex, "(?:" + ClassOfEverySecond() + "{1000}){262}"});
  all.push_back({"wide states", Kind::kRegex, "(?:(?:[\\x01-~]?){1000}){86}abcdefghijklmnopqrstuvwxyz"});
  all.push_back({"optional calls", Kind::kGrammar, OptionalCalls()});
  Rig();  // before the processes part
  const long idle = PeakKilobytes([] { Compile(Kind::kRegex, "a"); });
  ASSERT_GT(idle, 0);
  for (const Hostile& hostile : all) {
    SCOPED_TRACE(hostile.name);
    ASSERT_LE(hostile.text.size(), kMaxConstraintBytes);
    const long peak = PeakKilobytes([&] { Compile(hostile.kind, hostile.text); });
    ASSERT_GT(peak, 0) << "crashed";
    const Cost cost = Compile(hostile.kind, hostile.text);
    if (!kMeasures) continue;
    EXPECT_LT(peak - idle, kMaxKilobytes);
    EXPECT_LT(cost.seconds, kMaxSeconds);
    EXPECT_LT(cost.seconds_between_checks, kMaxSecondsBetweenChecks);
  }
}

TEST(ConstraintCostTest, GivesUpWhileExpressionsAreRepeated) {
  const ConstraintSpec spec{
      .kind = Kind::kRegex, .text = "(?:" + ClassOfEverySecond() + "{1000}){262}", .choices = {}};
  int checks = 0;
  const CompiledOrError ended = CompileConstraint(spec, Rig().vocabulary, [&] {
    return ++checks == 5 ? absl::CancelledError("gone") : absl::OkStatus();
  });
  EXPECT_EQ(ended.status(), absl::CancelledError("gone"));
  EXPECT_EQ(checks, 5);
  EXPECT_EQ(Rig().Error(spec.kind, spec.text), "is too large: its automaton has more than 1048576 edges");
}

}  // namespace
}  // namespace efla
