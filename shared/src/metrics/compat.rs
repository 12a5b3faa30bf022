//! PURE: the metric names of other servers, computed from the same totals.
//!
//! Dashboards, autoscaling rules and gateway endpoint pickers written for those servers work
//! unchanged. The names are theirs (with a colon, or `_perc` for a ratio), so a linter objects to
//! them; ours stay clean. Buckets are ours: theirs are a subset wherever a query could name one.
use std::collections::BTreeMap;

use super::catalogue as ours;
use super::definition::{GaugeMerge, Kind, SeriesId};
use super::labels::Label;
use super::merged::{Merged, merge, scalar};
use super::snapshot::{LabelValues, Value};

/// A server whose metric names can be published too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compat {
    /// The `vllm:` names; each replica is an engine.
    Vllm,
    /// The `vllm:` names; one series for the whole cluster, for readers that expect one per server.
    VllmCluster,
    /// The `aphrodite:` names; one series for the whole cluster.
    Aphrodite,
}

/// One name of another server.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    /// The name.
    pub name: &'static str,
    source: AliasSource,
    /// Their label, and our label that gives its value. Labels that are not listed are summed over.
    labels: &'static [(&'static str, &'static str)],
}

/// Where an alias's values come from.
#[derive(Clone, Copy, Debug)]
enum AliasSource {
    Series(SeriesId),
    /// The ratio of the sums of two series.
    Ratio(SeriesId, SeriesId),
    /// Only series in which this label has this value.
    Only(SeriesId, &'static str, &'static str),
    /// LoRA adapters in use and waited for, as lists in labels.
    Adapters {
        running: SeriesId,
        waiting: SeriesId,
    },
}

/// Current series of an alias.
#[derive(Clone, Debug, PartialEq)]
pub struct AliasFamily {
    /// The name.
    pub name: &'static str,
    /// Help text: what it means, and which of our series it is.
    pub help: String,
    /// Counter, gauge or histogram.
    pub kind: Kind,
    /// Number of a counter's integer steps per unit.
    pub scale: f64,
    /// Label names, in the order of the values.
    pub labels: Vec<&'static str>,
    /// The values.
    pub series: BTreeMap<LabelValues, Value>,
}

const ENGINE: (&str, &str) = ("engine", "replica");
const REASON: (&str, &str) = ("finished_reason", "finished_reason");

macro_rules! aliases {
    ($($name:literal = $source:expr, [$($label:expr),*];)*) => {
        &[$(Alias { name: $name, source: $source, labels: &[$($label),*] },)*]
    };
}

macro_rules! of {
    ($id:ident) => {
        AliasSource::Series(ours::$id.series())
    };
    ($part:ident / $whole:ident) => {
        AliasSource::Ratio(ours::$part.series(), ours::$whole.series())
    };
}

