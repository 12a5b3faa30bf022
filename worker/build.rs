//! Names the build by what its bits come from: the sources of the engine and of the arithmetic
//! below it. Ranks of one replica have to be of one build, and a version alone does not tell two
//! states of the sources apart.
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Folders whose files count, and what their names end in.
const SOURCES: [&str; 3] = ["src", "../kernels/src", "../kernels/cuda"];

fn main() {
    if let Err(error) = run() {
        // The one way in which a build script can say what is wrong.
        println!("cargo::error=the sources cannot be read: {error}");
    }
}

fn run() -> io::Result<()> {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    for folder in SOURCES {
        println!("cargo::rerun-if-changed={folder}");
        let mut files = Vec::new();
        collect(Path::new(folder), &mut files)?;
        // As they are named, not as the file system lists them.
        files.sort();
        for file in files {
            hash.add(file.to_string_lossy().as_bytes());
            hash.add(&fs::read(&file)?);
        }
    }
    // With kernels or without them.
    println!("cargo::rerun-if-env-changed=TUTTI_CUDA");
    hash.add(env::var("TUTTI_CUDA").unwrap_or_default().as_bytes());
    println!("cargo::rustc-env=TUTTI_BUILD={:016x}", hash.0);
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let named = |extension: &str| path.extension().is_some_and(|it| it == extension);
        if path.is_dir() {
            collect(&path, files)?;
        } else if ["rs", "cu", "cuh", "h"].into_iter().any(named) {
            files.push(path);
        }
    }
    Ok(())
}

/// FNV-1a of 64 bits.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        let length = (bytes.len() as u64).to_le_bytes();
        for byte in length.iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
