//! The operations on every instruction set against plain arithmetic, at their extremes.

use super::*;

/// Calls `$check::<I>()` for each instruction set that this CPU has.
macro_rules! on_every_level {
    ($check:ident) => {
        for level in IsaLevel::available() {
            match level {
                IsaLevel::Portable => $check::<Portable>(),
                #[cfg(target_arch = "x86_64")]
                IsaLevel::Avx2 => $check::<Avx2>(),
                #[cfg(target_arch = "x86_64")]
                IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => $check::<Avx512>(),
                #[cfg(target_arch = "aarch64")]
                IsaLevel::Neon => $check::<Neon>(),
                #[cfg(target_arch = "aarch64")]
                IsaLevel::I8mm => $check::<I8mm>(),
                _ => panic!("{level} is of another architecture"),
            }
        }
    };
}

/// Every half float, one by one and `NR` at a time.
fn halves_are_exact<I: Isa>() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for halves in all.chunks_exact(I::NR) {
        let mut wide = vec![0f32; I::NR];
        // SAFETY: the caller checked that the CPU has `I`; both have `NR` elements.
        unsafe { I::w_store(wide.as_mut_ptr(), I::w_load_f16(halves.as_ptr())) };
        for (&bits, wide) in halves.iter().zip(wide) {
            let expected = half::f16::from_bits(bits).to_f32();
            // SAFETY: as above.
            for ours in [wide, unsafe { I::f16(bits) }] {
                assert!(ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(), "{bits:#06x}");
            }
        }
    }
}

#[test]
fn half_floats_convert_like_the_half_crate() {
    on_every_level!(halves_are_exact);
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
    on_every_level!(dots_are_exact);
}

#[test]
fn levels_have_names_and_build_on_each_other() {
    for level in IsaLevel::ALL {
        assert_eq!(IsaLevel::from_name(level.name()), Some(level));
        assert_eq!(IsaLevel::available().any(|l| l == level), level.is_available());
    }
    for (low, high) in [(IsaLevel::Avx2, IsaLevel::Avx512), (IsaLevel::Neon, IsaLevel::I8mm)] {
        assert!(low.is_available() || !high.is_available());
    }
    assert_eq!(IsaLevel::available().next(), Some(IsaLevel::Portable));
    assert_eq!(IsaLevel::available().last(), Some(IsaLevel::detect()));
}

#[test]
fn levels_of_another_architecture_are_not_available() {
    let x86 = [IsaLevel::Avx2, IsaLevel::Avx512].iter().any(|level| level.is_available());
    let arm = [IsaLevel::Neon, IsaLevel::I8mm].iter().any(|level| level.is_available());
    assert!(!x86 || cfg!(target_arch = "x86_64"));
    assert!(!arm || cfg!(target_arch = "aarch64"));
}
