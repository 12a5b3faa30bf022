//! Token masks over a row of logits, a word of 32 tokens at a time. A grammar allows few tokens or
//! excludes few, so most words are all 0 or all 1; the others are handled without a branch per
//! token.

/// Tokens per word.
const WORD: usize = 32;

/// Copies the logits to `out`, with -infinity for tokens whose bit is not set. Missing words allow
/// nothing.
pub(super) fn apply(logits: &[f32], mask: &[u32], out: &mut Vec<f32>) {
    out.clear();
    out.reserve(logits.len());
    let (wide, rest) = logits.as_chunks::<WORD>();
    for (at, chunk) in wide.iter().enumerate() {
        match word(mask, at) {
            0 => out.extend_from_slice(&[f32::NEG_INFINITY; WORD]),
            u32::MAX => out.extend_from_slice(chunk),
            word => out.extend_from_slice(&select(chunk, word)),
        }
    }
    let word = word(mask, wide.len());
    out.extend(rest.iter().enumerate().map(|(bit, &x)| pick(x, word, bit)));
}

/// The lowest id of the largest allowed logit; `None` if no allowed logit is above -infinity.
pub(super) fn arg_max(logits: &[f32], mask: &[u32]) -> Option<u32> {
    let (mut best, mut max) = (None, f32::NEG_INFINITY);
    let mut look = |at: usize, chunk: &[f32; WORD]| {
        let largest = largest(chunk);
        if largest > max {
            max = largest;
            best = chunk.iter().position(|&x| x == largest).map(|bit| (at * WORD + bit) as u32);
        }
    };
    let (wide, rest) = logits.as_chunks::<WORD>();
    for (at, chunk) in wide.iter().enumerate() {
        match word(mask, at) {
            0 => {}
            u32::MAX => look(at, chunk),
            word => look(at, &select(chunk, word)),
        }
    }
    let mut last = [f32::NEG_INFINITY; WORD];
    let word = word(mask, wide.len());
    for (bit, (to, &x)) in last.iter_mut().zip(rest).enumerate() {
        *to = pick(x, word, bit);
    }
    look(wide.len(), &last);
    best
}

/// In four lanes of eight, which compilers vectorise.
fn largest(chunk: &[f32; WORD]) -> f32 {
    let of = |a: f32, b: f32| if a > b { a } else { b };
    let lanes: [f32; WORD / 4] = std::array::from_fn(|lane| {
        of(of(chunk[lane], chunk[lane + 8]), of(chunk[lane + 16], chunk[lane + 24]))
    });
    lanes.into_iter().fold(f32::NEG_INFINITY, of)
}

fn word(mask: &[u32], at: usize) -> u32 {
    mask.get(at).copied().unwrap_or(0)
}

fn select(chunk: &[f32; WORD], word: u32) -> [f32; WORD] {
    std::array::from_fn(|bit| pick(chunk[bit], word, bit))
}

#[inline(always)]
fn pick(x: f32, word: u32, bit: usize) -> f32 {
    if word & (1 << bit) == 0 { f32::NEG_INFINITY } else { x }
}
