// Attention of sequences that give a step many rows: prompts and their parts. No score matrix: keys and values of one
// block of the cache at a time go to shared memory, scores and means stay in registers.
//
// A block takes SPAN rows of the step and the query heads that share a KV head, together 64 rows of the tensor cores'
// products, 16 a warp. Rows of several sequences in one span are gone through one sequence after the other. Blocks with
// the longest contexts come first. With FINE, queries and weights are two halves each, the second for what the first lacks.
#include "../cache.cuh"
#include "../tiles.cuh"

#ifndef DIM
#define DIM 128
#define SHARE 2
#define Kv KvF16
#define FINE 0
#endif

static const u32 THREADS = 128, SLOTS = 64, SPAN = SLOTS / SHARE, FEW = 8 / SHARE;
static const u32 PITCH = DIM * 2 + 16, PLANE = KV_BLOCK * PITCH, STEPS = DIM / 16;
static const float NOTHING = -1e30f;

struct ManyArgs {
    u32 rows, heads, kv_heads, stride, window, tokens, to, to_stride;
    float scale, softcap;
    u32 parts;
};


// One block of the cache to shared memory, for one KV head. What is behind its first `keys` keys is zero: it may be
// anything, and nothing times NaN is NaN.
__device__ inline void fetch(u32 to, const u8* pool, u64 elements, u64 first, u32 keys, u32 kv_heads, u32 kv_head) {
#pragma unroll
    for (u32 i = threadIdx.x; i < KV_BLOCK * DIM / 8; i += THREADS) {
        u32 key = i / (DIM / 8), part = i % (DIM / 8);
        u64 at = ((first + key) * kv_heads + kv_head) * DIM + part * 8;
        if (Kv::PLAIN) {
            copy16_if(to + key * PITCH + part * 16, pool + at * 2, key < keys);
        } else {
            Vec4 v = {0, 0, 0, 0};
            if (key < keys) v = Kv::eight(pool, elements, at);
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + key * PITCH + part * 16), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        }
    }
}

struct Result {
    float* rows;
    u8* bytes;
    float *scales, *sums;
};

