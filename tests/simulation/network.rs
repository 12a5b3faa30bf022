//! Links between the coordinator and its workers. Frames of one direction arrive in the order in
//! which they were sent, all of them until the link ends; a partition or a stopped process delays
//! them.
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use shared::actor::link::QUEUE_MAX;
use shared::actor::liveness::{Liveness, LivenessAction, LivenessConfig};
use shared::ids::WorkerId;
use shared::protocol::{FromWorker, Rejoin, ToWorker};

use crate::coordinator::Life;
use crate::events::Event;
use crate::scenario::{MS, Time};
use crate::world::World;

pub(crate) type LinkId = usize;

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Coordinator = 0,
    Worker = 1,
}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Coordinator => Self::Worker,
            Self::Worker => Self::Coordinator,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Hello(Rejoin),
    Welcome(WorkerId),
    /// It may never join.
    Refused,
    Down(Rc<ToWorker>),
    Up(Box<FromWorker>),
    Ping,
    Pong,
    /// The other side has ended.
    End,
}

/// One direction.
#[derive(Debug, Default)]
struct Pipe {
    queue: VecDeque<Packet>,
    last_arrival: Time,
    /// Number of arrivals that were due while nothing could pass.
    held: u32,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) slot: usize,
    /// Coordinator at the other end.
    pub(crate) life: Life,
    /// Process run at the worker's end.
    pub(crate) incarnation: u64,
    /// By [`Side`]: whether that end is still open.
    pub(crate) open: [bool; 2],
    /// By receiving side.
    pipes: [Pipe; 2],
    /// By side; set once the handshake is over there.
    liveness: [Option<Liveness>; 2],
    /// Whether the worker's frames can arrive even after its end is closed.
    pub(crate) established: bool,
    /// When the coordinator last heard anything over it.
    pub(crate) heard: Time,
    /// Slot under which the coordinator welcomed the worker.
    pub(crate) joined: Option<WorkerId>,
}

/// What delays a slot's frames.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Path {
    /// Number of partitions in force, by receiving side.
    pub(crate) blocked: [u32; 2],
    /// Added latency.
    pub(crate) extra: Time,
}

impl World {
    pub(crate) fn new_link(&mut self, slot: usize, incarnation: u64, life: Life) -> LinkId {
        self.links.push(Link {
            slot,
            life,
            incarnation,
            open: [true, true],
            pipes: [Pipe::default(), Pipe::default()],
            liveness: [None, None],
            established: true,
            heard: self.now,
            joined: None,
        });
        self.links.len() - 1
    }

    /// Starts watching a link at one end.
    pub(crate) fn watch(&mut self, link: LinkId, side: Side) {
        let now = Duration::from_micros(self.now);
        self.links[link].liveness[side as usize] =
            Some(Liveness::new(LivenessConfig::default(), now));
        self.schedule(self.poll_interval(), Event::Poll { link, side });
    }

    fn poll_interval(&self) -> Time {
        LivenessConfig::default().ping_interval.as_micros() as Time / 4
    }

    /// Queues a frame towards `to`. Returns false when this end of the link is closed.
    pub(crate) fn send(&mut self, link: LinkId, to: Side, packet: Packet) -> bool {
        let from = to.other();
        if !self.links[link].open[from as usize] {
            return false;
        }
        self.push(link, to, packet);
        if self.links[link].pipes[to as usize].queue.len() > QUEUE_MAX {
            self.close(link, from);
        }
        true
    }

    fn push(&mut self, link: LinkId, to: Side, packet: Packet) {
        let slot = self.links[link].slot;
        let mut latency = self.random.range(50, self.scenario.latency.max(51));
        if self.random.chance(2) {
            latency *= 10;
        }
        let at = self.now + latency + self.paths[slot].extra;
        let pipe = &mut self.links[link].pipes[to as usize];
        let at = at.max(pipe.last_arrival + 1);
        pipe.last_arrival = at;
        pipe.queue.push_back(packet);
        self.schedule_at(at, Event::Arrive { link, to });
        if self.switches.reorder_frames && self.random.chance(2) {
            let queue = &mut self.links[link].pipes[to as usize].queue;
            let last = queue.len() - 1;
            queue.swap(last, last.saturating_sub(1));
        }
    }

