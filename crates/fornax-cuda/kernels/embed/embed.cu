// Rows of the embedding table chosen by token, times a factor.
//
// table: vocab × width in its format; rows: the step's rows; last: by slot; out: rows × width f32.
// A block takes one row. A row that stands for the slot's last token looks it up on the device.
#include "../rare.cuh"

struct EmbedArgs {
    u32 rows, width, vocab;
    float scale;
};

template <class W>
__device__ void embed(const EmbedArgs& a, const u8* table, const Row* rows, const u32* last,
                      float* out) {
    u32 row = blockIdx.x;
    u32 token = rows[row].token;
    if (token == NONE) token = last[rows[row].slot];
    // The host has checked its tokens, the choice is none beyond the vocabulary.
    if (token >= a.vocab) token = 0;
    const u8* from = table + (u64)token * W::row_bytes(a.width);
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x)
        out[(u64)row * a.width + i] = W::at(from, i) * a.scale;
}

#define ENTRY(W, suffix)                                                                           \
    extern "C" __global__ void embed_##suffix(EmbedArgs a, const u8* table, const Row* rows,       \
                                              const u32* last, float* out) {                       \
        embed<W>(a, table, rows, last, out);                                                       \
    }
EACH_FORMAT(ENTRY)
