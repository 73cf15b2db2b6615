// Whole decode steps: one launch runs every stage of every layer for up to R rows, chooses the tokens and goes on with
// them, for as many tokens as it is asked for. One block a multiprocessor; blocks wait for one another on a counter
// between stages, and begin to copy the weights of the next stage before they wait.
#include "attend.cuh"

#ifndef ROWS_AT_ONCE
#define ROWS_AT_ONCE 1
#endif

static const u32 R = ROWS_AT_ONCE;

struct StepArgs {
    u32 rows, stages, rounds, base, turn_rows, turn_pairs, ropes, group_words, stride, vocab, width, table_type;
    u32 out_first, out_next, ring_at, x_at, part_at, norms_at, slots, stage_at, tokens_low, tokens_high, starts;
    float scale;
};

__device__ inline void arrive(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Row r of the round: the embedding of its token, and sine and cosine of its position. One block.
__device__ __noinline__ void begin_row(const StepArgs& a, u32 r, u32 token, u32 pos, const u8* table, float* x,
                                       const float* freqs, float2* turns) {
    u32 t = threadIdx.x, nb = a.width / 32;
    if (token >= a.vocab) token = 0;
    for (u32 i = t; i < a.width; i += THREADS) {
        Where p = {table, (u64)a.vocab * nb, a.vocab, nb, token, token * nb + i / 32};
        float v = 0.0f;
        switch (a.table_type) {
#define CASE(W, suffix, number)                                                                                        \
    case number: v = P_##W::at(p, i % 32); break;
            EACH_PLANED(CASE)
#undef CASE
        }
        x[(u64)r * a.width + i] = v * a.scale;
    }
    for (u32 i = t; i < a.ropes * a.turn_pairs; i += THREADS) {
        // Frequencies, with the factor of both in the place behind them.
        const float* f = freqs + i / a.turn_pairs * (a.turn_pairs + 1);
        float sine, cosine;
        sincosf((float)pos * f[i % a.turn_pairs], &sine, &cosine);
        float2 turn = {cosine * f[a.turn_pairs], sine * f[a.turn_pairs]};
        turns[((u64)(i / a.turn_pairs) * a.turn_rows + r) * a.turn_pairs + i % a.turn_pairs] = turn;
    }
}

// Chooses the token of wanted row r from the blocks' best, and makes the row that goes on with it. One block; `row` is
// that row as the round began with it.
__device__ __noinline__ u32 pick(const StepArgs& a, u32 r, const Best* bests, u32 blocks, const Row& row, Row* all_rows,
                                 const Wanted* wanted, u32* last, const u32* stops, const u32* stop, Out* outs) {
    __shared__ Best parts[WARPS];
    __shared__ u32 token;
    u32 t = threadIdx.x;
    Best b = {negative_infinity(), 0.0f, NONE, 0};
    if (t < blocks) {
        float4 v = fresh4((const float*)(bests + r * blocks + t));
        b.value = v.x;
        b.sum = v.y;
        b.at = __float_as_uint(v.z);
    }
    // Loaded while the best are on their way.
    Wanted w = wanted[r];
    u32 stopped = *(volatile const u32*)(stop + row.slot);
    const u32* listed = stops + (u64)row.seq * STOPS;
    u32 entry = t < STOPS ? __ldg(listed + t) : 0, entries = __shfl_sync(0xffffffffu, entry, 0);
    if (t < 256) {
        b = best_of_warp(b);
        if (t % 32 == 0) parts[t / 32] = b;
    }
    __syncthreads();
    if (t < 32) {
        Best none = {negative_infinity(), 0.0f, NONE, 0};
        b = best_of_warp(t < 8 ? parts[t] : none);
        bool usable = b.at != NONE;
        u32 chosen = usable ? b.at : 0;
        bool ends = __any_sync(0xffffffffu, t > 0 && t <= entries && entry == chosen);
        if (t == 0) token = chosen;
        if (t == 0 && w.kind & TOKEN && row.left != 0) {
            float logprob = w.kind & LOGPROB && usable ? -logf(b.sum) : __int_as_float(0x7fc00000);
            u32 to = row.round == 0 ? r : a.out_first + (row.round - 1) * a.out_next + r;
            put_out(&outs[to], chosen, logprob, usable, w.ticket, row.pos + 1);
            if (w.kind & SETS_LAST) last[row.slot] = chosen;
            if (w.chain != NONE) {
                ends |= !usable || stopped >= w.ticket;
                Row* chain = &all_rows[w.chain];
                u32 more = a.base + r == w.chain ? row.left : fresh_word(&chain->left);
                Row next = {chosen, row.pos + 1, row.seq, row.slot, ends ? 0 : more - 1, row.round + 1};
                *chain = next;
            }
        }
    }
    __syncthreads();
    return token;
}

#ifdef TIMES
extern "C" int printf(const char*, ...);
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(StepArgs a, const Stage* stages, u32* counters, Row* all_rows, const Wanted* wanted, u32* last,
           const u32* stops, const u32* stop, Out* outs, Best* bests, const u8* table, float* x, const float* freqs,
           float2* turns, const u32* tables, float* means, float* scales, u32* done) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ Row rows[R];
#ifdef TIMES
    if (threadIdx.x < 48) (&times.sums[0][0])[threadIdx.x] = 0;
    if (threadIdx.x == 0) times.at = clock64();
    __syncthreads();
#endif
    u32 t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
    Room m = {shared_address(room + a.ring_at) + t / 32 * DEPTH * SLOT_BYTES, a.x_at, a.part_at, a.norms_at, a.slots};
    Stage* held = (Stage*)(room + a.stage_at);
    Row* given = all_rows + a.base;
    u32* counter = counters;
    u32 target = 0;
    // The counter of the launch after this one.
    if (block == 0 && t == 0) counters[a.starts & 1 ? 0 : 32] = 0;
    if (a.starts & 1) counter = counters + 32;
    take_stages(stages, held, a.stages);
    __syncthreads();
    u32 opening = 0;
    while (held[opening].kind != KIND_DENSE) opening++;
    Way y = prefetch<R>(held[opening], m.ring, block, blocks);
    Attend c = {rows, tables, a.group_words, a.stride, (u64)a.tokens_high << 32 | a.tokens_low, turns, a.turn_rows,
                a.turn_pairs, means, scales, done};
    if (block < a.rows) {
        u32 token = given[block].token;
        if (token == NONE) token = last[given[block].slot];
        begin_row(a, block, token, given[block].pos, table, x, freqs, turns);
    }
    arrive(counter);
    target += blocks;
    for (u32 round = 0; round < a.rounds; round++) {
        await(counter, target);
        if (t < R && t < a.rows) {
            const u32* w = (const u32*)(given + t);
            rows[t] = {fresh_word(w), fresh_word(w + 1), fresh_word(w + 2), fresh_word(w + 3), fresh_word(w + 4), fresh_word(w + 5), 0, 0};
        }
        __syncthreads();
        u32 alive = 0, furthest = 0;
        for (u32 r = 0; r < a.rows; r++) {
            alive |= rows[r].left;
            if (rows[r].left) furthest = max(furthest, rows[r].pos);
        }
        if (alive == 0) break;
        for (u32 i = 0; i < a.stages; i++) {
            const Stage& s = held[i];
            u32 before = target;
            if (s.kind == KIND_ATTEND) {
                u32 most = max(blocks / (s.kv_heads * a.rows), 1u);
                u32 parts = parts_of(furthest - first_key(s.window, furthest), most), jobs = a.rows * s.kv_heads * parts;
                bool waited = false;
                for (u32 job = block; job < jobs; job += blocks) {
                    u32 row = job / (s.kv_heads * parts), rest = job % (s.kv_heads * parts);
                    if (rows[row].left == 0) continue;
                    attend(s, c, row, rest / parts, rest % parts, parts, (float*)(room + a.x_at), counter, before);
                    waited = true;
                    __syncthreads();
                }
                // A block that has nothing to do must not arrive twice before others arrive once.
                if (!waited) await(counter, before);
                MARK(5, 5);
                arrive(counter);
                MARK(5, 3);
                target += blocks;
                continue;
            }
            if (s.kind == KIND_NORM) {
                if (i > 0) await(counter, before);
                for (u32 r = block; r < a.rows; r += blocks) {
                    norm_row(s, r, m, room);
                    __syncthreads();
                }
                arrive(counter);
                target += blocks;
                continue;
            }
            Source in = {s.pro, s.dim, s.heads, 1, (const float*)s.x, (const float*)s.x1};
            if (s.pro == PRO_MERGE) {
                u32 most = max(blocks / (s.kv_heads * a.rows), 1u);
                u32 parts = parts_of(furthest - first_key(s.window, furthest), most);
                in.parts = parts <= PARTS_DIRECT ? parts : 1;
            }
            [[maybe_unused]] u32 kind = s.epi == EPI_HEAD ? 4 : s.epi == EPI_GATED ? 2 : s.pro == PRO_NORM ? 0 : s.pro == PRO_MERGE ? 1 : 3;
            MARK(kind, 0);
            round_input<R>(s, in, a.rows, m, room, i > 0 ? counter : 0, before);
            MARK(kind, 1);
            float early = early_residual(s, y);
            stream_any<R>(y, m, room);
            MARK(kind, 2);
            finish_stage<R>(s, y, a.rows, m, room, bests, block, blocks, early);
            arrive(counter);
            MARK(kind, 3);
            target += blocks;
            // The next stage that reads weights; after the last one that is the first of the next round.
            u32 next = i + 1 == a.stages ? 0 : i + 1;
            while (held[next].kind != KIND_DENSE) next = next + 1 == a.stages ? 0 : next + 1;
            y = prefetch<R>(held[next], m.ring, block, blocks);
            MARK(kind, 4);
        }
        await(counter, target);
        MARK(4, 5);
        if (block < a.rows) {
            u32 token = pick(a, block, bests, blocks, rows[block], all_rows, wanted, last, stops, stop, outs);
            if (round + 1 < a.rounds) begin_row(a, block, token, rows[block].pos + 1, table, x, freqs, turns);
        }
        arrive(counter);
        target += blocks;
        MARK(5, 7);
    }
#ifdef TIMES
    if (t == 0 && (block == 0 || block == 100) && a.rounds > 1)
        for (u32 k = 0; k < 6; k++)
            for (u32 p = 0; p < 8; p++)
                if (times.sums[k][p]) printf("block %d kind %d phase %d: %d cycles a token\n", block, k, p, (int)(times.sums[k][p] / a.rounds));
#endif
    copies_wait<0>();
}
