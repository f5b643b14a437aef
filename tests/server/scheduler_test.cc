// The scheduler's rules, as tables: what is waiting and running, and what the next steps hold.
#include "server/engine/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

using Phase = Sequence::Phase;
using std::chrono::milliseconds;
using std::chrono::seconds;

const Clock::time_point kStart{seconds(1000)};

struct Table {
  explicit Table(const Scheduler::Options& options) : scheduler(options) {}

  // Queues a sequence; sequences are named by the order in which they are made: 0, 1, ...
  Sequence& Queue(int64_t prompt_tokens, bool scores = false, bool draws = true) {
    Sequence& sequence = sequences.emplace_back();
    sequence.prompt_tokens = prompt_tokens;
    sequence.scores_prompt = scores;
    sequence.first_rows = draws ? 1 : 0;
    sequence.submitted = kStart;
    EXPECT_TRUE(scheduler.Enqueue(sequence).ok());
    return sequence;
  }
  // One that begins with a pending token.
  Sequence& QueuePending(int64_t prompt_tokens, bool draws = true) {
    Sequence& sequence = sequences.emplace_back();
    sequence.has_pending = true;
    sequence.prompt_tokens = prompt_tokens;
    sequence.first_rows = draws ? 1 : 0;
    sequence.submitted = kStart;
    EXPECT_TRUE(scheduler.Enqueue(sequence).ok());
    return sequence;
  }
  Sequence& QueueAt(Clock::time_point submitted, int priority, int64_t prompt_tokens = 1) {
    Sequence& sequence = sequences.emplace_back();
    sequence.prompt_tokens = prompt_tokens;
    sequence.priority = priority;
    sequence.submitted = submitted;
    EXPECT_TRUE(scheduler.Enqueue(sequence).ok());
    return sequence;
  }
  // The order in which they leave the queue, each gone before the next.
  std::vector<int> AdmitOneByOne() {
    std::vector<int> order;
    std::vector<Sequence*> admitted;
    while (scheduler.waiting() > 0) {
      admitted.clear();
      scheduler.Admit(1, admitted);
      order.push_back(NameOf(admitted.front()));
      scheduler.Remove(*admitted.front());
    }
    return order;
  }
  // A sequence that is decoding: its prompt of one token was in a step of its own.
  Sequence& Decoding() {
    Sequence& sequence = Queue(1);
    Admit();
    while (sequence.phase != Phase::kDecode) scheduler.Next(plan);
    return sequence;
  }
  int Admit(int free_slots = 1000) {
    std::vector<Sequence*> admitted;
    scheduler.Admit(free_slots, admitted);
    return static_cast<int>(admitted.size());
  }
  int NameOf(const Sequence* sequence) const {
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (&sequences[i] == sequence) return static_cast<int>(i);
    }
    return -1;
  }
  // The next step in short: "d0 d1 p4 2:0+64 3:128+10" is decode rows of 0 and 1, the pending token of 4, and
  // two pieces.
  std::string Next() {
    scheduler.Next(plan);
    std::string text;
    for (const Sequence* sequence : plan.decode) text += absl::StrFormat("d%d ", NameOf(sequence));
    for (const Sequence* sequence : plan.pending) text += absl::StrFormat("p%d ", NameOf(sequence));
    for (const StepPlan::Piece& piece : plan.prefill) {
      text += absl::StrFormat("%d:%d+%d ", NameOf(piece.sequence), piece.begin, piece.num_tokens);
    }
    if (!text.empty()) text.pop_back();
    return text;
  }

  Scheduler scheduler;
  std::deque<Sequence> sequences;
  StepPlan plan;
};

Scheduler::Options Small() {
  return {.max_batch_tokens = 256,
          .max_running = 8,
          .max_samples = 320,
          .max_queue = 4,
          .max_queued_tokens = 1000};
}

TEST(SchedulerTest, NothingToDoIsAnEmptyStep) {
  Table table(Small());
  EXPECT_EQ(table.Next(), "");
  EXPECT_TRUE(table.plan.empty());
}

