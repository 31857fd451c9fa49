//! The commands beside running the sidecar, one a file.

pub mod dead_letters;
pub mod export;
