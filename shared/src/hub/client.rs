//! One request to the hub, and its errors in words.
//!
//! Redirects are followed here: the token goes to the hub and to nobody else, wherever it sends.
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use serde::Deserialize;
use ureq::http::{HeaderMap, StatusCode, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::name::{HubModel, RequestedModel, is_commit};
use super::{HubError, HubSettings};

/// Longest wait for a connection, for the beginning of an answer, and for more of it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait that the hub can ask for.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Largest list of a model's files, and longest body of an error that is looked at.
const LIST_MAX: u64 = 16 << 20;
const REDIRECTS_MAX: usize = 5;
/// Longest name that a content may have.
const ETAG_MAX: usize = 128;

/// A request failed.
#[derive(Debug)]
pub(super) struct RequestError {
    pub(super) error: HubError,
    /// The hub says how long to wait.
    pub(super) wait: Option<Duration>,
}

impl RequestError {
    pub(super) fn transient(why: impl std::fmt::Display) -> Self {
        Self { error: HubError::Transient(why.to_string()), wait: None }
    }

    pub(super) fn permanent(why: impl std::fmt::Display) -> Self {
        Self { error: HubError::Permanent(why.to_string()), wait: None }
    }
}

/// What the hub says of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FileInfo {
    pub(super) size: u64,
    /// The name of its content in the cache, with most hubs a checksum; empty where the list does
    /// not say it.
    pub(super) etag: String,
}

/// A commit and its files, by their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listing {
    pub(super) model: HubModel,
    pub(super) files: BTreeMap<String, FileInfo>,
}

/// A file's content from some byte on.
pub(super) struct ContentStream {
    /// Where it begins: where it was asked for, or at the file's beginning.
    pub(super) from: u64,
    pub(super) body: Box<dyn Read>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Client {
    agent: Agent,
    settings: HubSettings,
}

impl Client {
    /// A client of the hub that `settings` name.
    pub(super) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("tutti/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(SILENCE_TIMEOUT));
        let roots = rustls_native_certs::load_native_certs().certs;
        if roots.is_empty() && settings.endpoint.starts_with("https://") {
            return Err(HubError::Permanent(format!(
                "this host knows of no authorities, so it can trust no {}: install its package \
                 ca-certificates, or name a file of them in SSL_CERT_FILE",
                settings.endpoint
            )));
        }
        let roots: Vec<Certificate<'static>> =
            roots.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
            .root_certs(RootCerts::new_with_certs(&roots));
        let agent = config.tls_config(tls.build()).build().into();
        Ok(Self { agent, settings: settings.clone() })
    }

    /// Which commit a revision is, and what files it has.
    pub(super) fn list(&self, wanted: &RequestedModel) -> Result<Listing, RequestError> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Sibling {
            rfilename: String,
            size: Option<u64>,
            blob_id: Option<String>,
            lfs: Option<Large>,
        }
        #[derive(Deserialize)]
        struct Large {
            sha256: String,
            size: u64,
        }
        let RequestedModel { name, revision } = wanted;
        let revision = escaped(revision);
        let url =
            format!("{}/api/models/{name}/revision/{revision}?blobs=true", self.settings.endpoint);
        let mut answer = self.ask(wanted, "GET", &url, None)?.1;
        let bytes = answer.with_config().limit(LIST_MAX).read_to_vec();
        let bytes = bytes.map_err(|error| self.unreached(&error))?;
        let info: Info = serde_json::from_slice(&bytes).map_err(|error| {
            RequestError::transient(format!(
                "{}: its list of files cannot be read: {error}",
                self.settings.endpoint
            ))
        })?;
        if !is_commit(&info.sha) {
            return Err(RequestError::permanent(format!(
                "{} says that {name} is at the commit {:?}, which is none",
                self.settings.endpoint, info.sha
            )));
        }
        if is_commit(&wanted.revision) && info.sha != wanted.revision {
            return Err(RequestError::permanent(format!(
                "{} answers with the commit {} of {name} when asked for {}",
                self.settings.endpoint, info.sha, wanted.revision
            )));
        }
        let file = |sibling: Sibling| {
            let etag = match &sibling.lfs {
                Some(large) => Some(large.sha256.clone()),
                None => sibling.blob_id,
            };
            let size = sibling.lfs.map(|large| large.size).or(sibling.size);
            let listed = match (etag.filter(|etag| is_etag(etag)), size) {
                (Some(etag), Some(size)) => FileInfo { size, etag },
                // A mirror that lists names alone.
                _ => FileInfo::default(),
            };
            (sibling.rfilename, listed)
        };
        let model = HubModel { name: name.clone(), commit: info.sha };
        Ok(Listing { model, files: info.siblings.into_iter().map(file).collect() })
    }