TEST(SchedulerTest, PromptIsCutOnTheGridAndItsLastPieceIsRagged) {
  Table table(Small());
  table.Queue(600);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+256");
  EXPECT_EQ(table.plan.sample_rows, 0);
  EXPECT_EQ(table.Next(), "0:256+256");
  EXPECT_EQ(table.Next(), "0:512+88");
  EXPECT_EQ(table.plan.sample_rows, 1);
  EXPECT_EQ(table.Next(), "d0");
  EXPECT_EQ(table.Next(), "d0");
}

TEST(SchedulerTest, DecodeRowsComeOutOfTheBudgetAndTheRestIsCutOnTheGrid) {
  Table table(Small());
  table.Decoding();
  table.Decoding();
  table.Queue(600);
  table.Admit();
  EXPECT_EQ(table.Next(), "d0 d1 2:0+192");  // 254 tokens are left: three chunks
  EXPECT_EQ(table.Next(), "d0 d1 2:192+192");
  EXPECT_EQ(table.Next(), "d0 d1 2:384+216");
  EXPECT_EQ(table.Next(), "d0 d1 d2");
}

TEST(SchedulerTest, PromptAdvancesByAChunkHoweverFullTheBatchIs) {
  Table table({.max_batch_tokens = 64, .max_running = 70, .max_samples = 134});
  for (int i = 0; i < 69; ++i) table.Decoding();
  table.Queue(130);
  table.Admit();
  for (int64_t begin : {0, 64, 128}) {
    table.Next();
    EXPECT_EQ(table.plan.decode.size(), 69u);
    ASSERT_EQ(table.plan.prefill.size(), 1u);
    EXPECT_EQ(table.plan.prefill[0].begin, begin);
  }
  EXPECT_EQ(table.plan.prefill_tokens, 2);
}

TEST(SchedulerTest, SeveralShortPromptsShareAStep) {
  Table table(Small());
  table.Queue(10);
  table.Queue(64);
  table.Queue(65);
  table.Queue(1);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+10 1:0+64 2:0+65 3:0+1");
  EXPECT_EQ(table.plan.sample_rows, 4);
  EXPECT_EQ(table.plan.prefill_tokens, 140);
}

TEST(SchedulerTest, OldestPromptHasHalfAndTheOthersTakeTurns) {
  Table table(Small());  // four chunks a step: two to the oldest, two to the others in turn
  for (int i = 0; i < 4; ++i) table.Queue(240);
  ASSERT_EQ(table.Admit(), 4);
  EXPECT_EQ(table.Next(), "0:0+128 1:0+64 2:0+64");
  // 3 has waited longest, and its turn is followed by 1's; 16 tokens are no chunk and stay unused.
  EXPECT_EQ(table.Next(), "0:128+112 1:64+64 3:0+64");
  // 255 tokens are three chunks, and the odd one is the oldest's this time.
  EXPECT_EQ(table.Next(), "d0 1:128+112 2:64+64 3:64+64");
  EXPECT_EQ(table.Next(), "d0 d1 2:128+112 3:128+112");
}

TEST(SchedulerTest, WhatTheOthersLeaveGoesToTheOldest) {
  Table table(Small());
  table.Queue(1000 - 10);
  table.Queue(10);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+192 1:0+10");
}

TEST(SchedulerTest, SingleChunkAlternatesBetweenTheOldestAndTheOthers) {
  Table table({.max_batch_tokens = 64, .max_running = 8, .max_samples = 72, .max_queue = 8});
  table.Queue(64 * 100);
  table.Queue(64 * 2);
  table.Queue(64 * 2);
  table.Admit();
  std::string steps;
  for (int i = 0; i < 8; ++i) {
    table.Next();
    for (const StepPlan::Piece& piece : table.plan.prefill) {
      steps += absl::StrFormat("%d", table.NameOf(piece.sequence));
    }
  }
  EXPECT_EQ(steps, "01020102");
}

TEST(SchedulerTest, ShortPromptBesideALongOneIsServedInTheNextStep) {
  Table table({.max_batch_tokens = 512, .max_running = 8, .max_samples = 512});
  table.Queue(1 << 20);
  table.Admit();
  table.Next();
  const Sequence& late = table.Queue(20);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:512+448 1:0+20");
  EXPECT_EQ(late.phase, Phase::kDecode);
}

