// Barriers, simdgroup functions, simdgroup matrices and atomics. Every call knows its place in the source: lanes that meet in
// different places are a fault. Lanes that do not take part are a fault as well, though the device would go on.
#pragma once
#include "math.h"
#include "runtime.h"

namespace metal {
using msl::At;

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
// The pre-pass numbers the barriers and writes these for them.
inline void threadgroup_barrier_at(uint site, mem_flags f, At at = At::here()) { msl::msl_threadgroup_barrier(site, int(f), at.file, at.line); }
inline void simdgroup_barrier_at(uint site, mem_flags f, At at = At::here()) { msl::msl_simdgroup_barrier(site, int(f), at.file, at.line); }

// The types that every GPU takes in a simdgroup function: 8 to 32 bits, no bool, no bfloat.
template <class T> constexpr bool simd_type = (std::is_arithmetic_v<typename element<T>::type> || std::is_same_v<typename element<T>::type, half>) &&
                                              !std::is_same_v<typename element<T>::type, bool> && sizeof(typename element<T>::type) <= 4;
#define MSL_SIMD_TYPE static_assert(simd_type<T>, "simdgroup functions take numbers of 8 to 32 bits and vectors of them: no bool, bfloat or 64-bit type")

template <class T> MSL_RAW inline T slot_value(const msl::Slot &s) {
  T t;
  __builtin_memcpy((void *)&t, s.b, sizeof t);
  return t;
}
template <class T> MSL_RAW inline void set_slot(msl::Slot &s, const T &t) { __builtin_memcpy(s.b, (const void *)&t, sizeof t); }
template <class T> MSL_RAW __attribute__((noinline)) T lane_value(const char *name, T v, At at, int from, msl::Combine combine = nullptr) {
  uint32_t present;
  const msl::Slot *s = msl::msl_exchange(name, &v, sizeof v, combine, at.file, at.line, &present);
  return unsigned(from) < 32 && present >> from & 1 ? slot_value<T>(s[from]) : v;
}

// Folds all lanes' values in a tree, as a butterfly of shuffles would, and leaves the result in every slot.
template <class T, class F> MSL_RAW void fold(msl::Slot *s, uint32_t present) {
  T t[32];
  int n = 0;
  for (int l = 0; l < 32; l++)
    if (present >> l & 1) t[n++] = slot_value<T>(s[l]);
  for (; n > 1; n = (n + 1) / 2)
    for (int l = 0; l < n / 2; l++) t[l] = F::of(t[l], t[l + (n + 1) / 2]);
  for (int l = 0; l < 32; l++) set_slot(s[l], t[0]);
}
// Replaces each lane's value by the fold of those before it.
template <class T, class F, bool INCLUSIVE> MSL_RAW void scan(msl::Slot *s, uint32_t present) {
  T sum = F::template start<T>();
  for (int l = 0; l < 32; l++)
    if (present >> l & 1) {
      const T v = slot_value<T>(s[l]), next = F::of(sum, v);
      set_slot(s[l], INCLUSIVE ? next : sum);
      sum = next;
    }
}
struct Sum { template <class T> MSL_RAW static T of(T a, T b) { return T(a + b); } template <class T> MSL_RAW static T start() { return T(0); } };
struct Product { template <class T> MSL_RAW static T of(T a, T b) { return T(a * b); } template <class T> MSL_RAW static T start() { return T(1); } };
struct Larger { template <class T> MSL_RAW static T of(T a, T b) { return max(a, b); } };
struct Smaller { template <class T> MSL_RAW static T of(T a, T b) { return min(a, b); } };
struct And { template <class T> MSL_RAW static T of(T a, T b) { return T(a & b); } };
struct Or { template <class T> MSL_RAW static T of(T a, T b) { return T(a | b); } };
struct Xor { template <class T> MSL_RAW static T of(T a, T b) { return T(a ^ b); } };

#define MSL_FOLD(f, F) template <class T> inline T f(T v, At at = At::here()) { MSL_SIMD_TYPE; return lane_value<T>(#f, v, at, int(msl::msl_lane()), fold<T, F>); }
MSL_FOLD(simd_sum, Sum) MSL_FOLD(simd_product, Product) MSL_FOLD(simd_max, Larger) MSL_FOLD(simd_min, Smaller)
MSL_FOLD(simd_and, And) MSL_FOLD(simd_or, Or) MSL_FOLD(simd_xor, Xor)
#undef MSL_FOLD
#define MSL_SCAN(f, F, inclusive) template <class T> inline T f(T v, At at = At::here()) { MSL_SIMD_TYPE; return lane_value<T>(#f, v, at, int(msl::msl_lane()), scan<T, F, inclusive>); }
MSL_SCAN(simd_prefix_exclusive_sum, Sum, false) MSL_SCAN(simd_prefix_inclusive_sum, Sum, true)
MSL_SCAN(simd_prefix_exclusive_product, Product, false) MSL_SCAN(simd_prefix_inclusive_product, Product, true)
#undef MSL_SCAN
#define MSL_MOVE(f, from) template <class T> inline T f(T v, ushort k, At at = At::here()) { MSL_SIMD_TYPE; return lane_value<T>(#f, v, at, from); }
MSL_MOVE(simd_shuffle, k)
#undef MSL_MOVE
// The others need the same argument in all lanes; it travels behind the value.
MSL_RAW inline void check_uniform(msl::Slot *s, uint32_t present) {
  ushort first = 0, seen = 0;
  for (int l = 0; l < 32; l++) {
    ushort k;
    __builtin_memcpy(&k, s[l].b + 24, sizeof k);
    if (!(present >> l & 1)) continue;
    if (seen && k != first) seen = 2;
    else if (!seen) first = k, seen = 1;
    if (seen == 2) break;
  }
  const ushort bad = seen == 2;
  for (int l = 0; l < 32; l++) __builtin_memcpy(s[l].b + 26, &bad, sizeof bad);
}
template <class T> MSL_RAW __attribute__((noinline)) T moved(const char *name, T v, ushort k, At at, int from) {
  unsigned char payload[28] = {};
  static_assert(sizeof v <= 24, "a value of a simdgroup function has four components at most");
  __builtin_memcpy(payload, (const void *)&v, sizeof v), __builtin_memcpy(payload + 24, &k, sizeof k);
  uint32_t present;
  const msl::Slot *s = msl::msl_exchange(name, payload, sizeof payload, check_uniform, at.file, at.line, &present);
  if (s[msl::msl_lane()].b[26]) msl::msl_not_uniform(name, at.file, at.line);
  return unsigned(from) < 32 && present >> from & 1 ? slot_value<T>(s[from]) : v;
}
#define MSL_MOVE(f, from) template <class T> inline T f(T v, ushort k, At at = At::here()) { MSL_SIMD_TYPE; return moved<T>(#f, v, k, at, from); }
MSL_MOVE(simd_broadcast, k) MSL_MOVE(simd_shuffle_xor, int(msl::msl_lane()) ^ k)
MSL_MOVE(simd_shuffle_down, int(msl::msl_lane()) + k) MSL_MOVE(simd_shuffle_up, int(msl::msl_lane()) - k)
MSL_MOVE(simd_shuffle_rotate_down, (int(msl::msl_lane()) + k) & 31) MSL_MOVE(simd_shuffle_rotate_up, (int(msl::msl_lane()) - k) & 31)
#undef MSL_MOVE
template <class T> inline T simd_broadcast_first(T v, At at = At::here()) { MSL_SIMD_TYPE; return lane_value<T>("simd_broadcast_first", v, at, 0); }
template <class T> inline T simd_shuffle_and_fill_down(T v, T fill, ushort k, At at = At::here()) {
  MSL_SIMD_TYPE;
  const int from = int(msl::msl_lane()) + k;
  const T near = lane_value<T>("simd_shuffle_and_fill_down", v, at, from), far = lane_value<T>("simd_shuffle_and_fill_down", fill, at, from & 31);
  return from < 32 ? near : far;
}
template <class T> inline T simd_shuffle_and_fill_up(T v, T fill, ushort k, At at = At::here()) {
  MSL_SIMD_TYPE;
  const int from = int(msl::msl_lane()) - k;
  const T near = lane_value<T>("simd_shuffle_and_fill_up", v, at, from), far = lane_value<T>("simd_shuffle_and_fill_up", fill, at, from & 31);
  return from >= 0 ? near : far;
}

struct simd_vote {
  using vote_t = ulong;
  vote_t bits;
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xffffffffu; }
  bool any() const { return bits != 0; }
};
MSL_RAW inline void ballot_bits(msl::Slot *s, uint32_t present) {
  uint bits = 0;
  for (int l = 0; l < 32; l++)
    if (present >> l & 1 && slot_value<uint>(s[l])) bits |= 1u << l;
  for (int l = 0; l < 32; l++) set_slot(s[l], bits);
}
inline uint ballot(const char *name, bool v, At at) { return lane_value<uint>(name, v, at, int(msl::msl_lane()), ballot_bits); }
inline simd_vote simd_ballot(bool v, At at = At::here()) { return {ballot("simd_ballot", v, at)}; }
inline bool simd_any(bool v, At at = At::here()) { return ballot("simd_any", v, at) != 0; }
inline bool simd_all(bool v, At at = At::here()) { return ballot("simd_all", !v, at) == 0; }
inline bool simd_is_first() { return msl::msl_lane() == 0; }
inline simd_vote simd_active_threads_mask(At at = At::here()) { return {ballot("simd_active_threads_mask", true, at)}; }

