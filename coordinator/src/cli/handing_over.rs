//! How a leader ends: it hands the requests of front ends over to the coordinator that stands by,
//! or finishes them like its own.
use std::collections::BTreeSet;
use std::time::Duration;

use coordinator::coordinator::Coordinator;
use shared::membership::{Role, View};
use shared::protocol::PROTOCOL_VERSION;
use tokio::sync::watch;
use tokio::time::Instant;

use super::serve::finish;
use super::signals::Signals;

/// How long a leader waits until it has heard from etcd of coordinators that were told to end at
/// the same time.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// What is known when a leader's own requests have ended.
#[derive(Debug)]
struct Situation<'a> {
    /// The runs of the coordinators that stood by when the leader was told to end.
    stood_by: &'a BTreeSet<u64>,
    /// The runs of those that stand by now.
    stand_by: &'a BTreeSet<u64>,
    /// Names of the linked front ends.
    linked: &'a BTreeSet<String>,
    /// Names of the front ends that follow the leader of the membership.
    following: &'a BTreeSet<String>,
    /// Whether adapters that are no longer served may still be in use.
    adapters_leave: bool,
}

impl Situation<'_> {
    /// Why requests of front ends must end here; `None` if all of them can go on elsewhere.
    fn reason_to_finish(&self) -> Option<String> {
        // One that has come since may be the restart of one that ends again.
        if self.stood_by.is_disjoint(self.stand_by) {
            let reason = "no other coordinator with the same options and secret stands by, or none \
                          did all along";
            return Some(reason.to_owned());
        }
        if let Some(node) = self.linked.difference(self.following).next() {
            return Some(format!("the front end {node} would not find another coordinator"));
        }
        // The next leader does not have them.
        self.adapters_leave.then(|| "requests may use adapters that were unloaded".to_owned())
    }
}

/// The runs of coordinators other than `own` that can take over at once. One of another protocol
/// would refuse the front ends, and so would one with another secret; one that serves something
/// else would not give their requests the same text.
fn standing_by(view: &View, own: u64) -> BTreeSet<u64> {
    let leader = view.records.values().find(|record| record.incarnation == own);
    let ours = leader.and_then(|record| record.serves.as_deref());
    let others = view.records.values().filter(|record| {
        let is_other = record.role == Role::Coordinator && record.incarnation != own;
        let both = record.serves.as_deref().zip(ours);
        let is_alike = both.is_none_or(|(its, ours)| its.differences(ours).is_empty());
        view.connected && is_other && is_alike && record.protocol == PROTOCOL_VERSION
    });
    others.map(|record| record.incarnation).collect()
}

/// Names of the front ends that find the next leader.
fn following(view: &View) -> BTreeSet<String> {
    let frontends = view.records.values().filter(|record| record.role == Role::Frontend);
    frontends.map(|record| record.node.clone()).collect()
}

/// Whether all requests of front ends can go on elsewhere; says if not.
async fn can_hand_over(
    coordinator: &Coordinator,
    stood_by: &BTreeSet<u64>,
    view: &View,
    incarnation: u64,
) -> bool {
    let linked = &coordinator.frontends();
    let situation = Situation {
        stood_by,
        stand_by: &standing_by(view, incarnation),
        linked,
        following: &following(view),
        adapters_leave: coordinator.adapters_leave().await,
    };
    let reason = situation.reason_to_finish();
    if let Some(reason) = reason.as_ref().filter(|_| !linked.is_empty()) {
        tracing::info!(reason, "requests of front ends are not handed over");
    }
    reason.is_none()
}

/// Takes no new requests of its own clients and lets theirs finish, for at most `patience`.
/// Requests of front ends go on at the next leader if that is sure; otherwise they finish too.
pub(crate) async fn end(
    coordinator: &Coordinator,
    view: &watch::Receiver<View>,
    incarnation: u64,
    patience: Duration,
    signals: &mut Signals,
) {
    let began = Instant::now();
    let now = view.borrow().clone();
    let stood_by = standing_by(&now, incarnation);
    if can_hand_over(coordinator, &stood_by, &now, incarnation).await {
        let own = async {
            let finished = coordinator.finish_own(patience).await;
            tokio::time::sleep(HEARD_WITHIN.min(patience.saturating_sub(began.elapsed()))).await;
            finished
        };
        if !signals.drain(coordinator.own_requests(), patience, own).await {
            return;
        }
        let now = view.borrow().clone();
        if can_hand_over(coordinator, &stood_by, &now, incarnation).await {
            return;
        }
    }
    finish(coordinator, patience.saturating_sub(began.elapsed()), signals).await;
}

