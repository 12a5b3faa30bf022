//! The sources of the CUDA kernels, compiled for the host and launched there.
//!
//! `kernels/cuda/emulate` runs a block's threads as fibers and computes what tensor cores and warps
//! do; no GPU is involved, and none has checked it. Every launch runs several times, with different
//! orders of threads and blocks, with background copies early and late, and with buffers right
//! before or right after memory that faults: the results must be the same bits. Shared memory and
//! outputs are initially NaN. UBSan checks alignment. Another build notices two accesses to the
//! same memory that nothing orders (`emulate/races.h`), in whatever order they came.
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use testkit::made_once::made_once;
use testkit::models::repository;
use testkit::ptx::instructions_of_this_machine;

use crate::cuda_ptx;

/// Seeds of the orders in which every launch runs, see `Settings::seed` in `emulate/block.h`: by
/// index, reversed, shuffled.
const SEEDS: [u32; 3] = [0, 1, 3];
/// The order in which races are looked for. One is enough: what counts is what orders accesses.
const RACING_SEED: u32 = 2;

/// One argument of a kernel.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    Null,
    U32(u32),
    U64(u64),
    F32(f32),
    /// A device buffer with these bytes.
    Buffer(Vec<u8>),
    /// The buffer of argument number `.0`, from byte `.1` on.
    Same(u32, u64),
}

