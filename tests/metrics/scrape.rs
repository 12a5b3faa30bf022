//! A reader of the text format, written from the format's specification, not from our writer: it
//! sees what a Prometheus server would see.
use std::collections::{BTreeMap, BTreeSet};

/// One scrape.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    /// Family name to type.
    pub(crate) types: BTreeMap<String, String>,
    /// `name{labels}` as written, to value.
    pub(crate) samples: BTreeMap<String, f64>,
}

impl Scrape {
    /// Reads a scrape; panics at anything a server would reject.
    pub(crate) fn read(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line ends");
        let mut scrape = Self::default();
        let mut helps = BTreeSet::new();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                assert!(!help.is_empty());
                assert!(helps.insert(name.to_owned()), "{name} has one HELP");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(helps.contains(name), "{name} has a HELP");
                let old = scrape.types.insert(name.to_owned(), kind.to_owned());
                assert!(old.is_none(), "{name} has one TYPE");
                family = name.to_owned();
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                // All series of a cluster have this label, so tests need not name it.
                let series = series
                    .replace("{model_name=\"demo\"}", "")
                    .replace("{model_name=\"demo\",", "{");
                assert!(series.starts_with(&family), "{series} is among its family");
                let value = value.parse().unwrap();
                let old = scrape.samples.insert(series.clone(), value);
                assert!(old.is_none(), "{series} occurs once");
            }
        }
        scrape
    }

    /// The value of one series as written.
    pub(crate) fn get(&self, series: &str) -> f64 {
        *self.samples.get(series).unwrap_or_else(|| panic!("{series} is missing"))
    }

    /// Adds up all series of one sample name, as `sum(name)` would.
    pub(crate) fn sum(&self, name: &str) -> f64 {
        self.matching(name).map(|(_, value)| value).sum()
    }

    /// All series of one sample name.
    pub(crate) fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        self.samples.iter().filter_map(move |(series, value)| {
            let labels = series.strip_prefix(name)?;
            (labels.is_empty() || labels.starts_with('{')).then_some((series.as_str(), *value))
        })
    }

    /// Series whose values must not decrease from one scrape to the next.
    pub(crate) fn totals(&self) -> impl Iterator<Item = (&str, f64)> {
        let grows = |series: &str| {
            let name = series.split('{').next().unwrap_or(series);
            self.types.iter().any(|(family, kind)| match kind.as_str() {
                "counter" => family == name,
                "histogram" => name
                    .strip_prefix(family.as_str())
                    .is_some_and(|suffix| ["_bucket", "_sum", "_count"].contains(&suffix)),
                _ => false,
            })
        };
        self.samples
            .iter()
            .map(|(name, value)| (name.as_str(), *value))
            .filter(move |(n, _)| grows(n))
    }

    /// Checks the identities that hold within every scrape.
    pub(crate) fn check_identities(&self) {
        let computed: f64 = self
            .matching("tutti_prompt_tokens_by_source_total")
            .filter(|(series, _)| series.contains("source=\"local_compute\""))
            .map(|(_, value)| value)
            .sum();
        assert_eq!(
            self.sum("tutti_iteration_tokens_sum"),
            computed + self.sum("tutti_generation_tokens_total")
        );
        assert_eq!(self.sum("tutti_iteration_tokens_count"), self.sum("tutti_engine_steps_total"));
        assert_eq!(
            self.sum("tutti_prompt_tokens_by_source_total"),
            self.sum("tutti_prompt_tokens_total")
        );
        let in_flight = self.get("tutti_requests_in_flight");
        assert_eq!(
            self.sum("tutti_requests_running")
                + self.sum("tutti_requests_waiting")
                + self.sum("tutti_requests_swapped"),
            in_flight
        );
        assert_eq!(
            self.sum("tutti_request_success_total") + in_flight,
            self.get("tutti_requests_accepted_total")
        );
        let handed_over = self
            .matching("tutti_request_success_total")
            .filter(|(series, _)| series.contains("finished_reason=\"handed_over\""))
            .map(|(_, value)| value)
            .sum::<f64>();
        let ended = self.sum("tutti_request_success_total") - handed_over;
        for size in [
            "prompt_tokens",
            "generation_tokens",
            "max_num_generation_tokens",
            "preemptions",
            "params_n",
            "params_best_of",
            "params_max_tokens",
        ] {
            assert_eq!(self.get(&format!("tutti_request_{size}_count")), ended, "{size}");
        }
        self.check_histograms();
    }

    /// Checks that buckets are cumulative and end with the count.
    fn check_histograms(&self) {
        for (family, _) in self.types.iter().filter(|(_, kind)| *kind == "histogram") {
            let counts: Vec<_> = self.matching_name(&format!("{family}_count"));
            assert!(!counts.is_empty(), "{family} has a count");
            for (labels, count) in counts {
                let mut buckets: Vec<(f64, f64)> = self
                    .matching_name(&format!("{family}_bucket"))
                    .into_iter()
                    .filter_map(|(series, value)| {
                        let (rest, bound) = series.split_once("le=\"")?;
                        (rest.trim_end_matches(',') == labels.trim_end_matches('}')
                            || (labels.is_empty() && rest == "{"))
                            .then(|| {
                                let bound = bound.trim_end_matches("\"}");
                                (bound.replace("+Inf", "inf").parse().unwrap(), value)
                            })
                    })
                    .collect();
                buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
                assert!(buckets.len() > 1, "{family}{labels} has buckets");
                assert!(buckets.is_sorted_by(|a, b| a.1 <= b.1), "{family}{labels}: {buckets:?}");
                assert_eq!(buckets.last(), Some(&(f64::INFINITY, count)), "{family}{labels}");
            }
        }
    }

    fn matching_name(&self, name: &str) -> Vec<(String, f64)> {
        self.matching(name)
            .map(|(series, value)| (series[name.len()..].to_owned(), value))
            .collect()
    }
}
