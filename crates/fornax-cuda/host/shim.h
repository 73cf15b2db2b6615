// CUDA's language on the CPU, for tests: a kernel source is compiled as C++ behind this header. Threads of a block are fibers
// that give way at barriers and at exchanges of a warp alone, one block runs at a time, so `__shared__` is static memory.
// What differs from a GPU: no thread overtakes another between two barriers, and memory has one order. So it finds wrong
// arithmetic, wrong indices (allocations end at a guard page), and threads that miss a barrier; not every missing barrier.
#pragma once
#define FORNAX_HOST 1
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

using std::isinf;
using std::isnan;

struct Dim {
    unsigned x, y, z;
};
extern "C" {
extern Dim threadIdx, blockIdx, blockDim, gridDim;
void host_barrier();
// Every lane of the warp gives `n` bytes and gets those of all; `kind` must be the same in all.
const void* host_exchange(unsigned kind, const void* value, unsigned n, unsigned mask);
}

inline void __syncthreads() { host_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    unsigned char none = 0;
    host_exchange(1, &none, 1, mask);
}
inline unsigned host_lane() { return threadIdx.x & 31; }

template <class T>
inline T host_shuffle(unsigned kind, unsigned mask, T v, unsigned from) {
    static_assert(sizeof(T) <= 8, "a register or two");
    const char* all = (const char*)host_exchange(kind, &v, sizeof v, mask);
    T r;
    std::memcpy(&r, all + 8 * (from & 31), sizeof r);
    return r;
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int from) {
    return host_shuffle(2, mask, v, (unsigned)from);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int d) {
    return host_shuffle(3, mask, v, host_lane() ^ (unsigned)d);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned d) {
    return host_shuffle(4, mask, v, host_lane() >= d ? host_lane() - d : host_lane());
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned d) {
    return host_shuffle(5, mask, v, host_lane() + d < 32 ? host_lane() + d : host_lane());
}
inline unsigned __ballot_sync(unsigned mask, int p) {
    unsigned char one = p != 0;
    const char* all = (const char*)host_exchange(6, &one, 1, mask);
    unsigned r = 0;
    for (unsigned i = 0; i < 32; i++) r |= (mask >> i & 1 && all[8 * i] ? 1u : 0u) << i;
    return r;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }

template <class T, class V>
inline T atomicAdd(T* at, V v) {
    T old = *at;
    *at = old + (T)v;
    return old;
}
template <class T, class V>
inline T atomicMax(T* at, V v) {
    T old = *at;
    if ((T)v > old) *at = (T)v;
    return old;
}
template <class T>
inline T __ldg(const T* p) {
    return *p;
}

template <class To, class From>
inline To host_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}
inline float __int_as_float(int v) { return host_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return host_bits<float>(v); }
inline int __float_as_int(float v) { return host_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return host_bits<unsigned>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
    return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned by) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (by >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= ((a >> i) - (b >> i) & 255) << i;
    return r;
}
inline int __float2int_rn(float v) { return (int)nearbyintf(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }

// Of halves, by hand: a compiler for an old processor has no type for them.
inline float host_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h >> 15) << 31, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return host_bits<float>(sign | 0x7f800000u | m << 13);
    if (e == 0) return host_bits<float>(sign | host_bits<uint32_t>((float)m * 5.9604644775390625e-8f));
    return host_bits<float>(sign | (e + 112) << 23 | m << 13);
}
inline uint16_t host_float_to_half(float f) {
    uint32_t b = host_bits<uint32_t>(f), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) {
        // A multiple of 2^-24, rounded by adding what makes the sum's last bit that.
        float v = host_bits<float>(a) + 0.5f;
        return (uint16_t)(sign | (host_bits<uint32_t>(v) - 0x3f000000u));
    }
    uint32_t odd = a >> 13 & 1;
    return (uint16_t)(sign | ((a + 0xfff + odd - 0x38000000u) >> 13));
}

