#include "server/engine/prefix_cache.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace efla {
namespace {

constexpr std::string_view kDomain = "efla prefix 1\n";
constexpr size_t kSeenCells = size_t{1} << 19;  // 4 MiB: the blocks of 32 million tokens
constexpr int kLeastHalfLife = 64;              // lookups
constexpr int kHalfLifePerState = 4;            // a cache of n states turns over in about n / 2 lookups

// SHA-256 of one input after another, without asking for the algorithm each time.
class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EFLA_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void Add(const void* bytes, size_t size) { EFLA_CHECK(EVP_DigestUpdate(context_.get(), bytes, size) == 1); }
  // The digest of what was added since the last time.
  PrefixCache::BlockHash Take() {
    PrefixCache::BlockHash hash;
    static_assert(sizeof(hash) == 32);
    EFLA_CHECK(EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(&hash), nullptr) == 1);
    EFLA_CHECK(EVP_DigestInit_ex(context_.get(), nullptr, nullptr) == 1);
    return hash;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

}  // namespace

std::vector<PrefixCache::BlockHash> PrefixCache::Hash(std::span<const TokenId> prompt,
                                                      std::string_view salt) {
  std::vector<BlockHash> blocks;
  if (prompt.size() <= kChunkTokens) return blocks;
  blocks.reserve((prompt.size() - 1) / kChunkTokens);
  Digest digest;
  digest.Add(kDomain.data(), kDomain.size());
  digest.Add(salt.data(), salt.size());
  BlockHash hash = digest.Take();
  for (size_t begin = 0; begin + kChunkTokens < prompt.size(); begin += kChunkTokens) {
    digest.Add(&hash, sizeof(hash));
    digest.Add(prompt.data() + begin, kChunkTokens * sizeof(TokenId));
    hash = digest.Take();
    blocks.push_back(hash);
  }
  return blocks;
}

PrefixCache::PrefixCache(int capacity)
    : capacity_(capacity), half_life_(std::max(kLeastHalfLife, kHalfLifePerState * capacity)) {
  EFLA_CHECK(capacity >= 0);
  if (enabled()) seen_.resize(kSeenCells);
}

PrefixCache::~PrefixCache() = default;

// ---- mutex_ held ----

PrefixCache::Entry* PrefixCache::Find(const BlockHash& block, uint64_t id) {
  const auto it = entries_.find(block.key);
  return it != entries_.end() && it->second.id == id ? &it->second : nullptr;
}

double PrefixCache::Rank(double value) const {
  return std::log2(value) + static_cast<double>(clock_) / half_life_;
}

// The entry has saved its tokens once more.
void PrefixCache::Reward(Entry& entry) {
  by_rank_.erase({entry.rank, entry.id});
  const double value = std::exp2(entry.rank - static_cast<double>(clock_) / half_life_);
  entry.rank = Rank(value + static_cast<double>(entry.position));
  by_rank_.emplace(std::pair(entry.rank, entry.id), &entry);
}

bool PrefixCache::Seen(const BlockHash& block) const {
  return seen_[block.key[0] % kSeenCells] == (block.key[1] | 1);  // an empty cell is 0
}

ResidentStatePtr PrefixCache::Remove(Entry& entry) {
  ResidentStatePtr state = std::move(entry.state);
  by_rank_.erase({entry.rank, entry.id});
  const Key key = entry.key;
  entries_.erase(key);
  return state;
}

ResidentStatePtr PrefixCache::RemoveLeast() {
  // A state that somebody reads would give no slot back. Nobody gets at one but through this cache, so the
  // count cannot rise meanwhile.
  const auto least = std::find_if(by_rank_.begin(), by_rank_.end(),
                                  [](const auto& ranked) { return ranked.second->state.use_count() == 1; });
  return least == by_rank_.end() ? nullptr : Remove(*least->second);
}

// ---- Any thread ----

int64_t PrefixCache::MayCover(std::span<const BlockHash> blocks) const {
  if (!enabled()) return 0;
  const std::lock_guard lock(mutex_);
  size_t covered = blocks.size();
  while (covered > 0 && !Holds(blocks[covered - 1]) && !Seen(blocks[covered - 1])) --covered;
  return static_cast<int64_t>(covered) * kChunkTokens;
}