    /// What the hub says of one file, where its list does not.
    pub(super) fn describe(&self, model: &HubModel, file: &str) -> Result<FileInfo, RequestError> {
        let (headers, _) = self.ask(&model.wanted(), "HEAD", &self.address(model, file), None)?;
        let text = |names: [&str; 2]| {
            let found = names.into_iter().find_map(|name| headers.get(name));
            found.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let etag = text(["x-linked-etag", "etag"]);
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
        let size = text(["x-linked-size", "content-length"]).parse::<u64>();
        match size {
            Ok(size) if is_etag(&etag) => Ok(FileInfo { size, etag }),
            _ => Err(RequestError::permanent(format!(
                "{} says neither the size nor the etag of {file}",
                self.settings.endpoint
            ))),
        }
    }

    /// A file's content from byte `from` on.
    pub(super) fn content(
        &self,
        model: &HubModel,
        file: &str,
        from: u64,
    ) -> Result<ContentStream, RequestError> {
        let address = self.address(model, file);
        let (headers, body) = self.ask(&model.wanted(), "GET", &address, Some(from))?;
        let body = Box::new(body.into_reader());
        let range = headers.get("content-range").and_then(|range| range.to_str().ok());
        let Some(range) = range else { return Ok(ContentStream { from: 0, body }) };
        let begin = range.strip_prefix("bytes ").and_then(|rest| rest.split_once('-'));
        match begin.and_then(|(begin, _)| begin.parse::<u64>().ok()) {
            Some(begin) if begin == from => Ok(ContentStream { from, body }),
            _ => Err(RequestError::transient(format!(
                "{file}: asked for bytes from {from}, got {range}"
            ))),
        }
    }

    fn address(&self, model: &HubModel, file: &str) -> String {
        let HubModel { name, commit } = model;
        format!("{}/{name}/resolve/{commit}/{}", self.settings.endpoint, file.replace('+', "%2B"))
    }

    /// Asks, and follows redirects; for a HEAD only those of the hub to itself, for what another
    /// host says of a file is not the hub's word.
    fn ask(
        &self,
        wanted: &RequestedModel,
        method: &str,
        url: &str,
        from: Option<u64>,
    ) -> Result<(HeaderMap, Body), RequestError> {
        let mut at = parse(url)?;
        let mut token = self.settings.token.as_ref();
        for _ in 0..=REDIRECTS_MAX {
            let mut request = match method {
                "HEAD" => self.agent.head(at.clone()),
                _ => self.agent.get(at.clone()),
            };
            request = request.header("accept-encoding", "identity");
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {}", token.as_str()));
            }
            if let Some(from) = from.filter(|from| *from > 0) {
                request = request.header("range", format!("bytes={from}-"));
            }
            let answer = request.call().map_err(|error| self.unreached(&error))?;
            let (parts, mut body) = answer.into_parts();
            let moved = parts.status.is_redirection();
            if parts.status.is_success() {
                return Ok((parts.headers, body));
            }
            if !moved {
                let others = origin(&at) != origin(&parse(url)?);
                if others && matches!(parts.status.as_u16(), 401 | 403 | 404) {
                    // Not the hub's word: its link may have expired, and the next one works.
                    let host = at.host().unwrap_or_default();
                    let status = parts.status;
                    return Err(RequestError::transient(format!(
                        "{host} answers with status {status}"
                    )));
                }
                let text = body.with_config().limit(4096).lossy_utf8(true).read_to_string();
                let text = text.unwrap_or_default();
                return Err(self.refused(wanted, parts.status, &parts.headers, &text));
            }
            let location = parts.headers.get("location").and_then(|to| to.to_str().ok());
            let next = redirected(&at, location.unwrap_or_default())?;
            if origin(&next) != origin(&at) {
                if method == "HEAD" {
                    return Ok((parts.headers, body));
                }
                token = None;
            }
            at = next;
        }
        Err(RequestError::transient(format!("{url}: more than {REDIRECTS_MAX} redirects")))
    }

    fn unreached(&self, error: &ureq::Error) -> RequestError {
        RequestError::transient(format!("{} cannot be asked: {error}", self.settings.endpoint))
    }

