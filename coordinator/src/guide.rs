//! Structured output: which tokens may come next, so that the whole text is what a JSON schema, a
//! regular expression or a grammar describes. The grammars are llguidance's.
//!
//! A request's specification is made a [`Grammar`] once, on threads of its own ([`Making`]); each of
//! its sequences has a [`Guide`] through it, which the scheduler asks for masks and tells of accepted
//! tokens ([`crate::engine::TokenGuide`]).
mod bounds;
mod cache;
mod closed;
mod grammar;
mod making;
mod masks;
mod vocabulary;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use closed::closed;
pub use grammar::{Grammar, Guide};
pub(crate) use grammar::{json_schema, whole};
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokenId};
pub use making::{GrammarError, Making};
use shared::protocol::GuideSpec;

use self::cache::{Cache, Made};
use self::masks::Masks;
use self::vocabulary::Vocabulary;
use crate::text::model::TextModel;

/// Room for grammars as deep as their bytes allow; it is taken as it is used.
const STACK_BYTES: usize = 256 << 20;
/// What is found to be at fault after more time than this is not compiled again soon.
const SLOW: Duration = Duration::from_secs(1);

/// Makes grammars over one model's vocabulary.
pub struct Guides {
    factory: ParserFactory,
    barred_first: Vec<TokenId>,
    made: Mutex<Cache<Grammar>>,
    masks: Arc<Masks>,
}

impl fmt::Debug for Guides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guides").finish_non_exhaustive()
    }
}

impl Guides {
    /// For a model. Takes about half a second for a vocabulary of 128,000 tokens.
    ///
    /// # Errors
    /// One sentence when the model's tokenizer is not fit for it.
    pub fn new(model: &TextModel) -> Result<Self, String> {
        let vocabulary = Vocabulary::new(model)?;
        let barred_first = vocabulary.losing_their_space();
        let slices = SlicedBiasComputer::general_slices();
        let env = vocabulary.into_env();
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&env, capabilities, &slices)
            .map_err(|error| format!("the vocabulary is not fit for grammars: {error}"))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let masks = Arc::new(Masks::new());
        Ok(Self { factory, barred_first, made: Mutex::default(), masks })
    }

    /// What came of a specification lately.
    pub(crate) fn made(&self, spec: &GuideSpec) -> Option<Made<Grammar>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).get(spec)
    }

    /// The grammar of a specification, however long that takes: a schema of a few fields takes
    /// milliseconds, the dearest that is within all bounds many seconds. Requests have [`Making`].
    ///
    /// # Errors
    /// One sentence that goes on after the field's name.
    pub fn make(&self, spec: &GuideSpec) -> Result<Arc<Grammar>, String> {
        // The end of a stack is the end of the process: see `making`.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, || self.make_here(spec));
            let thread = thread.map_err(|error| format!("cannot be compiled now: {error}"))?;
            let broke = || Err("cannot be compiled: the compiler broke off".to_owned());
            thread.join().unwrap_or_else(|_| broke())
        })
    }

    /// As [`make`](Self::make), on this thread, which has [`STACK_BYTES`].
    fn make_here(&self, spec: &GuideSpec) -> Result<Arc<Grammar>, String> {
        if let Some(made) = self.made(spec) {
            return made;
        }
        let start = Instant::now();
        let masks = self.masks.clone();
        let made = Grammar::compile(&self.factory, &self.barred_first, masks, spec).map(Arc::new);
        let bytes = made.as_ref().map_or_else(String::len, |grammar| grammar.bytes());
        if made.is_ok() || start.elapsed() > SLOW {
            let mut cache = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            cache.put(spec.clone(), made.clone(), bytes);
        }
        made
    }
}

/// What a grammar may cost.
fn limits() -> ParserLimits {
    ParserLimits {
        // About 4 ms for one mask; real grammars take a hundredth.
        step_lexer_fuel: 50_000,
        step_max_items: 50_000,
        // 1 to 2 KiB each, for each sequence: 10 MiB at most.
        max_lexer_states: 5_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

#[cfg(test)]
mod tests;
