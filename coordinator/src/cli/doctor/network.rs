//! Ports that must be free, peers that must answer, clocks that must agree.
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, SystemTime};

use actix_web::http::header::HttpDate;
use coordinator::http::listener::is_left_over;
use serde_json::Value;
use shared::actor::link::{CloseReason, Connection};
use shared::membership::{DatabaseUsage, EtcdOptions, FULL_REMEDY, LEASE_TTL, ProbeError, Role};
use shared::wire::auth::AuthError;
use shared::wire::codec;
use shared::wire::frame::{FrameError, FrameKind};
use shared::wire::keyring::Keyring;
use ureq::Agent;

use super::super::etcd::EtcdArgs;
use super::super::http_client::{self, TrustArgs};
use super::host::mib;
use super::{DoctorArgs, Finding, Severity};

/// Time limit for a peer's answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Clock skew that makes logs and graphs of two nodes hard to compare.
const SKEW_WARN: Duration = Duration::from_secs(2);
/// Clock skew that is plainly wrong: certificates and dashboards break.
const SKEW_FAIL: Duration = Duration::from_secs(60);

pub(super) fn check(args: &DoctorArgs, secret: Option<&Keyring>) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &args.coordinator {
        Some(address) => {
            findings.push(coordinator(address, secret));
            let server = args.server.clone();
            let server = server.unwrap_or_else(|| default_server(address, &args.trust));
            findings.extend(compare(&server, &args.trust));
        }
        None => {
            findings.push(match &args.uds {
                Some(path) => socket(path),
                None => port("http port", "--listen", args.listen),
            });
            findings.push(port("cluster port", "--cluster-listen", args.cluster_listen));
            if let Some(server) = &args.server {
                findings.extend(compare(server, &args.trust));
            }
        }
    }
    findings.extend(etcd(&args.etcd));
    findings
}

fn default_server(coordinator: &str, trust: &TrustArgs) -> String {
    let host = coordinator.rsplit_once(':').map_or(coordinator, |(host, _)| host);
    let scheme = if trust.given() { "https" } else { "http" };
    format!("{scheme}://{host}:8000")
}

/// Checks whether the address can be bound.
fn port(check: &'static str, option: &str, address: SocketAddr) -> Finding {
    match TcpListener::bind(address) {
        Ok(_) => Finding::ok(check, format!("{address} is free")),
        Err(error) => Finding::fail(
            check,
            format!("{address} cannot be used: {error}"),
            format!("stop what listens there, or set {option} to another address"),
        ),
    }
}

/// Checks whether a Unix socket can have this path.
fn socket(path: &Path) -> Finding {
    const CHECK: &str = "http socket";
    let shown = path.display();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        let found = format!("{shown}: there is no folder {}", folder.display());
        return Finding::fail(CHECK, found, "make the folder, or set --uds to another path");
    }
    match is_left_over(path) {
        Ok(false) => Finding::ok(CHECK, format!("{shown} is free")),
        Ok(true) => Finding::ok(CHECK, format!("{shown} was left by a server that is gone")),
        Err(error) => Finding::fail(
            CHECK,
            format!("{shown} cannot be used: {error}"),
            "stop what listens there, or set --uds to another path",
        ),
    }
}

/// Checks whether the coordinator would admit a node with this secret.
fn coordinator(address: &str, secret: Option<&Keyring>) -> Finding {
    const CHECK: &str = "coordinator";
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(probe(address, secret)),
        Err(error) => Err(ProbeFailure::new(error.to_string(), "free some resources of this host")),
    };
    match outcome {
        Ok(()) => {
            let proven =
                if secret.is_some() { "has the same secret" } else { "requires no secret" };
            Finding::ok(CHECK, format!("{address} answers and {proven}"))
        }
        Err(refusal) => Finding::fail(CHECK, format!("{address}: {}", refusal.found), refusal.fix),
    }
}

/// Why it would not.
#[derive(Debug)]
struct ProbeFailure {
    found: String,
    fix: String,
}

impl ProbeFailure {
    fn new(found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { found: found.into(), fix: fix.into() }
    }
}

async fn probe(address: &str, secret: Option<&Keyring>) -> Result<(), ProbeFailure> {
    let mut connection = Connection::dial(address, DEADLINE).await.map_err(|error| {
        let fix = "start the coordinator with --cluster-listen on an address that this host can \
                   reach, and open the port in any firewall between them";
        ProbeFailure::new(format!("cannot be reached: {error}"), fix)
    })?;
    if let Some(secret) = secret {
        connection.authenticate_as_client(&secret.all(), DEADLINE).await.map_err(refusal)?;
    }
    connection.send(FrameKind::Ping, &[]).await.map_err(refusal)?;
    let frame = connection.receive(DEADLINE).await.map_err(refusal)?;
    match frame.kind {
        FrameKind::Pong => Ok(()),
        FrameKind::Refused => {
            let reason: Result<String, _> = codec::decode_message(&frame.body);
            Err(refusal(CloseReason::Refused(reason.unwrap_or_else(|error| error.to_string()))))
        }
        kind => Err(ProbeFailure::new(format!("answers with {kind:?}"), "is it the same version?")),
    }
}

