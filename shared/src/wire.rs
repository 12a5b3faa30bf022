//! How messages become bytes. The only module that names the encoding.
pub mod codec;
