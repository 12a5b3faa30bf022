//! Bytes that a rank has sent to other ranks, by transport.

/// Maximum number of transports counted separately; a process uses one or two.
const WAYS: usize = 4;

/// Byte counters; see the module's documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteCounters {
    ways: [(&'static str, u64); WAYS],
}

impl ByteCounters {
    /// Counts `bytes` sent by `way`.
    pub fn add(&mut self, way: &'static str, bytes: usize) {
        let slot = self.ways.iter_mut().find(|(known, _)| *known == way || known.is_empty());
        if let Some((known, sum)) = slot {
            *known = way;
            *sum += bytes as u64;
        }
    }

    /// The transports used, with their bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.ways.into_iter().filter(|(way, _)| !way.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_summed_by_way() {
        let mut tally = ByteCounters::default();
        assert_eq!(tally.iter().count(), 0);
        for (way, bytes) in [("a", 3), ("b", 1), ("a", 4), ("c", 1), ("d", 1), ("e", 1)] {
            tally.add(way, bytes);
        }
        // One transport too many: not counted.
        assert_eq!(tally.iter().collect::<Vec<_>>(), [("a", 7), ("b", 1), ("c", 1), ("d", 1)]);
    }
}
