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

// 16 bytes that are read once: past L1, with the neighbouring sectors fetched into L2.
__device__ inline uint4 LoadStream16(const void* global) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

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

// --- Clusters (compute capability 9.0; never called below) ---

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
