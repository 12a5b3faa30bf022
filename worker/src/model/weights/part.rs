//! One rank's share of the tensors: which rectangle of each it takes; checked, but not read yet.
use std::ops::Range;

use kernels::backend::{HostMatrix, Scales};
use kernels::weights::Compact;

use super::Source;
use super::delta::{DeltaPart, GatedQ};
use super::latent::LatentPart;
use crate::model::ModelError;
use crate::model::config::NormKind;
use crate::model::experts::{Biases, ExpertParts};
use crate::model::modules::Module;
use crate::model::quantization::Tensors;
use crate::model::rope::distinct;
use crate::model::safetensors::TensorView;

/// One rank's share of one layer: checked, but not read yet.
pub(super) struct LayerPart<'a> {
    pub(super) input_norm: Option<NormPart>,
    pub(super) rope: usize,
    pub(super) latent: Option<LatentPart<'a>>,
    pub(super) delta: Option<DeltaPart<'a>>,
    /// Empty with latents and with linear attention.
    pub(super) qkv: Vec<HostMatrix<'a>>,
    pub(super) qkv_bias: Option<Vec<f32>>,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) qk_norm: Option<Vec<f32>>,
    pub(super) sinks: Option<Vec<f32>>,
    /// Empty without gates.
    pub(super) gate: Vec<HostMatrix<'a>>,
    pub(super) output: Vec<HostMatrix<'a>>,
    pub(super) output_bias: Option<Vec<f32>>,
    pub(super) output_norm: Option<Vec<f32>>,
    pub(super) post_norm: Option<NormPart>,
    pub(super) mlp: MlpPart<'a>,
    pub(super) down_norm: Option<Vec<f32>>,
}

/// A norm of the residual stream.
pub(super) struct NormPart {
    pub(super) weight: Vec<f32>,
    /// Only of LayerNorms: zeros if the model has none.
    pub(super) bias: Option<Vec<f32>>,
}

impl NormPart {
    fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        [Some(&self.weight), self.bias.as_ref()].into_iter().flatten().map(Vec::as_slice)
    }

    /// Divides what it makes.
    pub(super) fn divide(&mut self, by: f32) {
        let all = self.weight.iter_mut().chain(self.bias.iter_mut().flatten());
        all.for_each(|value| *value /= by);
    }
}

pub(super) enum MlpPart<'a> {
    Dense {
        gate_up: Vec<HostMatrix<'a>>,
        gate_up_bias: Option<Vec<f32>>,
        down: Vec<HostMatrix<'a>>,
        down_bias: Option<Vec<f32>>,
    },
    Experts(ExpertParts<'a>),
}

impl MlpPart<'_> {
    /// Whether it has a stack of experts in which some would stay as they are according to `keeps`
    /// if all had their form, and others have another.
    pub(super) fn has_mixed_experts(&self, keeps: &dyn Fn(&Compact) -> bool) -> bool {
        let Self::Experts(parts) = self else { return false };
        let is_mixed = |stack: &[HostMatrix<'_>]| {
            let mut alone = stack.iter().filter(|matrix| matrix.scales.is_some());
            Compact::of(stack).is_none()
                && alone.any(|matrix| Compact::of(&[*matrix]).is_some_and(|form| keeps(&form)))
        };
        is_mixed(&parts.gate_up) || parts.down.iter().any(|stack| is_mixed(stack))
    }
}

/// How matrices are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// As one matrix, in bf16.
    Small,
    /// As one matrix.
    Matrix,
    /// As a stack.
    Stack,
}

