// From token rows to the rows that something is wanted of: a block takes one of them.
#include "../layout.cuh"

struct SelectArgs {
    u32 rows, width;
};

extern "C" __global__ void select_rows(SelectArgs a, const float* x, const Wanted* wanted,
                                       float* out) {
    u64 from = (u64)wanted[blockIdx.x].row * a.width, to = (u64)blockIdx.x * a.width;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) out[to + i] = x[from + i];
}
