// CUDA: the words of kernel-C for NVRTC, without any header. See KERNEL-C.md. A wave is a warp. Only words may enter.
#if WAVE != 32
#error "a CUDA warp has 32 lanes"
#endif
typedef unsigned int u32;
typedef int i32;
typedef float f32;
struct __align__(8) u32x2 { u32 x, y; };
struct __align__(16) u32x4 { u32 x, y, z, w; };
struct __align__(16) f32x4 { f32 x, y, z, w; };
#define FN static __device__ __forceinline__
#define CONST static __device__ constexpr
#define UNROLL _Pragma("unroll")
// RESIDENT workgroups of an op that has such a constant share a unit's registers.
#ifdef RESIDENT
#define HZ_BOUNDS(n_) __launch_bounds__(n_, RESIDENT)
#else
#define HZ_BOUNDS(n_) __launch_bounds__(n_)
#endif
#define HZ_RO const u32* __restrict__
#define HZ_RW u32* __restrict__

#define THREAD threadIdx.x
#define LANE (threadIdx.x & 31u)
#define WAVE_ID (threadIdx.x >> 5u)
#define GROUP_X blockIdx.x
#define GROUP_Y blockIdx.y
#define GROUP_Z blockIdx.z
#define BARRIER __syncthreads()

FN u32x2 mk2(u32 a, u32 b) { return u32x2{a, b}; }
FN u32x4 mk4(u32 a, u32 b, u32 c, u32 d) { return u32x4{a, b, c, d}; }
FN f32x4 mkf4(f32 a, f32 b, f32 c, f32 d) { return f32x4{a, b, c, d}; }
FN f32 as_f32(u32 x) { return __uint_as_float(x); }
FN u32 as_u32(f32 x) { return __float_as_uint(x); }
FN u32 as_u32(i32 x) { return (u32)x; }
FN i32 as_i32(u32 x) { return (i32)x; }

// Read-only memory goes through the non-coherent path. A weight's codes (plane 0) are read once and stay out of L1, where activations live:
// they have a pointer type of their own, which becomes an ordinary one when it is stored or passed as RO.
typedef const u32* RO;
typedef u32* RW;
struct HzCodes {
  const u32* at;
  __device__ __forceinline__ operator RO() const { return at; }
};
struct Wt { HzCodes p0; RO p1; RO p2; RO p3; RO tab; };
struct Unit { u32x4 lo; u32x4 hi; f32 s0; f32 s1; f32 m0; f32 m1; };
struct Floats { f32x4 v0; f32x4 v1; f32x4 v2; f32x4 v3; f32x4 v4; f32x4 v5; f32x4 v6; f32x4 v7; };
#define HZ_LOADS(type_, how_) \
  FN u32 LD1(type_ p, u32 i) { u32 v; asm("ld.global.nc" how_ ".u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(hz_at(p) + i))); return v; } \
  FN u32x2 LD2(type_ p, u32 i) { u32x2 v; asm("ld.global.nc" how_ ".v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(hz_at(p) + 2ull * i))); return v; } \
  FN u32x4 LD4(type_ p, u32 i) { u32x4 v; asm("ld.global.nc" how_ ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(hz_at(p) + 4ull * i))); return v; } \
  FN f32 LDF(type_ p, u32 i) { return as_f32(LD1(p, i)); } \
  FN f32x4 LDF4(type_ p, u32 i) { u32x4 v = LD4(p, i); return mkf4(as_f32(v.x), as_f32(v.y), as_f32(v.z), as_f32(v.w)); }
