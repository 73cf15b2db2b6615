// Matrices times one to four rows: bound by the bytes of the weights, each of which a tile of rows reads once.
//
// Layout: matrices outs x cols of blocks, as the file has them; x rows x cols floats; out rows x outs floats.
// Threads: a threadgroup computes OUTS outputs of ROWS rows. Its SIMDS simdgroups split the columns: a lane takes two runs of
// eight, decodes them for each of the outputs and multiplies by the sixteen elements of each row, which it holds in registers.
// Grid: outputs along x, rows along y.
// Bytes: every weight once for ROWS rows; x once for OUTS outputs. Accumulates in float: lanes, then simdgroups.
// RMS norm (NORMED): the lanes multiply x by the norm's weights as they load it and sum its squares on the way; the products
// are scaled at the end. The norm is so neither a dispatch nor a pass of its own.
constant uint OUTS [[function_constant(0)]];
constant uint ROWS [[function_constant(1)]];
constant uint SIMDS [[function_constant(2)]];
constant uint NORMED [[function_constant(3)]];

// The most that the policy may ask for.
constant constexpr uint TILE = 16;
constant constexpr uint MOST_ROWS = 4;
constant constexpr uint MOST_SIMDS = 8;
// What a simdgroup leaves: its part of each output, then of each row's sum of squares.
constant constexpr uint LEFT = TILE + MOST_ROWS;

// Where x comes from: rows of floats.
struct Plain {
    device const float *x;
    uint rows, cols;
};

// Eight elements of a row; what lies past the last row repeats it, and is not stored.
inline void eight_of(Plain x, uint row, uint col, thread float *to) {
    device const float *from = x.x + ulong(min(row, x.rows - 1)) * x.cols + col;
    if (x.cols % 4 == 0) {
        const float4 a = *(device const float4 *)from, b = *(device const float4 *)(from + 4);
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
        return;
    }
    for (uint i = 0; i < 8; i++) {
        to[i] = from[i];
    }
}

inline float one_of(Plain x, uint row, uint col) {
    return x.x[ulong(min(row, x.rows - 1)) * x.cols + col];
}

// Or shares of attention (see append.metal), joined as they are read: heads `width` wide, a multiple of eight.
struct Shares {
    device const float *parts;
    device const uint *rows;
    device const float *sinks;
    uint count, heads, width, splits, part, sinked;
};

inline void eight_of(Shares x, uint row, uint col, thread float *to) {
    row = min(row, x.count - 1);
    for (uint i = 0; i < 8; i++) {
        to[i] = 0;
    }
    if (x.rows[8 * row + 4] == 0) {
        return;
    }
    const uint head = col / x.width;
    device const float *mixes = x.parts + ulong(row) * x.part, *ends = mixes + ulong(x.heads) * x.splits * x.width;
    mixes += ulong(head) * x.splits * x.width + col % x.width;
    ends += head * x.splits * 2;
    float top = x.sinked ? x.sinks[head] : -INFINITY;
    for (uint s = 0; s < x.splits; s++) {
        top = max(top, ends[2 * s]);
    }
    float total = x.sinked ? exp(x.sinks[head] - top) : 0.0f;
    for (uint s = 0; s < x.splits; s++) {
        if (ends[2 * s] == -INFINITY) {
            continue;
        }
        const float weight = exp(ends[2 * s] - top);
        total = fma(weight, ends[2 * s + 1], total);
        device const float4 *mix = (device const float4 *)(mixes + s * x.width);
        const float4 a = mix[0], b = mix[1];
        to[0] = fma(weight, a.x, to[0]), to[1] = fma(weight, a.y, to[1]);
        to[2] = fma(weight, a.z, to[2]), to[3] = fma(weight, a.w, to[3]);
        to[4] = fma(weight, b.x, to[4]), to[5] = fma(weight, b.y, to[5]);
        to[6] = fma(weight, b.z, to[6]), to[7] = fma(weight, b.w, to[7]);
    }
    for (uint i = 0; i < 8; i++) {
        to[i] /= total;
    }
}

inline float one_of(Shares x, uint row, uint col) {
    float all[8];
    eight_of(x, row, col / 8 * 8, all);
    return all[col % 8];
}

