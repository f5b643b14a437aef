// One turn of a session, between its beginning and its commit.
#ifndef EFLA_SERVER_SESSIONS_SESSION_TURN_H_
#define EFLA_SERVER_SESSIONS_SESSION_TURN_H_

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
           OnCancel on_cancel, SessionInfo before, ContextPtr base)
      : manager_(manager),
        hold_(std::move(hold)),
        change_(change),
        on_cancel_(on_cancel),
        before_(std::move(before)),
        base_(std::move(base)) {
    ++manager_.turns_;
  }
  ~TurnImpl() override {
    hold_.GiveUp();
    --manager_.turns_;
  }

  absl::StatusOr<bool> Prepare(std::vector<TokenId> tokens, bool generates,
                               GenerationRequest& request) override;
  absl::StatusOr<SessionInfo> Commit(std::optional<FinalState> state, bool cancelled,
                                     std::string reply) override;
  const SessionInfo& before() const override { return before_; }

 private:
  absl::StatusOr<SessionInfo> CommitContext(ContextPtr next, std::string reply);

  SessionManagerImpl& manager_;
  SessionManagerImpl::Hold hold_;
  const SessionChange change_;
  const OnCancel on_cancel_;
  const SessionInfo before_;
  const ContextPtr base_;
  std::optional<Feed> feed_;  // once prepared
  bool computes_ = false;
  std::shared_ptr<const ContextTokens> base_tokens_;  // of base_'s state
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_TURN_H_
