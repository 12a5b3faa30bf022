//! Runs each part as a separate process with a time limit, and prints the table. After a step that
//! fails, hangs or crashes, the part continues with the next step in a new process.
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::{AGAIN, Options, PARTS, ROW, STEP, UNCHECKED, head};

/// Default time limit of everything on a GPU, the search for one included: below the ten minutes
/// that many machines give a command, so that the last line is always printed.
const ALL: Duration = Duration::from_secs(540);
/// Time limit of one step, on a GPU; longer in `speed`, which creates a random model of 16 GB, as
/// torch does, and where compute-sanitizer looks at every access.
const EACH: Duration = Duration::from_secs(60);
const EACH_OF_LONG: Duration = Duration::from_secs(150);
const LONG: [&str; 3] = ["speed", "torch", "sanitizer"];
/// Time limit of looking for a GPU, and of the first step of each part. On a machine that has just
/// booted, the driver starts then, and about a gigabyte (this program, its kernels, NVIDIA's
/// libraries) is read from disk.
const COLD: Duration = Duration::from_secs(180);
/// Time limit of one step on the stand-in, which is slow.
const EACH_SLOWLY: Duration = Duration::from_secs(600);
/// Most new processes of a part. After that it continues in the same process, whatever fails.
const RESTARTS: usize = 12;

/// Prints and counts the lines.
struct Report {
    file: Option<File>,
    rows: usize,
    faults: usize,
    /// Lines about what this machine cannot do, which are no faults.
    unchecked: usize,
    /// Number of parts that did not run completely for lack of time.
    not_run: usize,
}

impl Report {
    /// # Errors
    /// The file cannot be written to.
    fn new(file: Option<&Path>) -> Result<Self, String> {
        let open = |path: &Path| {
            let opened = File::options().create(true).append(true).open(path);
            opened.map_err(|error| format!("--report {}: {error}", path.display()))
        };
        let file = file.map(open).transpose()?;
        Ok(Self { file, rows: 0, faults: 0, unchecked: 0, not_run: 0 })
    }

    fn line(&mut self, line: &str) {
        // Standard output may be closed by now; the file still gets the line.
        let _ = writeln!(std::io::stdout(), "{line}");
        if let Some(file) = &mut self.file {
            let _ = writeln!(file, "{line}");
            let _ = file.flush();
        }
    }

    fn row(&mut self, state: &str, what: &str, words: &str) {
        self.rows += 1;
        self.faults += usize::from(state != "ok");
        self.unchecked += usize::from(state == "ok" && words.starts_with(UNCHECKED));
        self.line(&format!("{what:<48} {state:<7} {words}"));
    }

    /// Reports a part, or the rest of one, that was not run.
    fn not_run(&mut self, part: &str, words: &str) {
        self.not_run += 1;
        self.line(&format!("{part:<48} NOT RUN {words}: the time is up; say --only {part}"));
    }
}

/// A part's process.
struct Part {
    process: Child,
    lines: Receiver<String>,
}

/// How a part's process ended.
#[derive(Debug)]
enum End {
    Exit(ExitStatus),
    /// Not finished in time: how long a step has taken, and its limit.
    Late {
        waited: Duration,
        allowed: Duration,
    },
}

impl Part {
    fn start(options: &Options, part: &str, extra: &[String]) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(options.common()).args(["--part", part]).args(extra);
        if let Some(ordinal) = options.ordinal {
            command.args(["--gpu", &ordinal.to_string()]);
        }
        // A separate process group, so that its children end with it.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let mut process = command.spawn()?;
        let (sender, lines) = channel();
        let out = process.stdout.take();
        std::thread::spawn(move || {
            for line in out.into_iter().flat_map(|out| BufReader::new(out).split(b'\n')) {
                let Ok(line) = line else { return };
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, lines })
    }

    /// Passes each line to `on_line` until there are no more. The first step, including startup,
    /// may take `first`, others `each`; all together may last until `deadline`.
    fn follow(
        &mut self,
        (first, each): (Duration, Duration),
        deadline: Instant,
        mut on_line: impl FnMut(&str),
    ) -> std::io::Result<End> {
        let mut began = Instant::now();
        let mut steps = 0;
        loop {
            let now = Instant::now();
            let allowed = if steps > 1 { each } else { first };
            let until = (began + allowed).min(deadline);
            match self.lines.recv_timeout(until.saturating_duration_since(now)) {
                Ok(line) => {
                    if line.starts_with(STEP) {
                        began = Instant::now();
                        steps += 1;
                    }
                    on_line(&line);
                }
                Err(RecvTimeoutError::Disconnected) => return self.process.wait().map(End::Exit),
                Err(RecvTimeoutError::Timeout) => {
                    return Ok(End::Late { waited: began.elapsed(), allowed });
                }
            }
        }
    }

