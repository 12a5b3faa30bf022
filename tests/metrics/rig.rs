//! A hub, its page, and helpers to record in it.
use std::sync::Arc;
use std::time::Duration;

use coordinator::metrics::Hub;
use coordinator::metrics::exposition::{Format, Page, PageOptions};
use coordinator::metrics::observe::{ReplicaConfig, RequestSummary};
use shared::ids::Incarnation;
use shared::metrics::{Limits, Merged};
use shared::protocol::{EngineConfig, KvCacheDtype};

use crate::scrape::Scrape;

pub(crate) fn hub() -> Hub {
    Hub::new(Incarnation(1), Limits::default())
}

pub(crate) fn scrape(hub: &Hub) -> Scrape {
    Scrape::read(&text(hub, Format::Text))
}

/// The page of a coordinator that serves the model `demo`.
pub(crate) fn text(hub: &Hub, format: Format) -> String {
    let options = PageOptions {
        model_name: "demo".to_owned(),
        clock_start: Duration::from_secs(1_700_000_000),
        ..PageOptions::default()
    };
    let (merged, exemplars) = (hub.merged(), hub.exemplars());
    let mut text = String::new();
    let page =
        Page { merged: &merged, own: &Merged::default(), exemplars: &exemplars, gathered: &[] };
    page.render(format, &options, &mut text);
    text
}

/// The request id that the client knows.
pub(crate) fn id() -> Arc<str> {
    "cmpl-7".into()
}

pub(crate) fn config(num_blocks: u32) -> ReplicaConfig {
    ReplicaConfig {
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 4096,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            kv_cache_bytes: 1 << 30,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        },
        num_blocks,
        host_blocks: 0,
        tensor_parallel: 2,
    }
}

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) const SUMMARY: RequestSummary =
    RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 100, cached_tokens: 0 };
