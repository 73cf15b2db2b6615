// Gated short convolution: out = C * conv(B * X), causal within each sequence, whose last products are kept as its state.
//
// Layout: x rows x 3 width floats, B, C and X side by side; taps width x TAPS floats, oldest first; state slots x (TAPS - 1) x
// width floats, oldest first; rows 8 words each: token, position, sequence, slot, tokens left, round, place in its sequence's
// rows of this step, rows of it that follow; out rows x width floats.
// Threads: a thread a channel, along x, of `tile` rows of a sequence, along y: those of the other rows do nothing. A tile is no
// shorter than the taps, so that the first tile of a sequence alone looks at its state, and may replace it.
// Bytes: B and X are read once for every tap (all but the first time from the cache), C once. Accumulates in float.
#include <metal_stdlib>
using namespace metal;

struct ConvArgs {
    uint rows, width, taps, tile;
};

inline float product(device const float *x, ulong row, uint channel, uint width) {
    return x[row * 3 * width + channel] * x[row * 3 * width + 2 * width + channel];
}

kernel void short_conv(device const float *x [[buffer(0)]], device const float *taps [[buffer(1)]],
                       device const uint *rows [[buffer(2)]], device float *state [[buffer(3)]],
                       device float *out [[buffer(4)]], constant ConvArgs &args [[buffer(5)]],
                       uint2 at [[thread_position_in_grid]]) {
    const uint channel = at.x, row0 = at.y, width = args.width, kept = args.taps - 1;
    device const uint *row = rows + 8 * row0;
    const uint place = row[6];
    if (channel >= width || place % args.tile != 0) {
        return;
    }
    if (row[4] == 0) {
        // Nothing is left to produce: what was rejected must not reach the state.
        out[ulong(row0) * width + channel] = 0;
        return;
    }
    const bool first = place == 0, fresh = first && row[1] == 0;
    device float *mine = state + ulong(row[3]) * kept * width + channel;
    const uint n = min(args.tile, row[7] + 1);
    for (uint i = 0; i < n; i++) {
        float sum = 0;
        for (uint t = 0; t <= kept; t++) {
            float v = 0;
            if (!first || i + t >= kept) {
                v = product(x, row0 + i + t - kept, channel, width);
            } else if (!fresh) {
                v = mine[(i + t) * width];
            }
            sum = fma(taps[channel * args.taps + t], v, sum);
        }
        out[ulong(row0 + i) * width + channel] = x[ulong(row0 + i) * 3 * width + width + channel] * sum;
    }
    // The last products of the whole sequence; of a few rows, behind what is left of the old ones.
    const uint all = row[7] + 1;
    for (uint t = 0; t < kept && first; t++) {
        if (all + t >= kept) {
            mine[t * width] = product(x, row0 + all + t - kept, channel, width);
        } else {
            mine[t * width] = fresh ? 0.0f : mine[(all + t) * width];
        }
    }
}
