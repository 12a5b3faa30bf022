//! What the test binaries share.
#![forbid(unsafe_code)]
