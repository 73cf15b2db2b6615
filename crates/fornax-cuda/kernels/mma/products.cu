// y = W·x for several rows at a time, out of planes, on the tensor cores' 8-bit products: what batches are made of.
//
// A block takes OUTS outputs of TOKENS rows, and one of `splits` parts of the columns. Columns come in steps of eight
// blocks of 32, copied to a ring of shared memory; WIDE warps share the outputs, and each of the others takes blocks of its
// own, so that a warp multiplies 32 outputs by all rows of the tile, block after block: the sum of a block is exact, its
// scales multiply it in f32, and what warps and parts have is added in one order. Nothing of that depends on how many
// rows there are, so a row gets the same numbers in every batch.
//
// With EAGER, for few rows, whose steps are a chain of waits: the parts of the columns are a cluster, whose blocks send one
// another their sums and finish some rows each; else the last block to finish adds them, through the second-level cache.
#include "../tensor.cuh"
#include "cluster.cuh"

#ifndef TOKENS
#define TOKENS 64
#define WIDE 1
#define STAGES 4
#define THREADS_AT_ONCE 256
#define EAGER 0
#endif

static const u32 THREADS = THREADS_AT_ONCE, WARPS = THREADS / 32, DEEP = WARPS / WIDE, OUTS = 32 * WIDE, STEP = 8, COLUMNS = TOKENS / 8;
// Outputs as they are; gated pairs; gated pairs, rounded for the next product; outputs as they are, and beside them their
// norm, rounded for the next product.
static const u32 EPI_ROWS = 0, EPI_ROUND = 2, EPI_NORM = 3;

struct ProductArgs {
    // `rows` of this launch begin at row `base`; `stride` is that of scales and sums.
    u32 rows, base, stride, nb, outs, type, splits, epi, act, before;
    u32 cut0, cut1, width0, width1, width2, to_stride;
    float alpha, limit, scale, softcap;
    // The rows are of a norm whose factor is still to come, out of the sums of squares of their blocks, or `normed` is 0.
    u32 normed;
    float eps;
};

#include "formats.cuh"

// Numbers, scales and sums of the rows of a step.
template <class W>
__device__ inline void copy_rows(u32 to, const ProductArgs& a, const u8* x, const float* scales, const float* sums, u32 first, u32 from) {
    EACH_ITEM(i, TOKENS * 16) {
        u32 row = i / 16, part = i % 16;
        bool there = first + row < a.rows && from + part / 2 < a.nb;
        u32 at = there ? (a.base + first + row) * a.nb * 2 + from * 2 + part : 0;
        copy16_if(to + W::X_AT + row * 256 + ((part ^ (row & 7)) << 4), x + (u64)at * 16, there);
    }
    EACH_ITEM(i, STEP * TOKENS / 4) {
        u32 b = i / (TOKENS / 4), row = i % (TOKENS / 4) * 4;
        bool there = from + b < a.nb;
        u32 at = there ? (from + b) * a.stride + a.base + first + row : 0;
        copy16_if(to + W::D_AT + (b * TOKENS + row) * 4, scales + at, there);
        if (W::MINS) copy16_if(to + W::M_AT + (b * TOKENS + row) * 4, sums + at, there);
    }
}

