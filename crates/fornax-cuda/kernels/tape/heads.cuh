// Attention of one row by the blocks of a cluster, a KV head a cluster: head norms, positions, the append, all keys.
//
// Key j is the business of block j % 8 of the cluster, now and later, so the block that stores a key is the one that
// reads it; in launches with very many keys, which come as boxes (boxes.cuh), runs of 32 keys are. All query heads that
// share the KV head share each key; DIM / 8 lanes take a key, 8 elements a lane, in registers from the time before the
// queries exist. Each block sends what it has (means by maximum and sum) to the owners of blocks of 32 results, who put
// the eight together.
#pragma once
#include "dense.cuh"
#include "boxes.cuh"

#include "../keys.cuh"

static const u32 LANES = DIM / 8, PER_WARP = 32 / LANES;
static const u32 SETS = GROUP <= 4 ? 1 : 2, SET_WARPS = NW / SETS, GROUPS = SET_WARPS * PER_WARP;
// Raw heads lie by rank and warp, so that they travel together.
__device__ inline u32 raw_at(u32 row) {
    u32 rank = row / QKV_ROWS, i = row % QKV_ROWS;
    return (rank * NW + i % NW) * RAW_STRIDE + i / NW;
}

// A layer's addresses, 0 where there is nothing; `qkv_bias` by KV head, in the order of its rows, `gu_bias` of gate and up in
// turns.
struct TapeLayer {
    u64 norm, mlp_norm, q_norm, k_norm, qkv_bias, o_bias, gu_bias, down_bias, sinks, keys, values;
    u32 group, window, rope, number;
    float scale, softcap;
    u32 flip, spares[3];
};
static_assert(sizeof(TapeLayer) == 128, "as src/fast/tape has it");

// Loads where there is something; else x is what it was, and counts for nothing.
struct KvF16 : EightsF16 {
    typedef TileF16 Deep;
    static const bool TILES = true, BOXES = false;
    __device__ static void load(Eight& x, const u8* pool, u64 tokens, u64 token, u32 e, bool there) {
        const u8* p = pool + (token * (KV_HEADS * DIM) + e) * 2;
        asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
                     : "+r"(x.v.x), "+r"(x.v.y), "+r"(x.v.z), "+r"(x.v.w)
                     : "l"(p), "r"((u32)there)
                     : "memory");
    }
};
struct KvF32 : EightsF32 {
    typedef TileF16 Deep;
    static const bool TILES = false, BOXES = false;
    __device__ static void load(Eight& x, const u8* pool, u64 tokens, u64 token, u32 e, bool there) {
        const float* p = (const float*)pool + token * (KV_HEADS * DIM) + e;
        asm volatile(
            "{.reg .pred p; setp.ne.u32 p, %9, 0; @p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%8];"
            " @p ld.global.cg.v4.f32 {%4,%5,%6,%7}, [%8+16];}"
            : "+f"(x.a.x), "+f"(x.a.y), "+f"(x.a.z), "+f"(x.a.w), "+f"(x.b.x), "+f"(x.b.y), "+f"(x.b.z), "+f"(x.b.w)
            : "l"(p), "r"((u32)there)
            : "memory");
    }
};
struct KvQ8_0 : EightsQ8 {
    typedef TileQ8 Deep;
    static const bool TILES = true, BOXES = true;
    __device__ static void load(Eight& x, const u8* pool, u64 tokens, u64 token, u32 e, bool there) {
        const u32 width = KV_HEADS * DIM;
        const u8 *p = pool + token * width + e, *s = pool + scale_at(tokens * width, token * width, e);
        asm volatile(
            "{.reg .pred p; .reg .b16 h; setp.ne.u32 p, %5, 0; @p ld.global.cg.v2.u32 {%0,%1}, [%3];"
            " @p ld.global.cg.u16 h, [%4]; @p cvt.u32.u16 %2, h;}"
            : "+r"(x.a), "+r"(x.b), "+r"(x.d)
            : "l"(p), "l"(s), "r"((u32)there)
            : "memory");
    }
};

