//! How commands reach a running server over HTTP or HTTPS: which authorities they trust, and which
//! credentials they present.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coordinator::http::listener::UNIX_SCHEME;
use coordinator::http::tls::{read_authorities, read_certificates, read_pair};
use coordinator::standby;
use rustls::crypto::ring;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

use super::CliError;

/// Options of who asks an `https://` server.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TrustArgs {
    /// PEM file of the authorities to trust for the certificate of an https:// server [default:
    /// those of this host]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// PEM file of the client certificate to present to a server with --tls-client-ca
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_client_certificate: Option<PathBuf>,
    /// PEM file with the key of --tls-client-certificate, readable only by its owner
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_client_key: Option<PathBuf>,
}

impl TrustArgs {
    /// Whether any of them is given.
    pub(crate) fn given(&self) -> bool {
        self.tls_ca.is_some() || self.tls_client_certificate.is_some()
    }
}

/// Returns the URL of a server, which may be given without a scheme.
pub(crate) fn base_url(server: &str) -> String {
    standby::url(server.trim_end_matches('/'))
}

/// Makes the client for the server at `url`, which keeps up to `connections` for its next requests.
pub(crate) fn make_agent(
    url: &str,
    deadline: Duration,
    trust: &TrustArgs,
    connections: usize,
) -> Result<Agent, CliError> {
    if url.starts_with(UNIX_SCHEME) {
        return Err(CliError::Usage(format!(
            "{url}: commands reach no Unix socket: give the coordinator an address (--listen), and \
             the socket (--uds) to a front end"
        )));
    }
    let config = Agent::config_builder()
        .timeout_global(Some(deadline))
        .http_status_as_error(false)
        .max_idle_connections(connections)
        .max_idle_connections_per_host(connections);
    let identity = match (&trust.tls_client_certificate, &trust.tls_client_key) {
        (Some(certificate), Some(key)) => Some(identity(&OPTIONS, certificate, key)?),
        (None, None) => None,
        _ => {
            let message =
                "--tls-client-certificate and --tls-client-key belong together: give both";
            return Err(CliError::Usage(message.to_owned()));
        }
    };
    if !url.starts_with("https://") {
        if trust.given() {
            return Err(CliError::Usage(format!(
                "--tls-ca and --tls-client-certificate are for https:// servers; {url} is not one"
            )));
        }
        return Ok(config.build().into());
    }
    let tls = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&authorities(
            OPTIONS.authorities,
            trust.tls_ca.as_deref(),
        )?))
        .client_cert(identity);
    Ok(config.tls_config(tls.build()).build().into())
}

/// Describes a failed request to `url`, with a remedy if the error's own text has none.
pub(crate) fn describe_failure(url: &str, error: &ureq::Error) -> String {
    let text = error.to_string();
    if text.contains("CaUsedAsEndEntity") {
        return format!("{url}: {AUTHORITY_AS_SERVER}");
    }
    if text.contains("UnknownIssuer") {
        return format!(
            "{url}: {text}: no authority that is trusted here signed the server's certificate: \
             name its authority's file with --tls-ca"
        );
    }
    let plain = url.strip_prefix("http://");
    if let Some(rest) = plain
        && is_no_http(error)
    {
        let host = rest.split('/').next().unwrap_or(rest);
        return format!("{url}: {text}: if the server speaks HTTPS, try https://{host}");
    }
    // A TLS client's error upon an HTTP answer.
    if let Some(rest) = url.strip_prefix("https://")
        && text.contains("InvalidContentType")
    {
        let host = rest.split('/').next().unwrap_or(rest);
        return format!("{url}: the server does not speak HTTPS: try http://{host}");
    }
    format!("{url}: {text}")
}

/// Explains a certificate marked as an authority's, and how to make another.
pub(crate) const AUTHORITY_AS_SERVER: &str = "the server's certificate is a CA certificate \
     (CA:TRUE), which TLS libraries like this one reject for a server: make one with `openssl req \
     -x509 .. -addext basicConstraints=critical,CA:FALSE`, or have your own authority sign one";