#[cfg(test)]
mod tests {
    use shared::membership::{Record, Serves};

    use super::*;

    const OURS: u16 = PROTOCOL_VERSION;

    fn view(records: &[(Role, u64, u16)]) -> View {
        let record = |&(role, incarnation, protocol): &(Role, u64, u16)| Record {
            node: format!("n{incarnation}"),
            role,
            incarnation,
            address: String::new(),
            http: String::new(),
            pid: 1,
            version: format!("1.{incarnation}"),
            protocol,
            model: None,
            serves: None,
        };
        let keyed = records.iter().map(|it| (format!("{:?}/{}", it.0, it.1), record(it)));
        View { records: keyed.collect(), connected: true, ..View::default() }
    }

    /// Whether run 1 hands over if it was told to end at `before` and its own requests end at
    /// `after`, with these front ends linked.
    fn hands_over(before: &View, after: &View, linked: &[&str], adapters_leave: bool) -> bool {
        let situation = Situation {
            stood_by: &standing_by(before, 1),
            stand_by: &standing_by(after, 1),
            linked: &linked.iter().map(|&it| it.to_owned()).collect(),
            following: &following(after),
            adapters_leave,
        };
        situation.reason_to_finish().is_none()
    }

    #[test]
    fn a_leader_hands_over_to_one_that_has_stood_by_all_along() {
        use Role::{Coordinator, Worker};
        let alone = view(&[(Coordinator, 1, OURS), (Worker, 5, OURS)]);
        let two = view(&[(Coordinator, 1, OURS), (Coordinator, 2, OURS)]);
        let again = view(&[(Coordinator, 1, OURS), (Coordinator, 3, OURS)]);
        let three = view(&[(Coordinator, 2, OURS), (Coordinator, 3, OURS)]);
        let other = view(&[(Coordinator, 1, OURS), (Coordinator, 2, OURS + 1)]);
        let unknown = View { connected: false, ..two.clone() };
        assert!(hands_over(&two, &two, &[], false));
        assert!(hands_over(&three, &two, &[], false), "one of two is left");
        for (before, after, what) in [
            (&alone, &alone, "nobody else"),
            (&two, &alone, "the other has left too"),
            (&alone, &two, "one came just now"),
            (&two, &again, "the other has restarted"),
            (&other, &other, "another protocol"),
            (&two, &unknown, "etcd does not answer any more"),
            (&unknown, &two, "etcd did not answer"),
        ] {
            assert!(!hands_over(before, after, &[], false), "{what}");
        }
    }

    #[test]
    fn a_leader_hands_over_only_to_one_that_serves_the_same() {
        let serves = Serves {
            names: vec!["m".to_owned()],
            model: None,
            text: 1,
            max_model_len: 8,
            tensor_parallel: 1,
            dtypes: "bfloat16".to_owned(),
            secrets: vec!["a".to_owned()],
        };
        let two = view(&[(Role::Coordinator, 1, OURS), (Role::Coordinator, 2, OURS)]);
        let with = |own: &Serves, its: Option<Serves>| {
            let mut two = two.clone();
            for record in two.records.values_mut() {
                let serves = if record.incarnation == 1 { Some(own.clone()) } else { its.clone() };
                record.serves = serves.map(Box::new);
            }
            hands_over(&two, &two, &[], false)
        };
        assert!(with(&serves, Some(serves.clone())));
        assert!(with(&serves, None), "it does not say what it serves");
        for other in [
            Serves { secrets: vec!["b".to_owned()], ..serves.clone() },
            Serves { names: vec!["n".to_owned()], ..serves.clone() },
            Serves { text: 2, ..serves.clone() },
            Serves { tensor_parallel: 2, ..serves.clone() },
            Serves { dtypes: "float32".to_owned(), ..serves.clone() },
        ] {
            assert!(!with(&serves, Some(other.clone())), "{other:?}");
        }
    }

    #[test]
    fn a_leader_hands_over_only_what_can_go_on_elsewhere() {
        let records =
            [(Role::Coordinator, 2, OURS), (Role::Frontend, 7, OURS), (Role::Worker, 8, OURS)];
        let now = view(&records);
        assert!(hands_over(&now, &now, &["n7"], false));
        assert!(!hands_over(&now, &now, &["n7", "n9"], false), "n9 knows one address only");
        assert!(!hands_over(&now, &now, &["n8"], false), "a worker of that name");
        assert!(!hands_over(&now, &now, &["n7"], true), "an adapter that was unloaded");
    }
}
