// RMS norm of heads, rotary positions, and keys and values into the paged cache.
//
// Layout: q, k, v rows x (heads x dim) floats; pools and tables as in pool.metal; rows 8 words each: token, position,
// sequence, slot, tokens left, ... Heads of keys are at most 256 wide.
// Threads: a simdgroup a head of a row, four heads a threadgroup; heads along x, rows along y. A lane every 32nd pair.
// Bytes: with a norm an element is read twice (the second time from the cache), else once. Accumulates in float.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

struct Rotation {
    uint dim, pairs, halves;
    float eps, magnitude;
};

// One head; `pairs` of it are rotated (halves apart, or neighbours), the rest is normed alone. `norm` may be read where
// `normed`. `to` is a pointer to floats of any address space.
template <typename TO>
inline void rotated(device const float *x, device const float *norm, bool normed, device const float *freqs, uint pos,
                    Rotation r, uint lane, TO to) {
    float scale = 1;
    if (normed) {
        float sum = 0;
        for (uint i = lane; i < r.dim; i += 32) {
            sum = fma(x[i], x[i], sum);
        }
        scale = 1.0f / sqrt(simd_sum(sum) / float(r.dim) + r.eps);
    }
    for (uint i = lane; i < r.pairs; i += 32) {
        const uint p = r.halves ? i : 2 * i, q = r.halves ? i + r.pairs : 2 * i + 1;
        float u = x[p], v = x[q];
        if (normed) {
            u *= scale * norm[p];
            v *= scale * norm[q];
        }
        const float angle = float(pos) * freqs[i];
        const float s = sin(angle), c = cos(angle);
        to[p] = r.magnitude * (u * c - v * s);
        to[q] = r.magnitude * (u * s + v * c);
    }
    for (uint i = 2 * r.pairs + lane; i < r.dim; i += 32) {
        to[i] = normed ? x[i] * scale * norm[i] : x[i];
    }
}

struct RopeArgs {
    uint rows, heads, dim, norm;
    float eps;
    uint pairs, halves;
    float magnitude;
};

kernel void norm_rope(device const float *x [[buffer(0)]], device const float *norm [[buffer(1)]],
                      device const float *freqs [[buffer(2)]], device const uint *rows [[buffer(3)]],
                      device float *out [[buffer(4)]], constant RopeArgs &args [[buffer(5)]],
                      uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]]) {
    const uint head = group.x * 4 + simd;
    if (head >= args.heads) {
        return;
    }
    const ulong at = (ulong(group.y) * args.heads + head) * args.dim;
    const Rotation r = {args.dim, args.pairs, args.halves, args.eps, args.magnitude};
    rotated(x + at, norm, args.norm != 0, freqs, rows[8 * group.y + 1], r, lane, out + at);
}

constant constexpr uint WIDEST = 256;

// Element i of a pool. In a pool of blocks the lanes of a simdgroup put a whole block: all of them, in order.
inline void put(device float *pool, ulong i, float v, uint) {
    pool[i] = v;
}

inline void put(device half *pool, ulong i, float v, uint) {
    pool[i] = half(v);
}

inline void put(device Eights *pool, ulong i, float v, uint lane) {
    const float d = simd_max(abs(v)) / 127.0f;
    // What is not finite must show when it is read.
    const bool bad = simd_any(!isfinite(v));
    const float steps = bad || d < 1e-37f ? 0.0f : clamp(round(v * (1.0f / d)), -127.0f, 127.0f);
    device Eights *to = pool + i / 32;
    to->q[lane] = char(int(steps));
    if (lane == 0) {
        to->d = bad ? half(NAN) : half(d);
    }
}

struct KvWriteArgs {
    uint rows, k_width, v_width, block, stride;
};

