// The state of the one threadgroup that runs at a time, shared by the scheduler and the access checks of the run-time
// library. Kernels never see it.
#pragma once
#include "runtime.h"
#include <cstdarg>
#if !defined(__x86_64__) || defined(MSL_UCONTEXT)
#include <ucontext.h>
#endif

namespace msl {

constexpr unsigned THREADS = 1024, WIDTH = 32;
constexpr size_t STACK = 256 << 10, GUARD = 4 << 10;
// Threadgroup arrays lie far apart, so that an index past one's end meets nothing of another.
constexpr size_t ARRAY_SPAN = 64 << 10, ARRAYS = 96, GROUP_LIMIT = 32 << 10;
constexpr uint32_t ATOMIC = THREADS;
constexpr uint32_t CLOCK_END = (1u << 21) - 1;

enum Memory { DEVICE_MEMORY, GROUP_MEMORY_SPACE };

struct Fiber {
  void *sp;
#if !defined(__x86_64__) || defined(MSL_UCONTEXT)
  ucontext_t context;
#endif
  const char *waits; // the function it waits in
  const char *file;
  int line;
};
struct Simd {
  uint32_t present, ready, waiting, at_barrier, done;
  uint32_t phase; // of the next exchange to complete
  const char *name, *file;
  int line;
  uint32_t synced[2]; // the clock at its last barrier, for each memory
  Slot slots[2][WIDTH];
};
struct Array {
  uint32_t slot; // the declaration's number, or 0x10000 + the argument's index
  uint32_t bytes;
  const char *name;
};
struct Group {
  const Launch *launch;
  uint32_t id[3], threads, simds, current, finished, at_barrier;
  uint32_t ready_simds;
  uint32_t barrier_site;
  const char *barrier_file;
  int barrier_line;
  uint32_t clock, span_start, group_start, synced[2];
  uintptr_t stack_low; // of the running fiber
  bool running;
  uint64_t random;
  Binding *recent[64]; // by address, in steps shorter than a window; an empty one where there is none
  uint32_t narrays, group_bytes;
  Array arrays[ARRAYS];
  Simd simd[THREADS / WIDTH];
  Fiber fiber[THREADS], main;
  uint64_t reached[SITES / 64];
  Fault *fault;
  char *stacks, *arena;
  uint32_t *arena_cells; // four words for each byte of the first half of each span
  uint64_t arena_written[ARRAYS][GROUP_LIMIT / 64];
};
extern Group G __attribute__((visibility("hidden")));

struct Past { // a threadgroup that ran in this span
  uint32_t start; // the clock when it began
  uint32_t group[3];
  const char *name;
  uint64_t dispatch;
};
const Past *who_ran(uint32_t stamp);

[[noreturn]] void fault(uint32_t kind, int binding, int64_t offset, uint32_t size, bool write, const void *pc, const char *file, int line,
                        const char *text, ...) __attribute__((format(printf, 9, 10)));
enum Kind { LOAD, STORE, ATOMIC_LOAD, ATOMIC_STORE };

} // namespace msl
