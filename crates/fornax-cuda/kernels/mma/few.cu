// Attention of sequences that give a step one row or a few: decoding in batches, and drafts.
//
// A block takes one KV head of one sequence and one part of its context, for all rows and query heads that share the
// head, eight at most: they are the columns of the tensor cores' products, whose rows are keys, then elements of values.
// Warps take 16 keys at a time, straight from the paged cache to registers: the terms of a product may come in any order,
// so a lane's 16 bytes are what it needs. Where parts end depends on the length of the context alone; several are put
// together by the last block to finish. With EAGER, for steps of few rows, what is read next is asked for before its turn,
// and the keys and values of earlier steps before the kernel in front has ended: the memory has time for it.
#include "../cache.cuh"
#include "../turns.cuh"
#include "../tiles.cuh"

#ifndef DIM
#define DIM 128
#define Kv KvF16
#define EAGER 0
#endif

static const u32 THREADS = 128, WARPS = THREADS / 32, SLOTS = 8;
static const u32 CHUNKS = (DIM + 31) / 32, GROUPS = (DIM + 63) / 64;
static const float NOTHING = -1e30f;
// Keys of a part at least, and parts at most.
static const u32 PART_KEYS = 512, PARTS = 16;

struct FewArgs {
    // `parts` blocks for each head, as many as any context here has parts at least.
    u32 rows, heads, kv_heads, stride, window, tokens, to, to_stride;
    float scale, softcap;
    u32 parts;
    // The first row of this launch, and whether every row is taken by itself, however many its sequence has.
    u32 base, each;
    // Of `few_turned` alone.
    u32 pairs, halves;
    float eps, magnitude;
};

struct Job {
    const u32* table;
    u32 row, n, share, kv_head;  // first row, rows, query heads of each
    u32 pos;                     // of the first row
    u32 from, part, parts;       // first key of all; keys of a part
};

// The row that a slot belongs to, and its query head; slots behind the last are the last.
__device__ inline u32 row_of(const Job& j, u32 slot) { return min(slot, j.n * j.share - 1) / j.share; }
__device__ inline u32 head_of(const Job& j, u32 slot) { return j.kv_head * j.share + min(slot, j.n * j.share - 1) % j.share; }

// Lane (g, t) takes elements 32c + 8t … + 7 of slot g, which begins at `from`, as halves, and leaves what those lack in `rest`.
__device__ inline void load_queries(const float* from, float factor, u32 t, u32 (&to)[CHUNKS][4], Vec4 (*rest)[32]) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f}, y = x;
        if (32 * c + 8 * t < DIM) {
            x = *(const float4*)(from + 32 * c + 8 * t);
            y = *(const float4*)(from + 32 * c + 8 * t + 4);
        }
        x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
        y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
        to[c][0] = halves(x.x, x.y);
        to[c][1] = halves(x.z, x.w);
        to[c][2] = halves(y.x, y.y);
        to[c][3] = halves(y.z, y.w);
        Vec4 left = {halves_left(to[c][0], x.x, x.y), halves_left(to[c][1], x.z, x.w), halves_left(to[c][2], y.x, y.y),
                     halves_left(to[c][3], y.z, y.w)};
        if (threadIdx.x < 32) rest[c][threadIdx.x] = left;
    }
}

__device__ inline u32 word(const Vec4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Rounds 32 neighbouring values to one block. A warp.
__device__ inline void round_block(float v, u32 block, u32 row, u32 blocks, u32 stride, u32 lane, u8* q, float* scales, float* sums) {
    u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(v) & 0x7fffffffu);
    float top = __uint_as_float(bits), inverse = __fdividef(127.0f, top);
    bool none = top < 3.8e-37f, broken = bits >= 0x7f800000u;
    if (none || broken) inverse = 0.0f;
    int n = __float2int_rn(v * inverse), sum = __reduce_add_sync(0xffffffffu, n);
    q[((u64)row * blocks + block) * 32 + lane] = (u8)n;
    if (lane != 0) return;
    float scale = none ? 0.0f : top * (1.0f / 127.0f);
    if (broken) scale = __int_as_float(0x7fc00000);
    scales[(u64)block * stride + row] = scale;
    sums[(u64)block * stride + row] = scale * (float)sum;
}

