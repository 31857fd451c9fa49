//! The commands beside running the sidecar, one a file.

pub mod export;
