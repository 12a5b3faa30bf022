//! Where HTTP is served: at an address, or on a Unix socket, whose file comes and goes with its
//! server.
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

/// Maximum bytes of a Unix socket's path: the kernel has room for one more, a zero at its end.
pub const SOCKET_PATH_MAX: usize = 107;

/// What a Unix socket is called in place of a URL, before its path, as in nginx and in vLLM's log.
pub const UNIX_SCHEME: &str = "unix:";

/// How often a folder is tried that another server has for itself.
const TRIES: usize = 50;
/// Between two tries.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Where HTTP is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// An address.
    Tcp(SocketAddr),
    /// A Unix socket with this path.
    Unix(PathBuf),
}

impl Endpoint {
    /// The option that sets it.
    #[must_use]
    pub fn option(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "--listen",
            Self::Unix(_) => "--uds",
        }
    }

    /// The URL with this scheme; a Unix socket has none, and is `unix:PATH`.
    #[must_use]
    pub fn url(&self, scheme: &str) -> String {
        match self {
            Self::Tcp(address) => format!("{scheme}://{address}"),
            Self::Unix(_) => self.to_string(),
        }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{UNIX_SCHEME}{}", path.display()),
        }
    }
}

/// A listener for HTTP.
#[derive(Debug)]
pub enum HttpListener {
    /// Of an address.
    Tcp(TcpListener),
    /// Of a Unix socket.
    Unix(UnixListener),
}

impl HttpListener {
    /// Another one for the same connections.
    ///
    /// # Errors
    /// If the operating system has no more files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(listener) => Self::Tcp(listener.try_clone()?),
            Self::Unix(listener) => Self::Unix(listener.try_clone()?),
        })
    }
}

impl From<TcpListener> for HttpListener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

/// Where HTTP is served, held from the start of a process.
#[derive(Debug)]
pub(crate) struct BoundHttp {
    /// The file of a Unix socket; it goes before the listener does, see [`SocketFile`].
    pub(crate) file: Option<SocketFile>,
    pub(crate) listener: HttpListener,
    /// With the port that was given for any.
    pub(crate) endpoint: Endpoint,
}

impl BoundHttp {
    /// Listens there. A Unix socket may be used by whom the process's umask lets.
    pub(crate) fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let endpoint = Endpoint::Tcp(listener.local_addr()?);
                Ok(Self { file: None, listener: HttpListener::Tcp(listener), endpoint })
            }
            Endpoint::Unix(path) => {
                let alone = folder_alone(path);
                if is_left_over(path)? {
                    fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                let file = Some(SocketFile::new(path)?);
                drop(alone);
                listener.set_nonblocking(true)?;
                let endpoint = endpoint.clone();
                Ok(Self { file, listener: HttpListener::Unix(listener), endpoint })
            }
        }
    }
}

/// Has a socket's folder for this server, until what this returns is dropped: of two that begin at
/// once, one could remove the other's new socket for the one that was left. Where folders cannot be
/// locked, or one stays locked, a server begins nevertheless.
fn folder_alone(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or_else(|| Path::new("."))).ok()?;
    for _ in 0..TRIES {
        match folder.try_lock() {
            Ok(()) => return Some(folder),
            Err(TryLockError::WouldBlock) => std::thread::sleep(TRY_EVERY),
            Err(TryLockError::Error(_)) => return None,
        }
    }
    None
}

/// Whether the socket of a server that is gone is there, which may be removed. If not, nothing is
/// there.
///
/// # Errors
/// What else is there, and must stay.
pub fn is_left_over(path: &Path) -> io::Result<bool> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        let message = "something that is not a socket is there";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    let client = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A server with a full queue would have this wait.
    client.set_nonblocking(true)?;
    match client.connect(&SockAddr::unix(path)?).map_err(|error| (error.kind(), error)) {
        Err((io::ErrorKind::ConnectionRefused, _)) => Ok(true),
        Err((io::ErrorKind::NotFound, _)) => Ok(false),
        Ok(()) | Err((io::ErrorKind::WouldBlock, _)) => {
            let message = "another process listens there";
            Err(io::Error::new(io::ErrorKind::AddrInUse, message))
        }
        Err((_, error)) => Err(error),
    }
}

