//! Requests of different priority. The rig's invariants include that no less urgent request
//! overtakes another, and that the least urgent are preempted.
use coordinator::scheduler::SchedulerConfig;

use crate::rig::{ClientRequest, Rig, sizes};

fn rig(max_num_seqs: u32, num_blocks: u32) -> Rig {
    let mut rig = Rig::new(SchedulerConfig {
        max_model_len: 256,
        max_num_seqs,
        max_queued_requests: 16,
        prefix_caching: false,
        ..sizes()
    });
    rig.ready(num_blocks);
    rig
}

/// A request whose prompt has this many tokens and begins with `name`.
fn client(name: u32, priority: i32, prompt: u32) -> ClientRequest {
    let prompt = std::iter::once(name).chain(1..prompt).collect();
    ClientRequest { prompt, priority, max_tokens: 3, ..ClientRequest::default() }
}

/// Runs to the end; returns the names in the order of admission.
fn admitted(rig: &mut Rig) -> Vec<u32> {
    let mut names = Vec::new();
    for _ in 0..10_000 {
        if rig.plan() {
            names.extend(rig.plan.admitted.iter().map(|new| new.tokens[0]));
        } else if !rig.deliver() {
            break;
        }
    }
    rig.drain();
    names
}

#[test]
fn the_queue_is_in_order_of_priority_and_of_arrival_among_equals() {
    let mut rig = rig(1, 32);
    let asked = [(10, 0), (11, 7), (12, -1), (13, 0), (14, i32::MIN), (15, 7), (16, i32::MAX)];
    for (name, priority) in asked {
        rig.submit(client(name, priority, 4)).unwrap();
    }
    assert_eq!(admitted(&mut rig), [14, 12, 10, 13, 11, 15, 16]);
}

#[test]
fn choices_of_a_request_stay_together() {
    let mut rig = rig(1, 32);
    rig.submit(ClientRequest { n: 3, ..client(10, 2, 4) }).unwrap();
    rig.submit(ClientRequest { n: 2, ..client(11, 1, 4) }).unwrap();
    rig.submit(ClientRequest { n: 2, ..client(12, 2, 4) }).unwrap();
    assert_eq!(admitted(&mut rig), [11, 11, 10, 10, 10, 12, 12]);
}

#[test]
fn out_of_blocks_the_least_urgent_waits_though_it_was_there_first() {
    // Each needs six blocks by its end; there are ten.
    let mut rig = rig(4, 10);
    let long = |name, priority| ClientRequest { max_tokens: 80, ..client(name, priority, 10) };
    let patient = rig.submit(long(10, 1)).unwrap();
    for _ in 0..20 {
        rig.plan();
        rig.deliver();
    }
    let urgent = rig.submit(long(11, 0)).unwrap();
    let mut first = None;
    for _ in 0..10_000 {
        let (planned, delivered) = (rig.plan(), rig.deliver());
        for id in [patient, urgent] {
            if first.is_none() && rig.requests[&id].1.reasons[0].is_some() {
                first = Some(id);
            }
        }
        if !planned && !delivered {
            break;
        }
    }
    assert!(rig.preemptions > 0 && first == Some(urgent), "{} {first:?}", rig.preemptions);
    // Both have their whole text; the rig has compared it.
    for id in [patient, urgent] {
        assert_eq!(rig.requests[&id].1.tokens[0].len(), 80);
    }
}

#[test]
fn a_prompt_under_way_waits_for_blocks_of_less_urgent_ones_that_are_in_the_step() {
    // The urgent one is admitted last, when there are just enough blocks for its prompt, which
    // takes three steps. Meanwhile the other one, which decodes and is planned first, takes one
    // block.
    for before in 0..40 {
        let mut rig = rig(4, 9);
        let patient = ClientRequest { max_tokens: 100, ..client(10, 5, 30) };
        let patient = rig.submit(patient).unwrap();
        for _ in 0..before {
            rig.plan();
            rig.deliver();
        }
        let urgent = rig.submit(ClientRequest { max_tokens: 60, ..client(11, -5, 70) }).unwrap();
        rig.drain();
        assert_eq!(rig.requests[&patient].1.tokens[0].len(), 100);
        assert_eq!(rig.requests[&urgent].1.tokens[0].len(), 60);
    }
}

#[test]
fn another_replica_goes_by_the_same_priorities() {
    let mut rig = rig(2, 32);
    for (name, priority) in [(10, 3), (11, 0), (12, 3), (13, -4), (14, 0)] {
        rig.submit(ClientRequest { max_tokens: 9, ..client(name, priority, 4) }).unwrap();
    }
    for _ in 0..3 {
        rig.plan();
        rig.deliver();
    }
    rig.move_on();
    rig.submit(client(15, 0, 4)).unwrap();
    rig.ready(32);
    assert_eq!(admitted(&mut rig), [13, 11, 14, 15, 10, 12]);
}
