//! GPUs used by other workers of this host. Memory is allocated when a model is loaded, so workers
//! that start together would all choose the same GPU by free memory.
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

/// This process's claims. An abstract name ends with its process, however that ends.
static CLAIMS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Tells others on this host (in this network namespace) that this process uses the GPU with this
/// `uuid`, until it ends. Returns false if another process has claimed it; other failures do not
/// rule out the GPU.
pub(crate) fn claim(uuid: &str) -> bool {
    let name = format!("tutti/gpu/{uuid}");
    match SocketAddr::from_abstract_name(name).and_then(|name| UnixListener::bind_addr(&name)) {
        Ok(claim) => {
            CLAIMS.lock().unwrap_or_else(PoisonError::into_inner).push(claim);
            true
        }
        Err(error) => error.kind() != ErrorKind::AddrInUse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_claimed_once() {
        let uuid = |name: &str| format!("{name}-{}", std::process::id());
        assert!(claim(&uuid("first")));
        assert!(claim(&uuid("second")));
        assert!(!claim(&uuid("first")));
        assert!(claim(&"x".repeat(200)), "a name that is too long says nothing");
    }
}
