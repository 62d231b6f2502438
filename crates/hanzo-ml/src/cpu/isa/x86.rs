//! The methods that AVX2 and AVX-512 share: 256-bit forms, pasted into both implementations by [`ymm_methods`].
//!
//! AVX-512 keeps 32-byte vectors in mat-vec (a decode step is bound by the weight stream, and 32 elements is the unit
//! of every format); it only swaps what its masks and VNNI do better, and widens the GEMM.

/// The shared methods of [`super::Isa`] for x86-64.
macro_rules! ymm_methods {
    () => {
        type B = __m256i;
        type F = __m256;
        type N = __m256i;

        #[inline(always)]
        unsafe fn load(p: *const u8) -> __m256i {
            unsafe { _mm256_loadu_si256(p.cast()) }
        }

        #[inline(always)]
        unsafe fn store(p: *mut u8, x: __m256i) {
            unsafe { _mm256_storeu_si256(p.cast(), x) }
        }

        #[inline(always)]
        unsafe fn spill(p: *mut u8, x: __m256i) {
            unsafe { p.cast::<__m256i>().write_volatile(x) }
        }

        #[inline(always)]
        unsafe fn load_dup(p: *const u8) -> __m256i {
            unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
        }

        #[inline(always)]
        unsafe fn splat(x: u8) -> __m256i {
            unsafe { _mm256_set1_epi8(x as i8) }
        }

        #[inline(always)]
        unsafe fn from4(x: [u64; 4]) -> __m256i {
            unsafe { _mm256_setr_epi64x(x[0] as i64, x[1] as i64, x[2] as i64, x[3] as i64) }
        }

        #[inline(always)]
        unsafe fn from8(x: [u32; 8]) -> __m256i {
            let lane = |i: usize| x[i] as i32;
            unsafe { _mm256_setr_epi32(lane(0), lane(1), lane(2), lane(3), lane(4), lane(5), lane(6), lane(7)) }
        }

        #[inline(always)]
        unsafe fn nibbles(p: *const u8) -> __m256i {
            unsafe {
                let x = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
                let x = _mm256_srlv_epi64(x, _mm256_setr_epi64x(0, 0, 4, 4));
                _mm256_and_si256(x, _mm256_set1_epi8(15))
            }
        }

        #[inline(always)]
        unsafe fn nibbles8(p: *const u8) -> __m256i {
            unsafe {
                let x = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
                let x = _mm256_permute4x64_epi64::<0b01_01_00_00>(x);
                let x = _mm256_srlv_epi64(x, _mm256_setr_epi64x(0, 4, 0, 4));
                _mm256_and_si256(x, _mm256_set1_epi8(15))
            }
        }

        #[inline(always)]
        unsafe fn nibble_pairs(p: *const u8) -> __m256i {
            unsafe {
                let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                let x = _mm256_or_si256(x, _mm256_slli_epi16::<4>(x));
                _mm256_and_si256(x, _mm256_set1_epi8(15))
            }
        }

        #[inline(always)]
        unsafe fn threes(p: *const u8) -> __m256i {
            unsafe {
                let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                let low = _mm256_and_si256(x, _mm256_set1_epi32(0x7));
                let second = _mm256_and_si256(_mm256_slli_epi32::<5>(x), _mm256_set1_epi32(0x700));
                let third = _mm256_and_si256(_mm256_slli_epi32::<10>(x), _mm256_set1_epi32(0x7_0000));
                let fourth = _mm256_and_si256(_mm256_slli_epi32::<15>(x), _mm256_set1_epi32(0x700_0000));
                _mm256_or_si256(_mm256_or_si256(low, second), _mm256_or_si256(third, fourth))
            }
        }

        #[inline(always)]
        unsafe fn sevens(x: __m256i) -> __m256i {
            unsafe {
                let low = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
                let second = _mm256_and_si256(_mm256_slli_epi32::<1>(x), _mm256_set1_epi32(0x7f00));
                let third = _mm256_and_si256(_mm256_slli_epi32::<2>(x), _mm256_set1_epi32(0x7f_0000));
                let fourth = _mm256_and_si256(_mm256_slli_epi32::<3>(x), _mm256_set1_epi32(0x7f00_0000));
                _mm256_or_si256(_mm256_or_si256(low, second), _mm256_or_si256(third, fourth))
            }
        }

        #[inline(always)]
        unsafe fn high_sevens(p: *const u8) -> __m256i {
            unsafe {
                let a = _mm256_srli_epi16::<9>(_mm256_loadu_si256(p.cast()));
                let b = _mm256_srli_epi16::<9>(_mm256_loadu_si256(p.add(32).cast()));
                _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(a, b))
            }
        }

        #[inline(always)]
        unsafe fn odd_words(p: *const u8) -> __m256i {
            unsafe {
                let (a, b) = (_mm256_loadu_ps(p.cast()), _mm256_loadu_ps(p.add(32).cast()));
                let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
                _mm256_permute4x64_epi64::<0b11_01_10_00>(odd)
            }
        }

        #[inline(always)]
        unsafe fn splat4(x: u32) -> __m256i {
            unsafe { _mm256_set1_epi32(x as i32) }
        }

        #[inline(always)]
        unsafe fn top_bits(p: *const u8) -> __m256i {
            unsafe { _mm256_srai_epi32::<31>(_mm256_cvtepi16_epi32(_mm_loadu_si128(p.cast()))) }
        }

        #[inline(always)]
        unsafe fn eights(x: u32) -> __m256i {
            unsafe {
                let index = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
                _mm256_shuffle_epi8(_mm256_set1_epi32(x as i32), index)
            }
        }

        #[inline(always)]
        unsafe fn spill_pairs(out: *mut u16, low: __m256i, high: __m256i) {
            unsafe {
                let low = _mm256_permute4x64_epi64::<0b11_01_10_00>(low);
                let high = _mm256_permute4x64_epi64::<0b11_01_10_00>(high);
                Self::spill(out.cast(), _mm256_unpacklo_epi8(low, high));
                Self::spill(out.add(16).cast(), _mm256_unpackhi_epi8(low, high));
            }
        }

        #[inline(always)]
        unsafe fn with_parity(x: __m256i) -> __m256i {
            unsafe {
                // The parity of a nibble, in bit 7.
                let table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                    0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0,
                ));
                let nibble = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi16::<4>(x)), _mm256_set1_epi8(15));
                _mm256_or_si256(x, _mm256_shuffle_epi8(table, nibble))
            }
        }

        #[inline(always)]
        unsafe fn crumbs(p: *const u8) -> __m256i {
            unsafe {
                // One byte in each 32-bit lane; shifted copies put field j at bit 8 j.
                let x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                let x = _mm256_or_si256(x, _mm256_slli_epi32::<6>(x));
                let x = _mm256_or_si256(x, _mm256_slli_epi32::<12>(x));
                _mm256_and_si256(x, _mm256_set1_epi8(3))
            }
        }

        #[inline(always)]
        unsafe fn field<const SHIFT: u32, const MASK: u8>(x: __m256i) -> __m256i {
            unsafe {
                // A constant count: becomes the immediate form.
                let x = _mm256_srl_epi16(x, _mm_cvtsi32_si128(SHIFT as i32));
                _mm256_and_si256(x, _mm256_set1_epi8(MASK as i8))
            }
        }

        #[inline(always)]
        unsafe fn raise<const SHIFT: u32, const MASK: u8>(x: __m256i) -> __m256i {
            unsafe {
                let x = _mm256_and_si256(x, _mm256_set1_epi8(MASK as i8));
                _mm256_sll_epi16(x, _mm_cvtsi32_si128(SHIFT as i32))
            }
        }

        #[inline(always)]
        unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_or_si256(a, b) }
        }

        #[inline(always)]
        unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_add_epi8(a, b) }
        }

        #[inline(always)]
        unsafe fn sub(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_sub_epi8(a, b) }
        }

        #[inline(always)]
        unsafe fn halves(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_blend_epi32::<0xf0>(a, b) }
        }

        #[inline(always)]
        unsafe fn at_least(x: __m256i, v: u8) -> __m256i {
            unsafe {
                let above = _mm256_subs_epu8(x, _mm256_set1_epi8((v - 1) as i8));
                _mm256_min_epu8(above, _mm256_set1_epi8(1))
            }
        }

        #[inline(always)]
        unsafe fn prefetch(p: *const u8) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }

        #[inline(always)]
        unsafe fn f_zero() -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn f_splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn f_splat2(p: *const f32) -> __m256 {
            unsafe { _mm256_blend_ps::<0xf0>(_mm256_broadcast_ss(&*p), _mm256_broadcast_ss(&*p.add(1))) }
        }

        #[inline(always)]
        unsafe fn f_load(p: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(p) }
        }

        #[inline(always)]
        unsafe fn f_store(p: *mut f32, x: __m256) {
            unsafe { _mm256_storeu_ps(p, x) }
        }

        #[inline(always)]
        unsafe fn f_spill(p: *mut f32, x: __m256) {
            unsafe { p.cast::<__m256>().write_volatile(x) }
        }

        #[inline(always)]
        unsafe fn f_mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn f_fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn f_sum(x: __m256) -> f32 {
            unsafe {
                let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
            }
        }

        #[inline(always)]
        unsafe fn f_from_n(x: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(x) }
        }

        #[inline(always)]
        unsafe fn f_from_u8(x: u64) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(x as i64))) }
        }

        #[inline(always)]
        unsafe fn f_from_i8(x: u64) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(x as i64))) }
        }

        #[inline(always)]
        unsafe fn f_twice(x: __m256) -> [__m256; 2] {
            unsafe {
                let (lo, hi) = (_mm256_unpacklo_ps(x, x), _mm256_unpackhi_ps(x, x));
                [_mm256_permute2f128_ps::<0x20>(lo, hi), _mm256_permute2f128_ps::<0x31>(lo, hi)]
            }
        }

        #[inline(always)]
        unsafe fn f16(bits: u16) -> f32 {
            unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
        }

        #[inline(always)]
        unsafe fn fma1(a: f32, b: f32, c: f32) -> f32 {
            unsafe { _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c))) }
        }

        #[inline(always)]
        unsafe fn quantize(x: *const f32, codes: *mut i8) -> Quantized {
            unsafe {
                let mut v = [_mm256_setzero_ps(); 4];
                for i in 0..4 {
                    v[i] = _mm256_loadu_ps(x.add(8 * i));
                }
                // Magnitudes compare as integers, NaN above infinity: the result depends on no order.
                let magnitude = _mm256_set1_epi32(0x7fff_ffff);
                let mut m = _mm256_setzero_si256();
                for i in 0..4 {
                    m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
                }
                let m = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
                let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b00_00_11_10>(m));
                let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b00_00_00_01>(m));
                let (d, inverse) = super::quantum(f32::from_bits(_mm_cvtsi128_si32(m) as u32));
                if inverse == 0.0 {
                    _mm256_storeu_si256(codes.cast(), _mm256_setzero_si256());
                    return Quantized { d, sums: [0; 2] };
                }
                // Conversion rounds to nearest, ties to even; |x * inverse| < 127.5, so that packing clamps nothing.
                let inverse = _mm256_set1_ps(inverse);
                let mut q = [_mm256_setzero_si256(); 4];
                for i in 0..4 {
                    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
                }
                let q = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
                let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
                _mm256_storeu_si256(codes.cast(), q);
                let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
                let quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                let both = _mm_hadd_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256::<1>(quads));
                let both = _mm_hadd_epi32(both, both);
                Quantized { d, sums: [_mm_cvtsi128_si32(both) as i16, _mm_extract_epi32::<1>(both) as i16] }
            }
        }
    };
}

