//! The plain numbers: floats and integers stored one by one, little-endian.
//!
//! F32, F16 and BF16 may hold weights; the integers and F64 appear as metadata tensors and are only read. A value that
//! an `f32` cannot hold is rounded to the nearest (ties to even).

use super::BlockFormat;

macro_rules! read_as {
    ($( $(#[$doc:meta])* $name:ident, $bytes:literal, $read:expr; )*) => { $(
        $(#[$doc])*
        pub struct $name;

        impl BlockFormat<1, $bytes> for $name {
            #[inline]
            fn to_float(block: &[u8; $bytes], out: &mut [f32; 1]) {
                out[0] = $read(*block);
            }
        }
    )* };
}

read_as! {
    /// IEEE single precision.
    F32, 4, f32::from_le_bytes;
    /// IEEE half precision.
    F16, 2, |b| half::f16::from_le_bytes(b).to_f32();
    /// The upper half of an IEEE single.
    BF16, 2, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
    /// IEEE double precision.
    F64, 8, |b| f64::from_le_bytes(b) as f32;
    /// Signed byte.
    I8, 1, |b| f32::from(i8::from_le_bytes(b));
    /// Signed 16-bit integer.
    I16, 2, |b| f32::from(i16::from_le_bytes(b));
    /// Signed 32-bit integer.
    I32, 4, |b| i32::from_le_bytes(b) as f32;
    /// Signed 64-bit integer.
    I64, 8, |b| i64::from_le_bytes(b) as f32;
}
