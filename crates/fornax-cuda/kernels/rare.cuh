// The block formats that are seldom met: by the one way that serves any format, eight weights in a row at a time.
//
// `eight` decodes run `run` of a row, eight neighbouring weights of a block, as the scalar reference decodes them. Blocks
// start at even addresses and no better: nothing wider than two bytes is loaded whole. Odd addresses: bytes only.
#pragma once
#include "codebooks.cuh"
#include "weights.cuh"

struct AnyRare {};

template <class B, u32 LEN, u32 BYTES>
struct Rare : AnyRare {
    __device__ static u64 row_bytes(u32 cols) { return cols / LEN * (u64)BYTES; }
    // One weight: for the rows of an embedding, which are few.
    __device__ static float at(const u8* row, u32 i) {
        float w[8], v = 0.0f;
        B::eight(row, i / 8, w);
        for (u32 j = 0; j < 8; j++) v = j == i % 8 ? w[j] : v;
        return v;
    }
};

// Run `run` of a row in any format; zeroes past its end, which only plain numbers have within a run.
template <class W>
__device__ inline void run_of(const u8* row, u32 run, u32 cols, float* w) {
    if constexpr (__is_base_of(AnyRare, W)) {
        W::eight(row, run, w);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++) w[i] = 8 * run + i < cols ? W::at(row, 8 * run + i) : 0.0f;
    }
}

// The activations that belong to it. `wide`: rows begin at multiples of 16 bytes.
__device__ inline void run_of_x(const float* x, u32 run, u32 cols, bool wide, float* v) {
    if (wide && 8 * run + 8 <= cols) {
        float4 a = ((const float4*)x)[2 * run], b = ((const float4*)x)[2 * run + 1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) v[i] = 8 * run + i < cols ? x[8 * run + i] : 0.0f;
}

__device__ inline u32 pair_at(const u8* p, u32 i) { return ((const u16*)p)[i]; }

// Levels of E2M1, doubled.
__device__ const float FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Four bytes at an even address.
__device__ inline u32 word_at(const u8* p) {
    return pair_at(p, 0) | pair_at(p, 1) << 16;
}

// Two bits of each of eight bytes: w = d * bits + m.
__device__ inline void quarters(const u8* q, u32 shift, float d, float m, float* w) {
    for (u32 i = 0; i < 4; i++) {
        const u32 u = pair_at(q, i) >> shift;
        w[2 * i] = d * float(u & 3) + m;
        w[2 * i + 1] = d * float(u >> 8 & 3) + m;
    }
}

// scales:u8[16] qs:u8[64] d:half m:half; a byte of scales is of 16 weights, scale below and minimum above.
struct Q2_K : Rare<Q2_K, 256, 84> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 84 * (run / 32);
        const u32 group = run % 32 / 2, s = block[group];
        const float d = half_at(block + 80) * float(s & 15), m = half_at(block + 82) * float(s >> 4);
        quarters(block + 16 + group / 8 * 32 + group % 2 * 16 + run % 2 * 8, group % 8 / 2 * 2, d, -m, w);
    }
};

// hmask:u8[32] qs:u8[64] scales:u8[12] d:half; six-bit scales of 16 weights, a clear bit of hmask stands for -4.
struct Q3_K : Rare<Q3_K, 256, 110> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 110 * (run / 32);
        const u32 group = run % 32 / 2, at = group % 2 * 16 + run % 2 * 8, shift = group % 8 / 2 * 2;
        const u32 low = u32(block[96 + group % 8]) >> (group / 8 * 4) & 15;
        const u32 high = u32(block[104 + group % 4]) >> (group / 4 * 2) & 3;
        const float d = half_at(block + 108) * (float(low | high << 4) - 32.0f);
        const u8* qs = block + 32 + group / 8 * 32 + at;
        for (u32 i = 0; i < 8; i++) {
            const float q = float(u32(qs[i]) >> shift & 3);
            w[i] = d * ((u32(block[at + i]) >> (group / 2) & 1) != 0 ? q : q - 4.0f);
        }
    }
};

// Levels of the octets of two bits and of the quartets.
__device__ const float OCTET_LEVELS[4] = {8, 25, 43, 0};
__device__ const float QUARTET_LEVELS[8] = {4, 12, 20, 28, 36, 44, 52, 62};

// Seven stored signs, and an eighth that makes the number of set bits even.
__device__ inline u32 eight_signs(u32 seven) {
    return seven | (__popc(seven) & 1) << 7;
}

__device__ inline void octet(u32 code, u32 signs, float d, float* w) {
    for (u32 i = 0; i < 8; i++) {
        const float v = d * OCTET_LEVELS[code >> (2 * i) & 3];
        w[i] = (signs >> i & 1) != 0 ? -v : v;
    }
}