fn refusal(reason: CloseReason) -> ProbeFailure {
    let fix = match &reason {
        CloseReason::Auth(AuthError::WrongSecret) => {
            "copy the coordinator's secret file to this host"
        }
        CloseReason::Auth(AuthError::NoGreeting) => {
            "give the coordinator the secret too, or this node none"
        }
        CloseReason::Auth(AuthError::Version { .. })
        | CloseReason::Frame(FrameError::VersionMismatch { .. }) => {
            "install the same version on both"
        }
        CloseReason::Frame(FrameError::HttpServer) => {
            "--coordinator HOST:PORT, the port of the coordinator's --cluster-listen"
        }
        CloseReason::Frame(FrameError::BadMagic(_)) => {
            "that is not a cluster port: give the coordinator's --cluster-listen"
        }
        CloseReason::Refused(said) if said.contains("version") => {
            "install the same version on both"
        }
        CloseReason::Refused(said) if said.contains("runs without") => {
            "give the coordinator the secret too, or this node none"
        }
        CloseReason::Refused(_) => "--cluster-secret-file FILE, the coordinator's own file",
        CloseReason::PeerClosed => {
            "check the coordinator's log: it may be another version, or busy"
        }
        _ => "is it the coordinator's --cluster-listen, and does no firewall in between block it?",
    };
    ProbeFailure::new(reason.to_string(), fix)
}

/// Compares clock and version with a server's, from an HTTP answer.
fn compare(server: &str, trust: &TrustArgs) -> Vec<Finding> {
    const CLOCK: &str = "clock";
    const VERSION: &str = "version";
    let url = format!("{}/version", http_client::base_url(server));
    let agent = match http_client::make_agent(&url, DEADLINE, trust, 1) {
        Ok(agent) => agent,
        Err(error) => {
            let fix = "--server https://... with --tls-ca FILE, the authority that signed its \
                       certificate";
            return vec![Finding::fail(CLOCK, error.to_string(), fix)];
        }
    };
    let asked = SystemTime::now();
    let answer = agent.get(&url).call();
    let answered = SystemTime::now();
    let mut answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let why = http_client::describe_failure(&url, &error);
            let found = format!("not compared with the coordinator's: {why}");
            return vec![Finding::warn(
                CLOCK,
                found,
                "--server URL, the coordinator's HTTP address (https:// with --tls-ca, if it uses \
                 TLS)",
            )];
        }
    };
    let date = answer.headers().get("date").and_then(|date| date.to_str().ok());
    let date = date.and_then(|date| date.parse::<HttpDate>().ok()).map(SystemTime::from);
    let clock = match date {
        Some(date) => judge_skew(date, asked, answered),
        None => Finding::warn(
            CLOCK,
            format!("{url} does not report a date"),
            "is that Tutti's HTTP address?",
        ),
    };
    let ours = env!("CARGO_PKG_VERSION");
    let body: Value = answer.body_mut().read_json().unwrap_or_default();
    let version = match body["version"].as_str() {
        Some(theirs) if theirs == ours => Finding::ok(VERSION, format!("{ours} on both sides")),
        Some(theirs) => Finding::fail(
            VERSION,
            format!("{ours} here, {theirs} there"),
            "install the same version on both",
        ),
        None => Finding::warn(
            VERSION,
            format!("{url} does not report one"),
            "is that Tutti's HTTP address?",
        ),
    };
    vec![clock, version]
}

/// Judges the skew: `date` was the server's clock, cut to whole seconds, at some time between
/// `asked` and `answered`.
fn judge_skew(date: SystemTime, asked: SystemTime, answered: SystemTime) -> Finding {
    const CLOCK: &str = "clock";
    let behind = asked.duration_since(date + Duration::from_secs(1)).unwrap_or_default();
    let ahead = date.duration_since(answered).unwrap_or_default();
    let skew = behind.max(ahead);
    let direction = if behind > ahead { "ahead of" } else { "behind" };
    let fix = "run an NTP client on both hosts";
    let found = format!("at least {:.1} s {direction} the coordinator's", skew.as_secs_f64());
    if skew >= SKEW_FAIL {
        return Finding::fail(CLOCK, found, fix);
    }
    if skew >= SKEW_WARN {
        return Finding::warn(CLOCK, found, fix);
    }
    Finding::ok(CLOCK, "agrees with the coordinator's within 2 s")
}