template <class A, class B>
inline typename std::common_type<A, B>::type min(A a, B b) {
    using T = typename std::common_type<A, B>::type;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
inline typename std::common_type<A, B>::type max(A a, B b) {
    using T = typename std::common_type<A, B>::type;
    return (T)a < (T)b ? (T)b : (T)a;
}

// Products of a warp: lane (g, t) has of A the rows g and g + 8, of B the column g, of D the columns 2t and 2t + 1.
inline void host_words(uint32_t mine, uint32_t (&all)[32]) {
    const char* from = (const char*)host_exchange(7, &mine, 4, 0xffffffffu);
    for (unsigned i = 0; i < 32; i++) std::memcpy(&all[i], from + 8 * i, 4);
}
inline float host_half_of(const uint32_t (&all)[32], unsigned row, unsigned column) {
    return host_half_to_float((uint16_t)(all[row * 4 + column / 2] >> 16 * (column % 2)));
}
inline void host_mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t rows[4][32], columns[2][32];
    for (unsigned i = 0; i < 4; i++) host_words(a[i], rows[i]);
    host_words(b0, columns[0]);
    host_words(b1, columns[1]);
    unsigned g = host_lane() / 4, t = host_lane() % 4;
    for (unsigned i = 0; i < 4; i++) {
        double sum = d[i];
        for (unsigned k = 0; k < 16; k++)
            sum += (double)host_half_of(rows[k / 8 * 2 + i / 2], g, k % 8) * host_half_of(columns[k / 8], 2 * t + i % 2, k % 8);
        d[i] = (float)sum;
    }
}
inline void host_mma_s8(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t c) {
    uint32_t rows[4][32], columns[2][32];
    for (unsigned i = 0; i < 4; i++) host_words(a[i], rows[i]);
    host_words(b0, columns[0]);
    host_words(b1, columns[1]);
    unsigned g = host_lane() / 4, t = host_lane() % 4;
    auto byte_of = [](uint32_t word, unsigned k) { return (int)(signed char)(word >> 8 * (k % 4) & 255); };
    for (unsigned i = 0; i < 4; i++) {
        int sum = (int)c;
        for (unsigned k = 0; k < 32; k++)
            sum += byte_of(rows[k / 16 * 2 + i / 2][g * 4 + k % 16 / 4], k) * byte_of(columns[k / 16][(2 * t + i % 2) * 4 + k % 16 / 4], k);
        d[i] = (uint32_t)sum;
    }
}
inline uint32_t host_turned(uint32_t v) {
    uint32_t all[32];
    host_words(v, all);
    unsigned g = host_lane() / 4, t = host_lane() % 4;
    uint16_t low = (uint16_t)(all[2 * t * 4 + g / 2] >> 16 * (g % 2)), high = (uint16_t)(all[(2 * t + 1) * 4 + g / 2] >> 16 * (g % 2));
    return low | (uint32_t)high << 16;
}

struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
    float x, y;
};
struct __attribute__((aligned(16))) uint4 {
    unsigned x, y, z, w;
};
struct __attribute__((aligned(8))) uint2 {
    unsigned x, y;
};

// One thread of a launch: the constants, then the pointers.
template <class A, class... P, std::size_t... I>
inline void host_call(void (*f)(A, P...), const uint32_t* words, const uint64_t* pointers, std::index_sequence<I...>) {
    A a;
    std::memcpy((void*)&a, words, sizeof a);
    f(a, (P)pointers[I]...);
}
template <class A, class... P>
inline void host_thunk(void (*f)(A, P...), const uint32_t* words, const uint64_t* pointers) {
    host_call(f, words, pointers, std::make_index_sequence<sizeof...(P)>());
}
// Bytes of the constants and number of the pointers, which the host checks.
template <class A, class... P>
constexpr unsigned host_form(void (*)(A, P...)) {
    return (unsigned)sizeof(A) << 8 | (unsigned)sizeof...(P);
}
#define HOST_ENTRY(name)                                                                                               \
    extern "C" void host_thunk_##name(const uint32_t* w, const uint64_t* p) { host_thunk(&name, w, p); }               \
    extern "C" unsigned host_form_##name() { return host_form(&name); }
