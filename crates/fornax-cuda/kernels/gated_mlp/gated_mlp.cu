// y = act(G·x + bg) * (U·x + bu).
//
// gate, up: outs × cols in one format; x: rows × cols f32; y: rows × outs f32. A warp takes one
// output of up to TILE rows and reads one row of each matrix; sums are f32.
#include "../rare.cuh"
#include "../activate.cuh"

static const u32 TILE = 8;

template <class W>
__device__ void gated(const GatedArgs& a, const u8* gate, const u8* up, const float* x,
                      const float* gate_bias, const float* up_bias, float* y) {
    u32 out = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (out >= a.outs) return;
    u32 first = blockIdx.y * TILE, n = min(TILE, a.rows - first);
    u64 at = (u64)out * W::row_bytes(a.cols);
    bool wide = a.cols % 4 == 0;
    float g[TILE] = {}, u[TILE] = {};
#pragma unroll 1
    for (u32 run = lane; 8 * run < a.cols; run += 32) {
        float wg[8], wu[8], xs[8];
        run_of<W>(gate + at, run, a.cols, wg);
        run_of<W>(up + at, run, a.cols, wu);
#pragma unroll
        for (u32 r = 0; r < TILE; r++)
            if (r < n) {
                run_of_x(x + (u64)(first + r) * a.cols, run, a.cols, wide, xs);
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    g[r] += wg[i] * xs[i];
                    u[r] += wu[i] * xs[i];
                }
            }
    }
    // Lane r ends up with the sums of row r, so that the rest is done once, side by side.
    float vg = 0.0f, vu = 0.0f;
#pragma unroll
    for (u32 r = 0; r < TILE; r++) {
        float all_g = warp_sum(g[r]), all_u = warp_sum(u[r]);
        if (lane == r) {
            vg = all_g;
            vu = all_u;
        }
    }
    if (lane >= n) return;
    if (a.bias & 1) vg += gate_bias[out];
    if (a.bias & 2) vu += up_bias[out];
    y[(u64)(first + lane) * a.outs + out] = activate(a.act, a.alpha, a.limit, vg, vu);
}

#define ENTRY(W, suffix)                                                                           \
    extern "C" __global__ void gated_mlp_##suffix(GatedArgs a, const u8* gate, const u8* up,       \
                                                  const float* x, const float* gate_bias,          \
                                                  const float* up_bias, float* y) {                \
        gated<W>(a, gate, up, x, gate_bias, up_bias, y);                                           \
    }
EACH_FORMAT(ENTRY)
