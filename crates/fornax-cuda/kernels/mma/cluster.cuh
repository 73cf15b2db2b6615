// What blocks of a cluster have of one another: a barrier, and each other's shared memory. Where there are no clusters,
// `IN_CLUSTERS` says so, and none of it is called. Included behind tensor.cuh.
#pragma once

// Who arrives has written, who has awaited can read what all had written.
#if EAGER && __CUDA_ARCH__ >= 900
static const bool IN_CLUSTERS = true;
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_await() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The same place in the shared memory of a block of the cluster.
__device__ inline u32 of_block(u32 at, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
}
__device__ inline void put_shared_of_block(u32 at, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
#else
static const bool IN_CLUSTERS = false;
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_await() {}
__device__ inline u32 of_block(u32 at, u32) { return at; }
__device__ inline void put_shared_of_block(u32, float) {}
#endif
