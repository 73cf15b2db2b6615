// Scalars and vectors of the Metal Shading Language: half, bfloat, vec<T, N>, packed vectors, as_type. A vector's swizzles
// are members here under other names; the pre-pass spells them so.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;

// Not inlined where sanitizers look: the emulator's own reads of its own data.
#define MSL_RAW __attribute__((no_sanitize("thread"), no_sanitize("undefined")))

namespace metal {
using ::half;
using std::int8_t; using std::uint8_t; using std::int16_t; using std::uint16_t;
using std::int32_t; using std::uint32_t; using std::int64_t; using std::uint64_t;
using size_t = std::size_t;
using ptrdiff_t = std::ptrdiff_t;

// Nothing turns into a bfloat by itself; a bfloat turns into float.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  explicit bfloat(T v) {
    const float f = float(v);
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    bits = f != f ? uint16_t(u >> 16 | 64) : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
#define MSL_OP(op)                                                                                     \
  friend bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }               \
  bfloat &operator op##=(bfloat b) { return *this = bfloat(float(*this) op float(b)); }
  MSL_OP(+) MSL_OP(-) MSL_OP(*) MSL_OP(/)
#undef MSL_OP
  bfloat operator-() const { return bfloat(-float(*this)); }
};

template <class T> constexpr bool is_scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T> constexpr bool is_real = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;
template <class T> struct element { using type = T; static constexpr int count = 1; };
template <class T, int N> struct element<vec<T, N>> { using type = T; static constexpr int count = N; };
template <class T, int N> struct element<packed_vec<T, N>> { using type = T; static constexpr int count = N; };
template <class T> constexpr bool is_vec = false;
template <class T, int N> constexpr bool is_vec<vec<T, N>> = true;

// What an assignment to a swizzle goes through.
template <class T, int N, int... I> struct swizzled {
  vec<T, N> &v;
  static constexpr int n = sizeof...(I);
  operator vec<T, n>() const { return vec<T, n>(v.d[I]...); }
  void operator=(const vec<T, n> &o) { const vec<T, n> c = o; int k = 0; ((v.d[I] = c.d[k++]), ...); }
#define MSL_OP(op) template <class U> void operator op##=(const U &o) { *this = vec<T, n>(*this) op o; }
  MSL_OP(+) MSL_OP(-) MSL_OP(*) MSL_OP(/) MSL_OP(&) MSL_OP(|) MSL_OP(^)
#undef MSL_OP
};

// clang checks the alignment of what a copy constructor of a class's own is bound to, but not that of a plain copy.
#ifdef __clang__
#define MSL_COPY                                                                       \
  vec(const vec &o) { __builtin_memcpy((void *)this, (const void *)&o, sizeof o); }    \
  vec &operator=(const vec &o) { __builtin_memcpy((void *)this, (const void *)&o, sizeof o); return *this; }