// A stream of new prompts must starve neither the oldest nor the second oldest.
TEST(SchedulerTest, ArrivalsStarveNobody) {
  Table table({.max_batch_tokens = 128, .max_running = 6, .max_samples = 128, .max_queue = 100});
  Sequence& first = table.Queue(64 * 50);
  Sequence& second = table.Queue(64 * 50);
  int steps = 0;
  while (second.phase != Phase::kDecode && steps < 1000) {
    while (table.scheduler.running() + table.scheduler.waiting() < 6) table.Queue(60);
    table.Admit();
    table.Next();
    EXPECT_GT(table.plan.prefill_tokens, 0);
    ++steps;
    for (const StepPlan::Piece& piece : table.plan.prefill) {
      if (piece.sequence != &first && piece.last()) table.scheduler.Remove(*piece.sequence);
      if (piece.sequence == &second && piece.last()) break;
    }
    if (second.phase == Phase::kOutside) break;
  }
  EXPECT_EQ(first.prompt_done, first.prompt_tokens);
  EXPECT_EQ(second.prompt_done, second.prompt_tokens);
  EXPECT_LT(steps, 200);
}

TEST(SchedulerTest, PendingTokenGoesFirstAndAlone) {
  Table table(Small());
  table.QueuePending(100);
  table.Queue(70);
  table.Admit();
  EXPECT_EQ(table.Next(), "p0 1:0+70");  // the slot that the token writes is the one that the prompt reads
  EXPECT_EQ(table.plan.sample_rows, 1);
  EXPECT_EQ(table.plan.prefill_tokens, 70);
  EXPECT_EQ(table.Next(), "d1 0:0+100");
  EXPECT_EQ(table.plan.sample_rows, 2);
  EXPECT_EQ(table.Next(), "d0 d1");
}

TEST(SchedulerTest, PendingTokenWithoutAPromptIsADecodeRow) {
  Table table(Small());
  table.QueuePending(0);
  table.QueuePending(0, /*draws=*/false);
  table.Admit();
  EXPECT_EQ(table.Next(), "d0 p1");
  EXPECT_EQ(table.plan.sample_rows, 1);
  table.scheduler.Remove(table.sequences[1]);  // its owner wanted no more
  EXPECT_EQ(table.Next(), "d0");
}

TEST(SchedulerTest, PendingTokensComeOutOfTheBudget) {
  Table table(Small());
  table.Decoding();
  table.QueuePending(400);
  table.Queue(400);
  table.Admit();
  EXPECT_EQ(table.Next(), "d0 p1 2:0+192");
  EXPECT_EQ(table.plan.sample_rows, 1);
  EXPECT_EQ(table.Next(), "d0 1:0+128 2:192+64");
}

TEST(SchedulerTest, PendingSequencesMayBeRemovedAndExpire) {
  Table table(Small());
  Sequence& first = table.QueuePending(100);
  Sequence& second = table.QueuePending(0);
  second.expires = kStart + seconds(1);
  table.Admit();
  EXPECT_EQ(first.phase, Phase::kPending);
  table.scheduler.Remove(first);
  EXPECT_EQ(table.scheduler.running(), 1);
  EXPECT_EQ(table.Next(), "d1");
}

TEST(SchedulerTest, PromptGoesOnFromWhereItsOwnerSays) {
  Table table(Small());
  Sequence& sequence = table.Queue(600, /*scores=*/true);
  table.Admit();
  sequence.prompt_done = 448;
  EXPECT_EQ(table.Next(), "0:448+152");
  EXPECT_EQ(table.plan.sample_rows, 152);
}

TEST(SchedulerTest, ScoredPromptNeedsARowForEveryTokenButTheLast) {
  Table table(Small());
  table.Queue(200, /*scores=*/true, /*draws=*/false);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+200");
  EXPECT_EQ(table.plan.sample_rows, 199);
  table.Queue(200, /*scores=*/true, /*draws=*/true);
  table.scheduler.Remove(table.sequences[0]);
  table.Admit();
  EXPECT_EQ(table.Next(), "1:0+200");
  EXPECT_EQ(table.plan.sample_rows, 200);
}

