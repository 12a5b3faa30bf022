//! PURE: which free workers form a group together, and at which ranks.
use std::collections::BTreeMap;

use shared::ids::WorkerId;

use super::Member;

/// Groups free workers into complete tensor-parallel groups, ranks in order.
///
/// Same host first, since ranks exchange data twice a layer: as many whole groups as fit on each
/// host, then groups of what is left over on several. Workers that fill no group stay spare. A
/// worker whose weights are those of a rank, by `held`, becomes that rank where it can.
/// Deterministic: depends on the members and what they hold alone, ordered by host and worker id.
#[must_use]
pub fn place(
    free: &[&Member],
    world_size: usize,
    held: impl Fn(WorkerId) -> Option<usize>,
) -> Vec<Vec<WorkerId>> {
    if world_size == 0 {
        return Vec::new();
    }
    let mut hosts: BTreeMap<&str, Vec<WorkerId>> = BTreeMap::new();
    for member in free {
        hosts.entry(&member.host).or_default().push(member.worker);
    }
    let mut groups = Vec::new();
    let mut leftover = Vec::new();
    for workers in hosts.values_mut() {
        workers.sort_unstable();
        let (whole, rest) = group(workers, world_size, &held);
        groups.extend(whole);
        leftover.extend(rest);
    }
    groups.extend(group(&leftover, world_size, &held).0);
    groups.sort_unstable();
    groups
}

/// As many whole groups as there are workers for, and the workers left over.
fn group(
    workers: &[WorkerId],
    world_size: usize,
    held: impl Fn(WorkerId) -> Option<usize>,
) -> (Vec<Vec<WorkerId>>, Vec<WorkerId>) {
    let mut groups = vec![vec![None; world_size]; workers.len() / world_size];
    let mut others = Vec::new();
    for worker in workers {
        let rank = held(*worker).filter(|rank| *rank < world_size);
        let place = rank.and_then(|rank| {
            groups.iter_mut().map(|group| &mut group[rank]).find(|place| place.is_none())
        });
        match place {
            Some(place) => *place = Some(*worker),
            None => others.push(*worker),
        }
    }
    let mut others = others.into_iter();
    for place in groups.iter_mut().flatten().filter(|place| place.is_none()) {
        *place = others.next();
    }
    (
        groups.into_iter().map(|group| group.into_iter().flatten().collect()).collect(),
        others.collect(),
    )
}
