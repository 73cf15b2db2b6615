// The formats of weights as the products of batches read them: what of a step goes to shared memory, and what a warp makes
// of it, numbers as fragments and scales. Included behind the constants of a tile, which products.cu has.
#pragma once

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
// Both of a block with fifth bits.
__device__ inline Pair with_fifths(const Spot& s, u32 at) {
    Pair p = nibbles(s);
    add_fifths(p, s, at);
    return p;
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
        Pair p = with_fifths(s, H_AT);
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
    __device__ static Pair fragments(const Spot& s) { return with_fifths(s, H_AT); }
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
    __device__ static Pair fragments(const Spot& s) { return with_fifths(s, H_AT); }
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
