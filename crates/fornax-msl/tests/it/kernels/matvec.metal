// Matrix times vector over 34-byte blocks of 32: a simdgroup a row, lanes over blocks; f32 accumulator.
#include <metal_stdlib>
using namespace metal;

// 32 signed bytes with one half as their scale: 34 bytes, so nothing wider than 2 may be loaded whole.
struct Block {
    half scale;
    packed_char4 quants[8];
};

static inline float block_dot(device const Block &b, device const float4 *x) {
    float4 sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        sum += float4(char4(b.quants[i])) * x[i];
    }
    return float(b.scale) * (sum.x + sum.y + sum.z + sum.w);
}

// y = A x; a simdgroup a row.
[[kernel]] [[max_total_threads_per_threadgroup(256)]]
void matvec_q8(device const Block *a [[buffer(0)]], device const float4 *x [[buffer(1)]],
               device float *y [[buffer(2)]], constant uint2 &shape [[buffer(3)]],
               uint group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
               ushort simd [[simdgroup_index_in_threadgroup]], ushort simds [[simdgroups_per_threadgroup]]) {
    const uint row = group * simds + simd, blocks = shape.y / 32;
    if (row >= shape.x) {
        return;
    }
    float sum = 0.0f;
    for (uint b = lane; b < blocks; b += 32) {
        sum += block_dot(a[row * blocks + b], x + b * 8);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        y[row] = sum;
    }
}

// The inner dimension over the simdgroups of a threadgroup; one row a threadgroup.
kernel void matvec_split(device const half *a [[buffer(0)]], device const half *x [[buffer(1)]],
                         device float *y [[buffer(2)]], constant uint &columns [[buffer(3)]],
                         threadgroup float *partial [[threadgroup(0)]],
                         uint row [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                         uint n [[threads_per_threadgroup]]) {
    float sum = 0.0f;
    for (uint i = t; i < columns; i += n) {
        sum = fma(float(a[row * columns + i]), float(x[i]), sum);
    }
    partial[t] = sum;
    for (uint half_width = n / 2; half_width > 0; half_width /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t < half_width) {
            partial[t] += partial[t + half_width];
        }
    }
    if (t == 0) {
        y[row] = partial[0];
    }
}
