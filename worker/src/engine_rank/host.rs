//! Whether the host's memory holds what it is to hold: KV blocks to swap to, and the cache of ranks
//! that compute on CPUs.
use std::path::Path;

use kernels::Backend;
use shared::host::available_memory;
use shared::protocol::{CollectiveSpec, Form};

use crate::device::bytes_text;
use crate::engine::Engine;

/// What one rank asks of its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// Blocks of its KV cache, where that is in host memory.
    pub(super) kv_blocks: u32,
    /// Blocks to swap to.
    pub(super) host_blocks: u32,
    /// What was asked for to swap to, in bytes: blocks are counted up to a bound.
    pub(super) swap_bytes: u64,
}

/// Whether the host has room for what each of `ranks` asks. A cache takes its pages as sequences
/// fill it: one that is too large would end the process in the middle of requests.
///
/// # Errors
/// One sentence: what was asked for, and what there is.
pub(super) fn fits<B: Backend>(engine: &Engine<B>, asked: Asked, ranks: u32) -> Result<(), String> {
    let Asked { kv_blocks, host_blocks, swap_bytes } = asked;
    let bytes = |blocks: u32, each: u64| u64::from(blocks).saturating_mul(each);
    let kv = bytes(kv_blocks, engine.block_bytes());
    // What is there from an earlier epoch is taken already.
    let swap = match host_blocks == 0 || engine.has_host_blocks(host_blocks) {
        true => 0,
        false => swap_bytes.max(bytes(host_blocks, engine.host_block_bytes())),
    };
    match available_memory(Path::new("/")).filter(|_| kv > 0 || swap > 0) {
        Some(available) => check(available, ranks, swap, kv),
        None => Ok(()),
    }
}

/// Ranks that share the memory of this host, as far as is known. Of those on other hosts nothing is
/// known, nor of those on this one that do without shared memory: each looks at what is left.
pub(super) fn ranks_here(form: &Form) -> u32 {
    match &form.collective {
        CollectiveSpec::SharedMemory { .. } => form.world_size,
        CollectiveSpec::None | CollectiveSpec::Tcp { .. } => 1,
    }
}

/// What is left of the host's memory, in words.
pub(super) fn left() -> String {
    available_memory(Path::new("/")).map_or("unknown".to_owned(), bytes_text)
}

/// KV blocks that `bytes` of host memory hold.
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

/// Whether a host that has `available` bytes left can give each of `ranks` on it `swap` bytes to
/// swap to, and `kv` for its KV cache where that is in host memory, too.
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
