//! PURE: both sides of a link prove that they know the cluster's secret before anything else is
//! read; then every frame carries a MAC under a key of its link and direction.
//!
//! ```text
//! client -> server  greeting: "TUTA", protocol version (2 bytes), 2 bytes 0, nonce (32)
//! server -> client  nonce (32), HMAC(secret, "tutti server" greeting nonce)
//! client -> server  HMAC(secret, "tutti client" greeting nonce)
//! keys              HMAC(secret, "tutti to server" | "tutti to client" greeting nonce)
//! ```
//!
//! HMAC is HMAC-SHA-256; the secret is hashed once, so its file may have any length from 32 bytes.
//! Links are authenticated, not encrypted: anyone on the network can read prompts and tokens.
use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::protocol::PROTOCOL_VERSION;

/// First bytes sent by a client that authenticates.
pub const AUTH_MAGIC: [u8; 4] = *b"TUTA";
/// Bytes of the client's greeting.
pub const GREETING_LEN: usize = 40;
/// Bytes of the server's challenge.
pub const CHALLENGE_LEN: usize = 64;
/// Bytes of the client's proof.
pub const PROOF_LEN: usize = 32;
/// Bytes of a nonce.
pub const NONCE_LEN: usize = 32;
/// Bytes of a frame's tag.
pub const TAG_LEN: usize = 16;
/// Minimum length of a secret, in bytes.
pub const SECRET_MIN: usize = 32;

/// The secret that all processes of a cluster share. Its bytes are overwritten when it is dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<[u8; 32]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a peer was rejected, or its frames were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The secret is short enough to be guessed.
    #[error("the cluster secret has {0} bytes, it must have at least {SECRET_MIN}")]
    ShortSecret(usize),
    /// The peer does not begin with a greeting.
    #[error("the peer does not authenticate: it runs without the cluster secret")]
    NoGreeting,
    /// The peer speaks another protocol version.
    #[error(
        "the peer speaks protocol {theirs}, this side {PROTOCOL_VERSION}: run the same version on both"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The peer hung up instead of proving that it knows the secret.
    #[error("the peer does not prove that it knows the cluster secret: it has another one")]
    Unproven,
    /// The peer does not know the secret.
    #[error("the peer has another cluster secret")]
    WrongSecret,
}

impl Secret {
    /// Makes a secret from at least [`SECRET_MIN`] bytes; whitespace around a secret that is text
    /// is ignored.
    ///
    /// # Errors
    /// [`AuthError::ShortSecret`].
    pub fn new(bytes: &[u8]) -> Result<Self, AuthError> {
        let is_text =
            bytes.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        let bytes = if is_text { bytes.trim_ascii() } else { bytes };
        if bytes.len() < SECRET_MIN {
            return Err(AuthError::ShortSecret(bytes.len()));
        }
        Ok(Self(Zeroizing::new(Sha256::digest(bytes).into())))
    }

    /// Makes a secret from random bytes.
    #[must_use]
    pub fn of_random(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Derives a number for a purpose; it reveals nothing about the secret or other numbers.
    #[must_use]
    pub fn number(&self, purpose: &str) -> u64 {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti number ");
        mac.update(purpose.as_bytes());
        let whole: [u8; 32] = mac.finalize().into_bytes().into();
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&whole[..8]);
        u64::from_le_bytes(bytes)
    }

    /// Derives a secret for a purpose; it reveals nothing about this one or other derived ones.
    #[must_use]
    pub fn derived(&self, purpose: &str) -> Self {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti secret ");
        mac.update(purpose.as_bytes());
        Self(Zeroizing::new(mac.finalize().into_bytes().into()))
    }

    /// Returns a keyed hash of these parts, in order; without the secret, nobody can find other
    /// parts with the same hash.
    #[must_use]
    pub fn number_of(&self, parts: &[&[u8]]) -> u64 {
        let mut mac = keyed(&self.0);
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        let whole: [u8; 32] = mac.finalize().into_bytes().into();
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&whole[..8]);
        u64::from_le_bytes(bytes)
    }

    /// Returns a short text by which processes see whether they know the same secret; it reveals
    /// nothing about the secret, and differs from cluster to cluster.
    #[must_use]
    pub fn fingerprint(&self, cluster: &str) -> String {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti fingerprint ");
        mac.update(cluster.as_bytes());
        let whole = mac.finalize().into_bytes();
        whole.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns the token that a holder of the secret presents over HTTP for a purpose: 64
    /// hexadecimal digits that reveal nothing about the secret or about other purposes' tokens.
    #[must_use]
    pub fn token(&self, purpose: &str) -> String {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti token ");
        mac.update(purpose.as_bytes());
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether this is the token for a purpose; takes constant time.
    #[must_use]
    pub fn verify_token(&self, purpose: &str, token: &str) -> bool {
        let over = |text: &str| {
            let mut mac = keyed(&self.0);
            mac.update(text.as_bytes());
            mac
        };
        let given = over(token).finalize().into_bytes();
        over(&self.token(purpose)).verify_slice(&given).is_ok()
    }

    fn mac(
        &self,
        label: &str,
        greeting: &[u8; GREETING_LEN],
        nonce: &[u8; NONCE_LEN],
    ) -> Hmac<Sha256> {
        let mut mac = keyed(&self.0);
        mac.update(label.as_bytes());
        mac.update(greeting);
        mac.update(nonce);
        mac
    }

    fn keys(&self, greeting: &[u8; GREETING_LEN], nonce: &[u8; NONCE_LEN]) -> (MacKey, MacKey) {
        let key = |label| {
            let bytes: [u8; 32] = self.mac(label, greeting, nonce).finalize().into_bytes().into();
            MacKey(keyed(&bytes))
        };
        (key("tutti to server"), key("tutti to client"))
    }
}

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    // HMAC pads a short key with zeros to the block size of the hash.
    let mut block = [0u8; 64];
    block[..32].copy_from_slice(key);
    Hmac::<Sha256>::new(&block.into())
}

