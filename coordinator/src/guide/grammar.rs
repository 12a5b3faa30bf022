//! A specification compiled to a grammar, and one sequence's place in it.
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{SimpleVob, TokenId};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use shared::protocol::{GuideSpec, TokenMask, Whitespace};

use super::bounds;
use super::closed::closed;
use super::ebnf;
use super::exact;
use super::graft;
use super::masks::Masks;
use super::numbers;
use super::ranges::NumberRule;
use crate::engine::{GuideEnd, Guided, TokenGuide};
use crate::text::reply::grammar;

/// The pattern of [`Whitespace::Usual`].
const USUAL_WHITESPACE: &str = r"\x20|\x0A\x20{0,32}|\x0A\x09{1,8}";
/// Approximate memory of a small grammar's states, in bytes.
const GRAMMAR_BYTES: usize = 256 << 10;
/// Approximate memory of symbols and expressions per byte of a specification.
const BYTES_PER_BYTE: usize = 100;
/// Longest error shown, in characters.
const ERROR_CHARS: usize = 400;

/// A compiled specification. Each sequence follows it independently.
pub struct Grammar {
    way: Constraint,
    /// The tokens that may come first after other text.
    first: Arc<TokenMask>,
    /// The tokens that may come first where no text precedes; or why none may.
    first_of_all: Result<Arc<TokenMask>, String>,
    /// Approximate memory, in bytes.
    bytes: usize,
}

enum Constraint {
    /// Any sequence of the tokens in `first`.
    Free,
    /// The matcher before the first token. Each sequence copies it, so that what one sequence makes
    /// it learn does not affect others.
    Matched { matcher: Arc<Mutex<Matcher>>, is_json: bool, vocab: u32, masks: Arc<Masks> },
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Compiles a specification; `barred` are the tokens that no text can begin with.
    ///
    /// # Errors
    /// One sentence for the client.
    pub(super) fn compile(
        factory: &ParserFactory,
        barred: &[TokenId],
        masks: Arc<Masks>,
        spec: &GuideSpec,
    ) -> Result<Self, String> {
        spec.check()?;
        let vocab = factory.tok_env().tok_trie().vocab_size() as u32;
        if let GuideSpec::Tokens(tokens) = spec {
            return Self::of_tokens(tokens, vocab);
        }
        let mut rules = Vec::new();
        let grammar = top_level(spec, can_refer(spec).then_some(&mut rules))?;
        let parser = match rules.is_empty() {
            true => factory.create_parser(grammar),
            false => match graft::parser(factory, grammar, &rules) {
                Some(parser) => Ok(parser),
                // As if there were no such rules: a number that needs one is then refused by name.
                None => factory.create_parser(top_level(spec, None)?),
            },
        };
        let lexer = parser.as_ref().map_or(0, |parser| parser.parser.lexer_stats().num_bytes);
        let mut matcher = Matcher::new(parser);
        let mut first = matcher.compute_mask().map_err(|error| one_line(&error.to_string()))?;
        let behind = Arc::new(mask(vocab, &first)?);
        for token in barred {
            first.disallow_token(*token);
        }
        let first_of_all = match barred {
            [] => Ok(behind.clone()),
            _ => mask(vocab, &first).map(Arc::new),
        };
        let first = behind;
        let is_json = matches!(spec, GuideSpec::Json { .. });
        let matcher = Arc::new(Mutex::new(matcher));
        let way = Constraint::Matched { matcher, is_json, vocab, masks };
        let bytes = GRAMMAR_BYTES + lexer + 2 * first.weight() + BYTES_PER_BYTE * spec.bytes();
        Ok(Self { way, first, first_of_all, bytes })
    }

    fn of_tokens(tokens: &[u32], vocab: u32) -> Result<Self, String> {
        let mut list = tokens.to_vec();
        list.sort_unstable();
        list.dedup();
        let first = TokenMask::Only(list);
        first.check(vocab)?;
        let (bytes, first) = (first.weight(), Arc::new(first));
        Ok(Self { way: Constraint::Free, first_of_all: Ok(first.clone()), first, bytes })
    }

