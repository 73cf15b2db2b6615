// Weight blocks as GGUF stores them, read in place; prepended to every family that reads weights.
//
// A row is cols / LEN blocks of BYTES bytes, one after the other, with no padding. Except for MXFP4 (17 bytes), blocks start
// at even addresses and no better: nothing wider than two bytes is loaded whole.
// A run is eight weights in a row of a block. `eight` decodes the run of that number. Runs `GAP` apart share their bytes, so
// that a lane that decodes both reads these once: `first_run` numbers the first runs of such pairs.
// `one` decodes one weight, where rows need not consist of whole runs; no other type is asked for it.
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

inline float half_at(device const uchar *p) {
    return float(*(device const half *)p);
}

// Two bytes of eight 8-bit fields: their nibbles at `shift`, 0 or 4.
inline uint pair_at(device const uchar *p, uint i) {
    return uint(((device const ushort *)p)[i]);
}

struct F32 {
    enum : uint { LEN = 1, BYTES = 4, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const float *p = (device const float *)row + 8 * run;
        for (uint i = 0; i < 8; i++) {
            w[i] = p[i];
        }
    }
    static float one(device const uchar *row, uint col) {
        return ((device const float *)row)[col];
    }
};

struct F16 {
    enum : uint { LEN = 1, BYTES = 2, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const half *p = (device const half *)row + 8 * run;
        for (uint i = 0; i < 8; i++) {
            w[i] = float(p[i]);
        }
    }
    static float one(device const uchar *row, uint col) {
        return float(((device const half *)row)[col]);
    }
};

// Widened by hand: the type `bfloat` is not on every device.
struct BF16 {
    enum : uint { LEN = 1, BYTES = 2, GAP = 1 };
    static float one(device const uchar *row, uint col) {
        return as_type<float>(uint(((device const ushort *)row)[col]) << 16);
    }
    static void eight(device const uchar *row, uint run, thread float *w) {
        for (uint i = 0; i < 8; i++) {
            w[i] = one(row, 8 * run + i);
        }
    }
};

