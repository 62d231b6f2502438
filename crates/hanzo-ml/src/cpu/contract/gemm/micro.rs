//! The register tiles of the GEMM: `M` tokens by `V` vectors of weight rows, one slice of k.
//!
//! Each adds its products to the outputs in the order of the groups. What a group costs on the ports that multiply
//! decides which tile a format gets, see the module above. Nothing here knows of formats, threads or scratch.

use super::{MOST_TOKENS, Operands};
use crate::cpu::isa::Isa;

/// The body of the microkernel of `M` tokens and `V` vectors of rows for formats of `SPAN` elements a scale.
#[inline(always)]
pub(in crate::cpu::contract) unsafe fn micro<
    I: Isa,
    const SPAN: usize,
    const MIN: bool,
    const OFFSET: bool,
    const POWERS: bool,
    const M: usize,
    const V: usize,
>(
    o: &Operands<I>,
) {
    const { assert!(M <= MOST_TOKENS && (SPAN == 32 || !POWERS)) };
    unsafe {
        match (SPAN, MIN) {
            // Where registers hold it all, an operation less is not worth the sums' way through memory.
            (16, false) if I::PACKED_OFFSET => micro_halves::<I, OFFSET, M, V>(o),
            (16 | 32, _) => micro_groups::<I, SPAN, MIN, OFFSET, POWERS, M, V>(o),
            _ => micro_blocks::<I, SPAN, MIN, OFFSET, M, V>(o),
        }
    }
}

/// Where a microkernel is in a tile's panels and a block's tokens.
struct At<I: Isa, const M: usize, const V: usize> {
    w: [*const I::Packed; V],
    a: *const I::Packed,
    scales: [*const f32; V],
    minima: [*const f32; V],
    starts: *const i32,
    d: *const f32,
    dsums: *const f32,
}

impl<I: Isa, const M: usize, const V: usize> At<I, M, V> {
    #[inline(always)]
    fn start(o: &Operands<I>) -> Self {
        let mut at = At {
            w: [o.tile.codes.cast_const(); V],
            a: o.block.codes,
            scales: [o.tile.scales.cast_const(); V],
            minima: [o.tile.minima.cast_const(); V],
            starts: o.block.starts,
            d: o.block.d,
            dsums: o.block.dsums,
        };
        for v in 0..V {
            let panel = o.tile.panel(v);
            (at.w[v], at.scales[v], at.minima[v]) = (panel.codes, panel.scales, panel.minima);
        }
        at
    }

    /// The integer sums of the next `LEN` elements, which all begin with the next start if codes have an offset.
    #[inline(always)]
    unsafe fn sums<const LEN: usize, const OFFSET: bool>(&mut self) -> [[I::WI; M]; V] {
        unsafe {
            let mut sums = [[I::wi_zero(); M]; V];
            if OFFSET && I::PACKED_OFFSET {
                for t in 0..M {
                    let start = I::wi_splat(self.starts.add(t));
                    for v in 0..V {
                        sums[v][t] = start;
                    }
                }
                self.starts = self.starts.add(M);
            }
            for _ in 0..LEN / I::STEP {
                for v in 0..V {
                    sums[v] = I::wi_steps(sums[v], self.w[v], self.a);
                    self.w[v] = self.w[v].add(I::STEP * I::NR);
                }
                self.a = self.a.add(I::STEP * M);
            }
            for v in 0..V {
                sums[v] = I::wi_rows(sums[v]);
            }
            sums
        }
    }

    /// The scale of panel `v`'s rows in the next span.
    #[inline(always)]
    unsafe fn scale(&mut self, v: usize) -> I::W {
        let scale = unsafe { I::w_load(self.scales[v]) };
        self.scales[v] = self.scales[v].wrapping_add(I::NR);
        scale
    }

    /// The steps of the next group of 32.
    #[inline(always)]
    unsafe fn steps(&mut self) -> [I::W; M] {
        let mut d = [unsafe { I::w_zero() }; M];
        for t in 0..M {
            d[t] = unsafe { I::w_splat(*self.d.add(t)) };
        }
        self.d = self.d.wrapping_add(M);
        d
    }

    /// The minima of the next group, and what they are multiplied by.
    #[inline(always)]
    unsafe fn minima_of_group(&mut self) -> ([I::W; V], [I::W; M]) {
        unsafe {
            let (mut minima, mut dsums) = ([I::w_zero(); V], [I::w_zero(); M]);
            for v in 0..V {
                minima[v] = I::w_load(self.minima[v]);
                self.minima[v] = self.minima[v].add(I::NR);
            }
            for t in 0..M {
                dsums[t] = I::w_splat(*self.dsums.add(t));
            }
            self.dsums = self.dsums.add(M);
            (minima, dsums)
        }
    }
}

/// A scale, and perhaps a minimum, for each group of `GROUP` elements: `acc += sum * (scale * d)`.
#[inline(always)]
unsafe fn micro_groups<
    I: Isa,
    const GROUP: usize,
    const MIN: bool,
    const OFFSET: bool,
    const POWERS: bool,
    const M: usize,
    const V: usize,
