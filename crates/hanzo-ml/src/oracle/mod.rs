//! Numeric oracles: what every op means in f64, what an f32 computation of it may differ by, and the gate that holds
//! backends to it.
pub mod array;
pub mod case;
pub mod interp;
pub mod num;
pub mod pages;
pub mod probe;
pub mod random;
pub mod reference_backend;
pub mod weights;
