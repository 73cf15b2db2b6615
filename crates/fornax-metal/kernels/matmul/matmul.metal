// Matrices times five rows and more, on simdgroup matrices with float fragments.
//
// Layout: as matvec: matrix outs x cols of blocks, x rows x cols floats, out rows x outs floats.
// Threads: four simdgroups a threadgroup; which part is whose is said at each kernel. Outputs along x, rows along y.
// Bytes: every weight once for a tile of rows (16 or 32); x once for a tile of outputs (8 or 64). Accumulates in float.
struct MatmulArgs {
    uint rows, cols, outs, bias, residual;
    float scale, softcap;
};

// Eight elements of a row of x; zeros past the end of the row or of the rows.
inline void run_of_x(device const float *x, uint row, uint rows, uint run, uint cols, threadgroup float *to) {
    device const float *from = x + ulong(min(row, rows - 1)) * cols + 8 * run;
    for (uint i = 0; i < 8; i++) {
        to[i] = row < rows && 8 * run + i < cols ? from[i] : 0.0f;
    }
}

template <typename B>
inline void run_of_w(device const uchar *matrix, uint row, uint rows, uint run, uint cols, threadgroup float *to) {
    float w[8];
    // Outputs past the end repeat the last one, and are not stored.
    run_of<B>(row_of<B>(matrix, min(row, rows - 1), cols), run, cols, w);
    for (uint i = 0; i < 8; i++) {
        to[i] = w[i];
    }
}

inline void finish(float v, uint row, uint o, device const float *bias, device const float *residual, device float *out,
                   constant MatmulArgs &args) {
    if (row >= args.rows || o >= args.outs) {
        return;
    }
    v = (args.bias ? v + bias[o] : v) * args.scale;
    v = args.softcap != 0 ? args.softcap * tanh(v / args.softcap) : v;
    const ulong at = ulong(row) * args.outs + o;
    out[at] = args.residual ? v + residual[at] : v;
}

