//! The types of the elements of tiles, and their loads: f32 and pairs of bf16, each also in FP8.
use super::super::simd::{PairSimd, Simd};
use super::{CpuKvCache, Tiles};

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// [`Floats`]: f32.
    Floats,
    /// [`Pairs`]: two bf16 per word.
    Pairs,
    /// [`Floats`] in FP8.
    Fp8Floats,
    /// [`Pairs`] in FP8, two per 16 bits.
    Fp8Pairs,
}

/// An element of a tile.
pub(crate) trait Element: Copy + Default {
    /// All tiles of a cache; empty if it has other elements.
    fn tiles(cache: &CpuKvCache) -> &[Self];
}

/// Elements that are used as f32.
pub(crate) trait Floats: Element {
    /// Loads the first elements of `values`, which must have at least `LANES`.
    fn load<S: Simd>(values: &[Self]) -> S;

    /// As [`load`](Self::load), with zeros where `values` is too short.
    #[inline(always)]
    fn load_some<S: Simd>(values: &[Self]) -> S {
        if values.len() >= S::LANES {
            return Self::load(values);
        }
        let mut padded = [Self::default(); 16];
        padded[..values.len()].copy_from_slice(values);
        Self::load(&padded)
    }
}

/// Elements that are used as pairs of bf16.
pub(crate) trait Pairs: Element {
    /// Loads the first elements of `pairs`, which must have at least `LANES`.
    fn load<S: PairSimd>(pairs: &[Self]) -> S::Words;

    /// As [`load`](Self::load), with zeros where `pairs` is too short.
    #[inline(always)]
    fn load_some<S: PairSimd>(pairs: &[Self]) -> S::Words {
        if pairs.len() >= S::LANES {
            return Self::load::<S>(pairs);
        }
        let mut padded = [Self::default(); 16];
        padded[..pairs.len()].copy_from_slice(pairs);
        Self::load::<S>(&padded)
    }
}

impl Element for f32 {
    #[inline(always)]
    fn tiles(cache: &CpuKvCache) -> &[Self] {
        if let Tiles::Float32(data) = &cache.tiles { data } else { &[] }
    }
}

impl Floats for f32 {
    #[inline(always)]
    fn load<S: Simd>(values: &[Self]) -> S {
        S::load(values)
    }
}

impl Element for u8 {
    #[inline(always)]
    fn tiles(cache: &CpuKvCache) -> &[Self] {
        if let Tiles::Fp8(data) = &cache.tiles { data } else { &[] }
    }
}

impl Floats for u8 {
    #[inline(always)]
    fn load<S: Simd>(values: &[Self]) -> S {
        S::load_fp8(values)
    }
}

impl Element for u32 {
    #[inline(always)]
    fn tiles(cache: &CpuKvCache) -> &[Self] {
        if let Tiles::Bfloat16(data) = &cache.tiles { data } else { &[] }
    }
}

impl Pairs for u32 {
    #[inline(always)]
    fn load<S: PairSimd>(pairs: &[Self]) -> S::Words {
        S::load_words(pairs)
    }
}

impl Element for u16 {
    #[inline(always)]
    fn tiles(cache: &CpuKvCache) -> &[Self] {
        if let Tiles::Fp8Pairs(data) = &cache.tiles { data } else { &[] }
    }
}

impl Pairs for u16 {
    #[inline(always)]
    fn load<S: PairSimd>(pairs: &[Self]) -> S::Words {
        S::load_fp8_pairs(pairs)
    }
}
