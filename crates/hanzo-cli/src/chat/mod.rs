//! A conversation at a terminal or through a pipe.
//!
//! [`input`] reads lines and joins them into messages, [`slash`] parses commands, [`conversation`] is what was said and
//! can be saved, [`session`] lets the model answer. The loop, and what is printed, are the command's.

pub mod conversation;
pub mod input;
pub mod session;
pub mod slash;
