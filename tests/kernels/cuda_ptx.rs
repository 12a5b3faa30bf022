//! The cases of the CUDA kernels, once more on the PTX that nvcc makes of them: what the machine
//! code that ships is assembled from.
//!
//! `kernels/cuda/emulate/ptx` reads PTX and runs it. It shows whether the PTX in `device.cuh` is
//! right, which the emulation of the sources replaces by twins, and what the compiler did: moved,
//! contracted, laid out. A test here starts this program again with `TUTTI_ENGINE=ptx`, where every
//! launch runs on PTX alone; so launches of two kernels that have to agree are compared with each
//! other there, too.
//!
//! `TUTTI_PTX=compute_80` takes the PTX for that instead of compute_90a. `TUTTI_PTX_SEEDS=1` runs
//! every launch in several orders of threads. `TUTTI_PTX_FUSE=1` fuses what an assembler may fuse.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use testkit::ptx::{FLAGS, Ptx, from_folder, hash_of_flags, prepare};

use crate::cuda_emulation::{
    compile, declared, folder, launch, link, objects_named, program_named, read_u32, u32s,
    write_entries,
};

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
        // Kernels of these tests alone are declared nowhere.
        let declared = declared();
        let names = ptx.names.iter();
        let own: Vec<&String> = names.filter(|name| !declared.contains(*name)).collect();
        let declarations = own.iter().map(|name| format!("extern \"C\" void {name}(uint64_t);\n"));
        std::fs::write(scratch.path().join("declarations.inc"), declarations.collect::<String>())
            .unwrap();
        write_entries(scratch.path(), if own.is_empty() { &declared } else { &ptx.names });
        let units = [folder().join(main), ptx.stubs.clone()];
        let mut objects = compile(units.iter(), &flags(), scratch.path());
        objects.extend(machine());
        link(&objects, &[], scratch.path(), program);
    })
}

/// The objects of what runs PTX.
fn machine() -> Vec<PathBuf> {
    let mut units: Vec<PathBuf> = std::fs::read_dir(folder().join("emulate/ptx"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    units.extend(["emulate/guarded.cpp", "emulate/races.cpp"].map(|at| folder().join(at)));
    objects_named(&format!("cuda-ptx-machine-{:016x}", hash_of_flags()), &units, &flags())
}

fn flags() -> Vec<&'static str> {
    [FLAGS, &["-DTUTTI_RACES"]].concat()
}

#[test]
fn every_case_holds_on_ptx() {
    if ptx().is_none() {
        println!("skipped: no nvcc; kernels/cuda/get-nvcc gets it");
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["cuda_", "--skip", "cuda_ptx::", "--skip", "the_emulation_notices"])
        // With seeds of their own, and sources of their own.
        .args(["--skip", "every_part_of_the_protocol"])
        .env(ENGINE, "ptx")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let passed = said.matches(" ... ok\n").count();
    assert!(passed > 60, "{passed} cases: {said}");
}

/// The machine that runs `rules.ptx`.
fn rules() -> PathBuf {
    let place = folder().join("emulate/ptx");
    let ptx = from_folder(Path::new(env!("CARGO_TARGET_TMPDIR")), &place, "rules.ptx").unwrap();
    built("cuda-ptx-rules", "emulate/main.cpp", &ptx)
}

/// Each broken rule ends the launch with the instruction's line; what only looks like it does not.
#[test]
fn the_machine_notices_what_it_should() {
    let rules = rules();
    let words = [u32s(&[0; 64])];
    let run = |kernel| read_u32(&launch(kernel, [1, 1, 1], 64).run_on(&rules, &words, 0)[0]);
    let apart = |i: u32| if i % 32 < 16 { i ^ 2 } else { i ^ 1 };
    assert_eq!(run("lanes_shuffle_that_are_all_there"), (0..64).map(apart).collect::<Vec<_>>());
    let pairs: Vec<u32> = (0..64).map(|i| i ^ 1).collect();
    assert_eq!(run("lanes_read_what_others_wrote_before"), pairs);
    for (kernel, said_of_it) in [
        ("lanes_shuffle_that_are_not_all_there", "names lanes that do not come"),
        ("a_lane_is_not_in_its_mask", "a mask that lacks the lane itself"),
        ("a_shuffle_comes_from_outside_of_its_mask", "outside of its mask"),
        ("half_a_warp_multiplies", "names lanes that do not come"),
        ("a_warp_is_at_two_barriers", "at different barriers"),
        ("what_it_writes_is_read_as_never_written", "on the non-coherent path"),
        ("it_reads_behind_an_array", "behind the end of an array"),
        ("it_reads_before_shared_memory", "outside of the arrays"),
        ("a_pair_is_not_aligned", "not aligned"),
        ("it_reads_before_it_waits", "before it has waited"),
        ("no_thread_waits", "no block of the grid has waited"),
        ("half_of_the_threads_wait", "some threads of a block have waited"),
        ("lanes_read_what_others_write", "a race: "),
        ("it_does_what_is_not_known", "does not know this instruction here: dp4a.u32.u32"),
    ] {
        let said = launch(kernel, [1, 1, 1], 64).failure_of(&rules, &words);
        assert!(said.contains(said_of_it), "{kernel}: {said}");
    }
}
