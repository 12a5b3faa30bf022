//! Philox4x32-10: the counter-based random numbers of token sampling.
//!
//! Owns the generator and the mapping from a token's place to the generator's input; the sampler
//! decides what to do with the number. It is stateless: the same (seed, choice, position, draw)
//! gives the same number on any machine, in any batch, after any failover.
//!
//! J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;

/// Ten rounds of Philox4x32 over `counter` with `key`.
#[must_use]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL_0), key[1].wrapping_add(WEYL_1)];
        }
        let product_0 = u64::from(MULTIPLIER_0) * u64::from(counter[0]);
        let product_1 = u64::from(MULTIPLIER_1) * u64::from(counter[2]);
        counter = [
            (product_1 >> 32) as u32 ^ counter[1] ^ key[0],
            product_1 as u32,
            (product_0 >> 32) as u32 ^ counter[3] ^ key[1],
            product_0 as u32,
        ];
    }
    counter
}

/// A uniform number in [0, 1) with 53 random bits, for draw `draw` of the token at output position
/// `position`.
///
/// The seed fills the generator's 64-bit key; `choice` has a counter word of its own. No two (seed,
/// choice, position, draw) share an input.
#[must_use]
pub fn uniform(seed: u64, choice: u32, position: u32, draw: u32) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let words = philox4x32_10([position, draw, choice, 0], key);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of the Random123 distribution.
    #[test]
    fn known_answers() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_in_range_and_each_input_matters() {
        let base = uniform(7, 0, 0, 0);
        for other in [
            uniform(8, 0, 0, 0),
            uniform(7 | 1 << 40, 0, 0, 0),
            uniform(7, 1, 0, 0),
            uniform(7, 0, 1, 0),
            uniform(7, 0, 0, 1),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
        let mean = (0..4096)
            .map(|i| uniform(3, 0, i, 0))
            .inspect(|u| assert!((0.0..1.0).contains(u)))
            .sum::<f64>()
            / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
