//! Checks that the host's memory suffices for the KV blocks to swap to, and for the cache of ranks
//! that compute on CPUs.
use std::path::Path;

use kernels::Backend;
use shared::host::available_memory;
use shared::protocol::{CollectiveSpec, Form};

use crate::device::bytes_text;
use crate::engine::Engine;

/// Memory that one rank needs from its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostMemoryNeed {
    /// Number of blocks of its KV cache, if that is in host memory.
    pub(super) kv_blocks: u32,
    /// Number of blocks to swap to.
    pub(super) host_blocks: u32,
    /// The configured swap space, in bytes; the number of blocks is capped.
    pub(super) swap_bytes: u64,
}

/// Checks that the host has room for what each of `ranks` needs. The system promises memory that it
/// does not have, and ends the process that writes to it.
///
/// # Errors
/// One sentence with what was asked for and what there is.
pub(super) fn fits<B: Backend>(
    engine: &Engine<B>,
    asked: HostMemoryNeed,
    ranks: u32,
) -> Result<(), String> {
    let HostMemoryNeed { kv_blocks, host_blocks, swap_bytes } = asked;
    let bytes = |blocks: u32, each: u64| u64::from(blocks).saturating_mul(each);
    let kv = bytes(kv_blocks, engine.block_bytes());
    // Blocks from an earlier epoch are already allocated.
    let swap = match host_blocks == 0 || engine.has_host_blocks(host_blocks) {
        true => 0,
        false => swap_bytes.max(bytes(host_blocks, engine.host_block_bytes())),
    };
    match available_memory(Path::new("/")).filter(|_| kv > 0 || swap > 0) {
        Some(available) => check(available, ranks, swap, kv),
        None => Ok(()),
    }
}

/// Number of ranks known to share this host's memory. Ranks that do not use shared memory may be on
/// any host, so each checks what is left for itself.
pub(super) fn ranks_here(form: &Form) -> u32 {
    match &form.collective {
        CollectiveSpec::SharedMemory { .. } => form.world_size,
        CollectiveSpec::None | CollectiveSpec::Tcp { .. } => 1,
    }
}

/// The memory left on the host, as text.
pub(super) fn memory_left() -> String {
    available_memory(Path::new("/")).map_or("unknown".to_owned(), bytes_text)
}

/// Number of KV blocks that fit in `bytes` of host memory.
pub(super) fn swap_space(bytes: u64, block_bytes: u64) -> Result<u32, String> {
    match u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX) {
        0 if bytes > 0 => Err(format!(
            "--swap-space is {}, less than the {} that one KV block takes",
            bytes_text(bytes),
            bytes_text(block_bytes)
        )),
        blocks => Ok(blocks),
    }
}

/// Checks that a host with `available` bytes left can give each of its `ranks` `swap` bytes of swap
/// space and `kv` bytes for a KV cache in host memory.
fn check(available: u64, ranks: u32, swap: u64, kv: u64) -> Result<(), String> {
    let each = swap.saturating_add(kv);
    if each.saturating_mul(u64::from(ranks)) <= available {
        return Ok(());
    }
    let cache = format!("a KV cache of {} (--kv-cache-memory)", bytes_text(kv));
    let asked = match (swap, kv) {
        (0, _) => format!("{cache} is needed"),
        (_, 0) => format!("--swap-space is {}", bytes_text(swap)),
        _ => format!("--swap-space is {} and {cache} is needed", bytes_text(swap)),
    };
    let ranks = if ranks > 1 { format!(" for each of {ranks} ranks") } else { String::new() };
    let available = bytes_text(available);
    Err(format!("{asked}{ranks}, but this host has {available} of memory left"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn swap_space_is_what_the_host_has_for_all_of_its_ranks_and_their_caches() {
        assert_eq!(check(10 * GIB, 1, 10 * GIB, 0), Ok(()));
        let error = check(10 * GIB, 1, 11 * GIB, 0).unwrap_err();
        assert!(error.contains("11") && error.contains("10") && error.contains("GiB"), "{error}");
        let error = check(10 * GIB, 1, 8 * GIB, 3 * GIB).unwrap_err();
        assert!(error.contains("KV cache of 3"), "{error}");
        let error = check(10 * GIB, 4, 3 * GIB, 0).unwrap_err();
        assert!(error.contains("each of 4 ranks"), "{error}");
        let error = check(10 * GIB, 1, 0, 11 * GIB).unwrap_err();
        assert!(error.contains("KV cache of 11") && !error.contains("--swap-space"), "{error}");
        assert!(check(10 * GIB, u32::MAX, u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn swap_space_holds_a_block_or_is_none() {
        assert_eq!((swap_space(0, 100), swap_space(250, 100)), (Ok(0), Ok(2)));
        assert!(swap_space(99, 100).unwrap_err().contains("--swap-space"));
    }
}
