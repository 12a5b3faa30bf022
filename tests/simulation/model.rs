//! The simulated model: the next token depends on the seed, the position and all previous tokens,
//! so a lost, repeated or swapped token, or a stale cache, changes the text.
use std::task::{Context, Poll};

use coordinator::engine::{FinishReason, GuideEnd, Guided, TokenGuide};
use shared::protocol::{Lora, TokenMask};

use crate::random::mix;

/// Token ids are below this.
pub(crate) const VOCABULARY: u32 = 997;
/// A token in a prompt that ends every process that computes it.
pub(crate) const POISON: u32 = VOCABULARY + 1;
/// The state before the first token.
pub(crate) const EMPTY: u64 = 0x7077_1e55;

/// The state before the first token of a request with an adapter of these contents; 0 for none.
pub(crate) fn before(contents: u64) -> u64 {
    match contents {
        0 => EMPTY,
        contents => mix(EMPTY, contents) | 1,
    }
}

/// The number of adapters that coordinators are started with.
pub(crate) const ADAPTERS: u32 = 2;
/// Names of adapters that operators load and unload.
pub(crate) const COMING: [&str; 2] = ["x", "y"];
/// Contents from here on are on the hub: hosts do not have them from the beginning.
pub(crate) const OF_THE_HUB: u64 = 100;

/// The path of an adapter with these contents.
pub(crate) fn path_of(contents: u64) -> String {
    format!("/adapters/{contents}")
}

/// The contents of the adapter with this path.
pub(crate) fn contents_of(path: &str) -> u64 {
    path.rsplit('/').next().and_then(|it| it.parse().ok()).expect("a path of an adapter")
}

/// The adapter of the request with this seed: half of the requests have none.
pub(crate) fn adapter_of(seed: u64) -> u32 {
    let drawn = (mix(seed, 0xada9) >> 40) as u32 % (2 * ADAPTERS);
    if drawn < ADAPTERS { drawn + 1 } else { 0 }
}

/// The state after one more token: what a KV cache holds at the token's place.
pub(crate) fn extend(state: u64, token: u32) -> u64 {
    // 0 marks a place that was never written.
    mix(state, u64::from(token)) | 1
}

/// Chooses the token that follows `last`, among those allowed. Every third text repeats itself,
/// like prompts with a common beginning, until something interrupts it.
pub(crate) fn choose(
    state: u64,
    last: u32,
    (seed, choice): (u64, u32),
    allowed: Option<&TokenMask>,
) -> u32 {
    let drawn = (mix(state, mix(seed, u64::from(choice))) >> 33) as u32;
    match allowed {
        None if seed.is_multiple_of(3) && !(drawn >> 8).is_multiple_of(16) => (last + 1) % 7,
        None => drawn % VOCABULARY,
        Some(TokenMask::Only(tokens)) => tokens[drawn as usize % tokens.len()],
        Some(mask) => {
            let tokens: Vec<u32> = (0..VOCABULARY).filter(|token| mask.allows(*token)).collect();
            tokens[drawn as usize % tokens.len()]
        }
    }
}

/// Guides a text: the allowed tokens, and the end, depend on all previous tokens.
#[derive(Debug)]
pub(crate) struct Guide {
    state: u64,
    allowed: TokenMask,
    /// How often the guide answers "ask again".
    waits: u64,
}

impl Guide {
    pub(crate) fn new(key: u64) -> Self {
        let state = mix(key, EMPTY);
        Self { state, allowed: Self::after(state), waits: 0 }
    }

    fn after(state: u64) -> TokenMask {
        let mut tokens: Vec<u32> =
            (0..6).map(|at| (mix(state, at) >> 33) as u32 % VOCABULARY).collect();
        tokens.sort_unstable();
        tokens.dedup();
        TokenMask::Only(tokens)
    }
}

impl TokenGuide for Guide {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        match self.waits.checked_sub(1) {
            Some(left) => {
                self.waits = left;
                Poll::Pending
            }
            None => Poll::Ready(Ok(())),
        }
    }

    fn allowed(&self) -> Option<&TokenMask> {
        Some(&self.allowed)
    }

    fn mask_bytes_max(&self) -> usize {
        64
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if !self.allowed.allows(token) {
            return Err(GuideEnd::Broke(format!("token {token} is not one of those allowed")));
        }
        self.state = extend(self.state, token);
        self.allowed = Self::after(self.state);
        // Some masks are ready at once, others a while later.
        self.waits = (self.state >> 20 & 7).saturating_sub(4);
        Ok(if self.state >> 7 & 63 == 0 { Guided::IsOver } else { Guided::GoesOn })
    }
}

/// Combines the ranks' shares; the result differs if ranks disagree.
pub(crate) fn all_reduce(shares: &[u64]) -> u64 {
    let first = shares[0];
    if shares.iter().all(|share| *share == first) {
        return first;
    }
    shares.iter().fold(0, |sum, share| mix(sum, *share))
}

/// The embedding of a prompt that leads to this state.
pub(crate) fn embedding(state: u64) -> Vec<f32> {
    // Only as many bits as an f32 holds exactly.
    [state, state >> 24, state >> 48].map(|bits| (bits & 0xff_ffff) as f32).to_vec()
}

/// The conditions that end a text.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) stop_token: Option<u32>,
    pub(crate) min_tokens: u32,
    pub(crate) max_tokens: u32,
    pub(crate) max_model_len: u32,
    /// Key of the text's guide, if it has one; texts with different keys differ.
    pub(crate) guide: Option<u64>,
}

impl Ends {
    pub(crate) fn guide(&self) -> Option<Guide> {
        self.guide.map(Guide::new)
    }
}

/// The undisturbed text of one choice, and why it ends.
pub(crate) fn undisturbed(
    prompt: &[u32],
    seed: u64,
    choice: u32,
    ends: &Ends,
) -> (Vec<u32>, FinishReason) {
    undisturbed_with(u64::from(adapter_of(seed)), prompt, seed, choice, ends)
}

/// The same with an adapter of these contents.
pub(crate) fn undisturbed_with(
    contents: u64,
    prompt: &[u32],
    seed: u64,
    choice: u32,
    ends: &Ends,
) -> (Vec<u32>, FinishReason) {
    let begun = before(contents);
    let mut state = prompt.iter().fold(begun, |state, token| extend(state, *token));
    let mut text = Vec::new();
    if ends.max_tokens == 0 {
        return (text, FinishReason::Length);
    }
    let mut guide = ends.guide();
    let mut last = prompt.last().copied().unwrap_or_default();
    loop {
        let allowed = guide.as_ref().and_then(Guide::allowed);
        let token = choose(state, last, (seed, choice), allowed);
        last = token;
        state = extend(state, token);
        text.push(token);
        let len = text.len() as u32;
        let may_end = len >= ends.min_tokens;
        if may_end && ends.end_tokens.contains(&token) {
            return (text, FinishReason::EndToken(token));
        }
        if may_end && ends.stop_token == Some(token) {
            return (text, FinishReason::StopString);
        }
        if guide.as_mut().is_some_and(|guide| guide.accept(token) == Ok(Guided::IsOver)) {
            return (text, FinishReason::Complete);
        }
        if len >= ends.max_tokens || prompt.len() as u32 + len >= ends.max_model_len {
            return (text, FinishReason::Length);
        }
    }
}

/// The adapters that coordinators are started with, and the room for them.
pub(crate) fn lora(places: u32) -> Lora {
    let adapter = |number: u32| (number.to_string(), path_of(number.into()));
    Lora { places, ..Lora::fixed((1..=ADAPTERS).map(adapter), 16) }
}