// Where more keys than this were there before, the tensor cores take them.
static const bool TILES = Kv::TILES && GROUP >= 2 && GROUP <= DEEP_HEADS;
#ifndef FEW_KEYS
#define FEW_KEYS (2 * GROUPS)
#endif
// From so many tokens on a launch has very many keys, where the ring holds a layer of weights: its last slots are theirs then,
// and one of those who pass on copies them.
#ifndef BOXES_FROM
#define BOXES_FROM 1536
#endif
static const u32 PLACES_MOST = 11, SLOTS_BESIDE_LEAST = 5, BESIDE = AT_RING + SLOTS_BESIDE_LEAST * SLOT_STRIDE + 511 + boxes::Queries::BYTES;
static const u32 PLACES_BESIDE = SHARED_LIMIT > BESIDE ? (SHARED_LIMIT - BESIDE) / boxes::Tile::EACH : 0;
static const u32 PLACES = PLACES_MOST < PLACES_BESIDE ? PLACES_MOST : PLACES_BESIDE, PAIRS_OF_WARPS = NW / 2;
static const bool BOXES = TILES && Kv::BOXES && WINDOWS && (!NEAR || RANK_GROUPS < FORWARDERS) && PLACES >= PAIRS_OF_WARPS;
static const u32 ROOM_OF_RUNS = PLACES * boxes::Tile::EACH + 511 + boxes::Queries::BYTES;
static const u32 SLOTS_BESIDE = BOXES ? (SHARED_LIMIT - AT_RING - ROOM_OF_RUNS) / SLOT_STRIDE : SLOTS, SLOTS_LEFT = SLOTS < SLOTS_BESIDE ? SLOTS : SLOTS_BESIDE;
static const u32 TAPE_SHARED = AT_RING + more(SLOTS * SLOT_STRIDE, BOXES ? SLOTS_LEFT * SLOT_STRIDE + ROOM_OF_RUNS : 0);
static_assert(PLACES * boxes::Tile::BARRIERS <= 512, "barriers of runs have room");
// Where runs are; behind them, queries.
__device__ inline boxes::Ring ring_of_runs() {
    u32 base = shared_address(room);
    return {(Feed::at(SLOTS_LEFT) + 511) / 512 * 512, base + AT_RUN_BARS, base + AT_ASKED, PLACES};
}
__device__ inline u32 split_queries() { return ring_of_runs().to + PLACES * boxes::Tile::EACH; }
// Keys that a group of lanes works at: as many as there are registers for, twice.
static const u32 KEYS_AT_ONCE = TILES ? FEW_KEYS / GROUPS : (GROUP <= 2 ? 4 : 2) / (sizeof(typename Kv::Eight) > 16 ? 2 : 1);

static const u32 PAIRS_A_LANE = DIM / 64;
__device__ inline u32 left_of(u32 p) { return HALVES && p < PAIRS ? p : 2 * p; }
__device__ inline u32 right_of(u32 p) { return HALVES && p < PAIRS ? p + PAIRS : 2 * p + 1; }

// The gains of a head's norm, by pairs.
struct Gains {
    float a[PAIRS_A_LANE], b[PAIRS_A_LANE];
    __device__ void take(const float* norm, u32 lane) {
#pragma unroll
        for (u32 j = 0; j < PAIRS_A_LANE; j++) {
            a[j] = norm ? __ldg(norm + left_of(lane + 32 * j)) : 1.0f;
            b[j] = norm ? __ldg(norm + right_of(lane + 32 * j)) : 1.0f;
        }
    }
};

// Norms a raw head and turns its pairs, and may split it. One warp; a value is neither normed nor turned.
__device__ inline void turn_head(u32 head, const Gains& g, bool normed, const float2* turns, float scale, bool turned, float eps, u32 lane, bool split) {
    const float* x = (const float*)(room + AT_RAW);
    float* to = (float*)(room + AT_HEADS) + head * DIM;
    float a[PAIRS_A_LANE], b[PAIRS_A_LANE], square = 0.0f;
    float2 turn[PAIRS_A_LANE];
#pragma unroll
    for (u32 j = 0; j < PAIRS_A_LANE; j++) {
        u32 p = lane + 32 * j;
        a[j] = x[raw_at(head * DIM + left_of(p))];
        b[j] = x[raw_at(head * DIM + right_of(p))];
        turn[j] = {1.0f, 0.0f};
        if (turned && p < PAIRS) turn[j] = turns[p];
        if (HEAD_NORMS) {
            square += a[j] * a[j] + b[j] * b[j];
            a[j] *= g.a[j], b[j] *= g.b[j];
        }
    }
    if (HEAD_NORMS && normed) scale *= rsqrtf(warp_sum(square) / (float)DIM + eps);
    float values[2 * PAIRS_A_LANE];
    u32 places[2 * PAIRS_A_LANE];
#pragma unroll
    for (u32 j = 0; j < PAIRS_A_LANE; j++) {
        u32 p = lane + 32 * j;
        float u = a[j] * scale, v = b[j] * scale;
        to[places[2 * j] = left_of(p)] = values[2 * j] = u * turn[j].x - v * turn[j].y;
        to[places[2 * j + 1] = right_of(p)] = values[2 * j + 1] = u * turn[j].y + v * turn[j].x;
    }
    if (BOXES && split) boxes::Queries::split(split_queries(), head, values, places);
}

