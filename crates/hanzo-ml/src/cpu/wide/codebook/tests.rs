//! Planes, fields and signs against the codebooks, by scalar twins of the instructions, and the instructions against those.

use super::*;
use crate::cpu::isa::IsaLevel;

/// `vpmultishiftqb` on one qword.
fn multishift(at: &Bytes, qword: u64) -> [u8; 8] {
    std::array::from_fn(|i| qword.rotate_right(u32::from(at.0[i])) as u8)
}

/// `vpermb` over a table.
fn permuted(table: &Bytes, index: [u8; 8]) -> [u8; 8] {
    index.map(|i| table.0[usize::from(i) % 64])
}

/// `vgf2p8affineqb` of `x` by the matrix `a`, one qword.
fn affine(x: &Bytes, a: u64) -> [u8; 8] {
    let bytes = a.to_le_bytes();
    let bit = |x: u8, r: usize| ((bytes[7 - r] & x).count_ones() as u8 & 1) << r;
    std::array::from_fn(|i| (0..8).map(|r| bit(x.0[i], r)).sum())
}

/// The qword of four rows of a codebook.
fn joined<const N: usize>(planes: &Planes<N>, rows: [usize; 4]) -> u64 {
    let half = |plane: usize| rows.map(|row| planes.0[plane].0[row]);
    let ([a, b, c, d], [e, f, g, h]) = (half(0), half(1));
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Four rows around `i`, that all differ.
fn four_rows<const N: usize>(i: usize) -> [usize; 4] {
    [i, (i + 7) % N, (i * 5 + 1) % N, N - 1 - i]
}

/// Sign bytes of four rows, all different, of even parity.
fn sign_bytes(i: usize) -> [u8; 4] {
    std::array::from_fn(|p| tables::KSIGNS[(i * 3 + 37 * p) % 128])
}

/// The qword that has them at `places`.
fn placed(bytes: [u8; 4], places: [u32; 4]) -> u64 {
    (0..4).map(|p| u64::from(bytes[p]) << (8 * places[p])).sum()
}

/// The code of element `e` of a row.
fn signed(row: &[u8], signs: u8, e: usize) -> u8 {
    if signs >> e & 1 == 1 { 128 - row[e] } else { 128 + row[e] }
}

/// Indices of a permutation, scalar twin of [`select`].
fn selected(mask: u8, a: [u8; 8], b: [u8; 8]) -> [u8; 8] {
    std::array::from_fn(|i| a[i] & mask | b[i] & !mask)
}

fn rows_of_8_come_back_with_signs<const N: usize>(grid: &[u64; N], planes: &Planes<N>) {
    for i in 0..N {
        let (rows, sign_bytes) = (four_rows::<N>(i), sign_bytes(i));
        let qword = joined(planes, rows);
        let bytes = rows.map(|row| grid[row].to_le_bytes());
        let code = |row: usize, e: usize| signed(&bytes[row], sign_bytes[row], e);
        let by_chunk = affine(&SEVEN_AND_PARITY, placed(sign_bytes, [2, 3, 5, 6]));
        let placed = placed(sign_bytes, [2, 3, 4, 5]);
        let by_group = [affine(&LOW_HALVES, placed), affine(&HIGH_HALVES_PARITY, placed)];
        for v in 0..4 {
            let index = selected(3 << PLACES[v].0, multishift(&ROWS_OF_8[v], qword), by_chunk);
            assert_eq!(permuted(&SIGNED_2_BY_PLACES[v], index), std::array::from_fn(|e| code(v, e)), "row {}", rows[v]);
            let (row, half, bits) = (v / 2, v % 2, bits_of_rows(v as u8 / 2));
            let signs = std::array::from_fn(|e| by_group[half][e] & bits[e]);
            let index = selected(3, multishift(&HALVES_OF_8[v], qword), signs);
            let expected = std::array::from_fn(|e| code(row + e / 4 * 2, 4 * half + e % 4));
            assert_eq!(permuted(&SIGNED_2, index), expected, "halves {v} of rows {rows:?}");
        }
    }
}

fn rows_of_4_come_back_with_signs<const N: usize>(grid: &[u32; N], planes: &Planes<N>, tables: &[Bytes; 4]) {
    for i in 0..N {
        let (rows, sign_bytes) = (four_rows::<N>(i), sign_bytes(i));
        let bytes = rows.map(|row| grid[row].to_le_bytes());
        let signs = affine(&SEVEN_AND_PARITY, placed(sign_bytes, [2, 3, 5, 6]));
        for v in 0..4 {
            let fields = multishift(&ROWS_OF_4[v], joined(planes, rows));
            let got = permuted(&tables[v], selected(7 << PLACES[v].0, fields, signs));
            let first = v % 2 * 2;
            let pair = [bytes[first], bytes[first + 1]].concat();
            assert_eq!(got, std::array::from_fn(|e| signed(&pair, sign_bytes[v], e)), "rows {rows:?}");
        }
    }
}

#[test]
fn every_row_comes_back_with_its_signs_from_fields_of_the_planes() {
    rows_of_8_come_back_with_signs(&tables::IQ2_XXS_GRID, &IQ2_XXS_PLANES);
    rows_of_8_come_back_with_signs(&tables::IQ2_XS_GRID, &IQ2_XS_PLANES);
    rows_of_8_come_back_with_signs(&tables::IQ2_S_GRID, &IQ2_S_PLANES);
    rows_of_4_come_back_with_signs(&tables::IQ3_XXS_GRID, &IQ3_XXS_PLANES, &SIGNED_3_XXS);
    rows_of_4_come_back_with_signs(&tables::IQ3_S_GRID, &IQ3_S_PLANES, &SIGNED_3_S);
}

#[test]
fn every_ternary_row_comes_back_eightfold() {
    for i in 0..2048 {
        let rows = four_rows::<2048>(i);
        let qword = joined(&IQ1_PLANES, rows);
        let code = |row: usize, e: usize| 8 * (tables::IQ1_S_GRID[rows[row]].to_le_bytes()[e].wrapping_add(1));
        for v in 0..4 {
            let got = multishift(&ROWS_OF_8_UP[v], qword).map(|byte| byte & 0x18);
            assert_eq!(got, std::array::from_fn(|e| code(v, e)));
            let got = multishift(&HALVES_OF_8_UP[v], qword).map(|byte| byte & 0x18);
            assert_eq!(got, std::array::from_fn(|e| code(v / 2 + e / 4 * 2, v % 2 * 4 + e % 4)));
        }
    }
}

#[test]
fn three_tables_hold_the_ascending_plane_of_iq1() {
    for (i, &byte) in IQ1_PLANES.0[1].0.iter().enumerate() {
        let number = IQ1_STEPS.first.0[i / 16] + u8::from(i as u8 % 16 >= IQ1_STEPS.step.0[i / 16]);
        assert_eq!(IQ1_STEPS.bytes.0[usize::from(number)], byte, "row {i}");
    }
}

#[test]
fn one_affine_transformation_gives_the_signs_of_every_index_and_their_parity() {
    for (i, &byte) in tables::KSIGNS.iter().enumerate() {
        for p in 0..8 {
            // The eighth bit of an index's byte is another field's.
            for above in [0, 0x80] {
                let a = (i as u64 | above) << (8 * p);
                for (e, got) in affine(&SEVEN_AND_PARITY, a).into_iter().enumerate() {
                    assert_eq!(got, (byte >> e & 1) << (7 - p), "element {e} of {i}");
                }
                let halves = [affine(&LOW_HALVES, a), affine(&HIGH_HALVES_PARITY, a)];
                for e in 0..8 {
                    let got = [halves[e / 4][e % 4], halves[e / 4][4 + e % 4]];
                    assert_eq!(got, [(byte >> e & 1) << (7 - p); 2], "element {e} of {i}");
                }
            }
        }
    }
    for byte in 0..=255u64 {
        let halves = [affine(&LOW_HALVES, byte), affine(&HIGH_HALVES, byte)];
        for (e, got) in affine(&BITS, byte).into_iter().enumerate() {
            assert_eq!(got, (byte >> e & 1) as u8 * 0x80);
            assert_eq!(got, halves[e / 4][e % 4]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn stored(x: __m512i) -> [u8; 64] {
    unsafe { std::mem::transmute(x) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn look_ups_are_rows<const N: usize>(planes: &Planes<N>) {
    for first in (0..N).step_by(64) {
        // A permutation of all rows, so that every place meets both halves of every table.
        let rows: [usize; 64] = std::array::from_fn(|i| (first + i) * 77 % N);
        let low = rows.map(|row| row as u8);
        let mask = |bit: usize| (0..64).fold(0, |mask, i| mask | ((rows[i] >> bit & 1) as u64) << i);
        unsafe {
            let low = _mm512_loadu_si512(low.as_ptr().cast());
            let index = Index { low, high: [mask(8), mask(9), mask(10)] };
            let mut found = vec![super::rows(planes, index)];
            if N == 2048 {
                let high = rows.map(|row| (row >> 8) as u8 | 0xf8);
                let high = _mm512_loadu_si512(high.as_ptr().cast());
                let up = rows.map(|row| (row >> 8 << 4) as u8 | 0x8f);
                let up = _mm512_loadu_si512(up.as_ptr().cast());
                found.push(rows_ascending::<0>(&IQ1_PLANES, &IQ1_STEPS, index, high));
                found.push(rows_ascending::<4>(&IQ1_PLANES, &IQ1_STEPS, index, up));
            }
            for [a, b] in found {
                let (a, b) = (stored(a), stored(b));
                for j in 0..8 {
                    let at = |i: usize| joined(planes, std::array::from_fn(|e| rows[i + e])).to_le_bytes();
                    let first = 16 * (j / 2) + 4 * (j % 2);
                    assert_eq!(a[8 * j..][..8], at(first));
                    assert_eq!(b[8 * j..][..8], at(first + 8));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn instructions_are_their_twins() {
    let words: [u64; 8] = std::array::from_fn(|i| 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(2 * i as u64 + 3));
    unsafe {
        let x = _mm512_loadu_si512(words.as_ptr().cast());
        for taken in [&SEVEN_AND_PARITY, &LOW_HALVES, &HIGH_HALVES_PARITY] {
            assert_eq!(stored(signs(x, taken)), words.map(|word| affine(taken, word)).concat()[..]);
        }
        for at in ROWS_OF_8_UP.iter().chain(&ROWS_OF_4) {
            let shifted = _mm512_multishift_epi64_epi8(at.load(), x);
            assert_eq!(stored(shifted), words.map(|word| multishift(at, word)).concat()[..]);
            let looked_up = _mm512_permutexvar_epi8(select(7, shifted, x), SIGNED_3_S[0].load());
            let index = |word: u64| selected(7, multishift(at, word), word.to_le_bytes());
            let expected = words.map(|word| permuted(&SIGNED_3_S[0], index(word)));
            assert_eq!(stored(looked_up), expected.concat()[..]);
        }
    }
}

#[test]
fn instructions_find_every_row_and_do_as_their_scalar_twins() {
    if !IsaLevel::available().any(|isa| isa == IsaLevel::Avx512Vbmi) {
        return;
    }
    // SAFETY: the CPU has AVX-512 VBMI and GFNI.
    unsafe {
        look_ups_are_rows(&IQ2_XXS_PLANES);
        look_ups_are_rows(&IQ2_XS_PLANES);
        look_ups_are_rows(&IQ2_S_PLANES);
        look_ups_are_rows(&IQ3_XXS_PLANES);
        look_ups_are_rows(&IQ3_S_PLANES);
        look_ups_are_rows(&IQ1_PLANES);
        instructions_are_their_twins();
    }
}
