// Very many keys of 8 bits, on the tensor cores, out of shared memory: a warp that does nothing else has them copied there.
//
// Keys go to the ranks of a cluster by runs of 32 (`token_of`). A run, of one block of the cache, comes as a box of a tensor,
// keys and values together, and lies so that rows of fragments are in all banks; it has the tiles of a pair of warps. It is the
// number of boxes that takes time, not what they have. Runs lie in a ring of places, in the order in which they are used.
//
// Keys are rows of a product and query heads its columns; then elements of values are rows, and weights columns. Keys are
// multiplied as they are: a query is three numbers of eight bits, one finer than the other, with columns of their own, and a
// key's scales multiply whole numbers. Values are halves as they are; their scales multiply the weights before these are
// split, so that columns are of one block: those of two or four lie side by side.
#pragma once
#include "deep.cuh"

namespace boxes {

static const u32 RUN = 2 * TILE, RANKS = 8, ROUND = RANKS * RUN;
// Weights, times scales of values, are at most so much: until one is not, what they are relative to stays.
static const float WEIGHT_MOST = 16384.0f;

// Of so many tokens from the first on, how many keys are a rank's; and the token of its key n.
__device__ inline u32 keys_of(u32 tokens, u32 rank) {
    u32 rest = tokens % ROUND, before = rank * RUN;
    return tokens / ROUND * RUN + (rest > before ? min(rest - before, RUN) : 0);
}
__device__ inline u32 token_of(u32 n, u32 rank) { return n / RUN * ROUND + rank * RUN + n % RUN; }

// A layer's keys and values of a KV head, and those that a rank has.
struct Cache {
    const u8 *keys, *values;
    const u8* map;          // of boxes
    u32 flip;               // whether values come before keys there
    const u32* table;
    u64 tokens;             // of the pools
    u32 head, rank, count;  // at least one
};

// Queries of a KV head as columns of products: eight a product. Columns that are left have the last head once more.
struct Queries {
    // Products of two heads each, where a head has four columns. Bytes of what is split, and of the largest of each head.
    static const u32 PAIRS_OF = (GROUP + 1) / 2, SPLIT = PAIRS_OF * DIM * 8, BYTES = SPLIT + 16;
    u32 words[PAIRS_OF][DIM / 32][2];  // a lane's
    float factors[PAIRS_OF][2];        // what the lane's columns are worth

    // A head's elements, `values` of a lane at `places`: each number is one of what is left, 254 times, when the one before was
    // rounded. A warp.
    __device__ static void split(u32 to, u32 head, const float (&values)[DIM / 32], const u32 (&places)[DIM / 32]) {
        u32 bits = 0;
#pragma unroll
        for (u32 i = 0; i < DIM / 32; i++) bits = max(bits, __float_as_uint(values[i]) & 0x7fffffffu);
        bits = largest_of_warp(bits);
        // Nothing is left of what cannot be divided by; what is no number makes all scores such.
        float top = __uint_as_float(bits), inverse = top < 3.8e-37f || bits >= 0x7f800000u ? 0.0f : __fdividef(127.0f, top);
        if (threadIdx.x % 32 == 0) put_shared4(to + SPLIT + head * 4, bits);
        float left[DIM / 32];
#pragma unroll
        for (u32 i = 0; i < DIM / 32; i++) left[i] = values[i] * inverse;
#pragma unroll
        for (u32 n = 0; n < 3; n++)
#pragma unroll
            for (u32 i = 0; i < DIM / 32; i++) {
                u32 e = places[i], spot = to + (head / 2 * (DIM / 32) + e / 32) * 256 + (head % 2 * 4 + e % 16 / 4) * 8 + e % 32 / 16 * 4 + e % 4;
                float number = left[i] + AROUND;
                put_shared1(spot + n * 64, __float_as_uint(number));
                left[i] = (left[i] - (number - AROUND)) * 254.0f;
            }
    }
    // When all have met.
    __device__ void take(u32 from, u32 lane) {
        // The fourth number is nothing.
        float step = lane % 4 == 3 ? 0.0f : 1.0f / 127.0f;
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            if (i < lane % 4) step *= 1.0f / 254.0f;
#pragma unroll
        for (u32 n = 0; n < PAIRS_OF; n++) {
            u32 g = lane / 4, column = 2 * n + g % 2 < GROUP ? g : g - 1;
#pragma unroll
            for (u32 b = 0; b < DIM / 32; b++) shared8(from + (n * (DIM / 32) + b) * 256 + (column * 4 + lane % 4) * 8, words[n][b][0], words[n][b][1]);
#pragma unroll
            for (u32 h = 0; h < 2; h++) factors[n][h] = __uint_as_float(shared4(from + SPLIT + min(2 * n + h, GROUP - 1) * 4)) * step;
        }
    }
};

// Where runs are, on their way or there.
struct Ring {
    u32 to, bars;  // multiples of 512, and of 8
    u32 asked;     // where it says how many runs have been asked for, since the launch began
    u32 places;
};

// The tile of a warp: its half of a run.
struct Tile {
    static const u32 SCALES = DIM / 64, BLOCKS = DIM / 32;
    // Rows of 16 elements of a value. Weights of keys as columns: of eight, a lane has two heads' of one block of values.
    static const u32 MIXES = DIM / 16, SIDE = GROUP <= 2 && BLOCKS >= 4 ? 4 : 2, COLUMNS = BLOCKS / SIDE;
    // Bytes of a token, of a run's keys, or values, of its lines of 64 bytes of every key, and of its scales. Scales are no boxes:
    // many lines of a few bytes take as long as whole ones.
    static const u32 TOKEN = KV_HEADS * DIM, BYTES = RUN * DIM, SPAN_BYTES = RUN * 64, SPANS = DIM / 64;
    static const u32 HEAD_SCALES = DIM / 16, TOKEN_SCALES = TOKEN / 16, SCALE_BYTES = 2 * RUN * HEAD_SCALES;
    // Of all that a run has: a multiple of what boxes begin at.
    static const u32 EACH = 2 * BYTES + (SCALE_BYTES + 511) / 512 * 512;
    // A place has two barriers: that the run is there, as the box and 32 lanes that copy scales say; that both warps have used it.
    static const u32 THERE = 0, USED = 8, BARRIERS = 16, COME = 33;

