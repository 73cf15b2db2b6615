// One matrix product of up to R rows by a whole grid, out of planes: the piece that a decode step is made of.
//
// A block takes a contiguous share of the outputs, its warps contiguous shares of the chunks (32 blocks of 32 weights)
// of those rows, so that every warp reads one stretch of memory and all have the same to do. Weights go to a ring in
// shared memory by copies that need no register and are begun before the activations exist; activations are rounded to
// 8-bit blocks once a block, as fornax_plan::q8 says; the factor of an RMS norm, which rounding does not see, multiplies
// the result. A warp's sums over a row are put together in shared memory, and a thread finishes each output.
#pragma once
#include "../planes.cuh"

#ifndef DEPTH
#define DEPTH 6
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES 1088
#endif

static const u32 THREADS = 512, WARPS = THREADS / 32;

// What a stage does with its input, and with its sums.
static const u32 PRO_ROUND = 0, PRO_NORM = 1, PRO_MERGE = 2;
static const u32 EPI_ROWS = 0, EPI_GATED = 1, EPI_HEAD = 2;
static const u32 KIND_DENSE = 0, KIND_ATTEND = 1, KIND_NORM = 2;
// Parts of a context that are attended to apart; beyond four they are put together by the last to finish.
static const u32 PARTS = 16, PARTS_DIRECT = 4;

// As src/fast/stage.rs lays it out.
struct Stage {
    // The matrices of the first blocks0 blocks and of the rest; for attention, keys and values.
    u64 w0, w1;
    u64 x, x1, x2;
    u64 norm, norm1;
    u64 bias, residual;
    u64 y0, y1, y2;
    u32 kind, pro, epi, type0, type1, nb, outs0, outs1, blocks0, cut0, cut1, act;
    u32 width0, width1, width2;
    u32 heads, kv_heads, dim, window, group, rope, pairs, halves;
    float alpha, limit, scale, softcap, eps;
    u32 spare0, spare1, spare2, spare3;
};

// The best logit of a block's share, and the sum of exponentials relative to it.
struct Best {
    float value, sum;
    u32 at, spare;
};

__device__ inline void take_stages(const Stage* from, Stage* to, u32 n) {
    static_assert(sizeof(Stage) == 224, "as src/fast/stage.rs has it");
    for (u32 i = threadIdx.x; i < n * sizeof(Stage) / 16; i += THREADS) ((uint4*)to)[i] = __ldg((const uint4*)from + i);
}

