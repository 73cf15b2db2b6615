// Weights onto tapes, out of planes (planes.cuh), once at load: to every block of threads of the decode kernel its rows of a
// stage, unit by unit in the order in which it reads them. A warp takes a unit at a time.
//
// A unit is 32 blocks of 32 weights of a row, in the form that forms.cuh says, zeroes behind the row's end; or `span` blocks
// of each of several rows, of which `wide` are the share's. Of the rows of a piece, the first units of all come first, then
// the second ones.
#include "../planes.cuh"
#include "forms.cuh"

struct LayArgs {
    u32 rows, nb, units, span, wide;
};

// A block of threads: bytes from the tapes' beginning, its rows in the list of all, how many make a piece, and where in a row
// it begins.
struct LayShare {
    u64 at;
    u32 first, count, batch, block;
};

static const u32 LAY_WARPS = 8, LAY_MOST = 1088;

template <class W>
__device__ void lay(const LayArgs& a, const u8* w, const u32* list, const LayShare* shares, u8* tapes) {
    __shared__ __align__(16) u8 room[LAY_WARPS * LAY_MOST];
    LayShare s = shares[blockIdx.x];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = s.count * a.units;
    uint4* held = (uint4*)(room + warp * W::SLOT);
    uint4 zero = {0, 0, 0, 0};
    for (u32 p = blockIdx.y * LAY_WARPS + warp; p < all; p += gridDim.y * LAY_WARPS) {
        u32 batch = p / (s.batch * a.units) * s.batch, within = p - batch * a.units, there = min(s.batch, s.count - batch);
        u32 unit = within / there, sub = lane % a.span;
        u32 row = list[s.first + batch + within % there] + lane / a.span, b = s.block + unit * 32 + sub;
        for (u32 i = lane; i < W::SLOT / 16; i += 32) held[i] = zero;
        __syncwarp();
        Where from = {w, (u64)a.rows * a.nb, a.rows, a.nb, row, row * a.nb + b};
        if (sub < a.wide && b < a.nb) W::copy(shared_address(held), from, lane);
        copies_commit();
        copies_wait<0>();
        __syncwarp();
        uint4* to = (uint4*)(tapes + s.at + (u64)p * W::SLOT);
        for (u32 i = lane; i < W::SLOT / 16; i += 32) to[i] = held[i];
        __syncwarp();
    }
}

#define ENTRY(W, suffix, number)                                                                                       \
    extern "C" __global__ void lay_##suffix(LayArgs a, const u8* w, const u32* list, const LayShare* shares, u8* tapes) { \
        lay<Taped<P_##W>::Form>(a, w, list, shares, tapes);                                                            \
    }
EACH_PLANED(ENTRY)