template <typename B, typename X>
inline void products_of(device const uchar *matrix, X x, device const float *norm, uint out0, uint outs, uint row0, uint cols,
                        uint lane, uint simd, threadgroup float *partial) {
    float sum[TILE] = {0}, square[MOST_ROWS] = {0};
    for (uint pair = simd * 32 + lane; pair < cols / 16; pair += SIMDS * 32) {
        const uint run = first_run<B>(pair);
        float xs[MOST_ROWS][16];
        for (uint r = 0; r < ROWS; r++) {
            eight_of(x, row0 + r, 8 * run, xs[r]);
            eight_of(x, row0 + r, 8 * (run + B::GAP), xs[r] + 8);
            for (uint i = 0; i < 16 && NORMED != 0; i++) {
                square[r] = fma(xs[r][i], xs[r][i], square[r]);
                xs[r][i] *= norm[8 * run + i % 8 + (i < 8 ? 0 : 8 * B::GAP)];
            }
        }
        for (uint o = 0; o < OUTS; o++) {
            device const uchar *row = row_of<B>(matrix, min(out0 + o, outs - 1), cols);
            float w[16];
            B::eight(row, run, w);
            B::eight(row, run + B::GAP, w + 8);
            for (uint r = 0; r < ROWS; r++) {
                float dot = 0;
                for (uint i = 0; i < 16; i++) {
                    dot = fma(w[i], xs[r][i], dot);
                }
                sum[o * ROWS + r] += dot;
            }
        }
    }
    const uint col = cols / 16 * 16 + lane;
    if (simd == 0 && col < cols) {
        for (uint r = 0; r < ROWS; r++) {
            float v = one_of(x, row0 + r, col);
            if (NORMED != 0) {
                square[r] = fma(v, v, square[r]);
                v *= norm[col];
            }
            for (uint o = 0; o < OUTS; o++) {
                const float w = B::one(row_of<B>(matrix, min(out0 + o, outs - 1), cols), col);
                sum[o * ROWS + r] = fma(w, v, sum[o * ROWS + r]);
            }
        }
    }
    for (uint i = 0; i < OUTS * ROWS; i++) {
        const float all = simd_sum(sum[i]);
        if (lane == 0) {
            partial[simd * LEFT + i] = all;
        }
    }
    for (uint r = 0; r < ROWS && NORMED != 0; r++) {
        const float all = simd_sum(square[r]);
        if (lane == 0) {
            partial[simd * LEFT + TILE + r] = all;
        }
    }
}

template <typename B>
inline void products(device const uchar *matrix, device const float *x, device const float *norm, uint out0, uint outs,
                     uint row0, uint rows, uint cols, uint lane, uint simd, threadgroup float *partial) {
    const Plain plain = {x, rows, cols};
    products_of<B>(matrix, plain, norm, out0, outs, row0, cols, lane, simd, partial);
}

inline float gathered(threadgroup const float *partial, uint i) {
    float sum = 0;
    for (uint s = 0; s < SIMDS; s++) {
        sum += partial[s * LEFT + i];
    }
    return sum;
}

// What the norm makes of output i of the tile.
inline float normed(float v, threadgroup const float *partial, uint i, uint cols, float eps) {
    return NORMED != 0 ? v / sqrt(gathered(partial, TILE + i % ROWS) / float(cols) + eps) : v;
}

struct MatmulArgs {
    uint rows, cols, outs, bias, residual;
    float scale, softcap;
};

template <typename B>
kernel void matvec(device const uchar *matrix [[buffer(0)]], device const float *x [[buffer(1)]],
                   device const float *bias [[buffer(2)]], device const float *residual [[buffer(3)]],
                   device float *out [[buffer(4)]], constant MatmulArgs &args [[buffer(5)]],
                   uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float partial[MOST_SIMDS * LEFT];
    const uint out0 = group.x * OUTS, row0 = group.y * ROWS;
    products<B>(matrix, x, x, out0, args.outs, row0, args.rows, args.cols, lane, simd, partial);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = out0 + t / ROWS, r = row0 + t % ROWS;
    if (t >= OUTS * ROWS || o >= args.outs || r >= args.rows) {
        return;
    }
    float v = gathered(partial, t);
    v = (args.bias ? v + bias[o] : v) * args.scale;
    v = args.softcap != 0 ? args.softcap * tanh(v / args.softcap) : v;
    const ulong at = ulong(r) * args.outs + o;
    out[at] = args.residual ? v + residual[at] : v;
}

struct JoinedArgs {
    uint rows, cols, outs, bias, residual, heads, width, splits, part, sinks;
};

