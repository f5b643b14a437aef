// The product's claim: a sequence's tokens, log-probabilities and state do not depend on the company it
// keeps. Everything here is compared bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tests/model/model_rig.h"

namespace efla {
namespace {

constexpr int kStepTokens = 192;
constexpr int kCrowd = 31;  // sequences beside the one that is watched

std::vector<TokenId> RandomTokens(std::mt19937& random, int count, int64_t vocab_size) {
  std::uniform_int_distribution<TokenId> token(3, static_cast<TokenId>(vocab_size) - 1);
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  for (TokenId& id : tokens) id = token(random);
  return tokens;
}

// What a sequence shows to the outside.
struct Trace {
  std::vector<TokenId> tokens;     // drawn
  std::vector<uint32_t> logprobs;  // bits; of the prompt's tokens, then of the drawn ones
  std::vector<TokenId> top_tokens;
  std::vector<uint32_t> top_logprobs;
  std::vector<float> state;  // at the end

  void Expect(const Trace& other) const {
    EXPECT_EQ(tokens, other.tokens);
    EXPECT_EQ(logprobs, other.logprobs);
    EXPECT_EQ(top_tokens, other.top_tokens);
    EXPECT_EQ(top_logprobs, other.top_logprobs);
    EXPECT_TRUE(SameBits(state, other.state));
  }
};

// A prompt that is scored, and its sampled continuation.
class Sequence {
 public:
  Sequence(ModelRig& rig, std::vector<TokenId> prompt, int num_generated, uint64_t seed)
      : rig_(rig),
        prompt_(std::move(prompt)),
        num_generated_(num_generated),
        seed_(seed),
        slot_(rig.Acquire()) {}
  ~Sequence() { rig_.states().Release(slot_); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  bool done() const { return static_cast<int>(trace_.tokens.size()) == num_generated_; }
  bool decodes() const { return consumed_ == prompt_.size(); }
  int prompt_left() const { return static_cast<int>(prompt_.size() - consumed_); }

  void AddDecode(Step& step, bool other_slot) {
    ChooseSlots(other_slot);
    AddDraw(step, step.Decode(trace_.tokens.back(), read_slot_, slot_.slot));
  }
  void AddPrefill(Step& step, int num_tokens, bool other_slot) {
    ChooseSlots(other_slot);
    const auto part = std::span(prompt_).subspan(consumed_, static_cast<size_t>(num_tokens));
    const int row = step.Prefill(part, read_slot_, slot_.slot);
    samples_begin_ = step.num_samples();
    for (int i = 0; i < num_tokens; ++i, ++consumed_) {
      if (consumed_ + 1 < prompt_.size()) step.Score(row + i, prompt_[consumed_ + 1]);
    }
    if (decodes()) AddDraw(step, row + num_tokens - 1, samples_begin_);
    samples_end_ = step.num_samples();
  }
  void Take(const StepResult& result) {
    for (int i = samples_begin_; i < samples_end_; ++i) {
      const SampleResult& row = result.rows[static_cast<size_t>(i)];
      EXPECT_EQ(row.finite, 1);
      trace_.logprobs.push_back(std::bit_cast<uint32_t>(row.logprob));
      if (i + 1 < samples_end_ || !decodes()) continue;  // a scored prompt token
      trace_.tokens.push_back(row.token);
      for (int j = 0; j < kNumTop; ++j) {
        const TokenLogprob& top = result.top[static_cast<size_t>(row.top_begin + j)];
        trace_.top_tokens.push_back(top.token);
        trace_.top_logprobs.push_back(std::bit_cast<uint32_t>(top.logprob));
      }
    }
    if (retired_.slot >= 0) rig_.states().Release(std::exchange(retired_, {}));
  }
  Trace Finish() {
    trace_.state = rig_.ReadState(slot_);
    return trace_;
  }

 private:
  static constexpr int kNumTop = 3;

  void ChooseSlots(bool other_slot) {
    read_slot_ = started_ ? slot_.slot : StatePool::kZeroSlot;
    started_ = true;
    if (other_slot) retired_ = std::exchange(slot_, rig_.Acquire());
  }
  void AddDraw(Step& step, int token_row, int samples_begin = -1) {
    samples_begin_ = samples_begin >= 0 ? samples_begin : step.num_samples();
    step.Sample({.token_row = token_row,
                 .temperature = 0.9f,
                 .top_k = 200,
                 .top_p = 0.98f,
                 .min_p = 0.001f,
                 .seed = seed_,
                 .position = trace_.tokens.size(),
                 .num_top = kNumTop});
    samples_end_ = step.num_samples();
  }

  ModelRig& rig_;
  const std::vector<TokenId> prompt_;
  const int num_generated_;
  const uint64_t seed_;
  SlotHandle slot_, retired_;
  bool started_ = false;
  int32_t read_slot_ = 0;
  size_t consumed_ = 0;                      // prompt tokens
  int samples_begin_ = 0, samples_end_ = 0;  // in the current step
  Trace trace_;
};

class ExactnessTest : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const auto& [device, directory] = GetParam();
    if (absl::Status status = DeviceAvailable(device); !status.ok()) GTEST_SKIP() << status.ToString();
    absl::StatusOr<std::unique_ptr<ModelRig>> rig =
        ModelRig::Open(SourcePath(directory),
                       {.device = device,
                        .limits = {.max_tokens = kStepTokens, .max_decode = 64, .max_samples = kStepTokens},
                        .num_slots = 2 * kCrowd + 8});
    ASSERT_TRUE(rig.ok()) << rig.status();
    rig_ = *std::move(rig);
    std::mt19937 random(7);
    prompt_ = RandomTokens(random, kPromptTokens, vocab_size());
  }
  void TearDown() override {
    if (rig_ == nullptr) return;
    const absl::Status status = rig_->states().CheckInvariants(/*read_device=*/true);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(rig_->states().counts().live, 0);
  }

