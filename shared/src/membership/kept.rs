//! Created actors in etcd, as the leader keeps them for the next one; what is kept, and when, is
//! decided in [`crate::actor::placement::keep`].
//!
//! An actor has two keys, outside the prefix that everybody watches: what it was created with is
//! written once, and how far it has come at every start. Every write is a transaction on condition
//! that the writer still leads, as those of the [`ledger`](super::ledger). Only a process that
//! leads reads, so it finds all that the leaders before it wrote, and nothing is written after.
use std::collections::BTreeMap;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, PutOptions, Txn, TxnOp,
};
use serde::{Deserialize, Serialize};

use super::EtcdOptions;
use super::ledger::LedgerError;
use super::view::LEADER_KEY;
use crate::actor::placement::CREATED_MAX;
use crate::actor::placement::keep::{Change, Kept, KeptStart, Write};
use crate::protocol::actors::creation::{Creation, Needs, Where};

/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Number of actors that are read at once; their arguments fill most of what an answer may have.
const PAGE: i64 = 32;
/// Number of starts that are read at once.
const STARTS_PAGE: i64 = 1024;
/// Maximum number of keys that are read, so that nothing that others wrote fills the memory.
const KEYS_MAX: usize = 4 * CREATED_MAX;
/// What actors were created with.
const CREATED: &str = "created/";
/// How far they have come.
const STARTS: &str = "starts/";

/// Actors that were found.
#[derive(Debug, Default)]
pub struct Found {
    /// Those that can be read.
    pub actors: Vec<Kept>,
    /// Names of the others, and why not. Their keys stay.
    pub damaged: Vec<(String, String)>,
}

/// Created actors in etcd; see the module's documentation.
pub struct KeptActors {
    options: EtcdOptions,
    client: Option<Client>,
}

impl std::fmt::Debug for KeptActors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptActors").finish_non_exhaustive()
    }
}

/// The value of a key below [`CREATED`]: this as JSON, a line break, and the argument as it is.
#[derive(Serialize, Deserialize)]
struct Head {
    generation: u64,
    class: String,
    needs: Needs,
    at: Where,
    max_restarts: Option<u32>,
    mailbox: u32,
    start_limit_ms: u32,
    message_limit_ms: u32,
}

impl KeptActors {
    /// The created actors of the cluster named in `options`.
    #[must_use]
    pub fn new(options: EtcdOptions) -> Self {
        Self { options, client: None }
    }

    fn key(&self, kind: &str, name: &str) -> String {
        format!("/{}:actors/{kind}{name}", self.options.cluster)
    }

    /// Reads all actors. Call it in a process that leads.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub async fn load(&mut self) -> Result<Found, LedgerError> {
        let mut client = self.connect().await?;
        let created = self.read(&mut client, CREATED, PAGE).await?;
        let starts = self.read(&mut client, STARTS, STARTS_PAGE).await?;
        self.client = Some(client);
        let mut found = Found::default();
        for (name, value) in created {
            let start = starts.get(&name).map(Vec::as_slice);
            match decoded(&name, &value, start) {
                Ok(actor) => found.actors.push(actor),
                Err(error) => found.damaged.push((name, error)),
            }
        }
        Ok(found)
    }

    /// Reads the keys of one kind, page by page. Nobody else writes while this process leads.
    async fn read(
        &self,
        client: &mut Client,
        kind: &str,
        page: i64,
    ) -> Result<BTreeMap<String, Vec<u8>>, LedgerError> {
        let first = self.key(kind, "");
        // The first key after all that begin with this prefix: `/` is followed by `0`.
        let end = format!("{}0", first.trim_end_matches('/'));
        let (mut from, mut read) = (first.clone(), BTreeMap::new());
        loop {
            let options = GetOptions::new().with_range(end.as_str()).with_limit(page);
            let got = client.get(from, Some(options)).await?;
            for kv in got.kvs() {
                if let Some(name) = name(kv, &first) {
                    read.insert(name.to_owned(), kv.value().to_vec());
                }
            }
            if !got.more() {
                return Ok(read);
            }
            if read.len() >= KEYS_MAX {
                return Err(LedgerError::Damaged(format!(
                    "there are more than {KEYS_MAX} keys below {first}"
                )));
            }
            let Some(last) = got.kvs().last() else { return Ok(read) };
            // The next key that there can be.
            let last = String::from_utf8_lossy(last.key()).into_owned();
            from = format!("{last}\0");
        }
    }

    /// Writes all of this, or nothing, as the leader of `epoch`.
    ///
    /// # Errors
    /// [`LedgerError`]; whether it was written is not certain, except after
    /// [`LedgerError::Fenced`].
    pub async fn write(&mut self, epoch: i64, writes: Vec<Write>) -> Result<(), LedgerError> {
        let mut client = self.connect().await?;
        let mut operations = Vec::with_capacity(2 * writes.len());
        for Write { name, change } in writes {
            let keys = [CREATED, STARTS].map(|kind| self.key(kind, &name));
            let [created, started] = keys;
            match change {
                Change::Put { creation, start } => {
                    if let Some(creation) = creation {
                        let value = encoded(*creation, &start)?;
                        operations.push(TxnOp::put(created, value, None::<PutOptions>));
                    }
                    let value = json(&start)?;
                    operations.push(TxnOp::put(started, value, None::<PutOptions>));
                }
                Change::Delete => {
                    operations.push(TxnOp::delete(created, None::<DeleteOptions>));
                    operations.push(TxnOp::delete(started, None::<DeleteOptions>));
                }
            }
        }
        let leader = format!("/{}/{LEADER_KEY}", self.options.cluster);
        let leads = Compare::create_revision(leader, CompareOp::Equal, epoch);
        let done = client.txn(Txn::new().when([leads]).and_then(operations)).await?;
        self.client = Some(client);
        if done.succeeded() { Ok(()) } else { Err(LedgerError::Fenced) }
    }

    async fn connect(&mut self) -> Result<Client, LedgerError> {
        match self.client.take() {
            Some(client) => Ok(client),
            None => Ok(self.options.connect(DEADLINE).await?),
        }
    }
}

