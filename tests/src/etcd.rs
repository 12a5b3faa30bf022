//! A real etcd with its own data, on free loopback ports. Killed on drop.
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::certificates::Certificates;
use crate::fleet::free_port;
use crate::tools;

/// How long an answer may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// A running member of etcd.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    member: Member,
}

/// The options of a member.
#[derive(Clone, Debug)]
struct Member {
    program: PathBuf,
    name: String,
    data: PathBuf,
    client: u16,
    peer: u16,
    certificates: Option<Certificates>,
    /// Database quota in bytes, if not etcd's default.
    quota: Option<u64>,
    /// Names and addresses of all members, in etcd's format.
    cluster: String,
}

impl Etcd {
    /// Starts an etcd of one member, with its data in `folder`. `None`, with a notice, when etcd is
    /// missing outside of continuous integration.
    ///
    /// # Errors
    /// When it does not start to listen; in continuous integration, also when it is missing.
    pub async fn start(folder: &Path) -> Result<Option<Self>, String> {
        let members = Self::launch(folder, 1, None).await?;
        Ok(members.and_then(|mut members| members.pop()))
    }

    /// Same as [`Etcd::start`], with TLS, and only for clients with a certificate.
    ///
    /// # Errors
    /// Same as [`Etcd::start`].
    pub async fn start_secure(
        folder: &Path,
        certificates: &Certificates,
    ) -> Result<Option<Self>, String> {
        let members = Self::launch(folder, 1, Some(certificates)).await?;
        Ok(members.and_then(|mut members| members.pop()))
    }

    /// Same as [`Etcd::start`], with a database quota of `quota` bytes.
    ///
    /// # Errors
    /// Same as [`Etcd::start`].
    pub async fn start_small(folder: &Path, quota: u64) -> Result<Option<Self>, String> {
        let Some(mut etcd) = Self::start(folder).await? else { return Ok(None) };
        etcd.member.quota = Some(quota);
        etcd.restart().await?;
        Ok(Some(etcd))
    }

    /// Returns its revision: roughly the number of writes so far. `None` if it does not answer.
    pub async fn revision(&self) -> Option<u64> {
        let url = format!("{}/v3/maintenance/status", self.endpoint());
        let reply = reqwest::Client::new().post(url).body("{}").send().await.ok()?;
        let status: serde_json::Value = reply.json().await.ok()?;
        status["header"]["revision"].as_str()?.parse().ok()
    }

    /// Returns the revision at which the leader of the cluster `tutti` began to lead; `None` if
    /// nobody leads. An etcd that does not answer, or with an error, is asked again.
    ///
    /// # Errors
    /// etcd's last answer, if none was a list.
    pub async fn leads_since(&self) -> Result<Option<u64>, String> {
        let began = Instant::now();
        loop {
            match self.leader().await {
                Err(why) if began.elapsed() >= ANSWERS_WITHIN => return Err(why),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                Ok(since) => return Ok(since),
            }
        }
    }

    async fn leader(&self) -> Result<Option<u64>, String> {
        let url = format!("{}/v3/kv/range", self.endpoint());
        // "/tutti/leader" in base64, as the gateway expects keys.
        let body = r#"{"key": "L3R1dHRpL2xlYWRlcg=="}"#;
        let failed = |error: reqwest::Error| error.to_string();
        let client = reqwest::Client::builder().timeout(ANSWERS_WITHIN).build().map_err(failed)?;
        let reply = client.post(url).body(body).send().await.map_err(failed)?;
        let found: serde_json::Value = reply.json().await.map_err(failed)?;
        // An error, such as a time-out of its own, has no revision.
        if found["header"]["revision"].as_str().is_none() {
            return Err(found.to_string());
        }
        let since = found["kvs"][0]["create_revision"].as_str();
        since.map(|it| it.parse().map_err(|_| found.to_string())).transpose()
    }

    /// Waits this long, and returns the longest that etcd took to answer meanwhile.
    pub async fn slowest_answer(&self, during: Duration) -> Duration {
        let (began, mut slowest) = (Instant::now(), Duration::ZERO);
        while began.elapsed() < during {
            let asked = Instant::now();
            let _ = self.leader().await;
            slowest = slowest.max(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        slowest
    }

    /// Same as [`Etcd::start`], with `count` members.
    ///
    /// # Errors
    /// Same as [`Etcd::start`].
    pub async fn start_cluster(folder: &Path, count: usize) -> Result<Option<Vec<Self>>, String> {
        Self::launch(folder, count, None).await
    }

    async fn launch(
        folder: &Path,
        count: usize,
        certificates: Option<&Certificates>,
    ) -> Result<Option<Vec<Self>>, String> {
        let Some(program) = tools::find("etcd") else {
            if std::env::var_os("CI").is_some() {
                return Err("etcd is needed in continuous integration".to_owned());
            }
            let notice = "etcd is not here: run tests/run once, which gets it\n";
            let _ = std::io::Write::write_all(&mut std::io::stderr(), notice.as_bytes());
            return Ok(None);
        };
        let ports: Vec<(u16, u16)> = (0..count).map(|_| (free_port(), free_port())).collect();
        let peers = ports.iter().enumerate();
        let peers = peers.map(|(index, (_, peer))| format!("m{index}=http://127.0.0.1:{peer}"));
        let cluster = peers.collect::<Vec<_>>().join(",");
        let mut members = Vec::new();
        for (index, (client, peer)) in ports.into_iter().enumerate() {
            let (name, program) = (format!("m{index}"), program.clone());
            let data = folder.join(&name);
            let (cluster, certificates) = (cluster.clone(), certificates.cloned());
            let quota = None;
            let member = Member { program, name, data, client, peer, certificates, quota, cluster };
            members.push(Self { child: member.spawn()?, member });
        }
        for member in &members {
            member.wait().await?;
        }
        Ok(Some(members))
    }

    /// Its data folder.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.member.data
    }

    /// Whether it leads the etcd cluster; `None` if it does not answer.
    pub async fn leads(&self) -> Option<bool> {
        let url = format!("{}/v3/maintenance/status", self.endpoint());
        let reply = reqwest::Client::new().post(url).body("{}").send().await.ok()?;
        let status: serde_json::Value = reply.json().await.ok()?;
        Some(status["leader"].as_str()? == status["header"]["member_id"].as_str()?)
    }

    /// The URL for clients.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.member.endpoint()
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

    /// Restarts it with its old data and address.
    ///
    /// # Errors
    /// Same as [`Etcd::start`].
    pub async fn restart(&mut self) -> Result<(), String> {
        self.kill();
        self.child = self.member.spawn()?;
        self.wait().await
    }

    async fn wait(&self) -> Result<(), String> {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            let answers = if self.member.certificates.is_some() {
                // The test's own client does not speak TLS.
                tokio::net::TcpStream::connect(("127.0.0.1", self.member.client)).await.is_ok()
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

impl Member {
    fn endpoint(&self) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.client)
    }

    fn spawn(&self) -> Result<Child, String> {
        let client = self.endpoint();
        let peer = format!("http://127.0.0.1:{}", self.peer);
        let mut command = Command::new(&self.program);
        if let Some(certificates) = &self.certificates {
            let (certificate, key) = certificates.pair("server");
            command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
            command
                .arg("--trusted-ca-file")
                .arg(certificates.authority())
                .arg("--client-cert-auth");
        }
        command
            .args(["--name", &self.name, "--data-dir"])
            .arg(&self.data)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.cluster])
            .args(self.quota.map(|quota| format!("--quota-backend-bytes={quota}")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.program.display()))
    }
}
