//! The cluster secret: where it comes from, and when it is required.
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use coordinator::private_file;
use shared::wire::auth::Secret;
use zeroize::Zeroizing;

use super::CliError;
use super::options::CommonArgs;

/// The variable that holds the secret if there is no file.
const VARIABLE: &str = "TUTTI_CLUSTER_SECRET";

/// Reads the secret, if one is given.
pub(crate) fn read(args: &CommonArgs) -> Result<Option<Secret>, CliError> {
    read_file(args.cluster_secret_file.as_deref())
}

/// Reads the secret from this file, or from the environment.
pub(crate) fn read_file(file: Option<&Path>) -> Result<Option<Secret>, CliError> {
    let Some(file) = file else {
        return std::env::var_os(VARIABLE)
            .map(|secret| {
                Secret::new(&Zeroizing::new(secret.into_encoded_bytes()))
                    .map_err(|error| CliError::Usage(format!("{VARIABLE}: {error}")))
            })
            .transpose();
    };
    let at = |problem: String| {
        CliError::Usage(format!("--cluster-secret-file {}: {problem}", file.display()))
    };
    private_file::check(file).map_err(at)?;
    let bytes = fs::read(file).map(Zeroizing::new).map_err(|error| at(error.to_string()))?;
    Secret::new(&bytes).map(Some).map_err(|error| at(error.to_string()))
}

/// Rejects an address that other hosts can reach, unless they must authenticate.
pub(crate) fn require(
    address: SocketAddr,
    secret: Option<&Secret>,
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