const ETCD: &str = "etcd";
/// etcd's default bound on its database.
const QUOTA_DEFAULT: u64 = 2 << 30;

/// Checks whether each member of etcd would serve a node with these options.
fn etcd(args: &EtcdArgs) -> Vec<Finding> {
    let options = match super::super::etcd::options(args, LEASE_TTL) {
        Ok(Some(options)) => options,
        Ok(None) => return Vec::new(),
        Err(error) => {
            let fix = "give the node's own --etcd options, as the line says";
            return vec![Finding::fail(ETCD, error.to_string(), fix)];
        }
    };
    let member = |url: &String| {
        let of_http = url.strip_prefix("http://").and_then(|_| health(url));
        let one = EtcdOptions { endpoints: vec![url.clone()], ..options.clone() };
        match of_http {
            // Older members do not give the reason.
            Some(finding) => alarm(url, &one).unwrap_or(finding),
            None => access(url, &one),
        }
    };
    options.endpoints.iter().map(member).collect()
}

/// Returns why a member that speaks HTTP reports itself unhealthy, if it does.
fn health(url: &str) -> Option<Finding> {
    let fix = "start etcd, or name its client address (http://HOST:2379)";
    let mut answer = match agent().get(format!("{url}/health")).call() {
        Ok(answer) => answer,
        Err(error) => return Some(Finding::fail(ETCD, format!("{url}: {error}"), fix)),
    };
    let body: Value = answer.body_mut().read_json().unwrap_or_default();
    if body["health"] == "true" {
        return None;
    }
    if body.get("health").is_none() {
        let status = answer.status();
        let found = format!("{url} answers {status}, but not as etcd does");
        let fix = "--etcd with etcd's client address (http://HOST:2379): this is another server's";
        return Some(Finding::fail(ETCD, found, fix));
    }
    let reason = body["reason"].as_str().unwrap_or("it does not say why").to_owned();
    let found = format!("{url} is not healthy: {reason}");
    let fix = if reason.contains("NOSPACE") { FULL_REMEDY } else { "etcdctl endpoint status" };
    Some(Finding::fail(ETCD, found, fix))
}

/// Checks whether it admits a node, by its certificate and user, to read and write what it needs.
fn access(url: &str, options: &EtcdOptions) -> Finding {
    let probed = runtime().and_then(|it| it.block_on(options.probe(DEADLINE)));
    let cluster = &options.cluster;
    match probed {
        Ok(roles) => {
            let database_usage =
                runtime().and_then(|it| it.block_on(options.database_usage(DEADLINE)));
            let database_usage = database_usage.unwrap_or_default();
            if let Some(finding) = database_finding(url, database_usage) {
                return finding;
            }
            let tls = if options.tls.is_some() { " over TLS" } else { "" };
            let user = options.user.as_ref();
            let user = user.map(|(user, _)| format!(" as {user}")).unwrap_or_default();
            let size = match database_usage {
                DatabaseUsage { size: 0, .. } => String::new(),
                DatabaseUsage { size, quota: Some(quota), .. } => {
                    format!("; its database has {} of {}", mib(size), mib(quota))
                }
                DatabaseUsage { size, .. } => format!("; its database has {}", mib(size)),
            };
            let allowed = if let [_, _, _] = roles[..] {
                format!("/{cluster}/ is writable{user}")
            } else {
                let names: Vec<_> = roles.iter().map(|role| role_name(*role)).collect();
                format!("/{cluster}/ is writable{user} for a {}", names.join(" and a "))
            };
            let found = format!("{url} answers{tls}; {allowed}{size}");
            if roles.contains(&Role::Coordinator) {
                return Finding::ok(ETCD, found);
            }
            let fix = "for a coordinator, --etcd-user of one with its rights (docs/operations.md)";
            Finding::warn(ETCD, format!("{found}; not for a coordinator"), fix)
        }
        Err(error @ ProbeError::NotAllowed(_)) => Finding::fail(
            ETCD,
            format!("{url}: {error}"),
            format!(
                "--etcd-user and --etcd-password-file of a user that may read and write keys under \
                 /{cluster}/, /{cluster}:totals/ and /{cluster}:actors/"
            ),
        ),
        Err(error @ ProbeError::Full(_)) => {
            Finding::fail(ETCD, format!("{url}: {error}"), FULL_REMEDY)
        }
        Err(error @ ProbeError::Unreachable(_)) if options.tls.is_some() => Finding::fail(
            ETCD,
            format!("{url}: {error}"),
            "start etcd; --etcd-ca must be the authority that signed its certificate, which must \
             name the host of this URL; if etcd requires client certificates, it must trust \
             --etcd-cert with --etcd-key",
        ),
        Err(error @ ProbeError::Unreachable(_)) => Finding::fail(
            ETCD,
            format!("{url}: {error}"),
            "start etcd, or name its client address; https:// if it uses TLS",
        ),
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coordinator",
        Role::Worker => "worker",
        Role::Frontend => "front end",
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, ProbeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| ProbeError::Unreachable(error.to_string()))
}

