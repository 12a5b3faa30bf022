//! `tutti doctor`: can this host become a node? Checks, reports problems and how to fix them, and
//! changes nothing: it does not join, and loads no weights.
//!
//! - `host`, `gpu`: the host and its GPUs
//! - `model`: the model folder
//! - `network`: ports, peers and clocks
mod gpu;
mod host;
mod model;
mod network;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coordinator::http::tls::read_certificates;
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde_json::json;
use shared::model_config::ConfigOverrides;
use shared::protocol::Quantization;

use super::etcd::{EtcdArgs, parse_address};
use super::http_client::TrustArgs;
use super::hub::HubArgs;
use super::lora::LoraArgs;
use super::options::{
    Workers, parse_bytes, parse_quantization, parse_socket, parse_swap_space, parse_workers,
};
use super::output::print_line;
use super::speculative::{self, Speculative};
use super::work::cores;
use super::{CliError, api, secret};

/// Options of `tutti doctor`. Those that a role has too mean the same, so its configuration file
/// can be given.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// TOML file of the node to check, with the names of these options as keys; keys of other
    /// options are ignored
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Check this host as a worker or front end of the coordinator at this cluster address; without
    /// it, as a coordinator or for `tutti up`
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) coordinator: Option<String>,
    /// The coordinator's HTTP address, to compare clocks and versions with [default: port 8000 of
    /// --coordinator's host, https:// with --tls-ca]
    #[arg(long, value_name = "URL")]
    pub(crate) server: Option<String>,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
    /// PEM file with the server's certificate
    #[arg(long, alias = "ssl-certfile", value_name = "FILE")]
    pub(crate) tls_certificate: Option<PathBuf>,
    /// PEM file with the key of the server's certificate
    #[arg(long, alias = "ssl-keyfile", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// PEM file of the authorities for client certificates
    #[arg(long, alias = "ssl-ca-certs", value_name = "FILE")]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// Address that HTTP will be served on
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: SocketAddr,
    /// Unix socket that HTTP will be served on instead
    #[arg(long, value_name = "PATH", value_parser = parse_socket, conflicts_with = "listen")]
    pub(crate) uds: Option<PathBuf>,
    /// Address that workers and front ends will connect to
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8001")]
    pub(crate) cluster_listen: SocketAddr,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// File with the cluster's secret
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
    /// Accept that the node runs without a secret
    #[arg(long)]
    pub(crate) insecure_no_auth: bool,
    /// Model folder, or a name on Hugging Face's hub that was downloaded before [default:
    /// models/demo, for a coordinator]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// Keys that go before those of the model's config.json, as when serving
    #[arg(long, value_name = "JSON", value_parser = ConfigOverrides::parse)]
    pub(crate) hf_overrides: Option<ConfigOverrides>,
    /// Workers per replica
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: u32,
    /// Quantise weights while loading: int8 or none, as when serving
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    /// Speculative decoding, as when serving; a draft model takes memory too
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub(crate) speculative_config: Option<Speculative>,
    /// Workers on this host: a number, or all for one per GPU [default: 1 with --coordinator,
    /// otherwise --tensor-parallel]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub(crate) workers: Option<Workers>,
    /// KV cache memory per worker, in bytes or with a suffix KiB, MiB or GiB
    #[arg(long, alias = "kv-cache-memory-bytes", value_name = "BYTES", default_value = "512MiB", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory: u64,
    /// Maximum number of sequences in one engine step; of models with linear attention each takes
    /// memory
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_num_seqs: u32,
    /// Number of states kept for prefix caching by models with linear attention, each of which
    /// takes memory [default: half of --max-num-seqs, at least 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub(crate) prefix_states: Option<u32>,
    /// Compute every prompt from its beginning: no states are kept
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Host memory per worker for requests that are preempted when the KV cache is full: in GiB, or
    /// bytes with a suffix KiB, MiB or GiB
    #[arg(long, value_name = "GIB", default_value = "0", value_parser = parse_swap_space)]
    pub(crate) swap_space: u64,
    /// NVIDIA's management library (NVML), if the system's loader does not find it
    #[arg(long, value_name = "FILE")]
    pub(crate) nvml_lib: Option<PathBuf>,
}

