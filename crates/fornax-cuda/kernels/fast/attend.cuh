// Attention of single rows over the paged cache, with what comes before it: head norms, rotary positions, and the
// append of the row's own key and value.
//
// A block takes one KV head of one row and one part of its context, for all query heads that share the KV head. Four
// neighbouring keys at a time go to a group of DIM / 8 lanes; a lane keeps 8 elements of each query head and of its running mean. The
// first keys are read before the queries exist. Parts leave unnormalised means with maximum (of log2 scores) and sum;
// up to four are put together by the stage that reads them, more by the last block to finish.
#pragma once
#include "stage.cuh"

#include "../keys.cuh"

#ifndef DIM
#define DIM 128
#define HEADS_PER_KV 2
#define Kv KvF16
#endif
// CAPPED is defined where scores are capped.

static const u32 LANES = DIM / 8, PER_WARP = 32 / LANES;
// Query heads of one warp; warps of a set take the same heads.
static const u32 OWN = HEADS_PER_KV <= 4 ? HEADS_PER_KV : (HEADS_PER_KV + 1) / 2;
static const u32 SETS = HEADS_PER_KV <= 4 ? 1 : 2;
static const u32 SET_WARPS = WARPS / SETS, GROUPS = SET_WARPS * PER_WARP;
static const u32 AT_ONCE = 4;

struct KvF16 : EightsF16 {
    __device__ static Eight load(const u8* pool, u64 tokens, u32 width, u64 token, u32 e) {
        Eight x;
        const u8* p = pool + (token * width + e) * 2;
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.v.x), "=r"(x.v.y), "=r"(x.v.z), "=r"(x.v.w) : "l"(p) : "memory");
        return x;
    }
};
struct KvF32 : EightsF32 {
    __device__ static Eight load(const u8* pool, u64 tokens, u32 width, u64 token, u32 e) {
        const float* p = (const float*)pool + token * width + e;
        Eight x = {fresh4(p), fresh4(p + 4)};
        return x;
    }
};
struct KvQ8_0 : EightsQ8 {
    __device__ static Eight load(const u8* pool, u64 tokens, u32 width, u64 token, u32 e) {
        Eight x;
        u16 d;
        const u8 *p = pool + token * width + e, *s = pool + scale_at(tokens * width, token * width, e);
        asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(x.a), "=r"(x.b) : "l"(p) : "memory");
        asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(d) : "l"(s) : "memory");
        x.d = d;
        return x;
    }
};

// Parts of a context of `past` keys: enough that a few keys are all that a warp has to do, and few enough that the next
// stage puts them together; for long contexts as many as there are.
__device__ inline u32 parts_of(u32 past, u32 most) {
    u32 n = past <= 512 ? min((past + 31) / 32, PARTS_DIRECT) : min((past + 63) / 64, PARTS);
    return max(min(n, most), 1u);
}

struct Attend {
    const Row* rows;    // in shared memory
    const u32* tables;  // of all groups
    u32 group_words, stride;
    u64 tokens;  // of a pool
    const float2* turns;
    u32 turn_rows, turn_pairs;
    float *means, *scales;
    u32* done;
};

// Loads a head, norms it, and turns `pairs` of its pairs, into shared memory. One warp.
__device__ inline void turn_head(const Stage& s, const float* x, const float* norm, const float2* turns, float scale,
                                 u32 pairs, float* to, u32 lane) {
    static const u32 N = (DIM + 63) / 64;
    float a[N], b[N], na[N], nb[N], square = 0.0f;
    float2 turn[N];
    u32 i[N], k[N];
#pragma unroll
    for (u32 j = 0; j < N; j++) {
        u32 p = min(lane + 32 * j, (u32)DIM / 2 - 1);
        bool halves = s.halves && p < pairs;
        i[j] = halves ? p : 2 * p;
        k[j] = halves ? p + pairs : 2 * p + 1;
        a[j] = fresh(x + i[j]);
        b[j] = fresh(x + k[j]);
        turn[j] = {1.0f, 0.0f};
        if (p < pairs) turn[j] = turns[p];
        na[j] = norm ? __ldg(norm + i[j]) : 1.0f;
        nb[j] = norm ? __ldg(norm + k[j]) : 1.0f;
        // Heads of 32 have half as many pairs as there are lanes.
        if (lane + 32 * j < DIM / 2) square += a[j] * a[j] + b[j] * b[j];
    }
    if (norm) scale *= rsqrtf(warp_sum(square) / (float)DIM + s.eps);
#pragma unroll
    for (u32 j = 0; j < N; j++) {
        float u = a[j] * scale * na[j], v = b[j] * scale * nb[j];
        to[i[j]] = u * turn[j].x - v * turn[j].y;
        to[k[j]] = u * turn[j].y + v * turn[j].x;
    }
}