// Appends keys and values as they are: a thread an element, rows along y, whole simdgroups along x.
template <typename KV>
kernel void kv_write(device const float *k [[buffer(0)]], device const float *v [[buffer(1)]],
                     device const uint *rows [[buffer(2)]], device const uint *tables [[buffer(3)]],
                     device KV *keys0 [[buffer(4)]], device KV *keys1 [[buffer(5)]], device KV *keys2 [[buffer(6)]],
                     device KV *keys3 [[buffer(7)]], device KV *values0 [[buffer(8)]], device KV *values1 [[buffer(9)]],
                     device KV *values2 [[buffer(10)]], device KV *values3 [[buffer(11)]],
                     constant KvWriteArgs &args [[buffer(12)]], uint2 at [[thread_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]]) {
    device const uint *row = rows + 8 * at.y;
    // The position of a row with nothing left to produce may lie past its blocks.
    if (row[4] == 0) {
        return;
    }
    const Token token = token_of(tables, row[2], args.stride, args.block, row[1]);
    device KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
    device KV *values = piece_of(token.piece, values0, values1, values2, values3);
    if (at.x < args.k_width) {
        put(keys, token.at * args.k_width + at.x, k[ulong(at.y) * args.k_width + at.x], lane);
    }
    if (at.x < args.v_width) {
        put(values, token.at * args.v_width + at.x, v[ulong(at.y) * args.v_width + at.x], lane);
    }
}

struct RopeWriteArgs {
    uint rows, heads, kv_heads, dim, v_width, q_norm, k_norm;
    float eps;
    uint pairs, halves;
    float magnitude;
    uint block, stride;
};

// Norm and rotation of queries and keys and the append of keys and values at once: heads of q, then of k, then of v.
template <typename KV>
kernel void rope_write(device const float *q [[buffer(0)]], device const float *k [[buffer(1)]],
                       device const float *v [[buffer(2)]], device const float *q_norm [[buffer(3)]],
                       device const float *k_norm [[buffer(4)]], device const float *freqs [[buffer(5)]],
                       device const uint *rows [[buffer(6)]], device const uint *tables [[buffer(7)]],
                       device float *q_out [[buffer(8)]], device KV *keys0 [[buffer(9)]], device KV *keys1 [[buffer(10)]],
                       device KV *keys2 [[buffer(11)]], device KV *keys3 [[buffer(12)]], device KV *values0 [[buffer(13)]],
                       device KV *values1 [[buffer(14)]], device KV *values2 [[buffer(15)]],
                       device KV *values3 [[buffer(16)]], constant RopeWriteArgs &args [[buffer(17)]], uint2 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float stage[4 * WIDEST];
    uint head = group.x * 4 + simd;
    if (head >= args.heads + 2 * args.kv_heads) {
        return;
    }
    device const uint *row = rows + 8 * group.y;
    const Rotation r = {args.dim, args.pairs, args.halves, args.eps, args.magnitude};
    if (head < args.heads) {
        const ulong at = (ulong(group.y) * args.heads + head) * args.dim;
        rotated(q + at, q_norm, args.q_norm != 0, freqs, row[1], r, lane, q_out + at);
        return;
    }
    if (row[4] == 0) {
        return;
    }
    head -= args.heads;
    const Token token = token_of(tables, row[2], args.stride, args.block, row[1]);
    if (head < args.kv_heads) {
        device KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
        device const float *from = k + (ulong(group.y) * args.kv_heads + head) * args.dim;
        threadgroup float *mine = stage + simd * WIDEST;
        rotated(from, k_norm, args.k_norm != 0, freqs, row[1], r, lane, mine);
        // Pairs lie apart; what is stored together is not what a lane has rotated.
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < args.dim; i += 32) {
            put(keys, (token.at * args.kv_heads + head) * args.dim + i, mine[i], lane);
        }
        return;
    }
    head -= args.kv_heads;
    device KV *values = piece_of(token.piece, values0, values1, values2, values3);
    device const float *from = v + (ulong(group.y) * args.kv_heads + head) * args.v_width;
    for (uint i = lane; i < args.v_width; i += 32) {
        put(values, (token.at * args.kv_heads + head) * args.v_width + i, from[i], lane);
    }
}

#define KERNEL(name, ...) template [[host_name(name)]] kernel decltype(__VA_ARGS__) __VA_ARGS__;
KERNEL("kv_write_f32", kv_write<float>)
KERNEL("kv_write_f16", kv_write<half>)
KERNEL("kv_write_q8_0", kv_write<Eights>)
KERNEL("rope_write_f32", rope_write<float>)
KERNEL("rope_write_f16", rope_write<half>)
KERNEL("rope_write_q8_0", rope_write<Eights>)
