// From token rows to chosen tokens, and the row that feeds each of them back.
//
// select_rows: a block takes one wanted row. argmax: a block of 1024 threads takes one wanted row
// of `vocab` logits, read once (twice with the log-probability); ties go to the lowest id, NaN and
// −∞ are never chosen.
#include "../chosen.cuh"

struct SelectArgs {
    u32 rows, width;
};

extern "C" __global__ void select_rows(SelectArgs a, const float* x, const Wanted* wanted,
                                       float* out) {
    u64 from = (u64)wanted[blockIdx.x].row * a.width, to = (u64)blockIdx.x * a.width;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) out[to + i] = x[from + i];
}

// `base` is where this round's rows begin among all rows; outputs of the first round come first,
// then `out_next` for each later one.
struct ArgmaxArgs {
    u32 rows, vocab, base, out_first, out_next;
};

static const u32 THREADS = 1024;

__device__ inline bool better(float v, u32 i, float than, u32 at) {
    return v > than || (v == than && i < at);
}

extern "C" __global__ void argmax(ArgmaxArgs a, const float* logits, const Wanted* wanted,
                                  Row* all_rows, u32* last, const u32* stops, const u32* stop,
                                  Out* outs) {
    __shared__ float best_value[THREADS];
    __shared__ u32 best_at[THREADS];
    u32 ix = blockIdx.x, t = threadIdx.x;
    Wanted w = wanted[ix];
    Row row = all_rows[a.base + w.row];
    if (!(w.kind & TOKEN) || row.left == 0) return;
    const float* x = logits + (u64)ix * a.vocab;
    float value = negative_infinity();
    u32 at = NONE;
    // Eight loads are under way at a time.
    for (u32 i = t; i < a.vocab; i += 8 * THREADS) {
        float v[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            u32 from = i + k * THREADS;
            v[k] = from < a.vocab ? x[from] : negative_infinity();
        }
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (v[k] > value) {
                value = v[k];
                at = i + k * THREADS;
            }
    }
    best_value[t] = value;
    best_at[t] = at;
    for (u32 d = THREADS / 2; d > 0; d /= 2) {
        __syncthreads();
        if (t < d && better(best_value[t + d], best_at[t + d], best_value[t], best_at[t])) {
            best_value[t] = best_value[t + d];
            best_at[t] = best_at[t + d];
        }
    }
    __syncthreads();
    float top = best_value[0];
    u32 token = best_at[0];
    bool usable = token != NONE;
    float logprob = __int_as_float(0x7fc00000);
    if (w.kind & LOGPROB && usable) {
        __syncthreads();
        float sum = 0.0f;
        for (u32 i = t; i < a.vocab; i += THREADS)
            if (!isnan(x[i])) sum += expf(x[i] - top);
        best_value[t] = sum;
        for (u32 d = THREADS / 2; d > 0; d /= 2) {
            __syncthreads();
            if (t < d) best_value[t] += best_value[t + d];
        }
        __syncthreads();
        logprob = -logf(best_value[0]);
    }
    if (t == 0)
        finish_choice(row, w, ix, usable ? token : 0, usable, logprob, a.out_first, a.out_next, all_rows, last, stops, stop, outs);
}
