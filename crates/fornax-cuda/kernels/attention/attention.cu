// The paged cache: appending keys and values, and causal attention over them.
//
// A pool holds [block][token][heads · width] of one layer, f32, f16 or 8-bit blocks, keys and values
// apart.
// A table row of `stride` entries belongs to one sequence. Rows with nothing left to produce are
// passed over: their positions may lie past their blocks.
//
// attention: a block of 4 warps takes one head of one row; warp w takes keys first + w, first +
// w + 4, …; lanes split the width; a running maximum and f32 sums, put together at the end
// through shared memory. Bytes read per head and key: k_width + v_width elements.
#include "../layout.cuh"

struct KvWriteArgs {
    u32 rows, k_width, v_width, block, stride, tokens;
};

// Element i of a pool of `all` elements. `put` is called by whole warps for 32 neighbours.
struct KvF32 {
    __device__ static float get(const u8* pool, u64 all, u64 i) { return ((const float*)pool)[i]; }
    __device__ static void put(u8* pool, u64 all, u64 i, float v) { ((float*)pool)[i] = v; }
};

struct KvF16 {
    __device__ static float get(const u8* pool, u64 all, u64 i) { return half_to_float(((const u16*)pool)[i]); }
    __device__ static void put(u8* pool, u64 all, u64 i, float v) { ((u16*)pool)[i] = float_to_half(v); }
};

// All 8-bit numbers, then all scales.
struct KvQ8_0 {
    __device__ static float get(const u8* pool, u64 all, u64 i) {
        return half_to_float(((const u16*)(pool + all))[i / 32]) * (float)((const signed char*)pool)[i];
    }
    __device__ static void put(u8* pool, u64 all, u64 i, float v) {
        float top = fabsf(v);
        for (u32 d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        float d = top / 127.0f;
        pool[i] = (u8)(d > 0.0f ? (int)roundf(v / d) : 0);
        if (i % 32 == 0) ((u16*)(pool + all))[i / 32] = float_to_half(d);
    }
};

// A token's place in a pool, counted in tokens.
__device__ inline u64 token_at(const u32* table, u32 block, u32 pos) {
    return (u64)table[pos / block] * block + pos % block;
}

template <class K>
__device__ void kv_write(const KvWriteArgs& a, const float* k, const float* v, const Row* rows,
                         const u32* tables, u8* keys, u8* values) {
    u32 row = blockIdx.x;
    Row r = rows[row];
    if (r.left == 0) return;
    u64 at = token_at(tables + (u64)r.seq * a.stride, a.block, r.pos);
    for (u32 i = threadIdx.x; i < a.k_width; i += blockDim.x)
        K::put(keys, (u64)a.tokens * a.k_width, at * a.k_width + i, k[(u64)row * a.k_width + i]);
    for (u32 i = threadIdx.x; i < a.v_width; i += blockDim.x)
        K::put(values, (u64)a.tokens * a.v_width, at * a.v_width + i, v[(u64)row * a.v_width + i]);
}

struct AttentionArgs {
    u32 rows, heads, kv_heads, k_width, v_width, block, stride, window;
    float scale, softcap;
    u32 sinks, tokens;
};

static const u32 WARPS = 4;
// Value elements a lane keeps: heads of up to 32 · LANE elements.
static const u32 LANE = 8;

template <class K>
__device__ void attention(const AttentionArgs& a, const float* q, const Row* rows,
                          const u32* tables, const u8* keys, const u8* values,
                          const float* sinks, float* out) {
    __shared__ float part_max[WARPS], part_sum[WARPS];
    __shared__ float part_mix[WARPS][32 * LANE];
    u32 head = blockIdx.x, row = blockIdx.y;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Row r = rows[row];
    float* to = out + ((u64)row * a.heads + head) * a.v_width;
    if (r.left == 0) {
        for (u32 i = threadIdx.x; i < a.v_width; i += blockDim.x) to[i] = 0.0f;
        return;
    }
    const u32* table = tables + (u64)r.seq * a.stride;
    const float* query = q + ((u64)row * a.heads + head) * a.k_width;
    u32 group = head / (a.heads / a.kv_heads);
    u64 all_keys = (u64)a.tokens * a.kv_heads * a.k_width;
    u64 all_values = (u64)a.tokens * a.kv_heads * a.v_width;
    u32 first = a.window && r.pos + 1 > a.window ? r.pos + 1 - a.window : 0;
    float top = negative_infinity(), sum = 0.0f, mix[LANE] = {};
    for (u32 pos = first + warp; pos <= r.pos; pos += WARPS) {
        u64 at = token_at(table, a.block, pos) * a.kv_heads + group;
        float score = 0.0f;
        for (u32 i = lane; i < a.k_width; i += 32)
            score += query[i] * K::get(keys, all_keys, at * a.k_width + i);
        score = warp_sum(score) * a.scale;
        if (a.softcap != 0.0f) score = a.softcap * tanhf(score / a.softcap);
        float higher = fmaxf(top, score);
        float keep = expf(top - higher), weight = expf(score - higher);
        top = higher;
        sum = sum * keep + weight;
#pragma unroll
        for (u32 j = 0; j < LANE; j++) {
            u32 i = lane + 32 * j;
            if (i < a.v_width)
                mix[j] = mix[j] * keep + weight * K::get(values, all_values, at * a.v_width + i);
        }
    }
    if (lane == 0) {
        part_max[warp] = top;
        part_sum[warp] = sum;
    }
#pragma unroll
    for (u32 j = 0; j < LANE; j++) part_mix[warp][lane + 32 * j] = mix[j];
    __syncthreads();
    // A warp that saw no key has the maximum −∞ and the weight 0; the row itself is always seen.
    float all = a.sinks ? sinks[head] : negative_infinity();
    for (u32 w = 0; w < WARPS; w++) all = fmaxf(all, part_max[w]);
    float total = a.sinks ? expf(sinks[head] - all) : 0.0f;
    for (u32 w = 0; w < WARPS; w++) total += part_sum[w] * expf(part_max[w] - all);
    for (u32 i = threadIdx.x; i < a.v_width; i += blockDim.x) {
        float v = 0.0f;
        for (u32 w = 0; w < WARPS; w++) v += part_mix[w][i] * expf(part_max[w] - all);
        to[i] = v / total;
    }
}

#define ENTRY(K, suffix)                                                                           \
    extern "C" __global__ void kv_write_##suffix(KvWriteArgs a, const float* k, const float* v,    \
                                                 const Row* rows, const u32* tables,               \
                                                 u8* keys, u8* values) {                           \
        kv_write<K>(a, k, v, rows, tables, keys, values);                                          \
    }                                                                                              \
    extern "C" __global__ void attention_##suffix(                                                 \
        AttentionArgs a, const float* q, const Row* rows, const u32* tables, const u8* keys,  \
        const u8* values, const float* sinks, float* out) {                                   \
        attention<K>(a, q, rows, tables, keys, values, sinks, out);                                \
    }
ENTRY(KvF32, f32)
ENTRY(KvF16, f16)
ENTRY(KvQ8_0, q8_0)
