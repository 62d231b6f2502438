//! The operations on every instruction set against plain arithmetic, at their extremes.

use super::portable::f16_to_f32;
use super::*;

#[test]
fn half_floats_convert_like_the_half_crate() {
    for bits in 0..=u16::MAX {
        let expected = half::f16::from_bits(bits).to_f32();
        let ours = f16_to_f32(bits);
        assert!(ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(), "{bits:#06x}");
    }
}

/// Dot products of constant and of mixed extreme codes, exact.
fn dots_are_exact<I: Isa>() {
    let lanes = |n: I::N| {
        let mut out = [0f32; 8];
        // SAFETY: the caller checked that the CPU has `I`.
        unsafe { I::f_store(out.as_mut_ptr(), I::f_from_n(n)) };
        out
    };
    let extremes = [-128i32, -127, -1, 0, 1, 62, 127];
    for &x in &extremes[1..] {
        for &c in &extremes {
            for &other in &extremes {
                let a = [x as i8 as u8; 32];
                let mut codes = [c as i8 as u8; 32];
                codes[3] = other as i8 as u8;
                let expected = |lane: usize| ((if lane == 0 { 3 * c + other } else { 4 * c }) * x) as f32;
                // SAFETY: the caller checked that the CPU has `I`.
                let signed = lanes(unsafe {
                    let a = I::load(a.as_ptr());
                    I::dot_signed(I::signed(I::load(codes.as_ptr())), a, I::fix_signed(a))
                });
                assert_eq!(signed, std::array::from_fn(expected), "{c} {other} {x}");
                for offset in [1u8, 8, 64, 127] {
                    let shifted = codes.map(|code| (code as i8 as u8) & 0x7f);
                    let value = |i: usize| (i32::from(shifted[i]) - i32::from(offset)) * x;
                    let expected = |lane: usize| (4 * lane..4 * lane + 4).map(value).sum::<i32>() as f32;
                    // SAFETY: as above.
                    let unsigned = lanes(unsafe {
                        let a = I::load(a.as_ptr());
                        I::dot_unsigned(I::load(shifted.as_ptr()), a, I::fix_unsigned(a, offset))
                    });
                    assert_eq!(unsigned, std::array::from_fn(expected), "{shifted:?} - {offset}, {x}");
                }
            }
        }
    }
}

#[test]
fn dot_products_are_exact_at_the_extremes() {
    dots_are_exact::<Portable>();
    #[cfg(target_arch = "x86_64")]
    if IsaLevel::detect() >= IsaLevel::Avx2 {
        dots_are_exact::<Avx2>();
    }
    #[cfg(target_arch = "x86_64")]
    if IsaLevel::detect() >= IsaLevel::Avx512 {
        dots_are_exact::<Avx512>();
    }
}

#[test]
fn levels_have_names_and_an_order() {
    for level in IsaLevel::ALL {
        assert_eq!(IsaLevel::from_name(level.name()), Some(level));
    }
    assert!(IsaLevel::available().any(|level| level == IsaLevel::Portable));
    assert!(IsaLevel::Avx512 > IsaLevel::Avx2 && IsaLevel::Avx2 > IsaLevel::Portable);
}