>(
    o: &Operands<I>,
) {
    unsafe {
        let mut acc = o.load::<M, V>();
        let mut at = At::<I, M, V>::start(o);
        for _ in 0..o.k / 32 {
            let d = at.steps();
            for _ in 0..32 / GROUP {
                let sums = at.sums::<GROUP, OFFSET>();
                for v in 0..V {
                    let s = at.scale(v);
                    for t in 0..M {
                        let factor = if POWERS { I::w_times_power(d[t], s) } else { I::w_mul(s, d[t]) };
                        acc[t][v] = I::w_fma(I::w_from_wi(sums[v][t]), factor, acc[t][v]);
                    }
                }
                if MIN {
                    let (minima, dsums) = at.minima_of_group();
                    for v in 0..V {
                        for t in 0..M {
                            acc[t][v] = I::w_fnma(minima[v], dsums[t], acc[t][v]);
                        }
                    }
                }
            }
        }
        o.store(&acc);
    }
}

/// A scale for each group of 16, no minima: `acc += (sum * scale + sum * scale) * d`.
#[inline(always)]
unsafe fn micro_halves<I: Isa, const OFFSET: bool, const M: usize, const V: usize>(o: &Operands<I>) {
    unsafe {
        let running = Running::<I, M, V>::start(o);
        let mut at = At::<I, M, V>::start(o);
        for _ in 0..o.k / 32 {
            let mut both = [[I::w_zero(); M]; V];
            let sums = at.sums::<16, OFFSET>();
            for v in 0..V {
                let s = at.scale(v);
                for t in 0..M {
                    both[v][t] = I::w_mul(I::w_from_wi(sums[v][t]), s);
                }
            }
            let sums = at.sums::<16, OFFSET>();
            let d = at.steps();
            for v in 0..V {
                let s = at.scale(v);
                for t in 0..M {
                    let both = I::w_fma(I::w_from_wi(sums[v][t]), s, both[v][t]);
                    running.set(t, v, I::w_fma(both, d[t], running.get(t, v)));
                }
            }
        }
        running.finish(o);
    }
}

/// One scale for each `SPAN` elements, and perhaps minima of groups of 16: `acc += (sum over groups of sum * d) * scale`.
#[inline(always)]
unsafe fn micro_blocks<
    I: Isa,
    const SPAN: usize,
    const MIN: bool,
    const OFFSET: bool,
    const M: usize,
    const V: usize,
>(
    o: &Operands<I>,
) {
    unsafe {
        let running = Running::<I, M, V>::start(o);
        let mut at = At::<I, M, V>::start(o);
        for _ in 0..o.k / SPAN {
            let mut block = [[I::w_zero(); M]; V];
            for _ in 0..SPAN / 32 {
                let sums = at.sums::<32, OFFSET>();
                let d = at.steps();
                for v in 0..V {
                    for t in 0..M {
                        block[v][t] = I::w_fma(I::w_from_wi(sums[v][t]), d[t], block[v][t]);
                    }
                }
                if MIN {
                    let (low, high) = (at.minima_of_group(), at.minima_of_group());
                    for v in 0..V {
                        for t in 0..M {
                            let acc = I::w_fnma(low.0[v], low.1[t], running.get(t, v));
                            running.set(t, v, I::w_fnma(high.0[v], high.1[t], acc));
                        }
                    }
                }
            }
            for v in 0..V {
                let s = at.scale(v);
                for t in 0..M {
                    running.set(t, v, I::w_fma(block[v][t], s, running.get(t, v)));
                }
            }
        }
        running.finish(o);
    }
}

/// Sums that are in memory while a tile is worked on, because registers are full of others: by volatile accesses, since
/// the optimizer would move them to registers and those to the stack.
struct Running<I: Isa, const M: usize, const V: usize>(*mut I::W);

impl<I: Isa, const M: usize, const V: usize> Running<I, M, V> {
    #[inline(always)]
    unsafe fn start(o: &Operands<I>) -> Self {
        let running = Running(o.running.cast());
        for t in 0..M {
            for v in 0..V {
                unsafe {
                    let x = if o.first { I::w_zero() } else { I::w_load(o.out[t].add(v * I::NR)) };
                    running.set(t, v, x);
                }
            }
        }
        running
    }

    #[inline(always)]
    unsafe fn get(&self, t: usize, v: usize) -> I::W {
        unsafe { self.0.add(t * V + v).read_volatile() }
    }

    #[inline(always)]
    unsafe fn set(&self, t: usize, v: usize, x: I::W) {
        unsafe { self.0.add(t * V + v).write_volatile(x) }
    }

    #[inline(always)]
    unsafe fn finish(&self, o: &Operands<I>) {
        for t in 0..M {
            for v in 0..V {
                unsafe { I::w_store(o.out[t].add(v * I::NR), self.get(t, v)) };
            }
        }
    }
}
