//! What a process shows etcd, or knows etcd by: certificates, keys and passwords. They are read
//! again whenever etcd is dialled, since those of a file are replaced before they expire, and the
//! process may run for longer.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns what is to be used now, or why that cannot be read.
type Reading = dyn Fn() -> Result<Vec<u8>, String> + Send + Sync;

/// A certificate, key or password. Clones share what was read last.
#[derive(Clone)]
pub struct Credential(Arc<Inner>);

struct Inner {
    /// Where it comes from, for the log.
    name: String,
    /// None for one that stays the same.
    read: Option<Box<Reading>>,
    last: Mutex<Vec<u8>>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never what it is.
        f.debug_tuple("Credential").field(&self.0.name).finish()
    }
}

impl From<Vec<u8>> for Credential {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Inner { name: String::new(), read: None, last: Mutex::new(bytes) }))
    }
}

impl From<String> for Credential {
    fn from(text: String) -> Self {
        text.into_bytes().into()
    }
}

impl Credential {
    /// One that `read` returns, now and whenever etcd is dialled. It is called `name` in the log.
    ///
    /// # Errors
    /// That of `read`, now. Later on, what was read before is used instead.
    pub fn read_again(
        name: String,
        read: impl Fn() -> Result<Vec<u8>, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let last = Mutex::new(read()?);
        Ok(Self(Arc::new(Inner { name, read: Some(Box::new(read)), last })))
    }

    /// What is to be used now.
    #[must_use]
    pub fn current(&self) -> Vec<u8> {
        let Inner { name, read, last } = &*self.0;
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        match read.as_ref().map(|read| read()) {
            None => {}
            Some(Ok(now)) if now == *last => {}
            Some(Ok(now)) => {
                tracing::info!("{name} has changed and is used from now on");
                *last = now;
            }
            Some(Err(error)) => {
                tracing::warn!(error, "{name} cannot be read again: what it was is still used");
            }
        }
        last.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_changed_is_used_and_what_cannot_be_read_is_not() {
        let source = Arc::new(Mutex::new(Ok(b"old".to_vec())));
        let reads = source.clone();
        let read = move || reads.lock().unwrap().clone();
        let credential = Credential::read_again("--etcd-key k".to_owned(), read.clone()).unwrap();
        let set = |now| *source.lock().unwrap() = now;
        assert_eq!(credential.current(), b"old");
        set(Ok(b"new".to_vec()));
        assert_eq!(credential.clone().current(), b"new");
        set(Err("gone".to_owned()));
        assert_eq!(credential.current(), b"new");
        let refused = Credential::read_again(String::new(), read).unwrap_err();
        assert_eq!(refused, "gone");
        assert!(!format!("{credential:?}").contains("new"));
    }
}
