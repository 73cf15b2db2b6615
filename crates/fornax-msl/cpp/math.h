// Functions on single threads' values: math, integers, relations. Each half result is the float one rounded once.
#pragma once
#include "vec.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST const
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH half(__builtin_inff())
#define MAXHALF half(65504.0f)
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(0.0009765625f)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_PI_H half(3.14159265358979323846f)
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2u + 1u)
#define LONG_MAX __LONG_MAX__
#define ULONG_MAX (__LONG_MAX__ * 2ul + 1ul)

namespace metal {

#define MSL_1(f, e)                                                                                         \
  inline float f(float x) { return e; }                                                                     \
  template <int N> inline vec<float, N> f(const vec<float, N> &v) { return each<float>([](float x) { return f(x); }, v); }
#define MSL_2(f, e)                                                                                         \
  inline float f(float x, float y) { return e; }                                                            \
  template <int N> inline vec<float, N> f(const vec<float, N> &a, const vec<float, N> &b) { return each<float>([](float x, float y) { return f(x, y); }, a, b); }
#define MSL_LIST(U, B)                                                                                      \
  U(acos, __builtin_acosf(x)) U(asin, __builtin_asinf(x)) U(atan, __builtin_atanf(x)) U(cosh, __builtin_coshf(x)) \
  U(sinh, __builtin_sinhf(x)) U(tanh, __builtin_tanhf(x)) U(asinh, __builtin_asinhf(x)) U(acosh, __builtin_acoshf(x)) \
  U(atanh, __builtin_atanhf(x)) U(exp, __builtin_expf(x)) U(exp2, __builtin_exp2f(x)) U(exp10, __builtin_powf(10.0f, x)) \
  U(log, __builtin_logf(x)) U(log2, __builtin_log2f(x)) U(log10, __builtin_log10f(x)) U(sqrt, __builtin_sqrtf(x)) \
  U(rsqrt, 1.0f / __builtin_sqrtf(x)) U(sin, __builtin_sinf(x)) U(cos, __builtin_cosf(x)) U(tan, __builtin_tanf(x)) \
  U(floor, __builtin_floorf(x)) U(ceil, __builtin_ceilf(x)) U(rint, __builtin_rintf(x)) U(round, __builtin_roundf(x)) \
  U(trunc, __builtin_truncf(x)) U(fabs, __builtin_fabsf(x)) U(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f)) \
  U(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f)) U(sinpi, __builtin_sinf(x * M_PI_F)) U(cospi, __builtin_cosf(x * M_PI_F)) \
  B(pow, __builtin_powf(x, y)) B(powr, __builtin_powf(x, y)) B(atan2, __builtin_atan2f(x, y)) B(fmod, __builtin_fmodf(x, y)) \
  B(fmin, __builtin_fminf(x, y)) B(fmax, __builtin_fmaxf(x, y)) B(divide, x / y) B(copysign, __builtin_copysignf(x, y)) \
  B(fdim, __builtin_fdimf(x, y))
MSL_LIST(MSL_1, MSL_2)
namespace precise { MSL_LIST(MSL_1, MSL_2) }
namespace fast { MSL_LIST(MSL_1, MSL_2) }
#define MSL_H1(f, e)                                                                                        \
  inline half f(half x) { return half(f(float(x))); }                                                       \
  template <int N> inline vec<half, N> f(const vec<half, N> &v) { return each<half>([](half x) { return f(x); }, v); }
#define MSL_H2(f, e)                                                                                        \
  inline half f(half x, half y) { return half(f(float(x), float(y))); }                                     \
  template <int N> inline vec<half, N> f(const vec<half, N> &a, const vec<half, N> &b) { return each<half>([](half x, half y) { return f(x, y); }, a, b); }
MSL_LIST(MSL_H1, MSL_H2)
#undef MSL_LIST
#undef MSL_H1
#undef MSL_H2
#undef MSL_1
#undef MSL_2

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(double(a) * double(b) + double(c))); }
template <class T, int N> inline vec<T, N> fma(const vec<T, N> &a, const vec<T, N> &b, const vec<T, N> &c) { return each<T>([](T x, T y, T z) { return fma(x, y, z); }, a, b, c); }
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline float frexp(float x, int &e) { return __builtin_frexpf(x, &e); }
inline float modf(float x, float &whole) { return __builtin_modff(x, &whole); }
inline float sincos(float x, float &c) { c = cos(x); return sin(x); }

