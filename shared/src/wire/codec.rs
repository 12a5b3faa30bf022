//! Encodes and decodes values with bincode's standard configuration, within bounds and without
//! bytes left over.
//!
//! Framing, checksums and handshakes are elsewhere.
use bincode::BorrowDecode;
use bincode::de::read::{BorrowReader, Reader};
use bincode::de::{BorrowDecoder as _, Decoder as _, DecoderImpl};
use bincode::error::DecodeError;
use bincode::serde::BorrowCompat;
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

/// Memory that a value may claim while it is decoded, for each byte of its encoding: as much as a
/// number takes at most, since the smallest ones are encoded in one byte.
const CLAIMED_PER_BYTE: usize = size_of::<u128>();

/// Decodes a value that fills `bytes` exactly and claims at most `LIMIT` bytes of memory. Nor does
/// it claim more than `bytes` can account for: texts reserve the length that they name before
/// anybody looks at what is left.
///
/// # Errors
/// Returns [`CodecError::Decode`] for bytes that are not a `T` within the limit and
/// [`CodecError::Trailing`] for bytes after it.
pub fn decode<T: DeserializeOwned, const LIMIT: usize>(bytes: &[u8]) -> Result<T, CodecError> {
    decode_within(bytes, LIMIT)
}

/// Decodes the body of a frame, which may claim as much memory as its length accounts for.
///
/// # Errors
/// Same as [`decode`].
pub fn decode_message<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    decode_within(bytes, usize::MAX)
}

fn decode_within<T: DeserializeOwned>(bytes: &[u8], limit: usize) -> Result<T, CodecError> {
    let limit = limit.min(bytes.len().saturating_mul(CLAIMED_PER_BYTE));
    // Limits are constants of the decoder's type, and each would compile every message once more.
    // So there is one, and what is not allowed of it is claimed beforehand.
    let config = bincode::config::standard().with_limit::<{ usize::MAX }>();
    let mut decoder = DecoderImpl::new(Rest(bytes), config, ());
    let failed = |error: DecodeError| CodecError::Decode(error.to_string());
    decoder.claim_bytes_read(usize::MAX - limit).map_err(failed)?;
    let value = <BorrowCompat<T> as BorrowDecode<'_, ()>>::borrow_decode(&mut decoder);
    let BorrowCompat(value) = value.map_err(failed)?;
    match decoder.borrow_reader().0.len() {
        0 => Ok(value),
        extra => Err(CodecError::Trailing { extra }),
    }
}

/// What is not read yet.
struct Rest<'a>(&'a [u8]);

impl Reader for Rest<'_> {
    #[inline]
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), DecodeError> {
        bytes.copy_from_slice(self.take_bytes(bytes.len())?);
        Ok(())
    }

    #[inline]
    fn peek_read(&mut self, length: usize) -> Option<&[u8]> {
        self.0.get(..length)
    }

    #[inline]
    fn consume(&mut self, length: usize) {
        self.0 = self.0.get(length..).unwrap_or_default();
    }
}

impl<'a> BorrowReader<'a> for Rest<'a> {
    #[inline]
    fn take_bytes(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.0.split_at_checked(length) else {
            let additional = length.saturating_sub(self.0.len());
            return Err(DecodeError::UnexpectedEnd { additional });
        };
        self.0 = rest;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_that_lies_is_refused_before_anything_is_reserved() {
        let refused = |bytes: &[u8]| {
            let error = decode_message::<String>(bytes).unwrap_err();
            assert_eq!(error, CodecError::Decode("LimitExceeded".to_owned()));
        };
        for length in [200, 1 << 12, 1 << 20, 1 << 27, 1 << 40, u64::MAX] {
            refused(&encode(&length).unwrap());
        }
        // As much as the bytes that follow account for, and more.
        let claims =
            |length: u64, follow: usize| [encode(&length).unwrap(), vec![b'a'; follow]].concat();
        refused(&claims(17_000, 1000));
        let cut = decode_message::<String>(&claims(1001, 1000)).unwrap_err();
        assert_eq!(cut, CodecError::Decode("UnexpectedEnd { additional: 1 }".to_owned()));
        assert_eq!(decode_message::<String>(&claims(1000, 1000)).unwrap().len(), 1000);
        assert!(decode::<String, 999>(&claims(1000, 1000)).is_err());
    }

    #[test]
    fn the_smallest_numbers_of_every_size_are_within_the_limit() {
        fn holds<T: Default + Clone + PartialEq + Serialize + DeserializeOwned>() {
            for length in [0, 1, 10, 1000] {
                let numbers = vec![T::default(); length];
                let decoded = decode_message::<Vec<T>>(&encode(&numbers).unwrap());
                assert!(decoded.is_ok_and(|decoded| decoded == numbers), "{length}");
            }
        }
        holds::<u8>();
        holds::<u64>();
        holds::<u128>();
        holds::<f64>();
        holds::<String>();
        holds::<Option<u64>>();
        holds::<Vec<u128>>();
        assert_eq!(decode_message::<()>(&[]), Ok(()));
    }
}
