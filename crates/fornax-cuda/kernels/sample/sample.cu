// The choice of tokens: the best of every wanted row, in parts; where a sequence asks for more, penalties and the draw.
//
// Layout: logits wanted × vocab; best, changed: wanted × parts × 4 words (value, id or none, sum of exp(logit − value),
// spare), before and after penalties; candidates wanted × parts × RECORD words: how many, the sum of all weights, how near, then
// ids; choices a word for each wanted row; history slots × stride tokens by position; draws a structure for
// each sequence. Threads: 256 a wanted row, or a part of one (parts along x), unless said otherwise.
// Bytes: every logit three times at most (all but the first from the cache) to gather candidates; then the candidates alone
// about 30 times for the cuts and the draw, or all logits where the candidates are not enough for the rules. Sums of weights are f32, in an order that no seed changes.
//
// The order of the rules is the host's: penalties, top-k, top-p, min-p, temperature, draw. Exact ties go to the lowest id,
// NaN and −∞ are never chosen.
#include "../chosen.cuh"

static const u32 ALL = 0xffffffffu;
static const u32 THREADS = 256, WARPS = 8;

struct Draw {
    float temperature;
    u32 top_k;
    float top_p, floor;
    u32 seed_low, seed_high, window;
    float repeat, frequency, presence;
    // The first position of which the history holds the sequence's token.
    u32 known, spare;
};

// The first position that penalties look at, for a row.
__device__ inline u32 window_start(const Draw& d, u32 end) { return max(d.known, end > d.window ? end - d.window : 0u); }

