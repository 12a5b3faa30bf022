//! PURE: which slot a node without one gets.
use shared::ids::WorkerId;

/// A worker may bring a slot from another coordinator up to this far beyond those in use.
const AHEAD_MAX: u32 = 4096;

/// Returns the slot the worker brings, if it is free, otherwise the first free one.
pub(super) fn vacant<'a>(
    taken: impl ExactSizeIterator<Item = &'a WorkerId>,
    brought: Option<WorkerId>,
) -> WorkerId {
    let count = u32::try_from(taken.len()).unwrap_or(u32::MAX);
    let mut brought = brought.filter(|slot| slot.0 <= count.saturating_add(AHEAD_MAX));
    // Among one more number than are taken, one is vacant.
    let mut is_taken = vec![false; taken.len() + 1];
    for slot in taken {
        is_taken.get_mut(slot.0 as usize).into_iter().for_each(|it| *it = true);
        brought = brought.filter(|brought| brought != slot);
    }
    let first = (0..=count).zip(is_taken).find(|(_, is_taken)| !is_taken);
    brought.unwrap_or(WorkerId(first.map_or(count, |(slot, _)| slot)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(taken: &[u32], brought: Option<u32>) -> u32 {
        let taken: Vec<WorkerId> = taken.iter().copied().map(WorkerId).collect();
        vacant(taken.iter(), brought.map(WorkerId)).0
    }

    #[test]
    fn a_worker_keeps_its_slot_where_nobody_has_it() {
        assert_eq!(slot(&[], None), 0);
        assert_eq!(slot(&[0, 1], None), 2);
        assert_eq!(slot(&[0, 2], None), 1, "one that was brought leaves a gap");
        assert_eq!(slot(&[0, 1], Some(7)), 7);
        assert_eq!(slot(&[0, 7], Some(7)), 1);
        assert_eq!(slot(&[], Some(u32::MAX)), 0, "not any number");
    }
}
