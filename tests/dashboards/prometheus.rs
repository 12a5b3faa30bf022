//! A real Prometheus server that scrapes one address, and its HTTP API.
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::tools;

/// A `prometheus` process with its storage in a scratch folder. Killed on drop.
#[derive(Debug)]
pub(crate) struct Prometheus {
    child: Child,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    /// Starts a server with the configuration `shipped`, except that it scrapes `target` and
    /// evaluates the rules every second. `None` if the program is not installed, which continuous
    /// integration does not accept.
    pub(crate) async fn start(target: &str, shipped: &Path) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let rules = format!("- {}/rules/", shipped.parent().unwrap().display());
        let config = std::fs::read_to_string(shipped).unwrap();
        let quick = [": 5s", ": 4s", ": 15s"].iter().fold(config, |text, old| {
            assert!(text.contains(old), "no interval{old}");
            text.replace(old, ": 1s")
        });
        let config = quick.replace("127.0.0.1:8000", target).replace("- rules/", &rules);
        assert!(config.contains(target) && config.contains(&rules), "{config}");
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        // The server does not accept port 0, so use a port that was free a moment ago.
        let address = format!("127.0.0.1:{}", free_port());
        let Some(program) = tools::find("prometheus") else {
            assert!(std::env::var_os("CI").is_none(), "prometheus is needed in CI");
            crate::notice("prometheus is not here: no query was run (tests/run gets it)");
            return None;
        };
        let child = Command::new(program)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let client = Client::new(&format!("http://{address}")).unwrap();
        let mut server = Self { child, client, _folder: folder };
        server.wait_ready().await;
        Some(server)
    }

    async fn wait_ready(&mut self) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(30) {
            if let Ok(reply) = self.client.get("/-/ready").await
                && reply.status == 200
            {
                return;
            }
            assert!(self.child.try_wait().unwrap().is_none(), "prometheus ended");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("prometheus is not ready in 30 s");
    }

    /// The API's `data`, or its error.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, String> {
        let reply = self.client.get(path).await.map_err(|error| error.to_string())?;
        if reply.status == 200 && reply.body["status"] == "success" {
            Ok(reply.body["data"].clone())
        } else {
            Err(format!("{}: {}", reply.status, reply.body))
        }
    }

    /// Returns the values of an instant query without NaN: 0 / 0 is no result.
    pub(crate) async fn query(&self, query: &str) -> Result<Vec<f64>, String> {
        let data = self.get(&format!("/api/v1/query?query={}", encoded(query))).await?;
        let samples = data["result"].as_array().ok_or("no result")?;
        let values = samples.iter().filter_map(|sample| sample["value"][1].as_str()?.parse().ok());
        Ok(values.filter(|value: &f64| !value.is_nan()).collect())
    }

    /// Returns the number of values of `label` among `series`.
    pub(crate) async fn label_values(&self, series: &str, label: &str) -> Result<usize, String> {
        let path = format!("/api/v1/label/{label}/values?match[]={}", encoded(series));
        Ok(self.get(&path).await?.as_array().map_or(0, Vec::len))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Percent-encodes `text` for a URL's query.
fn encoded(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(byte);
    text.bytes()
        .map(
            |byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") },
        )
        .collect()
}