#else
#define MSL_COPY
#endif
#define MSL_BODY(N)                                                                                                          \
  MSL_COPY                                                                                                                   \
  vec() = default;                                                                                                           \
  template <class U, class = std::enable_if_t<is_scalar<U>>> vec(U s) { for (int i = 0; i < N; i++) d[i] = T(s); }           \
  template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>> explicit vec(const vec<U, N> &o) { U c[N]; __builtin_memcpy((void *)c, (const void *)o.d, sizeof c); for (int i = 0; i < N; i++) d[i] = T(c[i]); } \
  template <class A, class B, class... R, class = std::enable_if_t<((element<A>::count + element<B>::count) + ... + element<R>::count) == N>> \
  vec(const A &a, const B &b, const R &...r) { int k = 0; put(k, a), put(k, b), (put(k, r), ...); }                          \
  template <class U> void put(int &k, const U &s) {                                                                          \
    if constexpr (element<U>::count == 1) d[k++] = T(s);                                                                     \
    else for (int i = 0; i < element<U>::count; i++) d[k++] = T(s.d[i]);                                                     \
  }                                                                                                                          \
  T &operator[](uint i) { return d[i]; }                                                                                     \
  const T &operator[](uint i) const { return d[i]; }                                                                         \
  template <int... I> vec<T, sizeof...(I)> msl_get() const { return vec<T, sizeof...(I)>(d[I]...); }                         \
  template <int... I> swizzled<T, N, I...> msl_set() { return {*this}; }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union { T d[2]; struct { T x, y; }; struct { T r, g; }; };
  MSL_BODY(2)
  T msl_lo() const { return x; }
  T msl_hi() const { return y; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union { T d[3]; struct { T x, y, z; }; struct { T r, g, b; }; };
  MSL_BODY(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union { T d[4]; struct { T x, y, z, w; }; struct { T r, g, b, a; }; };
  MSL_BODY(4)
  vec<T, 2> msl_lo() const { return msl_get<0, 1>(); }
  vec<T, 2> msl_hi() const { return msl_get<2, 3>(); }
  vec<T, 2> msl_even() const { return msl_get<0, 2>(); }
  vec<T, 2> msl_odd() const { return msl_get<1, 3>(); }
  swizzled<T, 4, 0, 1> msl_set_lo() { return {*this}; }
  swizzled<T, 4, 2, 3> msl_set_hi() { return {*this}; }
  swizzled<T, 4, 0, 2> msl_set_even() { return {*this}; }
  swizzled<T, 4, 1, 3> msl_set_odd() { return {*this}; }
};
#undef MSL_BODY

template <class R, class F, class T, int N, class... V> inline vec<R, N> each_of(F f, const vec<T, N> &a, const V &...v) {
  vec<R, N> r;
  r.d[0] = R(f(a.d[0], v.d[0]...)), r.d[1] = R(f(a.d[1], v.d[1]...));
  if constexpr (N > 2) r.d[2] = R(f(a.d[2], v.d[2]...));
  if constexpr (N > 3) r.d[3] = R(f(a.d[3], v.d[3]...));
  return r;
}
// A copy made by one access, as the device loads a vector.
template <class T, int N> inline vec<T, N> whole(const vec<T, N> &a) {
  vec<T, N> c;
  __builtin_memcpy((void *)c.d, (const void *)a.d, sizeof c.d); // not what pads three components
  return c;
}
// f of each component; every index is a constant, so that the optimiser keeps vectors in registers.
template <class R, class F, class T, int N, class... V> inline vec<R, N> each(F f, const vec<T, N> &first, const V &...others) {
  return each_of<R>(f, whole(first), whole(others)...);
}
template <class T, class U> using if_scalar = std::enable_if_t<is_scalar<U>, T>;
#define MSL_BINARY(R, op)                                                                                                    \
  template <class T, int N> inline vec<R, N> operator op(const vec<T, N> &a, const vec<T, N> &b) { return each<R>([](T p, T q) { return p op q; }, a, b); } \
  template <class T, int N, class U> inline if_scalar<vec<R, N>, U> operator op(const vec<T, N> &a, U b) { return a op vec<T, N>(b); }                     \
  template <class T, int N, class U> inline if_scalar<vec<R, N>, U> operator op(U a, const vec<T, N> &b) { return vec<T, N>(a) op b; }
#define MSL_ARITHMETIC(op) \
  MSL_BINARY(T, op)        \
  template <class T, int N, class U> inline vec<T, N> &operator op##=(vec<T, N> &a, const U &b) { return a = a op b; }
MSL_ARITHMETIC(+) MSL_ARITHMETIC(-) MSL_ARITHMETIC(*) MSL_ARITHMETIC(/) MSL_ARITHMETIC(%)
MSL_ARITHMETIC(&) MSL_ARITHMETIC(|) MSL_ARITHMETIC(^) MSL_ARITHMETIC(<<) MSL_ARITHMETIC(>>)
MSL_BINARY(bool, ==) MSL_BINARY(bool, !=) MSL_BINARY(bool, <) MSL_BINARY(bool, <=) MSL_BINARY(bool, >) MSL_BINARY(bool, >=)
MSL_BINARY(bool, &&) MSL_BINARY(bool, ||)
#undef MSL_ARITHMETIC
#undef MSL_BINARY
template <class T, int N> inline vec<T, N> operator-(const vec<T, N> &a) { return each<T>([](T p) { return -p; }, a); }
template <class T, int N> inline vec<T, N> operator+(const vec<T, N> &a) { return a; }
template <class T, int N> inline vec<T, N> operator~(const vec<T, N> &a) { return each<T>([](T p) { return ~p; }, a); }
template <class T, int N> inline vec<bool, N> operator!(const vec<T, N> &a) { return each<bool>([](T p) { return !p; }, a); }

template <class T, int N> struct packed_vec {
  union { T d[N]; struct { T x, y; }; };
  packed_vec() = default;
  packed_vec(const vec<T, N> &v) { for (int i = 0; i < N; i++) d[i] = v.d[i]; }
  template <class... A, class = std::enable_if_t<sizeof...(A) == N>> packed_vec(A... a) : d{T(a)...} {}
  operator vec<T, N>() const { vec<T, N> v; __builtin_memcpy((void *)v.d, (const void *)d, sizeof d); return v; }
  T &operator[](uint i) { return d[i]; }
  const T &operator[](uint i) const { return d[i]; }
};
template <class T> struct packed_vec<T, 3> {
  union { T d[3]; struct { T x, y, z; }; };
  packed_vec() = default;
  packed_vec(const vec<T, 3> &v) { for (int i = 0; i < 3; i++) d[i] = v.d[i]; }
  packed_vec(T a, T b, T c) : d{a, b, c} {}
  operator vec<T, 3>() const { return vec<T, 3>(d[0], d[1], d[2]); }
  T &operator[](uint i) { return d[i]; }
  const T &operator[](uint i) const { return d[i]; }
};
template <class T> struct packed_vec<T, 4> {
  union { T d[4]; struct { T x, y, z, w; }; };
  packed_vec() = default;
  packed_vec(const vec<T, 4> &v) { for (int i = 0; i < 4; i++) d[i] = v.d[i]; }
  packed_vec(T a, T b, T c, T e) : d{a, b, c, e} {}
  operator vec<T, 4>() const { vec<T, 4> v; __builtin_memcpy((void *)v.d, (const void *)d, sizeof d); return v; } // one load
  T &operator[](uint i) { return d[i]; }
  const T &operator[](uint i) const { return d[i]; }
};

#define MSL_TYPES(t)                                                                                       \
  using t##2 = vec<t, 2>; using t##3 = vec<t, 3>; using t##4 = vec<t, 4>;                                  \
  using packed_##t##2 = packed_vec<t, 2>; using packed_##t##3 = packed_vec<t, 3>; using packed_##t##4 = packed_vec<t, 4>;
#define MSL_ALL(M) M(bool) M(char) M(uchar) M(short) M(ushort) M(int) M(uint) M(long) M(ulong) M(half) M(bfloat) M(float)
MSL_ALL(MSL_TYPES)
#undef MSL_TYPES

template <class T, class U> inline T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs two types of one size");
  T t;
  __builtin_memcpy((void *)&t, (const void *)&u, sizeof t);
  return t;
}

