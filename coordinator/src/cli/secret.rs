//! The cluster's secret: where it comes from, and when there has to be one.
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use shared::wire::auth::Secret;

use super::CliError;
use super::options::CommonArgs;

/// The variable that holds the secret where there is no file.
const VARIABLE: &str = "TUTTI_CLUSTER_SECRET";

/// Reads the secret, if one is given.
pub(crate) fn read(args: &CommonArgs) -> Result<Option<Secret>, CliError> {
    read_file(args.cluster_secret_file.as_deref())
}

/// Reads the secret of this file, or of the environment.
pub(crate) fn read_file(file: Option<&Path>) -> Result<Option<Secret>, CliError> {
    let Some(file) = file else {
        return std::env::var_os(VARIABLE)
            .map(|secret| {
                Secret::new(secret.as_encoded_bytes())
                    .map_err(|error| CliError::Usage(format!("{VARIABLE}: {error}")))
            })
            .transpose();
    };
    let at = |problem: String| {
        CliError::Usage(format!("--cluster-secret-file {}: {problem}", file.display()))
    };
    check_private(file).map_err(at)?;
    let bytes = fs::read(file).map_err(|error| at(error.to_string()))?;
    Secret::new(&bytes).map(Some).map_err(|error| at(error.to_string()))
}

/// Whether nobody else may read a file.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check_private(file: &Path) -> Result<(), String> {
    let metadata = fs::metadata(file).map_err(|error| error.to_string())?;
    let own = fs::metadata("/proc/self").map_or(metadata.uid(), |process| process.uid());
    if is_private(metadata.mode(), metadata.uid(), own) {
        return Ok(());
    }
    Err(format!("others may read it (mode {:o}): chmod 600 it", metadata.mode() & 0o777))
}

/// Whether a file of this mode and owner is a secret of a process of user `own`: its owner's alone;
/// of root's files a group may read some, for so systemd (`LoadCredential`) and Kubernetes hand a
/// process what is its own.
fn is_private(mode: u32, owner: u32, own: u32) -> bool {
    let others = if owner == 0 && own != 0 { 0o037 } else { 0o077 };
    mode & others == 0
}

/// Refuses an address that other hosts reach, unless who comes there has to prove something.
pub(crate) fn require(
    address: SocketAddr,
    secret: Option<&Secret>,
    insecure: bool,
) -> Result<(), CliError> {
    if address.ip().is_loopback() || secret.is_some() || insecure {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "--cluster-listen {address} can be reached from other hosts, and whoever joins there gets \
         prompts and chooses tokens: give every node the same secret (head -c 32 /dev/urandom | \
         base64 > FILE; chmod 600 FILE; --cluster-secret-file FILE), or say --insecure-no-auth"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_may_read_what_root_gave_it_and_nothing_else() {
        assert!(is_private(0o100_600, 1000, 1000) && is_private(0o100_600, 0, 0));
        assert!(!is_private(0o100_640, 1000, 1000) && !is_private(0o100_640, 0, 0));
        assert!(is_private(0o100_440, 0, 1000) && is_private(0o100_640, 0, 1000));
        assert!(!is_private(0o100_660, 0, 1000) && !is_private(0o100_644, 0, 1000));
        assert!(!is_private(0o100_604, 1000, 1000) && !is_private(0o100_640, 7, 1000));
    }
}
