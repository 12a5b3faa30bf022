//! Encodes and decodes values with bincode's standard configuration, within bounds and without
//! bytes left over.
//!
//! Framing, checksums and handshakes are elsewhere.
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a value could not be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The value cannot be encoded.
    #[error("cannot encode: {0}")]
    Encode(String),
    /// The bytes are not a valid value, or the value claims more memory than allowed.
    #[error("cannot decode: {0}")]
    Decode(String),
    /// Bytes are left after the value.
    #[error("{extra} bytes follow the encoded value")]
    Trailing {
        /// Their number.
        extra: usize,
    },
}

/// Encodes `value`.
///
/// # Errors
/// Returns [`CodecError::Encode`] when the value has no encoding (a sequence of unknown length).
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, CodecError> {
    bincode::serde::encode_to_vec(value, bincode::config::standard())
        .map_err(|error| CodecError::Encode(error.to_string()))
}

/// Decodes a value that fills `bytes` exactly and claims at most `LIMIT` bytes.
///
/// # Errors
/// Returns [`CodecError::Decode`] for bytes that are not a `T` within the limit and
/// [`CodecError::Trailing`] for bytes after it.
pub fn decode<T: DeserializeOwned, const LIMIT: usize>(bytes: &[u8]) -> Result<T, CodecError> {
    let config = bincode::config::standard().with_limit::<LIMIT>();
    let (value, used) = bincode::serde::decode_from_slice(bytes, config)
        .map_err(|error| CodecError::Decode(error.to_string()))?;
    match bytes.len() - used {
        0 => Ok(value),
        extra => Err(CodecError::Trailing { extra }),
    }
}

/// Most memory, in bytes, that the value of a frame may claim while it is decoded. Numbers take up
/// to eight times as much memory as on the wire (where a `u64` or a length may take one byte), so
/// whatever fits into a frame is within this bound.
pub const MESSAGE_MAX: usize = 16 * super::frame::BODY_MAX as usize;

/// Decodes the body of a frame.
///
/// # Errors
/// Same as [`decode`].
pub fn decode_message<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    decode::<T, MESSAGE_MAX>(bytes)
}
