// Many keys that were there before a token, on the tensor cores: a warp takes 16 of them at a time.
//
// Keys are rows of a product and query heads its columns; then elements of values are rows, and weights columns. What a
// lane needs comes straight from the cache to registers: the terms of a product may come in any order, so a lane takes
// neighbouring bytes. There are columns to spare: four hold heads, and four what halves lack of the queries, then of the
// weights, so that products are as good as of f32. Numbers of 8-bit blocks are halves as they are; a key's scales multiply
// the sums of a block, a value's the weights before they are split. With one head or two, two blocks side by side have
// columns of their own, and the queries of each are zeroes in the other's.
//
// Key n is the token 8n + rank: eight keys, from a multiple of eight on, lie in one block of the cache.
#pragma once
#include "../tensor.cuh"

#include "../keys.cuh"

static const u32 TILE = 16, DEEP_HEADS = 4;
// Tiles ahead of the one that is multiplied, of which the second-level cache is told.
#ifndef ASKED
#define ASKED 2
#endif
// Weights are below 2^(TOP_BELOW + TOP_ROOM), times the scale of their value: until one is not, what they are relative to
// stays. It begins so that the largest is 2^TOP_BELOW.
static const float TOP_BELOW = 4.0f, TOP_ROOM = 10.0f;

// How a format lies: elements of a span that a lane takes of a key, and of a value; words of them; blocks side by side.
struct TileF16 {
    static const bool SCALED = false;
    static const u32 SIDE = 1, SIZE = 2, OF_KEY = 8, OF_VALUE = 8;
    // Elements 4j … 4j + 3 of a lane's share of a span of a key, the first two or the others.
    __device__ static u32 of_key(const u32* span, u32 j, bool others) { return span[2 * j + others]; }
    // Elements 2i and 2i + 1 of two keys' values: of both keys the one, then the other.
    __device__ static void of_values(const u32* a, const u32* b, u32 i, u32& even, u32& odd) {
        even = __byte_perm(a[i], b[i], 0x5410);
        odd = __byte_perm(a[i], b[i], 0x7632);
    }
};
struct TileQ8 {
    static const bool SCALED = true;
    static const u32 SIDE = GROUP <= 2 ? 2 : 1, SIZE = 1, OF_KEY = 8 * SIDE, OF_VALUE = 4 * SIDE;
    __device__ static u32 of_key(const u32* span, u32 j, bool others) {
        return numbers(span[j] ^ 0x80808080u, others ? 0x4342 : 0x4140);
    }
    __device__ static void of_values(const u32* a, const u32* b, u32 i, u32& even, u32& odd) {
        u32 both = __byte_perm(a[i / 2], b[i / 2], i % 2 ? 0x7362 : 0x5140) ^ 0x80808080u;
        even = numbers(both, 0x4140);
        odd = numbers(both, 0x4342);
    }
};

// A layer's keys and values of a KV head, and those that a rank has.
struct Deep {
    const u8 *keys, *values;
    const u32* table;
    u64 tokens;             // of the pools
    u32 head, rank, count;  // at least one
};

// One tile of a warp, on its way or there.
template <class C>
struct Tile {
    static const u32 KEY_SPANS = DIM / (4 * C::OF_KEY), VALUE_SPANS = DIM / (8 * C::OF_VALUE);
    static const u32 KEY_LOAD = C::OF_KEY * C::SIZE / 4, VALUE_LOAD = C::OF_VALUE * C::SIZE / 4;
    static const u32 SCALES = C::SCALED ? DIM / 64 : 1;
    // Keys of halves are read by whole lines where there are columns for it: eight lanes take one of 64 halves of a key, the
    // upper four of them for the row behind, whose columns are others.
    static const bool LINES = !C::SCALED && GROUP <= 2;
    // Rows of 16 elements of a value; weights of keys as columns, by scales of values where there are any.
    static const u32 MIXES = DIM / 16, COLUMNS = C::SCALED ? VALUE_SPANS : 1;
    // Elements of a token; bytes of a token, of a block of the cache, and of that block's scales.
    static const u32 WIDTH_KV = KV_HEADS * DIM, TOKEN = WIDTH_KV * C::SIZE, BLOCK = KV_BLOCK * TOKEN, BLOCK_SCALES = BLOCK / 16;

