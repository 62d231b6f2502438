//! The engine's random numbers: xoshiro256++ seeded through SplitMix64 (Blackman and Vigna), so that a seed means the
//! same tokens on every machine and in every release. Not for cryptography.

/// A generator of 64-bit numbers, with a period of 2^256 - 1.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// A generator whose sequence is a function of `seed` alone.
    pub fn new(seed: u64) -> Rng {
        let mut counter = seed;
        Rng { state: std::array::from_fn(|_| split_mix(&mut counter)) }
    }

    /// The next number, uniform over all 64-bit values.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// The next number, uniform over the multiples of 2^-53 in [0, 1).
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// One step of SplitMix64: spreads a seed of few bits over all 64.
fn split_mix(counter: &mut u64) -> u64 {
    *counter = counter.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *counter;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        let mut rng = Rng { state: [1, 2, 3, 4] };
        let published = [41943041, 58720359, 3588806011781223, 3591011842654386];
        assert_eq!(published.map(|_| rng.next_u64()), published);
        assert_eq!(split_mix(&mut 0), 0xE220_A839_7B1D_CDAF);
    }

    #[test]
    fn fractions_stay_below_one_and_average_a_half() {
        let mut rng = Rng::new(1);
        let mean = (0..10_000).map(|_| rng.next_f64()).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        rng.state = [u64::MAX >> 24, 0, 0, u64::MAX];
        assert!((0..100).all(|_| rng.next_f64() < 1.0));
    }
}
