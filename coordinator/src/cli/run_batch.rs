//! `tutti run-batch`: answers all requests of a file, many at a time, as a client of a running
//! cluster. A run that was interrupted goes on where it was.
//!
//! - [`input`]: the requests
//! - [`results`]: the file of answers
//! - [`send`]: one request, as often as it takes
mod input;
mod results;
mod send;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;

use self::input::Requests;
use self::results::Outcome;
use self::send::{Sender, Server};
use super::api::{self, Key, parse_key};
use super::http_client::{TrustArgs, base_url, make_agent};
use super::output::print_line;
use super::{CliError, logging};

/// How often to say how far it is.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Enough for a thread that sends and waits.
const STACK_BYTES: usize = 512 << 10;

/// Options of `tutti run-batch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunBatchArgs {
    /// Requests, one JSON object per line, as for OpenAI's Batch API: custom_id, method (POST), url
    /// (such as /v1/chat/completions) and body
    #[arg(short, long, value_name = "FILE")]
    input_file: PathBuf,
    /// Where the answers go, one JSON object per line, in the order in which they come: custom_id,
    /// response (status_code, request_id, body) or error
    #[arg(short, long, value_name = "FILE")]
    output_file: PathBuf,
    /// Go on with --output-file: requests that it has answers to are not sent again
    #[arg(long)]
    resume: bool,
    /// HTTP addresses of the coordinator or of front ends, comma separated, http:// (may be
    /// omitted) or https://: requests go to them in turn, and to the next where one fails
    #[arg(
        long,
        value_name = "URLS",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8000"
    )]
    server: Vec<String>,
    #[command(flatten)]
    trust: TrustArgs,
    /// The API key, if the server wants one. Others see command lines: TUTTI_API_KEY in the
    /// environment hides it
    #[arg(long, value_name = "KEY", value_parser = parse_key)]
    api_key: Option<Key>,
    /// Number of requests in progress at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Seconds that a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    request_timeout: u32,
    /// Seconds for which a request is sent again where no server is reached or one is busy or fails
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    retry_for: u32,
}

/// How far it is.
#[derive(Debug, Default)]
struct Progress {
    /// Answered with 2xx.
    answered: usize,
    /// Answered with an error that another try would give too.
    refused: usize,
    /// Without an answer, or with one that may pass.
    failed: usize,
    completion_tokens: u64,
    /// Why no more requests are sent, if so.
    stopped: Option<String>,
    /// Number of threads that still send.
    sending: usize,
}

impl Progress {
    fn count(&mut self, outcome: &Outcome, completion_tokens: u64) {
        self.completion_tokens += completion_tokens;
        match outcome {
            Outcome::Answered { status: 200..=299, .. } => self.answered += 1,
            Outcome::Answered { status, .. } if !results::may_pass(*status) => self.refused += 1,
            _ => self.failed += 1,
        }
    }

    fn line(&self, all: usize, began: Instant) -> String {
        let done = self.answered + self.refused + self.failed;
        let seconds = began.elapsed().as_secs_f64().max(1e-3);
        format!(
            "{done} of {all} requests: {} answered, {} refused, {} failed; {:.1} requests/s, {:.0} \
             tokens/s",
            self.answered,
            self.refused,
            self.failed,
            done as f64 / seconds,
            self.completion_tokens as f64 / seconds
        )
    }
}

pub(crate) fn run(args: &RunBatchArgs) -> Result<(), CliError> {
    let ids = Requests::check(&args.input_file)?;
    let sender = sender(args)?;
    let (file, answered) = results::open(&args.output_file, args.resume, &ids)?;
    let (all, earlier) = (ids.len(), answered.len());
    drop(ids);
    let requests = Mutex::new(Requests::open(&args.input_file, answered)?.enumerate());
    let threads = (args.concurrency as usize).min((all - earlier).max(1));
    let progress = Mutex::new(Progress { sending: threads, ..Progress::default() });
    let ended = Condvar::new();
    let began = Instant::now();
    // Answers are written as they come, and each at once: whatever ends this process loses none.
    let one_after_the_other = || {
        while lock(&progress).stopped.is_none() {
            let Some((number, request)) = lock(&requests).next() else { break };
            let written = request.and_then(|request| {
                let outcome = sender.send(number, &request);
                if let Outcome::Answered { status: 401, body, .. } = &outcome {
                    // Of no use for a single request, and the same for all.
                    return Err(format!("the server wants another --api-key: {body}"));
                }
                let tokens = outcome.completion_tokens();
                let line = outcome.line(&request.custom_id) + "\n";
                let mut progress = lock(&progress);
                progress.count(&outcome, tokens);
                (&file).write_all(line.as_bytes()).map_err(|error| {
                    format!("--output-file {}: {error}", args.output_file.display())
                })
            });
            if let Err(problem) = written {
                lock(&progress).stopped = Some(problem);
            }
        }
        lock(&progress).sending -= 1;
        ended.notify_all();
    };
    std::thread::scope(|scope| {
        for index in 0..threads {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            if let Err(error) = thread.spawn_scoped(scope, one_after_the_other) {
                let mut progress = lock(&progress);
                progress.sending -= threads - index;
                if index == 0 {
                    progress.stopped = Some(format!("cannot start a thread: {error}"));
                }
                break;
            }
        }
        let mut now = lock(&progress);
        while now.sending > 0 {
            let waited = ended.wait_timeout(now, REPORT_EVERY);
            let timeout;
            (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                logging::say("INFO", &now.line(all - earlier, began));
            }
        }
    });
    let progress = progress.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(problem) = progress.stopped {
        return Err(CliError::Failed(problem));
    }
    if earlier > 0 {
        print_line(&format!("{earlier} of {all} requests had been answered before"));
    }
    print_line(&progress.line(all - earlier, began));
    match progress.failed {
        0 => Ok(()),
        failed => Err(CliError::Failed(format!(
            "{failed} requests have no answer yet: --resume sends them again"
        ))),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sender(args: &RunBatchArgs) -> Result<Sender, CliError> {
    let deadline = Duration::from_secs(args.request_timeout.into());
    let servers = args.server.iter().map(|server| {
        let url = base_url(server);
        let agent = make_agent(&url, deadline, &args.trust, args.concurrency as usize)?;
        Ok(Server { url, agent })
    });
    let servers = servers.collect::<Result<Vec<Server>, CliError>>()?;
    let hidden = || std::env::var(api::VARIABLE).ok().filter(|key| !key.is_empty());
    let key = args.api_key.clone().or_else(|| hidden().and_then(|key| parse_key(&key).ok()));
    Ok(Sender {
        servers,
        authorization: key.map(|key| key.bearer()),
        patience: Duration::from_secs(args.retry_for.into()),
    })
}
