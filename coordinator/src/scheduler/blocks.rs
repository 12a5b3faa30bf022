//! PURE: which KV blocks are free, and what the others hold. Mechanism only: the scheduler decides
//! who gets them.
//!
//! A full block can be found by its content: its tokens and all tokens before them. Several
//! sequences can share such a block, and it stays findable after the last of them gives it back,
//! until it is reused. Free blocks without content are reused first, then the least recently used
//! one. Content is compared token by token, never by hash alone.
use std::collections::HashMap;

use shared::ids::BlockId;
use shared::mix::mix;

/// No block: the end of a list.
const NONE: u32 = u32::MAX;

/// What comes before a block's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// Nothing. Sequences with different salts or adapters never share blocks.
    Start {
        /// The salt.
        salt: u64,
        /// The adapter, which changes the K and V of the same tokens.
        adapter: u32,
    },
    /// The content of the sequence's previous block, by the name it was kept under.
    Kept(u64),
}

/// A block found by its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedBlock {
    /// Its id.
    pub block: BlockId,
    /// What comes before the next block's tokens.
    pub prefix: Prefix,
    /// Whether no sequence uses it at present.
    pub is_free: bool,
}

/// The blocks of one replica's paged KV cache. Every rank's cache has the same blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockPool {
    blocks: Vec<Block>,
    block_size: usize,
    /// Tokens of the kept blocks, `block_size` for each block.
    tokens: Vec<u32>,
    /// Kept blocks by content hash: one block per hash, others with the same hash are not kept.
    kept: HashMap<u64, u32>,
    /// Name of the last block kept; names are never reused.
    last_name: u64,
    /// The free blocks: a list through `blocks`, taken from the front.
    front: u32,
    back: u32,
    num_free: u32,
    gains: u64,
}

#[derive(Clone, Debug)]
struct Block {
    /// Number of sequences that use it.
    users: u32,
    /// Its content, once it is full and findable.
    holds: Option<BlockContent>,
    /// Neighbours in the list of free blocks.
    before: u32,
    behind: u32,
}

#[derive(Clone, Copy, Debug)]
struct BlockContent {
    prefix: Prefix,
    name: u64,
    hash: u64,
}

impl BlockPool {
    /// Creates a pool whose `total` blocks are all free and hold nothing.
    #[must_use]
    pub fn new(total: u32, block_size: u32) -> Self {
        let block = Block { users: 0, holds: None, before: NONE, behind: NONE };
        let mut pool = Self {
            blocks: vec![block; total as usize],
            block_size: block_size as usize,
            tokens: vec![0; total as usize * block_size as usize],
            kept: HashMap::new(),
            last_name: 0,
            front: NONE,
            back: NONE,
            num_free: 0,
            gains: 0,
        };
        // Low ids first.
        (0..total).for_each(|block| pool.push_back(block));
        pool
    }

    /// Total number of blocks.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Number of free blocks.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Number of blocks in use.
    #[must_use]
    pub fn num_used(&self) -> u32 {
        self.total() - self.num_free
    }

    /// Number of times a block became findable, a free block was shared, or one's content became
    /// that of a block in use. Each time changes at
    /// most one block of what a sequence finds here: blocks after it refer to it by its name, which
    /// is new each time.
    #[must_use]
    pub fn gains(&self) -> u64 {
        self.gains
    }

    /// Takes a free block; its content is no longer findable. If it had any, `lost` is told what
    /// came behind it.
    pub fn take(&mut self, lost: impl FnOnce(Prefix)) -> Option<BlockId> {
        let block = self.front;
        if block == NONE {
            return None;
        }
        self.unlink(block);
        let taken = &mut self.blocks[block as usize];
        taken.users = 1;
        if let Some(holds) = taken.holds.take() {
            self.kept.remove(&holds.hash);
            lost(Prefix::Kept(holds.name));
        }
        Some(BlockId(block))
    }

    /// Adds a user to a block that was found.
    pub fn share(&mut self, block: BlockId) {
        if self.blocks[block.0 as usize].users == 0 {
            self.unlink(block.0);
            self.gains += 1;
        }
        self.blocks[block.0 as usize].users += 1;
    }

