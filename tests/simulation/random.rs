//! Random numbers that depend only on the seed.

/// A generator of the splitmix family.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed, 0x5eed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        finish(self.0)
    }

    /// A number in `low..=high`.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// A number in `low..=high`, favouring small ones: for times over several orders of magnitude.
    pub(crate) fn skewed(&mut self, low: u64, high: u64) -> u64 {
        let cut = self.range(low, high);
        self.range(low, cut)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.range(0, from.len() as u64 - 1) as usize]
    }
}

fn finish(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Combines two numbers into one, so that any change of either shows.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    finish(a.rotate_left(25) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
}
