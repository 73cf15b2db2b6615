// Products out of the tape, and their inputs: rounding to 8-bit blocks in shared memory, as fornax_plan::q8 says.
//
// The tape of a block brings its weights in the order in which they are used. One lane copies it to a ring, piece by
// piece, as fast as pieces are used up, through products, layers and tokens; a piece is one unit (a column of 32 blocks
// of weights) of up to RB rows for each warp. A warp adds up whole rows, a lane its own block of every unit.
#pragma once
#include "room.cuh"

#include "../rounding.cuh"
#include "links.cuh"

#include "forms.cuh"

extern __shared__ __align__(128) u8 room[];

typedef Taped<W_QKV>::Form FormQkv;
typedef Taped<W_O>::Form FormO;
typedef Taped<W_GU>::Form FormGu;
typedef Taped<W_DOWN>::Form FormDown;
typedef Taped<W_HEAD>::Form FormHead;

static const u32 UNIT_MAX = more(more(FormQkv::SLOT, FormO::SLOT), more(more(FormGu::SLOT, FormDown::SLOT), FormHead::SLOT));
static const u32 SLOT_STRIDE = lines(PIECE_ROWS * UNIT_MAX);

// Weights of a layer, by block, if all had as many.
static const u32 LAYER_BYTES = ((NB_WIDTH + 31) / 32 * (HEAD_ROWS * KV_HEADS * FormQkv::SLOT + 2 * FF * FormGu::SLOT) +
                                WIDTH * ((NB_HEADS + 31) / 32 * FormO::SLOT + (NB_FF + 31) / 32 * FormDown::SLOT)) / BLOCKS;
// Where the ring holds a layer, it is filled while attention goes on, and not while all wait for all: what is on its way
// makes others' few words late. Otherwise it is filled whenever there is room.
#ifndef WINDOWS
#define WINDOWS (LAYER_BYTES <= SLOTS * SLOT_STRIDE)
#endif
// Whether blocks without a KV head read rows of layers' ends, too.
#define ALL_READ_ROWS (WINDOWS || NEAR)
#ifndef UNDER_WAY
#define UNDER_WAY (WINDOWS ? 2u : 5u)
#endif
#ifndef UNDER_WAY_HEAD
#define UNDER_WAY_HEAD 6u
#endif
// Hand-overs: raw heads, parts of attention; then inputs: of O, of gate and up, of down, of the next layer.
static const u32 BAR_HEADS = AT_BARS + 2 * SLOTS * 8, BAR_MIXES = BAR_HEADS + 8, BAR_OUTPUT = BAR_HEADS + 16;
static const u32 BAR_GATED = BAR_HEADS + 24, BAR_DOWN = BAR_HEADS + 32, BAR_LAYER = BAR_HEADS + 40, BAR_PART = BAR_HEADS + 48;
// Words of the block: two lists of best logits, by warp; that the launch is over; the token that may begin; twice the layer, and
// one where the ring may be filled at will; the launch's first exchange; four times the layer and what is done of it.
static const u32 AT_BESTS = AT_MISC + 256, AT_HALT = AT_MISC + 768, AT_ROUND = AT_MISC + 772, AT_STEP = AT_MISC + 776;
static const u32 AT_EPOCH = AT_MISC + 780, AT_DONE = AT_MISC + 784;
// Barriers of runs of keys; and how many have been asked for.
static const u32 AT_RUN_BARS = AT_BARS + 512, AT_ASKED = AT_MISC + 788;
static_assert(SLOTS <= 28, "barriers have room for 28 slots");

#ifdef TIMES
#ifndef WATCH
extern "C" int printf(const char*, ...);
#endif
static const u32 PHASES = 24;
__shared__ long long times_at, times_sums[PHASES];
#define MARK(phase)                                                                                                    \
    {                                                                                                                  \
        if (threadIdx.x == 0) {                                                                                        \
            long long now = clock64();                                                                                 \
            times_sums[phase] += now - times_at;                                                                       \
            times_at = now;                                                                                            \
        }                                                                                                              \
    }
#else
#define MARK(phase)
#endif

