//! The catalogue as documentation: a test checks that `docs/metrics.md` is this text.
use std::fmt::Write;

use shared::metrics::catalogue::{CATALOGUE, FRONTEND_PAGE};
use shared::metrics::compat::Compat;
use shared::metrics::labels::MODEL_NAME;
use shared::metrics::{Definition, Kind};

const HEAD: &str = "\
# Metrics

One endpoint, `/metrics` on the coordinator, holds the whole cluster. This page is generated from the
catalogue (`shared/src/metrics/catalogue.rs`); to change it, change the catalogue and run
`UPDATE_DOCS=1 cargo test -p computing --test metrics`.

How to read it:

- Series that belong to a replica carry `replica`: `sum without (replica) (...)` is the cluster.
- Ranks of one replica see the same batch, so its tokens are counted once, by the coordinator, when it
  accepts them. Figures per rank carry `rank` and `worker` and are never added up.
- Counters and histograms never fall while the coordinator lives, whatever happens to workers. Gauges
  vanish with what they describe.
- Do not average ratios: divide the sums of numerator and denominator.
- A worker that dies takes at most one report interval of its own `rank` series with it. Requests and
  tokens are counted by the coordinator and lose nothing.
- Front ends of their own processes (`tutti frontend`) count their HTTP requests and what they refuse;
  everything the engine does is counted by the coordinator, so no total depends on how many front ends
  there are. A front end that is killed takes at most one report interval (0.5 s) of its HTTP series with
  it, one that stops none.
- Latencies of parts (prefill, decode, inference, end to end, time per output token) are those of requests
  for text that ended by `stop` or `length`; queue time and time to first token are those of all that came
  so far, however they end; sizes and parameters are those of all requests that ended. A request for embeddings, classes, a ranking or scores is one accepted request for each text or pair of texts; its latency is that of embeddings.

Formats: Prometheus text 0.0.4, and OpenMetrics 1.0 when the scraper asks for it, with the id of a
request beside the buckets of latency histograms (exemplars); gzip when asked for. The coordinator's own
`process_*` series come from the `prometheus` crate. Application metrics (`shared::metrics::application`)
appear under the names that the application gave them.

In every single scrape:

- `tutti_iteration_tokens_sum` = `tutti_prompt_tokens_by_source_total{source=\"local_compute\"}` +
  `tutti_generation_tokens_total`, and `tutti_iteration_tokens_count` = `tutti_engine_steps_total`
- running + waiting + swapped = `tutti_requests_in_flight`
- `tutti_request_success_total` over all reasons + `tutti_requests_in_flight` =
  `tutti_requests_accepted_total`
";

/// Renders the catalogue.
#[must_use]
pub fn markdown() -> String {
    let mut page = String::from(HEAD);
    page.push_str("\n## Series\n\n");
    page.push_str(
        "| name | type | unit | labels | measured by | merged by | meaning | present |\n",
    );
    page.push_str("| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for definition in CATALOGUE {
        row(&mut page, definition);
    }
    page.push_str("\n## Buckets\n\n| histogram | upper bounds |\n| --- | --- |\n");
    for definition in CATALOGUE {
        if let Kind::Histogram(bounds) = definition.kind {
            let bounds: Vec<_> = bounds.iter().map(f64::to_string).collect();
            // Writing to a String cannot fail.
            let _ = writeln!(page, "| `{}` | {} |", definition.name, bounds.join(" "));
        }
    }
    page.push_str(
        "\n## At a front end\n\nA front end of its own process (`tutti frontend`) has a `/metrics` of \
         its own, for whoever scrapes each process behind a load balancer: its `process_*` series and \
         what it counts itself. That is in the coordinator's totals already, so it has other names: a \
         server that scrapes the coordinator and front ends counts nothing twice.\n\n\
         | name at a front end | its part of |\n| --- | --- |\n",
    );
    for (name, of) in FRONTEND_PAGE {
        // Writing to a String cannot fail.
        let _ = writeln!(page, "| `{name}` | `{}` |", of.definition().name);
    }
    page.push_str(
        "\n## Names of other servers\n\nPublished beside ours from the same totals with \
         `--metrics-compat vllm,aphrodite`; with `model_name`, and with `engine` \
         where ours has `replica`. With `vllm-cluster` instead of `vllm` they have no `engine`: one \
         series for the whole cluster, for gateways that take one series for their server's.\n\n\
         | name | series |\n| --- | --- |\n",
    );
    for alias in [Compat::Vllm, Compat::Aphrodite].iter().flat_map(|compat| compat.aliases()) {
        // Writing to a String cannot fail.
        let _ = writeln!(page, "| `{}` | `{}` |", alias.name, alias.source().definition().name);
    }
    page
}

fn row(page: &mut String, definition: &Definition) {
    let kind = match definition.kind {
        Kind::Counter => "counter",
        Kind::Gauge(_) => "gauge",
        Kind::Histogram(_) => "histogram",
    };
    let model = definition.model.then(|| format!("`{MODEL_NAME}`"));
    let labels = definition.labels.iter().map(|label| match label.values {
        [] => format!("`{}`", label.name),
        values => format!("`{}` ({})", label.name, values.join(", ")),
    });
    let labels: Vec<String> = model.into_iter().chain(labels).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(
        page,
        "| `{}` | {kind} | {} | {} | {} | {} | {} | {} |",
        definition.name,
        definition.unit.as_str(),
        labels.join(", "),
        definition.owner.as_str(),
        definition.merge_rule(),
        definition.help,
        definition.when.map_or_else(|| "always".to_owned(), |when| format!("when {when}")),
    );
}
