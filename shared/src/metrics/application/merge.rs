//! PURE: merges application metrics of all sources.
//!
//! The algebra is that of our own series, but declarations come with the reports. The first one of
//! a name holds as long as any source uses it: of a source that declares it differently, only that
//! metric is refused. When no source uses it any more, another one takes its place, and the old
//! one's totals end, which Prometheus takes for a restart.
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::{Declaration, Family, GaugeMerge, Kind};
use crate::metrics::merger::Limits;
use crate::metrics::snapshot::{LabelValues, Value};

/// Maximum number of lines for the log that are remembered so that each is logged once.
const SAID_MAX: usize = 1024;

/// Sets of tags of a report that are beyond the bound, with the names of their metrics.
pub(crate) type TagSets = BTreeSet<(String, LabelValues)>;

/// One merged metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedFamily {
    /// What it is declared as.
    pub declaration: Declaration,
    /// Its values by tags.
    pub series: BTreeMap<LabelValues, Value>,
}

/// All known names, and the totals of retired sources.
#[derive(Debug)]
pub(crate) struct Applications {
    limits: Limits,
    /// By name. Every metric of a live source is known as that source declares it.
    known: BTreeMap<String, Known>,
    /// Whether names may have become unused since these were last looked for.
    may_free: bool,
    /// Lines that were already handed to the log.
    said: BTreeSet<String>,
    /// Lines that were not yet.
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Known {
    /// The totals of retired sources.
    retired: MergedFamily,
    /// Sets of tags of live and retired sources, for their bound. Those of vanished gauges stay
    /// until their room is needed.
    tag_sets: BTreeSet<LabelValues>,
}

impl Applications {
    /// Creates a merger that has seen nothing.
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            known: BTreeMap::new(),
            may_free: false,
            said: BTreeSet::new(),
            warnings: Vec::new(),
        }
    }

    /// Keeps of a source's report the metrics that continue its last report and agree with what is
    /// known, and of these the sets of tags within the bound. A refused counter or histogram keeps
    /// its old totals. `others` are the last reports of all other sources. Returns the number of
    /// refused metrics, and the sets of tags that are left out.
    pub(crate) fn admit<'a>(
        &mut self,
        source: &str,
        before: &[Family],
        now: &mut Vec<Family>,
        others: impl Iterator<Item = &'a [Family]> + Clone,
    ) -> (usize, TagSets) {
        let (mut refused, mut left_out) = (0, TagSets::new());
        let mut admitted: Vec<Family> = Vec::with_capacity(now.len());
        for mut family in std::mem::take(now) {
            let name = family.declaration.name.clone();
            let is_used = |name: &str| {
                find(before, name).is_some()
                    || find(&admitted, name).is_some()
                    || others.clone().any(|families| find(families, name).is_some())
            };
            let checked = if admitted.last().is_some_and(|last| last.declaration.name >= name) {
                Err("the report is not in canonical order".to_owned())
            } else {
                check(&family)
                    .and_then(|()| continues(find(before, &name), &family))
                    .and_then(|()| self.declare(&family.declaration, is_used))
            };
            if let Err(problem) = checked {
                refused += 1;
                self.refuse(source, &name, &problem);
                continue;
            }
            let over = self.admit_tag_sets(&family, others.clone());
            if !over.is_empty() {
                family.series.retain(|(tags, _)| !over.contains(tags));
                left_out.extend(over.into_iter().map(|tags| (name.clone(), tags)));
            }
            admitted.push(family);
        }
        // Totals that are missing from this report stay: none falls. Gauges may vanish.
        for old in before {
            let Err(place) = place(&admitted, &old.declaration.name) else { continue };
            if old.is_gauge() {
                self.may_free = true;
            } else {
                admitted.insert(place, old.clone());
            }
        }
        *now = admitted;
        (refused, left_out)
    }

    /// Keeps what a source had counted when a checkpoint was written, as far as it agrees with what
    /// is known, and without gauges. All its sets of tags are known from then on: they counted.
    pub(crate) fn adopt(&mut self, source: &str, families: &mut Vec<Family>) {
        let mut previous: Option<String> = None;
        families.retain(|family| {
            if family.is_gauge() {
                return false;
            }
            let name = &family.declaration.name;
            let checked = if previous.as_ref().is_some_and(|previous| previous >= name) {
                Err("the checkpoint is not in canonical order".to_owned())
            } else {
                // What is known here is newer, whoever uses it.
                check(family).and_then(|()| self.declare(&family.declaration, |_| true))
            };
            if let Err(problem) = checked {
                self.refuse(source, name, &problem);
                return false;
            }
            if let Some(known) = self.known.get_mut(name) {
                known.tag_sets.extend(family.series.iter().map(|(tags, _)| tags.clone()));
            }
            previous = Some(name.clone());
            true
        });
        self.may_free = true;
    }

    /// Makes this the declaration of its name, if it is not. Another one, or another metric of the
    /// same published name, gives way if it is not in use.
    fn declare(
        &mut self,
        declaration: &Declaration,
        is_used: impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        let name = &declaration.name;
        if self.known.get(name).is_some_and(|known| known.retired.declaration.same(declaration)) {
            return Ok(());
        }
        let known = self.known.values().map(|known| &known.retired.declaration);
        let in_the_way: Vec<Declaration> =
            known.filter(|it| it.name == *name || it.clashes_with(declaration)).cloned().collect();
        if let Some(old) = in_the_way.iter().find(|old| is_used(&old.name)) {
            return Err(if old.name == *name {
                format!("it is {old} elsewhere in the cluster, here {declaration}")
            } else {
                format!(
                    "`{}` is {old} in the cluster, and both would be published under the same name",
                    old.name
                )
            });
        }
        for old in in_the_way {
            self.known.remove(&old.name);
            self.say(format!(
                "application metric `{}`, {old}, is in use no more and gives way to `{name}`, \
                 {declaration}: its totals end",
                old.name
            ));
        }
        let max = self.limits.application_names;
        if self.known.len() >= max && std::mem::take(&mut self.may_free) {
            self.known.retain(|name, known| !known.retired.series.is_empty() || is_used(name));
        }
        if self.known.len() >= max {
            return Err(format!("there are {max} application metrics in the cluster already"));
        }
        let retired = MergedFamily { declaration: declaration.clone(), series: BTreeMap::new() };
        self.known.insert(name.clone(), Known { retired, tag_sets: BTreeSet::new() });
        Ok(())
    }

    /// Remembers the sets of tags of a family as far as the bound allows; returns those beyond it.
    fn admit_tag_sets<'a>(
        &mut self,
        family: &Family,
        others: impl Iterator<Item = &'a [Family]>,
    ) -> BTreeSet<LabelValues> {
        let max = self.limits.application_tag_sets;
        let name = &family.declaration.name;
        let mut over = BTreeSet::new();
        let Some(Known { tag_sets, .. }) = self.known.get_mut(name) else { return over };
        let mut others = Some(others);
        for (tags, _) in &family.series {
            if tag_sets.contains(tags) {
                continue;
            }
            if tag_sets.len() >= max
                && family.is_gauge()
                && let Some(others) = others.take()
            {
                // Sets that no source reports any more make room.
                let mut there: BTreeSet<&LabelValues> =
                    family.series.iter().map(|(tags, _)| tags).collect();
                for other in others.filter_map(|families| find(families, name)) {
                    there.extend(other.series.iter().map(|(tags, _)| tags));
                }
                tag_sets.retain(|tags| there.contains(tags));
            }
            if tag_sets.len() < max {
                tag_sets.insert(tags.clone());
            } else {
                over.insert(tags.clone());
            }
        }
        if !over.is_empty() {
            self.say(format!(
                "application metric `{name}` has {max} sets of tags in the cluster; more are left \
                 out"
            ));
        }
        over
    }

    /// Takes the gauges out of what a source has reported: its link is lost.
    pub(crate) fn lose(&mut self, families: &mut Vec<Family>) {
        families.retain(|family| !family.is_gauge());
        self.may_free = true;
    }

    /// Keeps the totals of a source that is gone for good.
    pub(crate) fn retire(&mut self, families: &[Family]) {
        for family in families.iter().filter(|family| !family.is_gauge()) {
            if let Some(known) = self.known.get_mut(&family.declaration.name) {
                add(&mut known.retired, family);
            }
        }
        self.may_free = true;
    }

    /// Returns the totals of retired sources.
    pub(crate) fn totals(&self) -> Vec<Family> {
        let known = self.known.values().map(|known| &known.retired);
        let family = |known: &MergedFamily| Family {
            declaration: known.declaration.clone(),
            series: known
                .series
                .iter()
                .map(|(tags, value)| (tags.clone(), value.clone()))
                .collect(),
        };
        known.filter(|family| !family.series.is_empty()).map(family).collect()
    }

    /// Takes totals of retired sources from another merger, in any order; a name may occur more
    /// than once.
    pub(crate) fn restore(&mut self, families: Vec<Family>) {
        for family in families {
            let mut one = vec![family];
            self.adopt("an earlier coordinator", &mut one);
            self.retire(&one);
        }
    }

    /// Returns all totals: those kept here plus those of `live` sources.
    pub(crate) fn merged<'a>(
        &self,
        live: impl Iterator<Item = Cow<'a, [Family]>>,
    ) -> Vec<MergedFamily> {
        let mut merged: BTreeMap<&str, MergedFamily> =
            self.known.iter().map(|(name, known)| (name.as_str(), known.retired.clone())).collect();
        for families in live {
            for family in families.iter() {
                if let Some(known) = merged.get_mut(family.declaration.name.as_str()) {
                    add(known, family);
                }
            }
        }
        merged.into_values().filter(|family| !family.series.is_empty()).collect()
    }

    /// Returns what the log should say since the last call.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    fn refuse(&mut self, source: &str, name: &str, problem: &str) {
        self.say(format!("{source}: application metric `{name}` is refused: {problem}"));
    }

    fn say(&mut self, line: String) {
        if self.said.len() < SAID_MAX && self.said.insert(line.clone()) {
            self.warnings.push(line);
        }
    }
}

