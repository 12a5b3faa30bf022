//! The options by which coordinators, workers and front ends find each other through etcd.
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Id};
use coordinator::http::listener::Endpoint;
use coordinator::private_file;
use shared::membership::{
    CoordinatorAddress, Credential, EtcdMembership, EtcdOptions, FatalError, LEASE_TTL, Record,
    Role, Tls,
};
use shared::protocol::PROTOCOL_VERSION;
use worker::run::address_towards;

use super::CliError;

/// The variable that holds the password if there is no file.
const PASSWORD: &str = "TUTTI_ETCD_PASSWORD";
/// Default address of the coordinator without etcd.
const COORDINATOR: &str = "127.0.0.1:8001";
/// Maximum length of a cluster's name.
const CLUSTER_NAME_MAX: usize = 64;

/// Options that mean nothing without etcd, beside those that [`options`] refuses: these are refused
/// on the command line only, since a file may be for all roles.
const ONLY_WITH_ETCD: [&str; 3] = ["leader_lease", "checkpoint_interval", "cluster_name"];

/// Options of the roles that meet through etcd.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct EtcdArgs {
    /// etcd's members (http://HOST:PORT or https://HOST:PORT), comma separated: coordinators,
    /// workers and front ends find each other through etcd, and one of the coordinators leads
    #[arg(long, value_name = "URLS", value_delimiter = ',', value_parser = parse_endpoint)]
    pub(crate) etcd: Vec<String>,
    /// Name of this cluster: tells apart clusters that share an etcd
    #[arg(long, value_name = "NAME", default_value = "tutti", value_parser = parse_cluster_name)]
    pub(crate) cluster_name: String,
    /// User to authenticate to etcd as, if it has users
    #[arg(long, value_name = "NAME")]
    pub(crate) etcd_user: Option<String>,
    /// File with the password of --etcd-user, readable only by its owner. The environment variable
    /// TUTTI_ETCD_PASSWORD can hold the password instead
    #[arg(long, value_name = "FILE")]
    pub(crate) etcd_password_file: Option<PathBuf>,
    /// PEM file of the authority that signed etcd's certificates, for https
    #[arg(long, value_name = "FILE")]
    pub(crate) etcd_ca: Option<PathBuf>,
    /// PEM file of this process's certificate, if etcd requires one
    #[arg(long, value_name = "FILE")]
    pub(crate) etcd_cert: Option<PathBuf>,
    /// PEM file with the key of --etcd-cert
    #[arg(long, value_name = "FILE")]
    pub(crate) etcd_key: Option<PathBuf>,
}

fn parse_endpoint(text: &str) -> Result<String, String> {
    let text = text.trim().trim_end_matches('/');
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let host_and_port = rest.filter(|rest| is_host_and_port(rest));
    match host_and_port {
        Some(_) => Ok(text.to_owned()),
        None => Err("expected http://HOST:PORT or https://HOST:PORT".to_owned()),
    }
}

/// Whether `text` is `HOST:PORT` with a port above 0, such as `10.0.0.1:8001` or `[::1]:8001`.
fn is_host_and_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty()
            && !host.contains(['/', '@', ' '])
            && (!host.contains(':') || (host.starts_with('[') && host.ends_with(']')))
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

/// Checks `HOST:PORT`.
pub(crate) fn parse_address(text: &str) -> Result<String, String> {
    if is_host_and_port(text) {
        Ok(text.to_owned())
    } else {
        Err("expected HOST:PORT, such as 10.0.0.1:8001".to_owned())
    }
}

fn parse_cluster_name(text: &str) -> Result<String, String> {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.len() <= CLUSTER_NAME_MAX && text.chars().all(known) {
        Ok(text.to_owned())
    } else {
        Err(format!("expected 1 to {CLUSTER_NAME_MAX} letters, digits, '-', '_' or '.'"))
    }
}

