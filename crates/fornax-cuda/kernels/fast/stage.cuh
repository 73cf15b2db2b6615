// One matrix product of up to R rows by a whole grid, out of planes: the piece that a decode step is made of.
//
// A block takes a contiguous share of the outputs. Its rows are cut into chunks of 32 blocks of 32 weights, a block a
// lane; a warp takes a contiguous share of the chunks, whatever rows they are of, and leaves one sum for each. Weights go to a ring in
// shared memory by copies that need no register and are begun before the activations exist; activations are rounded to
// 8-bit blocks once a block, as fornax_plan::q8 says; the factor of an RMS norm, which rounding does not see, multiplies
// the result. A thread adds the sums of a row, always in the same order, and finishes the output.
#pragma once
#include "../planes.cuh"
#include "../rounding.cuh"

#ifndef DEPTH
#define DEPTH 6
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES 1088
#endif

#ifndef THREADS_AT_ONCE
#define THREADS_AT_ONCE 256
#endif
static const u32 THREADS = THREADS_AT_ONCE, WARPS = THREADS / 32;

// Where time goes, by kind of stage and phase, told at the end of `decode`: for tuning alone.
#ifdef TIMES
struct Times {
    long long at, sums[6][8];
};
__shared__ Times times;
__device__ inline void mark(u32 kind, u32 phase) {
    long long now = clock64();
    if (threadIdx.x == 0) times.sums[kind][phase] += now - times.at, times.at = clock64();
}
#define MARK(kind, phase) mark(kind, phase)
#else
#define MARK(kind, phase)
#endif

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
    // Outputs (pairs of them) of a block, times 2^20: of the first matrix's blocks and of the second's.
    u32 step0, step1;
    u32 spare0, spare1;
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

// Returns when `target` arrivals were counted. Called by whole blocks.
__device__ inline void await(const u32* counter, u32 target) {
    if (threadIdx.x == 0) {
        u32 v;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
        while (v < target);
    }
    __syncthreads();
}

// What a warp does in a stage: chunks `from` .. `end` of its block's rows, and what it copies next.
struct Way {
    Where p;
    u32 first, n, per_row;  // the block's rows; chunks of a row
    u32 from, end, part;    // `part` of its row is chunk `from`
    u32 next_left, next_part, next_slot;
    u32 type, second;
};

__device__ inline Way way_of(const Stage& s, u32 block, u32 blocks) {
    Way y;
    y.second = block >= s.blocks0;
    u32 ix = y.second ? block - s.blocks0 : block, step = y.second ? s.step1 : s.step0;
    u32 unit = s.epi == EPI_GATED ? 1 : 0, rows = y.second ? s.outs1 : s.outs0, nb = s.nb;
    y.first = (u32)((u64)ix * step >> 20) << unit;
    y.n = ((u32)((u64)(ix + 1) * step >> 20) << unit) - y.first;
    y.type = y.second ? s.type1 : s.type0;
    y.per_row = (nb + 31) / 32;
    u32 all = y.n * y.per_row, each = (all + WARPS - 1) / WARPS;
    y.from = min(threadIdx.x / 32 * each, all);
    y.end = min(y.from + each, all);
    // Exact for numbers this small.
    u32 row = (u32)__fdividef((float)y.from + 0.5f, (float)y.per_row);
    y.part = y.from - row * y.per_row;
    row += y.first;
    y.p = {(const u8*)(y.second ? s.w1 : s.w0), (u64)rows * nb, rows, nb, row, row * nb + y.part * 32 + threadIdx.x % 32};
    y.next_left = y.end - y.from;
    y.next_part = y.part;
    y.next_slot = 0;
    return y;
}

// Chunks that a warp of one row works on at once, so that their latencies overlap; copies go in groups of as many.
static const u32 GANG = 4;
template <int R>
struct Gang {
    static const u32 SIZE = R == 1 && DEPTH % GANG == 0 ? GANG : 1;
};

