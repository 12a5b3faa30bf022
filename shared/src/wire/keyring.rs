//! The cluster's secrets as a process knows them: several while one takes another's place, and they
//! may change while it runs.
//!
//! Who accepts links proves itself by the first of its own; who dials takes a proof by any of its
//! own, and answers by the same. So a secret is replaced in three steps, each over all processes in
//! any order: the new one is added behind the old, the two change places, the old one is removed.
use std::sync::{Arc, PoisonError, RwLock};

use super::auth::{AuthError, SECRET_MIN, Secret};

/// Most secrets.
pub const SECRETS_MAX: usize = 8;

/// At least one secret. Clones share them.
#[derive(Clone, Debug)]
pub struct Keyring(Arc<RwLock<Vec<Secret>>>);

/// What is no list of secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyringError {
    /// The only one cannot be used.
    #[error(transparent)]
    Secret(#[from] AuthError),
    /// One of several cannot.
    #[error("line {line} has {bytes} bytes: each line is a secret, and has at least {SECRET_MIN}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// How many bytes it has.
        bytes: usize,
    },
    /// There are too many.
    #[error("there are {0} secrets, at most {SECRETS_MAX} may be")]
    Many(usize),
}

impl Keyring {
    /// From a file's bytes. Of text, each line that is not empty is a secret; other bytes are one.
    ///
    /// # Errors
    /// [`KeyringError`].
    pub fn read(bytes: &[u8]) -> Result<Self, KeyringError> {
        let is_text =
            bytes.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        if !is_text {
            return Ok(Secret::new(bytes)?.into());
        }
        let lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).enumerate();
        let lines: Vec<(usize, &[u8])> = lines.filter(|(_, line)| !line.is_empty()).collect();
        match lines.as_slice() {
            [] => Err(AuthError::ShortSecret(0).into()),
            [(_, one)] => Ok(Secret::new(one)?.into()),
            many if many.len() > SECRETS_MAX => Err(KeyringError::Many(many.len())),
            many => {
                let secret = |(index, line): &(usize, &[u8])| {
                    let wrong = |_| KeyringError::Line { line: index + 1, bytes: line.len() };
                    Secret::new(line).map_err(wrong)
                };
                let secrets: Result<Vec<Secret>, _> = many.iter().map(secret).collect();
                Ok(Self(Arc::new(RwLock::new(secrets?))))
            }
        }
    }

    /// By which this process proves itself to those who dial, and shows itself to servers.
    #[must_use]
    pub fn first(&self) -> Secret {
        let secrets = self.0.read().unwrap_or_else(PoisonError::into_inner);
        // There is always one: nobody who has none knows this.
        secrets.first().cloned().unwrap_or_else(|| Secret::of_random([0; 32]))
    }

    /// All, the first one first.
    #[must_use]
    pub fn all(&self) -> Vec<Secret> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// These take the place of those known so far, wherever they are used.
    pub fn replace(&self, others: &Self) {
        let others = others.all();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// [Fingerprints](Secret::fingerprint) of all, the first one first.
    #[must_use]
    pub fn fingerprints(&self, cluster: &str) -> Vec<String> {
        self.all().iter().map(|secret| secret.fingerprint(cluster)).collect()
    }

    /// Whether this is the token of one of the secrets for a purpose.
    #[must_use]
    pub fn verify_token(&self, purpose: &str, token: &str) -> bool {
        self.all().iter().any(|secret| secret.verify_token(purpose, token))
    }
}

impl From<Secret> for Keyring {
    fn from(secret: Secret) -> Self {
        Self(Arc::new(RwLock::new(vec![secret])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn tokens(bytes: &[u8]) -> Vec<String> {
        Keyring::read(bytes).unwrap().all().iter().map(|it| it.token("t")).collect()
    }

    fn token(secret: &[u8]) -> String {
        Secret::new(secret).unwrap().token("t")
    }

    #[test]
    fn each_line_of_a_text_is_a_secret() {
        assert_eq!(tokens(A.as_bytes()), [token(A.as_bytes())]);
        assert_eq!(tokens(format!("\n {A}\r\n\n").as_bytes()), [token(A.as_bytes())]);
        let both = [token(A.as_bytes()), token(B.as_bytes())];
        assert_eq!(tokens(format!("{A}\n{B}\n").as_bytes()), both);
        assert_eq!(tokens(format!("\t{A}\r\n\r\n{B}").as_bytes()), both);
        let binary = [&[0xff; 20][..], b"\n", &[7; 20]].concat();
        assert_eq!(tokens(&binary), [token(&binary)], "one, whatever bytes it has");
    }

    #[test]
    fn what_could_be_guessed_is_refused_and_named() {
        let error = |bytes: &[u8]| Keyring::read(bytes).unwrap_err();
        assert_eq!(error(b" \n"), AuthError::ShortSecret(0).into());
        assert_eq!(error(b"secret\n"), AuthError::ShortSecret(6).into());
        let second = format!("{A}\n\nshort\n");
        assert_eq!(error(second.as_bytes()), KeyringError::Line { line: 3, bytes: 5 });
        assert!(error(second.as_bytes()).to_string().contains("at least 32"));
        let many = [A; SECRETS_MAX + 1].join("\n");
        assert_eq!(error(many.as_bytes()), KeyringError::Many(9));
        assert!(Keyring::read([A; SECRETS_MAX].join("\n").as_bytes()).is_ok());
    }

    #[test]
    fn fingerprints_are_short_and_differ_between_secrets_and_clusters() {
        let both = Keyring::read(format!("{A}\n{B}").as_bytes()).unwrap();
        let [a, b] = both.fingerprints("c").try_into().unwrap();
        assert_eq!(
            Keyring::read(A.as_bytes()).unwrap().fingerprints("c"),
            std::slice::from_ref(&a)
        );
        assert!(a != b && a.len() == 16, "{a} {b}");
        assert!(!both.fingerprints("d").contains(&a));
        assert!(!token(A.as_bytes()).contains(&a));
    }

    #[test]
    fn whoever_has_a_keyring_has_what_replaces_it() {
        let keyring = Keyring::read(A.as_bytes()).unwrap();
        let held = keyring.clone();
        keyring.replace(&Keyring::read(format!("{B}\n{A}").as_bytes()).unwrap());
        assert_eq!(held.first().token("t"), token(B.as_bytes()));
        for (secret, known) in [(A, true), (B, true), ("c", false)] {
            let token = Secret::of_random([0; 32]).token(secret);
            let token = Secret::new(secret.as_bytes()).map_or(token, |it| it.token("admin"));
            assert_eq!(held.verify_token("admin", &token), known, "{secret}");
        }
    }
}
