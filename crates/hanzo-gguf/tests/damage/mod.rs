//! Seeded damage to files.

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, good enough to damage files with.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Damages a file in one to three places; half of the time where an integer of the file is, judging by its zeros.
pub fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    const NUMBERS: [u64; 14] = [
        0,
        1,
        2,
        7,
        9,
        32,
        33,
        64,
        255,
        0x7fff_ffff,
        0xffff_ffff,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
        0xffff_ffff_ffff_ffff,
    ];
    let mut file = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(3) {
        if file.is_empty() {
            break;
        }
        let at = random.below(file.len());
        // A little-endian integer's first byte: not zero, with zeros after it.
        let integer =
            (at..file.len().saturating_sub(4)).find(|&i| file[i] != 0 && file[i + 1..i + 4] == [0; 3]).unwrap_or(at);
        let patch = |file: &mut Vec<u8>, at: usize, bytes: &[u8]| {
            let n = bytes.len().min(file.len() - at);
            file[at..at + n].copy_from_slice(&bytes[..n]);
        };
        match random.below(10) {
            0 => file[at] ^= 1 << random.below(8),
            1 => file[at] = random.next() as u8,
            2 => file.truncate(at),
            3 => {
                let end = (at + 1 + random.below(16)).min(file.len());
                file.drain(at..end);
            }
            4 => {
                let end = (at + 1 + random.below(64)).min(file.len());
                let copy = file[at..end].to_vec();
                let to = random.below(file.len());
                file.splice(to..to, copy);
            }
            5 => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                file.truncate(at);
                file.extend(&other[from..]);
            }
            6 | 7 => file[integer] = random.pick(&NUMBERS) as u8,
            8 => patch(&mut file, integer, &(random.pick(&NUMBERS) as u32).to_le_bytes()),
            _ => patch(&mut file, integer, &random.pick(&NUMBERS).to_le_bytes()),
        }
    }
    file
}
