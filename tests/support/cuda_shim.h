// Runs CUDA kernels on the host, one block of threads after another: each thread is a fiber, which gives way where the
// threads of its warp or of its block wait for one another.
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __device__ static inline
#define __global__
#define __shared__ static

struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace shim {
enum State { READY, WARP, BLOCK, DONE };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state;
    unsigned long long given;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static const std::function<void()> *body;

static void enter() {
    (*body)();
    fibers[current].state = DONE;
    swapcontext(&fibers[current].context, &scheduler);
}

static void wait(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

// Let on those who all wait for one another: a warp, or the whole block. Threads that returned count for neither.
static bool release(unsigned begin, unsigned end, State state) {
    unsigned waiting = 0, alive = 0;
    for (unsigned i = begin; i < end; i++) {
        alive += fibers[i].state != DONE;
        waiting += fibers[i].state == state;
    }
    if (!alive || waiting != alive) return false;
    for (unsigned i = begin; i < end; i++)
        if (fibers[i].state == state) fibers[i].state = READY;
    return true;
}

static void run_block(unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        Fiber &fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        fiber.state = READY;
        makecontext(&fiber.context, enter, 0);
    }
    for (;;) {
        bool moved = false, left = false;
        for (unsigned i = 0; i < threads; i++) {
            left |= fibers[i].state != DONE;
            if (fibers[i].state != READY) continue;
            moved = true;
            current = i;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        if (!left) return;
        for (unsigned i = 0; i < threads; i += 32) moved |= release(i, i + 32, WARP);
        moved |= release(0, threads, BLOCK);
        if (!moved) {
            std::fprintf(stderr, "threads wait for one another at different places\n");
            std::abort();
        }
    }
}

static void launch(unsigned grid, unsigned threads, const std::function<void()> &kernel) {
    fibers.resize(threads);
    for (auto &fiber : fibers) fiber.stack.resize(64 << 10);
    body = &kernel;
    gridDim.x = grid;
    blockDim.x = threads;
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = i;
        run_block(threads);
    }
}
}  // namespace shim

static inline void __syncthreads() { shim::wait(shim::BLOCK); }

static inline unsigned __ballot_sync(unsigned, bool given) {
    const unsigned self = shim::current, warp = self & ~31u;
    shim::fibers[self].given = given;
    shim::wait(shim::WARP);
    unsigned mask = 0;
    for (unsigned i = 0; i < 32; i++) mask |= (unsigned)(shim::fibers[warp + i].given & 1) << i;
    shim::wait(shim::WARP);
    return mask;
}

static inline unsigned long long __shfl_down_sync(unsigned, unsigned long long value, unsigned step) {
    const unsigned self = shim::current, lane = self & 31;
    shim::fibers[self].given = value;
    shim::wait(shim::WARP);
    const unsigned long long found = lane + step < 32 ? shim::fibers[self + step].given : value;
    shim::wait(shim::WARP);
    return found;
}

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline void atomicAdd(unsigned long long *place, unsigned long long value) { *place += value; }
static inline void atomicMin(long long *place, long long value) { *place = value < *place ? value : *place; }