    // Keys g and g + 8; values 2t, 2t + 1, 2t + 8, 2t + 9. Scales of values come with the keys.
    u32 k[2 * KEY_SPANS * KEY_LOAD], v[4 * VALUE_SPANS * VALUE_LOAD];
    // Scales of keys, and of values, g and g + 8.
    u32 key_scales[2][SCALES], value_scales[2][SCALES];
    // Of the warp's next sixteen tiles, the blocks of the cache: two lanes a tile. A load of one would wait behind all others.
    u32 places;
    u32 lane;

    __device__ const u32* keys_of(u32 i, u32 span) const { return k + (i * KEY_SPANS + span) * KEY_LOAD; }
    __device__ const u32* values_of(u32 i, u32 span) const { return v + (i * VALUE_SPANS + span) * VALUE_LOAD; }

    __device__ void begin() {
        lane = threadIdx.x % 32;
#ifndef FORNAX_HOST
        // What follows from it is not kept from layer to layer.
        asm volatile("" : "+r"(lane));
#endif
    }
    // Tiles n, n + stride, … are to be fetched, as numbers 0 to 15.
    __device__ void find(const Deep& c, u32 n, u32 stride) {
        u32 block = __ldg(c.table + min((n + lane / 2 * stride) / 8 + lane % 2, (c.count - 1) / 8));
        // The wait for it is here, and nowhere else.
        places = __shfl_sync(0xffffffffu, block, lane);
    }
    __device__ u32 place(u32 number, u32 i) const { return __shfl_sync(0xffffffffu, places, number % 16 * 2 + i); }
    __device__ static u32 element(const Deep& c, u32 n) { return (8 * n + c.rank) * WIDTH_KV + c.head * DIM; }
    __device__ const u8* scales(const u8* pool, const Deep& c, u32 block) {
        return pool + c.tokens * WIDTH_KV + (u64)block * BLOCK_SCALES + element(c, lane / 4) / 16;
    }
    // A number behind the last tile's reads something that is there.
    __device__ __forceinline__ void fetch_keys(const Deep& c, u32 number) {
        u32 g = lane / 4, t = lane % 4;
        if (LINES) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u8* from = c.keys + (u64)place(number, i / 2) * BLOCK + element(c, i % 2 * 4 + g / 2) * C::SIZE + lane % 8 * 16;
#pragma unroll
                for (u32 s = 0; s < DIM / 64; s++) past_first_cache<4>(k + (i * (DIM / 64) + s) * 4, from + s * 128);
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 block = place(number, i);
            const u8* from = c.keys + (u64)block * BLOCK + (element(c, g) + C::OF_KEY * t) * C::SIZE;
#pragma unroll
            for (u32 s = 0; s < KEY_SPANS; s++)
                past_first_cache<KEY_LOAD>(k + (i * KEY_SPANS + s) * KEY_LOAD, from + s * (4 * C::OF_KEY * C::SIZE));
            if (!C::SCALED) continue;
            past_first_cache<SCALES>(key_scales[i], scales(c.keys, c, block));
            past_first_cache<SCALES>(value_scales[i], scales(c.values, c, block));
        }
    }
    __device__ __forceinline__ void fetch_values(const Deep& c, u32 number) {
        u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u8* from = c.values + (u64)place(number, i) * BLOCK + (element(c, 2 * t) + C::OF_VALUE * g) * C::SIZE;
#pragma unroll
            for (u32 s = 0; s < 2 * VALUE_SPANS; s++)
                past_first_cache<VALUE_LOAD>(v + (i * 2 * VALUE_SPANS + s) * VALUE_LOAD,
                                             from + s / VALUE_SPANS * 8 * TOKEN + s % VALUE_SPANS * (8 * C::OF_VALUE * C::SIZE));
        }
    }
    // Asks for a tile's keys and values into the second-level cache, a line a lane.
    __device__ void ask(const Deep& c, u32 number) const {
        static const u32 PIECE = 128, PIECES = DIM * C::SIZE > PIECE ? DIM * C::SIZE / PIECE : 1;
#pragma unroll
        for (u32 from = 0; from < TILE * PIECES; from += 32) {
            u32 i = (from + lane) % (TILE * PIECES), key = i / PIECES;
            u64 at = (u64)place(number, key / 8) * BLOCK + element(c, key % 8) * C::SIZE + i % PIECES * PIECE;
            into_second_cache(c.keys + at);
            into_second_cache(c.values + at);
        }
        if (!C::SCALED) return;
        u32 key = lane % TILE;
        u64 at = c.tokens * WIDTH_KV + (u64)place(number, key / 8) * BLOCK_SCALES + element(c, key % 8) / 16;
        into_second_cache((lane < TILE ? c.keys : c.values) + at);
    }
    // What lies behind the last of so many may be no number, and 0 · that is none.
    __device__ void clear_values(u32 left) {
        if (C::SCALED) return;
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 w = 0; w < VALUE_SPANS * VALUE_LOAD; w++)
                if (2 * (lane % 4) + i % 2 + i / 2 * 8 >= left) v[i * (VALUE_SPANS * VALUE_LOAD) + w] = 0;
    }

    __device__ float scale_of(const u32 (&words)[SCALES], u32 span) const {
        u32 block = span * C::SIDE + (C::SIDE == 2 ? lane % 2 : 0);
        return half_to_float((u16)(words[span * C::SIDE / 2] >> 16 * (block % 2) & 0xffff));
    }
    // Scales of values g and g + 8, by columns, and the logarithms of the largest of each.
    __device__ void heights(float (&up)[2], float (&scale)[COLUMNS][2]) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            up[i] = 0.0f;
            scale[0][i] = 1.0f;
            if (!C::SCALED) continue;
            u32 most = 0;
