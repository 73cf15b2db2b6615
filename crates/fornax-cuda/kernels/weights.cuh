// One weight out of a row in its GGUF block format: `Format::at(row, i)` is element i, as the
// scalar reference decodes it. A warp that asks for 32 neighbours reads one or two cache lines.
// Blocks lie at odd 2-byte steps, so nothing wider than 2 bytes is loaded at once.
#pragma once
#include "layout.cuh"

__device__ inline float half_at(const u8* p) { return half_to_float(*(const u16*)p); }

struct F32 {
    __device__ static float at(const u8* row, u32 i) { return ((const float*)row)[i]; }
    __device__ static u64 row_bytes(u32 cols) { return 4ull * cols; }
};

struct F16 {
    __device__ static float at(const u8* row, u32 i) { return half_to_float(((const u16*)row)[i]); }
    __device__ static u64 row_bytes(u32 cols) { return 2ull * cols; }
};

struct BF16 {
    __device__ static float at(const u8* row, u32 i) {
        return __uint_as_float((u32)((const u16*)row)[i] << 16);
    }
    __device__ static u64 row_bytes(u32 cols) { return 2ull * cols; }
};

// Blocks of 32 weights: a nibble of element e is the low half of byte e, or the high half of
// byte e - 16.
__device__ inline u32 nibble(const u8* q, u32 e) { return e < 16 ? q[e] & 15 : q[e - 16] >> 4; }

__device__ inline u32 fifth(const u8* q, u32 e) { return (u32)(q[e >> 3] >> (e & 7) & 1) << 4; }

struct Q4_0 {  // f16 d, 16 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 18;
        return half_at(b) * (float)((int)nibble(b + 2, i & 31) - 8);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 18ull; }
};

struct Q4_1 {  // f16 d, f16 m, 16 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 20;
        return half_at(b) * (float)nibble(b + 4, i & 31) + half_at(b + 2);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 20ull; }
};

struct Q5_0 {  // f16 d, 4 bytes of fifth bits, 16 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 22;
        u32 e = i & 31;
        return half_at(b) * (float)((int)(nibble(b + 6, e) | fifth(b + 2, e)) - 16);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 22ull; }
};

struct Q5_1 {  // f16 d, f16 m, 4 bytes of fifth bits, 16 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 24;
        u32 e = i & 31;
        return half_at(b) * (float)(nibble(b + 8, e) | fifth(b + 4, e)) + half_at(b + 2);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 24ull; }
};

struct Q8_0 {  // f16 d, 32 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 34;
        return half_at(b) * (float)(signed char)b[2 + (i & 31)];
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 34ull; }
};

struct MXFP4 {  // 8-bit exponent, 16 bytes of E2M1
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (i >> 5) * 17;
        u32 q = nibble(b + 1, i & 31);
        // 0, ½, 1, 1½, 2, 3, 4, 6, doubled so that they are whole.
        const u64 doubled = 0x0c08060403020100ull;
        float v = (float)(u32)(doubled >> (q & 7) * 8 & 0xff);
        return ldexpf(q & 8 ? -v : v, (int)b[0] - 128);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 32 * 17ull; }
};

// Scale and minimum of sub-block s of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes.
__device__ inline void scale_min(const u8* s, u32 j, u32& scale, u32& min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (u32)(s[j - 4] >> 6) << 4;
        min = s[j + 4] >> 4 | (u32)(s[j] >> 6) << 4;
    }
}

struct Q4_K {  // f16 d, f16 dmin, 12 bytes of scales, 128 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (u64)(i >> 8) * 144;
        u32 s = i >> 5 & 7, scale, min;
        scale_min(b + 4, s, scale, min);
        u32 byte = b[16 + (s >> 1) * 32 + (i & 31)];
        u32 q = s & 1 ? byte >> 4 : byte & 15;
        return half_at(b) * (float)scale * (float)q - half_at(b + 2) * (float)min;
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 256 * 144ull; }
};

struct Q5_K {  // f16 d, f16 dmin, 12 bytes of scales, 32 bytes of fifth bits, 128 bytes
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (u64)(i >> 8) * 176;
        u32 s = i >> 5 & 7, scale, min;
        scale_min(b + 4, s, scale, min);
        u32 byte = b[48 + (s >> 1) * 32 + (i & 31)];
        u32 q = (s & 1 ? byte >> 4 : byte & 15) | (u32)(b[16 + (i & 31)] >> s & 1) << 4;
        return half_at(b) * (float)scale * (float)q - half_at(b + 2) * (float)min;
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 256 * 176ull; }
};

struct Q6_K {  // 128 bytes of low nibbles, 64 of upper pairs, 16 signed scales, f16 d
    __device__ static float at(const u8* row, u32 i) {
        const u8* b = row + (u64)(i >> 8) * 210;
        u32 half = i >> 7 & 1, quarter = i >> 5 & 3, l = i & 31;
        u32 byte = b[half * 64 + (quarter & 1) * 32 + l];
        u32 low = quarter & 2 ? byte >> 4 : byte & 15;
        u32 high = b[128 + half * 32 + l] >> (2 * quarter) & 3;
        float scale = (float)(signed char)b[192 + half * 8 + quarter * 2 + (l >> 4)];
        return half_at(b + 208) * scale * (float)((int)(low | high << 4) - 32);
    }
    __device__ static u64 row_bytes(u32 cols) { return cols / 256 * 210ull; }
};