  int64_t vocab_size() { return rig_->model().config().vocab_size; }

  // The whole prompt in one segment, then token by token, nobody else there, one slot all along.
  Trace RunAlone(const std::vector<TokenId>& prompt) {
    Sequence sequence(*rig_, prompt, kGeneratedTokens, kSeed);
    while (!sequence.done()) {
      Step step;
      if (sequence.decodes()) {
        sequence.AddDecode(step, false);
      } else {
        sequence.AddPrefill(step, sequence.prompt_left(), false);
      }
      sequence.Take(rig_->Run(step));
    }
    return sequence.Finish();
  }

  // The same in steps full of other sequences: who takes part, in what order, how prompts are cut on the grid
  // and which slots are used all follow `seed`.
  Trace RunInCrowd(const std::vector<TokenId>& prompt, unsigned seed) {
    std::mt19937 random(seed);
    const auto pick = [&random](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const auto newcomer = [&] {
      return std::make_unique<Sequence>(*rig_, RandomTokens(random, pick(1, 150), vocab_size()), pick(1, 12),
                                        random());
    };
    std::vector<std::unique_ptr<Sequence>> crowd;
    const int target_place = pick(0, kCrowd);  // the place in the crowd decides the slot
    Sequence* target = nullptr;
    for (int i = 0; i <= kCrowd; ++i) {
      if (i == target_place) {
        crowd.push_back(std::make_unique<Sequence>(*rig_, prompt, kGeneratedTokens, kSeed));
        target = crowd.back().get();
      } else {
        crowd.push_back(newcomer());
      }
    }
    int mixed_steps = 0;
    while (!target->done()) {
      std::vector<Sequence*> order;
      for (auto& sequence : crowd) {
        if (sequence.get() == target || pick(0, 4) > 0) order.push_back(sequence.get());
      }
      std::shuffle(order.begin(), order.end(), random);
      Step step;
      std::vector<Sequence*> took_part;
      for (Sequence* sequence : order) {
        if (!sequence->decodes()) continue;
        sequence->AddDecode(step, pick(0, 1) == 1);
        took_part.push_back(sequence);
      }
      const size_t num_decode = took_part.size();
      for (Sequence* sequence : order) {
        if (sequence->decodes()) continue;
        const int room = kStepTokens - step.num_tokens();
        int take = std::min(sequence->prompt_left(), pick(1, 3) * kChunkTokens);
        if (take > room) take = room / kChunkTokens * kChunkTokens;
        if (take == 0) continue;
        sequence->AddPrefill(step, take, pick(0, 1) == 1);
        took_part.push_back(sequence);
      }
      if (took_part.empty()) continue;
      mixed_steps += num_decode > 0 && num_decode < took_part.size();
      const StepResult result = rig_->Run(step);
      for (Sequence* sequence : took_part) sequence->Take(result);
      for (auto& sequence : crowd) {
        if (sequence.get() != target && sequence->done()) sequence = newcomer();
      }
    }
    EXPECT_GE(mixed_steps, 5) << "the crowd must mix decode rows and prefill";
    return target->Finish();
  }

  static constexpr int kPromptTokens = 150;  // two grid points inside
  static constexpr int kGeneratedTokens = 20;
  static constexpr uint64_t kSeed = 0x9e3779b97f4a7c15u;

  std::unique_ptr<ModelRig> rig_;
  std::vector<TokenId> prompt_;
};

TEST_P(ExactnessTest, CompanyChangesNoBit) {
  const Trace alone = RunAlone(prompt_);
  ASSERT_EQ(alone.logprobs.size(), static_cast<size_t>(kPromptTokens - 1 + kGeneratedTokens));
  for (unsigned seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(testing::Message() << "crowd " << seed);
    alone.Expect(RunInCrowd(prompt_, seed));
  }
}

TEST_P(ExactnessTest, AOneTokenPromptToo) {
  const std::vector<TokenId> prompt(prompt_.begin(), prompt_.begin() + 1);
  RunAlone(prompt).Expect(RunInCrowd(prompt, 4));
}

TEST_P(ExactnessTest, AReusedSlotIsAsGoodAsNew) {
  const Trace fresh = RunAlone(prompt_);
  const int slots = rig_->states().counts().total;
  std::mt19937 random(11);
  for (int i = 0; i < slots; ++i) {  // freed slots are reused in turn: this dirties all of them
    Sequence other(*rig_, RandomTokens(random, 70, vocab_size()), 1, 0);
    Step step;
    other.AddPrefill(step, 70, false);
    other.Take(rig_->Run(step));
  }
  fresh.Expect(RunAlone(prompt_));
}

TEST_P(ExactnessTest, AStateCopiedOutAndInContinuesTheSame) {
  const Trace whole = RunAlone(prompt_);
  const auto prefix = std::span(prompt_).first(2 * kChunkTokens),
             rest = std::span(prompt_).subspan(2 * kChunkTokens);
  const SlotHandle from = rig_->Acquire(), to = rig_->Acquire();
  Step first;
  first.Prefill(prefix, StatePool::kZeroSlot, from.slot);
  rig_->Run(first);
  rig_->WriteState(to, rig_->ReadState(from));
  rig_->states().Release(from);
  Step second;
  const int row = second.Prefill(rest, to.slot, to.slot);
  for (size_t i = 0; i + 1 < rest.size(); ++i) second.Score(row + static_cast<int>(i), rest[i + 1]);
  const StepResult result = rig_->Run(second);
  for (size_t i = 0; i < result.rows.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(result.rows[i].logprob), whole.logprobs[prefix.size() + i]) << i;
  }
  rig_->states().Release(to);
}

// A device may replay steps of one size: each still has its own lists and masks, and leaves none behind.
TEST_P(ExactnessTest, StepsOfOneSizeHaveTheirOwnListsAndMasks) {
  constexpr int kRows = 4, kSteps = 8;
  std::mt19937 random(19);
  std::vector<SlotHandle> slots, scratch;
  std::vector<TokenId> plain;
  for (int i = 0; i < kRows; ++i) {
    slots.push_back(rig_->Acquire());
    scratch.push_back(rig_->Acquire());
    Step step;
    step.Prefill(RandomTokens(random, 20, vocab_size()), StatePool::kZeroSlot, slots.back().slot);
    rig_->Run(step);
  }
  for (int round = 0; round < kSteps; ++round) {
    Step step;
    std::vector<TokenId> wanted(kRows, -1);
    for (int i = 0; i < kRows; ++i) {
      const SampleRow row = {.token_row = step.Decode(7, slots[i].slot, scratch[i].slot), .temperature = 0};
      const int kind = round == 0 ? 0 : (round + i) % 4;  // plain, list, mask, both
      wanted[i] = RandomTokens(random, 1, vocab_size())[0];
      const LogitAdjustment bias = {.token = wanted[i], .bias = 100};
      std::vector<uint32_t> mask(MaskWords(vocab_size()));
      mask[wanted[i] / 32] |= uint32_t{1} << (wanted[i] % 32);
      if (kind == 0) wanted[i] = round == 0 ? -1 : plain[i];
      step.Sample(row, std::span(&bias, kind % 2), kind >= 2 ? mask : std::vector<uint32_t>());
    }
    const StepResult result = rig_->Run(step);
    for (int i = 0; i < kRows; ++i) {
      if (round == 0) {
        plain.push_back(result.rows[i].token);
      } else {
        EXPECT_EQ(result.rows[i].token, wanted[i]) << "step " << round << ", row " << i;
      }
    }
  }
  for (const auto* handles : {&slots, &scratch}) {
    for (const SlotHandle& slot : *handles) rig_->states().Release(slot);
  }
}

// A device may divide a step of thousands of prompt rows as it likes: within a prompt, between prompts.
TEST_P(ExactnessTest, AStepOfThousandsIsAsGoodAsManyOfHundreds) {
  constexpr int kLongPrompt = 3333, kOtherPrompt = 1900, kDecodeRows = 3, kSmallStep = 5 * kChunkTokens;
  const auto& [device, directory] = GetParam();
  absl::StatusOr<std::unique_ptr<ModelRig>> opened = ModelRig::Open(
      SourcePath(directory), {.device = device,
                              .limits = {.max_tokens = kLongPrompt + kOtherPrompt + kDecodeRows,
                                         .max_decode = kDecodeRows,
                                         .max_samples = 2 + kDecodeRows},
                              .num_slots = 16});
  ASSERT_TRUE(opened.ok()) << opened.status();
  ModelRig& rig = **opened;
  std::mt19937 random(17);
  const std::vector<TokenId> prompts[] = {RandomTokens(random, kLongPrompt, vocab_size()),
                                          RandomTokens(random, kOtherPrompt, vocab_size())};
  // The last row's draw and the state of each prompt.
  const auto expect_same = [&](const StepResult& result, const std::vector<SlotHandle>& slots,
                               const std::vector<std::vector<float>>& states,
                               const std::vector<uint32_t>& logprobs) {
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(result.rows[kDecodeRows + i].logprob), logprobs[i]) << "prompt " << i;
      EXPECT_TRUE(SameBits(rig.ReadState(slots[i]), states[i])) << "prompt " << i;
    }
  };
  std::vector<std::vector<float>> states;
  std::vector<uint32_t> logprobs;
  for (const std::vector<TokenId>& prompt : prompts) {
    const SlotHandle slot = rig.Acquire();
    for (int begin = 0; begin < static_cast<int>(prompt.size()); begin += kSmallStep) {
      const int count = std::min(kSmallStep, static_cast<int>(prompt.size()) - begin);
      Step step;
      const int row =
          step.Prefill(std::span(prompt).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
                       begin == 0 ? StatePool::kZeroSlot : slot.slot, slot.slot);
      step.Greedy(row + count - 1);
      const StepResult result = rig.Run(step);
      if (begin + count == static_cast<int>(prompt.size())) {
        logprobs.push_back(std::bit_cast<uint32_t>(result.rows[0].logprob));
      }
    }
    states.push_back(rig.ReadState(slot));
    rig.states().Release(slot);
  }
  std::vector<SlotHandle> decode_slots;
  for (int i = 0; i < kDecodeRows; ++i) {
    decode_slots.push_back(rig.Acquire());
    Step step;
    step.Prefill(RandomTokens(random, 10, vocab_size()), StatePool::kZeroSlot, decode_slots.back().slot);
    rig.Run(step);
  }
  for (const bool swapped : {false, true}) {
    SCOPED_TRACE(swapped ? "the shorter prompt first" : "the longer prompt first");
    std::vector<SlotHandle> slots = {rig.Acquire(), rig.Acquire()};
    Step step;
    for (const SlotHandle& slot : decode_slots) step.Greedy(step.Decode(5, slot.slot, slot.slot));
    int last_row[2];
    for (int i : {swapped ? 1 : 0, swapped ? 0 : 1}) {
      last_row[i] = step.Prefill(prompts[i], StatePool::kZeroSlot, slots[static_cast<size_t>(i)].slot) +
                    static_cast<int>(prompts[i].size()) - 1;
    }
    step.Greedy(last_row[0]);
    step.Greedy(last_row[1]);
    expect_same(rig.Run(step), slots, states, logprobs);
    for (const SlotHandle& slot : slots) rig.states().Release(slot);
  }
  for (const SlotHandle& slot : decode_slots) rig.states().Release(slot);
}

