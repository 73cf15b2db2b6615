// RMS norm: a threadgroup a row, sums of squares in f32 by simdgroup, then across simdgroups through threadgroup memory.
#include <metal_stdlib>
using namespace metal;

constant bool weighted [[function_constant(0)]];
constant uint per_thread [[function_constant(1)]];
constant uint step_width = is_function_constant_defined(per_thread) ? per_thread : 1u;

struct NormShape {
    uint columns;
    float eps;
};

// One threadgroup a row: y = x / rms(x), times w if there is one.
template <typename T>
kernel void rms_norm(device const T *x [[buffer(0)]],
                     device const float *w [[buffer(1), function_constant(weighted)]],
                     device T *y [[buffer(2)]],
                     constant NormShape &shape [[buffer(3)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint simds [[simdgroups_per_threadgroup]],
                     uint threads [[threads_per_threadgroup]]) {
    threadgroup float partial[32];
    threadgroup float scale;
    const ulong base = ulong(row) * shape.columns;
    float sum = 0;
    for (uint i = thread_index * step_width; i < shape.columns; i += threads * step_width) {
        for (uint k = 0; k < step_width && i + k < shape.columns; k++) {
            const float v = float(x[base + i + k]);
            sum += v * v;
        }
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        partial[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) {
        const float all = simd_sum(lane < simds ? partial[lane] : 0.0);
        if (lane == 0) {
            scale = precise::rsqrt(all / float(shape.columns) + shape.eps);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float r = scale;
    for (uint i = thread_index; i < shape.columns; i += threads) {
        const float v = float(x[base + i]) * r;
        y[base + i] = T(weighted ? v * w[i] : v);
    }
}

#define NORM(name, T) \
    template [[host_name(name)]] kernel void rms_norm<T>(device const T *, device const float *, device T *, constant NormShape &, uint, uint, uint, uint, uint, uint);
NORM("rms_norm_f32", float)
template [[host_name("rms_norm_f16")]] [[kernel]] decltype(rms_norm<half>) rms_norm<half>;
