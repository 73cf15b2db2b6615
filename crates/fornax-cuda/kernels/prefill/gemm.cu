// y = W·x for many rows, of halves with f32 sums: what long prompts are made of. For sm_90a.
//
// Both matrices lie in memory as the tensor cores read them (tiles.cuh). A block takes 128 rows × COLUMNS outputs: one
// warp copies tiles to a ring of shared memory, two warpgroups multiply 64 rows each. Outputs go to rows of f32 with bias
// and residual; or pairs of them, gate and up, become one, and go as halves to where the next product reads them.
#include "../tensor.cuh"
#include "../tiles.cuh"
#include "../wgmma.cuh"

#ifndef COLUMNS
#define COLUMNS 128
#define DEPTH 3
#define BLOCKS 2
#endif

static const u32 THREADS = 288, GROUPS = 2, STAGE = TILE_BYTES * (1 + COLUMNS / 128);
static const u32 PITCH = COLUMNS + 4;  // floats of a row of sums
static const u32 EPI_ROWS = 0, EPI_PAIRS = 1;

struct GemmArgs {
    u32 rows, outs, steps, epi, act, before, cut0, cut1, width0, width1, width2, to_tiles;
    float alpha, limit, scale, softcap;
};

struct Places {
    const float *bias, *residual;
    float *y0, *y1, *y2;
    u8* tiles;
};

__device__ inline float gate_of(const GemmArgs& a, float g, float u) {
    if (a.act == 0) return __fdividef(g, 1.0f + __expf(-g)) * u;
    if (a.act == 1) {
        float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(inner)) * u;
    }
    g = fminf(g, a.limit);
    u = fminf(fmaxf(u, -a.limit), a.limit);
    return __fdividef(g, 1.0f + __expf(-a.alpha * g)) * (u + 1.0f);
}

// Four neighbouring outputs of a row; every width is a multiple of four.
__device__ inline void put(const GemmArgs& a, const Places& p, float4 v, u32 out, u32 row) {
    out += a.before;
    float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (p.bias) x[i] += p.bias[out + i];
        x[i] *= a.scale;
        if (a.softcap != 0.0f) x[i] = a.softcap * tanhf(x[i] / a.softcap);
    }
    if (p.residual) {
        float4 r = *(const float4*)(p.residual + (u64)row * a.width0 + out);
        x[0] += r.x;
        x[1] += r.y;
        x[2] += r.z;
        x[3] += r.w;
    }
    float* to = p.y0 + (u64)row * a.width0 + out;
    if (out >= a.cut1) to = p.y2 + (u64)row * a.width2 + (out - a.cut1);
    else if (out >= a.cut0) to = p.y1 + (u64)row * a.width1 + (out - a.cut0);
    *(float4*)to = {x[0], x[1], x[2], x[3]};
}

__device__ inline float pair(const GemmArgs& a, const Places& p, float g, float u, u32 out) {
    if (p.bias) {
        g += p.bias[out];
        u += p.bias[out + 1];
    }
    return within_half(gate_of(a, g, u));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm(GemmArgs a, const u8* x, const u8* w, const float* bias, const float* residual, float* y0, float* y1, float* y2, u8* tiles) {
    extern __shared__ __align__(1024) u8 room[];
    __shared__ __align__(8) u64 barriers[2 * DEPTH];
    u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
    u32 row_tiles = (a.rows + TILE_ROWS - 1) / TILE_ROWS, row_tile = blockIdx.x % row_tiles, column = blockIdx.x / row_tiles * COLUMNS;
    // Rows of a tile begin where a kilobyte does.
    u32 ring = (shared_address(room) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * DEPTH;
    if (t == 0) {
        for (u32 i = 0; i < DEPTH; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, GROUPS);
        }
        barriers_made();
    }
    let_next_begin();
    await_before();
    __syncthreads();
    if (warp == 8) {
        if (lane != 0) return;
        const u8* from = x + (u64)row_tile * a.steps * TILE_BYTES;
        const u8* weights = w + (u64)(column / 128) * a.steps * TILE_BYTES;
        for (u32 step = 0; step < a.steps; step++) {
            u32 at = step % DEPTH, turn = step / DEPTH, to = ring + at * STAGE;
            if (turn > 0) barrier_wait(empty + 8 * at, (turn - 1) & 1);
            barrier_expect(full + 8 * at, STAGE);
            copy_bulk(to, from + (u64)step * TILE_BYTES, TILE_BYTES, full + 8 * at);
            for (u32 i = 0; i < COLUMNS / 128; i++)
                copy_bulk(to + (1 + i) * TILE_BYTES, weights + ((u64)i * a.steps + step) * TILE_BYTES, TILE_BYTES, full + 8 * at);
        }
        return;
    }
    u32 group = warp / 4;
    float d[COLUMNS / 2];
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
#pragma unroll 1
    for (u32 step = 0; step < a.steps; step++) {
        u32 at = step % DEPTH;
        barrier_wait(full + 8 * at, step / DEPTH & 1);
        u64 left = describe(ring + at * STAGE + group * 64 * 128), right = describe(ring + at * STAGE + TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; k++) wgmma(d, left + 2 * k, right + 2 * k, 1);
        wgmma_commit();
        // The step before is done with: its place can be filled.
        wgmma_wait<1>();
        if (step > 0 && t % 128 == 0) barrier_arrive(empty + 8 * ((step - 1) % DEPTH));
    }
    wgmma_wait<0>();
    // Both groups are done with the ring: it takes the sums, so that outputs are written in their order.
    asm volatile("bar.sync 1, 256;" ::: "memory");
    float* sums = (float*)(room + (ring - shared_address(room))) + group * 64 * PITCH;
    u32 g = warp % 4 * 16 + lane / 4, c = lane % 4;
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 8; i++) {
        *(float2*)(sums + g * PITCH + 8 * i + 2 * c) = {d[4 * i], d[4 * i + 1]};
        *(float2*)(sums + (g + 8) * PITCH + 8 * i + 2 * c) = {d[4 * i + 2], d[4 * i + 3]};
    }
    __syncwarp();
    Places p = {bias, residual, y0, y1, y2, tiles};
    // A warp writes the 16 rows that it has, row by row.
#pragma unroll 1
    for (u32 i = 0; i < 16; i++) {
        u32 own = warp % 4 * 16 + i, row = row_tile * TILE_ROWS + group * 64 + own;
        if (row >= a.rows) break;
        const float* from = sums + own * PITCH;
        if (a.epi == EPI_ROWS) {
#pragma unroll
            for (u32 k = lane * 4; k < COLUMNS; k += 128)
                if (column + k < a.outs) put(a, p, *(const float4*)(from + k), column + k, row);
        } else {
#pragma unroll
            for (u32 k = lane * 4; k < COLUMNS; k += 128) {
                float4 v = *(const float4*)(from + k);
                u32 out = column + k, at = out / 2;
                bool there = out < a.outs;
                float x = there ? pair(a, p, v.x, v.y, out) : 0.0f, y = there ? pair(a, p, v.z, v.w, out + 2) : 0.0f;
                if (a.epi == EPI_PAIRS) {
                    if (there) *(float2*)(p.y0 + (u64)row * a.width0 + at) = {x, y};
                } else if (at < (a.outs + 127) / 128 * 64) {
                    *(u32*)(p.tiles + tile_at(row, at, a.to_tiles)) = halves(x, y);
                }
            }
        }
    }
}
