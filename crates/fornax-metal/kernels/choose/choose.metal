// The highest logit of each wanted row, and the row that feeds it back, in two stages.
//
// Layout: logits wanted x vocab floats; parts wanted x PARTS x 4 words (value, id or none, sum of exp(logit - value), spare).
// Threads: first a threadgroup of 256 for each part of a row; then a simdgroup a row, a lane every 32nd part.
// Bytes: every logit twice (the second time from the cache). Ties go to the lowest id, NaN and -inf are never chosen.
// Accumulates the sum of exponentials in float.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

constant constexpr uint NOBODY = 0xffffffffu;
// What is wanted of a row.
constant constexpr uint TOKEN = 1;
constant constexpr uint LOGPROB = 2;
constant constexpr uint SETS_LAST = 4;
constant constexpr uint DRAWN = 8;
constant constexpr uint PENALISED = 16;

struct Best {
    float value;
    uint id;
};

inline Best better(Best a, Best b) {
    const bool take = b.id != NOBODY && (a.id == NOBODY || b.value > a.value || (b.value == a.value && b.id < a.id));
    return take ? b : a;
}

inline Best best_of_simd(Best a) {
    for (ushort step = 16; step > 0; step /= 2) {
        Best b;
        b.value = simd_shuffle_xor(a.value, step);
        b.id = simd_shuffle_xor(a.id, step);
        a = better(a, b);
    }
    return a;
}

struct PartsArgs {
    uint rows, vocab, parts;
};

kernel void argmax_parts(device const float *logits [[buffer(0)]], device uint *parts [[buffer(1)]],
                         constant PartsArgs &args [[buffer(2)]], uint2 group [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[8], sums[8];
    threadgroup uint ids[8];
    const uint share = (args.vocab + args.parts - 1) / args.parts;
    const uint first = group.x * share, end = min(first + share, args.vocab);
    device const float *row = logits + ulong(group.y) * args.vocab;
    Best best = {-INFINITY, NOBODY};
    for (uint i = first + t; i < end; i += 256) {
        // False for NaN.
        if (row[i] > best.value) {
            best.value = row[i];
            best.id = i;
        }
    }
    best = best_of_simd(best);
    if (lane == 0) {
        values[simd] = best.value;
        ids[simd] = best.id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = {values[lane % 8], ids[lane % 8]};
    best = best_of_simd(best);
    float sum = 0;
    for (uint i = first + t; i < end && best.id != NOBODY; i += 256) {
        sum += isnan(row[i]) ? 0.0f : exp(row[i] - best.value);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        sums[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
        float all = 0;
        for (uint s = 0; s < 8; s++) {
            all += sums[s];
        }
        device uint *to = parts + 4 * (ulong(group.y) * args.parts + group.x);
        to[0] = as_type<uint>(best.value);
        to[1] = best.id;
        to[2] = as_type<uint>(all);
    }
}

// The best of a row by its parts, and the sum of exp(logit - best), in every lane.
inline Best of_parts(device const uint *parts, uint row, uint n, uint lane, thread float &sum) {
    device const uint *mine = parts + 4 * ulong(row) * n;
    Best best = {-INFINITY, NOBODY};
    for (uint p = lane; p < n; p += 32) {
        best = better(best, {as_type<float>(mine[4 * p]), mine[4 * p + 1]});
    }
    best = best_of_simd(best);
    sum = 0;
    for (uint p = lane; p < n; p += 32) {
        // A part with nothing usable has -inf for its value and adds nothing.
        sum += mine[4 * p + 1] == NOBODY ? 0.0f : as_type<float>(mine[4 * p + 2]) * exp(as_type<float>(mine[4 * p]) - best.value);
    }
    sum = simd_sum(sum);
    return best;
}

struct PickArgs {
    uint rows, base, out_first, out_next, choices, parts, vocab, stride;
};

// How often a token was seen in the window that ends with its row.
inline uint times_seen(device const uint *seen, uint from, uint end, uint token, uint lane) {
    uint n = 0;
    for (uint i = from + lane; i < end; i += 32) {
        n += seen[i] == token ? 1 : 0;
    }
    return simd_sum(n);
}

// rows: 8 words each: token, position, sequence, slot, tokens left, round; wanted: row, what, chain row, ticket;
// stops: 16 words a sequence, the count first; out: the choices' tokens (or 0xfffffffe where no logit was usable), then
// their log-probabilities where asked. Of a row with penalties `penalised` are the parts after them, as its logits are;
// `choices` is what was drawn; draws: 12 words a sequence, see sample.metal.
kernel void argmax_pick(device const uint *parts [[buffer(0)]], device const uint *wanted [[buffer(1)]],
                        device uint *rows [[buffer(2)]], device uint *last [[buffer(3)]],
                        device const uint *stops [[buffer(4)]], device const uint *stop_tickets [[buffer(5)]],
                        device uint *out [[buffer(6)]], device const uint *penalised [[buffer(7)]],
                        device const uint *choices [[buffer(8)]], device const float *logits [[buffer(9)]],
                        device const uint *history [[buffer(10)]], device const uint *draws [[buffer(11)]],
                        constant PickArgs &args [[buffer(12)]], uint ix [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
    device const uint *want = wanted + 4 * ix;
    device const uint *row = rows + 8 * (args.base + want[0]);
    if ((want[1] & TOKEN) == 0 || row[4] == 0) {
        return;
    }
    float sum, unused;
    const Best raw = of_parts(parts, ix, args.parts, lane, sum);
    const bool changed = (want[1] & PENALISED) != 0;
    Best best = raw;
    if (changed) {
        best = of_parts(penalised, ix, args.parts, lane, unused);
    }
    const uint token = best.id == NOBODY ? 0 : (want[1] & DRAWN) != 0 ? choices[ix] : best.id;
    float value = logits[ulong(ix) * args.vocab + token];
    if (changed) {
        // What the penalties took is given back: the log-probability is of the row as it came.
        device const uint *draw = draws + 12 * row[2];
        const uint end = min(row[1] + 1, args.stride), from = end > draw[6] ? end - draw[6] : 0;
        const uint times = times_seen(history + ulong(row[3]) * args.stride, from, end, token, lane);
        const float repeat = as_type<float>(draw[7]);
        if (times > 0) {
            value += as_type<float>(draw[8]) * float(times) + as_type<float>(draw[9]);
            value = value > 0 ? value * repeat : value / repeat;
        }
    }
    // A chain's row is replaced by its successor: not before every lane has read it.
    simdgroup_barrier(mem_flags::mem_device);
    if (lane != 0) {
        return;
    }
    const uint pos = row[1], seq = row[2], slot = row[3], round = row[5];
    const uint at = round == 0 ? ix : args.out_first + (round - 1) * args.out_next + ix;
    out[at] = best.id == NOBODY ? NOBODY - 1 : token;
    if ((want[1] & LOGPROB) != 0) {
        out[args.choices + at] = as_type<uint>(value - raw.value - log(sum));
    }
    if ((want[1] & SETS_LAST) != 0) {
        last[slot] = token;
    }
    if (want[2] == NOBODY) {
        return;
    }
    bool ends = best.id == NOBODY || stop_tickets[slot] >= want[3];
    for (uint s = 0; s < stops[16 * seq]; s++) {
        ends = ends || stops[16 * seq + 1 + s] == token;
    }
    device uint *chain = rows + 8 * want[2];
    const uint left = ends ? 0 : chain[4] - 1;
    chain[0] = token;
    chain[1] = pos + 1;
    chain[2] = seq;
    chain[3] = slot;
    chain[4] = left;
    chain[5] = round + 1;
}
