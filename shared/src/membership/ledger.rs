//! Bytes that the leader leaves in etcd for the next one.
//!
//! Every write is a transaction on condition that the writer still leads: one that has been
//! replaced without knowing it changes nothing, and it does not lead again after that. The bytes
//! are cut into pieces below etcd's bound of a request; a head names the pieces that belong
//! together, and is written last, so that whoever reads finds the old ones or the new ones.
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, Error, PutOptions, Txn, TxnOp};
use serde::{Deserialize, Serialize};

use super::EtcdOptions;
use super::connect::explained;
use super::view::LEADER_KEY;

/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Largest piece; etcd's default bound of a request is 1.5 MiB.
const PIECE_BYTES: usize = 512 << 10;
/// Most pieces.
const PIECES_MAX: usize = 64;

/// Why the ledger could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// etcd does not answer, or not as it should.
    #[error("{0}")]
    Etcd(String),
    /// Somebody else leads.
    #[error("this process does not lead any more")]
    Fenced,
    /// The bytes are too many.
    #[error("{bytes} bytes exceed the limit of {}", PIECE_BYTES * PIECES_MAX)]
    TooLarge {
        /// How many.
        bytes: usize,
    },
    /// What is there does not belong together.
    #[error("the stored record is damaged: {0}")]
    Damaged(String),
}

impl From<Error> for LedgerError {
    fn from(error: Error) -> Self {
        Self::Etcd(explained(&error))
    }
}

/// Which pieces belong together, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    /// Grows with every write; pieces are written where those of the one before last are.
    generation: u64,
    pieces: usize,
    bytes: usize,
    crc32c: u32,
}

/// See the module's documentation.
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
    /// The ledger of the cluster that `options` name.
    #[must_use]
    pub fn new(options: EtcdOptions) -> Self {
        Self { options, client: None, generation: None }
    }

    /// Not below the prefix that everybody watches.
    fn key(&self, rest: &str) -> String {
        format!("/{}:totals/{rest}", self.options.cluster)
    }

    fn piece_key(&self, generation: u64, piece: usize) -> String {
        self.key(&format!("{}/{piece}", generation % 2))
    }

    /// What was left last; `None` when nothing was.
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
        // One that cannot be read is followed by any other.
        self.generation = Some(0);
        let head: Head =
            serde_json::from_slice(head.value()).map_err(|error| damaged(error.to_string()))?;
        // Whatever becomes of the pieces: the next ones go elsewhere.
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

    /// Leaves `bytes`, as the leader of `epoch`.
    ///
    /// # Errors
    /// [`LedgerError`]; what was there before is there then, unless the answer alone was lost.
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
            // Which pieces are there is not known: those of the head must not be written over.
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
        // Not known until it is answered: the next write looks.
        self.generation = None;
        self.put(client, epoch, self.key("head"), head).await?;
        self.generation = Some(generation);
        Ok(())
    }

    /// Writes one key if the leader is still that of `epoch`.
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