template <class W>
__device__ inline void multiply(const Spot& s, u32 lane, float (&acc)[2][COLUMNS][4]) {
    Pair p = W::fragments(s);
    float d[4], m[4];
    W::scales(s, d, m);
    // (AROUND + n) · d − AROUND · d is n · d in one step: the second product is exact, as scales have few bits.
    float less_d[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) less_d[i] = W::EXACT ? -AROUND * d[i] : 0.0f;
    u32 half = lane / 8 & 1, t = lane % 4;
#pragma unroll
    for (u32 n = 0; n < COLUMNS; n += 2) {
        u32 b[4], row = n * 8 + (lane / 16) * 8 + lane % 8;
        load_matrices(b, s.stage + W::X_AT + row * 256 + (((2 * s.b + half) ^ (row & 7)) << 4));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float x[2], y[2];
            u32 at = s.stage + (s.b * TOKENS + (n + i) * 8 + 2 * t) * 4;
            asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at + W::D_AT) : "memory");
            if (W::MINS) asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(y[0]), "=f"(y[1]) : "r"(at + W::M_AT) : "memory");
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                float v[4];
                float(&to)[4] = acc[k][n + i];
                if (W::TWO) {
                    float u[4];
                    mma_s8_half(v, p.a[k][0], p.a[k][1], b[2 * i]);
                    mma_s8_half(u, p.a[k][2], p.a[k][3], b[2 * i + 1]);
#pragma unroll
                    for (u32 j = 0; j < 4; j++) {
                        u32 r = 2 * k + j / 2;
                        to[j] = fmaf(fmaf(v[j] - AROUND, d[r], (u[j] - AROUND) * m[r]), x[j % 2], to[j]);
                    }
                } else {
                    mma_s8(v, p.a[k], b[2 * i], b[2 * i + 1]);
#pragma unroll
                    for (u32 j = 0; j < 4; j++) {
                        u32 r = 2 * k + j / 2;
                        to[j] = W::EXACT ? fmaf(fmaf(v[j], d[r], less_d[r]), x[j % 2], to[j])
                                         : fmaf(v[j] - AROUND, d[r] * x[j % 2], to[j]);
                        if (W::MINS) to[j] = fmaf(m[r], y[j % 2], to[j]);
                    }
                }
            }
        }
    }
}

// What a row's factor is made of: the squares of every fourth block of it. The order of the sums is one for all batches.
static const u32 QUARTERS = 4;

__device__ inline void add_squares(const ProductArgs& a, const float* squares, u32 first, float (&to)[QUARTERS][TOKENS]) {
    u32 row = threadIdx.x % TOKENS, quarter = threadIdx.x / TOKENS;
    if (!a.normed || quarter >= QUARTERS) return;
    const float* from = squares + a.base + first + row;
    float sum = 0.0f;
    // Eight loads under way, also at the end.
#pragma unroll 1
    for (u32 at = quarter; at < a.nb; at += 8 * QUARTERS) {
        float v[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 b = at + i * QUARTERS;
            v[i] = b < a.nb ? __ldcg(from + b * a.stride) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) sum += v[i];
    }
    to[quarter][row] = sum;
}
// The factor of the norm, into the first quarter.
__device__ inline void make_factors(const ProductArgs& a, float (&sums)[QUARTERS][TOKENS]) {
    u32 row = threadIdx.x;
    if (!a.normed || row >= TOKENS) return;
    float square = (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
    sums[0][row] = rsqrtf(square / (float)(a.nb * 32) + a.eps);
}

// `ahead` is called once what the kernel in front wrote can be read.
template <class W, class Ahead>
__device__ inline void steps(const ProductArgs& a, Matrix m, u32 first, u32 room, const u8* x, const float* scales,
                             const float* sums, const float* squares, float (&square)[QUARTERS][TOKENS],
                             float (&acc)[2][COLUMNS][4], const Ahead& ahead) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = (a.nb + STEP - 1) / STEP;
    u32 each = (all + a.splits - 1) / a.splits, begin = min(blockIdx.x % a.splits * each, all), end = min(begin + each, all);
    u32 next = begin;
    auto fetch = [&](bool weights, bool rows) {
        if (next < end) {
            u32 to = room + (next - begin) % STAGES * W::BYTES;
            m.from = next * STEP;
            if (weights) W::copy(to, m);
            if (rows) copy_rows<W>(to, a, x, scales, sums, first, m.from);
        }
        if (rows) copies_commit();
        next++;
    };
    // Weights are nobody's: their copies begin before the kernel in front has ended.
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; i++) fetch(true, false);
    await_before();
    // Not earlier: of small kernels several would stand there, in each other's way.
    if (EAGER) let_next_begin();
    next = begin;
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; i++) fetch(false, true);
    ahead();
    add_squares(a, squares, first, square);
#pragma unroll 1
    for (u32 step = begin; step < end; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(true, true);
        Spot s = {room + (step - begin) % STAGES * W::BYTES, warp % WIDE * 32, 0, lane};
#pragma unroll 1
        for (s.b = warp / WIDE; s.b < STEP; s.b += DEEP) multiply<W>(s, lane, acc);
    }
    copies_wait<0>();
    __syncthreads();
}