pub(crate) fn f32s(values: &[f32]) -> Arg {
    Arg::Buffer(values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

pub(crate) fn u32s(values: &[u32]) -> Arg {
    Arg::Buffer(values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

pub(crate) fn bf16s(values: &[f32]) -> Arg {
    Arg::Buffer(values.iter().flat_map(|&x| to_bf16(x).to_le_bytes()).collect())
}

pub(crate) fn some_f32s(values: Option<&[f32]>) -> Arg {
    values.map_or(Arg::Null, f32s)
}

/// `len` NaN values, to detect those that are not written.
pub(crate) fn poison_f32(len: usize) -> Arg {
    Arg::Buffer(vec![0xff; 4 * len])
}

pub(crate) fn poison_bf16(len: usize) -> Arg {
    Arg::Buffer(vec![0xff; 2 * len])
}

pub(crate) fn read_f32(bytes: &[u8]) -> Vec<f32> {
    let (quads, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    quads.iter().map(|&quad| f32::from_le_bytes(quad)).collect()
}

pub(crate) fn read_u32(bytes: &[u8]) -> Vec<u32> {
    let (quads, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    quads.iter().map(|&quad| u32::from_le_bytes(quad)).collect()
}

pub(crate) fn read_bf16(bytes: &[u8]) -> Vec<f32> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    assert!(rest.is_empty());
    pairs.iter().map(|&pair| f32::from_bits(u32::from(u16::from_le_bytes(pair)) << 16)).collect()
}

/// Rounds to nearest, ties to even.
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

pub(crate) fn rounded(x: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(x)) << 16)
}

pub(crate) fn rounded_all(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| rounded(x)).collect()
}

/// A kernel launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [usize; 3],
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

pub(crate) fn launch(kernel: &str, grid: [usize; 3], threads: u32) -> Launch<'_> {
    Launch { kernel, grid, threads, shared: 0 }
}

impl Launch<'_> {
    /// Runs it in every order; returns the final contents of its buffers, in the order of the
    /// arguments.
    pub(crate) fn run(&self, args: &[Arg]) -> Vec<Vec<u8>> {
        if let Some(ptx) = cuda_ptx::program() {
            return self.run_ptx(ptx, args);
        }
        let mut running = Vec::from(SEEDS.map(|seed| self.start(program(), args, seed)));
        running.push(self.start(racing(), args, RACING_SEED));
        let mut results = running.into_iter().map(|child| self.finish(child, args));
        let first = results.next().unwrap();
        for (seed, other) in SEEDS[1..].iter().chain([&RACING_SEED]).zip(results) {
            assert!(other == first, "{}: order {seed} gives other bits", self.kernel);
        }
        first
    }

    /// Runs it in one order.
    pub(crate) fn run_on(&self, program: &Path, args: &[Arg], seed: u32) -> Vec<Vec<u8>> {
        self.finish(self.start(program, args, seed), args)
    }

    fn run_ptx(&self, program: &Path, args: &[Arg]) -> Vec<Vec<u8>> {
        let seeds = cuda_ptx::seeds().iter();
        let running: Vec<Child> = seeds.map(|&seed| self.start(program, args, seed)).collect();
        let mut results = running.into_iter().map(|child| self.finish(child, args));
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{}: an order gives other bits", self.kernel);
        first
    }

    /// Runs it in one order; returns the emulation's error.
    pub(crate) fn failure(&self, args: &[Arg]) -> String {
        self.failure_of(cuda_ptx::program().unwrap_or_else(program), args)
    }

    pub(crate) fn failure_of(&self, program: &Path, args: &[Arg]) -> String {
        let output = self.start(program, args, 0).wait_with_output().unwrap();
        assert!(!output.status.success(), "{} did not fail", self.kernel);
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn start(&self, program: &Path, args: &[Arg], seed: u32) -> Child {
        let mut request = Vec::new();
        let mut word = |x: u32| request.extend(x.to_le_bytes());
        word(self.kernel.len() as u32);
        request.extend(self.kernel.as_bytes());
        let mut word = |x: u32| request.extend(x.to_le_bytes());
        self.grid.iter().for_each(|&n| word(n as u32));
        for n in [self.threads, self.shared, seed, args.len() as u32] {
            word(n);
        }
        for arg in args {
            let mut put = |kind: u32, bytes: &[&[u8]]| {
                request.extend(kind.to_le_bytes());
                bytes.iter().for_each(|bytes| request.extend(*bytes));
            };
            match arg {
                Arg::Null => put(0, &[]),
                Arg::U32(x) => put(1, &[&u64::from(*x).to_le_bytes()]),
                Arg::F32(x) => put(1, &[&u64::from(x.to_bits()).to_le_bytes()]),
                Arg::U64(x) => put(2, &[&x.to_le_bytes()]),
                Arg::Buffer(bytes) => put(3, &[&(bytes.len() as u64).to_le_bytes(), bytes]),
                Arg::Same(of, at) => put(4, &[&of.to_le_bytes(), &at.to_le_bytes()]),
            }
        }
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It reads all input before it writes. If it rejects the request, it may exit earlier and
        // print why.
        let _ = child.stdin.take().unwrap().write_all(&request);
        child
    }

    fn finish(&self, mut child: Child, args: &[Arg]) -> Vec<Vec<u8>> {
        let mut stdout = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {}: {said}", self.kernel, output.status);
        let mut rest = stdout.as_slice();
        let mut buffers = Vec::new();
        for arg in args {
            if let Arg::Buffer(bytes) = arg {
                let (buffer, after) = rest.split_at(bytes.len());
                buffers.push(buffer.to_vec());
                rest = after;
            }
        }
        assert!(rest.is_empty());
        buffers
    }
}

/// The names of all kernels in `kernels.h`, in order.
pub(crate) fn declared() -> Vec<String> {
    let header = std::fs::read_to_string(folder().join("kernels.h")).unwrap();
    header
        .split("__global__ void ")
        .skip(1)
        .map(|rest| rest.split('(').next().unwrap().to_owned())
        .collect()
}

pub(crate) fn folder() -> PathBuf {
    repository().join("kernels/cuda")
}

/// The emulation's program, built once per version of the sources.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        program_named("cuda-emulation", |program| build(program, SANITIZED, SANITIZED))
    })
}

/// The same, which looks for races: the compiler reports what kernels access.
fn racing() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        // Marks hold addresses of code in 32 bits.
        let emulation = &["-DTUTTI_RACES", "-no-pie"];
        let kernels = &["-DTUTTI_RACES", "-fsanitize=thread"];
        program_named("cuda-races", |program| build(program, kernels, emulation))
    })
}

