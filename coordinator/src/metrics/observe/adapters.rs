//! Requests by adapter. The series exist only for adapters that are served or still in use.
use shared::ids::ReplicaId;
use shared::metrics::{LocalStats, catalogue};

use super::{Cells, Recording, ReplicaCells};
use crate::metrics::up_down_gauge::UpDownGauge;

/// Requests of one adapter at one replica.
#[derive(Debug)]
pub(super) struct AdapterLevels {
    pub(super) running: UpDownGauge,
    /// Waiting or swapped.
    pub(super) waiting: UpDownGauge,
    is_served: bool,
}

impl AdapterLevels {
    pub(super) fn resolve(stats: &mut LocalStats, adapter: &str, replica: &str) -> Self {
        let labels = [adapter, replica];
        Self {
            running: UpDownGauge::new(stats.gauge(catalogue::LORA_REQUESTS, labels)),
            waiting: UpDownGauge::new(stats.gauge(catalogue::LORA_REQUESTS_WAITING, labels)),
            is_served: true,
        }
    }

    /// Sets whether the replica serves: an adapter that is served there is published at 0 too.
    pub(super) fn serves(&mut self, stats: &mut LocalStats, serves: bool) {
        self.running.show_zero(stats, serves && self.is_served);
        self.waiting.show_zero(stats, serves && self.is_served);
    }

    fn is_used(&self) -> bool {
        self.running.is_used() || self.waiting.is_used()
    }
}

impl Recording<'_> {
    /// Sets the adapters that are served. Those not served any more are counted until their last
    /// request ends.
    pub fn adapters<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.adapters = names.map(str::to_owned).collect();
        let Cells { stats, adapters, replicas, .. } = cells;
        for (replica, cells) in replicas {
            cells.set_adapters(stats, adapters, *replica);
        }
    }
}

impl ReplicaCells {
    /// Other adapters are served than before.
    fn set_adapters(&mut self, stats: &mut LocalStats, names: &[String], replica: ReplicaId) {
        let replica = replica.0.to_string();
        for name in names {
            let resolve = || AdapterLevels::resolve(stats, name, &replica);
            self.adapters.entry(name.clone()).or_insert_with(resolve);
        }
        for (name, levels) in &mut self.adapters {
            levels.is_served = names.contains(name);
            levels.serves(stats, self.serves);
        }
        let unused = |levels: &AdapterLevels| !levels.is_served && !levels.is_used();
        for (_, levels) in self.adapters.extract_if(.., |_, levels| unused(levels)) {
            levels.running.remove(stats);
            levels.waiting.remove(stats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_that_is_gone_leaves_nothing_behind() {
        let mut stats = LocalStats::new();
        let replica = ReplicaId(0);
        let mut cells = ReplicaCells::resolve(&mut stats, &["sql".to_owned()], replica);
        if let Some(sql) = cells.adapters.get_mut("sql") {
            sql.running.up(&mut stats);
        }
        let chat = ["chat".to_owned()];
        cells.set_adapters(&mut stats, &chat, replica);
        assert!(format!("{stats:?}").contains("sql"), "a request still uses it");
        if let Some(sql) = cells.adapters.get_mut("sql") {
            sql.running.down(&mut stats);
        }
        cells.set_adapters(&mut stats, &chat, replica);
        let held = format!("{stats:?}");
        assert!(held.contains("chat") && !held.contains("sql"), "{held}");
    }
}