/// Where a metric is in a report, or would be.
fn place(families: &[Family], name: &str) -> Result<usize, usize> {
    families.binary_search_by(|family| family.declaration.name.as_str().cmp(name))
}

fn find<'f>(families: &'f [Family], name: &str) -> Option<&'f Family> {
    families.get(place(families, name).ok()?)
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

/// Checks a metric by itself.
fn check(family: &Family) -> Result<(), String> {
    let declaration = &family.declaration;
    declaration.check().map_err(|error| error.to_string())?;
    if !family.series.is_sorted_by(|(a, _), (b, _)| a < b) {
        return Err("the report is not in canonical order".to_owned());
    }
    for (tags, value) in &family.series {
        declaration.check_tags(tags).map_err(|error| error.to_string())?;
        let fits = match (&declaration.kind, value) {
            (Kind::Counter, Value::Counter(_)) => true,
            (Kind::Gauge(_), Value::Gauge(value)) => value.is_finite(),
            (Kind::Histogram(bounds), Value::Histogram(totals)) => {
                totals.buckets.len() == bounds.len() + 1
            }
            _ => false,
        };
        if !fits {
            return Err("a value does not fit its declaration".to_owned());
        }
    }
    Ok(())
}

/// Checks that no total of `now` is below that of `old`.
fn continues(old: Option<&Family>, now: &Family) -> Result<(), String> {
    let Some(old) = old else { return Ok(()) };
    let does = old.declaration.same(&now.declaration)
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
        });
    if does { Ok(()) } else { Err("a total fell".to_owned()) }
}