/// Refuses options of etcd that the command line has and that would be ignored, except for
/// `tutti doctor`, which takes those of any node.
pub(crate) fn check_given(matches: &ArgMatches) -> Result<(), clap::Error> {
    let mut found = matches.subcommand().filter(|(role, _)| *role != "doctor");
    while let Some((_, matches)) = found {
        let is_given = |id: &&Id| {
            ONLY_WITH_ETCD.contains(&id.as_str())
                && matches.value_source(id.as_str()) == Some(ValueSource::CommandLine)
        };
        let has_etcd = matches.ids().any(|id| id == "etcd");
        if let Some(id) = matches.ids().find(is_given).filter(|_| !has_etcd) {
            let option = id.as_str().replace('_', "-");
            let message = format!("--{option} is given without --etcd\n");
            return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, message));
        }
        found = matches.subcommand();
    }
    Ok(())
}

/// Returns how etcd is reached, if it is used.
pub(crate) fn options(args: &EtcdArgs, ttl: Duration) -> Result<Option<EtcdOptions>, CliError> {
    let given: [(&str, bool); 5] = [
        ("--etcd-user", args.etcd_user.is_some()),
        ("--etcd-password-file", args.etcd_password_file.is_some()),
        ("--etcd-ca", args.etcd_ca.is_some()),
        ("--etcd-cert", args.etcd_cert.is_some()),
        ("--etcd-key", args.etcd_key.is_some()),
    ];
    if args.etcd.is_empty() {
        return match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(CliError::Usage(format!("{option} is given without --etcd"))),
            None => Ok(None),
        };
    }
    Ok(Some(EtcdOptions {
        endpoints: args.etcd.clone(),
        cluster: args.cluster_name.clone(),
        user: user(args)?,
        tls: tls(args)?,
        lease_ttl: ttl,
    }))
}

fn user(args: &EtcdArgs) -> Result<Option<(String, Credential)>, CliError> {
    let Some(user) = &args.etcd_user else {
        return match &args.etcd_password_file {
            Some(_) => {
                Err(CliError::Usage("--etcd-password-file is given without --etcd-user".to_owned()))
            }
            None => Ok(None),
        };
    };
    let password = match &args.etcd_password_file {
        Some(file) => credential("--etcd-password-file", file, private_text)?,
        None => std::env::var(PASSWORD).map(Credential::from).map_err(|_| {
            CliError::Usage(format!(
                "--etcd-user {user} needs a password: --etcd-password-file or {PASSWORD}"
            ))
        })?,
    };
    Ok(Some((user.clone(), password)))
}

fn tls(args: &EtcdArgs) -> Result<Option<Tls>, CliError> {
    let secure = args.etcd.iter().filter(|endpoint| endpoint.starts_with("https://")).count();
    if secure != 0 && secure != args.etcd.len() {
        let message = "--etcd: either all members must use http, or all https";
        return Err(CliError::Usage(message.to_owned()));
    }
    let identity = match (&args.etcd_cert, &args.etcd_key) {
        (Some(certificate), Some(key)) => {
            let certificate = credential("--etcd-cert", certificate, read)?;
            Some((certificate, credential("--etcd-key", key, private_text)?))
        }
        (None, None) => None,
        _ => {
            let message = "--etcd-cert and --etcd-key belong together: give both";
            return Err(CliError::Usage(message.to_owned()));
        }
    };
    match (&args.etcd_ca, secure > 0) {
        (Some(file), true) => {
            Ok(Some(Tls { authority: credential("--etcd-ca", file, read)?, identity }))
        }
        (None, true) => Err(CliError::Usage(
            "--etcd https://... needs --etcd-ca FILE, the authority that signed its certificate"
                .to_owned(),
        )),
        (None, false) if identity.is_none() => Ok(None),
        (_, false) => Err(CliError::Usage(
            "--etcd-ca, --etcd-cert and --etcd-key are for https://... members; these are http"
                .to_owned(),
        )),
    }
}