// What a block keeps of the token's place.
struct Spot {
    const u32* tables;  // of the sequence, first group
    u32 group_words, pos, rank;
    u64 tokens;
    bool boxed;      // whether the launch has very many keys
    const u8* maps;  // of their boxes, by layer
};

struct Attention {
    typename Kv::Eight k[KEYS_AT_ONCE], v[KEYS_AT_ONCE];
    u32 places;   // as of a tile, where there are many keys
    Gains gains;  // of the warp's first head
    u32 here;     // the token's own block of the cache
    bool boxed;   // whether the layer's keys come as boxes

    __device__ static u32 group() { return threadIdx.x / 32 % SET_WARPS * PER_WARP + threadIdx.x % 32 / LANES; }
    // Of so many tokens from the first on, how many keys are this block's; and the token of its key n.
    __device__ static u32 keys_of(u32 tokens, const Spot& c) {
        return BOXES && c.boxed ? boxes::keys_of(tokens, c.rank) : (tokens + 7 - c.rank) / 8;
    }
    __device__ static u32 token_of(u32 n, const Spot& c) { return BOXES && c.boxed ? boxes::token_of(n, c.rank) : 8 * n + c.rank; }
    // Of this block's keys: the first, and behind the last; how many, without the token's own.
    __device__ static u32 begin(const TapeLayer& s, const Spot& c) { return keys_of(first_key(s.window, c.pos), c); }
    __device__ static u32 keys(const Spot& c) { return keys_of(c.pos, c); }
    __device__ static u32 old_keys(const TapeLayer& s, const Spot& c) {
        u32 from = begin(s, c), to = keys(c);
        return to > from ? to - from : 0;
    }
    __device__ static const u32* table(const TapeLayer& s, const Spot& c) { return c.tables + s.group * c.group_words; }
    __device__ static bool deep(const TapeLayer& s, const Spot& c) { return TILES && old_keys(s, c) > FEW_KEYS; }
    __device__ static Deep cache(const TapeLayer& s, const Spot& c, u32 head) {
        return {(const u8*)s.keys, (const u8*)s.values, table(s, c), c.tokens, head, c.rank, keys(c)};
    }
    __device__ static u32 first_tile(const TapeLayer& s, const Spot& c) { return (begin(s, c) & ~7u) + threadIdx.x / 32 * TILE; }
    __device__ static u32 element() { return threadIdx.x % LANES * 8; }

    // Of the block's runs that a layer looks at: the first, and behind the last.
    __device__ static u32 first_run(const TapeLayer& s, const Spot& c) { return begin(s, c) / boxes::RUN; }
    __device__ static u32 last_run(const Spot& c) { return (keys(c) + boxes::RUN - 1) / boxes::RUN; }
    __device__ static boxes::Cache cache_of_boxes(const TapeLayer& s, const Spot& c, u32 head) {
        return {(const u8*)s.keys, (const u8*)s.values, c.maps + s.number * 128, s.flip, table(s, c), c.tokens, head, c.rank, keys(c)};
    }

    // Begins to read this block's keys n, n + GROUPS, …
    __device__ void fetch(const TapeLayer& s, const Spot& c, u32 head, u32 n) {
        u32 count = keys(c), last = count ? token_of(count - 1, c) : c.pos;
#pragma unroll
        for (u32 i = 0; i < KEYS_AT_ONCE; i++) {
            bool there = n + i * GROUPS < count;
            u64 at = place_of(table(s, c), min(token_of(n + i * GROUPS, c), last));
            Kv::load(k[i], (const u8*)s.keys, c.tokens, at, head * DIM + element(), there);
            Kv::load(v[i], (const u8*)s.values, c.tokens, at, head * DIM + element(), there);
        }
    }