TEST(SchedulerTest, ScoredPromptShrinksToTheSampleRowsOnTheGrid) {
  Table table({.max_batch_tokens = 512, .max_running = 8, .max_samples = 150});
  table.Decoding();
  table.Queue(300, /*scores=*/true);
  table.Admit();
  EXPECT_EQ(table.Next(), "d0 1:0+128");  // 149 rows are left
  EXPECT_EQ(table.plan.sample_rows, 129);
  EXPECT_EQ(table.Next(), "d0 1:128+128");
  EXPECT_EQ(table.Next(), "d0 1:256+44");
  EXPECT_EQ(table.plan.sample_rows, 1 + 43 + 1);
}

TEST(SchedulerTest, AnEndWithSeveralRowsWaitsUntilTheyFit) {
  Table table({.max_batch_tokens = 512, .max_running = 8, .max_samples = 75});
  table.Queue(70).first_rows = 64;
  table.Queue(100).first_rows = 10;
  table.Queue(20).first_rows = 0;
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+70 1:0+100 2:0+20");
  EXPECT_EQ(table.plan.sample_rows, 74);
  table.Queue(130).first_rows = 64;
  table.Queue(64).first_rows = 12;
  table.Admit();
  const std::string step = table.Next();
  EXPECT_NE(step.find("3:0+130"), std::string::npos) << step;
  EXPECT_EQ(step.find("4:"), std::string::npos) << step << ": of 75 rows 3 decode and 64 are taken";
}

TEST(SchedulerTest, ScoredPromptLeavesRowsForTheOthers) {
  Table table({.max_batch_tokens = 512, .max_running = 8, .max_samples = 128});
  table.Queue(1000, /*scores=*/true);
  Sequence& other = table.Queue(30);
  table.Admit();
  EXPECT_EQ(table.Next(), "0:0+64 1:0+30");
  EXPECT_EQ(table.plan.sample_rows, 65);
  EXPECT_EQ(other.phase, Phase::kDecode);
}

TEST(SchedulerTest, EveryStepKeepsItsBounds) {
  const Scheduler::Options options{.max_batch_tokens = 192,
                                   .max_running = 150,
                                   .max_samples = 214,
                                   .max_queue = 1000,
                                   .max_queued_tokens = 1 << 30};
  Table table(options);
  for (int i = 0; i < 400; ++i) table.Queue(1 + (i * 7919) % 700, i % 3 == 0, i % 5 != 0);
  std::vector<int64_t> expected(400, 0);
  for (int step = 0; step < 3000; ++step) {
    table.Admit();
    table.Next();
    const int decode = static_cast<int>(table.plan.decode.size());
    EXPECT_LE(table.plan.prefill_tokens, std::max(options.max_batch_tokens - decode, kChunkTokens));
    EXPECT_LE(table.plan.sample_rows, options.max_samples);
    EXPECT_LE(table.scheduler.running(), options.max_running);
    for (const StepPlan::Piece& piece : table.plan.prefill) {
      int64_t& next = expected[table.NameOf(piece.sequence)];
      EXPECT_EQ(piece.begin, next);
      EXPECT_EQ(piece.begin % kChunkTokens, 0);
      next += piece.num_tokens;
    }
    // Decoding sequences end after a while, so that there is room for the next ones.
    if (step % 2 == 0 && decode > 0) table.scheduler.Remove(*table.plan.decode.front());
    if (table.plan.empty()) break;
  }
  for (int i = 0; i < 400; ++i) EXPECT_EQ(expected[i], table.sequences[i].prompt_tokens) << i;
  EXPECT_EQ(table.scheduler.waiting() + table.scheduler.running(), 0);
}

