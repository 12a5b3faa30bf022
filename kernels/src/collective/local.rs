//! Ranks that are threads of one process.
#![allow(unsafe_code, reason = "memory that other threads write")]
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Collective;
use super::exchange::Exchange;
use super::region::{Header, RANKS_MAX, Region, RegionMemory, region_bytes};
use crate::error::CollectiveError;

struct Heap {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: the memory belongs to nobody else; all access goes through the region's protocol.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Heap({} bytes)", self.layout.size())
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.base, self.layout) }
    }
}

// SAFETY: the allocation has the size and alignment of a region and lives as long as this value.
unsafe impl RegionMemory for Heap {
    fn base(&self) -> *mut u8 {
        self.base
    }
}

/// Creates the collectives of `ranks` ranks in this process, one for each rank's thread.
///
/// # Errors
/// [`CollectiveError::Setup`] if `ranks` is not in 1..=64.
pub fn local_group(
    ranks: usize,
    timeout: Duration,
) -> Result<Vec<Box<dyn Collective>>, CollectiveError> {
    if ranks == 0 || ranks > RANKS_MAX {
        let message = format!("{ranks} ranks, it must be 1 to {RANKS_MAX}");
        return Err(CollectiveError::Setup(message));
    }
    let layout = Layout::from_size_align(region_bytes(ranks), align_of::<Header>())
        .map_err(|error| CollectiveError::Setup(error.to_string()))?;
    // SAFETY: the layout's size is not zero.
    let base = unsafe { alloc_zeroed(layout) };
    if base.is_null() {
        handle_alloc_error(layout);
    }
    let memory = Arc::new(Heap { base, layout });
    let collective = |rank| {
        let region = Region::new(memory.clone(), rank, ranks, timeout);
        Box::new(Exchange::new(region)) as Box<dyn Collective>
    };
    Ok((0..ranks).map(collective).collect())
}