    /// Approximate memory in bytes; the library's share can only be estimated.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// A guide before its first token; `behind_text` tells whether text precedes.
    ///
    /// # Errors
    /// One sentence when no token may come first there.
    pub fn guide(self: &Arc<Self>, behind_text: bool) -> Result<Guide, String> {
        let first = if behind_text { self.first.clone() } else { self.first_of_all.clone()? };
        Ok(Guide { grammar: self.clone(), first, place: GuideState::Beginning(None) })
    }
}

/// Whether a specification's schemas may refer to rules: not if it has the name of one itself.
fn can_refer(spec: &GuideSpec) -> bool {
    match spec {
        GuideSpec::Json { schema: text, .. } | GuideSpec::Lark(text) | GuideSpec::Made(text) => {
            !names_rule(text)
        }
        GuideSpec::Regex(_) | GuideSpec::Choice(_) | GuideSpec::Tokens(_) => false,
    }
}

/// Whether a text has the name of a rule, or a character of it as an escape of JSON.
fn names_rule(text: &str) -> bool {
    let is_of_name = |code: &str| {
        u8::from_str_radix(code, 16).is_ok_and(|byte| exact::NAME.as_bytes().contains(&byte))
    };
    let mut escapes = text.match_indices("\\u00");
    text.contains(exact::NAME)
        || escapes.any(|(at, _)| text.get(at + 4..at + 6).is_some_and(is_of_name))
}

/// The grammar of a specification. Its schemas refer to `rules`, if there may be such.
fn top_level(
    spec: &GuideSpec,
    rules: Option<&mut Vec<NumberRule>>,
) -> Result<TopLevelGrammar, String> {
    Ok(match spec {
        GuideSpec::Json { schema, whitespace } => {
            let schema = json_schema(schema, whitespace)?;
            TopLevelGrammar::from_json_schema(held(&schema, rules)?)
        }
        GuideSpec::Regex(regex) => TopLevelGrammar::from_regex(without_anchors(regex)),
        GuideSpec::Choice(strings) => TopLevelGrammar::from_lark(grammar::choice("start", strings)),
        GuideSpec::Made(grammar) => lark(grammar, rules)?,
        GuideSpec::Lark(grammar) if ebnf::is_ebnf(grammar) => {
            TopLevelGrammar::from_lark(ebnf::to_lark(grammar)?)
        }
        GuideSpec::Lark(grammar) => lark(grammar, rules)?,
        GuideSpec::Tokens(_) => return Err("is not a grammar".to_owned()),
    })
}

/// A schema whose numbers the library holds; what it does not hold is among the rules.
fn held(schema: &Value, rules: Option<&mut Vec<NumberRule>>) -> Result<Value, String> {
    match rules {
        Some(rules) => numbers::held(&exact::taken_out(schema, rules)),
        None => numbers::held(schema),
    }
}

/// A grammar in Lark's notation, after checking its JSON schemas.
fn lark(grammar: &str, mut rules: Option<&mut Vec<NumberRule>>) -> Result<TopLevelGrammar, String> {
    let (key, mut made, mut rest) = ("%json", String::with_capacity(grammar.len()), grammar);
    while let Some(at) = rest.find(key) {
        let (before, behind) = rest.split_at(at + key.len());
        made.push_str(before);
        rest = behind;
        // Leaves invalid JSON to the compiler.
        let mut schemas = serde_json::Deserializer::from_str(behind).into_iter::<Value>();
        if let Some(Ok(schema)) = schemas.next() {
            bounds::check(&schema)?;
            let held = held(&schema, rules.as_deref_mut())?;
            if held != schema {
                made.push_str(&format!(" {held}"));
                rest = &behind[schemas.byte_offset()..];
            }
        }
    }
    made.push_str(rest);
    Ok(TopLevelGrammar::from_lark(made))
}

