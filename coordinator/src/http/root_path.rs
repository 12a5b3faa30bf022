//! The path under which a proxy shows the API (`--root-path`), as in Starlette: the paths of
//! requests may begin with it, and need not. It is taken off before anything else sees a path, so
//! keys, routes, metrics and logs know the rest alone.
use std::sync::Arc;

use actix_web::Error;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Uri;
use actix_web::http::uri::PathAndQuery;
use actix_web::middleware::Next;

use super::routes;

/// Maximum bytes of it.
const BYTES_MAX: usize = 256;

/// See the module's documentation; by default there is none. Clones share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootPath(Arc<str>);

impl RootPath {
    /// Reads what the operator chose.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split('/').skip(1);
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        if !text.starts_with('/') {
            return Err("it must begin with `/`, such as /llm".to_owned());
        }
        if text.ends_with('/') {
            return Err("it must not end with `/`".to_owned());
        }
        if text.len() > BYTES_MAX {
            return Err(format!("it has {} bytes, the limit is {BYTES_MAX}", text.len()));
        }
        if parts.clone().any(|part| ["", ".", ".."].contains(&part)) {
            return Err("between `/` there must be something, other than `.` and `..`".to_owned());
        }
        if !parts.all(|part| part.bytes().all(is_known)) {
            return Err("it may have letters, digits, `-`, `_`, `.`, `~` and `/` only".to_owned());
        }
        let root = Self(text.into());
        match routes::paths().find(|(path, _)| root.hides(path)) {
            Some((path, _)) => Err(format!(
                "`{path}` is a path of this server, which would not be told from one behind it"
            )),
            None => Ok(root),
        }
    }

    /// The URL of the API, relative to the proxy's.
    #[must_use]
    pub fn url(&self) -> &str {
        if self.0.is_empty() { "/" } else { &self.0 }
    }

    /// Whether requests for this path of the server would be taken for others.
    fn hides(&self, path: &str) -> bool {
        let open = path.split_once('{').is_some_and(|(before, _)| self.0.starts_with(before));
        open || self.rest_of(path).is_some()
    }

    /// What a path has behind it, if it begins with it.
    fn rest_of<'a>(&self, path: &'a str) -> Option<&'a str> {
        if self.0.is_empty() {
            return None;
        }
        match path.strip_prefix(&*self.0)? {
            "" => Some("/"),
            rest => rest.starts_with('/').then_some(rest),
        }
    }

    /// The same without it, if its path begins with it. A path that spells it with escapes does
    /// not: it is one that is not served.
    fn taken_off(&self, uri: &Uri) -> Option<Uri> {
        let rest = self.rest_of(uri.path())?;
        let rest = match uri.query() {
            Some(query) => format!("{rest}?{query}"),
            None => rest.to_owned(),
        };
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::try_from(rest).ok()?);
        Uri::from_parts(parts).ok()
    }
}

/// Takes it off a request's path. What this is wrapped around never sees it.
///
/// # Errors
/// The handler's own.
pub(super) async fn take_off<B: MessageBody>(
    mut request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<B>, Error> {
    let rest = request.app_data::<RootPath>().and_then(|root| root.taken_off(request.uri()));
    if let Some(uri) = rest {
        // What routes are matched by, and what all others read.
        request.match_info_mut().get_mut().update(&uri);
        request.head_mut().uri = uri;
    }
    next.call(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_path_is_one_and_hides_no_path_of_the_server() {
        for good in ["/llm", "/a/b-c_d.e~f/9", "/v1beta", "/v3", "/healthy", "/api/v1"] {
            assert_eq!(RootPath::parse(good).unwrap().url(), good);
        }
        let longest = format!("/{}", "x".repeat(BYTES_MAX - 1));
        assert!(RootPath::parse(&longest).is_ok());
        let longer = format!("{longest}x");
        for (bad, told) in [
            ("", "begin with `/`"),
            ("llm", "begin with `/`"),
            ("https://host/llm", "begin with `/`"),
            ("/", "not end with `/`"),
            ("/llm/", "not end with `/`"),
            ("//llm", "something"),
            ("/llm/../v1", "something"),
            ("/llm/.", "something"),
            ("/l m", "letters"),
            ("/%6clm", "letters"),
            ("/llm?x", "letters"),
            ("/{id}", "letters"),
            ("/l\u{e9}", "letters"),
            (longer.as_str(), "257 bytes, the limit is 256"),
            ("/v1", "`/v1/completions` is a path of this server"),
            ("/health", "`/health` is"),
            ("/admin", "`/admin/status` is"),
            ("/v1/models/llm", "`/v1/models/{id}` is"),
        ] {
            let error = RootPath::parse(bad).unwrap_err();
            assert!(error.contains(told), "{bad}: {error}");
        }
        assert_eq!(RootPath::default().url(), "/");
    }

    #[test]
    fn it_is_taken_off_once_and_as_whole_parts() {
        let root = RootPath::parse("/a/b").unwrap();
        let rest = |root: &RootPath, text: &str| {
            root.taken_off(&text.parse().unwrap()).map(|uri| uri.to_string())
        };
        for (given, left) in [
            ("/a/b/v1/models?x=/a/b", Some("/v1/models?x=/a/b")),
            ("/a/b/a/b/v1", Some("/a/b/v1")),
            ("/a/b", Some("/")),
            ("/a/b?x", Some("/?x")),
            ("/a/b/", Some("/")),
            ("/a/b//v1/%2e%2e", Some("//v1/%2e%2e")),
            ("http://host:1/a/b/v1?x", Some("http://host:1/v1?x")),
            ("/a/bc/v1", None),
            ("/a/%62/v1", None),
            ("/a/B/v1", None),
            ("/v1/a/b", None),
            ("/a", None),
            ("*", None),
        ] {
            assert_eq!(rest(&root, given).as_deref(), left, "{given}");
        }
        assert_eq!(rest(&RootPath::default(), "/v1/models"), None);
        assert_eq!(rest(&RootPath::default(), "//v1/models"), None);
    }
}
