//! HTTPS: certificates from files, read again when they change.
//!
//! A bad new file is logged and what was read before stays, so that a certificate that is replaced
//! wrongly is no outage before the old one has expired. HTTP/1.1 is all that is offered: HTTP/2's
//! streams would be bounded by none of the limits that hold for connections, and a stream of
//! events gains nothing by it.
//!
//! - `files`: reading and checking
//! - `watch`: when files are read again
mod files;
mod watch;

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, Weak};
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
use self::watch::{Stamp, Stamps, Watch};

/// How long a handshake may take.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(3);
/// Between two looks at the files.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The files that a server's TLS is made of, all of them PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, then those that lead to its authority.
    pub certificate: PathBuf,
    /// The key of that certificate.
    pub key: PathBuf,
    /// Authorities of clients, where clients have to show a certificate.
    pub client_authority: Option<PathBuf>,
}

/// TLS of a server, from files that are watched as long as this is in use. Clones are the same.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    files: Arc<TlsFiles>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

/// TLS cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] TlsFileError),
    /// The library refuses what it is asked for.
    #[error("TLS: {0}")]
    Library(#[from] rustls::Error),
    /// The files cannot be watched.
    #[error("cannot start the thread that watches the files of TLS: {0}")]
    Thread(io::Error),
}

/// What was read of the files.
struct Loaded {
    key: Arc<CertifiedKey>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// What handshakes use now.
struct Current(RwLock<Loaded>);

impl TlsFiles {
    /// Reads and checks the files, and keeps nothing.
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

    fn stamps(&self) -> Stamps {
        let files = [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()];
        Stamps(files.into_iter().flatten().map(|file| stamp(file)).collect())
    }
}

impl Tls {
    /// Reads the files, and looks at them every so often from then on.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn start(files: TlsFiles, every: Duration) -> Result<Self, TlsError> {
        // Before they are read: what changes meanwhile is read again.
        let watch = Watch::new(files.stamps());
        let current = Arc::new(Current(RwLock::new(files.load()?)));
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?;
        let builder = match files.client_authority {
            Some(_) => builder.with_client_cert_verifier(Arc::new(Clients(current.clone()))),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(current.clone());
        if files.client_authority.is_some() {
            // A session that goes on is not asked for its certificate again, which an authority
            // that is gone may have signed.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        let files = Arc::new(files);
        let (watched, seen) = (files.clone(), Arc::downgrade(&current));
        let thread = std::thread::Builder::new().name("tls-files".to_owned());
        let thread = thread.spawn(move || keep_current(&watched, watch, every, &seen));
        thread.map_err(TlsError::Thread)?;
        Ok(Self { config: Arc::new(config), files })
    }

    /// What a listener is given.
    #[must_use]
    pub fn config(&self) -> ServerConfig {
        (*self.config).clone()
    }
}

/// The scheme of URLs of a server with this TLS.
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

fn stamp(file: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(file).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        bytes: metadata.size(),
    })
}

/// Reads the files again when they have changed, until nobody uses what was read.
fn keep_current(files: &TlsFiles, mut watch: Watch, every: Duration, current: &Weak<Current>) {
    let mut said = String::new();
    loop {
        std::thread::sleep(every);
        let Some(current) = current.upgrade() else { return };
        if !watch.look(files.stamps()) {
            continue;
        }
        let loaded = files.load();
        watch.has_read(loaded.is_err());
        match loaded {
            Ok(loaded) => {
                said.clear();
                *current.0.write().unwrap_or_else(PoisonError::into_inner) = loaded;
                tracing::info!(
                    certificate = %files.certificate.display(),
                    "files of TLS have changed and are in use from now on"
                );
            }
            // Once, however often it is tried.
            Err(error) if error.to_string() == said => {}
            Err(error) => {
                tracing::error!(
                    %error,
                    "files of TLS have changed and cannot be used: those read before stay in use"
                );
                said = error.to_string();
            }
        }
    }
}

impl Current {
    fn key(&self) -> Arc<CertifiedKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).key.clone()
    }

    fn clients(&self) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
        let clients = self.0.read().unwrap_or_else(PoisonError::into_inner).clients.clone();
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

/// Checks clients' certificates by the authorities of the day.
#[derive(Debug)]
struct Clients(Arc<Current>);

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A hint that may be absent, and could not change with the files.
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