    /// Gives blocks back, leaving `blocks` empty with its capacity.
    pub fn give_back(&mut self, blocks: &mut Vec<BlockId>) {
        // In reverse: a block table given back whole is handed out in order again, and the end of a
        // sequence is reused before its beginning, which more sequences may share.
        for BlockId(id) in blocks.drain(..).rev() {
            let Some(block) = self.blocks.get_mut(id as usize) else { continue };
            debug_assert!(block.users > 0, "a block was given back twice");
            block.users -= 1;
            match (block.users, block.holds) {
                (0, Some(_)) => self.push_back(id),
                (0, None) => self.push_front(id),
                _ => {}
            }
        }
    }

    /// Makes a full block findable by its content. Returns the prefix of the next block. If another
    /// block already has the same content, that one stays findable instead, unless nobody uses it:
    /// then it would be reused before this one, and what follows it would be lost.
    pub fn keep(&mut self, block: BlockId, prefix: Prefix, tokens: &[u32]) -> Prefix {
        let hash = hash(prefix, tokens);
        if let Some(found) = self.find_hashed(hash, prefix, tokens) {
            if found.is_free && found.block != block {
                self.pass_on(found.block, block, tokens);
            }
            return found.prefix;
        }
        self.last_name += 1;
        let name = self.last_name;
        let start = block.0 as usize * self.block_size;
        let room = self.tokens.get_mut(start..start + self.block_size);
        let Some(room) = room.filter(|room| room.len() == tokens.len()) else {
            return Prefix::Kept(name);
        };
        room.copy_from_slice(tokens);
        if let std::collections::hash_map::Entry::Vacant(vacant) = self.kept.entry(hash) {
            vacant.insert(block.0);
            self.gains += 1;
            self.blocks[block.0 as usize].holds = Some(BlockContent { prefix, name, hash });
        }
        Prefix::Kept(name)
    }

    /// Makes the content of a free block that of another block, which holds the same.
    fn pass_on(&mut self, from: BlockId, to: BlockId, tokens: &[u32]) {
        let start = to.0 as usize * self.block_size;
        let Some(room) = self.tokens.get_mut(start..start + self.block_size) else { return };
        let Some(holds) = self.blocks[from.0 as usize].holds.take() else { return };
        room.copy_from_slice(tokens);
        self.kept.insert(holds.hash, to.0);
        self.blocks[to.0 as usize].holds = Some(holds);
        self.unlink(from.0);
        self.push_front(from.0);
        self.gains += 1;
    }

    /// Makes these blocks unfindable, and thereby all blocks that follow them.
    pub fn forget(&mut self, blocks: &[BlockId]) {
        for BlockId(id) in blocks {
            let holds = self.blocks.get_mut(*id as usize).and_then(|block| block.holds.take());
            if let Some(holds) = holds {
                self.kept.remove(&holds.hash);
            }
        }
    }

    /// Makes all blocks unfindable.
    pub fn forget_all(&mut self) {
        self.kept.clear();
        self.blocks.iter_mut().for_each(|block| block.holds = None);
    }

    /// Finds the block that holds these tokens after that prefix.
    #[must_use]
    pub fn find(&self, prefix: Prefix, tokens: &[u32]) -> Option<CachedBlock> {
        self.find_hashed(hash(prefix, tokens), prefix, tokens)
    }

    fn find_hashed(&self, hash: u64, prefix: Prefix, tokens: &[u32]) -> Option<CachedBlock> {
        let id = *self.kept.get(&hash)?;
        let block = &self.blocks[id as usize];
        let holds = block.holds.filter(|holds| holds.prefix == prefix)?;
        let start = id as usize * self.block_size;
        let same = self.tokens[start..start + self.block_size] == *tokens;
        let prefix = Prefix::Kept(holds.name);
        same.then_some(CachedBlock { block: BlockId(id), prefix, is_free: block.users == 0 })
    }

    fn push_back(&mut self, id: u32) {
        let back = std::mem::replace(&mut self.back, id);
        let block = &mut self.blocks[id as usize];
        (block.before, block.behind) = (back, NONE);
        match back {
            NONE => self.front = id,
            back => self.blocks[back as usize].behind = id,
        }
        self.num_free += 1;
    }

