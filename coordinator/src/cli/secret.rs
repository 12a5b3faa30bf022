//! The cluster secret: where it comes from, and when it is required.
use std::net::SocketAddr;
use std::path::Path;

use coordinator::http::watch::LOOK_EVERY;
use coordinator::secret_file;
use shared::wire::keyring::Keyring;
use zeroize::Zeroizing;

use super::CliError;
use super::options::CommonArgs;

/// The variable that holds the secret if there is no file.
const VARIABLE: &str = "TUTTI_CLUSTER_SECRET";

/// Reads the secrets, if any are given, and follows their file from then on.
pub(crate) fn read(args: &CommonArgs) -> Result<Option<Keyring>, CliError> {
    let follow = |file: &Path| secret_file::start(file, LOOK_EVERY);
    given(args.cluster_secret_file.as_deref(), follow)
}

/// Reads the secrets of this file, or of the environment, once.
pub(crate) fn read_file(file: Option<&Path>) -> Result<Option<Keyring>, CliError> {
    given(file, secret_file::read)
}

fn given(
    file: Option<&Path>,
    read: impl FnOnce(&Path) -> Result<Keyring, String>,
) -> Result<Option<Keyring>, CliError> {
    if let Some(file) = file {
        return read(file).map(Some).map_err(|problem| {
            CliError::Usage(format!("--cluster-secret-file {}: {problem}", file.display()))
        });
    }
    std::env::var_os(VARIABLE)
        .map(|secret| {
            Keyring::read(&Zeroizing::new(secret.into_encoded_bytes()))
                .map_err(|error| CliError::Usage(format!("{VARIABLE}: {error}")))
        })
        .transpose()
}

/// Rejects an address that other hosts can reach, unless they must authenticate.
pub(crate) fn require(
    address: SocketAddr,
    secret: Option<&Keyring>,
    insecure: bool,
) -> Result<(), CliError> {
    if address.ip().is_loopback() || secret.is_some() || insecure {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "--cluster-listen {address} can be reached from other hosts, and any process that joins \
         there receives prompts and chooses tokens: give every node the same secret (head -c 32 \
         /dev/urandom | base64 > FILE; chmod 600 FILE; --cluster-secret-file FILE), or set \
         --insecure-no-auth"
    )))
}
