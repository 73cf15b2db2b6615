// Forms that weights have on tapes: those of planes.cuh, but where a second copy may be a little larger to be quicker to
// read. Nothing is lost.
#pragma once
// planes.cuh comes before this one.

// Nibbles; then scale and minimum of every block, a byte each; then f16 d and dmin for eight blocks.
struct T_Q4_K {
    static const u32 SLOT = 592;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        const u32* h = (const u32*)(p.w + p.blocks * 16 + (u64)(p.blk & ~7u) * 2);
        u32 scale, min;
        scale_min_of(h[1], h[2], h[3], p.blk & 7, scale, min);
        put_shared2(to + 512 + lane * 2, scale | min << 8);
        if (!(lane & 7)) put_shared4(to + 576 + lane / 2, h[0]);
    }
    Vec4 a;
    u32 both, d;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        both = shared2(s + 512 + lane * 2);
        d = shared4(s + 576 + (lane >> 3) * 4);
    }
    // Whole numbers below 2^22 become floats by their place in one.
    __device__ float dot(const Act& x, float acc) const {
        const u32 m = 0xf0f0f0f0u;
        int low = dot16(low_nibbles(a), x.a, 0), high = 0;
        high = dot4_mixed(a.x & m, x.b.x, high);
        high = dot4_mixed(a.y & m, x.b.y, high);
        high = dot4_mixed(a.z & m, x.b.z, high);
        high = dot4_mixed(a.w & m, x.b.w, high);
        int all = (low + (high >> 4)) * (int)(both & 255) + 0x4b400000;
        acc = fmaf(__int_as_float(all) - 12582912.0f, half_to_float(d & 0xffff) * x.d, acc);
        float min = __uint_as_float(__byte_perm(both, 0x4b000000u, 0x7441)) - 8388608.0f;
        return fmaf(half_to_float(d >> 16) * min, -(float)both_sums(x.sums) * x.d, acc);
    }
    // Of unsigned and signed bytes.
    __device__ static int dot4_mixed(u32 a, u32 b, int c) {
#ifdef FORNAX_HOST
        for (u32 i = 0; i < 32; i += 8) c += (int)(a >> i & 255) * (int)(signed char)(b >> i & 255);
        return c;
#else
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
        return c;
#endif
    }
};

template <class W>
struct Taped {
    typedef W Form;
};
template <>
struct Taped<P_Q4_K> {
    typedef T_Q4_K Form;
};
