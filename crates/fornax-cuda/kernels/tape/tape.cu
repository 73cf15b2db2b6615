// Decode steps of one sequence: one launch runs every layer, chooses the token and goes on with it, for as many tokens
// as it is asked for.
//
// One block a multiprocessor, in clusters of eight. Weights come from the block's own tape (dense.cuh) through a ring
// that a warp of its own keeps full. A layer has six hand-overs: rows of queries, key and value within the cluster of
// their KV head (heads.cuh); parts of attention within it; its result, rounded, to the owners of rows of the output;
// their rows to all; gated blocks, rounded, to the owners of rows of down, which are the same rows; their rows to all.
// Where the output is NEAR, the result stays in the cluster, which has the head's columns of all rows of the output, and
// all get what every cluster has of them. Values that go to all carry the number of their exchange, and whoever needs them
// reads until it is right.
#include "heads.cuh"

struct TapeArgs {
    u32 rounds, base, group_words, stride, out_first, out_next, tokens_low, tokens_high;
    float scale, head_scale, head_softcap, eps;
};

// The best logit that is known, and the sum of exponentials relative to it.
struct Best {
    float value, sum;
    u32 at;
    __device__ void join(const Best& o) {
        bool first = value > o.value || (value == o.value && at < o.at);
        float high = first ? value : o.value, low = first ? o.value : value, less = first ? o.sum : sum;
        sum = first ? sum : o.sum;
        // Where nothing was usable the value is −∞ and the sum 0.
        if (less > 0.0f) sum += less * __expf(low - high);
        value = high;
        at = first ? at : o.at;
    }
    __device__ void join_warp(u32 from) {
        for (u32 d = from; d > 0; d /= 2) {
            Best o;
            o.value = __shfl_xor_sync(0xffffffffu, value, d);
            o.sum = __shfl_xor_sync(0xffffffffu, sum, d);
            o.at = __shfl_xor_sync(0xffffffffu, at, d);
            join(o);
        }
    }
    __device__ static Best none() { return {negative_infinity(), 0.0f, NO_TOKEN}; }
    // Above it, the first block says that the sequence was stopped.
    static const u32 NO_TOKEN = 0x7fffffffu;
};

__device__ inline float gate_of(float g, float u) {
#if ACT == 0
    return g / (1.0f + __expf(-g)) * u;
#else
    float inner = 0.7978845608f * (g + 0.044715f * g * g * g);
    return 0.5f * g * (1.0f + tanhf(inner)) * u;
#endif
}

// Sine and cosine of a position's angles.
__device__ inline void turn_to(u32 pos, const float* freqs) {
    float2* turns = (float2*)(room + AT_TURNS);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROPES * PAIRS; i += CONSUMERS) {
        // Frequencies, with the factor of both in the place behind them.
        const float* f = freqs + i / PAIRS * (PAIRS + 1);
        float sine, cosine;
        sincosf((float)pos * f[i % PAIRS], &sine, &cosine);
        turns[i] = {cosine * f[PAIRS], sine * f[PAIRS]};
    }
}

__device__ inline void embed(u32 token, const u8* table, float scale) {
    static const u32 EACH = (WIDTH + CONSUMERS - 1) / CONSUMERS;
    if (token >= VOCAB) token = 0;
    float v[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; k++) {
        u32 i = min(threadIdx.x + k * CONSUMERS, WIDTH - 1);
        Where p = {table, (u64)VOCAB * NB_WIDTH, VOCAB, NB_WIDTH, token, token * NB_WIDTH + i / 32};
        v[k] = W_TABLE::at(p, i % 32) * scale;
    }
#pragma unroll
    for (u32 k = 0; k < EACH; k++) {
        u32 i = threadIdx.x + k * CONSUMERS;
        if (i < WIDTH) *(float*)(room + AT_TOKEN + i * 4) = v[k];
    }
}

