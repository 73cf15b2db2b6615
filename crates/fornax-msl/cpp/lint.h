// Declarations that let clang's C++ for OpenCL read kernel source: it has Metal's address spaces, vectors and half, and
// refuses what mixes them. Nothing here has a body that runs. Included before the output of the lint's pre-pass.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline
#define METAL_CONST const

using int8_t = char;
using uint8_t = uchar;
using int16_t = short;
using uint16_t = ushort;
using int32_t = int;
using uint32_t = uint;
using int64_t = long;
using uint64_t = ulong;
// A comparison of vectors gives integers here.
using bool2 = int2;
using bool3 = int3;
using bool4 = int4;

namespace metal {
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t; using ::int32_t; using ::uint32_t; using ::int64_t; using ::uint64_t;

struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
  operator float() const;
  operator float() const __constant;
  bfloat operator+(bfloat) const;
  bfloat operator-(bfloat) const;
  bfloat operator*(bfloat) const;
  bfloat operator/(bfloat) const;
  bfloat operator-() const;
  bfloat &operator+=(bfloat);
  bfloat &operator-=(bfloat);
  bfloat &operator*=(bfloat);
  bfloat &operator/=(bfloat);
};

template <class T, int N> struct vector_type;
template <class T> struct element { using type = T; static constexpr __constant int count = 1; };
template <class T, int N> struct packed_of { // a vector aligned as its element
  T d[N];
  using whole = typename vector_type<T, N>::type;
  packed_of() = default;
  packed_of(whole);
  template <class A, class B, class... R> packed_of(A, B, R...);
  operator whole() const;
  operator whole() const __constant;
  T x, y, z, w;
  const T operator[](uint) const;
  const T operator[](uint) const __constant;
  T &operator[](uint);
};
#define MSL_VECTORS(t)                                                                                  \
  template <> struct vector_type<t, 2> { using type = t##2; };                                          \
  template <> struct vector_type<t, 3> { using type = t##3; };                                          \
  template <> struct vector_type<t, 4> { using type = t##4; };                                          \
  template <> struct element<t##2> { using type = t; static constexpr __constant int count = 2; };                 \
  template <> struct element<t##3> { using type = t; static constexpr __constant int count = 3; };                 \
  template <> struct element<t##4> { using type = t; static constexpr __constant int count = 4; };                 \
  using packed_##t##2 = packed_of<t, 2>; using packed_##t##3 = packed_of<t, 3>; using packed_##t##4 = packed_of<t, 4>;
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort) MSL_VECTORS(int) MSL_VECTORS(uint)
MSL_VECTORS(long) MSL_VECTORS(ulong) MSL_VECTORS(half) MSL_VECTORS(float)
#undef MSL_VECTORS
template <int N> struct bfloats { bfloat x, y, z, w; bfloats() = default; template <class U> explicit bfloats(U); bfloat operator[](uint) const; };
template <> struct vector_type<bfloat, 2> { using type = bfloats<2>; };
template <> struct vector_type<bfloat, 3> { using type = bfloats<3>; };
template <> struct vector_type<bfloat, 4> { using type = bfloats<4>; };
template <int N> struct element<bfloats<N>> { using type = bfloat; static constexpr __constant int count = N; };
using bfloat2 = bfloats<2>;
using bfloat3 = bfloats<3>;
using bfloat4 = bfloats<4>;
template <class T, int N> using vec = typename vector_type<T, N>::type;

template <class T, class U> T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs two types of one size");
  return __builtin_astype(u, T);
}
// A vector of one argument: each component the same, or a conversion.
template <class T, class U> T msl_vector(U u) {
  if constexpr (element<U>::count == 1) return (T)(typename element<T>::type)u;
  else {
    static_assert(element<T>::count == element<U>::count, "a vector made of one with another number of components");
    return __builtin_convertvector(u, T);
  }
}
template <class T, class U, int N> T msl_vector(packed_of<U, N> u) { return msl_vector<T>((vec<U, N>)u); }
template <class T, int N> T msl_vector(bfloats<N> u);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class A, class B> constexpr __constant bool is_same_v = false;
template <class A> constexpr __constant bool is_same_v<A, A> = true;
template <class A, class B> struct is_same { static constexpr __constant bool value = is_same_v<A, B>; };
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T> constexpr __constant bool is_floating_point_v = is_same_v<T, half> || is_same_v<T, float> || is_same_v<T, bfloat>;
template <class T> struct is_floating_point { static constexpr __constant bool value = is_floating_point_v<T>; };
template <class T> struct numeric_limits {
  static constexpr T min(), max(), lowest(), epsilon(), infinity(), quiet_NaN();
};

// The types that every GPU takes in a simdgroup function.
template <class T> constexpr __constant bool simd_number = !is_same_v<T, bool> && !is_same_v<T, bfloat> && sizeof(T) <= 4;
template <class T> using simd_type = enable_if_t<simd_number<typename element<T>::type>, T>;
#define MSL_FOLD(f) template <class T> simd_type<T> f(T);
MSL_FOLD(simd_sum) MSL_FOLD(simd_product) MSL_FOLD(simd_max) MSL_FOLD(simd_min) MSL_FOLD(simd_and) MSL_FOLD(simd_or) MSL_FOLD(simd_xor)
MSL_FOLD(simd_prefix_exclusive_sum) MSL_FOLD(simd_prefix_inclusive_sum) MSL_FOLD(simd_prefix_exclusive_product) MSL_FOLD(simd_prefix_inclusive_product)
MSL_FOLD(simd_broadcast_first)
#undef MSL_FOLD
#define MSL_MOVE(f) template <class T> simd_type<T> f(T, ushort);
MSL_MOVE(simd_broadcast) MSL_MOVE(simd_shuffle) MSL_MOVE(simd_shuffle_xor) MSL_MOVE(simd_shuffle_up) MSL_MOVE(simd_shuffle_down)
MSL_MOVE(simd_shuffle_rotate_up) MSL_MOVE(simd_shuffle_rotate_down)
#undef MSL_MOVE
template <class T> simd_type<T> simd_shuffle_and_fill_up(T, T, ushort);
template <class T> simd_type<T> simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote {
  using vote_t = ulong;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8 && is_floating_point_v<T>, "simdgroup matrices are 8x8 of half, bfloat or float");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2> elements;
  vec<T, 2> &thread_elements();
};
template <class T> using matrix8 = simdgroup_matrix<T, 8, 8>;
using simdgroup_float8x8 = matrix8<float>;
using simdgroup_half8x8 = matrix8<half>;
using simdgroup_bfloat8x8 = matrix8<bfloat>;
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define MSL_SPACE(space)                                                                                            \
  template <class T> void simdgroup_load(matrix8<T> &, const space T *, ulong = 8, ulong2 = (ulong2)(0), bool = false); \
  template <class T> void simdgroup_store(matrix8<T>, space T *, ulong = 8, ulong2 = (ulong2)(0), bool = false);
