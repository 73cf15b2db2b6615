// Judges every load and store of a kernel. The compiler's own instrumentation (thread and undefined-behaviour sanitizers)
// calls in here before each access; the sanitizers' libraries are not linked. Knows nothing of scheduling.
#include "state.h"
#include <cstdio>
#include <cstring>

namespace msl {

typedef uint32_t Cell __attribute__((vector_size(16))); // last write, and three reads, of one byte
enum { WRITE = 0, READ = 1 };

static inline uint32_t thread_of(uint32_t record) { return record & (2 * THREADS - 1); }
static inline uint32_t stamp_of(uint32_t record) { return record >> 11; }

// Whether nothing orders the recorded access before the running thread's. 2: it was in another threadgroup.
static inline int unordered(uint32_t record, Memory memory) {
  const uint32_t stamp = stamp_of(record), thread = thread_of(record);
  if (stamp < G.span_start || G.clock == CLOCK_END) return 0;
  if (stamp < G.group_start) return memory == DEVICE_MEMORY ? 2 : 0;
  if (thread == G.current) return 0;
  if (thread != ATOMIC && thread / WIDTH == G.current / WIDTH) return stamp >= G.simd[thread / WIDTH].synced[memory];
  return stamp >= G.synced[memory];
}

struct Clash { int how; uint32_t record; bool was_write; };

static inline Clash touch(Cell &c, Kind kind, Memory memory) {
  const bool atomic = kind >= ATOMIC_LOAD, store = kind == STORE || kind == ATOMIC_STORE;
  const uint32_t mine = G.clock << 11 | (atomic ? ATOMIC : G.current);
  if (!(atomic && thread_of(c[WRITE]) == ATOMIC))
    if (const int how = unordered(c[WRITE], memory)) return {how, c[WRITE], true};
  if (store) {
    for (int r = READ; r < 4; r++) {
      if (atomic && thread_of(c[r]) == ATOMIC) continue;
      if (const int how = unordered(c[r], memory)) return {how, c[r], false};
    }
    // An atomic store after the same thread's plain one leaves that for others to clash with.
    const bool hides = atomic && thread_of(c[WRITE]) == G.current && stamp_of(c[WRITE]) >= G.synced[memory];
    if (!hides) c[WRITE] = mine;
    return {0, 0, false};
  }
  int spare = 0;
  for (int r = READ; r < 4; r++) {
    if (c[r] == mine) return {0, 0, false};
    // A record that is ordered before this access can only clash with what this one clashes with too.
    if (!spare && !unordered(c[r], memory)) spare = r;
  }
  const auto simd = [](uint32_t record) { return thread_of(record) / WIDTH; };
  if (spare) c[spare] = mine;
  else if (simd(mine) != simd(c[1]) && simd(c[3]) == simd(c[1])) c[3] = mine; // keep readers of two simdgroups
  return {0, 0, false};
}

static inline bool same(const Cell &a, const Cell &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// Touches the cells of `n` bytes; four that hold the same are done as one.
static inline Clash touch_range(uint32_t *cells, size_t at, size_t n, Kind kind, Memory memory) {
  Cell *c = reinterpret_cast<Cell *>(cells) + at;
  while (n) {
    size_t k = n >= 4 && same(c[0], c[1]) && same(c[0], c[2]) && same(c[0], c[3]) ? 4 : n >= 2 && same(c[0], c[1]) ? 2 : 1;
    if (const Clash clash = touch(c[0], kind, memory); clash.how) return clash;
    for (size_t i = 1; i < k; i++) c[i] = c[0];
    c += k, n -= k;
  }
  return {0, 0, false};
}

// Marks or tests `n` bits from `at` on. Nearly all accesses fit a word; the sets have a word to spare at their end.
static inline uint64_t low_bits(size_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
static inline void set_bits(uint64_t *bits, uint64_t at, size_t n) {
  for (;;) {
    const unsigned shift = at & 63;
    bits[at >> 6] |= low_bits(n) << shift;
    if (__builtin_expect(shift + n <= 64, 1)) return;
    at += 64 - shift, n -= 64 - shift;
  }
}
static inline bool all_bits(const uint64_t *bits, uint64_t at, size_t n) {
  for (;;) {
    const unsigned shift = at & 63;
    const uint64_t mask = low_bits(n) << shift;
    if ((bits[at >> 6] & mask) != mask) return false;
    if (__builtin_expect(shift + n <= 64, 1)) return true;
    at += 64 - shift, n -= 64 - shift;
  }
}

static const char *verb(Kind k) { return k == LOAD ? "read" : k == STORE ? "write" : "atomic access"; }

[[noreturn]] __attribute__((noinline, cold)) static void clash_fault(const Clash &c, int binding, int64_t offset, size_t n, Kind kind, const void *pc, const char *where) {
  const bool store = kind == STORE || kind == ATOMIC_STORE;
  const char *other = c.was_write ? "written" : "read";
  if (c.how == 2) {
    const Past *p = who_ran(stamp_of(c.record));
    const Past unknown = {0, {0, 0, 0}, "?", 0};
    if (!p) p = &unknown;
    fault(CONFLICT, binding, offset, uint32_t(n), store, pc, nullptr, 0,
          "%s of bytes that threadgroup [%u, %u, %u] of dispatch %llu (kernel %s) has %s, with no barrier between", verb(kind), p->group[0], p->group[1], p->group[2], (unsigned long long)p->dispatch, p->name, other);
  }
  const uint32_t t = thread_of(c.record);
  char who[32] = "an atomic access";
  if (t != ATOMIC) std::snprintf(who, sizeof who, "thread %u", t);
  fault(RACE, binding, offset, uint32_t(n), store, pc, nullptr, 0, "%s of %s that %s has %s since the last barrier that orders the two", verb(kind), where, who, other);
}

__attribute__((noinline)) static void group_access(uintptr_t a, size_t n, Kind kind, const void *pc) {
  const size_t at = a - uintptr_t(G.arena), k = at / ARRAY_SPAN, off = at % ARRAY_SPAN;
  const bool store = kind == STORE || kind == ATOMIC_STORE;
  if (k >= G.narrays || off + n > G.arrays[k].bytes)
    fault(OUT_OF_BOUNDS, -1, int64_t(off), uint32_t(n), store, pc, nullptr, 0, "%s of %zu bytes at offset %zu of threadgroup memory '%s', which has %u bytes", verb(kind), n, off, k < G.narrays ? G.arrays[k].name : "?", k < G.narrays ? G.arrays[k].bytes : 0);
  if (store) set_bits(G.arena_written[k], off, n);
  else if (!all_bits(G.arena_written[k], off, n))
    fault(UNWRITTEN, -1, int64_t(off), uint32_t(n), false, pc, nullptr, 0, "%s of %zu bytes at offset %zu of threadgroup memory '%s', which no thread of this threadgroup has written", verb(kind), n, off, G.arrays[k].name);
  char where[96];
  const Clash c = touch_range(G.arena_cells, k * GROUP_LIMIT + off, n, kind, GROUP_MEMORY_SPACE);
  if (!c.how) return;
  std::snprintf(where, sizeof where, "offset %zu of threadgroup memory '%s'", off, G.arrays[k].name);
  clash_fault(c, -1, int64_t(off), n, kind, pc, where);
}

__attribute__((noinline)) static Binding *find(uintptr_t a) {
  for (uint32_t i = 0; i < G.launch->nbindings; i++) {
    Binding *b = &G.launch->bindings[i];
    if (a - b->window < b->window_len) return G.recent[a >> 34 & 63] = b;
  }
  return nullptr;
}

__attribute__((noinline, cold)) static void stray(uintptr_t a, size_t n, Kind kind, const void *pc) {
  const bool store = kind == STORE || kind == ATOMIC_STORE;
  if (a >= G.launch->image_low && a + n <= G.launch->image_high) {
    if (!store) return;
    fault(READ_ONLY_WRITE, -1, 0, uint32_t(n), true, pc, nullptr, 0, "write to program-scope data, which is constant");
  }
  if (a - uintptr_t(G.stacks) < STACK * THREADS)
    fault(OUT_OF_BOUNDS, -1, 0, uint32_t(n), store, pc, nullptr, 0, "%s of thread memory that belongs to thread %zu", verb(kind), size_t((a - uintptr_t(G.stacks)) / STACK));
  fault(OUT_OF_BOUNDS, -1, 0, uint32_t(n), store, pc, nullptr, 0, "%s of %zu bytes at address %#zx, which is in no bound buffer", verb(kind), n, size_t(a));
}

__attribute__((noinline)) static void dispute(const Binding &b, uint64_t off, size_t n, Kind kind, const void *pc) {
  const Clash c = touch_range(b.cells, b.in_buffer + off, n, kind, DEVICE_MEMORY);
  if (c.how) clash_fault(c, int(&b - G.launch->bindings), int64_t(off), n, kind, pc, "device memory");
}

[[noreturn]] __attribute__((noinline, cold)) static void outside(const Binding &b, uint64_t off, size_t n, Kind kind, const void *pc) {
  fault(OUT_OF_BOUNDS, int(&b - G.launch->bindings), int64_t(off), uint32_t(n), kind == STORE || kind == ATOMIC_STORE, pc, nullptr, 0, "%s of %zu bytes at offset %lld of a range of %llu bytes", verb(kind), n, (long long)off, (unsigned long long)b.len);
}
[[noreturn]] __attribute__((noinline, cold)) static void refused(const Binding &b, uint64_t off, size_t n, Kind kind, const void *pc) {
  const int index = int(&b - G.launch->bindings);
  if (kind == STORE || kind == ATOMIC_STORE) fault(READ_ONLY_WRITE, index, int64_t(off), uint32_t(n), true, pc, nullptr, 0, "write to an argument that is bound for reading");
  fault(UNWRITTEN, index, int64_t(off), uint32_t(n), false, pc, nullptr, 0, "%s of %zu bytes at offset %lld that were never written", verb(kind), n, (long long)off);
}

// Inlined into each entry below, where size and kind are constants: most of the time of a run goes by here.
static inline __attribute__((always_inline)) void judge(uintptr_t a, size_t n, Kind kind, const void *pc) {
  if (!G.running || a - G.stack_low < STACK || n == 0) return;
  if (a - uintptr_t(G.arena) < ARRAY_SPAN * ARRAYS) return group_access(a, n, kind, pc);
  Binding *b = G.recent[a >> 34 & 63];
  if (__builtin_expect(a - b->window >= b->window_len, 0) && !(b = find(a))) return stray(a, n, kind, pc);
  const uint64_t off = a - b->low;
  if (__builtin_expect(off >= b->len || n > b->len - off, 0)) outside(*b, off, n, kind, pc);
  if (kind == STORE || kind == ATOMIC_STORE) {
    if (__builtin_expect(!b->writable, 0)) refused(*b, off, n, kind, pc);
    b->stores++, b->store_bytes += n;
    set_bits(b->write_set, off, n);
    if (b->written) set_bits(b->written, b->in_buffer + off, n);
  } else {
    b->loads++, b->load_bytes += n;
    set_bits(b->read_set, off, n);
    if (b->written && __builtin_expect(!all_bits(b->written, b->in_buffer + off, n), 0)) refused(*b, off, n, kind, pc);
  }
  if (b->cells) dispute(*b, off, n, kind, pc);
}
static void access(uintptr_t a, size_t n, Kind kind, const void *pc) { judge(a, n, kind, pc); }

extern "C" void *msl_threadgroup_array(uint32_t slot, uint64_t bytes, const char *name, const char *file, int line) {
  uint32_t k = 0;
  while (k < G.narrays && G.arrays[k].slot != slot) k++;
  if (k == G.narrays) {
    // Each array starts on 16 bytes, as the device's own do.
    const uint64_t padded = (bytes + 15) & ~15ull;
    if (k == ARRAYS || G.group_bytes + padded > GROUP_LIMIT)
      fault(GROUP_MEMORY, -1, 0, 0, false, nullptr, file, line, "threadgroup memory '%s' of %llu bytes comes on top of %u; the limit is %zu bytes", name, (unsigned long long)bytes, G.group_bytes, GROUP_LIMIT);
    G.arrays[k] = {slot, uint32_t(bytes), name};
    G.narrays++;
    G.group_bytes += uint32_t(padded);
  }
  return G.arena + k * ARRAY_SPAN;
}
extern "C" void *msl_threadgroup_argument(uint32_t index) {
  return msl_threadgroup_array(0x10000 + index, G.launch->group_bytes[index], "an argument", nullptr, 0);
}

extern "C" uint32_t msl_atomic_load(const volatile void *p, const void *pc) {
  if (uintptr_t(p) % 4) fault(MISALIGNED, -1, 0, 4, false, pc, nullptr, 0, "atomic access at an address that is not a multiple of 4");
  if (G.launch->checks) access(uintptr_t(p), 4, ATOMIC_LOAD, pc);
  return *static_cast<const volatile uint32_t *>(p);
}
extern "C" void msl_atomic_store(volatile void *p, uint32_t v, const void *pc) {
  if (uintptr_t(p) % 4) fault(MISALIGNED, -1, 0, 4, true, pc, nullptr, 0, "atomic access at an address that is not a multiple of 4");
  if (G.launch->checks) access(uintptr_t(p), 4, ATOMIC_STORE, pc);
  *static_cast<volatile uint32_t *>(p) = v;
}

} // namespace msl

using namespace msl;
#define PC __builtin_return_address(0)
extern "C" {
#define SIZED(n)                                                                         \
  void __tsan_read##n(void *p) { judge(uintptr_t(p), n, LOAD, PC); }                    \
  void __tsan_write##n(void *p) { judge(uintptr_t(p), n, STORE, PC); }                  \
  void __tsan_unaligned_read##n(void *p) { judge(uintptr_t(p), n, LOAD, PC); }          \
  void __tsan_unaligned_write##n(void *p) { judge(uintptr_t(p), n, STORE, PC); }        \
  void __tsan_volatile_read##n(void *p) { judge(uintptr_t(p), n, LOAD, PC); }           \
  void __tsan_volatile_write##n(void *p) { judge(uintptr_t(p), n, STORE, PC); }         \
  void __tsan_read_write##n(void *p) { judge(uintptr_t(p), n, LOAD, PC); judge(uintptr_t(p), n, STORE, PC); } \
  void __tsan_unaligned_read_write##n(void *p) { judge(uintptr_t(p), n, LOAD, PC); judge(uintptr_t(p), n, STORE, PC); }
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
#undef SIZED
void __tsan_read_range(void *p, unsigned long n) { access(uintptr_t(p), n, LOAD, PC); }
void __tsan_write_range(void *p, unsigned long n) { access(uintptr_t(p), n, STORE, PC); }
void *__tsan_memcpy(void *d, const void *s, unsigned long n) {
  access(uintptr_t(s), n, LOAD, PC), access(uintptr_t(d), n, STORE, PC);
  return std::memcpy(d, s, n);
}
void *__tsan_memmove(void *d, const void *s, unsigned long n) {
  access(uintptr_t(s), n, LOAD, PC), access(uintptr_t(d), n, STORE, PC);
  return std::memmove(d, s, n);
}
void *__tsan_memset(void *d, int v, unsigned long n) {
  access(uintptr_t(d), n, STORE, PC);
  return std::memset(d, v, n);
}
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

// The undefined-behaviour sanitizer's calls; each gets a record that the compiler wrote for the place.
struct Location { const char *file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };
struct Mismatch { Location at; const TypeName *type; uint8_t log_align, kind; };
struct BadIndex { Location at; const TypeName *array, *index; };
struct Overflow { Location at; const TypeName *type; };

void __ubsan_handle_type_mismatch_v1(const Mismatch *m, uintptr_t p) {
  if (!G.running) return;
  int binding = -1;
  int64_t offset = 0;
  if (const Binding *b = find(p)) binding = int(b - G.launch->bindings), offset = int64_t(p - b->low);
  static const char *const KINDS[] = {"load", "store", "reference", "member access", "member call", "constructor call", "cast", "cast", "cast", "cast"};
  fault(MISALIGNED, binding, offset, 0, m->kind == 1, PC, m->at.file, int(m->at.line), "%s of type %s, which needs an address that is a multiple of %u", m->kind < 10 ? KINDS[m->kind] : "access", m->type->name, 1u << m->log_align);
}
void __ubsan_handle_out_of_bounds(const BadIndex *m, uintptr_t index) {
  if (!G.running) return;
  fault(ARRAY_INDEX, -1, int64_t(index), 0, false, PC, m->at.file, int(m->at.line), "index %lld of an array of type %s", (long long)int(index), m->array->name);
}
void __ubsan_handle_divrem_overflow(const Overflow *m, uintptr_t, uintptr_t) {
  if (!G.running) return;
  fault(DIVISION, -1, 0, 0, false, PC, m->at.file, int(m->at.line), "integer division by zero, or overflow, in type %s", m->type->name);
}
}
