//! A stand-in for Hugging Face's hub: what its API and its file servers answer, over HTTP, with
//! faults on request. Files of weights lie on a second server, as the hub's do.
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The files of one commit.
type Files = BTreeMap<String, Arc<Vec<u8>>>;

/// One request that came.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// It came to the server that has the weights.
    pub elsewhere: bool,
    /// Its method.
    pub method: String,
    /// Its path and query.
    pub path: String,
    /// Its `Range`.
    pub range: Option<String>,
    /// Its `Authorization`.
    pub authorization: Option<String>,
}

/// What goes wrong. Every part may be changed at any time.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Contents of files end after so many bytes, one entry for each request, in order.
    pub ends_after: HashMap<String, Vec<usize>>,
    /// Contents of files are changed, so many times.
    pub corrupts: HashMap<String, usize>,
    /// Answers with these, in order, before any other: status, and headers as lines.
    pub answers: Vec<(u16, String)>,
    /// Names that are listed, of files that nobody has.
    pub lists_too: Vec<String>,
    /// Lists say names alone, as those of some mirrors do.
    pub bare_lists: bool,
    /// Ranges are not understood.
    pub ignores_ranges: bool,
    /// Names of contents that are listed instead of the true ones.
    pub etags: HashMap<String, String>,
    /// Sizes that are listed instead of the true ones.
    pub sizes: HashMap<String, u64>,
    /// Between two pieces of 64 KiB of a content.
    pub pause: Duration,
    /// Where file servers send requests on, in place of the second server.
    pub redirect: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    /// Models by name: their revisions, by name and by commit.
    models: HashMap<String, HashMap<String, (String, Files)>>,
    /// Which token a model wants.
    tokens: HashMap<String, String>,
    faults: Faults,
    asked: Vec<RecordedRequest>,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct FakeHub {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
    elsewhere: SocketAddr,
}

