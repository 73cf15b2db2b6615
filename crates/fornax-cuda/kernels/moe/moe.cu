// Mixtures of experts: the choice for each row, then the chosen experts' gated layers, pick by pick. A pick is a row's choice
// of an expert: number row · top_k + place.
//
// scores: rows × experts; ids, weights: rows × top_k, best first; matrices: experts × outs × cols in their format, one expert
// after the other; biases: experts × outs. All else is rows, or picks, × width f32. Sums are f32, and those of a pick do not
// depend on the others. Bytes read: every weight of a chosen expert once for each pick.
#include "../activate.cuh"
#include "../rare.cuh"

struct RouteArgs {
    u32 rows, experts, top_k, normalise;
};

// A warp a row; up to 1,024 experts and 32 of them chosen. Ties go to the lowest id; NaN counts as the lowest of all.
extern "C" __global__ void moe_route(RouteArgs a, const float* scores, u32* ids, float* weights) {
    u32 row = blockIdx.x, lane = threadIdx.x;
    const float* mine = scores + (u64)row * a.experts;
    // Bit j: the expert lane + 32 j is taken.
    u32 taken = 0, my_id = 0;
    float top = 0.0f, chosen = 0.0f, my_weight = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) {
        float best = negative_infinity();
        u32 id = NONE;
        for (u32 e = lane; e < a.experts; e += 32) {
            float v = isnan(mine[e]) ? negative_infinity() : mine[e];
            if ((taken >> (e / 32) & 1) == 0 && (id == NONE || v > best)) {
                best = v;
                id = e;
            }
        }
        for (u32 d = 16; d > 0; d /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, d);
            u32 other_id = __shfl_xor_sync(0xffffffffu, id, d);
            bool take = other_id != NONE && (id == NONE || other > best || (other == best && other_id < id));
            best = take ? other : best;
            id = take ? other_id : id;
        }
        taken |= id % 32 == lane ? 1u << (id / 32) : 0u;
        top = k == 0 ? best : top;
        float weight = expf(best - top);
        chosen += weight;
        if (lane == k) {
            my_id = id;
            my_weight = weight;
        }
    }
    float all = 0.0f;
    for (u32 e = lane; e < a.experts; e += 32) all += isnan(mine[e]) ? 0.0f : expf(mine[e] - top);
    all = warp_sum(all);
    if (lane < a.top_k) {
        ids[row * a.top_k + lane] = my_id;
        weights[row * a.top_k + lane] = my_weight / (a.normalise ? chosen : all);
    }
}

// `each`: picks that read one row of x.
struct ProductArgs {
    u32 rows, cols, outs, experts, each;
};

// y[pick] = the pick's expert · x. A warp takes one output of one pick; picks along y.
template <class W>
__device__ void product(const ProductArgs& a, const u8* w, const float* x, const u32* ids, float* y) {
    u32 out = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, pick = blockIdx.y;
    if (out >= a.outs) return;
    // An id of nowhere must not lead out of the matrices.
    u64 at = (u64)min(ids[pick], a.experts - 1) * a.outs + out;
    const u8* row = w + at * W::row_bytes(a.cols);
    const float* from = x + (u64)(pick / a.each) * a.cols;
    bool wide = a.cols % 4 == 0;
    float sum = 0.0f;
#pragma unroll 2
    for (u32 run = lane; 8 * run < a.cols; run += 32) {
        float v[8], xs[8];
        run_of<W>(row, run, a.cols, v);
        run_of_x(from, run, a.cols, wide, xs);
#pragma unroll
        for (u32 i = 0; i < 8; i++) sum += v[i] * xs[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) y[(u64)pick * a.outs + out] = sum;
}

#define ENTRY(W, suffix)                                                                                               \
    extern "C" __global__ void moe_product_##suffix(ProductArgs a, const u8* w, const float* x, const u32* ids,        \
                                                    float* y) {                                                        \
        product<W>(a, w, x, ids, y);                                                                                   \
    }
EACH_FORMAT(ENTRY)

struct MoeActArgs {
    u32 rows, outs, experts, bias, act;
    float alpha, limit;
};

// gate = act(gate + its bias) * (up + its bias), a thread an element, picks along y.
extern "C" __global__ void moe_act(MoeActArgs a, float* gate, const float* up, const u32* ids, const float* gate_bias,
                                   const float* up_bias) {
    u32 o = blockIdx.x * blockDim.x + threadIdx.x, pick = blockIdx.y;
    if (o >= a.outs) return;
    u64 bias = (u64)min(ids[pick], a.experts - 1) * a.outs + o, at = (u64)pick * a.outs + o;
    float g = gate[at], u = up[at];
    if (a.bias & 1) g += gate_bias[bias];
    if (a.bias & 2) u += up_bias[bias];
    gate[at] = activate(a.act, a.alpha, a.limit, g, u);
}

struct MoeSumArgs {
    u32 rows, outs, top_k, experts, bias, residual;
};

// A row's picks by weight, best first, then the residual; a thread an element, rows along y.
extern "C" __global__ void moe_sum(MoeSumArgs a, const float* parts, const u32* ids, const float* weights,
                                   const float* bias, const float* residual, float* out) {
    u32 o = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (o >= a.outs) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) {
        u32 pick = row * a.top_k + k;
        float v = parts[(u64)pick * a.outs + o];
        if (a.bias) v += bias[(u64)min(ids[pick], a.experts - 1) * a.outs + o];
        sum = fmaf(weights[pick], v, sum);
    }
    u64 at = (u64)row * a.outs + o;
    out[at] = a.residual ? sum + residual[at] : sum;
}