// What does not change within a launch.
struct Step {
    TapeArgs a;
    TapeShare share;
    u8* board;
    float* logits;
    Feed feed;
    u32 cluster, rank;
    u32 even;  // rows of a piece of O and of down
    u32 ends;  // rows of layers' ends that were received
    u32 at;    // layers, and heads, since the launch began
    bool attends;
    u32 runs;  // of keys that came as boxes, since the launch began

    // Rows of the output or of down to all, onto the residuals where these are not with those who pass rows on.
    template <class W, u32 NB, class Ready>
    __device__ void residual_rows(const float* bias, u64* to, u32 epoch, Ready&& ready) {
        u32 lane = threadIdx.x % 32;
        float* own = (float*)(room + AT_OWN);
        product<W, NB, AT_X1, 1, false>(feed, share.rows, even, 0.0f, ready, [&](u32 i, float v) {
            if (lane % (32 / RB) != 0 || i >= share.rows) return;
            if (BIASES && bias) v += __ldg(bias + share.row0 + i);
            if (!NEAR) {
                v += own[i];
                own[i] = v;
            }
            put_value(to + share.row0 + i, v, epoch);
        });
    }

    // What this rank's rows of the output get from the cluster's KV head, to all.
    template <class Ready>
    __device__ void near_rows(const float* bias, u8* to, u32 epoch, Ready&& ready) {
        static const u32 ALL = 8 / RB, N = (NEAR_PIECES < ALL ? NEAR_PIECES : ALL) * RB;
        static_assert(N == 2 || N == 4 || N == 8, "sums go to as many lanes");
        static_assert(!NEAR || (MIX_BLOCKS <= SPAN && NEAR_ROWS % UNIT_ROWS == 0), "units of whole rows");
        u32 sub = threadIdx.x % SPAN, in_unit = threadIdx.x % 32 / SPAN;
        product<FormO, 32, AT_NEAR, N / RB, false, false, SPAN>(feed, NEAR_UNITS, NEAR_MOST, 0.0f, ready, [&](u32 i, float v) {
            u32 row = rank * NEAR_ROWS + i * UNIT_ROWS;
            if (BIASES && bias && cluster == 0) v += __ldg(bias + min(row + in_unit, WIDTH - 1));
            u32 w[UNIT_ROWS];
#pragma unroll
            for (u32 j = 0; j < UNIT_ROWS; j++) w[j] = Quad::tagged(__shfl_sync(0xffffffffu, __float_as_uint(v), sub + j * SPAN), j, epoch);
            if (threadIdx.x % 32 >= SPAN || sub % (SPAN / N) != 0 || i >= NEAR_UNITS) return;
            put_three(to + (cluster * WIDTH + row) * 4, w[0], w[1], w[2], w[3]);
        });
    }