    __device__ static const float* norm_of(const TapeLayer& s, u32 item) {
        return (const float*)(item < GROUP ? s.q_norm : item == GROUP ? s.k_norm : 0);
    }

    __device__ void begin_layer(const TapeLayer& s, const Spot& c, u32 head) {
        u32 first = first_tile(s, c);
        here = __ldg(table(s, c) + c.pos / KV_BLOCK);
        const typename Kv::Eight zero = {};
#pragma unroll
        for (u32 i = 0; i < KEYS_AT_ONCE; i++) k[i] = v[i] = zero;
        boxed = BOXES && c.boxed && deep(s, c);
        if (!deep(s, c)) {
            fetch(s, c, head, begin(s, c) + group());
        } else if (!boxed) {
            // Registers for them are not to spare yet.
            Tile<typename Kv::Deep> tile;
            tile.begin();
            tile.find(cache(s, c, head), first, NW * TILE);
#pragma unroll
            for (u32 i = 0; i < ASKED; i++)
                if (first + i * (NW * TILE) < keys(c)) tile.ask(cache(s, c, head), i);
            places = tile.places;
        }
        if (HEAD_NORMS) gains.take(norm_of(s, threadIdx.x / 32), threadIdx.x % 32);
    }

    __device__ static float capped(const TapeLayer& s, float x) {
        return CAPPED ? (s.softcap != 0.0f ? s.softcap * tanhf(x / s.softcap) : x) * LOG2E : x;
    }

    // Keys that were there before this token, so many a group at once.
    template <u32 AT_ONCE>
    __device__ __forceinline__ void some_keys(const TapeLayer& s, const Spot& c, u32 head, u32 old, float (&q)[WARP_HEADS][8],
                                              float (&mix)[WARP_HEADS][8], float (&top)[WARP_HEADS], float (&sum)[WARP_HEADS]) {
#pragma unroll 1
        for (u32 base = 0; base < old; base += GROUPS * AT_ONCE) {
            u32 n = begin(s, c) + base + group();
            // Whole warps pass over what is behind the last key.
            if (base + threadIdx.x / 32 % SET_WARPS * PER_WARP >= old) break;
            typename Kv::Eight key[AT_ONCE], value[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) key[i] = k[i], value[i] = v[i];
            // The next keys are on their way while these are used.
            if (!TILES && AT_ONCE == KEYS_AT_ONCE && base + GROUPS * AT_ONCE < old) fetch(s, c, head, n + GROUPS * AT_ONCE);
            float score[AT_ONCE][WARP_HEADS];
            scores_of<Kv, LANES>(key, q, score);
            weigh(score, mix, top, sum, [&](u32 i, float x) { return n + i * GROUPS < keys(c) ? capped(s, x) : -1e30f; });
            add_values<Kv>(value, score, mix);
            if (TILES) break;
        }
    }

    // Keeps the token's key or value, and leaves it as it will be read.
    __device__ void append(const TapeLayer& s, const Spot& c, u32 head, u32 item, u32 lane) const {
        __syncwarp();
        float* to = (float*)(room + AT_HEADS) + item * DIM;
        u8* pool = (u8*)(item > GROUP ? s.values : s.keys);
        u64 at = ((u64)here * KV_BLOCK + c.pos % KV_BLOCK) * (KV_HEADS * DIM);
#pragma unroll
        for (u32 e = lane; e < DIM; e += 32) to[e] = Kv::store(pool, c.tokens * (KV_HEADS * DIM), at, head * DIM + e, to[e]);
    }

