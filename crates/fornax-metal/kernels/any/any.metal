// Matrices of any type as vectors are multiplied, and those of several types side by side: after matvec.metal, whose kernels
// these are but for the type, which the pipeline's constants say.
//
// Layout: as matvec.
// Threads: as matvec.
// Bytes: as matvec. Accumulates in float.
kernel void qkv_any(device const uchar *q [[buffer(0)]], device const uchar *k [[buffer(1)]], device const uchar *v [[buffer(2)]],
                    device const float *x [[buffer(3)]], device const float *norm [[buffer(4)]],
                    device const float *q_bias [[buffer(5)]], device const float *k_bias [[buffer(6)]],
                    device const float *v_bias [[buffer(7)]], device float *q_out [[buffer(8)]],
                    device float *k_out [[buffer(9)]], device float *v_out [[buffer(10)]],
                    constant QkvArgs &args [[buffer(11)]], uint2 group [[threadgroup_position_in_grid]],
                    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                    uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float partial[MOST_SIMDS * LEFT];
    const uint q_groups = (args.q_outs + OUTS - 1) / OUTS, k_groups = (args.k_outs + OUTS - 1) / OUTS;
    const uint row0 = group.y * ROWS;
    device const float *bias = q_bias;
    device float *out = q_out;
    uint outs = args.q_outs, tile = group.x, has_bias = args.bias & 1;
    if (tile >= q_groups + k_groups) {
        bias = v_bias, out = v_out, outs = args.v_outs, tile -= q_groups + k_groups, has_bias = args.bias & 4;
        products<Any<Type2>>(v, x, norm, tile * OUTS, outs, row0, args.rows, args.cols, lane, simd, partial);
    } else if (tile >= q_groups) {
        bias = k_bias, out = k_out, outs = args.k_outs, tile -= q_groups, has_bias = args.bias & 2;
        products<Any<Type1>>(k, x, norm, tile * OUTS, outs, row0, args.rows, args.cols, lane, simd, partial);
    } else {
        products<Any<Type0>>(q, x, norm, tile * OUTS, outs, row0, args.rows, args.cols, lane, simd, partial);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint o = tile * OUTS + t / ROWS, r = row0 + t % ROWS;
    if (t < OUTS * ROWS && o < outs && r < args.rows) {
        const float sum = normed(gathered(partial, t), partial, t, args.cols, args.eps);
        out[ulong(r) * outs + o] = has_bias ? sum + bias[o] : sum;
    }
}

kernel void gated_mlp_any(device const uchar *gate [[buffer(0)]], device const uchar *up [[buffer(1)]],
                          device const float *x [[buffer(2)]], device const float *norm [[buffer(3)]],
                          device const float *gate_bias [[buffer(4)]], device const float *up_bias [[buffer(5)]],
                          device float *out [[buffer(6)]], constant GatedArgs &args [[buffer(7)]],
                          uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float gates[MOST_SIMDS * LEFT], ups[MOST_SIMDS * LEFT];
    const uint out0 = group.x * OUTS, row0 = group.y * ROWS;
    products<Any<Type0>>(gate, x, norm, out0, args.outs, row0, args.rows, args.cols, lane, simd, gates);
    products<Any<Type1>>(up, x, norm, out0, args.outs, row0, args.rows, args.cols, lane, simd, ups);
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

KERNEL("matvec_any", matvec<Any<Type0>>)
KERNEL("matvec_joined_any", matvec_joined<Any<Type0>>)
