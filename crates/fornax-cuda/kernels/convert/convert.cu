// Activations as 8-bit blocks stand for them, for products by formats that have no integer path; and the activation of gated
// layers whose two matrices have different formats.
//
// round_rows: a warp takes a block of 32 of a row, along x; a last block may be shorter. The rounding is that of the host's
// definition to the bit: a = the largest magnitude, q = x · (127 / a) to the nearest even, y = (a / 127) · q; a block with
// something that is not finite becomes NaN.
#include "../activate.cuh"

struct RoundArgs {
    u32 rows, width;
};

extern "C" __global__ void round_rows(RoundArgs a, const float* x, float* y) {
    u32 blk = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, i = 32 * blk + threadIdx.x % 32;
    if (32 * blk >= a.width) return;
    u64 at = (u64)blockIdx.y * a.width + i;
    float v = i < a.width ? x[at] : 0.0f, top = fabsf(v);
    bool broken = __any_sync(0xffffffffu, isnan(v) || isinf(v));
    for (u32 d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    float inverse = 127.0f / top, d = top / 127.0f, r = 0.0f;
    // The reciprocal of the smallest magnitudes overflows; such a block counts as zero.
    if (top != 0.0f && !isinf(inverse)) r = d * rintf(v * inverse);
    if (broken) r = __int_as_float(0x7fc00000);
    if (i < a.width) y[at] = r;
}

// gate = act(gate) * up, a thread an element, rows along y. Biases have been added.
extern "C" __global__ void activate_rows(GatedArgs a, const float* gate, const float* up, float* out) {
    u32 o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= a.outs) return;
    u64 at = (u64)blockIdx.y * a.outs + o;
    out[at] = activate(a.act, a.alpha, a.limit, gate[at], up[at]);
}