/// Returns the alarm that a member raises, if any.
fn alarm(url: &str, options: &EtcdOptions) -> Option<Finding> {
    let database_usage =
        runtime().and_then(|it| it.block_on(options.database_usage(DEADLINE))).ok()?;
    database_finding(url, database_usage).filter(|finding| finding.level == Severity::Fail)
}

/// Checks whether it is full, or soon will be. A cluster's data is small: the database fills up
/// with old revisions that nobody compacts.
fn database_finding(url: &str, database_usage: DatabaseUsage) -> Option<Finding> {
    let DatabaseUsage { size, quota, no_space, corrupt } = database_usage;
    let size_text = mib(size);
    if corrupt {
        let found = format!("{url}: alarm CORRUPT: a member's data is damaged");
        return Some(Finding::fail(ETCD, found, "replace that member: etcdctl alarm list"));
    }
    if no_space {
        let found = format!("{url}: alarm NOSPACE with {size_text}: it accepts no writes");
        return Some(Finding::fail(ETCD, found, FULL_REMEDY));
    }
    // Older members do not report their bound.
    let quota = quota.unwrap_or(QUOTA_DEFAULT);
    let nearly = size > quota / 10 * 7;
    nearly.then(|| {
        let found = format!("{url}: its database has {size_text} of {}", mib(quota));
        Finding::warn(ETCD, found, FULL_REMEDY)
    })
}

fn agent() -> Agent {
    Agent::config_builder()
        .timeout_global(Some(DEADLINE))
        .http_status_as_error(false)
        .build()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_certain_counts_as_skew() {
        let at = |ms: u64| SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_000_000 + ms);
        // The server's clock is cut to seconds: 0.9 s reads as 0.
        let level = |date, asked, answered| judge_skew(at(date), at(asked), at(answered)).level;
        assert_eq!(level(5000, 5900, 5950), Severity::Ok);
        assert_eq!(level(5000, 4900, 5100), Severity::Ok);
        assert_eq!(level(5000, 8100, 8200), Severity::Warn);
        assert_eq!(level(5000, 2000, 2500), Severity::Warn);
        // A slow answer is less precise.
        assert_eq!(level(5000, 2000, 6000), Severity::Ok);
        assert_eq!(level(5000, 70_000, 70_100), Severity::Fail);
        assert_eq!(level(70_000, 5000, 5100), Severity::Fail);
        let ahead = judge_skew(at(5000), at(70_000), at(70_100)).found;
        assert!(ahead.contains("ahead of"), "{ahead}");
    }

    #[test]
    fn an_etcd_that_fills_up_is_said_before_it_is_full() {
        let level = |database_usage| {
            database_finding("http://e:2379", database_usage).map(|finding| finding.level)
        };
        let of = |size| DatabaseUsage { size, ..DatabaseUsage::default() };
        assert_eq!(level(of(1 << 30)), None);
        assert_eq!(level(of(3 << 29)), Some(Severity::Warn));
        assert_eq!(level(DatabaseUsage { quota: Some(8 << 30), ..of(3 << 29) }), None);
        assert_eq!(level(DatabaseUsage { no_space: true, ..of(1) }), Some(Severity::Fail));
        let finding =
            database_finding("http://e:2379", DatabaseUsage { corrupt: true, ..of(1) }).unwrap();
        assert!(finding.found.contains("CORRUPT") && finding.level == Severity::Fail);
    }

    #[test]
    fn a_unix_socket_must_not_be_anybody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let level = || socket(&path).level;
        assert_eq!(level(), Severity::Ok);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(level(), Severity::Fail);
        drop(listener);
        assert_eq!(level(), Severity::Ok, "one that is left over is replaced");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert_eq!(level(), Severity::Fail);
        let lost = socket(&folder.path().join("no/socket"));
        assert!(lost.level == Severity::Fail && lost.found.contains("no folder"), "{lost:?}");
    }

    #[test]
    fn the_http_server_is_guessed_from_the_cluster_address() {
        let mut trust = TrustArgs::default();
        assert_eq!(default_server("10.0.0.1:8001", &trust), "http://10.0.0.1:8000");
        assert_eq!(default_server("[::1]:8001", &trust), "http://[::1]:8000");
        trust.tls_ca = Some("ca.pem".into());
        assert_eq!(default_server("10.0.0.1:8001", &trust), "https://10.0.0.1:8000");
    }
}
