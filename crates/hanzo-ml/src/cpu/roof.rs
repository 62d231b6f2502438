//! What this processor can do at most: bytes a thread reads, multiply-adds a thread makes, how soon one thread sees what
//! another wrote. For measurements alone: no kernel may depend on it, and nothing here touches a model.
//!
//! The loops do nothing else, from registers or from memory in order, so that no kernel can be faster: a kernel's rate over
//! these is the fraction of its bound.

use super::isa::IsaLevel;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A multiply-add unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Int8 codes, as the contractions multiply them: `vpdpbusd` of 512 bits, `vpmaddubsw` and `vpmaddwd` of 256, `i16` products.
    Int8,
    /// Float by float.
    F32,
}

impl Unit {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Int8 => "int8",
            Unit::F32 => "f32",
        }
    }
}

/// Independent sums: enough to hide an instruction's latency on two ports, and few enough for sixteen registers.
const SUMS: usize = 12;

/// Reads all bytes in order, once, asking for those `ahead` bytes further (0: for none); gives a value that depends on each.
///
/// # Panics
/// If this processor lacks `isa`.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, reason = "the portable loop asks for nothing ahead"))]
pub fn read(isa: IsaLevel, bytes: &[u8], ahead: usize) -> u64 {
    assert!(isa.is_available(), "{isa} is not among this processor's instruction sets");
    match isa {
        // SAFETY: checked above.
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => unsafe { x86::read512(bytes, ahead) },
        // SAFETY: checked above.
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx2 => unsafe { x86::read256(bytes, ahead) },
        _ => {
            let mut sums = [0u64; 8];
            for line in bytes.as_chunks::<64>().0 {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum ^= u64::from_le_bytes(*word);
                }
            }
            sums.iter().fold(0, |a, b| a ^ b)
        }
    }
}

/// Makes multiply-adds in registers, `rounds` times twelve instructions (or what stands for one), and gives their number.
///
/// # Panics
/// If this processor lacks `isa`.
pub fn multiply_adds(isa: IsaLevel, unit: Unit, rounds: usize) -> u64 {
    assert!(isa.is_available(), "{isa} is not among this processor's instruction sets");
    let each = match (isa, unit) {
        // SAFETY: checked above, here and below.
        #[cfg(target_arch = "x86_64")]
        (IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16, Unit::Int8) => unsafe { x86::dot512(rounds) },
        #[cfg(target_arch = "x86_64")]
        (IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16, Unit::F32) => unsafe { x86::fma512(rounds) },
        #[cfg(target_arch = "x86_64")]
        (IsaLevel::Avx2, Unit::Int8) => unsafe { x86::dot256(rounds) },
        #[cfg(target_arch = "x86_64")]
        (IsaLevel::Avx2, Unit::F32) => unsafe { x86::fma256(rounds) },
        (_, Unit::Int8) => portable_int8(rounds),
        (_, Unit::F32) => portable_f32(rounds),
    };
    (each * SUMS * rounds) as u64
}

/// Sends a count to another thread and back, `rounds` times, through one cache line.
///
/// A round trip says where the two threads run: some 80 ns between cores that share a last-level cache and its path to
/// memory, several hundred between those that do not, whose read bandwidths then add up. On a virtual machine that may
/// differ from one minute to the next.
pub fn round_trips(rounds: usize) {
    #[repr(align(128))]
    struct Line(AtomicUsize);
    let line = Line(AtomicUsize::new(0));
    let wait = |value: usize| {
        let mut spins = 0u32;
        while line.0.load(Ordering::Acquire) != value {
            spins += 1;
            // The other thread may have no core of its own. No pause instructions: some hypervisors take a core away after
            // a few thousand.
            if spins.is_multiple_of(1 << 20) {
                std::thread::yield_now();
            }
        }
    };
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..rounds {
                wait(2 * i + 1);
                line.0.store(2 * i + 2, Ordering::Release);
            }
        });
        for i in 0..rounds {
            line.0.store(2 * i + 1, Ordering::Release);
            wait(2 * i + 2);
        }
    });
}

