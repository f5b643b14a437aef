#include "server/engine/scheduler.h"

#include <algorithm>
#include <unordered_map>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/types.h"

namespace efla {
namespace {

int64_t RoundDownToChunk(int64_t tokens) { return tokens / kChunkTokens * kChunkTokens; }

// When a sequence of priority 0 would have to have come to stand where this one stands.
Clock::time_point QueueTime(const Sequence& sequence) {
  return sequence.submitted - sequence.priority * kPriorityWorth;
}

// Those of its prompt's tokens that are to be computed.
int64_t OpenTokens(const Sequence& sequence) { return sequence.prompt_tokens - sequence.prompt_done; }

void CheckMayWait(const Sequence& sequence) {
  EFLA_CHECK(sequence.phase == Sequence::Phase::kOutside);
  EFLA_CHECK(OpenTokens(sequence) > 0 || (OpenTokens(sequence) == 0 && sequence.has_pending));
}

bool CaughtUp(const Sequence& parked) { return parked.parked_until == Clock::time_point::max(); }

}  // namespace

Scheduler::Scheduler(const Options& options) : options_(options) {
  EFLA_CHECK(options.max_batch_tokens > 0 && options.max_batch_tokens % kChunkTokens == 0);
  EFLA_CHECK(options.max_running > 0 && options.max_samples >= options.max_running + kChunkTokens);
}

absl::Status Scheduler::Enqueue(Sequence& sequence) {
  CheckMayWait(sequence);
  if (absl::Status status = CheckRoom(1, OpenTokens(sequence)); !status.ok()) return status;
  Insert(sequence);
  return absl::OkStatus();
}

void Scheduler::EnqueueReserved(Sequence& sequence) {
  CheckMayWait(sequence);
  Insert(sequence);
}

absl::Status Scheduler::Reserve(int sequences, int64_t tokens) {
  if (absl::Status status = CheckRoom(sequences, tokens); !status.ok()) return status;
  reserved_ += sequences;
  reserved_tokens_ += tokens;
  return absl::OkStatus();
}

void Scheduler::Release(int sequences, int64_t tokens) {
  reserved_ -= sequences;
  reserved_tokens_ -= tokens;
  EFLA_CHECK(reserved_ >= 0 && reserved_tokens_ >= 0);
}

absl::Status Scheduler::CheckRoom(int sequences, int64_t tokens) const {
  const int taken = waiting() + reserved_;
  if (taken + sequences > options_.max_queue) {
    return absl::ResourceExhaustedError(
        sequences == 1
            ? absl::StrFormat("the queue is full: %d requests wait; the limit is %d", taken,
                              options_.max_queue)
            : absl::StrFormat("the queue is full: %d requests wait and this one takes %d more places; "
                              "the limit is %d",
                              taken, sequences, options_.max_queue));
  }
  if (taken > 0 && queued_tokens() + tokens > options_.max_queued_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the queue is full: %d prompt tokens wait and the request has %d; the limit is %d",
                        queued_tokens(), tokens, options_.max_queued_tokens));
  }
  return absl::OkStatus();
}

void Scheduler::Insert(Sequence& sequence) {
  sequence.phase = Sequence::Phase::kWaiting;
  sequence.place = waiting_.emplace(QueueTime(sequence), &sequence);
  sequence.arrival = arrivals_.insert(arrivals_.end(), &sequence);
  queued_tokens_ += OpenTokens(sequence);
  next_expiry_ = std::min(next_expiry_, sequence.expires);
}

