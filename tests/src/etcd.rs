//! A real etcd with data of its own, on free loopback ports. Killed on drop.
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::certificates::Certificates;
use crate::fleet::free_port;
use crate::models::repository;

/// A running etcd.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    folder: PathBuf,
    client: u16,
    peer: u16,
    certificates: Option<Certificates>,
}

/// The program: in PATH, or where `tests/run` unpacks it.
fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let unpacked = repository().join("target/tools/usr/bin");
    let folders = std::env::split_paths(&path).chain([unpacked]);
    folders.map(|folder| folder.join("etcd")).find(|file| file.is_file())
}

impl Etcd {
    /// Starts etcd with its data in `folder`. `None`, with a notice, when there is no etcd and this
    /// is not continuous integration.
    ///
    /// # Errors
    /// When it does not start to listen, or in continuous integration without it.
    pub async fn start(folder: &Path) -> Result<Option<Self>, String> {
        Self::launch(folder, None).await
    }

    /// As [`Etcd::start`], with TLS and only for clients that show a certificate.
    ///
    /// # Errors
    /// As [`Etcd::start`].
    pub async fn start_secure(
        folder: &Path,
        certificates: &Certificates,
    ) -> Result<Option<Self>, String> {
        Self::launch(folder, Some(certificates.clone())).await
    }

    async fn launch(
        folder: &Path,
        certificates: Option<Certificates>,
    ) -> Result<Option<Self>, String> {
        let Some(program) = program() else {
            if std::env::var_os("CI").is_some() {
                return Err("etcd is needed in continuous integration".to_owned());
            }
            let notice = "etcd is not here: run tests/run once, which gets it\n";
            let _ = std::io::Write::write_all(&mut std::io::stderr(), notice.as_bytes());
            return Ok(None);
        };
        let (client, peer) = (free_port(), free_port());
        let child = spawn(&program, folder, client, peer, certificates.as_ref())?;
        let etcd = Self { child, folder: folder.to_owned(), client, peer, certificates };
        etcd.wait().await?;
        Ok(Some(etcd))
    }

    /// Where clients reach it.
    #[must_use]
    pub fn endpoint(&self) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.client)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again with its old data and address.
    ///
    /// # Errors
    /// As [`Etcd::start`].
    pub async fn restart(&mut self) -> Result<(), String> {
        self.kill();
        let program = program().ok_or("etcd is gone")?;
        let certificates = self.certificates.as_ref();
        self.child = spawn(&program, &self.folder, self.client, self.peer, certificates)?;
        self.wait().await
    }

    async fn wait(&self) -> Result<(), String> {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            let answers = if self.certificates.is_some() {
                // The test's own client speaks no TLS.
                tokio::net::TcpStream::connect(("127.0.0.1", self.client)).await.is_ok()
            } else {
                let health = reqwest::get(format!("{}/health", self.endpoint())).await;
                health.is_ok_and(|reply| reply.status().is_success())
            };
            if answers {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(format!("etcd at {} does not answer", self.endpoint()))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(
    program: &Path,
    folder: &Path,
    client: u16,
    peer: u16,
    certificates: Option<&Certificates>,
) -> Result<Child, String> {
    let scheme = if certificates.is_some() { "https" } else { "http" };
    let client = format!("{scheme}://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    let mut command = Command::new(program);
    if let Some(certificates) = certificates {
        let (certificate, key) = certificates.pair("server");
        command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        command.arg("--trusted-ca-file").arg(certificates.authority()).arg("--client-cert-auth");
    }
    command
        .args(["--name", "test", "--data-dir"])
        .arg(folder.join("etcd"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", program.display()))
}