    // When the raw heads are there: attends, and sends this block's part to the owners. `number` is that of the next run.
    __device__ void run(const TapeLayer& s, const Spot& c, u32 head, float eps, u32& number) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        bool appends = (BOXES && c.boxed ? c.pos / boxes::RUN : c.pos) % PEERS == c.rank;
        float factor = s.scale * (CAPPED ? 1.0f : LOG2E);
        const float2* turns = (const float2*)(room + AT_TURNS) + s.rope * PAIRS;
        u32 items = appends ? GROUP + 2 : GROUP;
#pragma unroll 1
        for (u32 item = warp; item < items; item += NW) {
            bool is_query = item < GROUP, is_value = item > GROUP;
            if (HEAD_NORMS && item != warp) gains.take(norm_of(s, item), lane);
            turn_head(item, gains, norm_of(s, item) != 0, turns, is_query ? factor : 1.0f, !is_value, eps, lane, is_query && boxed);
            // Where keys come as boxes, it can wait.
            if (!is_query && !(BOXES && boxed)) append(s, c, head, item, lane);
            // No more items than warps.
            if (GROUP + 2 <= NW) break;
        }
        u32 busy;
        if (BOXES && boxed) {
            busy = boxed_keys(s, c, head, appends, number);
        } else {
            busy = deep(s, c) ? many_keys(s, c, head, appends) : few_keys(s, c, head, appends);
        }
        MARK(5);
        meet();
        merge(c.rank, busy);
    }

    // Keys that there are many of: how many warps had some.
    __device__ __forceinline__ u32 many_keys(const TapeLayer& s, const Spot& c, u32 head, bool appends) {
        u32 warp = threadIdx.x / 32, tiles = (keys(c) - (begin(s, c) & ~7u) + TILE - 1) / TILE;
        const float* heads = (const float*)(room + AT_HEADS);
        u32 busy = min(tiles + appends, NW), queries = shared_address(room) + AT_RAW;
        typedef Mix<typename Kv::Deep> Means;
        // Not before a warp has turned its head: what it waits for then would wait for these.
        Tile<typename Kv::Deep> tile;
        tile.begin();
        tile.places = places;
        tile.fetch_keys(cache(s, c, head), 0);
        tile.fetch_values(cache(s, c, head), 0);
        meet();
        MARK(4);
        // Raw heads are not looked at any more.
        static_assert(!TILES || DIM * 16 <= RAW_ROWS * 4, "queries have room");
        Means::split(heads, queries);
        meet();
        if (warp >= busy) return busy;
        auto seen = [&](float x) { return capped(s, x); };
        Means mix;
        mix.begin(tile.lane);
        if (appends && warp == tiles % NW) mix.own(heads, seen);
        mix.over(tile, first_tile(s, c), NW * TILE, begin(s, c), keys(c), queries, [&]() { return cache(s, c, head); }, seen);
        mix.leave((float*)(room + AT_MIXES) + warp * WARP_HEADS * DIM, part()[warp]);
        return busy;
    }

    // Keys that come as boxes: how many warps had some.
    __device__ __forceinline__ u32 boxed_keys(const TapeLayer& s, const Spot& c, u32 head, bool appends, u32& number) {
        u32 warp = threadIdx.x / 32, first = first_run(s, c), tiles = (keys(c) - first * boxes::RUN + TILE - 1) / TILE;
        // One of the two warps that keep the token's key and value takes these, too.
        u32 busy = min(appends ? more(tiles, GROUP + 2) : tiles, NW);
        bool keeps = appends && warp >= GROUP && warp < GROUP + 2, owns = appends && warp == GROUP + 1;
        boxes::Tile tile;
        tile.begin(ring_of_runs(), number + warp / 2, s.flip);
        number += last_run(c) - first;
        meet();
        MARK(4);
        if (keeps) {
            append(s, c, head, warp, tile.lane);
            if (!owns) come_to_pair();
        }
        // Both warps of a pair say that runs have been used.
        if (warp >= (busy + 1) / 2 * 2) return busy;
        boxes::Queries queries;
        queries.take(split_queries(), tile.lane);
        auto seen = [&](float x) { return capped(s, x); };
        boxes::Mix mix;
        mix.begin(tile.lane);
        mix.over(tile, first * boxes::RUN + warp * TILE, NW * TILE, begin(s, c), queries, [&]() { return cache_of_boxes(s, c, head); }, seen);
        if (owns) {
            meet_pair();
            mix.own((const float*)(room + AT_HEADS), seen);
        }
        mix.leave((float*)(room + AT_MIXES) + warp * WARP_HEADS * DIM, part()[warp], tile.side());
        return busy;
    }

    // Keys that there are few of.
    __device__ __forceinline__ u32 few_keys(const TapeLayer& s, const Spot& c, u32 head, bool appends) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane / LANES, e = element(), set = warp / SET_WARPS;
        meet();
        MARK(4);
        const float* heads = (const float*)(room + AT_HEADS);
        float q[WARP_HEADS][8], mix[WARP_HEADS][8], top[WARP_HEADS], sum[WARP_HEADS];