// The place in the ring where a warp, or the lane that fills it, is; the ring may be short of its last slots.
struct Feed {
    u32 slot, parity, slots;
    __device__ static u32 full(u32 slot) { return shared_address(room) + AT_BARS + slot * 8; }
    __device__ static u32 empty(u32 slot) { return full(slot + SLOTS); }
    __device__ static u32 at(u32 slot) { return shared_address(room) + AT_RING + slot * SLOT_STRIDE; }
    __device__ u32 wrapped(u32 slot) const { return slot >= slots ? slot - slots : slot; }
    __device__ void next(u32 n) {
        slot += n;
        if (slot >= slots) {
            slot -= slots;
            parity ^= 1;
        }
    }
};

// What a block does, as src/fast/tape lays it out: where its tape begins; rows of O and of down; blocks of 32 gated outputs;
// rows of the head.
struct TapeShare {
    u64 at;
    u32 row0, rows, gate0, gates, head0, heads;
    // A block of gated outputs that is shared: its number, the first output here, rows of gate and up here, the rank that rounds
    // it, and whether that is this one.
    u32 part_gate, part_first, part_rows, part_rank, part_own, spare[3];
};

// Rows of a piece where `rows` are cut into as few, and as equal, pieces as can be.
__device__ inline u32 even_pieces(u32 rows) {
    u32 n = (rows + PIECE_ROWS - 1) / PIECE_ROWS;
    return n ? (rows + n - 1) / n : PIECE_ROWS;
}

// The lane that keeps the ring full.
struct Filler {
    Feed f, known;  // where the next piece goes; the oldest that is not known to have come
    const u8 *from, *begin;  // in the tape
    u64 policy;
    u32 issued, arrived, even;
    u32 step;  // layers (and heads) that are filled, since the launch began
    bool boxed;  // whether the launch has very many keys, and the ring is short

    // Whether the next piece may be asked for: it is of what the block works at, or nobody waits for an exchange. In a short
    // ring they are asked for whenever there is room.
    __device__ bool quiet() const {
        u32 now = *(volatile u32*)(room + AT_STEP);
        return !WINDOWS || boxed || (now & 1) || step <= now >> 1;
    }

    // The pieces of `rows` rows of one product, `most` rows a piece; false where the launch has come to its end.
    template <class W, u32 NB>
    __device__ bool fill(u32 rows, u32 most, u32 under_way = UNDER_WAY) {
        static const u32 U = (NB + 31) / 32;
        // Fewer than there are slots: a phase that is looked for must not be two behind.
        under_way = min(under_way, f.slots - 1);
#pragma unroll 1
        for (u32 left = rows; left > 0;) {
            u32 m = min(left, most), bytes = m * W::SLOT;
            left -= m;
#pragma unroll 1
            for (u32 u = 0; u < U; u++) {
                POLLS;
                while (!bar_done(Feed::empty(f.slot), f.parity ^ 1) || !quiet()) {
                    if (*(volatile u32*)(room + AT_HALT)) return false;
                    WATCHED("room in the ring");
                }
                // What is on its way in front of others' few words makes them late.
                while (issued - arrived >= under_way) {
                    bar_wait(Feed::full(known.slot), known.parity);
                    known.next(1);
                    arrived++;
                }
                bar_expect(Feed::full(f.slot), bytes);
                bulk_copy(Feed::at(f.slot), from, bytes, Feed::full(f.slot), policy);
                from += bytes;
                issued++;
                f.next(1);
            }
        }
        return true;
    }

    __device__ bool token(const TapeShare& s, bool attends) {
        from = begin;
#pragma unroll 1
        for (u32 layer = 0; layer < LAYERS; layer++) {
            if (attends && !fill<FormQkv, NB_WIDTH>(QKV_ROWS, PIECE_ROWS)) return false;
            if (NEAR) {
                if (attends && !fill<FormO, 32>(NEAR_UNITS, NEAR_MOST)) return false;
            } else if (!fill<FormO, NB_HEADS>(s.rows, even)) {
                return false;
            }
            if (!fill<FormGu, NB_WIDTH>((PART_RANKS > 1 ? s.part_rows : 0) + 64 * s.gates, PIECE_ROWS)) return false;
            if (!fill<FormDown, NB_FF>(s.rows, even)) return false;
            step++;
        }
        if (!fill<FormHead, NB_WIDTH>(s.heads, PIECE_ROWS, UNDER_WAY_HEAD)) return false;
        step++;
        return true;
    }

