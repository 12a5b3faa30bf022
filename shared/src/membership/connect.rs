//! How to connect to etcd: addresses, user, certificates; and a probe that checks these settings.
use std::time::Duration;

use etcd_client::{
    AlarmAction, AlarmType, Certificate, Client, Compare, CompareOp, ConnectOptions, Error,
    GetOptions, Identity, KeyValue, TlsOptions, Txn, TxnOp,
};

use super::credential::Credential;
use super::view::{DESIRED_KEY, Entry, LAST_LEADER_KEY, LEADER_KEY, Value, View};
use super::{PinnedRevision, Record, Role};

/// Interval between checks that an idle connection still works.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// A key of the cluster `cluster`, if it is one of ours.
pub(super) fn entry(cluster: &str, kv: &KeyValue) -> Option<Entry> {
    let prefix = format!("/{cluster}/");
    let key = std::str::from_utf8(kv.key()).ok()?.strip_prefix(&prefix)?.to_owned();
    let value = Value::decode(&key, kv.value(), kv.mod_revision())?;
    Some(Entry { key, value, created: kv.create_revision(), lease: kv.lease() })
}

/// Options for connecting to etcd.
#[derive(Clone)]
pub struct EtcdOptions {
    /// etcd's members, as `http://HOST:PORT` or, with TLS, `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// The cluster's name, which is the first part of all keys.
    pub cluster: String,
    /// User and password, if etcd requires them.
    pub user: Option<(String, Credential)>,
    /// Certificates, if the endpoints use TLS.
    pub tls: Option<Tls>,
    /// Time to live of a lease without keepalives, at least 2 s.
    pub lease_ttl: Duration,
}

/// Certificates, as PEM.
#[derive(Clone)]
pub struct Tls {
    /// The authority that signed etcd's certificates.
    pub authority: Credential,
    /// This process's own certificate and its key, if etcd requires one.
    pub identity: Option<(Credential, Credential)>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password must not be printed.
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl EtcdOptions {
    /// Returns a client with this deadline for answers, with the credentials as they are now.
    /// Without a user, nothing is dialled yet.
    ///
    /// # Errors
    /// When an address or certificate cannot be used, or the user is rejected.
    pub(super) async fn connect(&self, deadline: Duration) -> Result<Client, Error> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(deadline)
            .with_timeout(deadline)
            .with_keep_alive(KEEP_ALIVE, deadline)
            .with_tcp_keepalive(KEEP_ALIVE)
            .with_require_leader(true);
        if let Some((user, password)) = &self.user {
            let password = password.current();
            let password = String::from_utf8_lossy(&password);
            let password = password.trim_end_matches(['\n', '\r']);
            options = options.with_user(user, password).with_auto_token_refresh(true);
        }
        if let Some(tls) = &self.tls {
            let authority = Certificate::from_pem(tls.authority.current());
            let mut with = TlsOptions::new().ca_certificate(authority);
            if let Some((certificate, key)) = &tls.identity {
                with = with.identity(Identity::from_pem(certificate.current(), key.current()));
            }
            options = options.with_tls(with);
        }
        Client::connect(&self.endpoints, Some(options)).await
    }

    /// Which state of a model the cluster serves, by [`View::pinned`], asked once.
    ///
    /// # Errors
    /// Why etcd cannot be asked.
    pub async fn pinned(&self, deadline: Duration) -> Result<Option<PinnedRevision>, String> {
        Ok(self.listed(deadline).await?.pinned().cloned())
    }

    /// Which coordinator leads, asked once; `None` if none does.
    ///
    /// # Errors
    /// Why etcd cannot be asked.
    pub async fn leader(&self, deadline: Duration) -> Result<Option<Record>, String> {
        Ok(self.listed(deadline).await?.leader.map(|leader| leader.record))
    }

    /// All that etcd knows of the cluster now.
    async fn listed(&self, deadline: Duration) -> Result<View, String> {
        let ask = async {
            let mut client = self.connect(deadline).await?;
            let prefix = format!("/{}/", self.cluster);
            client.get(prefix, Some(GetOptions::new().with_prefix())).await
        };
        let listed = tokio::time::timeout(deadline, ask).await;
        let listed = listed
            .map_err(|_| format!("etcd does not answer within {} s", deadline.as_secs()))?
            .map_err(|error| explained(&error))?;
        let mut view = View::default();
        let entries = listed.kvs().iter().filter_map(|kv| entry(&self.cluster, kv)).collect();
        view.list(listed.header().map_or(0, |header| header.revision()), entries);
        Ok(view)
    }

