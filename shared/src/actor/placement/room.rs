//! PURE: processes that host classes, what they have left, and which of them takes an actor.
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::super::registry::Home;
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{
    Creation, Hosting, Instance, Needs, PlacementError, Where,
};

/// Maximum number of starts in one process that are accounted for: all actors, and as many of their
/// predecessors that have not ended yet.
const INSTANCES_MAX: usize = 2 * super::CREATED_MAX;
/// Maximum number of created actors that are placed in one process: each has a thread there.
pub const HOSTED_MAX: usize = 256;
/// Maximum number of nodes that an error names.
const NODES_SAID: usize = 8;

/// Amounts of resources by name. `cpus` and `gpus` are in thousandths, `memory` in bytes, others in
/// the units of whoever defined them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts(BTreeMap<String, u64>);

impl Amounts {
    fn of(cpus: u64, gpus: u64, memory: u64, custom: &BTreeMap<String, u64>) -> Self {
        let mut amounts = custom.clone();
        let own = [("cpus", cpus), ("gpus", gpus), ("memory", memory)];
        amounts.extend(own.map(|(name, amount)| (name.to_owned(), amount)));
        amounts.retain(|_, amount| *amount > 0);
        Self(amounts)
    }

    /// What an actor needs.
    #[must_use]
    pub fn needed(needs: &Needs) -> Self {
        Self::of(needs.cpus, needs.gpus, needs.memory, &needs.custom)
    }

    /// What a node offers.
    #[must_use]
    pub fn offered(offer: &NodeResources) -> Self {
        let thousandths = |whole: u32| u64::from(whole) * 1000;
        let NodeResources { cpus, gpus, memory_bytes, custom, .. } = offer;
        Self::of(thousandths(*cpus), thousandths(*gpus), *memory_bytes, custom)
    }

    fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let sum = self.0.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    fn subtract(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            if let Some(left) = self.0.get_mut(name) {
                *left = left.saturating_sub(*amount);
            }
        }
        self.0.retain(|_, amount| *amount > 0);
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, amount)) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            match name.as_str() {
                "cpus" | "gpus" => write!(f, "{} {name}", *amount as f64 / 1000.0)?,
                "memory" if *amount >= 1 << 20 => write!(f, "{} MiB of memory", amount >> 20)?,
                "memory" => write!(f, "{amount} bytes of memory")?,
                name => write!(f, "{amount} {name}")?,
            }
        }
        Ok(())
    }
}

/// A linked process that hosts classes.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Its node's name.
    pub node: String,
    /// What it hosts.
    pub hosting: Hosting,
    /// Whether its node is to leave: it gets no more actors.
    pub draining: bool,
    /// Starts that have not reported their end, with what they take.
    instances: BTreeMap<Instance, Amounts>,
    offered: Amounts,
    used: Amounts,
}

impl Host {
    pub(super) fn new(node: &str) -> Self {
        Self { node: node.to_owned(), ..Self::default() }
    }

    pub(super) fn offers(&mut self, hosting: Hosting) {
        self.offered = Amounts::offered(&hosting.offer);
        self.hosting = hosting;
    }

    pub(super) fn take(&mut self, instance: Instance, needs: &Needs) {
        let needed = Amounts::needed(needs);
        if self.instances.len() >= INSTANCES_MAX {
            return;
        }
        if !self.instances.contains_key(&instance) {
            self.used.add(&needed);
            self.instances.insert(instance, needed);
        }
    }

    /// Frees what a start took. False: it took nothing.
    pub(super) fn release(&mut self, instance: Instance) -> bool {
        let Some(taken) = self.instances.remove(&instance) else { return false };
        self.used.subtract(&taken);
        true
    }

    /// Number of starts that have not reported their end.
    #[must_use]
    pub fn actors(&self) -> usize {
        self.instances.len()
    }

    /// What its actors take.
    #[must_use]
    pub fn used(&self) -> &Amounts {
        &self.used
    }

    /// What is left.
    #[must_use]
    pub fn free(&self) -> Amounts {
        let mut free = self.offered.clone();
        free.subtract(&self.used);
        free
    }

