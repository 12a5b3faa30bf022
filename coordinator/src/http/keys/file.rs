//! The file of API keys: one key per line, followed by its own limits, if any; `#` at the start of
//! a line or after white space starts a comment. Reread when it changes; a file that cannot be used
//! changes nothing.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shared::metrics::labels::SecretFile;
use zeroize::Zeroizing;

use super::super::watch::{self, Watch};
use super::{ApiKey, ApiKeys, KeyLimits, Keys};
use crate::private_file;

/// Maximum number of keys: each request is compared with all of them.
const KEYS_MAX: usize = 10_000;

/// Where keys come from.
#[derive(Clone, Debug)]
pub struct KeyFile {
    /// The file.
    pub path: PathBuf,
    /// Keys from elsewhere, which stay.
    pub others: Vec<ApiKey>,
    /// Limits of keys that have none of their own.
    pub limits: KeyLimits,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// Its contents are wrong; the reason shows no key.
    #[error("{0}")]
    File(String),
    /// It cannot be watched.
    #[error("cannot start the thread that watches it: {0}")]
    Thread(std::io::Error),
}

impl KeyFile {
    /// Reads the file, and checks it for changes at this interval as long as the keys are in use.
    ///
    /// # Errors
    /// [`KeyFileError`].
    pub fn start(self, every: Duration) -> Result<ApiKeys, KeyFileError> {
        let paths = [self.path.clone()];
        // Before reading, so that changes meanwhile cause another reading.
        let watch = Watch::new(watch::stamps(&paths));
        let keys = ApiKeys::of(self.read().map_err(KeyFileError::File)?);
        let seen = Arc::downgrade(&keys.0);
        let read = move |keys: &Arc<Keys>| self.read_again(&ApiKeys(keys.clone()));
        let thread = std::thread::Builder::new().name("api-keys".to_owned());
        let work = move || {
            watch::keep_current("API keys", &paths, watch, every, &seen, read);
        };
        thread.spawn(work).map_err(KeyFileError::Thread)?;
        Ok(keys)
    }

    fn read_again(&self, keys: &ApiKeys) -> Result<(), String> {
        let read = self.read();
        if let Some(stats) = keys.0.stats.get() {
            stats.reloaded(SecretFile::ApiKeys, read.is_ok());
        }
        keys.replace(read.map_err(|error| format!("{}: {error}", self.path.display()))?);
        Ok(())
    }

    /// Reads all keys, including those from elsewhere.
    fn read(&self) -> Result<Vec<ApiKey>, String> {
        private_file::check(&self.path)?;
        let text = std::fs::read_to_string(&self.path).map(Zeroizing::new);
        let text = text.map_err(|error| error.to_string())?;
        let lines = text.lines().map(|line| uncommented(line).trim()).enumerate();
        let lines = lines.map(|(index, line)| (index + 1, line));
        let lines = lines.filter(|(_, line)| !line.is_empty());
        let mut keys = self.others.clone();
        for (number, line) in lines {
            keys.push(self.key(line).map_err(|error| format!("line {number}: {error}"))?);
        }
        if keys.len() > KEYS_MAX {
            return Err(format!("it has {} keys, at most {KEYS_MAX} are allowed", keys.len()));
        }
        // Nobody means to open the API with an empty file.
        if keys.len() == self.others.len() {
            return Err("it contains no key".to_owned());
        }
        Ok(keys)
    }

    /// A key and its limits, such as `KEY requests=8 tokens-per-minute=100000`.
    fn key(&self, line: &str) -> Result<ApiKey, String> {
        let mut words = line.split_ascii_whitespace();
        let key = words.next().unwrap_or_default();
        let mut limits = self.limits;
        for word in words {
            // The word may be part of a key, so it is not shown.
            let (name, value) = word.split_once('=').ok_or_else(|| {
                format!("the key is followed by something that is not a limit: {KNOWN} are known")
            })?;
            let (place, max) = match name {
                "requests" => (&mut limits.requests, LIMIT_MAX),
                "requests-per-minute" => (&mut limits.per_minute, LIMIT_MAX),
                "tokens-per-minute" => (&mut limits.tokens_per_minute, TOKENS_MAX),
                _ => return Err(format!("an unknown limit: {KNOWN} are known")),
            };
            let number = value.parse::<u32>().ok().filter(|number| *number <= max);
            let number =
                number.ok_or_else(|| format!("{name} must be a number from 0 (none) to {max}"))?;
            *place = (number > 0).then_some(number);
        }
        ApiKey::new(key, limits).map_err(|error| error.to_string())
    }
}

