//! Ops, Plans, levers, numeric oracles, and the backends that run them.
#![deny(missing_docs)]