pub(super) use ymm_methods;

/// Transposes four rows of eight 32-bit words: words `i` (low half) and `i + 4` (high half) of all rows.
#[inline(always)]
pub(super) unsafe fn transpose4(rows: [*const i8; 4]) -> [std::arch::x86_64::__m256i; 4] {
    use std::arch::x86_64::*;
    unsafe {
        let mut r = [_mm256_setzero_si256(); 4];
        for i in 0..4 {
            r[i] = _mm256_loadu_si256(rows[i].cast());
        }
        let a = [_mm256_unpacklo_epi32(r[0], r[1]), _mm256_unpackhi_epi32(r[0], r[1])];
        let b = [_mm256_unpacklo_epi32(r[2], r[3]), _mm256_unpackhi_epi32(r[2], r[3])];
        [
            _mm256_unpacklo_epi64(a[0], b[0]),
            _mm256_unpackhi_epi64(a[0], b[0]),
            _mm256_unpacklo_epi64(a[1], b[1]),
            _mm256_unpackhi_epi64(a[1], b[1]),
        ]
    }
}

/// Transposes eight rows of eight 32-bit words.
#[inline(always)]
pub(super) unsafe fn transpose8(r: [std::arch::x86_64::__m256i; 8]) -> [std::arch::x86_64::__m256i; 8] {
    use std::arch::x86_64::*;
    unsafe {
        let a = [
            _mm256_unpacklo_epi32(r[0], r[1]),
            _mm256_unpackhi_epi32(r[0], r[1]),
            _mm256_unpacklo_epi32(r[2], r[3]),
            _mm256_unpackhi_epi32(r[2], r[3]),
            _mm256_unpacklo_epi32(r[4], r[5]),
            _mm256_unpackhi_epi32(r[4], r[5]),
            _mm256_unpacklo_epi32(r[6], r[7]),
            _mm256_unpackhi_epi32(r[6], r[7]),
        ];
        // b[i]: words i (low half) and i + 4 (high half) of rows 0..4; b[4 + i] of rows 4..8.
        let b = [
            _mm256_unpacklo_epi64(a[0], a[2]),
            _mm256_unpackhi_epi64(a[0], a[2]),
            _mm256_unpacklo_epi64(a[1], a[3]),
            _mm256_unpackhi_epi64(a[1], a[3]),
            _mm256_unpacklo_epi64(a[4], a[6]),
            _mm256_unpackhi_epi64(a[4], a[6]),
            _mm256_unpacklo_epi64(a[5], a[7]),
            _mm256_unpackhi_epi64(a[5], a[7]),
        ];
        [
            _mm256_permute2x128_si256::<0x20>(b[0], b[4]),
            _mm256_permute2x128_si256::<0x20>(b[1], b[5]),
            _mm256_permute2x128_si256::<0x20>(b[2], b[6]),
            _mm256_permute2x128_si256::<0x20>(b[3], b[7]),
            _mm256_permute2x128_si256::<0x31>(b[0], b[4]),
            _mm256_permute2x128_si256::<0x31>(b[1], b[5]),
            _mm256_permute2x128_si256::<0x31>(b[2], b[6]),
            _mm256_permute2x128_si256::<0x31>(b[3], b[7]),
        ]
    }
}
