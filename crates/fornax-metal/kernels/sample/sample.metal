// Penalties and the draw, where a sequence asks for more than the highest logit: after choose.metal, whose parts it reads.
//
// Layout: candidates wanted x PARTS x RECORD words: how many, the sum of their weights, then ids where there are few; choices a
// word for each wanted row; history slots x stride tokens by position; draws a structure for each sequence; all else as there.
// Threads: 256 a wanted row, or a part of one: said at each kernel.
// Bytes: every logit three times at most (all but the first from the cache) to gather candidates; then the candidates alone,
// where they are few, about 30 times for the cuts and the draw.
// Sums of weights accumulate in float, in an order that the seed of no shuffle changes.
//
// The order of the rules is the host's: penalties, top-k, top-p, min-p, temperature, draw. Exact ties go to the lowest id.
struct Draw {
    float temperature;
    uint top_k;
    float top_p, floor;
    uint seed_low, seed_high, window;
    float repeat, frequency, presence;
    uint spare[2];
};

struct PenaltyArgs {
    uint rows, base, vocab, stride;
};

// A threadgroup a wanted row. Every distinct token of the window once, by the thread that has its first occurrence.
kernel void penalise(device float *logits [[buffer(0)]], device const uint *wanted [[buffer(1)]],
                     device const uint *rows [[buffer(2)]], device const uint *history [[buffer(3)]],
                     device const Draw *draws [[buffer(4)]], constant PenaltyArgs &args [[buffer(5)]],
                     uint ix [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    device const uint *want = wanted + 4 * ix, *row = rows + 8 * (args.base + want[0]);
    if ((want[1] & PENALISED) == 0 || row[4] == 0) {
        return;
    }
    device const Draw &draw = draws[row[2]];
    device const uint *seen = history + ulong(row[3]) * args.stride;
    const uint end = min(row[1] + 1, args.stride), from = end > draw.window ? end - draw.window : 0;
    for (uint i = from + t; i < end; i += 256) {
        const uint token = seen[i];
        uint times = 0;
        bool first = token < args.vocab;
        for (uint j = from; j < end && first; j++) {
            first = seen[j] != token || j >= i;
            times += seen[j] == token ? 1 : 0;
        }
        if (first) {
            device float *logit = logits + ulong(ix) * args.vocab + token;
            const float v = *logit > 0 ? *logit / draw.repeat : *logit * draw.repeat;
            *logit = v - (draw.frequency * float(times) + draw.presence);
        }
    }
}

// Ids that a part keeps, and how many nats below the best they may be.
constant constexpr uint NEAREST = 128;
constant constexpr float NEAR = 12;
constant constexpr uint RECORD = 2 + NEAREST;

struct DrawArgs {
    uint rows, base, vocab, parts;
};

// A row whose token is to be drawn.
inline bool is_drawn(device const uint *want, device const uint *row) {
    return (want[1] & (TOKEN | DRAWN)) == (TOKEN | DRAWN) && row[4] != 0;
}

inline float tempered(float v, float best, float floor, float temperature) {
    return v >= best + floor || v == best ? exp((v - best) / temperature) : 0.0f;
}

// A threadgroup a part of a wanted row, parts along x.
kernel void gather(device const float *logits [[buffer(0)]], device const uint *parts [[buffer(1)]],
                   device const uint *penalised [[buffer(2)]], device const uint *wanted [[buffer(3)]],
                   device const uint *rows [[buffer(4)]], device const Draw *draws [[buffer(5)]],
                   device uint *candidates [[buffer(6)]], constant DrawArgs &args [[buffer(7)]],
                   uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint counts[8];
    threadgroup float sums[8];
    device const uint *want = wanted + 4 * group.y, *row = rows + 8 * (args.base + want[0]);
    if (!is_drawn(want, row)) {
        return;
    }
    device const Draw &draw = draws[row[2]];
    float total;
    const Best best = of_parts((want[1] & PENALISED) != 0 ? penalised : parts, group.y, args.parts, lane, total);
    const uint share = (args.vocab + args.parts - 1) / args.parts;
    const uint first = group.x * share, end = min(first + share, args.vocab);
    device const float *mine = logits + ulong(group.y) * args.vocab;
    uint count = 0;
    float weight = 0;
    for (uint i = first + t; i < end; i += 256) {
        // False for NaN and for what is impossible.
        if (mine[i] > -INFINITY) {
            weight += tempered(mine[i], best.value, draw.floor, draw.temperature);
            count += mine[i] >= best.value - NEAR ? 1 : 0;
        }
    }
    uint place = simd_prefix_exclusive_sum(count);
    count = simd_sum(count);
    weight = simd_sum(weight);
    if (lane == 0) {
        counts[simd] = count;
        sums[simd] = weight;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint all = 0;
    weight = 0;
    for (uint s = 0; s < 8; s++) {
        place += s < simd ? counts[s] : 0;
        all += counts[s];
        weight += sums[s];
    }
    device uint *record = candidates + (ulong(group.y) * args.parts + group.x) * RECORD;
    if (t == 0) {
        record[0] = all;
        record[1] = as_type<uint>(weight);
    }
    for (uint i = first + t; i < end && all <= NEAREST; i += 256) {
        if (mine[i] > -INFINITY && mine[i] >= best.value - NEAR) {
            record[2 + place++] = i;
        }
    }
}

// Logits to be looked at: all of a row, or those that its parts keep.
struct Source {
    device const float *logits;
    device const uint *records;
    uint vocab, parts, near;
};

// What to add up of them, by four bits of a number at a time: of those not below `cut` (and, at it, of ids up to `cut_id`) the
// count, the probability or the tempered probability, by value; or the count of those of value `tie`, by id.
struct Query {
    uint cut, cut_id, prefix, shift, tie;
    uint by_id, what;
    float best, temperature;
};

constant constexpr uint COUNT = 0;
constant constexpr uint MASS = 1;
constant constexpr uint TEMPERED = 2;

// A number with the order of the floats. -0 and 0 are a tie.
inline uint ordered(float v) {
    const uint bits = as_type<uint>(v + 0.0f);
    return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

inline float value_of(uint key) {
    return as_type<float>(key >> 31 != 0 ? key ^ 0x80000000u : ~key);
}

inline float weighed(float v, uint what, float best, float temperature) {
    return what == COUNT ? 1.0f : exp(what == MASS ? v - best : (v - best) / temperature);
}

inline void add(Source s, uint id, Query q, thread float *bins) {
    const float v = s.logits[id];
    const uint key = ordered(v);
    if (!(v > -INFINITY) || key < q.cut || (key == q.cut && id > q.cut_id) || (q.by_id != 0 && key != q.tie)) {
        return;
    }
    const uint number = q.by_id != 0 ? ~id : key;
    if (q.shift < 28 && number >> (q.shift + 4) != q.prefix) {
        return;
    }
    const uint digit = number >> q.shift & 15;
    const float w = weighed(v, q.what, q.best, q.temperature);
    for (uint b = 0; b < 16; b++) {
        bins[b] += b == digit ? w : 0.0f;
    }
}

// Two sets, so that one is read while the next is written.
constant constexpr uint BINS = 2 * 8 * 16;

// One look at all of them: what each digit has, in every thread.
inline void tally(Source s, Query q, threadgroup float *shared, thread uint &turn, uint t, uint lane, uint simd, thread float *all) {
    float bins[16] = {0};
    if (s.near != 0) {
        for (uint p = simd; p < s.parts; p += 8) {
            device const uint *record = s.records + p * RECORD;
            for (uint i = lane; i < record[0]; i += 32) {
                add(s, record[2 + i], q, bins);
            }
        }
    } else {
        for (uint i = t; i < s.vocab; i += 256) {
            add(s, i, q, bins);
        }
    }
    threadgroup float *mine = shared + turn * 128;
    turn ^= 1;
    for (uint b = 0; b < 16; b++) {
        const float sum = simd_sum(bins[b]);
        if (lane == 0) {
            mine[simd * 16 + b] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = 0; b < 16; b++) {
        all[b] = 0;
        for (uint g = 0; g < 8; g++) {
            all[b] += mine[g * 16 + b];
        }
    }
}

inline float everything(Source s, Query q, threadgroup float *shared, thread uint &turn, uint t, uint lane, uint simd) {
    float all[16], sum = 0;
    q.shift = 28;
    tally(s, q, shared, turn, t, lane, simd, all);
    for (uint b = 0; b < 16; b++) {
        sum += all[b];
    }
    return sum;
}

// From the best down, the number in which the target is reached, or the last that there is; `above` is what is above it.
inline uint reach(Source s, Query q, float target, threadgroup float *shared, thread uint &turn, uint t, uint lane, uint simd,
                  thread float &above) {
    // Ids have 24 bits.
    uint shift = q.by_id != 0 ? 24 : 32;
    q.prefix = q.by_id != 0 ? 0xff : 0;
    above = 0;
    while (shift > 0) {
        shift -= 4;
        q.shift = shift;
        float all[16];
        tally(s, q, shared, turn, t, lane, simd, all);
        float sum = above;
        uint digit = 0;
        bool reached = false;
        for (uint b = 16; b > 0 && !reached; b--) {
            if (all[b - 1] > 0) {
                digit = b - 1;
                above = sum;
                sum += all[b - 1];
                reached = sum >= target;
            }
        }
        q.prefix = q.prefix << 4 | digit;
    }
    return q.prefix;
}

// The id of number n, from 1, of those whose value is `key`.
inline uint tie_number(Source s, Query q, uint key, uint n, threadgroup float *shared, thread uint &turn, uint t, uint lane,
                       uint simd) {
    float above;
    q.by_id = 1;
    q.what = COUNT;
    q.tie = key;
    return ~reach(s, q, float(n), shared, turn, t, lane, simd, above);
}

inline uint ties(Source s, Query q, uint key, threadgroup float *shared, thread uint &turn, uint t, uint lane, uint simd) {
    float all[16], sum = 0;
    q.by_id = 1;
    q.what = COUNT;
    q.tie = key;
    q.prefix = 0xff;
    q.shift = 20;
    tally(s, q, shared, turn, t, lane, simd, all);
    for (uint b = 0; b < 16; b++) {
        sum += all[b];
    }
    return uint(sum);
}

// Two rounds of the SplitMix64 finaliser over seed and position, the top 24 bits.
inline ulong mixed(ulong z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ul;
    z = (z ^ z >> 27) * 0x94d049bb133111ebul;
    return z ^ z >> 31;
}

inline float uniform_at(device const Draw &draw, uint pos) {
    const ulong seed = ulong(draw.seed_low) | ulong(draw.seed_high) << 32;
    const ulong z = mixed(mixed(seed + 0x9e3779b97f4a7c15ul) ^ (ulong(pos) << 1 | 1));
    return float(uint(z >> 40)) / 16777216.0f;
}

// A threadgroup a wanted row. Without top-k and top-p the draw goes through the ids in their order; with either, from the best
// down. The kept are always a beginning of that order, so that each rule is a cut: a value, and among its ties an id.
kernel void draw_token(device const float *logits [[buffer(0)]], device const uint *parts [[buffer(1)]],
                       device const uint *penalised [[buffer(2)]], device const uint *wanted [[buffer(3)]],
                       device const uint *rows [[buffer(4)]], device const Draw *draws [[buffer(5)]],
                       device const uint *candidates [[buffer(6)]], device uint *choices [[buffer(7)]],
                       constant DrawArgs &args [[buffer(8)]], uint ix [[threadgroup_position_in_grid]],
                       uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float shared[BINS];
    device const uint *want = wanted + 4 * ix, *row = rows + 8 * (args.base + want[0]);
    if (!is_drawn(want, row)) {
        return;
    }
    device const Draw &draw = draws[row[2]];
    float total;
    const Best best = of_parts((want[1] & PENALISED) != 0 ? penalised : parts, ix, args.parts, lane, total);
    device const float *mine = logits + ulong(ix) * args.vocab;
    device const uint *records = candidates + ulong(ix) * args.parts * RECORD;
    if (best.id == NOBODY || best.value == INFINITY) {
        if (t == 0) {
            choices[ix] = best.id;
        }
        return;
    }
    const float u = uniform_at(draw, row[1] + 1);
    uint turn = 0;
    if (draw.top_k == 0 && draw.top_p >= 1) {
        float sum = 0, before = 0;
        for (uint p = 0; p < args.parts; p++) {
            sum += as_type<float>(records[p * RECORD + 1]);
        }
        const float target = u * sum;
        uint part = 0;
        sum = 0;
        for (uint p = 0; p < args.parts && sum <= target; p++) {
            const float w = as_type<float>(records[p * RECORD + 1]);
            if (w > 0) {
                part = p;
                before = sum;
                sum += w;
            }
        }
        const uint share = (args.vocab + args.parts - 1) / args.parts;
        const uint first = part * share, end = min(first + share, args.vocab);
        for (uint i0 = first; i0 < end; i0 += 256) {
            const uint i = i0 + t;
            const bool usable = i < end && mine[min(i, end - 1)] > -INFINITY;
            const float w = usable ? tempered(mine[i], best.value, draw.floor, draw.temperature) : 0.0f;
            const float up_to = simd_prefix_inclusive_sum(w), here = simd_sum(w);
            threadgroup float *sums = shared + turn * 128;
            turn ^= 1;
            if (lane == 0) {
                sums[simd] = here;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // The simdgroup in which the target is passed; the last of anything where rounding lets none.
            const bool at_end = i0 + 256 >= end;
            uint who = 8;
            float at = before, behind = before;
            for (uint g = 0; g < 8; g++) {
                if (sums[g] > 0 && (who == 8 || at <= target)) {
                    const bool passed = at + sums[g] > target;
                    behind = passed || at_end ? at : behind;
                    who = passed || at_end ? g : who;
                }
                at += sums[g];
            }
            if (who < 8) {
                if (simd == who) {
                    const uint passing = simd_min(w > 0 && behind + up_to > target ? i : NOBODY);
                    const uint last = simd_max(w > 0 ? i : 0u);
                    if (lane == 0) {
                        choices[ix] = passing == NOBODY ? last : passing;
                    }
                }
                return;
            }
            before = at;
        }
        if (t == 0) {
            choices[ix] = best.id;
        }
        return;
    }
    Source s = {mine, records, args.vocab, args.parts, 1};
    Query q = {0, NOBODY, 0, 0, 0, 0, MASS, best.value, draw.temperature};
    uint near = 0;
    for (uint p = 0; p < args.parts; p++) {
        const uint n = records[p * RECORD];
        near += n;
        s.near = n > NEAREST ? 0 : s.near;
    }
    // The near ones alone must be enough for the rule, else it takes all.
    if (s.near != 0 && draw.top_k != 0) {
        s.near = near >= draw.top_k ? 1 : 0;
    } else if (s.near != 0) {
        s.near = everything(s, q, shared, turn, t, lane, simd) >= draw.top_p * total ? 1 : 0;
    }
    float above;
    if (draw.top_k != 0) {
        q.what = COUNT;
        const uint key = reach(s, q, float(draw.top_k), shared, turn, t, lane, simd, above);
        const uint n = ties(s, q, key, shared, turn, t, lane, simd), keep = draw.top_k - min(uint(above), draw.top_k);
        q.cut_id = keep < n ? tie_number(s, q, key, keep, shared, turn, t, lane, simd) : NOBODY;
        q.cut = key;
        q.what = MASS;
        total = everything(s, q, shared, turn, t, lane, simd);
    }
    if (draw.top_p < 1) {
        q.what = MASS;
        const float target = draw.top_p * total;
        const uint key = reach(s, q, target, shared, turn, t, lane, simd, above);
        const uint n = ties(s, q, key, shared, turn, t, lane, simd);
        const float keep = ceil((target - above) / weighed(value_of(key), MASS, best.value, 1));
        const uint cut_id = keep < float(n) ? tie_number(s, q, key, max(uint(keep), 1u), shared, turn, t, lane, simd) : NOBODY;
        q.cut_id = key == q.cut ? min(q.cut_id, cut_id) : cut_id;
        q.cut = key;
    }
    const uint floor = ordered(best.value + draw.floor);
    if (floor > q.cut) {
        q.cut = floor;
        q.cut_id = NOBODY;
    }
    q.what = TEMPERED;
    const float target = u * everything(s, q, shared, turn, t, lane, simd);
    const uint key = reach(s, q, target, shared, turn, t, lane, simd, above);
    const uint n = ties(s, q, key, shared, turn, t, lane, simd);
    const float w = weighed(value_of(key), TEMPERED, best.value, draw.temperature);
    const float behind = max(target - above, 0.0f) / w;
    const uint number = behind < float(n) ? uint(behind) : n - 1;
    const uint id = tie_number(s, q, key, number + 1, shared, turn, t, lane, simd);
    if (t == 0) {
        choices[ix] = id;
    }
}
