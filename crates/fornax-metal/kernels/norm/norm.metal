// RMS norm of rows, with the residual added after it where there is one.
//
// Layout: x, residual, out rows x width floats; weight width floats.
// Threads: a threadgroup a row, up to 1,024 threads, a thread every so-many-th element.
// Bytes: an element of x is read twice (the second time from the cache), one of each other once. Accumulates in float.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

struct NormArgs {
    uint rows, width;
    float eps;
    uint residual;
};

kernel void rms_norm(device const float *x [[buffer(0)]], device const float *weight [[buffer(1)]],
                     device const float *residual [[buffer(2)]], device float *out [[buffer(3)]],
                     constant NormArgs &args [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                     uint t [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                     uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup float partial[32];
    const ulong at = ulong(row) * args.width;
    float sum = 0;
    for (uint i = t; i < args.width; i += threads) {
        sum = fma(x[at + i], x[at + i], sum);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        partial[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Every simdgroup adds the same numbers in the same way, which saves the second barrier.
    sum = simd_sum(lane < simds ? partial[lane] : 0.0f);
    const float scale = 1.0f / sqrt(sum / float(args.width) + args.eps);
    for (uint i = t; i < args.width; i += threads) {
        const float y = x[at + i] * scale * weight[i];
        out[at + i] = args.residual ? y + residual[at + i] : y;
    }
}

struct CopyArgs {
    uint rows, width;
};

// Rows to where the host reads them: a thread an element.
kernel void copy(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                 constant CopyArgs &args [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
    if (at.x < args.width) {
        out[ulong(at.y) * args.width + at.x] = x[ulong(at.y) * args.width + at.x];
    }
}

// Token rows to wanted rows: a thread an element. A wanted row's first word of four is the token row.
kernel void select_rows(device const float *x [[buffer(0)]], device const uint *wanted [[buffer(1)]],
                        device float *out [[buffer(2)]], constant CopyArgs &args [[buffer(3)]],
                        uint2 at [[thread_position_in_grid]]) {
    if (at.x < args.width) {
        out[ulong(at.y) * args.width + at.x] = x[ulong(wanted[4 * at.y]) * args.width + at.x];
    }
}
