// Products out of the tape, and their inputs: rounding to 8-bit blocks in shared memory, as fornax_plan::q8 says.
//
// The tape of a block brings its weights in the order in which they are used. One lane copies it to a ring, piece by
// piece, as fast as pieces are used up, through products, layers and tokens; a piece is one unit (a column of 32 blocks
// of weights) of up to RB rows for each warp. A warp adds up whole rows, a lane its own block of every unit.
#pragma once
#include "room.cuh"

#include "../rounding.cuh"
#include "links.cuh"

extern __shared__ __align__(128) u8 room[];

static const u32 UNIT_MAX = more(more(W_QKV::SLOT, W_O::SLOT), more(more(W_GU::SLOT, W_DOWN::SLOT), W_HEAD::SLOT));
static const u32 SLOT_STRIDE = lines(PIECE_ROWS * UNIT_MAX);

// Weights of a layer, by block, if all had as many.
static const u32 LAYER_BYTES = ((NB_WIDTH + 31) / 32 * (HEAD_ROWS * KV_HEADS * W_QKV::SLOT + 2 * FF * W_GU::SLOT) +
                                WIDTH * ((NB_HEADS + 31) / 32 * W_O::SLOT + (NB_FF + 31) / 32 * W_DOWN::SLOT)) / BLOCKS;
// Where the ring holds a layer, it is filled while attention goes on, and not while all wait for all: what is on its way
// makes others' few words late. Otherwise it is filled whenever there is room.
#ifndef WINDOWS
#define WINDOWS (LAYER_BYTES <= SLOTS * SLOT_STRIDE)
#endif
#ifndef UNDER_WAY
#define UNDER_WAY (WINDOWS ? 2u : 5u)
#endif
#ifndef UNDER_WAY_HEAD
#define UNDER_WAY_HEAD 6u
#endif
static const u32 TAPE_SHARED = AT_RING + SLOTS * SLOT_STRIDE;
static_assert(SLOTS <= 56, "barriers have room for 56 slots");
// Hand-overs: raw heads, parts of attention; then inputs: of O, of gate and up, of down, of the next layer.
static const u32 BAR_HEADS = AT_BARS + 2 * SLOTS * 8, BAR_MIXES = BAR_HEADS + 8, BAR_OUTPUT = BAR_HEADS + 16;
static const u32 BAR_GATED = BAR_HEADS + 24, BAR_DOWN = BAR_HEADS + 32, BAR_LAYER = BAR_HEADS + 40;
// Words of the block: two lists of best logits, by warp; that the launch is over; the token that may begin; twice the layer, and
// one where the ring may be filled at will.
static const u32 AT_BESTS = AT_MISC + 256, AT_HALT = AT_MISC + 768, AT_ROUND = AT_MISC + 772, AT_STEP = AT_MISC + 776;

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

// The place in the ring where a warp, or the lane that fills it, is.
struct Feed {
    u32 slot, parity;
    __device__ static u32 full(u32 slot) { return shared_address(room) + AT_BARS + slot * 8; }
    __device__ static u32 empty(u32 slot) { return full(slot + SLOTS); }
    __device__ static u32 at(u32 slot) { return shared_address(room) + AT_RING + slot * SLOT_STRIDE; }
    __device__ static u32 wrapped(u32 slot) { return slot >= SLOTS ? slot - SLOTS : slot; }
    __device__ void next(u32 n) {
        slot += n;
        if (slot >= SLOTS) {
            slot -= SLOTS;
            parity ^= 1;
        }
    }
};

// What a block does, as src/fast/tape lays it out: where its tape begins; rows of O and of down; blocks of 32 gated outputs;
// rows of the head.
struct TapeShare {
    u64 at;
    u32 row0, rows, gate0, gates, head0, heads, spare[8];
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

    // Whether the next piece may be asked for: it is of what the block works at, or nobody waits for an exchange.
    __device__ bool quiet() const {
        u32 now = *(volatile u32*)(room + AT_STEP);
        return !WINDOWS || (now & 1) || step <= now >> 1;
    }