// The means of one row: lane t has columns 8i + 2t and 8i + 2t + 1 of all i.
__device__ inline void put_row(const ManyArgs& a, const Result& o, const float (&mix)[DIM / 8][4], u32 h, float factor, u32 row, u32 head, bool there, u32 t) {
    if (a.to == TO_ROUND) {
#pragma unroll
        for (u32 b = 0; b < DIM / 32; b++) {
            float v[8];
            u32 bits = 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                v[i] = mix[4 * b + i / 2][2 * h + i % 2] * factor;
                bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
            }
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
            float top = __uint_as_float(bits), inverse = __fdividef(127.0f, top);
            bool none = top < 3.8e-37f, broken = bits >= 0x7f800000u;
            if (none || broken) inverse = 0.0f;
            int sum = 0;
            u32 block = (head * DIM + 32 * b) / 32;
            u8* to = o.bytes + ((u64)row * (a.heads * DIM / 32) + block) * 32;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                int x = __float2int_rn(v[2 * i] * inverse), y = __float2int_rn(v[2 * i + 1] * inverse);
                sum += x + y;
                if (there) *(u16*)(to + 8 * i + 2 * t) = (u16)((x & 255) | (y & 255) << 8);
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float scale = none ? 0.0f : top * (1.0f / 127.0f);
            if (broken) scale = __int_as_float(0x7fc00000);
            if (there && t == 0) {
                o.scales[(u64)block * a.to_stride + row] = scale;
                o.sums[(u64)block * a.to_stride + row] = scale * (float)sum;
            }
        }
        return;
    }
    if (!there) return;
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++) {
        float x = mix[i][2 * h] * factor, y = mix[i][2 * h + 1] * factor;
        u32 at = head * DIM + 8 * i + 2 * t;
        if (a.to == TO_TILES) {
            *(u32*)(o.bytes + tile_at(row, at, (a.heads * DIM + 63) / 64)) = halves(within_half(x), within_half(y));
        } else {
            *(float2*)(o.rows + (u64)row * a.heads * DIM + at) = {x, y};
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, DIM <= 128 ? 3 - FINE : 1)
    many(ManyArgs a, const float* q, const Row* rows, const u32* tables, const u8* keys, const u8* values,
         const float* sinks, float* out_rows, u8* out_bytes, float* out_scales, float* out_sums) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ Row span[SPAN];
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    u32 kv_head = blockIdx.x, base = (gridDim.y - 1 - blockIdx.y) * SPAN, n = min(SPAN, a.rows - base);
    let_next_begin();
    await_before();
    if (thread < n) span[thread] = rows[base + thread];
    __syncthreads();
    float factor = a.scale * (a.softcap != 0.0f ? 1.0f : LOG2E);
    u32 fragments[STEPS][4], rest[FINE ? STEPS : 1][4];
    u32 slot_of[2], row_of[2], head_of[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        slot_of[h] = warp * 16 + h * 8 + g;
        row_of[h] = min(slot_of[h] / SHARE, n - 1);
        head_of[h] = kv_head * SHARE + slot_of[h] % SHARE;
        const float* from = q + ((u64)(base + row_of[h]) * a.heads + head_of[h]) * DIM + 2 * t;
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            float2 x = *(const float2*)(from + 16 * i), y = *(const float2*)(from + 16 * i + 8);
            fragments[i][h] = halves(x.x * factor, x.y * factor);
            fragments[i][2 + h] = halves(y.x * factor, y.y * factor);
            if (FINE) {
                rest[i * FINE][h] = halves_left(fragments[i][h], x.x * factor, x.y * factor);
                rest[i * FINE][2 + h] = halves_left(fragments[i][2 + h], y.x * factor, y.y * factor);
            }
        }
    }
    float mix[DIM / 8][4], top[2] = {NOTHING, NOTHING}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) mix[i][k] = 0.0f;
    u64 elements = (u64)a.tokens * a.kv_heads * DIM;
    u32 memory = shared_address(room);
