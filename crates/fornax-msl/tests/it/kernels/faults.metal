// One fault a kernel, for the tests of the reports. Buffers of u32 or float, sizes as each test binds them.
#include <metal_stdlib>
using namespace metal;

// Each kernel commits one fault; its line carries the name of the kernel's fault in a comment, so that tests find it.

kernel void read_past(device const float *x [[buffer(0)]], device float *y [[buffer(1)]], constant uint &at [[buffer(2)]], uint t [[thread_position_in_grid]]) {
    y[t] = x[t + at]; // read_past
}
kernel void write_past(device float *y [[buffer(0)]], uint t [[thread_position_in_grid]]) {
    y[t] = 1.0f; // write_past
}
kernel void bytes_past(constant uint *n [[buffer(0)]], device uint *y [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    y[t] = n[t]; // bytes_past
}
kernel void matrix_past(device const float *x [[buffer(0)]], device float *y [[buffer(1)]]) {
    simdgroup_float8x8 m;
    simdgroup_load(m, x, 9); // matrix_past
    simdgroup_store(m, y, 8);
}
kernel void matrix_race(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float tile[64];
    tile[t] = 0.0f;
    tile[t + 32] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_store(m, tile, 8); // matrix_race
    y[t] = tile[t]; // matrix_race
}
kernel void atomic_past(device atomic_uint *n [[buffer(0)]], uint t [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit(n + t, 1u, memory_order_relaxed); // atomic_past
}
kernel void array_past(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[16];
    threadgroup float other[16];
    threadgroup float *p = part;
    p[t] = 1.0f; // array_past
    other[t & 15] = 2.0f;
    y[t] = p[t];
}
kernel void argument_past(threadgroup float *part [[threadgroup(0)]], device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    part[t] = 1.0f; // argument_past
    y[t] = part[t];
}
kernel void other_thread(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup ulong pointer;
    float mine[2] = {1.0f, 2.0f};
    if (t == 0) {
        pointer = ulong(&mine[0]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = *(thread float *)pointer; // other_thread
}
kernel void unwritten_device(device const float *x [[buffer(0)]], device float *y [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    y[t] = x[t]; // unwritten_device
}
kernel void unwritten_in_place(device float *y [[buffer(0)]], uint t [[thread_position_in_grid]]) {
    y[t] *= 2.0f; // unwritten_in_place
}
kernel void unwritten_threadgroup(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[32];
    if (t != 7) {
        part[t] = 1.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part[t]; // unwritten_threadgroup
}
kernel void half_a_barrier(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 16) {
        threadgroup_barrier(mem_flags::mem_threadgroup); // half_a_barrier
    }
    y[t] = 1.0f;
}
kernel void two_barriers(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup); // two_barriers
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup); // two_barriers
    }
    y[t] = 1.0f;
}
kernel void half_a_sum(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = 0.0f;
    if (t % 2 == 0) {
        y[t] = simd_sum(1.0f); // half_a_sum
    }
}
kernel void sum_or_max(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 16) {
        y[t] = simd_sum(1.0f); // sum_or_max
    } else {
        y[t] = simd_max(1.0f); // sum_or_max
    }
}
kernel void sum_after_return(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    if (t == 3) {
        return;
    }
    y[t] = simd_sum(1.0f); // sum_after_return
}
kernel void lane_by_lane(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = simd_shuffle_down(float(t), ushort(t & 1)); // lane_by_lane
}
kernel void barrier_after_return(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    if (t >= 32) {
        return;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // barrier_after_return
    y[t] = 1.0f;
}
kernel void wide_load(device const uchar *x [[buffer(0)]], device float *y [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    const half4 h = *(device const half4 *)(x + 2); // wide_load
    y[t] = float(h.x);
}
kernel void odd_word(device const uchar *x [[buffer(0)]], device uint *y [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = *(device const uint *)(x + 34 * t + 2); // odd_word
}
kernel void wide_store(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    *(device float4 *)(y + 1 + 4 * t) = float4(1.0f); // wide_store
}
kernel void odd_atomic(device uchar *y [[buffer(0)]]) {
    atomic_fetch_add_explicit((device atomic_uint *)(y + 2), 1u, memory_order_relaxed); // odd_atomic
}
kernel void race_read(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[64];
    part[t] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    part[t] += 1.0f; // race_read
    y[t] = part[63 - t]; // race_read
}
kernel void race_write(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part;
    part = float(t); // race_write
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part;
}
kernel void race_in_simdgroup(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[32];
    part[t] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    part[t] = simd_sum(float(t)); // race_in_simdgroup
    y[t] = part[t ^ 1]; // race_in_simdgroup
}
kernel void race_device(device float *y [[buffer(0)]], device float *z [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = 1.0f; // race_device
    threadgroup_barrier(mem_flags::mem_threadgroup);
    z[t] = y[63 - t]; // race_device
}
kernel void race_flags(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[64];
    part[t] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    part[t] = 2.0f; // race_flags
    threadgroup_barrier(mem_flags::mem_device);
    y[t] = part[63 - t]; // race_flags
}
kernel void race_across_simdgroups(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float part[64];
    part[t] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    part[t] = 2.0f; // race_across_simdgroups
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part[(t + 32) & 63]; // race_across_simdgroups
}
kernel void unset(device float *y [[buffer(0)]], constant uint &n [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    float values[8];
    for (uint i = 0; i < n; i++) {
        values[i] = 0.0f;
    }
    y[t] = values[t & 7];
}
kernel void race_atomic(device uint *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup uint count;
    if (t == 0) {
        count = 0; // race_atomic
    }
    atomic_fetch_add_explicit((threadgroup atomic_uint *)&count, 1u, memory_order_relaxed); // race_atomic
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = count;
}
kernel void same_bytes(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = 1.0f; // same_bytes
}
kernel void copy(device const float *x [[buffer(0)]], device float *y [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    y[t] = x[t]; // copy
}
kernel void static_memory(device float *y [[buffer(0)]], threadgroup float *more [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float big[7000]; // static_memory
    big[t] = 1.0f;
    more[t] = big[t];
    y[t] = more[t];
}
kernel void cast_away(device const float *x [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    ((device float *)x)[t] = 1.0f; // cast_away
}
kernel void thread_array(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    float acc[4] = {0.0f, 1.0f, 2.0f, 3.0f};
    acc[t] += 1.0f; // thread_array
    y[t] = acc[(t + 1) & 3];
}
constant float steps[4] = {1.0f, 2.0f, 3.0f, 4.0f};
kernel void table_past(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = steps[t]; // table_past
}
kernel void divide(device uint *y [[buffer(0)]], constant uint &n [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    y[t] = t / n; // divide
}
kernel void many_barriers(device float *y [[buffer(0)]], constant uint &n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
    for (uint k = 0; k < n; k++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[i] = 1.0f;
}
