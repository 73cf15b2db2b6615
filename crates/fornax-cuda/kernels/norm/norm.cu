// RMS norm of rows, and of heads with rotary positions behind it. Sums are f32.
//
// rms_norm: a block takes one row of `width`; reads it twice, writes it once.
// norm_rope: a warp takes one head; a lane takes pairs lane, lane + 32, …, then what is not
// rotated.
#include "../layout.cuh"

struct NormArgs {
    u32 rows, width;
    float eps;
    u32 residual;
};

extern "C" __global__ void rms_norm(NormArgs a, const float* x, const float* weight,
                                    const float* residual, float* out) {
    __shared__ float part[32];
    u64 at = (u64)blockIdx.x * a.width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) sum += x[at + i] * x[at + i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    // Every warp adds the parts, so that no second exchange is needed.
    u32 lane = threadIdx.x % 32;
    sum = warp_sum(lane < blockDim.x / 32 ? part[lane] : 0.0f);
    float scale = 1.0f / sqrtf(sum / (float)a.width + a.eps);
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        float v = x[at + i] * scale * weight[i];
        out[at + i] = a.residual ? v + residual[at + i] : v;
    }
}

struct RopeArgs {
    u32 rows, heads, dim, norm;
    float eps;
    u32 pairs, halves;
    float magnitude;
};

extern "C" __global__ void norm_rope(RopeArgs a, const float* x, const float* norm,
                                     const float* freqs, const Row* rows, float* out) {
    u32 head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= a.heads) return;
    u32 row = blockIdx.y;
    u64 at = ((u64)row * a.heads + head) * a.dim;
    float scale = 1.0f;
    if (a.norm) {
        float sum = 0.0f;
        for (u32 i = lane; i < a.dim; i += 32) sum += x[at + i] * x[at + i];
        scale = 1.0f / sqrtf(warp_sum(sum) / (float)a.dim + a.eps);
    }
    float pos = (float)rows[row].pos;
    for (u32 i = lane; i < a.pairs; i += 32) {
        u32 p = a.halves ? i : 2 * i, q = a.halves ? i + a.pairs : 2 * i + 1;
        float u = x[at + p] * scale, v = x[at + q] * scale;
        if (a.norm) {
            u *= norm[p];
            v *= norm[q];
        }
        // The full-range sine: the fast one is useless for angles of thousands of radians.
        float s, c;
        sincosf(pos * freqs[i], &s, &c);
        out[at + p] = a.magnitude * (u * c - v * s);
        out[at + q] = a.magnitude * (u * s + v * c);
    }
    for (u32 i = 2 * a.pairs + lane; i < a.dim; i += 32)
        out[at + i] = x[at + i] * scale * (a.norm ? norm[i] : 1.0f);
}
