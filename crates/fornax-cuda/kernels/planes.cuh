// Block-quantised matrices as the fast kernels keep them: the bits of the GGUF blocks, taken apart into planes.
//
// A matrix of `rows` × nb blocks of 32 weights; block b of row r is number r·nb + b. Plane A gives every block 16
// bytes: nibbles (element e low in byte e, element e + 16 high), or the first half of Q8_0, whose second half is
// plane B. What else a format has (fifth bits, scales) follows in planes of its own, in the order of the structs
// below. So lane l of a warp owns block l of a chunk of 32: its loads are 16 bytes wide and side by side, and it needs
// one scale. Nothing grows but by the padding of a row with an odd number of blocks: 2 or 3 bytes.
//
// `copy` brings a lane's part of a chunk to shared memory without registers; `dot` multiplies it by the activations.
#pragma once
#include "layout.cuh"

struct Vec4 {
    u32 x, y, z, w;
};

#ifdef FORNAX_HOST
// Addresses of shared memory are distances here, and copies are there at once.
static char host_window[16];
inline u32 shared_address(const void* p) { return (u32)((uintptr_t)p - (uintptr_t)host_window); }
template <class T>
inline T host_shared(u32 at) {
    T v;
    std::memcpy(&v, host_window + (int)at, sizeof v);
    return v;
}
inline void copy16(u32 to, const void* from) { std::memcpy(host_window + (int)to, from, 16); }
inline void copy8(u32 to, const void* from) { std::memcpy(host_window + (int)to, from, 8); }
inline void copy4(u32 to, const void* from) { std::memcpy(host_window + (int)to, from, 4); }
inline void copies_commit() {}
template <int N>
inline void copies_wait() {}
inline Vec4 shared16(u32 at) { return host_shared<Vec4>(at); }
inline void put_shared16(u32 at, const Vec4& v) { std::memcpy(host_window + (int)at, &v, 16); }
inline void shared8(u32 at, u32& a, u32& b) {
    a = host_shared<u32>(at);
    b = host_shared<u32>(at + 4);
}
inline void put_shared1(u32 at, u32 v) { host_window[(int)at] = (u8)v; }
inline void put_shared2(u32 at, u32 v) {
    u16 w = (u16)v;
    std::memcpy(host_window + (int)at, &w, 2);
}
inline void put_shared4(u32 at, u32 v) { std::memcpy(host_window + (int)at, &v, 4); }
inline u32 shared4(u32 at) { return host_shared<u32>(at); }
inline u32 shared2(u32 at) { return host_shared<u16>(at); }
inline u32 shared1(u32 at) { return host_shared<u8>(at); }
#else
__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ inline Vec4 shared16(u32 at) {
    Vec4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ inline void put_shared16(u32 at, const Vec4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void shared8(u32 at, u32& a, u32& b) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}
__device__ inline void put_shared1(u32 at, u32 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ inline void put_shared2(u32 at, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)v) : "memory"); }
__device__ inline void put_shared4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ inline u32 shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ inline u32 shared2(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ inline u32 shared1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
#endif

// One block of activations: two halves of 16, the scale, and the sums of the halves as two 16-bit numbers.
struct Act {
    Vec4 a, b;
    float d;
    int sums;
};

__device__ inline int dot16(const Vec4& a, const Vec4& b, int c) {
    c = __dp4a((int)a.x, (int)b.x, c);
    c = __dp4a((int)a.y, (int)b.y, c);
    c = __dp4a((int)a.z, (int)b.z, c);
    return __dp4a((int)a.w, (int)b.w, c);
}
__device__ inline int low_sum(int sums) { return (int)(short)(sums & 0xffff); }
__device__ inline int high_sum(int sums) { return sums >> 16; }
__device__ inline int both_sums(int sums) { return low_sum(sums) + high_sum(sums); }

__device__ inline Vec4 low_nibbles(const Vec4& v) {
    const u32 m = 0x0f0f0f0fu;
    Vec4 r = {v.x & m, v.y & m, v.z & m, v.w & m};
    return r;
}
__device__ inline Vec4 high_nibbles(const Vec4& v) {
    const u32 m = 0x0f0f0f0fu;
    Vec4 r = {v.x >> 4 & m, v.y >> 4 & m, v.z >> 4 & m, v.w >> 4 & m};
    return r;
}
// Bit k of `bits` to bit 4 of byte k.
__device__ inline u32 fifths(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }
__device__ inline Vec4 with_fifths(const Vec4& v, u32 bits) {
    Vec4 r = {v.x | fifths(bits), v.y | fifths(bits >> 4), v.z | fifths(bits >> 8), v.w | fifths(bits >> 12)};
    return r;
}

// Where a chunk's lane is: block number, and the same in planes whose rows are padded.
struct Where {
    const u8* w;
    u64 blocks;  // of the whole matrix
    u32 rows;    // of the whole matrix
    u32 nb, row, blk;
    __device__ u32 even() const { return blk + row * (nb & 1); }
    __device__ u64 even_all() const { return blocks + (u64)rows * (nb & 1); }
};

__device__ inline u32 nibble_at(const u8* a, u32 e) { return e < 16 ? a[e] & 15 : a[e - 16] >> 4; }
__device__ inline float half_of(const void* p) { return half_to_float(*(const u16*)p); }

struct P_Q8_0 {  // A, B, f16 d
    static const u32 SLOT = 1088;
    static const bool SUMS = false;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy16(to + 512 + lane * 16, p.w + p.blocks * 16 + (u64)p.blk * 16);
        if (!(lane & 1)) copy4(to + 1024 + lane * 2, p.w + p.blocks * 32 + (u64)p.even() * 2);
    }
    Vec4 a, b;
    float d;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        b = shared16(s + 512 + lane * 16);
        d = half_to_float(shared2(s + 1024 + lane * 2));
    }
    __device__ float dot(const Act& x, float acc) const {
        return fmaf((float)dot16(b, x.b, dot16(a, x.a, 0)), d * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        const signed char* q = (const signed char*)p.w + (e < 16 ? 0 : p.blocks * 16) + (u64)p.blk * 16;
        return half_of(p.w + p.blocks * 32 + (u64)p.even() * 2) * (float)q[e & 15];
    }
};

