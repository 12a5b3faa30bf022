//! PURE: which free workers form a group together.
use std::collections::BTreeMap;

use shared::ids::WorkerId;

use super::Member;

/// Groups free workers into complete tensor-parallel groups, ranks in order.
///
/// Same host first, since ranks exchange data twice a layer: as many whole groups as fit on each
/// host, then groups of what is left over on several. Workers that fill no group stay spare.
/// Deterministic: depends on the members alone, ordered by host and worker id.
#[must_use]
pub fn place(free: &[&Member], world_size: usize) -> Vec<Vec<WorkerId>> {
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
        let whole = workers.len() / world_size * world_size;
        groups.extend(workers[..whole].chunks(world_size).map(<[WorkerId]>::to_vec));
        leftover.extend_from_slice(&workers[whole..]);
    }
    groups.extend(leftover.chunks_exact(world_size).map(<[WorkerId]>::to_vec));
    groups.sort_unstable();
    groups
}
