// Session turns that outlive a broken connection or a server that ended.
#ifndef EFLA_CLIENT_RESUME_H_
#define EFLA_CLIENT_RESUME_H_

#include <chrono>
#include <functional>

#include "absl/status/status.h"
#include "client/client.h"

namespace efla {

struct ResumeOptions {
  int attempts = 6;  // calls, the first included
  // Between calls, doubled each time, where the server says nothing of when to come back.
  std::chrono::milliseconds first_delay{200}, longest_delay{5'000};
};

// Client::Generate of a request with a session, made again with the same request_id when it breaks off
// (UNAVAILABLE), when the server asks to come back later (RetryInfo), and when the turn before still runs
// there (SESSION_BUSY). A turn that was committed is answered with its record; one that was not is drawn
// again with the same seed. Either way `on_event` gets one accepted event, and every byte, id and
// log-probability once and in order; progress is told anew.
//
// A request_id and a seed are made where the request has none. options.timeout is that of all calls together.
// DATA_LOSS where a repetition differs from what has been delivered, as it may on another build or when
// another writer came between; other errors are the last call's.
absl::Status GenerateResuming(Client& client, v1::GenerateRequest request, const CallOptions& options,
                              const ResumeOptions& resume,
                              const std::function<bool(const v1::GenerateResponse&)>& on_event);

}  // namespace efla

#endif  // EFLA_CLIENT_RESUME_H_