#pragma unroll
            for (u32 s = 0; s < SCALES; s++) most = max(most, max(value_scales[i][s] & 0xffff, value_scales[i][s] >> 16));
            // Of nothing: less than the least.
            up[i] = fmaxf(log2_of(half_to_float((u16)most)), -24.0f);
#pragma unroll
            for (u32 s = 0; s < VALUE_SPANS; s++) scale[s][i] = scale_of(value_scales[i], s);
        }
    }

    // Scores of keys g and g + 8 for the two heads of a lane's columns, of queries as `split` left them.
    __device__ __forceinline__ void scores(u32 queries, float (&score)[2][2]) const {
        if (C::SCALED) {
            block_scores(queries, score);
        } else if (LINES) {
            line_scores(queries, score);
        } else {
            plain_scores(queries, score);
        }
    }
    // Words of lines are rows g and g + 8 of key 4i + g / 2: four sets of columns for their quarters of the line.
    __device__ __forceinline__ void line_scores(u32 queries, float (&score)[2][2]) const {
        float a[4][4] = {}, x[4][2];
#pragma unroll
        for (u32 s = 0; s < DIM / 64; s++) {
            Vec4 q = shared16(queries + (s * 32 + lane) * 16);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32* w = k + (i * (DIM / 64) + s) * 4;
                u32 rows[4] = {w[0], w[1], w[2], w[3]};
                mma_f16(a[i], rows, q.x, q.y);
                mma_f16(a[i], rows, q.z, q.w);
            }
        }
        // Of a key's eight lanes, four have something: those whose columns are of their half of the line.
        bool odd = lane / 4 % 2, high = lane % 4 >= 2, mine = lane % 2 == odd;
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) x[i][h] = mine ? (high ? a[i][2 + h] : a[i][h]) : 0.0f;
        // Each step leaves a lane half as much: keys by two bits, then a head.
        float y[2][2], z[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float got = __shfl_xor_sync(0xffffffffu, x[i + 2][h], 1);
                y[i][h] = mine ? x[i][h] : got;
            }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float got = __shfl_xor_sync(0xffffffffu, high ? y[0][h] : y[1][h], 2);
            z[h] = (high ? y[1][h] : y[0][h]) + got;
        }
        float all = (odd ? z[1] : z[0]) + __shfl_xor_sync(0xffffffffu, odd ? z[0] : z[1], 5);
        // Lane (2p + h, (i / 2 ^ h) + 2 (i % 2)) has key 4i + p for head h.
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            u32 key = lane / 4 + n / 2 * 8, i = key / 4, h = GROUP == 1 || lane % 2 ? GROUP - 1 : n % 2;
            score[n / 2][n % 2] = __shfl_sync(0xffffffffu, all, (2 * (key % 4) + h) * 4 + (i / 2 ^ h) + 2 * (i % 2));
        }
    }
    // As they were loaded, four words are rows g and g + 8: a key has both, each with half of the elements, and columns that
    // go with them.
    __device__ __forceinline__ void plain_scores(u32 queries, float (&score)[2][2]) const {
        float a[2][2][4] = {};
#pragma unroll
        for (u32 s = 0; s < KEY_SPANS; s++) {
            Vec4 q = shared16(queries + (s * 32 + lane) * 16);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32* x = keys_of(i, s);
                u32 rows[4] = {x[0], x[1], x[2], x[3]};
                mma_f16(a[i][0], rows, q.x, q.y);
                mma_f16(a[i][1], rows, q.z, q.w);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float low = a[i / 2][0][i % 2] + a[i / 2][1][i % 2], high = a[i / 2][0][2 + i % 2] + a[i / 2][1][2 + i % 2];
            float x = lane % 4 >= 2 ? high : low;
            score[i / 2][i % 2] = x + __shfl_xor_sync(0xffffffffu, x, 2);
        }
    }
    // A product is of one block, whose scale multiplies it; two sums each, so that fewer products wait for one another.
    __device__ __forceinline__ void block_scores(u32 queries, float (&score)[2][2]) const {
        float a[KEY_SPANS][2][4] = {}, all[4] = {};
#pragma unroll
        for (u32 s = 0; s < KEY_SPANS; s++) {
            const u32 *x = keys_of(0, s), *y = keys_of(1, s);
            Vec4 q;
#pragma unroll
            for (u32 j = 0; j < C::OF_KEY / 4; j++) {
                u32 rows[4] = {C::of_key(x, j, false), C::of_key(y, j, false), C::of_key(x, j, true), C::of_key(y, j, true)};
                if (j % 2 == 0) q = shared16(queries + ((s * (C::OF_KEY / 8) + j / 2) * 32 + lane) * 16);
                mma_f16(a[s][j % 2], rows, j % 2 ? q.z : q.x, j % 2 ? q.w : q.y);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) all[i] = fmaf(scale_of(key_scales[i / 2], s), a[s][0][i] + a[s][1][i], all[i]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            // What halves lack, and the other block.
            float x = all[i];
            x += __shfl_xor_sync(0xffffffffu, x, 2);
            if (C::SIDE == 2) x += __shfl_xor_sync(0xffffffffu, x, 1);
            score[i / 2][i % 2] = x;
        }
    }

    // Adds the values by their weights.
    __device__ __forceinline__ void add(const u32 (&column)[COLUMNS][2], float (&mix)[MIXES][4]) const {
#pragma unroll
        for (u32 s = 0; s < VALUE_SPANS; s++) {
            u32 n = C::SCALED ? s : 0;
#pragma unroll
            for (u32 i = 0; i < C::OF_VALUE / 2; i++) {
                u32 rows[4];
                C::of_values(values_of(0, s), values_of(1, s), i, rows[0], rows[1]);
                C::of_values(values_of(2, s), values_of(3, s), i, rows[2], rows[3]);
                mma_f16(mix[s * (C::OF_VALUE / 2) + i], rows, column[n][0], column[n][1]);
            }
        }
    }
};