PrefixCache::Plan PrefixCache::Look(std::span<const BlockHash> blocks, bool use) {
  Plan plan;
  if (!enabled() || blocks.empty()) return plan;
  const std::lock_guard lock(mutex_);
  ++clock_;
  stats_.lookups += use ? 1 : 0;
  const auto position_of = [](size_t block) { return static_cast<int64_t>(block + 1) * kChunkTokens; };
  for (size_t i = blocks.size(); use && i-- > 0;) {
    const auto it = entries_.find(blocks[i].key);
    if (it == entries_.end()) continue;
    Entry& entry = it->second;
    if (!entry.published || entry.check != blocks[i].check || entry.position != position_of(i)) continue;
    Reward(entry);
    plan.position = entry.position;
    plan.state = entry.state;
    ++stats_.hits;
    stats_.hit_tokens += static_cast<uint64_t>(entry.position);
    break;
  }

  size_t seen = blocks.size();
  while (seen > 0 && !Seen(blocks[seen - 1])) --seen;
  for (const BlockHash& block : blocks) seen_[block.key[0] % kSeenCells] = block.key[1] | 1;
  size_t count = 0;
  for (const size_t end : {seen, blocks.size()}) {
    if (end == 0 || position_of(end - 1) <= plan.position || Holds(blocks[end - 1])) continue;
    if (count > 0 && plan.saves[0] == position_of(end - 1)) continue;
    plan.saves[count++] = position_of(end - 1);
  }
  return plan;
}

uint64_t PrefixCache::Add(const BlockHash& block, int64_t position, ResidentStatePtr state) {
  EFLA_CHECK(state != nullptr && position > 0 && position % kChunkTokens == 0);
  ResidentStatePtr evicted;  // outlives the lock
  const std::lock_guard lock(mutex_);
  if (!enabled() || Holds(block)) return 0;
  if (static_cast<int>(entries_.size()) >= capacity_) {
    evicted = RemoveLeast();
    if (evicted == nullptr) return 0;
  }
  Entry& entry = entries_[block.key];
  entry = {.key = block.key,
           .check = block.check,
           .position = position,
           .id = next_id_++,
           .published = false,
           .rank = Rank(static_cast<double>(position)),
           .state = std::move(state)};
  by_rank_.emplace(std::pair(entry.rank, entry.id), &entry);
  return entry.id;
}

void PrefixCache::Publish(const BlockHash& block, uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (Entry* entry = Find(block, id)) entry->published = true;
}

void PrefixCache::Drop(const BlockHash& block, uint64_t id) {
  ResidentStatePtr dropped;  // outlives the lock
  const std::lock_guard lock(mutex_);
  if (Entry* entry = Find(block, id); entry != nullptr && !entry->published) dropped = Remove(*entry);
}

bool PrefixCache::GiveBack() {
  ResidentStatePtr state;  // outlives the lock
  const std::lock_guard lock(mutex_);
  state = RemoveLeast();
  return state != nullptr;
}

absl::StatusOr<SlotHandle> PrefixCache::AcquireSlot(StatePool& pool) {
  absl::StatusOr<SlotHandle> slot = pool.Acquire();
  while (!slot.ok() && GiveBack()) slot = pool.Acquire();
  return slot;
}

PrefixCache::Stats PrefixCache::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.states = static_cast<int>(entries_.size());
  return stats;
}

absl::Status PrefixCache::CheckInvariants() const {
  const std::lock_guard lock(mutex_);
  if (static_cast<int>(entries_.size()) > capacity_ || by_rank_.size() != entries_.size()) {
    return absl::InternalError(absl::StrFormat("prefix cache: %d states, %d of them ranked; the limit is %d",
                                               entries_.size(), by_rank_.size(), capacity_));
  }
  for (const auto& [key, entry] : entries_) {
    const auto ranked = by_rank_.find({entry.rank, entry.id});
    if (entry.key != key || ranked == by_rank_.end() || ranked->second != &entry) {
      return absl::InternalError(
          absl::StrFormat("prefix cache: the state at %d is ranked elsewhere", entry.position));
    }
    if (entry.state == nullptr || entry.position <= 0 || entry.position % kChunkTokens != 0 ||
        !std::isfinite(entry.rank) || entry.id == 0 || entry.id >= next_id_) {
      return absl::InternalError(absl::StrFormat("prefix cache: an entry at %d with id %d, rank %f, %s state",
                                                 entry.position, entry.id, entry.rank,
                                                 entry.state == nullptr ? "no" : "a"));
    }
  }
  return absl::OkStatus();
}

}  // namespace efla