MSL_SPACE(device) MSL_SPACE(threadgroup)
#undef MSL_SPACE
template <class D, class A, class B, class C> void simdgroup_multiply_accumulate(matrix8<D> &, matrix8<A>, matrix8<B>, matrix8<C>);
template <class D, class A, class B> void simdgroup_multiply(matrix8<D> &, matrix8<A>, matrix8<B>);

template <class T> struct msl_atomic { T value; };
template <class T> struct itself { using type = T; };
template <class T> using exactly = typename itself<T>::type;
#define MSL_FETCH(f, space) template <class T> T f(volatile space msl_atomic<T> *, exactly<T>, int);
#define MSL_ATOMICS(space)                                                                                          \
  template <class T> T msl_load(const volatile space msl_atomic<T> *, int);                                        \
  template <class T> void msl_store(volatile space msl_atomic<T> *, exactly<T>, int);                              \
  template <class T> bool msl_compare(volatile space msl_atomic<T> *, thread T *, exactly<T>, int, int);           \
  MSL_FETCH(msl_exchange, space) MSL_FETCH(msl_add, space) MSL_FETCH(msl_sub, space) MSL_FETCH(msl_and, space)     \
  MSL_FETCH(msl_or, space) MSL_FETCH(msl_xor, space) MSL_FETCH(msl_max, space) MSL_FETCH(msl_min, space)
MSL_ATOMICS(device) MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_FETCH

#define MSL_MATH                                                                                                    \
  using ::acos; using ::asin; using ::atan; using ::atan2; using ::cosh; using ::sinh; using ::tanh; using ::exp; using ::exp2; \
  using ::exp10; using ::log; using ::log2; using ::log10; using ::sqrt; using ::rsqrt; using ::sin; using ::cos; using ::tan; \
  using ::floor; using ::ceil; using ::rint; using ::round; using ::trunc; using ::fabs; using ::pow; using ::powr; using ::fmod; \
  using ::fmin; using ::fmax; using ::copysign; template <class T> T divide(T, T); template <class T> T saturate(T);
namespace precise { MSL_MATH }
namespace fast { MSL_MATH }
#undef MSL_MATH
template <class T> T divide(T, T);
template <class T> T saturate(T);
template <class T> T msl_fract(T);
template <class T> T msl_abs(T);
template <class T, class C> T msl_select(T, T, C);
template <class T> T min3(T, T, T);
template <class T> T max3(T, T, T);
template <class T> T extract_bits(T, uint, uint);
template <class T> T insert_bits(T, T, uint, uint);
template <class T> T reverse_bits(T);
template <class T> T mulhi(T, T);
template <class T> T absdiff(T, T);
template <class T> T length_squared(T);
float sincos(float, thread float &);
float frexp(float, thread int &);
} // namespace metal

