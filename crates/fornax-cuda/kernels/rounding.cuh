// Rounding to 8-bit blocks as fornax_plan::q8 says, wherever products get their input from.
#pragma once
#include "layout.cuh"

// How a block is rounded, by the bits of its largest magnitude.
struct Rounding {
    float top, inverse;
    bool none, broken;
    __device__ static Rounding of(u32 bits) {
        float top = __uint_as_float(bits), inverse = __fdividef(127.0f, top);
        // The reciprocal of the smallest magnitudes overflows; such a block counts as zero.
        bool none = top < 3.8e-37f, broken = bits >= 0x7f800000u;
        if (none || broken) inverse = 0.0f;
        return {top, inverse, none, broken};
    }
    __device__ float scale() const {
        float d = none ? 0.0f : top * (1.0f / 127.0f);
        return broken ? __int_as_float(0x7fc00000) : d;
    }
};
// What four neighbouring values of every lane, eight lanes a block, become as a block of 8-bit numbers.
struct Rounded {
    u32 word;
    Rounding how;
    __device__ float scale() const { return how.scale(); }
};
__device__ inline Rounded round_quad(float4 y) {
    // Of the bits: NaN and infinity are above all numbers, and must not be rounded away.
    u32 bits = max(max(__float_as_uint(y.x) & 0x7fffffffu, __float_as_uint(y.y) & 0x7fffffffu),
                   max(__float_as_uint(y.z) & 0x7fffffffu, __float_as_uint(y.w) & 0x7fffffffu));
#pragma unroll
    for (u32 d = 1; d < 8; d *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, d));
    Rounding how = Rounding::of(bits);
    int q0 = __float2int_rn(y.x * how.inverse), q1 = __float2int_rn(y.y * how.inverse);
    int q2 = __float2int_rn(y.z * how.inverse), q3 = __float2int_rn(y.w * how.inverse);
    return {__byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410), how};
}
