//! Where kernels get their instruction set: for each, small `#[target_feature]` functions around the generic bodies, and
//! the table from (contraction, format, activations) to them.

use hanzo_gguf::Format;

use super::gemm::{Micro, Micros, Operands};
use super::{ActKind, Acts, Contraction, Job, Kernel, float, gemm, matvec};
use crate::cpu::formats::{self, CpuFormat, for_each_cpu_format};
use crate::cpu::isa;

/// The row of the table for one key: `$module` has the entry points, the list is of all block formats.
macro_rules! table {
    ($( $(#[$attr:meta])* $file:ident :: $format:ident, )*) => {
        /// The kernel of a key on this instruction set.
        pub(crate) fn kernel(op: Contraction, format: Format, acts: ActKind) -> Option<Kernel> {
            match (acts, format) {
                (ActKind::F32, Format::F32) => Some(plain::<float::F32>),
                (ActKind::F32, Format::F16) => Some(plain::<float::F16>),
                (ActKind::F32, Format::BF16) => Some(plain::<float::BF16>),
                $(
                    $(#[$attr])*
                    (ActKind::Int8, Format::$format) => Some(match op {
                        Contraction::MatVec => matvec::<formats::$file::$format> as Kernel,
                        Contraction::Gemm => gemm::<formats::$file::$format>,
                    }),
                    $(#[$attr])*
                    (ActKind::F32, Format::$format) => Some(decoded),
                )*
                _ => None,
            }
        }
    };
}

/// The entry points of one instruction set.
macro_rules! entries {
    ($(#[$attr:meta])* $module:ident, $isa:ident $(, $features:literal)?) => {
        $(#[$attr])*
        pub(super) mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            unsafe fn matvec<F: CpuFormat>(job: &mut Job<'_>) {
                unsafe { super::matvec::run::<isa::$isa, F>(job) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn gemm<F: CpuFormat>(job: &mut Job<'_>) {
                unsafe { super::gemm::run::<isa::$isa, F>(job, &micros::<F>()) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn micro<
                const SPAN: usize,
                const MIN: bool,
                const OFFSET: bool,
                const POWERS: bool,
                const M: usize,
            >(
                operands: &Operands<isa::$isa>,
            ) {
                unsafe { super::gemm::micro::<isa::$isa, SPAN, MIN, OFFSET, POWERS, M, VECTORS>(operands) }
            }

            const VECTORS: usize = <isa::$isa as isa::Isa>::VECTORS;

            /// The microkernels depend on a format's shape only.
            const fn micros<F: CpuFormat>() -> Micros<isa::$isa> {
                const FULL: usize = <isa::$isa as isa::Isa>::MR;
                const SHORT: usize = gemm::SHORT;
                macro_rules! of {
                    ($span:literal, $min:literal, $offset:literal) => {
                        of!($span, $min, $offset, false)
                    };
                    ($span:literal, $min:literal, $offset:literal, $powers:literal) => {
                        Micros {
                            full: micro::<$span, $min, $offset, $powers, FULL> as Micro<isa::$isa>,
                            short: micro::<$span, $min, $offset, $powers, SHORT>,
                        }
                    };
                }
                let offset = <F as gemm::Form<isa::$isa>>::TAKEN != 0;
                match (<F as gemm::Form<isa::$isa>>::SPAN, F::HAS_MIN, offset) {
                    (16, false, false) => of!(16, false, false),
                    (16, false, true) => of!(16, false, true),
                    (16, true, false) => of!(16, true, false),
                    (16, true, true) => of!(16, true, true),
                    (32, false, false) => of!(32, false, false),
                    (32, false, true) if <F as gemm::Form<isa::$isa>>::POWERS => of!(32, false, true, true),
                    (32, false, true) => of!(32, false, true),
                    (32, true, false) => of!(32, true, false),
                    (32, true, true) => of!(32, true, true),
                    (_, false, false) => of!(256, false, false),
                    (_, false, true) => of!(256, false, true),
                    (_, true, false) => of!(256, true, false),
                    (_, true, true) => of!(256, true, true),
                }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn plain<P: float::Plain>(job: &mut Job<'_>) {
                unsafe { float::run::<isa::$isa, P>(job) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn decoded(job: &mut Job<'_>) {
                unsafe { float::run_decoded::<isa::$isa>(job) }
            }

            /// See [`super::super::QuantizeRow`].
            $(#[target_feature(enable = $features)])?
            pub(crate) unsafe fn quantize(acts: &Acts, token: usize, groups: std::ops::Range<usize>, x: *const f32) {
                unsafe { super::super::acts::quantize::<isa::$isa>(acts, token, groups, x) }
            }

            for_each_cpu_format!(table);
        }
    };
}

entries!(portable, Portable);
entries!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    Avx2,
    "avx2,fma,f16c,bmi2"
);
entries!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    Avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2"
);
/// The kernel of BF16 weights with activations rounded to bf16, on AVX-512 with AVX512_BF16.
#[cfg(target_arch = "x86_64")]
pub(super) fn rounded(format: Format) -> Option<Kernel> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    unsafe fn bf16(job: &mut Job<'_>) {
        unsafe { super::rounded::run::<isa::Avx512>(job) }
    }
    (format == Format::BF16).then_some(bf16 as Kernel)
}
entries!(
    #[cfg(target_arch = "aarch64")]
    neon,
    Neon,
    "neon,dotprod"
);
entries!(
    #[cfg(target_arch = "aarch64")]
    i8mm,
    I8mm,
    "neon,dotprod,i8mm"
);