/// What a file has, as `read` reads it, now and whenever etcd is dialled.
fn credential(
    option: &str,
    file: &Path,
    read: impl Fn(&Path) -> Result<Vec<u8>, String> + Send + Sync + 'static,
) -> Result<Credential, CliError> {
    let name = format!("{option} {}", file.display());
    let file = file.to_owned();
    let found = Credential::read_again(name.clone(), move || read(&file));
    found.map_err(|problem| CliError::Usage(format!("{name}: {problem}")))
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    fs::read(file).map_err(|error| error.to_string())
}

/// Reads a file that nobody else may read.
fn private_text(file: &Path) -> Result<Vec<u8>, String> {
    private_file::check(file)?;
    let text = String::from_utf8(read(file)?).map_err(|_| "it is not text".to_owned())?;
    Ok(text.into_bytes())
}

/// Rejects two ways to find the coordinator.
pub(crate) fn check_found_once(coordinator: Option<&str>, args: &EtcdArgs) -> Result<(), CliError> {
    match coordinator.filter(|_| !args.etcd.is_empty()) {
        None => Ok(()),
        Some(coordinator) => Err(CliError::Usage(format!(
            "--coordinator {coordinator} and --etcd cannot be combined: with --etcd the leader's \
             address is found there"
        ))),
    }
}