// Copies the next chunks as one group.
template <class W, u32 SIZE>
__device__ inline void copy_group(Way& y, u32 ring, u32 lane) {
    if (y.p.nb % 32 == 0) {  // rows end where chunks end
#pragma unroll 1
        for (u32 i = min(y.next_left, SIZE); i > 0; i--) {
            W::copy(ring + y.next_slot * SLOT_BYTES, y.p, lane);
            y.p.blk += 32;
            y.next_slot = y.next_slot + 1 == DEPTH ? 0 : y.next_slot + 1;
        }
    } else {
#pragma unroll 1
        for (u32 i = min(y.next_left, SIZE); i > 0; i--) {
            if (y.next_part * 32 + lane < y.p.nb) W::copy(ring + y.next_slot * SLOT_BYTES, y.p, lane);
            y.p.blk += 32;
            if (++y.next_part == y.per_row) {
                y.next_part = 0;
                y.p.row++;
                y.p.blk += y.p.nb - 32 * y.per_row;
            }
            y.next_slot = y.next_slot + 1 == DEPTH ? 0 : y.next_slot + 1;
        }
    }
    y.next_left -= min(y.next_left, SIZE);
    copies_commit();
}

// Begins the first copies of a stage.
template <int R>
__device__ inline Way prefetch(const Stage& s, u32 ring, u32 block, u32 blocks) {
    Way y = way_of(s, block, blocks);
    u32 lane = threadIdx.x % 32;
    static const u32 SIZE = Gang<R>::SIZE;
    switch (y.type) {
#define CASE(W, suffix, number)                                                                                        \
    case number:                                                                                                       \
        _Pragma("unroll 1") for (u32 i = 0; i < DEPTH / SIZE; i++) copy_group<P_##W, SIZE>(y, ring, lane);             \
        break;
        EACH_PLANED(CASE)
#undef CASE
    }
    return y;
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
    u32 slots;                 // of sums
};

template <class W, int R>
__device__ inline void stream(Way y, const Room& m, u8* base) {
    static const u32 AT_ONCE = Gang<R>::SIZE;
    u32 lane = threadIdx.x % 32, nb = y.p.nb, ring = m.ring, slot = 0, part = y.part;
    float* sums = (float*)(base + m.part);
    u32 x = shared_address(base + m.x), scales = x + R * nb * 32;
#pragma unroll 1
    for (u32 c = y.from; c < y.end; c += AT_ONCE) {
        float acc[AT_ONCE][R];
        copies_wait<DEPTH / AT_ONCE - 1>();
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int r = 0; r < R; r++) acc[i][r] = 0.0f;
            u32 b = part * 32 + lane;
            // Behind the last chunk the ring holds something old, and nobody reads the sum.
            if (b < nb) {
                W w;
                w.load(ring + slot * SLOT_BYTES, lane);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    Act a;
                    u32 at = x + r * nb * 32 + b * 16, ds = scales + (r * nb + b) * 4;
                    a.a = shared16(at);
                    a.b = shared16(at + nb * 16);
                    a.d = __uint_as_float(shared4(ds));
                    if (W::SUMS) a.sums = (int)shared4(ds + R * nb * 4);
                    acc[i][r] = w.dot(a, 0.0f);
                }
            }
            if (++part == y.per_row) part = 0;
            if (++slot == DEPTH) slot = 0;
        }
        __syncwarp();
        copy_group<W, AT_ONCE>(y, ring, lane);
        // Lane i · 32 / (chunks · rows) has sum i: chunk after chunk, in each row after row.
        static const u32 ALL = AT_ONCE * R;
        float v = sums_over_lanes<ALL>((float(&)[ALL])acc, lane);
        u32 i = lane / (32 / ALL);
        if (lane % (32 / ALL) == 0 && c + i / R < y.end) sums[c * R + i] = v;
    }
}

template <int R>
__device__ inline void stream_any(const Way& y, const Room& m, u8* base) {
    switch (y.type) {
#define CASE(W, suffix, number)                                                                                        \
    case number: stream<P_##W, R>(y, m, base); break;
        EACH_PLANED(CASE)
#undef CASE
    }
}

// The sum of one row of the block's share.
template <int R>
__device__ inline float row_sum(const Way& y, const Room& m, const u8* base, u32 row, u32 r) {
    const float* sums = (const float*)(base + m.part) + row * y.per_row * R + r;
    float v = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < y.per_row; i++) v += sums[i * R];
    return v;
}

// Four neighbouring elements of one row of the input.
struct Source {
    u32 pro, dim, heads, parts;
    const float *x, *scales;  // scales: maximum and sum of every part
};

// The parts of attention put together.
__device__ inline float4 merged4(const Source& in, u32 row, u32 e) {
    u32 head = e / in.dim, at = row * in.heads + head;
    const float* x = in.x + (u64)at * PARTS * in.dim + (e - head * in.dim);
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
    float4 y = {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse};
    return y;
}

// True where a format needs the sums of activations.
#define CASE(W, suffix, number) || P_##W::SUMS
static const bool ANY_SUMS = false EACH_PLANED(CASE);
#undef CASE

