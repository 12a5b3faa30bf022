//! Asks the coordinator that a command is for: the one at `--server`, or the one that leads
//! according to etcd.
use std::time::{Duration, Instant};

use coordinator::http::admin::TOKEN_PURPOSE;
use coordinator::standby;
use serde_json::Value;
use shared::membership::{EtcdOptions, LEASE_TTL};

use super::super::options::OperatorArgs;
use super::super::{CliError, etcd, http_client, secret};

/// Time limit for an answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long it is tried to find a coordinator that leads, and answers: one takes the place of
/// another within this time, mostly.
const FOUND_WITHIN: Duration = Duration::from_secs(15);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// Why there is no answer.
struct Failure {
    error: CliError,
    /// Whether nothing was done, and the next leader, or this one once it serves, may do it.
    again: bool,
}

impl From<CliError> for Failure {
    fn from(error: CliError) -> Self {
        Self { error, again: false }
    }
}

/// Asks the coordinator; POSTs if there is a body.
pub(super) fn ask(
    args: &OperatorArgs,
    path: &str,
    query: &[(&str, String)],
    body: Option<Value>,
) -> Result<Value, CliError> {
    ask_within(DEADLINE, args, path, query, body)
}

/// The same, with another time limit.
pub(super) fn ask_within(
    deadline: Duration,
    args: &OperatorArgs,
    path: &str,
    query: &[(&str, String)],
    body: Option<Value>,
) -> Result<Value, CliError> {
    let ask = |server: &str| ask_at(deadline, args, server, path, query, body.as_ref());
    match etcd::options(&args.etcd, LEASE_TTL)? {
        None => ask(&args.server).map_err(|failure| failure.error),
        Some(etcd) => ask_leader(&etcd, FOUND_WITHIN, ask),
    }
}

/// Asks whoever leads, as long as a leader that is gone, or does not serve yet, is all there is.
fn ask_leader(
    etcd: &EtcdOptions,
    patience: Duration,
    ask: impl Fn(&str) -> Result<Value, Failure>,
) -> Result<Value, CliError> {
    let until = Instant::now() + patience;
    let system = actix::System::new();
    loop {
        let found = system.block_on(etcd.leader(DEADLINE));
        let found = found.map_err(|error| CliError::Failed(format!("etcd: {error}")))?;
        let failure = match found {
            Some(leader) => match ask(&standby::url(&leader.http)) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            },
            None => {
                let cluster = &etcd.cluster;
                let message = format!("etcd knows no coordinator that leads the cluster {cluster}");
                Failure { error: CliError::Failed(message), again: true }
            }
        };
        if !failure.again || Instant::now() >= until {
            return Err(failure.error);
        }
        std::thread::sleep(PAUSE);
    }
}

fn ask_at(
    deadline: Duration,
    args: &OperatorArgs,
    server: &str,
    path: &str,
    query: &[(&str, String)],
    body: Option<&Value>,
) -> Result<Value, Failure> {
    let url = format!("{}{path}", http_client::base_url(server));
    let agent = http_client::make_agent(&url, deadline, &args.trust, 1)?;
    let failed = |error: ureq::Error| {
        let again = is_unreached(&error);
        let error = CliError::Failed(http_client::describe_failure(&url, &error));
        Failure { error, again }
    };
    let token = secret::read_file(args.cluster_secret_file.as_deref())?
        .map(|secrets| format!("Bearer {}", secrets.first().token(TOKEN_PURPOSE)));
    let mut response = match body {
        None => {
            let query = query.iter().map(|(key, value)| (*key, value.as_str()));
            let request = agent.get(&url).query_pairs(query);
            match &token {
                Some(token) => request.header("authorization", token),
                None => request,
            }
            .call()
        }
        Some(body) => {
            let request = agent.post(&url);
            match &token {
                Some(token) => request.header("authorization", token),
                None => request,
            }
            .send_json(body)
        }
    }
    .map_err(failed)?;
    let text = response.body_mut().read_to_string().map_err(failed)?;
    // Some answers are a sentence.
    let answer: Value = serde_json::from_str(&text).unwrap_or(Value::String(text));
    if response.status().is_success() {
        return Ok(answer);
    }
    let message = answer["error"]["message"].as_str().map(str::to_owned);
    let again = message.as_deref().is_some_and(standby::is_reason);
    let message = message.unwrap_or_else(|| format!("{url}: {}", response.status()));
    Err(Failure { error: CliError::Failed(message), again })
}

/// Whether nobody was asked: no connection came about.
fn is_unreached(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::ConnectionFailed => true,
        ureq::Error::Io(error) => matches!(
            error.kind(),
            std::io::ErrorKind::ConnectionRefused
                | std::io::ErrorKind::HostUnreachable
                | std::io::ErrorKind::NetworkUnreachable
        ),
        _ => false,
    }
}