struct P_Q4_0 {  // A, f16 d
    static const u32 SLOT = 576;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        if (!(lane & 1)) copy4(to + 512 + lane * 2, p.w + p.blocks * 16 + (u64)p.even() * 2);
    }
    Vec4 a;
    float d;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        d = half_to_float(shared2(s + 512 + lane * 2));
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(high_nibbles(a), x.b, dot16(low_nibbles(a), x.a, -8 * both_sums(x.sums)));
        return fmaf((float)s, d * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        int q = (int)nibble_at(p.w + (u64)p.blk * 16, e) - 8;
        return half_of(p.w + p.blocks * 16 + (u64)p.even() * 2) * (float)q;
    }
};

struct P_Q4_1 {  // A, f16 d and m
    static const u32 SLOT = 640;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy4(to + 512 + lane * 4, p.w + p.blocks * 16 + (u64)p.blk * 4);
    }
    Vec4 a;
    u32 dm;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        dm = shared4(s + 512 + lane * 4);
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(high_nibbles(a), x.b, dot16(low_nibbles(a), x.a, 0));
        acc = fmaf((float)s, half_to_float(dm & 0xffff) * x.d, acc);
        return fmaf((float)both_sums(x.sums), half_to_float(dm >> 16) * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        const u8* dm = p.w + p.blocks * 16 + (u64)p.blk * 4;
        return half_of(dm) * (float)nibble_at(p.w + (u64)p.blk * 16, e) + half_of(dm + 2);
    }
};

struct P_Q5_0 {  // A, fifth bits, f16 d
    static const u32 SLOT = 704;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy4(to + 512 + lane * 4, p.w + p.blocks * 16 + (u64)p.blk * 4);
        if (!(lane & 1)) copy4(to + 640 + lane * 2, p.w + p.blocks * 20 + (u64)p.even() * 2);
    }
    Vec4 a;
    u32 h;
    float d;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        h = shared4(s + 512 + lane * 4);
        d = half_to_float(shared2(s + 640 + lane * 2));
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(with_fifths(low_nibbles(a), h), x.a, -16 * both_sums(x.sums));
        s = dot16(with_fifths(high_nibbles(a), h >> 16), x.b, s);
        return fmaf((float)s, d * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        u32 h = *(const u32*)(p.w + p.blocks * 16 + (u64)p.blk * 4);
        int q = (int)(nibble_at(p.w + (u64)p.blk * 16, e) | (h >> e & 1) << 4) - 16;
        return half_of(p.w + p.blocks * 20 + (u64)p.even() * 2) * (float)q;
    }
};

