// y = (W·x + b) · scale, capped where asked, plus a residual.
//
// w: outs × cols in its format; x: rows × cols f32; y: rows × outs f32. A warp takes one output of
// up to TILE rows, so that a weight is decoded once for all of them; a lane takes every 32nd run of eight columns and adds in
// f32, then across the warp: what a row gives does not depend on the rows beside it. Bytes read per output and tile: one row
// of w.
#include "../rare.cuh"

struct MatmulArgs {
    u32 rows, cols, outs, bias, residual;
    float scale, softcap;
};

static const u32 TILE = 8;

template <class W>
__device__ void matmul(const MatmulArgs& a, const u8* w, const float* x, const float* bias,
                       const float* residual, float* y) {
    u32 out = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (out >= a.outs) return;
    u32 first = blockIdx.y * TILE, n = min(TILE, a.rows - first);
    const u8* row = w + (u64)out * W::row_bytes(a.cols);
    bool wide = a.cols % 4 == 0;
    float sum[TILE] = {};
#pragma unroll 1
    for (u32 run = lane; 8 * run < a.cols; run += 32) {
        float v[8], xs[8];
        run_of<W>(row, run, a.cols, v);
#pragma unroll
        for (u32 r = 0; r < TILE; r++)
            if (r < n) {
                run_of_x(x + (u64)(first + r) * a.cols, run, a.cols, wide, xs);
#pragma unroll
                for (u32 i = 0; i < 8; i++) sum[r] += v[i] * xs[i];
            }
    }
    // Lane r ends up with the sum of row r, so that the rest is done once, side by side.
    float v = 0.0f;
#pragma unroll
    for (u32 r = 0; r < TILE; r++) {
        float all = warp_sum(sum[r]);
        if (lane == r) v = all;
    }
    if (lane >= n) return;
    if (a.bias) v += bias[out];
    v *= a.scale;
    if (a.softcap != 0.0f) v = a.softcap * tanhf(v / a.softcap);
    u64 at = (u64)(first + lane) * a.outs + out;
    y[at] = a.residual ? v + residual[at] : v;
}

#define ENTRY(W, suffix)                                                                           \
    extern "C" __global__ void matmul_##suffix(MatmulArgs a, const u8* w, const float* x,          \
                                               const float* bias, const float* residual,           \
                                               float* y) {                                         \
        matmul<W>(a, w, x, bias, residual, y);                                                     \
    }
EACH_FORMAT(ENTRY)
