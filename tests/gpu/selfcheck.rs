//! Checks the check: a step that fails, crashes or hangs is reported, and affects no other.
use std::process::Command;

use crate::{AGAIN, Options, ROW, STEP};

/// Result or effect of a call of the stand-in, and words that the one failed line must contain.
const FAULTS: [(&str, &str); 3] =
    [("700", "CUDA_ERROR_ILLEGAL_ADDRESS"), ("-2", "signal: 6"), ("-1", "not finished")];
/// Plenty for a step in small sizes.
const LIMIT: &str = "20";

/// # Errors
/// What was not reported correctly, in one line.
pub(crate) fn faults_are_told(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let mut counts = Vec::new();
    for (code, told) in FAULTS {
        let folder = tempfile::tempdir().map_err(words)?;
        let report = folder.path().join("report.txt");
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--require-gpu", "--only", "operations", "--gpu", "0", "--step-limit", LIMIT])
            .arg("--report")
            .arg(&report)
            .env("FAKE_CUDA_FAIL", format!("cuLaunchKernel:7={code}"))
            .env("FAKE_CUDA_ONCE", folder.path().join("done"))
            .output()
            .map_err(words)?;
        let table = String::from_utf8_lossy(&output.stdout);
        let failed: Vec<&str> = table.lines().filter(|line| line.contains(" FAILED ")).collect();
        if output.status.code() != Some(1) || !table.contains("FAIL: ") {
            return Err(format!("a fault {code} ends with {}:\n{table}", output.status));
        }
        if failed.len() != 1 || !failed[0].contains(told) {
            return Err(format!("a fault {code} is not told, or costs other steps:\n{table}"));
        }
        let file = std::fs::read_to_string(&report).map_err(words)?;
        if file != table {
            return Err(format!("the file is not the table:\n{file}\n{table}"));
        }
        counts.push(table.lines().filter(|line| line.contains(" ok ")).count());
    }
    time_that_is_up_is_no_failure(options)?;
    memory_that_is_not_shared_is_no_failure(options)?;
    a_kernel_that_does_not_wait_is_told(options)?;
    a_context_is_left_where_it_is_broken(options)?;
    what_a_sanitizer_finds_is_told(options)?;
    what_is_not_installed_is_no_failure(options)?;
    // All steps except the failing one.
    if counts.iter().any(|count| *count != counts[0] || *count < 10) {
        return Err(format!("lines that are well, by fault: {counts:?}"));
    }
    Ok(())
}

/// With `--keep-going` a part continues after a fault, unless the context is broken. It runs only
/// the requested steps.
fn a_context_is_left_where_it_is_broken(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    for (code, exit, steps) in [("1", 1, 4), ("700", i32::from(AGAIN), 1)] {
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--part", "operations", "--gpu", "0", "--keep-going", "--step", "add_rmsnorm"])
            .env("FAKE_CUDA_FAIL", format!("cuLaunchKernel:1={code}"))
            .output()
            .map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout);
        let begun = said.lines().filter(|line| line.starts_with(STEP)).count();
        if output.status.code() != Some(exit) || begun != steps {
            return Err(format!("fault {code}: {begun} steps, {}:\n{said}", output.status));
        }
    }
    Ok(())
}

/// A kernel that begins early and reads its inputs before they are there fails, and passes where
/// kernels do not begin early.
fn a_kernel_that_does_not_wait_is_told(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    for (overlap, exit, told) in
        [("--quick", 1, "with inputs that arrive late: "), ("--no-overlap", 0, "@row ok")]
    {
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--part", "operations", "--gpu", "0", "--step", "3 x 64 with delta", overlap])
            .env("FAKE_CUDA_HASTY", "1")
            .output()
            .map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout);
        if output.status.code() != Some(exit) || !said.contains(told) {
            return Err(format!("{overlap}: {}:\n{said}", output.status));
        }
    }
    Ok(())
}

