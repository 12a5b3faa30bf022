//! PURE: merges application metrics of all sources.
//!
//! The algebra is that of our own series, but declarations come with the reports, and the first one
//! of a name wins. If a source declares it differently, only that metric of its report is refused.
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::{Declaration, Family, GaugeMerge, Kind};
use crate::metrics::snapshot::{LabelValues, Value};

/// Maximum number of names over all sources and all time.
const NAMES_MAX: usize = 1024;
/// Maximum number of sets of tags per name over all sources and all time.
const TAG_SETS_MAX: usize = 4096;

/// One merged metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedFamily {
    /// What it is declared as.
    pub declaration: Declaration,
    /// Its values by tags.
    pub series: BTreeMap<LabelValues, Value>,
}

/// All known names, and the totals of retired sources.
#[derive(Debug, Default)]
pub(crate) struct Applications {
    known: BTreeMap<String, MergedFamily>,
    /// Refusals that were already handed to the log; each is logged once.
    said: BTreeSet<String>,
    /// Refusals that were not yet.
    warnings: Vec<String>,
}

impl Applications {
    /// Keeps of a source's report the metrics that continue its last report and agree with what is
    /// known; a refused metric keeps its old values. Returns the number of refused metrics.
    pub(crate) fn admit(
        &mut self,
        source: &str,
        before: &[Family],
        now: &mut Vec<Family>,
    ) -> usize {
        let mut refused = 0;
        let mut previous: Option<String> = None;
        now.retain(|family| {
            let name = family.declaration.name.clone();
            let problem = if previous.as_ref().is_some_and(|previous| *previous >= name) {
                Some("the report is not in canonical order".to_owned())
            } else {
                let old = before.iter().find(|old| old.declaration.name == name);
                self.problem(old, family)
            };
            let Some(problem) = problem else {
                previous = Some(name);
                return true;
            };
            refused += 1;
            let line = format!("{source}: application metric `{name}` is refused: {problem}");
            if self.said.len() < NAMES_MAX && self.said.insert(line.clone()) {
                self.warnings.push(line);
            }
            false
        });
        // Metrics that are missing from this report stay: no total falls.
        for old in before {
            let name = old.declaration.name.as_str();
            if let Err(place) =
                now.binary_search_by(|family| family.declaration.name.as_str().cmp(name))
            {
                now.insert(place, old.clone());
            }
        }
        refused
    }

    fn problem(&mut self, old: Option<&Family>, now: &Family) -> Option<String> {
        let declaration = &now.declaration;
        if let Err(error) = declaration.check() {
            return Some(error.to_string());
        }
        if !now.series.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Some("the report is not in canonical order".to_owned());
        }
        for (tags, value) in &now.series {
            if let Err(error) = declaration.check_tags(tags) {
                return Some(error.to_string());
            }
            let fits = match (&declaration.kind, value) {
                (Kind::Counter, Value::Counter(_)) => true,
                (Kind::Gauge(_), Value::Gauge(value)) => value.is_finite(),
                (Kind::Histogram(bounds), Value::Histogram(totals)) => {
                    totals.buckets.len() == bounds.len() + 1
                }
                _ => false,
            };
            if !fits {
                return Some("a value does not fit its declaration".to_owned());
            }
        }
        if let Some(old) = old
            && !continues(old, now)
        {
            return Some("a total fell".to_owned());
        }
        match self.known.get(&declaration.name) {
            Some(known) if !known.declaration.same(declaration) => Some(format!(
                "it is {} elsewhere in the cluster, here {declaration}",
                known.declaration
            )),
            Some(known) => {
                let new = now.series.iter().filter(|(tags, _)| !known.series.contains_key(tags));
                if known.series.len() + new.count() > TAG_SETS_MAX {
                    return Some(format!(
                        "it has more than {TAG_SETS_MAX} sets of tags in the cluster"
                    ));
                }
                None
            }
            None if self.known.len() >= NAMES_MAX => {
                Some(format!("there are {NAMES_MAX} application metrics in the cluster already"))
            }
            None => {
                let family =
                    MergedFamily { declaration: declaration.clone(), series: BTreeMap::new() };
                self.known.insert(declaration.name.clone(), family);
                None
            }
        }
    }

    /// Keeps the totals of a source that is gone for good.
    pub(crate) fn retire(&mut self, families: &[Family]) {
        for family in families {
            if matches!(family.declaration.kind, Kind::Gauge(_)) {
                continue;
            }
            if let Some(known) = self.known.get_mut(&family.declaration.name) {
                add(known, family);
            }
        }
    }

    /// Returns the totals of retired sources.
    pub(crate) fn totals(&self) -> Vec<Family> {
        let with_series = self.known.values().filter(|family| !family.series.is_empty());
        let family = |known: &MergedFamily| Family {
            declaration: known.declaration.clone(),
            series: known
                .series
                .iter()
                .map(|(tags, value)| (tags.clone(), value.clone()))
                .collect(),
        };
        with_series.map(family).collect()
    }

    /// Takes totals of retired sources from another merger, in any order; a name may occur more
    /// than once.
    pub(crate) fn restore(&mut self, families: Vec<Family>) {
        for family in families {
            let mut one = vec![family];
            if self.admit("an earlier coordinator", &[], &mut one) == 0 {
                self.retire(&one);
            }
        }
    }

    /// Returns all totals: those kept here plus those of `live` sources.
    pub(crate) fn merged<'a>(
        &self,
        live: impl Iterator<Item = (Cow<'a, [Family]>, bool)>,
    ) -> Vec<MergedFamily> {
        let mut merged = self.known.clone();
        for (families, lost) in live {
            for family in families.iter() {
                let is_gauge = matches!(family.declaration.kind, Kind::Gauge(_));
                if let Some(known) = merged.get_mut(&family.declaration.name)
                    && !(lost && is_gauge)
                {
                    add(known, family);
                }
            }
        }
        merged.into_values().filter(|family| !family.series.is_empty()).collect()
    }

    /// Returns descriptions of what was refused since the last call.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }
}

fn add(known: &mut MergedFamily, family: &Family) {
    for (tags, value) in &family.series {
        match known.series.get_mut(tags) {
            None => {
                known.series.insert(LabelValues::clone(tags), value.clone());
            }
            Some(held) => match (held, value) {
                (Value::Counter(held), Value::Counter(value)) => {
                    *held = held.saturating_add(*value);
                }
                (Value::Histogram(held), Value::Histogram(value)) => held.add(value),
                (Value::Gauge(held), Value::Gauge(value)) => {
                    *held = match known.declaration.kind {
                        Kind::Gauge(GaugeMerge::Max) => held.max(*value),
                        Kind::Gauge(GaugeMerge::Min) => held.min(*value),
                        _ => *held + value,
                    };
                }
                _ => {}
            },
        }
    }
}

/// Whether no total of `now` is below that of `old`.
fn continues(old: &Family, now: &Family) -> bool {
    old.declaration.same(&now.declaration)
        && old.series.iter().all(|(tags, before)| {
            let place = now.series.binary_search_by(|(held, _)| held.cmp(tags));
            match (before, place.ok().and_then(|place| now.series.get(place))) {
                (Value::Gauge(_), _) => true,
                (Value::Counter(before), Some((_, Value::Counter(now)))) => now >= before,
                (Value::Histogram(before), Some((_, Value::Histogram(now)))) => {
                    now.continues(before)
                }
                _ => false,
            }
        })
}
