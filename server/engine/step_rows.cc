#include "server/engine/step_rows.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/check.h"

namespace efla {
namespace {

// Every prompt token but the last is followed by one that can be scored.
int NumScores(const StepPlan::Piece& piece) {
  return piece.sequence->scores_prompt ? piece.num_tokens - (piece.last() ? 1 : 0) : 0;
}

void BeginCall(Call& call, Clock::time_point now, std::vector<std::shared_ptr<GenerationImpl>>& news) {
  if (call.begun()) return;
  call.Begin(now);
  news.push_back(call.generation());
}

// Makes the last of `rows` one row for each of the seeds, if there are any: all draw from the same logits.
void AddFirstDrawRows(std::span<const uint64_t> seeds, std::vector<SampleRow>& rows) {
  if (seeds.empty()) return;
  rows.back().seed = seeds.front();
  for (const uint64_t seed : seeds.subspan(1)) {
    rows.push_back(rows.back());
    rows.back().seed = seed;
  }
}

}  // namespace

void StepRows::AddRecurrentRow(Call& call, Clock::time_point now,
                               std::vector<std::shared_ptr<GenerationImpl>>& news) {
  tokens_.push_back(call.next_token());
  read_slots_.push_back(call.read_slot());
  write_slots_.push_back(call.slot.slot);
  BeginCall(call, now, news);
}

// The state that the call's prompt reaches at `position` goes to the prefix cache, to be published when it
// has proved good, and the call goes on in another slot. False, and nothing is kept, when there is none.
bool StepRows::SaveState(Call& call, int64_t position) {
  const absl::StatusOr<SlotHandle> next = cache_.AcquireSlot(pool_);
  if (!next.ok()) return false;
  EFLA_CHECK(!pool_.IsShared(call.slot));
  if (call.base != nullptr) read_states_.push_back(std::move(call.base));
  call.base = std::make_shared<const ResidentState>(pool_, std::exchange(call.slot, *next));
  if (const uint64_t id = cache_.Add(call.block_before(position), position, call.base); id != 0) {
    call.saves.push_back({position, id});
  }
  return true;
}

// Adds the piece's parts: it is cut where a state is to be saved, and each part but the first follows the one
// before it.
void StepRows::CutPiece(size_t piece_index, bool may_save) {
  const StepPlan::Piece& piece = plan_->prefill[piece_index];
  Call& call = AsCall(piece.sequence);
  const int64_t end = piece.begin + piece.num_tokens;
  int64_t begin = piece.begin;
  int round = 0;
  const auto add = [&](int64_t part_end) {
    parts_.push_back({.piece = piece_index,
                      .round = round++,
                      .begin = begin,
                      .num_tokens = static_cast<int>(part_end - begin),
                      .read_slot = call.read_slot(),
                      .write_slot = call.slot.slot});
    begin = part_end;
  };
  std::array<int64_t, 2> points = call.save_points;
  std::sort(points.begin(), points.end());
  for (const int64_t point : points) {
    if (!may_save) break;
    if (point > 0 && point == piece.begin && call.computed) {
      SaveState(call, point);
    } else if (point > begin && point < end) {
      add(point);
      if (!SaveState(call, point)) {
        begin = parts_.back().begin;
        parts_.pop_back();
        --round;
      }
    }
  }
  add(end);
}

// The parts' tokens and segments, all first parts before all second ones: those of a round are computed
// together.
void StepRows::LayOutPrompts() {
  std::vector<PromptPart*>& order = part_order_;
  order.clear();
  for (PromptPart& part : parts_) order.push_back(&part);
  std::sort(order.begin(), order.end(), [](const PromptPart* a, const PromptPart* b) {
    return std::pair(a->round, a) < std::pair(b->round, b);
  });
  for (PromptPart* part : order) {
    part->first_row = static_cast<int>(tokens_.size());
    part->segment = static_cast<int32_t>(segments_.size());
    segments_.push_back({.token_begin = part->first_row,
                         .num_tokens = part->num_tokens,
                         .read_slot = part->read_slot,
                         .write_slot = part->write_slot,
                         .follows = part->round > 0 ? (part - 1)->segment : -1});
    const auto tokens = AsCall(plan_->prefill[part->piece].sequence).request().prompt.begin() + part->begin;
    tokens_.insert(tokens_.end(), tokens, tokens + part->num_tokens);
  }
}

void StepRows::Build(const StepPlan& plan, bool may_save, Clock::time_point now,
                     std::vector<std::shared_ptr<GenerationImpl>>& news) {
  plan_ = &plan;
  tokens_.clear();
  read_slots_.clear();
  write_slots_.clear();
  segments_.clear();
  samples_.clear();
  draw_lists_.clear();
  parts_.clear();
  for (Sequence* sequence : plan_->decode) {
    Call& call = AsCall(sequence);
    samples_.push_back(call.DrawRow(static_cast<int>(tokens_.size()), draw_lists_));
    AddRecurrentRow(call, now, news);
  }
  for (Sequence* sequence : plan_->pending) AddRecurrentRow(AsCall(sequence), now, news);
  for (size_t i = 0; i < plan_->prefill.size(); ++i) CutPiece(i, may_save);
  LayOutPrompts();
  for (const PromptPart& part : parts_) {
    const StepPlan::Piece& piece = plan_->prefill[part.piece];
    Call& call = AsCall(piece.sequence);
    const int64_t end = piece.begin + piece.num_tokens, part_end = part.begin + part.num_tokens;
    const int64_t scores = std::min<int64_t>(piece.begin + NumScores(piece), part_end) - part.begin;
    for (int64_t i = 0; i < scores; ++i) {
      samples_.push_back(call.ScoreRow(part.first_row + static_cast<int>(i), part.begin + i + 1));
    }
    if (part_end < end) continue;
    if (piece.last() && call.first_rows > 0) {
      samples_.push_back(call.DrawRow(part.first_row + part.num_tokens - 1, draw_lists_));
      AddFirstDrawRows(call.request().first_draw_seeds, samples_);
    }
    BeginCall(call, now, news);
  }
  EFLA_CHECK(static_cast<int>(samples_.size()) == plan_->sample_rows);
}

StepInput StepRows::input() const {
  return {.tokens = tokens_,
          .num_decode = decode_rows(),
          .decode_read_slot = read_slots_,
          .decode_write_slot = write_slots_,
          .segments = segments_,
          .samples = samples_,
          .adjustments = draw_lists_.adjustments,
          .masks = draw_lists_.masks};
}

void StepRows::TakeDraw(Call& call, const StepOutput& output, size_t row, Clock::time_point now,
                        StepEffects& effects) {
  const SampleResult& result = output.rows[row];
  if (!call.AddToken(result, TopOf(output, row), now)) effects.lagging.push_back(&call);
  if (result.finite && result.token >= 0) SeeToDraw(call, now);
}

// What follows from a token that has been added: its mask's successor, and the figures.
void StepRows::SeeToDraw(Call& call, Clock::time_point now) {
  if (call.constraint() != nullptr && !call.end) {
    call.ready = false;
    call.constraint()->SetDrawn(call.next_token());
    masks_.Post(call.constraint());
  }
  if (observer_ == nullptr) return;
  if (const std::optional<double> gap = call.token_gap_seconds()) {
    observer_->OnTokenGap(*gap);
  } else {
    observer_->OnFirstToken(Seconds(now - call.submitted));
  }
}

void StepRows::TakeFirstDraw(Call& call, Clock::time_point now, StepEffects& effects) {
  if (!call.TakeFirstDraw(now)) effects.lagging.push_back(&call);
  SeeToDraw(call, now);
  if (call.end) {
    effects.ended.push_back(&call);
  } else {
    effects.news.push_back(call.generation());
  }
}

// The last token before the first draw has been computed; `row` is its first row, if the call draws.
void StepRows::TakePromptEnd(Call& call, const StepOutput& output, size_t row, Clock::time_point now,
                             StepEffects& effects) {
  if (call.first_rows > 0 && !call.wants_tokens()) call.AddCheck(output.rows[row]);
  // Finite logits came from finite states, those of the prompt's beginning too: what is not finite stays so.
  if (call.first_rows > 0 && !call.end && output.rows[row].finite && !call.generation()->cancelled()) {
    for (const Call::Save& save : call.saves) cache_.Publish(call.block_before(save.position), save.id);
  }
  if (!call.end) call.AddPromptPiece(now);
  if (call.end) return;
  const size_t num_first = call.request().first_draw_seeds.size();
  if (num_first == 0) return TakeDraw(call, output, row, now, effects);
  for (size_t i = row; i < row + num_first; ++i) call.AddFirstDraw(output.rows[i], TopOf(output, i));
}

// The rows come in Build's order. Text and stop strings are matched here, while the device has nothing to
// do: a token's successor cannot be computed before it is known whether there is one.
void StepRows::TakeResults(const StepOutput& output, Clock::time_point now, StepEffects& effects) {
  const auto settle = [&effects](Call& call) {
    call.base = nullptr;
    call.computed = true;
    if (call.end) {
      effects.ended.push_back(&call);
    } else if (call.TakeHasNews()) {
      effects.news.push_back(call.generation());
    }
  };
  size_t row = 0;
  for (Sequence* sequence : plan_->decode) {
    Call& call = AsCall(sequence);
    if (call.has_drawn()) {
      TakeDraw(call, output, row++, now, effects);
    } else {
      TakePromptEnd(call, output, row++, now, effects);  // its pending token, and there was no prompt
    }
    settle(call);
  }
  for (Sequence* sequence : plan_->pending) {
    Call& call = AsCall(sequence);
    if (call.prompt_tokens == 0) call.AddPromptPiece(now);  // nothing is drawn either: that was all
    settle(call);
  }
  for (const StepPlan::Piece& piece : plan_->prefill) {
    Call& call = AsCall(piece.sequence);
    for (int i = NumScores(piece); i > 0; --i, ++row) call.AddScore(output.rows[row], TopOf(output, row));
    if (piece.last()) {
      TakePromptEnd(call, output, row, now, effects);
      row += static_cast<size_t>(call.first_rows);
    } else if (!call.end) {
      call.AddPromptPiece(now);
    }
    settle(call);
  }
}

}  // namespace efla
