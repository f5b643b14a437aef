// Rows of the embedding table as float32.
#ifndef EFLA_KERNELS_CPU_EMBEDDING_H_
#define EFLA_KERNELS_CPU_EMBEDDING_H_

#include <span>

#include "kernels/cpu/matrix.h"
#include "kernels/cpu/thread_pool.h"

namespace efla {

// x[i] = table[tokens[i]], x [tokens, table.cols].
void EmbedTokens(const RowMatrix& table, std::span<const TokenId> tokens, float* x, ThreadPool& pool);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_EMBEDDING_H_
