//! One clear message for each error of the driver while a model is loaded and run.
use std::collections::HashMap;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernels::cuda::capacity::graph_nodes;
use serde_json::json;
use shared::protocol::Quantization;
use testkit::local_cluster::tutti_binary;
use testkit::models::{repository, variant};
use testkit::wait::PATIENCE;
use worker::model::config::ModelConfig;
use worker::model::safetensors::WeightFiles;
use worker::model::shard::Shard;
use worker::model::weights::{KeptSizes, Source, kept_sizes};

use crate::{described, fake, options, tutti, with_fake};

const BENCH: [&str; 9] = [
    "bench",
    "--device",
    "cuda",
    "--model",
    "tests/models/llama-gqa",
    "--decode-steps",
    "6",
    "--prompt-tokens",
    "20",
];

/// Runs a short measurement with a fault; returns its message.
fn fails(environment: &[(&str, &str)]) -> String {
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1"]);
    let (code, _, stderr) = with_fake(&args, environment);
    assert_eq!(code, 1, "{environment:?} {stderr}");
    let lines: Vec<&str> =
        stderr.trim_end().lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    lines[0].to_owned()
}

#[test]
fn a_model_is_measured_and_its_steps_become_graphs() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1,3"]);
    let environment = [("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("\"decode_b3\":") && stdout.contains("Fake GPU A"), "{stdout}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    let count = |what: &str| log.lines().filter(|line| line.starts_with(what)).count();
    // Two buckets, captured once each and replayed for all steps but the first two.
    assert!(
        count("capture") >= 2 && count("graph") >= 8,
        "{} {}",
        count("capture"),
        count("graph")
    );
    // Nothing is allocated once the first step is captured.
    let after = log.split_once("\ncapture").unwrap().1;
    assert!(!after.contains("\nalloc"), "memory is allocated while serving");
    // A replayed step is one copy in, one graph launch, one copy out.
    let last = log.rfind("\ngraph").unwrap();
    let before = log[..last].rfind("\ngraph").unwrap();
    let step: Vec<&str> = log[before + 1..last].lines().skip(1).collect();
    assert_eq!(step.len(), 2, "{step:?}");
    assert!(step[0].starts_with("download"), "{step:?}");
    assert!(step[1].starts_with("upload") && step[1].ends_with("pinned"), "{step:?}");
}