struct P_Q5_1 {  // A, fifth bits, f16 d and m
    static const u32 SLOT = 768;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy4(to + 512 + lane * 4, p.w + p.blocks * 16 + (u64)p.blk * 4);
        copy4(to + 640 + lane * 4, p.w + p.blocks * 20 + (u64)p.blk * 4);
    }
    Vec4 a;
    u32 h, dm;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        h = shared4(s + 512 + lane * 4);
        dm = shared4(s + 640 + lane * 4);
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(with_fifths(low_nibbles(a), h), x.a, 0);
        s = dot16(with_fifths(high_nibbles(a), h >> 16), x.b, s);
        acc = fmaf((float)s, half_to_float(dm & 0xffff) * x.d, acc);
        return fmaf((float)both_sums(x.sums), half_to_float(dm >> 16) * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        u32 h = *(const u32*)(p.w + p.blocks * 16 + (u64)p.blk * 4);
        const u8* dm = p.w + p.blocks * 20 + (u64)p.blk * 4;
        u32 q = nibble_at(p.w + (u64)p.blk * 16, e) | (h >> e & 1) << 4;
        return half_of(dm) * (float)q + half_of(dm + 2);
    }
};

struct P_MXFP4 {  // A, 8-bit exponent (rows padded to a multiple of four)
    static const u32 SLOT = 544;
    static const bool SUMS = false;
    __device__ static u32 padded(const Where& p) { return p.blk + p.row * (-p.nb & 3); }
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        if (!(lane & 3)) copy4(to + 512 + lane, p.w + p.blocks * 16 + padded(p));
    }
    Vec4 a;
    float d;
    __device__ static float scale(u32 e) { return ldexpf(1.0f, (int)e - 128); }
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        d = scale(shared1(s + 512 + lane));
    }
    // Four E2M1 numbers, one a byte, doubled so that they are whole.
    __device__ static u32 doubled(u32 q) {
        u32 at = q & 0x07070707u;
        at = (at | at >> 4) & 0x00ff00ffu;
        at = (at | at >> 8) & 0xffffu;
        u32 v = __byte_perm(0x03020100u, 0x0c080604u, at);
        u32 sign = (q >> 3 & 0x01010101u) * 0xffu;
        return __vsub4(v ^ sign, sign);
    }
    __device__ static Vec4 all(const Vec4& q) {
        Vec4 r = {doubled(q.x), doubled(q.y), doubled(q.z), doubled(q.w)};
        return r;
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(all(low_nibbles(a)), x.a, 0);
        s = dot16(all(high_nibbles(a)), x.b, s);
        return fmaf((float)s, d * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        int q = (int)(signed char)(doubled(nibble_at(p.w + (u64)p.blk * 16, e)) & 255);
        return (float)q * scale(p.w[p.blocks * 16 + padded(p)]);
    }
};

// Scale and minimum of sub-block j out of the 12 bytes of Q4_K and Q5_K.
__device__ inline void scale_min_of(u32 s0, u32 s1, u32 s2, u32 j, u32& scale, u32& min) {
    u32 shift = 8 * (j & 3), b0 = s0 >> shift & 255, b1 = s1 >> shift & 255, b2 = s2 >> shift & 255;
    scale = j < 4 ? b0 & 63 : (b2 & 15) | (b0 >> 6) << 4;
    min = j < 4 ? b1 & 63 : b2 >> 4 | (b1 >> 6) << 4;
}

struct P_Q4_K {  // A, then 16 bytes for eight blocks: f16 d, f16 dmin, 12 bytes of scales
    static const u32 SLOT = 576;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        if (!(lane & 7)) copy16(to + 512 + lane * 2, p.w + p.blocks * 16 + (u64)p.blk * 2);
    }
    Vec4 a;
    float d, m;
    __device__ void header(const Vec4& h, u32 j) {
        u32 scale, min;
        scale_min_of(h.y, h.z, h.w, j, scale, min);
        d = half_to_float(h.x & 0xffff) * (float)scale;
        m = half_to_float(h.x >> 16) * (float)min;
    }
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        header(shared16(s + 512 + (lane & ~7u) * 2), lane & 7);
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(high_nibbles(a), x.b, dot16(low_nibbles(a), x.a, 0));
        acc = fmaf((float)s, d * x.d, acc);
        return fmaf((float)both_sums(x.sums), -m * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        P_Q4_K b;
        b.header(*(const Vec4*)(p.w + p.blocks * 16 + (u64)(p.blk & ~7u) * 2), p.blk & 7);
        return b.d * (float)nibble_at(p.w + (u64)p.blk * 16, e) - b.m;
    }
};