    /// Returns as what a process with these options could be a member: etcd is reachable, accepts
    /// the certificate and user, and grants access to the keys of these roles. Writes nothing.
    ///
    /// # Errors
    /// What prevents it in every role.
    pub async fn probe(&self, deadline: Duration) -> Result<Vec<Role>, ProbeError> {
        let mut client = self.connect(deadline).await?;
        let (mut roles, mut denied) = (Vec::new(), None);
        for role in [Role::Coordinator, Role::Worker, Role::Frontend] {
            match self.probe_as(&mut client, role).await {
                Ok(()) => roles.push(role),
                Err(error @ ProbeError::NotAllowed(_)) => denied = denied.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        denied.filter(|_| roles.is_empty()).map_or(Ok(roles), Err)
    }

    /// Asks for what a role reads, and for the right to write what it writes.
    async fn probe_as(&self, client: &mut Client, role: Role) -> Result<(), ProbeError> {
        let key = |rest: &str| format!("/{}{rest}", self.cluster);
        let (mut read, mut written) = (vec![key("/")], Vec::new());
        match role {
            Role::Worker => written.push(key("/workers/probe")),
            Role::Frontend => written.push(key("/frontends/probe")),
            Role::Coordinator => {
                let beside = [":totals/", ":actors/"];
                read.extend(beside.map(key));
                written.push(key("/coordinators/probe"));
                let leaders = [LEADER_KEY, LAST_LEADER_KEY, DESIRED_KEY];
                written.extend(leaders.map(|name| key(&format!("/{name}"))));
                written.extend(beside.map(|prefix| key(&format!("{prefix}probe"))));
            }
        }
        for prefix in read {
            let count = GetOptions::new().with_prefix().with_count_only();
            client.get(prefix, Some(count)).await?;
        }
        // No key has this revision: nothing is written, but etcd checks permissions first.
        let never = Compare::create_revision(key("/"), CompareOp::Equal, -1);
        let puts: Vec<TxnOp> = written.into_iter().map(|key| TxnOp::put(key, "", None)).collect();
        client.txn(Txn::new().when([never]).and_then(puts)).await?;
        Ok(())
    }
}

/// What to do about an etcd that is full. It accepts no writes: nobody can join or take over.
pub const FULL_REMEDY: &str = "etcdctl compact REVISION (of `etcdctl endpoint status -w json`), \
     etcdctl defrag --cluster, etcdctl alarm disarm; and run it with --auto-compaction-mode=periodic \
     --auto-compaction-retention=10m";

/// Whether an error says that etcd is full.
pub(super) fn is_full(reason: &str) -> bool {
    reason.contains("database space exceeded")
}

/// Whether an error says that etcd's user lacks a permission.
pub(super) fn is_denied(reason: &str) -> bool {
    reason.contains("permission denied")
}

/// Describes an error of etcd, with its remedy if that is known.
pub(super) fn explained(error: &Error) -> String {
    let text = plain(error);
    if is_full(&text) {
        return format!("etcd is full and accepts no writes ({text}); to fix it: {FULL_REMEDY}");
    }
    text
}

/// Describes an error without the client's own structures: its message and the last cause in its
/// chain, which holds the system's or TLS's message.
fn plain(error: &Error) -> String {
    let (mut text, mut source) = match error {
        Error::GRpcStatus(status) if !status.message().is_empty() => {
            (status.message().to_owned(), std::error::Error::source(status))
        }
        Error::GRpcStatus(status) => {
            (status.code().description().to_owned(), std::error::Error::source(status))
        }
        Error::TransportError(error) => (error.to_string(), std::error::Error::source(error)),
        other => (other.to_string(), None),
    };
    while let Some(cause) = source {
        source = cause.source();
        let cause = cause.to_string();
        if source.is_none() && !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// How full a member's database is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatabaseUsage {
    /// Size of its database file, in bytes.
    pub size: u64,
    /// The bound on that size, if the member reports it (etcd 3.6).
    pub quota: Option<u64>,
    /// Whether the bound is reached; then it accepts no writes.
    pub no_space: bool,
    /// Whether a member's data is damaged.
    pub corrupt: bool,
}

impl EtcdOptions {
    /// Returns how full the member is that answers. Users other than root may be denied this.
    ///
    /// # Errors
    /// What prevents it.
    pub async fn database_usage(&self, deadline: Duration) -> Result<DatabaseUsage, ProbeError> {
        let mut client = self.connect(deadline).await?;
        let status = client.status().await?;
        let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await;
        let alarms = alarms.map(|answer| answer.alarms().to_vec()).unwrap_or_default();
        let raised = |kind| alarms.iter().any(|alarm| alarm.alarm() == kind);
        Ok(DatabaseUsage {
            size: u64::try_from(status.db_size()).unwrap_or(0),
            quota: u64::try_from(status.db_size_quota()).ok().filter(|quota| *quota > 0),
            no_space: raised(AlarmType::Nospace),
            corrupt: raised(AlarmType::Corrupt),
        })
    }
}

/// Why a process with these options could not be a member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// etcd does not know the user, or denies it the access it needs.
    #[error("{0}")]
    NotAllowed(String),
    /// etcd accepts no writes.
    #[error("{0}")]
    Full(String),
    /// No connection that both sides trust, or no answer.
    #[error("{0}")]
    Unreachable(String),
}

impl From<Error> for ProbeError {
    fn from(error: Error) -> Self {
        // InvalidArgument is the code for a wrong password.
        const AUTH: [&str; 4] =
            ["InvalidArgument", "PermissionDenied", "Unauthenticated", "FailedPrecondition"];
        let text = plain(&error);
        let code = match &error {
            Error::GRpcStatus(status) => format!("{:?}", status.code()),
            _ => String::new(),
        };
        if is_full(&text) {
            return Self::Full(text);
        }
        if AUTH.contains(&code.as_str()) { Self::NotAllowed(text) } else { Self::Unreachable(text) }
    }
}