#[test]
fn without_graphs_every_step_is_called() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1", "--no-cuda-graphs", "--no-cuda-overlap"]);
    let environment = [("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    assert_eq!(with_fake(&args, &environment).0, 0);
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(!log.contains("capture") && !log.contains("\ngraph"));
}

/// With more rows the kernels that take weights of int8 read x too often.
#[test]
fn int8_weights_are_widened_from_65_rows_on() {
    for (tokens, widens) in [("64", false), ("65", true)] {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut args = BENCH.to_vec();
        args.extend(["--batches", "1", "--quantization", "int8"]);
        args[8] = tokens;
        let environment = [("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
        let (code, _, stderr) = with_fake(&args, &environment);
        assert_eq!(code, 0, "{stderr}");
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert_eq!(log.contains("launch tutti_widen_int8"), widens, "{tokens}");
    }
}

/// Once, however many parts of a prompt gate and up are computed in.
#[test]
fn int8_weights_are_widened_once_a_layer() {
    let model = tempfile::tempdir().unwrap();
    let folder = repository().join("tests/models/llama-gqa");
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.path().join(entry.file_name())).unwrap();
    }
    let config = model.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let longer =
        text.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 2048");
    assert_ne!(text, longer);
    std::fs::write(&config, longer).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1", "--quantization", "int8"]);
    args[4] = model.path().to_str().unwrap();
    args[8] = "1300";
    let environment = [("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, _, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stderr}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    // Number of products after each widened matrix: q, k and v; output; gate and up; down.
    let (mut products, mut current, mut in_step) = (Vec::new(), 0, false);
    for line in log.lines() {
        if line.starts_with("launch tutti_embed") {
            in_step = true;
        } else if line.starts_with("launch tutti_sample") {
            // Products between steps are those that are planned ahead.
            in_step = false;
        } else if !in_step {
            continue;
        } else if line.starts_with("launch tutti_widen_int8") {
            products.push(0);
            current = products.len();
        } else if line.starts_with("product ") {
            assert!(current > 0, "a product before any matrix is widened");
            products[current - 1] += 1;
        }
    }
    assert!(!products.is_empty());
    assert!(products.chunks(4).all(|layer| layer == [1, 1, 2, 1]), "{products:?}");
}

/// cuBLASLt fails where it is asked for algorithms; this project's kernels multiply instead.
#[test]
fn a_library_that_fails_to_choose_ends_nothing() {
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1"]);
    args[8] = "40";
    let log = tempfile::NamedTempFile::new().unwrap();
    let environment = [
        ("FAKE_CUDA_FAIL", "cublasLtMatmulAlgoGetHeuristic:1=14"),
        ("FAKE_CUDA_LOG", log.path().to_str().unwrap()),
    ];
    let (code, _, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stderr}");
    // It was asked, and has multiplied other shapes.
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(log.contains("\nproduct "), "{stderr}");
    // A GPU that has failed is still told.
    let lost = [("FAKE_CUDA_FAIL", "cublasLtMatmulAlgoGetHeuristic:1=700")];
    let (code, _, stderr) = with_fake(&args, &lost);
    assert!(code == 1 && stderr.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{code} {stderr}");
}

#[test]
fn memory_that_runs_out_is_named() {
    let line = fails(&[("FAKE_CUDA_FAIL", "cuMemAlloc_v2:6=2")]);
    assert!(line.contains("cannot allocate") && line.contains("bytes for "), "{line}");
    let line = fails(&[("FAKE_CUDA_FAIL", "cuMemAllocHost_v2:1=2")]);
    assert!(line.contains("pinned memory"), "{line}");
}

#[test]
fn a_model_that_does_not_fit_says_what_would_do() {
    // The workspace of cuBLASLt alone takes most of the memory.
    let line = fails(&[("FAKE_CUDA_MEMORY", "34000000")]);
    for words in ["does not fit on the GPU: ", "missing (weights ", "MiB are free"] {
        assert!(line.contains(words), "{line}");
    }
}

/// What is reckoned with before loading is what is then allocated, except for groups of inputs with
/// scales of their own.
#[test]
fn every_size_that_is_reckoned_with_is_an_allocation() {
    let models = ["llama-gqa", "qwen3-moe", "gpt-oss", "deepseek-v3", "qwen2-fp8"];
    let plain = models.map(|model| (model, Quantization::None));
    for (model, quantization) in plain.into_iter().chain([("llama-gqa", Quantization::Int8)]) {
        let (folder, log) = (variant(model), tempfile::NamedTempFile::new().unwrap());
        let mut args = BENCH.to_vec();
        args[4] = folder.to_str().unwrap();
        args.extend(["--batches", "1"]);
        if quantization == Quantization::Int8 {
            args.extend(["--quantization", "int8"]);
        }
        let environment = [("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
        let (code, _, stderr) = with_fake(&args, &environment);
        assert_eq!(code, 0, "{model}: {stderr}");
        let log = std::fs::read_to_string(log.path()).unwrap();
        let mut left: HashMap<u64, u32> = HashMap::new();
        for line in log.lines() {
            if let Some(bytes) = line.strip_prefix("alloc ") {
                *left.entry(bytes.parse().unwrap()).or_default() += 1;
            }
        }
        let config = ModelConfig::load(&folder).unwrap();
        let files = WeightFiles::open(&folder).unwrap();
        let shard = Shard::new(&config, 0, 1).unwrap();
        let source = Source { files: &files, config: &config, shard: &shard };
        let KeptSizes { matrices, vectors } =
            kept_sizes(&source, quantization, &|_, _| true).unwrap();
        assert!(matrices.len() >= 4 * config.num_layers && vectors.len() >= 2 * config.num_layers);
        for bytes in matrices.into_iter().chain(vectors) {
            let count = left.get_mut(&bytes).filter(|count| **count > 0);
            *count.unwrap_or_else(|| panic!("{model} {quantization:?}: {bytes}")) -= 1;
        }
    }
}

/// 24 matrices of 1.02 MiB have a page of 2 MiB each, and of 24 of 0.51 MiB three share one: 37 MiB
/// of weights take 64.
#[test]
fn a_model_of_many_matrices_that_does_not_fit_is_not_loaded() {
    const INNER: usize = 4160;
    let model = tempfile::tempdir().unwrap();
    let config = std::fs::read(repository().join("tests/models/llama-gqa/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["intermediate_size"] = INNER.into();
    config["num_hidden_layers"] = 24.into();
    std::fs::write(model.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors = vec![
        ("lm_head.weight".to_owned(), vec![384, 64]),
        ("model.embed_tokens.weight".to_owned(), vec![384, 64]),
        ("model.norm.weight".to_owned(), vec![64]),
    ];
    for layer in 0..24 {
        let shapes = [
            ("input_layernorm", vec![64]),
            ("post_attention_layernorm", vec![64]),
            ("mlp.gate_proj", vec![INNER, 64]),
            ("mlp.up_proj", vec![INNER, 64]),
            ("mlp.down_proj", vec![64, INNER]),
            ("self_attn.q_proj", vec![64, 64]),
            ("self_attn.k_proj", vec![32, 64]),
            ("self_attn.v_proj", vec![32, 64]),
            ("self_attn.o_proj", vec![64, 64]),
        ];
        let named = |(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape);
        tensors.extend(shapes.map(named));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let offsets = [start, end];
        let tensor = json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets});
        header.insert(name, tensor);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + end, 0);
    std::fs::write(model.path().join("model.safetensors"), file).unwrap();
    // 90 % of it, less cuBLASLt's 32 MiB and a 32nd: some 50 MiB.
    let environment = [("FAKE_CUDA_MEMORY", "100000000")];
    let mut args = BENCH.to_vec();
    args[4] = model.path().to_str().unwrap();
    args.extend(["--batches", "1"]);
    let (code, _, stderr) = with_fake(&args, &environment);
    assert!(code == 1 && stderr.contains("does not fit on the GPU: "), "{code} {stderr}");
    assert!(stderr.contains("(weights 66 MiB"), "{stderr}");
}

#[test]
fn kernels_that_do_not_suit_the_gpu_are_named() {
    let line = fails(&[("FAKE_CUDA_FAIL", "cuModuleLoadData:1=209")]);
    assert!(line.contains("no image for this GPU's architecture"), "{line}");
    let line = fails(&[("FAKE_CUDA_FAIL", "cuModuleLoadData:1=222")]);
    assert!(line.contains("newer than the driver"), "{line}");
    let line = fails(&[("FAKE_CUDA_FAIL", "cuModuleGetFunction:2=500")]);
    assert!(line.contains("tutti_add_rmsnorm") && line.contains("not among"), "{line}");
    let line = fails(&[("FAKE_CUDA_FAIL", "cuFuncLoad:4=2")]);
    assert!(
        line.contains("cannot allocate") && line.contains("tutti_add_normed_rmsnorm"),
        "{line}"
    );
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("broken.fatbin"), "not a fatbin").unwrap();
    let libraries = fake().libraries.to_str().unwrap();
    let kernels = folder.path().to_str().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--cuda-lib-dir", libraries, "--cuda-kernels", kernels]);
    let output = tutti(&args, &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("cannot be read by this driver"), "{stderr}");
}

#[test]
fn a_gpu_that_fails_while_it_computes_is_one_line() {
    for (fault, words) in [
        ("cuLaunchKernel:40=719", "a kernel failed"),
        ("cuLaunchKernel:110=700", "left its memory"),
        ("cuEventQuery:8=719", "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuGraphLaunch:2=702", "ran too long"),
        ("cuMemcpyHtoDAsync_v2:30=214", "memory is faulty"),
        ("cuStreamQuery:6=716", "misaligned"),
    ] {
        let line = fails(&[("FAKE_CUDA_FAIL", fault)]);
        assert!(line.contains(words), "{fault}: {line}");
    }
}

/// The driver's exit handler waits for a GPU that has failed; else it runs as ever.
#[test]
fn a_program_whose_gpu_failed_ends_without_exit_handlers() {
    for (fault, code) in [("none:1=0", 0), ("cuGraphLaunch:2=719", 1)] {
        let log = tempfile::NamedTempFile::new().unwrap();
        let environment = [
            ("FAKE_CUDA_FAIL", fault),
            ("FAKE_CUDA_EXIT_WAITS", "1"),
            ("FAKE_CUDA_LOG", log.path().to_str().unwrap()),
        ];
        let mut child = Command::new(tutti_binary())
            .args(BENCH)
            .args(["--batches", "1"])
            .args(options(fake()))
            .envs(environment)
            .current_dir(repository())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if began.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("{fault}: it has not ended after {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut stderr = String::new();
        child.stderr.unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(status.code(), Some(code), "{fault}: {stderr}");
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert_eq!(log.lines().any(|line| line == "exit handler"), code == 0, "{fault}");
        // What is said last is written before.
        assert_eq!(stderr.contains("error: ") && stderr.contains("(719)"), code == 1, "{stderr}");
    }
}

/// A step that cannot be captured is launched without a graph.
#[test]
fn steps_that_cannot_be_captured_are_called() {
    for fault in [
        "cuStreamEndCapture:1=901",
        "cuStreamBeginCapture_v2:1=900",
        "cuGraphInstantiateWithFlags:1=801",
        // No room for it on the GPU.
        "cuGraphUpload:1=2",
        "captured_cuLaunchKernel:7=1",
    ] {
        // States of linear attention are copied before and after steps.
        for model in ["tests/models/llama-gqa", "tests/models/qwen3_5"] {
            let mut args = BENCH.to_vec();
            args[4] = model;
            args.extend(["--batches", "1,3"]);
            let (code, stdout, stderr) = with_fake(&args, &[("FAKE_CUDA_FAIL", fault)]);
            assert_eq!(code, 0, "{fault}, {model}: {stdout} {stderr}");
            assert!(stderr.contains("a step is run again"), "{fault}, {model}: {stderr}");
        }
    }
}

/// A step that cannot be captured with kernels that begin early is captured without that.
#[test]
fn steps_that_cannot_be_captured_with_overlap_are_captured_without() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "1,3"]);
    let environment =
        [("FAKE_CUDA_CAPTURED_OVERLAP", "0"), ("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stdout} {stderr}");
    assert!(stderr.contains("a step is run again"), "{stderr}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(log.lines().filter(|line| line.starts_with("graph")).count() >= 8, "{log}");
}

/// Where memory for a graph was short, the next one is tried 64 steps later.
#[test]
fn a_graph_that_there_was_no_memory_for_is_made_later() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args[6] = "150";
    args.extend(["--batches", "1"]);
    let environment =
        [("FAKE_CUDA_FAIL", "cuGraphUpload:1=2"), ("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stdout} {stderr}");
    assert_eq!(stderr.matches("a step is run again").count(), 1, "{stderr}");
    assert!(stderr.contains("memory is short"), "{stderr}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    let parts: Vec<&str> = log.split("\ncapture ").collect();
    let [before, between, after] = parts[..] else { panic!("{} captures", parts.len() - 1) };
    assert!(!before.contains("\ngraph ") && !between.contains("\ngraph "));
    // Each step begins with it, and so does the last one, which is captured.
    assert_eq!(between.matches("\nlaunch tutti_embed").count(), 64);
    // Some of these steps are among the 150 that are measured.
    assert!(after.matches("\ngraph ").count() > 150 - 64, "{stderr}");
}

/// The graphs that there are go on being used.
#[test]
fn a_graph_that_there_is_no_memory_for_costs_no_other() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--batches", "3,1"]);
    // The first one is for steps of one row, the second for those of three.
    let environment =
        [("FAKE_CUDA_FAIL", "cuGraphUpload:2=2"), ("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stdout} {stderr}");
    assert_eq!(stderr.matches("a step is run again").count(), 1, "{stderr}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    let parts: Vec<&str> = log.split("\ncapture ").collect();
    let [_, one_row, after] = parts[..] else { panic!("{} captures", parts.len() - 1) };
    assert!(one_row.contains("\ngraph "));
    assert_eq!(after.matches("\ngraph ").count(), 6, "steps of one row");
}

/// What is kept free for graphs is reckoned by the number of their kernels.
#[test]
fn graphs_have_no_more_kernels_than_reckoned() {
    let models = [("llama-gqa", 2), ("gemma3", 3), ("gpt-oss", 2), ("deepseek-v3", 3)];
    for (model, layers) in models.into_iter().chain([("glm4-moe", 3), ("minimax-m2", 2)]) {
        let log = tempfile::NamedTempFile::new().unwrap();
        let path = log.path().to_str().unwrap();
        let folder = format!("tests/models/{model}");
        let mut args = BENCH.to_vec();
        args[4] = &folder;
        args.extend(["--batches", "3"]);
        let (code, stdout, stderr) = with_fake(&args, &[("FAKE_CUDA_LOG", path)]);
        assert_eq!(code, 0, "{model}: {stdout} {stderr}");
        let log = std::fs::read_to_string(path).unwrap();
        let captures = log.lines().filter_map(|line| line.strip_prefix("capture "));
        let found: u64 = captures.map(|count| count.parse().unwrap()).max().unwrap();
        let reckoned = graph_nodes(layers, 1);
        assert!(found <= reckoned && 4 * found > reckoned, "{model}: {found} of {reckoned}");
    }
}

/// Of the algorithms that cuBLASLt offers for a product, the fastest one that runs is chosen and
/// kept.
#[test]
fn products_take_the_quickest_algorithm() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args[8] = "100";
    args.extend(["--batches", "1"]);
    let environment =
        [("FAKE_CUDA_ALGORITHMS", "4"), ("FAKE_CUDA_LOG", log.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&args, &environment);
    assert_eq!(code, 0, "{stdout} {stderr}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    let products = log.lines().filter(|line| line.starts_with("product "));
    let mut shapes: HashMap<&str, Vec<&str>> = HashMap::new();
    for (shape, algorithm) in products.filter_map(|line| line.split_once(" by ")) {
        shapes.entry(shape).or_default().push(algorithm);
    }
    assert!(!shapes.is_empty());
    let mut chosen = 0;
    for (shape, algorithms) in shapes {
        // The second one cannot run; the last one is reported as the fastest.
        let used =
            algorithms.iter().rposition(|algorithm| *algorithm != "3").map_or(0, |at| at + 1);
        let mut tried = algorithms[..used].to_vec();
        tried.dedup();
        // Similar numbers of rows share a choice.
        assert!(tried.is_empty() || tried == ["0", "2"], "{shape}: {algorithms:?}");
        assert!(tried.is_empty() || algorithms.len() >= used + 5, "{shape}: {algorithms:?}");
        chosen += usize::from(!tried.is_empty());
    }
    assert!(chosen > 0);
}

/// An algorithm that cuBLASLt offers but that fails when called is skipped, and nothing else fails.
#[test]
fn an_algorithm_that_fails_is_passed_over() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut args = BENCH.to_vec();
    args[8] = "100";
    args.extend(["--batches", "1"]);
    // The first call of the first product; a measured call of it; its last call.
    for call in [1, 3, 7] {
        let fault = format!("cublasLtMatmul:{call}=14");
        let environment = [
            ("FAKE_CUDA_ALGORITHMS", "4"),
            ("FAKE_CUDA_LOG", log.path().to_str().unwrap()),
            ("FAKE_CUDA_FAIL", &fault),
        ];
        let (code, stdout, stderr) = with_fake(&args, &environment);
        assert_eq!(code, 0, "{stdout} {stderr}");
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert!(log.lines().any(|line| line.starts_with("product ")), "{log}");
    }
    // The only one fails, as where there is no memory to load it: other kernels multiply. So they
    // do where it fails later, for other rows than it was chosen for.
    for call in [1, 12, 30] {
        let fault = format!("cublasLtMatmul:{call}=3");
        let (code, stdout, stderr) = with_fake(&args, &[("FAKE_CUDA_FAIL", &fault)]);
        assert_eq!(code, 0, "call {call}: {stdout} {stderr}");
    }
    // But not after a GPU has failed.
    let (code, _, stderr) = with_fake(
        &args,
        &[("FAKE_CUDA_ALGORITHMS", "4"), ("FAKE_CUDA_FAIL", "cublasLtMatmul:3=719")],
    );
    assert!(code != 0 && stderr.contains("(719)"), "{code} {stderr}");
}

/// Why a kernel cannot be loaded is not hidden by modules that do not have it.
#[test]
fn a_kernel_that_cannot_be_loaded_is_not_looked_for_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.fatbin", "b.fatbin"] {
        std::fs::write(folder.path().join(name), "fake fatbin").unwrap();
    }
    let libraries = fake().libraries.to_str().unwrap();
    let mut args = BENCH.to_vec();
    args.extend(["--cuda-lib-dir", libraries]);
    args.extend(["--cuda-kernels", folder.path().to_str().unwrap(), "--batches", "1"]);
    let (code, _, stderr) = described(&tutti(&args, &[("FAKE_CUDA_FAIL", "cuFuncLoad:1=209")]));
    assert!(code != 0 && stderr.contains("tutti_embed"), "{code} {stderr}");
    assert!(stderr.contains("no image for this GPU's architecture"), "{stderr}");
}

/// Without cuBLASLt, this project's own kernels compute prompts.
#[test]
fn without_cublaslt_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fake().libraries.join("libcuda.so.1"), folder.path().join("libcuda.so.1"))
        .unwrap();
    let mut args = BENCH.to_vec();
    args[8] = "100";
    let kernels = fake().kernels.to_str().unwrap();
    args.extend(["--cuda-lib-dir", folder.path().to_str().unwrap(), "--cuda-kernels", kernels]);
    args.extend(["--batches", "1"]);
    let output = tutti(&args, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
