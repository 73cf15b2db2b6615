// Attention over the paged cache: a row at position p sees the keys max(0, p - window + 1) ..= p of its own sequence.
//
// Layout: q rows x heads x k_width and out rows x heads x v_width floats; pools and tables as in pool.metal, rows as in rope.metal; partials
// rows x heads x splits x (2 + v_width) floats: largest score, sum, unscaled mix.
// Heads are at most 256 wide: a lane holds every 32nd element, K_EACH of a key and V_EACH of a value.
// Threads: said at each kernel; a lane of a simdgroup always holds the same elements of a head.
// Bytes: decode reads each K and V element once for up to eight query heads of its key head; prefill once for eight rows of
// up to eight. Softmax is online: no score is kept, and there is no limit on the keys. Accumulates in float.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

constant uint HEADS [[function_constant(0)]];
constant uint K_EACH [[function_constant(1)]];
constant uint V_EACH [[function_constant(2)]];

// The most that the host may ask for.
constant constexpr uint MOST_HEADS = 8;
constant constexpr uint MOST_EACH = 8;

struct AttentionArgs {
    uint rows, heads, kv_heads, k_width, v_width, block, stride, window;
    float scale, softcap;
    uint sinks, splits;
};

inline uint first_key(uint pos, constant AttentionArgs &args) {
    return args.window == 0 || pos < args.window ? 0 : pos + 1 - args.window;
}

inline Token token_at(device const uint *tables, uint seq, uint pos, constant AttentionArgs &args) {
    return token_of(tables, seq, args.stride, args.block, pos);
}

inline float capped(float score, constant AttentionArgs &args) {
    return args.softcap != 0 ? args.softcap * tanh(score / args.softcap) : score;
}

// Decode, first stage. Threads: a simdgroup (which is the threadgroup) for a share of the keys, along x, of HEADS query
// heads of one key head, along y, of a row, along z. Each K and V element of the share is read once for all of its heads.
template <typename KV>
kernel void attention_split(device const float *q [[buffer(0)]], device const uint *rows [[buffer(1)]],
                            device const uint *tables [[buffer(2)]], device const KV *keys0 [[buffer(3)]],
                            device const KV *keys1 [[buffer(4)]], device const KV *keys2 [[buffer(5)]],
                            device const KV *keys3 [[buffer(6)]], device const KV *values0 [[buffer(7)]],
                            device const KV *values1 [[buffer(8)]], device const KV *values2 [[buffer(9)]],
                            device const KV *values3 [[buffer(10)]], device float *partials [[buffer(11)]],
                            constant AttentionArgs &args [[buffer(12)]], uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]]) {
    device const uint *mine = rows + 8 * group.z;
    if (mine[4] == 0) {
        return;
    }
    const uint pos = mine[1], seq = mine[2], first = first_key(pos, args);
    // Shares of less than 32 keys cost more in the second stage than they save here.
    const uint share = max((pos + 1 - first + args.splits - 1) / args.splits, 32u);
    const uint begin = first + group.x * share, end = min(begin + share, pos + 1);
    const uint head0 = group.y * HEADS, kv = head0 / (args.heads / args.kv_heads);
    float qs[MOST_HEADS][MOST_EACH], mix[MOST_HEADS][MOST_EACH], best[MOST_HEADS], sum[MOST_HEADS];
    for (uint h = 0; h < HEADS; h++) {
        device const float *from = q + (ulong(group.z) * args.heads + head0 + h) * args.k_width;
        for (uint j = 0; j < K_EACH; j++) {
            const uint d = lane + 32 * j;
            qs[h][j] = d < args.k_width ? from[d] * args.scale : 0.0f;
        }
        for (uint j = 0; j < V_EACH; j++) {
            mix[h][j] = 0;
        }
        best[h] = -INFINITY;
        sum[h] = 0;
    }
    for (uint key = begin; key < end; key += 4) {
        ulong at[4];
        uint piece[4];
        float scores[MOST_HEADS][4];
        for (uint u = 0; u < 4; u++) {
            const Token token = token_at(tables, seq, min(key + u, end - 1), args);
            at[u] = token.at * args.kv_heads + kv;
            piece[u] = token.piece;
            device const KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
            float ks[MOST_EACH];
            for (uint j = 0; j < K_EACH; j++) {
                const uint d = lane + 32 * j;
                ks[j] = d < args.k_width ? stored(keys, at[u] * args.k_width + d) : 0.0f;
            }
            for (uint h = 0; h < HEADS; h++) {
                float dot = 0;
                for (uint j = 0; j < K_EACH; j++) {
                    dot = fma(qs[h][j], ks[j], dot);
                }
                const float score = capped(simd_sum(dot), args);
                scores[h][u] = key + u < end ? score : -INFINITY;
            }
        }
        for (uint h = 0; h < HEADS; h++) {
            const float top = max(best[h], max(max(scores[h][0], scores[h][1]), max(scores[h][2], scores[h][3])));
            const float keep = exp(best[h] - top);
            best[h] = top;
            sum[h] *= keep;
            for (uint u = 0; u < 4; u++) {
                scores[h][u] = exp(scores[h][u] - top);
                sum[h] += scores[h][u];
            }
            for (uint j = 0; j < V_EACH; j++) {
                mix[h][j] *= keep;
            }
        }
        for (uint u = 0; u < 4; u++) {
            device const KV *values = piece_of(piece[u], values0, values1, values2, values3);
            for (uint j = 0; j < V_EACH; j++) {
                const uint d = lane + 32 * j;
                const float v = d < args.v_width ? stored(values, at[u] * args.v_width + d) : 0.0f;
                for (uint h = 0; h < HEADS; h++) {
                    mix[h][j] = fma(scores[h][u], v, mix[h][j]);
                }
            }
        }
    }
    for (uint h = 0; h < HEADS; h++) {
        const ulong part = (ulong(group.z) * args.heads + head0 + h) * args.splits + group.x;
        device float *to = partials + part * (args.v_width + 2);
        if (lane == 0) {
            to[0] = best[h];
            to[1] = sum[h];
        }
        // The second stage does not look at the mix of no keys.
        for (uint j = 0; j < V_EACH && begin < end; j++) {
            if (lane + 32 * j < args.v_width) {
                to[2 + lane + 32 * j] = mix[h][j];
            }
        }
    }
}