    // Queries, key and value of the cluster's head, raw, to all blocks of the cluster.
    template <class Ready>
    __device__ void queries(const TapeLayer& s, Ready&& ready) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = shared_address(room);
        product<FormQkv, NB_WIDTH, AT_X0, P, true, false>(feed, QKV_ROWS, PIECE_ROWS, a.eps, ready, [&](u32 i, float v) {
            static const u32 N = P * RB, SAME = 32 / N;
            static_assert(N == 2 || N == 4 || N == 8, "a warp's rows travel by twos or fours");
            u32 row = rank * QKV_ROWS + min(i, QKV_ROWS - 1);
            if (BIASES && s.qkv_bias) v += __ldg((const float*)s.qkv_bias + cluster * HEAD_ROWS + row);
            // A warp's rows lie side by side.
            u32 peer = lane % PEERS, to = (rank * NW + warp) * RAW_STRIDE + i / NW - lane / SAME;
            u32 bar = at_peer(base + BAR_HEADS, peer), at, half = N == 8 ? lane / 8 % 2 : 0;
            float w[4];
#pragma unroll
            for (u32 j = 0; j < (N < 4 ? N : 4); j++) w[j] = __shfl_sync(0xffffffffu, v, (half * 4 + j) * SAME);
            to = __shfl_sync(0xffffffffu, to, 0);
            at = at_peer(base + AT_RAW + (to + half * 4) * 4, peer);
            if (N == 2) {
                if (lane < PEERS) send2(at, bar, w[0], w[1]);
            } else if (lane < (N == 8 ? 2 : 1) * PEERS) {
                send4(at, bar, __float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]), __float_as_uint(w[3]));
            }
        });
    }

    // Own blocks of gated outputs, rounded, to all; before them, what this rank has of a block that is shared.
    template <class Ready>
    __device__ void gated(const TapeLayer& s, u32 epoch, u32 parity, Ready&& ready) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = shared_address(room);
        float* own = (float*)(room + AT_GATED);
        u32 part = PART_RANKS > 1 ? share.part_rows : 0, all = part + 64 * share.gates;
        product<FormGu, NB_WIDTH, AT_X0, P, true>(feed, all, PIECE_ROWS, a.eps, ready, [&](u32 i, float v) {
            static const u32 SAME = 32 / (P * RB);
            bool shares = i < part;
            u32 k = shares ? i : i - part, out = k / (2 * NW) * NW + warp;
            if (BIASES && s.gu_bias) {
                u32 first = shares ? share.part_gate * 32 + share.part_first : share.gate0 * 32;
                v += __ldg((const float*)s.gu_bias + 2 * min(first + out, FF - 1) + (k / NW & 1));
            }
            float other = __shfl_xor_sync(0xffffffffu, v, SAME);
            if (lane % (2 * SAME) != 0 || i >= all) return;
            v = gate_of(v, other);
            if (shares) {
                u32 rank = share.part_rank;
                send(at_peer(base + AT_PART + (share.part_first + out) * 4, rank), at_peer(base + BAR_PART, rank), v);
            } else {
                own[out] = v;
            }
        });
        meet();
        MARK(14);