int64_t Scheduler::TokensAhead(const Sequence& sequence) const {
  constexpr int kMostLookedAt = 4096;
  std::unordered_map<uint64_t, int64_t> shared;  // the longest prompt of a group
  if (sequence.shared_beginning != 0) shared[sequence.shared_beginning] = sequence.prompt_tokens;
  int64_t tokens = 0;
  int looked_at = 0;
  for (const auto& [time, waiting] : waiting_) {
    if (time > QueueTime(sequence) || ++looked_at > kMostLookedAt) break;
    if (waiting->shared_beginning == 0) {
      tokens += OpenTokens(*waiting);
      continue;
    }
    int64_t& longest = shared[waiting->shared_beginning];
    tokens += std::max<int64_t>(waiting->prompt_tokens - longest, 0);
    longest = std::max(longest, waiting->prompt_tokens);
  }
  return tokens;
}

int Scheduler::admissible() const {
  const int64_t places = options_.max_running - running() -
                         std::count_if(parked_.begin(), parked_.end(),
                                       [](const Sequence* sequence) { return CaughtUp(*sequence); });
  return static_cast<int>(std::clamp<int64_t>(places, 0, waiting()));
}

void Scheduler::Admit(int free_slots, std::vector<Sequence*>& admitted) {
  for (auto it = parked_.begin(); it != parked_.end() && running() < options_.max_running;) {
    Sequence& sequence = **it;
    if (!CaughtUp(sequence)) {
      ++it;
      continue;
    }
    it = parked_.erase(it);
    sequence.phase = Sequence::Phase::kDecode;
    running_.push_back(&sequence);
  }
  while (free_slots > 0 && !waiting_.empty() && running() < options_.max_running) {
    Sequence& sequence = *waiting_.begin()->second;
    waiting_.erase(sequence.place);
    arrivals_.erase(sequence.arrival);
    queued_tokens_ -= OpenTokens(sequence);
    if (!sequence.has_pending) {
      sequence.phase = Sequence::Phase::kPrefill;
    } else if (OpenTokens(sequence) == 0 && sequence.first_rows > 0) {
      sequence.phase = Sequence::Phase::kDecode;
    } else {
      sequence.phase = Sequence::Phase::kPending;
    }
    sequence.served_step = step_;
    running_.push_back(&sequence);
    admitted.push_back(&sequence);
    --free_slots;
  }
}

void Scheduler::Take(Sequence& sequence, int64_t limit) {
  const int64_t rest = sequence.prompt_tokens - sequence.prompt_done - sequence.step_tokens;
  int64_t tokens = std::min({rest, limit, tokens_left_});
  if (sequence.scores_prompt) tokens = std::min(tokens, rows_left_);
  if (tokens == rest && !sequence.scores_prompt && rows_left_ < sequence.first_rows) --tokens;
  if (tokens == rest && sequence.first_rows > 0 && !sequence.ready) --tokens;
  if (tokens < rest) tokens = RoundDownToChunk(tokens);
  if (tokens <= 0) return;
  sequence.step_tokens += tokens;
  tokens_left_ -= tokens;
  if (sequence.scores_prompt) {
    rows_left_ -= tokens;  // the last token's row is the draw's, or spare
  } else if (tokens == rest) {
    rows_left_ -= sequence.first_rows;
  }
}

