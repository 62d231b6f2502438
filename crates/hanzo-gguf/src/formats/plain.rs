//! The plain numbers: floats and integers stored one by one, little-endian.
//!
//! F32, F16 and BF16 may hold weights; the integers and F64 appear as metadata tensors and are only read. A value that
//! the target cannot hold is rounded to the nearest (ties to even); writing clamps to the largest finite number.

use super::{BlockFormat, Encode, f16_value};

macro_rules! plain_numbers {
    ($( $(#[$doc:meta])* $name:ident, $bytes:literal, $read:expr, $write:expr; )*) => { $(
        $(#[$doc])*
        pub struct $name;

        impl BlockFormat<1, $bytes> for $name {
            const FROM_FLOAT: Option<Encode<1, $bytes>> = $write;

            #[inline]
            fn to_float(block: &[u8; $bytes], out: &mut [f32; 1]) {
                out[0] = $read(*block);
            }
        }
    )* };
}

plain_numbers! {
    /// IEEE single precision.
    F32, 4, f32::from_le_bytes, Some(|x, _, block| *block = x[0].to_le_bytes());
    /// IEEE half precision.
    F16, 2, |b| f16_value(u16::from_le_bytes(b)), Some(|x, _, block| *block = nearest_f16(x[0]).to_le_bytes());
    /// The upper half of an IEEE single.
    BF16, 2, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16), Some(|x, _, block| *block = nearest_bf16(x[0]).to_le_bytes());
    /// IEEE double precision.
    F64, 8, |b| f64::from_le_bytes(b) as f32, None;
    /// Signed byte.
    I8, 1, |b| f32::from(i8::from_le_bytes(b)), None;
    /// Signed 16-bit integer.
    I16, 2, |b| f32::from(i16::from_le_bytes(b)), None;
    /// Signed 32-bit integer.
    I32, 4, |b| i32::from_le_bytes(b) as f32, None;
    /// Signed 64-bit integer.
    I64, 8, |b| i64::from_le_bytes(b) as f32, None;
}

fn nearest_f16(x: f32) -> half::f16 {
    half::f16::from_f32(x.clamp(half::f16::MIN.to_f32(), half::f16::MAX.to_f32()))
}

fn nearest_bf16(x: f32) -> half::bf16 {
    half::bf16::from_f32(x.clamp(half::bf16::MIN.to_f32(), half::bf16::MAX.to_f32()))
}
