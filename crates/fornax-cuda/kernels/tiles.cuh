// Matrices of halves as the products of prompts read them: tiles of 128 rows × 64 columns, 16 KB each, column tiles of a
// row of tiles side by side. A row of a tile is 128 bytes; its 16-byte parts are exchanged by the low three bits of the
// row (the tensor cores' 128-byte swizzle), so that a tile goes to shared memory by one plain copy.
#pragma once
#include "layout.cuh"

static const u32 TILE_ROWS = 128, TILE_BYTES = TILE_ROWS * 128;

// Where element (row, column) is, in bytes, for `tiles` column tiles.
__device__ inline u64 tile_at(u32 row, u32 column, u32 tiles) {
    u64 tile = (u64)(row / TILE_ROWS) * tiles + column / 64;
    u32 part = (column % 64 / 8) ^ (row & 7);
    return tile * TILE_BYTES + row % TILE_ROWS * 128 + part * 16 + column % 8 * 2;
}