#pragma unroll 1
        for (u32 b = warp; b < share.gates + (PART_RANKS > 1 ? share.part_own : 0); b += NW) {
            u32 block = share.gate0 + b;
            if (PART_RANKS > 1 && b == share.gates) {
                bar_wait(base + BAR_PART, parity);
                if (lane == 0) bar_expect(base + BAR_PART, 128);
                own = (float*)(room + AT_PART) - b * 32;
                block = share.part_gate;
            }
            put_block(board + BOARD_GATED + block * 48, own[b * 32 + lane], epoch, lane);
        }
    }

    __device__ static const TapeLayer& layer_of(u32 number) { return ((const TapeLayer*)(room + AT_LAYERS))[number]; }

    __device__ void layer(const Spot& spot, u32 number, u32 epoch, u32 parity) {
        const TapeLayer& s = layer_of(number);
        u64 *middle = (u64*)(board + BOARD_MIDDLE), *end = (u64*)(board + BOARD_LAYER);
        u32 bars = shared_address(room);
        if (attends) {
            Attention mix;
            mix.begin_layer(s, spot, cluster);
            if (number == 0) round_token((const float*)s.norm);
            queries(s, [&] {
                begins(number);
                MARK(1);
            });
            MARK(2);
            bar_wait(bars + BAR_HEADS, parity);
            if (threadIdx.x == 0) bar_expect(bars + BAR_HEADS, RAW_ROWS * 4);
            MARK(3);
            mix.run(s, spot, cluster, a.eps, runs);
            MARK(6);
            if (rank < MIX_BLOCKS) {
                bar_wait(bars + BAR_MIXES, parity);
                MARK(7);
                Attention::finish(s, cluster, rank, board + BOARD_MIXES, epoch);
                if (threadIdx.x == 0) bar_expect(bars + BAR_MIXES, mix_bytes());
            }
            MARK(8);
            done(1);
            if (NEAR) {
                near_rows((const float*)s.o_bias, board + BOARD_MIDDLE, epoch, [&] {
                    receive<BAR_OUTPUT, MIX_BLOCKS>(parity);
                    says(false);
                    MARK(9);
                });
                MARK(10);
            }
        } else {
            begins(ALL_READ_ROWS ? number : 0);
            done(1);
            // No warp may be a layer behind another.
            meet();
        }
        if (!NEAR) {
            residual_rows<FormO, NB_HEADS>((const float*)s.o_bias, middle, epoch, [&] {
                receive<BAR_OUTPUT, NB_HEADS>(parity);
                says(false);
                MARK(9);
            });
            MARK(10);
        }
        done(2);
        // Boxes of the next token have the key and value of this one. While all wait for all.
        if (BOXES && spot.boxed && spot.pos / boxes::RUN % PEERS == rank) fence_boxes();
        gated(s, epoch, parity, [&] {
            receive<BAR_GATED, NB_WIDTH>(parity);
            if (NEAR) says(false);
            MARK(12);
        });
        MARK(15);
        done(3);
        residual_rows<FormDown, NB_FF>((const float*)s.down_bias, end, epoch, [&] {
            receive<BAR_DOWN, NB_FF>(parity);
            MARK(16);
        });
        done(4);
        at++;
        MARK(17);
    }

    // Waits for the row of the layer before; that of the first one is there.
    __device__ void begins(u32 number) {
        if (number > 0) {
            receive<BAR_LAYER, NB_WIDTH>(ends & 1);
            ends++;
        }
        says(true);
    }

    // Says how far the block is with a layer, to those who pass on.
    __device__ void done(u32 parts) {
        if (threadIdx.x == 0) *(volatile u32*)(room + AT_DONE) = 4 * at + parts;
    }

    // Says what the block works at, and whether nobody waits for an exchange.
    __device__ void says(bool quiet) {
        if (WINDOWS && threadIdx.x == 0) *(volatile u32*)(room + AT_STEP) = 2 * at + quiet;
    }

    // Bytes that the other blocks of the cluster send to this one in a layer.
    __device__ u32 mix_bytes() const { return (MIX_BLOCKS - rank + PEERS - 1) / PEERS * PEERS * PART_BYTES; }

    // The block's best logit, to all.
    __device__ void head(u32 epoch, bool sums, bool stopped) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Best best = Best::none();
        product<FormHead, NB_WIDTH, AT_X0, P, true, false>(feed, share.heads, PIECE_ROWS, a.eps, [&] {
            begins(LAYERS);
            MARK(18);
        }, [&](u32 i, float v) {
            if (i >= share.heads) return;
            v *= a.head_scale;
            if (a.head_softcap != 0.0f) v = a.head_softcap * tanhf(v / a.head_softcap);
            u32 row = share.head0 + i;
            if (logits && lane % (32 / (P * RB)) == 0) logits[row] = v;
            if (!(v > negative_infinity())) return;
            if (sums) {
                best.join({v, 1.0f, row});
            } else if (v > best.value) {
                best = {v, 1.0f, row};
            }
        });
        // Lanes with the same rows have the same, and are not added up.
        u32 same = 32 / (P * RB);
        for (u32 d = 16; d >= same; d /= 2) {
            Best o;
            o.value = __shfl_xor_sync(0xffffffffu, best.value, d);
            o.sum = __shfl_xor_sync(0xffffffffu, best.sum, d);
            o.at = __shfl_xor_sync(0xffffffffu, best.at, d);
            best.join(o);
        }
        float4* parts = (float4*)(room + AT_BESTS);
        if (lane == 0) parts[warp] = {best.value, best.sum, __uint_as_float(best.at), 0.0f};
        at++;
        MARK(19);
        meet();
        if (warp > 0) return;
        best = Best::none();
        if (lane < NW) best = {parts[lane].x, parts[lane].y, __float_as_uint(parts[lane].z)};
        best.join_warp(16);
        u32 at = best.at | (stopped && blockIdx.x == 0 ? 0x80000000u : 0);
        if (lane == 0) put_three(board + BOARD_BEST + blockIdx.x * 16, __float_as_uint(best.value), __float_as_uint(best.sum), at, epoch);
    }

    // The best of all blocks; every block finds the same.
    __device__ Best choose(u32 epoch, bool& stopped) {
        u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
        Best best = Best::none();
        u32 stop = 0;
        POLLS;
        for (u32 i = t; i < BLOCKS; i += CONSUMERS) {
            Three v;
            do {
                v = get_three(board + BOARD_BEST + i * 16);
                WATCHED("the best logits");
            } while (v.epoch != epoch);
            stop |= v.c >> 31;
            best.join({__uint_as_float(v.a), __uint_as_float(v.b), v.c & Best::NO_TOKEN});
        }
        __syncwarp();
        best.join_warp(16);
        stop = __any_sync(0xffffffffu, stop);
        float4* parts = (float4*)(room + AT_BESTS + 256);
        if (lane == 0) parts[warp] = {best.value, best.sum, __uint_as_float(best.at), __uint_as_float(stop)};
        meet();
        best = Best::none();
        stopped = false;
#pragma unroll
        for (u32 i = 0; i < NW; i++) {
            best.join({parts[i].x, parts[i].y, __float_as_uint(parts[i].z)});
            stopped |= __float_as_uint(parts[i].w) != 0;
        }
        return best;
    }
};