/// MAC key for one direction of one link.
#[derive(Clone)]
pub struct MacKey(Hmac<Sha256>);

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}

impl MacKey {
    /// Computes the tag of a frame.
    #[must_use]
    pub fn tag(&self, header: &[u8], body: &[u8]) -> [u8; TAG_LEN] {
        let whole: [u8; 32] = self.over(header, body).finalize().into_bytes().into();
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&whole[..TAG_LEN]);
        tag
    }

    /// Whether this is the tag of that frame; takes constant time.
    #[must_use]
    pub fn verify(&self, header: &[u8], body: &[u8], tag: &[u8]) -> bool {
        tag.len() == TAG_LEN && self.over(header, body).verify_truncated_left(tag).is_ok()
    }

    fn over(&self, header: &[u8], body: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(header);
        mac.update(body);
        mac
    }
}

/// MAC keys for both directions, as one side uses them.
#[derive(Clone, Debug)]
pub struct SessionKeys {
    /// Key for frames that this side sends.
    pub send: MacKey,
    /// Key for frames that this side receives.
    pub receive: MacKey,
}

/// Returns the client's first message.
#[must_use]
pub fn greeting(nonce: &[u8; NONCE_LEN]) -> [u8; GREETING_LEN] {
    let mut greeting = [0; GREETING_LEN];
    greeting[..4].copy_from_slice(&AUTH_MAGIC);
    greeting[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    greeting[8..].copy_from_slice(nonce);
    greeting
}

/// Returns the server's answer to a greeting.
///
/// # Errors
/// [`AuthError::NoGreeting`] and [`AuthError::Version`].
pub fn challenge(
    secret: &Secret,
    greeting: &[u8; GREETING_LEN],
    nonce: &[u8; NONCE_LEN],
) -> Result<[u8; CHALLENGE_LEN], AuthError> {
    if greeting[..4] != AUTH_MAGIC {
        return Err(AuthError::NoGreeting);
    }
    let theirs = u16::from_le_bytes([greeting[4], greeting[5]]);
    if theirs != PROTOCOL_VERSION {
        return Err(AuthError::Version { theirs });
    }
    let mut challenge = [0; CHALLENGE_LEN];
    challenge[..NONCE_LEN].copy_from_slice(nonce);
    let proof = secret.mac("tutti server", greeting, nonce).finalize().into_bytes();
    challenge[NONCE_LEN..].copy_from_slice(&proof);
    Ok(challenge)
}

/// The client's answer to a challenge, and its keys: by the secret of its own by which the server
/// has proved itself.
///
/// # Errors
/// [`AuthError::WrongSecret`] when the server knows none of them.
pub fn prove(
    secrets: &[Secret],
    greeting: &[u8; GREETING_LEN],
    challenge: &[u8; CHALLENGE_LEN],
) -> Result<([u8; PROOF_LEN], SessionKeys), AuthError> {
    let nonce: &[u8; NONCE_LEN] = challenge.first_chunk().ok_or(AuthError::WrongSecret)?;
    let is_its = |secret: &&Secret| {
        let server = secret.mac("tutti server", greeting, nonce);
        server.verify_slice(&challenge[NONCE_LEN..]).is_ok()
    };
    let secret = secrets.iter().find(is_its).ok_or(AuthError::WrongSecret)?;
    let proof = secret.mac("tutti client", greeting, nonce).finalize().into_bytes();
    let (to_server, to_client) = secret.keys(greeting, nonce);
    Ok((proof.into(), SessionKeys { send: to_server, receive: to_client }))
}

/// Checks a client's proof and returns the server's keys.
///
/// # Errors
/// [`AuthError::WrongSecret`].
pub fn verify(
    secret: &Secret,
    greeting: &[u8; GREETING_LEN],
    nonce: &[u8; NONCE_LEN],
    proof: &[u8; PROOF_LEN],
) -> Result<SessionKeys, AuthError> {
    let client = secret.mac("tutti client", greeting, nonce);
    client.verify_slice(proof).map_err(|_| AuthError::WrongSecret)?;
    let (to_server, to_client) = secret.keys(greeting, nonce);
    Ok(SessionKeys { send: to_client, receive: to_server })
}