// One job of the stage, which waits for the stage before it as late as it can.
__device__ __noinline__ void attend(const Stage& s, const Attend& c, u32 row, u32 kv_head, u32 part, u32 parts,
                                    float* room, const u32* counter, u32 target) {
    __shared__ float part_top[WARPS][OWN], part_sum[WARPS][OWN];
    __shared__ u32 is_last;
    float* query = room;                            // [HEADS_PER_KV + 2][DIM]
    float* mixes = room + (HEADS_PER_KV + 2) * DIM;  // [WARPS][OWN][DIM]
    u32 t = threadIdx.x, warp = t / 32, lane = t % 32, sub = lane / LANES, e = lane % LANES * 8;
    u32 set = warp / SET_WARPS, group = warp % SET_WARPS * PER_WARP + sub;
    Row r = c.rows[row];
    const u32* table = c.tables + s.group * c.group_words + r.seq * c.stride;
    const u8 *keys = (const u8*)s.w0, *values = (const u8*)s.w1;
    u32 width = s.kv_heads * DIM, from = first_key(s.window, r.pos), start = from & ~3u, past = r.pos - start;
    u32 share = ((past + parts - 1) / parts + 3) & ~3u, k0 = start + part * share, k1 = min(k0 + share, r.pos);
    bool last = part == parts - 1;
    typename Kv::Eight k[AT_ONCE], v[AT_ONCE];
    // Four neighbours are of one block of the cache.
    auto fetch = [&](u32 key) {
        if (key >= k1) return;
        u64 at = place_of(table, key);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            // A key behind the last is read as the last, and counts for nothing.
            u64 own = at + min(i, k1 - 1 - key);
            k[i] = Kv::load(keys, c.tokens, width, own, kv_head * DIM + e);
            v[i] = Kv::load(values, c.tokens, width, own, kv_head * DIM + e);
        }
    };
    fetch(k0 + group * AT_ONCE);
    MARK(5, 4);
    await(counter, target);
    MARK(5, 0);
    float factor = s.scale * (s.softcap != 0.0f ? 1.0f : LOG2E);
    const float2* turns = c.turns + ((u64)s.rope * c.turn_rows + row) * c.turn_pairs;
    // Query heads, then, for the part that appends them, the key and the value. Neither norm nor turn touches a value.
    u32 items = last ? HEADS_PER_KV + 2 : HEADS_PER_KV;
#pragma unroll 1
    for (u32 item = warp; item < items; item += WARPS) {
        bool is_query = item < HEADS_PER_KV, is_value = item > HEADS_PER_KV;
        u64 head = is_query ? (u64)row * s.heads + kv_head * HEADS_PER_KV + item : (u64)row * s.kv_heads + kv_head;
        const float* from = (const float*)(is_query ? s.x : is_value ? s.x2 : s.x1) + head * DIM;
        const float* norm = (const float*)(is_query ? s.norm : is_value ? 0 : s.norm1);
        turn_head(s, from, norm, turns, is_query ? factor : 1.0f, is_value ? 0 : s.pairs, query + item * DIM, lane);
    }
    __syncthreads();
    if (last) {
#pragma unroll 1
        for (u32 i = t; i < 2 * DIM; i += THREADS) {
            u32 which = i / DIM, el = i % DIM;
            float* at = query + (HEADS_PER_KV + which) * DIM + el;
            *at = Kv::store((u8*)(which ? values : keys), c.tokens * width, place_of(table, r.pos) * width, kv_head * DIM + el, *at);
        }
        __syncthreads();
    }
    MARK(5, 1);
    float q[OWN][8], mix[OWN][8], top[OWN], sum[OWN];
#pragma unroll
    for (u32 h = 0; h < OWN; h++) {
        u32 head = min(set * OWN + h, (u32)HEADS_PER_KV - 1);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            q[h][i] = query[head * DIM + e + i];
            mix[h][i] = 0.0f;
        }
        top[h] = -1e30f;
        sum[h] = 0.0f;
    }
#ifdef CAPPED
    auto capped = [&](float x) { return s.softcap != 0.0f ? s.softcap * tanhf(x / s.softcap) * LOG2E : x; };
#else
    auto capped = [](float x) { return x; };
#endif
    if (last && group == 0) {  // the row's own key
#pragma unroll
        for (u32 h = 0; h < OWN; h++) {
            float x = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 8; i++) x = fmaf(q[h][i], query[HEADS_PER_KV * DIM + e + i], x);
#pragma unroll
            for (u32 d = 1; d < LANES; d *= 2) x += __shfl_xor_sync(LANES == 32 ? 0xffffffffu : (1u << LANES) - 1, x, d);
            top[h] = capped(x);
            sum[h] = 1.0f;
#pragma unroll
            for (u32 i = 0; i < 8; i++) mix[h][i] = query[(HEADS_PER_KV + 1) * DIM + e + i];
        }
    }
    __syncwarp();