const VLLM: &[Alias] = aliases! {
    "vllm:num_requests_running" = of!(REQUESTS_RUNNING), [ENGINE];
    "vllm:num_requests_waiting" = of!(REQUESTS_WAITING), [ENGINE];
    "vllm:num_requests_waiting_by_reason" = of!(REQUESTS_WAITING), [ENGINE, ("reason", "reason")];
    "vllm:num_requests_swapped" = of!(REQUESTS_SWAPPED), [ENGINE];
    "vllm:kv_cache_usage_perc" = of!(KV_CACHE_BLOCKS_USED / KV_CACHE_BLOCKS), [ENGINE];
    "vllm:gpu_cache_usage_perc" = of!(KV_CACHE_BLOCKS_USED / KV_CACHE_BLOCKS), [ENGINE];
    "vllm:cpu_cache_usage_perc" = of!(HOST_KV_CACHE_BLOCKS_USED / HOST_KV_CACHE_BLOCKS), [ENGINE];
    "vllm:cache_config_info" = of!(CACHE_CONFIG_INFO), [
        ("block_size", "block_size"), ("cache_dtype", "cache_dtype"),
        ("enable_prefix_caching", "enable_prefix_caching"), ENGINE,
        ("num_cpu_blocks", "num_host_blocks"), ("num_gpu_blocks", "num_blocks")];
    "vllm:lora_requests_info" = AliasSource::Adapters {
        running: ours::LORA_REQUESTS.series(), waiting: ours::LORA_REQUESTS_WAITING.series(),
    }, [("max_lora", ""), ("running_lora_adapters", ""), ("waiting_lora_adapters", "")];
    "vllm:prefix_cache_queries_total" = of!(PREFIX_CACHE_QUERIES), [ENGINE];
    "vllm:prefix_cache_hits_total" = of!(PREFIX_CACHE_HITS), [ENGINE];
    "vllm:num_preemptions_total" = of!(PREEMPTIONS), [ENGINE];
    "vllm:prompt_tokens_total" = of!(PROMPT_TOKENS), [ENGINE];
    "vllm:prompt_tokens_by_source_total" = of!(PROMPT_TOKENS_BY_SOURCE),
        [ENGINE, ("source", "source")];
    "vllm:prompt_tokens_cached_total" =
        AliasSource::Only(ours::PROMPT_TOKENS_BY_SOURCE.series(), "source", "local_cache_hit"), [ENGINE];
    "vllm:generation_tokens_total" = of!(GENERATION_TOKENS), [ENGINE];
    "vllm:request_success_total" = of!(REQUEST_SUCCESS), [REASON];
    "vllm:request_prompt_tokens" = of!(REQUEST_PROMPT_TOKENS), [];
    "vllm:request_generation_tokens" = of!(REQUEST_GENERATION_TOKENS), [];
    "vllm:request_max_num_generation_tokens" = of!(REQUEST_MAX_NUM_GENERATION_TOKENS), [];
    "vllm:request_num_preemptions" = of!(REQUEST_PREEMPTIONS), [];
    "vllm:request_prefill_kv_computed_tokens" = of!(REQUEST_PREFILL_COMPUTED_TOKENS), [];
    "vllm:request_params_max_tokens" = of!(REQUEST_PARAMS_MAX_TOKENS), [];
    "vllm:request_params_n" = of!(REQUEST_PARAMS_N), [];
    "vllm:request_params_best_of" = of!(REQUEST_PARAMS_BEST_OF), [];
    "vllm:iteration_tokens_total" = of!(ITERATION_TOKENS), [ENGINE];
    "vllm:time_to_first_token_seconds" = of!(TIME_TO_FIRST_TOKEN), [];
    "vllm:inter_token_latency_seconds" = of!(INTER_TOKEN_LATENCY), [];
    "vllm:time_per_output_token_seconds" = of!(INTER_TOKEN_LATENCY), [];
    "vllm:request_time_per_output_token_seconds" = of!(REQUEST_TIME_PER_OUTPUT_TOKEN), [];
    "vllm:e2e_request_latency_seconds" = of!(E2E_REQUEST_LATENCY), [];
    "vllm:request_queue_time_seconds" = of!(REQUEST_QUEUE_TIME), [];
    "vllm:request_inference_time_seconds" = of!(REQUEST_INFERENCE_TIME), [];
    "vllm:request_prefill_time_seconds" = of!(REQUEST_PREFILL_TIME), [];
    "vllm:request_decode_time_seconds" = of!(REQUEST_DECODE_TIME), [];
    "vllm:spec_decode_num_drafts_total" = of!(SPEC_DECODE_DRAFTS), [ENGINE];
    "vllm:spec_decode_num_draft_tokens_total" = of!(SPEC_DECODE_DRAFT_TOKENS), [ENGINE];
    "vllm:spec_decode_num_accepted_tokens_total" = of!(SPEC_DECODE_ACCEPTED_TOKENS), [ENGINE];
    "vllm:spec_decode_num_accepted_tokens_per_pos_total" = of!(SPEC_DECODE_ACCEPTED_PER_POSITION),
        [ENGINE, ("position", "position")];
};