/// A closed schema with options for llguidance added.
///
/// # Errors
/// One sentence for the client.
pub(crate) fn json_schema(schema: &str, whitespace: &Whitespace) -> Result<Value, String> {
    let parsed = serde_json::from_str(schema).map_err(|error| format!("is not JSON: {error}"))?;
    let Value::Object(mut schema) = parsed else {
        return Err("must be a JSON object".to_owned());
    };
    let key = "x-guidance";
    if schema.contains_key(key) {
        return Err(format!("`{key}` is not supported"));
    }
    let mut options = match whitespace {
        Whitespace::Usual => json!({"whitespace_pattern": USUAL_WHITESPACE}),
        Whitespace::None => json!({"whitespace_flexible": false}),
        Whitespace::Pattern(pattern) => json!({"whitespace_pattern": pattern}),
    };
    // Treats `oneOf` as `anyOf`: equivalent where the members exclude each other, which the library
    // cannot verify through references, such as those of tagged unions.
    options["coerce_one_of"] = json!(true);
    schema.insert(key.to_owned(), options);
    let schema = closed(&Value::Object(schema));
    bounds::check(&schema)?;
    Ok(schema)
}

/// Removes the anchors of a regular expression, which matches the whole text anyway.
pub(crate) fn without_anchors(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let Some(rest) = regex.strip_suffix('$') else { return regex };
    let escapes = rest.len() - rest.trim_end_matches('\\').len();
    if escapes % 2 == 0 { rest } else { regex }
}

/// The library's error in one line, without its internal state.
fn one_line(error: &str) -> String {
    // The library's own assertions mean nothing to a client.
    if error.contains("panic: ") || error.contains("panicked at") {
        return "is too large or too complex to compile: make it smaller or simpler".to_owned();
    }
    let end = ["\n<", "<state>", "<backtrace>"].iter().filter_map(|it| error.find(it)).min();
    let error = &error[..end.unwrap_or(error.len())];
    // Source excerpts: a line number, a bar and the source; a caret.
    let shows = |line: &str| {
        let rest = line.trim_start().trim_start_matches(|c: char| c.is_ascii_digit());
        rest.trim_start().starts_with('|') || rest.trim() == "^"
    };
    let lines = error.lines().filter(|line| !shows(line));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let chars: Vec<char> = words.join(" ").chars().collect();
    if chars.len() <= ERROR_CHARS {
        return chars.into_iter().collect();
    }
    // The reason follows a part that may be long.
    let (head, tail) = (&chars[..ERROR_CHARS / 2], &chars[chars.len() - ERROR_CHARS / 2..]);
    head.iter().chain(&['.', '.', '.']).chain(tail).collect()
}

fn mask(vocab: u32, allowed: &SimpleVob) -> Result<TokenMask, String> {
    let mask = TokenMask::from_bits(vocab, allowed.as_slice());
    match mask.check(vocab) {
        Ok(()) => Ok(mask),
        Err(_) => Err("no token of this model's vocabulary can come next".to_owned()),
    }
}

/// One sequence's place in a grammar; see [`Grammar::guide`].
pub struct Guide {
    grammar: Arc<Grammar>,
    first: Arc<TokenMask>,
    place: GuideState,
}

/// The state of a guide.
enum GuideState {
    /// No token is accepted yet, or it makes no difference. Once the first step is near, holds the
    /// copy of the matcher, which may still be in the making.
    Beginning(Option<MatcherCopy>),
    /// After some tokens; the next mask was not requested yet. A sequence that has all its tokens
    /// never requests it.
    Behind(Box<Matcher>),
    /// After some tokens; the next mask is known.
    Known(Box<Matcher>, TokenMask),
    /// The next mask is being computed.
    Computed(Arc<Mutex<MaskWork>>),
    /// It has failed, or is complete.
    Ended,
}

/// A copy of a grammar's matcher, filled in once made and taken once. Copying may take
/// milliseconds.
type MatcherCopy = Arc<Mutex<Option<Box<Matcher>>>>;

