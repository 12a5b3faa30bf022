//! The merged matrices of a site: how they are laid out on a rank, and those of an adapter.
use std::ops::Range;

use kernels::backend::{DType, HostMatrix};

use super::Site;
use super::files::AdapterFiles;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::modules::Module;

/// One adapter's merged matrices of a site in one layer, in f32.
pub(super) struct Matrices {
    /// A, `[ranks, inputs]`, for each part of the inputs.
    pub(super) downs: Vec<Vec<u8>>,
    /// B, scaled, `[outputs, ranks]`.
    pub(super) up: Vec<u8>,
}

/// The layout of a site's merged matrices on one rank.
#[derive(Debug)]
pub(super) struct Joint {
    pub(super) site: Site,
    /// The modules of the site.
    pub(super) modules: &'static [Module],
    /// The modules that some adapter changes in some layer.
    pub(super) used: Vec<Module>,
    /// The padded rank of each module.
    pub(super) rank: usize,
    /// This rank's outputs of each module of the site.
    pub(super) rows: Vec<Range<usize>>,
    /// This rank's inputs, one range per part of the sum.
    pub(super) parts: Vec<Range<usize>>,
}

impl Joint {
    /// Sum of the modules' ranks.
    pub(super) fn width(&self) -> usize {
        self.used.len() * self.rank
    }

    /// Whether a layer has one of its modules.
    pub(super) fn is_in(&self, config: &ModelConfig, layer: usize) -> bool {
        self.used.iter().any(|module| module.is_in(config, layer))
    }

    /// The matrices of an adapter that changes nothing.
    pub(super) fn zeros(&self) -> Matrices {
        let zeros = |rows: usize, cols: usize| vec![0; rows * cols * size_of::<f32>()];
        let width = self.width();
        Matrices {
            downs: self.parts.iter().map(|part| zeros(width, part.len())).collect(),
            up: zeros(self.outputs(), width),
        }
    }

    /// The matrices of an adapter; `None` if it does not change the site in this layer.
    pub(super) fn matrices(
        &self,
        adapter: &AdapterFiles,
        config: &ModelConfig,
        layer: usize,
    ) -> Result<Option<Matrices>, ModelError> {
        let mut found = Vec::new();
        for (place, module) in self.used.iter().enumerate() {
            if let Some(factors) = adapter.factors(layer, *module, config)? {
                found.push((place * self.rank, *module, factors));
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        let width = self.width();
        let down = |part: &Range<usize>| {
            let cols = part.len();
            let mut all = vec![0.0; width * cols];
            for (first, _, factors) in &found {
                factors.write_a(part.start, cols, &mut all[first * cols..][..self.rank * cols]);
            }
            bytes_of(&all)
        };
        let downs = self.parts.iter().map(down).collect();
        let mut all = vec![0.0; self.outputs() * width];
        for (column, module, factors) in &found {
            let (first, own) = self.outputs_of(*module);
            for (to, row) in (first..).zip(own) {
                factors.write_b(row, &mut all[to * width + column..][..factors.rank]);
            }
        }
        Ok(Some(Matrices { downs, up: bytes_of(&all) }))
    }

    /// Number of outputs of all modules, used or not.
    pub(super) fn outputs(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }

    /// Returns the first row of a module's outputs, and which outputs of the module they are.
    fn outputs_of(&self, module: Module) -> (usize, Range<usize>) {
        let before = self.modules.iter().take_while(|other| **other != module).count();
        let first = self.rows[..before].iter().map(Range::len).sum();
        (first, self.rows[before].clone())
    }
}

fn bytes_of(matrix: &[f32]) -> Vec<u8> {
    matrix.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A matrix in f32.
pub(super) fn host(data: &[u8], (rows, cols): (usize, usize)) -> HostMatrix<'_> {
    let dtype = DType::F32;
    HostMatrix { data, dtype, rows, cols, col_start: 0, row_stride: cols, scales: None }
}
