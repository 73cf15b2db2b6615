// What the host uploads for a step, word by word, as src/feed.rs writes it, and the conversions
// between 16-bit and 32-bit floats. No header of the toolkit is included: NVRTC alone must do.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// No token, no chain.
static const u32 NONE = 0xffffffffu;

// A token row. `token` is NONE for the slot's last one; `left` is what the row's chain has still
// to produce, 0 for a row that is passed over; `round` counts the tokens fed back so far. The row is the `nth` of `rows`
// that its sequence has in the step; `rows` is 0 for a token that was fed back.
struct Row {
    u32 token, pos, seq, slot, left, round, nth, rows;
};

// What is wanted of a row. `chain` is the row, among all rows, that the chosen token goes into.
struct Wanted {
    u32 row, kind, chain, ticket;
};
static const u32 TOKEN = 1, LOGPROB = 2, SETS_LAST = 4;
// Instead of TOKEN: the kernels of sample.cu choose, by a draw, or after penalties, or both.
static const u32 DRAWN = 8, PENALISED = 16;

// A chosen token. The lowest two bits of `state` say what became of it, those above are the ticket's: so whoever looks while
// a ticket runs can tell its outputs from what was there before.
struct Out {
    u32 token;
    float logprob;
    u32 state, pos;
};
static const u32 CHOSEN = 1, UNUSABLE = 2;

// Words of a sequence's stop list: the count, then the tokens.
static const u32 STOPS = 16;

#ifdef FORNAX_HOST
inline float half_to_float(u16 h) { return host_half_to_float(h); }
inline u16 float_to_half(float f) { return host_float_to_half(f); }
#else
__device__ inline float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// To nearest, ties to even.
__device__ inline u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#endif

// As one store of 16 bytes, where `to` is a multiple of 16: nobody sees half of it.
__device__ inline void put_out(Out* to, u32 token, float logprob, bool usable, u32 ticket, u32 pos) {
    u32 state = (usable ? CHOSEN : UNUSABLE) | ticket << 2;
#ifdef FORNAX_HOST
    Out out = {token, logprob, state, pos};
    *to = out;
#else
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(token), "r"(__float_as_uint(logprob)), "r"(state), "r"(pos) : "memory");
#endif
}

__device__ inline float warp_sum(float v) {
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

__device__ inline float negative_infinity() { return __int_as_float(0xff800000); }
