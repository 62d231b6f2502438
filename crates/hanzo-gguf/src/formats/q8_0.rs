//! Q8_0: 32 elements in 34 bytes, `value = d * code`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | codes, i8, in element order |

use super::{BlockFormat, f16_at};

/// Signed bytes, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q8_0;

impl BlockFormat<32, 34> for Q8_0 {
    fn to_float(block: &[u8; 34], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for (value, &code) in out.iter_mut().zip(&block[2..]) {
            *value = d * f32::from(code as i8);
        }
    }
}