// 5 to 16 rows. A threadgroup computes 8 outputs of 16 rows; its four simdgroups split the columns, 32 at a time, and add
// up at the end. Each stages in its own part of threadgroup memory, so that only simdgroups wait while columns pass.
template <typename B>
kernel void matmul_small(device const uchar *matrix [[buffer(0)]], device const float *x [[buffer(1)]],
                         device const float *bias [[buffer(2)]], device const float *residual [[buffer(3)]],
                         device float *out [[buffer(4)]], constant MatmulArgs &args [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float stage[4 * 24 * 32];
    threadgroup float *w = stage + simd * (24 * 32), *xs = w + 8 * 32;
    const uint out0 = group.x * 8, row0 = group.y * 16, i = lane / 4, part = lane % 4;
    simdgroup_float8x8 sums[2];
    sums[0] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    sums[1] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = simd; k < (args.cols + 31) / 32; k += 4) {
        run_of_w<B>(matrix, out0 + i, args.outs, 4 * k + part, args.cols, w + i * 32 + part * 8);
        run_of_x(x, row0 + i, args.rows, 4 * k + part, args.cols, xs + i * 32 + part * 8);
        run_of_x(x, row0 + 8 + i, args.rows, 4 * k + part, args.cols, xs + (8 + i) * 32 + part * 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint s = 0; s < 4; s++) {
            simdgroup_float8x8 mw, mx;
            simdgroup_load(mw, w + s * 8, 32, ulong2(0, 0), true);
            for (uint h = 0; h < 2; h++) {
                simdgroup_load(mx, xs + h * 256 + s * 8, 32);
                simdgroup_multiply_accumulate(sums[h], mx, mw, sums[h]);
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(sums[0], stage + simd * 128, 8);
    simdgroup_store(sums[1], stage + simd * 128 + 64, 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float v = stage[t] + stage[128 + t] + stage[256 + t] + stage[384 + t];
    finish(v, row0 + t / 8, out0 + t % 8, bias, residual, out, args);
}

// Any number of rows. A threadgroup of four simdgroups computes 64 outputs of 32 rows, a simdgroup 32 of 16; 32 columns at a
// time are decoded into threadgroup memory.
template <typename B>
kernel void matmul_tiled(device const uchar *matrix [[buffer(0)]], device const float *x [[buffer(1)]],
                         device const float *bias [[buffer(2)]], device const float *residual [[buffer(3)]],
                         device float *out [[buffer(4)]], constant MatmulArgs &args [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float w[64 * 32], xs[32 * 32];
    const uint out0 = group.x * 64, row0 = group.y * 32, part = t % 4;
    simdgroup_float8x8 sums[8];
    for (uint j = 0; j < 8; j++) {
        sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint k = 0; k < (args.cols + 31) / 32; k++) {
        for (uint i = t / 4; i < 64; i += 32) {
            run_of_w<B>(matrix, out0 + i, args.outs, 4 * k + part, args.cols, w + i * 32 + part * 8);
        }
        run_of_x(x, row0 + t / 4, args.rows, 4 * k + part, args.cols, xs + t / 4 * 32 + part * 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint s = 0; s < 4; s++) {
            simdgroup_float8x8 mw, mx[2];
            simdgroup_load(mx[0], xs + simd / 2 * 512 + s * 8, 32);
            simdgroup_load(mx[1], xs + simd / 2 * 512 + 256 + s * 8, 32);
            for (uint j = 0; j < 4; j++) {
                simdgroup_load(mw, w + (simd % 2 * 32 + j * 8) * 32 + s * 8, 32, ulong2(0, 0), true);
                simdgroup_multiply_accumulate(sums[j], mx[0], mw, sums[j]);
                simdgroup_multiply_accumulate(sums[4 + j], mx[1], mw, sums[4 + j]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // The decoded weights have had their use: the sums take their place, rows x outputs.
    for (uint j = 0; j < 8; j++) {
        simdgroup_store(sums[j], w + (simd / 2 * 16 + j / 4 * 8) * 64 + simd % 2 * 32 + j % 4 * 8, 64);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < 32 * 64; i += 128) {
        finish(w[i], row0 + i / 64, out0 + i % 64, bias, residual, out, args);
    }
}

KERNEL("matmul_small_f32", matmul_small<F32>)
KERNEL("matmul_small_f16", matmul_small<F16>)
KERNEL("matmul_small_bf16", matmul_small<BF16>)
KERNEL("matmul_small_q8_0", matmul_small<Q8_0>)
KERNEL("matmul_small_q4_0", matmul_small<Q4_0>)
KERNEL("matmul_small_q4_1", matmul_small<Q4_1>)
KERNEL("matmul_small_q5_0", matmul_small<Q5_0>)
KERNEL("matmul_small_q5_1", matmul_small<Q5_1>)
KERNEL("matmul_small_q4_k", matmul_small<Q4_K>)
KERNEL("matmul_small_q5_k", matmul_small<Q5_K>)
KERNEL("matmul_small_q6_k", matmul_small<Q6_K>)
KERNEL("matmul_small_mxfp4", matmul_small<MXFP4>)
KERNEL("matmul_tiled_f32", matmul_tiled<F32>)
KERNEL("matmul_tiled_f16", matmul_tiled<F16>)
KERNEL("matmul_tiled_bf16", matmul_tiled<BF16>)
KERNEL("matmul_tiled_q8_0", matmul_tiled<Q8_0>)
KERNEL("matmul_tiled_q4_0", matmul_tiled<Q4_0>)
KERNEL("matmul_tiled_q4_1", matmul_tiled<Q4_1>)
KERNEL("matmul_tiled_q5_0", matmul_tiled<Q5_0>)
KERNEL("matmul_tiled_q5_1", matmul_tiled<Q5_1>)
KERNEL("matmul_tiled_q4_k", matmul_tiled<Q4_K>)
KERNEL("matmul_tiled_q5_k", matmul_tiled<Q5_K>)
KERNEL("matmul_tiled_q6_k", matmul_tiled<Q6_K>)
KERNEL("matmul_tiled_mxfp4", matmul_tiled<MXFP4>)
KERNEL("matmul_small_any", matmul_small<Any<Type0>>)
KERNEL("matmul_tiled_any", matmul_tiled<Any<Type0>>)
