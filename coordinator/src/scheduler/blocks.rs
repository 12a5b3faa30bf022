//! PURE: which KV blocks are free. Mechanism only; who gets them is the scheduler's business.
use shared::ids::BlockId;

/// The blocks of one replica's paged KV cache. Every rank's cache has the same blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockPool {
    free: Vec<BlockId>,
    total: u32,
}

impl BlockPool {
    /// All of `total` blocks are free.
    #[must_use]
    pub fn new(total: u32) -> Self {
        // Popped from the end: low ids first.
        Self { free: (0..total).rev().map(BlockId).collect(), total }
    }

    /// Blocks there are.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Blocks nobody has.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Blocks somebody has.
    #[must_use]
    pub fn num_used(&self) -> u32 {
        self.total - self.num_free()
    }

    /// Takes a block.
    pub fn take(&mut self) -> Option<BlockId> {
        self.free.pop()
    }

    /// Gives blocks back; `blocks` is empty then, with its capacity kept.
    pub fn give_back(&mut self, blocks: &mut Vec<BlockId>) {
        // In reverse, so that a block table given back whole is handed out in order again.
        self.free.extend(blocks.drain(..).rev());
        debug_assert!(self.free.len() <= self.total as usize, "a block was given back twice");
    }
}