// Runs of keys for the warps that compute, token after token.
__device__ inline void bring(const Step& step, const TapeArgs& a, Spot spot) {
    Bringer b = {threadIdx.x % 32, 0};
    bool going = true;
#pragma unroll 1
    for (u32 round = 0; round < a.rounds && going; round++, spot.pos++) {
#pragma unroll 1
        for (u32 i = 0; i < LAYERS && going; i++) {
            POLLS;
            while (round > 0 && (int)(*(volatile u32*)(room + AT_DONE) - (4 * ((round - 1) * (LAYERS + 1) + i) + 3)) < 0) {
                if (*(volatile u32*)(room + AT_HALT)) break;
                WATCHED("the token's key");
            }
            __syncwarp();
            going = b.layer(Step::layer_of(i), spot, step.cluster);
        }
    }
    b.drain();
}

// What a rank passes on, token after token.
__device__ inline void forward(const Step& step, const TapeArgs& a, const float* final_norm, u32 warp, u32 all) {
    Forwarder f;
    f.rank = step.rank, f.warp = warp, f.lane = threadIdx.x % 32, f.all = all;
#pragma unroll
    for (u32 p = 0; p < PEERS; p++) f.peer[p] = at_peer(shared_address(room), p);
    const u8* board = step.board;
#pragma unroll 1
    for (u32 round = 0; round < a.rounds; round++) {
        u32 epoch = *(const volatile u32*)(room + AT_EPOCH) + round * (LAYERS + 1);
        POLLS;
        while (*(volatile u32*)(room + AT_ROUND) != round + 1) {
            if (*(volatile u32*)(room + AT_HALT)) return;
            WATCHED("the next token");
        }
        __syncwarp();
        if (NEAR) f.begin();
#pragma unroll 1
        for (u32 i = 0; i < LAYERS; i++, epoch++) {
            const TapeLayer& s = Step::layer_of(i);
            u32 done = 4 * (round * (LAYERS + 1) + i);
            f.until(done);
            if ((ALL_READ_ROWS || step.attends) && i > 0) f.row<BAR_LAYER, false>(board + BOARD_LAYER, epoch - 1, (const float*)s.norm);
            f.until(done + 1);
            if (!NEAR) f.blocks<NB_HEADS, BAR_OUTPUT>(board + BOARD_MIXES, epoch);
            f.until(done + 2);
            f.row<BAR_GATED, NEAR>(board + BOARD_MIDDLE, epoch, (const float*)s.mlp_norm);
            f.until(done + 3);
            f.blocks<NB_FF, BAR_DOWN>(board + BOARD_GATED, epoch);
        }
        f.until(4 * (round * (LAYERS + 1) + LAYERS));
        f.row<BAR_LAYER, false>(board + BOARD_LAYER, epoch - 1, final_norm);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(8, 1, 1)
    tape_decode(TapeArgs a, const TapeLayer* layers, const TapeShare* shares, const u8* tape, Row* all_rows,
                const Wanted* wanted, u32* last, const u32* stops, const u32* stop, Out* outs, const u8* table,
                const float* final_norm, const float* freqs, const u32* tables, float* logits, u8* board, const u8* maps) {
    u32 t = threadIdx.x, base = shared_address(room);
    Row row = all_rows[a.base];
    u32 rank = blockIdx.x % PEERS, cluster = blockIdx.x / PEERS;
    bool attends = cluster < KV_HEADS;
    u64 tokens = (u64)a.tokens_high << 32 | a.tokens_low;
    bool boxed = BOXES && row.pos + a.rounds > BOXES_FROM;
    u32 slots = boxed && attends ? SLOTS_LEFT : SLOTS;
    Step step = {a, shares[blockIdx.x], board, logits, {0, 0, slots}, cluster, rank, 0, 0, 0, attends, 0};
    step.even = even_pieces(step.share.rows);
    if (t == 0) {
        for (u32 i = 0; i < SLOTS; i++) {
            bar_init(base + AT_BARS + i * 8, 1);
            bar_init(base + AT_BARS + (SLOTS + i) * 8, NW);
        }
        for (u32 i = 0; i < 7; i++) bar_init(base + BAR_HEADS + i * 8, 1);
        for (u32 i = 0; BOXES && i < 2 * PLACES; i++) bar_init(base + AT_RUN_BARS + i * 8, i % 2 ? 2 : boxes::Tile::COME);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        bar_expect(base + BAR_HEADS, RAW_ROWS * 4);
        if (step.rank < MIX_BLOCKS) bar_expect(base + BAR_MIXES, step.mix_bytes());
        bar_expect(base + BAR_OUTPUT, (NEAR ? MIX_BLOCKS : NB_HEADS) * 48);
        bar_expect(base + BAR_GATED, NB_WIDTH * 48);
        bar_expect(base + BAR_DOWN, NB_FF * 48);
        bar_expect(base + BAR_LAYER, NB_WIDTH * 48);
        if (PART_RANKS > 1 && step.share.part_own) bar_expect(base + BAR_PART, 128);
        *(u32*)(room + AT_HALT) = 0;
        *(u32*)(room + AT_ROUND) = 0;
        *(u32*)(room + AT_EPOCH) = *(const volatile u32*)(board + BOARD_EPOCH) + 1;
        *(u32*)(room + AT_STEP) = 1;
        *(u32*)(room + AT_DONE) = 0;
        *(u32*)(room + AT_ASKED) = 0;
#ifdef TIMES
        for (u32 i = 0; i < PHASES; i++) times_sums[i] = 0;
        times_at = clock64();
#endif
    }
    // Lanes beyond the end of a row see blocks of nothing.
    for (u32 i = t; i < (AT_OWN - AT_X0) / 4; i += THREADS) *(u32*)(room + AT_X0 + i * 4) = 0;
    for (u32 i = t; i < (AT_RING - AT_NEAR) / 4; i += THREADS) *(u32*)(room + AT_NEAR + i * 4) = 0;
    for (u32 i = t; i < LAYERS * 8; i += THREADS) *(uint4*)(room + AT_LAYERS + i * 16) = __ldg((const uint4*)layers + i);
    cluster_barrier();
    if (t >= CONSUMERS) {
        if (t == CONSUMERS) {
            const u8* from = tape + step.share.at;
            Filler f = {{0, 0, slots}, {0, 0, slots}, from, from, policy_once(), 0, 0, step.even, 0, boxed};
            for (u32 round = 0; round < a.rounds; round++)
                if (!f.token(step.share, step.attends)) break;
            f.drain();
        } else if (t >= CONSUMERS + 32) {
            u32 warp = t / 32 - NW - 1;
            bool brings = boxed && attends;
            if (BOXES && brings && warp == FORWARDERS - 1) {
                bring(step, a, {tables + row.seq * a.stride, a.group_words, row.pos, rank, tokens, true, maps});
            } else {
                forward(step, a, final_norm, warp, FORWARDERS - brings);
            }
        }
        __syncwarp();
        cluster_barrier();
        return;
    }
    Wanted w = wanted[0];
    u32 token = row.token == NONE ? last[row.slot] : row.token, parity = 0;
    turn_to(row.pos, freqs);
    for (u32 round = 0; round < a.rounds && row.left != 0; round++) {
        u32 epoch = *(const volatile u32*)(room + AT_EPOCH) + round * (LAYERS + 1);
        if (!NEAR && t == 0) *(volatile u32*)(room + AT_ROUND) = round + 1;
        embed(token, table, a.scale);
        meet();
        u32 from = NEAR ? first_block(NB_WIDTH, step.rank) * 32 : step.share.row0;
        u32 end = NEAR ? first_block(NB_WIDTH, step.rank + 1) * 32 : from + step.share.rows;
        for (u32 i = t; i < end - from; i += CONSUMERS) ((float*)(room + AT_OWN))[i] = ((float*)(room + AT_TOKEN))[from + i];
        if (NEAR) {
            // Those who pass rows on have residuals from here.
            meet();
            if (t == 0) *(volatile u32*)(room + AT_ROUND) = round + 1;
        }
        MARK(0);
        Spot spot = {tables + row.seq * a.stride, a.group_words, row.pos, step.rank, tokens, boxed, maps};
#pragma unroll 1
        for (u32 i = 0; i < LAYERS; i++) {
            step.layer(spot, i, epoch + i, parity);
            parity ^= 1;
        }
        bool stopped = blockIdx.x == 0 && *(volatile const u32*)(stop + row.slot) >= w.ticket;
        step.head(epoch + LAYERS, w.kind & LOGPROB, stopped && w.chain != NONE);
        MARK(20);
        turn_to(row.pos + 1, freqs);
        Best best = step.choose(epoch + LAYERS, stopped);
        MARK(21);
        bool usable = best.at != Best::NO_TOKEN, ends = stopped || !usable;

        token = usable ? best.at : 0;
        const u32* listed = stops + row.seq * STOPS;
        u32 entries = __ldg(listed);
        for (u32 i = 1; i < STOPS; i++) ends |= i <= entries && __ldg(listed + i) == token;
        u32 left = ends ? 0 : row.left - 1;
        if (blockIdx.x == 0 && t == 0 && w.kind & TOKEN) {
            float logprob = w.kind & LOGPROB && usable ? -logf(best.sum) : __int_as_float(0x7fc00000);
            put_out(outs + (row.round == 0 ? 0 : a.out_first + (row.round - 1) * a.out_next), token, logprob, usable, w.ticket, row.pos + 1);
            if (w.kind & SETS_LAST) last[row.slot] = token;
            if (w.chain != NONE) {
                u32 more = a.base == w.chain ? row.left : all_rows[w.chain].left;
                all_rows[w.chain] = {token, row.pos + 1, row.seq, row.slot, ends ? 0 : more - 1, row.round + 1, 0, 0};
            }
        }
        row.left = left;
        row.pos++;
        row.round++;
        MARK(22);
    }
    if (t == 0) *(volatile u32*)(room + AT_HALT) = 1;
    // All have read where it began, or it did not go on.
    if (t == 0 && blockIdx.x == 0) {
        u32 rounds = *(volatile u32*)(room + AT_ROUND);
        *(volatile u32*)(board + BOARD_EPOCH) = *(u32*)(room + AT_EPOCH) - 1 + rounds * (LAYERS + 1);
    }
#ifdef TIMES
    if (t == 0 && (blockIdx.x == 0 || blockIdx.x == BLOCKS - 1 || blockIdx.x == PEERS * (KV_HEADS - 1)) && a.rounds > 1)
        for (u32 p = 0; p < PHASES; p++)
            if (times_sums[p]) printf("block %d phase %d: %d cycles a token\n", (int)blockIdx.x, p, (int)(times_sums[p] / a.rounds));
#endif
    cluster_barrier();
}

// What the host asks for: bytes of a block's shared memory and of the board, threads of a block, slots of its ring.
extern "C" __device__ u32 tape_sizes[4] = {TAPE_SHARED, BOARD_BYTES, THREADS, SLOTS};
