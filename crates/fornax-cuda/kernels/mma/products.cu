// y = W·x for several rows at a time, out of planes, on the tensor cores' 8-bit products: what batches are made of.
//
// A block takes OUTS outputs of TOKENS rows, and one of `splits` parts of the columns. Columns come in steps of eight
// blocks of 32, copied to a ring of shared memory; WIDE warps share the outputs, and each of the others takes blocks of its
// own, so that a warp multiplies 32 outputs by all rows of the tile, block after block: the sum of a block is exact, its
// scales multiply it in f32, and what warps and parts have is added in one order. Nothing of that depends on how many
// rows there are, so a row gets the same numbers in every batch.
#include "../tensor.cuh"

#ifndef TOKENS
#define TOKENS 64
#define WIDE 1
#define STAGES 4
#define THREADS_AT_ONCE 256
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

// Shared memory of a step: plane A of the weights, 128 bytes a row, plane B, fifth bits, scales (so many bytes a row); then
// numbers, scales and sums of the rows. src/rows/space.rs counts the same.
template <u32 B, u32 H, u32 S>
struct Space {
    static const u32 H_ROW = H, S_ROW = S, B_AT = OUTS * 128, H_AT = B_AT + OUTS * B, S_AT = H_AT + OUTS * H;
    static const u32 X_AT = S_AT + OUTS * S, D_AT = X_AT + TOKENS * 256, M_AT = D_AT + STEP * TOKENS * 4;
    static const u32 BYTES = M_AT + STEP * TOKENS * 4;
};

__device__ inline u32 swizzled(u32 row, u32 part) { return row * 128 + ((part ^ (row & 7)) << 4); }

// The threads' shares of `count` items, as many for each but at the end.
#define EACH_ITEM(i, count)                                                                                            \
    _Pragma("unroll") for (u32 k = 0; k < ((count) + THREADS - 1) / THREADS; k++)                                      \
        if (u32 i = threadIdx.x + k * THREADS; (count) % THREADS == 0 || i < (count))

// Copies plane A, or the second half of Q8_0: 16 bytes a block.
__device__ inline void copy_plane(u32 to, const u8* plane, u32 first, u32 outs, u32 nb, u32 from) {
    EACH_ITEM(i, OUTS * STEP) {
        u32 row = i / STEP, b = i % STEP;
        bool there = first + row < outs && from + b < nb;
        u32 blk = there ? (first + row) * nb + from + b : 0;
        copy16_if(to + swizzled(row, b), plane + (u64)blk * 16, there);
    }
}
// Copies `WORDS` words a row from `plane` + row · row_bytes + at to rows of STRIDE bytes; those from `end` on are zero.
template <u32 WORDS, u32 STRIDE>
__device__ inline void copy_words(u32 to, const u8* plane, u32 row_bytes, u32 at, u32 end, u32 first, u32 outs) {
    EACH_ITEM(i, OUTS * WORDS) {
        u32 row = i / WORDS, w = i % WORDS;
        bool there = first + row < outs && at + 4 * w < end;
        copy4_if(to + row * STRIDE + w * 4, there ? plane + (u64)(first + row) * row_bytes + (at + 4 * w) : plane, there);
    }
}

struct Matrix {
    const u8* w;
    u32 nb, outs, first, from;  // of the tile: first output, first block of the step
    __device__ u64 blocks() const { return (u64)nb * outs; }
    __device__ u32 even() const { return nb + (nb & 1); }
};

// Of a warp: where its 32 rows begin in the step, and which block it takes.
struct Spot {
    u32 stage, row, b, lane;
};

__device__ inline u32 nibble_low(u32 v) { return v & 0x0f0f0f0fu; }
__device__ inline u32 nibble_high(u32 v) { return v >> 4 & 0x0f0f0f0fu; }
// Subtracts the same small number from every byte; no borrow crosses, whatever the bytes up to 63 are.
__device__ inline u32 less(u32 v, u32 each) { return ((v | 0x80808080u) - each) ^ 0x80808080u; }

// Fragments of 32 outputs of one block: two of 16 rows.
struct Pair {
    u32 a[2][4];
};

// Nibbles of both halves; matrices: rows 0–7 and 8–15 of the first 16, then of the second.
__device__ inline Pair nibbles(const Spot& s) {
    u32 r[4], row = s.row + s.lane % 32;
    load_matrices(r, s.stage + swizzled(row, s.b));
    Pair p;
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        p.a[m][0] = nibble_low(r[2 * m]);
        p.a[m][1] = nibble_low(r[2 * m + 1]);
        p.a[m][2] = nibble_high(r[2 * m]);
        p.a[m][3] = nibble_high(r[2 * m + 1]);
    }
    return p;
}
// `at` is where the fifth bits begin.
__device__ inline void add_fifths(Pair& p, const Spot& s, u32 at) {
    u32 g = s.lane / 4, t = s.lane % 4;
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 h = shared4(s.stage + at + (s.row + m * 16 + i * 8 + g) * 32 + s.b * 4);
            p.a[m][i] |= fifths(h >> 4 * t);
            p.a[m][2 + i] |= fifths(h >> (16 + 4 * t));
        }
}
// Scale i is that of rows g, g + 8, g + 16, g + 24.
#define EACH_ROW(i) _Pragma("unroll") for (u32 i = 0; i < 4; i++)
__device__ inline u32 row_of(const Spot& s, u32 i) { return s.row + i * 8 + s.lane / 4; }

