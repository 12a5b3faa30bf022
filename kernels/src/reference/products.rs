//! Matrix products, row by row.
use super::{ReferenceBackend, add_row, project};
use crate::backend::{Activation, Buffer as _, PlainActivation, ProductOps};
use crate::check;
use crate::error::KernelError;

impl ProductOps for ReferenceBackend {
    fn linear(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::product("linear", x, weight, bias, weight.rows(), out)?;
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            project(x.row(i), weight, bias.map(Vec::as_slice), out.row_mut(i));
        }
        Ok(())
    }

    fn linear_columns(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let op = "linear_columns";
        let end = check::columns(op, x, first, weight.cols())?;
        check::width(op, "out", out, weight.rows())?;
        check::vector(op, "bias", bias, weight.rows())?;
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            let bias = bias.map(Vec::as_slice);
            project(&x.row(i)[first..end], weight, bias, out.row_mut(i));
        }
        Ok(())
    }

    fn gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: Activation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let inner = check::gate_up(x, weight, bias, addend, out)?;
        out.set_rows(x.rows())?;
        self.row.resize(2 * inner, 0.0);
        for i in 0..x.rows() {
            project(x.row(i), weight, bias.map(Vec::as_slice), &mut self.row);
            add_row(&mut self.row, addend, i);
            let (gate, up) = self.row.split_at(inner);
            for ((y, g), u) in out.row_mut(i).iter_mut().zip(gate).zip(up) {
                *y = activated(activation, *g) * u;
            }
        }
        Ok(())
    }

    fn activated(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: PlainActivation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::activated(x, weight, bias, addend, out)?;
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            let row = out.row_mut(i);
            project(x.row(i), weight, bias.map(Vec::as_slice), row);
            add_row(row, addend, i);
            row.iter_mut().for_each(|x| *x = plainly_activated(activation, *x));
        }
        Ok(())
    }

    fn lm_head(
        &mut self,
        x: &Self::Buffer,
        rows: &[u32],
        weight: &Self::Matrix,
        cap: Option<f32>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::product("lm_head", x, weight, None::<&Vec<f32>>, weight.rows(), out)?;
        check::below_bound("lm_head", "row", rows, x.rows())?;
        check::attention::softcap("lm_head", cap)?;
        out.set_rows(rows.len())?;
        for (i, &row) in rows.iter().enumerate() {
            project(x.row(row as usize), weight, None, out.row_mut(i));
            if let Some(cap) = cap {
                out.row_mut(i).iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
            }
        }
        Ok(())
    }
}

fn activated(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

fn plainly_activated(activation: PlainActivation, x: f32) -> f32 {
    match activation {
        PlainActivation::GeluTanh => activated(Activation::GeluTanh, x),
        // NaN stays NaN, which `max` would not do.
        PlainActivation::SquaredRelu => {
            if x < 0.0 {
                0.0
            } else {
                x * x
            }
        }
    }
}
