#include "server/sessions/session_table.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"

namespace efla {

SessionPtr SessionTable::Find(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second;
}

absl::StatusOr<SessionPtr> SessionTable::Insert(const SessionPtr& session) {
  const std::lock_guard lock(mutex_);
  if (const auto found = sessions_.find(session->id); found != sessions_.end()) return found->second;
  if (std::ssize(sessions_) >= max_sessions_) {
    return WithSessionError(absl::ResourceExhaustedError(absl::StrFormat(
                                "%d sessions are open; the limit is %d", sessions_.size(), max_sessions_)),
                            "SESSION_LIMIT");
  }
  sessions_[session->id] = session;
  return session;
}

void SessionTable::Add(SessionPtr session) {
  const std::lock_guard lock(mutex_);
  const std::string& id = session->id;
  sessions_.try_emplace(id, std::move(session));
}

void SessionTable::Remove(const SessionPtr& session) {
  SessionPtr listed;
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(session->id);
  if (found == sessions_.end() || found->second != session) return;
  listed = std::move(found->second);
  sessions_.erase(found);
}

std::vector<SessionPtr> SessionTable::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<SessionPtr> all;
  all.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) all.push_back(session);
  return all;
}

std::map<std::string, SessionPtr> SessionTable::Matching(const std::string& prefix,
                                                         const std::string& after) const {
  std::map<std::string, SessionPtr> matching;
  const std::lock_guard lock(mutex_);
  auto next = prefix > after ? sessions_.lower_bound(prefix) : sessions_.upper_bound(after);
  for (; next != sessions_.end() && next->first.starts_with(prefix); ++next) matching.insert(*next);
  return matching;
}

std::vector<SessionPtr> SessionTable::Next(std::string& after, size_t most) const {
  std::vector<SessionPtr> some;
  const std::lock_guard lock(mutex_);
  auto next = sessions_.upper_bound(after);
  for (; next != sessions_.end() && some.size() < most; ++next) some.push_back(next->second);
  after = next == sessions_.end() ? "" : some.back()->id;
  return some;
}

}  // namespace efla
