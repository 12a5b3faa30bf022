//! PURE: the results of compiled specifications, grammars or errors; evicts the least recently used
//! first.
use std::collections::HashMap;
use std::sync::Arc;

use shared::protocol::GuideSpec;

/// Maximum number of entries.
const ENTRIES_MAX: usize = 128;
/// Maximum bytes of all entries together, as far as their size is known.
const BYTES_MAX: usize = 256 << 20;

/// The result of compiling a specification.
pub(super) type Compiled<T> = Result<Arc<T>, String>;

/// An LRU cache of compiled specifications.
#[derive(Debug)]
pub(super) struct Cache<T> {
    made: HashMap<GuideSpec, Entry<T>>,
    bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct Entry<T> {
    used: u64,
    bytes: usize,
    made: Compiled<T>,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { made: HashMap::new(), bytes: 0, uses: 0 }
    }
}

impl<T> Cache<T> {
    /// The cached result for `spec`.
    pub(super) fn get(&mut self, spec: &GuideSpec) -> Option<Compiled<T>> {
        self.uses += 1;
        let entry = self.made.get_mut(spec)?;
        entry.used = self.uses;
        Some(entry.made.clone())
    }

    /// Caches a result of about `bytes` bytes, not counting the specification itself. Entries that
    /// are too large on their own are not cached.
    pub(super) fn put(&mut self, spec: GuideSpec, made: Compiled<T>, bytes: usize) {
        self.uses += 1;
        self.remove(&spec);
        let bytes = bytes + spec.bytes();
        if bytes > BYTES_MAX {
            return;
        }
        while self.made.len() >= ENTRIES_MAX || self.bytes + bytes > BYTES_MAX {
            let oldest = self.made.iter().min_by_key(|(_, entry)| entry.used);
            let Some(oldest) = oldest.map(|(spec, _)| spec.clone()) else { break };
            self.remove(&oldest);
        }
        self.bytes += bytes;
        self.made.insert(spec, Entry { used: self.uses, bytes, made });
    }

    fn remove(&mut self, spec: &GuideSpec) {
        if let Some(entry) = self.made.remove(spec) {
            self.bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(n: usize) -> GuideSpec {
        GuideSpec::Regex(n.to_string())
    }

    fn kept(cache: &mut Cache<usize>, n: usize) -> Option<usize> {
        cache.get(&spec(n)).map(|made| *made.unwrap())
    }

    #[test]
    fn the_longest_unused_is_forgotten() {
        let mut cache = Cache::default();
        for n in 0..ENTRIES_MAX {
            cache.put(spec(n), Ok(Arc::new(n)), 1);
        }
        assert_eq!(kept(&mut cache, 0), Some(0));
        cache.put(spec(ENTRIES_MAX), Ok(Arc::new(ENTRIES_MAX)), 1);
        assert!(cache.get(&spec(1)).is_none());
        for n in [0, 2, ENTRIES_MAX] {
            assert_eq!(kept(&mut cache, n), Some(n));
        }
    }

    #[test]
    fn what_is_kept_is_bounded_in_bytes_and_errors_are_kept_as_well() {
        let mut cache = Cache::default();
        for n in 0..3 {
            cache.put(spec(n), Ok(Arc::new(n)), BYTES_MAX / 3 - 1);
        }
        assert_eq!(kept(&mut cache, 0), Some(0));
        cache.put(spec(3), Err("no".to_owned()), BYTES_MAX / 2);
        assert_eq!((kept(&mut cache, 0), kept(&mut cache, 1)), (Some(0), None));
        assert_eq!(kept(&mut cache, 2), None);
        assert_eq!(cache.get(&spec(3)), Some(Err("no".to_owned())));
        // Replaced by a smaller one.
        cache.put(spec(3), Ok(Arc::new(3)), 5);
        cache.put(spec(4), Ok(Arc::new(4)), BYTES_MAX / 2);
        assert_eq!((kept(&mut cache, 0), kept(&mut cache, 3)), (Some(0), Some(3)));
        cache.put(spec(5), Ok(Arc::new(5)), BYTES_MAX);
        assert_eq!((kept(&mut cache, 5), kept(&mut cache, 4)), (None, Some(4)));
    }
}
