// Runs one threadgroup: each thread is a fiber with its own stack, and barriers and simdgroup functions are the only points
// where another one may go on. Knows nothing of what the threads access.
#include "state.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <sys/mman.h>
#include <vector>

namespace msl {
Group G;
static std::vector<Past> past;

const Past *who_ran(uint32_t stamp) {
  const auto after = std::upper_bound(past.begin(), past.end(), stamp, [](uint32_t s, const Past &p) { return s < p.start; });
  return after == past.begin() ? nullptr : &after[-1];
}

#if defined(__x86_64__) && !defined(MSL_UCONTEXT)
// Saves the callee-saved registers on the old stack and takes them from the new one.
extern "C" void msl_switch_stack(void **save, void *load) __attribute__((visibility("hidden")));
asm(R"(
.text
.p2align 4
.hidden msl_switch_stack
.globl msl_switch_stack
.type msl_switch_stack,@function
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch_stack,.-msl_switch_stack
)");
static inline void switch_to(Fiber &from, Fiber &to) { msl_switch_stack(&from.sp, to.sp); }
#else
static inline void switch_to(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }
#endif

static inline char *stack_of(unsigned i) { return G.stacks + size_t(i) * STACK; }

static inline void resume(unsigned i, Fiber &from) {
  G.current = i;
  G.stack_low = uintptr_t(stack_of(i));
  if (&from != &G.fiber[i]) switch_to(from, G.fiber[i]);
}

[[noreturn]] static void leave(Fiber &from) {
  G.running = false;
  switch_to(from, G.main);
  __builtin_unreachable();
}

void fault(uint32_t kind, int binding, int64_t offset, uint32_t size, bool write, const void *pc, const char *file, int line, const char *text, ...) {
  Fault &f = *G.fault;
  f.kind = kind, f.binding = binding, f.offset = offset, f.size = size, f.write = write, f.thread = G.current;
  std::memcpy(f.group, G.id, sizeof f.group);
  f.pc = uintptr_t(pc), f.line = line;
  std::snprintf(f.file, sizeof f.file, "%s", file ? file : "");
  va_list list;
  va_start(list, text);
  std::vsnprintf(f.text, sizeof f.text, text, list);
  va_end(list);
  leave(G.fiber[G.current]);
}

static inline uint32_t draw() {
  G.random ^= G.random << 13, G.random ^= G.random >> 7, G.random ^= G.random << 17;
  return uint32_t(G.random >> 20);
}
// A set bit of `mask`: the next one after `from`, round the word, or any.
static inline unsigned choose(uint32_t mask, unsigned from) {
  const unsigned r = (G.launch->order ? draw() : from + 1) & 31;
  const uint32_t turned = mask >> r | mask << (-r & 31);
  return (unsigned(__builtin_ctz(turned)) + r) & 31;
}

// Says how many threads wait where, for the report of a divergence.
static void describe_waiting(char *out, size_t room) {
  struct Where { const char *name, *file; int line; unsigned count, first; } where[8];
  unsigned n = 0;
  for (unsigned i = 0; i < G.threads; i++) {
    const Simd &s = G.simd[i / WIDTH];
    const Fiber &f = G.fiber[i];
    if (s.done >> (i % WIDTH) & 1 || (s.ready >> (i % WIDTH) & 1) || !f.waits) continue;
    unsigned k = 0;
    while (k < n && !(where[k].line == f.line && !std::strcmp(where[k].name, f.waits))) k++;
    if (k == n && n < 8) where[n++] = {f.waits, f.file, f.line, 0, i};
    if (k < 8) where[k].count++;
  }
  size_t at = 0;
  for (unsigned k = 0; k < n && at < room; k++)
    at += size_t(std::snprintf(out + at, room - at, "%s%u thread(s) (first %u) wait in %s at %s:%d", k ? "; " : "", where[k].count, where[k].first, where[k].name, where[k].file, where[k].line));
  if (G.finished && at < room) std::snprintf(out + at, room - at, "; %u have returned", G.finished);
}
[[noreturn]] static void divergent() {
  char text[400];
  describe_waiting(text, sizeof text);
  const Fiber *first = nullptr;
  for (unsigned i = 0; i < G.threads && !first; i++)
    if (!((G.simd[i / WIDTH].done | G.simd[i / WIDTH].ready) >> (i % WIDTH) & 1)) first = &G.fiber[i];
  fault(DIVERGENT, -1, 0, 0, false, nullptr, first ? first->file : nullptr, first ? first->line : 0, "not all threads reach it: %s", text);
}

// Goes on with a thread that can run; `from` is the fiber that gives way.
static void yield_from(Fiber &from) {
  unsigned s = G.current / WIDTH;
  if (!G.simd[s].ready) {
    if (!G.ready_simds) {
      if (G.finished == G.threads) leave(from);
      divergent();
    }
    s = choose(G.ready_simds, s);
  }
  const unsigned lane = choose(G.simd[s].ready, s == G.current / WIDTH ? G.current % WIDTH : 31);
  resume(s * WIDTH + lane, from);
}

static inline void block(const char *name, const char *file, int line) {
  const unsigned s = G.current / WIDTH;
  Fiber &f = G.fiber[G.current];
  f.waits = name, f.file = file, f.line = line;
  G.simd[s].ready &= ~(1u << G.current % WIDTH);
  if (!G.simd[s].ready) G.ready_simds &= ~(1u << s);
}

static inline void tick() {
  if (G.clock < CLOCK_END) G.clock++;
}

static inline void reach(uint32_t site) {
  if (site < SITES) G.reached[site / 64] |= 1ull << site % 64;
}

extern "C" const uint64_t *msl_reached() { return G.reached; }

extern "C" void msl_threadgroup_barrier(uint32_t site, int flags, const char *file, int line) {
  reach(site);
  if (int64_t(site) == G.launch->disabled_barrier) return;
  Simd &mine = G.simd[G.current / WIDTH];
  if (G.at_barrier == 0) G.barrier_site = site, G.barrier_file = file, G.barrier_line = line;
  block("threadgroup_barrier", file, line);
  mine.at_barrier |= 1u << G.current % WIDTH;
  if (G.barrier_site != site)
    fault(DIVERGENT, -1, 0, 0, false, nullptr, file, line, "thread %u is at this threadgroup_barrier while others wait at the one at %s:%d", G.current, G.barrier_file, G.barrier_line);
  if (G.finished) divergent();
  if (++G.at_barrier == G.threads) {
    G.at_barrier = 0;
    tick();
    for (unsigned m = 0; m < 2; m++)
      if (flags >> m & 1) G.synced[m] = G.clock;
    for (unsigned s = 0; s < G.simds; s++) {
      Simd &x = G.simd[s];
      x.ready = x.at_barrier, x.at_barrier = 0;
      G.ready_simds |= 1u << s;
      for (unsigned m = 0; m < 2; m++)
        if (flags >> m & 1) x.synced[m] = G.clock;
    }
  }
  yield_from(G.fiber[G.current]);
}

extern "C" const Slot *msl_exchange(const char *name, const void *v, uint32_t n, Combine combine, const char *file, int line, uint32_t *present) {
  Simd &s = G.simd[G.current / WIDTH];
  const uint32_t bit = 1u << G.current % WIDTH;
  Slot *slots = s.slots[s.phase];
  if (s.waiting == 0) s.name = name, s.file = file, s.line = line;
  std::memcpy(slots[G.current % WIDTH].b, v, n);
  s.waiting |= bit;
  block(name, file, line);
  if (s.line != line || std::strcmp(s.name, name) != 0)
    fault(DIVERGENT, -1, 0, 0, false, nullptr, file, line, "lane %u is in %s while lanes of its simdgroup wait in %s at %s:%d", G.current % WIDTH, name, s.name, s.file, s.line);
  if (s.done) divergent();
  if (present) *present = s.present;
  if (s.waiting == s.present) {
    if (combine) combine(slots, s.present);
    s.waiting = 0, s.ready = s.present, s.phase ^= 1;
    G.ready_simds |= 1u << (G.current / WIDTH);
  }
  yield_from(G.fiber[G.current]);
  return slots;
}

// Lanes that come out of a simdgroup barrier first have not been joined by all, so the last to arrive sets the clock.
static int joining;
static void joined(Slot *, uint32_t) {
  Simd &s = G.simd[G.current / WIDTH];
  tick();
  for (unsigned m = 0; m < 2; m++)
    if (joining >> m & 1) s.synced[m] = G.clock;
}
extern "C" void msl_simdgroup_barrier(uint32_t site, int flags, const char *file, int line) {
  reach(site);
  if (int64_t(site) == G.launch->disabled_barrier) return;
  joining = flags;
  msl_exchange("simdgroup_barrier", &flags, sizeof flags, joined, file, line, nullptr);
}

extern "C" void msl_not_uniform(const char *name, const char *file, int line) {
  fault(DIVERGENT, -1, 0, 0, false, nullptr, file, line, "%s with an argument that is not the same in all lanes", name);
}

extern "C" uint32_t msl_lane() { return G.current % WIDTH; }
extern "C" void msl_place(Place *p) {
  const uint32_t *z = G.launch->size, i = G.current;
  p->index = i, p->position[0] = i % z[0], p->position[1] = i / z[0] % z[1], p->position[2] = i / (z[0] * z[1]);
  std::memcpy(p->group, G.id, sizeof p->group);
}

static void body() {
  G.launch->thunk(G.launch);
  Simd &s = G.simd[G.current / WIDTH];
  Fiber &me = G.fiber[G.current];
  s.done |= 1u << G.current % WIDTH;
  G.finished++;
  block("its end", "", 0);
  if (s.waiting || G.at_barrier) divergent();
  yield_from(me);
  __builtin_unreachable();
}

static bool reserve() {
  if (G.stacks) return true;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *stacks = mmap(nullptr, STACK * THREADS, PROT_READ | PROT_WRITE, flags, -1, 0);
  void *arena = mmap(nullptr, ARRAY_SPAN * ARRAYS, PROT_READ | PROT_WRITE, flags, -1, 0);
  void *cells = mmap(nullptr, GROUP_LIMIT * ARRAYS * 16, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (stacks == MAP_FAILED || arena == MAP_FAILED || cells == MAP_FAILED) return false;
  for (unsigned i = 0; i < THREADS; i++) mprotect((char *)stacks + i * STACK, GUARD, PROT_NONE);
  G.stacks = (char *)stacks, G.arena = (char *)arena, G.arena_cells = (uint32_t *)cells;
  G.clock = 1;
  return true;
}

static void prepare_fiber(unsigned i) {
  Fiber &f = G.fiber[i];
  f.waits = nullptr;
  // Tops at different offsets, or all stacks would compete for the same lines of the cache.
  char *top = stack_of(i) + STACK - 64 - (i % 64) * 192;
#if defined(__x86_64__) && !defined(MSL_UCONTEXT)
  void **sp = (void **)(uintptr_t(top) & ~uintptr_t(15)) - 1; // as after a call: 8 below a multiple of 16
  *sp = nullptr;
  *--sp = (void *)body;
  f.sp = sp - 6;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack_of(i) + GUARD;
  f.context.uc_stack.ss_size = size_t(top - stack_of(i)) - GUARD;
  f.context.uc_link = nullptr;
  makecontext(&f.context, body, 0);
#endif
}

extern "C" int msl_run_group(const Launch *launch, const uint32_t group[3], uint64_t seed, Fault *out) {
  out->kind = NO_FAULT;
  if (!reserve()) {
    out->kind = GROUP_MEMORY;
    std::snprintf(out->text, sizeof out->text, "no address space for the stacks of the threads");
    return 1;
  }
  G.launch = launch, G.fault = out;
  std::memcpy(G.id, group, sizeof G.id);
  G.threads = launch->size[0] * launch->size[1] * launch->size[2], G.simds = (G.threads + WIDTH - 1) / WIDTH;
  G.finished = G.at_barrier = 0;
  std::memset(G.reached, 0, sizeof G.reached);
  G.random = seed | 1;
  tick();
  G.group_start = G.clock;
  past.push_back({G.clock, {group[0], group[1], group[2]}, launch->name, launch->dispatch});
  G.synced[0] = G.synced[1] = G.clock;
  G.ready_simds = G.simds == 32 ? ~0u : (1u << G.simds) - 1;
  for (unsigned s = 0; s < G.simds; s++) {
    Simd &x = G.simd[s];
    const unsigned n = G.threads - s * WIDTH;
    x.present = x.ready = n >= WIDTH ? ~0u : (1u << n) - 1;
    x.waiting = x.at_barrier = x.done = x.phase = 0;
    x.synced[0] = x.synced[1] = G.clock;
  }
  for (unsigned i = 0; i < G.threads; i++) prepare_fiber(i);
  for (unsigned a = 0; a < G.narrays; a++) std::memset(G.arena_written[a], 0, sizeof G.arena_written[a]);
  G.narrays = G.group_bytes = 0;
  static Binding nowhere;
  for (Binding *&b : G.recent) b = &nowhere;
  G.running = true;
  const unsigned s = choose(G.ready_simds, 31);
  resume(s * WIDTH + choose(G.simd[s].ready, 31), G.main);
  G.running = false;
  return out->kind != NO_FAULT;
}

extern "C" void msl_begin_span() {
  tick();
  past.clear();
  G.span_start = G.clock;
}
extern "C" int msl_clock_is_low() { return G.clock > CLOCK_END / 2; }
extern "C" void msl_reset_clock() {
  if (G.arena_cells) madvise(G.arena_cells, GROUP_LIMIT * ARRAYS * 16, MADV_DONTNEED);
  past.clear();
  G.clock = 1;
  G.span_start = 1;
}
extern "C" uint64_t msl_group_bytes() { return G.group_bytes; }

} // namespace msl