impl<'a> LayerPart<'a> {
    /// All matrices, those together that are loaded together.
    pub(super) fn loads(&self) -> Vec<(&[HostMatrix<'a>], Kind)> {
        let one = |matrix| (std::slice::from_ref(matrix), Kind::Matrix);
        let mut loads = match (&self.latent, &self.delta) {
            (Some(latent), _) => latent.loads(),
            (_, Some(delta)) => delta.loads(),
            _ => vec![(self.qkv.as_slice(), Kind::Matrix)],
        };
        if !self.gate.is_empty() {
            loads.push((self.gate.as_slice(), Kind::Matrix));
        }
        loads.extend(self.output.iter().map(one));
        match &self.mlp {
            MlpPart::Dense { gate_up, down, .. } => {
                loads.push((gate_up, Kind::Matrix));
                loads.extend(down.iter().map(one));
            }
            MlpPart::Experts(ExpertParts { router, gate_up, down, .. }) => {
                loads.extend([(router.as_slice(), Kind::Small), (gate_up, Kind::Stack)]);
                loads.extend(down.iter().map(|stack| (stack.as_slice(), Kind::Stack)));
            }
        }
        loads
    }

    /// All vectors, each of which is loaded by itself.
    pub(super) fn vectors(&self) -> Vec<&[f32]> {
        let of_stream = [&self.input_norm, &self.post_norm];
        let mut all: Vec<&[f32]> =
            of_stream.into_iter().flatten().flat_map(NormPart::vectors).collect();
        let of_mlp = match &self.mlp {
            MlpPart::Dense { gate_up_bias, down_bias, .. } => {
                [gate_up_bias.as_ref(), None, down_bias.as_ref()]
            }
            MlpPart::Experts(ExpertParts { biases: Biases { router, gate_up, down }, .. }) => {
                [gate_up.as_ref(), router.as_ref(), down.as_ref()]
            }
        };
        let others = [
            &self.qkv_bias,
            &self.q_norm,
            &self.k_norm,
            &self.qk_norm,
            &self.sinks,
            &self.output_bias,
            &self.output_norm,
            &self.down_norm,
        ];
        let others = others.into_iter().flatten().chain(of_mlp.into_iter().flatten());
        all.extend(others.map(Vec::as_slice));
        all.extend(self.latent.iter().flat_map(LatentPart::norms));
        all.extend(self.delta.iter().flat_map(DeltaPart::vectors));
        all
    }
}

/// Some outputs of a module.
struct Outputs {
    module: Module,
    /// Ranges of outputs, in the order in which they are taken.
    ranges: Vec<Range<usize>>,
}

impl Outputs {
    fn of(module: Module, ranges: Vec<Range<usize>>) -> Self {
        Self { module, ranges }
    }
}

/// Finds tensors and cuts out this rank's share.
#[derive(Clone, Copy)]
pub(super) struct Part<'a>(pub(super) Source<'a>);

impl<'a> Part<'a> {
    pub(super) fn layer(self, index: usize) -> Result<LayerPart<'a>, ModelError> {
        Layer { part: self, index }.read()
    }

    /// Returns this rank's rows of the embedding, which must not be packed.
    pub(super) fn embedding<'b>(&self, padding: &'b [u8]) -> Result<Vec<HostMatrix<'b>>, ModelError>
    where
        'a: 'b,
    {
        let embedding = self.vocabulary("model.embed_tokens.weight", padding)?;
        if embedding.iter().any(|it| matches!(it.scales, Some(Scales::Packed(_)))) {
            return Err(ModelError::Tensor {
                file: self.0.files.folder().to_owned(),
                tensor: "model.embed_tokens".to_owned(),
                message: "is packed: 4-bit embeddings are not supported".to_owned(),
            });
        }
        Ok(embedding)
    }

    /// Returns this rank's rows of a `[vocab, hidden]` tensor, zero-padded to `vocab_width`.
    pub(super) fn vocabulary<'b>(
        &self,
        name: &str,
        padding: &'b [u8],
    ) -> Result<Vec<HostMatrix<'b>>, ModelError>
    where
        'a: 'b,
    {
        let Source { config, shard, .. } = self.0;
        let tensor = self.weight(name, [config.vocab_size, config.hidden_size])?;
        let own = rows_of(&tensor, &shard.vocab);
        let rows = shard.vocab_width - shard.vocab.len();
        let behind = match own.scales {
            // Rows after the last one of a packed matrix read as zeros.
            Some(Scales::Packed(_)) => {
                tensor.cut(config.vocab_size..config.vocab_size + rows, 0..own.cols)
            }
            _ => HostMatrix { data: padding, rows, scales: None, ..own },
        };
        let mut parts = vec![own, behind];
        parts.retain(|part| part.rows > 0);
        Ok(parts)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.0.files.numbers(name, &[len])
    }

    /// Reads the weight of an RMSNorm and adds `norm_offset`.
    pub(super) fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut values = self.vector(name, len)?;
        values.iter_mut().for_each(|weight| *weight += self.0.config.norm_offset);
        Ok(values)
    }

    /// Reads a norm of the residual stream.
    pub(super) fn stream_norm(&self, name: &str) -> Result<NormPart, ModelError> {
        let hidden = self.0.config.hidden_size;
        let weight = self.norm(&format!("{name}.weight"), hidden)?;
        let bias = match self.0.config.norm_kind {
            NormKind::Rms => None,
            NormKind::Layer { has_bias: false } => Some(vec![0.0; hidden]),
            NormKind::Layer { has_bias: true } => {
                Some(self.vector(&format!("{name}.bias"), hidden)?)
            }
        };
        Ok(NormPart { weight, bias })
    }

    pub(super) fn weight(
        &self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<TensorView<'a>, ModelError> {
        self.tensors().weight(name, &shape)
    }

    fn tensors(&self) -> Tensors<'a> {
        Tensors { files: self.0.files, quantised: self.0.config.quantised }
    }
}