struct P_Q5_K {  // A, fifth bits, the header of Q4_K
    static const u32 SLOT = 704;
    static const bool SUMS = true;
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy4(to + 512 + lane * 4, p.w + p.blocks * 16 + (u64)p.blk * 4);
        if (!(lane & 7)) copy16(to + 640 + lane * 2, p.w + p.blocks * 20 + (u64)p.blk * 2);
    }
    Vec4 a;
    u32 h;
    P_Q4_K k;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        h = shared4(s + 512 + lane * 4);
        k.header(shared16(s + 640 + (lane & ~7u) * 2), lane & 7);
    }
    __device__ float dot(const Act& x, float acc) const {
        int s = dot16(with_fifths(low_nibbles(a), h), x.a, 0);
        s = dot16(with_fifths(high_nibbles(a), h >> 16), x.b, s);
        acc = fmaf((float)s, k.d * x.d, acc);
        return fmaf((float)both_sums(x.sums), -k.m * x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        P_Q4_K b;
        b.header(*(const Vec4*)(p.w + p.blocks * 20 + (u64)(p.blk & ~7u) * 2), p.blk & 7);
        u32 h = *(const u32*)(p.w + p.blocks * 16 + (u64)p.blk * 4);
        return b.d * (float)(nibble_at(p.w + (u64)p.blk * 16, e) | (h >> e & 1) << 4) - b.m;
    }
};

struct P_Q6_K {  // A, 8 bytes of upper pairs, two signed scales, f16 d for eight blocks (rows padded to even)
    static const u32 SLOT = 848;
    static const bool SUMS = true;
    __device__ static u64 d_at(const Where& p) {
        u32 supers = p.nb / 8;
        return p.blocks * 26 + 2 * (u64)(p.blk / 8 + p.row * (supers & 1));
    }
    __device__ static void copy(u32 to, const Where& p, u32 lane) {
        copy16(to + lane * 16, p.w + (u64)p.blk * 16);
        copy8(to + 512 + lane * 8, p.w + p.blocks * 16 + (u64)p.blk * 8);
        if (!(lane & 1)) copy4(to + 768 + lane * 2, p.w + p.blocks * 24 + (u64)p.blk * 2);
        if (!(lane & 15)) copy4(to + 832 + lane / 4, p.w + d_at(p));
    }
    // Upper pairs: byte k of a half's word holds those of elements k, k + 4, k + 8, k + 12.
    __device__ static Vec4 six(const Vec4& v, u32 h) {
        const u32 m = 0x30303030u;
        Vec4 r = {v.x | (h << 4 & m), v.y | (h << 2 & m), v.z | (h & m), v.w | (h >> 2 & m)};
        return r;
    }
    Vec4 a;
    u32 h0, h1;
    float d0, d1;
    __device__ void load(u32 s, u32 lane) {
        a = shared16(s + lane * 16);
        h0 = shared4(s + 512 + lane * 8);
        h1 = shared4(s + 516 + lane * 8);
        u32 sc = shared2(s + 768 + lane * 2);
        float d = half_to_float(shared2(s + 832 + (lane / 8) * 2));
        d0 = d * (float)(signed char)(sc & 255);
        d1 = d * (float)(signed char)(sc >> 8);
    }
    __device__ float dot(const Act& x, float acc) const {
        int s0 = dot16(six(low_nibbles(a), h0), x.a, -32 * low_sum(x.sums));
        int s1 = dot16(six(high_nibbles(a), h1), x.b, -32 * high_sum(x.sums));
        return fmaf(fmaf((float)s0, d0, (float)s1 * d1), x.d, acc);
    }
    __device__ static float at(const Where& p, u32 e) {
        const u8* h = p.w + p.blocks * 16 + (u64)p.blk * 8 + (e & 16) / 4;
        u32 k = e & 15, high = h[k & 3] >> (k / 4 * 2) & 3;
        int q = (int)(nibble_at(p.w + (u64)p.blk * 16, e) | high << 4) - 32;
        int sc = ((const signed char*)p.w)[p.blocks * 24 + (u64)p.blk * 2 + e / 16];
        return half_of(p.w + d_at(p)) * (float)sc * (float)q;
    }
};

// Every format; the host defines it first to name those alone that a model has, each with its number.
#ifndef EACH_PLANED
#define EACH_PLANED(M)                                                                                                 \
    M(Q8_0, q8_0, 0) M(Q4_0, q4_0, 1) M(Q4_1, q4_1, 2) M(Q5_0, q5_0, 3) M(Q5_1, q5_1, 4) M(Q4_K, q4_k, 5)              \
    M(Q5_K, q5_k, 6) M(Q6_K, q6_k, 7) M(MXFP4, mxfp4, 8)
#endif