// Segments of one step that follow others of it: as if each had a step of its own.
TEST_P(ExactnessTest, SegmentsFollowEachOtherWithinAStep) {
  constexpr int kDecodeRows = 2;
  // Ends of each prompt's parts. The long ones make a step of several lanes where the device has them.
  const std::vector<std::vector<std::vector<int>>> cases = {
      {{128, 200}, {64, 128, 150}, {40}},
      {{3200, 3328, 3333}, {64, 1856, 1900}},
      {{64, 65}, {4480, 4500}},
  };
  const auto& [device, directory] = GetParam();
  absl::StatusOr<std::unique_ptr<ModelRig>> opened = ModelRig::Open(
      SourcePath(directory),
      {.device = device,
       .limits = {.max_tokens = 5400, .max_decode = kDecodeRows, .max_samples = 3 + kDecodeRows},
       .num_slots = 24});
  ASSERT_TRUE(opened.ok()) << opened.status();
  ModelRig& rig = **opened;
  std::mt19937 random(19);
  std::vector<SlotHandle> decode_slots;
  for (int i = 0; i < kDecodeRows; ++i) decode_slots.push_back(rig.Acquire());
  for (const std::vector<std::vector<int>>& prompts_ends : cases) {
    SCOPED_TRACE("prompts of which the first has " + std::to_string(prompts_ends[0].back()) + " tokens");
    struct Part {
      int begin, end;
      SlotHandle slot;
      std::vector<float> state;
    };
    struct Prompt {
      std::vector<TokenId> tokens;
      std::vector<Part> parts;
      uint32_t logprob = 0;
      int last_row = 0;
      int32_t segment = -1;  // of the part before
    };
    std::vector<Prompt> prompts;
    size_t rounds = 0;
    for (const std::vector<int>& ends : prompts_ends) {
      Prompt& prompt = prompts.emplace_back();
      prompt.tokens = RandomTokens(random, ends.back(), vocab_size());
      const SlotHandle slot = rig.Acquire();
      int begin = 0;
      for (const int end : ends) {
        Step step;
        const int row = step.Prefill(
            std::span(prompt.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
            begin == 0 ? StatePool::kZeroSlot : slot.slot, slot.slot);
        step.Greedy(row + end - begin - 1);
        prompt.logprob = std::bit_cast<uint32_t>(rig.Run(step).rows[0].logprob);
        prompt.parts.push_back({begin, end, rig.Acquire(), rig.ReadState(slot)});
        begin = end;
      }
      rounds = std::max(rounds, prompt.parts.size());
      rig.states().Release(slot);
    }
    Step step;
    for (const SlotHandle& slot : decode_slots) {
      step.Greedy(step.Decode(5, StatePool::kZeroSlot, slot.slot));
    }
    int32_t segments = 0;
    for (size_t round = 0; round < rounds; ++round) {
      for (Prompt& prompt : prompts) {
        if (round >= prompt.parts.size()) continue;
        const Part& part = prompt.parts[round];
        const auto tokens =
            std::span(prompt.tokens)
                .subspan(static_cast<size_t>(part.begin), static_cast<size_t>(part.end - part.begin));
        const int32_t read = round == 0 ? StatePool::kZeroSlot : prompt.parts[round - 1].slot.slot;
        prompt.last_row =
            step.Prefill(tokens, read, part.slot.slot, prompt.segment) + part.end - part.begin - 1;
        prompt.segment = segments++;
      }
    }
    for (const Prompt& prompt : prompts) step.Greedy(prompt.last_row);
    const StepResult result = rig.Run(step);
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(result.rows[kDecodeRows + i].logprob), prompts[i].logprob)
          << "prompt " << i;
      for (const Part& part : prompts[i].parts) {
        EXPECT_TRUE(SameBits(rig.ReadState(part.slot), part.state))
            << "prompt " << i << " up to " << part.end;
        rig.states().Release(part.slot);
      }
    }
  }
  for (const SlotHandle& slot : decode_slots) rig.states().Release(slot);
}