/// Whether the answer was not HTTP at all, such as an HTTPS server's to a plain request.
fn is_no_http(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Protocol(_) | ureq::Error::Http(_) => true,
        ureq::Error::Io(error) => matches!(
            error.kind(),
            std::io::ErrorKind::UnexpectedEof
                | std::io::ErrorKind::ConnectionReset
                | std::io::ErrorKind::InvalidData
        ),
        _ => false,
    }
}

/// What names the files, for errors about them.
pub(crate) struct FileNames {
    pub(crate) authorities: &'static str,
    pub(crate) certificate: &'static str,
    pub(crate) key: &'static str,
}

const OPTIONS: FileNames = FileNames {
    authorities: "--tls-ca",
    certificate: "--tls-client-certificate",
    key: "--tls-client-key",
};

/// Reads whom to trust: the file that `name` names, or the authorities of this host.
pub(crate) fn authorities(
    name: &'static str,
    file: Option<&Path>,
) -> Result<Vec<Certificate<'static>>, CliError> {
    let certificates = match file {
        Some(file) => {
            read_authorities(name, file).map_err(|error| CliError::Usage(error.to_string()))?;
            read_certificates(name, file).map_err(|error| CliError::Usage(error.to_string()))?
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            if found.certs.is_empty() {
                let why = found.errors.first().map(|error| format!(" ({error})"));
                return Err(CliError::Usage(format!(
                    "this host trusts no authorities{}: name the server's with {name} FILE",
                    why.unwrap_or_default()
                )));
            }
            found.certs
        }
    };
    Ok(certificates.iter().map(|der| Certificate::from_der(der).to_owned()).collect())
}

/// Reads what to present to a server.
pub(crate) fn identity(
    names: &FileNames,
    certificate: &Path,
    key: &Path,
) -> Result<ClientCert, CliError> {
    let options = ((names.certificate, certificate), (names.key, key));
    let failed = |error: &dyn std::fmt::Display| CliError::Usage(error.to_string());
    // Both are checked like a server's.
    let pair = read_pair(options.0, options.1).map_err(|error| failed(&error))?;
    let chain: Vec<_> = pair.cert.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
    let at =
        |problem: String| CliError::Usage(format!("{} {}: {problem}", names.key, key.display()));
    let text = std::fs::read(key).map_err(|error| at(error.to_string()))?;
    let key = PrivateKey::from_pem(&text).map_err(|error| at(error.to_string()))?;
    Ok(ClientCert::new_with_certs(&chain, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str, trust: &TrustArgs, words: &[&str]) {
        let error = make_agent(url, Duration::from_secs(1), trust, 1).err().unwrap().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }

    #[test]
    fn a_server_without_a_scheme_speaks_http() {
        assert_eq!(base_url("10.0.0.1:8000"), "http://10.0.0.1:8000");
        assert_eq!(base_url("https://host:1/"), "https://host:1");
    }

    #[test]
    fn a_unix_socket_is_not_taken_for_a_host() {
        let url = base_url("unix:/run/tutti.sock");
        assert_eq!(url, "unix:/run/tutti.sock");
        refused(&url, &TrustArgs::default(), &["unix:/run/tutti.sock", "--listen", "front end"]);
    }

    #[test]
    fn an_unknown_authority_is_to_be_named() {
        let error = std::io::Error::other("invalid peer certificate: UnknownIssuer");
        let text = describe_failure("https://h:1", &ureq::Error::Io(error));
        assert!(text.starts_with("https://h:1: ") && text.contains("--tls-ca"), "{text}");
    }

    #[test]
    fn half_of_a_setting_and_files_that_are_none_are_refused() {
        let trust = |ca: Option<&str>, certificate: Option<&str>, key: Option<&str>| TrustArgs {
            tls_ca: ca.map(PathBuf::from),
            tls_client_certificate: certificate.map(PathBuf::from),
            tls_client_key: key.map(PathBuf::from),
        };
        refused("https://h", &trust(Some("/no/such"), None, None), &["--tls-ca /no/such"]);
        refused("https://h", &trust(None, Some("c"), None), &["--tls-client-key", "both"]);
        refused("http://h", &trust(Some("c"), None, None), &["--tls-ca", "https://"]);
        let none = trust(None, Some("/no/c"), Some("/no/k"));
        refused("https://h", &none, &["--tls-client-certificate /no/c"]);
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str();
        refused("https://h", &trust(path, None, None), &["--tls-ca", "no certificate"]);
    }
}