    // The pieces of `rows` rows of one product, `most` rows a piece; false where the launch has come to its end.
    template <class W, u32 NB>
    __device__ bool fill(u32 rows, u32 most, u32 under_way = UNDER_WAY) {
        static const u32 U = (NB + 31) / 32;
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
            if (attends && !fill<W_QKV, NB_WIDTH>(QKV_ROWS, PIECE_ROWS)) return false;
            if (!fill<W_O, NB_HEADS>(s.rows, even)) return false;
            if (!fill<W_GU, NB_WIDTH>(64 * s.gates, PIECE_ROWS)) return false;
            if (!fill<W_DOWN, NB_FF>(s.rows, even)) return false;
            step++;
        }
        if (!fill<W_HEAD, NB_WIDTH>(s.heads, PIECE_ROWS, UNDER_WAY_HEAD)) return false;
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

// Sums over the lanes of N numbers each; the 32 / N lanes from n · 32 / N on end up with sum n. All get the sum of `all`.
template <u32 N, bool ALL>
__device__ __forceinline__ float lane_sums(float (&a)[N], float& all, u32 lane) {
    u32 n = N;
#pragma unroll
    for (u32 bit = 16; bit > 0; bit /= 2) {
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

// Units of a row that are waited for together.
__device__ constexpr u32 chunk_of(u32 units) { return units % 4 == 0 ? 4 : units % 3 == 0 ? 3 : units % 2 == 0 ? 2 : 1; }

// `rows` rows of NB blocks, `most` a piece, by the input at X. P pieces of rows of one unit leave their sums together:
// out(i, v), by whole warps, where the 32 / (P · RB) neighbouring lanes have the sum of the same row i, which may be
// none of the block's. Lanes wait for a piece each, and give its place back. Where the input is normed, its blocks bring
// their sums of squares, and the factor is put to the sums here.
template <class W, u32 NB, u32 X, u32 P, bool NORMED, class Out>
__device__ __forceinline__ void product(Feed& feed, u32 rows, u32 most, float eps, Out&& out) {
    static const u32 U = (NB + 31) / 32, N = P * RB, C = U == 1 ? P : chunk_of(U);
    static_assert(P == 1 || U == 1, "the tape has the units of a row before the next rows");
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 first = 0; first < rows; first += most * P) {
        float acc[N];
#pragma unroll
        for (u32 i = 0; i < N; i++) acc[i] = 0.0f;
        float square = 0.0f, spare = 0.0f;
        u32 n = U > 1 ? C : min((rows - first + most - 1) / most, P);
#pragma unroll 1
        for (u32 u = 0; u < U; u += C) {
            u32 mine = feed.slot + lane, wraps = mine >= SLOTS;
            mine = Feed::wrapped(mine);
            POLLS;
            while (!__all_sync(0xffffffffu, lane >= n || bar_done(Feed::full(mine), feed.parity ^ wraps))) {
                WATCHED("weights");
            }
            W next[RB];
            Act a = input_block<W, X>(u * 32 + lane, spare);
            square += spare;
            take_piece(next, feed.slot, warp, lane);
#pragma unroll
            for (u32 c = 0; c < C; c++) {
                W w[RB];
#pragma unroll
                for (u32 r = 0; r < RB; r++) w[r] = next[r];
                Act b = a;
                // What lies behind the last row or piece is something old, and nobody looks at the sum.
                if (c + 1 < C) {
                    if (U > 1) a = input_block<W, X>((u + c + 1) * 32 + lane, spare), square += spare;
                    take_piece(next, Feed::wrapped(feed.slot + c + 1), warp, lane);
                }
                u32 p = U == 1 ? c : 0;
#pragma unroll
                for (u32 r = 0; r < RB; r++) acc[p * RB + r] = w[r].dot(b, acc[p * RB + r]);
            }
            __syncwarp();
            if (lane < n) bar_arrive(Feed::empty(mine));
            feed.next(n);
        }
        float v = lane_sums<N, NORMED>(acc, square, lane);
        if (NORMED) v *= rsqrtf(square / (float)WIDTH + eps);
        // Of the piece, then of all.
        u32 p = lane / (32 / N) / RB, i = lane / (32 / N) % RB * NW + warp;
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

// Loads again and again until all lanes have what they wait for. Two loads are under way, half a journey apart.
template <class Load, class Ready, class Value>
__device__ __forceinline__ void poll(Value& v, Load&& load, Ready&& ready) {
    Value other;
    load(v);
    if (__all_sync(0xffffffffu, ready(v))) return;
    load(v);
    u32 begin = clock();
    while (clock() - begin < 300) {
    }
    load(other);
    POLLS;
    while (true) {
        if (__all_sync(0xffffffffu, ready(v))) return;
        load(v);
        if (__all_sync(0xffffffffu, ready(other))) {
            v = other;
            return;
        }
        load(other);
        WATCHED("an exchange");
    }
}

// Warps that read what all blocks exchange, each rank its part, and pass it on within the cluster.
struct Forwarder {
    u32 rank, warp, lane;
    u32 peer[PEERS];  // shared memory of the blocks of the cluster

    // NB blocks that their owners have rounded.
    template <u32 NB, u32 BAR>
    __device__ void blocks(const u8* board, u32 epoch) {
        u32 begin = first_block(NB, rank) * 3, end = first_block(NB, rank + 1) * 3;
#pragma unroll 1
        for (u32 first = begin + warp * 32; first < end; first += FORWARDERS * 32) {
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

    // A row, times the gains, rounded.
    template <u32 BAR>
    __device__ void row(const u8* board, u32 epoch, const float* gains) {
        u32 begin = first_block(NB_WIDTH, rank), end = first_block(NB_WIDTH, rank + 1);
        struct Quad {
            Pair a, b;
        };
#pragma unroll 1
        for (u32 first = begin + warp * 4; first < end; first += FORWARDERS * 4) {
            u32 b = first + lane / 8, quad = min(b, end - 1) * 8 + lane % 8;
            bool in = b < end;
            float4 g = __ldg((const float4*)gains + quad);
            const u64* from = (const u64*)board + quad * 4;
            Quad p;
            poll(
                p,
                [&](Quad& x) {
                    x.a = get_pair(from);
                    x.b = get_pair(from + 2);
                },
                [&](const Quad& x) { return is_of(x.a.a, epoch) && is_of(x.a.b, epoch) && is_of(x.b.a, epoch) && is_of(x.b.b, epoch); });
            float4 v = {value_of(p.a.a), value_of(p.a.b), value_of(p.b.a), value_of(p.b.b)};
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

// A block of 32, an element a lane, rounded and exchanged. By a whole warp.
__device__ inline void put_block(u8* to, float v, u32 epoch, u32 lane) {
    u32 bits = largest_of_warp(__float_as_uint(v) & 0x7fffffffu);
    float top = __uint_as_float(bits), inverse = __fdividef(127.0f, top);
    bool none = top < 3.8e-37f, broken = bits >= 0x7f800000u;
    if (none || broken) inverse = 0.0f;
    u32 q = (u32)__float2int_rn(v * inverse) & 255;
    q |= __shfl_down_sync(0xffffffffu, q, 1) << 8;
    q |= __shfl_down_sync(0xffffffffu, q, 2) << 16;
    // Lane 4 i has word i; lane j < 3 takes words 3 j and on, the last of them the scale.
    u32 a = __shfl_sync(0xffffffffu, q, lane * 12), b = __shfl_sync(0xffffffffu, q, lane * 12 + 4);
    u32 c = __shfl_sync(0xffffffffu, q, lane * 12 + 8);
    float scale = broken ? __int_as_float(0x7fc00000) : none ? 0.0f : top * (1.0f / 127.0f);
    if (lane < 3) put_three(to + lane * 16, a, b, lane == 2 ? __float_as_uint(scale) : c, epoch);
}
