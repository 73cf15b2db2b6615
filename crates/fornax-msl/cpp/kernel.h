// What the pre-pass's output needs besides the language: threadgroup arrays, function constants, and the table of kernels
// with each one's arguments. Included before every kernel source.
#pragma once
#include "simd.h"
#include <utility>

extern "C" char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));

namespace msl {

template <class T> MSL_RAW inline T &threadgroup_array(uint32_t slot, const char *name, At at = At::here()) {
  return *static_cast<T *>(msl_threadgroup_array(slot, sizeof(T), name, at.file, at.line));
}

enum AddressSpace : uint32_t { NO_SPACE, DEVICE_SPACE, CONSTANT_SPACE_OF, THREADGROUP_SPACE };
struct ArgSpec { // what the attributes and the address space of a parameter say
  const char *name, *type;
  Source source;
  uint32_t index;
  AddressSpace space;
  bool read_only;
  int32_t needs;
};

template <class P> MSL_RAW inline P argument(const ArgDesc &a, const Launch &l, const Place &p) {
  if constexpr (std::is_pointer_v<P>) {
    return P(a.source == BUFFER ? l.buffer[a.index] : msl_threadgroup_argument(a.index));
  } else if constexpr (std::is_reference_v<P>) {
    return *static_cast<std::remove_reference_t<P> *>(l.buffer[a.index]);
  } else {
    uint64_t v[3] = {0, 0, 0};
    const uint32_t threads = l.size[0] * l.size[1] * l.size[2];
    for (int i = 0; i < 3; i++) switch (a.source) {
      case POSITION_IN_GRID: v[i] = uint64_t(p.group[i]) * l.size[i] + p.position[i]; break;
      case GROUP_IN_GRID: v[i] = p.group[i]; break;
      case POSITION_IN_GROUP: v[i] = p.position[i]; break;
      case INDEX_IN_GROUP: v[i] = p.index; break;
      case LANE: v[i] = p.index % 32; break;
      case SIMDGROUP: v[i] = p.index / 32; break;
      case THREADS_PER_GROUP: v[i] = l.size[i]; break;
      case GROUPS_PER_GRID: v[i] = l.grid[i]; break;
      case THREADS_PER_GRID: v[i] = uint64_t(l.grid[i]) * l.size[i]; break;
      case SIMD_WIDTH: v[i] = 32; break;
      case SIMDGROUPS_PER_GROUP: v[i] = (threads + 31) / 32; break;
      default: break;
    }
    if constexpr (std::is_integral_v<P>) return P(v[0]);
    else {
      P r;
      for (int i = 0; i < metal::element<P>::count; i++) r.d[i] = typename metal::element<P>::type(v[i]);
      return r;
    }
  }
}

template <auto F> struct Entry;
template <class... P, void (*F)(P...)> struct Entry<F> {
  template <class Q> MSL_RAW static ArgDesc describe(const ArgSpec &s) {
    using T = std::remove_cv_t<std::remove_pointer_t<std::remove_reference_t<Q>>>;
    uint32_t flags = 0, size = 0, align = 1;
    if constexpr (std::is_pointer_v<Q>) flags |= POINTER;
    if constexpr (std::is_reference_v<Q>) flags |= REFERENCE;
    if (s.read_only || s.space == CONSTANT_SPACE_OF) flags |= READ_ONLY;
    if (s.space == CONSTANT_SPACE_OF) flags |= CONSTANT_SPACE;
    if constexpr (!std::is_void_v<T>) size = sizeof(T), align = alignof(T);
    return {s.name, s.type, s.source, s.index, flags, size, align, s.needs};
  }
  template <size_t... I> MSL_RAW static void call(const Launch *l, std::index_sequence<I...>) {
    void (*volatile f)(P...) = F;
    Place p;
    msl_place(&p);
    f(argument<P>(l->args[I], *l, p)...);
  }
  MSL_RAW static void thunk(const Launch *l) { call(l, std::index_sequence_for<P...>{}); }
  MSL_RAW static KernelDesc kernel(const char *name, const ArgSpec *specs, uint32_t n, uint32_t max_threads) {
    static ArgDesc args[sizeof...(P) + 1];
    uint32_t i = 0;
    if (n == sizeof...(P)) ((args[i] = describe<P>(specs[i]), i++), ...);
    return {name, thunk, args, i, max_threads};
  }
};

} // namespace msl

