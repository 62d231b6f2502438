// HIP: the words of kernel-C for clang's AMDGPU back end or hipRTC, without any header. See KERNEL-C.md. WAVE is 32 (RDNA) or 64 (CDNA). Only words
// may enter.
#if WAVE != 32 && WAVE != 64
#error "an AMD wave has 32 or 64 lanes"
#endif
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif
typedef unsigned int u32;
typedef int i32;
typedef float f32;
struct alignas(8) u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(16) f32x4 { f32 x, y, z, w; };
#define FN static __device__ inline __attribute__((always_inline))
#define CONST static __device__ constexpr
#define UNROLL _Pragma("unroll")
#define HZ_BOUNDS(n_) __attribute__((amdgpu_flat_work_group_size(n_, n_)))
#define HZ_RO const u32* __restrict__
#define HZ_RW u32* __restrict__

#define THREAD __builtin_amdgcn_workitem_id_x()
#if WAVE == 64
#define LANE __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))
#else
#define LANE __builtin_amdgcn_mbcnt_lo(~0u, 0u)
#endif
#define WAVE_ID (THREAD / WAVE)
#define GROUP_X __builtin_amdgcn_workgroup_id_x()
#define GROUP_Y __builtin_amdgcn_workgroup_id_y()
#define GROUP_Z __builtin_amdgcn_workgroup_id_z()
#define BARRIER (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"))

FN u32x2 mk2(u32 a, u32 b) { return u32x2{a, b}; }
FN u32x4 mk4(u32 a, u32 b, u32 c, u32 d) { return u32x4{a, b, c, d}; }
FN f32x4 mkf4(f32 a, f32 b, f32 c, f32 d) { return f32x4{a, b, c, d}; }
FN f32 as_f32(u32 x) { return __builtin_bit_cast(f32, x); }
FN u32 as_u32(f32 x) { return __builtin_bit_cast(u32, x); }
FN u32 as_u32(i32 x) { return (u32)x; }
FN i32 as_i32(u32 x) { return (i32)x; }