// d:half, then of each 32 weights four indices of a byte each and a word: four times seven signs, four bits of scale.
struct IQ2_XXS : Rare<IQ2_XXS, 256, 66> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 66 * (run / 32);
        const u8* part = block + 2 + run % 32 / 4 * 8;
        const u32 packed = word_at(part + 4), k = run % 4;
        const float d = half_at(block) * (0.5f + float(packed >> 28)) * 0.25f;
        octet(IQ2_XXS_CODES[part[k]], eight_signs(packed >> (7 * k) & 127), d, w);
    }
};

// d:half qs:u16[32] scales:u8[8]; nine bits of index and seven of signs, four bits of scale for 16 weights.
struct IQ2_XS : Rare<IQ2_XS, 256, 74> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 74 * (run / 32);
        const u32 k = run % 32, q = pair_at(block + 2, k);
        const u32 scale = u32(block[66 + k / 4]) >> (k % 4 / 2 * 4) & 15;
        const float d = half_at(block) * (0.5f + float(scale)) * 0.25f;
        octet(IQ2_XS_CODES[q & 511], eight_signs(q >> 9), d, w);
    }
};

// d:half qs:u8[32] signs:u8[32] qh:u8[8] scales:u8[8]
struct IQ2_S : Rare<IQ2_S, 256, 82> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 82 * (run / 32);
        const u32 k = run % 32, high = u32(block[66 + k / 4]) >> (k % 4 * 2) & 3;
        const u32 scale = u32(block[74 + k / 4]) >> (k % 4 / 2 * 4) & 15;
        const float d = half_at(block) * (0.5f + float(scale)) * 0.25f;
        octet(IQ2_S_CODES[block[2 + k] | high << 8], block[34 + k], d, w);
    }
};

// d:half qs:u8[64], then a word for each 32 weights: four times seven signs, four bits of scale.
struct IQ3_XXS : Rare<IQ3_XXS, 256, 98> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 98 * (run / 32);
        const u32 k = run % 32, packed = word_at(block + 66 + k / 4 * 4);
        const u32 signs = eight_signs(packed >> (7 * (k % 4)) & 127);
        const u32 codes = IQ3_XXS_CODES[block[2 + 2 * k]] | u32(IQ3_XXS_CODES[block[3 + 2 * k]]) << 16;
        const float d = half_at(block) * (0.5f + float(packed >> 28)) * 0.5f;
        for (u32 i = 0; i < 8; i++) {
            const float v = d * QUARTET_LEVELS[codes >> (4 * i) & 7];
            w[i] = (signs >> i & 1) != 0 ? -v : v;
        }
    }
};

// d:half qs:u8[64] qh:u8[8] signs:u8[32] scales:u8[4]; the levels are the odd numbers.
struct IQ3_S : Rare<IQ3_S, 256, 110> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 110 * (run / 32);
        const u32 k = run % 32, high = u32(block[66 + k / 4]) >> (k % 4 * 2), signs = block[74 + k];
        const u32 low = block[2 + 2 * k] | (high & 1) << 8, next = block[3 + 2 * k] | (high >> 1 & 1) << 8;
        const u32 codes = IQ3_S_CODES[low] | u32(IQ3_S_CODES[next]) << 16;
        const u32 scale = u32(block[106 + k / 8]) >> (k / 4 % 2 * 4) & 15;
        const float d = half_at(block) * float(1 + 2 * scale);
        for (u32 i = 0; i < 8; i++) {
            const float v = d * float(1 + 2 * (codes >> (4 * i) & 7));
            w[i] = (signs >> i & 1) != 0 ? -v : v;
        }
    }
};

// A ternary octet, moved by an eighth of a step up or, where `down`, down.
__device__ inline void ternary(u32 code, bool down, float d, float* w) {
    for (u32 i = 0; i < 8; i++) {
        w[i] = d * (float(code >> (2 * i) & 3) - (down ? 1.125f : 0.875f));
    }
}

// d:half qs:u8[32] qh:u16[8]; of qh four times three bits of index, three of scale, one of the move.
struct IQ1_S : Rare<IQ1_S, 256, 50> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 50 * (run / 32);
        const u32 k = run % 32, high = pair_at(block + 34, k / 4);
        const u32 index = block[2 + k] | (high >> (3 * (k % 4)) & 7) << 8;
        ternary(IQ1_CODES[index], (high & 0x8000) != 0, half_at(block) * float(2 * (high >> 12 & 7) + 1), w);
    }
};

// qs:u8[32] qh:u8[16] scales:u16[4]; the top halves of the scales make d, the rest are three bits for 16 weights.
struct IQ1_M : Rare<IQ1_M, 256, 56> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 56 * (run / 32);
        u32 bits = 0;
        for (u32 i = 0; i < 4; i++) {
            bits |= (pair_at(block + 48, i) >> 12) << (4 * i);
        }
        const u32 k = run % 32, group = k / 2, high = u32(block[32 + group]) >> (k % 2 * 4);
        const u32 scale = pair_at(block + 48, group / 4) >> (group % 4 * 3) & 7;
        const float d = half_to_float((u16)bits) * float(2 * scale + 1);
        ternary(IQ1_CODES[block[k] | (high & 7) << 8], (high & 8) != 0, d, w);
    }
};

