//! HTTPS against `curl`, whose TLS implementation differs from ours: trust, replaced certificates,
//! and clients that never finish a handshake.
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coordinator::http::options::{ApiOptions, ConnectionBound};
use coordinator::http::tls::{Tls, TlsFiles};
use testkit::certificates::{Certificates, openssl};

use crate::rig::Rig;

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with an authority and the certificates it signed; `None` without `openssl`.
struct Authority {
    folder: tempfile::TempDir,
    made: Certificates,
}

impl Authority {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let made = Certificates::make(folder.path()).unwrap()?;
        Some(Self { folder, made })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn files(&self) -> TlsFiles {
        let (certificate, key) = self.made.pair("server");
        TlsFiles { certificate, key, client_authority: None }
    }

    fn openssl(&self, args: &str) {
        openssl(self.folder.path(), args).unwrap();
    }
}

fn serve(files: TlsFiles) -> Rig {
    serve_with(files, ApiOptions::default())
}

fn serve_with(files: TlsFiles, api: ApiOptions) -> Rig {
    let tls = Tls::start(files, Duration::from_millis(50)).unwrap();
    Rig::with_api(&ApiOptions { tls: Some(tls), ..api })
}

/// Runs `curl ARGS https://SERVER PATH`, trusting `authority`; returns its exit code and output.
fn curl(rig: &Rig, authority: &Path, path: &str, args: &[&str]) -> (i32, String) {
    let output = Command::new("curl")
        .args(["--silent", "--max-time", "30", "--noproxy", "*", "--cacert"])
        .arg(authority)
        .args(args)
        .arg(format!("https://{}{path}", rig.address))
        .output()
        .unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// Repeats `curl` until it exits with this code.
fn until(rig: &Rig, authority: &Path, args: &[&str], code: i32) {
    let began = Instant::now();
    loop {
        let (found, _) = curl(rig, authority, "/health", args);
        if found == code {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "curl ends with {found}, not {code}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

const OK: i32 = 0;
/// curl's exit codes for an untrusted peer and for a failed handshake.
const UNTRUSTED: i32 = 60;
const BODY: &str = r#"{"prompt": "x", "max_tokens": 4, "stream": true}"#;
const POST: [&str; 4] = ["--header", "content-type: application/json", "--data", BODY];

#[test]
fn completions_are_streamed_over_tls() {
    let Some(authority) = Authority::new() else { return };
    let rig = serve(authority.files());
    let ca = authority.made.authority();
    for version in [&["--tls-max", "1.2"][..], &["--tlsv1.3"], &["--http2"]] {
        let (code, text) = curl(&rig, &ca, "/v1/completions", &[&POST[..], version].concat());
        assert_eq!(code, OK, "{version:?}");
        assert!(text.starts_with("data: {") && text.ends_with("data: [DONE]\n\n"), "{text}");
        // The finish comes with the last token, or in a separate event if it comes later.
        let events = text.matches("\"text\"").count();
        assert!((4..=5).contains(&events), "an event for each token: {text}");
        // HTTP/2 is not offered: the limits are per HTTP/1.1 connection.
        let write = ["--output", "/dev/null", "--write-out", "%{http_version}"];
        let asked = [version, &write].concat();
        assert_eq!(curl(&rig, &ca, "/health", &asked), (OK, "1.1".to_owned()), "{version:?}");
    }
    // By name and by address; no older TLS version.
    let name = format!("localhost:{}:127.0.0.1", rig.address.port());
    let output = Command::new("curl")
        .args(["--silent", "--fail", "--noproxy", "*", "--resolve", &name, "--cacert"])
        .arg(&ca)
        .arg(format!("https://localhost:{}/health", rig.address.port()))
        .status();
    assert!(output.unwrap().success());
    let old = ["--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0"];
    assert_ne!(curl(&rig, &ca, "/health", &old).0, OK);
}

#[test]
fn connections_of_an_address_are_counted_under_tls_too() {
    let Some(authority) = Authority::new() else { return };
    let connections = ConnectionBound::Of(1);
    let api = ApiOptions { connections, ..ApiOptions::default() };
    let rig = serve_with(authority.files(), api);
    rig.script(|script| script.hang = true);
    let ca = authority.made.authority();
    let mut client = Command::new("curl")
        .args(["--silent", "--no-buffer", "--noproxy", "*", "--cacert"])
        .arg(&ca)
        .args(POST)
        .arg(format!("https://{}/v1/completions", rig.address))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while rig.seen.lock().unwrap().requests.is_empty() {
        assert!(began.elapsed() < PATIENCE, "the request arrives");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_ne!(curl(&rig, &ca, "/health", &[]).0, OK, "the second connection is closed");
    client.kill().unwrap();
    client.wait().unwrap();
    until(&rig, &ca, &[], OK);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let Some(authority) = Authority::new() else { return };
    let rig = serve(authority.files());
    rig.script(|script| script.hang = true);
    let mut client = Command::new("curl")
        .args(["--silent", "--no-buffer", "--noproxy", "*", "--cacert"])
        .arg(authority.made.authority())
        .args(POST)
        .arg(format!("https://{}/v1/completions", rig.address))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 6];
    client.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"data: ", "events come while the request runs");
    client.kill().unwrap();
    client.wait().unwrap();
    assert!(rig.cancelled().await);
}

fn open_handshake(rig: &Rig, index: u32) -> TcpStream {
    let mut stream = TcpStream::connect(rig.address).unwrap();
    if index.is_multiple_of(2) {
        // The head of a TLS record that never arrives completely.
        stream.write_all(&[0x16, 3, 1, 1, 0, 1]).unwrap();
    }
    stream
}

#[test]
fn strangers_do_no_harm() {
    let (Some(authority), Some(other)) = (Authority::new(), Authority::new()) else { return };
    let rig = serve(authority.files());
    let ca = authority.made.authority();
    assert_eq!(curl(&rig, &other.made.authority(), "/health", &[]).0, UNTRUSTED);
    // HTTP without TLS: no answer that a client could take for HTTP, then the connection closes.
    let mut plain = TcpStream::connect(rig.address).unwrap();
    plain.set_read_timeout(Some(PATIENCE)).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
    // More stalled handshakes than actix allows at a time by default (256): later clients are still
    // answered meanwhile. On a busy machine the handshakes' deadline may pass first.
    let in_time = (0..5).any(|_| {
        let mut silent: Vec<_> = (0..300).map(|index| open_handshake(&rig, index)).collect();
        assert_eq!(curl(&rig, &ca, "/health", &[]).0, OK);
        let last_still = |stream: &mut TcpStream| {
            stream.set_nonblocking(true).unwrap();
            stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        };
        let in_time = silent.iter_mut().all(last_still);
        for mut stream in silent {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            // The server hangs up at the deadline: a time-out here would be an error.
            let end = stream.read_to_end(&mut Vec::new());
            let kind = end.err().map(|error| error.kind());
            assert!(kind.is_none_or(|kind| kind == ErrorKind::ConnectionReset), "{kind:?}");
        }
        in_time
    });
    assert!(in_time, "who comes later waits for handshakes that never end");
    assert_eq!(curl(&rig, &ca, "/health", &[]).0, OK);
}

#[test]
fn files_that_change_are_used_and_bad_ones_are_not() {
    let (Some(authority), Some(next)) = (Authority::new(), Authority::new()) else { return };
    let rig = serve(authority.files());
    let (old, new) = (authority.made.authority(), next.made.authority());
    until(&rig, &old, &[], OK);
    let (certificate, key) = next.made.pair("server");
    let files = authority.files();
    let first = (std::fs::read(&files.certificate).unwrap(), std::fs::read(&files.key).unwrap());
    // A certificate without its key, for long enough that the server sees it.
    std::fs::copy(&certificate, &files.certificate).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    until(&rig, &old, &[], OK);
    // Then the key, by a rename, as most tools do.
    let beside = authority.path("new.key");
    std::fs::copy(&key, &beside).unwrap();
    std::fs::rename(&beside, &files.key).unwrap();
    until(&rig, &new, &[], OK);
    assert_eq!(curl(&rig, &old, "/health", &[]).0, UNTRUSTED);
    // An invalid certificate, then none at all.
    std::fs::write(&files.certificate, "no certificate").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    until(&rig, &new, &[], OK);
    std::fs::remove_file(&files.certificate).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    until(&rig, &new, &[], OK);
    // Then valid ones again.
    std::fs::write(&files.certificate, &first.0).unwrap();
    std::fs::write(&files.key, &first.1).unwrap();
    until(&rig, &old, &[], OK);
    assert_eq!(curl(&rig, &new, "/health", &[]).0, UNTRUSTED);
}

#[test]
fn clients_show_certificates_where_they_have_to() {
    let (Some(authority), Some(other)) = (Authority::new(), Authority::new()) else { return };
    let trusted = authority.path("clients.pem");
    std::fs::copy(authority.made.authority(), &trusted).unwrap();
    let rig = serve(TlsFiles { client_authority: Some(trusted.clone()), ..authority.files() });
    let ca = authority.made.authority();
    let shown = |by: &Authority| {
        let (certificate, key) = by.made.pair("client");
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        ["--cert".to_owned(), text(certificate), "--key".to_owned(), text(key)]
    };
    let (own, foreign) = (shown(&authority), shown(&other));
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let foreign: Vec<&str> = foreign.iter().map(String::as_str).collect();
    for version in ["--tls-max 1.2", "--tlsv1.3"] {
        let version: Vec<&str> = version.split(' ').collect();
        let ask = |args: &[&str]| curl(&rig, &ca, "/health", &[args, &version[..]].concat()).0;
        assert_eq!(ask(&own), OK, "{version:?}");
        assert_ne!(ask(&[]), OK, "{version:?}");
        assert_ne!(ask(&foreign), OK, "{version:?}");
    }
    // The trusted authorities can change, too.
    std::fs::copy(other.made.authority(), &trusted).unwrap();
    until(&rig, &ca, &foreign, OK);
    assert_ne!(curl(&rig, &ca, "/health", &own).0, OK);
}

#[test]
fn files_that_cannot_be_used_are_refused_by_name() {
    let (Some(authority), Some(other)) = (Authority::new(), Authority::new()) else { return };
    let good = authority.files();
    good.check().unwrap();
    // Keys in each format.
    authority.openssl("pkey -in server.key -traditional -out sec1.key");
    TlsFiles { key: authority.path("sec1.key"), ..good.clone() }.check().unwrap();
    authority.openssl(
        "req -x509 -newkey rsa:2048 -nodes -keyout rsa8.key -out rsa.pem -days 2 -subj /CN=rsa",
    );
    authority.openssl("pkey -in rsa8.key -traditional -out rsa1.key");
    for key in ["rsa8.key", "rsa1.key"] {
        let (certificate, key) = (authority.path("rsa.pem"), authority.path(key));
        TlsFiles { certificate, key, client_authority: None }.check().unwrap();
    }
    let refused = |files: TlsFiles, words: &[&str]| {
        let error = files.check().unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let with_key = |key: PathBuf| TlsFiles { key, ..good.clone() };
    let with_certificate = |certificate: PathBuf| TlsFiles { certificate, ..good.clone() };
    refused(with_key("/no/such".into()), &["--tls-key /no/such", "No such file"]);
    refused(with_certificate("/no/such".into()), &["--tls-certificate /no/such"]);
    refused(with_key(other.made.pair("server").1), &["--tls-key", "not the key of", "server.pem"]);
    refused(with_key(authority.path("rsa8.key")), &["--tls-key", "rsa8.key", "not the key"]);
    refused(with_certificate(good.key.clone()), &["--tls-certificate", "no certificate"]);
    refused(with_certificate("/dev/zero".into()), &["--tls-certificate", "more than"]);
    authority.openssl("pkey -in server.key -aes128 -passout pass:x -out locked.key");
    refused(with_key(authority.path("locked.key")), &["locked.key", "encrypted"]);
    let torn = authority.path("torn.pem");
    let whole = std::fs::read_to_string(&good.certificate).unwrap();
    std::fs::write(&torn, whole.replacen("MII", "MIJ", 1)).unwrap();
    refused(with_certificate(torn), &["torn.pem", "certificate 1", "cannot be used"]);
    let half = authority.path("half.pem");
    std::fs::write(&half, &whole[..whole.len() / 2]).unwrap();
    refused(with_certificate(half), &["half.pem", "certificate 1", "not complete PEM"]);
    let clients = Some(good.key.clone());
    let files = TlsFiles { client_authority: clients, ..good.clone() };
    refused(files, &["--tls-client-ca", "no certificate"]);
    let open = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(&good.key, open).unwrap();
    refused(good.clone(), &["--tls-key", "others may read it (mode 644)"]);
}