__device__ inline float gate_of(const ProductArgs& a, float g, float u) {
    if (a.act == 0) return g / (1.0f + expf(-g)) * u;
    if (a.act == 1) {
        float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(inner)) * u;
    }
    g = fminf(g, a.limit);
    u = fminf(fmaxf(u, -a.limit), a.limit);
    return g / (1.0f + expf(-a.alpha * g)) * (u + 1.0f);
}

static const u32 PITCH = OUTS + 4;
// What a thread has of a tile: one output, or pair of outputs, of every `EVERY`th row.
static const u32 EVERY = THREADS / OUTS, OWN = TOKENS * OUTS / THREADS, EVERY_PAIR = 2 * EVERY, OWN_PAIRS = OWN / 2;
// Whether what is added at the end is asked for at the beginning: few rows leave registers for it.
static const bool EARLY = EAGER && OWN <= 4;

// The rows of the tile that a thread finishes: of those that it has, every `parts`th.
struct Share {
    u32 part, parts, from, every, rows;
    __device__ u32 row(u32 i) const { return from + (i * parts + part) * every; }
    __device__ bool has(u32 i, u32 most) const { return i * parts + part < most && row(i) < rows; }
};

// Shared memory of a block before what the other blocks of its cluster send: the ring, or the sums that take its place.
// src/rows/kernels.rs counts the same.
static const u32 SUMS = DEEP * TOKENS * PITCH * 4;
template <class W>
static const u32 WORK = STAGES * W::BYTES > SUMS ? STAGES * W::BYTES : SUMS;

struct Places {
    const float *bias, *residual, *norm;
    float *y0, *y1, *y2;
    u8* q;
    float *scales, *sums, *squares;
};

// Rounds 32 neighbouring outputs of a row to one block for the next product. A warp.
__device__ inline void round_block(const ProductArgs& a, const Places& p, float v, u32 block, u32 row, u32 lane) {
    u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(v) & 0x7fffffffu);
    float top = __uint_as_float(bits), inverse = __fdividef(127.0f, top);
    bool none = top < 3.8e-37f, broken = bits >= 0x7f800000u;
    if (none || broken) inverse = 0.0f;
    int q = __float2int_rn(v * inverse), sum = __reduce_add_sync(0xffffffffu, q);
    p.q[(u64)row * a.width0 + block * 32 + lane] = (u8)q;
    if (lane != 0) return;
    float scale = none ? 0.0f : top * (1.0f / 127.0f);
    if (broken) scale = __int_as_float(0x7fc00000);
    p.scales[(u64)block * a.to_stride + row] = scale;
    p.sums[(u64)block * a.to_stride + row] = scale * (float)sum;
}

// What is added to output `out` of the thread's rows.
__device__ inline void residuals(const ProductArgs& a, const Places& p, const Share& s, float (&add)[OWN], u32 first_out, u32 first_row) {
    u32 out = first_out + threadIdx.x % OUTS;
    // Rows of a step are fewer than 2^32 / width.
    const float* from = p.residual + (u64)(a.base + first_row) * a.width0 + a.before + out;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) add[i] = p.residual && out < a.outs && s.has(i, OWN) ? from[(u64)s.row(i) * a.width0] : 0.0f;
}

// Sums of the thread's rows to where they go.
__device__ inline void finish_rows(const ProductArgs& a, const Places& p, const Share& s, float (&v)[OWN], const float (&add)[OWN], float bias, float norm, u32 first_out, u32 first_row) {
    u32 out = first_out + threadIdx.x % OUTS, lane = threadIdx.x % 32;
    if (out >= a.outs) return;
    out += a.before;
    first_row += a.base;
    float* to = p.y0;
    u32 width = a.width0, at = out;
    if (out >= a.cut1) to = p.y2, width = a.width2, at = out - a.cut1;
    else if (out >= a.cut0) to = p.y1, width = a.width1, at = out - a.cut0;
    to += (u64)first_row * width + at;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        float x = (v[i] + bias) * a.scale;
        if (a.softcap != 0.0f) x = a.softcap * tanhf(x / a.softcap);
        v[i] = x + add[i];
        if (s.has(i, OWN)) to[(u64)s.row(i) * width] = v[i];
    }
    if (a.epi != EPI_NORM) return;
    // Whole warps stay together: 32 outputs are one block of a row.
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        if (!s.has(i, OWN)) break;
        u32 row = first_row + s.row(i);
        float square = warp_sum(v[i] * v[i]);
        if (lane == 0) p.squares[(u64)(out / 32) * a.to_stride + row] = square;
        round_block(a, p, v[i] * norm, out / 32, row, lane);
    }
}

