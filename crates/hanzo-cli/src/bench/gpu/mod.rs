//! One GPU kernel alone: weights resident and out of cache, launches recorded once and timed by the device's clock.
//!
//! [`lab`] times a [`subject`] and checks what it computed; [`contraction`], [`glu`], [`attention`], [`rows`] and [`stream`] are the subjects,
//! [`weights`] makes matrices; [`sweep`] looks for better constants; [`report`] says what came out. Grammar is the command's.

pub mod attention;
pub mod contraction;
pub mod glu;
pub mod lab;
pub mod report;
pub mod rows;
pub mod stream;
pub mod subject;
pub mod sweep;
mod weights;