    // Nothing may be on its way into the memory of a block that has ended.
    __device__ void drain() {
        for (; arrived < issued; arrived++) {
            bar_wait(Feed::full(known.slot), known.parity);
            known.next(1);
        }
    }
};

// Sums over OVER neighbouring lanes of N numbers each; the OVER / N lanes from n · OVER / N on end up with sum n. All get the
// sum of `all`.
template <u32 N, bool ALL, u32 OVER>
__device__ __forceinline__ float lane_sums(float (&a)[N], float& all, u32 lane) {
    u32 n = N;
#pragma unroll
    for (u32 bit = OVER / 2; bit > 0; bit /= 2) {
        if (ALL) all += __shfl_xor_sync(0xffffffffu, all, bit);
        if (n > 1) {
            bool up = lane & bit;
#pragma unroll
            for (u32 i = 0; i < n / 2; i++) {
                float keep = up ? a[i + n / 2] : a[i], give = up ? a[i] : a[i + n / 2];
                a[i] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
            }
            n /= 2;
        } else {
            a[0] += __shfl_xor_sync(0xffffffffu, a[0], bit);
        }
    }
    return a[0];
}

// Block b of an input; `spare` is the word that its owner had to spare.
template <class W, u32 X>
__device__ inline Act input_block(u32 b, float& spare) {
    u32 x = shared_address(room) + X + b * 48;
    Vec4 p = shared16(x), q = shared16(x + 16), r = shared16(x + 32);
    Act a;
    spare = __uint_as_float(p.w);
    a.a = {p.x, p.y, p.z, q.x};
    a.b = {q.y, q.z, r.x, r.y};
    a.d = __uint_as_float(r.z);
    if (W::SUMS) {
        Vec4 ones = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        a.sums = (dot16(a.a, ones, 0) & 0xffff) | dot16(a.b, ones, 0) << 16;
    }
    return a;
}

// A warp's rows of a piece, to registers.
template <class W>
__device__ __forceinline__ void take_piece(W (&w)[RB], u32 slot, u32 warp, u32 lane) {
    u32 at = Feed::at(slot) + warp * W::SLOT;
#pragma unroll
    for (u32 r = 0; r < RB; r++) w[r].load(at + r * NW * W::SLOT, lane);
}

// Units of a row that are waited for together: few where the ring does not hold them for long.
__device__ constexpr u32 chunk_of(u32 units) { return WINDOWS && units % 4 == 0 ? 4 : units % 3 == 0 ? 3 : units % 2 == 0 ? 2 : 1; }

// `rows` rows of NB blocks, `most` a piece, by the input at X, which is there after ready(). P pieces of rows of one unit
// leave their sums together: out(i, v), by whole warps, where the 32 / (P · RB) neighbouring lanes have the sum of the same
// row i, which may be none of the block's. Lanes wait for a piece each, and give its place back. Where the input is normed,
// its blocks bring their sums of squares, and the factor is put to the sums here. Units may have several rows, of OVER
// blocks each: then OVER lanes take the place of 32.
template <class W, u32 NB, u32 X, u32 P, bool NORMED, bool EARLY = NEAR, u32 OVER = 32, class Ready, class Out>
__device__ __forceinline__ void product(Feed& feed, u32 rows, u32 most, float eps, Ready&& ready, Out&& out) {
    static const u32 U = (NB + 31) / 32, N = P * RB, C = P > 1 ? P * U : chunk_of(U);
    static_assert(C <= 8, "pieces are waited for together");
    // Places are given back as they are used where others wait for them.
    static const bool ONE_BY_ONE = !WINDOWS && P == 1;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!EARLY || rows == 0) ready();
