//! The engine end to end: tiny models written to memory, run on the CPU against the f64 interpreter, and a backend that
//! only remembers tokens, which shows whether sequences, batches, windows and generation keep them straight.

mod fake;
mod numbers;
mod serving;
mod text;
mod tiny;