struct Result {
    float* rows;
    u8* bytes;
    float *scales, *sums;
};

// Element e of a head of a row; whole warps for 32 neighbours.
__device__ inline void put(const FewArgs& a, const Result& o, float v, u32 row, u32 head, u32 e, u32 lane) {
    u32 at = head * DIM + e;
    if (a.to == TO_ROUND) {
        round_block(v, at / 32, row, a.heads * DIM / 32, a.to_stride, lane, o.bytes, o.scales, o.sums);
    } else if (a.to == TO_TILES) {
        *(u16*)(o.bytes + tile_at(row, at, (a.heads * DIM + 63) / 64)) = float_to_half(within_half(v));
    } else {
        o.rows[(u64)row * a.heads * DIM + at] = v;
    }
}

// What a product gave of a row, to be normed and turned here.
struct Raw {
    const float *k, *v, *q_norm, *k_norm, *freqs;
};

// The row's heads of this block: queries to shared memory, the key and the value to the cache, where this part ends with
// them. Sixteen bytes of a shared row are never split.
__device__ inline void turn_row(const FewArgs& a, const Job& j, const float* q, const Raw& raw, const float2* turns, u8* keys,
                                u8* values, bool last_part, float (&queries)[SLOTS][DIM], float (&key)[DIM]) {
    static const u32 EACH = (DIM + THREADS - 1) / THREADS;
    u32 lane = threadIdx.x % 32, width = a.kv_heads * DIM;
    Head h = {DIM, a.pairs, a.halves, a.eps};
    u64 elements = (u64)a.tokens * width, at = place_of(j.table, j.pos) * width + j.kv_head * DIM;
    u64 from = ((u64)j.row * a.kv_heads + j.kv_head) * DIM;
    // The value is as the product left it.
    float value[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; k++) {
        u32 i = threadIdx.x + k * THREADS;
        value[k] = last_part && i < DIM ? __ldcg(raw.v + from + i) : 0.0f;
    }
#pragma unroll 1
    for (u32 item = threadIdx.x / 32; item < j.share + last_part; item += WARPS) {
        if (item < j.share) {
            turn_head(h, q + ((u64)j.row * a.heads + j.kv_head * j.share + item) * DIM, raw.q_norm, turns, lane, queries[item]);
        } else {
            turn_head(h, raw.k + from, raw.k_norm, turns, lane, key);
            for (u32 i = lane; i < DIM; i += 32) Kv::put(keys, elements, at + i, key[i]);
        }
    }
#pragma unroll
    for (u32 k = 0; k < EACH; k++) {
        u32 i = threadIdx.x + k * THREADS;
        if (last_part && i < DIM) Kv::put(values, elements, at + i, value[k]);
    }
}

// Asks for a head's keys and values of earlier steps, so that the second-level cache has them when the kernel in front is
// through.
__device__ inline void ask_for(const Job& j, u32 begin, u32 end, u32 width, const u8* keys, const u8* values) {
    static const u32 EACH = Kv::PLAIN ? 2 : 1, PIECES = DIM * EACH / 32;
#pragma unroll 1
    for (u32 i = threadIdx.x; begin + i / PIECES < end; i += THREADS) {
        u64 at = (place_of(j.table, begin + i / PIECES) * width + j.kv_head * DIM) * EACH + i % PIECES * 32;
        into_second_cache(keys + at);
        into_second_cache(values + at);
    }
}

