// Decode attention that does what comes before it too: norm and rotation of queries and keys, the append, and the first
// stage of attention over the paged cache, for steps with one row of each sequence.
//
// Layout: q rows x heads x k_width, k and v rows x kv heads x width floats, as the projections left them; pools and
// tables as in pool.metal, rows as in rope.metal. partials, a row `part` floats: heads x splits x v_width unscaled mixes, then heads x splits x 2
// floats (largest score, sum), for matvec_joined.
// Heads are at most 256 wide: a lane holds every 32nd element, K_EACH of a key and V_EACH of a value.
// Threads: SIMDS simdgroups for a share of the keys, along x, of HEADS query heads of one key head, along y, of a row, along
// z. The simdgroups take four keys of the share in turn, and add up at the end.
// Bytes: each K and V element once for HEADS query heads; the row's own key and value are read raw by whoever takes the last
// share, who also appends them: nobody else looks at them in the cache. Softmax is online. Accumulates in float.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

constant uint HEADS [[function_constant(0)]];
constant uint K_EACH [[function_constant(1)]];
constant uint V_EACH [[function_constant(2)]];
constant uint SIMDS [[function_constant(3)]];

// The most that the host may ask for.
constant constexpr uint MOST_HEADS = 8;
constant constexpr uint MOST_EACH = 8;
constant constexpr uint MOST_SIMDS = 4;
// Floats of mixes that a simdgroup leaves at a time.
constant constexpr uint LEFT = 1024;

// What element i reads once it is stored; stores it where asked. In a pool of blocks the lanes of a simdgroup hold a whole
// block: all of them, in order.
inline float kept(device float *pool, ulong i, float v, bool store, uint) {
    if (store) {
        pool[i] = v;
    }
    return v;
}

inline float kept(device half *pool, ulong i, float v, bool store, uint) {
    const half h = half(v);
    if (store) {
        pool[i] = h;
    }
    return float(h);
}

inline float kept(device Eights *pool, ulong i, float v, bool store, uint lane) {
    const float d = simd_max(abs(v)) / 127.0f;
    // What is not finite must show when it is read.
    const bool bad = simd_any(!isfinite(v));
    const float steps = bad || d < 1e-37f ? 0.0f : clamp(round(v * (1.0f / d)), -127.0f, 127.0f);
    const half scale = bad ? half(NAN) : half(d);
    if (store) {
        device Eights *to = pool + i / 32;
        to->q[lane] = char(int(steps));
        if (lane == 0) {
            to->d = scale;
        }
    }
    return float(scale) * steps;
}

struct AppendArgs {
    uint rows, heads, kv_heads, k_width, v_width, block, stride, window;
    float scale, softcap;
    uint splits, part, q_norm, k_norm;
    float eps;
    uint pairs, halves;
    float magnitude;
};

inline Token token_at(device const uint *tables, uint seq, uint pos, constant AppendArgs &args) {
    return token_of(tables, seq, args.stride, args.block, pos);
}

inline float capped(float score, constant AppendArgs &args) {
    return args.softcap != 0 ? args.softcap * tanh(score / args.softcap) : score;
}

// How a position turns a lane's elements: each becomes itself times c plus its partner times s.
struct Turn {
    float c[MOST_EACH], s[MOST_EACH];
    uint partner[MOST_EACH];
};

inline void turn_of(device const float *freqs, uint pos, constant AppendArgs &args, uint lane, thread Turn &turn) {
    for (uint j = 0; j < K_EACH; j++) {
        const uint d = lane + 32 * j;
        turn.c[j] = 1;
        turn.s[j] = 0;
        turn.partner[j] = d;
        if (d < 2 * args.pairs) {
            const uint pair = args.halves ? d % args.pairs : d / 2;
            const bool second = args.halves ? d >= args.pairs : d % 2 != 0;
            const float angle = float(pos) * freqs[pair], s = args.magnitude * sin(angle);
            turn.c[j] = args.magnitude * cos(angle);
            turn.s[j] = second ? s : -s;
            turn.partner[j] = args.halves ? (second ? d - args.pairs : d + args.pairs) : (d ^ 1u);
        }
    }
}

