//! aep-sidecar: an Agent Event Protocol relay and CloudEvents export pipeline in one binary.
pub mod aep;
pub mod export;