impl FakeHub {
    /// A hub without models.
    ///
    /// # Panics
    /// When no port can be had.
    #[must_use]
    #[allow(clippy::expect_used, reason = "a test that has no hub fails")]
    pub fn start() -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (own, elsewhere) = (bind(), bind());
        let hub = Self {
            state: Arc::default(),
            address: own.local_addr().expect("its address"),
            elsewhere: elsewhere.local_addr().expect("its address"),
        };
        for (listener, is_elsewhere) in [(own, false), (elsewhere, true)] {
            let hub = hub.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let hub = hub.clone();
                    // Whoever asked may be gone.
                    std::thread::spawn(move || drop(hub.serve(stream, is_elsewhere)));
                }
            });
        }
        hub
    }

    /// Its address, for `HF_ENDPOINT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Puts the files of a folder there as `name`, and has `revision` be them. Returns the commit.
    ///
    /// # Panics
    /// When the folder cannot be read.
    #[allow(clippy::expect_used, reason = "a test that has no model fails")]
    pub fn put(&self, name: &str, revision: &str, folder: &Path) -> String {
        let mut files = Files::new();
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            files.insert(name, Arc::new(std::fs::read(entry.path()).expect("a file")));
        }
        self.put_files(name, revision, files)
    }

    /// The same with files that are given.
    pub fn put_files(&self, name: &str, revision: &str, files: Files) -> String {
        let mut hash = Sha256::new();
        for (file, content) in &files {
            hash.update(file);
            hash.update(content.as_slice());
        }
        let commit = hex(&hash.finalize())[..40].to_owned();
        let mut state = self.state();
        let model = state.models.entry(name.to_owned()).or_default();
        model.insert(revision.to_owned(), (commit.clone(), files.clone()));
        model.insert(commit.clone(), (commit.clone(), files));
        commit
    }

    /// Has only those read a model who have this token.
    pub fn restrict(&self, name: &str, token: &str) {
        self.state().tokens.insert(name.to_owned(), token.to_owned());
    }

    /// Changes what goes wrong.
    pub fn fail(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.state().faults);
    }

    /// What was asked since the last call.
    #[must_use]
    pub fn asked(&self) -> Vec<RecordedRequest> {
        std::mem::take(&mut self.state().asked)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: TcpStream, elsewhere: bool) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let mut words = line.split_whitespace().map(str::to_owned);
            let (method, path) =
                (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let (mut range, mut authorization) = (None, None);
            loop {
                let mut header = String::new();
                reader.read_line(&mut header)?;
                let Some((name, value)) = header.trim_end().split_once(':') else { break };
                match name.to_ascii_lowercase().as_str() {
                    "range" => range = Some(value.trim().to_owned()),
                    "authorization" => authorization = Some(value.trim().to_owned()),
                    _ => {}
                }
            }
            let asked = RecordedRequest { elsewhere, method, path, range, authorization };
            self.state().asked.push(asked.clone());
            if !self.answer(&stream, &asked)? {
                return Ok(());
            }
        }
    }

    /// Answers one request; returns whether the connection goes on.
    fn answer(&self, stream: &TcpStream, asked: &RecordedRequest) -> std::io::Result<bool> {
        let next = {
            let mut state = self.state();
            if state.faults.answers.is_empty() {
                None
            } else {
                Some(state.faults.answers.remove(0))
            }
        };
        if let Some((status, headers)) = next {
            return say(stream, status, &headers, b"");
        }
        let path = asked.path.split('?').next().unwrap_or_default().replace("%2F", "/");
        if asked.elsewhere {
            return self.weights(stream, asked, path.trim_start_matches('/'));
        }
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let (org, name, of, revision, file) = match parts.as_slice() {
            ["api", "models", org, name, "revision", revision @ ..] => {
                (org, name, Of::Info, revision.join("/"), &[][..])
            }
            ["api", "models", org, name, "tree", revision @ ..] => {
                (org, name, Of::Tree, revision.join("/"), &[][..])
            }
            ["api", "resolve-cache", "models", org, name, commit, file @ ..] => {
                (org, name, Of::Small, (*commit).to_owned(), file)
            }
            [org, name, "resolve", revision, file @ ..] => {
                (org, name, Of::Place, (*revision).to_owned(), file)
            }
            _ => return say(stream, 404, "", b"no such thing"),
        };
        let (name, file) = (format!("{org}/{name}"), file.join("/"));
        let (commit, files) = match self.files(asked, &name, &revision) {
            Ok(found) => found,
            Err((status, code)) => {
                return say(stream, status, &format!("X-Error-Code: {code}\r\n"), b"");
            }
        };
        match of {
            Of::Info => self.info(stream, &name, &commit, &files),
            Of::Tree => tree(stream, &files),
            Of::Small | Of::Place => {
                let Some(content) = files.get(&file) else {
                    return say(stream, 404, "X-Error-Code: EntryNotFound\r\n", b"");
                };
                if of == Of::Small {
                    let etag = short(content);
                    let headers = format!("X-Repo-Commit: {commit}\r\nETag: \"{etag}\"\r\n");
                    return self.content(stream, asked, &file, content, &headers);
                }
                self.place(stream, &name, &commit, &file, content)
            }
        }
    }

    /// A commit and its files, or the status and the code that say why there are none.
    fn files(
        &self,
        asked: &RecordedRequest,
        name: &str,
        revision: &str,
    ) -> Result<(String, Files), (u16, &'static str)> {
        let state = self.state();
        let model = state.models.get(name).ok_or((404, "RepoNotFound"))?;
        let given = asked.authorization.as_deref();
        if let Some(wanted) = state.tokens.get(name)
            && given != Some(&format!("Bearer {wanted}"))
        {
            return Err((if given.is_some() { 403 } else { 401 }, "GatedRepo"));
        }
        model.get(revision).cloned().ok_or((404, "RevisionNotFound"))
    }

    fn info(
        &self,
        stream: &TcpStream,
        name: &str,
        commit: &str,
        files: &Files,
    ) -> std::io::Result<bool> {
        let faults = self.state().faults.clone();
        let sibling = |(file, content): (&String, &Arc<Vec<u8>>)| {
            let size = faults.sizes.get(file).copied().unwrap_or(content.len() as u64);
            if faults.bare_lists {
                return json!({"rfilename": file});
            }
            let name = faults.etags.get(file).cloned().unwrap_or_else(|| blob_id(file, content));
            let mut sibling = json!({"rfilename": file, "size": size, "blobId": name});
            if is_large(file) {
                sibling["lfs"] = json!({"sha256": long(content), "size": size, "pointerSize": 134});
            }
            sibling
        };
        let mut siblings: Vec<Value> = files.iter().map(sibling).collect();
        let too = faults.lists_too.iter();
        siblings.extend(
            too.map(|file| json!({"rfilename": file, "size": 1, "blobId": "0".repeat(40)})),
        );
        let body = json!({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": false});
        say(stream, 200, "Content-Type: application/json\r\n", body.to_string().as_bytes())
    }

    /// Where a file is.
    fn place(
        &self,
        stream: &TcpStream,
        name: &str,
        commit: &str,
        file: &str,
        content: &[u8],
    ) -> std::io::Result<bool> {
        if !is_large(file) {
            // Within the same host, which still wants to know who asks.
            let to = format!("/api/resolve-cache/models/{name}/{commit}/{file}");
            let headers = format!("X-Repo-Commit: {commit}\r\nLocation: {to}\r\n");
            return say(stream, 307, &headers, b"");
        }
        let commit = format!("X-Repo-Commit: {commit}\r\n");
        let (sum, size) = (long(content), content.len());
        let to = self.state().faults.redirect.clone();
        let to = to.unwrap_or_else(|| format!("http://{}/{sum}/{file}", self.elsewhere));
        let headers = format!(
            "{commit}X-Linked-Etag: \"{sum}\"\r\nX-Linked-Size: {size}\r\nETag: \"{sum}\"\r\n\
             Location: {to}\r\n"
        );
        say(stream, 302, &headers, b"")
    }

    fn weights(
        &self,
        stream: &TcpStream,
        asked: &RecordedRequest,
        path: &str,
    ) -> std::io::Result<bool> {
        let (sum, file) = path.split_once('/').unwrap_or_default();
        let found = {
            let state = self.state();
            let all = state.models.values().flat_map(HashMap::values);
            let all = all.flat_map(|(_, files)| files.get(file));
            all.into_iter().find(|content| long(content) == sum).cloned()
        };
        match found {
            Some(content) => {
                self.content(stream, asked, file, &content, &format!("ETag: \"{sum}\"\r\n"))
            }
            None => say(stream, 404, "", b"no such content"),
        }
    }

    fn content(
        &self,
        mut stream: &TcpStream,
        asked: &RecordedRequest,
        file: &str,
        content: &[u8],
        headers: &str,
    ) -> std::io::Result<bool> {
        let (cut, corrupt, pause, ignores) = {
            let mut state = self.state();
            let faults = &mut state.faults;
            let cuts = faults.ends_after.get_mut(file).filter(|cuts| !cuts.is_empty());
            let cut = if asked.method == "GET" { cuts.map(|cuts| cuts.remove(0)) } else { None };
            let corrupts = faults.corrupts.get_mut(file).filter(|left| **left > 0);
            let corrupt = corrupts.map(|left| *left -= 1).is_some();
            (cut, corrupt, faults.pause, faults.ignores_ranges)
        };
        let range = asked.range.as_deref().filter(|_| !ignores);
        let from = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        let from = from.and_then(|from| from.parse::<usize>().ok()).unwrap_or(0);
        if from > content.len() {
            return say(stream, 416, "", b"");
        }
        let mut body = content[from..].to_vec();
        if corrupt && let Some(byte) = body.last_mut() {
            *byte ^= 1;
        }
        let (status, size) = (if range.is_some() { 206 } else { 200 }, content.len());
        let range = match range {
            Some(_) => format!("Content-Range: bytes {from}-{}/{size}\r\n", size.max(1) - 1),
            None => String::new(),
        };
        let head = format!(
            "HTTP/1.1 {status} OK\r\n{headers}{range}Accept-Ranges: bytes\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        if asked.method == "HEAD" {
            return Ok(true);
        }
        let end = cut.unwrap_or(body.len()).min(body.len());
        for piece in body[..end].chunks(64 << 10) {
            stream.write_all(piece)?;
            std::thread::sleep(pause);
        }
        Ok(end == body.len())
    }
}

/// What a path asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// What a commit has.
    Info,
    /// Its files, with their sizes.
    Tree,
    /// A small file's content.
    Small,
    /// Where a file is.
    Place,
}