__device__ inline float4 fresh4(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ inline float2 fresh2(const float* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ inline float fresh(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline u32 fresh_word(const u32* p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// A warp's way through the chunks of its block's share.
struct Flow {
    u32 second, type, first, n, per_row, per_warp, from, end;
    // What is copied next: where the lane's block is, the chunk, its place in the row, the slot it goes to.
    Where p;
    u32 next, next_part, next_slot;
};

__device__ inline Flow open_flow(const Stage& s, u32 block, u32 blocks) {
    Flow f;
    f.second = block >= s.blocks0;
    f.type = f.second ? s.type1 : s.type0;
    u32 ix = f.second ? block - s.blocks0 : block, count = f.second ? blocks - s.blocks0 : s.blocks0;
    u32 unit = s.epi == EPI_GATED ? 2 : 1, rows = f.second ? s.outs1 : s.outs0, jobs = rows / unit;
    u32 a = ix * jobs / count, b = (ix + 1) * jobs / count;
    f.first = a * unit;
    f.n = (b - a) * unit;
    f.per_row = (s.nb + 31) / 32;
    u32 all = f.n * f.per_row;
    f.per_warp = max((all + WARPS - 1) / WARPS, 1u);
    f.from = min(threadIdx.x / 32 * f.per_warp, all);
    f.end = min(f.from + f.per_warp, all);
    f.next = f.from;
    f.next_part = f.from % f.per_row;
    f.next_slot = 0;
    u32 at = f.first + f.from / f.per_row;
    f.p = {(const u8*)(f.second ? s.w1 : s.w0), (u64)rows * s.nb, rows, s.nb, at,
           at * s.nb + f.next_part * 32 + threadIdx.x % 32};
    return f;
}

template <class W>
__device__ inline void copy_next(Flow& f, u32 ring, u32 lane) {
    if (f.next < f.end) {
        if (f.next_part * 32 + lane < f.p.nb) W::copy(ring + f.next_slot * SLOT_BYTES, f.p, lane);
        f.next++;
        f.p.blk += 32;
        if (++f.next_part == f.per_row) {
            f.next_part = 0;
            f.p.row++;
            f.p.blk += f.p.nb - 32 * f.per_row;
        }
        if (++f.next_slot == DEPTH) f.next_slot = 0;
    }
    copies_commit();
}

// Begins the first copies of a stage, one group a chunk.
__device__ inline void prefetch(Flow& f, u32 ring) {
    u32 lane = threadIdx.x % 32;
    switch (f.type) {
#define CASE(W, suffix, number)                                                                                        \
    case number:                                                                                                       \
        _Pragma("unroll 1") for (u32 i = 0; i < DEPTH; i++) copy_next<P_##W>(f, ring, lane);                        \
        break;
        EACH_PLANED(CASE)
#undef CASE
    }
}

// Sums over the lanes of R numbers each; lane r · 32 / R ends up with sum r.
template <int R>
__device__ inline float sums_over_lanes(float (&a)[R], u32 lane) {
    u32 bit = 16;
#pragma unroll
    for (int n = R; n > 1; n /= 2, bit /= 2) {
        bool up = lane & bit;
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            float keep = up ? a[i + n / 2] : a[i], give = up ? a[i] : a[i + n / 2];
            a[i] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
        }
    }
    float v = a[0];
    for (; bit > 0; bit /= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
    return v;
}

// Shared memory of a block, by offset from its start.
struct Room {
    u32 ring, x, part, norms;  // the ring of this warp; activations; sums by warp; sums of squares by row and warp
    u32 slots;                 // rows that a warp's part has room for
};

template <class W, int R>
__device__ inline void stream(Flow& f, const Room& m, u8* base) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, nb = f.p.nb;
    u32 part = f.from % f.per_row, slot = 0, row_slot = 0;
    float acc[R];
#pragma unroll
    for (int r = 0; r < R; r++) acc[r] = 0.0f;
    float* sums = (float*)(base + m.part) + warp * m.slots * R;
    u32 x = shared_address(base + m.x);
#pragma unroll 1
    for (u32 c = f.from; c < f.end; c++) {
        copies_wait<DEPTH - 1>();
        __syncwarp();
        u32 b = part * 32 + lane;
        if (b < nb) {
            W w;
            w.load(m.ring + slot * SLOT_BYTES, lane);
#pragma unroll
            for (int r = 0; r < R; r++) {
                Act a;
                u32 at = x + r * nb * 32 + b * 16;
                a.a = shared16(at);
                a.b = shared16(at + nb * 16);
                at = x + R * nb * 32 + (r * nb + b) * 4;
                a.d = __uint_as_float(shared4(at));
                a.sums = (int)shared4(at + R * nb * 4);
                acc[r] = w.dot(a, acc[r]);
            }
        }
        __syncwarp();
        copy_next<W>(f, m.ring, lane);
        if (++slot == DEPTH) slot = 0;
        if (++part == f.per_row || c + 1 == f.end) {
            float v = sums_over_lanes<R>(acc, lane);
            if (lane % (32 / R) == 0) sums[row_slot * R + lane / (32 / R)] = v;
#pragma unroll
            for (int r = 0; r < R; r++) acc[r] = 0.0f;
            part = 0;
            row_slot++;
        }
    }
}

template <int R>
__device__ inline void stream_any(Flow& f, const Room& m, u8* base) {
    switch (f.type) {
#define CASE(W, suffix, number)                                                                                        \
    case number: stream<P_##W, R>(f, m, base); break;
        EACH_PLANED(CASE)
#undef CASE
    }
}

// The sum of one row of the block's share, over the warps that have a part of it, in their order.
template <int R>
__device__ inline float row_sum(const Flow& f, const Room& m, const u8* base, u32 row, u32 r) {
    const float* sums = (const float*)(base + m.part);
    u32 a = row * f.per_row, first = a / f.per_warp, last = (a + f.per_row - 1) / f.per_warp;
    float v = 0.0f;
    for (u32 w = first; w <= last; w++) v += sums[(w * m.slots + row - w * f.per_warp / f.per_row) * R + r];
    return v;
}

// Four neighbouring elements of one row of the input.
struct Source {
    u32 pro, dim, heads, parts;
    const float *x, *scales;  // scales: maximum and sum of every part
};

__device__ inline float4 input4(const Source& in, u32 width, u32 row, u32 e) {
    if (in.pro != PRO_MERGE) return fresh4(in.x + (u64)row * width + e);
    u32 head = e / in.dim, at = row * in.heads + head;
    const float* x = in.x + (u64)at * PARTS * in.dim + e % in.dim;
    const float* ms = in.scales + (u64)at * PARTS * 2;
    float2 m[PARTS_DIRECT];
    float4 v[PARTS_DIRECT];
    float top = -1e30f;
#pragma unroll
    for (u32 i = 0; i < PARTS_DIRECT; i++)
        if (i < in.parts) {
            m[i] = fresh2(ms + 2 * i);
            v[i] = fresh4(x + i * in.dim);
        }
#pragma unroll
    for (u32 i = 0; i < PARTS_DIRECT; i++)
        if (i < in.parts) top = fmaxf(top, m[i].x);
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PARTS_DIRECT; i++)
        if (i < in.parts) {
            float w = exp2f(m[i].x - top);
            sum = fmaf(w, m[i].y, sum);
            o.x = fmaf(w, v[i].x, o.x);
            o.y = fmaf(w, v[i].y, o.y);
            o.z = fmaf(w, v[i].z, o.z);
            o.w = fmaf(w, v[i].w, o.w);
        }
    float inverse = 1.0f / sum;
    o.x *= inverse;
    o.y *= inverse;
    o.z *= inverse;
    o.w *= inverse;
    return o;
}

// Rounds `rows` rows to 8-bit blocks in shared memory; with a norm, leaves the sums of squares there too. Ends with the
// block's barrier.
template <int R>
__device__ inline void round_input(const Stage& s, const Source& in, u32 rows, const Room& m, u8* base) {
    static const u32 AT_ONCE = R == 1 ? 4 : 2;
    u32 t = threadIdx.x, nb = s.nb, width = nb * 32, quads = width / 4;
    u8* x = base + m.x;
    const float* norm = (const float*)s.norm;
#pragma unroll 1
    for (u32 r = 0; r < rows; r++) {
        float square = 0.0f;
#pragma unroll 1
        for (u32 from = 0; from < quads; from += THREADS * AT_ONCE) {
            float4 v[AT_ONCE], g[AT_ONCE];
#pragma unroll
            for (u32 u = 0; u < AT_ONCE; u++) {
                u32 i = from + u * THREADS + t;
                float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
                v[u] = i < quads ? input4(in, width, r, i * 4) : zero;
                if (s.pro == PRO_NORM) g[u] = i < quads ? __ldg((const float4*)norm + i) : zero;
            }
#pragma unroll
            for (u32 u = 0; u < AT_ONCE; u++) {
                u32 i = from + u * THREADS + t;
                if (from + u * THREADS >= quads) break;
                float4 y = v[u];
                if (s.pro == PRO_NORM) {
                    square += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
                    y.x *= g[u].x;
                    y.y *= g[u].y;
                    y.z *= g[u].z;
                    y.w *= g[u].w;
                }
                float top = fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
                // NaN or infinity must not be rounded away: the sum of the block carries it into the scale.
                float odd = (y.x - y.x) + (y.y - y.y) + (y.z - y.z) + (y.w - y.w);
#pragma unroll
                for (u32 d = 1; d < 8; d *= 2) {
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
                    odd += __shfl_xor_sync(0xffffffffu, odd, d);
                }
                float inverse = 127.0f / top;
                bool none = !(top > 0.0f) || isinf(inverse);
                if (none) inverse = 0.0f;
                int q0 = __float2int_rn(y.x * inverse), q1 = __float2int_rn(y.y * inverse);
                int q2 = __float2int_rn(y.z * inverse), q3 = __float2int_rn(y.w * inverse);
                u32 packed = (q0 & 255) | (q1 & 255) << 8 | (q2 & 255) << 16 | (u32)q3 << 24;
                int sum = q0 + q1 + q2 + q3;
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                int other = __shfl_xor_sync(0xffffffffu, sum, 4);
                if (i < quads) {
                    u32 b = i / 8, half = i / 4 & 1;
                    *(u32*)(x + r * nb * 32 + half * nb * 16 + b * 16 + (i & 3) * 4) = packed;
                    if ((t & 7) == 0) {
                        u32 at = R * nb * 32 + (r * nb + b) * 4;
                        *(float*)(x + at) = (none ? 0.0f : top / 127.0f) + odd;
                        *(u32*)(x + at + R * nb * 4) = (u32)(sum & 0xffff) | (u32)other << 16;
                    }
                }
            }
        }
        if (s.pro == PRO_NORM) {
            square = warp_sum(square);
            if (t % 32 == 0) ((float*)(base + m.norms))[r * WARPS + t / 32] = square;
        }
    }
    __syncthreads();
}

// An RMS norm on its own: x, norm and residual to y0, rows of width0. A block takes one row.
__device__ inline void norm_row(const Stage& s, u32 r, const Room& m, u8* base) {
    u32 t = threadIdx.x, width = s.width0;
    const float *x = (const float*)s.x + (u64)r * width, *norm = (const float*)s.norm;
    const float* residual = s.residual ? (const float*)s.residual + (u64)r * width : 0;
    float* y = (float*)s.y0 + (u64)r * width;
    float* squares = (float*)(base + m.norms);
    float square = 0.0f;
    for (u32 i = t; i < width; i += THREADS) {
        float v = fresh(x + i);
        square += v * v;
    }
    square = warp_sum(square);
    if (t % 32 == 0) squares[t / 32] = square;
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < WARPS; i++) sum += squares[i];
    float factor = 1.0f / sqrtf(sum / (float)width + s.eps);
    for (u32 i = t; i < width; i += THREADS) {
        float v = fresh(x + i) * factor * norm[i];
        y[i] = residual ? v + fresh(residual + i) : v;
    }
}

__device__ inline float norm_factor(const Stage& s, const Room& m, const u8* base, u32 r) {
    if (s.pro != PRO_NORM) return 1.0f;
    const float4* squares = (const float4*)(base + m.norms) + r * WARPS / 4;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS / 4; i++) sum += squares[i].x + squares[i].y + squares[i].z + squares[i].w;
    return 1.0f / sqrtf(sum / (float)(s.nb * 32) + s.eps);
}