/// A mask being computed, with the matcher that computes it.
enum MaskWork {
    /// Who waits for it.
    UnderWay(Option<Waker>),
    Done(Box<Matcher>, Result<TokenMask, GuideEnd>),
    /// It was taken.
    Taken,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_begun = !matches!(self.place, GuideState::Beginning(_));
        f.debug_struct("Guide").field("has_begun", &has_begun).finish_non_exhaustive()
    }
}

impl Guide {
    /// Starts copying the matcher before it is needed.
    fn copy_ahead(&mut self) {
        let (GuideState::Beginning(copy @ None), Constraint::Matched { matcher, masks, .. }) =
            (&mut self.place, &self.grammar.way)
        else {
            return;
        };
        let (copied, matcher) = (MatcherCopy::default(), matcher.clone());
        *copy = Some(copied.clone());
        masks.run(Box::new(move || {
            let mut copied = copied.lock().unwrap_or_else(PoisonError::into_inner);
            *copied = copy_of(&matcher).ok();
        }));
    }

    /// Advances by a token that is allowed.
    fn advance(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        let Constraint::Matched { matcher, is_json, .. } = &self.grammar.way else {
            return Ok(Guided::GoesOn);
        };
        let mut matcher = match std::mem::replace(&mut self.place, GuideState::Ended) {
            GuideState::Known(matcher, _) | GuideState::Behind(matcher) => matcher,
            GuideState::Beginning(copy) => {
                let copy = copy
                    .and_then(|copy| copy.lock().unwrap_or_else(PoisonError::into_inner).take());
                copy.map_or_else(|| copy_of(matcher), Ok)?
            }
            GuideState::Computed(_) | GuideState::Ended => return Err(unknown()),
        };
        let taken = guarded(|| take(&mut matcher, token, *is_json))?;
        if taken == Guided::GoesOn {
            self.place = GuideState::Behind(matcher);
        }
        Ok(taken)
    }

    /// Starts computing the mask that follows the accepted tokens.
    fn compute(&mut self) {
        let (GuideState::Behind(_), Constraint::Matched { vocab, masks, .. }) =
            (&self.place, &self.grammar.way)
        else {
            return;
        };
        let work = Arc::new(Mutex::new(MaskWork::UnderWay(None)));
        let before = std::mem::replace(&mut self.place, GuideState::Computed(work.clone()));
        let (GuideState::Behind(mut matcher), vocab) = (before, *vocab) else { return };
        masks.run(Box::new(move || {
            // A panic must reach whoever waits: a whole batch waits with it.
            let allowed = guarded(|| {
                let allowed = matcher.compute_mask().map_err(|it| one_line(&it.to_string()));
                allowed.and_then(|allowed| mask(vocab, &allowed))
            });
            let done = MaskWork::Done(matcher, allowed);
            let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
            let before = std::mem::replace(&mut *work, done);
            drop(work);
            if let MaskWork::UnderWay(Some(waker)) = before {
                waker.wake();
            }
        }));
    }
}

pub(super) fn not_allowed(token: u32) -> GuideEnd {
    GuideEnd::Broke(format!("token {token} is not one of those allowed"))
}

fn unknown() -> GuideEnd {
    GuideEnd::Broke("the tokens allowed next are not known".to_owned())
}

fn copy_of(matcher: &Mutex<Matcher>) -> Result<Box<Matcher>, GuideEnd> {
    guarded(|| Ok(Box::new(matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone())))
}

/// Turns a panic of the library into an error of this request alone, but not of its making.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, GuideEnd> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(GuideEnd::Refused),
        Err(_) => {
            let message = "the tokens allowed next could not be computed: a bug in this program";
            Err(GuideEnd::Broke(message.to_owned()))
        }
    }
}