#pragma unroll 1
    for (u32 base = k0; base < k1; base += GROUPS * AT_ONCE) {
        u32 key = base + group * AT_ONCE;
        if (base != k0) fetch(key);
        // Whole warps pass over what is behind the last key.
        if (base + group / PER_WARP * PER_WARP * AT_ONCE >= k1) break;
        float score[AT_ONCE][OWN];
        scores_of<Kv, LANES>(k, q, score);
        weigh(score, mix, top, sum, [&](u32 i, float x) { return key + i < k1 && key + i >= from ? capped(x) : -1e30f; });
        if (key >= k1) continue;
        add_values<Kv>(v, score, mix);
    }
    // The groups of a warp, then the warps of a set that had keys.
    u32 busy = min(max((k1 > k0 ? k1 - k0 : 0) + PER_WARP * AT_ONCE - 1, PER_WARP * AT_ONCE) / (PER_WARP * AT_ONCE), SET_WARPS);
    if (warp % SET_WARPS < busy) {
#pragma unroll
        for (u32 h = 0; h < OWN; h++) {
            join_groups<LANES>(top[h], sum[h], mix[h]);
            if (sub == 0) {
                float4* to = (float4*)(mixes + (warp * OWN + h) * DIM + e);
                to[0] = {mix[h][0], mix[h][1], mix[h][2], mix[h][3]};
                to[1] = {mix[h][4], mix[h][5], mix[h][6], mix[h][7]};
            }
            if (lane == 0) {
                part_top[warp][h] = top[h];
                part_sum[warp][h] = sum[h];
            }
        }
    }
    __syncthreads();
    MARK(5, 2);
    u64 first_head = (u64)row * s.heads + kv_head * HEADS_PER_KV;
    const float* sinks = (const float*)s.bias;
#pragma unroll 1
    for (u32 i = t; i < HEADS_PER_KV * DIM; i += THREADS) {
        u32 head = i / DIM, el = i % DIM, w0 = head / OWN * SET_WARPS, h = head % OWN;
        float sink = sinks && last ? __ldg(sinks + kv_head * HEADS_PER_KV + head) * LOG2E : -1e30f;
        float high = sink, all = 0.0f, mean = 0.0f;
#pragma unroll 2
        for (u32 w = w0; w < w0 + busy; w++) high = fmaxf(high, part_top[w][h]);
#pragma unroll 2
        for (u32 w = w0; w < w0 + busy; w++) {
            float weight = power2(part_top[w][h] - high);
            all = fmaf(weight, part_sum[w][h], all);
            mean = fmaf(weight, mixes[(w * OWN + h) * DIM + el], mean);
        }
        if (sinks && last) all += power2(sink - high);
        u64 at = (first_head + head) * PARTS + part;
        c.means[at * DIM + el] = mean;
        if (el == 0) {
            c.scales[at * 2] = high;
            c.scales[at * 2 + 1] = all;
        }
    }
    MARK(5, 6);
    if (parts <= PARTS_DIRECT) return;
    __threadfence();
    __syncthreads();
    if (t == 0) {
        u32* done = c.done + row * s.kv_heads + kv_head;
        is_last = atomicAdd(done, 1) == parts - 1;
        if (is_last) *done = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
#pragma unroll 1
    for (u32 i = t; i < HEADS_PER_KV * DIM; i += THREADS) {
        u64 at = (first_head + i / DIM) * PARTS;
        float high = -1e30f, all = 0.0f, mean = 0.0f;
#pragma unroll 4
        for (u32 p = 0; p < parts; p++) high = fmaxf(high, fresh(c.scales + (at + p) * 2));
#pragma unroll 4
        for (u32 p = 0; p < parts; p++) {
            float2 ml = fresh2(c.scales + (at + p) * 2);
            float weight = power2(ml.x - high);
            all = fmaf(weight, ml.y, all);
            mean = fmaf(weight, fresh(c.means + (at + p) * DIM + i % DIM), mean);
        }
        __syncwarp();
        c.means[at * DIM + i % DIM] = mean;
        // Every thread has read the scales of its head before one of them is overwritten.
        room[i] = high;
        room[HEADS_PER_KV * DIM + i] = all;
    }
    __syncthreads();
    for (u32 head = t; head < HEADS_PER_KV; head += THREADS) {
        u64 at = (first_head + head) * PARTS * 2;
        c.scales[at] = room[head * DIM];
        c.scales[at + 1] = room[HEADS_PER_KV * DIM + head * DIM];
    }
}
