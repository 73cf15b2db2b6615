// Runs blocks of kernels on the CPU, one after the other: behind shim.h and a kernel's source in one file. Each thread is a
// fiber with a stack of its own; barriers and exchanges of a warp are the only places where another goes on.
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
}

namespace host {
const unsigned MOST = 1024, WIDTH = 32;
const size_t STACK = 128 << 10;

struct Fiber {
    void* sp;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    bool ready, done;
};
struct Warp {
    unsigned present, waiting, mask, kind, phase;
    // Two sets, so that a lane that has gone on does not write over what another has still to read.
    char slots[2][WIDTH][8];
};
static Fiber fibers[MOST], home;
static Warp warps[MOST / WIDTH];
static char* stacks;
static unsigned threads, current, at_barrier, finished;
static bool reversed;
static void (*thunk)(const uint32_t*, const uint64_t*);
static const uint32_t* words;
static const uint64_t* pointers;
static char trouble[256];

#if defined(__x86_64__)
extern "C" void host_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
.text
.p2align 4
.hidden host_switch
.globl host_switch
.type host_switch,@function
host_switch:
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
.size host_switch,.-host_switch
)");
static void switch_to(Fiber& from, Fiber& to) { host_switch(&from.sp, to.sp); }
#else
static void switch_to(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

static void enter(Fiber& from, unsigned i) {
    current = i;
    threadIdx = {i, 0, 0};
    switch_to(from, fibers[i]);
}

static void leave(Fiber& from) { switch_to(from, home); }

static void fail(const char* what) {
    if (!trouble[0])
        snprintf(trouble, sizeof trouble, "thread %u of block (%u, %u): %s", current, blockIdx.x, blockIdx.y, what);
    leave(fibers[current]);
}

// Goes on with another thread that can run.
static void give_way() {
    Fiber& me = fibers[current];
    for (unsigned n = 1; n <= threads; n++) {
        unsigned i = reversed ? (current + threads - n) % threads : (current + n) % threads;
        if (!fibers[i].ready) continue;
        if (i == current) return;
        enter(me, i);
        return;
    }
    if (finished < threads) fail("threads wait for one another at different places");
    leave(me);
}

static void body() {
    thunk(words, pointers);
    Fiber& me = fibers[current];
    me.ready = false;
    me.done = true;
    finished++;
    warps[current / WIDTH].present &= ~(1u << current % WIDTH);
    give_way();
}

static void ready(unsigned i) {
    Fiber& f = fibers[i];
    f.ready = true;
    f.done = false;
    char* top = stacks + (i + 1) * STACK - 64 - i % 64 * 192;
#if defined(__x86_64__)
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15) - 1;
    *sp = nullptr;
    *--sp = (void*)body;
    f.sp = sp - 6;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + i * STACK;
    f.context.uc_stack.ss_size = (size_t)(top - (stacks + i * STACK));
    f.context.uc_link = nullptr;
    makecontext(&f.context, body, 0);
#endif
}

static void block() {
    for (unsigned w = 0; w * WIDTH < threads; w++) {
        unsigned n = threads - w * WIDTH;
        warps[w].present = n >= WIDTH ? ~0u : (1u << n) - 1;
        warps[w].waiting = warps[w].phase = 0;
    }
    for (unsigned i = 0; i < threads; i++) ready(i);
    at_barrier = finished = 0;
    enter(home, reversed ? threads - 1 : 0);
}
}  // namespace host

extern "C" void host_barrier() {
    using namespace host;
    fibers[current].ready = false;
    if (finished) fail("a barrier that threads which have returned do not reach");
    if (++at_barrier == threads) {
        at_barrier = 0;
        for (unsigned i = 0; i < threads; i++) fibers[i].ready = true;
    }
    give_way();
}

extern "C" const void* host_exchange(unsigned kind, const void* value, unsigned n, unsigned mask) {
    using namespace host;
    Warp& w = warps[current / WIDTH];
    unsigned lane = current % WIDTH, bit = 1u << lane;
    if (!(mask & bit)) fail("an exchange whose mask leaves the thread out");
    if (mask & ~w.present) fail("an exchange with lanes that have returned or are none");
    if (w.waiting && (w.kind != kind || w.mask != mask)) fail("lanes of a warp in different exchanges");
    w.kind = kind;
    w.mask = mask;
    char(*slots)[8] = w.slots[w.phase];
    memcpy(slots[lane], value, n);
    w.waiting |= bit;
    fibers[current].ready = false;
    if (w.waiting == mask) {
        w.waiting = 0;
        w.phase ^= 1;
        for (unsigned i = 0; i < WIDTH; i++)
            if (mask >> i & 1) fibers[current / WIDTH * WIDTH + i].ready = true;
    }
    give_way();
    return slots;
}

// Runs a launch; returns what went wrong, or nothing. `order` is odd for the last thread first.
extern "C" const char* host_run(void (*f)(const uint32_t*, const uint64_t*), const uint32_t* grid, unsigned n,
                                const uint32_t* w, const uint64_t* p, unsigned order) {
    using namespace host;
    if (!stacks) {
        void* all = mmap(nullptr, STACK * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) return "no address space for the stacks of threads";
        stacks = (char*)all;
    }
    if (n == 0 || n > MOST) return "a block of no thread, or of more than 1024";
    thunk = f, words = w, pointers = p, threads = n, reversed = order & 1, trouble[0] = 0;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {n, 1, 1};
    for (unsigned y = 0; y < grid[1]; y++)
        for (unsigned x = 0; x < grid[0]; x++) {
            blockIdx = {x, y, 0};
            block();
            if (trouble[0]) return trouble;
        }
    return nullptr;
}
