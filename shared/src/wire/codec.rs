//! Values to bytes and back: bincode 2, standard configuration (varint integers, little endian).
//!
//! Decoding is bounded: a decoder never reserves more than the frame's limit, and bytes that remain
//! after a value are an error, since they mean that the two sides do not agree on the type. bincode
//! is named here alone, so that a compatible successor can replace it.
use bincode::config;
use bincode::error::{DecodeError, EncodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes a decoder may claim while it reads one value: the largest frame body.
pub const DECODE_MAX: usize = super::frame::BODY_MAX as usize;

/// A value could not be coded.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The value has no wire form.
    #[error("cannot encode: {0}")]
    Encode(#[from] EncodeError),
    /// The bytes are not a value of the type.
    #[error("cannot decode: {0}")]
    Decode(#[from] DecodeError),
    /// The value ended before its bytes did.
    #[error("{extra} bytes follow the value: the two sides disagree on its type")]
    TrailingBytes {
        /// How many.
        extra: usize,
    },
}

/// Encodes a value.
///
/// # Errors
/// [`CodecError::Encode`].
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    Ok(bincode::serde::encode_to_vec(value, config::standard())?)
}

/// Encodes a value behind what `buffer` holds.
///
/// # Errors
/// [`CodecError::Encode`].
pub fn encode_into<T: Serialize>(value: &T, buffer: &mut Vec<u8>) -> Result<(), CodecError> {
    bincode::serde::encode_into_std_write(value, buffer, config::standard())?;
    Ok(())
}

/// Decodes a value that takes up all of `bytes`.
///
/// # Errors
/// [`CodecError`]; never panics, never reserves more than [`DECODE_MAX`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let config = config::standard().with_limit::<DECODE_MAX>();
    let (value, used) = bincode::serde::decode_from_slice(bytes, config)?;
    if used == bytes.len() {
        Ok(value)
    } else {
        Err(CodecError::TrailingBytes { extra: bytes.len() - used })
    }
}
