// y = act(G·x + bg) * (U·x + bu).
//
// gate, up: outs × cols in one format; x: rows × cols f32; y: rows × outs f32. A warp takes one
// output of up to TILE rows and reads one row of each matrix; sums are f32.
#include "../weights.cuh"

struct GatedArgs {
    u32 rows, cols, outs, bias, act;
    float alpha, limit;
};

static const u32 TILE = 8;

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float activate(const GatedArgs& a, float g, float u) {
    if (a.act == 0) return g * sigmoid(g) * u;
    if (a.act == 1) {
        float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(inner)) * u;
    }
    g = fminf(g, a.limit);
    u = fminf(fmaxf(u, -a.limit), a.limit);
    return g * sigmoid(a.alpha * g) * (u + 1.0f);
}

template <class W>
__device__ void gated(const GatedArgs& a, const u8* gate, const u8* up, const float* x,
                      const float* gate_bias, const float* up_bias, float* y) {
    u32 out = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (out >= a.outs) return;
    u32 first = blockIdx.y * TILE, n = min(TILE, a.rows - first);
    u64 at = (u64)out * W::row_bytes(a.cols);
    float g[TILE] = {}, u[TILE] = {};
#pragma unroll 1
    for (u32 i = lane; i < a.cols; i += 32) {
        float wg = W::at(gate + at, i), wu = W::at(up + at, i);
#pragma unroll
        for (u32 r = 0; r < TILE; r++) {
            float v = r < n ? x[(u64)(first + r) * a.cols + i] : 0.0f;
            g[r] += wg * v;
            u[r] += wu * v;
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
    y[(u64)(first + lane) * a.outs + out] = activate(a, vg, vu);
}

#define ENTRY(W, suffix)                                                                           \
    extern "C" __global__ void gated_mlp_##suffix(GatedArgs a, const u8* gate, const u8* up,       \
                                                  const float* x, const float* gate_bias,          \
                                                  const float* up_bias, float* y) {                \
        gated<W>(a, gate, up, x, gate_bias, up_bias, y);                                           \
    }
EACH_FORMAT(ENTRY)