/// Removes from the command line of `tutti doctor` the options that only other roles know: it
/// accepts the options of the node to be.
pub(crate) fn without_others(args: &[OsString]) -> Vec<OsString> {
    if args.get(1).is_none_or(|role| role != "doctor") {
        return args.to_vec();
    }
    let command = super::options::command();
    let of = |role: &str, name: &str| -> Option<clap::builder::ValueRange> {
        let subcommand = command.find_subcommand(role)?;
        let found = subcommand.get_arguments().find(|it| {
            let aliases = it.get_all_aliases().unwrap_or_default();
            it.get_long() == Some(name) || aliases.contains(&name)
        })?;
        let flag = !found.get_action().takes_values();
        Some(if flag { 0.into() } else { found.get_num_args().unwrap_or_else(|| 1.into()) })
    };
    let mut kept = Vec::with_capacity(args.len());
    // Number of values that may still follow the removed option.
    let mut values = 0;
    for argument in args {
        let text = argument.to_str().unwrap_or_default();
        let Some(option) = text.strip_prefix("--") else {
            match values {
                0 => kept.push(argument.clone()),
                _ => values -= 1,
            }
            continue;
        };
        let (name, has_value) = option.split_once('=').map_or((option, false), |it| (it.0, true));
        let others = ["up", "coordinator", "worker", "frontend"];
        let other = others.iter().find_map(|role| of(role, name));
        match other.filter(|_| of("doctor", name).is_none()) {
            Some(range) => values = if has_value { 0 } else { range.max_values() },
            None => {
                values = 0;
                kept.push(argument.clone());
            }
        }
    }
    kept
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// As it should be.
    Ok,
    /// It would start, but with a problem.
    Warn,
    /// It would not start or not work.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// What was checked.
    check: &'static str,
    level: Severity,
    /// The finding, in one line.
    found: String,
    /// How to fix it; absent if there is nothing to fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Severity::Ok, found: one_line(&found.into()), fix: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        let fix = Some(one_line(&fix.into()));
        Self { check, level: Severity::Warn, found: one_line(&found.into()), fix }
    }

    fn fail(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: Severity::Fail, ..Self::warn(check, found, fix) }
    }

    fn line(&self) -> String {
        let level = match self.level {
            Severity::Ok => "ok",
            Severity::Warn => "warn",
            Severity::Fail => "fail",
        };
        let fix = self.fix.as_ref().map(|fix| format!("; to fix it: {fix}")).unwrap_or_default();
        format!("{level:<5} {:<14} {}{fix}", self.check, self.found)
    }
}

/// Joins the lines of another component's message: the table has one line per finding.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

pub(crate) fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let workers = match (args.workers, &args.coordinator) {
        (Some(Workers::Number(number)), _) => number,
        (Some(Workers::All), _) => gpu::count(args.nvml_lib.as_deref()).max(1),
        (None, Some(_)) => 1,
        (None, None) => args.tensor_parallel,
    };
    let (secret, finding) = read_secret(args);
    let mut findings = vec![finding];
    findings.extend(certificate(args));
    findings.extend(network::check(args, secret.as_ref()));
    findings.extend(model::check(args, workers));
    findings.push(host::shared_memory(Path::new("/dev/shm"), workers, args.tensor_parallel));
    findings.push(host::open_files(Path::new("/proc/self/limits")));
    findings.push(host::processors(cores(), workers));
    findings.push(gpu::check(args.nvml_lib.as_deref()));
    let failed = findings.iter().filter(|finding| finding.level == Severity::Fail).count();
    if args.json {
        let version = env!("CARGO_PKG_VERSION");
        let all = json!({"version": version, "ok": failed == 0, "checks": findings});
        print_line(&all.to_string());
    } else {
        findings.iter().for_each(|finding| print_line(&finding.line()));
    }
    match failed {
        0 => Ok(()),
        n => Err(CliError::Failed(format!("{n} of {} checks failed", findings.len()))),
    }
}