    Ring ring;
    u32 lane;
    u32 half;    // the first of the run's keys that are the warp's
    u32 number;  // of the run, since the launch began
    u32 flip;
    u32 known;   // how many runs have been asked for

    __device__ void begin(const Ring& r, u32 next, u32 flipped) {
        ring = r;
        number = next;
        flip = flipped;
        known = 0;
        half = threadIdx.x / 32 % 2 * TILE;
        lane = threadIdx.x % 32;
#ifndef FORNAX_HOST
        // What follows from it is not kept from layer to layer.
        asm volatile("" : "+r"(lane));
#endif
    }
    __device__ u32 here() const { return ring.to + number % ring.places * EACH; }
    __device__ u32 keys_at() const { return here() + flip * BYTES; }
    __device__ u32 values_at() const { return here() + (1 - flip) * BYTES; }
    __device__ u32 bar(u32 which) const { return ring.bars + number % ring.places * BARRIERS + which; }
    __device__ u32 phase() const { return number / ring.places & 1; }
    // Of a span, where a key's piece of 16 bytes is; and where scales of a tile's key, or value, are.
    __device__ static u32 spot(u32 key, u32 piece) { return key * 64 + (piece ^ key / 2 % 4) * 16; }
    __device__ u32 scale_spot(bool value, u32 key) const { return here() + 2 * BYTES + ((value ^ flip) * RUN + half + key) * HEAD_SCALES; }

#ifdef FORNAX_HOST
    // Here a tile, whose first key is n, is copied when it is wanted.
    __device__ void await(const Cache& c, u32 n) {
        u64 token = (u64)c.table[token_of(n, c.rank) / KV_BLOCK] * KV_BLOCK + token_of(n, c.rank) % KV_BLOCK;
        for (u32 value = 0; value < 2; value++) {
            const u8 *pool = value ? c.values : c.keys, *scales = pool + c.tokens * TOKEN + (token + lane % TILE) * TOKEN_SCALES + c.head * HEAD_SCALES;
            for (u32 i = lane; i < TILE * SPANS * 4; i += 32) {
                u32 key = i / (SPANS * 4), piece = i % (SPANS * 4);
                copy16((value ? values_at() : keys_at()) + piece / 4 * SPAN_BYTES + spot(half + key, piece % 4), pool + (token + key) * TOKEN + c.head * DIM + piece * 16);
            }
            for (u32 i = 0; i < HEAD_SCALES; i += 4) copy4(scale_spot(value, lane % TILE) + i, scales + i);
        }
        __syncwarp();
    }
    __device__ void used() const {}
#else
    // Has the run that begins at a token copied, when its place has been used. A warp.
    __device__ __forceinline__ void copy(const Cache& c, u32 token) const {
        if (lane == 0) {
            put_shared4(ring.asked, number + 1);
            bar_expect(bar(THERE), 2 * BYTES);
            copy_box(here(), c.map, bar(THERE), 0, token, c.head * SPANS, 0);
        }
#pragma unroll
        for (u32 pool = 0; pool < 2; pool++) {
            const u8* from = (pool != flip ? c.values : c.keys) + c.tokens * TOKEN + (u64)(token + lane) * TOKEN_SCALES + c.head * HEAD_SCALES;
            u32 to = here() + 2 * BYTES + (pool * RUN + lane) * HEAD_SCALES;
            if (HEAD_SCALES == 8) copy8(to, from);
            else copy4(to, from);
        }
        bar_arrive_copied(bar(THERE));
        __syncwarp();
    }
    // Before the run is asked for, its place's barrier may be two phases behind, and would say too much.
    __device__ __forceinline__ void await(const Cache&, u32) {
        POLLS;
        while ((int)(known - number) <= 0) {
            known = shared4(ring.asked);
            WATCHED("a run");
        }
        bar_wait(bar(THERE), phase());
        __syncwarp();
    }
    // Says that it has been read.
    __device__ __forceinline__ void used() const {
        __syncwarp();
        if (lane == 0) bar_arrive(bar(USED));
    }
#endif