    fn is_full(&self) -> bool {
        self.instances.len() >= HOSTED_MAX
    }

    fn has_room_for(&self, needed: &Amounts) -> bool {
        let left = |name: &str| self.offered.get(name).saturating_sub(self.used.get(name));
        !self.is_full() && needed.0.iter().all(|(name, amount)| left(name) >= *amount)
    }

    fn hosts(&self, class: &str) -> bool {
        self.hosting.classes.iter().any(|it| it == class)
    }

    fn matches(&self, at: &Where) -> bool {
        let labels = &self.hosting.offer.labels;
        let right = at.soft || at.node.as_ref().is_none_or(|node| *node == self.node);
        right && at.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// How much of its scarcest resource is taken, in thousandths, then how many actors it has.
    fn load(&self) -> (u64, usize) {
        let share = |(name, offered): (&String, &u64)| {
            u128::from(self.used.get(name)) * 1000 / u128::from(*offered).max(1)
        };
        let load = self.offered.0.iter().map(share).max().unwrap_or(0);
        (u64::try_from(load).unwrap_or(u64::MAX), self.instances.len())
    }
}

/// Chooses the process for an actor; `avoid` is taken only if there is no other.
pub(super) fn choose(
    hosts: &BTreeMap<Home, Host>,
    creation: &Creation,
    avoid: Option<Home>,
) -> Result<Home, PlacementError> {
    let Creation { class, needs, at, .. } = creation;
    let hosting: Vec<_> = hosts.iter().filter(|(_, host)| host.hosts(class)).collect();
    if hosting.is_empty() {
        return Err(PlacementError::NoHost(class.clone()));
    }
    let allowed = |(_, host): &&(&Home, &Host)| !host.draining && host.matches(at);
    let allowed: Vec<_> = hosting.iter().filter(allowed).collect();
    if allowed.is_empty() {
        let words = |(_, host): &(&Home, &Host)| match host.draining {
            true => format!("{} (it drains)", host.node),
            false => host.node.clone(),
        };
        let hosts = list(hosting.iter().map(words), ", ");
        return Err(PlacementError::NoMatch { asked: words_of(at), hosts });
    }
    let needed = Amounts::needed(needs);
    let fits = |(_, host): &&&(&Home, &Host)| host.has_room_for(&needed);
    let rank = |(home, host): &&&(&Home, &Host)| {
        let elsewhere = at.node.as_ref().is_some_and(|node| *node != host.node);
        let (load, back) = (host.load(), Some(**home) == avoid);
        let (emptiest, fullest) = match at.spread {
            true => (load, Reverse((0, 0))),
            false => ((0, 0), Reverse(load)),
        };
        (back, elsewhere, emptiest, fullest, host.node.clone(), **home)
    };
    match allowed.iter().filter(fits).min_by_key(rank) {
        Some((home, _)) => Ok(**home),
        None => {
            let words = |(_, host): &&(&Home, &Host)| match host.is_full() {
                true => {
                    format!("nothing on {} (it runs {HOSTED_MAX} actors, the limit)", host.node)
                }
                false => format!("{} on {}", host.free(), host.node),
            };
            let free = list(allowed.iter().map(words), "; ");
            Err(PlacementError::NoRoom { asked: needed.to_string(), free })
        }
    }
}

fn words_of(at: &Where) -> String {
    let node = at.node.iter().filter(|_| !at.soft).map(|node| format!("on node {node}"));
    let labels = at.labels.iter().map(|(key, value)| format!("where {key} is {value}"));
    let words: Vec<String> = node.chain(labels).collect();
    if words.is_empty() { "anywhere".to_owned() } else { words.join(" and ") }
}

/// The first few of `items`, and how many more there are.
fn list(items: impl ExactSizeIterator<Item = String>, between: &str) -> String {
    let more = items.len().saturating_sub(NODES_SAID);
    let said: Vec<String> = items.take(NODES_SAID).collect();
    let said = said.join(between);
    if more > 0 { format!("{said} and {more} more") } else { said }
}