TEST(SchedulerTest, AdmissionIsFirstComeFirstServedBySlotsAndPlaces) {
  Table table(Small());
  for (int i = 0; i < 4; ++i) table.Queue(5);
  EXPECT_EQ(table.Admit(/*free_slots=*/0), 0);
  EXPECT_EQ(table.Admit(/*free_slots=*/3), 3);
  EXPECT_EQ(table.scheduler.waiting(), 1);
  EXPECT_EQ(table.Next(), "0:0+5 1:0+5 2:0+5");
  for (int i = 0; i < 3; ++i) table.Queue(5);
  EXPECT_EQ(table.Admit(), 4);
  EXPECT_EQ(table.scheduler.queued_tokens(), 0);
  EXPECT_EQ(table.Next(), "d0 d1 d2 3:0+5 4:0+5 5:0+5 6:0+5");
  table.Queue(5);
  table.Queue(5);
  EXPECT_EQ(table.Admit(), 1);  // max_running is 8
  EXPECT_EQ(table.scheduler.oldest_waiting(), &table.sequences[8]);
}

TEST(SchedulerTest, HigherPrioritiesLeaveTheQueueFirst) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128});
  for (const int priority : {0, -8, 3, 0, 8, 3}) table.QueueAt(kStart, priority);
  EXPECT_EQ(table.AdmitOneByOne(), (std::vector<int>{4, 2, 5, 0, 3, 1}));
  EXPECT_EQ(table.scheduler.oldest_waiting(), nullptr);
}

TEST(SchedulerTest, AWaitingRequestRisesALevelEveryFewSeconds) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128});
  table.QueueAt(kStart, 0);
  table.QueueAt(kStart + kPriorityWorth - milliseconds(1), 1);  // overtakes it
  table.QueueAt(kStart + kPriorityWorth + milliseconds(1), 1);  // comes too late to
  EXPECT_EQ(table.scheduler.oldest_waiting(), &table.sequences[0]);
  EXPECT_EQ(table.AdmitOneByOne(), (std::vector<int>{1, 0, 2}));
}

// Two requests of the highest priority come in the time that one takes, for ever.
TEST(SchedulerTest, AStreamOfHighPrioritiesStarvesNobody) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128, .max_queue = 1000});
  Sequence& low = table.QueueAt(kStart, kLowestPriority);
  Clock::time_point now = kStart;
  int overtaken = 0;
  while (low.phase == Phase::kWaiting) {
    ASSERT_LT(overtaken, 1000);
    for (int i = 0; i < 2; ++i) table.QueueAt(now, kHighestPriority);
    table.Admit(1);
    if (low.phase == Phase::kWaiting) ++overtaken;
    for (Sequence& sequence : table.sequences) {
      if (sequence.phase != Phase::kWaiting) table.scheduler.Remove(sequence);
    }
    now += seconds(1);
  }
  // Those that came within the time that the levels between them are worth, two a second.
  EXPECT_EQ(overtaken, 2 * (kHighestPriority - kLowestPriority) * kPriorityWorth.count());
}

TEST(SchedulerTest, TokensAheadAreThoseThatLeaveTheQueueBefore) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128, .max_queue = 10});
  table.QueueAt(kStart, 0, 300);
  table.QueueAt(kStart, 2, 50);
  Sequence late;
  late.prompt_tokens = 10;
  late.submitted = kStart + seconds(1);
  EXPECT_EQ(table.scheduler.TokensAhead(late), 350);
  late.priority = 1;
  EXPECT_EQ(table.scheduler.TokensAhead(late), 50);
  late.priority = 8;
  EXPECT_EQ(table.scheduler.TokensAhead(late), 0);
}

TEST(SchedulerTest, TokensAheadOfOneBeginningCountOnce) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128, .max_queue = 10});
  for (const int64_t tokens : {300, 500, 400}) {
    Sequence& sequence = table.sequences.emplace_back();
    sequence.prompt_tokens = tokens;
    sequence.shared_beginning = 7;
    ASSERT_TRUE(table.scheduler.Enqueue(sequence).ok());
  }
  table.QueueAt(kStart, 0, 20);
  Sequence late;
  late.prompt_tokens = 10;
  late.submitted = kStart;
  EXPECT_EQ(table.scheduler.TokensAhead(late), 520);
  late.shared_beginning = 7;
  late.prompt_tokens = 480;  // counts itself
  EXPECT_EQ(table.scheduler.TokensAhead(late), 40);
}

