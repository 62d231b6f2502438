//! The commands that run a model, as processes, on a llama of 100 kilobytes made here: random weights, one token a byte.
#![cfg(unix)]

mod chat;
mod devices;
mod measure;
mod run;
mod tiny;
