// Corners of the language: every result is the bits of a float or a word, written one behind the other by one thread.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

#define PUT(v) out[n++] = as_type<uint>(float(v))

constant float kTable[] = {0.0f, 0.5f, 1.5f, 2.5f};
constant constexpr uint kCount = sizeof(kTable) / sizeof(kTable[0]);
enum Mode : uint { First, Second = 7 };
struct Pair {
    float4 at;
    packed_float3 p;
    half h[2];
    float lengths() const { return at.x + at.w + p[2]; }
};
template <typename T, int N>
struct Fold {
    static T of(thread const T *v) {
        T sum = 0;
        #pragma unroll
        for (int i = 0; i < N; ++i) { sum += v[i]; }
        return sum;
    }
};
template <typename T> METAL_FUNC T widest() { return numeric_limits<T>::max(); }
namespace detail {
inline float halved(float v) { return v / 2; }
}

kernel void vectors(device uint *out [[buffer(0)]]) {
    uint n = 0;
    float4 v = float4(1, 2, 3, 4);
    v.xy = v.zw;                                        // 3 4 3 4
    PUT(v.x); PUT(v.y);
    v.wz += float2(10, 20);                             // 3 4 23 14
    PUT(v.z); PUT(v.w);
    const float3 s = v.wyx;                             // 14 4 3
    PUT(s.x); PUT(s.y); PUT(s.z);
    PUT(dot(v.xy, float2(2, 1)));                       // 10
    half4 h = half4(v) * 0.5h + half(1);                // 2.5 3 12.5 8
    PUT(h.z); PUT(h.lo.x + h.hi.y + h.even.x + h.odd.y); // 12.5, 2.5+8+2.5+8
    h.hi = half2(-1, -2);
    PUT(h.w);                                           // -2
    PUT(all(v == float4(3, 4, 23, 14))); PUT(any(v < 3.0f));
    const uint4 u = uint4(0xf0u, 1, 2, 3) >> 1 | 0x100u;
    PUT(u.x); PUT(u.w);                                 // 0x178, 0x101
    const char4 c = char4(-1, 2, -128, 127);
    const float4 f = float4(c);
    PUT(f.x); PUT(f.z);
    PUT(as_type<uchar4>(0x04030201u).z);                // 3
    PUT(as_type<ushort2>(0x00020001u).y);               // 2
    PUT(as_type<half2>(0x40003c00u).y);                 // 2
    packed_float3 p = float3(1, 2, 3);
    p.y = 5;
    PUT(float3(p).y + p[2]);                            // 8
    Pair pair = {float4(1, 2, 3, 4), packed_float3(7, 8, 9), {1.0h, 2.0h}};
    PUT(pair.lengths()); PUT(pair.at.y); PUT(pair.h[1]); // 14 2 2
    PUT(select(float2(1, 2), float2(3, 4), bool2(true, false)).x);
    PUT(v[2]); v[2] = 6; PUT(v.b);                      // 23 6
    PUT(sizeof(float3)); PUT(sizeof(packed_float3)); PUT(sizeof(half3)); PUT(sizeof(Pair)); // 16 12 8 32
    int3 i = int3(7, -7, 9) / 2; PUT(i.x); PUT(i.y); PUT((-i).z); // 3 -3 -4
    i *= 3; PUT(i.x);                                   // 9
    vec<float, 2> generic = vec<float, 2>(1.5f); PUT(generic.y);
    PUT(((float2)(3.0f)).x);
}

kernel void scalars(device uint *out [[buffer(0)]]) {
    uint n = 0;
    PUT(half(65504.0h) + half(65504.0h));               // inf: half stays half
    PUT(half(2049.0f));                                 // 2048: ties to even
    PUT(1.0 / 3);                                       // a float
    bfloat b = bfloat(1.00390625f);                     // a tie: to even, 1
    PUT(float(b)); b += bfloat(2.0f); PUT(b * b);       // 1 9
    PUT(bfloat(3.0f) / bfloat(7.0f));                   // 0.427734375
    PUT(rint(2.5f)); PUT(round(2.5f)); PUT(trunc(-2.5f)); PUT(fract(2.25f));
    PUT(exp2(3.0f)); PUT(fast::exp2(3.0f)); PUT(precise::sqrt(2.0f)); PUT(rsqrt(4.0h));
    PUT(clamp(5, 1, 3)); PUT(min(3u, 2u)); PUT(max(NAN, 1.0f)); PUT(fmin(-1.0f, 2.0f)); PUT(abs(-3));
    PUT(mix(1.0f, 3.0f, 0.25f)); PUT(step(1.0f, 0.5f)); PUT(sign(-2.0f)); PUT(saturate(1.5f));
    PUT(fma(2.0f, 3.0f, 1.0f)); PUT(copysign(2.0f, -1.0f)); PUT(ldexp(1.5f, 3));
    PUT(popcount(0xffu)); PUT(clz(1u)); PUT(ctz(8u)); PUT(clz(ushort(1))); PUT(reverse_bits(1u) == 0x80000000u);
    PUT(extract_bits(0xabcdu, 4, 8)); PUT(extract_bits(int(0xf0), 4, 4)); PUT(insert_bits(0u, 5u, 4, 4));
    PUT(mulhi(0x80000000u, 4u)); PUT(rotate(0x80000001u, 1u)); PUT(absdiff(-2, 3));
    PUT(isnan(NAN)); PUT(isinf(-INFINITY)); PUT(INFINITY > FLT_MAX);
    PUT(numeric_limits<half>::max()); PUT(widest<short>()); PUT(numeric_limits<float>::infinity());
    PUT((is_same_v<uint, uint32_t>)); PUT(is_floating_point<half>::value); PUT(sizeof(long));
    PUT(kTable[2] + kCount); PUT(Second); PUT(detail::halved(3));
    const float values[4] = {1, 2, 3, 4};
    PUT((Fold<float, 4>::of(values)));
    constexpr ushort shift = 3; PUT(1 << shift);
    int e; PUT(frexp(6.0f, e)); PUT(e);
    char small = -1; PUT(small < 0);
    PUT(0x1p-3f); PUT(1e2); PUT(M_PI_F > 3.14f);
    PUT(uint(float(3000000000u)) == 3000000000u); float cosine; PUT(sincos(0.0f, cosine)); PUT(cosine);
}

