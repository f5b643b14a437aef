// W3C Trace Context: the caller's trace, to be found again in our logs.
#ifndef EFLA_SERVER_TRACE_CONTEXT_H_
#define EFLA_SERVER_TRACE_CONTEXT_H_

#include <string>
#include <string_view>

namespace efla {

// The trace id (32 hexadecimal digits) of a `traceparent`; empty where it is not valid: of version 00, or of
// a later one that begins like it, in lower case, with ids that are not all zeros.
std::string TraceIdOf(std::string_view traceparent);

}  // namespace efla

#endif  // EFLA_SERVER_TRACE_CONTEXT_H_