#pragma unroll 1
    for (u32 first = 0; first < rows; first += most * P) {
        float acc[N];
#pragma unroll
        for (u32 i = 0; i < N; i++) acc[i] = 0.0f;
        float square = 0.0f, spare = 0.0f;
        u32 n = P > 1 ? min((rows - first + most - 1) / most, P) * U : C;
#pragma unroll 1
        for (u32 u = 0; u < U; u += P > 1 ? U : C) {
            u32 mine = feed.slot + lane, wraps = mine >= feed.slots;
            mine = feed.wrapped(mine);
            auto there = [&] { return __all_sync(0xffffffffu, lane >= n || bar_done(Feed::full(mine), feed.parity ^ wraps)); };
            W next[RB];
            // Weights that are there are taken before the input.
            bool early = EARLY && there();
            if (early) take_piece(next, feed.slot, warp, lane);
            if (EARLY && first == 0 && u == 0) ready();
            if (!early) {
                POLLS;
                while (!there()) {
                    WATCHED("weights");
                }
                take_piece(next, feed.slot, warp, lane);
            }
            // Of all units that are taken together, where they are taken more than once.
            static const u32 HELD = P > 1 ? U : 1;
            Act held[HELD];
#pragma unroll
            for (u32 h = 0; h < HELD; h++) held[h] = input_block<W, X>((u + h) * 32 + lane % OVER, spare), square += spare;
#pragma unroll
            for (u32 c = 0; c < C; c++) {
                if (P > 1 && c >= n) break;
                W w[RB];
#pragma unroll
                for (u32 r = 0; r < RB; r++) w[r] = next[r];
                Act b = held[P > 1 ? c % U : 0];
                // What lies behind the last row or piece is something old, and nobody looks at the sum.
                if (c + 1 < C) {
                    if (P == 1) held[0] = input_block<W, X>((u + c + 1) * 32 + lane, spare), square += spare;
                    take_piece(next, feed.wrapped(feed.slot + c + 1), warp, lane);
                }
                u32 p = P > 1 ? c / U : 0;
#pragma unroll
                for (u32 r = 0; r < RB; r++) acc[p * RB + r] = w[r].dot(b, acc[p * RB + r]);
                if (ONE_BY_ONE) {
                    __syncwarp();
                    if (lane == c) bar_arrive(Feed::empty(mine));
                }
            }
            if (!ONE_BY_ONE) {
                __syncwarp();
                if (lane < n) bar_arrive(Feed::empty(mine));
            }
            feed.next(n);
        }
        float v = lane_sums<N, NORMED, OVER>(acc, square, lane);
        if (NORMED) v *= rsqrtf(square / (float)WIDTH + eps);
        // Of the piece, then of all.
        u32 p = lane % OVER / (OVER / N) / RB, i = lane % OVER / (OVER / N) % RB * NW + warp;
        out(i < most ? first + p * most + i : rows, v);
    }
}

// Lane j < 3 of the eight of a block gets words 3 j and on, the last of them the scale.
__device__ inline Three three_of(const Rounded& r, u32 lane) {
    float scale = r.scale();
    u32 from = (lane & 24) + (lane & 7) * 3;
    Three t;
    t.a = __shfl_sync(0xffffffffu, r.word, from);
    t.b = __shfl_sync(0xffffffffu, r.word, from + 1);
    t.c = __shfl_sync(0xffffffffu, r.word, from + 2);
    if ((lane & 7) == 2) t.c = __float_as_uint(scale);
    return t;
}

// Of NB blocks, rank r of a cluster passes on those from first_block(NB, r) on, four at a time where it rounds them.
static const u32 RANK_GROUPS = ((NB_WIDTH + PEERS - 1) / PEERS + 3) / 4;
__device__ inline u32 first_block(u32 nb, u32 rank) { return nb * rank / PEERS; }