void Scheduler::Next(StepPlan& plan) {
  plan.decode.clear();
  plan.pending.clear();
  plan.prefill.clear();
  plan.prefill_tokens = 0;
  plan.sample_rows = 0;
  prompts_.clear();
  ++step_;
  for (Sequence* sequence : running_) {
    if (sequence->phase == Sequence::Phase::kDecode) {
      if (sequence->ready) plan.decode.push_back(sequence);
    } else if (sequence->phase == Sequence::Phase::kPending) {
      plan.pending.push_back(sequence);
      sequence->phase = OpenTokens(*sequence) > 0 ? Sequence::Phase::kPrefill : Sequence::Phase::kDecode;
    } else {
      sequence->step_tokens = 0;
      prompts_.push_back(sequence);
    }
  }
  const int64_t num_recurrent = static_cast<int64_t>(plan.decode.size() + plan.pending.size());
  plan.sample_rows = static_cast<int>(plan.decode.size());
  if (prompts_.empty()) return;

  tokens_left_ = std::max<int64_t>(options_.max_batch_tokens - num_recurrent, kChunkTokens);
  rows_left_ = options_.max_samples - plan.sample_rows;
  Sequence& oldest = *prompts_.front();
  if (prompts_.size() > 1) {
    const int64_t most = oldest.scores_prompt ? std::min(tokens_left_, rows_left_) : tokens_left_;
    const int64_t chunks = most / kChunkTokens;
    int64_t share = chunks / 2;
    if (chunks % 2 == 1) {
      share += odd_chunk_to_oldest_ ? 1 : 0;
      odd_chunk_to_oldest_ = !odd_chunk_to_oldest_;
    }
    Take(oldest, share * kChunkTokens);
    others_.assign(prompts_.begin() + 1, prompts_.end());
    std::stable_sort(others_.begin(), others_.end(),
                     [](const Sequence* a, const Sequence* b) { return a->served_step < b->served_step; });
    for (int64_t before = -1; before != tokens_left_;) {
      before = tokens_left_;
      for (Sequence* other : others_) Take(*other, kChunkTokens);
    }
  }
  Take(oldest, tokens_left_);

  for (Sequence* sequence : prompts_) {
    if (sequence->step_tokens == 0) continue;
    const StepPlan::Piece piece{sequence, sequence->prompt_done, static_cast<int>(sequence->step_tokens)};
    plan.prefill.push_back(piece);
    plan.prefill_tokens += piece.num_tokens;
    if (sequence->scores_prompt) plan.sample_rows += piece.num_tokens - (piece.last() ? 1 : 0);
    if (piece.last()) plan.sample_rows += sequence->first_rows;
    sequence->prompt_done += piece.num_tokens;
    sequence->served_step = step_;
    if (piece.last()) sequence->phase = Sequence::Phase::kDecode;
  }
}

void Scheduler::Park(Sequence& sequence, Clock::time_point until) {
  EFLA_CHECK(sequence.phase == Sequence::Phase::kDecode);
  std::erase(running_, &sequence);
  sequence.phase = Sequence::Phase::kParked;
  sequence.parked_until = until;
  parked_.push_back(&sequence);
  next_expiry_ = std::min(next_expiry_, until);
}

void Scheduler::CatchUp(Sequence& sequence) {
  EFLA_CHECK(sequence.phase == Sequence::Phase::kParked);
  sequence.parked_until = Clock::time_point::max();
}

void Scheduler::Remove(Sequence& sequence) {
  switch (sequence.phase) {
    case Sequence::Phase::kOutside:
      return;
    case Sequence::Phase::kWaiting:
      waiting_.erase(sequence.place);
      arrivals_.erase(sequence.arrival);
      queued_tokens_ -= OpenTokens(sequence);
      break;
    case Sequence::Phase::kPending:
    case Sequence::Phase::kPrefill:
    case Sequence::Phase::kDecode:
      std::erase(running_, &sequence);
      break;
    case Sequence::Phase::kParked:
      std::erase(parked_, &sequence);
      break;
  }
  sequence.phase = Sequence::Phase::kOutside;
}

void Scheduler::TakeExpired(Clock::time_point now, std::vector<Sequence*>& expired) {
  if (now < next_expiry_) return;
  next_expiry_ = Clock::time_point::max();
  const size_t first = expired.size();
  const auto look = [&](Sequence* sequence) {
    Clock::time_point expires = sequence->expires;
    if (sequence->phase == Sequence::Phase::kParked) expires = std::min(expires, sequence->parked_until);
    if (expires <= now) {
      expired.push_back(sequence);
    } else {
      next_expiry_ = std::min(next_expiry_, expires);
    }
  };
  for (Sequence* sequence : arrivals_) look(sequence);
  for (Sequence* sequence : running_) look(sequence);
  for (Sequence* sequence : parked_) look(sequence);
  for (size_t i = first; i < expired.size(); ++i) Remove(*expired[i]);
}

}  // namespace efla