    // A key's scales.
    __device__ __forceinline__ void take_scales(u32 key, u32 (&w)[SCALES]) const {
        u32 at = scale_spot(false, key);
        if (SCALES == 2) shared8(at, w[0], w[SCALES - 1]);
        else w[0] = shared4(at);
    }
    // Which of the blocks side by side a lane's columns are of; and of those, a value's scales.
    __device__ u32 side() const { return (GROUP <= 2 ? lane % 4 : lane % 4 / 2) % SIDE; }
    __device__ __forceinline__ void take_scales_of_side(u32 key, u32 (&w)[COLUMNS]) const {
        u32 at = scale_spot(true, key) + side() * 2;
#pragma unroll
        for (u32 s = 0; s < COLUMNS; s++) w[s] = shared2(at + s * SIDE * 2);
    }
    __device__ static float scale_of(const u32 (&words)[SCALES], u32 block) {
        return half_to_float((u16)(words[block / 2] >> 16 * (block % 2) & 0xffff));
    }

    // Rows of keys, two pieces each, as fragment m: eights of keys come first.
    __device__ u32 row_of_keys() const { return spot(half + lane / 8 % 2 * 8 + lane % 8, lane / 16); }
    __device__ static u32 fragment(u32 at, u32 row, u32 m) { return at + (row ^ m % 2 * 32) + m / 2 * SPAN_BYTES; }

    // Scores of keys g and g + 8 for the two heads of a lane's columns. A product is of one block, whose scale multiplies it.
    __device__ __forceinline__ void scores(const Queries& q, float (&score)[2][2]) const {
        static const u32 N = Queries::PAIRS_OF;
        u32 from = keys_at(), near[SCALES], behind[SCALES];
        take_scales(lane / 4, near);
        take_scales(lane / 4 + 8, behind);
        float all[N][4] = {};
        u32 row = row_of_keys();
#pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) {
            u32 rows[4];
            load_matrices(rows, fragment(from, row, b));
            float scale[2] = {scale_of(near, b), scale_of(behind, b)};
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                float a[4];
                mma_s8(a, rows, q.words[n][b][0], q.words[n][b][1]);
#pragma unroll
                for (u32 i = 0; i < 4; i++) all[n][i] = fmaf(a[i] - AROUND, scale[i / 2], all[n][i]);
            }
        }
        // Neighbouring lanes have the finer numbers of the same heads; of four heads, each then has two.
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float keep = all[0][i] * q.factors[0][i % 2], give = keep;
            if (N > 1) {
                float other = all[N - 1][i] * q.factors[N - 1][i % 2];
                give = lane % 2 ? keep : other;
                keep = lane % 2 ? other : keep;
            }
            keep += __shfl_xor_sync(0xffffffffu, give, 1);
            score[i / 2][i % 2] = keep + __shfl_xor_sync(0xffffffffu, keep, 2);
        }
    }

    // Adds a tile's values, with 128 more, by their weights, and 128 by these to `ones`. Bytes are below what halves have for
    // exponents, so that alone they are 2^-24 times what they say.
    __device__ __forceinline__ void add(const u32 (&column)[COLUMNS][2], const u32 (&rest)[COLUMNS][2], float (&mix)[MIXES][4],
                                        float (&ones)[COLUMNS][4]) const {
        u32 from = values_at(), row = row_of_keys();
#pragma unroll
        for (u32 m = 0; m < MIXES; m += 2) {
            // Of elements 2g and 2g + 1 by turns, of keys 2t and 2t + 1, then of those eight behind.
            u32 w[4], s = m / 2 / SIDE;
            load_matrices_turned(w, fragment(from, row, m / 2));
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 x = w[2 * i] ^ 0x80808080u, y = w[2 * i + 1] ^ 0x80808080u;
                u32 rows[4] = {__byte_perm(x, 0, 0x4240), __byte_perm(x, 0, 0x4341), __byte_perm(y, 0, 0x4240), __byte_perm(y, 0, 0x4341)};
                mma_f16(mix[m + i], rows, column[s][0], column[s][1]);
                mma_f16(mix[m + i], rows, rest[s][0], rest[s][1]);
            }
        }
        u32 more[4] = {0x00800080u, 0x00800080u, 0x00800080u, 0x00800080u};
