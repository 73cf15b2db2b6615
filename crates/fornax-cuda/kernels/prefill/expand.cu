// A matrix out of planes as tiles of halves, for the products of long prompts: once for each of them, into memory that the
// next matrix takes over. A thread takes one block of 32 weights; a warp eight of each of four rows, so that it reads and
// writes whole lines. A weight is rounded once, from the f32 value that its format gives.
#include "../tensor.cuh"
#include "../tiles.cuh"

struct ExpandArgs {
    u32 nb, outs;
};

// Element e is q[e] · d[e / 16] + m.
struct Open {
    Vec4 q[2];
    float d[2], m;
};

__device__ inline Vec4 plane(const u8* p, u64 at) { return global16(p + at * 16); }
__device__ inline void same(Open& o, float d, float m) { o.d[0] = o.d[1] = d, o.m = m; }
__device__ inline void nibbles(Open& o, const Where& p) {
    Vec4 v = plane(p.w, p.blk);
    o.q[0] = low_nibbles(v);
    o.q[1] = high_nibbles(v);
}
__device__ inline void fifth_bits(Open& o, const Where& p) {
    u32 h = *(const u32*)(p.w + p.blocks * 16 + (u64)p.blk * 4);
    o.q[0] = with_fifths(o.q[0], h);
    o.q[1] = with_fifths(o.q[1], h >> 16);
}
__device__ inline void header(Open& o, const u8* headers, u32 blk) {
    P_Q4_K k;
    k.header(global16(headers + (u64)(blk & ~7u) * 2), blk & 7);
    same(o, k.d, -k.m);
}

template <class W>
struct Opened;
template <>
struct Opened<P_Q8_0> {
    __device__ static void open(Open& o, const Where& p) {
        o.q[0] = plane(p.w, p.blk);
        o.q[1] = plane(p.w, p.blocks + p.blk);
        same(o, half_of(p.w + p.blocks * 32 + (u64)p.even() * 2), 0.0f);
    }
};
template <>
struct Opened<P_Q4_0> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        float d = half_of(p.w + p.blocks * 16 + (u64)p.even() * 2);
        same(o, d, -8.0f * d);
    }
};
template <>
struct Opened<P_Q4_1> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        const u8* d = p.w + p.blocks * 16 + (u64)p.blk * 4;
        same(o, half_of(d), half_of(d + 2));
    }
};
template <>
struct Opened<P_Q5_0> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        fifth_bits(o, p);
        float d = half_of(p.w + p.blocks * 20 + (u64)p.even() * 2);
        same(o, d, -16.0f * d);
    }
};
template <>
struct Opened<P_Q5_1> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        fifth_bits(o, p);
        const u8* d = p.w + p.blocks * 20 + (u64)p.blk * 4;
        same(o, half_of(d), half_of(d + 2));
    }
};
template <>
struct Opened<P_Q4_K> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        header(o, p.w + p.blocks * 16, p.blk);
    }
};
template <>
struct Opened<P_Q5_K> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        fifth_bits(o, p);
        header(o, p.w + p.blocks * 20, p.blk);
    }
};
template <>
struct Opened<P_Q6_K> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        const u32* h = (const u32*)(p.w + p.blocks * 16 + (u64)p.blk * 8);
        o.q[0] = P_Q6_K::six(o.q[0], h[0]);
        o.q[1] = P_Q6_K::six(o.q[1], h[1]);
        const signed char* scales = (const signed char*)(p.w + p.blocks * 24 + (u64)p.blk * 2);
        float d = half_of(p.w + P_Q6_K::d_at(p));
        o.d[0] = d * (float)scales[0];
        o.d[1] = d * (float)scales[1];
        o.m = 0.0f;
    }
};
template <>
struct Opened<P_MXFP4> {
    __device__ static void open(Open& o, const Where& p) {
        nibbles(o, p);
        o.q[0] = P_MXFP4::all(o.q[0]);
        o.q[1] = P_MXFP4::all(o.q[1]);
        same(o, P_MXFP4::scale(p.w[p.blocks * 16 + P_MXFP4::padded(p)]), 0.0f);
    }
};

template <class W>
__device__ void expand(const ExpandArgs& a, const u8* w, u8* to, int less) {
    u32 tiles = (a.nb + 1) / 2, row = blockIdx.y * 32 + threadIdx.x / 8, b = blockIdx.x * 8 + threadIdx.x % 8;
    bool there = row < a.outs && b < 2 * tiles;
    if (!there) row = 0, b = 0;
    u8* out = to + tile_at(row, 0, tiles) + (u64)(b / 2) * TILE_BYTES - (row & 7) * 16;
    let_next_begin();
    Open o = {};
    if (b < a.nb) {
        Where p = {w, (u64)a.outs * a.nb, a.outs, a.nb, row, row * a.nb + b};
        Opened<W>::open(o, p);
    }
    // The weights are nobody's, but the product in front still reads the matrix that is written over.
    await_before();
    if (!there) return;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 words[2] = {i & 1 ? o.q[i / 2].z : o.q[i / 2].x, i & 1 ? o.q[i / 2].w : o.q[i / 2].y};
        float f[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) f[k] = fmaf((float)((int)(signed char)(words[k / 4] >> 8 * (k % 4)) - less), o.d[i / 2], o.m);
        Vec4 v = {halves(f[0], f[1]), halves(f[2], f[3]), halves(f[4], f[5]), halves(f[6], f[7])};
        put_global16(out + ((b % 2 * 4 + i) ^ (row & 7)) * 16, v);
    }
}

template <class W>
struct Less {
    static const int BY = 0;
};
template <>
struct Less<P_Q6_K> {
    static const int BY = 32;
};

#define ENTRY(W, suffix, number)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) expand_##suffix(ExpandArgs a, const u8* w, u8* to) {             \
        expand<P_##W>(a, w, to, Less<P_##W>::BY);                                                                      \
    }
EACH_PLANED(ENTRY)
