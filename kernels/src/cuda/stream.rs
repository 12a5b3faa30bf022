//! A queue of work on the GPU, events in it, and graphs: work recorded once and run many times.
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::calls::driver as sys;
use super::context::{Context, check};
use crate::error::KernelError;

/// How long to spin on a step before the thread sleeps between polls: a decode step takes a few
/// milliseconds, and waking a sleeping thread tens of microseconds.
const SPIN: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);

/// Pauses between two polls of something that has been waited for this long.
pub(super) fn pause(waited: Duration) {
    if waited > SPIN {
        std::thread::sleep(NAP);
    } else {
        std::hint::spin_loop();
    }
}

/// Waits for work on the GPU for at most `patience`; if other ranks take part in it, for at most
/// their time limit.
fn wait(
    context: &Context,
    patience: Duration,
    what: &str,
    is_done: impl Fn() -> Result<bool, KernelError>,
) -> Result<(), KernelError> {
    let began = Instant::now();
    loop {
        // Before the poll: this process may be stopped at any time, and work that is done then
        // still counts.
        let waited = began.elapsed();
        if is_done()? {
            context.group.poll()?;
            if context.group.is_silent() {
                context.note_work(waited);
            }
            return Ok(());
        }
        if waited >= patience {
            let message = format!("the GPU did not finish {what} in {patience:?}: it hangs");
            return Err(context.hangs(message));
        }
        context.check_group(waited)?;
        pause(waited);
    }
}

/// Why a call of this rank could not be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CaptureFault {
    /// The GPU's memory was short, which another time it may not be.
    Memory,
    /// Anything else: the call will not be recorded the next time either.
    Refused,
}

/// A stream. Work on it runs in the order of the calls.
pub struct Stream {
    raw: sys::CUstream,
    /// Time limit for all of its work.
    patience: Cell<Duration>,
    /// Calls are recorded.
    captures: Cell<bool>,
    /// Why a call of this rank could not be recorded, in the current or the last capture.
    fault: Cell<Option<CaptureFault>>,
    context: Rc<Context>,
}

impl Stream {
    /// Creates a stream that does not wait for the default stream. Waits for its work last at most
    /// `patience`.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn new(context: &Rc<Context>, patience: Duration) -> Result<Self, KernelError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; destroyed when `Self` is dropped.
        check(unsafe { sys::cuStreamCreate(&raw mut raw, flags) }, "make a stream")?;
        let (captures, fault) = (Cell::new(false), Cell::new(None));
        let patience = Cell::new(patience);
        Ok(Self { raw, patience, captures, fault, context: context.clone() })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Whether calls are recorded.
    pub(super) fn captures(&self) -> bool {
        self.captures.get()
    }

    /// Time limit for all of its work.
    pub(super) fn patience(&self) -> Duration {
        self.patience.get()
    }

    /// Changes that limit.
    pub(super) fn set_patience(&self, patience: Duration) {
        self.patience.set(patience);
    }

