//! Programs of others: NVIDIA's compute-sanitizer, which looks at every access of this project's
//! kernels, and torch, whose figures on the same GPU are to compare with. Where a machine does not
//! have one, that is no failure.
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::kernels_speed::matrices;
use crate::shapes::{SHAPES, Shape, TINY};
use crate::{Options, ROW, Step, Table, UNCHECKED};

/// What compute-sanitizer can look for.
const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];
/// Its exit code when it has found something.
const FOUND: i32 = 86;
/// How its last line begins, which also says how many errors there are, and how that continues if
/// there are none. racecheck has a line of its own, in which hazards that are only warnings count.
const SUMMARIES: [(&str, &str); 2] =
    [("RACECHECK SUMMARY: ", "0 hazards "), ("ERROR SUMMARY: ", "0 errors")];
/// Nothing smaller is read from memory each time.
const COLD_BYTES: usize = 1 << 30;

/// compute-sanitizer comes with the toolkit, and in a Python package (nvidia-cuda-sanitizer-api).
fn sanitizer(options: &Options) -> Option<PathBuf> {
    if let Some(file) = &options.sanitizer {
        return Some(file.clone());
    }
    let name = "compute-sanitizer";
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let homes = homes.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(homes.map(|home| home.join("bin")));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Every operation in small sizes, with each tool.
pub(crate) fn sanitizer_steps(options: &Options, ordinal: u32) -> Vec<Step<'_>> {
    let step = |tool: &'static str| {
        Step::new(tool, move |table| {
            let name = format!("operations in small sizes, {tool}");
            table.add(
                name,
                match sanitizer(options) {
                    Some(program) => sanitized(&program, tool, options, ordinal),
                    None => Ok(format!("{UNCHECKED}: no compute-sanitizer")),
                },
            );
        })
    };
    TOOLS.into_iter().map(step).collect()
}

fn sanitized(
    program: &Path,
    tool: &str,
    options: &Options,
    ordinal: u32,
) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--print-limit", "3"])
        // Of calls that fail, the program itself says so; some do as a matter of course, such as
        // when modules are asked in turn for a kernel.
        .args(["--report-api-errors", "no"])
        // NVIDIA's own kernels are theirs to check.
        .args(["--kernel-regex", "kns=tutti_"])
        .arg(own)
        .args(options.common())
        .args(["--part", "operations", "--gpu", &ordinal.to_string(), "--quick", "--keep-going"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    judged(&output)
}

/// What the tool has found, in one line.
fn judged(output: &Output) -> Result<String, String> {
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let lines = || said.iter().flat_map(|text| text.lines());
    let count =
        |state: &str| lines().filter(|line| line.starts_with(&[ROW, state].concat())).count();
    let (well, failed) = (count("ok"), count("FAILED"));
    let of = |line: &str| {
        let found = |(begins, clean)| Some((line.split_once(begins)?.1.to_owned(), clean));
        SUMMARIES.into_iter().find_map(found)
    };
    let Some((summary, clean)) = lines().find_map(of) else {
        let last = lines().rfind(|line| !line.is_empty()).unwrap_or("it says nothing");
        return Err(format!("no summary, {}: {last}", output.status));
    };
    if output.status.success() && summary.starts_with(clean) && failed == 0 && well > 0 {
        return Ok(format!("{well} lines, {summary}"));
    }
    // The first thing that it says of any kernel.
    let first = lines().find(|line| line.starts_with("========= ") && !line.contains("COMPUTE-S"));
    let first = first.map_or("", |line| line.trim_start_matches("========= "));
    Err(format!("{summary}, {failed} lines failed, {}: {first}", output.status))
}

/// What torch is asked to measure for a shape.
fn asked(shape: &Shape, quick: bool) -> serde_json::Value {
    let rows: &[u32] = match (quick, shape.name == SHAPES[0].name) {
        (true, _) => &[1, 3],
        (false, true) => &[1, 8, 64, 256, 4096],
        (false, false) => &[],
    };
    let matrices: Vec<_> =
        matrices(shape).into_iter().map(|(what, n, k)| json!([what, n, k])).collect();
    json!({
        "name": shape.name, "hidden": shape.hidden, "inner": shape.inner, "layers": shape.layers,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab": shape.vocab, "tied": shape.tied, "rows": rows, "matrices": matrices,
        "batches": if quick { &[1, 3][..] } else { &[1, 8, 64, 256] },
        "context": if quick { 20 } else { 512 }, "steps": if quick { 3 } else { 32 },
        "cold_bytes": if quick { 1 } else { COLD_BYTES },
    })
}

/// Decode and products of the dense shapes by torch.
pub(crate) fn torch_steps(options: &Options, ordinal: u32) -> Vec<Step<'_>> {
    let all: &'static [Shape] = if options.quick { &TINY[..1] } else { &SHAPES[..2] };
    let step = |shape: &'static Shape| {
        Step::new(shape.name, move |table| torch(options, ordinal, shape, table))
    };
    all.iter().map(step).collect()
}

fn torch(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    let Some(python) = &options.python else {
        return table.add("torch", Ok(format!("{UNCHECKED}: no Python with torch")));
    };
    let wanted = json!({"needs_gpu": !options.quick, "shapes": [asked(shape, options.quick)]});
    let output = Command::new(python)
        .args(["-c", include_str!("torch_baseline.py"), &wanted.to_string()])
        // The driver numbers GPUs for it as it does here; torch sees this one only.
        .env("CUDA_VISIBLE_DEVICES", visible(ordinal))
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            return table.add("torch", Err(format!("{}: {error}", python.display())));
        }
    };
    let mut rows = 0;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let mut fields = line.strip_prefix(ROW).into_iter().flat_map(|row| row.splitn(3, '\t'));
        let (Some(state), Some(name), Some(words)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        rows += 1;
        let words = words.to_owned();
        table.add(name, if state == "ok" { Ok(words) } else { Err(words) });
    }
    if !output.status.success() || rows == 0 {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = said.lines().rfind(|line| !line.is_empty()).unwrap_or("it says nothing");
        table.add(format!("torch, {}", shape.name), Err(format!("{}: {last}", output.status)));
    }
}

/// The one visible GPU, among those that this process may use.
fn visible(ordinal: u32) -> String {
    let all = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let named = all.split(',').map(str::trim).filter(|name| !name.is_empty());
    named.map(str::to_owned).nth(ordinal as usize).unwrap_or_else(|| ordinal.to_string())
}
