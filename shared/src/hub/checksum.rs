//! PURE: whether a content is the one that its name on the hub stands for.
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Takes a content piece by piece, and compares it with its name in the end.
pub(super) struct Verifier {
    /// With small letters.
    name: String,
    hash: Hash,
}

/// What the hub names contents by.
enum Hash {
    /// Large files.
    Sha256(Sha256),
    /// Small ones, as git does: the hash of a head, which has the size, and the content. Mirrors
    /// without git may take the content alone. SHA-1 is enough for what goes wrong on the way by
    /// accident, all that it is here for; against forgers there is TLS.
    Sha1 { with_head: Sha1, alone: Sha1 },
}

impl Verifier {
    /// One for a content of `size` bytes, if its name is a checksum.
    pub(super) fn new(name: &str, size: u64) -> Option<Self> {
        let is_hex = name.bytes().all(|it| it.is_ascii_hexdigit());
        let hash = match name.len() {
            64 if is_hex => Hash::Sha256(Sha256::new()),
            40 if is_hex => Hash::Sha1 {
                with_head: Sha1::new_with_prefix(format!("blob {size}\0")),
                alone: Sha1::new(),
            },
            _ => return None,
        };
        Some(Self { name: name.to_ascii_lowercase(), hash })
    }

    /// Takes the next piece.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match &mut self.hash {
            Hash::Sha256(hash) => hash.update(bytes),
            Hash::Sha1 { with_head, alone } => {
                with_head.update(bytes);
                alone.update(bytes);
            }
        }
    }

    /// Whether what came is what the name stands for, all of it.
    pub(super) fn agrees(self) -> bool {
        let Self { name, hash } = self;
        match hash {
            Hash::Sha256(hash) => hex(&hash.finalize()) == name,
            Hash::Sha1 { with_head, alone } => {
                hex(&with_head.finalize()) == name || hex(&alone.finalize()) == name
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `git hash-object`, `sha1sum` and `sha256sum` of nothing, and of `hello` and a line's end.
    const KNOWN: [(&str, &[&str]); 2] = [
        (
            "",
            &[
                "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
                "da39a3ee5e6b4b0d3255bfef95601890afd80709",
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            ],
        ),
        (
            "hello\n",
            &[
                "ce013625030ba8dba906f756967f9e9ca394464a",
                "f572d396fae9206628714fb2ce00f72e94f2258f",
                "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            ],
        ),
    ];

    /// Whether pieces of a content of `size` bytes are right.
    fn is_right(name: &str, size: u64, pieces: &[&str]) -> bool {
        let mut verifier = Verifier::new(name, size).unwrap();
        for piece in pieces {
            verifier.update(piece.as_bytes());
        }
        verifier.agrees()
    }

    #[test]
    fn contents_are_those_of_their_names_alone() {
        for (content, names) in KNOWN {
            let size = content.len() as u64;
            for name in names {
                assert!(is_right(name, size, &[content]), "{name}");
                let (first, rest) = content.split_at(content.len() / 2);
                assert!(is_right(&name.to_ascii_uppercase(), size, &[first, rest]), "{name}");
                assert!(!is_right(name, size, &["hellO\n"]), "{name}");
            }
            assert!(!is_right(names[0], size + 1, &[content]), "git's has the size in it");
        }
    }

    #[test]
    fn other_names_say_nothing_of_contents() {
        for name in ["", "abc", &"a".repeat(39), &"a".repeat(63), &"g".repeat(40), &"-".repeat(64)]
        {
            assert!(Verifier::new(name, 1).is_none(), "{name}");
        }
    }
}