// A lane's elements of a head, normed and turned. `norm` may be read where `normed`.
inline void turned(device const float *x, device const float *norm, bool normed, thread const Turn &turn,
                   constant AppendArgs &args, uint lane, thread float *to) {
    float scale = 1;
    if (normed) {
        float sum = 0;
        for (uint j = 0; j < K_EACH; j++) {
            const uint d = lane + 32 * j;
            sum = d < args.k_width ? fma(x[d], x[d], sum) : sum;
        }
        scale = 1.0f / sqrt(simd_sum(sum) / float(args.k_width) + args.eps);
    }
    for (uint j = 0; j < K_EACH; j++) {
        const uint d = lane + 32 * j, p = turn.partner[j];
        to[j] = 0;
        if (d < args.k_width) {
            const float u = normed ? x[d] * scale * norm[d] : x[d], v = normed ? x[p] * scale * norm[p] : x[p];
            to[j] = u * turn.c[j] + v * turn.s[j];
        }
    }
}

template <typename KV>
kernel void attention_append(device const float *q [[buffer(0)]], device const float *k [[buffer(1)]],
                             device const float *v [[buffer(2)]], device const float *q_norm [[buffer(3)]],
                             device const float *k_norm [[buffer(4)]], device const float *freqs [[buffer(5)]],
                             device const uint *rows [[buffer(6)]], device const uint *tables [[buffer(7)]],
                             device KV *keys0 [[buffer(8)]], device KV *keys1 [[buffer(9)]], device KV *keys2 [[buffer(10)]],
                             device KV *keys3 [[buffer(11)]], device KV *values0 [[buffer(12)]],
                             device KV *values1 [[buffer(13)]], device KV *values2 [[buffer(14)]],
                             device KV *values3 [[buffer(15)]], device float *partials [[buffer(16)]],
                             constant AppendArgs &args [[buffer(17)]],
                             uint3 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float tops[MOST_SIMDS * MOST_HEADS], sums[MOST_SIMDS * MOST_HEADS], mixes[MOST_SIMDS * LEFT];
    device const uint *mine = rows + 8 * group.z;
    if (mine[4] == 0) {
        return;
    }
    const uint pos = mine[1], seq = mine[2];
    const uint first = args.window == 0 || pos < args.window ? 0 : pos + 1 - args.window;
    // Shares of less than 32 keys cost more where they are joined than they save here.
    const uint share = max((pos + 1 - first + args.splits - 1) / args.splits, 32u);
    const uint begin = first + group.x * share, end = min(begin + share, pos + 1);
    const uint head0 = group.y * HEADS, each = args.heads / args.kv_heads, kv = head0 / each;
    device float *to = partials + ulong(group.z) * args.part;
    device float *ends = to + ulong(args.heads) * args.splits * args.v_width;
    if (begin >= end) {
        // The mix of no keys is not looked at.
        if (t < HEADS) {
            device float *said = ends + ((head0 + t) * args.splits + group.x) * 2;
            said[0] = -INFINITY;
            said[1] = 0;
        }
        return;
    }
    Turn turn;
    turn_of(freqs, pos, args, lane, turn);
    float qs[MOST_HEADS][MOST_EACH], mix[MOST_HEADS][MOST_EACH], best[MOST_HEADS], sum[MOST_HEADS];
    for (uint h = 0; h < HEADS; h++) {
        device const float *from = q + (ulong(group.z) * args.heads + head0 + h) * args.k_width;
        turned(from, q_norm, args.q_norm != 0, turn, args, lane, qs[h]);
        for (uint j = 0; j < K_EACH; j++) {
            qs[h][j] *= args.scale;
        }
        for (uint j = 0; j < V_EACH; j++) {
            mix[h][j] = 0;
        }
        best[h] = -INFINITY;
        sum[h] = 0;
    }
    // The row's own key and value, as the cache will give them.
    float k_now[MOST_EACH], v_now[MOST_EACH];
    if (end == pos + 1) {
        const Token token = token_at(tables, seq, pos, args);
        const ulong at = token.at * args.kv_heads + kv;
        device KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
        device KV *values = piece_of(token.piece, values0, values1, values2, values3);
        const bool store = simd == 0 && head0 % each == 0;
        turned(k + (ulong(group.z) * args.kv_heads + kv) * args.k_width, k_norm, args.k_norm != 0, turn, args, lane, k_now);
        for (uint j = 0; j < K_EACH; j++) {
            const uint d = lane + 32 * j;
            if (d < args.k_width) {
                k_now[j] = kept(keys, at * args.k_width + d, k_now[j], store, lane);
            }
        }
        for (uint j = 0; j < V_EACH; j++) {
            const uint d = lane + 32 * j;
            v_now[j] = 0;
            if (d < args.v_width) {
                const float now = v[(ulong(group.z) * args.kv_heads + kv) * args.v_width + d];
                v_now[j] = kept(values, at * args.v_width + d, now, store, lane);
            }
        }
    }
    for (uint key = begin + 4 * simd; key < end; key += 4 * SIMDS) {
        ulong at[4];
        uint piece[4];
        bool now[4];
        float scores[MOST_HEADS][4];
        for (uint u = 0; u < 4; u++) {
            const uint p = min(key + u, end - 1);
            now[u] = p == pos;
            const Token token = token_at(tables, seq, p, args);
            at[u] = token.at * args.kv_heads + kv;
            piece[u] = token.piece;
            device const KV *keys = piece_of(token.piece, keys0, keys1, keys2, keys3);
            float ks[MOST_EACH];
            for (uint j = 0; j < K_EACH; j++) {
                const uint d = lane + 32 * j;
                ks[j] = 0;
                if (d < args.k_width) {
                    ks[j] = now[u] ? k_now[j] : stored(keys, at[u] * args.k_width + d);
                }
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
                if (d < args.v_width) {
                    const float w = now[u] ? v_now[j] : stored(values, at[u] * args.v_width + d);
                    for (uint h = 0; h < HEADS; h++) {
                        mix[h][j] = fma(scores[h][u], w, mix[h][j]);
                    }
                }
            }
        }
    }
    for (uint h = 0; h < HEADS && lane == 0; h++) {
        tops[simd * MOST_HEADS + h] = best[h];
        sums[simd * MOST_HEADS + h] = sum[h];
    }
    const uint wide = 32 * V_EACH, batch = LEFT / wide;
    for (uint h0 = 0; h0 < HEADS; h0 += batch) {
        const uint n = min(batch, HEADS - h0);
        if (h0 != 0) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint h = 0; h < n; h++) {
            for (uint j = 0; j < V_EACH; j++) {
                mixes[simd * LEFT + h * wide + 32 * j + lane] = mix[h0 + h][j];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = t; i < n * wide; i += 32 * SIMDS) {
            const uint h = h0 + i / wide, d = i % wide;
            float top = tops[h];
            for (uint s = 1; s < SIMDS; s++) {
                top = max(top, tops[s * MOST_HEADS + h]);
            }
            float all = 0, total = 0;
            for (uint s = 0; s < SIMDS; s++) {
                // A simdgroup without a key has -inf and weighs nothing.
                const float weight = exp(tops[s * MOST_HEADS + h] - top);
                all = fma(weight, mixes[s * LEFT + i], all);
                total = fma(weight, sums[s * MOST_HEADS + h], total);
            }
            const uint part = (head0 + h) * args.splits + group.x;
            if (d < args.v_width) {
                to[ulong(part) * args.v_width + d] = all;
            }
            if (d == 0) {
                ends[part * 2] = top;
                ends[part * 2 + 1] = total;
            }
        }
    }
}

#define KERNEL(name, ...) template [[host_name(name)]] kernel decltype(__VA_ARGS__) __VA_ARGS__;
KERNEL("attention_append_f32", attention_append<float>)
KERNEL("attention_append_f16", attention_append<half>)
KERNEL("attention_append_q8_0", attention_append<Eights>)
