// Mixtures of experts for many rows: the rows that chose an expert are multiplied by its matrices together. After moe.metal.
//
// Layout: as there; a pick is a row's choice of an expert, number row x top_k + place. groups: how many tiles there are, then of
// each the expert, the first of its picks in the order, how many; behind `tiles` of them the picks in the order of experts.
// Threads: the grouping, one threadgroup, a thread an expert. Products, four simdgroups a threadgroup: 64 outputs, along x, of a
// tile of at most 16 picks, along y; 32 columns at a time are decoded into threadgroup memory. The sum, a thread an element.
// Bytes: every weight of a chosen expert once for 16 picks; x once for 64 outputs. Accumulates in float.
constant constexpr uint PICKS = 16;
constant constexpr uint WIDE = 64;

struct GroupArgs {
    uint rows, experts, top_k, tiles;
};

kernel void moe_group(device const uint *ids [[buffer(0)]], device uint *groups [[buffer(1)]],
                      constant GroupArgs &args [[buffer(2)]], uint expert [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                      uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup uint counts[32], tiles[32];
    const uint picks = args.rows * args.top_k;
    uint n = 0;
    for (uint p = 0; p < picks; p++) {
        n += min(ids[p], args.experts - 1) == expert ? 1 : 0;
    }
    const uint mine = (n + PICKS - 1) / PICKS;
    uint first = simd_prefix_exclusive_sum(n), tile = simd_prefix_exclusive_sum(mine);
    const uint all_picks = simd_sum(n), all_tiles = simd_sum(mine);
    if (lane == 0) {
        counts[simd] = all_picks;
        tiles[simd] = all_tiles;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint total = 0;
    for (uint s = 0; s < simds; s++) {
        first += s < simd ? counts[s] : 0;
        tile += s < simd ? tiles[s] : 0;
        total += tiles[s];
    }
    for (uint i = 0; i < mine; i++) {
        device uint *to = groups + 1 + 3 * (tile + i);
        to[0] = expert;
        to[1] = first + i * PICKS;
        to[2] = min(PICKS, n - i * PICKS);
    }
    device uint *order = groups + 1 + 3 * args.tiles;
    for (uint p = 0; p < picks && n > 0; p++) {
        if (min(ids[p], args.experts - 1) == expert) {
            order[first++] = p;
        }
    }
    if (expert == 0) {
        groups[0] = total;
    }
}

// Runs of 32 columns of 64 rows of a matrix, from row `first` on; what lies past the last row repeats it.
template <typename B>
inline void stage_rows(device const uchar *matrix, uint first, uint rows, uint k, uint cols, uint t, threadgroup float *to) {
    for (uint i = t / 4; i < WIDE; i += 32) {
        float w[8];
        run_of<B>(row_of<B>(matrix, first + min(i, rows - 1), cols), 4 * k + t % 4, cols, w);
        for (uint j = 0; j < 8; j++) {
            to[i * 32 + t % 4 * 8 + j] = w[j];
        }
    }
}

// The same of the rows of x that a tile's picks stand for; zeros past the last pick and the last column.
inline void stage_picks(device const float *x, device const uint *order, uint n, uint each, uint k, uint cols, uint t,
                        threadgroup float *to) {
    for (uint i = t; i < PICKS * 32; i += 128) {
        const uint col = 32 * k + i % 32;
        device const float *row = x + ulong(order[min(i / 32, n - 1)] / each) * cols;
        to[i] = i / 32 < n && col < cols ? row[col] : 0.0f;
    }
}

// 16 picks x 16 outputs of a simdgroup, eight columns at a time.
inline void multiply(threadgroup const float *xs, threadgroup const float *w, uint simd, thread simdgroup_float8x8 *sums) {
    for (uint s = 0; s < 4; s++) {
        simdgroup_float8x8 mx[2], mw;
        simdgroup_load(mx[0], xs + s * 8, 32);
        simdgroup_load(mx[1], xs + 256 + s * 8, 32);
        for (uint j = 0; j < 2; j++) {
            simdgroup_load(mw, w + (simd * 16 + j * 8) * 32 + s * 8, 32, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sums[j], mx[0], mw, sums[j]);
            simdgroup_multiply_accumulate(sums[2 + j], mx[1], mw, sums[2 + j]);
        }
    }
}

// Where the weights were: picks x outputs.
inline void keep(thread simdgroup_float8x8 *sums, uint simd, threadgroup float *to) {
    for (uint j = 0; j < 4; j++) {
        simdgroup_store(sums[j], to + j / 2 * 8 * WIDE + simd * 16 + j % 2 * 8, WIDE);
    }
}

inline void clear(thread simdgroup_float8x8 *sums) {
    for (uint j = 0; j < 4; j++) {
        sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}

struct GroupedArgs {
    GatedArgs gated;
    uint top_k, experts, tiles;
};

kernel void grouped_gated(device const uchar *gate [[buffer(0)]], device const uchar *up [[buffer(1)]],
                          device const float *x [[buffer(2)]], device const uint *groups [[buffer(3)]],
                          device const float *gate_bias [[buffer(4)]], device const float *up_bias [[buffer(5)]],
                          device float *inner [[buffer(6)]], constant GroupedArgs &args [[buffer(7)]],
                          uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float gates[WIDE * 32], ups[WIDE * 32], xs[PICKS * 32];
    if (group.y >= groups[0]) {
        return;
    }
    device const uint *tile = groups + 1 + 3 * group.y, *order = groups + 1 + 3 * args.tiles + tile[1];
    const uint outs = args.gated.outs, cols = args.gated.cols, out0 = group.x * WIDE, n = tile[2];
    const uint first = tile[0] * outs;
    simdgroup_float8x8 g[4], u[4];
    clear(g);
    clear(u);
    for (uint k = 0; k < (cols + 31) / 32; k++) {
        stage_rows<Any<Type0>>(gate, first + out0, outs - out0, k, cols, t, gates);
        stage_rows<Any<Type1>>(up, first + out0, outs - out0, k, cols, t, ups);
        stage_picks(x, order, n, args.top_k, k, cols, t, xs);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply(xs, gates, simd, g);
        multiply(xs, ups, simd, u);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    keep(g, simd, gates);
    keep(u, simd, ups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < n * WIDE; i += 128) {
        const uint o = out0 + i % WIDE;
        if (o < outs) {
            const float a = args.gated.bias & 1 ? gates[i] + gate_bias[first + o] : gates[i];
            const float b = args.gated.bias & 2 ? ups[i] + up_bias[first + o] : ups[i];
            inner[ulong(order[i / WIDE]) * outs + o] = activated(a, b, args.gated);
        }
    }
}

struct GroupedDownArgs {
    uint rows, cols, outs, top_k, experts, bias, residual, tiles;
};

// A row of `parts` for every pick.
kernel void grouped_down(device const uchar *down [[buffer(0)]], device const float *inner [[buffer(1)]],
                         device const uint *groups [[buffer(2)]], device const float *bias [[buffer(3)]],
                         device float *parts [[buffer(4)]], constant GroupedDownArgs &args [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float w[WIDE * 32], xs[PICKS * 32];
    if (group.y >= groups[0]) {
        return;
    }
    device const uint *tile = groups + 1 + 3 * group.y, *order = groups + 1 + 3 * args.tiles + tile[1];
    const uint out0 = group.x * WIDE, first = tile[0] * args.outs, n = tile[2];
    simdgroup_float8x8 sums[4];
    clear(sums);
    for (uint k = 0; k < (args.cols + 31) / 32; k++) {
        stage_rows<Any<Type0>>(down, first + out0, args.outs - out0, k, args.cols, t, w);
        stage_picks(inner, order, n, 1, k, args.cols, t, xs);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply(xs, w, simd, sums);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    keep(sums, simd, w);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < n * WIDE; i += 128) {
        const uint o = out0 + i % WIDE;
        if (o < args.outs) {
            parts[ulong(order[i / WIDE]) * args.outs + o] = args.bias ? w[i] + bias[first + o] : w[i];
        }
    }
}

// The picks of a row by weight, and the residual.
kernel void grouped_sum(device const float *parts [[buffer(0)]], device const float *weights [[buffer(1)]],
                        device const float *residual [[buffer(2)]], device float *out [[buffer(3)]],
                        constant GroupedDownArgs &args [[buffer(4)]], uint2 at [[thread_position_in_grid]]) {
    if (at.x >= args.outs) {
        return;
    }
    float sum = 0;
    for (uint k = 0; k < args.top_k; k++) {
        const ulong pick = ulong(at.y) * args.top_k + k;
        sum = fma(weights[pick], parts[pick * args.outs + at.x], sum);
    }
    const ulong to = ulong(at.y) * args.outs + at.x;
    out[to] = args.residual ? sum + residual[to] : sum;
}
