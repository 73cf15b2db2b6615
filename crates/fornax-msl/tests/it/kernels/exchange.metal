// Values that change lanes: through threadgroup memory and by shuffles. Rows of 32 u32; a simdgroup a row.
#include <metal_stdlib>
using namespace metal;

// Reverses each row of 32 through threadgroup memory: a simdgroup a row, which needs no other simdgroup to wait.
kernel void reverse_rows(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                         uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float row[128];
    for (int round = 0; round < 2; round++) {
        row[t] = round == 0 ? x[i] : row[t] * 2.0f;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const float other = row[t ^ 31];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        row[t] = other;
    }
    y[i] = row[t];
}

// The sum of what the neighbours wrote to device memory before.
kernel void neighbours(device float *x [[buffer(0)]], device float *y [[buffer(1)]],
                       uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    x[i] = float(t);
    threadgroup_barrier(mem_flags::mem_device);
    y[i] = x[i ^ 1] + x[i ^ 32];
}