// With `TURN`, each sequence has one row, whose heads are as its product left them.
template <bool TURN>
__device__ inline void attend_few(const FewArgs& a, const float* q, const Raw& raw, const Row* rows, const u32* tables, u8* keys,
                                  u8* values, const float* sinks, const Result& o, float* means, float2* marks, u32* arrived) {
    extern __shared__ __align__(16) float mixes[];  // [WARPS][SLOTS][DIM]
    __shared__ float tops[WARPS][SLOTS], all[WARPS][SLOTS];
    __shared__ bool is_last;
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    if (!EAGER) let_next_begin();
    Row r = rows[a.base + blockIdx.y];
    Job j;
    j.share = a.heads / a.kv_heads;
    j.n = a.each ? 1 : max(r.rows, 1u);
    // A sequence is its first row's; longer ones are another kernel's. Who has nothing to do waits, too: the kernel behind
    // counts on it.
    if (r.left == 0 || (r.nth != 0 && !a.each) || j.n * j.share > SLOTS) {
        await_before();
        if (EAGER) let_next_begin();
        return;
    }
    j.table = tables + (u64)r.seq * a.stride;
    j.row = a.base + blockIdx.y;
    j.kv_head = blockIdx.x / a.parts;
    u32 part = blockIdx.x % a.parts;
    j.pos = r.pos;
    j.from = first_key(a.window, r.pos) & ~15u;
    u32 end = r.pos + j.n;
    j.part = max(PART_KEYS, ((end - j.from + PARTS - 1) / PARTS + 15) & ~15u);
    j.parts = (end - j.from + j.part - 1) / j.part;
    if (part >= j.parts) {
        await_before();
        if (EAGER) let_next_begin();
        return;
    }
    u32 begin = j.from + part * j.part, stop = min(begin + j.part, end);
    u32 width = a.kv_heads * DIM;
    u64 elements = (u64)a.tokens * width;
    Vec4 k[2][CHUNKS], v[4][GROUPS];
    // Sixteen keys are of one block of the cache; those behind the last are read as the last, and count for nothing.
    auto fetch_keys = [&](u32 base) {
        u64 place = place_of(j.table, base);
        u32 most = stop - 1 - base;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u64 at = (place + min(8 * i + g, most)) * width + j.kv_head * DIM;
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                k[i][c] = {0, 0, 0, 0};
                if (32 * c + 8 * t < DIM) k[i][c] = Kv::eight(keys, elements, at + 32 * c + 8 * t);
            }
        }
    };
    auto fetch_values = [&](u32 base) {
        u64 place = place_of(j.table, base);
        u32 most = stop - 1 - base;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u64 at = (place + min(2 * t + (i & 1) + (i / 2) * 8, most)) * width + j.kv_head * DIM;
#pragma unroll
            for (u32 c = 0; c < GROUPS; c++) {
                v[i][c] = {0, 0, 0, 0};
                if (64 * c + 8 * g < DIM) v[i][c] = Kv::eight(values, elements, at + 64 * c + 8 * g);
            }
        }
    };
    // Keys of earlier steps are there already; those of the rows before this one in its sequence are still being written.
    u32 opening = begin + warp * 16;
    bool ahead = opening < stop && opening + 16 <= r.pos - r.nth;
    if (ahead) fetch_keys(opening);
    if (EAGER && ahead) fetch_values(opening);
    if (EAGER) ask_for(j, begin, min(stop, r.pos - r.nth), width, keys, values);
    const float* mine = q + ((u64)(j.row + row_of(j, g)) * a.heads + head_of(j, g)) * DIM;
    if (TURN) {
        __shared__ __align__(16) float queries[SLOTS][DIM], key[DIM];
        __shared__ float2 turns[(DIM + 1) / 2];
        // The weights of norms come from memory: not when they are needed.
        for (u32 i = thread * 8; i < DIM && raw.q_norm; i += THREADS * 8) {
            early(raw.q_norm + i);
            early(raw.k_norm + i);
        }
        for (u32 i = thread; i < a.pairs; i += THREADS) turns[i] = turn_of(r.pos, raw.freqs[i], a.magnitude);
        await_before();
        if (EAGER) let_next_begin();
        __syncthreads();
        turn_row(a, j, q, raw, turns, keys, values, stop == end, queries, key);
        __syncthreads();
        mine = queries[row_of(j, g) * j.share + min(g, j.n * j.share - 1) % j.share];
    } else {
        await_before();
        if (EAGER) let_next_begin();
    }
    u32 query[CHUNKS][4];
    __shared__ Vec4 rest[CHUNKS][32];
    load_queries(mine, a.scale * (a.softcap != 0.0f ? 1.0f : LOG2E), t, query, rest);
    __syncthreads();
    // Of slots 2t and 2t + 1.
    float mix[GROUPS * 4][4], top[2] = {NOTHING, NOTHING}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < GROUPS * 4; i++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) mix[i][k] = 0.0f;
    u32 last[2], first[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        last[h] = j.pos + row_of(j, 2 * t + h);
        first[h] = first_key(a.window, last[h]);
    }
    if (EAGER && !ahead && opening < stop) {
        fetch_keys(opening);
        fetch_values(opening);
    }
