//! Memory of groups that were left. The driver forbids freeing it while another process has it
//! open, and a process that stands still closes nothing; its GPU may even still write there.
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;

use crate::cuda::memory::DeviceMemory;

/// Pieces that are kept although their processes were not seen again: some ten megabytes each.
/// Those that left longest ago are freed first; in practice such processes are gone by then.
const KEPT_MOST: usize = 8;

/// The memory of one thread's groups: its backends come and go with the model and the degree, what
/// others have open stays.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct Retired(Rc<RefCell<Lent<DeviceMemory>>>);

thread_local! {
    static RETIRED: Retired = Retired(Rc::new(RefCell::new(Lent::new())));
}

impl Retired {
    /// That of this thread.
    pub(in crate::cuda) fn of_thread() -> Self {
        RETIRED.with(Clone::clone)
    }

    /// Takes memory that these processes have opened, and may not yet have closed.
    pub(super) fn retire(&self, memory: DeviceMemory, processes: &[u64]) {
        self.0.borrow_mut().retire(memory, processes);
    }

    /// Frees memory, now that these processes have left all their groups.
    pub(super) fn release(&self, processes: &[u64]) {
        self.0.borrow_mut().release(processes);
    }
}

/// PURE: what is lent to whom.
struct Lent<M>(VecDeque<(M, Box<[u64]>)>);

impl<M> fmt::Debug for Lent<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lent").field(&self.0.len()).finish()
    }
}

impl<M> Lent<M> {
    fn new() -> Self {
        Self(VecDeque::new())
    }

    fn retire(&mut self, memory: M, processes: &[u64]) {
        self.0.push_back((memory, processes.into()));
    }

    fn release(&mut self, processes: &[u64]) {
        self.0.retain(|(_, lent)| !lent.iter().all(|process| processes.contains(process)));
        while self.0.len() > KEPT_MOST {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_freed_when_all_who_had_it_have_left() {
        let mut lent = Lent::new();
        let alive = Rc::new(());
        lent.retire(alive.clone(), &[1, 2]);
        lent.retire(alive.clone(), &[1, 3]);
        let held = || Rc::strong_count(&alive) - 1;
        lent.release(&[1]);
        assert_eq!(held(), 2);
        lent.release(&[2, 1, 4]);
        assert_eq!(held(), 1, "3 may still have its part open");
        lent.release(&[1, 3]);
        assert_eq!(held(), 0);

        for other in 10..30 {
            lent.retire(alive.clone(), &[1, other]);
            lent.release(&[1]);
            assert!(held() <= KEPT_MOST);
        }
        assert_eq!(held(), KEPT_MOST);
        lent.release(&(1..30).collect::<Vec<_>>());
        assert_eq!(held(), 0);
    }
}