/// Compiles kernels and the emulation with these flags each.
fn build(program: &Path, kernel_flags: &[&str], emulation_flags: &[&str]) {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write_entries(scratch.path(), &declared());
    let sources = sources();
    let of = |wanted: &'static str| {
        sources.iter().filter(move |path| {
            // `ranks.cpp` is a separate program.
            path.extension().is_some_and(|extension| extension == wanted)
                && !path.ends_with("ranks.cpp")
                && !path.starts_with(folder().join("emulate/ptx"))
        })
    };
    let mut objects = compile(of("cu"), kernel_flags, scratch.path());
    objects.extend(compile(of("cpp"), emulation_flags, scratch.path()));
    // Without what the kernels are compiled with: `races.cpp` is the library.
    link(&objects, emulation_flags, scratch.path(), program);
}

/// What `main.cpp` includes: the names of kernels.
pub(crate) fn write_entries(scratch: &Path, names: &[String]) {
    let mut entries = String::new();
    for name in names {
        writeln!(entries, "ENTRY({name}),").unwrap();
    }
    std::fs::write(scratch.join("entries.inc"), entries).unwrap();
}

/// A program that `build` creates, once per version of these sources.
pub(crate) fn program_named(name: &str, build: impl FnOnce(&Path)) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (FLAGS, SANITIZED, instructions_of_this_machine()).hash(&mut hasher);
    for path in sources() {
        (&path, std::fs::read(&path).unwrap()).hash(&mut hasher);
    }
    let name = format!("{name}-{:016x}", hasher.finish());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let make = || {
        build(&program);
        Ok(())
    };
    made_once(&program, make).unwrap();
    program
}

/// Objects that several programs are linked of, compiled once per version of these sources. `name`
/// tells of the units and flags.
pub(crate) fn objects_named(name: &str, units: &[PathBuf], flags: &[&str]) -> Vec<PathBuf> {
    let folder = program_named(name, |folder| {
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        compile(units.iter(), flags, scratch.path());
        std::fs::rename(scratch.keep(), folder).unwrap();
    });
    units.iter().map(|unit| folder.join(unit.file_name().unwrap()).with_extension("o")).collect()
}

/// Optimised for this machine, to keep the tests fast; without fused multiply-add, so that sums are
/// rounded as written; with alignment checks of every access.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-march=native",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-DTUTTI_EMULATE",
];
/// Besides, where races are not looked for.
pub(crate) const SANITIZED: &[&str] = &[
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
];

fn sources() -> Vec<PathBuf> {
    let folders = [folder(), folder().join("emulate"), folder().join("emulate/ptx")];
    let mut paths: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            matches!(extension, Some("cu" | "cuh" | "h" | "cpp"))
        })
        .collect();
    paths.sort();
    paths
}

/// Compiles each unit to an object below `scratch`, which is also an include directory.
pub(crate) fn compile<'a>(
    units: impl Iterator<Item = &'a PathBuf>,
    flags: &[&str],
    scratch: &Path,
) -> Vec<PathBuf> {
    let mut objects = Vec::new();
    let compilers: Vec<(&PathBuf, Child)> = units
        .map(|unit| {
            let object = scratch.join(unit.file_name().unwrap()).with_extension("o");
            let child = Command::new("c++")
                .args(FLAGS)
                .args(flags)
                .args(["-I".as_ref(), scratch.as_os_str(), "-I".as_ref(), folder().as_os_str()])
                .args(["-x", "c++", "-c"])
                .arg(unit)
                .arg("-o")
                .arg(&object)
                .stderr(Stdio::piped())
                .spawn();
            assert!(child.is_ok(), "c++ (Debian: g++): {child:?}");
            objects.push(object);
            (unit, child.unwrap())
        })
        .collect();
    for (unit, child) in compilers {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", unit.display());
    }
    objects
}