using metal::as_type;
using metal::bfloat;
using metal::bfloat2;
using metal::bfloat3;
using metal::bfloat4;
using metal::packed_char2; using metal::packed_char4; using metal::packed_uchar2; using metal::packed_uchar4;
using metal::packed_short2; using metal::packed_short4; using metal::packed_ushort2; using metal::packed_ushort4;
using metal::packed_half2; using metal::packed_half4; using metal::packed_float2; using metal::packed_float3; using metal::packed_float4;
using metal::packed_uint2; using metal::packed_uint3; using metal::packed_uint4; using metal::packed_int2; using metal::packed_int4;
#define abs metal::msl_abs
#define select metal::msl_select
#define fract metal::msl_fract
#define atomic_uint metal::msl_atomic<uint>
#define atomic_int metal::msl_atomic<int>
#define atomic_float metal::msl_atomic<float>
#undef atomic_load_explicit
#undef atomic_store_explicit
#define atomic_load_explicit metal::msl_load
#define atomic_store_explicit metal::msl_store
#define atomic_exchange_explicit metal::msl_exchange
#define atomic_compare_exchange_weak_explicit metal::msl_compare
#define atomic_fetch_add_explicit metal::msl_add
#define atomic_fetch_sub_explicit metal::msl_sub
#define atomic_fetch_and_explicit metal::msl_and
#define atomic_fetch_or_explicit metal::msl_or
#define atomic_fetch_xor_explicit metal::msl_xor
#define atomic_fetch_max_explicit metal::msl_max
#define atomic_fetch_min_explicit metal::msl_min
#define msl_defined(x) (sizeof(x) != 0)

// OpenCL writes a vector of several values as a cast of a list.
#define MSL_FIFTH(a, b, c, d, e, ...) e
#define MSL_ONE(T, x) metal::msl_vector<T>(x)
#define MSL_LIST(T, ...) ((T)(__VA_ARGS__))
#define MSL_MAKE(T, ...) MSL_FIFTH(__VA_ARGS__, MSL_LIST, MSL_LIST, MSL_LIST, MSL_ONE)(T, __VA_ARGS__)
#define char2(...) MSL_MAKE(char2, __VA_ARGS__)
#define char3(...) MSL_MAKE(char3, __VA_ARGS__)
#define char4(...) MSL_MAKE(char4, __VA_ARGS__)
#define uchar2(...) MSL_MAKE(uchar2, __VA_ARGS__)
#define uchar3(...) MSL_MAKE(uchar3, __VA_ARGS__)
#define uchar4(...) MSL_MAKE(uchar4, __VA_ARGS__)
#define short2(...) MSL_MAKE(short2, __VA_ARGS__)
#define short3(...) MSL_MAKE(short3, __VA_ARGS__)
#define short4(...) MSL_MAKE(short4, __VA_ARGS__)
#define ushort2(...) MSL_MAKE(ushort2, __VA_ARGS__)
#define ushort3(...) MSL_MAKE(ushort3, __VA_ARGS__)
#define ushort4(...) MSL_MAKE(ushort4, __VA_ARGS__)
#define int2(...) MSL_MAKE(int2, __VA_ARGS__)
#define int3(...) MSL_MAKE(int3, __VA_ARGS__)
#define int4(...) MSL_MAKE(int4, __VA_ARGS__)
#define uint2(...) MSL_MAKE(uint2, __VA_ARGS__)
#define uint3(...) MSL_MAKE(uint3, __VA_ARGS__)
#define uint4(...) MSL_MAKE(uint4, __VA_ARGS__)
#define long2(...) MSL_MAKE(long2, __VA_ARGS__)
#define long3(...) MSL_MAKE(long3, __VA_ARGS__)
#define long4(...) MSL_MAKE(long4, __VA_ARGS__)
#define ulong2(...) MSL_MAKE(ulong2, __VA_ARGS__)
#define ulong3(...) MSL_MAKE(ulong3, __VA_ARGS__)
#define ulong4(...) MSL_MAKE(ulong4, __VA_ARGS__)
#define half2(...) MSL_MAKE(half2, __VA_ARGS__)
#define half3(...) MSL_MAKE(half3, __VA_ARGS__)
#define half4(...) MSL_MAKE(half4, __VA_ARGS__)
#define float2(...) MSL_MAKE(float2, __VA_ARGS__)
#define float3(...) MSL_MAKE(float3, __VA_ARGS__)
#define float4(...) MSL_MAKE(float4, __VA_ARGS__)
#define bool2(...) MSL_MAKE(int2, __VA_ARGS__)
#define bool3(...) MSL_MAKE(int3, __VA_ARGS__)
#define bool4(...) MSL_MAKE(int4, __VA_ARGS__)
// Words of OpenCL that are names like any other in Metal.
#define local local_name
#define global global_name
#define generic generic_name
#define pipe pipe_name