__device__ inline float gate_of(const Stage& s, float g, float u) {
    if (s.act == 0) return g / (1.0f + expf(-g)) * u;
    if (s.act == 1) {
        float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(inner)) * u;
    }
    g = fminf(g, s.limit);
    u = fminf(fmaxf(u, -s.limit), s.limit);
    return g / (1.0f + expf(-s.alpha * g)) * (u + 1.0f);
}

__device__ inline Best better_of(const Best& a, const Best& b) {
    bool first = a.value > b.value || (a.value == b.value && a.at < b.at);
    Best best = first ? a : b;
    // Where nothing was usable the value is −∞ and the sum 0.
    float other = first ? b.value : a.value, sum = first ? b.sum : a.sum;
    if (sum > 0.0f) best.sum += sum * expf(other - best.value);
    return best;
}

__device__ inline Best best_of_warp(Best b) {
    for (u32 d = 16; d > 0; d /= 2) {
        Best o;
        o.value = __shfl_xor_sync(0xffffffffu, b.value, d);
        o.sum = __shfl_xor_sync(0xffffffffu, b.sum, d);
        o.at = __shfl_xor_sync(0xffffffffu, b.at, d);
        b = better_of(b, o);
    }
    return b;
}

__device__ inline float* output_of(const Stage& s, u32 out, u32 r) {
    if (out < s.cut0) return (float*)s.y0 + (u64)r * s.width0 + out;
    if (out < s.cut1) return (float*)s.y1 + (u64)r * s.width1 + (out - s.cut0);
    return (float*)s.y2 + (u64)r * s.width2 + (out - s.cut1);
}