/// Atomically: another process may use the file.
pub(crate) fn link(objects: &[PathBuf], flags: &[&str], scratch: &Path, program: &Path) {
    let linked = scratch.join("program");
    let output = Command::new("c++")
        .args(FLAGS)
        .args(flags)
        .args(objects)
        .arg("-o")
        .arg(&linked)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(linked, program).unwrap();
}

#[test]
fn every_declared_kernel_can_be_launched() {
    let program = cuda_ptx::program().unwrap_or_else(program);
    let output = Command::new(program).arg("--list").output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    let listed: Vec<&str> = listed.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(listed, declared());
    assert!(listed.len() > 30, "{listed:?}");
}

#[test]
fn the_emulation_notices_what_it_should() {
    // A buffer that is too short, then one that is misaligned.
    let short = launch("tutti_add", [1, 1, 1], 256);
    let args = [f32s(&[1.0; 8]), f32s(&[2.0; 4]), Arg::U32(8), Arg::Null];
    let said = short.failure(&args);
    assert!(said.contains("reaches outside of a buffer"), "{said}");
    let args = [f32s(&[1.0; 12]), Arg::Same(0, 4), Arg::U32(8), Arg::Null];
    let said = short.failure(&args);
    assert!(said.contains("misaligned"), "{said}");
    let wrong = launch("tutti_add", [1, 1, 1], 33);
    assert!(wrong.failure(&args).contains("multiple of 32"));
}

/// A grid must not complete before the preceding ones, nor touch before then what they read or
/// write: see `end_without_waiting` in `device.cuh`.
#[test]
fn the_emulation_notices_who_does_not_wait() {
    let word = [u32s(&[7])];
    assert_eq!(read_u32(&launch("one_block_waits", [3, 1, 1], 64).run(&word)[0]), [7]);
    for (kernel, words) in [
        ("no_block_waits", "no block of the grid has waited"),
        ("half_of_a_block_waits", "some threads of a block have waited"),
        ("a_block_writes_that_does_not_wait", "before it has waited"),
        ("it_writes_before_it_waits", "before it has waited"),
    ] {
        let said = launch(kernel, [3, 1, 1], 64).failure(&word);
        assert!(said.contains(words), "{kernel}: {said}");
    }
}

/// What orders accesses to the same memory, and what does not: whatever came out in the order in
/// which the emulation happened to run them.
#[test]
fn the_emulation_notices_races() {
    let words = [u32s(&[0; 64])];
    let run = |kernel| read_u32(&launch(kernel, [3, 1, 1], 64).run(&words)[0]);
    let on = |apart: u32| (0..64).map(|i| (i + apart) % 64).collect::<Vec<u32>>();
    assert_eq!(run("threads_read_what_others_wrote_behind_a_barrier"), on(33));
    let pairs: Vec<u32> = (0..64).map(|i| i ^ 1).collect();
    assert_eq!(run("lanes_read_what_others_wrote_behind_a_warp_barrier"), pairs);
    assert_eq!(run("threads_add_atomically")[0], 3 * 64 * 64);
    assert_eq!(run("blocks_write_words_of_their_own")[40..50], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
    for (kernel, words_of_it) in [
        ("threads_read_what_others_wrote", "reads byte"),
        ("threads_overwrite_what_others_read", "of shared memory of 256 bytes"),
        ("lanes_read_what_others_wrote_behind_a_shuffle", "reads byte"),
        ("warps_read_what_others_wrote_behind_a_warp_barrier", "reads byte"),
        ("a_thread_reads_what_others_add_atomically", "reads byte"),
        ("a_copy_arrives_while_others_read", "of shared memory of 16 bytes"),
        ("blocks_write_what_others_read", "of global memory"),
    ] {
        let said = launch(kernel, [3, 1, 1], 64).failure_of(racing(), &words);
        assert!(said.contains("a race: ") && said.contains(words_of_it), "{kernel}: {said}");
    }
}
