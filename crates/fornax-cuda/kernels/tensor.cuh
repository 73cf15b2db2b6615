// What tensor cores need, as thin functions over single instructions: fragments from shared memory, 8-bit and 16-bit
// products of a warp. Lane l of a warp is row l / 4 of a fragment ("g") and column pair l % 4 ("t").
#pragma once
#include "planes.cuh"

#ifndef FORNAX_HOST
// Kernels of a chain may begin before the one in front has ended (their launches say so): what comes before `await_before`
// must read nothing that the chain writes, and write nothing at all. A step's rows and block tables are older than the
// chain, whose first kernel begins like any other, and so are keys and values of earlier steps.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes, or zeroes where `there` is false.
__device__ inline void copy16_if(u32 to, const void* from, bool there) {
    u32 n = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
__device__ inline void copy4_if(u32 to, const void* from, bool there) {
    u32 n = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
#endif

// Four 8 × 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8, and gets 4 bytes of each.
__device__ inline void load_matrices(u32 (&r)[4], u32 at) {
#ifdef FORNAX_HOST
    u32 rows[32];
    host_words(at, rows);
    for (u32 i = 0; i < 4; i++) r[i] = shared4(rows[8 * i + host_lane() / 4] + host_lane() % 4 * 4);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}
// The same by columns of two bytes: of rows 2t and 2t + 1 what stands in column g.
__device__ inline void load_matrices_turned(u32 (&r)[4], u32 at) {
#ifdef FORNAX_HOST
    u32 rows[32], g = host_lane() / 4, t = host_lane() % 4;
    host_words(at, rows);
    for (u32 i = 0; i < 4; i++) r[i] = shared2(rows[8 * i + 2 * t] + 2 * g) | shared2(rows[8 * i + 2 * t + 1] + 2 * g) << 16;
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}

// Sums of 8-bit products are handed out as floats around this number, exact up to 2^22: a conversion would run at half the
// rate of what takes it off again.
static const u32 AROUND_BITS = 0x4b400000u;
static const float AROUND = 12582912.0f;

__device__ inline void mma_s8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 r[4], c = AROUND_BITS;
#ifdef FORNAX_HOST
    host_mma_s8(r, a, b0, b1, c);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
#endif
#pragma unroll
    for (u32 i = 0; i < 4; i++) d[i] = __uint_as_float(r[i]);
}
#ifndef FORNAX_HOST
// Of one half of the block.
__device__ inline void mma_s8_half(float (&d)[4], u32 a0, u32 a1, u32 b) {
    u32 r[4], c = AROUND_BITS;
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(c));
#pragma unroll
    for (u32 i = 0; i < 4; i++) d[i] = __uint_as_float(r[i]);
}
#endif
__device__ inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef FORNAX_HOST
    host_mma_f16(d, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// An 8 × 8 matrix of halves turned: lane (g, t) gives row g, columns 2t and 2t + 1, and gets column g.
__device__ inline u32 turned(u32 v) {
#ifdef FORNAX_HOST
    return host_turned(v);
#else
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
#endif
}

#ifndef FORNAX_HOST
// Of memory that nobody writes while the kernel lives: the compiler may move it anywhere.
__device__ inline Vec4 global16(const void* p) {
    Vec4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// No later than it is asked for.
__device__ inline float early(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ inline void put_global16(void* p, const Vec4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

#endif

// Begins to copy a box of a tensor of four axes to shared memory. `bar` learns of the bytes.
__device__ inline void copy_box(u32 to, const u8* map, u32 bar, u32 x, u32 y, u32 z, u32 w) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
#endif
}
// What was stored before is there for boxes that are asked for behind it.
__device__ inline void fence_boxes() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ inline u32 largest_of_warp(u32 v) {
#ifdef FORNAX_HOST
    for (u32 d = 1; d < 32; d *= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
#elif __CUDA_ARCH__ >= 800
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
#endif
}
// Words that another kernel may write while this one lives, past the first-level cache.
template <u32 N>
__device__ inline void past_first_cache(u32* to, const u8* from) {
    static_assert(N == 1 || N == 2 || N == 4, "one load");
#ifdef FORNAX_HOST
    std::memcpy(to, from, N * 4);
#else
    if (N == 1) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(to[0]) : "l"(from) : "memory");
    if (N == 2) asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[N - 1]) : "l"(from) : "memory");
    if (N == 4)
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[N > 1]), "=r"(to[N > 2 ? 2 : 0]), "=r"(to[N - 1])
                     : "l"(from)
                     : "memory");
#endif
}
__device__ inline void into_second_cache(const void* from) {
#ifndef FORNAX_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
#endif
}

// Two floats as halves, the first low.
__device__ inline u32 halves(float low, float high) {
#ifdef FORNAX_HOST
    return host_float_to_half(low) | (u32)host_float_to_half(high) << 16;
#else
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#endif
}
// Two of four bytes q + 128 as halves q, exactly and without a conversion: `pick` puts each above 1024.
__device__ inline u32 numbers(u32 bytes, u32 pick) {
    u32 v = __byte_perm(bytes, 0x64646464u, pick);
#ifdef FORNAX_HOST
    return halves(half_to_float((u16)(v & 0xffff)) - 1152.0f, half_to_float((u16)(v >> 16)) - 1152.0f);
#else
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(v), "r"(0x64806480u));
    return r;
#endif
}
// What two halves lack of the floats that they stand for, as halves: with both, products are as good as of f32.
__device__ inline u32 halves_left(u32 have, float low, float high) {
    return halves(low - half_to_float((u16)(have & 0xffff)), high - half_to_float((u16)(have >> 16)));
}
// A finite number beyond the largest half becomes that; what is not finite stays so.
__device__ inline float within_half(float v) {
    float top = 65504.0f, size = fabsf(v);
    return size > top && size < __int_as_float(0x7f800000) ? copysignf(top, v) : v;
}