/// Finds the tensors of one layer.
pub(super) struct Layer<'a> {
    pub(super) part: Part<'a>,
    pub(super) index: usize,
}

impl<'a> Layer<'a> {
    fn read(&self) -> Result<LayerPart<'a>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        let rope = &config.ropes[self.index];
        let latent = config.latent.map(|latent| self.latent(&latent)).transpose()?;
        let own = config.delta.as_ref().filter(|_| config.is_linear(self.index));
        let delta = own.map(|delta| self.delta(delta)).transpose()?;
        let is_plain = latent.is_none() && delta.is_none();
        // Features of q and k in the order in which backends rotate them.
        let mut outputs = vec![
            Outputs::of(Module::Q, rope.rows(config.head_dim, shard.heads.clone())),
            Outputs::of(Module::K, rope.rows(config.head_dim, shard.kv_heads.clone())),
            Outputs::of(Module::V, vec![self.features(&shard.kv_heads)]),
        ];
        outputs.retain(|_| is_plain);
        let GatedQ { q, gate } = match config.gates_attention && is_plain {
            true => self.gated_q()?,
            false => GatedQ { q: Vec::new(), gate: Vec::new() },
        };
        let first = usize::from(!q.is_empty());
        let qkv: Vec<_> = q.into_iter().chain(self.rows(&outputs[first..])?).collect();
        let norm = |name: Option<&str>| name.map(|name| self.norm(name)).transpose();
        let stream = |name: Option<&str>| {
            name.map(|name| self.part.stream_norm(&self.name(name))).transpose()
        };
        let ropes = distinct(&config.ropes);
        let has_output_bias = config.output_bias && delta.is_none();
        Ok(LayerPart {
            input_norm: stream(config.norms.input)?,
            rope: ropes.iter().position(|kind| *kind == rope).unwrap_or(0),
            latent,
            qkv,
            qkv_bias: self.biases(config.qkv_bias && is_plain, &outputs)?,
            q_norm: self.head_norm("self_attn.q_norm")?.map(|mut norm| {
                norm.iter_mut().for_each(|weight| *weight *= config.query_scale);
                norm
            }),
            k_norm: self.head_norm("self_attn.k_norm")?,
            qk_norm: self.whole_norm(&outputs)?,
            sinks: self.sinks()?,
            gate,
            output: match &delta {
                Some(delta) => delta.output.clone(),
                None => {
                    let (heads, value) = (&shard.heads, config.value_dim());
                    self.cols(Module::O, &(heads.start * value..heads.end * value))?
                }
            },
            delta,
            output_bias: self.row_parallel_bias(has_output_bias, Module::O)?,
            output_norm: norm(config.norms.output)?,
            post_norm: stream(config.norms.post)?,
            mlp: self.mlp()?,
            down_norm: norm(config.norms.down)?,
        })
    }

    fn mlp(&self) -> Result<MlpPart<'a>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        if let Some(experts) = config.experts.as_ref().filter(|it| it.layers[self.index]) {
            let (tensors, layer) = (self.part.tensors(), format!("model.layers.{}", self.index));
            let found = ExpertParts::find(tensors, experts, &layer, config.hidden_size, shard);
            return Ok(MlpPart::Experts(found?));
        }
        self.refuse_scaled_activation()?;
        let inner = &shard.intermediate;
        let gate_up: Vec<Outputs> = [Module::Gate, Module::Up]
            .into_iter()
            .filter(|module| module.is_known(config))
            .map(|module| Outputs::of(module, vec![inner.clone()]))
            .collect();
        Ok(MlpPart::Dense {
            gate_up: self.rows(&gate_up)?,
            gate_up_bias: self.biases(config.mlp_bias, &gate_up)?,
            down: self.cols(Module::Down, inner)?,
            down_bias: self.row_parallel_bias(config.mlp_bias, Module::Down)?,
        })
    }

    /// AutoAWQ moves factors of the down projection into the activation of MLPs without a gate,
    /// which becomes `activation(x) / scales`. Without them the results would be wrong.
    fn refuse_scaled_activation(&self) -> Result<(), ModelError> {
        let files = self.part.0.files;
        let names = ["mlp.act.scales", "mlp.act_fn.scales"].map(|name| self.name(name));
        let Some(tensor) = names.into_iter().find(|name| files.has(name)) else { return Ok(()) };
        let message = "scales the MLP's activation, as AutoAWQ does for models whose MLP has no \
                       gate: this is not supported, use a checkpoint in bf16 or one made by GPTQ";
        let (file, message) = (files.folder().to_owned(), message.to_owned());
        Err(ModelError::Tensor { file, tensor, message })
    }

    pub(super) fn name(&self, suffix: &str) -> String {
        format!("model.layers.{}.{suffix}", self.index)
    }

    /// Features of these heads.
    fn features(&self, heads: &Range<usize>) -> Range<usize> {
        let head_dim = self.part.0.config.head_dim;
        heads.start * head_dim..heads.end * head_dim
    }

    /// Finds the matrix of the checkpoint that contains a module.
    fn matrix(&self, module: Module) -> Result<TensorView<'a>, ModelError> {
        let place = module.place(self.part.0.config);
        self.part.weight(&self.name(&format!("{}.weight", place.name)), place.shape)
    }

    /// Cuts these outputs out of column-parallel modules.
    fn rows(&self, wanted: &[Outputs]) -> Result<Vec<HostMatrix<'a>>, ModelError> {
        let mut parts = Vec::new();
        for Outputs { module, ranges } in wanted {
            let tensor = self.matrix(*module)?;
            let rows = ranges.iter().map(|own| module.rows(self.part.0.config, own));
            parts.extend(rows.map(|rows| rows_of(&tensor, &rows)));
        }
        Ok(parts)
    }

    /// Cuts a row-parallel module with these inputs into one matrix per part of its sum.
    fn cols(&self, module: Module, own: &Range<usize>) -> Result<Vec<HostMatrix<'a>>, ModelError> {
        Ok(self.parts_of(&self.matrix(module)?, own))
    }

    /// Cuts these inputs of a row-parallel tensor into one matrix per part of its sum.
    pub(super) fn parts_of(
        &self,
        tensor: &TensorView<'a>,
        own: &Range<usize>,
    ) -> Vec<HostMatrix<'a>> {
        let parts = self.part.0.shard.parts;
        let width = own.len() / parts;
        let part = |i: usize| own.start + i * width..own.start + (i + 1) * width;
        (0..parts).map(|i| cols_of(tensor, &part(i))).collect()
    }

    /// Reads the biases of these outputs, if the model has them.
    fn biases(&self, has: bool, wanted: &[Outputs]) -> Result<Option<Vec<f32>>, ModelError> {
        if !has {
            return Ok(None);
        }
        let config = self.part.0.config;
        let mut joined = Vec::new();
        for Outputs { module, ranges } in wanted {
            let place = module.place(config);
            let name = self.name(&format!("{}.bias", place.name));
            let all = self.part.vector(&name, place.shape[0])?;
            ranges.iter().for_each(|own| joined.extend(&all[module.rows(config, own)]));
        }
        Ok(Some(joined))
    }

    /// Reads the bias of a row-parallel module: checked on every rank, kept on rank 0.
    fn row_parallel_bias(&self, has: bool, module: Module) -> Result<Option<Vec<f32>>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        let all = 0..config.hidden_size;
        let bias = self.biases(has, &[Outputs::of(module, vec![all])])?;
        Ok(bias.filter(|_| shard.rank == 0))
    }

    /// Reads an RMSNorm of what is added to the residual stream.
    fn norm(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let hidden = self.part.0.config.hidden_size;
        self.part.norm(&self.name(&format!("{name}.weight")), hidden)
    }

    /// Reads the RMSNorm of each head of q or k, in the order of its features, if the model has it.
    fn head_norm(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let config = self.part.0.config;
        let (rope, head_dim) = (&config.ropes[self.index], config.head_dim);
        if !config.qk_norm || config.is_linear(self.index) {
            return Ok(None);
        }
        let all = self.part.norm(&self.name(&format!("{name}.weight")), head_dim)?;
        Ok(Some((0..head_dim).map(|i| all[rope.source(head_dim, i)]).collect()))
    }

    /// Reads the norm of q and of k over all heads, for these outputs, if the model has it.
    fn whole_norm(&self, wanted: &[Outputs]) -> Result<Option<Vec<f32>>, ModelError> {
        let config = self.part.0.config;
        if !config.qk_norm_whole {
            return Ok(None);
        }
        let mut joined = Vec::new();
        for (Outputs { module, ranges }, name) in wanted.iter().zip(["q_norm", "k_norm"]) {
            let name = self.name(&format!("self_attn.{name}.weight"));
            let all = self.part.norm(&name, module.shape(config)[0])?;
            ranges.iter().for_each(|own| joined.extend(&all[own.clone()]));
        }
        Ok(Some(joined))
    }

    /// Reads the sinks of this rank's heads, if the model has them.
    fn sinks(&self) -> Result<Option<Vec<f32>>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        if !config.sinks {
            return Ok(None);
        }
        let all = self.part.vector(&self.name("self_attn.sinks"), config.num_heads)?;
        Ok(Some(all[shard.heads.clone()].to_vec()))
    }
}