// One half a block.
__device__ inline void one_scale(const Spot& s, u32 at, float (&d)[4]) {
    EACH_ROW(i) d[i] = half_to_float((u16)shared2(s.stage + at + row_of(s, i) * 16 + s.b * 2));
}
// Scale and minimum, two halves a block.
__device__ inline void two_scales(const Spot& s, u32 at, float (&d)[4], float (&m)[4]) {
    EACH_ROW(i) {
        u32 v = shared4(s.stage + at + row_of(s, i) * 32 + s.b * 4);
        d[i] = half_to_float((u16)(v & 0xffff));
        m[i] = half_to_float((u16)(v >> 16));
    }
}
// The header of eight blocks.
__device__ inline void header_scales(const Spot& s, u32 at, float (&d)[4], float (&m)[4]) {
    EACH_ROW(i) {
        Vec4 h = shared16(s.stage + at + row_of(s, i) * 16);
        u32 scale, min;
        scale_min_of(h.y, h.z, h.w, s.b, scale, min);
        d[i] = half_to_float((u16)(h.x & 0xffff)) * (float)scale;
        m[i] = -half_to_float((u16)(h.x >> 16)) * (float)min;
    }
}

struct M_Q8_0 : Space<128, 0, 16> {
    static const bool MINS = false, TWO = false, EXACT = true;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_plane(to + B_AT, m.w + m.blocks() * 16, m.first, m.outs, m.nb, m.from);
        copy_words<4, 16>(to + S_AT, m.w + m.blocks() * 32, m.even() * 2, m.from * 2, m.nb * 2, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p;
        u32 plane = s.lane < 16 ? 0 : B_AT;
#pragma unroll
        for (u32 m = 0; m < 2; m++) load_matrices(p.a[m], s.stage + plane + swizzled(s.row + m * 16 + s.lane % 16, s.b));
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&)[4]) { one_scale(s, S_AT, d); }
};

struct M_Q4_0 : Space<0, 0, 16> {
    static const bool MINS = false, TWO = false, EXACT = true;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<4, 16>(to + S_AT, m.w + m.blocks() * 16, m.even() * 2, m.from * 2, m.nb * 2, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
#pragma unroll
        for (u32 i = 0; i < 8; i++) p.a[i / 4][i % 4] = less(p.a[i / 4][i % 4], 0x08080808u);
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&)[4]) { one_scale(s, S_AT, d); }
};

struct M_Q5_0 : Space<0, 32, 16> {
    static const bool MINS = false, TWO = false, EXACT = true;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<8, 32>(to + H_AT, m.w + m.blocks() * 16, m.nb * 4, m.from * 4, m.nb * 4, m.first, m.outs);
        copy_words<4, 16>(to + S_AT, m.w + m.blocks() * 20, m.even() * 2, m.from * 2, m.nb * 2, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
        add_fifths(p, s, H_AT);
#pragma unroll
        for (u32 i = 0; i < 8; i++) p.a[i / 4][i % 4] = less(p.a[i / 4][i % 4], 0x10101010u);
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&)[4]) { one_scale(s, S_AT, d); }
};

struct M_Q4_1 : Space<0, 0, 32> {
    static const bool MINS = true, TWO = false, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<8, 32>(to + S_AT, m.w + m.blocks() * 16, m.nb * 4, m.from * 4, m.nb * 4, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) { return nibbles(s); }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&m)[4]) { two_scales(s, S_AT, d, m); }
};

struct M_Q5_1 : Space<0, 32, 32> {
    static const bool MINS = true, TWO = false, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<8, 32>(to + H_AT, m.w + m.blocks() * 16, m.nb * 4, m.from * 4, m.nb * 4, m.first, m.outs);
        copy_words<8, 32>(to + S_AT, m.w + m.blocks() * 20, m.nb * 4, m.from * 4, m.nb * 4, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
        add_fifths(p, s, H_AT);
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&m)[4]) { two_scales(s, S_AT, d, m); }
};

struct M_Q4_K : Space<0, 0, 16> {
    static const bool MINS = true, TWO = false, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<4, 16>(to + S_AT, m.w + m.blocks() * 16, m.nb * 2, m.from * 2, m.nb * 2, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) { return nibbles(s); }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&m)[4]) { header_scales(s, S_AT, d, m); }
};

