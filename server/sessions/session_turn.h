// One turn of a session, between its beginning and its commit.
#ifndef EFLA_SERVER_SESSIONS_SESSION_TURN_H_
#define EFLA_SERVER_SESSIONS_SESSION_TURN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/sessions/session_manager_impl.h"

namespace efla {

class TurnImpl final : public Turn {
 public:
  TurnImpl(SessionManagerImpl& manager, SessionManagerImpl::Hold hold, const SessionChange& change,
           OnCancel on_cancel, SessionInfo before, uint64_t next_revision, ContextPtr base, bool made)
      : manager_(manager),
        hold_(std::move(hold)),
        change_(change),
        on_cancel_(on_cancel),
        before_(std::move(before)),
        next_revision_(next_revision),
        base_(std::move(base)),
        made_(made) {
    ++manager_.turns_;
  }
  ~TurnImpl() override {
    Drop();
    --manager_.turns_;
  }

  absl::StatusOr<bool> Prepare(std::vector<TokenId> tokens, bool generates,
                               GenerationRequest& request) override;
  absl::StatusOr<SessionInfo> Commit(std::optional<FinalState> state, bool cancelled,
                                     std::string reply) override;
  const SessionInfo& before() const override { return before_; }
  uint64_t next_revision() const override { return next_revision_; }
  std::optional<TokenId> last_drawn() const override;
  void OnLost(std::function<void()> stop) override;
  absl::Status Lost() const override;

 private:
  absl::StatusOr<SessionInfo> CommitContext(ContextPtr next, std::string reply);
  // Ends it without a commit.
  void Drop();

  SessionManagerImpl& manager_;
  SessionManagerImpl::Hold hold_;
  const SessionChange change_;
  const OnCancel on_cancel_;
  const SessionInfo before_;
  const uint64_t next_revision_;
  const ContextPtr base_;
  const bool made_;           // the session was made for this turn
  std::optional<Feed> feed_;  // once prepared
  bool computes_ = false;
  bool replaces_ = false;  // there is no room for the new state beside the old one, which is not kept
  std::shared_ptr<const ContextTokens> base_tokens_;  // of base_'s state
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_TURN_H_