    /// Returns what each thread waits in, to find out why the process hangs.
    fn threads(&self) -> String {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id()));
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let words = |task: &Path| {
            let (name, waits) = (read(task.join("comm")), read(task.join("wchan")));
            let stat = read(task.join("stat"));
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            format!("{} {} {}", name.trim(), state.unwrap_or('?'), waits.trim())
        };
        let all = tasks.into_iter().flatten().flatten().map(|task| words(&task.path()));
        all.collect::<Vec<_>>().join(", ")
    }

    /// Kills the process and its children; the error says that it cannot be killed.
    fn kill(&mut self) -> Result<(), String> {
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        // In case there is no `kill` program.
        let _ = self.process.kill();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(15) {
            if matches!(self.process.try_wait(), Ok(Some(_)) | Err(_)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("; its process cannot be ended: the driver holds it".to_owned())
    }
}

/// Runs one part to completion, restarting its process as needed.
fn run_part(options: &Options, part: &str, deadline: Instant, report: &mut Report) {
    let usual = match (options.quick, part) {
        (true, _) => EACH_SLOWLY,
        (false, part) if LONG.contains(&part) => EACH_OF_LONG,
        (false, _) => EACH,
    };
    let each = options.step_limit.map_or(usual, Duration::from_secs);
    let cold = options.step_limit.map_or(usual.max(COLD), Duration::from_secs);
    let mut skip = 0;
    for restarts in 0.. {
        let mut extra = vec!["--skip".to_owned(), skip.to_string()];
        if restarts >= RESTARTS {
            extra.push("--keep-going".to_owned());
        }
        let mut process = match Part::start(options, part, &extra) {
            Ok(process) => process,
            Err(error) => return report.row("FAILED", part, &format!("does not start: {error}")),
        };
        let (mut step, mut faults) = (format!("{part}: beginning"), 0);
        let begun_at = skip;
        let first = if restarts == 0 { cold } else { each };
        let ended = process.follow((first, each), deadline, |line| {
            if let Some(name) = line.strip_prefix(STEP) {
                step = format!("{part}: {name}");
                skip += 1;
            } else if let Some(row) = line.strip_prefix(ROW) {
                let mut fields = row.splitn(3, '\t');
                let mut field = || fields.next().unwrap_or_default().to_owned();
                let (state, what, words) = (field(), field(), field());
                faults += usize::from(state != "ok");
                report.row(&state, &what, &words);
            } else {
                report.line(&format!("  | {line}"));
            }
        });
        match ended {
            Ok(End::Exit(status)) if status.success() => return,
            Ok(End::Exit(status)) if status.code() == Some(1) && faults > 0 => return,
            Ok(End::Exit(status)) if status.code() == Some(i32::from(AGAIN)) => {}
            Ok(End::Exit(status)) => {
                report.row("FAILED", &step, &format!("its process ended: {status}"));
            }
            // At the deadline no further step may begin, and a step that used up its own time has
            // failed.
            Ok(End::Late { waited, allowed }) if waited < allowed && Instant::now() >= deadline => {
                let words = process.kill().err().unwrap_or_default();
                return report.not_run(part, &format!("{step} and the rest{words}"));
            }
            Ok(End::Late { waited, .. }) => {
                let threads = process.threads();
                let killed = process.kill().err().unwrap_or_default();
                let words = format!("not finished after {waited:.1?}{killed}; threads: {threads}");
                report.row("FAILED", &step, &words);
            }
            Err(error) => report.row("FAILED", &step, &error.to_string()),
        }
        if Instant::now() >= deadline {
            return report.not_run(part, "the rest");
        }
        if skip == begun_at {
            // Not even its first step began: another attempt would end the same way.
            return;
        }
    }
}

/// Prints the table's head. Returns the GPU that is used; otherwise why there is none, unless that
/// has been printed.
fn print_head(options: &Options, report: &mut Report) -> Result<u32, String> {
    let words = |error: std::io::Error| error.to_string();
    let mut process = Part::start(options, "head", &[]).map_err(words)?;
    let mut ordinal = None;
    let ended = process.follow((COLD, COLD), Instant::now() + COLD, |line| {
        match line.strip_prefix(head::GPU) {
            Some(found) => ordinal = found.parse().ok(),
            None => report.line(line),
        }
    });
    match (ended.map_err(words)?, ordinal) {
        (End::Exit(_), Some(ordinal)) => Ok(ordinal),
        (End::Exit(status), None) if status.code() == Some(2) => Err(String::new()),
        (End::Exit(status), None) => Err(format!("no GPU: looking for one ended: {status}")),
        (End::Late { waited, .. }, _) => {
            let threads = process.threads();
            let killed = process.kill().err().unwrap_or_default();
            Err(format!("no GPU: the driver does not answer in {waited:.1?}{killed}: {threads}"))
        }
    }
}

/// Runs all parts; the time limit counts from `began` on, which is before the search for a GPU.
fn run_all(options: &Options, began: Instant, report: &mut Report) -> ExitCode {
    let usual = if options.quick { 6 * EACH_SLOWLY } else { ALL };
    let deadline = began + options.time_limit.map_or(usual, Duration::from_secs);
    for part in PARTS.into_iter().filter(|part| options.wants(part)) {
        let (rows, begun) = (report.rows, Instant::now());
        if begun >= deadline {
            report.not_run(part, "all of it");
            continue;
        }
        run_part(options, part, deadline, report);
        let (rows, took) = (report.rows - rows, begun.elapsed().as_secs_f64());
        report.line(&format!("-- {part}: {rows} lines in {took:.1} s"));
    }
    let (rows, faults, took) = (report.rows, report.faults, began.elapsed().as_secs_f64());
    let verdict = match (faults, report.not_run) {
        (0, 0) if rows > 0 => "PASS",
        (0, 1..) => "INCOMPLETE",
        _ => "FAIL",
    };
    let not_run = match report.not_run {
        0 => String::new(),
        parts => format!(", {parts} parts not run to their end"),
    };
    let unchecked = match report.unchecked {
        0 => String::new(),
        lines => format!(", {lines} {UNCHECKED}"),
    };
    let counts = format!("{rows} lines, {faults} failed{unchecked}{not_run}");
    report.line(&format!("{verdict}: {counts}, {took:.0} s"));
    if verdict == "PASS" { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the whole check on a GPU, or the self-check on the stand-in.
pub(crate) fn run(mut options: Options) -> ExitCode {
    let began = Instant::now();
    if !PARTS.into_iter().any(|part| options.wants(part)) {
        println!("no such part; there are {}", PARTS.join(", "));
        // Otherwise it is `cargo test` with the name of another test.
        return if options.require_gpu { ExitCode::from(2) } else { ExitCode::SUCCESS };
    }
    let mut report = match Report::new(options.report.as_deref()) {
        Ok(report) => report,
        Err(message) => {
            println!("{message}");
            return ExitCode::from(2);
        }
    };
    match print_head(&options, &mut report) {
        Ok(ordinal) => {
            options.ordinal = Some(ordinal);
            run_all(&options, began, &mut report)
        }
        Err(reason) => {
            if !reason.is_empty() {
                report.line(&reason);
            }
            if options.require_gpu {
                return ExitCode::from(2);
            }
            check_itself(options, &mut report)
        }
    }
}

/// On a host without a GPU, checks that every part works, as far as the stand-in can show, and that
/// steps that fail, break the context or hang are reported and affect no others.
fn check_itself(mut options: Options, report: &mut Report) -> ExitCode {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let fakes = testkit::fake_cuda::fake_cuda_of(folder, 4).and_then(|fake| {
        let nccl = testkit::fake_cuda::fake_nccl(folder, &fake, None)?;
        Ok((fake, nccl))
    });
    let (fake, nccl) = match fakes {
        Ok(fakes) => fakes,
        Err(error) => {
            report.line(&format!("the stand-in for the driver does not compile: {error}"));
            return ExitCode::FAILURE;
        }
    };
    report.line("checking the check itself, on a stand-in for the driver");
    options.folders = vec![fake.libraries];
    options.kernels = Some(fake.kernels);
    options.nccl_lib = Some(nccl);
    options.quick = true;
    options.ordinal = Some(0);
    if !options.only.is_empty() {
        return run_all(&options, Instant::now(), report);
    }
    // Other tests show that models are computed correctly on the stand-in.
    let mut all_well = ExitCode::SUCCESS;
    for part in ["operations", "ranks"] {
        options.only = vec![part.to_owned()];
        if run_all(&options, Instant::now(), report) != ExitCode::SUCCESS {
            all_well = ExitCode::FAILURE;
        }
    }
    if let Err(fault) = crate::selfcheck::faults_are_told(&options) {
        report.line(&fault);
        all_well = ExitCode::FAILURE;
    }
    all_well
}
