//! PURE: which free workers form a group, at which ranks, and which spare fills a gap.
use std::collections::{BTreeMap, BTreeSet};

use shared::ids::WorkerId;
use shared::protocol::NVLINK_LABEL;

use super::Member;

/// The NVLink island of a worker's GPU: its host and the label shared by the GPUs it links.
fn island(member: &Member) -> Option<(&str, &str)> {
    let label = member.offer.labels.get(NVLINK_LABEL)?;
    Some((&member.host, label))
}

/// Whether a worker computes as a group does: ranks of different builds would not agree.
#[must_use]
pub fn joins(member: &Member, group: &[Member]) -> bool {
    group.first().is_none_or(|first| first.build == member.build)
}

/// How the operator wants workers grouped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementRules {
    /// What a worker must offer to be a rank, by resource name (`cpus`, `gpus`, `memory` in bytes,
    /// or one of the operator's own).
    pub needs: BTreeMap<String, u64>,
    /// Labels that tell which hosts are near each other, nearest first: `rack`, then `zone`.
    pub near: Vec<String>,
    /// Number of workers kept for gaps when replicas are added; the first replica takes precedence.
    pub spares: u32,
}

impl PlacementRules {
    /// Returns what a worker lacks to be a rank: the resource, the amount needed, the amount
    /// offered.
    #[must_use]
    pub fn lacks(&self, member: &Member) -> Option<(&str, u64, u64)> {
        let offered = |name: &str| member.offer.amount(name);
        let short = self.needs.iter().find(|(name, amount)| offered(name) < **amount);
        short.map(|(name, amount)| (name.as_str(), *amount, offered(name)))
    }

    /// Returns the distance of two workers: 0 if NVLink joins them, 1 on one host, otherwise by the
    /// first label they share.
    #[must_use]
    pub fn distance(&self, a: &Member, b: &Member) -> usize {
        if a.host == b.host {
            return usize::from(island(a).is_none() || island(a) != island(b));
        }
        let shared = |key: &String| {
            let of = |member: &Member| member.offer.labels.get(key).cloned();
            of(a).is_some() && of(a) == of(b)
        };
        2 + self.near.iter().position(shared).unwrap_or(self.near.len())
    }

    /// Returns the free worker nearest to a group among those that may join it; the first of
    /// equally near ones.
    #[must_use]
    pub fn nearest(&self, free: &[&Member], group: &[Member]) -> Option<usize> {
        let far = |member: &Member| -> usize {
            group.iter().map(|other| self.distance(member, other)).sum()
        };
        let may_join = |index: &usize| joins(free[*index], group);
        (0..free.len()).filter(may_join).min_by_key(|index| far(free[*index]))
    }

    /// Returns how many of `groups` groups may be made of `free` workers when there are `replicas`.
    #[must_use]
    pub fn affordable(&self, free: usize, degree: usize, groups: usize, replicas: usize) -> usize {
        let kept = free.saturating_sub(self.spares as usize) / degree.max(1);
        let least = usize::from(replicas == 0);
        groups.min(kept.max(least))
    }
}

/// Groups free workers into complete tensor-parallel groups, with ranks in order and one build per
/// group; the nearest groups come first.
///
/// Groups first take workers that NVLink joins, then those of one host, since ranks exchange data
/// twice per layer: as many whole groups as fit on each. The rest is grouped under one value of the
/// nearest label, then of the next one, and finally freely. A worker without a label is near no
/// other by that label. Workers that lack what ranks need are in no group; workers that fill no
/// group stay spare. A worker that holds a rank's weights, by `held`, becomes that rank if
/// possible. Deterministic: depends only on the members and what they hold, not on their order.
#[must_use]
pub fn place(
    free: &[&Member],
    world_size: usize,
    rules: &PlacementRules,
    held: impl Fn(WorkerId) -> Option<usize>,
) -> Vec<Vec<WorkerId>> {
    if world_size == 0 {
        return Vec::new();
    }
    let mut builds: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for member in free.iter().copied().filter(|member| rules.lacks(member).is_none()) {
        builds.entry(&member.build).or_default().push(member);
    }
    let all = builds.into_values();
    all.flat_map(|alike| place_alike(alike, world_size, rules, &held)).collect()
}

/// [`place`] for workers of one build.
fn place_alike(
    mut left: Vec<&Member>,
    world_size: usize,
    rules: &PlacementRules,
    held: &impl Fn(WorkerId) -> Option<usize>,
) -> Vec<Vec<WorkerId>> {
    // Neighbours are adjacent, so that groups cut from the rest at the end are near, too.
    let label = |member: &Member, key: &String| member.offer.labels.get(key).cloned();
    left.sort_by_cached_key(|member| {
        let labels: Vec<Option<String>> =
            rules.near.iter().rev().map(|key| label(member, key)).collect();
        let island = label(member, &NVLINK_LABEL.to_owned());
        (labels, member.host.clone(), island, member.worker)
    });
    let mut groups = carve(&mut left, world_size, held, |member| {
        island(member).map(|(host, island)| format!("{host} {island}"))
    });
    groups.extend(carve(&mut left, world_size, held, |member| Some(member.host.clone())));
    for key in &rules.near {
        groups.extend(carve(&mut left, world_size, held, |member| label(member, key)));
    }
    groups.extend(carve(&mut left, world_size, held, |_| Some(String::new())));
    groups
}

