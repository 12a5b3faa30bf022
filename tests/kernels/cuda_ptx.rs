//! The cases of the CUDA kernels, once more on the PTX that nvcc makes of them: what the machine code
//! that ships is assembled from.
//!
//! `kernels/cuda/emulate/ptx` reads PTX and runs it. It shows whether the PTX in `device.cuh` is right,
//! which the emulation of the sources replaces by twins, and what the compiler did: moved, contracted,
//! laid out. A test here starts this program again with `TUTTI_ENGINE=ptx`, where every launch runs on
//! PTX alone; so launches of two kernels that have to agree are compared with each other there, too.
//!
//! `TUTTI_PTX=compute_80` takes the PTX for that instead of compute_90a. `TUTTI_PTX_SEEDS=1` runs every
//! launch in several orders of threads.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use testkit::ptx::{FLAGS, Ptx, prepare};

use crate::cuda_emulation::{compile, folder, link, program_named, write_entries};

const ENGINE: &str = "TUTTI_ENGINE";

/// The seeds of the orders to run, as in `cuda_emulation`: in step; and every lane by itself.
pub(crate) fn seeds() -> &'static [u32] {
    match std::env::var_os("TUTTI_PTX_SEEDS") {
        None => &[0],
        Some(_) => &[0, 1, 2, 3],
    }
}

/// The program that runs PTX, where launches are to run on it.
pub(crate) fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let is_chosen = std::env::var(ENGINE).is_ok_and(|engine| engine == "ptx");
        is_chosen.then(|| built("cuda-ptx", "emulate/main.cpp", &ptx().unwrap()))
    };
    PROGRAM.get_or_init(make).as_deref()
}

/// None without nvcc.
pub(crate) fn ptx() -> Option<Ptx> {
    prepare(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap()
}

/// A program with this file's `main`, that runs PTX.
pub(crate) fn built(name: &str, main: &str, ptx: &Ptx) -> PathBuf {
    program_named(&format!("{name}-{:016x}", ptx.hash), |program| {
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        write_entries(scratch.path());
        let mut units: Vec<PathBuf> = std::fs::read_dir(folder().join("emulate/ptx"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
            .collect();
        units.extend([main, "emulate/guarded.cpp", "emulate/races.cpp"].map(|at| folder().join(at)));
        units.push(ptx.stubs.clone());
        let flags = [FLAGS, &["-DTUTTI_RACES"]].concat();
        let objects = compile(units.iter(), &flags, scratch.path());
        link(&objects, &[], scratch.path(), program);
    })
}

#[test]
fn every_case_holds_on_ptx() {
    if ptx().is_none() {
        println!("skipped: no nvcc; kernels/cuda/get-nvcc gets it");
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["cuda_", "--skip", "cuda_ptx::", "--skip", "the_emulation_notices"])
        .args(["--skip", "cuda_peers::"])
        .env(ENGINE, "ptx")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("tutti_") || said.contains("ok."), "{said}");
}
