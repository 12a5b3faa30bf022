//! PURE: fast hashes and pseudo-random numbers. None of them is cryptographic: use
//! [`crate::wire::auth`] to protect secrets.
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// wyhash's multiplier: odd, with as many bits set as clear, and without a pattern.
const FACTOR: u64 = 0xa076_1d64_78bd_642f;

/// Extends the hash `start` of preceding tokens by `tokens`.
#[must_use]
pub fn mix(start: u64, tokens: &[u32]) -> u64 {
    // Tokens and hashes may both be small numbers: spread one of them first.
    let start = start.wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(32);
    tokens
        .iter()
        .fold(start, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(GOLDEN).rotate_left(29))
}

/// Returns number `n` of the SplitMix64 sequence with this seed.
#[must_use]
pub fn split_mix(seed: u64, n: u64) -> u64 {
    let mut bits = seed.wrapping_add(n.wrapping_mul(GOLDEN));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A map keyed by our own ids, which is looked up for every token.
pub type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// A set of our own ids.
pub type IdSet<K> = HashSet<K, BuildHasherDefault<IdHasher>>;

/// Hashes ids with one multiplication.
///
/// The standard library's hash costs several times that, so that nobody can choose keys that all
/// fall into one place. Nobody can here: processes count their requests and sequences themselves,
/// and a front end of another process, which has proved that it belongs to the cluster, chooses no
/// more than the lower bits of its own numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut number = [0; 8];
            number[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(number));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // Both halves of the product: maps take the lowest bits for the place, the highest to tell
        // entries apart.
        let product = u128::from(self.0.rotate_left(5) ^ number) * u128::from(FACTOR);
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::hash::{BuildHasher as _, Hash};

    use super::*;
    use crate::ids::{RequestId, SeqId};

    fn hashed(id: impl Hash) -> u64 {
        BuildHasherDefault::<IdHasher>::default().hash_one(id)
    }

    /// Whether the hashes of these many fill the places of a map nearly as random numbers would,
    /// and so their marks: the lowest bits and the highest seven.
    fn spread(hashes: &[u64]) {
        let places: BTreeSet<u64> = hashes.iter().map(|hash| hash % hashes.len() as u64).collect();
        // Of random ones, 63 % are filled.
        assert!(places.len() * 100 > hashes.len() * 55, "{} places", places.len());
        let marks: BTreeSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        assert!(marks.len() > 100, "{} marks", marks.len());
    }

    #[test]
    fn ids_that_are_counted_fall_into_different_places() {
        spread(&(0..4096).map(|n| hashed(RequestId(n))).collect::<Vec<_>>());
        // Of one front end, of many, and those that several count at the same time.
        let link = |link: u64, n: u64| hashed(RequestId(link << 40 | n));
        spread(&(0..4096).map(|n| link(3, n)).collect::<Vec<_>>());
        spread(&(0..4096).map(|n| link(n, 1)).collect::<Vec<_>>());
        spread(&(0..4096).map(|n| link(n % 16, n / 16)).collect::<Vec<_>>());
        // Every second, and pairs.
        spread(&(0..4096).map(|n| hashed(SeqId(n * 2))).collect::<Vec<_>>());
        spread(&(0..4096).map(|n| hashed((RequestId(n / 4), n as u32 % 4))).collect::<Vec<_>>());
    }

    #[test]
    fn the_sequence_is_that_of_the_paper() {
        // The first numbers of Vigna's splitmix64.c for the seed 1234567.
        let found: Vec<u64> = (1..=3).map(|n| split_mix(1_234_567, n)).collect();
        let expected =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(found, expected);
    }
}
