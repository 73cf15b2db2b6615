// What the compiled kernels and the run-time library know of each other: the C boundary of the emulator. Plain data only;
// src/ffi.rs mirrors the structs that the host fills in. It must not know any Metal type.
#pragma once
#include <cstddef>
#include <cstdint>

namespace msl {

// Where a kernel argument comes from.
enum Source : uint32_t {
  BUFFER, THREADGROUP, POSITION_IN_GRID, GROUP_IN_GRID, POSITION_IN_GROUP, INDEX_IN_GROUP, LANE, SIMDGROUP,
  THREADS_PER_GROUP, GROUPS_PER_GRID, THREADS_PER_GRID, SIMD_WIDTH, SIMDGROUPS_PER_GROUP, GRID_ORIGIN,
};
enum ArgFlags : uint32_t { POINTER = 1, REFERENCE = 2, READ_ONLY = 4, CONSTANT_SPACE = 8 };

struct ArgDesc {
  const char *name, *type; // the type as the source spells it
  uint32_t source, index, flags, size, align;
  int32_t needs; // the function constant that must be true for the argument to exist, or -1
};

struct Binding { // one bound buffer range, or one setBytes copy
  uintptr_t window; // start of the address window that belongs to this binding alone
  uint64_t window_len;
  uintptr_t low; // the bytes that the kernel may touch
  uint64_t len;
  uint64_t in_buffer;  // `low` as an offset in the buffer
  uint64_t *written;   // a bit for each byte of the buffer that was ever written; null: all were
  uint32_t *cells;     // four words for each byte of the buffer; null: nothing can conflict here
  uint64_t *read_set, *write_set; // a bit for each byte of the range, of this dispatch
  uint32_t writable;
  uint32_t index; // the argument's
  uint64_t loads, load_bytes, stores, store_bytes;
};

struct Launch {
  void (*thunk)(const Launch *);
  const ArgDesc *args;
  uint32_t nargs, nbindings;
  Binding *bindings;
  void *buffer[31];          // by index: where the argument points
  uint32_t group_bytes[31];  // threadgroup memory lengths by index
  uint32_t grid[3], size[3];
  uintptr_t image_low, image_high; // the loaded kernel library: program-scope constants live there
  int64_t disabled_barrier;
  uint32_t order; // 0 ascending, 1 by the seed
  uint32_t checks;
  const char *name; // the kernel's
  uint64_t dispatch; // its place among those of the run
};

enum FaultKind : uint32_t {
  NO_FAULT, OUT_OF_BOUNDS, UNWRITTEN, DIVERGENT, MISALIGNED, RACE, CONFLICT, GROUP_MEMORY, READ_ONLY_WRITE, ARRAY_INDEX, DIVISION,
};
struct Fault {
  uint32_t kind, group[3], thread;
  int32_t binding;  // index in Launch::bindings, or -1
  int32_t line;     // 0: unknown, ask `pc`
  uint32_t size, write;
  int64_t offset;   // in the binding's range, or in the threadgroup array
  uintptr_t pc;     // 0: unknown
  char file[192], text[512];
};

struct ConstantDesc {
  const char *name;
  uint32_t id, kind, size;
  void *value;
  bool *defined;
};
struct KernelDesc {
  const char *name;
  void (*thunk)(const Launch *);
  const ArgDesc *args;
  uint32_t nargs, max_threads;
};
struct Table {
  const KernelDesc *kernels;
  uint64_t nkernels;
  const ConstantDesc *constants;
  uint64_t nconstants;
  void (*derive)(); // recomputes program-scope constants that depend on function constants
  uintptr_t image_low, image_high;
};

struct At { // a place in a kernel source
  const char *file;
  int line;
  static constexpr At here(const char *f = __builtin_FILE(), int l = __builtin_LINE()) { return {f, l}; }
};
struct alignas(16) Slot { unsigned char b[32]; };
using Combine = void (*)(Slot *slots, uint32_t present);
struct Place { // the running thread
  uint32_t index, position[3], group[3];
};

extern "C" {
// Entered by kernels.
void msl_threadgroup_barrier(uint32_t site, int flags, const char *file, int line);
void msl_simdgroup_barrier(uint32_t site, int flags, const char *file, int line);
// Every lane of the simdgroup leaves `n` bytes in its slot; the last to arrive combines them; then all see the slots.
const Slot *msl_exchange(const char *name, const void *v, uint32_t n, Combine combine, const char *file, int line, uint32_t *present);
void *msl_threadgroup_array(uint32_t slot, uint64_t bytes, const char *name, const char *file, int line);
uint32_t msl_lane();
void msl_place(Place *);
void *msl_threadgroup_argument(uint32_t index);
uint32_t msl_atomic_load(const volatile void *p, const void *pc);
void msl_atomic_store(volatile void *p, uint32_t v, const void *pc);
// Entered by the host.
int msl_run_group(const Launch *, const uint32_t group[3], uint64_t seed, Fault *fault);
void msl_begin_span();
// Ends a simdgroup function whose argument differs from lane to lane where it must not.
void msl_not_uniform(const char *name, const char *file, int line);
int msl_clock_is_low(); // true: the host clears all cells and calls msl_reset_clock
void msl_reset_clock();
// A bit for each barrier site that the last group reached; later sites are not recorded.
constexpr uint32_t SITES = 1024;
const uint64_t *msl_reached();
uint64_t msl_group_bytes(); // threadgroup memory of the last group that ran
}

} // namespace msl
