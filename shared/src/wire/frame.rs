//! PURE: frames on a byte stream.
//!
//! ```text
//! offset  size  field
//!      0     4  magic "TUTI"
//!      4     2  protocol version; this and all numbers below are little endian
//!      6     1  kind
//!      7     1  flags: bit 0 is set on authenticated links, where a tag follows the body
//!      8     4  body length
//!     12     8  epoch (0 outside of an epoch)
//!     20     8  sequence number, counted from 1 in each direction
//!     28     4  CRC32C of bytes 0..28 and the body
//!     32     -  body
//!      -    16  tag: the first bytes of HMAC-SHA-256 over header and body; see `auth`
//! ```
//!
//! The length is checked against the kind's bound before memory is reserved, and the buffer grows
//! only as bytes arrive, so a false length costs nothing.
use super::auth::{MacKey, TAG_LEN};
use crate::protocol::PROTOCOL_VERSION;

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"TUTI";
/// Bytes before the body.
pub const HEADER_LEN: usize = 32;
/// Flag of frames with a tag.
const AUTHENTICATED: u8 = 1;
/// Largest body of any kind, in bytes. The coordinator's scheduler ensures that a step plan fits.
pub const BODY_MAX: u32 = 16 << 20;
/// Largest body of a handshake frame, in bytes.
pub const HANDSHAKE_MAX: u32 = 4 << 10;
/// Largest body of a welcome, which lists everything that is served, in bytes.
pub const WELCOME_MAX: u32 = 128 << 10;
/// Largest body of a control message, in bytes.
pub const CONTROL_MAX: u32 = 1 << 20;

/// Bytes that a decoder keeps reserved between frames: two reads of a link. Larger frames are rare,
/// and a process may have a thousand links.
const RESERVED_MAX: usize = 128 << 10;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// A worker introduces itself: `protocol::Hello`.
    Hello = 1,
    /// The coordinator accepts it: `protocol::Welcome`.
    Welcome = 2,
    /// The coordinator rejects it: a sentence, as a string. The same in all protocol versions.
    Refused = 3,
    /// Checks that the peer is alive. No body.
    Ping = 4,
    /// Answers a ping. No body.
    Pong = 5,
    /// A `protocol::ToWorker` or `protocol::FromWorker` of the control plane.
    Control = 6,
    /// A step's plan, masks or result, in the same enums.
    Step = 7,
    /// A front end introduces itself: `protocol::FrontendHello`.
    FrontendHello = 8,
    /// A request: `protocol::FromFrontend`.
    Request = 9,
    /// Events of requests: `protocol::ToFrontend`.
    Events = 10,
    /// A message between named actors: `protocol::actors::ActorFrame`.
    Actor = 11,
    /// The coordinator cannot accept it now; it may dial again: a sentence, as a string.
    NotYet = 12,
    /// The coordinator takes it when it has some files: `protocol::ToFetch`.
    Fetch = 13,
}

impl FrameKind {
    /// Largest body of this kind.
    #[must_use]
    pub const fn body_max(self) -> u32 {
        match self {
            Self::Hello | Self::FrontendHello | Self::Refused | Self::NotYet => HANDSHAKE_MAX,
            Self::Welcome | Self::Fetch => WELCOME_MAX,
            Self::Ping | Self::Pong => 0,
            Self::Control | Self::Actor => CONTROL_MAX,
            Self::Step | Self::Request | Self::Events => BODY_MAX,
        }
    }

    const fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refused,
            4 => Self::Ping,
            5 => Self::Pong,
            6 => Self::Control,
            7 => Self::Step,
            8 => Self::FrontendHello,
            9 => Self::Request,
            10 => Self::Events,
            11 => Self::Actor,
            12 => Self::NotYet,
            13 => Self::Fetch,
            _ => return None,
        })
    }
}

/// One received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it carries.
    pub kind: FrameKind,
    /// The epoch it belongs to.
    pub epoch: u64,
    /// Its body.
    pub body: Vec<u8>,
}

/// Why a stream is invalid or incomplete. Any of these closes the link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer speaks another protocol.
    #[error("not a Tutti frame: it begins with {0:02x?}")]
    BadMagic([u8; 4]),
    /// The peer answers like an HTTP or HTTPS server.
    #[error(
        "that is an HTTP port: name the coordinator's cluster port (its --cluster-listen, 8001 \
         unless told otherwise)"
    )]
    HttpServer,
    /// The peer speaks like an HTTP client.
    #[error("the peer speaks HTTP, and this is the cluster port: HTTP is at --listen")]
    HttpClient,
    /// The peer speaks another version of the protocol.
    #[error("the peer speaks protocol {theirs}, this side {ours}: run the same version on both")]
    VersionMismatch {
        /// Our version.
        ours: u16,
        /// Its version.
        theirs: u16,
    },
    /// A kind or flag unknown to this version.
    #[error("unknown frame kind {kind} with flags {flags}")]
    UnknownKind {
        /// The kind's byte.
        kind: u8,
        /// The flags' byte.
        flags: u8,
    },
    /// The body exceeds its kind's bound.
    #[error("a {kind:?} frame of {len} bytes exceeds the limit of {max}")]
    TooLarge {
        /// The kind.
        kind: FrameKind,
        /// The length, claimed or actual.
        len: u64,
        /// The bound.
        max: u32,
    },
    /// Bytes were corrupted in transit.
    #[error("checksum mismatch: {computed:08x} computed, {received:08x} received")]
    BadChecksum {
        /// The checksum of what was received.
        computed: u32,
        /// The checksum in the frame.
        received: u32,
    },
    /// The frame does not come from the peer that authenticated.
    #[error("the frame's tag is wrong: it is not from the peer that authenticated")]
    BadTag,
    /// A frame was lost, repeated or injected.
    #[error("frame {received} arrived where {expected} was due")]
    BadSequence {
        /// The expected sequence number.
        expected: u64,
        /// The received one.
        received: u64,
    },
}