// 8x8 matrices: each lane holds two neighbours of one row, laid out as on the devices so far.
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup matrices are 8x8");
  static_assert(is_real<T>, "simdgroup matrices hold half, bfloat or float");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const int r = row(msl::msl_lane()), c = col(msl::msl_lane());
    e.d[0] = r == c ? diagonal : T(0), e.d[1] = r == c + 1 ? diagonal : T(0);
  }
  vec<T, 2> &thread_elements() { return e; }
  const vec<T, 2> &thread_elements() const { return e; }
  static int row(uint l) { return int((l / 4 & 4) + l / 2 % 4); }
  static int col(uint l) { return int((l / 4 & 2) * 2 + l % 2 * 2); }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <class T> using matrix8 = simdgroup_matrix<T, 8, 8>;
#define MSL_PLACED inline __attribute__((always_inline)) // so that an access has the caller's line

template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) { simdgroup_matrix<T, R, C> m; m.e = vec<T, 2>(v); return m; }
template <class T> inline matrix8<T> make_diagonal_simdgroup_matrix(T v) { return matrix8<T>(v); }
template <class T, class U> MSL_PLACED void simdgroup_load(matrix8<T> &m, const U *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transpose = false, At at = At::here()) {
  static_assert(std::is_same_v<T, std::remove_cv_t<U>>, "simdgroup_load needs a pointer to the matrix's own type");
  const ulong r = ulong(m.row(msl::msl_lane())), c = ulong(m.col(msl::msl_lane()));
  for (ulong i = 0; i < 2; i++) m.e.d[i] = transpose ? p[(origin.y + c + i) * stride + origin.x + r] : p[(origin.y + r) * stride + origin.x + c + i];
  lane_value<uint>("simdgroup_load", 0, at, 0);
}
template <class T, class U> MSL_PLACED void simdgroup_store(const matrix8<T> &m, U *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transpose = false, At at = At::here()) {
  static_assert(std::is_same_v<T, U>, "simdgroup_store needs a pointer to the matrix's own type");
  const ulong r = ulong(m.row(msl::msl_lane())), c = ulong(m.col(msl::msl_lane()));
  for (ulong i = 0; i < 2; i++) (transpose ? p[(origin.y + c + i) * stride + origin.x + r] : p[(origin.y + r) * stride + origin.x + c + i]) = m.e.d[i];
  lane_value<uint>("simdgroup_store", 0, at, 0);
}

