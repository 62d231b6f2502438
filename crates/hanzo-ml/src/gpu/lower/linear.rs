//! Lowering of the ops of this file's name: see [`super::Lowering`].

use super::Lowering;
use crate::error::Result;
use crate::plan::Op;

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(_cx: &mut Lowering<'_>, _op: &Op) -> Result<bool> {
    Ok(false)
}