/// Eight products of 16 bits, summed in 32.
fn portable_int8(rounds: usize) -> usize {
    let (a, b) = (black_box([3i16; 8]), black_box([-2i16; 8]));
    let mut sums = [[0i32; 8]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for i in 0..8 {
                sum[i] = sum[i].wrapping_add(i32::from(a[i]) * i32::from(b[i]));
            }
        }
        black_box(&mut sums);
    }
    8
}

/// Four products and sums.
fn portable_f32(rounds: usize) -> usize {
    let (a, b) = (black_box([1.0f32; 4]), black_box([1e-9f32; 4]));
    let mut sums = [[0f32; 4]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for i in 0..4 {
                sum[i] += a[i] * b[i];
            }
        }
        black_box(&mut sums);
    }
    4
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::SUMS;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// As [`super::read`].
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn read512(bytes: &[u8], ahead: usize) -> u64 {
        let mut sum = _mm512_setzero_si512();
        for line in bytes.as_chunks::<64>().0 {
            if ahead > 0 {
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast());
            }
            // SAFETY: a line is 64 bytes.
            sum = _mm512_xor_si512(sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
        }
        _mm512_reduce_add_epi64(sum) as u64
    }

    /// As [`super::read`].
    #[target_feature(enable = "avx2")]
    pub(super) fn read256(bytes: &[u8], ahead: usize) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 2];
        for line in bytes.as_chunks::<64>().0 {
            if ahead > 0 {
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast());
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a line is 64 bytes.
                *sum = _mm256_xor_si256(*sum, unsafe { _mm256_loadu_si256(line.as_ptr().add(32 * i).cast()) });
            }
        }
        let sum = _mm256_xor_si256(sums[0], sums[1]);
        (_mm256_extract_epi64::<0>(sum) ^ _mm256_extract_epi64::<1>(sum) ^ _mm256_extract_epi64::<2>(sum)) as u64
            ^ _mm256_extract_epi64::<3>(sum) as u64
    }

    /// Multiply-adds an instruction.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn dot512(rounds: usize) -> usize {
        let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(-2)));
        let mut sums = [_mm512_setzero_si512(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        64
    }

    /// Multiply-adds an instruction.
    #[target_feature(enable = "avx512f")]
    pub(super) fn fma512(rounds: usize) -> usize {
        let (a, b) = (black_box(_mm512_set1_ps(1.0)), black_box(_mm512_set1_ps(1e-9)));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
        16
    }

    /// Multiply-adds of three instructions: products of bytes in pairs, sums of pairs, the sum.
    #[target_feature(enable = "avx2")]
    pub(super) fn dot256(rounds: usize) -> usize {
        let (a, ones) = (black_box(_mm256_set1_epi8(3)), _mm256_set1_epi16(1));
        let mut b = black_box([_mm256_set1_epi8(-2); 2]);
        let mut sums = [_mm256_setzero_si256(); SUMS];
        for round in 0..rounds {
            for sum in &mut sums {
                // The second operand differs from round to round, so that the product is made each time.
                let pairs = _mm256_maddubs_epi16(a, b[round % 2]);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
            b = black_box(b);
        }
        black_box(sums);
        32
    }

    /// Multiply-adds an instruction.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn fma256(rounds: usize) -> usize {
        let (a, b) = (black_box(_mm256_set1_ps(1.0)), black_box(_mm256_set1_ps(1e-9)));
        let mut sums = [_mm256_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
        8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_sees_every_byte_of_whole_lines_and_multiplying_counts_what_it_makes() {
        for isa in IsaLevel::available() {
            let mut bytes = vec![0u8; 64 * 37];
            let none = read(isa, &bytes, 0);
            for at in [0, 63, 64, 64 * 37 - 1] {
                bytes[at] = 1;
                assert!(read(isa, &bytes, 0) != none && read(isa, &bytes, 4096) != none, "{isa} {at}");
                bytes[at] = 0;
            }
            round_trips(3);
            assert!(multiply_adds(isa, Unit::Int8, 10) >= 10 * 8 && multiply_adds(isa, Unit::F32, 10) >= 10 * 4);
        }
    }
}