/// Removes a line's comment.
fn uncommented(line: &str) -> &str {
    let begins =
        |(at, _): &(usize, &str)| line[..*at].chars().next_back().is_none_or(char::is_whitespace);
    line.match_indices('#').find(begins).map_or(line, |(at, _)| &line[..at])
}

/// The limits of a key.
const KNOWN: &str = "requests=N, requests-per-minute=N and tokens-per-minute=N";
/// Largest value of a limit of requests.
const LIMIT_MAX: u32 = 1_000_000;
/// Largest value of a limit of tokens.
const TOKENS_MAX: u32 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::time::Instant;

    use shared::metrics::catalogue;

    use super::*;
    use crate::metrics::FrontendStats;

    fn write(path: &Path, text: &str, mode: u32) {
        // Like a careful operator: replaced whole, with its mode.
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, Permissions::from_mode(mode)).unwrap();
        fs::rename(&new, path).unwrap();
    }

    fn file(path: &Path) -> KeyFile {
        let limits = KeyLimits { requests: Some(5), ..KeyLimits::default() };
        KeyFile { path: path.to_owned(), others: Vec::new(), limits }
    }

    #[test]
    fn a_line_is_a_key_and_its_limits() {
        let file = file(Path::new("/unused"));
        let limits = |line: &str| file.key(line).unwrap().limits;
        assert_eq!(limits("abc"), file.limits);
        for (line, key) in [("# all", ""), ("two#x # Anna's", "two#x "), ("\t# three", "\t")] {
            assert_eq!(uncommented(line), key, "{line}");
        }
        let all = KeyLimits {
            requests: Some(8),
            per_minute: Some(120),
            tokens_per_minute: Some(1_000_000_000),
        };
        let line = "abc requests=8  requests-per-minute=120 tokens-per-minute=1000000000";
        assert_eq!(limits(line), all);
        assert_eq!(limits("abc\trequests=0"), KeyLimits::default());
        for (wrong, what) in [
            ("abc hidden", "not a limit"),
            ("abc hidden=3", "unknown limit"),
            ("abc requests=-1", "a number from 0"),
            ("abc requests=1000001", "to 1000000"),
            ("abc tokens-per-minute=1000000001", "to 1000000000"),
            ("a\u{e9}", "printable"),
        ] {
            let error = file.key(wrong).unwrap_err();
            assert!(error.contains(what) && !error.contains("hidden"), "{error}");
        }
    }

    #[test]
    fn a_changed_file_is_used_and_one_that_cannot_be_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        write(&path, "# ours\nfirst\nsecond requests=1 # of Anna\n", 0o600);
        let keys = file(&path).start(Duration::from_millis(20)).unwrap();
        let stats = FrontendStats::new();
        keys.count_in(&stats);
        let count = |outcome| {
            let merged = shared::metrics::Merged::of(&stats.report().1);
            merged.counter(catalogue::FILE_RELOADS, ["api_keys", outcome]).unwrap_or_default()
        };
        let knows = |key: &str| keys.owner(key).is_some();
        assert!(knows("first") && knows("second") && !knows("third"));
        let until = |what: &str, found: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !found() {
                assert!(began.elapsed() < Duration::from_secs(20), "{what}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        write(&path, "second\nthird\n", 0o600);
        until("the new key", &|| knows("third"));
        assert!(knows("second") && !knows("first"));
        for (text, mode) in [("\n", 0o600), ("fourth bad\n", 0o600), ("fourth\n", 0o644)] {
            write(&path, text, mode);
            let failed = count("failed");
            // One reading of the file before may have been under way.
            until("a failure to read it", &|| count("failed") >= failed + 2);
            assert!(knows("second") && knows("third") && !knows("fourth"), "{text:?}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        until("the file that may be read again", &|| knows("fourth"));
        assert!(count("ok") >= 2 && count("failed") >= 3);
    }
}
