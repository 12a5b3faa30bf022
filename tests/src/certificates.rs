//! An authority with certificates for this host, created by `openssl`.
use std::path::{Path, PathBuf};
use std::process::Command;

/// The PEM files of an authority, and of the certificates that it signed: one for a server on this
/// host, one for a client.
#[derive(Clone, Debug)]
pub struct Certificates {
    folder: PathBuf,
}

impl Certificates {
    /// Creates them in `folder`. `None`, with a notice, when `openssl` is missing outside of
    /// continuous integration.
    ///
    /// # Errors
    /// The error of `openssl`; in continuous integration, also that it is missing.
    pub fn make(folder: &Path) -> Result<Option<Self>, String> {
        if Command::new("openssl").arg("version").output().is_err() {
            if std::env::var_os("CI").is_some() {
                return Err("openssl is needed in continuous integration".to_owned());
            }
            let notice = "openssl is not here: TLS is not tested\n";
            let _ = std::io::Write::write_all(&mut std::io::stderr(), notice.as_bytes());
            return Ok(None);
        }
        let certificates = Self { folder: folder.to_owned() };
        let run = |args: &str| openssl(folder, args);
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
        run(&format!("req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority"))?;
        let extensions = "subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n\
                          extendedKeyUsage=serverAuth,clientAuth\n";
        let file = folder.join("extensions");
        std::fs::write(&file, extensions).map_err(|error| error.to_string())?;
        for name in ["server", "client"] {
            let request = format!("{name}.csr");
            run(&format!("req -new {key} -keyout {name}.key -out {request} -subj /CN={name}"))?;
            run(&format!(
                "x509 -req -in {request} -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
                 -extfile extensions -out {name}.pem"
            ))?;
        }
        Ok(Some(certificates))
    }

    /// The authority's certificate.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    /// The certificate and key of `server` or `client`.
    #[must_use]
    pub fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.folder.join(format!("{name}.pem")), self.folder.join(format!("{name}.key")))
    }
}

/// Runs `openssl ARGS` in `folder`.
///
/// # Errors
/// The output of `openssl`.
pub fn openssl(folder: &Path, args: &str) -> Result<(), String> {
    let output = Command::new("openssl")
        .args(args.split_whitespace())
        .current_dir(folder)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("openssl {args}: {}", String::from_utf8_lossy(&output.stderr)))
}
