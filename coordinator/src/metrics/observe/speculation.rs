//! Results of speculative decoding.
use shared::ids::ReplicaId;
use shared::metrics::catalogue;
use shared::metrics::{Counter, LocalStats};

use super::Recording;

/// Series of one replica that drafts.
#[derive(Debug)]
pub(super) struct SpeculationCells {
    drafts: Counter,
    draft_tokens: Counter,
    accepted: Counter,
    emitted: Counter,
    emittable: Counter,
    by_position: Vec<Counter>,
}

impl SpeculationCells {
    fn resolve(stats: &mut LocalStats, replica: ReplicaId, tokens_max: u32) -> Self {
        let name = replica.0.to_string();
        let label = [name.as_str()];
        Self {
            drafts: stats.counter(catalogue::SPEC_DECODE_DRAFTS, label),
            draft_tokens: stats.counter(catalogue::SPEC_DECODE_DRAFT_TOKENS, label),
            accepted: stats.counter(catalogue::SPEC_DECODE_ACCEPTED_TOKENS, label),
            emitted: stats.counter(catalogue::SPEC_DECODE_EMITTED_TOKENS, label),
            emittable: stats.counter(catalogue::SPEC_DECODE_EMITTABLE_TOKENS, label),
            by_position: (0..tokens_max)
                .map(|position| {
                    let labels = [position.to_string().as_str(), &name].map(str::to_owned);
                    let labels = [labels[0].as_str(), &labels[1]];
                    stats.counter(catalogue::SPEC_DECODE_ACCEPTED_PER_POSITION, labels)
                })
                .collect(),
        }
    }
}

impl Recording<'_> {
    /// A replica serves that drafts up to `tokens_max` tokens at a time: its series exist from now
    /// on.
    pub fn speculates(&mut self, replica: ReplicaId, tokens_max: u32) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        cells
            .speculation
            .get_or_insert_with(|| SpeculationCells::resolve(stats, replica, tokens_max));
    }

    /// A draft of `tokens` was verified: the first `accepted` of them were right, and its sequence
    /// gained `emitted` tokens.
    pub fn drafted(&mut self, replica: ReplicaId, tokens: u32, accepted: u32, emitted: u32) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        let Some(cells) = &cells.speculation else { return };
        stats.add(cells.drafts, 1);
        stats.add(cells.draft_tokens, u64::from(tokens));
        stats.add(cells.accepted, u64::from(accepted));
        stats.add(cells.emitted, u64::from(emitted));
        stats.add(cells.emittable, u64::from(tokens) + 1);
        for counter in cells.by_position.iter().take(accepted as usize) {
            stats.add(*counter, 1);
        }
    }
}