template <class A, class B, class C> struct Operands { vec<A, 2> a; vec<B, 2> b; vec<C, 2> c; };
// The last lane to arrive multiplies for all: sums in float, inner index ascending.
template <class D, class A, class B, class C> MSL_RAW void multiply(msl::Slot *s, uint32_t) {
  float a[8][8], b[8][8];
  Operands<A, B, C> o[32];
  for (uint l = 0; l < 32; l++) {
    o[l] = slot_value<Operands<A, B, C>>(s[l]);
    const int r = matrix8<D>::row(l), c = matrix8<D>::col(l);
    for (int i = 0; i < 2; i++) a[r][c + i] = float(o[l].a.d[i]), b[r][c + i] = float(o[l].b.d[i]);
  }
  for (uint l = 0; l < 32; l++) {
    const int r = matrix8<D>::row(l), c = matrix8<D>::col(l);
    vec<D, 2> d;
    for (int i = 0; i < 2; i++) {
      float sum = float(o[l].c.d[i]);
      for (int k = 0; k < 8; k++) sum = __builtin_fmaf(a[r][k], b[k][c + i], sum);
      d.d[i] = D(sum);
    }
    set_slot(s[l], d);
  }
}
template <class D, class A, class B, class C> MSL_RAW __attribute__((noinline)) void multiply_at(matrix8<D> &d, const matrix8<A> &a, const matrix8<B> &b, const matrix8<C> &c, At at, const char *name) {
  const Operands<A, B, C> o{a.e, b.e, c.e};
  const msl::Slot *s = msl::msl_exchange(name, &o, sizeof o, multiply<D, A, B, C>, at.file, at.line, nullptr);
  d.e = slot_value<vec<D, 2>>(s[msl::msl_lane()]);
}
template <class D, class A, class B, class C> inline void simdgroup_multiply_accumulate(matrix8<D> &d, const matrix8<A> &a, const matrix8<B> &b, const matrix8<C> &c, At at = At::here()) {
  multiply_at(d, a, b, c, at, "simdgroup_multiply_accumulate");
}
template <class D, class A, class B> inline void simdgroup_multiply(matrix8<D> &d, const matrix8<A> &a, const matrix8<B> &b, At at = At::here()) {
  const matrix8<D> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  multiply_at(d, a, b, zero, at, "simdgroup_multiply");
}

