// f32 matrix product on 8 x 8 simdgroup matrices: a 32 x 32 tile a threadgroup, staged through threadgroup memory; f32 accumulators.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant constexpr int TILE = 32;

// c[m][n] = a[m][k] b[k][n]: a tile of 32x32 for a threadgroup of four simdgroups, each eight of its rows.
template <typename T>
kernel void matmul(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]],
                   device float *c [[buffer(2)]], constant uint3 &mnk [[buffer(3)]],
                   threadgroup T *tile_a [[threadgroup(0)]], uint2 group [[threadgroup_position_in_grid]],
                   uint t [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup T tile_b[8 * TILE];
    simdgroup_float8x8 acc[4];
    for (int i = 0; i < 4; i++) {
        acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    const ulong row0 = group.y * TILE, col0 = group.x * TILE;
    for (uint k = 0; k < mnk.z; k += 8) {
        for (uint i = t; i < 256; i += 128) {
            tile_a[i] = a[(row0 + i / 8) * mnk.z + k + i % 8];
            tile_b[i] = b[(k + i / 32) * mnk.y + col0 + i % 32];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_matrix<T, 8, 8> ma, mb;
        simdgroup_load(ma, tile_a + simd * 64, 8);
        for (int j = 0; j < 4; j++) {
            simdgroup_load(mb, tile_b, TILE, ulong2(j * 8, 0));
            simdgroup_multiply_accumulate(acc[j], ma, mb, acc[j]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int j = 0; j < 4; j++) {
        simdgroup_store(acc[j], c + (row0 + simd * 8) * mnk.y + col0 + j * 8, mnk.y);
    }
}
typedef decltype(matmul<float>) matmul_of_float;
template [[host_name("matmul_f32")]] kernel matmul_of_float matmul<float>;
typedef decltype(matmul<half>) matmul_of_half;
template [[host_name("matmul_f16")]] kernel matmul_of_half matmul<half>;
