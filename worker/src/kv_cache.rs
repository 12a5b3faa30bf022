//! Arithmetic of the paged KV cache: how many blocks fit, and where a position's K and V are.
//!
//! Which block belongs to whom is the coordinator's decision; the bytes are the device's. Here are
//! only the block tables that plans build up, checked so that no slot is outside the cache.
use shared::ids::BlockId;

/// Blocks that fit in `bytes`; at most as many as keep every slot index within u32.
#[must_use]
pub fn blocks_that_fit(bytes: u64, block_bytes: u64, block_size: u32) -> u32 {
    let most = u64::from(blocks_max(block_size));
    bytes.checked_div(block_bytes).unwrap_or(0).min(most) as u32
}

/// The most blocks of `block_size` tokens whose slots a u32 can name.
#[must_use]
pub fn blocks_max(block_size: u32) -> u32 {
    u32::MAX / block_size.max(1)
}

/// The blocks of one sequence, in the order of its positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<u32>,
}

impl BlockTable {
    /// Appends blocks of a cache of `num_blocks`.
    ///
    /// # Errors
    /// The first block that the cache does not have; nothing is appended then.
    pub fn append(&mut self, blocks: &[BlockId], num_blocks: u32) -> Result<(), BlockId> {
        if let Some(&outside) = blocks.iter().find(|block| block.0 >= num_blocks) {
            return Err(outside);
        }
        self.blocks.extend(blocks.iter().map(|block| block.0));
        Ok(())
    }

    /// Positions that have a block.
    #[must_use]
    pub fn capacity(&self, block_size: u32) -> u64 {
        self.blocks.len() as u64 * u64::from(block_size)
    }

    /// Where the K and V of `position` are, or `None` when it has no block.
    #[must_use]
    pub fn slot(&self, position: u32, block_size: u32) -> Option<u32> {
        let block = self.blocks.get((position / block_size) as usize)?;
        Some(block * block_size + position % block_size)
    }

    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_table_and_not_the_order_of_blocks() {
        let mut table = BlockTable::default();
        table.append(&[BlockId(7), BlockId(2)], 8).unwrap();
        table.append(&[BlockId(0)], 8).unwrap();
        assert_eq!(table.capacity(4), 12);
        let slots: Vec<_> = (0..13).map(|position| table.slot(position, 4)).collect();
        let expected = [28, 29, 30, 31, 8, 9, 10, 11, 0, 1, 2, 3].map(Some);
        assert_eq!(slots[..12], expected);
        assert_eq!(slots[12], None);
    }

    #[test]
    fn a_block_outside_the_cache_is_named_and_nothing_is_appended() {
        let mut table = BlockTable::default();
        assert_eq!(table.append(&[BlockId(1), BlockId(8)], 8), Err(BlockId(8)));
        assert_eq!(table, BlockTable::default());
    }

    #[test]
    fn as_many_blocks_fit_as_divide_the_memory() {
        assert_eq!(blocks_that_fit(1000, 300, 16), 3);
        assert_eq!(blocks_that_fit(299, 300, 16), 0);
        // Slots stay below 2^32 however much memory there is.
        assert_eq!(blocks_that_fit(u64::MAX, 1, 16), u32::MAX / 16);
    }
}