const APHRODITE: &[Alias] = aliases! {
    "aphrodite:num_requests_running" = of!(REQUESTS_RUNNING), [];
    "aphrodite:num_requests_waiting" = of!(REQUESTS_WAITING), [];
    "aphrodite:num_requests_swapped" = of!(REQUESTS_SWAPPED), [];
    "aphrodite:gpu_cache_usage_perc" = of!(KV_CACHE_BLOCKS_USED / KV_CACHE_BLOCKS), [];
    "aphrodite:cpu_cache_usage_perc" = of!(HOST_KV_CACHE_BLOCKS_USED / HOST_KV_CACHE_BLOCKS), [];
    "aphrodite:num_preemptions_total" = of!(PREEMPTIONS), [];
    "aphrodite:prompt_tokens_total" = of!(PROMPT_TOKENS), [];
    "aphrodite:generation_tokens_total" = of!(GENERATION_TOKENS), [];
    "aphrodite:time_to_first_token_seconds" = of!(TIME_TO_FIRST_TOKEN), [];
    "aphrodite:time_per_output_token_seconds" = of!(INTER_TOKEN_LATENCY), [];
    "aphrodite:e2e_request_latency_seconds" = of!(E2E_REQUEST_LATENCY), [];
    "aphrodite:request_prompt_tokens" = of!(REQUEST_PROMPT_TOKENS), [];
    "aphrodite:request_generation_tokens" = of!(REQUEST_GENERATION_TOKENS), [];
    "aphrodite:request_params_best_of" = of!(REQUEST_PARAMS_BEST_OF), [];
    "aphrodite:request_params_n" = of!(REQUEST_PARAMS_N), [];
    "aphrodite:request_success_total" = of!(REQUEST_SUCCESS), [REASON];
    "aphrodite:spec_decode_draft_acceptance_rate" =
        of!(SPEC_DECODE_ACCEPTED_TOKENS / SPEC_DECODE_DRAFT_TOKENS), [];
    "aphrodite:spec_decode_efficiency" =
        of!(SPEC_DECODE_EMITTED_TOKENS / SPEC_DECODE_EMITTABLE_TOKENS), [];
    "aphrodite:spec_decode_num_accepted_tokens_total" = of!(SPEC_DECODE_ACCEPTED_TOKENS), [];
    "aphrodite:spec_decode_num_draft_tokens_total" = of!(SPEC_DECODE_DRAFT_TOKENS), [];
    "aphrodite:spec_decode_num_emitted_tokens_total" = of!(SPEC_DECODE_EMITTED_TOKENS), [];
    "aphrodite:avg_prompt_throughput_toks_per_s" = of!(PROMPT_THROUGHPUT), [];
    "aphrodite:avg_generation_throughput_toks_per_s" = of!(GENERATION_THROUGHPUT), [];
    "aphrodite:cache_config_info" = of!(CACHE_CONFIG_INFO),
        [("block_size", "block_size"), ("num_gpu_blocks", "num_blocks")];
};

impl AliasFamily {
    /// Returns the upper bounds of a histogram's buckets; empty for other kinds.
    #[must_use]
    pub fn bounds(&self) -> &'static [f64] {
        match self.kind {
            Kind::Histogram(bounds) => bounds,
            Kind::Counter | Kind::Gauge(_) => &[],
        }
    }
}

impl Compat {
    /// Returns all its names.
    #[must_use]
    pub const fn aliases(self) -> &'static [Alias] {
        match self {
            Self::Vllm | Self::VllmCluster => VLLM,
            Self::Aphrodite => APHRODITE,
        }
    }

    /// Returns its families, as far as our series exist.
    pub fn families(self, merged: &Merged) -> impl Iterator<Item = AliasFamily> {
        let engines = self != Self::VllmCluster;
        self.aliases().iter().filter_map(move |alias| alias.family(merged, engines))
    }
}

impl Alias {
    /// Returns our series that it stands for.
    #[must_use]
    pub fn source(&self) -> SeriesId {
        match self.source {
            AliasSource::Series(id)
            | AliasSource::Ratio(id, _)
            | AliasSource::Only(id, ..)
            | AliasSource::Adapters { running: id, .. } => id,
        }
    }

