//! What a process writes to etcd: its own key, the leader's key and operators' commands. Each write
//! has a condition, so that nobody overwrites another process's key.
use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp};

use super::EtcdMember;
use super::session::{Session, SessionEnd};
use crate::membership::Record;
use crate::membership::core::KeyOwner;
use crate::membership::view::{DESIRED_KEY, LAST_LEADER_KEY, LEADER_KEY, LastLeader};

impl EtcdMember {
    /// Writes this process's key if no other process has it.
    pub(super) async fn register(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        let Some(lease) = self.core.lease() else { return Ok(()) };
        let key = self.key(self.core.key());
        let (mut client, wanted) = (session.client(), key.clone());
        let got =
            self.keeping_lease(session, async move { client.get(wanted, None).await }).await?;
        let held = got.kvs().first();
        let held = held.map(|kv| KeyOwner { revision: kv.mod_revision(), record: decode(kv) });
        let Some(seen) = self.core.found(self.now(), held).map_err(SessionEnd::Fatal)? else {
            return Ok(());
        };
        let value = json(self.core.record())?;
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, seen);
        let put = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(key.as_str(), value, Some(put));
        let register = Txn::new().when([unchanged]).and_then([put]);
        let mut client = session.client();
        let written =
            self.keeping_lease(session, async move { client.txn(register).await }).await?;
        if written.succeeded() {
            self.core.registered();
            tracing::info!(key = self.core.key(), "registered with etcd");
            self.list(session).await?;
        }
        Ok(())
    }

    /// Takes the leader's key if it is vacant and this process has missed no other leader.
    pub(super) async fn run_for_leader(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        let Some(lease) = self.core.lease() else { return Ok(()) };
        let (key, led) = (self.key(LEADER_KEY), self.key(LAST_LEADER_KEY));
        let vacant = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let missed_nobody =
            Compare::mod_revision(led.as_str(), CompareOp::Equal, self.core.last_leader_revision());
        let value = json(self.core.record())?;
        let lead = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
        let led = TxnOp::put(led, self.last_leader_json(false)?, None);
        let run = Txn::new().when([vacant, missed_nobody]).and_then([lead, led]);
        let mut client = session.client();
        self.keeping_lease(session, async move { client.txn(run).await }).await?;
        // Whoever leads now: the list shows it at once, the watch would show it a little later.
        self.list(session).await
    }

    /// Moves the leader's key to the current lease, if this process still leads as it has since
    /// `epoch`.
    pub(super) async fn hold(
        &mut self,
        session: &mut Session,
        epoch: i64,
    ) -> Result<(), SessionEnd> {
        let Some(lease) = self.core.lease() else { return Ok(()) };
        let put = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(self.key(LEADER_KEY), json(self.core.record())?, Some(put));
        let hold = Txn::new().when([self.leads(epoch)]).and_then([put]);
        let mut client = session.client();
        self.keeping_lease(session, async move { client.txn(hold).await }).await?;
        self.list(session).await
    }

    /// Stores operators' commands for the next leader, if this process still leads.
    pub(super) async fn store(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        let Some((epoch, desired)) = self.core.to_store() else { return Ok(()) };
        let put = TxnOp::put(self.key(DESIRED_KEY), json(desired)?, None);
        let store = Txn::new().when([self.leads(epoch)]).and_then([put]);
        let mut client = session.client();
        self.keeping_lease(session, async move { client.txn(store).await }).await?;
        // Either it is stored, or another process leads: the list shows which.
        self.list(session).await
    }

    /// Gives up the lease, and all keys with it. A leader first records that it will not come back,
    /// so that nobody waits for it.
    pub(super) async fn hand_over(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        if let Some(epoch) = self.core.view().own().map(|leader| leader.epoch) {
            let put = TxnOp::put(self.key(LAST_LEADER_KEY), self.last_leader_json(true)?, None);
            session.client.txn(Txn::new().when([self.leads(epoch)]).and_then([put])).await?;
        }
        if let Some(lease) = self.core.lease() {
            session.client.lease_revoke(lease).await?;
        }
        Ok(())
    }

    /// The condition that this process still leads as it has since `epoch`.
    pub(super) fn leads(&self, epoch: i64) -> Compare {
        Compare::create_revision(self.key(LEADER_KEY), CompareOp::Equal, epoch)
    }

    pub(super) fn last_leader_json(&self, ended: bool) -> Result<Vec<u8>, SessionEnd> {
        json(&LastLeader { record: self.core.record().clone(), ended, revision: 0 })
    }
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, SessionEnd> {
    serde_json::to_vec(value).map_err(|error| SessionEnd::Broken(error.to_string()))
}

fn decode(kv: &KeyValue) -> Option<Record> {
    serde_json::from_slice(kv.value()).ok()
}