kernel void simd(device uint *out [[buffer(0)]], uint t [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                 uint width [[threads_per_simdgroup]]) {
    uint n = t * 32;
    PUT(simd_sum(float(lane))); PUT(simd_product(lane == 3 ? 2 : 1)); PUT(simd_max(int(t) - 40)); PUT(simd_min(half(lane) - 4.0h));
    PUT(simd_sum(float2(lane, 1)).y);
    PUT(simd_and(lane | 32u)); PUT(simd_or(uint(lane))); PUT(simd_xor(uint(lane)));
    PUT(simd_broadcast(t, 5)); PUT(simd_broadcast_first(t)); PUT(simd_shuffle(t, ushort(31 - lane)));
    PUT(simd_shuffle_xor(t, 1)); PUT(simd_shuffle_down(t, 2)); PUT(simd_shuffle_up(t, 2)); PUT(simd_shuffle_rotate_down(t, 2));
    PUT(simd_prefix_exclusive_sum(1u)); PUT(simd_prefix_inclusive_sum(int(lane)));
    PUT(simd_all(lane < 32)); PUT(simd_all(lane < 31)); PUT(simd_any(lane == 31)); PUT(simd_any(lane == 32));
    PUT(popcount(uint(simd_vote::vote_t(simd_ballot(lane % 4 == 0)))));
    PUT(width); PUT(simd_is_first());
    PUT(simd_shuffle_and_fill_down(t, 1000u, 2));
    PUT(simd_prefix_inclusive_product(lane == 1 ? 3.0f : 1.0f));
}

kernel void positions(device uint4 *out [[buffer(0)]], uint3 grid_at [[thread_position_in_grid]], uint3 group [[threadgroup_position_in_grid]],
                      ushort3 at [[thread_position_in_threadgroup]], ushort3 size [[threads_per_threadgroup]],
                      uint3 groups [[threadgroups_per_grid]], uint3 whole [[threads_per_grid]], uint i [[thread_index_in_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]]) {
    const uint index = (grid_at.z * whole.y + grid_at.y) * whole.x + grid_at.x;
    out[index] = uint4(grid_at.x | grid_at.y << 8 | grid_at.z << 16, group.x | group.y << 8 | group.z << 16,
                       at.x | at.y << 8 | at.z << 16, i | simd << 8 | simds << 16 | (size.x == 4 && groups.z == 2) << 24);
}

// Transposes an 8x8 matrix and multiplies by the identity, in three element types.
template <typename T>
kernel void matrices(device const T *a [[buffer(0)]], device T *b [[buffer(1)]], device float *elements [[buffer(2)]],
                     uint lane [[thread_index_in_simdgroup]]) {
    simdgroup_matrix<T, 8, 8> m, r;
    simdgroup_load(m, a, 16, ulong2(8, 1), true);
    simdgroup_multiply(r, simdgroup_matrix<T, 8, 8>(T(1.0f)), m);
    simdgroup_store(r, b, 8);
    elements[lane * 2] = float(m.thread_elements()[0]);
    elements[lane * 2 + 1] = float(m.thread_elements().y);
}
template [[host_name("matrices_f32")]] kernel void matrices<float>(device const float *, device float *, device float *, uint);
template [[host_name("matrices_f16")]] kernel void matrices<half>(device const half *, device half *, device float *, uint);
template [[host_name("matrices_bf16")]] kernel void matrices<bfloat>(device const bfloat *, device bfloat *, device float *, uint);

// Each half operation rounds by itself: 2048 + 1 is 2048, and a product beyond 65504 is infinite.
kernel void halves(device uint *out [[buffer(0)]], constant half *v [[buffer(1)]]) {
    uint n = 0;
    PUT(v[0] + v[1] + v[1]);
    PUT(v[0] * v[0] * v[2]);
    half sum = v[0];
    for (int i = 0; i < 4; i++) { sum += v[1]; }
    PUT(sum);
    const half4 h = half4(v[0]) + half4(v[1]) + half4(v[1]);
    PUT(h.y);
    PUT(fma(v[0], v[2], v[1]));
    PUT(float(v[0]) + float(v[1]));
}

kernel void atomics(device atomic_int *n [[buffer(0)]], device uint *out [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    int expected = atomic_load_explicit(&n[0], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&n[0], &expected, expected + 2, memory_order_relaxed, memory_order_relaxed)) {
    }
    atomic_fetch_sub_explicit(&n[1], 1, memory_order_relaxed);
    atomic_fetch_min_explicit(&n[2], int(t) - 5, memory_order_relaxed);
    atomic_fetch_or_explicit(&n[3], 1 << (t & 15), memory_order_relaxed);
    atomic_fetch_xor_explicit(&n[4], 3, memory_order_relaxed);
    atomic_fetch_and_explicit(&n[5], ~(1 << (t & 3)), memory_order_relaxed);
    out[t] = uint(atomic_exchange_explicit(&n[6], int(t), memory_order_relaxed) >= 0);
}
