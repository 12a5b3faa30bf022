//! Reads and checks files of TLS: a certificate chain, its key, authorities.
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use crate::private_file;

/// Maximum size of a TLS file in bytes, five times a bundle of all public authorities.
const FILE_MAX: u64 = 1 << 20;

/// A TLS file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{option} {}: {problem}", file.display())]
pub struct TlsFileError {
    /// The option that names the file.
    pub option: &'static str,
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// Reads a chain and its key, which must belong together.
///
/// The chain is PEM: the own certificate first, then those that lead to the authority. The key is
/// also PEM: PKCS#8, PKCS#1 (RSA) or SEC1 (EC), unencrypted, and not readable by other users.
///
/// # Errors
/// [`TlsFileError`], naming the file at fault by its option.
pub fn read_pair(
    (certificate_option, certificate): (&'static str, &Path),
    (key_option, key): (&'static str, &Path),
) -> Result<CertifiedKey, TlsFileError> {
    let chain = read_certificates(certificate_option, certificate)?;
    let at = |problem: String| TlsFileError { option: key_option, file: key.to_owned(), problem };
    private_file::check(key).map_err(at)?;
    let text = read(key).map(Zeroizing::new).map_err(at)?;
    // The file's contents are secret and not repeated.
    let parsed = PrivateKeyDer::from_pem_slice(&text).map_err(|_| {
        let encrypted = text.windows(10).any(|word| word == b"ENCRYPTED ");
        at(if encrypted {
            "the key is encrypted: decrypt it (openssl pkey -in FILE -out NEW)".to_owned()
        } else {
            "it contains no private key in PEM form (PKCS#8, PKCS#1 or SEC1)".to_owned()
        })
    })?;
    CertifiedKey::from_der(chain, parsed, &ring::default_provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            at(format!("it is not the key of the first certificate in {}", certificate.display()))
        }
        error => at(format!("the key cannot be used: {error}")),
    })
}

/// Reads certificates of authorities.
///
/// # Errors
/// [`TlsFileError`], also if there is none in the file.
pub fn read_authorities(
    option: &'static str,
    file: &Path,
) -> Result<Arc<RootCertStore>, TlsFileError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(option, file)? {
        roots.add(certificate).map_err(|error| TlsFileError {
            option,
            file: file.to_owned(),
            problem: format!("an authority's certificate cannot be used: {error}"),
        })?;
    }
    Ok(Arc::new(roots))
}

/// Reads a PEM file of certificates, at least one.
///
/// # Errors
/// [`TlsFileError`].
pub fn read_certificates(
    option: &'static str,
    file: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let at = |problem: String| TlsFileError { option, file: file.to_owned(), problem };
    let text = read(file).map_err(at)?;
    let mut chain = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let number = chain.len() + 1;
        let certificate = certificate
            .map_err(|_| at(format!("certificate {number} in it is not complete PEM")))?;
        ParsedCertificate::try_from(&certificate)
            .map_err(|error| at(format!("certificate {number} in it cannot be used: {error}")))?;
        chain.push(certificate);
    }
    if chain.is_empty() {
        return Err(at("it contains no certificate in PEM form".to_owned()));
    }
    Ok(chain)
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    let opened = File::open(file).map_err(|error| error.to_string())?;
    opened.take(FILE_MAX + 1).read_to_end(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > FILE_MAX {
        return Err(format!("it has more than {FILE_MAX} bytes"));
    }
    Ok(text)
}
