//! The CUDA kernels as nvcc compiles them: PTX, and what runs it on the host
//! (`kernels/cuda/emulate/ptx`).
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiler options for what runs PTX, besides those of the emulation: the vector instructions of
/// this machine, since one instruction of PTX computes 32 numbers.
pub const FLAGS: &[&str] = &["-O3", "-march=native", "-DTUTTI_PTX"];

/// PTX to run, and what to link with its machine.
#[derive(Clone, Debug)]
pub struct Ptx {
    /// A file of C++ with the kernels' interface, which names the folder with a file of PTX for
    /// each of them.
    pub stubs: PathBuf,
    /// Their names.
    pub names: Vec<String>,
    /// A number of all of it, and of this machine's instructions.
    pub hash: u64,
}

/// Compiles the kernels of this repository, for the architecture that `TUTTI_PTX` names
/// (`compute_80`; otherwise `compute_90a`), below `folder`, unless that is done already. None
/// without nvcc, except in CI.
///
/// # Errors
/// The compiler's error.
pub fn prepare(folder: &Path) -> Result<Option<Ptx>, String> {
    let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/cuda");
    // Where `kernels/cuda/check` has compiled them, with the same options.
    let compiled = folder.join("../cuda/check");
    let output = Command::new(cuda.join("build"))
        .arg("--strict")
        .arg(&compiled)
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return match said.starts_with("no nvcc") && std::env::var_os("CI").is_none() {
            true => Ok(None),
            false => Err(said),
        };
    }
    let architecture = std::env::var("TUTTI_PTX").unwrap_or_else(|_| "compute_90a".into());
    from_folder(folder, &compiled, &format!("{architecture}.ptx")).map(Some)
}

/// The PTX in `compiled`, of files whose names end so.
///
/// # Errors
/// What cannot be read or written, or is not as expected.
pub fn from_folder(folder: &Path, compiled: &Path, ending: &str) -> Result<Ptx, String> {
    let mut kernels = BTreeMap::new();
    let entries = std::fs::read_dir(compiled).map_err(|error| error.to_string())?;
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(ending) {
            let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
            kernels.extend(entries_of(name, &text));
        }
    }
    if kernels.is_empty() {
        return Err(format!("no *{ending} in {}", compiled.display()));
    }
    let mut hasher = DefaultHasher::new();
    (&kernels, hash_of_flags()).hash(&mut hasher);
    let hash = hasher.finish();
    let target = folder.join(format!("ptx-{}-{hash:016x}", ending.trim_end_matches(".ptx")));
    let made =
        Ptx { stubs: target.join("stubs.cpp"), names: kernels.keys().cloned().collect(), hash };
    if target.is_dir() {
        return Ok(made);
    }
    let scratch = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
    for (name, text) in &kernels {
        std::fs::write(scratch.path().join(format!("{name}.ptx")), text)
            .map_err(|error| error.to_string())?;
    }
    std::fs::write(scratch.path().join("stubs.cpp"), stubs(&target, &kernels))
        .map_err(|error| error.to_string())?;
    match std::fs::rename(scratch.keep(), &target) {
        Err(error) if !target.is_dir() => Err(error.to_string()),
        _ => Ok(made),
    }
}

/// The text of each kernel by itself, with what the file declares for all, and with a comment that
/// says where it was.
fn entries_of(file: &str, text: &str) -> Vec<(String, String)> {
    let mut all = String::new();
    let mut entries: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for (index, line) in text.lines().enumerate() {
        if let Some(rest) = line.strip_prefix(".visible .entry ") {
            let name = rest.split('(').next().unwrap_or_default().to_owned();
            entries.push((name, format!("//# {file} {}\n", index + 1)));
            inside = true;
        }
        match entries.last_mut().filter(|_| inside) {
            Some((_, entry)) => entry.extend([line, "\n"]),
            None if line.starts_with("//") => {}
            None => all.extend([line, "\n"]),
        }
        inside = inside && line != "}";
    }
    entries.iter_mut().for_each(|(_, entry)| entry.insert_str(0, &all));
    entries
}

/// C++ with a function for each kernel, which has the parameters that the PTX has.
fn stubs(kernels_folder: &Path, kernels: &BTreeMap<String, String>) -> String {
    let mut stubs = "#include <stdint.h>\n#include <string.h>\nnamespace emulate::ptx {\n\
        extern const char* const folder;\n"
        .to_owned();
    let _ =
        writeln!(stubs, "const char* const folder = {:?};", kernels_folder.display().to_string());
    stubs += "void enter(const char*, const uint64_t*, size_t);\n}\n";
    for (name, text) in kernels {
        let parameters: Vec<String> = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix(".param .")?.split(' ').next())
            .enumerate()
            .map(|(index, kind)| match kind {
                "u64" => format!("uint64_t p{index}"),
                "u32" => format!("uint32_t p{index}"),
                "f32" => format!("float p{index}"),
                // The compiler will complain about it.
                _ => kind.to_owned(),
            })
            .collect();
        let count = parameters.len();
        let copies: String = (0..count)
            .map(|index| format!(" memcpy(raw + {index}, &p{index}, sizeof p{index});"))
            .collect();
        let _ = writeln!(
            stubs,
            "extern \"C\" void {name}({}) {{ uint64_t raw[{}] = {{}};{copies} \
             emulate::ptx::enter({name:?}, raw, {count}); }}",
            parameters.join(", "),
            count.max(1),
        );
    }
    stubs
}

/// A number of [`FLAGS`] and of this machine's instructions: what is compiled for other machines
/// may not run here.
pub fn hash_of_flags() -> u64 {
    let mut hasher = DefaultHasher::new();
    (FLAGS, instructions_of_this_machine()).hash(&mut hasher);
    hasher.finish()
}

/// What the instruction sets of this machine's processor are called.
#[must_use]
pub fn instructions_of_this_machine() -> String {
    let all = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let is_flags = |line: &&str| line.starts_with("flags") || line.starts_with("Features");
    all.lines().find(is_flags).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_from_what_is_around_them() {
        let text = "// A comment.\n.version 9.0\n.shared .b8 all[4];\n.visible .entry one(\n\
            \t.param .u64 one_param_0,\n\t.param .f32 one_param_1\n)\n{\n\tret;\n}\n\
            .visible .entry two(\n)\n{\n\tret;\n}\n";
        let entries = entries_of("a.ptx", text);
        let all = ".version 9.0\n.shared .b8 all[4];\n";
        assert_eq!(
            entries[1],
            ("two".into(), format!("{all}//# a.ptx 11\n.visible .entry two(\n)\n{{\n\tret;\n}}\n"))
        );
        let stubs = stubs(Path::new("/x"), &entries.into_iter().collect());
        assert!(stubs.contains("void one(uint64_t p0, float p1) { uint64_t raw[2]"), "{stubs}");
        assert!(stubs.contains("void two() {"), "{stubs}");
    }
}
