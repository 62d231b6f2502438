// Metal 3: the words of kernel-C. See KERNEL-C.md. To be compiled with fast math off (MTLMathModeSafe). THREAD, LANE, WAVE_ID and GROUP_* are
// parameters of the entry. Only words may enter.
#include <metal_stdlib>
using namespace metal;
typedef uint u32;
typedef int i32;
typedef float f32;
typedef uint2 u32x2;
typedef uint4 u32x4;
typedef float4 f32x4;
#define FN static inline
#define CONST constant constexpr
#define UNROLL _Pragma("unroll")
#define RO device const uint*
#define RW device uint*
#define HZ_RO device const uint*
#define HZ_RW device uint*

#define HZ_INDICES uint THREAD [[thread_index_in_threadgroup]], uint LANE [[thread_index_in_simdgroup]], \
    uint WAVE_ID [[simdgroup_index_in_threadgroup]], uint3 hz_group [[threadgroup_position_in_grid]]
#define GROUP_X hz_group.x
#define GROUP_Y hz_group.y
#define GROUP_Z hz_group.z
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)

FN u32x2 mk2(u32 a, u32 b) { return uint2(a, b); }
FN u32x4 mk4(u32 a, u32 b, u32 c, u32 d) { return uint4(a, b, c, d); }
FN f32x4 mkf4(f32 a, f32 b, f32 c, f32 d) { return float4(a, b, c, d); }
FN f32 as_f32(u32 x) { return as_type<float>(x); }
FN u32 as_u32(f32 x) { return as_type<uint>(x); }
FN u32 as_u32(i32 x) { return as_type<uint>(x); }
FN i32 as_i32(u32 x) { return as_type<int>(x); }

FN u32 LD1(RO p, u32 i) { return p[i]; }
FN u32x2 LD2(RO p, u32 i) { return ((device const uint2*)p)[i]; }
FN u32x4 LD4(RO p, u32 i) { return ((device const uint4*)p)[i]; }
FN f32 LDF(RO p, u32 i) { return ((device const float*)p)[i]; }
FN f32x4 LDF4(RO p, u32 i) { return ((device const float4*)p)[i]; }
FN RO ADV(RO p, u32 n) { return p + 4ul * ulong(n); }
FN u32 RW1(RW p, u32 i) { return p[i]; }
FN f32 RWF(RW p, u32 i) { return as_f32(p[i]); }
FN void ST1(RW p, u32 i, u32 v) { p[i] = v; }
FN void ST2(RW p, u32 i, u32x2 v) { ((device uint2*)p)[i] = v; }
FN void ST4(RW p, u32 i, u32x4 v) { ((device uint4*)p)[i] = v; }
FN void STF(RW p, u32 i, f32 v) { ((device float*)p)[i] = v; }
FN void STF4(RW p, u32 i, f32x4 v) { ((device float4*)p)[i] = v; }
// Relaxed atomics are coherent over the device. Before Metal 3.2 no fence is, but for a threadgroup's own barrier.
#if __METAL_VERSION__ >= 320
#define FENCE atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device)
#else
#define FENCE threadgroup_barrier(mem_flags::mem_device)
#endif
FN f32 CLDF(RW p, u32 i) { return as_f32(atomic_load_explicit((device atomic_uint*)(p + i), memory_order_relaxed)); }
FN f32x4 CLDF4(RW p, u32 i) { return mkf4(CLDF(p, 4u * i), CLDF(p, 4u * i + 1u), CLDF(p, 4u * i + 2u), CLDF(p, 4u * i + 3u)); }
FN void CSTF(RW p, u32 i, f32 v) { atomic_store_explicit((device atomic_uint*)(p + i), as_u32(v), memory_order_relaxed); }
FN void CSTF4(RW p, u32 i, f32x4 v) {
  CSTF(p, 4u * i, v.x);
  CSTF(p, 4u * i + 1u, v.y);
  CSTF(p, 4u * i + 2u, v.z);
  CSTF(p, 4u * i + 3u, v.w);
}
FN u32 ATOMIC_ADD(RW p, u32 i, u32 v) { return atomic_fetch_add_explicit((device atomic_uint*)(p + i), v, memory_order_relaxed); }