__device__ const float FOUR_BIT_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Nibbles of eight bytes into sixteen levels.
__device__ inline void levels(const u8* q, u32 shift, const float* table, float d, float* w) {
    for (u32 i = 0; i < 8; i++) {
        w[i] = d * table[u32(q[i]) >> shift & 15];
    }
}

// d:half qs:u8[16]; as Q4_0.
struct IQ4_NL : Rare<IQ4_NL, 32, 18> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 18 * (run / 4);
        levels(block + 2 + 8 * (run % 2), run % 4 / 2 * 4, FOUR_BIT_LEVELS, half_at(block), w);
    }
};

// d:half sh:u16 sl:u8[4] qs:u8[128]; six-bit scales of 32 weights.
struct IQ4_XS : Rare<IQ4_XS, 256, 136> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 136 * (run / 32);
        const u32 group = run % 32 / 4, low = u32(block[4 + group / 2]) >> (group % 2 * 4) & 15;
        const u32 scale = low | (pair_at(block + 2, 0) >> (2 * group) & 3) << 4;
        const float d = half_at(block) * (float(scale) - 32.0f);
        levels(block + 8 + 16 * group + 8 * (run % 2), run % 4 / 2 * 4, FOUR_BIT_LEVELS, d, w);
    }
};

// qs:u8[48] qh:u8[4] d:half; five digits of base three to a byte, four in qh. A byte times 3^k has digit k on top.
struct TQ1_0 : Rare<TQ1_0, 256, 54> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 54 * (run / 32);
        const float d = half_at(block + 52);
        for (u32 i = 0; i < 8; i++) {
            // The first run of bytes is 32 long, the second 16, the third 4.
            const u32 weight = run % 32 * 8 + i, rest = weight < 160 ? weight : weight < 240 ? weight - 160 : weight - 240;
            const u32 len = weight < 160 ? 32 : weight < 240 ? 16 : 4, from = weight < 160 ? 0 : weight < 240 ? 32 : 48;
            u32 byte = block[from + rest % len];
            for (u32 k = 0; k < rest / len; k++) {
                byte = byte * 3 & 255;
            }
            w[i] = d * (float(byte * 3 >> 8) - 1.0f);
        }
    }
};

// qs:u8[64] d:half
struct TQ2_0 : Rare<TQ2_0, 256, 66> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 66 * (run / 32);
        const u32 group = run % 32 / 4;
        const float d = half_at(block + 64);
        quarters(block + group / 4 * 32 + run % 4 * 8, group % 4 * 2, d, -d, w);
    }
};

// e:u8[4] qs:u8[32]; a scale of four bits of exponent and three of fraction, halved, for 16 weights; 0x7f counts as 0.
struct NVFP4 : Rare<NVFP4, 64, 36> {
    __device__ static void eight(const u8* row, u32 run, float* w) {
        const u8* block = row + 36 * (run / 8);
        const u32 group = run % 8 / 2, e = block[group], exponent = e >> 3 & 15, fraction = e & 7;
        const float scale = exponent == 0 ? float(fraction) * __uint_as_float(117u << 23)
                                          : float(8 + fraction) * __uint_as_float((exponent + 116) << 23);
        levels(block + 4 + 8 * group, run % 2 * 4, FP4, e == 0x7f ? 0.0f : scale, w);
    }
};

// Every format with the suffix of its entry names; the host defines it first to name those alone that a model has.
#ifndef EACH_FORMAT
#define EACH_FORMAT(M)                                                                                                 \
    M(F32, f32) M(F16, f16) M(BF16, bf16) M(Q8_0, q8_0) M(Q4_0, q4_0) M(Q4_1, q4_1) M(Q5_0, q5_0) M(Q5_1, q5_1)        \
    M(Q4_K, q4_k) M(Q5_K, q5_k) M(Q6_K, q6_k) M(MXFP4, mxfp4) M(Q2_K, q2_k) M(Q3_K, q3_k) M(IQ2_XXS, iq2_xxs)          \
    M(IQ2_XS, iq2_xs) M(IQ2_S, iq2_s) M(IQ3_XXS, iq3_xxs) M(IQ3_S, iq3_s) M(IQ1_S, iq1_s) M(IQ1_M, iq1_m)              \
    M(IQ4_NL, iq4_nl) M(IQ4_XS, iq4_xs) M(TQ1_0, tq1_0) M(TQ2_0, tq2_0) M(NVFP4, nvfp4)
#endif
