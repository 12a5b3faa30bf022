//! Threads that compute masks: with a large vocabulary one mask may take milliseconds, a batch
//! needs many, and the thread that drives replicas must not wait for them.
//!
//! A panicking job does not end its thread; the job's author must make the panic known to whoever
//! waits for the result.
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Maximum number of threads: a mask takes little time, and has the cores to itself only between
/// steps.
const THREADS_MAX: usize = 16;

type Job = Box<dyn FnOnce() + Send>;

/// A pool of threads; see the module's documentation. At most one job per guided sequence is
/// waiting. The threads end when it is dropped.
pub(super) struct Masks {
    queue: Arc<Queue>,
    threads: usize,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    come: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    over: bool,
}

impl fmt::Debug for Masks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masks").field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Masks {
    /// One thread per core, up to [`THREADS_MAX`].
    pub(super) fn new() -> Self {
        let queue = Arc::<Queue>::default();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let start = |number: &usize| {
            let queue = queue.clone();
            let builder = std::thread::Builder::new().name(format!("mask-{number}"));
            builder.spawn(move || queue.work()).is_ok()
        };
        let threads = (0..cores.min(THREADS_MAX)).take_while(start).count();
        Self { queue, threads }
    }

    /// Queues a job for the next free thread.
    pub(super) fn run(&self, job: Job) {
        if self.threads == 0 {
            return run(job);
        }
        self.queue.lock().waiting.push_back(job);
        self.queue.come.notify_one();
    }
}

fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a mask could not be computed: a bug in this program");
    }
}

impl Drop for Masks {
    fn drop(&mut self) {
        self.queue.lock().over = true;
        self.queue.come.notify_all();
    }
}

impl Queue {
    fn lock(&self) -> std::sync::MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut jobs = self.lock();
            let job = loop {
                match jobs.waiting.pop_front() {
                    Some(job) => break job,
                    None if jobs.over => return,
                    None => jobs = self.come.wait(jobs).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(jobs);
            run(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_job_is_run_also_those_that_wait_at_the_end() {
        let masks = Masks::new();
        assert!(masks.threads > 0);
        let (done, jobs) = mpsc::channel();
        for number in 0..100 {
            let done = done.clone();
            masks.run(Box::new(move || done.send(number).unwrap_or_default()));
        }
        drop((masks, done));
        let within = Duration::from_secs(20);
        let mut seen: Vec<i32> = (0..100).map(|_| jobs.recv_timeout(within).unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_with_it() {
        let masks = Masks::new();
        let threads = masks.threads;
        for _ in 0..2 * threads {
            masks.run(Box::new(|| panic!("as a defect would")));
        }
        let (done, jobs) = mpsc::channel();
        masks.run(Box::new(move || done.send(7).unwrap_or_default()));
        assert_eq!(jobs.recv_timeout(Duration::from_secs(20)), Ok(7));
    }
}
