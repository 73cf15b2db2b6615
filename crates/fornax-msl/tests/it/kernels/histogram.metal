// Counting with atomics: u32 values in, 16 bins and a float sum out; a thread a value.
#include <metal_stdlib>
using namespace metal;

// Counts values into 16 bins: first in threadgroup memory, then in the result; and sums them.
kernel void histogram(device const uint *values [[buffer(0)]], device atomic_uint *bins [[buffer(1)]],
                      device atomic_float *total [[buffer(2)]], device atomic_int *largest [[buffer(3)]],
                      constant uint &count [[buffer(4)]], uint i [[thread_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
    threadgroup atomic_uint local[16];
    if (t < 16) {
        atomic_store_explicit(&local[t], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < count) {
        atomic_fetch_add_explicit(&local[values[i] & 15], 1u, memory_order_relaxed);
        atomic_fetch_add_explicit(total, float(values[i]), memory_order_relaxed);
        atomic_fetch_max_explicit(largest, int(values[i]), memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < 16) {
        atomic_fetch_add_explicit(&bins[t], atomic_load_explicit(&local[t], memory_order_relaxed), memory_order_relaxed);
    }
}
