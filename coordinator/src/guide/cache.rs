//! PURE: what was made of which specification, the longest unused forgotten first.
use std::collections::HashMap;
use std::sync::Arc;

use shared::protocol::GuideSpec;

/// Most specifications that are kept.
const ENTRIES_MAX: usize = 128;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Cache<T> {
    made: HashMap<GuideSpec, (u64, Arc<T>)>,
    uses: u64,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { made: HashMap::new(), uses: 0 }
    }
}

impl<T> Cache<T> {
    /// What was made of this one, if it is kept.
    pub(super) fn get(&mut self, spec: &GuideSpec) -> Option<Arc<T>> {
        self.uses += 1;
        let (used, made) = self.made.get_mut(spec)?;
        *used = self.uses;
        Some(made.clone())
    }

    /// Keeps what was made of this one.
    pub(super) fn put(&mut self, spec: GuideSpec, made: Arc<T>) {
        self.uses += 1;
        self.made.insert(spec, (self.uses, made));
        if self.made.len() > ENTRIES_MAX {
            let oldest = self.made.iter().min_by_key(|(_, (used, _))| *used);
            let oldest = oldest.map(|(spec, _)| spec.clone());
            oldest.and_then(|spec| self.made.remove(&spec));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_is_forgotten() {
        let spec = |n: usize| GuideSpec::Regex(n.to_string());
        let mut cache = Cache::default();
        for n in 0..ENTRIES_MAX {
            cache.put(spec(n), Arc::new(n));
        }
        assert_eq!(cache.get(&spec(0)).as_deref(), Some(&0));
        cache.put(spec(ENTRIES_MAX), Arc::new(ENTRIES_MAX));
        assert!(cache.get(&spec(1)).is_none());
        for kept in [0, 2, ENTRIES_MAX] {
            assert_eq!(cache.get(&spec(kept)).as_deref(), Some(&kept));
        }
    }
}
