//! The aep-sidecar binary.
fn main() {}