/// Takes as many whole groups out of `left` as there are under each value of `domain`.
fn carve(
    left: &mut Vec<&Member>,
    world_size: usize,
    held: impl Fn(WorkerId) -> Option<usize>,
    domain: impl Fn(&Member) -> Option<String>,
) -> Vec<Vec<WorkerId>> {
    let mut domains: BTreeMap<String, Vec<WorkerId>> = BTreeMap::new();
    for member in left.iter() {
        if let Some(value) = domain(member) {
            domains.entry(value).or_default().push(member.worker);
        }
    }
    let mut groups: Vec<Vec<WorkerId>> =
        domains.values().flat_map(|workers| group(workers, world_size, &held)).collect();
    groups.sort_unstable();
    let taken: BTreeSet<WorkerId> = groups.iter().flatten().copied().collect();
    left.retain(|member| !taken.contains(&member.worker));
    groups
}

/// Makes as many whole groups as there are workers for.
fn group(
    workers: &[WorkerId],
    world_size: usize,
    held: impl Fn(WorkerId) -> Option<usize>,
) -> Vec<Vec<WorkerId>> {
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
    groups.into_iter().map(|group| group.into_iter().flatten().collect()).collect()
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use proptest::prelude::*;
    use shared::ids::Incarnation;
    use shared::protocol::NodeResources;

    use super::*;

    fn member(worker: u32, host: u32, rack: Option<u32>, gpus: u32) -> Member {
        let labels = rack.map(|rack| ("rack".to_owned(), format!("r{rack}"))).into_iter().collect();
        Member {
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
            node: format!("n{worker}"),
            host: format!("h{host}"),
            collective_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
            draining: false,
            offer: NodeResources { gpus, labels, ..NodeResources::default() },
            gpu: String::new(),
            build: String::new(),
        }
    }

    fn rules() -> PlacementRules {
        PlacementRules {
            needs: [("gpus".to_owned(), 1)].into(),
            near: vec!["rack".to_owned()],
            spares: 0,
        }
    }

    fn ids(groups: Vec<Vec<WorkerId>>) -> Vec<Vec<u32>> {
        groups.into_iter().map(|group| group.into_iter().map(|w| w.0).collect()).collect()
    }

    #[test]
    fn one_host_then_one_rack_then_any() {
        let all = [
            member(0, 0, Some(0), 1),
            member(1, 1, Some(1), 1),
            member(2, 2, Some(0), 1),
            member(3, 3, Some(1), 1),
            member(4, 4, None, 1),
            member(5, 5, Some(2), 1),
            member(6, 6, Some(2), 0),
            member(7, 7, None, 1),
            member(8, 7, None, 1),
        ];
        let free: Vec<&Member> = all.iter().collect();
        let groups = ids(place(&free, 2, &rules(), |_| None));
        assert_eq!(groups, [vec![7, 8], vec![0, 2], vec![1, 3], vec![4, 5]]);
        assert_eq!(rules().lacks(&all[6]), Some(("gpus", 1, 0)));
    }

    #[test]
    fn gpus_that_nvlink_joins_come_before_the_rest_of_their_host() {
        let joined = |worker, host, island: Option<&str>| {
            let mut member = member(worker, host, None, 1);
            let label = island.map(|island| (NVLINK_LABEL.to_owned(), island.to_owned()));
            member.offer.labels.extend(label);
            member
        };
        let all = [
            joined(0, 0, Some("x")),
            joined(1, 0, Some("y")),
            joined(2, 0, Some("x")),
            joined(3, 0, Some("y")),
            joined(4, 0, None),
            joined(5, 1, Some("x")),
            joined(6, 1, None),
            joined(7, 0, Some("x")),
        ];
        let free: Vec<&Member> = all.iter().collect();
        let groups = ids(place(&free, 2, &rules(), |_| None));
        assert_eq!(groups, [vec![0, 2], vec![1, 3], vec![4, 7], vec![6, 5]]);
        let [a, b] = [&all[0..1], &all[5..6]];
        assert_eq!(rules().nearest(&[&all[1], &all[4], &all[7], &all[5]], a), Some(2));
        assert_eq!(rules().nearest(&[&all[0], &all[6]], b), Some(1), "names are a host's own");
    }

    #[test]
    fn a_group_is_of_one_build() {
        let of = |worker, host, build: &str| {
            let mut member = member(worker, host, Some(0), 1);
            member.build = build.to_owned();
            member
        };
        let all = [of(0, 0, "a"), of(1, 0, "b"), of(2, 0, "a"), of(3, 1, "b"), of(4, 1, "a")];
        let free: Vec<&Member> = all.iter().collect();
        // Rather across two hosts than of two builds.
        assert_eq!(ids(place(&free, 2, &rules(), |_| None)), [vec![0, 2], vec![1, 3]]);
        assert_eq!(ids(place(&free, 3, &rules(), |_| None)), [vec![0, 2, 4]]);
        assert!(place(&free, 4, &rules(), |_| None).is_empty());
        assert_eq!(rules().nearest(&[&all[1], &all[4]], &all[..1]), Some(1));
        assert_eq!(rules().nearest(&[&all[1]], &all[..1]), None);
    }

    #[test]
    fn the_nearest_spare_fills_a_gap() {
        let (near, far, same) =
            (member(1, 1, Some(0), 1), member(2, 2, Some(1), 1), member(3, 0, None, 1));
        let group = [member(0, 0, Some(0), 1)];
        let rules = rules();
        assert_eq!(rules.nearest(&[&far, &near, &same], &group), Some(2));
        assert_eq!(rules.nearest(&[&far, &near], &group), Some(1));
        assert_eq!(rules.nearest(&[&far], &group), Some(0));
        assert_eq!(rules.nearest(&[], &group), None);
        assert_eq!(rules.nearest(&[&far, &near], &[]), Some(0));
    }

    #[test]
    fn spares_are_kept_but_the_first_replica_comes_before() {
        let rules = PlacementRules { spares: 2, ..PlacementRules::default() };
        let affordable = |free, groups, replicas| rules.affordable(free, 2, groups, replicas);
        assert_eq!(affordable(2, 1, 0), 1, "better a replica than a spare");
        assert_eq!(affordable(2, 1, 1), 0);
        assert_eq!(affordable(4, 2, 0), 1);
        assert_eq!(affordable(5, 2, 3), 1);
        assert_eq!(affordable(6, 3, 3), 2);
        assert_eq!(affordable(0, 0, 0), 0);
    }

    proptest! {
        /// Checks counts that need no placing: no worker twice, none that lacks something, the
        /// maximum number of groups, the maximum number on one host, and in one rack at least as
        /// many as its left-over workers make, whatever the order of the members.
        #[test]
        fn groups_are_as_many_and_as_near_as_they_can_be(
            all in prop::collection::vec((0..6u32, prop::option::of(0..3u32), 0..4u32), 0..40),
            degree in 1..5usize,
            turn in 0..40usize,
        ) {
            // A host is in one rack.
            let mut racks: BTreeMap<u32, Option<u32>> = BTreeMap::new();
            let members: Vec<Member> = (0..)
                .zip(all)
                .map(|(worker, (host, rack, gpus))| {
                    let rack = *racks.entry(host).or_insert(rack);
                    member(worker, host, rack, gpus)
                })
                .collect();
            let free: Vec<&Member> = members.iter().collect();
            let groups = place(&free, degree, &rules(), |_| None);
            let mut turned = free.clone();
            turned.rotate_left(turn % free.len().max(1));
            prop_assert_eq!(&place(&turned, degree, &rules(), |_| None), &groups);

            let by_id: BTreeMap<WorkerId, &Member> = free.iter().map(|m| (m.worker, *m)).collect();
            let mut seen = BTreeSet::new();
            for worker in groups.iter().flatten() {
                prop_assert!(seen.insert(*worker) && by_id[worker].offer.gpus > 0);
            }
            let able: Vec<&&Member> = free.iter().filter(|m| m.offer.gpus > 0).collect();
            prop_assert!(groups.iter().all(|group| group.len() == degree));
            prop_assert_eq!(groups.len(), able.len() / degree);
            let count = |key: &dyn Fn(&Member) -> Option<String>, of: &[&Member]| {
                let mut counts: BTreeMap<String, usize> = BTreeMap::new();
                for member in of {
                    if let Some(value) = key(member) {
                        *counts.entry(value).or_default() += 1;
                    }
                }
                counts
            };
            let host = |m: &Member| Some(m.host.clone());
            let rack = |m: &Member| m.offer.labels.get("rack").cloned();
            let within = |key: &dyn Fn(&Member) -> Option<String>| {
                groups
                    .iter()
                    .filter(|group| {
                        let first = key(by_id[&group[0]]);
                        first.is_some() && group.iter().all(|w| key(by_id[w]) == first)
                    })
                    .count()
            };
            let able: Vec<&Member> = able.into_iter().copied().collect();
            let on_host: usize = count(&host, &able).values().map(|n| n / degree).sum();
            // Groups of one are always on one host.
            if degree > 1 {
                prop_assert_eq!(within(&host), on_host);
            }
            // Left over per rack once hosts have taken theirs.
            let mut over: BTreeMap<String, usize> = BTreeMap::new();
            for (name, n) in count(&host, &able) {
                let of = able.iter().find(|m| m.host == name).and_then(|m| rack(m));
                if let Some(of) = of {
                    *over.entry(of).or_default() += n % degree;
                }
            }
            let in_rack: usize = over.values().map(|n| n / degree).sum();
            prop_assert!(within(&rack) >= in_rack, "{} < {in_rack}", within(&rack));
        }
    }
}