// Decode, second stage. Threads: a simdgroup a head, along x, of a row, along y; a lane holds one of at most 32 shares.
kernel void attention_reduce(device const float *partials [[buffer(0)]], device const uint *rows [[buffer(1)]],
                             device const float *sinks [[buffer(2)]], device float *out [[buffer(3)]],
                             constant AttentionArgs &args [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]]) {
    const ulong head = ulong(group.y) * args.heads + group.x;
    device const float *parts = partials + head * args.splits * (args.v_width + 2);
    device float *to = out + head * args.v_width;
    const bool live = rows[8 * group.y + 4] != 0;
    float best = -INFINITY, sum = 0;
    if (live && lane < args.splits) {
        best = parts[lane * (args.v_width + 2)];
        sum = parts[lane * (args.v_width + 2) + 1];
    }
    const float sink = args.sinks ? sinks[group.x] : -INFINITY;
    const float top = max(simd_max(best), sink);
    const float weight = best == -INFINITY ? 0.0f : exp(best - top);
    const float total = simd_sum(sum * weight) + (args.sinks ? exp(sink - top) : 0.0f);
    for (uint j = 0; j < V_EACH; j++) {
        const uint d = lane + 32 * j;
        float mix = 0;
        for (uint s = 0; s < args.splits; s++) {
            const float w = simd_shuffle(weight, ushort(s));
            if (w > 0 && d < args.v_width) {
                mix = fma(w, parts[s * (args.v_width + 2) + 2 + d], mix);
            }
        }
        if (d < args.v_width) {
            to[d] = live ? mix / total : 0.0f;
        }
    }
}

constant constexpr uint TILE = 8;
constant constexpr uint WIDTH = 32 * MOST_EACH;

