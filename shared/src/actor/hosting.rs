//! Classes of actors that a process can be told to start, and the actors that it was told to start.
//!
//! Each of these actors has a thread of its own, so that a handler that blocks holds up nothing
//! else: not the link, not other actors. What decides about its life is a small task on a thread of
//! the runtime, which runs no code of the application.
//!
//! - `instance`: one start of one actor
mod instance;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

pub(super) use self::instance::{Start, run};
use super::named::{Handled, NamedActor, handled};
use super::runtime::ActorRuntime;
use crate::wire::codec;

/// Maximum number of threads in a process that hang in handlers of actors that were given up. A
/// thread cannot be killed; beyond this number the process starts no more actors.
pub const HUNG_MAX: usize = 64;

/// A class of actors that processes host: other processes have them created by its name.
pub trait ActorClass: NamedActor + Sized {
    /// Its name, the same in all processes.
    const CLASS: &'static str;

    /// What an actor is made from. It is kept and used again when the actor is started again.
    type Argument: Serialize + DeserializeOwned;

    /// Makes an actor. Runs on the actor's own thread and may block.
    ///
    /// # Errors
    /// One sentence on why it cannot be made.
    fn create(argument: Self::Argument, context: ActorContext) -> Result<Self, String>;
}

/// What an actor may want to know about itself.
#[derive(Clone, Debug)]
pub struct ActorContext {
    /// The runtime of its process, by which it reaches others.
    pub runtime: ActorRuntime,
    /// Its name.
    pub name: String,
    /// The node that it was placed on.
    pub node: String,
    /// How often it was started before.
    pub restarts: u32,
}

/// An actor of any class.
pub(super) trait Served: Send {
    fn serve<'a>(
        &'a mut self,
        body: &'a [u8],
    ) -> Pin<Box<dyn Future<Output = Handled> + Send + 'a>>;
}

impl<A: NamedActor> Served for A {
    fn serve<'a>(
        &'a mut self,
        body: &'a [u8],
    ) -> Pin<Box<dyn Future<Output = Handled> + Send + 'a>> {
        Box::pin(handled(self, body))
    }
}

/// Makes an actor of one class from an encoded argument.
pub(super) type Factory =
    Arc<dyn Fn(&[u8], ActorContext) -> Result<Box<dyn Served>, String> + Send + Sync>;

pub(super) fn factory<C: ActorClass>() -> Factory {
    Arc::new(|argument, context| {
        let argument = codec::decode_message::<C::Argument>(argument)
            .map_err(|error| format!("not an argument of this class: {error}"))?;
        C::create(argument, context).map(|actor| Box::new(actor) as Box<dyn Served>)
    })
}

/// The thread of a runtime's tasks; it ends with the runtime.
pub(super) struct Controller {
    handle: Handle,
    /// Threads of actors, those that hang included.
    threads: Arc<AtomicUsize>,
    _stop: oneshot::Sender<()>,
}

impl Controller {
    pub(super) fn start() -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name("actors".to_owned()).spawn(move || {
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, threads: Arc::default(), _stop: stop })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(super) fn threads(&self) -> &Arc<AtomicUsize> {
        &self.threads
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Controller")
    }
}
