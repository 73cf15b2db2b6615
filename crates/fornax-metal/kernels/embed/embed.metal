// Embedding rows: the rows of a table of weights that the step's tokens choose.
//
// Layout: table vocab x width of blocks; rows 8 words each (token, position, sequence, slot, ...); out rows x width floats;
// history slots x stride tokens by position, in which each row leaves its own.
// Threads: a threadgroup a row, a thread a run of eight elements at a time.
// Bytes: one row of the table for each row of output. Nothing is accumulated.
struct EmbedArgs {
    uint rows, width, vocab;
    float scale;
    uint stride;
};

template <typename B>
kernel void embed(device const uchar *table [[buffer(0)]], device const uint *rows [[buffer(1)]],
                  device const uint *last [[buffer(2)]], device float *out [[buffer(3)]],
                  device uint *history [[buffer(4)]], constant EmbedArgs &args [[buffer(5)]],
                  uint row [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    uint token = rows[8 * row];
    if (token == 0xffffffffu) {
        token = last[rows[8 * row + 3]];
    }
    const uint pos = rows[8 * row + 1];
    if (t == 0 && rows[8 * row + 4] != 0 && pos < args.stride) {
        history[ulong(rows[8 * row + 3]) * args.stride + pos] = token;
    }
    device float *to = out + ulong(row) * args.width;
    for (uint run = t; run < (args.width + 7) / 8; run += threads) {
        float w[8];
        if (token < args.vocab) {
            run_of<B>(row_of<B>(table, token, args.width), run, args.width, w);
        }
        for (uint i = 0; i < 8 && 8 * run + i < args.width; i++) {
            // A token of nowhere must be heard of: no logit of its row will be usable.
            to[8 * run + i] = token < args.vocab ? w[i] * args.scale : NAN;
        }
    }
}

KERNEL("embed_f32", embed<F32>)
KERNEL("embed_f16", embed<F16>)
KERNEL("embed_bf16", embed<BF16>)
KERNEL("embed_q8_0", embed<Q8_0>)
KERNEL("embed_q4_0", embed<Q4_0>)
KERNEL("embed_q4_1", embed<Q4_1>)
KERNEL("embed_q5_0", embed<Q5_0>)
KERNEL("embed_q5_1", embed<Q5_1>)
KERNEL("embed_q4_k", embed<Q4_K>)
KERNEL("embed_q5_k", embed<Q5_K>)
KERNEL("embed_q6_k", embed<Q6_K>)
KERNEL("embed_mxfp4", embed<MXFP4>)
KERNEL("embed_any", embed<Any<Type0>>)
