// What becomes of a chosen token: its output, the slot's last token, and the row that feeds it back. One thread of a launch
// does this for a wanted row.
#pragma once
#include "layout.cuh"

// `out_first` outputs of the first round, then `out_next` for each later one.
__device__ inline void finish_choice(Row row, Wanted w, u32 ix, u32 token, bool usable, float logprob, u32 out_first, u32 out_next,
                                     Row* all_rows, u32* last, const u32* stops, const u32* stop, Out* outs) {
    u32 to = row.round == 0 ? ix : out_first + (row.round - 1) * out_next + ix;
    put_out(&outs[to], token, logprob, usable, w.ticket, row.pos + 1);
    if (w.kind & SETS_LAST) last[row.slot] = token;
    if (w.chain == NONE) return;
    bool ends = !usable || stop[row.slot] >= w.ticket;
    const u32* listed = stops + (u64)row.seq * STOPS;
    for (u32 i = 0; i < listed[0]; i++) ends |= listed[1 + i] == token;
    Row* chain = &all_rows[w.chain];
    Row next = {token, row.pos + 1, row.seq, row.slot, ends ? 0 : chain->left - 1, row.round + 1, 0, 0};
    *chain = next;
}