struct M_Q5_K : Space<0, 32, 16> {
    static const bool MINS = true, TWO = false, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<8, 32>(to + H_AT, m.w + m.blocks() * 16, m.nb * 4, m.from * 4, m.nb * 4, m.first, m.outs);
        copy_words<4, 16>(to + S_AT, m.w + m.blocks() * 20, m.nb * 2, m.from * 2, m.nb * 2, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
        add_fifths(p, s, H_AT);
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&m)[4]) { header_scales(s, S_AT, d, m); }
};

// Two scales a block: `d` of the first half, `m` of the second.
struct M_Q6_K : Space<0, 64, 32> {
    static const bool MINS = false, TWO = true, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        copy_words<16, 64>(to + H_AT, m.w + m.blocks() * 16, m.nb * 8, m.from * 8, m.nb * 8, m.first, m.outs);
        copy_words<4, 32>(to + S_AT, m.w + m.blocks() * 24, m.nb * 2, m.from * 2, m.nb * 2, m.first, m.outs);
        // One half for eight blocks, the second of its word for every other step.
        u32 supers = m.nb / 8, row_bytes = 2 * (supers + (supers & 1)), at = m.from / 8 * 2 & ~3u;
        copy_words<1, 32>(to + S_AT + 16, m.w + m.blocks() * 26, row_bytes, at, row_bytes, m.first, m.outs);
        if (threadIdx.x < OUTS) asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + S_AT + threadIdx.x * 32 + 20), "r"(m.from / 8 & 1) : "memory");
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
        u32 t = s.lane % 4;
        EACH_ROW(i) {
            u32 at = s.stage + H_AT + row_of(s, i) * 64 + s.b * 8, h0 = shared4(at), h1 = shared4(at + 4);
            u32 x = __funnelshift_r(h0 << 4, h0 >> 28, 2 * t) & 0x30303030u, y = __funnelshift_r(h1 << 4, h1 >> 28, 2 * t) & 0x30303030u;
            p.a[i / 2][i % 2] = less(p.a[i / 2][i % 2] | x, 0x20202020u);
            p.a[i / 2][2 + i % 2] = less(p.a[i / 2][2 + i % 2] | y, 0x20202020u);
        }
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&m)[4]) {
        EACH_ROW(i) {
            u32 at = s.stage + S_AT + row_of(s, i) * 32, sc = shared2(at + s.b * 2);
            float all = half_to_float((u16)shared2(at + 16 + shared4(at + 20) * 2));
            d[i] = all * (float)(signed char)(sc & 255);
            m[i] = all * (float)(signed char)(sc >> 8);
        }
    }
};

struct M_MXFP4 : Space<0, 0, 8> {
    static const bool MINS = false, TWO = false, EXACT = false;
    __device__ static void copy(u32 to, const Matrix& m) {
        copy_plane(to, m.w, m.first, m.outs, m.nb, m.from);
        u32 row_bytes = m.nb + (-m.nb & 3);
        copy_words<2, 8>(to + S_AT, m.w + m.blocks() * 16, row_bytes, m.from, m.nb, m.first, m.outs);
    }
    __device__ static Pair fragments(const Spot& s) {
        Pair p = nibbles(s);
#pragma unroll
        for (u32 i = 0; i < 8; i++) p.a[i / 4][i % 4] = P_MXFP4::doubled(p.a[i / 4][i % 4]);
        return p;
    }
    __device__ static void scales(const Spot& s, float (&d)[4], float (&)[4]) {
        EACH_ROW(i) d[i] = P_MXFP4::scale(shared1(s.stage + S_AT + row_of(s, i) * 8 + s.b));
    }
};

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
#pragma unroll 8
    for (u32 b = quarter; b < a.nb; b += QUARTERS) sum += __ldcg(from + b * a.stride);
    to[quarter][row] = sum;
}
// The factor of the norm, into the first quarter.
__device__ inline void make_factors(const ProductArgs& a, float (&sums)[QUARTERS][TOKENS]) {
    u32 row = threadIdx.x;
    if (!a.normed || row >= TOKENS) return;
    float square = (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
    sums[0][row] = rsqrtf(square / (float)(a.nb * 32) + a.eps);
}

template <class W>
__device__ inline void steps(const ProductArgs& a, Matrix m, u32 first, u32 room, const u8* x, const float* scales,
                             const float* sums, const float* squares, float (&square)[QUARTERS][TOKENS],
                             float (&acc)[2][COLUMNS][4]) {
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
    next = begin;
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; i++) fetch(false, true);
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
// What a thread finishes: one output, or pair of outputs, of every `EVERY`th row.
static const u32 EVERY = THREADS / OUTS, OWN = TOKENS * OUTS / THREADS, EVERY_PAIR = 2 * EVERY, OWN_PAIRS = OWN / 2;

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

// Output `out` of all rows of the tile that are the thread's.
__device__ inline void put(const ProductArgs& a, const Places& p, float (&v)[OWN], u32 out, u32 first_row, u32 rows) {
    out += a.before;
    float bias = p.bias ? __ldg(p.bias + out) : 0.0f, add[OWN];
    float* to = p.y0;
    u32 width = a.width0, at = out, from = threadIdx.x / OUTS;
    if (out >= a.cut1) to = p.y2, width = a.width2, at = out - a.cut1;
    else if (out >= a.cut0) to = p.y1, width = a.width1, at = out - a.cut0;
    // Rows of a step are fewer than 2^32 / width.
    const float* residual = p.residual + (u64)(first_row + from) * a.width0 + out;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) add[i] = p.residual && from + i * EVERY < rows ? residual[(u64)i * EVERY * a.width0] : 0.0f;
    to += (u64)(first_row + from) * width + at;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        float x = (v[i] + bias) * a.scale;
        if (a.softcap != 0.0f) x = a.softcap * tanhf(x / a.softcap);
        v[i] = x + add[i];
        if (from + i * EVERY < rows) to[(u64)i * EVERY * width] = v[i];
    }
    if (a.epi != EPI_NORM) return;
    // Whole warps stay together: 32 outputs are one block of a row.
    float norm = __ldg(p.norm + out);
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        if (from + i * EVERY >= rows) break;
        u32 row = first_row + from + i * EVERY, lane = threadIdx.x % 32;
        float square = warp_sum(v[i] * v[i]);
        if (lane == 0) p.squares[(u64)(out / 32) * a.to_stride + row] = square;
        round_block(a, p, v[i] * norm, out / 32, row, lane);
    }
}