fn tree(stream: &TcpStream, files: &Files) -> std::io::Result<bool> {
    let entry = |(file, content): (&String, &Arc<Vec<u8>>)| {
        let name = blob_id(file, content);
        let mut entry = json!({"type": "file", "path": file, "size": content.len(), "oid": name});
        if is_large(file) {
            entry["lfs"] = json!({"oid": long(content), "size": content.len(), "pointerSize": 134});
        }
        entry
    };
    let body = Value::Array(files.iter().map(entry).collect());
    say(stream, 200, "Content-Type: application/json\r\n", body.to_string().as_bytes())
}

/// Whether the hub keeps a file with the weights.
fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors")
}

fn say(mut stream: &TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<bool> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {length}\r\n\r\n");
    stream.write_all(&[head.as_bytes(), body].concat())?;
    Ok(true)
}

/// The name of a large content.
fn long(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

/// The name of a small one: git's.
fn short(content: &[u8]) -> String {
    let mut hash = Sha1::new_with_prefix(format!("blob {}\0", content.len()));
    hash.update(content);
    hex(&hash.finalize())
}

/// The name of what git has of a file: for a large one that is a pointer to it.
fn blob_id(file: &str, content: &[u8]) -> String {
    if !is_large(file) {
        return short(content);
    }
    let (sum, size) = (long(content), content.len());
    let version = "version https://git-lfs.github.com/spec/v1";
    short(format!("{version}\noid sha256:{sum}\nsize {size}\n").as_bytes())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