// Prefill. Threads: eight simdgroups for eight rows, along y, of HEADS query heads of one key head, along x. The keys that the
// rows of one sequence see pass through threadgroup memory, eight at a time, and are read once for all rows and heads.
template <typename KV>
kernel void attention_tiled(device const float *q [[buffer(0)]], device const uint *rows [[buffer(1)]],
                            device const uint *tables [[buffer(2)]], device const KV *keys0 [[buffer(3)]],
                            device const KV *keys1 [[buffer(4)]], device const KV *keys2 [[buffer(5)]],
                            device const KV *keys3 [[buffer(6)]], device const KV *values0 [[buffer(7)]],
                            device const KV *values1 [[buffer(8)]], device const KV *values2 [[buffer(9)]],
                            device const KV *values3 [[buffer(10)]], device const float *sinks [[buffer(11)]],
                            device float *out [[buffer(12)]], constant AttentionArgs &args [[buffer(13)]],
                            uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float ks[TILE * WIDTH], vs[TILE * WIDTH];
    const uint head0 = group.x * HEADS, kv = head0 / (args.heads / args.kv_heads);
    const uint row0 = group.y * TILE, n = min(TILE, args.rows - row0);
    const bool valid = simd < n;
    device const uint *mine = rows + 8 * (row0 + min(simd, n - 1));
    const bool live = valid && mine[4] != 0;
    const uint pos = mine[1], first = first_key(pos, args);
    const ulong at_head = ulong(row0 + min(simd, n - 1)) * args.heads + head0;
    float qs[MOST_HEADS][MOST_EACH], mix[MOST_HEADS][MOST_EACH], best[MOST_HEADS], sum[MOST_HEADS];
    for (uint h = 0; h < HEADS; h++) {
        for (uint j = 0; j < K_EACH; j++) {
            const uint d = lane + 32 * j;
            qs[h][j] = d < args.k_width ? q[(at_head + h) * args.k_width + d] * args.scale : 0.0f;
        }
        for (uint j = 0; j < V_EACH; j++) {
            mix[h][j] = 0;
        }
        best[h] = args.sinks ? sinks[head0 + h] : -INFINITY;
        sum[h] = args.sinks ? 1.0f : 0.0f;
    }
    for (uint a = 0, b = 0; a < n; a = b) {
        const uint seq = rows[8 * (row0 + a) + 2];
        uint low = 0xffffffffu, high = 0;
        for (b = a; b < n && rows[8 * (row0 + b) + 2] == seq; b++) {
            const uint p = rows[8 * (row0 + b) + 1];
            if (rows[8 * (row0 + b) + 4] != 0) {
                low = min(low, first_key(p, args));
                high = max(high, p + 1);
            }
        }
        for (uint key = low; key < high; key += TILE) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (key + simd < high) {
                const Token token = token_at(tables, seq, key + simd, args);
                const ulong at = token.at * args.kv_heads + kv;
                device const KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
                device const KV *values = piece_of(token.piece, values0, values1, values2, values3);
                for (uint d = lane; d < args.k_width; d += 32) {
                    ks[simd * WIDTH + d] = stored(keys, at * args.k_width + d);
                }
                for (uint d = lane; d < args.v_width; d += 32) {
                    vs[simd * WIDTH + d] = stored(values, at * args.v_width + d);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (!live || simd < a || simd >= b || key > pos || key + TILE <= first) {
                continue;
            }
            for (uint h = 0; h < HEADS; h++) {
                // At least one of these keys is seen, so that the largest score is finite.
                float scores[TILE], top = best[h];
                for (uint u = 0; u < TILE; u++) {
                    scores[u] = -INFINITY;
                    if (key + u >= first && key + u <= pos) {
                        float dot = 0;
                        for (uint j = 0; j < K_EACH; j++) {
                            const uint d = lane + 32 * j;
                            dot = d < args.k_width ? fma(qs[h][j], ks[u * WIDTH + d], dot) : dot;
                        }
                        scores[u] = capped(simd_sum(dot), args);
                        top = max(top, scores[u]);
                    }
                }
                const float keep = exp(best[h] - top);
                best[h] = top;
                sum[h] *= keep;
                for (uint j = 0; j < V_EACH; j++) {
                    mix[h][j] *= keep;
                }
                for (uint u = 0; u < TILE; u++) {
                    if (key + u < first || key + u > pos) {
                        continue;
                    }
                    const float weight = exp(scores[u] - top);
                    sum[h] += weight;
                    for (uint j = 0; j < V_EACH; j++) {
                        const uint d = lane + 32 * j;
                        mix[h][j] = d < args.v_width ? fma(weight, vs[u * WIDTH + d], mix[h][j]) : 0.0f;
                    }
                }
            }
        }
    }
    for (uint h = 0; h < HEADS; h++) {
        for (uint j = 0; j < V_EACH; j++) {
            const uint d = lane + 32 * j;
            if (valid && d < args.v_width) {
                out[(at_head + h) * args.v_width + d] = live ? mix[h][j] / sum[h] : 0.0f;
            }
        }
    }
}

#define KERNEL(name, ...) template [[host_name(name)]] kernel decltype(__VA_ARGS__) __VA_ARGS__;
KERNEL("attention_split_f32", attention_split<float>)
KERNEL("attention_split_f16", attention_split<half>)
KERNEL("attention_split_q8_0", attention_split<Eights>)
KERNEL("attention_tiled_f32", attention_tiled<float>)
KERNEL("attention_tiled_f16", attention_tiled<half>)
KERNEL("attention_tiled_q8_0", attention_tiled<Eights>)
