// The gated activations, numbered as the boundary lists them, and what gated layers are given.
#pragma once
#include "layout.cuh"

struct GatedArgs {
    u32 rows, cols, outs, bias, act;
    float alpha, limit;
};

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float activate(u32 act, float alpha, float limit, float g, float u) {
    if (act == 0) return g * sigmoid(g) * u;
    if (act == 1) {
        float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(inner)) * u;
    }
    g = fminf(g, limit);
    u = fminf(fmaxf(u, -limit), limit);
    return g * sigmoid(alpha * g) * (u + 1.0f);
}