using std::conditional_t; using std::enable_if_t; using std::is_same; using std::is_same_v; using std::is_integral; using std::is_integral_v;
using std::is_signed; using std::is_signed_v; using std::is_unsigned; using std::is_unsigned_v; using std::is_pointer; using std::is_pointer_v;
using std::remove_reference_t; using std::remove_cv_t; using std::remove_const_t; using std::make_unsigned_t; using std::make_signed_t;
using std::integral_constant; using std::true_type; using std::false_type; using std::void_t; using std::conditional; using std::enable_if;
using std::is_convertible_v; using std::is_const_v;
template <class T> struct is_floating_point : std::bool_constant<is_real<std::remove_cv_t<T>>> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_arithmetic : std::bool_constant<is_scalar<std::remove_cv_t<T>>> {};
template <class T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> struct is_vector : std::bool_constant<is_vec<std::remove_cv_t<T>>> {};
template <class T> constexpr bool is_vector_v = is_vector<T>::value;
template <class T> struct vec_element { using type = typename element<T>::type; };
template <class T> using vec_element_t = typename vec_element<T>::type;
template <class T> using make_scalar_t = typename element<T>::type;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false, has_infinity = true, has_quiet_NaN = true;
  static constexpr int digits = 11, digits10 = 3;
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half epsilon() { return half(0.0009765625f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};
} // namespace metal

// The types that need no `metal::`.
using metal::bfloat;
using metal::as_type;
#define MSL_TYPES(t)                                      \
  using metal::t##2; using metal::t##3; using metal::t##4; \
  using metal::packed_##t##2; using metal::packed_##t##3; using metal::packed_##t##4;
MSL_ALL(MSL_TYPES)
#undef MSL_TYPES
#undef MSL_ALL
