#include "kernels/device.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/check.h"

namespace efla {
namespace {

#ifndef NDEBUG
// No slot may be written twice in one step, nor written by one sequence and read by another, unless the
// reader is a segment that follows the writer.
bool SlotsAreDisjoint(const StepInput& input) {
  std::vector<int32_t> writes(input.decode_write_slot.begin(), input.decode_write_slot.end());
  for (const Segment& segment : input.segments) writes.push_back(segment.write_slot);
  std::sort(writes.begin(), writes.end());
  if (std::adjacent_find(writes.begin(), writes.end()) != writes.end()) return false;
  const auto read_alone = [&](int32_t read, int32_t write) {
    return read == write || !std::binary_search(writes.begin(), writes.end(), read);
  };
  for (size_t i = 0; i < input.decode_read_slot.size(); ++i) {
    if (!read_alone(input.decode_read_slot[i], input.decode_write_slot[i])) return false;
  }
  return std::all_of(input.segments.begin(), input.segments.end(), [&](const Segment& segment) {
    return segment.follows >= 0 || read_alone(segment.read_slot, segment.write_slot);
  });
}

bool ListsNameTokensOnce(const StepInput& input) {
  std::vector<TokenId> tokens;
  for (const SampleRow& row : input.samples) {
    tokens.clear();
    for (const LogitAdjustment& adjustment : input.adjustments.subspan(row.adjust_begin, row.num_adjust)) {
      tokens.push_back(adjustment.token);
    }
    std::sort(tokens.begin(), tokens.end());
    if (std::adjacent_find(tokens.begin(), tokens.end()) != tokens.end()) return false;
  }
  return true;
}
#endif

void CheckLayer(const MixArgs& args) {
  EFLA_CHECK(args.layer != nullptr && args.proj != nullptr && args.out != nullptr);
  EFLA_CHECK(args.state.pool != nullptr && args.state.slot_stride > 0);
  const MixLayer& layer = *args.layer;
  EFLA_CHECK(layer.num_heads > 0 && layer.d_k > 0 && layer.d_v > 0 && layer.conv_size >= 0);
  EFLA_CHECK(layer.coef_columns() == 0 || args.coef != nullptr);
  EFLA_CHECK(layer.conv_size == 0 ||
             (layer.q_conv != nullptr && layer.k_conv != nullptr && layer.v_conv != nullptr));
  EFLA_CHECK(!IsGated(layer.type) || (layer.a_log != nullptr && layer.dt_bias != nullptr));
  EFLA_CHECK(layer.o_norm != nullptr);
  const int64_t recurrent_floats = static_cast<int64_t>(layer.num_heads) * layer.d_k * layer.d_v;
  EFLA_CHECK(args.state.recurrent_offset >= 0 &&
             args.state.recurrent_offset + recurrent_floats <= args.state.slot_stride);
  const int64_t conv_floats = static_cast<int64_t>(std::max(layer.conv_size - 1, 0)) * layer.conv_channels();
  EFLA_CHECK(args.state.conv_offset >= 0 && args.state.conv_offset + conv_floats <= args.state.slot_stride);
}

}  // namespace

bool Device::BeginStep(const StepInput& input) {
  EFLA_CHECK(!step_.open);
  EFLA_CHECK(input.num_decode >= 0 && static_cast<size_t>(input.num_decode) <= input.tokens.size());
  EFLA_CHECK(input.decode_read_slot.size() == static_cast<size_t>(input.num_decode));
  EFLA_CHECK(input.decode_write_slot.size() == static_cast<size_t>(input.num_decode));
  const int num_tokens = static_cast<int>(input.tokens.size());
  EFLA_CHECK(num_tokens > 0);
  TokenId max_token = 0;
  for (const TokenId token : input.tokens) {
    EFLA_CHECK(token >= 0);
    max_token = std::max(max_token, token);
  }
  for (int i = 0; i < input.num_decode; ++i) {
    EFLA_CHECK(input.decode_read_slot[i] >= 0 && input.decode_write_slot[i] > 0);
  }
  int next_token = input.num_decode;
  for (size_t i = 0; i < input.segments.size(); ++i) {
    const Segment& segment = input.segments[i];
    EFLA_CHECK(segment.token_begin == next_token && segment.num_tokens >= 1);
    EFLA_CHECK(segment.num_tokens <= num_tokens - next_token);
    EFLA_CHECK(segment.read_slot >= 0 && segment.write_slot > 0);
    EFLA_CHECK(segment.follows < static_cast<int32_t>(i));
    EFLA_CHECK(segment.follows < 0 || input.segments[segment.follows].write_slot == segment.read_slot);
    next_token += segment.num_tokens;
  }
  EFLA_CHECK(next_token == num_tokens);
  TokenId max_target = -1;
  int num_lists = 0;
  int64_t num_masks = 0;
  for (const SampleRow& row : input.samples) {
    EFLA_CHECK(row.token_row >= 0 && row.token_row < num_tokens);
    EFLA_CHECK(row.temperature >= 0 && row.top_k >= 0 && row.top_p >= 0 && row.min_p >= 0 && row.min_p <= 1);
    EFLA_CHECK(row.typical_p > 0);
    EFLA_CHECK(row.num_top >= 0 && row.num_top <= kMaxTopLogprobs);
    max_target = std::max(max_target, row.target);
    if (row.num_adjust == 0 && row.mask < 0) continue;
    EFLA_CHECK(row.target < 0);
    EFLA_CHECK(row.num_adjust >= 0 && row.num_adjust <= kMaxAdjustments && row.adjust_begin >= 0);
    EFLA_CHECK(static_cast<size_t>(row.adjust_begin) + row.num_adjust <= input.adjustments.size());
    num_lists += row.num_adjust > 0 ? 1 : 0;
    num_masks = std::max<int64_t>(num_masks, row.mask + 1);
  }
  for (const LogitAdjustment& adjustment : input.adjustments) {
    EFLA_CHECK(adjustment.token >= 0);
    EFLA_CHECK(std::isfinite(adjustment.bias) || (std::isinf(adjustment.bias) && adjustment.bias < 0));
    EFLA_CHECK(std::isfinite(adjustment.scale) && adjustment.scale > 0 && std::isfinite(adjustment.penalty));
    max_target = std::max(max_target, adjustment.token);
  }
  EFLA_CHECK(static_cast<int64_t>(input.adjustments.size()) <= int64_t{num_lists} * kMaxAdjustments);
  EFLA_CHECK((num_masks == 0) == input.masks.empty());
#ifndef NDEBUG
  EFLA_CHECK(SlotsAreDisjoint(input));
  EFLA_CHECK(ListsNameTokensOnce(input));
#endif
  step_ = {.open = true,
           .num_tokens = num_tokens,
           .num_decode = input.num_decode,
           .num_segments = static_cast<int>(input.segments.size()),
           .num_samples = static_cast<int>(input.samples.size()),
           .max_token = max_token,
           .max_target = max_target,
           .num_masks = num_masks,
           .mask_words = static_cast<int64_t>(input.masks.size())};
  return DoBeginStep(input);
}

void Device::Embed(const EmbedArgs& args) {
  EFLA_CHECK(step_.open && args.table != nullptr && args.x != nullptr);
  EFLA_CHECK(step_.max_token < args.table->rows());
  DoEmbed(args);
}

void Device::Project(const ProjectArgs& args) {
  EFLA_CHECK(step_.open && args.num_tokens == step_.num_tokens);
  EFLA_CHECK(args.x != nullptr && args.norm != nullptr && args.weight != nullptr && args.out != nullptr);
  EFLA_CHECK((args.coef_weight == nullptr) == (args.coef_out == nullptr));
  EFLA_CHECK(args.coef_weight == nullptr || args.coef_weight->cols() == args.weight->cols());
  DoProject(args);
}

void Device::MixRecurrent(const MixArgs& args) {
  EFLA_CHECK(step_.open);
  CheckLayer(args);
  if (step_.num_decode > 0) DoMixRecurrent(args);
}

void Device::MixChunk(const MixArgs& args) {
  EFLA_CHECK(step_.open);
  CheckLayer(args);
  if (step_.num_segments > 0) DoMixChunk(args);
}

void Device::AddLinear(const AddLinearArgs& args) {
  EFLA_CHECK(step_.open && args.num_tokens == step_.num_tokens);
  EFLA_CHECK(args.in != nullptr && args.weight != nullptr && args.x != nullptr);
  DoAddLinear(args);
}

void Device::GatedMlp(const GatedMlpArgs& args) {
  EFLA_CHECK(step_.open && args.num_tokens == step_.num_tokens);
  EFLA_CHECK(args.x != nullptr && args.norm != nullptr && args.gate_up != nullptr && args.out != nullptr);
  EFLA_CHECK(args.gate_up->rows() % 2 == 0);
  DoGatedMlp(args);
}

void Device::Head(const HeadArgs& args) {
  EFLA_CHECK(step_.open && args.x != nullptr && args.norm != nullptr && args.head != nullptr);
  EFLA_CHECK(step_.max_target < args.head->rows());
  EFLA_CHECK(step_.mask_words == step_.num_masks * MaskWords(args.head->rows()));
  DoHead(args);
}

void Device::EndStep() {
  EFLA_CHECK(step_.open);
  step_.open = false;
  DoEndStep();
}

}  // namespace efla