/// A script in place of compute-sanitizer runs the program behind its options and says what it has
/// found.
fn what_a_sanitizer_finds_is_told(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let folder = tempfile::tempdir().map_err(words)?;
    let script = folder.path().join("compute-sanitizer");
    // What the tools say last.
    let cases = [
        ("memcheck", "ERROR SUMMARY: 0 errors", 0, "4 lines, 0 errors"),
        ("memcheck", "ERROR SUMMARY: 2 errors", 86, "2 errors"),
        (
            "racecheck",
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
            "4 lines, 0 hazards displayed",
        ),
        (
            "racecheck",
            "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)",
            0,
            "1 hazard displayed",
        ),
    ];
    for (tool, found, exit, told) in cases {
        let text = format!(
            "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift 2; done\n\"$@\" || exit\n\
             echo '========= Invalid __global__ read of size 4 bytes'\n\
             echo '========= {found}'\nexit {exit}\n"
        );
        std::fs::write(&script, text).map_err(words)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).map_err(words)?;
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--part", "sanitizer", "--gpu", "0", "--step", "add_rmsnorm", "--step", tool])
            .arg("--sanitizer")
            .arg(&script)
            .output()
            .map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout);
        let rows: Vec<&str> = said.lines().filter(|line| line.starts_with(ROW)).collect();
        let is_well = output.status.success();
        if rows.len() != 1 || !rows[0].contains(told) || is_well != told.starts_with("4 lines") {
            return Err(format!("{found}: {}:\n{said}", output.status));
        }
        if !is_well && !rows[0].contains("Invalid __global__ read") {
            return Err(format!("what was found is not told:\n{said}"));
        }
    }
    Ok(())
}

/// Machines without torch, or whose Python has none.
fn what_is_not_installed_is_no_failure(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    for (python, is_well) in [(None, true), (Some("/bin/false"), false)] {
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--part", "torch", "--gpu", "0"])
            .args(python.into_iter().flat_map(|python| ["--python", python]))
            .output()
            .map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout);
        let rows = said.lines().filter(|line| line.starts_with(ROW)).count();
        if output.status.success() != is_well || rows != 1 {
            return Err(format!("Python {python:?}: {}:\n{said}", output.status));
        }
    }
    Ok(())
}

/// Where processes cannot share a GPU's memory, what ranks do instead is checked; ranks that fail
/// then, too, have failed.
fn memory_that_is_not_shared_is_no_failure(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let calls = [
        ("cuIpcOpenMemHandle_v2:1=801", Some(3)),
        ("cuIpcGetMemHandle:1=801", Some(3)),
        // Not of sharing memory.
        ("cuMemcpyDtoHAsync_v2:1=719", None),
    ];
    for (fault, unchecked) in calls {
        let output = Command::new(std::env::current_exe().map_err(words)?)
            .args(options.common())
            .args(["--require-gpu", "--only", "ranks-peers", "--gpu", "0"])
            .args(["--step", "two processes on one GPU", "--step", "-KILL"])
            .env("FAKE_CUDA_FAIL", fault)
            .output()
            .map_err(words)?;
        let table = String::from_utf8_lossy(&output.stdout);
        let told = table.lines().filter(|line| line.contains(" ok      not available here: "));
        let told: Vec<&str> = told.collect();
        let is_well = output.status.success() && table.contains("PASS: ");
        let instead = told.iter().any(|line| line.contains("without that: "));
        if is_well != unchecked.is_some()
            || unchecked.is_some_and(|lines| lines != told.len())
            || unchecked.is_some() != instead
        {
            return Err(format!("{fault} ends with {}:\n{table}", output.status));
        }
    }
    Ok(())
}

/// In every part, steps that there was no time for are reported differently from failures.
fn time_that_is_up_is_no_failure(options: &Options) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let output = Command::new(std::env::current_exe().map_err(words)?)
        .args(options.common())
        .args(["--require-gpu", "--only", "operations,goldens", "--gpu", "0", "--time-limit", "1"])
        .output()
        .map_err(words)?;
    let table = String::from_utf8_lossy(&output.stdout);
    let not_run = table.lines().filter(|line| line.contains(" NOT RUN ")).count();
    let is_told = not_run == 2 && table.contains("INCOMPLETE: ") && !table.contains(" FAILED ");
    if output.status.code() != Some(1) || !is_told {
        return Err(format!("time that is up ends with {}:\n{table}", output.status));
    }
    Ok(())
}
