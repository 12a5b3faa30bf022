//! A thread that does nothing any more, while the rest of its process goes on.
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// Stops the thread of this number, as a debugger does, until its standard input ends.
const STOP: &str = "
import ctypes, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.restype = ctypes.c_long
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, INTERRUPT = 0x4206, 0x4207
for request in (SEIZE, INTERRUPT):
    if ptrace(request, int(sys.argv[1]), None, None) != 0:
        sys.exit('ptrace: error %d' % ctypes.get_errno())
print('stopped', flush=True)
sys.stdin.read()
";

/// A stopped thread; it goes on when this is dropped.
#[derive(Debug)]
pub struct Stopped(Child);

impl Stopped {
    /// Stops the thread of this name in a process.
    ///
    /// # Errors
    /// Why it cannot be: it is not there, there is no Python, or the system forbids it.
    pub fn thread(pid: u32, name: &str) -> Result<Self, String> {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
        let threads = threads.map_err(|error| error.to_string())?.flatten().map(|it| it.path());
        let is_it = |path: &std::path::PathBuf| {
            std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let found = threads.into_iter().find(is_it);
        let found = found.ok_or_else(|| format!("process {pid} has no thread {name}"))?;
        Self::number(found.file_name().unwrap_or_default())
    }

    /// Stops the main thread of a process.
    ///
    /// # Errors
    /// As [`Stopped::thread`].
    pub fn main_thread(pid: u32) -> Result<Self, String> {
        Self::number(OsStr::new(&pid.to_string()))
    }

    fn number(thread: &OsStr) -> Result<Self, String> {
        let python = std::env::var_os("TUTTI_TEST_PYTHON").unwrap_or_else(|| "python3".into());
        let mut child = Command::new(python)
            .args(["-c", STOP])
            .arg(thread)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("no Python: {error}"))?;
        let mut said = String::new();
        if let Some(stdout) = child.stdout.take() {
            let _ = BufReader::new(stdout).read_line(&mut said);
        }
        let stopped = Self(child);
        if said.trim_end() == "stopped" {
            Ok(stopped)
        } else {
            Err("ptrace is forbidden".to_owned())
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
