// How the parts of a launch wait for one another: barriers of transactions in shared memory, stores to other blocks of a
// cluster, and values in global memory that carry the number of the exchange which wrote them.
#pragma once
#include "../tensor.cuh"

// Where a kernel waits for ever, this build says for what, and stops.
#ifdef WATCH
extern "C" int printf(const char*, ...);
#define WATCHED(what)                                                                                                  \
    if (++polls > (1u << 22)) {                                                                                        \
        printf("block %d thread %d waits for %s\n", (int)blockIdx.x, (int)threadIdx.x, what);                         \
        asm volatile("trap;");                                                                                         \
    }
#define POLLS u32 polls = 0
#else
#define WATCHED(what)
#define POLLS
#endif

__device__ inline void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives when all copies that this thread has begun are there.
__device__ inline void bar_arrive_copied(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Arrives, and asks for so many bytes before the phase ends.
__device__ inline void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Whether a phase has ended: soon, or at once.
#define BAR_DONE(name, how)                                                                                            \
    __device__ inline bool name(u32 bar, u32 parity) {                                                                 \
        u32 done;                                                                                                      \
        asm volatile("{.reg .pred p; mbarrier." how ".parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"      \
                     : "=r"(done)                                                                                      \
                     : "r"(bar), "r"(parity)                                                                           \
                     : "memory");                                                                                      \
        return done;                                                                                                   \
    }
BAR_DONE(bar_done, "try_wait")
BAR_DONE(bar_done_now, "test_wait")
__device__ inline void bar_wait(u32 bar, u32 parity) {
    POLLS;
    while (!bar_done(bar, parity)) {
        WATCHED("weights, or the cluster");
    }
}
// The same place in the shared memory of a block of the cluster.
__device__ inline u32 at_peer(u32 at, u32 peer) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(peer));
    return there;
}
__device__ inline void send(u32 to, u32 bar, float v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(v)), "r"(bar)
                 : "memory");
}
__device__ inline void send2(u32 to, u32 bar, float v, float w) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(__float_as_uint(v)), "r"(__float_as_uint(w)), "r"(bar)
                 : "memory");
}
__device__ inline void send4(u32 to, u32 bar, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(a), "r"(b), "r"(c), "r"(d), "r"(bar)
        : "memory");
}
__device__ inline void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Of two warps: one comes, the other waits for it.
__device__ inline void come_to_pair() { asm volatile("bar.arrive 2, 64;" ::: "memory"); }
__device__ inline void meet_pair() { asm volatile("bar.sync 2, 64;" ::: "memory"); }
// Of the warps that compute.
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ inline u64 policy_once() {
    u64 p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ inline void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}

// A value with its epoch, stored and loaded as one.
__device__ inline void put_value(u64* to, float v, u32 epoch) {
    u64 both = (u64)epoch << 32 | __float_as_uint(v);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}
struct Pair {
    u64 a, b;
};
__device__ inline Pair get_pair(const u64* from) {
    Pair p;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(p.a), "=l"(p.b) : "l"(from) : "memory");
    return p;
}
__device__ inline bool is_of(u64 v, u32 epoch) { return (u32)(v >> 32) == epoch; }
__device__ inline float value_of(u64 v) { return __uint_as_float((u32)v); }

// Four values with 16 bits of their epoch in place of the last four of each, stored and loaded as one: at any time, what is
// there is of this exchange or of the one before.
struct Quad {
    u32 v[4];
    static const u32 TAG = 15;
    __device__ static u32 tagged(u32 v, u32 i, u32 epoch) { return (v & ~TAG) | (epoch >> 4 * i & TAG); }
    // Bits that are not as they should be.
    __device__ u32 other(u32 epoch) const {
        return ((v[0] ^ epoch) | (v[1] ^ epoch >> 4) | (v[2] ^ epoch >> 8) | (v[3] ^ epoch >> 12)) & TAG;
    }
    // The middle of what it may have been. NaN stays NaN, and infinity becomes it.
    __device__ float value(u32 i) const { return __uint_as_float((v[i] & ~TAG) | (TAG + 1) / 2); }
};

// Three words with their epoch, stored and loaded as one.
struct Three {
    u32 a, b, c, epoch;
};
__device__ inline void put_three(void* to, u32 a, u32 b, u32 c, u32 epoch) {
    asm volatile(
        "{.reg .b64 l, h; .reg .b128 v; mov.b64 l, {%1, %2}; mov.b64 h, {%3, %4}; mov.b128 v, {l, h};"
        " st.relaxed.gpu.global.b128 [%0], v;}" ::"l"(to),
        "r"(a), "r"(b), "r"(c), "r"(epoch)
        : "memory");
}
__device__ inline Three get_three(const void* from) {
    Three t;
    asm volatile(
        "{.reg .b64 l, h; .reg .b128 v; ld.relaxed.gpu.global.b128 v, [%4]; mov.b128 {l, h}, v;"
        " mov.b64 {%0, %1}, l; mov.b64 {%2, %3}, h;}"
        : "=r"(t.a), "=r"(t.b), "=r"(t.c), "=r"(t.epoch)
        : "l"(from)
        : "memory");
    return t;
}