    /// What an answer means that is none, and what to do about it.
    fn refused(
        &self,
        wanted: &RequestedModel,
        status: StatusCode,
        headers: &HeaderMap,
        body: &str,
    ) -> RequestError {
        let header = |name: &str| headers.get(name).and_then(|it| it.to_str().ok()).unwrap_or("");
        let (code, message) = (header("x-error-code"), header("x-error-message"));
        let (RequestedModel { name, revision }, hub) = (wanted, &self.settings.endpoint);
        let has_token = self.settings.token.is_some();
        let lasting = match (status.as_u16(), code) {
            (_, "GatedRepo") if has_token => format!(
                "{name}: the owner of the hub's token has no access to it: ask for it at {hub}/{name}"
            ),
            (_, "GatedRepo") => format!(
                "{name}: only those may have it who were granted access: ask for it at {hub}/{name}, \
                 and put your token into HF_TOKEN"
            ),
            (404, "RevisionNotFound") => {
                format!("{name} has no revision {revision}: see {hub}/{name}/commits")
            }
            (404, "EntryNotFound") => {
                format!("{name} has not all files that it lists at {revision}")
            }
            (401, _) if message.contains("Invalid credentials") => format!(
                "{hub} does not accept the token (of HF_TOKEN, or of the file `token` in HF_HOME): \
                 make a new one at {hub}/settings/tokens"
            ),
            (401 | 403 | 404, _) if has_token => format!(
                "{hub} has no model {name}, or the owner of the token may not see it: check the name"
            ),
            (401 | 403 | 404, _) => format!(
                "{hub} has no model {name}, or it is private: check the name; to be let in, put your \
                 token into HF_TOKEN"
            ),
            (status @ (408 | 416 | 429 | 500..=599), _) => {
                let wait = header("retry-after").parse().ok().map(Duration::from_secs);
                let error =
                    HubError::Transient(format!("{hub} answers with status {status} for {name}"));
                return RequestError { error, wait: wait.map(|wait| wait.min(WAIT_MAX)) };
            }
            (status, _) => {
                let said = if message.is_empty() { body } else { message };
                let said: String = said.chars().filter(|c| !c.is_control()).take(200).collect();
                format!("{hub} answers with status {status} for {name}: {said}")
            }
        };
        RequestError::permanent(lasting)
    }
}

/// Whether a content may be called that in the cache.
fn is_etag(etag: &str) -> bool {
    let good = |it: u8| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_');
    (1..=ETAG_MAX).contains(&etag.len()) && etag.bytes().all(good)
}

fn parse(url: &str) -> Result<Uri, RequestError> {
    url.parse().map_err(|error| RequestError::permanent(format!("{url}: {error}")))
}

/// Where a redirect leads.
fn redirected(from: &Uri, location: &str) -> Result<Uri, RequestError> {
    let wrong =
        || RequestError::permanent(format!("{from} redirects to {location:?}, which is refused"));
    if location.starts_with('/') && !location.starts_with("//") {
        let (scheme, host) = origin(from);
        return parse(&format!("{scheme}://{host}{location}"));
    }
    let to: Uri = location.parse().map_err(|_| wrong())?;
    let plain = to.scheme_str() == Some("http") && from.scheme_str() == Some("http");
    if to.host().is_none() || !(plain || to.scheme_str() == Some("https")) {
        return Err(wrong());
    }
    Ok(to)
}

/// Scheme, host and port: whoever is trusted with a token.
fn origin(uri: &Uri) -> (&str, String) {
    let host = uri.authority().map(|it| it.as_str().to_ascii_lowercase()).unwrap_or_default();
    (uri.scheme_str().unwrap_or_default(), host)
}

/// A revision as one part of a path.
fn escaped(revision: &str) -> String {
    let one = |it: u8| match it {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => (it as char).to_string(),
        other => format!("%{other:02X}"),
    };
    revision.bytes().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_hosts_of_the_same_or_better_trust() {
        let to = |from: &str, location: &str| {
            redirected(&from.parse().unwrap(), location).map(|uri| uri.to_string()).ok()
        };
        let hub = "https://hub.example/a/b";
        assert_eq!(to(hub, "/x?y=1").as_deref(), Some("https://hub.example/x?y=1"));
        assert_eq!(to(hub, "https://cdn.example/x").as_deref(), Some("https://cdn.example/x"));
        assert_eq!(to("http://hub/a", "http://cdn/x").as_deref(), Some("http://cdn/x"));
        for refused in ["http://cdn.example/x", "//cdn.example/x", "file:///etc/passwd", "x", ""] {
            assert_eq!(to(hub, refused), None, "{refused}");
        }
        let same = |a: &str, b: &str| {
            origin(&a.parse::<Uri>().unwrap()) == origin(&b.parse::<Uri>().unwrap())
        };
        assert!(same("https://hub/a", "https://HUB/b"));
        assert!(
            !same("https://hub/a", "https://hub:444/a") && !same("https://hub/a", "http://hub/a")
        );
        assert!(!same("https://hub/a", "https://hub.evil/a"));
    }

    #[test]
    fn what_goes_into_paths_is_escaped_or_checked() {
        assert_eq!(escaped("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(escaped("v1.0+x"), "v1.0%2Bx");
        for etag in ["../x", "", "a/b", "a.incomplete", &"a".repeat(129)] {
            assert!(!is_etag(etag), "{etag}");
        }
        assert!(is_etag(&"a".repeat(64)));
    }
}