// Atomics. One thread runs at a time, so a load and a store are one step.
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic {
  static_assert(sizeof(T) == 4, "atomics of 32 bits only");
  T value;
};
template <> struct atomic<bool> { uint value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
template <class T> struct itself { using type = T; };
template <class T> using exactly = typename itself<T>::type;
#define MSL_PC __builtin_return_address(0)
#define MSL_ATOMIC MSL_RAW inline __attribute__((noinline))
template <class T> MSL_RAW inline T from_bits(uint u) { if constexpr (std::is_same_v<T, bool>) return u != 0; else { T t; __builtin_memcpy(&t, &u, 4); return t; } }
template <class T> MSL_RAW inline uint to_bits(T t) { if constexpr (std::is_same_v<T, bool>) return t; else { uint u; __builtin_memcpy(&u, &t, 4); return u; } }
template <class T> MSL_ATOMIC T atomic_load_explicit(const volatile atomic<T> *p, memory_order) { return from_bits<T>(msl::msl_atomic_load(p, MSL_PC)); }
template <class T> MSL_ATOMIC void atomic_store_explicit(volatile atomic<T> *p, exactly<T> v, memory_order) { msl::msl_atomic_store(p, to_bits<T>(v), MSL_PC); }
#define MSL_FETCH(f, e)                                                                                  \
  template <class T> MSL_ATOMIC T f(volatile atomic<T> *p, exactly<T> v, memory_order) {                 \
    const T old = from_bits<T>(msl::msl_atomic_load(p, MSL_PC));                                         \
    msl::msl_atomic_store(p, to_bits<T>(T(e)), MSL_PC);                                                  \
    return old;                                                                                          \
  }
MSL_FETCH(atomic_exchange_explicit, v) MSL_FETCH(atomic_fetch_add_explicit, old + v) MSL_FETCH(atomic_fetch_sub_explicit, old - v)
MSL_FETCH(atomic_fetch_and_explicit, old & v) MSL_FETCH(atomic_fetch_or_explicit, old | v) MSL_FETCH(atomic_fetch_xor_explicit, old ^ v)
MSL_FETCH(atomic_fetch_max_explicit, max(old, v)) MSL_FETCH(atomic_fetch_min_explicit, min(old, v))
#undef MSL_FETCH
template <class T> MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *p, T *expected, exactly<T> v, memory_order, memory_order) {
  const uint old = msl::msl_atomic_load(p, MSL_PC);
  if (old != to_bits<T>(*expected)) return *expected = from_bits<T>(old), false;
  msl::msl_atomic_store(p, to_bits<T>(v), MSL_PC);
  return true;
}
} // namespace metal