#pragma unroll 1
    for (u32 base = opening; base < stop; base += WARPS * 16) {
        u32 next = base + WARPS * 16;
        if (!EAGER && (base != opening || !ahead)) fetch_keys(base);
        if (!EAGER) fetch_values(base);
        // Scores of keys g and g + 8 for slots 2t and 2t + 1.
        float s[4] = {}, small[4] = {};
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            u32 x[4] = {k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y}, y[4] = {k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w};
            Vec4 left = rest[c][lane];
            mma_f16(s, x, query[c][0], query[c][1]);
            mma_f16(small, x, left.x, left.y);
            mma_f16(s, y, query[c][2], query[c][3]);
            mma_f16(small, y, left.z, left.w);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) s[i] += small[i];
        if (EAGER && next < stop) fetch_keys(next);
        float keep[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float high = top[h];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float& x = s[2 * i + h];
                u32 key = base + 8 * i + g;
                if (a.softcap != 0.0f) x = a.softcap * tanhf(x / a.softcap) * LOG2E;
                if (key > last[h] || key < first[h] || key >= stop) x = negative_infinity();
                high = fmaxf(high, x);
            }
#pragma unroll
            for (u32 d = 4; d < 32; d *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
            keep[h] = power2(top[h] - high);
            top[h] = high;
            s[h] = power2(s[h] - high);
            s[2 + h] = power2(s[2 + h] - high);
            sum[h] = sum[h] * keep[h] + s[h] + s[2 + h];
        }
#pragma unroll
        for (u32 i = 0; i < GROUPS * 4; i++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) mix[i][n] *= keep[n % 2];
        u32 p0 = halves(s[0], s[1]), p1 = halves(s[2], s[3]);
        u32 left0 = turned(halves_left(p0, s[0], s[1])), left1 = turned(halves_left(p1, s[2], s[3]));
        p0 = turned(p0);
        p1 = turned(p1);
#pragma unroll
        for (u32 c = 0; c < GROUPS; c++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                // Rows g and g + 8 are elements 64c + 8g + 2i and the one behind it.
                u32 a0 = word(v[0][c], i), a1 = word(v[1][c], i), b0 = word(v[2][c], i), b1 = word(v[3][c], i);
                u32 x[4] = {__byte_perm(a0, a1, 0x5410), __byte_perm(a0, a1, 0x7632), __byte_perm(b0, b1, 0x5410), __byte_perm(b0, b1, 0x7632)};
                mma_f16(mix[4 * c + i], x, left0, left1);
                mma_f16(mix[4 * c + i], x, p0, p1);
            }
        if (EAGER && next < stop) fetch_values(next);
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
#pragma unroll
        for (u32 d = 4; d < 32; d *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], d);
        u32 slot = 2 * t + h;
        if (g == 0) tops[warp][slot] = top[h], all[warp][slot] = sum[h];
        if (slot >= j.n * j.share) continue;
