//! AVX512_BF16: pairs of bf16 products added to f32, for AVX-512 tiles. Only on processors that have it beside the rest.
//!
//! `vdpbf16ps` adds two exact products to each lane, rounding to nearest even whatever the mode, and takes subnormal inputs
//! and results as zero, as `vcvtne2ps2bf16` does: rounding in between may differ from one maker to the next.

use std::arch::x86_64::*;

use super::{Avx512, Bf16};

impl Bf16 for Avx512 {
    /// 32 bf16.
    type P = __m512i;

    const PAIRED: usize = 32;

    #[inline(always)]
    unsafe fn p_load(p: *const u8, n: usize) -> __m512i {
        unsafe {
            if n == 32 { _mm512_loadu_si512(p.cast()) } else { _mm512_maskz_loadu_epi16((1u32 << n) - 1, p.cast()) }
        }
    }

    #[inline(always)]
    unsafe fn p_dot(acc: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: both are 64 bytes of which any bits are bf16.
        unsafe {
            let bf16 = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
            _mm512_dpbf16_ps(acc, bf16(w), bf16(x))
        }
    }

    #[inline(always)]
    unsafe fn p_round(x: *const f32, n: usize, out: *mut u8) {
        for from in (0..n).step_by(32) {
            let mask = |first: usize| match n.saturating_sub(from + first) {
                left @ 0..16 => (1u16 << left) - 1,
                _ => !0,
            };
            unsafe {
                let low = _mm512_maskz_loadu_ps(mask(0), x.wrapping_add(from));
                let high = _mm512_maskz_loadu_ps(mask(16), x.wrapping_add(from + 16));
                let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(out.add(2 * from).cast(), rounded);
            }
        }
    }
}