#pragma unroll
        for (u32 s = 0; s < COLUMNS; s++) {
            mma_f16(ones[s], more, column[s][0], column[s][1]);
            mma_f16(ones[s], more, rest[s][0], rest[s][1]);
        }
    }
};

// What a warp has of its heads: means of values relative to 2^top, by rows of elements and the lane's two columns.
struct Mix {
    typedef Tile T;
    float mix[T::MIXES][4], ones[T::COLUMNS][4], top[2], sum[2];
    // What products of values are times.
    static constexpr float UNIT = 1.0f / 16777216.0f;
    u32 lane;

    __device__ u32 head_of(u32 h) { return min((GROUP <= 2 ? 0 : lane % 2 * 2) + h, GROUP - 1); }

    __device__ void begin(u32 l) {
        lane = l;
        begin_with_none(mix, top, sum);
#pragma unroll
        for (u32 i = 0; i < T::COLUMNS * 4; i++) ones[i / 4][i % 4] = 0.0f;
    }

    // Of row g of the elements' i-th sixteen, or of row g + 8.
    __device__ u32 element(u32 i, u32 behind) { return 16 * i + lane / 4 * 2 + behind; }

    // The token's own key and value; `seen` makes scores of products. A warp.
    template <class Score>
    __device__ void own(const float* heads, const Score& seen) {
        const float* value = heads + (GROUP + 1) * DIM;
        float weight[2] = {}, keep[2] = {1.0f, 1.0f};
#pragma unroll
        for (u32 h = 0; h < GROUP; h++) {
            float x = seen(own_product(heads, h, lane));
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                if (head_of(i) == h) {
                    float high = fmaxf(top[i], x - (TOP_BELOW + 6.0f));
                    keep[i] = power2(top[i] - high);
                    weight[i] = power2(x - high);
                    top[i] = high;
                }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            sum[i] = fmaf(sum[i], keep[i], lane < 4 ? weight[i] : 0.0f);
#pragma unroll
            for (u32 m = 0; m < T::MIXES; m++)
#pragma unroll
                for (u32 n = i; n < 4; n += 2)
                    mix[m][n] = fmaf(mix[m][n], keep[i], value[element(m, n / 2)] * (weight[i] * UNIT));
#pragma unroll
            for (u32 s = 0; s < T::COLUMNS; s++) ones[s][i] *= keep[i], ones[s][2 + i] *= keep[i];
        }
    }

    // Scores of a tile and, of its values, scales that the lane's columns are of.
    struct Seen {
        float score[2][2];
        u32 scales[2][T::COLUMNS];
    };

