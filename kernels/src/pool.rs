//! A backend's threads: a fixed number, parked when idle, one job at a time.
//!
//! Owns waking, claiming and waiting. Each thread starts with its own share of the tasks, the same
//! share in every job: if jobs order their tasks alike (by rows, for instance), the data that a
//! thread wrote in one job is in its cache in the next. A thread that runs out of tasks steals the
//! last ones of other threads, so a task's result must not depend on the thread that runs it. Jobs
//! do not allocate.
#![allow(unsafe_code, reason = "a job is lent to threads that end with it")]
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::KernelError;

/// A job: called with (task, worker); worker 0 is the calling thread.
type Task = dyn Fn(usize, usize) + Sync;

/// Number of polls of an idle thread: a few microseconds, the gap between two operations of a
/// decoder layer.
const SPINS: u32 = 200;

/// Number of further polls that yield the core, before the thread parks: as long as the last task
/// of another thread can take. Waking up takes longer than most waits.
const YIELDS: u32 = 200;

/// Maximum number of threads in a pool.
pub const THREADS_MAX: usize = 1024;

/// Threads that process the tasks of one job at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Each thread's share of the current job. The job may only be accessed after claiming one of
    /// its tasks.
    shares: Box<[Share]>,
    /// Number of jobs; a change starts one.
    jobs: AtomicUsize,
    /// Finished tasks of the current job.
    ended: AtomicUsize,
    panicked: AtomicBool,
    job: UnsafeCell<Job>,
    /// Number of threads parked on `work`.
    sleepers: AtomicUsize,
    /// The caller is parked on `finished`.
    caller_waits: AtomicBool,
    /// The mutex of the two condition variables; true when the pool ends.
    stop: Mutex<bool>,
    work: Condvar,
    finished: Condvar,
    spins: u32,
    yields: u32,
}

#[derive(Clone, Copy)]
struct Job {
    task: &'static Task,
    num_tasks: usize,
}

// SAFETY: `job` is written only by the caller while no task is claimed or claimable, and read only
// by a thread that holds a claim; `shares` and `ended` order the two.
unsafe impl Sync for Shared {}

/// The unclaimed tasks: the first in the high half, one past the last in the low half. On a
/// separate cache line.
#[derive(Default)]
#[repr(align(64))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, tasks: Range<u32>) {
        self.0.store(u64::from(tasks.start) << 32 | u64::from(tasks.end), SeqCst);
    }

    /// Claims the first task (`first`) or the last one.
    fn claim(&self, first: bool) -> Option<usize> {
        let tasks = |word: u64| ((word >> 32) as u32, word as u32);
        let (step, back) = if first { (1 << 32, 0) } else { (0, 1) };
        let claimed = self.0.fetch_update(SeqCst, SeqCst, |word| {
            let (start, end) = tasks(word);
            (start < end).then(|| word + step - back)
        });
        let (start, end) = tasks(claimed.ok()?);
        Some(if first { start as usize } else { end as usize - 1 })
    }
}