// Turns the sums into outputs. Begins with the block's barrier.
template <int R>
__device__ inline void finish_stage(const Stage& s, const Flow& f, u32 rows, const Room& m, u8* base, Best* bests,
                                    u32 block, u32 blocks) {
    __syncthreads();
    u32 t = threadIdx.x, offset = f.second ? s.outs0 : 0;
    const float *bias = (const float*)s.bias, *residual = (const float*)s.residual;
    if (s.epi == EPI_GATED) {
        for (u32 i = t; i < f.n / 2 * R; i += THREADS) {
            u32 pair = i / R, r = i % R;
            if (r >= rows) continue;
            float factor = norm_factor(s, m, base, r);
            float g = row_sum<R>(f, m, base, 2 * pair, r) * factor;
            float u = row_sum<R>(f, m, base, 2 * pair + 1, r) * factor;
            u32 out = f.first + 2 * pair;
            if (bias) {
                g += bias[out];
                u += bias[out + 1];
            }
            ((float*)s.y0)[(u64)r * s.width0 + out / 2] = gate_of(s, g, u);
        }
        return;
    }
    Best best[R];
#pragma unroll
    for (int r = 0; r < R; r++) best[r] = {negative_infinity(), 0.0f, NONE, 0};
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (r >= rows) break;
        float factor = norm_factor(s, m, base, r);
        for (u32 i = t; i < f.n; i += THREADS) {
            u32 out = offset + f.first + i;
            float v = row_sum<R>(f, m, base, i, r) * factor;
            if (bias) v += bias[out];
            v *= s.scale;
            if (s.softcap != 0.0f) v = s.softcap * tanhf(v / s.softcap);
            if (residual) v += fresh(residual + (u64)r * s.width0 + out);
            *output_of(s, out, r) = v;
            if (s.epi == EPI_HEAD && v > negative_infinity()) best[r] = better_of(best[r], {v, 1.0f, out, 0});
        }
    }
    if (s.epi != EPI_HEAD) return;
    Best* parts = (Best*)(base + m.x);
    for (u32 r = 0; r < rows; r++) {
        Best b = best[0];
#pragma unroll
        for (int i = 1; i < R; i++)
            if (i == r) b = best[i];
        b = best_of_warp(b);
        __syncthreads();
        if (t % 32 == 0) parts[t / 32] = b;
        __syncthreads();
        if (t < 32) {
            Best none = {negative_infinity(), 0.0f, NONE, 0};
            b = best_of_warp(t < WARPS ? parts[t] : none);
            if (t == 0) bests[r * blocks + block] = b;
        }
    }
}
