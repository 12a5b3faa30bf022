//! vLLM's options that Tutti does not have under these names: docs/from-vllm.md has this table.
//!
//! Texts are Markdown, as in that file; errors show them without its links. Names are without
//! leading dashes, short ones with their dash.
use super::Handling::{self, Always, Flag, Other, Unneeded};

/// Options that are answered with the same text.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) names: &'static [&'static str],
    pub(crate) here: Handling,
}

const fn row(names: &'static [&'static str], here: Handling) -> Row {
    Row { names, here }
}

/// The table, in the order of the document.
pub(crate) const ROWS: &[Row] = &[
    row(&["enable-prefix-caching"], Always("`--no-enable-prefix-caching` turns it off")),
    row(
        &["disable-log-requests", "no-enable-log-requests", "disable-uvicorn-access-log"],
        Always("`--access-log` logs requests"),
    ),
    row(
        &[
            "enable-chunked-prefill",
            "enable-auto-tool-choice",
            "enable-lora",
            "enable-prompt-tokens-details",
            "enable-request-id-headers",
            "enable-server-load-tracking",
            "enable-ssl-refresh",
            "async-scheduling",
            "language-model-only",
            "aggregate-engine-logging",
        ],
        Always("it cannot be turned off"),
    ),
    row(&["enable-reasoning"], Unneeded("`--reasoning-parser` is enough")),
    row(&["trust-remote-code"], Unneeded("it is never needed: no code of a model's folder is run")),
    // Where it is served, and by how many.
    row(&["host", "port"], Other("`--listen IP:PORT`")),
    row(&["-tp"], Other("`--tensor-parallel N`")),
    row(
        &["-dp", "data-parallel-size"],
        Other(
            "`--workers` M times the tensor-parallel degree, or that many `tutti worker` processes \
             anywhere: the available workers form as many replicas as they can",
        ),
    ),
    row(
        &[
            "-dpn",
            "data-parallel-rank",
            "-dpr",
            "data-parallel-start-rank",
            "-dpl",
            "data-parallel-size-local",
            "-dpa",
            "data-parallel-address",
            "-dpp",
            "data-parallel-rpc-port",
            "-dpb",
            "data-parallel-backend",
            "-dpe",
            "data-parallel-external-lb",
            "-dph",
            "data-parallel-hybrid-lb",
        ],
        Other("`tutti worker` on each host: replicas are formed and numbered by the coordinator"),
    ),
    row(
        &["-pp", "pipeline-parallel-size"],
        Other("layers are not divided among ranks: `--tensor-parallel N`"),
    ),
    row(
        &[
            "-dcp",
            "decode-context-parallel-size",
            "-pcp",
            "prefill-context-parallel-size",
            "cp-kv-cache-interleave-size",
            "dcp-kv-cache-interleave-size",
            "dcp-comm-backend",
        ],
        Other("contexts are not divided among ranks: `--tensor-parallel N`"),
    ),
    row(
        &["-ep", "enable-expert-parallel"],
        Flag("each rank has a part of every expert: `--tensor-parallel N`"),
    ),
    row(
        &[
            "enable-eplb",
            "eplb-config",
            "num-redundant-experts",
            "expert-placement-strategy",
            "all2all-backend",
            "enable-elastic-ep",
            "enable-ep-weight-filter",
        ],
        Other("each rank has a part of every expert, so none is placed"),
    ),
    row(
        &["distributed-executor-backend"],
        Other(
            "`tutti coordinator`, `tutti worker`, `tutti frontend`; processes find each other \
             through `--etcd` or `--coordinator`",
        ),
    ),
    row(
        &["nnodes", "-n", "node-rank", "-r", "headless"],
        Other(
            "`tutti worker` on each of the other hosts ([README](../README.md#several-machines))",
        ),
    ),
    row(
        &["master-addr", "master-port"],
        Other("`--coordinator HOST:PORT` or `--etcd URLS` of `tutti worker`"),
    ),
    row(
        &["-asc", "api-server-count", "disable-frontend-multiprocessing", "renderer-num-workers"],
        Other("`tutti frontend`, any number of them"),
    ),
    row(&["distributed-timeout-seconds"], Other("`--form-timeout`, `--step-timeout`")),
    row(&["shutdown-timeout"], Other("`--drain-timeout SECONDS`")),
    row(&["enable-sleep-mode"], Flag("a server does not sleep: stop it, or some of its workers")),
    // The model.
    row(&["hf-token"], Other("`HF_TOKEN` in the environment, or the file `token` in `HF_HOME`")),
    row(&["-q"], Other("`--quantization METHOD`")),
    row(&["tokenizer-revision", "code-revision"], Other("`--revision`, for the whole model")),
    row(
        &["hf-config-path", "rope-scaling", "rope-theta"],
        Other("`--hf-overrides JSON` ([Long contexts](configuration.md#long-contexts))"),
    ),
    row(
        &["tokenizer", "tokenizer-mode", "skip-tokenizer-init"],
        Other("the folder's `tokenizer.json` is always used"),
    ),
    row(
        &[
            "load-format",
            "model-loader-extra-config",
            "ignore-patterns",
            "pt-load-map-location",
            "safetensors-load-strategy",
            "use-tqdm-on-load",
            "max-parallel-loading-workers",
        ],
        Other("only safetensors are read"),
    ),
    row(
        &["config-format", "model-impl"],
        Other("`config.json` says which of Tutti's models it is"),
    ),
    row(
        &["task", "runner"],
        Other(
            "the model's `config.json`, or `--hf-overrides`, says what it can do: text and \
             embeddings, or [classes](api.md#classification)",
        ),
    ),
    row(
        &["convert"],
        Other("`--hf-overrides JSON`, with `architectures` ([Rerankers](api.md#rerankers))"),
    ),
    row(
        &["pooler-config", "override-pooler-config"],
        Other(
            "edit the folder's `1_Pooling/config.json`; classes always take the last token \
             ([Embeddings](api.md#embeddings))",
        ),
    ),
    row(&["max-cpu-loras"], Other("`--max-loras N`: all adapters may be in one step")),
    row(
        &[
            "lora-dtype",
            "lora-extra-vocab-size",
            "lora-target-modules",
            "fully-sharded-loras",
            "specialize-active-lora",
        ],
        Other("adapters are used as they are ([LoRA adapters](configuration.md#lora-adapters))"),
    ),
    // How it is computed.
    row(
        &["enforce-eager"],
        Flag(
            "`--no-cuda-graphs`; `--cuda-warmup 0` starts sooner and captures graphs when steps \
             first need them",
        ),
    ),
    row(
        &["-O", "optimization-level", "-cc", "compilation-config", "performance-mode"],
        Other("nothing is compiled; `--no-cuda-graphs` turns graphs off"),
    ),
    row(
        &["cudagraph-capture-sizes", "max-cudagraph-capture-size", "max-seq-len-to-capture"],
        Other("graphs are captured for decode steps of every size ([GPUs](gpus.md))"),
    ),
    row(
        &["-ac", "attention-config", "attention-backend", "moe-backend", "kernel-config"],
        Other("each device has one implementation"),
    ),
    row(&["disable-custom-all-reduce"], Flag("`--cuda-exchange nccl`")),
    row(&["num-gpu-blocks-override"], Other("`--kv-cache-memory BYTES`")),
    row(&["calculate-kv-scales"], Flag("KV caches in FP8 have no scales")),
    row(&["kv-cache-dtype-skip-layers"], Other("`--kv-cache-dtype`, for all layers")),
    row(&["prefix-caching-hash-algo"], Other("prefixes are found by a hash that is not chosen")),
    row(
        &[
            "cpu-offload-gb",
            "cpu-offload-params",
            "offload-backend",
            "offload-group-size",
            "offload-num-in-group",
            "offload-params",
            "offload-prefetch-step",
        ],
        Other("weights stay in the memory of the device that computes"),
    ),
    row(
        &["kv-offloading-size", "kv-offloading-backend", "preemption-mode"],
        Other("`--swap-space GIB`, for requests that are preempted"),
    ),
    row(
        &["mamba-cache-mode", "mamba-block-size"],
        Other(
            "`--prefix-states N`: states of linear attention are kept where prompts end and where \
             they part ([how](configuration.md#linear-attention))",
        ),
    ),
    row(
        &["mamba-cache-dtype", "mamba-ssm-cache-dtype"],
        Other("states of linear attention are in f32"),
    ),
    row(
        &["kv-transfer-config", "kv-events-config", "ec-transfer-config", "tokens-only"],
        Other("each replica computes its own prompts: KV caches are not passed on"),
    ),
    row(
        &[
            "-sc",
            "speculative-model",
            "num-speculative-tokens",
            "ngram-prompt-lookup-max",
            "ngram-prompt-lookup-min",
        ],
        Other("`--speculative-config JSON`"),
    ),
    row(
        &["max-num-partial-prefills", "max-long-partial-prefills"],
        Other(
            "nothing to set: a prompt longer than a step leaves up to half of each step to shorter \
             ones",
        ),
    ),
    row(
        &["long-prefill-token-threshold"],
        Other("`--max-mixed-prefill-tokens` bounds all prompts together, while sequences decode"),
    ),
    row(
        &[
            "enable-dbo",
            "dbo-decode-token-threshold",
            "dbo-prefill-token-threshold",
            "ubatch-size",
            "num-scheduler-steps",
            "scheduler-reserve-full-isl",
        ],
        Other("nothing corresponds: `--max-num-batched-tokens` bounds a step"),
    ),
    row(&["stream-interval"], Other("every token is sent as it comes")),
    row(
        &[
            "middleware",
            "logits-processors",
            "io-processor-plugin",
            "tool-parser-plugin",
            "reasoning-parser-plugin",
            "worker-cls",
            "worker-extension-cls",
            "scheduler-cls",
            "additional-config",
        ],
        Other("no Python runs here, so there are no plugins"),
    ),
    // The API.
    row(
        &["chat-template-content-format"],
        Other("templates get text as a string: parts are joined by line breaks"),
    ),
    row(&["trust-request-chat-template"], Flag("`--chat-template FILE`, one for all requests")),
    row(&["response-role"], Other("answers have the role `assistant`")),
    row(
        &["exclude-tools-when-tool-choice-none"],
        Flag("the template is told of all `tools` of a request"),
    ),
    row(&["tool-server"], Other("the server runs no tools: clients do")),
    row(&["enable-prompt-embeds"], Flag("prompts are text or tokens")),
    row(&["seed"], Other("set `seed` in requests")),
    row(
        &["guided-decoding-backend", "structured-outputs-config"],
        Other("llguidance is the only backend"),
    ),
    row(&["reasoning-config"], Other("`--reasoning-parser` says which marks are around reasoning")),
    row(
        &[
            "limit-mm-per-prompt",
            "allowed-local-media-path",
            "allowed-media-domains",
            "media-io-kwargs",
            "mm-processor-kwargs",
            "mm-processor-cache-gb",
            "mm-processor-cache-type",
            "mm-encoder-attn-backend",
            "mm-encoder-only",
            "mm-encoder-tp-mode",
            "mm-tensor-ipc",
            "enable-mm-embeds",
            "interleave-mm-strings",
            "skip-mm-profiling",
            "disable-chunked-mm-input",
            "video-pruning-rate",
            "default-mm-loras",
        ],
        Other("only text is served"),
    ),
    row(
        &["allow-credentials", "allowed-methods", "allowed-headers"],
        Other("`--allowed-origins` ([security.md](security.md#options))"),
    ),
    row(&["ssl-cert-reqs"], Other("`--tls-client-ca FILE` requires client certificates")),
    row(&["ssl-ciphers"], Other("the ciphers of TLS 1.2 and 1.3 are not chosen")),
    row(
        &["h11-max-header-count", "h11-max-incomplete-event-size"],
        Other("a request's head is bounded ([Limits](api.md#limits))"),
    ),
    row(
        &["disable-fastapi-docs", "enable-offline-docs"],
        Other("`/openapi.json` describes the API; there are no pages ([OpenAPI](api.md#openapi))"),
    ),
    // What it tells.
    row(&["enable-log-requests"], Flag("`--access-log`")),
    row(
        &["max-log-len", "enable-log-outputs", "enable-log-deltas"],
        Other("prompts and answers are never logged: leave it out"),
    ),
    row(
        &["disable-access-log-for-endpoints"],
        Other("`--access-log` logs all requests, without it none is logged"),
    ),
    row(
        &["uvicorn-log-level", "log-config-file", "log-error-stack"],
        Other("`--log-level`, `--access-log`"),
    ),
    row(
        &["collect-detailed-traces"],
        Other("leave it out: spans always have their parts, queue, prefill and decode"),
    ),
    row(&["disable-log-stats"], Flag("`--log-stats-interval 0`")),
    row(
        &[
            "profiler-config",
            "enable-layerwise-nvtx-tracing",
            "enable-logging-iteration-details",
            "kv-cache-metrics",
            "kv-cache-metrics-sample",
            "cudagraph-metrics",
            "enable-mfu-metrics",
            "show-hidden-metrics-for-version",
        ],
        Other("`/metrics` has what is measured ([metrics.md](metrics.md))"),
    ),
];
