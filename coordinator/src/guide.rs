//! Structured output (guided decoding): which tokens may come next so that the whole text matches a
//! JSON schema, a regular expression or a grammar. The grammars are llguidance's.
//!
//! A request's specification is compiled to a [`Grammar`] once, on separate threads
//! ([`GrammarCompiler`]). Each of its sequences follows the grammar with a [`Guide`], which gives
//! the scheduler masks and takes accepted tokens ([`crate::engine::TokenGuide`]).
//!
//! - `bad_words`: PURE: words that must not come, with or without another guide
//! - `bounds`: PURE: bounds on what makes compiling a schema expensive
//! - `cache`: PURE: the recently compiled specifications
//! - `closed`: PURE: schemas whose objects allow no unnamed properties
//! - `ebnf`: PURE: grammars in EBNF, in Lark's notation
//! - `grammar`: a compiled specification, and one sequence's place in it
//! - `compiler`: how many grammars are compiled at a time, on which threads
//! - `masks`: threads that compute masks
//! - `numbers`: PURE: numbers of schemas, as the grammars' library holds them
//! - `exact`: PURE: schemas without the numbers that it does not hold; `ranges`: PURE: what those
//!   are in a grammar; `graft`: puts it there; `decimal`: PURE: numbers by their digits
//! - `thinking`: PURE: a bound on reasoning, with or without a grammar
//! - `vocabulary`: the bytes of each token
mod bad_words;
mod bounds;
mod cache;
mod closed;
mod compiler;
mod decimal;
mod ebnf;
mod exact;
mod graft;
mod grammar;
mod masks;
mod numbers;
mod ranges;
mod thinking;
mod vocabulary;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use bad_words::BadWordsGuide;
pub(crate) use closed::{closed, loosened, without_truisms, without_unique_items};
pub use compiler::{GrammarCompiler, GrammarError};
pub use grammar::{Grammar, Guide};
pub(crate) use grammar::{json_schema, without_anchors};
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokenId};
use shared::protocol::{BadWords, GuideSpec, ThinkingBudget};
pub use thinking::ThinkingGuide;

use self::cache::{Cache, Compiled};
use self::masks::Masks;
use self::vocabulary::Vocabulary;
use crate::engine::TokenGuide;
use crate::text::model::TextModel;

/// Stack for grammars nested as deeply as their size allows; memory is committed only when used.
const STACK_BYTES: usize = 256 << 20;
/// A specification that fails after more time than this is cached as failed.
const SLOW: Duration = Duration::from_secs(1);

/// Compiles grammars over one model's vocabulary.
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
    /// For one model. Takes about half a second with a vocabulary of 128,000 tokens.
    ///
    /// # Errors
    /// One sentence when the model's tokenizer does not support grammars.
    pub fn new(model: &TextModel) -> Result<Self, String> {
        let vocabulary = Vocabulary::new(model)?;
        let barred_first = vocabulary.losing_their_space();
        let slices = SlicedBiasComputer::general_slices();
        let env = vocabulary.into_env();
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&env, capabilities, &slices)
            .map_err(|error| format!("the vocabulary cannot be used for grammars: {error}"))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let masks = Arc::new(Masks::new());
        Ok(Self { factory, barred_first, made: Mutex::default(), masks })
    }

    /// Returns the cached result for a specification.
    pub(crate) fn cached(&self, spec: &GuideSpec) -> Option<Compiled<Grammar>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).get(spec)
    }

    /// Compiles a specification, however long that takes: milliseconds for a schema of a few
    /// fields, many seconds for the most expensive one within all bounds. Requests use
    /// [`GrammarCompiler`] instead.
    ///
    /// # Errors
    /// One sentence that continues after the field's name.
    pub fn compile(&self, spec: &GuideSpec) -> Result<Arc<Grammar>, String> {
        // A stack overflow would end the process: see `compiler`.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, || self.compile_on_this_thread(spec));
            let thread = thread.map_err(|error| format!("cannot be compiled now: {error}"))?;
            let broke = || Err("cannot be compiled: the compiler was interrupted".to_owned());
            thread.join().unwrap_or_else(|_| broke())
        })
    }

    /// Like [`compile`](Self::compile), on the current thread, which must have a stack of
    /// [`STACK_BYTES`].
    fn compile_on_this_thread(&self, spec: &GuideSpec) -> Result<Arc<Grammar>, String> {
        if let Some(made) = self.cached(spec) {
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

/// Makes a guide for each of some choices, of the same kind; none if nothing guides them.
/// `bad_words` come with the size of the vocabulary; `behind_text` tells whether text precedes.
///
/// # Errors
/// One sentence when the grammar lets no token come first there.
pub fn guides(
    choices: usize,
    grammar: Option<&Arc<Grammar>>,
    thinking: Option<&Arc<ThinkingBudget>>,
    bad_words: Option<(&Arc<BadWords>, u32)>,
    behind_text: bool,
) -> Result<Vec<Box<dyn TokenGuide>>, String> {
    let mut made: Vec<Box<dyn TokenGuide>> = Vec::new();
    for _ in 0..choices {
        let guide = grammar.map(|grammar| grammar.guide(behind_text)).transpose()?;
        let guide: Option<Box<dyn TokenGuide>> = match (thinking, guide) {
            (Some(budget), guide) => Some(Box::new(ThinkingGuide::new(budget.clone(), guide))),
            (None, Some(guide)) => Some(Box::new(guide)),
            (None, None) => None,
        };
        made.push(match (bad_words, guide) {
            (Some((words, vocab)), guide) => {
                Box::new(BadWordsGuide::new(words.clone(), vocab, guide))
            }
            (None, Some(guide)) => guide,
            (None, None) => break,
        });
    }
    Ok(made)
}

/// Limits on the cost of a grammar.
fn limits() -> ParserLimits {
    ParserLimits {
        // About 4 ms for one mask; real grammars take a hundredth of that.
        step_lexer_fuel: 50_000,
        step_max_items: 50_000,
        // 1 to 2 KiB each, for each sequence: at most 10 MiB.
        max_lexer_states: 5_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

#[cfg(test)]
mod tests;