    // Keys before `first`, and from `keys` on, have no weight; the tile begins at n.
    __device__ __forceinline__ void hide(Seen& x, u32 n, u32 first, u32 keys) const {
        if (n >= first && n + TILE <= keys) return;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 key = n + 8 * i + lane / 4;
            bool is = key >= first && key < keys;
#pragma unroll
            for (u32 h = 0; h < 2; h++) x.score[i][h] = is ? x.score[i][h] : negative_infinity();
#pragma unroll
            for (u32 s = 0; s < T::COLUMNS; s++) x.scales[i][s] = is ? x.scales[i][s] : 0;
        }
    }

    // What weights may be times, as a power of two: not less than the largest scale of the tile's values.
    __device__ __forceinline__ static float height(const Seen& x) {
        u32 most = 0;
#pragma unroll
        for (u32 i = 0; i < 2 * T::COLUMNS; i++) most = max(most, x.scales[i / T::COLUMNS][i % T::COLUMNS]);
        return (float)(largest_of_warp(most) >> 10 & 31) - 14.0f;
    }

    // All that there is becomes relative to more.
    __device__ __forceinline__ void rise(const Seen& x) {
        float up = height(x);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float keep = raise(mix, top, sum, h, fmaxf(x.score[0][h], x.score[1][h]) + up, TOP_BELOW);
#pragma unroll
            for (u32 i = 0; i < T::COLUMNS; i++) ones[i][h] *= keep, ones[i][2 + h] *= keep;
        }
    }

    // What a tile's keys weigh, and that times their values' scales; whether one of these is too large.
    struct Weights {
        float all[2][2], scaled[2][T::COLUMNS][2];
    };
    __device__ __forceinline__ bool weights(const Seen& x, Weights& w) const {
        bool higher = false;
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                w.all[i][h] = power2(x.score[i][h] - top[h]);
#pragma unroll
                for (u32 s = 0; s < T::COLUMNS; s++) {
                    w.scaled[i][s][h] = w.all[i][h] * half_to_float((u16)x.scales[i][s]);
                    higher |= !(w.scaled[i][s][h] <= WEIGHT_MOST);
                }
            }
        return higher;
    }

    // A tile's weights as columns of halves, and what these lack of them.
    __device__ __forceinline__ void weigh(const Seen& x, u32 (&column)[T::COLUMNS][2], u32 (&rest)[T::COLUMNS][2]) {
        Weights w;
        bool higher = weights(x, w);
        if (__any_sync(0xffffffffu, higher)) {
            rise(x);
            weights(x, w);
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) sum[h] += w.all[0][h] + w.all[1][h];
#pragma unroll
        for (u32 i = 0; i < 2 * T::COLUMNS; i++) {
            const float(&v)[2] = w.scaled[i % 2][i / 2];
            u32 have = halves(v[0], v[1]), left = halves_left(have, v[0], v[1]);
            column[i / 2][i % 2] = turned(have);
            rest[i / 2][i % 2] = turned(left);
        }
    }

    // Tiles n, n + stride, … of keys from `first` on. `cache` says where they are.
    template <class Where, class Score>
    __device__ __forceinline__ void over(T& tile, u32 n, u32 stride, u32 first, const Queries& queries, const Where& cache,
                                        const Score& seen) {
        u32 keys = cache().count;
        // Of a run that ends in its first half, too.
#pragma unroll 1
        for (; n / RUN * RUN < keys; n += stride) {
            Seen x;
            tile.await(cache(), n);
            tile.scores(queries, x.score);
#pragma unroll
            for (u32 i = 0; i < 4; i++) x.score[i / 2][i % 2] = seen(x.score[i / 2][i % 2]);
#pragma unroll
            for (u32 i = 0; i < 2; i++) tile.take_scales_of_side(8 * i + lane / 4, x.scales[i]);
            hide(x, n, first, keys);
            u32 column[T::COLUMNS][2], rest[T::COLUMNS][2];
            weigh(x, column, rest);
            tile.add(column, rest, mix, ones);
            tile.used();
            tile.number += stride / RUN;
        }
    }

    // Leaves what the warp has: means one head behind the other, and what they are relative to with the sums of weights.
    __device__ void leave(float* means, float2* marks, u32 side) {
        // Of each block, a lane has sums with its scales, or with others'.
        bool mine = GROUP > 2 || lane % 4 < T::SIDE;
#pragma unroll
        for (u32 i = 0; i < 2 * T::COLUMNS; i++) {
            u32 first = i / 2 * T::SIDE * 2 + i % 2;
            float x[4];
#pragma unroll
            for (u32 k = 0; k < T::SIDE; k++)
#pragma unroll
                for (u32 n = 0; n < 4; n++)
                    if (k == 0 || side == k) x[n] = mix[first + 2 * k][n];
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                u32 head = (GROUP <= 2 ? 0 : lane % 2 * 2) + h;
                float2 both = {(x[h] - ones[i / 2][h]) / UNIT, (x[2 + h] - ones[i / 2][h]) / UNIT};
                if (mine && head < GROUP) *(float2*)(means + head * DIM + element(first + 2 * side, 0)) = both;
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 head = GROUP <= 2 ? h : lane % 2 * 2 + h;
#pragma unroll
            for (u32 d = 4; d < 32; d *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], d);
            float2 mark = {top[h], sum[h]};
            if (lane < (GROUP <= 2 ? 1 : 2) && head < GROUP) marks[head] = mark;
        }
    }
};

}  // namespace boxes