FN const u32* hz_at(RO p) { return p; }
FN const u32* hz_at(HzCodes p) { return p.at; }
HZ_LOADS(RO, "")
HZ_LOADS(HzCodes, ".L1::no_allocate")
FN RO ADV(RO p, u32 n) { return p + 4ull * n; }
FN HzCodes ADV(HzCodes p, u32 n) { return HzCodes{p.at + 4ull * n}; }
FN Wt hz_wt(RO base, u32 o1, u32 o2, u32 o3, RO table) { return Wt{HzCodes{base}, ADV(base, o1), ADV(base, o2), ADV(base, o3), table}; }
FN u32 RW1(RW p, u32 i) { return p[i]; }
FN f32 RWF(RW p, u32 i) { return as_f32(p[i]); }
FN void ST1(RW p, u32 i, u32 v) { p[i] = v; }
FN void ST2(RW p, u32 i, u32x2 v) { ((u32x2*)p)[i] = v; }
FN void ST4(RW p, u32 i, u32x4 v) { ((u32x4*)p)[i] = v; }
FN void STF(RW p, u32 i, f32 v) { ((f32*)p)[i] = v; }
FN void STF4(RW p, u32 i, f32x4 v) { ((f32x4*)p)[i] = v; }
// At device scope, for what another workgroup of the launch reads or wrote.
#define FENCE __threadfence()
FN f32 CLDF(RW p, u32 i) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p + i)) : "memory"); return as_f32(v); }
FN f32x4 CLDF4(RW p, u32 i) {
  f32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(__cvta_generic_to_global(p + 4ull * i)) : "memory");
  return v;
}
FN void CSTF(RW p, u32 i, f32 v) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" :: "l"(__cvta_generic_to_global(p + i)), "f"(v) : "memory"); }
FN void CSTF4(RW p, u32 i, f32x4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(__cvta_generic_to_global(p + 4ull * i)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
FN u32 ATOMIC_ADD(RW p, u32 i, u32 v) { return atomicAdd(p + i, v); }

// Butterflies: every lane gets the same bits.
FN f32 wave_xor(f32 x, u32 m) { return __shfl_xor_sync(~0u, x, (int)m); }
FN f32 wave_sum(f32 x) {
  UNROLL for (u32 m = 16u; m > 0u; m >>= 1u) x += wave_xor(x, m);
  return x;
}
FN f32 wave_max(f32 x) {
  UNROLL for (u32 m = 16u; m > 0u; m >>= 1u) x = fmaxf(x, wave_xor(x, m));
  return x;
}
FN i32 wave_sum_i(i32 x) {
  i32 v;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(v) : "r"(x));
  return v;
}
FN i32 dp4a(u32 a, u32 b, i32 c) {
  i32 v;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
FN f32 f16_to_f32(u32 h) {
  f32 v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((unsigned short)h));
  return v;
}
FN u32 f32_to_f16(f32 x) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
FN f32 mul_rn(f32 a, f32 b) { return __fmul_rn(a, b); }
FN f32 sqrt_rn(f32 x) { return __fsqrt_rn(x); }
FN f32 fma_(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
FN f32 rint_(f32 x) { return rintf(x); }
FN f32 floor_(f32 x) { return floorf(x); }
FN f32 abs_(f32 x) { return fabsf(x); }
FN f32 min_(f32 a, f32 b) { return fminf(a, b); }
FN f32 max_(f32 a, f32 b) { return fmaxf(a, b); }
FN u32 min_(u32 a, u32 b) { return a < b ? a : b; }
FN u32 max_(u32 a, u32 b) { return a > b ? a : b; }
FN i32 min_(i32 a, i32 b) { return a < b ? a : b; }
FN i32 max_(i32 a, i32 b) { return a > b ? a : b; }
FN u32 popc(u32 x) { return (u32)__popc(x); }
FN u32 prmt(u32 lo, u32 hi, u32 sel) { return __byte_perm(lo, hi, sel); }
#if HZ_GRID
static __shared__ u32 hz_grid[HZ_TABLE_WORDS];
FN u32 GRID(Wt w, u32 i) { return hz_grid[i]; }
#define HZ_GRID_LOAD(w_) do { for (u32 hz_i = THREAD; hz_i < HZ_TABLE_WORDS; hz_i += THREADS) hz_grid[hz_i] = LD1((w_).tab, hz_i); BARRIER; } while (0)
#else
FN u32 GRID(Wt w, u32 i) { return LD1(w.tab, i); }
#endif

// ---- tensor cores, for ops/cuda ----
typedef const u32x4* TileLine;
#define TILE_LINE(tile_, i_) (&(tile_)[i_])
struct HzInt4 { i32 x, y, z, w; };
FN u32x4 hz_ldmatrix4(TileLine line) {
  u32x4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"((u32)__cvta_generic_to_shared(line)) : "memory");
  return v;
}
FN HzInt4 hz_mma_k32(u32x4 a, u32 b0, u32 b1) {
  HzInt4 c;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
  return c;
}
FN HzInt4 hz_mma_k16(u32 a0, u32 a1, u32 b0) {
  HzInt4 c;
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "r"(a0), "r"(a1), "r"(b0), "r"(0));
  return c;
}
// Two floats as the nearest halves (bfloat16s), ties to even, the first in the low half.
FN u32 hz_half2(f32 a, f32 b) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
FN u32 hz_bfloat2(f32 a, f32 b) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
#define HZ_MMA_K16(name_, type_) \
  FN f32x4 name_(u32x4 a, u32 b0, u32 b1, f32x4 c) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type_ "." type_ ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1)); \
    return c; \
  }
HZ_MMA_K16(hz_mma_f16, "f16")
HZ_MMA_K16(hz_mma_bf16, "bf16")
// Sixteen bytes to workgroup memory beside whatever the thread does: they are there once the thread has waited for their group and, for others, passed a barrier.
FN void hz_copy16(TileLine to, RO p, u32 i) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(p + 4ull * i)) : "memory");
}
FN void hz_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the last n_, a constant, are there.
#define hz_copy_wait(n_) asm volatile("cp.async.wait_group %0;" :: "n"(n_) : "memory")