TEST(SchedulerTest, AdmissibleIsWhatAdmitWouldAdmit) {
  Table table({.max_batch_tokens = 256, .max_running = 3, .max_samples = 128, .max_queue = 10});
  EXPECT_EQ(table.scheduler.admissible(), 0);
  Sequence& parked = table.Decoding();
  table.Decoding();
  table.scheduler.Park(parked, kStart + seconds(30));
  for (int i = 0; i < 5; ++i) table.Queue(5);
  EXPECT_EQ(table.scheduler.admissible(), 2);
  table.scheduler.CatchUp(parked);  // takes one of the places
  EXPECT_EQ(table.scheduler.admissible(), 1);
  EXPECT_EQ(table.Admit(), 1);
  EXPECT_EQ(table.scheduler.admissible(), 0);
}

TEST(SchedulerTest, QueueIsBoundedInRequests) {
  Table table(Small());
  for (int i = 0; i < 4; ++i) table.Queue(5);
  Sequence more;
  more.prompt_tokens = 5;
  const absl::Status status = table.scheduler.Enqueue(more);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("the limit is 4"), absl::string_view::npos) << status;
  EXPECT_EQ(more.phase, Phase::kOutside);
  table.scheduler.Remove(table.sequences[2]);
  EXPECT_TRUE(table.scheduler.Enqueue(more).ok());
  table.scheduler.Remove(more);
}

TEST(SchedulerTest, QueueIsBoundedInTokensButTakesOneLongPrompt) {
  Table table(Small());
  table.Queue(5000);
  Sequence more;
  more.prompt_tokens = 1;
  const absl::Status status = table.scheduler.Enqueue(more);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("the limit is 1000"), absl::string_view::npos) << status;
  table.Admit();
  EXPECT_TRUE(table.scheduler.Enqueue(more).ok());
  EXPECT_EQ(table.scheduler.queued_tokens(), 1);
  table.scheduler.Remove(more);
  EXPECT_EQ(table.scheduler.queued_tokens(), 0);
}

TEST(SchedulerTest, ParkedSequenceGivesItsPlaceAwayAndComesBackBeforeTheQueue) {
  Table table({.max_batch_tokens = 256, .max_running = 2, .max_samples = 128});
  Sequence& first = table.Decoding();
  table.Decoding();
  table.Queue(5);
  table.Queue(5);
  EXPECT_EQ(table.Admit(), 0);
  table.scheduler.Park(first, kStart + seconds(30));
  EXPECT_EQ(table.scheduler.parked(), 1);
  EXPECT_EQ(table.Admit(), 1);
  EXPECT_EQ(table.Next(), "d1 2:0+5");
  table.scheduler.CatchUp(first);
  EXPECT_EQ(table.Admit(), 0);  // no place yet
  EXPECT_EQ(table.Next(), "d1 d2");
  table.scheduler.Remove(table.sequences[1]);
  EXPECT_EQ(table.Admit(), 0);  // the parked one took it, 3 still waits
  EXPECT_EQ(table.Next(), "d2 d0");
  EXPECT_EQ(table.scheduler.parked(), 0);
}

TEST(SchedulerTest, ExpiryIsFoundInEveryPhaseAndOnTime) {
  Table table(Small());
  EXPECT_EQ(table.scheduler.next_expiry(), Clock::time_point::max());
  Sequence& decoding = table.Decoding();
  Sequence& parked = table.Decoding();
  Sequence& prefilling = table.Queue(100);
  table.Admit();
  Sequence waiting;
  waiting.prompt_tokens = 7;
  waiting.expires = kStart + seconds(1);
  ASSERT_TRUE(table.scheduler.Enqueue(waiting).ok());
  EXPECT_EQ(table.scheduler.next_expiry(), kStart + seconds(1));
  table.scheduler.Park(parked, kStart + seconds(2));

  std::vector<Sequence*> expired;
  table.scheduler.TakeExpired(kStart, expired);
  EXPECT_TRUE(expired.empty());
  table.scheduler.TakeExpired(kStart + seconds(1), expired);
  EXPECT_EQ(expired, std::vector<Sequence*>{&waiting});
  EXPECT_EQ(waiting.phase, Phase::kOutside);
  EXPECT_EQ(table.scheduler.waiting(), 0);
  EXPECT_EQ(table.scheduler.next_expiry(), kStart + seconds(2));

  expired.clear();
  table.scheduler.TakeExpired(kStart + seconds(5), expired);
  EXPECT_EQ(expired, std::vector<Sequence*>{&parked});
  EXPECT_EQ(table.scheduler.next_expiry(), Clock::time_point::max());
  EXPECT_EQ(decoding.phase, Phase::kDecode);
  EXPECT_EQ(prefilling.phase, Phase::kPrefill);
}

