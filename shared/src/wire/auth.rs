//! PURE: both sides of a link prove that they know the cluster's secret, before anything else is
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
//! Links are authenticated, not encrypted: who can read the network reads prompts and tokens.
use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::protocol::PROTOCOL_VERSION;

/// First bytes of a client that authenticates.
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
/// Fewest bytes of a secret.
pub const SECRET_MIN: usize = 32;

/// What all processes of a cluster know. Its bytes are overwritten when it is dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<[u8; 32]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a peer was not let in, or its frames not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// A secret that could be guessed.
    #[error("the cluster secret has {0} bytes, it must have at least {SECRET_MIN}")]
    ShortSecret(usize),
    /// The peer does not begin as an authenticating one does.
    #[error("the peer does not authenticate: it runs without the cluster secret")]
    NoGreeting,
    /// The peer is of another version.
    #[error(
        "the peer speaks protocol {theirs}, this side {PROTOCOL_VERSION}: run the same version on both"
    )]
    Version {
        /// Its version.
        theirs: u16,
    },
    /// The peer went away when it was to prove that it knows the secret.
    #[error("the peer does not prove that it knows the cluster secret: it has another one")]
    Unproven,
    /// The peer does not know the secret.
    #[error("the peer has another cluster secret")]
    WrongSecret,
}

impl Secret {
    /// A secret of at least [`SECRET_MIN`] bytes; white space around one that is text does not
    /// count.
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

    /// A secret that was drawn at random.
    #[must_use]
    pub fn of_random(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// A number for a purpose, which tells nothing of the secret or of other purposes' numbers.
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

    /// Another secret, for a purpose: it tells nothing of this one or of other purposes' ones.
    #[must_use]
    pub fn derived(&self, purpose: &str) -> Self {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti secret ");
        mac.update(purpose.as_bytes());
        Self(Zeroizing::new(mac.finalize().into_bytes().into()))
    }

    /// A number of these parts, in their order, that nobody finds other parts for without the
    /// secret.
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

    /// What a holder of the secret shows over HTTP for a purpose: 64 hexadecimal digits that tell
    /// nothing of the secret or of other purposes.
    #[must_use]
    pub fn token(&self, purpose: &str) -> String {
        let mut mac = keyed(&self.0);
        mac.update(b"tutti token ");
        mac.update(purpose.as_bytes());
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether this is the token for a purpose, in time that does not depend on the answer.
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
    // HMAC pads a short key with zeros to a block of the hash.
    let mut block = [0u8; 64];
    block[..32].copy_from_slice(key);
    Hmac::<Sha256>::new(&block.into())
}

/// The key of one direction of one link.
#[derive(Clone)]
pub struct MacKey(Hmac<Sha256>);

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}

impl MacKey {
    /// The tag of a frame.
    #[must_use]
    pub fn tag(&self, header: &[u8], body: &[u8]) -> [u8; TAG_LEN] {
        let whole: [u8; 32] = self.over(header, body).finalize().into_bytes().into();
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&whole[..TAG_LEN]);
        tag
    }

    /// Whether this is the tag of that frame, in time that does not depend on the answer.
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

/// Keys of both directions, as one side uses them.
#[derive(Clone, Debug)]
pub struct SessionKeys {
    /// For frames that this side sends.
    pub send: MacKey,
    /// For frames that it receives.
    pub receive: MacKey,
}

/// The client's first message.
#[must_use]
pub fn greeting(nonce: &[u8; NONCE_LEN]) -> [u8; GREETING_LEN] {
    let mut greeting = [0; GREETING_LEN];
    greeting[..4].copy_from_slice(&AUTH_MAGIC);
    greeting[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    greeting[8..].copy_from_slice(nonce);
    greeting
}

/// The server's answer to a greeting.
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

/// The server's check of a client's proof, and its keys.
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