/// Returns the address at which a worker or front end finds the coordinator, and its membership if
/// it has one.
pub(crate) fn find(
    coordinator: Option<&str>,
    args: &EtcdArgs,
    role: Role,
    node: &str,
    incarnation: u64,
) -> Result<(CoordinatorAddress, Option<EtcdMembership>), CliError> {
    let Some(options) = options(args, LEASE_TTL)? else {
        return Ok((CoordinatorAddress::from(coordinator.unwrap_or(COORDINATOR)), None));
    };
    check_found_once(coordinator, args)?;
    let record = Record {
        node: node.to_owned(),
        role,
        incarnation,
        address: String::new(),
        http: String::new(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL_VERSION,
        model: None,
        serves: None,
    };
    let membership = EtcdMembership::start(options, record, false).map_err(no_thread)?;
    Ok((CoordinatorAddress::Followed(membership.view()), Some(membership)))
}

pub(crate) fn no_thread(error: std::io::Error) -> CliError {
    CliError::Failed(format!("cannot start the membership thread: {error}"))
}

/// Resolves when membership cannot continue; never without one.
pub(crate) async fn failed(membership: &mut Option<EtcdMembership>) -> CliError {
    match membership {
        Some(membership) => match membership.failed().await {
            error @ FatalError::NameTaken { .. } => CliError::NameTaken(error.to_string()),
            error @ FatalError::Ended => CliError::Failed(error.to_string()),
        },
        None => std::future::pending().await,
    }
}

/// Returns where others reach a coordinator that listens on `cluster` and `http`: (cluster address,
/// HTTP address).
pub(crate) fn advertised(
    advertise: Option<&str>,
    cluster: SocketAddr,
    http: &Endpoint,
    etcd: &[String],
) -> Result<(String, String), CliError> {
    let address = match advertise {
        Some(address) => address.to_owned(),
        None if !cluster.ip().is_unspecified() => cluster.to_string(),
        None => {
            let towards = outgoing(etcd).filter(|ip| !ip.is_loopback()).ok_or_else(|| {
                CliError::Usage(format!(
                    "--cluster-listen {cluster} is a wildcard address, and it is not clear at \
                     which address other nodes reach this host: set --advertise HOST:PORT"
                ))
            })?;
            SocketAddr::new(towards, cluster.port()).to_string()
        }
    };
    let loopback = cluster.ip().is_loopback() && advertise.is_none();
    if loopback && outgoing(etcd).is_some_and(|ip| !ip.is_loopback()) {
        tracing::warn!(
            address,
            "only this host can reach the advertised address: set --cluster-listen or --advertise"
        );
    }
    let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
    let http = match http {
        Endpoint::Tcp(http) if http.ip().is_unspecified() => format!("{host}:{}", http.port()),
        // A Unix socket is reached from its host alone; others are told so.
        other => other.to_string(),
    };
    Ok((address, http))
}

/// Returns this host's address on the route to etcd.
fn outgoing(etcd: &[String]) -> Option<IpAddr> {
    etcd.iter().find_map(|endpoint| address_towards(endpoint.rsplit_once("//")?.1).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(endpoints: &[&str]) -> EtcdArgs {
        EtcdArgs {
            etcd: endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect(),
            cluster_name: "c".to_owned(),
            ..EtcdArgs::default()
        }
    }

    fn refused(args: &EtcdArgs, words: &[&str]) {
        let error = options(args, LEASE_TTL).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }

    #[test]
    fn addresses_are_checked_and_unclear_ones_refused() {
        for good in ["http://h:1", "https://10.0.0.1:2379/", "http://[::1]:2379"] {
            assert!(parse_endpoint(good).is_ok(), "{good}");
        }
        for bad in ["h:1", "http://h", "http://h:0", "http://h:1/v3", "http://u@h:1", "ftp://h:1"] {
            assert!(parse_endpoint(bad).is_err(), "{bad}");
        }
        assert!(parse_cluster_name("a-b_c.1").is_ok());
        assert!(parse_cluster_name("a/b").is_err() && parse_cluster_name("").is_err());
        let any: SocketAddr = ([0, 0, 0, 0], 8001).into();
        let local: SocketAddr = ([127, 0, 0, 1], 8001).into();
        let etcd = ["http://127.0.0.1:2379".to_owned()];
        let error = advertised(None, any, &any.into(), &etcd).unwrap_err().to_string();
        assert!(error.contains("--advertise") && error.contains("0.0.0.0:8001"), "{error}");
        let wildcard = Endpoint::Tcp(([0, 0, 0, 0], 80).into());
        let given = advertised(Some("host:9"), any, &wildcard, &etcd).unwrap();
        assert_eq!(given, ("host:9".to_owned(), "host:80".to_owned()));
        let given = advertised(None, local, &local.into(), &etcd).unwrap();
        assert_eq!(given, ("127.0.0.1:8001".to_owned(), "127.0.0.1:8001".to_owned()));
        let socket = Endpoint::Unix("/run/tutti.sock".into());
        let given = advertised(None, local, &socket, &etcd).unwrap();
        assert_eq!(given.1, "unix:/run/tutti.sock");
    }

    #[test]
    fn half_of_a_setting_is_refused() {
        let mut plain = args(&[]);
        assert!(options(&plain, LEASE_TTL).unwrap().is_none());
        plain.etcd_user = Some("u".to_owned());
        refused(&plain, &["--etcd-user", "without --etcd"]);
        refused(&args(&["https://h:1"]), &["--etcd-ca"]);
        refused(&args(&["https://h:1", "http://h:2"]), &["all"]);
        let mut half = args(&["https://h:1"]);
        half.etcd_cert = Some("c".into());
        refused(&half, &["--etcd-cert", "--etcd-key", "both"]);
        let mut plain = args(&["http://h:1"]);
        plain.etcd_ca = Some("c".into());
        refused(&plain, &["http"]);
        let mut user = args(&["http://h:1"]);
        user.etcd_password_file = Some("/no/such".into());
        refused(&user, &["--etcd-user"]);
        user.etcd_user = Some("u".to_owned());
        refused(&user, &["--etcd-password-file /no/such"]);
        let named = find(Some("h:1"), &args(&["http://h:1"]), Role::Worker, "n", 1);
        let error = named.unwrap_err().to_string();
        assert!(error.contains("--coordinator h:1 and --etcd cannot be combined"), "{error}");
    }
}