#pragma unroll
        for (u32 i = 0; i < GROUPS * 4; i++) {
            u32 e = i / 4 * 64 + 8 * g + 2 * (i % 4);
            if (e < DIM) *(float2*)(mixes + (warp * SLOTS + slot) * DIM + e) = {mix[i][h], mix[i][2 + h]};
        }
    }
    __syncthreads();
    u32 slots = j.n * j.share;
    // A place for parts of its own.
    u32 place = (a.each ? blockIdx.y : r.seq) * a.kv_heads + j.kv_head;
    u64 mark = (u64)place * a.parts * SLOTS;
    for (u32 i = thread; i < slots * DIM; i += THREADS) {
        u32 slot = i / DIM, e = i % DIM, head = head_of(j, slot);
        float high = NOTHING, total = 0.0f, mean = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) high = fmaxf(high, tops[w][slot]);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            float weight = power2(tops[w][slot] - high);
            total = fmaf(weight, all[w][slot], total);
            mean = fmaf(weight, mixes[(w * SLOTS + slot) * DIM + e], mean);
        }
        if (j.parts == 1) {
            if (sinks) {
                float sink = __ldg(sinks + head) * LOG2E, higher = fmaxf(high, sink), keep = power2(high - higher);
                total = total * keep + power2(sink - higher);
                mean *= keep;
            }
            put(a, o, mean / total, j.row + row_of(j, slot), head, e, lane);
        } else {
            u64 at = mark + part * SLOTS + slot;
            means[at * DIM + e] = mean;
            if (e == 0) marks[at] = {high, total};
        }
    }
    if (j.parts == 1) return;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32* count = arrived + place;
        is_last = atomicAdd(count, 1) == j.parts - 1;
        if (is_last) *count = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    for (u32 i = thread; i < slots * DIM; i += THREADS) {
        u32 slot = i / DIM, e = i % DIM, head = head_of(j, slot);
        float high = sinks ? __ldg(sinks + head) * LOG2E : NOTHING, total = 0.0f, mean = 0.0f;
#pragma unroll 4
        for (u32 p = 0; p < j.parts; p++) high = fmaxf(high, __ldcg(&marks[mark + p * SLOTS + slot].x));
        if (sinks) total = power2(__ldg(sinks + head) * LOG2E - high);
#pragma unroll 4
        for (u32 p = 0; p < j.parts; p++) {
            u64 at = mark + p * SLOTS + slot;
            float2 m = __ldcg(marks + at);
            float weight = power2(m.x - high);
            total = fmaf(weight, m.y, total);
            mean = fmaf(weight, __ldcg(means + at * DIM + e), mean);
        }
        put(a, o, mean / total, j.row + row_of(j, slot), head, e, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, DIM <= 128 ? 4 : 2)
    few(FewArgs a, const float* q, const Row* rows, const u32* tables, u8* keys, u8* values, const float* sinks,
        float* out_rows, u8* out_bytes, float* out_scales, float* out_sums, float* means, float2* marks, u32* arrived) {
    Result o = {out_rows, out_bytes, out_scales, out_sums};
    Raw none = {nullptr, nullptr, nullptr, nullptr, nullptr};
    attend_few<false>(a, q, none, rows, tables, keys, values, sinks, o, means, marks, arrived);
}

extern "C" __global__ void __launch_bounds__(THREADS, DIM <= 128 ? 4 : 2)
    few_turned(FewArgs a, const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm,
               const float* freqs, const Row* rows, const u32* tables, u8* keys, u8* values, const float* sinks,
               float* out_rows, u8* out_bytes, float* out_scales, float* out_sums, float* means, float2* marks, u32* arrived) {
    Result o = {out_rows, out_bytes, out_scales, out_sums};
    Raw raw = {k, v, q_norm, k_norm, freqs};
    attend_few<true>(a, q, raw, rows, tables, keys, values, sinks, o, means, marks, arrived);
}