    /// Whether frames towards `to` are held up.
    fn is_held(&self, link: LinkId, to: Side) -> bool {
        let slot = self.links[link].slot;
        let frozen = to == Side::Worker
            && self.processes[slot].incarnation == self.links[link].incarnation
            && self.processes[slot].frozen;
        let life = Some(self.links[link].life);
        let stopped = to == Side::Coordinator
            && self.seats.iter().any(|seat| seat.frozen && seat.life == life);
        frozen || stopped || self.paths[slot].blocked[to as usize] > 0
    }

    /// Delivers frames that were delayed for a slot, if nothing else delays them.
    pub(crate) fn release_held(&mut self, slot: usize) {
        for link in 0..self.links.len() {
            for to in [Side::Coordinator, Side::Worker] {
                if self.links[link].slot != slot || self.is_held(link, to) {
                    continue;
                }
                let held = std::mem::take(&mut self.links[link].pipes[to as usize].held);
                for _ in 0..held {
                    let at = self.now + self.random.range(10, 50 * MS);
                    self.schedule_at(at, Event::Arrive { link, to });
                }
            }
        }
    }

    pub(crate) fn arrive(&mut self, link: LinkId, to: Side) {
        if self.is_held(link, to) {
            self.links[link].pipes[to as usize].held += 1;
            return;
        }
        let Some(packet) = self.links[link].pipes[to as usize].queue.pop_front() else { return };
        if !self.links[link].open[to as usize] {
            return;
        }
        if self.switches.lose_frames
            && matches!(packet, Packet::Up(_) | Packet::Down(_))
            && self.random.chance(1)
        {
            return;
        }
        self.note_packet(link, to, &packet);
        let now = Duration::from_micros(self.now);
        if let Some(liveness) = &mut self.links[link].liveness[to as usize] {
            let answers_again = liveness.heard(now);
            if answers_again && to == Side::Coordinator {
                self.worker_is_silent(link, false);
            }
        }
        self.links[link].established = true;
        if to == Side::Coordinator {
            self.links[link].heard = self.now;
        }
        match (packet, to) {
            (Packet::Ping, _) => {
                self.send(link, to.other(), Packet::Pong);
            }
            (Packet::Pong, _) => {}
            (Packet::End, _) => self.close(link, to),
            (Packet::Hello(rejoin), _) => self.hello(link, rejoin),
            (Packet::Welcome(worker), _) => self.welcomed(link, worker),
            (Packet::Refused, _) => self.refused(link),
            (Packet::Down(message), _) => self.worker_takes(link, &message),
            (Packet::Up(message), _) => self.coordinator_takes(link, *message),
        }
    }

    pub(crate) fn poll(&mut self, link: LinkId, side: Side) {
        if !self.links[link].open[side as usize] {
            return;
        }
        let now = Duration::from_micros(self.now);
        let Some(liveness) = &mut self.links[link].liveness[side as usize] else { return };
        match liveness.poll(now) {
            LivenessAction::Ping => {
                self.send(link, side.other(), Packet::Ping);
            }
            LivenessAction::Dead { .. } => {
                if !(self.switches.no_liveness && side == Side::Coordinator) {
                    return self.close(link, side);
                }
            }
            LivenessAction::Suspect => {
                if side == Side::Coordinator {
                    self.worker_is_silent(link, true);
                }
            }
            LivenessAction::Wait => {}
        }
        self.schedule(self.poll_interval(), Event::Poll { link, side });
    }

    /// Closes one end. What that end had queued may be lost; the other end learns of the close
    /// after whatever is not lost. The owner is notified by a separate event, as by the link's
    /// tasks.
    pub(crate) fn close(&mut self, link: LinkId, side: Side) {
        if !std::mem::replace(&mut self.links[link].open[side as usize], false) {
            return;
        }
        let kept = if !self.links[link].established {
            0
        } else if self.random.chance(50) {
            usize::MAX
        } else {
            self.random.range(0, 4) as usize
        };
        self.links[link].pipes[side.other() as usize].queue.truncate(kept);
        self.push(link, side.other(), Packet::End);
        let soon = self.random.range(1, 300);
        self.schedule(soon, Event::Closed { link, side });
    }
}