#pragma unroll
        for (u32 h = 0; h < WARP_HEADS; h++) {
            const float4* x = (const float4*)(heads + min(set * WARP_HEADS + h, GROUP - 1) * DIM + e);
            float4 a = x[0], b = x[1];
            q[h][0] = a.x, q[h][1] = a.y, q[h][2] = a.z, q[h][3] = a.w;
            q[h][4] = b.x, q[h][5] = b.y, q[h][6] = b.z, q[h][7] = b.w;
#pragma unroll
            for (u32 i = 0; i < 8; i++) mix[h][i] = 0.0f;
            top[h] = -1e30f;
            sum[h] = 0.0f;
        }
        // Keys of this block without the token's own, and with it.
        u32 old = old_keys(s, c), all = old + (appends ? 1 : 0);
        u32 busy = min((all + PER_WARP - 1) / PER_WARP, SET_WARPS);
        if (appends && warp % SET_WARPS == old % GROUPS / PER_WARP) {
            bool mine = group() == old % GROUPS;
#pragma unroll
            for (u32 h = 0; h < WARP_HEADS; h++) {
                float x = 0.0f;
#pragma unroll
                for (u32 i = 0; i < 8; i++) x = fmaf(q[h][i], heads[GROUP * DIM + e + i], x);
#pragma unroll
                for (u32 d = 1; d < LANES; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
                if (mine) top[h] = capped(s, x), sum[h] = 1.0f;
#pragma unroll
                for (u32 i = 0; i < 8; i++) mix[h][i] = mine ? heads[(GROUP + 1) * DIM + e + i] : 0.0f;
            }
        }
        if (old <= GROUPS) {
            some_keys<1>(s, c, head, old, q, mix, top, sum);
        } else if (KEYS_AT_ONCE > 2 && old <= 2 * GROUPS) {
            some_keys<2>(s, c, head, old, q, mix, top, sum);
        } else {
            some_keys<KEYS_AT_ONCE>(s, c, head, old, q, mix, top, sum);
        }
        if (warp % SET_WARPS < busy) {
            float* means = (float*)(room + AT_MIXES);
#pragma unroll
            for (u32 h = 0; h < WARP_HEADS; h++) {
                join_groups<LANES>(top[h], sum[h], mix[h]);
                if (sub == 0) {
                    float4* to = (float4*)(means + (warp * WARP_HEADS + h) * DIM + e);
                    to[0] = {mix[h][0], mix[h][1], mix[h][2], mix[h][3]};
                    to[1] = {mix[h][4], mix[h][5], mix[h][6], mix[h][7]};
                }
                if (lane == 0) part()[warp][h] = {top[h], sum[h]};
            }
        }
        return busy;
    }

    // Of every warp and head of it, what its means are relative to, and its sum of weights.
    __device__ static float2 (*part())[WARP_HEADS] {
        __shared__ float2 all[NW][WARP_HEADS];
        return all;
    }

    // What the warps of a set have, put together, and off to the owners.
    __device__ void merge(u32 rank, u32 busy) {
        u32 t = threadIdx.x;
        const float* mixes = (const float*)(room + AT_MIXES);
        u32 base = shared_address(room);
        // Four results a thread.
#pragma unroll
        for (u32 i = t * 4; i < GROUP * DIM; i += CONSUMERS * 4) {
            u32 b = i / 32, h = i / DIM, w0 = h / WARP_HEADS * SET_WARPS, own = h % WARP_HEADS;
            float high = -1e30f, all = 0.0f;
            float4 mean = {0.0f, 0.0f, 0.0f, 0.0f};
            float2 p[SET_WARPS];
#pragma unroll
            for (u32 w = 0; w < SET_WARPS; w++) {
                p[w] = part()[w0 + w][own];
                if (w >= busy) p[w] = {-1e30f, 0.0f};
                high = fmaxf(high, p[w].x);
            }
#pragma unroll
            for (u32 w = 0; w < SET_WARPS; w++) {
                if (w >= busy) break;
                float weight = power2(p[w].x - high);
                float4 x = *(const float4*)(mixes + ((w0 + w) * WARP_HEADS + own) * DIM + i % DIM);
                all = fmaf(weight, p[w].y, all);
                mean.x = fmaf(weight, x.x, mean.x);
                mean.y = fmaf(weight, x.y, mean.y);
                mean.z = fmaf(weight, x.z, mean.z);
                mean.w = fmaf(weight, x.w, mean.w);
            }
            u32 owner = b % PEERS, bar = at_peer(base + BAR_MIXES, owner);
            u32 to = at_peer(base + AT_PARTS + b / PEERS * PEERS * PART_BYTES + rank * 128, owner);
            send4(to + i % 32 * 4, bar, __float_as_uint(mean.x), __float_as_uint(mean.y), __float_as_uint(mean.z), __float_as_uint(mean.w));
            if (i % 32 == 0) send2(at_peer(base + AT_PARTS + b / PEERS * PEERS * PART_BYTES + PEERS * 128 + rank * 8, owner), bar, high, all);
        }
    }

    // The results that this block owns, put together, rounded and exchanged: with all, or, where NEAR, within the cluster.
    __device__ static void finish(const TapeLayer& s, u32 head, u32 rank, u8* board, u32 epoch) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 n = warp; n * PEERS + rank < MIX_BLOCKS; n += NW) {
            u32 b = n * PEERS + rank;
            const u8* parts = room + AT_PARTS + n * PEERS * PART_BYTES;
            const float* sinks = (const float*)s.sinks;
            float sink = sinks ? __ldg(sinks + head * GROUP + b * 32 / DIM) * LOG2E : -1e30f, high = sink;
            float2 p[PEERS];
            float v[PEERS], all = 0.0f, mean = 0.0f;
#pragma unroll
            for (u32 r = 0; r < PEERS; r++) {
                p[r] = *(const float2*)(parts + PEERS * 128 + r * 8);
                v[r] = *(const float*)(parts + r * 128 + lane * 4);
                high = fmaxf(high, p[r].x);
            }
#pragma unroll
            for (u32 r = 0; r < PEERS; r++) {
                float weight = power2(p[r].x - high);
                all = fmaf(weight, p[r].y, all);
                mean = fmaf(weight, v[r], mean);
            }
            if (sinks) all += power2(sink - high);
            if (NEAR) {
                send_block(AT_NEAR + b * 48, BAR_OUTPUT, mean / all, lane);
            } else {
                put_block(board + (head * MIX_BLOCKS + b) * 48, mean / all, epoch, lane);
            }
        }
    }
};