    /// Waits for all work; if other ranks take part in it, for at most their time limit.
    ///
    /// # Errors
    /// [`KernelError::Device`] if any of it failed or it takes too long,
    /// [`KernelError::Collective`] if the ranks' exchange was aborted or failed, or takes too long.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        wait(&self.context, self.patience(), "its work", || self.is_idle())
    }

    /// Whether all work is done.
    ///
    /// # Errors
    /// [`KernelError::Device`] if any of it failed.
    pub fn is_idle(&self) -> Result<bool, KernelError> {
        // SAFETY: the stream is alive.
        let status = unsafe { sys::cuStreamQuery(self.raw) };
        if status == sys::NOT_READY {
            return Ok(false);
        }
        check(status, "wait for the GPU").map(|()| true)
    }

    /// Records calls from now on instead of running them. Other threads can continue to call the
    /// driver.
    ///
    /// # Errors
    /// [`KernelError::Again`]: nothing is recorded, and the stream is well;
    /// [`KernelError::Device`].
    pub fn begin_capture(&self) -> Result<(), KernelError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.fault.set(None);
        // SAFETY: the stream is alive, and not the default one.
        let status = unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) };
        check(status, "begin to capture a graph").map_err(|error| match error {
            // What is to be recorded needs no graph.
            KernelError::OutOfMemory { .. } => self.unrecorded(error),
            error => error,
        })?;
        self.captures.set(true);
        Ok(())
    }

    /// Interprets the failure of a call. If the call was only to be recorded, nothing has run, and
    /// nothing but the graph is broken; if the context is, repeating the call will show it.
    pub(super) fn failed(&self, error: KernelError) -> KernelError {
        match error {
            KernelError::Again(_)
            | KernelError::Device(_)
            | KernelError::Unsupported(_)
            | KernelError::OutOfMemory { .. }
                if self.captures.get() =>
            {
                self.unrecorded(error)
            }
            error => error,
        }
    }

    /// Notes why a call of this rank was not recorded.
    fn unrecorded(&self, error: KernelError) -> KernelError {
        let (fault, line) = match error {
            // The driver's errors for a call that cannot be recorded.
            KernelError::Again(line) => (CaptureFault::Refused, line),
            KernelError::OutOfMemory { what, .. } => {
                (CaptureFault::Memory, format!("{what}: the GPU's memory is short"))
            }
            error => (CaptureFault::Refused, error.to_string()),
        };
        self.note_fault(fault);
        KernelError::Again(line)
    }

    /// Of several faults the first counts: after it, the driver refuses all that follows.
    fn note_fault(&self, fault: CaptureFault) {
        self.fault.set(self.fault.get().or(Some(fault)));
    }

    /// Notes that a library could not record a call of this rank.
    pub(super) fn note_refusal(&self) {
        if self.captures.get() {
            self.note_fault(CaptureFault::Refused);
        }
    }

    /// Why the last capture failed, if it was because of a call of this rank and not because other
    /// ranks ended it; returned once.
    pub(super) fn take_capture_fault(&self) -> Option<CaptureFault> {
        self.fault.take()
    }

    /// Ends recording, and returns a graph that can be run.
    ///
    /// # Errors
    /// [`KernelError::Again`]: recording has ended, and nothing of it has run.
    pub fn end_capture(&self) -> Result<Graph, KernelError> {
        let made = self.make_graph().map_err(|error| self.failed(error));
        self.captures.set(false);
        made
    }

    fn make_graph(&self) -> Result<Graph, KernelError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive; the graph is destroyed below.
        let status = unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) };
        check(status, "capture a graph")?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just captured.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
        // SAFETY: as above; the instance does not need the graph.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check(status, "make a graph runnable")?;
        let made = Graph { raw: exec, context: self.context.clone() };
        // Otherwise its memory is allocated when it is first run: a step that cannot be run for
        // lack of it would cost the device, and a graph that cannot be made costs only the graph.
        // SAFETY: both are alive, and the stream no longer captures.
        let status = unsafe { sys::cuGraphUpload(exec, self.raw) };
        check(status, "make room for a graph on the GPU")?;
        Ok(made)
    }

    /// Ends recording and discards the recorded calls, if any.
    pub fn abandon_capture(&self) {
        self.captures.set(false);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive.
        let status = unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) };
        if status == 0 && !graph.is_null() {
            // SAFETY: the graph was just captured.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: created in `new`; work in flight goes on, and what it uses is freed by calls that
        // wait for it.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// A recorded step.
pub struct Graph {
    raw: sys::CUgraphExec,
    context: Rc<Context>,
}

impl Graph {
    /// Runs the graph, in stream order.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn launch(&self, stream: &Stream) -> Result<(), KernelError> {
        // SAFETY: both are alive, and so is the memory that the graph refers to: its cache drops
        // graphs before buffers.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) }, "run a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: created in `end_capture`.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

/// An event in a stream.
pub struct Event {
    raw: sys::CUevent,
    context: Rc<Context>,
}

impl Event {
    /// Creates an event; `timed` ones can be subtracted and cost slightly more.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn new(context: &Rc<Context>, timed: bool) -> Result<Self, KernelError> {
        let mut raw = std::ptr::null_mut();
        let flags = match timed {
            true => sys::CUevent_flags_enum::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING,
        } as u32;
        // SAFETY: a context is current; destroyed when `Self` is dropped.
        check(unsafe { sys::cuEventCreate(&raw mut raw, flags) }, "make an event")?;
        Ok(Self { raw, context: context.clone() })
    }

    /// Marks the work queued so far.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn record(&self, stream: &Stream) -> Result<(), KernelError> {
        // SAFETY: both are alive.
        check(unsafe { sys::cuEventRecord(self.raw, stream.raw()) }, "mark the stream")
    }

    /// Whether the marked work is done.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it failed.
    pub fn is_done(&self) -> Result<bool, KernelError> {
        // SAFETY: the event is alive.
        let status = unsafe { sys::cuEventQuery(self.raw) };
        if status == sys::NOT_READY {
            return Ok(false);
        }
        check(status, "wait for the GPU").map(|()| true)
    }

    /// Waits for the marked work, at most `patience`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it failed or takes longer; [`KernelError::Collective`] as
    /// [`Stream::synchronize`].
    pub fn wait(&self, patience: Duration) -> Result<(), KernelError> {
        wait(&self.context, patience, "a step", || self.is_done())
    }

    /// Waits for the marked work before what it uses is freed, whatever becomes of an exchange with
    /// other ranks. If it takes longer than `patience` or fails, nothing is freed any more.
    pub(super) fn settle(&self, patience: Duration) {
        let began = Instant::now();
        loop {
            let waited = began.elapsed();
            match self.is_done() {
                Ok(true) => return,
                Ok(false) if waited < patience => pause(waited),
                _ => {
                    let _ = self.context.hangs("the GPU does not finish its work".to_owned());
                    return;
                }
            }
        }
    }

    /// Time from `earlier` to this event, both timed and done.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn since(&self, earlier: &Self) -> Result<Duration, KernelError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; writes one float.
        let status =
            unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw, self.raw) };
        check(status, "measure time on the GPU")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: created in `new`.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}