/// The file of a Unix socket on which this process listens. When this is dropped, the file is
/// removed, if it is still the same: as long as the listener is open, no other file gets its
/// number, so this has to go first.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// The device, and the file's number there.
    id: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), id: id_of(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id_of(&self.path).is_ok_and(|id| id == self.id) {
            // If it stays, the next server removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn id_of(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    fn bind(path: &Path) -> io::Result<BoundHttp> {
        BoundHttp::bind(&Endpoint::Unix(path.to_owned()))
    }

    #[test]
    fn a_socket_goes_with_its_server_and_one_that_was_left_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let bound = bind(&path).unwrap();
        assert_eq!(bound.endpoint.url("http"), format!("unix:{}", path.display()));
        assert_eq!(bound.endpoint.option(), "--uds");
        let other = bound.listener.try_clone().unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"x").unwrap();
        let HttpListener::Unix(listener) = &other else { panic!("it is a Unix socket") };
        let mut byte = [0];
        listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        // The clone of another server listens on.
        drop(bound);
        assert!(!path.exists());
        // As a process leaves it that is killed.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists() && is_left_over(&path).unwrap());
        let bound = bind(&path).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop(bound);
        assert!(!path.exists() && !is_left_over(&path).unwrap());
    }

    #[test]
    fn of_servers_that_begin_at_once_one_has_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for _ in 0..20 {
            drop(UnixListener::bind(&path).unwrap());
            let bound: Vec<io::Result<BoundHttp>> = std::thread::scope(|scope| {
                let servers: Vec<_> = (0..4).map(|_| scope.spawn(|| bind(&path))).collect();
                servers.into_iter().map(|server| server.join().unwrap()).collect()
            });
            assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1, "{bound:?}");
            assert!(UnixStream::connect(&path).is_ok());
            drop(bound);
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_others_have_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let refused = |words: &str| {
            let error = bind(&path).unwrap_err().to_string();
            assert!(error.contains(words) && path.exists(), "{error}");
            assert!(is_left_over(&path).is_err());
        };
        fs::write(&path, "text").unwrap();
        refused("not a socket");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
        let error = bind(&path).unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        fs::remove_file(&path).unwrap();
        let first = bind(&path).unwrap();
        refused("another process listens there");
        // The file of another server that came in its place.
        fs::remove_file(&path).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        let _datagrams = UnixDatagram::bind(&path).unwrap();
        refused("");
    }

    #[test]
    fn a_server_that_takes_nobody_more_is_there_nevertheless() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        let _queued = UnixStream::connect(&path).unwrap();
        for _ in 0..4 {
            assert!(bind(&path).unwrap_err().to_string().contains("another process"));
        }
    }

    #[test]
    fn the_longest_path_is_as_long_as_the_kernel_takes() {
        let folder = tempfile::tempdir().unwrap();
        let room = SOCKET_PATH_MAX - folder.path().as_os_str().len() - 1;
        let longest = folder.path().join("x".repeat(room));
        assert_eq!(longest.as_os_str().len(), SOCKET_PATH_MAX);
        assert!(bind(&longest).is_ok());
        assert!(bind(&folder.path().join("x".repeat(room + 1))).is_err());
    }

    #[test]
    fn an_address_has_a_port_once_it_is_bound() {
        let bound = BoundHttp::bind(&Endpoint::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let Endpoint::Tcp(address) = bound.endpoint else { panic!("it is an address") };
        assert_ne!(address.port(), 0);
        assert_eq!(bound.endpoint.option(), "--listen");
        assert_eq!(bound.endpoint.url("https"), format!("https://{address}"));
    }
}