// Of no key at all.
template <u32 MIXES>
__device__ __forceinline__ void begin_with_none(float (&mix)[MIXES][4], float (&top)[2], float (&sum)[2]) {
#pragma unroll
    for (u32 i = 0; i < MIXES; i++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) mix[i][n] = 0.0f;
#pragma unroll
    for (u32 h = 0; h < 2; h++) top[h] = -1e30f, sum[h] = 0.0f;
}
// A head's product with the token's own key. A warp.
__device__ __forceinline__ float own_product(const float* heads, u32 h, u32 lane) {
    const float* key = heads + GROUP * DIM;
    float x = 0.0f;
#pragma unroll
    for (u32 e = 0; e < DIM; e += 32) x = fmaf(heads[h * DIM + e + lane], key[e + lane], x);
    return warp_sum(x);
}
// Where the highest of all lanes' scores is more than `most` above what a column is relative to, all that there is becomes
// relative to more. Returns what it is times.
template <u32 MIXES>
__device__ __forceinline__ float raise(float (&mix)[MIXES][4], float (&top)[2], float (&sum)[2], u32 h, float high, float most) {
#pragma unroll
    for (u32 d = 4; d < 32; d *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
    if (!(high > top[h] + most)) high = top[h] + TOP_BELOW;
    float keep = power2(top[h] - (high - TOP_BELOW));
    top[h] = high - TOP_BELOW;
    sum[h] *= keep;
#pragma unroll
    for (u32 i = 0; i < MIXES; i++) mix[i][h] *= keep, mix[i][2 + h] *= keep;
    return keep;
}

// What a warp has of its heads: means of values relative to 2^top, by rows of elements and the lane's two columns.
template <class C>
struct Mix {
    typedef Tile<C> T;
    float mix[T::MIXES][4], top[2], sum[2];
    u32 lane;

    __device__ u32 head_of(u32 h) { return min((C::SIDE == 2 ? 0 : lane % 2 * 2) + h, GROUP - 1); }

    // Queries, one behind the other, as columns: all lanes' words of eight elements each after the other. Four warps.
    __device__ static void split(const float* heads, u32 to) {
        u32 part = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if (part >= DIM / 32) return;
        if (T::LINES) {
            if (part >= DIM / 64) return;
            const float* from = heads + min(g % 2, GROUP - 1) * DIM + 64 * part + 32 * (g / 2 % 2) + 8 * t + 2 * (g / 4);
            float2 x = *(const float2*)from, y = *(const float2*)(from + 4);
            u32 a = halves(x.x, x.y), b = halves(y.x, y.y);
            Vec4 v = {a, b, halves_left(a, x.x, x.y), halves_left(b, y.x, y.y)};
            put_shared16(to + threadIdx.x * 16, v);
            return;
        }
        const float* from = heads + min(g % (C::SIDE == 2 ? 2 : 4), GROUP - 1) * DIM;
        from += part / (C::OF_KEY / 8) * (4 * C::OF_KEY) + C::OF_KEY * t + part % (C::OF_KEY / 8) * 8;
        float4 x = *(const float4*)from, y = *(const float4*)(from + 4);
        u32 a = halves(x.x, x.y), b = halves(x.z, x.w), c = halves(y.x, y.y), d = halves(y.z, y.w);
        Vec4 v = {a, b, c, d};
        if (g >= 4) v = {halves_left(a, x.x, x.y), halves_left(b, x.z, x.w), halves_left(c, y.x, y.y), halves_left(d, y.z, y.w)};
        if (!C::SCALED) {
            // The elements that go with the row, and what they lack.
            bool odd = g >= 4;
            v = {odd ? b : a, odd ? d : c, 0, 0};
            v.z = odd ? halves_left(b, x.z, x.w) : halves_left(a, x.x, x.y);
            v.w = odd ? halves_left(d, y.z, y.w) : halves_left(c, y.x, y.y);
        }
        if (C::SIDE == 2 && g / 2 % 2 != t / 2) v = {0, 0, 0, 0};
        put_shared16(to + threadIdx.x * 16, v);
    }

    __device__ void begin(u32 l) {
        lane = l;
        begin_with_none(mix, top, sum);
    }

    __device__ u32 element(u32 i) {
        return i / (C::OF_VALUE / 2) * (8 * C::OF_VALUE) + lane / 4 * C::OF_VALUE + i % (C::OF_VALUE / 2) * 2;
    }

    // The token's own key and value, the first of all; `score` of a head. A warp.
    template <class Score>
    __device__ void own(const float* heads, const Score& seen) {
        const float* value = heads + (GROUP + 1) * DIM;
        const float weight = 1 << (u32)(TOP_BELOW + 6.0f);
#pragma unroll
        for (u32 h = 0; h < GROUP; h++) {
            float x = seen(own_product(heads, h, lane)) - (TOP_BELOW + 6.0f);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                if (head_of(i) == h) top[i] = x, sum[i] = lane < 4 ? weight : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < T::MIXES; i++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) mix[i][n] = lane % 4 < 2 ? value[element(i) + n / 2] * weight : 0.0f;
    }

    // Weights of scores, as columns; where one is too large for a half, all that there is becomes relative to more.
    __device__ __forceinline__ void weigh(float (&score)[2][2], const float (&up)[2], const float (&scale)[T::COLUMNS][2],
                                          u32 (&column)[T::COLUMNS][2]) {
        bool higher = false;
#pragma unroll
        for (u32 i = 0; i < 4; i++) higher |= score[i / 2][i % 2] + up[i / 2] > top[i % 2] + (TOP_BELOW + TOP_ROOM);
        if (__any_sync(0xffffffffu, higher)) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) raise(mix, top, sum, h, fmaxf(score[0][h] + up[0], score[1][h] + up[1]), TOP_BELOW + TOP_ROOM);
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                score[i][h] = power2(score[i][h] - top[h]);
                sum[h] += score[i][h];
            }
#pragma unroll
            for (u32 s = 0; s < T::COLUMNS; s++) {
                float x = score[i][0] * scale[s][i], y = score[i][1] * scale[s][i];
                u32 have = halves(x, y), left = halves_left(have, x, y);
                column[s][i] = turned(lane % 4 >= 2 ? left : have);
            }
        }
    }

    // Tiles n, n + stride, … of keys from `first` on and before `keys`; the first is on its way. `cache` says where they are.
    template <class Cache, class Score>
    __device__ __forceinline__ void over(T& tile, u32 n, u32 stride, u32 first, u32 keys, u32 queries, const Cache& cache,
                                        const Score& seen) {
        if (n >= keys) return;
        float score[2][2], up[2], scale[T::COLUMNS][2];
        u32 column[T::COLUMNS][2];
        // Of the tile whose first key is n: what is not seen, and what is not there, has no weight.
        auto hide = [&] {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 key = n + 8 * i + lane / 4;
                bool is = key >= first && key < keys;
#pragma unroll
                for (u32 h = 0; h < 2; h++) score[i][h] = is ? seen(score[i][h]) : negative_infinity();
                if (!C::SCALED || is) continue;
                up[i] = -24.0f;
#pragma unroll
                for (u32 s = 0; s < T::COLUMNS; s++) scale[s][i] = 0.0f;
            }
        };
        tile.scores(queries, score);
        tile.heights(up, scale);
        tile.fetch_keys(cache(), 1);
        tile.ask(cache(), ASKED);
        hide();
        weigh(score, up, scale, column);
        // Loads of one iteration are waited for together in the next. None depends on a condition, or it would go to
        // other registers, and be waited for at once: what is behind the last tile is read, and not looked at.
