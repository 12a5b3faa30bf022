//! Where the cache is, which hub is asked, and with which token: from the environment that the
//! hub's own libraries read.
use std::fmt;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

/// The hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Longest token that is taken.
const TOKEN_MAX: usize = 4096;

/// See the module's documentation.
#[derive(Clone)]
pub struct HubSettings {
    /// The cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// Whoever has it may read what its owner may.
    pub token: Option<Zeroizing<String>>,
    /// Nothing is asked of the hub.
    pub offline: bool,
}

impl fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the token.
        f.debug_struct("HubSettings")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl HubSettings {
    /// What this process's environment says; `cache` stands for its cache.
    ///
    /// # Errors
    /// Which variable or file cannot be used, and why.
    pub fn from_environment(cache: Option<&Path>) -> Result<Self, String> {
        Self::from_variables(
            cache,
            |name| std::env::var(name).ok(),
            |file| std::fs::read_to_string(file).ok(),
        )
    }

    /// The same from variables and files that are given.
    ///
    /// # Errors
    /// Which variable or file cannot be used, and why.
    pub fn from_variables(
        cache: Option<&Path>,
        variable: impl Fn(&str) -> Option<String>,
        file: impl FnOnce(&Path) -> Option<String>,
    ) -> Result<Self, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let user = variable("HOME").map(PathBuf::from);
        let path = |text: String| match (text.strip_prefix("~/"), &user) {
            (Some(rest), Some(user)) => user.join(rest),
            _ => PathBuf::from(text),
        };
        let caches = variable("XDG_CACHE_HOME").map(path);
        let caches = caches.or_else(|| user.as_ref().map(|user| user.join(".cache")));
        let home = variable("HF_HOME").map(path);
        let home = home.or_else(|| caches.map(|caches| caches.join("huggingface")));
        let cache = cache
            .map(Path::to_owned)
            .or_else(|| variable("HF_HUB_CACHE").map(path))
            .or_else(|| variable("HUGGINGFACE_HUB_CACHE").map(path))
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or("there is no folder for models: set HF_HOME, or give --download-dir")?;
        let cache = std::path::absolute(&cache).unwrap_or(cache);
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if endpoint.contains('@') {
            // The address is shown in logs.
            return Err("HF_ENDPOINT has a user or password before an @: give a token in HF_TOKEN"
                .to_owned());
        }
        if !["https://", "http://"].iter().any(|it| endpoint.starts_with(it)) {
            return Err(format!("HF_ENDPOINT is {endpoint}, expected an https:// address"));
        }
        let in_file = || {
            let path = variable("HF_TOKEN_PATH").map(path);
            file(&path.or_else(|| home.map(|home| home.join("token")))?)
        };
        let token = variable("HF_TOKEN")
            .or_else(|| variable("HUGGING_FACE_HUB_TOKEN"))
            .or_else(in_file)
            .map(|text| Zeroizing::new(text.trim().to_owned()))
            .filter(|token| !token.is_empty());
        let good =
            |token: &str| token.len() <= TOKEN_MAX && token.bytes().all(|it| it.is_ascii_graphic());
        if token.as_deref().is_some_and(|token| !good(token)) {
            return Err(
                "the hub's token (HF_TOKEN, or the file `token` in HF_HOME) is none: it has \
                        spaces or other characters that no token has"
                    .to_owned(),
            );
        }
        let is_true = |name: &str| {
            variable(name).is_some_and(|value| {
                matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
            })
        };
        let offline = is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE");
        Ok(Self { cache, endpoint, token, offline })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(
        variables: &[(&str, &str)],
        file: Option<(&str, &str)>,
    ) -> Result<HubSettings, String> {
        let find = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        HubSettings::from_variables(None, find, |asked| {
            file.filter(|(path, _)| Path::new(path) == asked).map(|(_, text)| text.to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_the_hub_s_libraries_have_it() {
        let cache = |variables: &[(&str, &str)]| settings(variables, None).unwrap().cache;
        let home = ("HOME", "/u");
        assert_eq!(cache(&[home]), Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/c")]), Path::new("/c/huggingface/hub"));
        let set = ("HF_HOME", "~/hf");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/c"), set]), Path::new("/u/hf/hub"));
        assert_eq!(cache(&[home, set, ("HF_HUB_CACHE", "/x")]), Path::new("/x"));
        assert_eq!(cache(&[home, ("HUGGINGFACE_HUB_CACHE", "/y")]), Path::new("/y"));
        assert!(settings(&[], None).unwrap_err().contains("--download-dir"));
        let given = HubSettings::from_variables(Some(Path::new("/g")), |_| None, |_| None).unwrap();
        assert_eq!(given.cache, Path::new("/g"));
    }

    #[test]
    fn the_token_is_the_variable_s_or_the_file_s_and_is_never_shown() {
        let token = |variables: &[(&str, &str)], file| {
            settings(variables, file).unwrap().token.map(|it| it.to_string())
        };
        let (home, file) = (("HF_HOME", "/hf"), Some(("/hf/token", "hf_file\n")));
        assert_eq!(token(&[home], file).as_deref(), Some("hf_file"));
        assert_eq!(token(&[home, ("HF_TOKEN", " hf_x ")], file).as_deref(), Some("hf_x"));
        assert_eq!(token(&[home, ("HF_TOKEN", "")], file).as_deref(), Some("hf_file"));
        let elsewhere = [home, ("HF_TOKEN_PATH", "/t")];
        assert_eq!(token(&elsewhere, Some(("/t", "hf_t"))).as_deref(), Some("hf_t"));
        assert_eq!(token(&[home], None), None);
        let error = settings(&[home, ("HF_TOKEN", "hidden\nhidden")], None).unwrap_err();
        assert!(error.contains("HF_TOKEN") && !error.contains("hidden"), "{error}");
        let shown = settings(&[home, ("HF_TOKEN", "hidden")], None).unwrap();
        assert!(!format!("{shown:?}").contains("hidden"));
    }

    #[test]
    fn the_hub_may_be_another_or_not_be_asked_at_all() {
        let home = ("HF_HOME", "/hf");
        assert_eq!(settings(&[home], None).unwrap().endpoint, "https://huggingface.co");
        let mirror = settings(&[home, ("HF_ENDPOINT", "http://mirror:1/hub/")], None).unwrap();
        assert_eq!(mirror.endpoint, "http://mirror:1/hub");
        assert!(settings(&[home, ("HF_ENDPOINT", "mirror")], None).unwrap_err().contains("mirror"));
        for secret in ["https://user:hidden@mirror/hub", "user:hidden@mirror", "http://hidden@m"] {
            let error = settings(&[home, ("HF_ENDPOINT", secret)], None).unwrap_err();
            assert!(error.contains("HF_TOKEN") && !error.contains("hidden"), "{error}");
        }
        for (value, offline) in
            [("1", true), ("true", true), ("on", true), ("0", false), ("", false)]
        {
            let settings = settings(&[home, ("HF_HUB_OFFLINE", value)], None).unwrap();
            assert_eq!(settings.offline, offline, "{value}");
        }
    }
}
