// Mixtures of experts: the choice for each row, then the chosen experts' gated layers as vectors are multiplied.
//
// Layout: scores rows x experts floats; ids and weights rows x top_k, best first; matrices experts x outs x cols of blocks, one
// expert after the other; biases experts x outs floats; x rows x cols, inner (rows x top_k) x outs, out rows x outs floats.
// Threads: the choice, a simdgroup a row. Products, as matvec: OUTS outputs of one row a threadgroup, outputs along x; along y
// the chosen experts of the rows, one after the other, and the rows where the experts' results are added up.
// Bytes: every weight of a chosen expert once for each row that chose it. Accumulates in float.
struct RouteArgs {
    uint rows, experts, top_k, normalise;
};

// Up to 1,024 experts and 32 of them chosen. Ties go to the lowest id; NaN counts as the lowest of all.
kernel void moe_route(device const float *scores [[buffer(0)]], device uint *ids [[buffer(1)]],
                      device float *weights [[buffer(2)]], constant RouteArgs &args [[buffer(3)]],
                      uint row [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    device const float *mine = scores + ulong(row) * args.experts;
    // Bit j: the expert lane + 32 j is taken.
    uint taken = 0, my_id = 0;
    float top = 0, chosen = 0, my_weight = 0;
    for (uint k = 0; k < args.top_k; k++) {
        float best = -INFINITY;
        uint id = 0xffffffffu;
        for (uint e = lane; e < args.experts; e += 32) {
            const float v = isnan(mine[e]) ? -INFINITY : mine[e];
            if ((taken >> (e / 32) & 1) == 0 && (id == 0xffffffffu || v > best)) {
                best = v;
                id = e;
            }
        }
        for (ushort step = 16; step > 0; step /= 2) {
            const float other = simd_shuffle_xor(best, step);
            const uint other_id = simd_shuffle_xor(id, step);
            const bool take = other_id != 0xffffffffu && (id == 0xffffffffu || other > best || (other == best && other_id < id));
            best = take ? other : best;
            id = take ? other_id : id;
        }
        taken |= id % 32 == lane ? 1u << (id / 32) : 0u;
        top = k == 0 ? best : top;
        const float weight = exp(best - top);
        chosen += weight;
        if (lane == k) {
            my_id = id;
            my_weight = weight;
        }
    }
    float all = 0;
    for (uint e = lane; e < args.experts; e += 32) {
        all += isnan(mine[e]) ? 0.0f : exp(mine[e] - top);
    }
    all = simd_sum(all);
    if (lane < args.top_k) {
        ids[row * args.top_k + lane] = my_id;
        weights[row * args.top_k + lane] = my_weight / (args.normalise ? chosen : all);
    }
}

struct ExpertArgs {
    GatedArgs gated;
    uint top_k, experts;
};

// act(gate x) * (up x) of every chosen expert.
kernel void moe_gated(device const uchar *gate [[buffer(0)]], device const uchar *up [[buffer(1)]],
                      device const float *x [[buffer(2)]], device const uint *ids [[buffer(3)]],
                      device const float *gate_bias [[buffer(4)]], device const float *up_bias [[buffer(5)]],
                      device float *inner [[buffer(6)]], constant ExpertArgs &args [[buffer(7)]],
                      uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float gates[MOST_SIMDS * LEFT], ups[MOST_SIMDS * LEFT];
    const uint outs = args.gated.outs, cols = args.gated.cols, out0 = group.x * OUTS;
    // An id of nowhere must not lead out of the matrices.
    const uint first = min(ids[group.y], args.experts - 1) * outs;
    device const float *row = x + ulong(group.y / args.top_k) * cols;
    products<Any<Type0>>(row_of<Any<Type0>>(gate, first, cols), row, row, out0, outs, 0, 1, cols, lane, simd, gates);
    products<Any<Type1>>(row_of<Any<Type1>>(up, first, cols), row, row, out0, outs, 0, 1, cols, lane, simd, ups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = out0 + t;
    if (t < OUTS && o < outs) {
        float g = gathered(gates, t), u = gathered(ups, t);
        g = args.gated.bias & 1 ? g + gate_bias[first + o] : g;
        u = args.gated.bias & 2 ? u + up_bias[first + o] : u;
        inner[ulong(group.y) * outs + o] = activated(g, u, args.gated);
    }
}

struct DownArgs {
    uint rows, cols, outs, top_k, experts, bias, residual;
};

// The experts' results by weight, and the residual.
kernel void moe_down(device const uchar *down [[buffer(0)]], device const float *inner [[buffer(1)]],
                     device const uint *ids [[buffer(2)]], device const float *weights [[buffer(3)]],
                     device const float *bias [[buffer(4)]], device const float *residual [[buffer(5)]],
                     device float *out [[buffer(6)]], constant DownArgs &args [[buffer(7)]],
                     uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    // Two, so that one expert's parts are read while the next one's are written.
    threadgroup float partial[2 * MOST_SIMDS * LEFT];
    const uint out0 = group.x * OUTS, o = out0 + t, row = group.y;
    float sum = 0;
    for (uint k = 0; k < args.top_k; k++) {
        const uint pick = row * args.top_k + k, first = min(ids[pick], args.experts - 1) * args.outs;
        device const float *x = inner + ulong(pick) * args.cols;
        threadgroup float *parts = partial + k % 2 * (MOST_SIMDS * LEFT);
        products<Any<Type0>>(row_of<Any<Type0>>(down, first, args.cols), x, x, out0, args.outs, 0, 1, args.cols, lane, simd, parts);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t < OUTS && o < args.outs) {
            const float v = gathered(parts, t);
            sum = fma(weights[pick], args.bias ? v + bias[first + o] : v, sum);
        }
    }
    if (t < OUTS && o < args.outs) {
        const ulong at = ulong(row) * args.outs + o;
        out[at] = args.residual ? sum + residual[at] : sum;
    }
}