// The warp that has runs copied for all others, one after the other, layer after layer and token after token.
struct Bringer {
    u32 lane, number;  // of the next run

    // A layer's, when attention of the last token has left its key there; false where the launch has come to its end.
    __device__ bool layer(const TapeLayer& s, const Spot& c, u32 head) {
        if (!Attention::deep(s, c)) return true;
        boxes::Cache cache = Attention::cache_of_boxes(s, c, head);
        u32 end = Attention::last_run(c);
#pragma unroll 1
        for (u32 first = Attention::first_run(s, c); first < end; first += 32) {
            // The blocks of so many, a lane each.
            u32 block = __ldg(cache.table + Attention::token_of(min(first + lane, end - 1) * boxes::RUN, c) / KV_BLOCK);
#pragma unroll 1
            for (u32 i = 0; i < min(end - first, 32u); i++) {
                u32 token = __shfl_sync(0xffffffffu, block, i) * KV_BLOCK + c.rank * boxes::RUN % KV_BLOCK;
                boxes::Tile tile;
                tile.begin(ring_of_runs(), number, s.flip);
                POLLS;
                while (!__all_sync(0xffffffffu, bar_done_now(tile.bar(boxes::Tile::USED), tile.phase() ^ 1))) {
                    if (*(volatile u32*)(room + AT_HALT)) return false;
                    WATCHED("room for a run");
                }
                tile.copy(cache, token);
                number++;
            }
        }
        return true;
    }
    // Nothing may be on its way into the memory of a block that has ended.
    __device__ void drain() const {
#pragma unroll 1
        for (u32 i = 1; i <= min(PLACES, number); i++) {
            boxes::Tile tile;
            tile.begin(ring_of_runs(), number - i, 0);
            bar_wait(tile.bar(boxes::Tile::THERE), tile.phase());
        }
    }
};
