// The words of kernel-C for Vulkan's GLSL; see KERNEL-C.md.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_integer_dot_product : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

#define u32 uint
#define i32 int
#define f32 float
#define u32x2 uvec2
#define u32x4 uvec4
#define f32x4 vec4
#define mk2(a, b) uvec2(a, b)
#define mk4(a, b, c, d) uvec4(a, b, c, d)
#define mkf4(a, b, c, d) vec4(a, b, c, d)
#define FN
#define CONST const
#define UNROLL [[unroll]]

#define RO uint64_t
#define RW uint64_t
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly restrict buffer HzR1 { uint e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly restrict buffer HzR2 { uvec2 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly restrict buffer HzR4 { uvec4 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly restrict buffer HzRf { float e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly restrict buffer HzRf4 { vec4 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer HzW1 { uint e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer HzW2 { uvec2 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer HzW4 { uvec4 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer HzWf { float e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer HzWf4 { vec4 e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer HzCf { float e[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) coherent buffer HzCf4 { vec4 e[]; };
#define LD1(p, i) (HzR1(p).e[i])
#define LD2(p, i) (HzR2(p).e[i])
#define LD4(p, i) (HzR4(p).e[i])
#define LDF(p, i) (HzRf(p).e[i])
#define LDF4(p, i) (HzRf4(p).e[i])
#define RW1(p, i) (HzW1(p).e[i])
#define RWF(p, i) (HzWf(p).e[i])
#define ST1(p, i, v) HzW1(p).e[i] = (v)
#define ST2(p, i, v) HzW2(p).e[i] = (v)
#define ST4(p, i, v) HzW4(p).e[i] = (v)
#define STF(p, i, v) HzWf(p).e[i] = (v)
#define STF4(p, i, v) HzWf4(p).e[i] = (v)
#define CLDF(p, i) (HzCf(p).e[i])
#define CLDF4(p, i) (HzCf4(p).e[i])
#define CSTF(p, i, v) HzCf(p).e[i] = (v)
#define CSTF4(p, i, v) HzCf4(p).e[i] = (v)
#define FENCE memoryBarrierBuffer()
#define ADV(p, n) ((p) + 16ul * uint64_t(n))
#define ATOMIC_ADD(p, i, v) atomicAdd(HzW1(p).e[i], v)

#define THREAD gl_LocalInvocationIndex
#define LANE gl_SubgroupInvocationID
#define WAVE_ID gl_SubgroupID
#define GROUP_X gl_WorkGroupID.x
#define GROUP_Y gl_WorkGroupID.y
#define GROUP_Z gl_WorkGroupID.z
#define BARRIER barrier()

#define as_f32(x) uintBitsToFloat(x)
uint as_u32(float x) { return floatBitsToUint(x); }
uint as_u32(int x) { return uint(x); }
#define as_i32(x) int(x)
#define abs_(x) abs(x)
#define min_(a, b) min(a, b)
#define max_(a, b) max(a, b)
#define floor_(x) floor(x)
#define rint_(x) roundEven(x)
#define fma_(a, b, c) fma(a, b, c)
#define popc(x) uint(bitCount(x))
#define dp4a(a, b, c) (dotPacked4x8EXT(int(a), int(b)) + (c))

// Never made part of an fma.
float mul_rn(float a, float b) {
  precise float product = a * b;
  return product;
}

// One Newton step on the residual: Vulkan's own square root is only within a few units in the last place.
float sqrt_rn(float x) {
  float s = sqrt(x);
  float r = fma(-s, s, x);
  float t = s + r / (2.0f * s);
  return x > 1e-35f && x < 1e35f ? t : s;
}

uint prmt(uint lo, uint hi, uint sel) {
  uvec4 at = (uvec4(sel) >> uvec4(0u, 4u, 8u, 12u)) & 7u;
  uvec4 from = uvec4(at.x < 4u ? lo : hi, at.y < 4u ? lo : hi, at.z < 4u ? lo : hi, at.w < 4u ? lo : hi);
  uvec4 b = (from >> ((at & 3u) * 8u)) & 255u;
  return b.x | (b.y << 8) | (b.z << 16) | (b.w << 24);
}

struct Wt { RO p0; RO p1; RO p2; RO p3; RO tab; };
struct Unit { u32x4 lo; u32x4 hi; f32 s0; f32 s1; f32 m0; f32 m1; };
struct Floats { f32x4 v0; f32x4 v1; f32x4 v2; f32x4 v3; f32x4 v4; f32x4 v5; f32x4 v6; f32x4 v7; };

// What depends on the constants WAVE and HALF_HW, which the assembler prints after this prelude.
#define HZ_AFTER_CONSTANTS \
  float wave_sum(float x) { return WAVE == 1u ? x : subgroupAdd(x); } \
  float wave_max(float x) { return WAVE == 1u ? x : subgroupMax(x); } \
  int wave_sum_i(int x) { return WAVE == 1u ? x : subgroupAdd(x); } \
  float wave_xor(float x, uint m) { return WAVE == 1u ? x : subgroupShuffleXor(x, m); } \
  float f16_to_f32(uint h) { \
    if (HALF_HW != 0u) return unpackHalf2x16(h & 0xffffu).x; \
    uint m = (h & 0x7fffu) << 13; \
    uint sign = (h & 0x8000u) << 16; \
    uint e = m & 0x0f800000u; \
    uint bits = e == 0x0f800000u ? m + 0x70000000u : m + 0x38000000u; \
    float small = float(h & 0x3ffu) * 5.9604644775390625e-8f; \
    return uintBitsToFloat(sign | (e == 0u ? floatBitsToUint(small) : bits)); \
  } \
  uint f32_to_f16(float x) { \
    uint u = floatBitsToUint(x); \
    uint sign = (u >> 16) & 0x8000u; \
    uint a = u & 0x7fffffffu; \
    if (HALF_HW != 0u) return packHalf2x16(vec2(x, 0.0f)); \
    if (a > 0x7f800000u) return sign | 0x7e00u; \
    if (a >= 0x47800000u) return sign | 0x7c00u; \
    if (a < 0x38800000u) { \
      if (a < 0x33000000u) return sign; \
      uint e = a >> 23; \
      uint m = (a & 0x7fffffu) | 0x800000u; \
      uint s = 126u - e; \
      uint r = m >> s; \
      uint rest = m & ((1u << s) - 1u); \
      uint half_ = 1u << (s - 1u); \
      return sign | (r + (rest > half_ || (rest == half_ && (r & 1u) == 1u) ? 1u : 0u)); \
    } \
    uint r = (a - 0x38000000u) >> 13; \
    uint rest = a & 0x1fffu; \
    return sign | (r + (rest > 0x1000u || (rest == 0x1000u && (r & 1u) == 1u) ? 1u : 0u)); \
  }