#pragma unroll 1
        for (u32 at = 1; n + stride < keys; at++) {
            n += stride;
            tile.scores(queries, score);
            tile.heights(up, scale);
            if (at == 15) tile.find(cache(), n, stride), at = 0;
            tile.fetch_keys(cache(), at + 1);
            tile.add(column, mix);
            tile.fetch_values(cache(), at);
            hide();
            weigh(score, up, scale, column);
            tile.ask(cache(), at + ASKED);
        }
        if (n + TILE > keys) tile.clear_values(keys - n);
        tile.add(column, mix);
    }

    // Leaves what the warp has: means one head behind the other, and what they are relative to with the sums of weights.
    __device__ void leave(float* means, float2* marks) {
        static const u32 HALF = T::MIXES / 2;
        u32 g = lane / 4, t = lane % 4;
        bool rest = t >= 2, mine = C::SIDE == 1 || t % 2 == g * C::OF_VALUE / 32;
        // Two lanes share what must be added: each does half of the rows.
#pragma unroll
        for (u32 i = 0; i < HALF; i++) {
            float x[4];
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                float got = __shfl_xor_sync(0xffffffffu, rest ? mix[i][n] : mix[i + HALF][n], 2);
                x[n] = (rest ? mix[i + HALF][n] : mix[i][n]) + got;
            }
            u32 e = rest ? element(i + HALF) : element(i);
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                u32 head = C::SIDE == 2 ? h : t % 2 * 2 + h;
                float2 both = {x[h], x[2 + h]};
                if (mine && head < GROUP) *(float2*)(means + head * DIM + e) = both;
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 head = C::SIDE == 2 ? h : t % 2 * 2 + h;
#pragma unroll
            for (u32 d = 4; d < 32; d *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], d);
            float2 mark = {top[h], sum[h]};
            if (lane < (C::SIDE == 2 ? 1 : 2) && head < GROUP) marks[head] = mark;
        }
    }
};
