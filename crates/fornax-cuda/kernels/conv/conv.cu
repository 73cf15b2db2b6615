// Gated short convolution: out = C · conv(B · X), causal within each sequence, whose last products are kept as its state.
//
// x: rows × 3 width, B, C and X side by side; taps: width × taps, oldest first; state: slots × (taps − 1) × width, oldest
// first; out: rows × width; all f32. A thread takes one channel, along x, of `tile` rows of a sequence, along y: those that
// begin at other rows do nothing. A tile is no shorter than the taps, so that the first tile of a sequence alone looks at its
// state, and may replace it. Bytes: B and X are read once for every tap (all but the first time from the cache), C once.
#include "../layout.cuh"

struct ConvArgs {
    u32 rows, width, taps, tile;
};

__device__ inline float product(const float* x, u64 row, u32 channel, u32 width) {
    return x[row * 3 * width + channel] * x[row * 3 * width + 2 * width + channel];
}

extern "C" __global__ void short_conv(ConvArgs a, const float* x, const float* taps, const Row* rows, float* state, float* out) {
    u32 channel = blockIdx.x * blockDim.x + threadIdx.x, row0 = blockIdx.y, width = a.width, kept = a.taps - 1;
    Row row = rows[row0];
    if (channel >= width || row.nth % a.tile != 0) return;
    if (row.left == 0) {
        // Nothing is left to produce: what was rejected must not reach the state.
        out[(u64)row0 * width + channel] = 0.0f;
        return;
    }
    bool first = row.nth == 0, fresh = first && row.pos == 0;
    float* mine = state + (u64)row.slot * kept * width + channel;
    // Rows of the sequence from this one on; a chain's row is alone.
    u32 all = row.rows > row.nth ? row.rows - row.nth : 1, n = min(a.tile, all);
    for (u32 i = 0; i < n; i++) {
        float sum = 0.0f;
        for (u32 t = 0; t <= kept; t++) {
            float v = 0.0f;
            if (!first || i + t >= kept)
                v = product(x, row0 + i + t - kept, channel, width);
            else if (!fresh)
                v = mine[(i + t) * width];
            sum = fmaf(taps[channel * a.taps + t], v, sum);
        }
        out[(u64)(row0 + i) * width + channel] = x[(u64)(row0 + i) * 3 * width + width + channel] * sum;
    }
    // The last products of the whole sequence; of a few rows, behind what is left of the old ones.
    for (u32 t = 0; t < kept && first; t++) {
        if (all + t >= kept)
            mine[t * width] = product(x, row0 + all + t - kept, channel, width);
        else
            mine[t * width] = fresh ? 0.0f : mine[(all + t) * width];
    }
}