TEST(SchedulerTest, RunningSequencesExpireToo) {
  Table table(Small());
  std::vector<Sequence> sequences(2);
  for (Sequence& sequence : sequences) {
    sequence.prompt_tokens = 300;
    sequence.expires = kStart + seconds(1);
    ASSERT_TRUE(table.scheduler.Enqueue(sequence).ok());
    table.Admit();
    table.scheduler.Next(table.plan);
  }
  std::vector<Sequence*> expired;
  table.scheduler.TakeExpired(kStart + seconds(1), expired);
  EXPECT_EQ(expired.size(), 2u);
  EXPECT_EQ(table.scheduler.running(), 0);
  EXPECT_EQ(table.Next(), "");
}

TEST(SchedulerTest, CaughtUpSequenceThatWaitsForAPlaceIsNotSlow) {
  Table table({.max_batch_tokens = 256, .max_running = 1, .max_samples = 128});
  Sequence& parked = table.Decoding();
  table.scheduler.Park(parked, kStart + seconds(2));
  table.Decoding();
  table.scheduler.CatchUp(parked);
  table.Admit();
  std::vector<Sequence*> expired;
  table.scheduler.TakeExpired(kStart + seconds(100), expired);
  EXPECT_TRUE(expired.empty());
  EXPECT_EQ(parked.phase, Phase::kParked);
  table.scheduler.Remove(parked);
  EXPECT_EQ(table.scheduler.parked(), 0);
}

// ---- Sequences that are not ready ----

TEST(SchedulerTest, ADecodingSequenceThatIsNotReadySitsOut) {
  Table table(Small());
  table.Decoding();
  Sequence& late = table.Decoding();
  table.Queue(600);
  table.Admit();
  late.ready = false;
  EXPECT_EQ(table.Next(), "d0 2:0+192");
  EXPECT_EQ(table.plan.sample_rows, 1);
  late.ready = true;
  EXPECT_EQ(table.Next(), "d0 d1 2:192+192");
  late.ready = false;
  table.scheduler.Remove(table.sequences[0]);
  table.scheduler.Remove(table.sequences[2]);
  EXPECT_EQ(table.Next(), "");
  EXPECT_TRUE(table.plan.empty());
}

TEST(SchedulerTest, ThePromptOfOneThatIsNotReadyStopsBeforeItsLastPiece) {
  for (const int64_t prompt : {1, 64, 65, 128, 300}) {
    Table table(Small());
    Sequence& late = table.Queue(prompt);
    late.ready = false;
    table.Queue(20);
    table.Admit();
    for (int step = 0; step < 4; ++step) table.Next();
    EXPECT_EQ(late.prompt_done, (prompt - 1) / 64 * 64) << prompt;
    EXPECT_EQ(late.phase, Phase::kPrefill);
    EXPECT_EQ(table.Next(), "d1");
    late.ready = true;
    EXPECT_EQ(table.Next(),
              absl::StrFormat("d1 0:%d+%d", (prompt - 1) / 64 * 64, prompt - (prompt - 1) / 64 * 64));
    EXPECT_EQ(table.plan.sample_rows, 2);
  }
}

TEST(SchedulerTest, APendingTokenIsFedBeforeTheSequenceIsReadyIfAPromptFollows) {
  Table table(Small());
  table.QueuePending(10).ready = false;
  table.QueuePending(0).ready = false;
  table.Admit();
  EXPECT_EQ(table.Next(), "p0");
  EXPECT_EQ(table.Next(), "");
  for (Sequence& sequence : table.sequences) sequence.ready = true;
  EXPECT_EQ(table.Next(), "d1 0:0+10");
}

}  // namespace
}  // namespace efla