/// Reads the secret that the node would have.
fn read_secret(args: &DoctorArgs) -> (Option<shared::wire::keyring::Keyring>, Finding) {
    const CHECK: &str = "secret";
    let secret = match secret::read_file(args.cluster_secret_file.as_deref()) {
        Ok(secret) => secret,
        Err(error) => {
            let fix = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; the same file on \
                       every node";
            return (None, Finding::fail(CHECK, error.to_string(), fix));
        }
    };
    let source = match &args.cluster_secret_file {
        Some(file) => format!("{} is readable only by its owner", file.display()),
        None => "TUTTI_CLUSTER_SECRET is set".to_owned(),
    };
    let listens = args.coordinator.is_none() && !args.cluster_listen.ip().is_loopback();
    let finding = match &secret {
        Some(_) => Finding::ok(CHECK, source),
        None if listens && !args.insecure_no_auth => Finding::fail(
            CHECK,
            format!(
                "none is given, but other hosts can reach --cluster-listen {}",
                args.cluster_listen
            ),
            "--cluster-secret-file FILE, the same on every node",
        ),
        None => Finding::ok(CHECK, "none is given, which suits only a cluster on one host"),
    };
    (secret, finding)
}

/// Checks whether the server to be could speak TLS, if it is to.
fn certificate(args: &DoctorArgs) -> Option<Finding> {
    const CHECK: &str = "certificate";
    let (certificate, key) = (args.tls_certificate.as_ref(), args.tls_key.as_ref());
    let files = match api::tls_files(certificate, key, args.tls_client_ca.as_ref()) {
        Ok(files) => files?,
        Err(error) => {
            let fix = "PEM files of the certificate and of its key";
            return Some(Finding::fail(CHECK, error.to_string(), fix));
        }
    };
    Some(match files.check() {
        Ok(()) if is_authority(&files.certificate) => {
            let found = format!(
                "{} is a CA certificate (CA:TRUE): curl accepts it, but `tutti status` and many \
                 other clients reject it",
                files.certificate.display()
            );
            Finding::warn(
                CHECK,
                found,
                "openssl req -x509 .. -addext basicConstraints=critical,CA:FALSE",
            )
        }
        Ok(()) => {
            let found = format!("{} and its key belong together", files.certificate.display());
            Finding::ok(CHECK, found)
        }
        Err(error) => {
            let fix = "PEM files of the certificate and of its key, which only its owner may read";
            Finding::fail(CHECK, error.to_string(), fix)
        }
    })
}

/// Whether clients like ours reject the certificate for a server because it is an authority's;
/// tested with such a client.
fn is_authority(certificate: &Path) -> bool {
    let chain = read_certificates("--tls-certificate", certificate).unwrap_or_default();
    let (Some(leaf), Ok(name)) = (chain.first(), ServerName::try_from("localhost")) else {
        return false;
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates([leaf.clone()]);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
    verifier.is_ok_and(|verifier| {
        let now = rustls::pki_types::UnixTime::now();
        let judged = verifier.verify_server_cert(leaf, &[], &name, &[], now);
        judged.is_err_and(|error| format!("{error:?}").contains("CaUsedAsEndEntity"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_node_to_be_are_taken() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let kept = |text: &str| without_others(&words(text));
        let given = "tutti doctor --block-size 32 --tensor-parallel 2 --served-model-name a b \
                     --access-log --dtype=auto --model m --node n";
        assert_eq!(kept(given), words("tutti doctor --tensor-parallel 2 --model m"));
        let given = words("tutti up --max-num-seqs 4");
        assert_eq!(without_others(&given), given, "of another role");
        assert_eq!(kept("tutti doctor --modle m"), words("tutti doctor --modle m"));
    }

    #[test]
    fn a_finding_is_one_line_with_its_remedy() {
        let finding = Finding::fail("model", "two\nlines", "do this");
        assert_eq!(finding.line(), "fail  model          two lines; to fix it: do this");
        assert_eq!(Finding::ok("model", "fine").line(), "ok    model          fine");
    }
}