// d:half qs:char[32]
struct Q8_0 {
    enum : uint { LEN = 32, BYTES = 34, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 34 * (run / 4);
        const float d = half_at(block);
        for (uint i = 0; i < 4; i++) {
            const char2 q = as_type<char2>(ushort(pair_at(block + 2 + 8 * (run % 4), i)));
            w[2 * i] = d * float(q.x);
            w[2 * i + 1] = d * float(q.y);
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// Eight nibbles of eight bytes: w = d * nibble + m.
inline void nibbles(device const uchar *q, uint shift, float d, float m, thread float *w) {
    for (uint i = 0; i < 4; i++) {
        const uint u = pair_at(q, i) >> shift;
        w[2 * i] = d * float(u & 15) + m;
        w[2 * i + 1] = d * float(u >> 8 & 15) + m;
    }
}

// The same with a fifth bit for each, the bits of `high`.
inline void fives(device const uchar *q, uint shift, uint high, float d, float m, thread float *w) {
    for (uint i = 0; i < 4; i++) {
        const uint u = pair_at(q, i) >> shift;
        w[2 * i] = d * float((u & 15) | (high >> (2 * i) & 1) << 4) + m;
        w[2 * i + 1] = d * float((u >> 8 & 15) | (high >> (2 * i + 1) & 1) << 4) + m;
    }
}

// d:half qs:uchar[16]; byte j holds weight j in its low half and weight j + 16 in its high one.
struct Q4_0 {
    enum : uint { LEN = 32, BYTES = 18, GAP = 2 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 18 * (run / 4);
        const float d = half_at(block);
        nibbles(block + 2 + 8 * (run % 2), 4 * (run % 4 / 2), d, -8 * d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half m:half qs:uchar[16]
struct Q4_1 {
    enum : uint { LEN = 32, BYTES = 20, GAP = 2 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 20 * (run / 4);
        nibbles(block + 4 + 8 * (run % 2), 4 * (run % 4 / 2), half_at(block), half_at(block + 2), w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half qh:uchar[4] qs:uchar[16]; bit j of qh belongs to weight j.
struct Q5_0 {
    enum : uint { LEN = 32, BYTES = 22, GAP = 2 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 22 * (run / 4);
        const float d = half_at(block);
        fives(block + 6 + 8 * (run % 2), 4 * (run % 4 / 2), block[2 + run % 4], d, -16 * d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half m:half qh:uchar[4] qs:uchar[16]
struct Q5_1 {
    enum : uint { LEN = 32, BYTES = 24, GAP = 2 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 24 * (run / 4);
        device const uchar *q = block + 8 + 8 * (run % 2);
        fives(q, 4 * (run % 4 / 2), block[4 + run % 4], half_at(block), half_at(block + 2), w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// Scale and minimum of the 32 weights of number j in a K block: six bits each, packed in twelve bytes.
inline uint2 six_bits(device const uchar *s, uint j) {
    if (j < 4) {
        return uint2(s[j] & 63, s[j + 4] & 63);
    }
    return uint2((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4);
}

// d:half dmin:half scales:uchar[12] qs:uchar[128]; 32 bytes hold 64 weights, low halves first.
struct Q4_K {
    enum : uint { LEN = 256, BYTES = 144, GAP = 4 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 144 * (run / 32);
        const uint j = run % 32 / 4;
        const uint2 s = six_bits(block + 4, j);
        const float d = half_at(block) * float(s.x), m = half_at(block + 2) * float(s.y);
        nibbles(block + 16 + 32 * (j / 2) + 8 * (run % 4), 4 * (j % 2), d, -m, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half dmin:half scales:uchar[12] qh:uchar[32] qs:uchar[128]; bit j of qh[l] belongs to weight l of 32 weights j.
struct Q5_K {
    enum : uint { LEN = 256, BYTES = 176, GAP = 4 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 176 * (run / 32);
        const uint j = run % 32 / 4;
        const uint2 s = six_bits(block + 4, j);
        const float d = half_at(block) * float(s.x), m = half_at(block + 2) * float(s.y);
        device const uchar *q = block + 48 + 32 * (j / 2) + 8 * (run % 4);
        uint high = 0;
        for (uint i = 0; i < 4; i++) {
            const uint u = pair_at(block + 16 + 8 * (run % 4), i) >> j;
            high |= ((u & 1) | (u >> 8 & 1) << 1) << (2 * i);
        }
        fives(q, 4 * (j % 2), high, d, -m, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// ql:uchar[128] qh:uchar[64] scales:char[16] d:half; a half block of 128 weights has 64 bytes of low and 32 of high bits,
// a scale is of 16 weights.
struct Q6_K {
    enum : uint { LEN = 256, BYTES = 210, GAP = 8 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 210 * (run / 32);
        const uint part = run % 32 / 16, k = run % 16 / 4, h = run % 4;
        const float scale = float(as_type<char>(block[192 + 8 * part + 2 * k + h / 2]));
        const float d = half_at(block + 208) * scale;
        for (uint i = 0; i < 4; i++) {
            const uint low = pair_at(block + 64 * part + 32 * (k % 2) + 8 * h, i) >> (4 * (k / 2));
            const uint high = pair_at(block + 128 + 32 * part + 8 * h, i) >> (2 * k);
            w[2 * i] = d * (float((low & 15) | (high & 3) << 4) - 32);
            w[2 * i + 1] = d * (float((low >> 8 & 15) | (high >> 8 & 3) << 4) - 32);
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// Levels of E2M1, doubled.
constant float FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// e:uchar qs:uchar[16]; the scale is 2^(e - 128), subnormal for the two smallest. Odd addresses: bytes only.
struct MXFP4 {
    enum : uint { LEN = 32, BYTES = 17, GAP = 2 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 17 * (run / 4);
        const uint e = block[0], shift = 4 * (run % 4 / 2);
        const float d = as_type<float>(e < 2 ? 0x200000u << e : (e - 1) << 23);
        for (uint i = 0; i < 8; i++) {
            w[i] = d * FP4[block[1 + 8 * (run % 2) + i] >> shift & 15];
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

template <typename B>
inline uint first_run(uint pair) {
    return pair / B::GAP * (2 * B::GAP) + pair % B::GAP;
}

// A row of a matrix of type B.
template <typename B>
inline device const uchar *row_of(device const uchar *matrix, uint row, uint cols) {
    return matrix + ulong(row) * (cols / B::LEN * B::BYTES);
}

// A run of a row whose columns may end within it: zeros beyond.
template <typename B>
inline void run_of(device const uchar *row, uint run, uint cols, thread float *w) {
    if (8 * run + 8 <= cols) {
        B::eight(row, run, w);
        return;
    }
    for (uint i = 0; i < 8; i++) {
        w[i] = 8 * run + i < cols ? B::one(row, 8 * run + i) : 0.0f;
    }
}

#define KERNEL(name, ...) template [[host_name(name)]] kernel decltype(__VA_ARGS__) __VA_ARGS__;