pub(super) fn rows_of<'a>(tensor: &TensorView<'a>, rows: &Range<usize>) -> HostMatrix<'a> {
    tensor.cut(rows.clone(), 0..tensor.size().1)
}

fn cols_of<'a>(tensor: &TensorView<'a>, cols: &Range<usize>) -> HostMatrix<'a> {
    tensor.cut(0..tensor.size().0, cols.clone())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kernels::backend::DType;

    use super::*;
    use crate::model::config::ModelConfig;
    use crate::model::safetensors::WeightFiles;
    use crate::model::shard::Shard;

    #[test]
    fn experts_are_mixed_if_some_of_a_stack_would_have_stayed_quantised() {
        for name in ["qwen3-moe-w4a16", "qwen3-moe-fp8"] {
            check_mixing(name);
        }
    }

    fn check_mixing(model: &str) {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models");
        let folder = models.join(model);
        let (files, config) =
            (WeightFiles::open(&folder).unwrap(), ModelConfig::load(&folder).unwrap());
        let shard = Shard::new(&config, 0, 1).unwrap();
        let part = Part(Source { files: &files, config: &config, shard: &shard });
        let layers = || (0..config.num_layers).map(|i| part.layer(i).unwrap().mlp);
        assert!(layers().all(|mlp| !mlp.has_mixed_experts(&|_| true)), "all are quantised");
        let unpack = |matrices: &mut [HostMatrix<'_>]| {
            for matrix in matrices {
                (matrix.dtype, matrix.scales) = (DType::Bf16, None);
            }
        };
        let edited = |edit: &dyn Fn(&mut ExpertParts<'_>), keeps: bool| {
            let mut found = layers().find(|mlp| matches!(mlp, MlpPart::Experts(_))).unwrap();
            if let MlpPart::Experts(parts) = &mut found {
                edit(parts);
            }
            found.has_mixed_experts(&|_| keeps)
        };
        assert!(edited(&|parts| unpack(&mut parts.gate_up[4..6]), true), "one expert's");
        assert!(edited(&|parts| unpack(&mut parts.down[0][..1]), true));
        // Two stacks, each of one form.
        assert!(!edited(&|parts| unpack(&mut parts.gate_up), true));
        // All in FP8, but one has several groups of inputs.
        let regroup = |matrix: &mut HostMatrix<'_>| {
            if let Some(Scales::Blocks(scales)) = &mut matrix.scales {
                scales.block.1 = 16;
            }
        };
        let is_fp8 = model.ends_with("fp8");
        assert_eq!(edited(&|parts| regroup(&mut parts.gate_up[5]), true), is_fp8);
        // The quantised ones would become bf16 in any case.
        assert!(!edited(&|parts| unpack(&mut parts.gate_up[4..6]), false));
    }
}