// Sums of the thread's pairs.
__device__ inline void finish_pairs(const ProductArgs& a, const Places& p, const Share& s, const float (&gate)[OWN_PAIRS], const float (&up)[OWN_PAIRS], u32 first_out, u32 first_row) {
    u32 at = first_out + 2 * (threadIdx.x % (OUTS / 2));
    float2 bias = {0.0f, 0.0f};
    if (p.bias && at < a.outs) bias = {p.bias[at], p.bias[at + 1]};
#pragma unroll
    for (u32 i = 0; i < OWN_PAIRS; i++) {
        // Whole warps stay together: 32 pairs are one row's.
        if (!s.has(i, OWN_PAIRS)) break;
        float v = gate_of(a, gate[i] + bias.x, up[i] + bias.y);
        u32 row = a.base + first_row + s.row(i);
        if (a.epi == EPI_ROUND) round_block(a, p, v, at / 64, row, threadIdx.x % 32);
        else if (at < a.outs) p.y0[(u64)row * a.width0 + at / 2] = v;
    }
}

// Parts of the columns are the blocks of a cluster. Each sends what it has to the block that finishes it, into a place of
// its own, [part][share][thread].
template <u32 PARTS, u32 MOST>
static const u32 SHARES = MOST >= PARTS ? MOST / PARTS : 1;
template <u32 PARTS, u32 MOST>
__device__ inline void send(u32 sent, u32 part, const float* v) {
#pragma unroll
    for (u32 i = 0; i < MOST; i++) {
        u32 at = sent + ((part * SHARES<PARTS, MOST> + i / PARTS) * THREADS + threadIdx.x) * 4;
        put_shared_of_block(of_block(at, i % PARTS), v[i]);
    }
}
// Adds what was sent, in the order of the parts.
template <u32 PARTS, u32 MOST>
__device__ inline void add_sent(u32 sent, float* v) {
#pragma unroll
    for (u32 i = 0; i < SHARES<PARTS, MOST>; i++) {
        v[i] = 0.0f;
#pragma unroll
        for (u32 z = 0; z < PARTS; z++) v[i] += __uint_as_float(shared4(sent + ((z * SHARES<PARTS, MOST> + i) * THREADS + threadIdx.x) * 4));
    }
}
template <u32 PARTS>
__device__ inline void exchange(u32 sent, u32 part, bool rows, float (&v)[OWN]) {
    u32 up = sent + PARTS * SHARES<PARTS, OWN_PAIRS> * THREADS * 4;
    // All have begun, so their memory is there.
    cluster_await();
    if (rows) {
        send<PARTS, OWN>(sent, part, v);
    } else {
        send<PARTS, OWN_PAIRS>(sent, part, v);
        send<PARTS, OWN_PAIRS>(up, part, v + OWN_PAIRS);
    }
    cluster_arrive();
    cluster_await();
    if (rows) {
        add_sent<PARTS, OWN>(sent, v);
    } else {
        add_sent<PARTS, OWN_PAIRS>(sent, v);
        add_sent<PARTS, OWN_PAIRS>(up, v + OWN_PAIRS);
    }
}