// The product that follows attention, of its shares: so that joining them is no dispatch and waits for nothing.
template <typename B>
kernel void matvec_joined(device const uchar *matrix [[buffer(0)]], device const float *parts [[buffer(1)]],
                          device const uint *rows [[buffer(2)]], device const float *sinks [[buffer(3)]],
                          device const float *bias [[buffer(4)]], device const float *residual [[buffer(5)]],
                          device float *out [[buffer(6)]], constant JoinedArgs &args [[buffer(7)]],
                          uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float partial[MOST_SIMDS * LEFT];
    const uint out0 = group.x * OUTS, row0 = group.y * ROWS;
    const Shares x = {parts, rows, sinks, args.rows, args.heads, args.width, args.splits, args.part, args.sinks};
    products_of<B>(matrix, x, parts, out0, args.outs, row0, args.cols, lane, simd, partial);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = out0 + t / ROWS, r = row0 + t % ROWS;
    if (t < OUTS * ROWS && o < args.outs && r < args.rows) {
        const float v = gathered(partial, t);
        const ulong at = ulong(r) * args.outs + o;
        out[at] = (args.bias ? v + bias[o] : v) + (args.residual ? residual[at] : 0.0f);
    }
}

struct QkvArgs {
    uint rows, cols, q_outs, k_outs, v_outs, bias;
    float eps;
};

// The three projections that share their input, as one space of outputs; no threadgroup spans two of them.
template <typename B>
kernel void qkv(device const uchar *q [[buffer(0)]], device const uchar *k [[buffer(1)]], device const uchar *v [[buffer(2)]],
                device const float *x [[buffer(3)]], device const float *norm [[buffer(4)]],
                device const float *q_bias [[buffer(5)]], device const float *k_bias [[buffer(6)]],
                device const float *v_bias [[buffer(7)]], device float *q_out [[buffer(8)]],
                device float *k_out [[buffer(9)]], device float *v_out [[buffer(10)]],
                constant QkvArgs &args [[buffer(11)]], uint2 group [[threadgroup_position_in_grid]],
                uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float partial[MOST_SIMDS * LEFT];
    const uint q_groups = (args.q_outs + OUTS - 1) / OUTS, k_groups = (args.k_outs + OUTS - 1) / OUTS;
    device const uchar *matrix = q;
    device const float *bias = q_bias;
    device float *out = q_out;
    uint outs = args.q_outs, tile = group.x, has_bias = args.bias & 1;
    if (tile >= q_groups + k_groups) {
        matrix = v, bias = v_bias, out = v_out, outs = args.v_outs, tile -= q_groups + k_groups, has_bias = args.bias & 4;
    } else if (tile >= q_groups) {
        matrix = k, bias = k_bias, out = k_out, outs = args.k_outs, tile -= q_groups, has_bias = args.bias & 2;
    }
    const uint out0 = tile * OUTS, row0 = group.y * ROWS;
    products<B>(matrix, x, norm, out0, outs, row0, args.rows, args.cols, lane, simd, partial);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = out0 + t / ROWS, r = row0 + t % ROWS;
    if (t < OUTS * ROWS && o < outs && r < args.rows) {
        const float sum = normed(gathered(partial, t), partial, t, args.cols, args.eps);
        out[ulong(r) * outs + o] = has_bias ? sum + bias[o] : sum;
    }
}

struct GatedArgs {
    uint rows, cols, outs, bias, act;
    float alpha, limit, eps;
};

inline float activated(float g, float u, constant GatedArgs &args) {
    if (args.act == 0) {
        return g / (1.0f + exp(-g)) * u;
    }
    if (args.act == 1) {
        const float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanh(inner)) * u;
    }
    const float gate = min(g, args.limit), up = clamp(u, -args.limit, args.limit);
    return gate / (1.0f + exp(-args.alpha * gate)) * (up + 1.0f);
}

