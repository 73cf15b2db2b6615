// The paged cache as kernels of several rows see it: [block][token][heads · width] of one layer, f32, f16 or 8-bit blocks
// (all numbers, then all scales), keys and values apart. Sixteen-bit words come out of it eight at a time.
#pragma once
#include "tensor.cuh"

#include "keys.cuh"

// Keys and values may be written by the kernel in front while this one lives already, so their loads stay where they are
// (a load of constant memory was moved in front of the wait), and go past the first-level cache.
__device__ inline Vec4 cached16(const void* p) {
    Vec4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// Element i of a pool of `all` elements. `put` is called by whole warps for 32 neighbours.
struct KvF32 {
    __device__ static void put(u8* pool, u64 all, u64 i, float v) { ((float*)pool)[i] = v; }
};

struct KvF16 {
    static const bool PLAIN = true;
    __device__ static void put(u8* pool, u64 all, u64 i, float v) { ((u16*)pool)[i] = float_to_half(v); }
    // Elements i … i + 7 as halves.
    __device__ static Vec4 eight(const u8* pool, u64 all, u64 i) { return cached16(pool + i * 2); }
};

struct KvQ8_0 {
    static const bool PLAIN = false;
    __device__ static void put(u8* pool, u64 all, u64 i, float v) {
        Cell c = cell_of(v);
        pool[i] = (u8)c.q;
        if (i % 32 == 0) ((u16*)(pool + all))[i / 32] = float_to_half(c.d);
    }
    __device__ static u32 two(u32 bytes, u32 pick, u32 scale) {
        u32 r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(numbers(bytes, pick)), "r"(scale));
        return r;
    }
    __device__ static Vec4 eight(const u8* pool, u64 all, u64 i) {
        u32 a, b;
        u16 d;
        asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(pool + i) : "memory");
        asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(d) : "l"(pool + all + i / 32 * 2) : "memory");
        a ^= 0x80808080u;
        b ^= 0x80808080u;
        u32 scale = d | (u32)d << 16;
        Vec4 v = {two(a, 0x4140, scale), two(a, 0x4342, scale), two(b, 0x4140, scale), two(b, 0x4342, scale)};
        return v;
    }
};

// Where the result of attention goes: rows of f32, 8-bit blocks, or tiles of halves.
static const u32 TO_ROWS = 0, TO_ROUND = 1, TO_TILES = 2;
