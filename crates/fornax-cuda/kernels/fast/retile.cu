// GGUF blocks into planes (planes.cuh), once at load. A thread takes one block of 32 weights of one row.
//
// from: rows × nb blocks as the file has them. A row goes to row base + row · step of a matrix of `all` rows, so that
// matrices that are read together become one: one after the other, or row by row in turn.
#include "../planes.cuh"

struct RetileArgs {
    u32 rows, nb, base, step, all;
};

__device__ inline void put_bytes(u8* to, const u8* from, u32 n) {
    for (u32 i = 0; i < n; i++) to[i] = from[i];
}

template <class W>
struct Tile;

template <>
struct Tile<P_Q8_0> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 34;
        put_bytes(w + (u64)p.blk * 16, from + 2, 16);
        put_bytes(w + p.blocks * 16 + (u64)p.blk * 16, from + 18, 16);
        put_bytes(w + p.blocks * 32 + (u64)p.even() * 2, from, 2);
    }
};
template <>
struct Tile<P_Q4_0> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 18;
        put_bytes(w + (u64)p.blk * 16, from + 2, 16);
        put_bytes(w + p.blocks * 16 + (u64)p.even() * 2, from, 2);
    }
};
template <>
struct Tile<P_Q4_1> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 20;
        put_bytes(w + (u64)p.blk * 16, from + 4, 16);
        put_bytes(w + p.blocks * 16 + (u64)p.blk * 4, from, 4);
    }
};
template <>
struct Tile<P_Q5_0> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 22;
        put_bytes(w + (u64)p.blk * 16, from + 6, 16);
        put_bytes(w + p.blocks * 16 + (u64)p.blk * 4, from + 2, 4);
        put_bytes(w + p.blocks * 20 + (u64)p.even() * 2, from, 2);
    }
};
template <>
struct Tile<P_Q5_1> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 24;
        put_bytes(w + (u64)p.blk * 16, from + 8, 16);
        put_bytes(w + p.blocks * 16 + (u64)p.blk * 4, from + 4, 4);
        put_bytes(w + p.blocks * 20 + (u64)p.blk * 4, from, 4);
    }
};
template <>
struct Tile<P_MXFP4> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)b * 17;
        put_bytes(w + (u64)p.blk * 16, from + 1, 16);
        w[p.blocks * 16 + P_MXFP4::padded(p)] = from[0];
    }
};

// The nibbles of sub-block j, 32 bytes of which hold two sub-blocks each.
__device__ inline void put_nibbles(u8* to, const u8* q, u32 high) {
    for (u32 i = 0; i < 16; i++) {
        u32 low = high ? q[i] >> 4 : q[i] & 15, up = high ? q[i + 16] >> 4 : q[i + 16] & 15;
        to[i] = (u8)(low | up << 4);
    }
}
template <>
struct Tile<P_Q4_K> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)(b / 8) * 144;
        u32 j = b & 7;
        put_nibbles(w + (u64)p.blk * 16, from + 16 + (j >> 1) * 32, j & 1);
        put_bytes(w + p.blocks * 16 + (u64)p.blk * 2, from + 2 * j, 2);
    }
};
template <>
struct Tile<P_Q5_K> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)(b / 8) * 176;
        u32 j = b & 7, h = 0;
        put_nibbles(w + (u64)p.blk * 16, from + 48 + (j >> 1) * 32, j & 1);
        for (u32 e = 0; e < 32; e++) h |= (u32)(from[16 + e] >> j & 1) << e;
        *(u32*)(w + p.blocks * 16 + (u64)p.blk * 4) = h;
        put_bytes(w + p.blocks * 20 + (u64)p.blk * 2, from + 2 * j, 2);
    }
};
template <>
struct Tile<P_Q6_K> {
    __device__ static void put(u8* w, const Where& p, const u8* row, u32 b) {
        const u8* from = row + (u64)(b / 8) * 210;
        u32 j = b & 7, half = j >> 2, quarter = j & 3;
        put_nibbles(w + (u64)p.blk * 16, from + half * 64 + (quarter & 1) * 32, quarter & 2);
        u8* h = w + p.blocks * 16 + (u64)p.blk * 8;
        for (u32 k = 0; k < 8; k++) {
            u32 v = 0;
            for (u32 i = 0; i < 4; i++) {
                u32 e = (k & 4) * 4 + 4 * i + (k & 3);
                v |= (u32)(from[128 + half * 32 + e] >> (2 * quarter) & 3) << (2 * i);
            }
            h[k] = (u8)v;
        }
        put_bytes(w + p.blocks * 24 + (u64)p.blk * 2, from + 192 + half * 8 + quarter * 2, 2);
        if (j == 0) put_bytes(w + P_Q6_K::d_at(p), from + 208, 2);
    }
};

template <class W>
__device__ void retile(const RetileArgs& a, const u8* from, u64 row_bytes, u8* to) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)a.rows * a.nb) return;
    u32 row = (u32)(i / a.nb), b = (u32)(i % a.nb), into = a.base + row * a.step;
    Where p = {to, (u64)a.all * a.nb, a.all, a.nb, into, into * a.nb + b};
    Tile<W>::put(to, p, from + row * row_bytes, b);
}

#define ENTRY(W, suffix, number)                                                                                       \
    extern "C" __global__ void retile_##suffix(RetileArgs a, const u8* from, u8* to, u64 row_bytes) {                  \
        retile<P_##W>(a, from, row_bytes, to);                                                                         \
    }
EACH_PLANED(ENTRY)