    /// Returns its current series; `engines` tells whether each replica has its own.
    fn family(&self, merged: &Merged, engines: bool) -> Option<AliasFamily> {
        let definition = self.source().definition();
        let labels: Vec<(&str, &str)> =
            self.labels.iter().copied().filter(|label| engines || *label != ENGINE).collect();
        let (kind, series, help) = match self.source {
            AliasSource::Series(id) => {
                (definition.kind, regroup(merged, id, &labels, None)?, definition.help.to_owned())
            }
            AliasSource::Only(id, label, value) => {
                let series = regroup(merged, id, &labels, Some((label, value)))?;
                let help = format!("{} where {label} is {value}.", definition.name);
                (definition.kind, series, help)
            }
            AliasSource::Adapters { running, waiting } => {
                let help = "The LoRA adapters that requests run with and wait for, as lists, of those \
                            that are served; when workers last reported, in seconds since 1970.";
                (definition.kind, adapters(merged, running, waiting)?, help.to_owned())
            }
            AliasSource::Ratio(part, whole) => {
                let parts = regroup(merged, part, &labels, None)?;
                let wholes = regroup(merged, whole, &labels, None)?;
                let ratio = |(labels, part): (LabelValues, Value)| {
                    let whole = scalar(wholes.get(&labels)?)?;
                    let ratio = scalar(&part)? / whole;
                    (whole > 0.0).then_some((labels, Value::Gauge(ratio)))
                };
                let series: BTreeMap<_, _> = parts.into_iter().filter_map(ratio).collect();
                let whole = whole.definition().name;
                let help = format!("{} divided by {whole}.", definition.name);
                (Kind::Gauge(GaugeMerge::Sum), series, help)
            }
        };
        (!series.is_empty()).then(|| AliasFamily {
            name: self.name,
            help,
            kind,
            scale: definition.counter_scale(),
            labels: labels.iter().map(|(theirs, _)| *theirs).collect(),
            series,
        })
    }
}

/// Regroups one of our families by their labels; `only` selects series by one of our labels.
fn regroup(
    merged: &Merged,
    id: SeriesId,
    labels: &[(&str, &str)],
    only: Option<(&str, &str)>,
) -> Option<BTreeMap<LabelValues, Value>> {
    let definition = id.definition();
    let is_left_out = |labels: &LabelValues| {
        only.is_some_and(|(name, value)| {
            let named = definition.labels.iter().zip(labels.iter());
            named.into_iter().any(|(label, is)| label.name == name && is != value)
        })
    };
    let places: Vec<Option<usize>> = labels
        .iter()
        .map(|(_, ours)| definition.labels.iter().position(|label| label.name == *ours))
        .collect();
    let mut grouped: BTreeMap<LabelValues, Value> = BTreeMap::new();
    for (labels, value) in merged.family(id)?.iter().filter(|(labels, _)| !is_left_out(labels)) {
        let their_label = |place: usize| {
            Some(their_value(definition.labels.get(place)?, labels.get(place)?).to_owned())
        };
        let theirs: LabelValues =
            places.iter().map(|place| place.and_then(their_label).unwrap_or_default()).collect();
        match grouped.get_mut(&theirs) {
            Some(held) => merge(definition.kind, held, value),
            None => {
                grouped.insert(theirs, value.clone());
            }
        }
    }
    Some(grouped)
}

/// Builds the one series about adapters: the number served, and lists of those in use. Its value is
/// a time, because readers that find several series take the one with the largest value.
fn adapters(
    merged: &Merged,
    running: SeriesId,
    waiting: SeriesId,
) -> Option<BTreeMap<LabelValues, Value>> {
    let adapter = [("", ours::LORA_REQUESTS.series().definition().labels.first()?.name)];
    let served = regroup(merged, running, &adapter, None)?;
    let names = |family: &BTreeMap<LabelValues, Value>| {
        let used = family.iter().filter(|(_, value)| scalar(value).is_some_and(|it| it > 0.0));
        used.filter_map(|(labels, _)| labels.first()).cloned().collect::<Vec<_>>().join(",")
    };
    let waits = regroup(merged, waiting, &adapter, None).unwrap_or_default();
    let reported = regroup(merged, ours::WORKER_LAST_REPORT.series(), &[], None);
    let reported = reported.unwrap_or_default();
    let at = reported.values().next().and_then(scalar).unwrap_or(1.0);
    let labels = [served.len().to_string(), names(&served), names(&waits)];
    Some(BTreeMap::from([(LabelValues::from(labels), Value::Gauge(at))]))
}

/// Translates a value of one of our labels into theirs. What an open label says is a name that
/// somebody chose, such as an adapter's: it stays, whatever word it is.
fn their_value<'a>(label: &Label, value: &'a str) -> &'a str {
    if label.values.is_empty() {
        return value;
    }
    match value {
        "preempted" => "capacity",
        "no_replica" => "deferred",
        "true" => "True",
        "false" => "False",
        value => value,
    }
}
