//! Benchmarks: whole models as llama-bench measures them, and single kernels.
//!
//! [`row`] is one line of results, [`report`] its formats, [`placement`] where the weights are, [`profile`] where the time
//! goes, [`step_report`] what a step cost on a device, [`kernel`] one contraction alone, [`roof`] what the CPU can do at most, [`gpu`] one GPU kernel alone. Grammar and order of work are the command's; what is timed is `measure`'s.

pub mod gpu;
pub mod kernel;
pub mod placement;
pub mod profile;
pub mod report;
pub mod roof;
pub mod row;
pub mod step_report;