FN f32 wave_sum(f32 x) { return simd_sum(x); }
FN f32 wave_max(f32 x) { return simd_max(x); }
FN i32 wave_sum_i(i32 x) { return simd_sum(x); }
FN f32 wave_xor(f32 x, u32 m) { return simd_shuffle_xor(x, ushort(m)); }
FN i32 dp4a(u32 a, u32 b, i32 c) {
  int4 p = int4(as_type<char4>(a)) * int4(as_type<char4>(b));
  return c + p.x + p.y + p.z + p.w;
}
FN f32 f16_to_f32(u32 h) { return float(as_type<half>(ushort(h))); }
FN u32 f32_to_f16(f32 x) { return uint(as_type<ushort>(half(x))); }
FN f32 mul_rn(f32 a, f32 b) {
#pragma clang fp contract(off)
  return a * b;
}
FN f32 sqrt_rn(f32 x) { return precise::sqrt(x); }
FN f32 fma_(f32 a, f32 b, f32 c) { return fma(a, b, c); }
FN f32 rint_(f32 x) { return rint(x); }
FN f32 floor_(f32 x) { return floor(x); }
FN f32 abs_(f32 x) { return fabs(x); }
FN f32 min_(f32 a, f32 b) { return fmin(a, b); }
FN f32 max_(f32 a, f32 b) { return fmax(a, b); }
FN u32 min_(u32 a, u32 b) { return min(a, b); }
FN u32 max_(u32 a, u32 b) { return max(a, b); }
FN i32 min_(i32 a, i32 b) { return min(a, b); }
FN i32 max_(i32 a, i32 b) { return max(a, b); }
FN u32 popc(u32 x) { return popcount(x); }
FN u32 prmt(u32 lo, u32 hi, u32 sel) {
  uint4 at = (uint4(sel) >> uint4(0u, 4u, 8u, 12u)) & 7u;
  uint4 from = select(uint4(hi), uint4(lo), at < 4u);
  uint4 b = (from >> ((at & 3u) * 8u)) & 255u;
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
struct Unit { u32x4 lo; u32x4 hi; f32 s0; f32 s1; f32 m0; f32 m1; };
struct Floats { f32x4 v0; f32x4 v1; f32x4 v2; f32x4 v3; f32x4 v4; f32x4 v5; f32x4 v6; f32x4 v7; };
// Metal has no workgroup memory at file scope: a weight whose codebook is there carries a pointer to it.
#if HZ_GRID
struct Wt { RO p0; RO p1; RO p2; RO p3; RO tab; threadgroup const u32* grid; };
FN Wt hz_wt(RO base, u32 o1, u32 o2, u32 o3, RO table, threadgroup const u32* grid) { return Wt{base, ADV(base, o1), ADV(base, o2), ADV(base, o3), table, grid}; }
FN u32 GRID(Wt w, u32 i) { return w.grid[i]; }
#define HZ_GRID_MEMORY threadgroup u32 hz_grid[HZ_TABLE_WORDS];
#define HZ_GRID_ARG , hz_grid
#define HZ_GRID_LOAD(w_) do { for (u32 hz_i = THREAD; hz_i < HZ_TABLE_WORDS; hz_i += THREADS) hz_grid[hz_i] = LD1((w_).tab, hz_i); BARRIER; } while (0)
#else
struct Wt { RO p0; RO p1; RO p2; RO p3; RO tab; };
FN Wt hz_wt(RO base, u32 o1, u32 o2, u32 o3, RO table) { return Wt{base, ADV(base, o1), ADV(base, o2), ADV(base, o3), table}; }
FN u32 GRID(Wt w, u32 i) { return LD1(w.tab, i); }
#define HZ_GRID_MEMORY
#define HZ_GRID_ARG
#endif

// ---- simdgroup matrices of 8 by 8, for ops/msl: tiles are u32x4 runs of 8 halves, `stride` runs a row ----
typedef simdgroup_float8x8 MatF;
typedef simdgroup_half8x8 MatH;
FN MatF hz_mat_zero() { return make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }
FN MatH hz_mat_load(threadgroup const u32x4* tile, u32 at, u32 stride) {
  MatH m;
  simdgroup_load(m, (threadgroup const half*)(tile + at), ulong(stride) * 8ul);
  return m;
}
FN MatH hz_mat_load_transposed(threadgroup const u32x4* tile, u32 at, u32 stride) {
  MatH m;
  simdgroup_load(m, (threadgroup const half*)(tile + at), ulong(stride) * 8ul, ulong2(0ul, 0ul), true);
  return m;
}
FN MatF hz_mat_fma(MatH a, MatH b, MatF c) {
  MatF d;
  simdgroup_multiply_accumulate(d, a, b, c);
  return d;
}
FN void hz_mat_store(threadgroup f32* to, u32 at, MatF m) { simdgroup_store(m, to + at, 8ul); }