// Of floating-point operands the one that is no NaN; second operands convert to the first one's type.
template <class T> using same_as = std::common_type_t<T>;
template <class T> using if_plain = std::enable_if_t<is_scalar<T>, T>;
template <class T> inline if_plain<T> min(T a, same_as<T> b) { if constexpr (is_real<T>) return a != a ? b : b < a ? b : a; else return b < a ? b : a; }
template <class T> inline if_plain<T> max(T a, same_as<T> b) { if constexpr (is_real<T>) return a != a ? b : a < b ? b : a; else return a < b ? b : a; }
template <class T> inline if_plain<T> clamp(T v, same_as<T> a, same_as<T> b) { return min(max(v, a), b); }
template <class T> inline if_plain<T> mix(T a, T b, same_as<T> t) { return a + (b - a) * t; }
template <class T> inline if_plain<T> abs(T a) { return a < T(0) ? T(-a) : a; }
template <class T> inline if_plain<T> sign(T a) { return a > T(0) ? T(1) : a < T(0) ? T(-1) : T(a == a ? a : T(0)); }
template <class T> inline if_plain<T> step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <class T> inline if_plain<T> smoothstep(T a, T b, T x) { const T t = clamp(T((x - a) / (b - a)), T(0), T(1)); return T(t * t * (T(3) - T(2) * t)); }
template <class T> inline if_plain<T> select(T a, T b, bool c) { return c ? b : a; }
template <class T> inline if_plain<T> min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> inline if_plain<T> max3(T a, T b, T c) { return max(a, max(b, c)); }
#define MSL_EACH2(f)                                                                                                          \
  template <class T, int N> inline vec<T, N> f(const vec<T, N> &a, const vec<T, N> &b) { return each<T>([](T x, T y) { return f(x, y); }, a, b); } \
  template <class T, int N, class U> inline if_scalar<vec<T, N>, U> f(const vec<T, N> &a, U b) { return f(a, vec<T, N>(b)); }
MSL_EACH2(min) MSL_EACH2(max) MSL_EACH2(step)
#undef MSL_EACH2
template <class T, int N> inline vec<T, N> abs(const vec<T, N> &a) { return each<T>([](T x) { return abs(x); }, a); }
template <class T, int N> inline vec<T, N> sign(const vec<T, N> &a) { return each<T>([](T x) { return sign(x); }, a); }
template <class T, int N> inline vec<T, N> clamp(const vec<T, N> &v, const vec<T, N> &a, const vec<T, N> &b) { return min(max(v, a), b); }
template <class T, int N, class U> inline if_scalar<vec<T, N>, U> clamp(const vec<T, N> &v, U a, U b) { return min(max(v, vec<T, N>(a)), vec<T, N>(b)); }
template <class T, int N, class U> inline vec<T, N> mix(const vec<T, N> &a, const vec<T, N> &b, const U &t) { return a + (b - a) * t; }
template <class T, int N> inline vec<T, N> select(const vec<T, N> &a, const vec<T, N> &b, const vec<bool, N> &c) { return each<T>([](T x, T y, bool z) { return z ? y : x; }, a, b, c); }
template <class T, int N> inline vec<T, N> select(const vec<T, N> &a, const vec<T, N> &b, bool c) { return c ? b : a; }

inline bool isnan(float v) { return v != v; }
inline bool isinf(float v) { return __builtin_fabsf(v) == __builtin_inff(); }
inline bool isfinite(float v) { return __builtin_fabsf(v) < __builtin_inff(); }
inline bool signbit(float v) { return __builtin_signbit(v); }
#define MSL_TEST(f) template <class T, int N> inline vec<bool, N> f(const vec<T, N> &a) { return each<bool>([](T x) { return f(float(x)); }, a); }
MSL_TEST(isnan) MSL_TEST(isinf) MSL_TEST(isfinite) MSL_TEST(signbit)
#undef MSL_TEST
inline bool any(bool v) { return v; }
inline bool all(bool v) { return v; }
template <class T, int N> inline bool any(const vec<T, N> &a) { bool r = false; for (int i = 0; i < N; i++) r = r || a.d[i]; return r; }
template <class T, int N> inline bool all(const vec<T, N> &a) { bool r = true; for (int i = 0; i < N; i++) r = r && a.d[i]; return r; }