/// Encodes the frames of one direction of a link.
#[derive(Clone, Debug, Default)]
pub struct FrameEncoder {
    sequence: u64,
    key: Option<MacKey>,
    /// Protocol version to write, if not our own.
    version: Option<u16>,
}

impl FrameError {
    /// Returns the error for a peer whose first bytes are not this protocol's magic.
    #[must_use]
    pub fn of_foreign(magic: [u8; 4]) -> Self {
        match &magic {
            // The second pattern is a TLS alert: an HTTPS port's answer to bytes that are not TLS.
            b"HTTP" | [0x15, 0x03, _, 0] => Self::HttpServer,
            b"GET " | b"HEAD" | b"POST" | b"PUT " | b"OPTI" | b"DELE" | b"PRI " => Self::HttpClient,
            _ => Self::BadMagic(magic),
        }
    }
}

impl FrameEncoder {
    /// Creates an encoder for a peer of another version, which has its own frame kinds and bodies.
    #[must_use]
    pub fn of_version(version: u16) -> Self {
        Self { version: Some(version), ..Self::default() }
    }

    /// Authenticates every frame from now on.
    pub fn set_key(&mut self, key: MacKey) {
        self.key = Some(key);
    }

    /// Appends a frame to `out`.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`]; nothing is written then.
    pub fn encode(
        &mut self,
        kind: FrameKind,
        epoch: u64,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), FrameError> {
        let max = kind.body_max();
        let len = u32::try_from(body.len()).ok().filter(|len| *len <= max);
        let Some(len) = len else {
            return Err(FrameError::TooLarge { kind, len: body.len() as u64, max });
        };
        self.sequence += 1;
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        let version = self.version.unwrap_or(PROTOCOL_VERSION);
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&[kind as u8, if self.key.is_some() { AUTHENTICATED } else { 0 }]);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&epoch.to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&out[start..]), body);
        out.extend_from_slice(&checksum.to_le_bytes());
        let header_end = out.len();
        out.extend_from_slice(body);
        if let Some(key) = &self.key {
            let tag = key.tag(&out[start..header_end], body);
            out.extend_from_slice(&tag);
        }
        Ok(())
    }
}

/// Decodes the frames of one direction of a link.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that are already consumed.
    taken: usize,
    sequence: u64,
    key: Option<MacKey>,
}

impl FrameDecoder {
    /// Accepts only authenticated frames from now on.
    pub fn set_key(&mut self, key: MacKey) {
        self.key = Some(key);
    }

    /// Appends received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes reserved: never much more than have arrived, and few once all frames are taken.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Takes the next complete frame; `None` until more bytes arrive.
    ///
    /// # Errors
    /// [`FrameError`]; the rest of the stream is unusable.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let bytes = &self.buffer[self.taken..];
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            let mut magic = [0; 4];
            magic[..seen].copy_from_slice(&bytes[..seen]);
            return Err(FrameError::of_foreign(magic));
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let (kind, len) = check_header(header, self.key.is_some())?;
        let tag_len = if self.key.is_some() { TAG_LEN } else { 0 };
        let Some((body, rest)) = rest.split_at_checked(len) else { return Ok(None) };
        let Some(tag) = rest.get(..tag_len) else { return Ok(None) };
        let received = u32::from_le_bytes(field(header, 28));
        let computed = crc32c::crc32c_append(crc32c::crc32c(&header[..28]), body);
        if computed != received {
            return Err(FrameError::BadChecksum { computed, received });
        }
        if self.key.as_ref().is_some_and(|key| !key.verify(header, body, tag)) {
            return Err(FrameError::BadTag);
        }
        let sequence = u64::from_le_bytes(field(header, 20));
        let expected = self.sequence + 1;
        if sequence != expected {
            return Err(FrameError::BadSequence { expected, received: sequence });
        }
        let frame =
            Frame { kind, epoch: u64::from_le_bytes(field(header, 12)), body: body.to_vec() };
        self.sequence = expected;
        self.taken += HEADER_LEN + len + tag_len;
        if self.taken == self.buffer.len() {
            self.taken = 0;
            self.buffer.clear();
            self.buffer.shrink_to(RESERVED_MAX);
        }
        Ok(Some(frame))
    }
}

fn check_header(
    header: &[u8; HEADER_LEN],
    authenticated: bool,
) -> Result<(FrameKind, usize), FrameError> {
    let theirs = u16::from_le_bytes(field(header, 4));
    if theirs != PROTOCOL_VERSION {
        return Err(FrameError::VersionMismatch { ours: PROTOCOL_VERSION, theirs });
    }
    let flags = header[7];
    let kind = FrameKind::from_byte(header[6])
        .filter(|_| flags == if authenticated { AUTHENTICATED } else { 0 })
        .ok_or(FrameError::UnknownKind { kind: header[6], flags })?;
    let len = u32::from_le_bytes(field(header, 8));
    let max = kind.body_max();
    if len > max {
        return Err(FrameError::TooLarge { kind, len: u64::from(len), max });
    }
    Ok((kind, len as usize))
}

fn field<const N: usize>(header: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
