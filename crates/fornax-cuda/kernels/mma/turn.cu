// What comes between the products and attention, for any number of rows: norms of the heads of queries and keys, rotary
// positions, and the append of keys and values to the paged cache.
//
// A block takes one row (blockIdx.x) and some of its heads, a warp one head after the other; sine and cosine of the
// position are made once for them.
#include "../cache.cuh"
#include "../turns.cuh"

struct TurnArgs {
    u32 rows, heads, kv_heads, dim, v_dim, pairs, halves, stride, tokens;
    float eps, magnitude;
};

static const u32 THREADS = 256, WARPS = THREADS / 32, DIM_MAX = 256;

template <class K>
__device__ void turn(const TurnArgs& a, const float* q, const float* k, const float* v, const float* q_norm,
                     const float* k_norm, const float* freqs, const Row* rows, const u32* tables, float* q_out,
                     u8* keys, u8* values) {
    __shared__ float2 turns[DIM_MAX / 2];
    __shared__ float room[WARPS][DIM_MAX];
    u32 row = blockIdx.x, t = threadIdx.x, lane = t % 32;
    let_next_begin();
    Row r = rows[row];
    if (r.left == 0) {
        await_before();
        return;
    }
    Head h = {a.dim, a.pairs, a.halves, a.eps};
    for (u32 i = t; i < a.pairs; i += THREADS) turns[i] = turn_of(r.pos, freqs[i], a.magnitude);
    await_before();
    __syncthreads();
    u64 place = place_of(tables + (u64)r.seq * a.stride, r.pos);
    float* to = room[t / 32];
    for (u32 item = blockIdx.y * WARPS + t / 32; item < a.heads + 2 * a.kv_heads; item += WARPS * gridDim.y) {
        if (item < a.heads) {
            u64 at = ((u64)row * a.heads + item) * a.dim;
            turn_head(h, q + at, q_norm, turns, lane, to);
            for (u32 i = lane; i < a.dim; i += 32) q_out[at + i] = to[i];
        } else if (item < a.heads + a.kv_heads) {
            u32 head = item - a.heads;
            turn_head(h, k + ((u64)row * a.kv_heads + head) * a.dim, k_norm, turns, lane, to);
            u64 at = (place * a.kv_heads + head) * a.dim;
            for (u32 i = lane; i < a.dim; i += 32) K::put(keys, (u64)a.tokens * a.kv_heads * a.dim, at + i, to[i]);
        } else {
            u32 head = item - a.heads - a.kv_heads;
            const float* from = v + ((u64)row * a.kv_heads + head) * a.v_dim;
            u64 at = (place * a.kv_heads + head) * a.v_dim;
            for (u32 i = lane; i < a.v_dim; i += 32) K::put(values, (u64)a.tokens * a.kv_heads * a.v_dim, at + i, from[i]);
        }
        __syncwarp();
    }
}

#define ENTRY(K, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        turn_##suffix(TurnArgs a, const float* q, const float* k, const float* v, const float* q_norm,                \
                      const float* k_norm, const float* freqs, const Row* rows, const u32* tables, float* q_out,      \
                      u8* keys, u8* values) {                                                                          \
        turn<K>(a, q, k, v, q_norm, k_norm, freqs, rows, tables, q_out, keys, values);                                 \
    }
ENTRY(KvF32, f32)
ENTRY(KvF16, f16)
ENTRY(KvQ8_0, q8_0)
