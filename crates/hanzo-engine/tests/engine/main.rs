//! The engine end to end: tiny models written to memory, run on the CPU against an independent f64 forward pass, and a backend that
//! only remembers tokens, which shows whether sequences, batches, windows and generation keep them straight.

mod fake;
mod loading;
mod numbers;
mod reference;
mod serving;
mod text;
mod tiny;