// blockIdx.x: tile of outputs, then part of the columns; blockIdx.y: tile of rows. `partial` holds what parts have, [tile][part][row][out].
template <class W>
__device__ inline void product(const ProductArgs& a, const u8* w, const u8* x, const float* scales, const float* sums,
                               const float* squares, const Places& p, float* partial, u32* arrived) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ bool last;
    __shared__ float square[QUARTERS][TOKENS];
    u32 t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, c = lane % 4;
    u32 tile_x = blockIdx.x / a.splits, split = blockIdx.x % a.splits, first_out = tile_x * OUTS, first_row = blockIdx.y * TOKENS;
    if (!EAGER) let_next_begin();
    bool rows = a.epi == EPI_ROWS || a.epi == EPI_NORM, whole = a.splits == 1, together = IN_CLUSTERS && !whole;
    // A pair is a thread's own, gate in the first half of its sums and up in the second, or an output is.
    u32 step = rows ? EVERY : EVERY_PAIR, from = rows ? t / OUTS : t / (OUTS / 2);
    Share share = {together ? split : 0, together ? a.splits : 1, from, step, min(TOKENS, a.rows - first_row)};
    if (together) cluster_arrive();
    float acc[2][COLUMNS][4] = {}, add[OWN] = {};
    Matrix m = {w, a.nb, a.outs, first_out, 0};
    float bias, norm;
    auto constants = [&] {
        u32 out = min(first_out + t % OUTS, a.outs - 1) + a.before;
        bias = rows && p.bias ? early(p.bias + out) : 0.0f;
        norm = a.epi == EPI_NORM ? early(p.norm + out) : 0.0f;
    };
    if (EARLY) constants();
    auto ahead = [&] {
        if (EARLY && rows) residuals(a, p, share, add, first_out, first_row);
    };
    steps<W>(a, m, first_row, shared_address(room), x, scales, sums, squares, square, acc, ahead);
    make_factors(a, square);
    float* have = (float*)room;
#pragma unroll
    for (u32 k = 0; k < 2; k++)
#pragma unroll
        for (u32 n = 0; n < COLUMNS; n++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 out = warp % WIDE * 32 + k * 16 + j / 2 * 8 + g, row = n * 8 + 2 * c + j % 2;
                have[(warp / WIDE * TOKENS + row) * PITCH + out] = acc[k][n][j];
            }
    __syncthreads();
    // Of all warps with the same outputs, in their order.
    float v[OWN];
    auto out_of = [&](u32 i) { return rows ? t % OUTS : 2 * (t % (OUTS / 2)) + i / OWN_PAIRS; };
    auto row_of = [&](u32 i) { return from + (rows ? i : i % OWN_PAIRS) * step; };
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        v[i] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) v[i] += have[(d * TOKENS + row_of(i)) * PITCH + out_of(i)];
    }
    if (together) {
        u32 sent = shared_address(room) + WORK<W>;
        if (a.splits == 2) exchange<2>(sent, split, rows, v);
        else if (a.splits == 4) exchange<4>(sent, split, rows, v);
        else exchange<8>(sent, split, rows, v);
    } else if (!whole) {
        u32 tile = blockIdx.y * (gridDim.x / a.splits) + tile_x;
        float* parts = partial + (u64)tile * a.splits * TOKENS * OUTS;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) parts[(split * OWN + i) * THREADS + t] = v[i];
        __threadfence();
        __syncthreads();
        if (t == 0) {
            last = atomicAdd(arrived + tile, 1) == a.splits - 1;
            if (last) arrived[tile] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!last) return;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) v[i] = 0.0f;
#pragma unroll 2
        for (u32 z = 0; z < a.splits; z++)
#pragma unroll
            for (u32 i = 0; i < OWN; i++) v[i] += __ldcg(parts + (z * OWN + i) * THREADS + t);
    }
    if (a.normed) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) v[i] *= square[0][min(share.row(rows ? i : i % OWN_PAIRS), TOKENS - 1)];
    }
    if (rows) {
        if (!EARLY) {
            constants();
            residuals(a, p, share, add, first_out, first_row);
        }
        finish_rows(a, p, share, v, add, bias, norm, first_out, first_row);
    } else {
        float gate[OWN_PAIRS], up[OWN_PAIRS];
#pragma unroll
        for (u32 i = 0; i < OWN_PAIRS; i++) gate[i] = v[i], up[i] = v[OWN_PAIRS + i];
        finish_pairs(a, p, share, gate, up, first_out, first_row);
    }
}

#define ENTRY(W, suffix, number)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)                                               \
        product_##suffix(ProductArgs a, const u8* w, const u8* x, const float* scales, const float* sums,             \
                         const float* squares, const float* bias, const float* residual, const float* norm,            \
                         float* y0, float* y1, float* y2, u8* q, float* to_scales, float* to_sums, float* to_squares,  \
                         float* partial, u32* arrived) {                                                               \
        Places p = {bias, residual, norm, y0, y1, y2, q, to_scales, to_sums, to_squares};                              \
        product<M_##W>(a, w, x, scales, sums, squares, p, partial, arrived);                                           \
    }
EACH_PLANED(ENTRY)
