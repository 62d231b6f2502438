// The words of ops/cuda and ops/hip on the host prelude: tensor-core instructions emulated from the tables of PTX (mma, ldmatrix) and of AMD's
// matrix instructions, register by register, so that a kernel that holds a fragment wrongly gives wrong sums. All lanes publish their registers, then
// each makes its own results.
typedef hz::Cell<u32x4> TileLine;
#define TILE_LINE(tile_, i_) ((tile_)[i_].c)
struct HzInt4 { i32 x, y, z, w; i32& operator[](u32 i) { return i == 0u ? x : i == 1u ? y : i == 2u ? z : w; } };
struct HzInt8 { i32 v[8]; i32& operator[](u32 i) { return v[i]; } };
static u32 published[THREADS / WAVE][WAVE][8];
static void together(const char*) { hz::wave_word(hz::SUM_I, 0u, 0u, __LINE__); }
static u32 (*publish(const u32* words, u32 n))[8] {
  for (u32 i = 0u; i < n; i++) published[WAVE_ID][LANE][i] = words[i];
  together("published");
  return published[WAVE_ID];
}
static i32 byte_of(u32 word, u32 k) { return (i32)(int8_t)(word >> (8u * k)); }
FN u32x4 hz_line(TileLine line) { return line.get(); }
FN HzInt8 hz_zeros8() { return HzInt8{{0, 0, 0, 0, 0, 0, 0, 0}}; }

// ldmatrix .x4: lane i gives the address of line i % 8 of matrix i / 8; register m of lane l is word l % 4 of line l / 4 of matrix m.
FN u32x4 hz_ldmatrix4(TileLine line) {
  u32x4 own = line.get();
  u32 words[4] = {own.x, own.y, own.z, own.w};
  u32(*lanes)[8] = publish(words, 4u);
  u32 r[4];
  for (u32 m = 0u; m < 4u; m++) r[m] = lanes[m * 8u + LANE / 4u][LANE % 4u];
  together("read");
  return mk4(r[0], r[1], r[2], r[3]);
}
// mma.m16n8k32 and .m16n8k16 of signed bytes: element (i, k) of A is byte k % 4 of register (i / 8) + 2 (k / 16) of lane (i % 8) * 4 + k % 16 / 4;
// element (k, n) of B is byte k % 4 of register k / 16 of lane n * 4 + k % 16 / 4; element (i, n) of C is register n % 2 + 2 (i / 8) of lane
// (i % 8) * 4 + n / 2.
static HzInt4 mma(const u32* a, const u32* b, u32 depth) {
  u32 words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  u32(*lanes)[8] = publish(words, 6u);
  HzInt4 c;
  for (u32 e = 0u; e < 4u; e++) {
    u32 i = LANE / 4u + (e / 2u) * 8u, n = LANE % 4u * 2u + e % 2u;
    c[e] = 0;
    for (u32 k = 0u; k < depth; k++) {
      u32 of_a = lanes[i % 8u * 4u + k % 16u / 4u][i / 8u + 2u * (k / 16u)], of_b = lanes[n * 4u + k % 16u / 4u][4u + k / 16u];
      c[e] += byte_of(of_a, k % 4u) * byte_of(of_b, k % 4u);
    }
  }
  together("read");
  return c;
}
FN HzInt4 hz_mma_k32(u32x4 a, u32 b0, u32 b1) {
  u32 ra[4] = {a.x, a.y, a.z, a.w}, rb[2] = {b0, b1};
  return mma(ra, rb, 32u);
}
FN HzInt4 hz_mma_k16(u32 a0, u32 a1, u32 b0) {
  u32 ra[4] = {a0, a1, 0u, 0u}, rb[2] = {b0, 0u};
  return mma(ra, rb, 16u);
}
// mma.m16n8k16 of halves or bfloat16s: element (i, k) of A is half k % 2 of register i / 8 + 2 (k / 8) of lane (i % 8) * 4 + k % 8 / 2; element (k, n) of
// B is half k % 2 of register k / 8 of lane n * 4 + k % 8 / 2; C as above, in f32. Products are exact; PTX leaves the order of sums open.
template <class Value> static f32x4 mma_k16(u32x4 a, u32 b0, u32 b1, f32x4 c, Value value) {
  u32 words[6] = {a.x, a.y, a.z, a.w, b0, b1};
  u32(*lanes)[8] = publish(words, 6u);
  f32 sums[4] = {c.x, c.y, c.z, c.w};
  for (u32 e = 0u; e < 4u; e++) {
    u32 i = LANE / 4u + (e / 2u) * 8u, n = LANE % 4u * 2u + e % 2u;
    for (u32 k = 0u; k < 16u; k++) {
      u32 of_a = lanes[i % 8u * 4u + k % 8u / 2u][i / 8u + 2u * (k / 8u)], of_b = lanes[n * 4u + k % 8u / 2u][4u + k / 8u];
      sums[e] += value(of_a >> (16u * (k % 2u)) & 0xffffu) * value(of_b >> (16u * (k % 2u)) & 0xffffu);
    }
  }
  together("read");
  return mkf4(sums[0], sums[1], sums[2], sums[3]);
}
FN f32x4 hz_mma_f16(u32x4 a, u32 b0, u32 b1, f32x4 c) { return mma_k16(a, b0, b1, c, [](u32 h) { return f16_to_f32(h); }); }
FN f32x4 hz_mma_bf16(u32x4 a, u32 b0, u32 b1, f32x4 c) { return mma_k16(a, b0, b1, c, [](u32 h) { return as_f32(h << 16u); }); }
FN u32 hz_half2(f32 a, f32 b) { return f32_to_f16(a) | f32_to_f16(b) << 16u; }
static u32 nearest_bfloat(f32 x) {
  u32 bits = as_u32(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16u & 1u)) >> 16u;
}
FN u32 hz_bfloat2(f32 a, f32 b) { return nearest_bfloat(a) | nearest_bfloat(b) << 16u; }
// cp.async: what a thread asked for is in workgroup memory once it has waited for the group that it closed behind it, and for other threads behind a
// barrier after that. Until then its place holds nothing that may be used.
struct Asked { TileLine to; u32x4 value; u32 group; };
static Asked asked[THREADS][64];
static u32 n_asked[THREADS], groups_closed[THREADS];
static uint64_t asked_in[THREADS];
FN void hz_copy16(TileLine to, RO p, u32 i) {
  u32 me = THREAD;
  if (asked_in[me] != hz::global_group && n_asked[me] != 0u) hz::fault("a workgroup before this one ended with copies on their way");
  asked_in[me] = hz::global_group;
  if (n_asked[me] == 64u) hz::fault("more than 64 copies of a thread are on their way");
  u32x4 value = LD4(p, i);
  to.put(mk4(0x7fffdeadu, 0x7fffdeadu, 0x7fffdeadu, 0x7fffdeadu));
  asked[me][n_asked[me]++] = Asked{to, value, groups_closed[me]};
}
FN void hz_copy_commit() { groups_closed[THREAD]++; }
FN void hz_copy_wait(u32 but) {
  u32 me = THREAD, left = 0u;
  for (u32 k = 0u; k < n_asked[me]; k++) {
    Asked one = asked[me][k];
    if (one.group + but < groups_closed[me]) one.to.put(one.value);
    else asked[me][left++] = one;
  }
  n_asked[me] = left;
}
// v_wmma_i32_16x16x16_iu8, wave 32: lane l % 16 of either half holds row l % 16 of A and column l % 16 of B, 16 bytes each; element (i, n) of C is
// register i / 2 of lane n + 16 (i % 2). The halves of the wave must hold the same.
FN HzInt8 hz_wmma_i8(u32x4 a, u32x4 b, HzInt8 c) {
  u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  u32(*lanes)[8] = publish(words, 8u);
  for (u32 k = 0u; k < 8u; k++)
    if (lanes[LANE % 16u][k] != lanes[LANE % 16u + 16u][k]) hz::fault("the halves of a wave hold different operands");
  for (u32 e = 0u; e < 8u; e++) {
    u32 i = 2u * e + LANE / 16u, n = LANE % 16u;
    for (u32 k = 0u; k < 16u; k++) c[e] += byte_of(lanes[i][k / 4u], k % 4u) * byte_of(lanes[n][4u + k / 4u], k % 4u);
  }
  together("read");
  return c;
}
// v_mfma_i32_16x16x32_i8, wave 64: lane l holds bytes 8 (l / 16) .. + 7 of row l % 16 of A and of column l % 16 of B; element (i, n) of C is register
// i % 4 of lane n + 16 (i / 4).
FN HzInt4 hz_mfma_i8(u32x2 a, u32x2 b) {
  u32 words[4] = {a.x, a.y, b.x, b.y};
  u32(*lanes)[8] = publish(words, 4u);
  HzInt4 c;
  for (u32 e = 0u; e < 4u; e++) {
    u32 i = LANE / 16u * 4u + e, n = LANE % 16u;
    c[e] = 0;
    for (u32 k = 0u; k < 32u; k++) c[e] += byte_of(lanes[k / 8u * 16u + i][k / 4u % 2u], k % 4u) * byte_of(lanes[k / 8u * 16u + n][2u + k / 4u % 2u], k % 4u);
  }
  together("read");
  return c;
}

