//! The `hanzo` binary.
fn main() {}