impl TokenGuide for Guide {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        self.copy_ahead();
        self.compute();
        let GuideState::Computed(work) = &self.place else { return Poll::Ready(Ok(())) };
        let mut under_way = work.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *under_way, MaskWork::Taken) {
            MaskWork::UnderWay(_) => {
                *under_way = MaskWork::UnderWay(Some(context.waker().clone()));
                Poll::Pending
            }
            MaskWork::Done(matcher, Ok(mask)) => {
                drop(under_way);
                self.place = GuideState::Known(matcher, mask);
                Poll::Ready(Ok(()))
            }
            MaskWork::Done(_, Err(error)) => {
                drop(under_way);
                self.place = GuideState::Ended;
                Poll::Ready(Err(error))
            }
            MaskWork::Taken => Poll::Ready(Err(unknown())),
        }
    }

    fn allowed(&self) -> Option<&TokenMask> {
        match &self.place {
            GuideState::Beginning(_) => Some(&self.first),
            GuideState::Known(_, mask) => Some(mask),
            GuideState::Behind(_) | GuideState::Computed(_) | GuideState::Ended => None,
        }
    }

    fn mask_bytes_max(&self) -> usize {
        match &self.grammar.way {
            Constraint::Free => self.grammar.first.weight(),
            Constraint::Matched { vocab, .. } => TokenMask::weight_max(*vocab),
        }
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if !self.allowed().is_some_and(|allowed| allowed.allows(token)) {
            return Err(not_allowed(token));
        }
        self.advance(token)
    }

    fn follow(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if matches!(self.place, GuideState::Beginning(_)) && !self.first.allows(token) {
            return Err(not_allowed(token));
        }
        self.advance(token)
    }
}

/// Advances the matcher by one token.
fn take(matcher: &mut Matcher, token: u32, is_json: bool) -> Result<Guided, String> {
    let error = |error| one_line(&format!("{error}"));
    matcher.consume_token(token).map_err(error)?;
    if matcher.is_stopped() {
        return match matcher.stop_reason() {
            StopReason::NoExtension | StopReason::EndOfSentence => Ok(Guided::IsOver),
            reason => Err(matcher.get_error().map_or(reason.to_string(), |it| one_line(&it))),
        };
    }
    // After its last character, only a number can continue; trailing whitespace is of no use.
    let ends_in_digit = || {
        let env = matcher.tok_env();
        env.is_ok_and(|env| env.tok_trie().token(token).last().is_some_and(u8::is_ascii_digit))
    };
    if is_json && !ends_in_digit() && matcher.is_accepting().map_err(error)? {
        return Ok(Guided::IsOver);
    }
    Ok(Guided::GoesOn)
}

#[cfg(test)]
mod tests {
    use super::{GuideEnd, GuideSpec, Whitespace, can_refer, guarded, one_line};

    #[test]
    fn schemas_that_name_a_rule_refer_to_none() {
        let refers = |schema: &str| {
            let schema = schema.to_owned();
            can_refer(&GuideSpec::Json { schema, whitespace: Whitespace::Usual })
        };
        assert!(refers(r#"{"title": "caf\u00e9 \u0026 number", "const": "\u00"}"#));
        for named in [
            r#"{"$defs": {"tutti-number-0": {}}}"#,
            r#"{"$defs": {"tutti\u002dnumber-0": {}}}"#,
            r#"{"$defs": {"\u0074utti-number-0": {}}}"#,
        ] {
            assert!(!refers(named), "{named}");
        }
    }

    #[test]
    fn a_panic_is_an_error_for_whoever_waits() {
        assert_eq!(guarded(|| Ok(7)), Ok(7));
        let refused = guarded(|| Err::<u8, _>("it is not so".to_owned()));
        assert_eq!(refused, Err(GuideEnd::Refused("it is not so".to_owned())));
        let defect = guarded(|| -> Result<u8, String> { panic!("as a defect would") });
        let Err(GuideEnd::Broke(why)) = defect else { panic!("{defect:?}") };
        assert!(why.contains("could not be computed"), "{why}");
    }

    #[test]
    fn what_the_library_says_is_one_line_without_its_inner_state() {
        let said = one_line("panic: assertion failed: grammar.symbols.len() < u16::MAX\n<state>x");
        assert!(said.contains("make it smaller") && !said.contains("assert"), "{said}");
        assert_eq!(one_line("no such\n3 | rule: a\n  | ^\nrule\n<state>x"), "no such rule");
    }
}
