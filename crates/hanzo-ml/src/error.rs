//! The crate's error type: what failed, in which op, tensor or setting, and what to do about it.

/// An error of this crate. Every variant names the op, tensor, lever or setting at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A Plan whose shapes, dtypes or order do not fit together.
    #[error("plan: op {index} ({op}): {what}")]
    Plan {
        /// Index of the op in the Plan.
        index: usize,
        /// The op's kind.
        op: &'static str,
        /// What does not fit.
        what: String,
    },
    /// A weight that is missing or has the wrong shape or format.
    #[error("weight {name}: {what}")]
    Weight {
        /// The tensor's name in the model file.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// A batch that does not fit the executable or the caches.
    #[error("batch: {0}")]
    Batch(String),
    /// An op, format or option the backend cannot run.
    #[error("{backend}: {what}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// What it cannot do, and what could be done instead.
        what: String,
    },
    /// A malformed setting or lever name.
    #[error("setting {name}: {what}")]
    Setting {
        /// The environment variable or lever at fault.
        name: String,
        /// What is wrong, and the accepted values.
        what: String,
    },
    /// A device or its driver that failed, or was lost.
    #[error("{backend}: {what}")]
    Device {
        /// The backend's name.
        backend: &'static str,
        /// What failed, and what could be done about it.
        what: String,
    },
    /// Memory could not be had.
    #[error("out of memory: {0}")]
    Memory(String),
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