    fn push_front(&mut self, id: u32) {
        let front = std::mem::replace(&mut self.front, id);
        let block = &mut self.blocks[id as usize];
        (block.before, block.behind) = (NONE, front);
        match front {
            NONE => self.back = id,
            front => self.blocks[front as usize].before = id,
        }
        self.num_free += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Block { before, behind, .. } = self.blocks[id as usize];
        match before {
            NONE => self.front = behind,
            before => self.blocks[before as usize].behind = behind,
        }
        match behind {
            NONE => self.back = before,
            behind => self.blocks[behind as usize].before = before,
        }
        self.num_free -= 1;
    }
}

fn hash(prefix: Prefix, tokens: &[u32]) -> u64 {
    let start = match prefix {
        Prefix::Start { salt, adapter } => !salt ^ u64::from(adapter).rotate_right(16),
        Prefix::Kept(name) => name,
    };
    mix(start, tokens)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const START: Prefix = Prefix::Start { salt: 0, adapter: 0 };

    #[test]
    fn what_is_kept_is_found_until_it_is_taken_the_longest_unused_first() {
        let mut pool = BlockPool::new(3, 2);
        let mut table: Vec<BlockId> = (0..2).filter_map(|_| pool.take(drop)).collect();
        let first = pool.keep(table[0], START, &[1, 2]);
        pool.keep(table[1], first, &[3, 4]);
        for (salt, adapter, what) in [(1, 0, "another salt"), (0, 1, "another adapter")] {
            assert!(pool.find(Prefix::Start { salt, adapter }, &[1, 2]).is_none(), "{what}");
        }
        assert!(pool.find(START, &[3, 4]).is_none(), "not without what comes before");
        pool.give_back(&mut table);
        assert_eq!(pool.num_free(), 3);
        let found = pool.find(START, &[1, 2]).unwrap();
        assert!(found.is_free && pool.find(found.prefix, &[3, 4]).is_some());
        assert_eq!(pool.take(drop), Some(BlockId(2)), "the one that holds nothing");
        assert_eq!(pool.take(drop), Some(BlockId(1)), "the end before the beginning");
        assert!(pool.find(found.prefix, &[3, 4]).is_none());
        pool.share(found.block);
        assert_eq!((pool.take(drop), pool.num_free()), (None, 0));
    }

    #[test]
    fn what_is_forgotten_is_not_found_nor_what_is_behind_it() {
        let mut pool = BlockPool::new(3, 1);
        let mut table: Vec<BlockId> = (0..2).filter_map(|_| pool.take(drop)).collect();
        let first = pool.keep(table[0], START, &[1]);
        pool.keep(table[1], first, &[2]);
        pool.forget(&table[..1]);
        assert!(pool.find(START, &[1]).is_none());
        // The same tokens computed again are another block: what followed the old one stays lost.
        let again = pool.take(drop).unwrap();
        let prefix = pool.keep(again, START, &[1]);
        assert_eq!(pool.find(START, &[1]).map(|found| found.block), Some(again));
        assert!(pool.find(prefix, &[2]).is_none());
        pool.give_back(&mut table);
        pool.give_back(&mut vec![again]);
        assert_eq!(pool.num_free(), 3);
    }

    #[test]
    fn nothing_is_found_of_what_was_there_when_all_was_forgotten() {
        let mut pool = BlockPool::new(4, 1);
        let mut used: Vec<BlockId> = (0..2).filter_map(|_| pool.take(drop)).collect();
        let mut free: Vec<BlockId> = pool.take(drop).into_iter().collect();
        let first = pool.keep(used[0], START, &[1]);
        pool.keep(free[0], START, &[2]);
        pool.give_back(&mut free);
        pool.forget_all();
        assert!(pool.find(START, &[1]).is_none() && pool.find(START, &[2]).is_none());
        // A sequence that goes on adds to what cannot be found; others begin anew.
        pool.keep(used[1], first, &[3]);
        let mut again: Vec<BlockId> = pool.take(drop).into_iter().collect();
        let prefix = pool.keep(again[0], START, &[1]);
        assert!(pool.find(START, &[1]).is_some() && pool.find(prefix, &[3]).is_none());
        pool.give_back(&mut used);
        pool.give_back(&mut again);
        assert_eq!(pool.num_free(), 4);
        assert!((0..4).all(|_| pool.take(drop).is_some()), "all can be used");
    }

    #[test]
    fn what_nobody_uses_is_passed_on_to_who_computes_it_again() {
        let mut pool = BlockPool::new(4, 1);
        let mut old: Vec<BlockId> = (0..2).filter_map(|_| pool.take(drop)).collect();
        let first = pool.keep(old[0], START, &[1]);
        let second = pool.keep(old[1], first, &[2]);
        let in_use = pool.take(drop).unwrap();
        assert_eq!(pool.keep(in_use, START, &[1]), first);
        assert_eq!(pool.find(START, &[1]).map(|found| found.block), Some(old[0]), "both in use");
        let given = old.clone();
        pool.give_back(&mut old);
        assert_eq!(pool.keep(in_use, START, &[1]), first);
        let found = pool.find(START, &[1]).unwrap();
        assert_eq!((found.block, found.is_free), (in_use, false));
        // What follows is still there, and the block that had it is the first to be reused.
        assert_eq!(pool.find(first, &[2]).map(|found| found.prefix), Some(second));
        let mut lost = None;
        let mut take = |pool: &mut BlockPool| pool.take(|prefix| lost = Some(prefix));
        assert_eq!(take(&mut pool), Some(given[0]));
        assert_eq!(take(&mut pool), Some(BlockId(3)));
        assert_eq!(take(&mut pool), Some(given[1]));
        assert_eq!((lost, pool.take(drop)), (Some(second), None));
    }

    #[test]
    fn a_hash_is_not_believed() {
        let mut pool = BlockPool::new(2, 1);
        let block = pool.take(drop).unwrap();
        pool.keep(block, START, &[7]);
        let same = hash(START, &[7]);
        // Other content under the same hash.
        pool.tokens[block.0 as usize] = 8;
        assert!(pool.kept.contains_key(&same) && pool.find(START, &[7]).is_none());
    }

    proptest! {
        /// Compares with a list of all free blocks and a map from whole prefixes to blocks.
        #[test]
        fn it_agrees_with_a_naive_pool(ops in prop::collection::vec((0u8..5, 0usize..64), 1..200)) {
            let mut pool = BlockPool::new(6, 1);
            let mut free: VecDeque<u32> = (0..6).collect();
            let mut users: BTreeMap<u32, u32> = BTreeMap::new();
            let mut kept: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
            // Sequences: their tokens, blocks and next prefix.
            let mut held: Vec<(Vec<u32>, Vec<BlockId>, Prefix)> = Vec::new();
            for (op, pick) in ops {
                let index = pick % held.len().max(1);
                match op {
                    0 => held.push((Vec::new(), Vec::new(), START)),
                    1 | 2 if !held.is_empty() => {
                        let (tokens, blocks, prefix) = &mut held[index];
                        tokens.push(pick as u32 % 3);
                        let last = tokens[tokens.len() - 1];
                        let found = pool.find(*prefix, &[last]);
                        prop_assert_eq!(found.map(|it| it.block.0), kept.get(tokens).copied());
                        if let Some(found) = found {
                            let user = users.entry(found.block.0).or_default();
                            prop_assert_eq!(found.is_free, *user == 0);
                            free.retain(|block| *block != found.block.0);
                            *user += 1;
                            pool.share(found.block);
                            blocks.push(found.block);
                            *prefix = found.prefix;
                            continue;
                        }
                        let taken = pool.take(drop);
                        prop_assert_eq!(taken.map(|it| it.0), free.pop_front());
                        let Some(block) = taken else {
                            tokens.pop();
                            continue;
                        };
                        kept.retain(|_, kept| *kept != block.0);
                        users.insert(block.0, 1);
                        kept.insert(tokens.clone(), block.0);
                        *prefix = pool.keep(block, *prefix, &[last]);
                        blocks.push(block);
                    }
                    3 if !held.is_empty() => {
                        let (_, mut blocks, _) = held.swap_remove(index);
                        for block in blocks.iter().rev() {
                            let user = users.entry(block.0).or_default();
                            *user -= 1;
                            if *user == 0 {
                                free.push_back(block.0);
                            }
                        }
                        pool.give_back(&mut blocks);
                    }
                    _ => {}
                }
                prop_assert_eq!(pool.num_free() as usize, free.len());
            }
        }
    }
}