// Over the eight lanes of a block.
__device__ inline float block_sum(float v) {
#pragma unroll
    for (u32 d = 1; d < 8; d *= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

// The first layer's input, out of the embedding in shared memory, by all warps that compute.
__device__ inline void round_token(const float* gains) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = warp; i < PEERS * RANK_GROUPS; i += NW) {
        u32 rank = i / RANK_GROUPS, b = first_block(NB_WIDTH, rank) + i % RANK_GROUPS * 4 + lane / 8;
        bool in = b < first_block(NB_WIDTH, rank + 1);
        u32 quad = in ? b * 8 + lane % 8 : 0;
        float4 v = *(const float4*)(room + AT_TOKEN + quad * 16), g = __ldg((const float4*)gains + quad);
        float square = in ? v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w : 0.0f;
        v.x *= g.x, v.y *= g.y, v.z *= g.z, v.w *= g.w;
        Three t = three_of(round_quad(v), lane);
        square = block_sum(square);
        if (in && lane % 8 < 3) *(uint4*)(room + AT_X0 + b * 48 + lane % 8 * 16) = {t.a, t.b, t.c, __float_as_uint(square)};
    }
    meet();
}

// Waits for an input that the cluster passes on, and asks for the next.
template <u32 BAR, u32 NB>
__device__ inline void receive(u32 parity) {
    u32 bar = shared_address(room) + BAR;
    bar_wait(bar, parity);
    if (threadIdx.x == 0) bar_expect(bar, NB * 48);
}

// Loads again and again until all lanes have what they wait for. More loads under way at once would make others' values late.
template <class Load, class Ready, class Value>
__device__ __forceinline__ void poll(Value& v, Load&& load, Ready&& ready) {
    POLLS;
    do {
        load(v);
        WATCHED("an exchange");
    } while (!__all_sync(0xffffffffu, ready(v)));
}

// Nanoseconds between looks at what the block has done.
#ifndef PATIENCE
#define PATIENCE 20
#endif

// Warps that read what all blocks exchange, each rank its part, and pass it on within the cluster.
struct Forwarder {
    u32 rank, warp, lane;
    u32 all;          // who do this
    u32 peer[PEERS];  // shared memory of the blocks of the cluster
    float4 x;         // where NEAR, residuals of the rank's part

    // Until the block has done its own part, others have not either, and who asks is in the way.
    __device__ void until(u32 done) const {
        POLLS;
        while ((int)(*(volatile u32*)(room + AT_DONE) - done) < 0) {
            __nanosleep(PATIENCE);
            WATCHED("its own part");
        }
        __syncwarp();
    }

    // NB blocks that their owners have rounded.
    template <u32 NB, u32 BAR>
    __device__ void blocks(const u8* board, u32 epoch) {
        u32 begin = first_block(NB, rank) * 3, end = first_block(NB, rank + 1) * 3;
#pragma unroll 1
        for (u32 first = begin + warp * 32; first < end; first += all * 32) {
            u32 at = first + lane;
            bool in = at < end;
            Three v;
            const u8* from = board + min(at, end - 1) * 16;
            poll(v, [&](Three& x) { x = get_three(from); }, [&](const Three& x) { return x.epoch == epoch; });
            if (in) {
#pragma unroll
                for (u32 p = 0; p < PEERS; p++) send4(peer[p] + AT_X1 + at * 16, peer[p] + BAR, v.a, v.b, v.c, 0);
            }
            __syncwarp();
        }
    }

