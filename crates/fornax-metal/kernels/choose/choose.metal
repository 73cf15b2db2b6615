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

struct PickArgs {
    uint rows, base, out_first, out_next, choices, parts;
};

// rows: 8 words each: token, position, sequence, slot, tokens left, round; wanted: row, what, chain row, ticket;
// stops: 16 words a sequence, the count first; out: the choices' tokens (or 0xfffffffe where no logit was usable), then
// their log-probabilities where asked.
kernel void argmax_pick(device const uint *parts [[buffer(0)]], device const uint *wanted [[buffer(1)]],
                        device uint *rows [[buffer(2)]], device uint *last [[buffer(3)]],
                        device const uint *stops [[buffer(4)]], device const uint *stop_tickets [[buffer(5)]],
                        device uint *out [[buffer(6)]], constant PickArgs &args [[buffer(7)]],
                        uint ix [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    device const uint *mine = parts + 4 * ulong(ix) * args.parts;
    Best best = {-INFINITY, NOBODY};
    for (uint p = lane; p < args.parts; p += 32) {
        best = better(best, {as_type<float>(mine[4 * p]), mine[4 * p + 1]});
    }
    best = best_of_simd(best);
    float sum = 0;
    for (uint p = lane; p < args.parts; p += 32) {
        // A part with nothing usable has -inf for its value and adds nothing.
        sum += mine[4 * p + 1] == NOBODY ? 0.0f : as_type<float>(mine[4 * p + 2]) * exp(as_type<float>(mine[4 * p]) - best.value);
    }
    sum = simd_sum(sum);
    device const uint *want = wanted + 4 * ix;
    device const uint *row = rows + 8 * (args.base + want[0]);
    if (lane != 0 || (want[1] & 1) == 0 || row[4] == 0) {
        return;
    }
    const uint pos = row[1], seq = row[2], slot = row[3], round = row[5];
    const uint token = best.id == NOBODY ? 0 : best.id;
    const uint at = round == 0 ? ix : args.out_first + (round - 1) * args.out_next + ix;
    out[at] = best.id == NOBODY ? NOBODY - 1 : token;
    if ((want[1] & 2) != 0) {
        // The highest logit is the one that all were measured against.
        out[args.choices + at] = as_type<uint>(-log(sum));
    }
    if ((want[1] & 4) != 0) {
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
