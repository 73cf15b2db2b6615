// Rows of f32 for the products of several rows: rounded to 8-bit blocks as fornax_plan::q8 says, or to halves in the
// tiles of the prompt's products. A norm in front is folded in: 8-bit rounding does not see the factor 1/rms, which goes
// into the scales; halves are of the normed value.
//
// A block takes one row. round_rows writes numbers [row][width], scales and scaled sums [block][stride]; halve_rows
// writes tiles of 128 rows × 64 columns, swizzled as the tensor cores read them (tiles.cuh).
#include "../rounding.cuh"
#include "../tensor.cuh"
#include "../tiles.cuh"

struct RoundArgs {
    u32 rows, width, stride, norm;
    float eps;
};

static const u32 THREADS = 256, WARPS = THREADS / 32;

// The sum over the block.
__device__ inline float block_sum(float v) {
    __shared__ float part[WARPS];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += part[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) round_rows(RoundArgs a, const float* x, const float* norm, u8* q,
                                                                 float* scales, float* sums) {
    extern __shared__ float2 kept[];  // scale and sum by block
    u32 t = threadIdx.x, row = blockIdx.x, quads = a.width / 4, nb = a.width / 32;
    const float4 *from = (const float4*)(x + (u64)row * a.width), *g = (const float4*)norm;
    u32* to = (u32*)(q + (u64)row * a.width);
    float square = 0.0f;
    let_next_begin();
    await_before();
#pragma unroll 2
    for (u32 i = t; (i & ~31u) < quads; i += THREADS) {
        float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i < quads) y = from[i];
        if (a.norm) {
            float4 w = i < quads ? g[i] : y;
            square += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
            y = {y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w};
        }
        Rounded r = round_quad(y);
        int sum = __dp4a((int)r.word, 0x01010101, 0);
#pragma unroll
        for (u32 d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (i < quads) to[i] = r.word;
        if (i < quads && t % 8 == 0) {
            float scale = r.scale();
            kept[i / 8] = {scale, scale * (float)sum};
        }
    }
    float factor = 1.0f;
    if (a.norm) factor = rsqrtf(block_sum(square) / (float)a.width + a.eps);
    __syncthreads();
    for (u32 i = t; i < nb; i += THREADS) {
        float2 v = kept[i];
        scales[(u64)i * a.stride + row] = v.x * factor;
        sums[(u64)i * a.stride + row] = v.y * factor;
    }
}

// width is a multiple of 8; columns up to the end of the last tile are zero.
extern "C" __global__ void __launch_bounds__(THREADS) halve_rows(RoundArgs a, const float* x, const float* norm, u8* to) {
    u32 t = threadIdx.x, row = blockIdx.x, parts = a.width / 8;
    const float4 *from = (const float4*)(x + (u64)row * a.width), *g = (const float4*)norm;
    float factor = 1.0f;
    let_next_begin();
    await_before();
    if (a.norm) {
        float square = 0.0f;
        for (u32 i = t; i < a.width / 4; i += THREADS) {
            float4 y = from[i];
            square += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
        }
        factor = rsqrtf(block_sum(square) / (float)a.width + a.eps);
    }
    u32 all = (parts + 7) & ~7u;
    for (u32 i = t; i < all; i += THREADS) {
        Vec4 v = {0, 0, 0, 0};
        if (i < parts) {
            float4 y = from[2 * i], z = from[2 * i + 1];
            if (a.norm) {
                float4 w = g[2 * i], u = g[2 * i + 1];
                y = {y.x * factor * w.x, y.y * factor * w.y, y.z * factor * w.z, y.w * factor * w.w};
                z = {z.x * factor * u.x, z.y * factor * u.y, z.z * factor * u.z, z.w * factor * u.w};
            }
            v = {halves(within_half(y.x), within_half(y.y)), halves(within_half(y.z), within_half(y.w)),
                 halves(within_half(z.x), within_half(z.y)), halves(within_half(z.z), within_half(z.w))};
        }
        put_global16(to + tile_at(row, i * 8, all / 8), v);
    }
}