    // Four sums of what the clusters have, in the order of KV heads.
    __device__ float4 parts(const u8* from, u32 epoch) {
        struct Parts {
            Quad h[KV_HEADS];
        } p;
        poll(
            p,
            [&](Parts& x) {
#pragma unroll
                for (u32 i = 0; i < KV_HEADS; i++) {
                    Three t = get_three(from + i * WIDTH * 4);
                    x.h[i] = {t.a, t.b, t.c, t.epoch};
                }
            },
            [&](const Parts& x) {
                u32 other = 0;
#pragma unroll
                for (u32 i = 0; i < KV_HEADS; i++) other |= x.h[i].other(epoch);
                return other == 0;
            });
        float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < KV_HEADS; i++) v.x += p.h[i].value(0), v.y += p.h[i].value(1), v.z += p.h[i].value(2), v.w += p.h[i].value(3);
        return v;
    }

    // Residuals of the first layer.
    __device__ void begin() {
        u32 quad = min(warp * 4 + lane / 8, RANK_GROUPS * 4 - 1) * 8 + lane % 8;
        asm volatile("" ::: "memory");
        x = ((const float4*)(room + AT_OWN))[quad];
    }

    // A row, times the gains, rounded; or, where it comes in PARTS, the sum of what the clusters have. Where NEAR, residuals
    // stay here.
    template <u32 BAR, bool PARTS>
    __device__ void row(const u8* board, u32 epoch, const float* gains) {
        u32 begin = first_block(NB_WIDTH, rank), end = first_block(NB_WIDTH, rank + 1);
        static_assert(!NEAR || (RANK_GROUPS <= FORWARDERS && RANK_GROUPS * 128 <= ROWS_MAX), "residuals are of one round");
#pragma unroll 1
        for (u32 first = begin + warp * 4; first < end; first += all * 4) {
            u32 b = first + lane / 8, quad = min(b, end - 1) * 8 + lane % 8;
            bool in = b < end;
            float4 g = __ldg((const float4*)gains + quad), v;
            if (PARTS) {
                v = parts(board + quad * 16, epoch);
            } else {
                struct Pairs {
                    Pair a, b;
                } p;
                const u64* from = (const u64*)board + quad * 4;
                poll(
                    p,
                    [&](Pairs& x) {
                        x.a = get_pair(from);
                        x.b = get_pair(from + 2);
                    },
                    [&](const Pairs& x) { return is_of(x.a.a, epoch) && is_of(x.a.b, epoch) && is_of(x.b.a, epoch) && is_of(x.b.b, epoch); });
                v = {value_of(p.a.a), value_of(p.a.b), value_of(p.b.a), value_of(p.b.b)};
            }
            if (NEAR) {
                v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
                x = v;
            }
            float square = block_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w);
            v.x *= g.x, v.y *= g.y, v.z *= g.z, v.w *= g.w;
            Three t = three_of(round_quad(v), lane);
            if (in && lane % 8 < 3) {
                u32 to = AT_X0 + b * 48 + lane % 8 * 16, spare = lane % 8 == 0 ? __float_as_uint(square) : 0;
#pragma unroll
                for (u32 q = 0; q < PEERS; q++) send4(peer[q] + to, peer[q] + BAR, t.a, t.b, t.c, spare);
            }
            __syncwarp();
        }
    }
};

// A block of 32, an element a lane, rounded: lane l gets words 3 (l % 3) and on, the last of them the scale. By a whole warp.
__device__ inline Three block_of(float v, u32 lane) {
    Rounding how = Rounding::of(largest_of_warp(__float_as_uint(v) & 0x7fffffffu));
    u32 q = (u32)__float2int_rn(v * how.inverse) & 255;
    q |= __shfl_down_sync(0xffffffffu, q, 1) << 8;
    q |= __shfl_down_sync(0xffffffffu, q, 2) << 16;
    // Lane 4 i has word i.
    u32 part = lane % 3;
    Three t;
    t.a = __shfl_sync(0xffffffffu, q, part * 12);
    t.b = __shfl_sync(0xffffffffu, q, part * 12 + 4);
    t.c = __shfl_sync(0xffffffffu, q, part * 12 + 8);
    if (part == 2) t.c = __float_as_uint(how.scale());
    return t;
}
// Such a block, to all.
__device__ inline void put_block(u8* to, float v, u32 epoch, u32 lane) {
    Three t = block_of(v, lane);
    if (lane < 3) put_three(to + lane * 16, t.a, t.b, t.c, epoch);
}
// Such a block, to the same place of all blocks of the cluster.
__device__ inline void send_block(u32 at, u32 bar, float v, u32 lane) {
    Three t = block_of(v, lane);
    u32 base = shared_address(room), peer = min(lane / 3, PEERS - 1);
    if (lane < 3 * PEERS) send4(at_peer(base + at + lane % 3 * 16, peer), at_peer(base + bar, peer), t.a, t.b, t.c, 0);
}