template <class T, int N> inline T dot(const vec<T, N> &a, const vec<T, N> &b) { const vec<T, N> p = a * b; T s = p.d[0]; for (int i = 1; i < N; i++) s = T(s + p.d[i]); return s; }
template <class T, int N> inline T length_squared(const vec<T, N> &a) { return dot(a, a); }
template <class T, int N> inline T length(const vec<T, N> &a) { return sqrt(dot(a, a)); }
template <class T, int N> inline T distance(const vec<T, N> &a, const vec<T, N> &b) { return length(a - b); }
template <class T, int N> inline vec<T, N> normalize(const vec<T, N> &a) { return a * rsqrt(dot(a, a)); }
template <class T> inline vec<T, 3> cross(const vec<T, 3> &a, const vec<T, 3> &b) { return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x); }

// Integers.
template <class T> using if_integer = std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, T>;
template <class T> constexpr int bits_of = int(sizeof(T)) * 8;
template <class T> inline if_integer<T> popcount(T v) { return T(__builtin_popcountll((unsigned long long)std::make_unsigned_t<T>(v))); }
template <class T> inline if_integer<T> clz(T v) { return T(v ? __builtin_clzll((unsigned long long)std::make_unsigned_t<T>(v)) - (64 - bits_of<T>) : bits_of<T>); }
template <class T> inline if_integer<T> ctz(T v) { return T(v ? __builtin_ctzll((unsigned long long)std::make_unsigned_t<T>(v)) : bits_of<T>); }
template <class T> inline if_integer<T> rotate(T v, T n) { using U = std::make_unsigned_t<T>; const int k = int(U(n) % bits_of<T>); return T(k ? U(U(v) << k | U(v) >> (bits_of<T> - k)) : U(v)); }
template <class T> inline if_integer<T> reverse_bits(T v) { T r = 0; for (int i = 0; i < bits_of<T>; i++) r = T(r << 1 | (v >> i & 1)); return r; }
template <class T> inline if_integer<T> extract_bits(T v, uint offset, uint count) {
  if (count == 0) return 0;
  using U = std::make_unsigned_t<T>;
  const U up = U(U(v) << (bits_of<T> - offset - count));
  return T(T(up) >> (bits_of<T> - count));
}
template <class T> inline if_integer<T> insert_bits(T base, T v, uint offset, uint count) {
  if (count == 0) return base;
  const T mask = T((~std::make_unsigned_t<T>(0) >> (bits_of<T> - count)) << offset);
  return T((base & ~mask) | (T(v << offset) & mask));
}
template <class T> inline if_integer<T> mulhi(T a, T b) { return T(__int128(a) * __int128(b) >> bits_of<T>); }
template <class T> inline if_integer<T> mad24(T a, T b, T c) { return a * b + c; }
template <class T> inline if_integer<T> mul24(T a, T b) { return a * b; }
template <class T> inline if_integer<T> madhi(T a, T b, T c) { return T(mulhi(a, b) + c); }
template <class T> inline std::make_unsigned_t<T> absdiff(T a, T b) { return std::make_unsigned_t<T>(a < b ? b - a : a - b); }
template <class T> inline if_integer<T> addsat(T a, T b) { T r; return __builtin_add_overflow(a, b, &r) ? (std::is_signed_v<T> && b < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max()) : r; }
template <class T> inline if_integer<T> subsat(T a, T b) { T r; return __builtin_sub_overflow(a, b, &r) ? (std::is_signed_v<T> && b < 0 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min()) : r; }
template <int N> inline vec<uint, N> popcount(const vec<uint, N> &a) { return each<uint>([](uint x) { return popcount(x); }, a); }

// Packing.
inline float4 unpack_unorm4x8_to_float(uint v) { return float4(uchar4(uchar(v), uchar(v >> 8), uchar(v >> 16), uchar(v >> 24))) / 255.0f; }
} // namespace metal