__device__ inline u32 warp_sum_u32(u32 v) {
    for (u32 d = 16; d > 0; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

// Of the lanes up to this one.
template <class T>
__device__ inline T warp_prefix(T v, u32 lane) {
    for (u32 d = 1; d < 32; d *= 2) {
        T other = __shfl_up_sync(ALL, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

struct NoteArgs {
    u32 rows, stride;
};

// A thread a row: leaves the row's token in its slot's history.
extern "C" __global__ void note_tokens(NoteArgs a, const Row* rows, const u32* last, u32* history) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.rows) return;
    Row row = rows[i];
    if (row.left == 0 || row.pos >= a.stride) return;
    history[(u64)row.slot * a.stride + row.pos] = row.token == NONE ? last[row.slot] : row.token;
}

struct Best {
    float value;
    u32 id;
};

__device__ inline Best better(Best a, Best b) {
    bool take = b.id != NONE && (a.id == NONE || b.value > a.value || (b.value == a.value && b.id < a.id));
    return take ? b : a;
}

__device__ inline Best best_of_warp(Best a) {
    for (u32 d = 16; d > 0; d /= 2) {
        Best b = {__shfl_xor_sync(ALL, a.value, d), __shfl_xor_sync(ALL, a.id, d)};
        a = better(a, b);
    }
    return a;
}

// `kinds`: the wanted rows looked at.
struct SurveyArgs {
    u32 rows, base, vocab, parts, kinds;
};

// The best of each part of a wanted row, and its sum of exponentials.
extern "C" __global__ void survey(SurveyArgs a, const float* logits, const Wanted* wanted, const Row* rows, u32* to) {
    __shared__ float values[WARPS], sums[WARPS];
    __shared__ u32 ids[WARPS];
    u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    Wanted w = wanted[blockIdx.y];
    if (!(w.kind & a.kinds) || rows[a.base + w.row].left == 0) return;
    u32 share = (a.vocab + a.parts - 1) / a.parts, first = blockIdx.x * share, end = min(first + share, a.vocab);
    const float* mine = logits + (u64)blockIdx.y * a.vocab;
    Best best = {negative_infinity(), NONE};
    // Eight loads are under way at a time.
    for (u32 i = first + t; i < end; i += 8 * THREADS) {
        float v[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = i + k * THREADS < end ? mine[i + k * THREADS] : negative_infinity();
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            // False for NaN.
            if (v[k] > best.value) best = {v[k], i + k * THREADS};
    }
    best = best_of_warp(best);
    if (lane == 0) {
        values[warp] = best.value;
        ids[warp] = best.id;
    }
    __syncthreads();
    best = {values[lane % WARPS], ids[lane % WARPS]};
    best = best_of_warp(best);
    // The best alone needs no sum.
    bool counted = best.id != NONE && w.kind != TOKEN && w.kind != (TOKEN | SETS_LAST);
    float sum = 0.0f;
    for (u32 i = first + t; i < end && counted; i += THREADS) sum += isnan(mine[i]) ? 0.0f : expf(mine[i] - best.value);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (t == 0) {
        float all = 0.0f;
        for (u32 s = 0; s < WARPS; s++) all += sums[s];
        u32* place = to + 4 * ((u64)blockIdx.y * a.parts + blockIdx.x);
        place[0] = __float_as_uint(best.value);
        place[1] = best.id;
        place[2] = __float_as_uint(all);
    }
}

// The best of a row by its parts, and the sum of exp(logit − best), in every lane.
__device__ inline Best of_parts(const u32* parts, u32 row, u32 n, u32 lane, float& sum) {
    const u32* mine = parts + 4 * (u64)row * n;
    Best best = {negative_infinity(), NONE};
    for (u32 p = lane; p < n; p += 32) best = better(best, {__uint_as_float(mine[4 * p]), mine[4 * p + 1]});
    best = best_of_warp(best);
    sum = 0.0f;
    for (u32 p = lane; p < n; p += 32)
        // A part with nothing usable adds nothing.
        sum += mine[4 * p + 1] == NONE ? 0.0f : __uint_as_float(mine[4 * p + 2]) * expf(__uint_as_float(mine[4 * p]) - best.value);
    sum = warp_sum(sum);
    return best;
}

struct PenaltyArgs {
    u32 rows, base, vocab, stride;
};

// Every distinct token of the window once, by the thread that has its first occurrence.
extern "C" __global__ void penalise(PenaltyArgs a, float* logits, const Wanted* wanted, const Row* rows, const u32* history,
                                    const Draw* draws) {
    u32 ix = blockIdx.x;
    Wanted w = wanted[ix];
    Row row = rows[a.base + w.row];
    if (!(w.kind & PENALISED) || row.left == 0) return;
    const Draw& draw = draws[row.seq];
    const u32* seen = history + (u64)row.slot * a.stride;
    u32 end = min(row.pos + 1, a.stride), from = window_start(draw, end);
    for (u32 i = from + threadIdx.x; i < end; i += THREADS) {
        u32 token = seen[i], times = 0;
        bool first = token < a.vocab;
        for (u32 j = from; j < end && first; j++) {
            first = seen[j] != token || j >= i;
            times += seen[j] == token ? 1 : 0;
        }
        if (!first) continue;
        float* logit = logits + (u64)ix * a.vocab + token;
        float v = *logit > 0.0f ? *logit / draw.repeat : *logit * draw.repeat;
        *logit = v - (draw.frequency * (float)times + draw.presence);
    }
}

// Ids that a part keeps, and how many nats below the best they may be: 12, or as many halves of that as it takes for them to
// be few enough.
static const u32 NEAREST = 128, LEVELS = 10;
static const u32 RECORD = 3 + NEAREST;

__device__ inline float near_limit(float best, u32 level) { return best - 12.0f / (float)(1u << level); }

struct DrawArgs {
    u32 rows, base, vocab, parts;
};

__device__ inline float tempered(float v, float best, float floor, float temperature) {
    return v >= best + floor || v == best ? expf((v - best) / temperature) : 0.0f;
}

extern "C" __global__ void gather(DrawArgs a, const float* logits, const u32* bests, const u32* changed, const Wanted* wanted,
                                  const Row* rows, const Draw* draws, u32* candidates) {
    __shared__ u32 counts[WARPS][LEVELS];
    __shared__ float sums[WARPS];
    u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    Wanted w = wanted[blockIdx.y];
    Row row = rows[a.base + w.row];
    if (!(w.kind & DRAWN) || row.left == 0) return;
    const Draw& draw = draws[row.seq];
    float total;
    Best best = of_parts(w.kind & PENALISED ? changed : bests, blockIdx.y, a.parts, lane, total);
    u32 share = (a.vocab + a.parts - 1) / a.parts, first = blockIdx.x * share, end = min(first + share, a.vocab);
    const float* mine = logits + (u64)blockIdx.y * a.vocab;
    u32 count[LEVELS];
#pragma unroll
    for (u32 k = 0; k < LEVELS; k++) count[k] = 0;
    float weight = 0.0f;
    for (u32 i = first + t; i < end; i += THREADS) {
        float v = mine[i];
        // False for NaN and for what is impossible.
        if (!(v > negative_infinity())) continue;
        weight += tempered(v, best.value, draw.floor, draw.temperature);
#pragma unroll
        for (u32 k = 0; k < LEVELS; k++) count[k] += v >= near_limit(best.value, k) ? 1 : 0;
    }
#pragma unroll
    for (u32 k = 0; k < LEVELS; k++) {
        u32 here = warp_sum_u32(count[k]);
        if (lane == 0) counts[warp][k] = here;
    }
    weight = warp_sum(weight);
    if (lane == 0) sums[warp] = weight;
    __syncthreads();
    // The widest level that leaves few enough.
    u32 level = LEVELS, kept = 0;
    for (u32 k = 0; k < LEVELS && level == LEVELS; k++) {
        kept = 0;
        for (u32 s = 0; s < WARPS; s++) kept += counts[s][k];
        if (kept <= NEAREST) level = k;
    }
    weight = 0.0f;
    for (u32 s = 0; s < WARPS; s++) weight += sums[s];
    u32* record = candidates + ((u64)blockIdx.y * a.parts + blockIdx.x) * RECORD;
    if (t == 0) {
        record[0] = level == LEVELS ? NONE : kept;
        record[1] = __float_as_uint(weight);
        record[2] = level;
    }
    if (level == LEVELS) return;
    u32 own = 0;
#pragma unroll
    for (u32 k = 0; k < LEVELS; k++) own = k == level ? count[k] : own;
    u32 place = warp_prefix(own, lane) - own;
    for (u32 s = 0; s < warp; s++) place += counts[s][level];
    for (u32 i = first + t; i < end && own > 0; i += THREADS)
        if (mine[i] > negative_infinity() && mine[i] >= near_limit(best.value, level)) record[3 + place++] = i;
}

// Logits to be looked at: all of a row, or those that its parts keep.
struct Source {
    const float* logits;
    const u32* records;
    u32 vocab, parts, near;
};

// What to add up of them, by four bits of a number at a time: of those not below `cut` (and, at it, of ids up to `cut_id`)
// the count, the probability or the tempered probability, by value; or the count of those of value `tie`, by id.
struct Query {
    u32 cut, cut_id, prefix, shift, tie, by_id, what;
    float best, temperature;
};

static const u32 COUNT = 0, MASS = 1, TEMPERED = 2;

// A number with the order of the floats. −0 and 0 are a tie.
__device__ inline u32 ordered(float v) {
    u32 bits = __float_as_uint(v + 0.0f);
    return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ inline float value_of(u32 key) { return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key); }

__device__ inline float weighed(float v, u32 what, float best, float temperature) {
    return what == COUNT ? 1.0f : expf(what == MASS ? v - best : (v - best) / temperature);
}

__device__ inline void add(const Source& s, u32 id, const Query& q, float* bins) {
    float v = s.logits[id];
    u32 key = ordered(v);
    if (!(v > negative_infinity()) || key < q.cut || (key == q.cut && id > q.cut_id) || (q.by_id != 0 && key != q.tie)) return;
    u32 number = q.by_id != 0 ? ~id : key;
    if (q.shift < 28 && number >> (q.shift + 4) != q.prefix) return;
    u32 digit = number >> q.shift & 15;
    float w = weighed(v, q.what, q.best, q.temperature);
#pragma unroll
    for (u32 b = 0; b < 16; b++) bins[b] += b == digit ? w : 0.0f;
}

// The block that draws is a large one: it may have to look at every logit.
static const u32 DRAWERS = 1024, DRAW_WARPS = 32;

// What its threads share, and which half of it is theirs to write next: one is read while the other is written.
struct Shared {
    float* bins;
    float* all;
    u32 turn, t, lane, warp;
};

static const u32 HALF = DRAW_WARPS * 16;

// One look at all of them: what each digit has, in every thread.
__device__ __noinline__ void tally(const Source& s, const Query& q, Shared& h, float* all) {
    float bins[16];
#pragma unroll
    for (u32 b = 0; b < 16; b++) bins[b] = 0.0f;
    if (s.near != 0) {
        for (u32 p = h.warp; p < s.parts; p += DRAW_WARPS) {
            const u32* record = s.records + p * RECORD;
            for (u32 i = h.lane; i < record[0]; i += 32) add(s, record[3 + i], q, bins);
        }
    } else {
        for (u32 i = h.t; i < s.vocab; i += DRAWERS) add(s, i, q, bins);
    }
    float *mine = h.bins + h.turn * HALF, *sums = h.all + h.turn * 16;
    h.turn ^= 1;
#pragma unroll
    for (u32 b = 0; b < 16; b++) {
        float sum = warp_sum(bins[b]);
        if (h.lane == 0) mine[h.warp * 16 + b] = sum;
    }
    __syncthreads();
    if (h.warp == 0) {
        float sum = 0.0f;
        for (u32 g = h.lane / 16; g < DRAW_WARPS; g += 2) sum += mine[g * 16 + h.lane % 16];
        sum += __shfl_xor_sync(ALL, sum, 16);
        if (h.lane < 16) sums[h.lane] = sum;
    }
    __syncthreads();
    for (u32 b = 0; b < 16; b++) all[b] = sums[b];
}

__device__ inline float everything(const Source& s, Query q, Shared& h) {
    float all[16], sum = 0.0f;
    q.shift = 28;
    tally(s, q, h, all);
    for (u32 b = 0; b < 16; b++) sum += all[b];
    return sum;
}

// From the best down, the number in which the target is reached, or the last that there is; `above` is what is above it.
__device__ __noinline__ u32 reach(const Source& s, Query q, float target, Shared& h, float& above) {
    // Ids have 24 bits.
    u32 shift = q.by_id != 0 ? 24 : 32;
    q.prefix = q.by_id != 0 ? 0xff : 0;
    above = 0.0f;
    while (shift > 0) {
        shift -= 4;
        q.shift = shift;
        float all[16];
        tally(s, q, h, all);
        float sum = above;
        u32 digit = 0;
        bool reached = false;
        for (u32 b = 16; b > 0 && !reached; b--)
            if (all[b - 1] > 0.0f) {
                digit = b - 1;
                above = sum;
                sum += all[b - 1];
                reached = sum >= target;
            }
        q.prefix = q.prefix << 4 | digit;
    }
    return q.prefix;
}

// The id of number n, from 1, of those whose value is `key`.
__device__ inline u32 tie_number(const Source& s, Query q, u32 key, u32 n, Shared& h) {
    float above;
    q.by_id = 1;
    q.what = COUNT;
    q.tie = key;
    return ~reach(s, q, (float)n, h, above);
}

__device__ inline u32 ties(const Source& s, Query q, u32 key, Shared& h) {
    float all[16], sum = 0.0f;
    q.by_id = 1;
    q.what = COUNT;
    q.tie = key;
    q.prefix = 0xff;
    q.shift = 20;
    tally(s, q, h, all);
    for (u32 b = 0; b < 16; b++) sum += all[b];
    return (u32)sum;
}

// Two rounds of the SplitMix64 finaliser over seed and position, the top 24 bits.
__device__ inline u64 mixed(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

__device__ inline float uniform_at(const Draw& draw, u32 pos) {
    u64 seed = (u64)draw.seed_low | (u64)draw.seed_high << 32;
    u64 z = mixed(mixed(seed + 0x9e3779b97f4a7c15ull) ^ ((u64)pos << 1 | 1));
    return (float)(u32)(z >> 40) / 16777216.0f;
}

// Without top-k and top-p the draw goes through the ids in their order: first to the part in which it ends, then in steps of
// a block to the id.
__device__ __noinline__ u32 by_order(const DrawArgs& a, const Draw& draw, const float* mine, const u32* records, Best best, float u,
                                     Shared& h, u32* found) {
    float sum = 0.0f, before = 0.0f;
    for (u32 p = 0; p < a.parts; p++) sum += __uint_as_float(records[p * RECORD + 1]);
    float target = u * sum;
    u32 part = 0;
    sum = 0.0f;
    for (u32 p = 0; p < a.parts && sum <= target; p++) {
        float w = __uint_as_float(records[p * RECORD + 1]);
        if (w > 0.0f) {
            part = p;
            before = sum;
            sum += w;
        }
    }
    u32 share = (a.vocab + a.parts - 1) / a.parts, first = part * share, end = min(first + share, a.vocab);
    for (u32 i0 = first; i0 < end; i0 += DRAWERS) {
        u32 i = i0 + h.t;
        bool usable = i < end && mine[min(i, end - 1)] > negative_infinity();
        float w = usable ? tempered(mine[i], best.value, draw.floor, draw.temperature) : 0.0f;
        float up_to = warp_prefix(w, h.lane), here = __shfl_sync(ALL, up_to, 31);
        float* sums = h.bins + h.turn * HALF;
        h.turn ^= 1;
        if (h.lane == 0) sums[h.warp] = here;
        __syncthreads();
        // The warp in which the target is passed; the last of anything where rounding lets none.
        bool at_end = i0 + DRAWERS >= end;
        u32 who = DRAW_WARPS;
        float at = before, behind = before;
        for (u32 g = 0; g < DRAW_WARPS; g++) {
            if (sums[g] > 0.0f && (who == DRAW_WARPS || at <= target)) {
                bool passed = at + sums[g] > target;
                behind = passed || at_end ? at : behind;
                who = passed || at_end ? g : who;
            }
            at += sums[g];
        }
        if (who < DRAW_WARPS) {
            if (h.warp == who) {
                u32 passing = w > 0.0f && behind + up_to > target ? i : NONE, last = w > 0.0f ? i : 0;
                for (u32 d = 16; d > 0; d /= 2) {
                    passing = min(passing, __shfl_xor_sync(ALL, passing, d));
                    last = max(last, __shfl_xor_sync(ALL, last, d));
                }
                if (h.lane == 0) *found = passing == NONE ? last : passing;
            }
            __syncthreads();
            return *found;
        }
        before = at;
    }
    return best.id;
}

// With top-k or top-p the draw goes from the best down. The kept are always a beginning of that order, so that each rule is a
// cut: a value, and among its ties an id.
__device__ __noinline__ u32 by_value(const DrawArgs& a, const Draw& draw, const float* mine, const u32* records, Best best, float total,
                                     float u, Shared& h) {
    Source s = {mine, records, a.vocab, a.parts, 1};
    Query q = {0, NONE, 0, 0, 0, 0, MASS, best.value, draw.temperature};
    // All parts have what is as near as in the part that is strictest.
    u32 level = 0;
    for (u32 p = 0; p < a.parts; p++) {
        level = max(level, records[p * RECORD + 2]);
        s.near = records[p * RECORD] == NONE ? 0 : s.near;
    }
    // The near ones alone must be enough for the rule, else it takes all.
    if (s.near != 0) {
        q.cut = ordered(near_limit(best.value, level));
        q.what = draw.top_k != 0 ? COUNT : MASS;
        float enough = draw.top_k != 0 ? (float)draw.top_k : draw.top_p * total;
        if (everything(s, q, h) < enough) {
            s.near = 0;
            q.cut = 0;
        }
        q.what = MASS;
    }
    float above;
    if (draw.top_k != 0) {
        q.what = COUNT;
        u32 key = reach(s, q, (float)draw.top_k, h, above);
        u32 n = ties(s, q, key, h), keep = draw.top_k - min((u32)above, draw.top_k);
        q.cut_id = keep < n ? tie_number(s, q, key, keep, h) : NONE;
        q.cut = key;
        q.what = MASS;
        total = everything(s, q, h);
    }
    if (draw.top_p < 1.0f) {
        q.what = MASS;
        float target = draw.top_p * total;
        u32 key = reach(s, q, target, h, above), n = ties(s, q, key, h);
        float keep = ceilf((target - above) / weighed(value_of(key), MASS, best.value, 1.0f));
        u32 cut_id = keep < (float)n ? tie_number(s, q, key, keep > 1.0f ? (u32)keep : 1u, h) : NONE;
        q.cut_id = key == q.cut ? min(q.cut_id, cut_id) : cut_id;
        q.cut = key;
    }
    u32 floor = ordered(best.value + draw.floor);
    if (floor > q.cut) {
        q.cut = floor;
        q.cut_id = NONE;
    }
    q.what = TEMPERED;
    float target = u * everything(s, q, h);
    u32 key = reach(s, q, target, h, above), n = ties(s, q, key, h);
    float w = weighed(value_of(key), TEMPERED, best.value, draw.temperature);
    float behind = fmaxf(target - above, 0.0f) / w;
    u32 number = behind < (float)n ? (u32)behind : n - 1;
    return tie_number(s, q, key, number + 1, h);
}

extern "C" __global__ void __launch_bounds__(DRAWERS) draw_token(DrawArgs a, const float* logits, const u32* bests, const u32* changed, const Wanted* wanted,
                                      const Row* rows, const Draw* draws, const u32* candidates, u32* choices) {
    __shared__ float bins[2 * HALF], sums[2 * 16];
    __shared__ u32 found;
    u32 ix = blockIdx.x;
    Shared h = {bins, sums, 0, threadIdx.x, threadIdx.x % 32, threadIdx.x / 32};
    Wanted w = wanted[ix];
    Row row = rows[a.base + w.row];
    if (!(w.kind & DRAWN) || row.left == 0) return;
    const Draw& draw = draws[row.seq];
    float total;
    Best best = of_parts(w.kind & PENALISED ? changed : bests, ix, a.parts, h.lane, total);
    const float* mine = logits + (u64)ix * a.vocab;
    const u32* records = candidates + (u64)ix * a.parts * RECORD;
    u32 token = best.id;
    if (best.id != NONE && !isinf(best.value)) {
        float u = uniform_at(draw, row.pos + 1);
        if (draw.top_k == 0 && draw.top_p >= 1.0f)
            token = by_order(a, draw, mine, records, best, u, h, &found);
        else
            token = by_value(a, draw, mine, records, best, total, u, h);
    }
    if (h.t == 0) choices[ix] = token;
}

// `kinds`: the wanted rows that are chosen for.
struct PickArgs {
    u32 rows, base, vocab, parts, stride, out_first, out_next, kinds;
};

// A warp a wanted row: the drawn token, or the best, after penalties where there are any; its log-probability is of the row as it came.
extern "C" __global__ void pick(PickArgs a, const float* logits, const u32* bests, const u32* changed, const u32* choices,
                                const Wanted* wanted, Row* rows, const u32* history, const Draw* draws, u32* last,
                                const u32* stops, const u32* stop, Out* outs) {
    u32 ix = blockIdx.x, lane = threadIdx.x;
    Wanted w = wanted[ix];
    Row row = rows[a.base + w.row];
    if (!(w.kind & a.kinds) || row.left == 0) return;
    float sum, unused;
    Best raw = of_parts(bests, ix, a.parts, lane, sum), best = raw;
    if (w.kind & PENALISED) best = of_parts(changed, ix, a.parts, lane, unused);
    bool usable = best.id != NONE;
    u32 token = !usable ? 0 : w.kind & DRAWN ? choices[ix] : best.id;
    float value = logits[(u64)ix * a.vocab + token];
    if (w.kind & PENALISED) {
        // What the penalties took is given back.
        const Draw& draw = draws[row.seq];
        const u32* seen = history + (u64)row.slot * a.stride;
        u32 end = min(row.pos + 1, a.stride), times = 0;
        for (u32 i = window_start(draw, end) + lane; i < end; i += 32) times += seen[i] == token ? 1 : 0;
        times = warp_sum_u32(times);
        if (times > 0) {
            value += draw.frequency * (float)times + draw.presence;
            value = value > 0.0f ? value * draw.repeat : value / draw.repeat;
        }
    }
    float logprob = w.kind & LOGPROB && usable ? value - raw.value - logf(sum) : __int_as_float(0x7fc00000);
    // A chain's row is replaced by its successor: not before every lane has read it.
    __syncwarp();
    if (lane == 0)
        finish_choice(row, w, ix, token, usable, logprob, a.out_first, a.out_next, rows, last, stops, stop, outs);
}
