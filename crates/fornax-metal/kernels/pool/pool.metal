// Keys and values of the paged cache: how they are stored and where a token lies. Before the kernels that read and write them.
//
// A pool is [block][token][kv head x width] of one layer, keys and values apart, in floats, halves or blocks of 32 (no head's
// end is within one). It has up to four pieces, each a buffer of its own, so that it can grow where it is: an entry of a
// sequence's block table says the piece in its upper four bits, and below them the block within the piece.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

// Pieces that there are.
constant uint PIECES [[function_constant(4)]];

// Q8_0: elements are d * q.
struct Eights {
    half d;
    char q[32];
};

inline float stored(device const float *pool, ulong i) {
    return pool[i];
}

inline float stored(device const half *pool, ulong i) {
    return float(pool[i]);
}

inline float stored(device const Eights *pool, ulong i) {
    return float(pool[i / 32].d) * float(pool[i / 32].q[i % 32]);
}

// A token's piece, and its place there counted in tokens.
struct Token {
    uint piece;
    ulong at;
};

// Tables are sequence after sequence, `stride` entries each, of blocks of `block` tokens.
inline Token token_of(device const uint *tables, uint seq, uint stride, uint block, uint pos) {
    const uint entry = tables[seq * stride + pos / block];
    Token token;
    token.piece = entry >> 28;
    token.at = ulong(entry & 0x0fffffffu) * block + pos % block;
    return token;
}

// A piece, given all of them. Where there is one, nothing is chosen.
template <typename POOL>
inline POOL piece_of(uint piece, POOL first, POOL second, POOL third, POOL fourth) {
    if (PIECES == 1) {
        return first;
    }
    return piece == 0 ? first : piece == 1 ? second : piece == 2 ? third : fourth;
}