// act(gate x) * (up x).
template <typename B>
kernel void gated_mlp(device const uchar *gate [[buffer(0)]], device const uchar *up [[buffer(1)]],
                      device const float *x [[buffer(2)]], device const float *norm [[buffer(3)]],
                      device const float *gate_bias [[buffer(4)]], device const float *up_bias [[buffer(5)]],
                      device float *out [[buffer(6)]], constant GatedArgs &args [[buffer(7)]], uint2 group [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float gates[MOST_SIMDS * LEFT], ups[MOST_SIMDS * LEFT];
    const uint out0 = group.x * OUTS, row0 = group.y * ROWS;
    products<B>(gate, x, norm, out0, args.outs, row0, args.rows, args.cols, lane, simd, gates);
    products<B>(up, x, norm, out0, args.outs, row0, args.rows, args.cols, lane, simd, ups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = out0 + t / ROWS, r = row0 + t % ROWS;
    if (t < OUTS * ROWS && o < args.outs && r < args.rows) {
        float g = normed(gathered(gates, t), gates, t, args.cols, args.eps);
        float u = normed(gathered(ups, t), ups, t, args.cols, args.eps);
        g = args.bias & 1 ? g + gate_bias[o] : g;
        u = args.bias & 2 ? u + up_bias[o] : u;
        out[ulong(r) * args.outs + o] = activated(g, u, args);
    }
}

// The same for many rows, whose products are made before: in place, a thread an element, rows along y.
kernel void activate(device const float *up [[buffer(0)]], device float *gate [[buffer(1)]],
                     constant GatedArgs &args [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
    if (at.x < args.outs) {
        const ulong i = ulong(at.y) * args.outs + at.x;
        gate[i] = activated(gate[i], up[i], args);
    }
}

KERNEL("matvec_f32", matvec<F32>)
KERNEL("matvec_f16", matvec<F16>)
KERNEL("matvec_bf16", matvec<BF16>)
KERNEL("matvec_q8_0", matvec<Q8_0>)
KERNEL("matvec_q4_0", matvec<Q4_0>)
KERNEL("matvec_q4_1", matvec<Q4_1>)
KERNEL("matvec_q5_0", matvec<Q5_0>)
KERNEL("matvec_q5_1", matvec<Q5_1>)
KERNEL("matvec_q4_k", matvec<Q4_K>)
KERNEL("matvec_q5_k", matvec<Q5_K>)
KERNEL("matvec_q6_k", matvec<Q6_K>)
KERNEL("matvec_mxfp4", matvec<MXFP4>)
KERNEL("qkv_f32", qkv<F32>)
KERNEL("qkv_f16", qkv<F16>)
KERNEL("qkv_bf16", qkv<BF16>)
KERNEL("qkv_q8_0", qkv<Q8_0>)
KERNEL("qkv_q4_0", qkv<Q4_0>)
KERNEL("qkv_q4_1", qkv<Q4_1>)
KERNEL("qkv_q5_0", qkv<Q5_0>)
KERNEL("qkv_q5_1", qkv<Q5_1>)
KERNEL("qkv_q4_k", qkv<Q4_K>)
KERNEL("qkv_q5_k", qkv<Q5_K>)
KERNEL("qkv_q6_k", qkv<Q6_K>)
KERNEL("qkv_mxfp4", qkv<MXFP4>)
KERNEL("gated_mlp_f32", gated_mlp<F32>)
KERNEL("gated_mlp_f16", gated_mlp<F16>)
KERNEL("gated_mlp_bf16", gated_mlp<BF16>)
KERNEL("gated_mlp_q8_0", gated_mlp<Q8_0>)
KERNEL("gated_mlp_q4_0", gated_mlp<Q4_0>)
KERNEL("gated_mlp_q4_1", gated_mlp<Q4_1>)
KERNEL("gated_mlp_q5_0", gated_mlp<Q5_0>)
KERNEL("gated_mlp_q5_1", gated_mlp<Q5_1>)
KERNEL("gated_mlp_q4_k", gated_mlp<Q4_K>)
KERNEL("gated_mlp_q5_k", gated_mlp<Q5_K>)
KERNEL("gated_mlp_q6_k", gated_mlp<Q6_K>)
KERNEL("gated_mlp_mxfp4", gated_mlp<MXFP4>)
KERNEL("matvec_joined_f32", matvec_joined<F32>)
KERNEL("matvec_joined_f16", matvec_joined<F16>)
KERNEL("matvec_joined_bf16", matvec_joined<BF16>)
KERNEL("matvec_joined_q8_0", matvec_joined<Q8_0>)
KERNEL("matvec_joined_q4_0", matvec_joined<Q4_0>)
KERNEL("matvec_joined_q4_1", matvec_joined<Q4_1>)
KERNEL("matvec_joined_q5_0", matvec_joined<Q5_0>)
KERNEL("matvec_joined_q5_1", matvec_joined<Q5_1>)
KERNEL("matvec_joined_q4_k", matvec_joined<Q4_K>)
KERNEL("matvec_joined_q5_k", matvec_joined<Q5_K>)
KERNEL("matvec_joined_q6_k", matvec_joined<Q6_K>)
KERNEL("matvec_joined_mxfp4", matvec_joined<MXFP4>)
