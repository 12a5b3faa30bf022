//! The `tutti` binary: wiring only.
fn main() {}
