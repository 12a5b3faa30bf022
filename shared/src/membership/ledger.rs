//! Bytes that the leader leaves in etcd for the next one.
//!
//! Every write is a transaction on condition that the writer still leads: a leader that has been
//! replaced without knowing it changes nothing, and does not lead again. The bytes are cut into
//! pieces below etcd's bound on a request. A head names the pieces that belong together and is
//! written last, so that a reader finds either the old pieces or the new ones.
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, Error, PutOptions, Txn, TxnOp};
use serde::{Deserialize, Serialize};

use super::EtcdOptions;
use super::connect::{explained, is_denied};
use super::view::LEADER_KEY;

/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum size of a piece in bytes; etcd's default bound on a request is 1.5 MiB.
const PIECE_BYTES: usize = 512 << 10;
/// Maximum number of pieces.
const PIECES_MAX: usize = 64;

/// Why the ledger could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// etcd does not answer, or gives an unexpected answer.
    #[error("{0}")]
    Etcd(String),
    /// The user may not read or write there.
    #[error("{0}; `tutti doctor` says what etcd's user needs")]
    Denied(String),
    /// Another process leads.
    #[error("this process does not lead any more")]
    Fenced,
    /// There are too many bytes.
    #[error("{bytes} bytes exceed the limit of {}", PIECE_BYTES * PIECES_MAX)]
    TooLarge {
        /// Number of bytes.
        bytes: usize,
    },
    /// The stored pieces do not belong together.
    #[error("the stored record is damaged: {0}")]
    Damaged(String),
}

impl From<Error> for LedgerError {
    fn from(error: Error) -> Self {
        let reason = explained(&error);
        if is_denied(&reason) { Self::Denied(reason) } else { Self::Etcd(reason) }
    }
}

/// Head of the ledger, as JSON: names the pieces that belong together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    /// Grows with every write; even and odd generations are written to different keys.
    generation: u64,
    pieces: usize,
    bytes: usize,
    crc32c: u32,
}

/// The ledger; see the module's documentation.
pub struct Ledger {
    options: EtcdOptions,
    client: Option<Client>,
    generation: Option<u64>,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Ledger {
    /// The ledger of the cluster named in `options`.
    #[must_use]
    pub fn new(options: EtcdOptions) -> Self {
        Self { options, client: None, generation: None }
    }

    /// Returns a key outside the prefix that everybody watches.
    fn key(&self, rest: &str) -> String {
        format!("/{}:totals/{rest}", self.options.cluster)
    }

    fn piece_key(&self, generation: u64, piece: usize) -> String {
        self.key(&format!("{}/{piece}", generation % 2))
    }

    /// Returns the bytes that were stored last; `None` if there are none.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub async fn load(&mut self) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut client = self.connect().await?;
        let loaded = self.read(&mut client).await;
        self.client = loaded.is_ok().then_some(client);
        loaded
    }

    async fn read(&mut self, client: &mut Client) -> Result<Option<Vec<u8>>, LedgerError> {
        let got = client.get(self.key("head"), None).await?;
        let Some(head) = got.kvs().first() else {
            self.generation = Some(0);
            return Ok(None);
        };
        let damaged = |problem: String| LedgerError::Damaged(problem);
        // A head that cannot be read may be followed by any generation.
        self.generation = Some(0);
        let head: Head =
            serde_json::from_slice(head.value()).map_err(|error| damaged(error.to_string()))?;
        // Even if the pieces are damaged, the next ones go to the other keys.
        self.generation = Some(head.generation);
        if head.pieces > PIECES_MAX {
            return Err(damaged(format!("it has {} pieces", head.pieces)));
        }
        let mut bytes = Vec::new();
        for piece in 0..head.pieces {
            let got = client.get(self.piece_key(head.generation, piece), None).await?;
            let found = got.kvs().first();
            let found = found.ok_or_else(|| damaged(format!("piece {piece} is missing")))?;
            bytes.extend_from_slice(found.value());
        }
        if bytes.len() != head.bytes || crc32c::crc32c(&bytes) != head.crc32c {
            return Err(damaged("length or checksum is wrong".to_owned()));
        }
        Ok(Some(bytes))
    }

    /// Stores `bytes`, as the leader of `epoch`.
    ///
    /// # Errors
    /// [`LedgerError`]; the previous bytes are still stored then, unless only the answer was lost.
    pub async fn save(&mut self, epoch: i64, bytes: &[u8]) -> Result<(), LedgerError> {
        if bytes.len() > PIECE_BYTES * PIECES_MAX {
            return Err(LedgerError::TooLarge { bytes: bytes.len() });
        }
        let mut client = self.connect().await?;
        let saved = self.write(&mut client, epoch, bytes).await;
        self.client = saved.is_ok().then_some(client);
        saved
    }

    async fn write(
        &mut self,
        client: &mut Client,
        epoch: i64,
        bytes: &[u8],
    ) -> Result<(), LedgerError> {
        if self.generation.is_none() {
            // It is unknown which pieces the head names: they must not be overwritten.
            match self.read(client).await {
                Ok(_) | Err(LedgerError::Damaged(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let generation = self.generation.unwrap_or(0).wrapping_add(1);
        let pieces: Vec<&[u8]> = bytes.chunks(PIECE_BYTES).collect();
        for (at, piece) in pieces.iter().enumerate() {
            self.put(client, epoch, self.piece_key(generation, at), piece.to_vec()).await?;
        }
        let head = Head {
            generation,
            pieces: pieces.len(),
            bytes: bytes.len(),
            crc32c: crc32c::crc32c(bytes),
        };
        let head = serde_json::to_vec(&head).map_err(|e| LedgerError::Etcd(e.to_string()))?;
        // Unknown until etcd answers: the next write reads the head again.
        self.generation = None;
        self.put(client, epoch, self.key("head"), head).await?;
        self.generation = Some(generation);
        Ok(())
    }

    /// Writes one key if the leader of `epoch` still leads.
    async fn put(
        &self,
        client: &mut Client,
        epoch: i64,
        key: String,
        value: Vec<u8>,
    ) -> Result<(), LedgerError> {
        let leader = format!("/{}/{LEADER_KEY}", self.options.cluster);
        let leads = Compare::create_revision(leader, CompareOp::Equal, epoch);
        let put = TxnOp::put(key, value, None::<PutOptions>);
        let done = client.txn(Txn::new().when([leads]).and_then([put])).await?;
        if done.succeeded() { Ok(()) } else { Err(LedgerError::Fenced) }
    }

    async fn connect(&mut self) -> Result<Client, LedgerError> {
        match self.client.take() {
            Some(client) => Ok(client),
            None => Ok(self.options.connect(DEADLINE).await?),
        }
    }
}
