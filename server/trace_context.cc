#include "server/trace_context.h"

#include <algorithm>

namespace efla {
namespace {

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsId(std::string_view text) { return IsHex(text) && text.find_first_not_of('0') != text.npos; }

}  // namespace

// VERSION-TRACE-PARENT-FLAGS: 2, 32, 16 and 2 digits. https://www.w3.org/TR/trace-context/#traceparent-header
std::string TraceIdOf(std::string_view traceparent) {
  constexpr size_t kBytes = 55, kTrace = 3, kTraceBytes = 32, kParent = 36, kParentBytes = 16, kFlags = 53;
  if (traceparent.size() < kBytes) return "";
  const std::string_view version = traceparent.substr(0, 2);
  if (!IsHex(version) || version == "ff") return "";
  if (version == "00" ? traceparent.size() != kBytes
                      : traceparent.size() > kBytes && traceparent[kBytes] != '-') {
    return "";
  }
  for (const size_t dash : {kTrace - 1, kParent - 1, kFlags - 1}) {
    if (traceparent[dash] != '-') return "";
  }
  const std::string_view trace = traceparent.substr(kTrace, kTraceBytes);
  if (!IsId(trace) || !IsId(traceparent.substr(kParent, kParentBytes)) ||
      !IsHex(traceparent.substr(kFlags, 2))) {
    return "";
  }
  return std::string(trace);
}

}  // namespace efla
