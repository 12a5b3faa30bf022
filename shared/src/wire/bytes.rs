//! PURE: byte fields, encoded in one piece. By default serde treats a `Vec<u8>` as a list and
//! visits each byte; the encoding is the same.
//!
//! Usage: `#[serde(with = "bytes")]`, or `#[serde(with = "bytes::or_error")]` on a `Result`.
use std::fmt;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Serializes bytes.
///
/// # Errors
/// The serializer's.
pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// Deserializes bytes.
///
/// # Errors
/// The deserializer's.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    struct Whole;

    impl Visitor<'_> for Whole {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_vec())
        }

        fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
            Ok(bytes)
        }
    }

    deserializer.deserialize_byte_buf(Whole)
}

/// Bytes, or the error that came instead.
pub mod or_error {
    use super::*;

    #[derive(Serialize)]
    struct Bytes<'a>(#[serde(serialize_with = "super::serialize")] &'a [u8]);

    #[derive(Deserialize)]
    struct Owned(#[serde(deserialize_with = "super::deserialize")] Vec<u8>);

    /// Serializes bytes or an error.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<E: Serialize, S: Serializer>(
        outcome: &Result<Vec<u8>, E>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        outcome.as_ref().map(|bytes| Bytes(bytes)).serialize(serializer)
    }

    /// Deserializes bytes or an error.
    ///
    /// # Errors
    /// The deserializer's.
    pub fn deserialize<'de, E: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Result<Vec<u8>, E>, D::Error> {
        let outcome = Result::<Owned, E>::deserialize(deserializer)?;
        Ok(outcome.map(|Owned(bytes)| bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec;

    #[derive(Serialize)]
    struct AsList {
        before: u32,
        bytes: Vec<u8>,
        outcome: Result<Vec<u8>, String>,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Whole {
        before: u32,
        #[serde(with = "crate::wire::bytes")]
        bytes: Vec<u8>,
        #[serde(with = "crate::wire::bytes::or_error")]
        outcome: Result<Vec<u8>, String>,
    }

    #[test]
    fn the_form_is_that_of_a_list() {
        for len in [0, 1, 250, 251, 70_000] {
            let bytes: Vec<u8> = (0..len).map(|i: u32| (i % 256) as u8).collect();
            for outcome in [Ok(bytes.clone()), Err("why".to_owned())] {
                let list = AsList { before: 7, bytes: bytes.clone(), outcome: outcome.clone() };
                let whole = Whole { before: 7, bytes: bytes.clone(), outcome };
                let encoded = codec::encode(&whole).unwrap();
                assert_eq!(encoded, codec::encode(&list).unwrap(), "{len} bytes");
                assert_eq!(codec::decode_message::<Whole>(&encoded), Ok(whole));
            }
        }
    }

    #[test]
    fn a_length_that_lies_is_an_error() {
        #[derive(Debug, PartialEq, Deserialize)]
        struct Alone(#[serde(with = "crate::wire::bytes")] Vec<u8>);
        let claims = |len: u64| codec::encode(&len).unwrap();
        for len in [1, 1 << 20, 1 << 24, 1 << 40, u64::MAX] {
            let read = codec::decode_message::<Alone>(&claims(len));
            assert!(matches!(read, Err(codec::CodecError::Decode(_))), "{len}: {read:?}");
        }
    }
}
