//! Every backend refuses invalid arguments in the same words.
use kernels::backend::{
    Activation, AttentionAt, AttentionShape, Batch, Buffer, DType, DeltaAt, DeltaInput, DeltaShape,
    DeltaWeights, ExpertActivation, HostMatrix, KvShape, KvStorage, LayerNorm, PlainActivation,
    QkNorm, QkvInput, QkvWeights, RopeTable, Routing, Rule, RuleWeights, SeqRows, StatesShape,
};
use kernels::collective::single_rank;
use kernels::cpu::Precision;
use kernels::sampling::{SampleParams, SampleRow};
use kernels::{Backend, CpuBackend, KernelError, ReferenceBackend};

use crate::rig::fake_cuda_backend;

const WIDTH: usize = 8;

fn matrix<'a>(data: &'a [u8], rows: usize, cols: usize) -> HostMatrix<'a> {
    let (col_start, row_stride) = (0, cols);
    HostMatrix { data, dtype: DType::F32, rows, cols, col_start, row_stride, scales: None }
}

fn at<'a>(shape: &'a AttentionShape, batch: &'a Batch<'a>) -> AttentionAt<'a> {
    AttentionAt { shape, batch, layer: 0 }
}

/// The backend's errors for calls with one fault each.
fn refusals<B: Backend>(backend: &mut B) -> Vec<String> {
    let zeros = vec![0; 4 * 3 * WIDTH * WIDTH];
    let square = backend.load_matrix(&[matrix(&zeros, WIDTH, WIDTH)]).unwrap();
    let tall = backend.load_matrix(&[matrix(&zeros, 3 * WIDTH, WIDTH)]).unwrap();
    let odd = backend.load_matrix(&[matrix(&zeros, 3, WIDTH)]).unwrap();
    let experts = backend.load_stack(&vec![matrix(&zeros, WIDTH, WIDTH); 4]).unwrap();
    let ones = backend.load_vector(&[1.0; WIDTH]).unwrap();
    let long = backend.load_vector(&[1.0; WIDTH + 1]).unwrap();
    let rope = |backend: &mut B, q_scale: Option<&[f32]>| RopeTable {
        cos: backend.load_vector(&[1.0; 16]).unwrap(),
        sin: backend.load_vector(&[0.0; 16]).unwrap(),
        q_scale: q_scale.map(|scale| backend.load_vector(scale).unwrap()),
    };
    // With factors of q for fewer positions than can be rotated.
    let (rope, short) = (rope(backend, None), rope(backend, Some(&[1.0])));
    let kv = KvShape {
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 8,
        latent: None,
        block_size: 4,
        num_blocks: 2,
        storage: KvStorage::AsTaken,
    };
    let mut cache = backend.new_kv_cache(kv).unwrap();
    let mut host = backend.new_host_kv(kv).unwrap();
    let routing = Routing::softmax(2, 1, true);
    let mut routes = backend.new_routes(2, routing).unwrap();
    // A new buffer's number of rows is up to the device.
    let mut buffer = |width, rows, is_input| {
        let made = match is_input {
            true => backend.new_input_buffer(2, width),
            false => backend.new_buffer(2, width),
        };
        let mut made = made.unwrap();
        made.set_rows(rows).unwrap();
        made
    };
    let (mut x, mut sum) = (buffer(WIDTH, 2, true), buffer(WIDTH, 2, false));
    let (fewer, mut wide) = (buffer(WIDTH, 1, false), buffer(WIDTH + 8, 2, false));
    let mut wide_input = buffer(WIDTH + 8, 2, true);
    let (mut queries, mut out) = (buffer(WIDTH, 2, true), buffer(WIDTH, 2, true));
    let mut all = Vec::new();
    let mut says = |result: Result<(), KernelError>| all.push(result.unwrap_err().to_string());

    says(backend.embed(&square, &[0], 0, 1.0, &mut wide));
    says(backend.add_rmsnorm(&mut sum, Some(&fewer), &ones, 0.0, &mut x));
    says(backend.add_rmsnorm(&mut sum, None, &long, 0.0, &mut x));
    says(backend.add_rmsnorm(&mut sum, None, &ones, 0.0, &mut wide_input));
    says(backend.add_normed_rmsnorm(&mut sum, &fewer, &long, &ones, 0.0, &mut x));
    let norm = |bias| LayerNorm { weight: &ones, bias };
    says(backend.add_layernorm(&mut sum, Some(&fewer), norm(&ones), 0.0, &mut x));
    says(backend.add_layernorm(&mut sum, None, norm(&long), 0.0, &mut x));
    says(backend.add_layernorm(&mut sum, None, norm(&ones), 0.0, &mut wide_input));
    says(backend.add_normed(&mut sum, Some((&fewer, &ones)), 0.0, &mut x));
    says(backend.add_normed(&mut sum, None, 0.0, &mut wide_input));
    says(backend.add(&mut sum, &fewer));
    says(backend.linear(&wide_input, &square, None, &mut sum));
    says(backend.linear(&x, &square, None, &mut wide));
    says(backend.linear(&x, &square, Some(&long), &mut sum));
    says(backend.linear_columns(&x, 1, &square, None, &mut sum));
    says(backend.gate_up(&x, &odd, None, None, Activation::Silu, &mut wide_input));
    says(backend.gate_up(&x, &square, None, Some(&sum), Activation::Silu, &mut wide_input));
    let squared = PlainActivation::SquaredRelu;
    says(backend.activated(&x, &square, Some(&long), None, squared, &mut queries));
    says(backend.activated(&x, &square, None, Some(&fewer), squared, &mut queries));
    says(backend.activated(&x, &square, None, None, squared, &mut wide_input));
    let qk = QkNorm { columns: [4, 4], sections: [1; 2], parts: 1, counts: [4; 2], eps: 0.0 };
    says(backend.qk_squares(&sum, &QkNorm { columns: [8, 4], ..qk }, &mut wide));
    says(backend.qk_squares(&sum, &QkNorm { parts: 3, ..qk }, &mut wide));
    says(backend.qk_squares(&sum, &QkNorm { sections: [0, 1], ..qk }, &mut wide));
    says(backend.qk_squares(&sum, &QkNorm { counts: [0, 1], ..qk }, &mut wide));
    says(backend.qk_squares(&sum, &qk, &mut wide));
    says(backend.qk_scale(&mut sum, &qk, &fewer, &ones));
    says(backend.qk_scale(&mut sum, &qk, &fewer, &long));
    says(backend.lm_head(&x, &[0, 2], &square, None, &mut sum));
    says(backend.lm_head(&x, &[0], &square, Some(0.0), &mut sum));
    says(backend.route(&x, &square, None, &mut routes));
    says(backend.assign(&[0, 2], &mut routes));
    says(backend.assign(&[0, 1, 0], &mut routes));
    let silu = ExpertActivation::Silu;
    says(backend.experts_gate_up(&wide_input, &experts, None, silu, &routes, &mut x));
    says(backend.experts_gate_up(&x, &experts, Some(&long), silu, &routes, &mut wide_input));
    says(backend.experts_down(&x, 1, &experts, None, &routes, &mut sum));

    let shape = AttentionShape {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 8,
        norm_eps: 0.0,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    let seq = SeqRows { row_start: 0, num_rows: 2, context_len: 2, table_start: 0, table_len: 1 };
    let (seqs, far) = ([seq], [SeqRows { context_len: 9, ..seq }]);
    let good = Batch { positions: &[0, 1], slots: &[0, 1], seqs: &seqs, block_tables: &[0] };
    let bias = Some(backend.load_vector(&[0.0; 3]).unwrap());
    let unlike = QkvWeights { weight: square, bias: None, q_norm: None, k_norm: None };
    let weights = QkvWeights { weight: tall, bias: None, q_norm: None, k_norm: None };
    let tall = backend.load_matrix(&[matrix(&zeros, 3 * WIDTH, WIDTH)]).unwrap();
    let biased = QkvWeights { weight: tall, bias, q_norm: None, k_norm: None };
    let qkv = |weights, addend| QkvInput { x: &x, weights, addend, rope: &rope };
    let (cache, q) = (&mut cache, &mut wide_input);
    says(backend.qkv_rope_write(qkv(&unlike, None), at(&shape, &good), cache, q));
    says(backend.qkv_rope_write(qkv(&weights, None), at(&shape, &good), cache, q));
    let q = &mut queries;
    says(backend.qkv_rope_write(qkv(&weights, Some(&sum)), at(&shape, &good), cache, q));
    for batch in [
        Batch { slots: &[0], ..good },
        Batch { slots: &[0, 8], ..good },
        Batch { positions: &[0, 4], ..good },
    ] {
        says(backend.qkv_rope_write(qkv(&weights, None), at(&shape, &batch), cache, q));
    }
    for shape in [
        AttentionShape { num_kv_heads: 0, ..shape },
        AttentionShape { head_dim: 6, ..shape },
        AttentionShape { sliding_window: Some(0), ..shape },
        AttentionShape { softcap: Some(f32::NAN), ..shape },
        AttentionShape { latent: Some(4), ..shape },
    ] {
        says(backend.qkv_rope_write(qkv(&weights, None), at(&shape, &good), cache, q));
    }
    let few = QkvInput { rope: &short, ..qkv(&weights, None) };
    says(backend.qkv_rope_write(few, at(&shape, &good), cache, q));
    let layer = AttentionAt { layer: 1, ..at(&shape, &good) };
    says(backend.qkv_rope_write(qkv(&weights, None), layer, cache, q));
    says(backend.qkv_rope_write(qkv(&biased, None), at(&shape, &good), cache, q));
    says(backend.rope_write(&mut sum, &rope, at(&shape, &good), cache, q));
    says(backend.paged_attention(q, Some(&ones), at(&shape, &good), cache, &mut out));
    for batch in [Batch { block_tables: &[2], ..good }, Batch { seqs: &far, ..good }] {
        says(backend.paged_attention(q, None, at(&shape, &batch), cache, &mut out));
    }
    says(backend.heads_product(q, &experts, 1.0, &mut out));

    let rule = Rule::GatedDelta;
    let layer =
        DeltaShape { rule, key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 8, kernel: 2 };
    let states = StatesShape { num_layers: 1, slots: 2, layer };
    let none = StatesShape { layer: DeltaShape { kernel: 1, ..layer }, ..states };
    says(backend.new_states(none).map(drop));
    let mut states = backend.new_states(states).unwrap();
    let mut buffer = |width, rows| {
        let mut made = backend.new_buffer(2, width).unwrap();
        made.set_rows(rows).unwrap();
        made
    };
    let (qkvz, ba, less) = (buffer(32, 2), buffer(2, 2), buffer(2, 1));
    let mut vector = |len| backend.load_vector(&vec![1.0; len]).unwrap();
    let [conv, decay, dt_bias, norm] = [48, 1, 1, 8].map(&mut vector);
    let rule = RuleWeights::GatedDelta { norm };
    let weights = DeltaWeights { conv, decay, dt_bias, rule };
    let [conv, decay, dt_bias, norm] = [32, 1, 1, 8].map(&mut vector);
    let narrow = DeltaWeights { conv, decay, dt_bias, rule: RuleWeights::GatedDelta { norm } };
    let [conv, decay, dt_bias, skip] = [48, 1, 1, 1].map(vector);
    let rule = RuleWeights::Mamba2 { conv_bias: None, skip };
    let other = DeltaWeights { conv, decay, dt_bias, rule };
    let input = |qkvz, ba, weights| DeltaInput { qkvz, ba, weights, eps: 0.0 };
    let own = |states| DeltaAt { batch: &good, states, layer: 0 };
    for (input, at) in [
        (input(&wide, &ba, &weights), own(&[1])),
        (input(&qkvz, &less, &weights), own(&[1])),
        (input(&qkvz, &ba, &narrow), own(&[1])),
        (input(&qkvz, &ba, &other), own(&[1])),
        (input(&qkvz, &ba, &weights), own(&[2])),
        (input(&qkvz, &ba, &weights), own(&[0, 1])),
        (input(&qkvz, &ba, &weights), DeltaAt { layer: 1, ..own(&[1]) }),
    ] {
        says(backend.delta_attention(input, at, &mut states, &mut out));
    }
    says(backend.gate(&fewer, &mut out));

    says(backend.swap_out(cache, &mut host, &[(2, 0)]));
    says(backend.swap_in(cache, &mut host, &[(0, 0), (0, 1)]));

    let params = SampleParams::default();
    let row = SampleRow { params: &params, prompt: &[], output: &[], allowed: None };
    let mut sampled = Vec::new();
    says(backend.sample(&sum, WIDTH + 1, 0, &[row], &mut sampled));
    says(backend.sample(&sum, WIDTH, 2, &[row], &mut sampled));
    says(backend.logprobs(&sum, WIDTH, 0, &[8], 1, &mut sampled));
    let beyond = 1..3;
    says(backend.read_rows(&sum, std::slice::from_ref(&beyond), &mut Vec::new()));
    all
}

#[test]
fn every_backend_refuses_in_the_same_words() {
    let wanted = refusals(&mut ReferenceBackend::new(single_rank()));
    assert!(wanted.len() > 35, "{wanted:#?}");
    let mut cpu = CpuBackend::new(1, Precision::Float32, single_rank()).unwrap();
    assert_eq!(refusals(&mut cpu), wanted);
    assert_eq!(refusals(&mut fake_cuda_backend(false, single_rank())), wanted);
}
