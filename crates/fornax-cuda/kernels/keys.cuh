// The paged cache, and the softmax over its keys as they come: what the kernels of attention have in common.
// Included behind planes.cuh, by whatever name that has.
#pragma once

static const u32 KV_BLOCK = 64;
// Scores come times this, so that powers are those of two.
static const float LOG2E = 1.44269504f;

// A token's place in a pool, counted in tokens.
__device__ inline u64 place_of(const u32* table, u32 pos) {
    return (u64)__ldg(table + pos / KV_BLOCK) * KV_BLOCK + pos % KV_BLOCK;
}
__device__ inline u32 first_key(u32 window, u32 pos) { return window && pos + 1 > window ? pos + 1 - window : 0; }
#ifdef FORNAX_HOST
inline float power2(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
#else
__device__ inline float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// A lane's value as a number of a block of 32 lanes, and the block's scale.
struct Cell {
    int q;
    float d;
};
__device__ inline Cell cell_of(float v) {
    float top = fabsf(v);
    for (u32 d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    float d = top / 127.0f;
    return {d > 0.0f ? (int)roundf(v / d) : 0, d};
}

// Eight neighbouring elements as a cache stores them; how they are loaded is a kernel's own. `store` takes element e of a
// token whose elements begin at `at` in a pool of `all`, and returns it as it will be read; called by whole warps for 32
// neighbours.
struct EightsF32 {
    struct Eight {
        float4 a, b;
    };
    __device__ static void unpack(const Eight& x, float (&f)[8]) {
        f[0] = x.a.x, f[1] = x.a.y, f[2] = x.a.z, f[3] = x.a.w;
        f[4] = x.b.x, f[5] = x.b.y, f[6] = x.b.z, f[7] = x.b.w;
    }
    __device__ static float store(u8* pool, u64 all, u64 at, u32 e, float v) {
        ((float*)pool)[at + e] = v;
        return v;
    }
};
struct EightsF16 {
    struct Eight {
        Vec4 v;
    };
    __device__ static void unpack(const Eight& x, float (&f)[8]) {
        u32 w[4] = {x.v.x, x.v.y, x.v.z, x.v.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            f[2 * i] = half_to_float(w[i] & 0xffff);
            f[2 * i + 1] = half_to_float(w[i] >> 16);
        }
    }
    __device__ static float store(u8* pool, u64 all, u64 at, u32 e, float v) {
        u16 h = float_to_half(v);
        ((u16*)pool)[at + e] = h;
        return half_to_float(h);
    }
};
// All 8-bit numbers of the pool, then all scales.
struct EightsQ8 {
    struct Eight {
        u32 a, b, d;
    };
    __device__ static u64 scale_at(u64 all, u64 at, u32 e) { return all + (at + e) / 32 * 2; }
    __device__ static void unpack(const Eight& x, float (&f)[8]) {
        float d = half_to_float((u16)x.d);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            f[i] = d * (float)(signed char)(x.a >> 8 * i & 255);
            f[4 + i] = d * (float)(signed char)(x.b >> 8 * i & 255);
        }
    }
    __device__ static float store(u8* pool, u64 all, u64 at, u32 e, float v) {
        Cell c = cell_of(v);
        u16 h = float_to_half(c.d);
        pool[at + e] = (u8)c.q;
        if (e % 32 == 0) *(u16*)(pool + scale_at(all, at, e)) = h;
        return half_to_float(h) * (float)c.q;
    }
};

// Scores of N keys for H query heads, of which LANES neighbouring lanes have eight elements each.
template <class Cells, u32 LANES, u32 N, u32 H>
__device__ __forceinline__ void scores_of(const typename Cells::Eight* keys, const float (&q)[H][8], float (&score)[N][H]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        float f[8];
        Cells::unpack(keys[i], f);
#pragma unroll
        for (u32 h = 0; h < H; h++) {
            float x = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 8; j++) x = fmaf(q[h][j], f[j], x);
            score[i][h] = x;
        }
    }
#pragma unroll
    for (u32 d = 1; d < LANES; d *= 2)
#pragma unroll
        for (u32 i = 0; i < N; i++)
#pragma unroll
            for (u32 h = 0; h < H; h++) score[i][h] += __shfl_xor_sync(0xffffffffu, score[i][h], d);
}

// Makes weights of scores, below the largest so far, and takes down what was there by as much as that rises.
// `seen(i, x)` is key i's score x with its cap, or -1e30 for a key that is not seen.
template <u32 N, u32 H, class Seen>
__device__ __forceinline__ void weigh(float (&score)[N][H], float (&mix)[H][8], float (&top)[H], float (&sum)[H], const Seen& seen) {
#pragma unroll
    for (u32 h = 0; h < H; h++) {
        float high = top[h];
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            score[i][h] = seen(i, score[i][h]);
            high = fmaxf(high, score[i][h]);
        }
        float keep = power2(top[h] - high);
        top[h] = high;
        sum[h] *= keep;
#pragma unroll
        for (u32 j = 0; j < 8; j++) mix[h][j] *= keep;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            score[i][h] = score[i][h] > -1e29f ? power2(score[i][h] - high) : 0.0f;
            sum[h] += score[i][h];
        }
    }
}

// Adds the values by their weights.
template <class Cells, u32 N, u32 H>
__device__ __forceinline__ void add_values(const typename Cells::Eight* values, const float (&weight)[N][H], float (&mix)[H][8]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        float f[8];
        Cells::unpack(values[i], f);
#pragma unroll
        for (u32 h = 0; h < H; h++)
#pragma unroll
            for (u32 j = 0; j < 8; j++) mix[h][j] = fmaf(weight[i][h], f[j], mix[h][j]);
    }
}

// Puts together what the groups of LANES lanes of a warp have, in all of them.
template <u32 LANES>
__device__ __forceinline__ void join_groups(float& top, float& sum, float (&mix)[8]) {
#pragma unroll
    for (u32 d = LANES; d < 32; d *= 2) {
        float high = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d)), keep = power2(top - high);
        top = high;
        sum *= keep;
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            mix[j] *= keep;
            mix[j] += __shfl_xor_sync(0xffffffffu, mix[j], d);
        }
    }
}