typedef const u32* RO;
typedef u32* RW;
struct Wt { RO p0; RO p1; RO p2; RO p3; RO tab; };
struct Unit { u32x4 lo; u32x4 hi; f32 s0; f32 s1; f32 m0; f32 m1; };
struct Floats { f32x4 v0; f32x4 v1; f32x4 v2; f32x4 v3; f32x4 v4; f32x4 v5; f32x4 v6; f32x4 v7; };
FN u32 LD1(RO p, u32 i) { return p[i]; }
FN u32x2 LD2(RO p, u32 i) { return ((const u32x2*)p)[i]; }
FN u32x4 LD4(RO p, u32 i) { return ((const u32x4*)p)[i]; }
FN f32 LDF(RO p, u32 i) { return ((const f32*)p)[i]; }
FN f32x4 LDF4(RO p, u32 i) { return ((const f32x4*)p)[i]; }
FN RO ADV(RO p, u32 n) { return p + 4ull * n; }
FN Wt hz_wt(RO base, u32 o1, u32 o2, u32 o3, RO table) { return Wt{base, ADV(base, o1), ADV(base, o2), ADV(base, o3), table}; }
FN u32 RW1(RW p, u32 i) { return p[i]; }
FN f32 RWF(RW p, u32 i) { return as_f32(p[i]); }
FN void ST1(RW p, u32 i, u32 v) { p[i] = v; }
FN void ST2(RW p, u32 i, u32x2 v) { ((u32x2*)p)[i] = v; }
FN void ST4(RW p, u32 i, u32x4 v) { ((u32x4*)p)[i] = v; }
FN void STF(RW p, u32 i, f32 v) { ((f32*)p)[i] = v; }
FN void STF4(RW p, u32 i, f32x4 v) { ((f32x4*)p)[i] = v; }
// The fence writes back and invalidates what is not coherent over the device: plain accesses around it are enough.
#define FENCE __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent")
FN f32 CLDF(RW p, u32 i) { return RWF(p, i); }
FN f32x4 CLDF4(RW p, u32 i) { return ((const f32x4*)p)[i]; }
FN void CSTF(RW p, u32 i, f32 v) { STF(p, i, v); }
FN void CSTF4(RW p, u32 i, f32x4 v) { STF4(p, i, v); }
FN u32 ATOMIC_ADD(RW p, u32 i, u32 v) { return __hip_atomic_fetch_add(p + i, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }

FN u32 hz_lane_xor(u32 x, u32 m) { return (u32)__builtin_amdgcn_ds_bpermute((i32)((LANE ^ m) << 2u), (i32)x); }
FN f32 wave_xor(f32 x, u32 m) { return as_f32(hz_lane_xor(as_u32(x), m)); }
// Lane `LANE ^ M` for a constant: a swizzle within 32 lanes needs no address.
template <u32 M> FN u32 hz_swizzle(u32 x) {
  if constexpr (M < 32u) return (u32)__builtin_amdgcn_ds_swizzle((i32)x, (M << 10u) | 0x1fu);
  else return hz_lane_xor(x, M);
}
#define HZ_BUTTERFLY(step_) { if (WAVE == 64u) { step_(32u) } step_(16u) step_(8u) step_(4u) step_(2u) step_(1u) }
#define HZ_SUM(m_) x += as_f32(hz_swizzle<m_>(as_u32(x)));
#define HZ_MAX(m_) x = __builtin_fmaxf(x, as_f32(hz_swizzle<m_>(as_u32(x))));
#define HZ_SUM_I(m_) x += (i32)hz_swizzle<m_>((u32)x);
FN f32 wave_sum(f32 x) { HZ_BUTTERFLY(HZ_SUM) return x; }
FN f32 wave_max(f32 x) { HZ_BUTTERFLY(HZ_MAX) return x; }
FN i32 wave_sum_i(i32 x) { HZ_BUTTERFLY(HZ_SUM_I) return x; }
FN i32 dp4a(u32 a, u32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_sudot4(true, (i32)a, true, (i32)b, c, false);
#elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__) || \
    defined(__gfx1011__) || defined(__gfx1012__) || defined(__GFX10_3__) || defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__)
  return __builtin_amdgcn_sdot4((i32)a, (i32)b, c, false);
#else
  for (u32 k = 0u; k < 32u; k += 8u) c += (i32)(signed char)(a >> k) * (i32)(signed char)(b >> k);
  return c;
#endif
}
FN f32 f16_to_f32(u32 h) { return (f32)__builtin_bit_cast(_Float16, (unsigned short)h); }
FN u32 f32_to_f16(f32 x) { return __builtin_bit_cast(unsigned short, (_Float16)x); }
FN f32 mul_rn(f32 a, f32 b) {
#pragma clang fp contract(off)
  return a * b;
}
FN f32 sqrt_rn(f32 x) { return __builtin_sqrtf(x); }
FN f32 fma_(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
FN f32 rint_(f32 x) { return __builtin_rintf(x); }
FN f32 floor_(f32 x) { return __builtin_floorf(x); }
FN f32 abs_(f32 x) { return __builtin_fabsf(x); }
FN f32 min_(f32 a, f32 b) { return __builtin_fminf(a, b); }
FN f32 max_(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
FN u32 min_(u32 a, u32 b) { return a < b ? a : b; }
FN u32 max_(u32 a, u32 b) { return a > b ? a : b; }
FN i32 min_(i32 a, i32 b) { return a < b ? a : b; }
FN i32 max_(i32 a, i32 b) { return a > b ? a : b; }
FN u32 popc(u32 x) { return (u32)__builtin_popcount(x); }
// The instruction takes a selector a byte where the word has one a nibble.
FN u32 prmt(u32 lo, u32 hi, u32 sel) {
  u32 wide = (sel & 0xffu) | (sel & 0xff00u) << 8u;
  wide = (wide | wide << 4u) & 0x07070707u;
  return __builtin_amdgcn_perm(hi, lo, wide);
}
#if HZ_GRID
static __shared__ u32 hz_grid[HZ_TABLE_WORDS];
FN u32 GRID(Wt w, u32 i) { return hz_grid[i]; }
#define HZ_GRID_LOAD(w_) do { for (u32 hz_i = THREAD; hz_i < HZ_TABLE_WORDS; hz_i += THREADS) hz_grid[hz_i] = LD1((w_).tab, hz_i); BARRIER; } while (0)
#else
FN u32 GRID(Wt w, u32 i) { return LD1(w.tab, i); }
#endif

// ---- matrix cores, for ops/hip ----
typedef const u32x4* TileLine;
#define TILE_LINE(tile_, i_) (&(tile_)[i_])
typedef i32 HzInt4 __attribute__((ext_vector_type(4)));
typedef i32 HzInt8 __attribute__((ext_vector_type(8)));
FN u32x4 hz_line(TileLine line) { return *line; }
FN HzInt8 hz_zeros8() { return HzInt8{0, 0, 0, 0, 0, 0, 0, 0}; }
#if defined(__GFX11__)
FN HzInt8 hz_wmma_i8(u32x4 a, u32x4 b, HzInt8 c) {
  return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, __builtin_bit_cast(HzInt4, a), true, __builtin_bit_cast(HzInt4, b), c, false);
}
#endif
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
FN HzInt4 hz_mfma_i8(u32x2 a, u32x2 b) {
  return __builtin_amdgcn_mfma_i32_16x16x32_i8(__builtin_bit_cast(long, a), __builtin_bit_cast(long, b), HzInt4{0, 0, 0, 0}, 0, 0, 0);
}
#endif
