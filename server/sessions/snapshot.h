// The snapshot format EFLS, version 1: one context in bytes, for files, stores and exports.
//
// Numbers are little-endian. Texts are padded with zero bytes. What is called zero must be zero.
//
// Header, 512 bytes
//     0   8  "EFLS" 0D 0A 1A 0A: what a transfer as text would damage
//     8   2  major version, 1: another one cannot be read
//    10   2  minor version, 0: a higher one differs only in what may be ignored
//    12   4  byte order mark 0x01020304
//    16   4  bytes of the header, 512
//    20   4  number of sections, at most 64
//    24   8  bytes of the whole snapshot
//    32   8  features that a reader must understand, one a bit; none are defined
//    40   8  features that a reader may ignore, likewise
//    48  64  fingerprint of the weights, SHA-256 in hexadecimal
//   112  64  fingerprint of the tokenizer, likewise; zero where the model has none
//   176 192  numerics (SnapshotIdentity), text
//   368  16  model type ("efla", "gated_efla", "delta_net", "gated_deltanet")
//   384   4  layers
//   388   4  heads
//   392   4  d_k
//   396   4  d_v
//   400   4  columns of a convolution state: conv_size - 1, or 0
//   404  12  channels of its parts q, k, v, four bytes each
//   416   4  type of the states' elements: 1 is float32
//   420   4  order of the recurrent state: 1 is [layer, head, d_k, d_v]
//   424   4  order of a convolution state's part: 1 is [layer, column, channel], oldest column first
//   428   4  vocabulary size
//   432   8  tokens that the state covers (ContextTokens::fed_tokens)
//   440   4  pending tokens, 0 or 1
//   444   4  tokens of the pending prompt, at most 64
//   448   4  tokens of the tail
//   452  60  zero
// Section table, 32 bytes a section, in any order
//     0   4  id: 1 TOKENS, 2 RECURRENT, 3 CONV_Q, 4 CONV_K, 5 CONV_V
//     4   4  1: a reader that does not know the id must refuse the snapshot; 0: it may skip the section
//     8   8  offset from the snapshot's beginning, a multiple of 64
//    16   8  bytes
//    24   4  encoding: 0 is none
//    28   4  zero
// Piece table, 8 bytes a piece: for each section in the table's order, XXH3 (64 bits) of each MiB of it
// Sections, each from the next multiple of 64 on, the gaps zero
//   TOKENS     4 bytes a token: the pending token, the pending prompt, the tail
//   RECURRENT  in the order above; this section and the next three only where the state covers tokens
//   CONV_Q, CONV_K, CONV_V  likewise, each only where the model has convolutions
// Footer, 32 bytes, from the next multiple of 64 on
//     0  16  XXH3 (128 bits: the low half, the high half) of header, section table and piece table
//    16   8  bytes of the whole snapshot
//    24   8  "EFLSEND" 0A
//
// The piece hashes cover each byte of the sections and the footer's hash covers the rest. They find damage,
// not forgery: whoever may import may put any numbers into a state.
#ifndef EFLA_SERVER_SESSIONS_SNAPSHOT_H_
#define EFLA_SERVER_SESSIONS_SNAPSHOT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/config.h"
#include "server/sessions/context.h"
#include "server/sessions/host_buffer.h"

namespace efla {

// What a snapshot must agree with to be read.
struct SnapshotIdentity {
  std::string weights_fingerprint;    // SHA-256, hex
  std::string tokenizer_fingerprint;  // likewise; empty: the model has no tokenizer
  // The arithmetic: device kind and name, activation type, build; at most 192 bytes. Bits are the same only
  // where it is the same.
  std::string numerics;
};

struct Snapshot {
  ContextTokens tokens;
  HostBuffer state;  // StateLayout::state_bytes; empty when fed_tokens is 0
};

// Thread-safe.
class SnapshotFormat {
 public:
  // REQUIRES: config.Validate(). `buffers`: whose memory snapshots and states get; null: a pool of its own.
  SnapshotFormat(SnapshotIdentity identity, const ModelConfig& config,
                 std::shared_ptr<HostBuffers> buffers = nullptr);

  // INVALID_ARGUMENT when the state has not the model's size or the tokens contradict each other; DATA_LOSS
  // when the state holds a NaN or an infinity (such a state is never written).
  absl::StatusOr<HostBuffer> Encode(const ContextTokens& tokens, std::span<const std::byte> state) const;

  // Untrusted bytes. DATA_LOSS: truncated, a checksum differs, a NaN. FAILED_PRECONDITION, naming both sides:
  // another format version, model, tokenizer, shape, dtype; another `numerics` unless `allow_other_numerics`.
  // INVALID_ARGUMENT: not a snapshot at all, or fields that contradict each other (ids beyond the vocabulary,
  // counts). Every size is derived from the model and compared, never taken from the bytes.
  absl::StatusOr<Snapshot> Decode(std::span<const std::byte> bytes, bool allow_other_numerics = false) const;
  // Likewise, of bytes that may be written over: mostly without a copy of the state.
  absl::StatusOr<Snapshot> DecodeInPlace(HostBuffer bytes, bool allow_other_numerics = false) const;

  // Of any valid Encode; for limits before the bytes have arrived.
  int64_t max_bytes() const;
  int64_t state_bytes() const;  // of every state: StateLayout::state_bytes
  const SnapshotIdentity& identity() const { return identity_; }
  // Shared by all copies of this format; never null.
  const std::shared_ptr<HostBuffers>& buffers() const { return buffers_; }

 private:
  // `own`: bytes' buffer, when it may be written over.
  absl::StatusOr<Snapshot> Decode(std::span<const std::byte> bytes, bool allow_other_numerics,
                                  HostBuffer* own) const;

  SnapshotIdentity identity_;
  ModelConfig config_;
  std::shared_ptr<HostBuffers> buffers_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SNAPSHOT_H_
