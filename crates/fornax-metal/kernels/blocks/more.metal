// The block formats that are seldom met, and one type that stands for any: after blocks.metal and codebooks.metal.
//
// As there: a run is eight weights in a row of a block, blocks start at even addresses and no better, no type has a GAP.
// `Any<Type0>` is what the host names by a function constant when it makes the pipeline: one kernel for every type, and for
// matrices of several types at once. The compiler of the device leaves of the choice what the constant says.

// Four bytes at an even address.
inline uint word_at(device const uchar *p) {
    return pair_at(p, 0) | pair_at(p, 1) << 16;
}

// Two bits of each of eight bytes: w = d * bits + m.
inline void quarters(device const uchar *q, uint shift, float d, float m, thread float *w) {
    for (uint i = 0; i < 4; i++) {
        const uint u = pair_at(q, i) >> shift;
        w[2 * i] = d * float(u & 3) + m;
        w[2 * i + 1] = d * float(u >> 8 & 3) + m;
    }
}

// scales:uchar[16] qs:uchar[64] d:half m:half; a byte of scales is of 16 weights, scale below and minimum above.
struct Q2_K {
    enum : uint { LEN = 256, BYTES = 84, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 84 * (run / 32);
        const uint group = run % 32 / 2, s = block[group];
        const float d = half_at(block + 80) * float(s & 15), m = half_at(block + 82) * float(s >> 4);
        quarters(block + 16 + group / 8 * 32 + group % 2 * 16 + run % 2 * 8, group % 8 / 2 * 2, d, -m, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// hmask:uchar[32] qs:uchar[64] scales:uchar[12] d:half; six-bit scales of 16 weights, a clear bit of hmask stands for -4.
struct Q3_K {
    enum : uint { LEN = 256, BYTES = 110, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 110 * (run / 32);
        const uint group = run % 32 / 2, at = group % 2 * 16 + run % 2 * 8, shift = group % 8 / 2 * 2;
        const uint low = uint(block[96 + group % 8]) >> (group / 8 * 4) & 15;
        const uint high = uint(block[104 + group % 4]) >> (group / 4 * 2) & 3;
        const float d = half_at(block + 108) * (float(low | high << 4) - 32.0f);
        device const uchar *qs = block + 32 + group / 8 * 32 + at;
        for (uint i = 0; i < 8; i++) {
            const float q = float(uint(qs[i]) >> shift & 3);
            w[i] = d * ((uint(block[at + i]) >> (group / 2) & 1) != 0 ? q : q - 4.0f);
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// Levels of the octets of two bits and of the quartets.
constant float OCTET_LEVELS[4] = {8, 25, 43, 0};
constant float QUARTET_LEVELS[8] = {4, 12, 20, 28, 36, 44, 52, 62};

// Seven stored signs, and an eighth that makes the number of set bits even.
inline uint eight_signs(uint seven) {
    return seven | (popcount(seven) & 1) << 7;
}

inline void octet(uint code, uint signs, float d, thread float *w) {
    for (uint i = 0; i < 8; i++) {
        const float v = d * OCTET_LEVELS[code >> (2 * i) & 3];
        w[i] = (signs >> i & 1) != 0 ? -v : v;
    }
}

// d:half, then of each 32 weights four indices of a byte each and a word: four times seven signs, four bits of scale.
struct IQ2_XXS {
    enum : uint { LEN = 256, BYTES = 66, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 66 * (run / 32);
        device const uchar *part = block + 2 + run % 32 / 4 * 8;
        const uint packed = word_at(part + 4), k = run % 4;
        const float d = half_at(block) * (0.5f + float(packed >> 28)) * 0.25f;
        octet(IQ2_XXS_CODES[part[k]], eight_signs(packed >> (7 * k) & 127), d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half qs:ushort[32] scales:uchar[8]; nine bits of index and seven of signs, four bits of scale for 16 weights.
struct IQ2_XS {
    enum : uint { LEN = 256, BYTES = 74, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 74 * (run / 32);
        const uint k = run % 32, q = pair_at(block + 2, k);
        const uint scale = uint(block[66 + k / 4]) >> (k % 4 / 2 * 4) & 15;
        const float d = half_at(block) * (0.5f + float(scale)) * 0.25f;
        octet(IQ2_XS_CODES[q & 511], eight_signs(q >> 9), d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half qs:uchar[32] signs:uchar[32] qh:uchar[8] scales:uchar[8]
struct IQ2_S {
    enum : uint { LEN = 256, BYTES = 82, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 82 * (run / 32);
        const uint k = run % 32, high = uint(block[66 + k / 4]) >> (k % 4 * 2) & 3;
        const uint scale = uint(block[74 + k / 4]) >> (k % 4 / 2 * 4) & 15;
        const float d = half_at(block) * (0.5f + float(scale)) * 0.25f;
        octet(IQ2_S_CODES[block[2 + k] | high << 8], block[34 + k], d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half qs:uchar[64], then a word for each 32 weights: four times seven signs, four bits of scale.
struct IQ3_XXS {
    enum : uint { LEN = 256, BYTES = 98, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 98 * (run / 32);
        const uint k = run % 32, packed = word_at(block + 66 + k / 4 * 4);
        const uint signs = eight_signs(packed >> (7 * (k % 4)) & 127);
        const uint codes = IQ3_XXS_CODES[block[2 + 2 * k]] | uint(IQ3_XXS_CODES[block[3 + 2 * k]]) << 16;
        const float d = half_at(block) * (0.5f + float(packed >> 28)) * 0.5f;
        for (uint i = 0; i < 8; i++) {
            const float v = d * QUARTET_LEVELS[codes >> (4 * i) & 7];
            w[i] = (signs >> i & 1) != 0 ? -v : v;
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half qs:uchar[64] qh:uchar[8] signs:uchar[32] scales:uchar[4]; the levels are the odd numbers.
struct IQ3_S {
    enum : uint { LEN = 256, BYTES = 110, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 110 * (run / 32);
        const uint k = run % 32, high = uint(block[66 + k / 4]) >> (k % 4 * 2), signs = block[74 + k];
        const uint low = block[2 + 2 * k] | (high & 1) << 8, next = block[3 + 2 * k] | (high >> 1 & 1) << 8;
        const uint codes = IQ3_S_CODES[low] | uint(IQ3_S_CODES[next]) << 16;
        const uint scale = uint(block[106 + k / 8]) >> (k / 4 % 2 * 4) & 15;
        const float d = half_at(block) * float(1 + 2 * scale);
        for (uint i = 0; i < 8; i++) {
            const float v = d * float(1 + 2 * (codes >> (4 * i) & 7));
            w[i] = (signs >> i & 1) != 0 ? -v : v;
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// A ternary octet, moved by an eighth of a step up or, where `down`, down.
inline void ternary(uint code, bool down, float d, thread float *w) {
    for (uint i = 0; i < 8; i++) {
        w[i] = d * (float(code >> (2 * i) & 3) - (down ? 1.125f : 0.875f));
    }
}

// d:half qs:uchar[32] qh:ushort[8]; of qh four times three bits of index, three of scale, one of the move.
struct IQ1_S {
    enum : uint { LEN = 256, BYTES = 50, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 50 * (run / 32);
        const uint k = run % 32, high = pair_at(block + 34, k / 4);
        const uint index = block[2 + k] | (high >> (3 * (k % 4)) & 7) << 8;
        ternary(IQ1_CODES[index], (high & 0x8000) != 0, half_at(block) * float(2 * (high >> 12 & 7) + 1), w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// qs:uchar[32] qh:uchar[16] scales:ushort[4]; the top halves of the scales make d, the rest are three bits for 16 weights.
struct IQ1_M {
    enum : uint { LEN = 256, BYTES = 56, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 56 * (run / 32);
        uint bits = 0;
        for (uint i = 0; i < 4; i++) {
            bits |= (pair_at(block + 48, i) >> 12) << (4 * i);
        }
        const uint k = run % 32, group = k / 2, high = uint(block[32 + group]) >> (k % 2 * 4);
        const uint scale = pair_at(block + 48, group / 4) >> (group % 4 * 3) & 7;
        const float d = float(as_type<half>(ushort(bits))) * float(2 * scale + 1);
        ternary(IQ1_CODES[block[k] | (high & 7) << 8], (high & 8) != 0, d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

constant float FOUR_BIT_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Nibbles of eight bytes into sixteen levels.
inline void levels(device const uchar *q, uint shift, constant const float *table, float d, thread float *w) {
    for (uint i = 0; i < 8; i++) {
        w[i] = d * table[uint(q[i]) >> shift & 15];
    }
}

// d:half qs:uchar[16]; as Q4_0.
struct IQ4_NL {
    enum : uint { LEN = 32, BYTES = 18, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 18 * (run / 4);
        levels(block + 2 + 8 * (run % 2), run % 4 / 2 * 4, FOUR_BIT_LEVELS, half_at(block), w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// d:half sh:ushort sl:uchar[4] qs:uchar[128]; six-bit scales of 32 weights.
struct IQ4_XS {
    enum : uint { LEN = 256, BYTES = 136, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 136 * (run / 32);
        const uint group = run % 32 / 4, low = uint(block[4 + group / 2]) >> (group % 2 * 4) & 15;
        const uint scale = low | (pair_at(block + 2, 0) >> (2 * group) & 3) << 4;
        const float d = half_at(block) * (float(scale) - 32.0f);
        levels(block + 8 + 16 * group + 8 * (run % 2), run % 4 / 2 * 4, FOUR_BIT_LEVELS, d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// qs:uchar[48] qh:uchar[4] d:half; five digits of base three to a byte, four in qh. A byte times 3^k has digit k on top.
struct TQ1_0 {
    enum : uint { LEN = 256, BYTES = 54, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 54 * (run / 32);
        const float d = half_at(block + 52);
        for (uint i = 0; i < 8; i++) {
            // The first run of bytes is 32 long, the second 16, the third 4.
            const uint weight = run % 32 * 8 + i, rest = weight < 160 ? weight : weight < 240 ? weight - 160 : weight - 240;
            const uint len = weight < 160 ? 32 : weight < 240 ? 16 : 4, from = weight < 160 ? 0 : weight < 240 ? 32 : 48;
            uint byte = block[from + rest % len];
            for (uint k = 0; k < rest / len; k++) {
                byte = byte * 3 & 255;
            }
            w[i] = d * (float(byte * 3 >> 8) - 1.0f);
        }
    }
    static float one(device const uchar *, uint) { return 0; }
};

// qs:uchar[64] d:half
struct TQ2_0 {
    enum : uint { LEN = 256, BYTES = 66, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 66 * (run / 32);
        const uint group = run % 32 / 4;
        const float d = half_at(block + 64);
        quarters(block + group / 4 * 32 + run % 4 * 8, group % 4 * 2, d, -d, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// e:uchar[4] qs:uchar[32]; a scale of four bits of exponent and three of fraction, halved, for 16 weights; 0x7f counts as 0.
struct NVFP4 {
    enum : uint { LEN = 64, BYTES = 36, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        device const uchar *block = row + 36 * (run / 8);
        const uint group = run % 8 / 2, e = block[group], exponent = e >> 3 & 15, fraction = e & 7;
        const float scale = exponent == 0 ? float(fraction) * as_type<float>(117u << 23)
                                          : float(8 + fraction) * as_type<float>((exponent + 116) << 23);
        levels(block + 4 + 8 * group, run % 2 * 4, FP4, e == 0x7f ? 0.0f : scale, w);
    }
    static float one(device const uchar *, uint) { return 0; }
};

// The types of up to three matrices, by their numbers in GGUF.
constant uint TYPE0 [[function_constant(4)]];
constant uint TYPE1 [[function_constant(5)]];
constant uint TYPE2 [[function_constant(6)]];

struct Type0 {
    static uint number() { return TYPE0; }
};
struct Type1 {
    static uint number() { return TYPE1; }
};
struct Type2 {
    static uint number() { return TYPE2; }
};

// Says `what(B)` for the format of that number.
#define BY_TYPE(number, what)                                                                                                    \
    switch (number) {                                                                                                            \
    case 0: what(F32) break;                                                                                                     \
    case 1: what(F16) break;                                                                                                     \
    case 2: what(Q4_0) break;                                                                                                    \
    case 3: what(Q4_1) break;                                                                                                    \
    case 6: what(Q5_0) break;                                                                                                    \
    case 7: what(Q5_1) break;                                                                                                    \
    case 8: what(Q8_0) break;                                                                                                    \
    case 10: what(Q2_K) break;                                                                                                   \
    case 11: what(Q3_K) break;                                                                                                   \
    case 12: what(Q4_K) break;                                                                                                   \
    case 13: what(Q5_K) break;                                                                                                   \
    case 14: what(Q6_K) break;                                                                                                   \
    case 16: what(IQ2_XXS) break;                                                                                                \
    case 17: what(IQ2_XS) break;                                                                                                 \
    case 18: what(IQ3_XXS) break;                                                                                                \
    case 19: what(IQ1_S) break;                                                                                                  \
    case 20: what(IQ4_NL) break;                                                                                                 \
    case 21: what(IQ3_S) break;                                                                                                  \
    case 22: what(IQ2_S) break;                                                                                                  \
    case 23: what(IQ4_XS) break;                                                                                                 \
    case 29: what(IQ1_M) break;                                                                                                  \
    case 30: what(BF16) break;                                                                                                   \
    case 34: what(TQ1_0) break;                                                                                                  \
    case 35: what(TQ2_0) break;                                                                                                  \
    case 39: what(MXFP4) break;                                                                                                  \
    case 40: what(NVFP4) break;                                                                                                  \
    default: break;                                                                                                              \
    }

#define DECODE_EIGHT(B) B::eight(row, run, w);
#define DECODE_ONE(B) return B::one(row, col);
#define BYTES_OF_ROW(B) return cols / B::LEN * B::BYTES;

template <typename T>
struct Any {
    // Rows go by the type's own blocks: see row_of.
    enum : uint { LEN = 1, BYTES = 1, GAP = 1 };
    static void eight(device const uchar *row, uint run, thread float *w) {
        BY_TYPE(T::number(), DECODE_EIGHT)
    }
    static float one(device const uchar *row, uint col) {
        BY_TYPE(T::number(), DECODE_ONE)
        return 0;
    }
};

inline uint bytes_of_row(uint number, uint cols) {
    BY_TYPE(number, BYTES_OF_ROW)
    return 0;
}

template <>
inline device const uchar *row_of<Any<Type0>>(device const uchar *matrix, uint row, uint cols) {
    return matrix + ulong(row) * bytes_of_row(TYPE0, cols);
}

template <>
inline device const uchar *row_of<Any<Type1>>(device const uchar *matrix, uint row, uint cols) {
    return matrix + ulong(row) * bytes_of_row(TYPE1, cols);
}

template <>
inline device const uchar *row_of<Any<Type2>>(device const uchar *matrix, uint row, uint cols) {
    return matrix + ulong(row) * bytes_of_row(TYPE2, cols);
}
