// The instructions that CUDA C++ has no name for, one function each.
#ifndef EFLA_KERNELS_CUDA_PTX_CUH_
#define EFLA_KERNELS_CUDA_PTX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// The block's dynamic shared memory.
#define EFLA_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace efla::cuda {

// --- Programmatic dependent launch ---
// The rule that keeps early starts safe: every thread of every kernel of a step waits before it reads what
// the kernels before it wrote, or writes anything; and a kernel triggers only after its own wait. So what a
// kernel does before its wait runs when everything but its direct predecessor is complete.

__device__ inline void GridDependencyWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void GridDependencyTrigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- Copies ---

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts a copy of 16 bytes from global to shared memory; zeros when not `valid` (`global` is not read then).
__device__ inline void CpAsync16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same for what other blocks of the multiprocessor read as well: through L1, always read.
__device__ inline void CpAsync16Cached(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)), "l"(global)
               : "memory");
}

__device__ inline void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ inline void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Matrix units: m16n8k16, 16-bit operands, float32 sums ---
// Lane l holds, with g = l / 4 and t = l % 4:
//   a[0], a[1]: A[g][2t, 2t+1], A[g+8][2t, 2t+1];  a[2], a[3]: the same rows, columns 2t+8, 2t+9
//   b0, b1:     B[2t, 2t+1][g], B[2t+8, 2t+9][g]
//   d[0..1]:    D[g][2t, 2t+1];  d[2..3]: D[g+8][2t, 2t+1]

template <typename Act>
__device__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes
// each). Lane l receives elements [l / 4][2 (l % 4), + 1] of matrix i in r[i]; of its transpose for
// LdMatrix4Trans.
__device__ inline void LdMatrix4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}

__device__ inline void LdMatrix4Trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}

// --- Barriers in shared memory, and the copies that complete on them (compute capability 9.0; the functions
// from here on are never called below) ---

__device__ inline void BarrierInit(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}

// Makes the initialised barriers visible to copies; before a __syncthreads.
__device__ inline void BarrierInitFence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives, and has the phase wait for so many bytes of copies as well.
__device__ inline void BarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Waits until the phase of this parity is complete; phases begin with parity 0.
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Copies the box of a tensor map at (column, row) to shared memory; what lies outside the matrix is zero.
__device__ inline void CopyTile(void* shared, const void* tensor_map, int column, int row,
                                uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(SharedAddress(shared)),
      "l"(tensor_map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
#endif
}

// --- Matrix units of a warpgroup: m64 nN k16, 16-bit operands in shared memory, float32 sums ---
// Both operands lie as CopyTile leaves boxes of 64 columns in the 128-byte swizzle: row r, 16-byte vector v
// at r * 128 + (v ^ r % 8) * 16, the whole aligned to 1024 bytes. Warp w, lane l of the warpgroup hold, with
// g = l / 4 and t = l % 4:
//   d[4j], d[4j + 1]: D[16w + g][8j + 2t, + 1];  d[4j + 2], d[4j + 3]: the same columns of row 16w + g + 8

// Of columns 16 * step to 16 * step + 15 of a tile.
__device__ inline uint64_t TileDescriptor(const void* tile, int step) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kRowGroupBytes = 1024, kIgnored = 1;
  return kSwizzle128 | (kRowGroupBytes >> 4) << 32 | kIgnored << 16 |
         (((SharedAddress(tile) & 0x3ffff) + 32 * step) >> 4);
}

// Before products whose registers were written or read since the last.
__device__ inline void WarpgroupFence() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// The products since the last commit are one group.
__device__ inline void WarpgroupCommit() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most kPending groups are unfinished; they finish in order.
template <int kPending>
__device__ inline void WarpgroupWait() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Every warp of a warpgroup: gives registers back down to kCount a thread, or takes them up to kCount,
// waiting until they are free.
template <int kCount>
__device__ inline void DropRegisters() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

template <int kCount>
__device__ inline void TakeRegisters() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// d = A B^T, added to d if `add`. A has 64 rows, B kCount / 2 = N rows.
template <typename Act, int kCount>
__device__ void WarpgroupMma(float (&d)[kCount], uint64_t a, uint64_t b, bool add);

// --- Clusters ---

__device__ inline void ClusterArriveRelaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Loads 16 bytes from the shared memory of the cluster's block `rank`, at the place of this block's `shared`.
__device__ inline float4 LoadFromCluster(const float* shared, int rank) {
  float4 value = {};
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(SharedAddress(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote)
               : "memory");
#endif
  return value;
}

// Stores into the shared memory of the cluster's block `rank`, at the place of this block's `shared`.
__device__ inline void StoreToCluster(float* shared, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(SharedAddress(shared)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_PTX_CUH_
