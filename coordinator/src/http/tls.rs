//! HTTPS: certificates from files, reread when they change.
//!
//! A bad new file is logged and the old contents stay, so that a wrongly replaced certificate
//! causes no outage before the old one expires. Only HTTP/1.1 is offered: HTTP/2's streams would
//! escape the limits per connection, and a stream of events gains nothing from it.
//!
//! - `files`: reads and checks the files
mod files;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};

pub use self::files::{TlsFileError, read_authorities, read_certificates, read_pair};
use shared::metrics::labels::SecretFile;

use super::watch::{self, Watch};
use crate::metrics::FrontendStats;

/// Time limit for a handshake.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(3);

/// The files of a server's TLS, all in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by those that lead to its authority.
    pub certificate: PathBuf,
    /// The key of that certificate.
    pub key: PathBuf,
    /// Authorities of clients, if clients must present a certificate.
    pub client_authority: Option<PathBuf>,
}

/// A server's TLS, from files that are watched as long as this is in use. Clones share it.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    files: Arc<TlsFiles>,
    current: Arc<Current>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] TlsFileError),
    /// The library rejects the configuration.
    #[error("TLS: {0}")]
    Library(#[from] rustls::Error),
    /// The files cannot be watched.
    #[error("cannot start the thread that watches the TLS files: {0}")]
    Thread(io::Error),
}

/// Contents of the files.
struct Loaded {
    key: Arc<CertifiedKey>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// What handshakes use at present.
struct Current {
    loaded: RwLock<Loaded>,
    /// Counts reloads of files.
    stats: OnceLock<FrontendStats>,
}

impl TlsFiles {
    /// Reads and checks the files without keeping anything.
    ///
    /// # Errors
    /// [`TlsFileError`].
    pub fn check(&self) -> Result<(), TlsFileError> {
        self.load().map(|_| ())
    }

    fn load(&self) -> Result<Loaded, TlsFileError> {
        let certificate = ("--tls-certificate", self.certificate.as_path());
        let key = read_pair(certificate, ("--tls-key", &self.key))?;
        let clients = self.client_authority.as_deref().map(clients_of).transpose()?;
        Ok(Loaded { key: Arc::new(key), clients })
    }

    fn paths(&self) -> Vec<PathBuf> {
        let files = [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()];
        files.into_iter().flatten().cloned().collect()
    }
}

impl Tls {
    /// Reads the files, and checks them for changes at this interval.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn start(files: TlsFiles, every: Duration) -> Result<Self, TlsError> {
        // Before reading, so that changes meanwhile cause another reading.
        let paths = files.paths();
        let watch = Watch::new(watch::stamps(&paths));
        let (loaded, stats) = (RwLock::new(files.load()?), OnceLock::new());
        let current = Arc::new(Current { loaded, stats });
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?;
        let builder = match files.client_authority {
            Some(_) => builder.with_client_cert_verifier(Arc::new(Clients(current.clone()))),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(current.clone());
        if files.client_authority.is_some() {
            // A resumed session does not present its certificate again, which a removed authority
            // may have signed.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        let files = Arc::new(files);
        let (watched, seen) = (files.clone(), Arc::downgrade(&current));
        let thread = std::thread::Builder::new().name("tls-files".to_owned());
        let read = move |current: &Arc<Current>| current.read_again(&watched);
        let work = move || watch::keep_current("TLS files", &paths, watch, every, &seen, read);
        thread.spawn(work).map_err(TlsError::Thread)?;
        Ok(Self { config: Arc::new(config), files, current })
    }

    /// Sets where reloads of files are counted.
    pub(super) fn count_in(&self, stats: &FrontendStats) {
        let _ = self.current.stats.set(stats.clone());
    }

    /// Returns the configuration for a listener.
    #[must_use]
    pub fn config(&self) -> ServerConfig {
        (*self.config).clone()
    }
}

/// Returns the URL scheme of a server with this TLS.
#[must_use]
pub fn scheme(tls: Option<&Tls>) -> &'static str {
    if tls.is_some() { "https" } else { "http" }
}

fn clients_of(file: &Path) -> Result<Arc<dyn ClientCertVerifier>, TlsFileError> {
    const OPTION: &str = "--tls-client-ca";
    let roots = read_authorities(OPTION, file)?;
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
    verifier.map(|verifier| verifier as Arc<dyn ClientCertVerifier>).map_err(|error| TlsFileError {
        option: OPTION,
        file: file.to_owned(),
        problem: error.to_string(),
    })
}

impl Current {
    fn read_again(&self, files: &TlsFiles) -> Result<(), String> {
        let loaded = files.load().map_err(|error| error.to_string());
        if let Some(stats) = self.stats.get() {
            stats.reloaded(SecretFile::Tls, loaded.is_ok());
        }
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded?;
        Ok(())
    }

    fn key(&self) -> Arc<CertifiedKey> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).key.clone()
    }

    fn clients(&self) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
        let clients = self.loaded.read().unwrap_or_else(PoisonError::into_inner).clients.clone();
        clients.ok_or_else(|| rustls::Error::General("no authority of clients".to_owned()))
    }
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Current")
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.key())
    }
}

/// Checks clients' certificates against the present authorities.
#[derive(Debug)]
struct Clients(Arc<Current>);

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // An optional hint, which could not follow changes of the files.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0.clients()?.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.clients()?.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.clients()?.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.clients().map(|clients| clients.supported_verify_schemes()).unwrap_or_default()
    }
}
