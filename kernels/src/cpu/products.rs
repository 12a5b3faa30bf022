//! Matrix products. Gate and up are one product of both, then the activation of one times the
//! other.
use super::gemm::{self, Output};
use super::memory::Disjoint;
use super::pack::PANEL;
use super::{CpuBackend, CpuBuffer, CpuMatrix, CpuVector, GRAIN, elementwise};
use crate::backend::{Activation, Buffer as _, PlainActivation, ProductOps};
use crate::check;
use crate::error::KernelError;

impl ProductOps for CpuBackend {
    fn linear(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::product("linear", x, weight, bias, weight.rows(), out)?;
        out.set_rows(x.rows())?;
        self.product(&|i| x.row(i), weight, bias, out)
    }

    fn linear_columns(
        &mut self,
        x: &CpuBuffer,
        first: usize,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let op = "linear_columns";
        let end = check::columns(op, x, first, weight.cols())?;
        check::width(op, "out", out, weight.rows())?;
        check::vector(op, "bias", bias, weight.rows())?;
        out.set_rows(x.rows())?;
        self.product(&|i| &x.row(i)[first..end], weight, bias, out)
    }

    fn gate_up(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        addend: Option<&CpuBuffer>,
        activation: Activation,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let inner = check::gate_up(x, weight, bias, addend, out)?;
        out.set_rows(x.rows())?;
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, wide, .. } = self;
        let (isa, rows) = (*isa, x.rows());
        let acts = gemm::prepare(arithmetic, pool, acts, rows, x.width(), &|i| x.row(i))?;
        let out = Disjoint::new(out.values_mut());
        let bias = bias.map(|bias| &**bias);
        // Gate and up panels in one task, so that their product finds them in the cache.
        if inner.is_multiple_of(PANEL) {
            let half = gemm::pair_panels(rows) * PANEL;
            let sums = wide.get(pool.num_threads() * rows * half * 2)?;
            return gemm::multiply_pairs(
                isa,
                pool,
                &acts,
                weight,
                bias,
                sums,
                &|first, panels, sums| {
                    let (start, len) = (panels.start * PANEL, panels.len() * PANEL);
                    for (row, sums) in (first..).zip(sums.chunks_exact_mut(half * 2)) {
                        let (gate, up) = sums.split_at_mut(half);
                        if let Some(addend) = addend {
                            let (to_gate, to_up) = addend.row(row).split_at(inner);
                            elementwise::add(isa, &mut gate[..len], &to_gate[start..start + len]);
                            elementwise::add(isa, &mut up[..len], &to_up[start..start + len]);
                        }
                        // SAFETY: the columns belong to one task.
                        let out = unsafe { out.slice(row * inner + start, len) };
                        let (gate, up) = (&gate[..len], &up[..len]);
                        elementwise::activate_mul(isa, activation, gate, up, out);
                    }
                },
            );
        }
        let both = wide.get(rows * inner * 2)?;
        let to = Output { data: Disjoint::new(both), stride: inner * 2, first_row: 0, column: 0 };
        gemm::multiply(isa, pool, &acts, weight, bias, &to)?;
        let grain = (GRAIN / inner).max(1);
        let both = Disjoint::new(both);
        pool.run_ranges(rows, grain, &|range, _| {
            for row in range {
                // SAFETY: every row belongs to one task.
                let both = unsafe { both.slice(row * inner * 2, inner * 2) };
                if let Some(addend) = addend {
                    elementwise::add(isa, both, addend.row(row));
                }
                let (gate, up) = both.split_at(inner);
                // SAFETY: every row belongs to one task.
                let out = unsafe { out.slice(row * inner, inner) };
                elementwise::activate_mul(isa, activation, gate, up, out);
            }
        })
    }

    fn activated(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        addend: Option<&CpuBuffer>,
        activation: PlainActivation,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::activated(x, weight, bias, addend, out)?;
        out.set_rows(x.rows())?;
        self.product(&|i| x.row(i), weight, bias, out)?;
        let (isa, rows, inner) = (self.isa, x.rows(), out.width());
        let out = Disjoint::new(out.values_mut());
        self.pool.run_ranges(rows * inner, GRAIN / 4, &|range, _| {
            // SAFETY: every element belongs to one task.
            let own = unsafe { out.slice(range.start, range.len()) };
            if let Some(addend) = addend {
                elementwise::add(isa, own, &addend.values()[range]);
            }
            elementwise::activate(isa, activation, own);
        })
    }

    fn lm_head(
        &mut self,
        x: &CpuBuffer,
        rows: &[u32],
        weight: &CpuMatrix,
        cap: Option<f32>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let op = "lm_head";
        check::product(op, x, weight, None::<&CpuVector>, weight.rows(), out)?;
        check::below_bound(op, "row", rows, x.rows())?;
        check::attention::softcap(op, cap)?;
        out.set_rows(rows.len())?;
        self.product(&|i| x.row(rows[i] as usize), weight, None, out)?;
        let Some(cap) = cap else { return Ok(()) };
        let (isa, len) = (self.isa, out.values().len());
        let out = Disjoint::new(out.values_mut());
        self.pool.run_ranges(len, GRAIN / 16, &|range, _| {
            // SAFETY: every element belongs to one task.
            elementwise::soft_cap(isa, unsafe { out.slice(range.start, range.len()) }, cap);
        })
    }
}

impl CpuBackend {
    /// `out = x weight^T + bias`, where row `i` of `x` is `source(i)`. Arguments are already
    /// checked.
    fn product<'s>(
        &mut self,
        source: &(dyn Fn(usize) -> &'s [f32] + Sync),
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, .. } = self;
        let (rows, stride) = (out.rows(), out.width());
        let acts = gemm::prepare(arithmetic, pool, acts, rows, weight.cols(), source)?;
        let out = Output { data: Disjoint::new(out.values_mut()), stride, first_row: 0, column: 0 };
        gemm::multiply(*isa, pool, &acts, weight, bias.map(|b| &**b), &out)
    }
}