fn name<'a>(kv: &'a KeyValue, prefix: &str) -> Option<&'a str> {
    std::str::from_utf8(kv.key()).ok()?.strip_prefix(prefix)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, LedgerError> {
    serde_json::to_vec(value).map_err(|error| LedgerError::Damaged(error.to_string()))
}

fn encoded(creation: Creation, start: &KeptStart) -> Result<Vec<u8>, LedgerError> {
    let Creation { class, argument, needs, at, max_restarts, mailbox, .. } = creation;
    let Creation { start_limit_ms, message_limit_ms, .. } = creation;
    let generation = start.instance.generation;
    let mut value = json(&Head {
        generation,
        class,
        needs,
        at,
        max_restarts,
        mailbox,
        start_limit_ms,
        message_limit_ms,
    })?;
    value.push(b'\n');
    value.extend(argument);
    Ok(value)
}

fn decoded(name: &str, value: &[u8], start: Option<&[u8]>) -> Result<Kept, String> {
    let start = start.ok_or("nothing is known of its starts")?;
    let start: KeptStart = serde_json::from_slice(start).map_err(|error| error.to_string())?;
    // JSON of one line has no line break.
    let end = value.iter().position(|byte| *byte == b'\n').ok_or("its argument is missing")?;
    let (head, argument) = value.split_at(end);
    let head: Head = serde_json::from_slice(head).map_err(|error| error.to_string())?;
    if start.instance.generation != head.generation {
        return Err("its keys do not belong together".to_owned());
    }
    let Head { class, needs, at, max_restarts, mailbox, .. } = head;
    let creation = Creation {
        name: name.to_owned(),
        class,
        argument: argument.get(1..).unwrap_or_default().to_vec(),
        needs,
        at,
        max_restarts,
        mailbox,
        start_limit_ms: head.start_limit_ms,
        message_limit_ms: head.message_limit_ms,
    };
    Ok(Kept { creation, start })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::actors::creation::{Instance, Restarted};

    fn start() -> KeptStart {
        let instance = Instance { generation: u64::MAX - 1, incarnation: 3 };
        KeptStart { instance, restarted: Restarted { total: 5, in_a_row: 2 }, waits: false }
    }

    fn creation() -> Creation {
        Creation {
            name: "a\u{e9} b".to_owned(),
            class: "counter".to_owned(),
            argument: vec![b'\n', 0, 255, b'{', b'\n'],
            needs: Needs::nothing().cpus(0.5).custom("seats", 2),
            at: Where::rather("n1").label("zone", "west\n"),
            max_restarts: None,
            mailbox: 8,
            start_limit_ms: 1000,
            message_limit_ms: 0,
        }
    }

    #[test]
    fn an_actor_is_read_as_it_was_written() {
        let value = encoded(creation(), &start()).unwrap();
        let started = json(&start()).unwrap();
        let kept = decoded(&creation().name, &value, Some(&started));
        assert_eq!(kept, Ok(Kept { creation: creation(), start: start() }));
    }

    /// Whoever changes these bytes loses the actors that the build before has kept.
    #[test]
    fn what_is_stored_stays_readable() {
        let head = concat!(
            r#"{"generation":18446744073709551614,"class":"counter","#,
            r#""needs":{"cpus":500,"gpus":0,"memory":0,"custom":{"seats":2}},"#,
            r#""at":{"node":"n1","soft":true,"labels":{"zone":"west\n"},"spread":false},"#,
            r#""max_restarts":null,"mailbox":8,"start_limit_ms":1000,"message_limit_ms":0}"#,
        );
        let created = [head.as_bytes(), b"\n", &creation().argument].concat();
        let started = concat!(
            r#"{"instance":{"generation":18446744073709551614,"incarnation":3},"#,
            r#""restarted":{"total":5,"in_a_row":2},"waits":false}"#,
        );
        let text = |value: Vec<u8>| String::from_utf8_lossy(&value).into_owned();
        let written = encoded(creation(), &start()).unwrap();
        assert_eq!(text(written), text(created.clone()));
        assert_eq!(text(json(&start()).unwrap()), started);
        let kept = decoded(&creation().name, &created, Some(started.as_bytes()));
        assert_eq!(kept, Ok(Kept { creation: creation(), start: start() }));
    }

    #[test]
    fn what_does_not_belong_together_is_not_read() {
        let value = encoded(creation(), &start()).unwrap();
        let other = Instance { generation: 1, incarnation: 1 };
        let other = json(&KeptStart { instance: other, ..start() }).unwrap();
        let started = json(&start()).unwrap();
        let cut = value.iter().position(|byte| *byte == b'\n').unwrap();
        for (value, start) in [
            (&value[..], None),
            (&value[..], Some(&other[..])),
            (&value[..], Some(&b"{}"[..])),
            (&value[..cut], Some(&started[..])),
            (&b"{}\n"[..], Some(&started[..])),
        ] {
            assert!(decoded("a", value, start).is_err(), "{value:?} {start:?}");
        }
    }
}
