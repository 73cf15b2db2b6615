// Stages for any number of rows, up to eight at a time: what prompts are made of. And embedding rows out of planes.
#include "stage.cuh"

#ifndef ROWS_AT_ONCE
#define ROWS_AT_ONCE 8
#endif
static const u32 R = ROWS_AT_ONCE;

struct StageArgs {
    u32 rows, ring_at, x_at, part_at, norms_at, slots;
};

// blockIdx.y counts the tiles of R rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) stage_rows(StageArgs a, const Stage* stages) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ Stage s;
    Room m = {shared_address(room + a.ring_at) + threadIdx.x / 32 * DEPTH * SLOT_BYTES, a.x_at, a.part_at, a.norms_at,
              a.slots};
    take_stages(stages, &s, 1);
    __syncthreads();
    u32 first = blockIdx.y * R, rows = min(R, a.rows - first);
    Way y = prefetch<R>(s, m.ring, blockIdx.x, gridDim.x);
    if (threadIdx.x == 0) {
        s.x += (u64)first * s.nb * 128;
        if (s.residual) s.residual += (u64)first * s.width0 * 4;
        s.y0 += (u64)first * s.width0 * 4;
        s.y1 += (u64)first * s.width1 * 4;
        s.y2 += (u64)first * s.width2 * 4;
    }
    __syncthreads();
    Source in = {s.pro, s.dim, s.heads, 1, (const float*)s.x, (const float*)s.x1};
    round_input<R>(s, in, rows, m, room, 0, 0);
    float early = early_residual(s, y);
    stream_any<R>(y, m, room);
    finish_stage<R>(s, y, rows, m, room, 0, blockIdx.x, gridDim.x, early);
    copies_wait<0>();
}

struct EmbedRowsArgs {
    u32 rows, width, vocab, type;
    float scale;
};

extern "C" __global__ void embed_rows(EmbedRowsArgs a, const u8* table, const Row* rows, const u32* last, float* x) {
    Row r = rows[blockIdx.x];
    u32 token = r.token == NONE ? last[r.slot] : r.token, nb = a.width / 32;
    // The host has checked its tokens, the choice writes none beyond the vocabulary.
    if (token >= a.vocab) token = 0;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        Where p = {table, (u64)a.vocab * nb, a.vocab, nb, token, token * nb + i / 32};
        float v = 0.0f;
        switch (a.type) {
#define CASE(W, suffix, number)                                                                                        \
    case number: v = P_##W::at(p, i % 32); break;
            EACH_PLANED(CASE)
#undef CASE
        }
        x[(u64)blockIdx.x * a.width + i] = v * a.scale;
    }
}