// One sequence's state holds NaN; the others, in decode rows and in prefill, must not notice.
TEST_P(ExactnessTest, NaNStaysInItsRow) {
  constexpr int kRows = 5, kBadDecode = 2;
  constexpr size_t kAppended = 50;  // tokens
  std::mt19937 random(13);
  std::vector<SlotHandle> slots;
  std::vector<std::vector<float>> before;
  for (int i = 0; i < kRows + 3; ++i) {
    slots.push_back(rig_->Acquire());
    Step step;
    step.Prefill(RandomTokens(random, 20, vocab_size()), StatePool::kZeroSlot, slots.back().slot);
    rig_->Run(step);
    before.push_back(rig_->ReadState(slots.back()));
  }
  const size_t bad_prefill = kRows + 1;
  const std::vector<TokenId> decoded = RandomTokens(random, kRows, vocab_size());
  const std::vector<TokenId> appended = RandomTokens(random, 3 * static_cast<int>(kAppended), vocab_size());
  const std::vector<TokenId> targets = RandomTokens(random, kRows + 3, vocab_size());
  std::vector<std::vector<float>> after;
  const auto run = [&] {
    for (size_t i = 0; i < slots.size(); ++i) rig_->WriteState(slots[i], before[i]);
    std::vector<SampleResult> rows;
    after.clear();
    Step step;
    for (size_t i = 0; i < kRows; ++i)
      step.Score(step.Decode(decoded[i], slots[i].slot, slots[i].slot), targets[i]);
    for (size_t i = 0; i < 3; ++i) {
      const int32_t slot = slots[kRows + i].slot;
      const int row = step.Prefill(std::span(appended).subspan(i * kAppended, kAppended), slot, slot);
      step.Score(row + static_cast<int>(kAppended) - 1, targets[kRows + i]);
    }
    rows = rig_->Run(step).rows;
    for (SlotHandle slot : slots) after.push_back(rig_->ReadState(slot));
    return rows;
  };
  const std::vector<SampleResult> clean = run();
  const std::vector<std::vector<float>> clean_states = after;
  for (size_t bad : {size_t{kBadDecode}, bad_prefill}) {
    std::fill(before[bad].begin(), before[bad].end(), std::numeric_limits<float>::quiet_NaN());
  }
  const std::vector<SampleResult> poisoned = run();
  for (size_t i = 0; i < clean.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "row " << i);
    ASSERT_EQ(clean[i].finite, 1);
    if (i == kBadDecode || i == bad_prefill) {
      EXPECT_EQ(poisoned[i].finite, 0);
      continue;
    }
    EXPECT_EQ(poisoned[i].finite, 1);
    EXPECT_EQ(std::bit_cast<uint32_t>(poisoned[i].logprob), std::bit_cast<uint32_t>(clean[i].logprob));
    EXPECT_TRUE(SameBits(after[i], clean_states[i]));
  }
  for (SlotHandle slot : slots) rig_->states().Release(slot);
}

INSTANTIATE_TEST_SUITE_P(
    Checkpoints, ExactnessTest,
    ::testing::Combine(::testing::Values("cpu", "cuda"),
                       ::testing::Values("model/demo", "tests/golden/efla_basic", "tests/golden/efla_expand",
                                         "tests/golden/efla_gate_neg", "tests/golden/efla_noconv",
                                         "tests/golden/efla_tied_sharded", "tests/golden/gated_efla",
                                         "tests/golden/gated_deltanet")),
    [](const auto& test) {
      const std::string& path = std::get<1>(test.param);
      return std::get<0>(test.param) + "_" + path.substr(path.rfind('/') + 1);
    });

}  // namespace
}  // namespace efla