// Rounds `rows` rows to 8-bit blocks in shared memory; with a norm, leaves the sums of squares there too. Waits for the
// input where there is a counter. Ends with the block's barrier.
template <int R>
__device__ inline void round_input(const Stage& s, const Source& in, u32 rows, const Room& m, u8* base,
                                   const u32* counter, u32 target) {
    static const u32 AT_ONCE = 4;
    u32 t = threadIdx.x, nb = s.nb, width = nb * 32, quads = width / 4, pro = s.pro;
    u8* x = base + m.x;
    const float4* norm = (const float4*)s.norm;
    float4 zero = {0.0f, 0.0f, 0.0f, 0.0f}, g = zero;
    // What does not depend on the stage before is read before the wait.
    if (pro == PRO_NORM && t < quads) g = __ldg(norm + t);
    if (counter) await(counter, target);
#pragma unroll 1
    for (u32 r = 0; r < rows; r++) {
        float square = 0.0f;
        auto read = [&](u32 i) {
            if (i >= quads) return zero;
            return pro == PRO_MERGE ? merged4(in, r, i * 4) : fresh4(in.x + (u64)r * width + i * 4);
        };
        // Whole warps go on, four loads at a time.
#pragma unroll 1
        for (u32 from = t; (from & ~31u) < quads; from += THREADS * AT_ONCE) {
            float4 v[AT_ONCE], w[AT_ONCE];
#pragma unroll
            for (u32 u = 0; u < AT_ONCE; u++) v[u] = read(from + u * THREADS);
#pragma unroll
            for (u32 u = 0; u < AT_ONCE; u++) {
                u32 i = from + u * THREADS;
                w[u] = zero;
                if (pro == PRO_NORM && i < quads) w[u] = i == t ? g : __ldg(norm + i);
            }
#pragma unroll
            for (u32 u = 0; u < AT_ONCE; u++) {
                u32 i = from + u * THREADS;
                if ((i & ~31u) >= quads) break;
                float4 y = v[u];
                if (pro == PRO_NORM) {
                    square += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
                    y.x *= w[u].x;
                    y.y *= w[u].y;
                    y.z *= w[u].z;
                    y.w *= w[u].w;
                }
                Rounded q = round_quad(y);
                u32 b = i / 8, half = i / 4 & 1, at = R * nb * 32 + (r * nb + b) * 4;
                if (i < quads) {
                    *(u32*)(x + r * nb * 32 + half * nb * 16 + b * 16 + (i & 3) * 4) = q.word;
                    if ((t & 7) == 0) *(float*)(x + at) = q.scale();
                }
                if (ANY_SUMS) {
                    int sum = __dp4a((int)q.word, 0x01010101, 0);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    int other = __shfl_xor_sync(0xffffffffu, sum, 4);
                    if (i < quads && (t & 7) == 0) *(u32*)(x + at + R * nb * 4) = (u32)(sum & 0xffff) | (u32)other << 16;
                }
            }
        }
        if (pro == PRO_NORM) {
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
#pragma unroll 1
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
#pragma unroll 1
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
    return rsqrtf(sum / (float)(s.nb * 32) + s.eps);
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

// The residual that the thread adds first, read while the weights are on their way.
__device__ inline float early_residual(const Stage& s, const Way& y) {
    if (!s.residual || threadIdx.x >= y.n) return 0.0f;
    return fresh((const float*)s.residual + (y.second ? s.outs0 : 0) + y.first + threadIdx.x);
}

// Turns the sums into outputs. Begins with the block's barrier.
template <int R>
__device__ inline void finish_stage(const Stage& s, const Way& f, u32 rows, const Room& m, u8* base, Best* bests,
                                    u32 block, u32 blocks, float early) {
    __syncthreads();
    u32 t = threadIdx.x, offset = f.second ? s.outs0 : 0;
    const float *bias = (const float*)s.bias, *residual = (const float*)s.residual;
    if (s.epi == EPI_GATED) {
#pragma unroll 1
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
#pragma unroll 1
        for (u32 i = t; i < f.n; i += THREADS) {
            u32 out = offset + f.first + i;
            float v = row_sum<R>(f, m, base, i, r) * factor;
            if (bias) v += bias[out];
            v *= s.scale;
            if (s.softcap != 0.0f) v = s.softcap * tanhf(v / s.softcap);
            if (residual) v += r == 0 && i == t ? early : fresh(residual + (u64)r * s.width0 + out);
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