// Sums of the thread's outputs to where they go.
__device__ inline void finish_rows(const ProductArgs& a, const Places& p, float (&v)[OWN], u32 first_out, u32 first_row) {
    u32 out = threadIdx.x % OUTS;
    if (first_out + out < a.outs) put(a, p, v, first_out + out, a.base + first_row, min(TOKENS, a.rows - first_row));
}

// Sums of the thread's pairs.
__device__ inline void finish_pairs(const ProductArgs& a, const Places& p, const float (&gate)[OWN_PAIRS], const float (&up)[OWN_PAIRS], u32 first_out, u32 first_row) {
    u32 pair = threadIdx.x % (OUTS / 2), from = threadIdx.x / (OUTS / 2), at = first_out + 2 * pair;
    u32 rows = min(TOKENS, a.rows - first_row), to = a.base + first_row + from;
    float2 bias = {0.0f, 0.0f};
    if (p.bias && at < a.outs) bias = {p.bias[at], p.bias[at + 1]};
#pragma unroll
    for (u32 i = 0; i < OWN_PAIRS; i++) {
        // Whole warps stay together: 32 pairs are one row's.
        if (from + i * EVERY_PAIR >= rows) break;
        float v = gate_of(a, gate[i] + bias.x, up[i] + bias.y);
        u32 row = to + i * EVERY_PAIR;
        if (a.epi == EPI_ROUND) round_block(a, p, v, at / 64, row, threadIdx.x % 32);
        else if (at < a.outs) p.y0[(u64)row * a.width0 + at / 2] = v;
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
    let_next_begin();
    float acc[2][COLUMNS][4] = {};
    Matrix m = {w, a.nb, a.outs, first_out, 0};
    steps<W>(a, m, first_row, shared_address(room), x, scales, sums, squares, square, acc);
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
    bool rows = a.epi == EPI_ROWS || a.epi == EPI_NORM, whole = a.splits == 1;
    // A pair is a thread's own, gate in the first half of its sums and up in the second, or an output is.
    u32 step = rows ? EVERY : EVERY_PAIR, from = rows ? t / OUTS : t / (OUTS / 2);
    auto out_of = [&](u32 i) { return rows ? t % OUTS : 2 * (t % (OUTS / 2)) + i / OWN_PAIRS; };
    auto row_of = [&](u32 i) { return from + (rows ? i : i % OWN_PAIRS) * step; };
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        v[i] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) v[i] += have[(d * TOKENS + row_of(i)) * PITCH + out_of(i)];
    }
    if (!whole) {
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
        for (u32 i = 0; i < OWN; i++) v[i] *= square[0][row_of(i)];
    }
    if (rows) {
        finish_rows(a, p, v, first_out, first_row);
        return;
    }
    float gate[OWN_PAIRS], up[OWN_PAIRS];
#pragma unroll
    for (u32 i = 0; i < OWN_PAIRS; i++) gate[i] = v[i], up[i] = v[OWN_PAIRS + i];
    finish_pairs(a, p, gate, up, first_out, first_row);
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
