//! PURE: which decode steps share a graph, which products share a plan, and a cache for both.
use std::collections::HashMap;
use std::hash::Hash;

/// Row counts that decode graphs are captured for; a step takes the smallest that holds it. They
/// are close together for short steps: a graph computes nothing for missing rows, but still
/// launches their blocks.
const ROWS: [u32; 22] =
    [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512];

/// The bucket of a decode step of `rows` rows, with steps limited to `rows_max`; `None` if it is
/// too large for a graph.
#[must_use]
pub fn decode_bucket(rows: u32, rows_max: u32) -> Option<u32> {
    if rows == 0 || rows > rows_max {
        return None;
    }
    ROWS.into_iter().find(|bucket| *bucket >= rows).map(|bucket| bucket.min(rows_max))
}

/// The buckets of all decode steps that have a graph, with steps limited to `rows_max` rows.
#[must_use]
pub fn decode_buckets(rows_max: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (1..=rows_max.min(ROWS[ROWS.len() - 1]))
        .filter_map(|rows| decode_bucket(rows, rows_max))
        .collect();
    all.dedup();
    all
}

/// The row count that a product's algorithm is chosen for. Buckets are close together where a tile
/// more or less matters, and closest for decode steps: the best for 33 rows need not be the best
/// for 64.
#[must_use]
pub fn product_bucket(rows: u32) -> u32 {
    let step = match rows {
        0..=64 => 8,
        65..=512 => 64,
        513..=2048 => 256,
        _ => 1024,
    };
    rows.max(1).div_ceil(step).saturating_mul(step)
}

/// State of a key: seen in a warm-up run, or with its value.
#[derive(Debug)]
enum Entry<V> {
    Warm,
    Made(V),
}

/// Action for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStage {
    /// First use: run as is, so that everything loaded or chosen at first use is ready.
    Warm,
    /// Second use: make the value.
    Make,
    /// Later uses: use the value.
    Use,
}

/// A bounded cache whose keys are seen once before their value is made. Evicts the least recently
/// used key.
#[derive(Debug)]
pub struct StagedCache<K, V> {
    entries: HashMap<K, (Entry<V>, u64)>,
    capacity: usize,
    clock: u64,
}

impl<K: Hash + Eq + Copy, V> StagedCache<K, V> {
    /// Creates a cache of at most `capacity` keys.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { entries: HashMap::new(), capacity: capacity.max(1), clock: 0 }
    }

    /// Returns the action for `key` and marks it as used.
    pub fn stage(&mut self, key: K) -> CacheStage {
        self.clock += 1;
        let clock = self.clock;
        if let Some((entry, used)) = self.entries.get_mut(&key) {
            *used = clock;
            return match entry {
                Entry::Warm => CacheStage::Make,
                Entry::Made(_) => CacheStage::Use,
            };
        }
        self.put(key, Entry::Warm);
        CacheStage::Warm
    }

    /// Returns the value of `key`, if it has one.
    #[must_use]
    pub fn get(&self, key: &K) -> Option<&V> {
        match self.entries.get(key) {
            Some((Entry::Made(value), _)) => Some(value),
            _ => None,
        }
    }

    /// Sets the value of `key`.
    pub fn insert(&mut self, key: K, value: V) {
        self.clock += 1;
        self.put(key, Entry::Made(value));
    }

    fn put(&mut self, key: K, entry: Entry<V>) {
        if !self.entries.contains_key(&key) && self.entries.len() >= self.capacity {
            let oldest = self.entries.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, (entry, self.clock));
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Number of values.
    #[must_use]
    pub fn made(&self) -> usize {
        self.entries.values().filter(|(entry, _)| matches!(entry, Entry::Made(_))).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_it() {
        for rows in 1..=512 {
            let bucket = decode_bucket(rows, 512).unwrap();
            assert!(bucket >= rows && bucket <= 512);
            assert!(decode_bucket(bucket, 512) == Some(bucket));
            assert!(rows == 1 || bucket >= decode_bucket(rows - 1, 512).unwrap());
            // At most half of a bucket is empty.
            assert!(bucket < rows * 2, "{rows} rows in {bucket}");
        }
        assert_eq!(decode_bucket(0, 512), None);
        assert_eq!(decode_bucket(513, 1024), None);
        // Buffers have `rows_max` rows: no bucket is larger.
        assert_eq!(decode_bucket(9, 10), Some(10));
        assert_eq!(decode_bucket(11, 10), None);
    }

    #[test]
    fn buckets_are_listed_once() {
        assert_eq!(decode_buckets(0), [0; 0]);
        assert_eq!(decode_buckets(1), [1]);
        assert_eq!(decode_buckets(10), [1, 2, 4, 8, 10]);
        assert_eq!(decode_buckets(512), ROWS);
        assert_eq!(decode_buckets(4096), ROWS);
    }

    #[test]
    fn products_of_like_rows_share_a_plan() {
        assert_eq!(product_bucket(0), 8);
        assert_eq!(product_bucket(33), 40);
        assert_eq!(product_bucket(64), 64);
        assert_eq!(product_bucket(65), 128);
        assert_eq!(product_bucket(513), 768);
        assert_eq!(product_bucket(2049), 3072);
        assert_eq!(product_bucket(u32::MAX), u32::MAX);
        // Fewer rows are multiplied by other kernels, except in measurements.
        let buckets: std::collections::HashSet<u32> = (33..=8192).map(product_bucket).collect();
        assert!(buckets.len() <= 24, "{} plans per matrix", buckets.len());
        assert!((1..=8192).all(|rows| product_bucket(rows) >= rows));
    }

    #[test]
    fn a_key_is_warmed_then_made_then_used() {
        let mut cache = StagedCache::new(4);
        assert_eq!(cache.stage(1), CacheStage::Warm);
        assert_eq!(cache.get(&1), None);
        assert_eq!(cache.stage(1), CacheStage::Make);
        cache.insert(1, "graph");
        assert_eq!(cache.stage(1), CacheStage::Use);
        assert_eq!(cache.get(&1), Some(&"graph"));
        assert_eq!(cache.made(), 1);
        cache.clear();
        assert_eq!(cache.stage(1), CacheStage::Warm);
    }

    #[test]
    fn the_one_used_longest_ago_goes_first() {
        let mut cache = StagedCache::new(3);
        for key in 0..3 {
            cache.stage(key);
            cache.insert(key, key);
        }
        assert_eq!(cache.stage(0), CacheStage::Use);
        assert_eq!(cache.stage(3), CacheStage::Warm);
        assert_eq!(cache.get(&1), None);
        assert!(cache.get(&0).is_some() && cache.get(&2).is_some());
        assert_eq!(cache.entries.len(), 3);
    }
}