#pragma unroll 1
    for (u32 from = 0, next; from < n; from = next) {
        Row r = span[from];
        u32 all = max(r.rows, 1u);
        next = min(from + all - r.nth, n);
        if (r.left == 0 || all <= FEW) continue;
        const u32* table = tables + (u64)r.seq * a.stride;
        u32 last_pos = r.pos + (next - 1 - from);
        u32 page = first_key(a.window, r.pos) / KV_BLOCK, end = last_pos / KV_BLOCK;
        u32 pos[2], first[2];
        bool own[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            own[h] = slot_of[h] < n * SHARE && row_of[h] >= from && row_of[h] < next;
            pos[h] = r.pos + row_of[h] - from;
            first[h] = first_key(a.window, pos[h]);
        }
        u32 ring = 0;
        auto fetch_page = [&](u32 which, u32 at) {
            u64 place = (u64)__ldg(table + which) * KV_BLOCK;
            u32 filled = last_pos + 1 - which * KV_BLOCK;
            fetch(memory + at * 2 * PLANE, keys, elements, place, filled, a.kv_heads, kv_head);
            fetch(memory + at * 2 * PLANE + PLANE, values, elements, place, filled, a.kv_heads, kv_head);
            if (Kv::PLAIN) copies_commit();
        };
        __syncthreads();
        fetch_page(page, 0);
#pragma unroll 1
        for (; page <= end; page++, ring ^= 1) {
            if (Kv::PLAIN) copies_wait<0>();
            __syncthreads();
            // The page before is no longer read: its place takes the next one.
            if (page < end) fetch_page(page + 1, ring ^ 1);
            u32 k_at = memory + ring * 2 * PLANE, v_at = k_at + PLANE;
            float s[8][4];
#pragma unroll
            for (u32 i = 0; i < 8; i++)
#pragma unroll
                for (u32 k = 0; k < 4; k++) s[i][k] = 0.0f;
#pragma unroll
            for (u32 i = 0; i < STEPS; i++)
#pragma unroll
                for (u32 c = 0; c < 8; c += 2) {
                    u32 b[4];
                    load_matrices(b, k_at + (c * 8 + lane / 16 * 8 + lane % 8) * PITCH + i * 32 + (lane / 8 & 1) * 16);
                    if (FINE) {
                        mma_f16(s[c], rest[i * FINE], b[0], b[1]);
                        mma_f16(s[c + 1], rest[i * FINE], b[2], b[3]);
                    }
                    mma_f16(s[c], fragments[i], b[0], b[1]);
                    mma_f16(s[c + 1], fragments[i], b[2], b[3]);
                }
            u32 begin = page * KV_BLOCK;
            if (a.softcap != 0.0f) {
#pragma unroll
                for (u32 i = 0; i < 32; i++) s[i / 4][i % 4] = a.softcap * tanhf(s[i / 4][i % 4] / a.softcap) * LOG2E;
            }
            // All keys of the page are everybody's, most of the time.
            bool whole = from == 0 && next == n && begin + KV_BLOCK <= r.pos + 1 && (a.window == 0 || begin >= first_key(a.window, last_pos));
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                if (!whole) {
#pragma unroll
                    for (u32 i = 0; i < 16; i++) {
                        u32 key = begin + i / 2 * 8 + 2 * t + i % 2;
                        if (!own[h] || key > pos[h] || key < first[h]) s[i / 2][2 * h + i % 2] = negative_infinity();
                    }
                }
                float high = top[h];
#pragma unroll
                for (u32 i = 0; i < 16; i++) high = fmaxf(high, s[i / 2][2 * h + i % 2]);
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                float keep = power2(top[h] - high), more = 0.0f;
                top[h] = high;
#pragma unroll
                for (u32 i = 0; i < 16; i++) {
                    float& x = s[i / 2][2 * h + i % 2];
                    x = power2(x - high);
                    more += x;
                }
                sum[h] = sum[h] * keep + more;
                if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
                    for (u32 i = 0; i < DIM / 8; i++) {
                        mix[i][2 * h] *= keep;
                        mix[i][2 * h + 1] *= keep;
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 p[4] = {halves(s[2 * i][0], s[2 * i][1]), halves(s[2 * i][2], s[2 * i][3]), halves(s[2 * i + 1][0], s[2 * i + 1][1]),
                            halves(s[2 * i + 1][2], s[2 * i + 1][3])};
                u32 less[4];
#pragma unroll
                for (u32 k = 0; k < 4; k++) less[k] = halves_left(p[k], s[2 * i + k / 2][k % 2 * 2], s[2 * i + k / 2][k % 2 * 2 + 1]);
#pragma unroll
                for (u32 c = 0; c < DIM / 8; c += 2) {
                    u32 b[4];
                    load_matrices_turned(b, v_at + (i * 16 + lane % 16) * PITCH + c * 16 + lane / 16 * 16);
                    if (FINE) {
                        mma_f16(mix[c], less, b[0], b[1]);
                        mma_f16(mix[c + 1], less, b[2], b[3]);
                    }
                    mma_f16(mix[c], p, b[0], b[1]);
                    mma_f16(mix[c + 1], p, b[2], b[3]);
                }
            }
        }
    }
    Result o = {out_rows, out_bytes, out_scales, out_sums};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float all = sum[h];
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        const Row& r = span[row_of[h]];
        bool there = slot_of[h] < n * SHARE && r.left != 0 && max(r.rows, 1u) > FEW;
        float high = top[h], factor = 1.0f;
        if (sinks) {
            float sink = __ldg(sinks + head_of[h]) * LOG2E, higher = fmaxf(high, sink);
            factor = power2(high - higher);
            all = all * factor + power2(sink - higher);
        }
        factor /= all;
        put_row(a, o, mix, h, there ? factor : 0.0f, base + row_of[h], head_of[h], there, t);
    }
}
