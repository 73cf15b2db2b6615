// Shapes of a model as constants, and where everything lies in a block's shared memory.
//
// Plain arithmetic: the kernel tells the host what it comes to (`tape_sizes`), and a program that runs the kernel by itself
// can include this file.
#pragma once

typedef unsigned int u32;

static const u32 GROUP = HEADS / KV_HEADS, PEERS = 8, BLOCKS = PEERS * CLUSTERS;
// Warps that compute; then one that fills the ring, and those that pass on what all blocks exchange.
static const u32 CONSUMERS = NW * 32, FORWARDERS = 3, THREADS = CONSUMERS + 32 + FORWARDERS * 32, PIECE_ROWS = NW * RB;
// Blocks of 32 of the inputs of products, and units of 32 such blocks.
static const u32 NB_WIDTH = WIDTH / 32, NB_HEADS = HEADS * DIM / 32, NB_FF = FF / 32;
// Rows of the queries, key and value of one KV head, and a block's share of them.
static const u32 HEAD_ROWS = (GROUP + 2) * DIM, QKV_ROWS = HEAD_ROWS / PEERS;
// Blocks of 32 of the result of attention: of a KV head, and at most of one owner.
static const u32 MIX_BLOCKS = GROUP * DIM / 32, OWN_BLOCKS = (MIX_BLOCKS + PEERS - 1) / PEERS;
// Blocks of gated outputs that remain where all blocks of threads have as many are shared by that many ranks each, or by none.
static const u32 GATES_LEFT = NB_FF % BLOCKS, PART_RANKS = GATES_LEFT == 0 || GATES_LEFT > 4 * CLUSTERS ? 1 : GATES_LEFT > 2 * CLUSTERS ? 2 : 4;
static const u32 ROWS_MAX = 256, GATES_MAX = 8;

// Where NEAR, a cluster multiplies the results of its own KV head by their columns of the output, and all add up what the
// clusters have. A unit then has UNIT_ROWS rows of SPAN blocks, of which those behind the head's are nothing.
#ifndef NEAR
#define NEAR 0
#endif
static const u32 SPAN = 8, UNIT_ROWS = 32 / SPAN;
static const u32 NEAR_ROWS = WIDTH / PEERS, NEAR_UNITS = (NEAR_ROWS + UNIT_ROWS - 1) / UNIT_ROWS;
static const u32 NEAR_PIECES = (NEAR_UNITS + PIECE_ROWS - 1) / PIECE_ROWS, NEAR_MOST = (NEAR_UNITS + NEAR_PIECES - 1) / NEAR_PIECES;
// Rows of queries, key and value come by warp, a multiple of those whose sums a warp has at once.
static const u32 P = NB_WIDTH > 64 ? 1 : NB_WIDTH > 32 || RB >= 4 ? 2 : 4;
static const u32 RAW_STRIDE = (QKV_ROWS + NW * P * RB - 1) / (NW * P * RB) * (P * RB), RAW_ROWS = PEERS * NW * RAW_STRIDE;

#ifdef __CUDACC__
#define ANYWHERE __host__ __device__
#else
#define ANYWHERE
#endif
ANYWHERE constexpr u32 more(u32 a, u32 b) { return a > b ? a : b; }
ANYWHERE constexpr u32 lines(u32 bytes) { return (bytes + 127) / 128 * 128; }
ANYWHERE constexpr u32 whole_units(u32 nb) { return (nb + 31) / 32 * 32; }

// Two inputs in turns: of QKV, of gate and up, and of the head; of the output of attention, and of down.
static const u32 NB_X0 = whole_units(NB_WIDTH), NB_X1 = whole_units(more(NB_HEADS, NB_FF));

static const u32 AT_BARS = 0;                                        // full, empty; then one for each hand-over
static const u32 AT_MISC = AT_BARS + 1024;                           // words of the block
static const u32 AT_LAYERS = AT_MISC + 1024;                         // TapeLayer
static const u32 AT_X0 = AT_LAYERS + LAYERS * 128;                   // blocks of 32 as three times three words and one
static const u32 AT_X1 = AT_X0 + NB_X0 * 48;
static const u32 AT_OWN = AT_X1 + NB_X1 * 48;                        // residuals of own rows, f32
static const u32 AT_GATED = AT_OWN + ROWS_MAX * 4;                   // own gated values, f32
static const u32 AT_PART = AT_GATED + GATES_MAX * 128;               // a block that ranks share, f32
static const u32 AT_RAW = AT_PART + (PART_RANKS > 1 ? 128 : 0);      // queries, key, value of the KV head, f32
static const u32 AT_HEADS = AT_RAW + lines(RAW_ROWS * 4);            // the same with norms and positions
static const u32 AT_MIXES = AT_HEADS + lines(HEAD_ROWS * 4);         // [NW][queries of a warp][DIM]
static const u32 WARP_HEADS = GROUP <= 4 ? GROUP : (GROUP + 1) / 2;  // query heads of a warp
static const u32 AT_TOKEN = AT_MIXES;                                // before the first layer: the embedding, f32
static const u32 AT_PARTS = AT_MIXES + more(lines(NW * WARP_HEADS * DIM * 4), lines(WIDTH * 4));  // [owned][PEERS][32], then maximum and sum
static const u32 PART_BYTES = 128 + 8;                               // of a rank; an owned block has first all results
static const u32 AT_TURNS = AT_PARTS + lines(OWN_BLOCKS * PEERS * PART_BYTES);
static const u32 AT_NEAR = AT_TURNS + lines(ROPES * PAIRS * 8);      // results of the KV head, as an input
static const u32 AT_RING = AT_NEAR + (NEAR ? lines(SPAN * 48) : 0);

// Where a launch's blocks meet, in global memory.
static const u32 BOARD_MIXES = 0;
static const u32 BOARD_MIDDLE = BOARD_MIXES + lines(48 * NB_HEADS);
static const u32 BOARD_GATED = BOARD_MIDDLE + lines(NEAR ? 4 * WIDTH * KV_HEADS : 8 * WIDTH);  // where NEAR, by KV head
static const u32 BOARD_LAYER = BOARD_GATED + lines(48 * NB_FF);
static const u32 BOARD_BEST = BOARD_LAYER + lines(8 * WIDTH);
static const u32 BOARD_EPOCH = BOARD_BEST + lines(16 * BLOCKS);  // of the last exchange
static const u32 BOARD_BYTES = BOARD_EPOCH + 128;
