// Norm and rotary positions of a head, alike wherever they are computed: a row's keys must not depend on which kernel made
// them.
#pragma once
#include "layout.cuh"

struct Head {
    u32 dim, pairs, halves;
    float eps;
};

// Cosine and sine at a position. The full-range sine: the fast one is useless for angles of thousands of radians.
__device__ inline float2 turn_of(u32 pos, float freq, float magnitude) {
    float s, c;
    sincosf((float)pos * freq, &s, &c);
    return {c * magnitude, s * magnitude};
}

// Norms and turns a head into the warp's own memory.
__device__ inline void turn_head(const Head& h, const float* x, const float* norm, const float2* turns, u32 lane, float* to) {
    float scale = 1.0f;
    if (norm) {
        float sum = 0.0f;
        for (u32 i = lane; i < h.dim; i += 32) sum = fmaf(x[i], x[i], sum);
        scale = 1.0f / sqrtf(warp_sum(sum) / (float)h.dim + h.eps);
    }
    for (u32 i = lane; i < h.pairs; i += 32) {
        u32 p = h.halves ? i : 2 * i, q = h.halves ? i + h.pairs : 2 * i + 1;
        float u = x[p] * scale, v = x[q] * scale;
        if (norm) {
            u *= __ldg(norm + p);
            v *= __ldg(norm + q);
        }
        float2 turn = turns[i];
        to[p] = fmaf(u, turn.x, -(v * turn.y));
        to[q] = fmaf(u, turn.y, v * turn.x);
    }
    for (u32 i = 2 * h.pairs + lane; i < h.dim; i += 32) to[i] = x[i] * scale * (norm ? __ldg(norm + i) : 1.0f);
    __syncwarp();
}