// Metal's simdgroup matrices: their registers are nobody's business, so every lane holds the whole matrix.
struct MatF { f32 v[64]; };
struct MatH { f32 v[64]; };
FN MatF hz_mat_zero() { MatF m; for (u32 i = 0u; i < 64u; i++) m.v[i] = 0.0f; return m; }
template <u32 SIZE> FN MatH hz_mat_load(hz::Shared<u32x4, SIZE>& tile, u32 at, u32 stride) {
  MatH m;
  for (u32 i = 0u; i < 8u; i++) {
    u32x4 run = tile[at + i * stride];
    u32 words[4] = {run.x, run.y, run.z, run.w};
    for (u32 k = 0u; k < 8u; k++) m.v[i * 8u + k] = f16_to_f32(words[k / 2u] >> (16u * (k & 1u)) & 0xffffu);
  }
  return m;
}
template <u32 SIZE> FN MatH hz_mat_load_transposed(hz::Shared<u32x4, SIZE>& tile, u32 at, u32 stride) {
  MatH m = hz_mat_load(tile, at, stride), t;
  for (u32 i = 0u; i < 64u; i++) t.v[i] = m.v[i % 8u * 8u + i / 8u];
  return t;
}
FN MatF hz_mat_fma(MatH a, MatH b, MatF c) {
  for (u32 i = 0u; i < 64u; i++)
    for (u32 k = 0u; k < 8u; k++) c.v[i] += a.v[i / 8u * 8u + k] * b.v[k * 8u + i % 8u];
  return c;
}
template <u32 SIZE> FN void hz_mat_store(hz::Shared<f32, SIZE>& to, u32 at, MatF m) {
  for (u32 e = 0u; e < 2u; e++) to[at + e * 32u + LANE] = m.v[e * 32u + LANE];
}
