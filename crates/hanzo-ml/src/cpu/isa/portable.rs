//! The instruction set in plain Rust: what every other one must agree with, and what runs where there is no other.
//!
//! Loops over arrays of constant length, which the compiler vectorises with whatever the target's baseline has. No
//! intrinsics may enter.

use super::{Isa, Quantized};

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map<T: Copy, U: Copy + Default, const L: usize>(x: [T; L], f: impl Fn(T) -> U) -> [U; L] {
    let mut out = [U::default(); L];
    for i in 0..L {
        out[i] = f(x[i]);
    }
    out
}

#[inline(always)]
fn zip<T: Copy, U: Copy + Default, const L: usize>(a: [T; L], b: [T; L], f: impl Fn(T, T) -> U) -> [U; L] {
    let mut out = [U::default(); L];
    for i in 0..L {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Sums of four products a lane.
#[inline(always)]
fn dot4(a: [i16; 32], b: [u8; 32]) -> [i32; 8] {
    let mut out = [0i32; 8];
    for i in 0..8 {
        for j in 0..4 {
            out[i] += i32::from(a[4 * i + j]) * i32::from(b[4 * i + j] as i8);
        }
    }
    out
}

/// The sum of eight lanes, by halves.
#[inline(always)]
fn sum8(x: [f32; 8]) -> f32 {
    ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
}

/// A half float by its bits: exact for every value, NaN payloads shifted.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    // The half's exponent and mantissa read as an f32 are the value times 2^-112, subnormals included.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7fff);
    let finite = (f32::from_bits(magnitude << 13) * REBIAS).to_bits();
    let special = 0x7f80_0000 | (magnitude & 0x3ff) << 13;
    let value = if magnitude < 0x7c00 { finite } else { special };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// Adds four products a lane: four codes of each row at `w`, four of one token at `a`.
#[inline(always)]
unsafe fn step(acc: [i32; 8], w: *const i16, a: *const i16) -> [i32; 8] {
    // Steps are [2][NR][2]: two pairs of codes, the pairs of all rows together.
    let w = unsafe { w.cast::<[[[i16; 2]; 8]; 2]>().read_unaligned() };
    let a = unsafe { a.cast::<[[i16; 2]; 2]>().read_unaligned() };
    let mut out = acc;
    for pair in 0..2 {
        for row in 0..8 {
            let [w0, w1] = w[pair][row];
            out[row] += i32::from(w0) * i32::from(a[pair][0]) + i32::from(w1) * i32::from(a[pair][1]);
        }
    }
    out
}

impl Isa for Portable {
    type B = [u8; 32];
    type F = [f32; 8];
    type N = [i32; 8];
    type Fix = u8;
    type W = [f32; 8];
    type WI = [i32; 8];
    type Packed = i16;

    const NR: usize = 8;
    const MR: usize = 4;
    const FT: usize = 2;
    const STEP: usize = 4;
    const PACKED_OFFSET: bool = false;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [u8; 32] {
        unsafe { p.cast::<[u8; 32]>().read() }
    }

    #[inline(always)]
    unsafe fn store(p: *mut u8, x: [u8; 32]) {
        unsafe { p.cast::<[u8; 32]>().write(x) }
    }

    #[inline(always)]
    unsafe fn spill(p: *mut u8, x: [u8; 32]) {
        unsafe { Self::store(p, x) }
    }

    #[inline(always)]
    unsafe fn load_dup(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 16]>().read() };
        let mut out = [0; 32];
        out[..16].copy_from_slice(&x);
        out[16..].copy_from_slice(&x);
        out
    }

    #[inline(always)]
    unsafe fn splat(x: u8) -> [u8; 32] {
        [x; 32]
    }

    #[inline(always)]
    unsafe fn from4(x: [u64; 4]) -> [u8; 32] {
        let mut out = [0; 32];
        for i in 0..4 {
            out[8 * i..8 * i + 8].copy_from_slice(&x[i].to_le_bytes());
        }
        out
    }

    #[inline(always)]
    unsafe fn from8(x: [u32; 8]) -> [u8; 32] {
        let mut out = [0; 32];
        for i in 0..8 {
            out[4 * i..4 * i + 4].copy_from_slice(&x[i].to_le_bytes());
        }
        out
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 16]>().read() };
        let mut out = [0; 32];
        for i in 0..16 {
            out[i] = x[i] & 15;
            out[16 + i] = x[i] >> 4;
        }
        out
    }

    #[inline(always)]
    unsafe fn nibbles8(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 16]>().read() };
        let mut out = [0; 32];
        for i in 0..8 {
            out[i] = x[i] & 15;
            out[8 + i] = x[i] >> 4;
            out[16 + i] = x[8 + i] & 15;
            out[24 + i] = x[8 + i] >> 4;
        }
        out
    }

    #[inline(always)]
    unsafe fn nibble_pairs(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 16]>().read() };
        let mut out = [0; 32];
        for i in 0..16 {
            out[2 * i] = x[i] & 15;
            out[2 * i + 1] = x[i] >> 4;
        }
        out
    }

    #[inline(always)]
    unsafe fn threes(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        let mut out = [0; 32];
        for i in 0..8 {
            for j in 0..4 {
                out[4 * i + j] = (x[i] >> (3 * j) & 7) as u8;
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn sevens(x: [u8; 32]) -> [u8; 32] {
        let mut out = [0; 32];
        for i in 0..8 {
            let word = u32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
            for j in 0..4 {
                out[4 * i + j] = (word >> (7 * j) & 127) as u8;
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn high_sevens(p: *const u8) -> [u8; 32] {
        map(unsafe { p.cast::<[u16; 32]>().read_unaligned() }, |word| (word >> 9) as u8)
    }

    #[inline(always)]
    unsafe fn odd_words(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[[u32; 2]; 8]>().read_unaligned() };
        unsafe { Self::from8(map(x, |pair| pair[1])) }
    }

    #[inline(always)]
    unsafe fn splat4(x: u32) -> [u8; 32] {
        unsafe { Self::from8([x; 8]) }
    }

    #[inline(always)]
    unsafe fn top_bits(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[i16; 8]>().read_unaligned() };
        unsafe { Self::from8(map(x, |word| i32::from(word >> 15) as u32)) }
    }

    #[inline(always)]
    unsafe fn eights(x: u32) -> [u8; 32] {
        let x = x.to_le_bytes();
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = x[i / 8];
        }
        out
    }

    #[inline(always)]
    unsafe fn spill_pairs(out: *mut u16, low: [u8; 32], high: [u8; 32]) {
        let words = zip(low, high, |l, h| u16::from_le_bytes([l, h]));
        unsafe { out.cast::<[u16; 32]>().write_unaligned(words) }
    }

    #[inline(always)]
    unsafe fn with_parity(x: [u8; 32]) -> [u8; 32] {
        map(x, |v| {
            let p = v ^ v >> 4;
            let p = p ^ p >> 2;
            v | (p ^ p >> 1) << 7
        })
    }

    #[inline(always)]
    unsafe fn crumbs(p: *const u8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 8]>().read() };
        let mut out = [0; 32];
        for i in 0..8 {
            for j in 0..4 {
                out[4 * i + j] = x[i] >> (2 * j) & 3;
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn field<const SHIFT: u32, const MASK: u8>(x: [u8; 32]) -> [u8; 32] {
        map(x, |v| v >> SHIFT & MASK)
    }

    #[inline(always)]
    unsafe fn raise<const SHIFT: u32, const MASK: u8>(x: [u8; 32]) -> [u8; 32] {
        map(x, |v| (v & MASK) << SHIFT)
    }

    #[inline(always)]
    unsafe fn or(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        zip(a, b, |x, y| x | y)
    }

    #[inline(always)]
    unsafe fn add(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        zip(a, b, u8::wrapping_add)
    }

    #[inline(always)]
    unsafe fn sub(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        zip(a, b, u8::wrapping_sub)
    }

    #[inline(always)]
    unsafe fn halves(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        let mut out = a;
        out[16..].copy_from_slice(&b[16..]);
        out
    }

    #[inline(always)]
    unsafe fn at_least(x: [u8; 32], v: u8) -> [u8; 32] {
        map(x, |b| u8::from(b >= v))
    }

    #[inline(always)]
    unsafe fn add_at(x: [u8; 32], bits: u32, v: u8) -> [u8; 32] {
        let mut out = x;
        for i in 0..32 {
            out[i] = x[i].wrapping_add(v * (bits >> i & 1) as u8);
        }
        out
    }

    #[inline(always)]
    unsafe fn negate_at(x: [u8; 32], bits: u32) -> [u8; 32] {
        let mut out = x;
        for i in 0..32 {
            let mask = 0u8.wrapping_sub((bits >> i & 1) as u8);
            out[i] = (x[i] ^ mask).wrapping_sub(mask);
        }
        out
    }

    #[inline(always)]
    unsafe fn signed(x: [u8; 32]) -> [u8; 32] {
        x
    }

    #[inline(always)]
    unsafe fn lookup_signed(table: &[i8; 16], index: [u8; 32]) -> [u8; 32] {
        map(index, |i| table[usize::from(i & 15)] as u8)
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn fix_none() -> u8 {
        0
    }

    #[inline(always)]
    unsafe fn fix_unsigned(_: [u8; 32], offset: u8) -> u8 {
        offset
    }

    #[inline(always)]
    unsafe fn fix_signed(_: [u8; 32]) -> u8 {
        0
    }

    #[inline(always)]
    unsafe fn dot_unsigned(codes: [u8; 32], a: [u8; 32], offset: u8) -> [i32; 8] {
        dot4(map(codes, |c| i16::from(c) - i16::from(offset)), a)
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: [u8; 32], a: [u8; 32], _: u8) -> [i32; 8] {
        dot4(map(codes, |c| i16::from(c as i8)), a)
    }

    #[inline(always)]
    unsafe fn f_zero() -> [f32; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn f_splat2(p: *const f32) -> [f32; 8] {
        let (a, b) = unsafe { (*p, *p.add(1)) };
        [a, a, a, a, b, b, b, b]
    }

    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> [f32; 8] {
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn f_store(p: *mut f32, x: [f32; 8]) {
        unsafe { p.cast::<[f32; 8]>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn f_spill(p: *mut f32, x: [f32; 8]) {
        unsafe { Self::f_store(p, x) }
    }

    #[inline(always)]
    unsafe fn f_mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |x, y| x * y)
    }

    #[inline(always)]
    unsafe fn f_fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        zip(zip(a, b, |x, y| x * y), c, |x, y| x + y)
    }

    #[inline(always)]
    unsafe fn f_sum(x: [f32; 8]) -> f32 {
        sum8(x)
    }

    #[inline(always)]
    unsafe fn f_from_n(x: [i32; 8]) -> [f32; 8] {
        map(x, |v| v as f32)
    }

    #[inline(always)]
    unsafe fn f_from_u8(x: u64) -> [f32; 8] {
        map(x.to_le_bytes(), f32::from)
    }

    #[inline(always)]
    unsafe fn f_from_i8(x: u64) -> [f32; 8] {
        map(x.to_le_bytes(), |b| f32::from(b as i8))
    }

    #[inline(always)]
    unsafe fn f_twice(x: [f32; 8]) -> [[f32; 8]; 2] {
        [[x[0], x[0], x[1], x[1], x[2], x[2], x[3], x[3]], [x[4], x[4], x[5], x[5], x[6], x[6], x[7], x[7]]]
    }

    #[inline(always)]
    unsafe fn f16(bits: u16) -> f32 {
        f16_to_f32(bits)
    }

    #[inline(always)]
    unsafe fn fma1(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    unsafe fn quantize(x: *const f32, codes: *mut i8) -> Quantized {
        // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low mantissa bits.
        const MAGIC: f32 = 12_582_912.0;
        let x = unsafe { x.cast::<[f32; 32]>().read_unaligned() };
        // As integers, magnitudes order like floats, with NaN above infinity: no order of comparisons matters.
        let mut top = 0u32;
        for v in x {
            top = top.max(v.to_bits() & 0x7fff_ffff);
        }
        let (d, inverse) = super::quantum(f32::from_bits(top));
        let mut out = [0i8; 32];
        let mut sums = [0i16; 2];
        if inverse != 0.0 {
            for i in 0..32 {
                let code = (x[i] * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
                out[i] = code.clamp(-127, 127) as i8;
            }
            for i in 0..16 {
                sums[0] += i16::from(out[i]);
                sums[1] += i16::from(out[16 + i]);
            }
        }
        unsafe { codes.cast::<[i8; 32]>().write_unaligned(out) };
        Quantized { d, sums }
    }

    #[inline(always)]
    unsafe fn w_zero() -> [f32; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn w_load(p: *const f32) -> [f32; 8] {
        unsafe { Self::f_load(p) }
    }

    #[inline(always)]
    unsafe fn w_load_f16(p: *const u16) -> [f32; 8] {
        map(unsafe { p.cast::<[u16; 8]>().read_unaligned() }, f16_to_f32)
    }

    #[inline(always)]
    unsafe fn w_load_bf16(p: *const u16) -> [f32; 8] {
        map(unsafe { p.cast::<[u16; 8]>().read_unaligned() }, |b| f32::from_bits(u32::from(b) << 16))
    }

    #[inline(always)]
    unsafe fn w_store(p: *mut f32, x: [f32; 8]) {
        unsafe { Self::f_store(p, x) }
    }

    #[inline(always)]
    unsafe fn w_splat(x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn w_mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |x, y| x * y)
    }

    #[inline(always)]
    unsafe fn w_fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        unsafe { Self::f_fma(a, b, c) }
    }

    #[inline(always)]
    unsafe fn w_fnma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        zip(c, zip(a, b, |x, y| x * y), |x, y| x - y)
    }

    #[inline(always)]
    unsafe fn w_sum(x: [f32; 8]) -> f32 {
        sum8(x)
    }

    #[inline(always)]
    unsafe fn w_from_wi(x: [i32; 8]) -> [f32; 8] {
        map(x, |v| v as f32)
    }

    #[inline(always)]
    unsafe fn wi_splat(p: *const i32) -> [i32; 8] {
        [unsafe { *p }; 8]
    }

    #[inline(always)]
    unsafe fn wi_zero() -> [i32; 8] {
        [0; 8]
    }

    #[inline(always)]
    unsafe fn wi_steps<const M: usize>(mut sums: [[i32; 8]; M], w: *const i16, a: *const i16) -> [[i32; 8]; M] {
        for t in 0..M {
            sums[t] = unsafe { step(sums[t], w, a.add(4 * t)) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn pack_weights(codes: *const u8, signed: bool, offset: u8, out: *mut i16) {
        for step in 0..8 {
            for pair in 0..2 {
                for row in 0..8 {
                    for j in 0..2 {
                        // SAFETY: `codes` has 8 * 32 bytes, `out` 8 * 32 codes.
                        unsafe {
                            let code = *codes.add(row * 32 + step * 4 + pair * 2 + j);
                            let value =
                                if signed { i16::from(code as i8) } else { i16::from(code) - i16::from(offset) };
                            out.add(step * 32 + pair * 16 + row * 2 + j).write(value);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut i16, stride: usize) {
        for step in 0..8 {
            for t in 0..4 {
                for j in 0..4 {
                    // SAFETY: tokens have 32 codes; `out` has eight steps of sixteen, `stride` apart.
                    unsafe {
                        let code = *codes[t].add(step * 4 + j);
                        out.add(step * stride + t * 4 + j).write(i16::from(code));
                    }
                }
            }
        }
    }
}