impl Pool {
    /// A pool of `threads` threads, including the caller.
    pub(crate) fn new(threads: usize) -> Result<Self, KernelError> {
        if threads == 0 || threads > THREADS_MAX {
            return Err(KernelError::Unsupported(format!(
                "threads is {threads}, it must be in 1..={THREADS_MAX}"
            )));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            shares: std::iter::repeat_with(Share::default).take(threads).collect(),
            jobs: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            job: UnsafeCell::new(Job { task: &|_, _| {}, num_tasks: 0 }),
            sleepers: AtomicUsize::new(0),
            caller_waits: AtomicBool::new(false),
            stop: Mutex::new(false),
            work: Condvar::new(),
            finished: Condvar::new(),
            spins: if threads > cores { 0 } else { SPINS },
            yields: if threads > cores { 0 } else { YIELDS },
        });
        let mut pool = Self { shared, threads: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("tutti-cpu-{worker}"))
                .spawn(move || shared.serve(worker))
                .map_err(|error| {
                    KernelError::Device(format!("cannot start thread {worker}: {error}"))
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub(crate) fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `task(i, worker)` for all `i` in `0..num_tasks`, and returns when all have ended. No
    /// two running tasks have the same `worker`, which is below `num_threads()`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if a task panicked; the other tasks still run.
    pub(crate) fn run(
        &mut self,
        num_tasks: usize,
        task: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<(), KernelError> {
        let shared = &*self.shared;
        let threads = self.num_threads();
        let Ok(count) = u32::try_from(num_tasks) else {
            return Err(KernelError::Device(format!("{num_tasks} tasks are more than 2^32")));
        };
        if num_tasks <= 1 || self.threads.is_empty() {
            for index in 0..num_tasks {
                shared.call(task, index, 0);
            }
            return shared.outcome();
        }
        // SAFETY: only holders of a claim use the reference, and this function returns only after
        // every claim has ended, so no use outlives the borrow.
        let task =
            unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static Task>(task) };
        // SAFETY: all tasks of the last job were claimed and have ended: nobody reads `job`.
        unsafe { *shared.job.get() = Job { task, num_tasks } };
        shared.ended.store(0, SeqCst);
        let start = |i: usize| (u64::from(count) * i as u64 / threads as u64) as u32;
        for (i, share) in shared.shares.iter().enumerate() {
            share.set(start(i)..start(i + 1));
        }
        shared.jobs.fetch_add(1, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            drop(shared.lock());
            shared.work.notify_all();
        }
        shared.work_off(0);
        shared.wait_for_the_rest(num_tasks);
        shared.outcome()
    }

    /// Runs `task(range, worker)` over consecutive ranges that cover `0..total`, each of at least
    /// `grain` items except the last. Small totals run on the caller alone.
    pub(crate) fn run_ranges(
        &mut self,
        total: usize,
        grain: usize,
        task: &(dyn Fn(Range<usize>, usize) + Sync),
    ) -> Result<(), KernelError> {
        if total == 0 {
            return Ok(());
        }
        // Several ranges per thread, so that a thread that starts late takes fewer.
        let most = if self.threads.is_empty() { 1 } else { self.num_threads() * 4 };
        let size = total.div_ceil(most).max(grain.max(1));
        self.run(total.div_ceil(size), &|index, worker| {
            let start = index * size;
            task(start..(start + size).min(total), worker);
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The main loop of a pool thread.
    fn serve(&self, worker: usize) {
        loop {
            let seen = self.jobs.load(SeqCst);
            self.work_off(worker);
            if self.spin_until(|| self.jobs.load(SeqCst) != seen) {
                continue;
            }
            let mut stop = self.lock();
            // Announced before the last check, just as the caller publishes the job before it
            // checks for sleepers: one of the two sees the other.
            self.sleepers.fetch_add(1, SeqCst);
            while !*stop && self.jobs.load(SeqCst) == seen {
                stop = self.work.wait(stop).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleepers.fetch_sub(1, SeqCst);
            if *stop {
                return;
            }
        }
    }

    /// Claims and runs tasks until none is left: first this thread's own, in order, then those of
    /// other threads, from the last on.
    fn work_off(&self, worker: usize) {
        let (before, from) = self.shares.split_at(worker);
        for (i, share) in from.iter().chain(before).enumerate() {
            while let Some(index) = share.claim(i == 0) {
                self.run_claimed(index, worker);
            }
        }
    }

    fn run_claimed(&self, index: usize, worker: usize) {
        // SAFETY: this thread holds a claim on the current job, so nobody writes it.
        let Job { task, num_tasks } = unsafe { *self.job.get() };
        self.call(task, index, worker);
        let all_ended = self.ended.fetch_add(1, SeqCst) + 1 == num_tasks;
        if all_ended && self.caller_waits.load(SeqCst) {
            drop(self.lock());
            self.finished.notify_one();
        }
    }

    fn call(&self, task: &(dyn Fn(usize, usize) + Sync), index: usize, worker: usize) {
        if catch_unwind(AssertUnwindSafe(|| task(index, worker))).is_err() {
            self.panicked.store(true, SeqCst);
        }
    }

    fn wait_for_the_rest(&self, num_tasks: usize) {
        if self.spin_until(|| self.ended.load(SeqCst) == num_tasks) {
            return;
        }
        let mut guard = self.lock();
        self.caller_waits.store(true, SeqCst);
        while self.ended.load(SeqCst) < num_tasks {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_waits.store(false, SeqCst);
    }

    fn spin_until(&self, condition: impl Fn() -> bool) -> bool {
        for _ in 0..self.spins {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        for _ in 0..self.yields {
            std::thread::yield_now();
            if condition() {
                return true;
            }
        }
        condition()
    }

    fn outcome(&self) -> Result<(), KernelError> {
        if self.panicked.swap(false, SeqCst) {
            return Err(KernelError::Device("a task of the CPU thread pool panicked".into()));
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        *self.shared.lock() = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of tasks are caught, so this cannot fail.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads)", self.num_threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_per_job() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for round in 0..300 {
                let num_tasks = round % 17;
                let counts: Vec<AtomicUsize> =
                    (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_tasks, &|task, worker| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, SeqCst);
                })
                .unwrap();
                assert!(counts.iter().all(|count| count.load(SeqCst) == 1), "{threads} {round}");
            }
        }
    }

    #[test]
    fn parked_threads_wake_up() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let sum = AtomicUsize::new(0);
            pool.run(100, &|task, _| {
                sum.fetch_add(task, SeqCst);
            })
            .unwrap();
            assert_eq!(sum.load(SeqCst), 4950);
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        for threads in [1, 3] {
            let mut pool = Pool::new(threads).unwrap();
            let ran = AtomicUsize::new(0);
            let result = pool.run(20, &|task, _| {
                assert!(task != 7, "deliberate");
                ran.fetch_add(1, SeqCst);
            });
            assert!(matches!(result, Err(KernelError::Device(_))));
            assert_eq!(ran.load(SeqCst), 19);
            pool.run(4, &|_, _| {}).unwrap();
        }
    }

    #[test]
    fn ranges_cover_everything_once() {
        let mut pool = Pool::new(2).unwrap();
        for (total, grain) in [(0, 1), (1, 1), (7, 3), (100, 1), (1000, 999)] {
            let counts: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            pool.run_ranges(total, grain, &|range, _| {
                for item in range {
                    counts[item].fetch_add(1, SeqCst);
                }
            })
            .unwrap();
            assert!(counts.iter().all(|count| count.load(SeqCst) == 1));
        }
    }

    #[test]
    fn thread_counts_are_bounded() {
        assert!(Pool::new(0).is_err());
        assert!(Pool::new(THREADS_MAX + 1).is_err());
    }
}
