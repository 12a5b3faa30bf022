//! PURE: ranges of numbers as regular expressions of their digits, exactly.
use super::decimal::{Decimal, Divisor};

/// Digits behind the point, or none.
const DECIMALS: &str = r"(\.[0-9]+)?";

/// One end of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct End {
    pub(super) at: Decimal,
    pub(super) is_open: bool,
}

/// Numbers between two ends; those among them that are integers, or multiples.
#[derive(Clone, Debug)]
pub(super) struct Range {
    whole: bool,
    low: Option<End>,
    high: Option<End>,
    step: Option<Decimal>,
}

/// What a number's text must match: all the patterns, and without its sign it must be a multiple.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NumberRule {
    pub(super) patterns: Vec<String>,
    pub(super) divisor: Option<Divisor>,
}

impl Range {
    /// All numbers, or all integers.
    pub(super) const fn new(whole: bool) -> Self {
        Self { whole, low: None, high: None, step: None }
    }

    /// Leaves out what is below.
    pub(super) fn begin(&mut self, end: End) {
        self.low = Some(self.low.map_or(end, |low| low.max(end)));
    }

    /// Leaves out what is above.
    pub(super) fn finish(&mut self, end: End) {
        let tightness = |end: End| (end.at.negated(), end.is_open);
        self.high = match self.high {
            Some(high) if tightness(high) >= tightness(end) => Some(high),
            _ => Some(end),
        };
    }

    /// Leaves out what is no multiple; `None` if grammars cannot compute with the divisor.
    pub(super) fn divide(&mut self, by: Decimal) -> Option<()> {
        let by = if by < Decimal::ZERO { by.negated() } else { by };
        by.divisor()?;
        let step = self.step.or(self.whole.then_some(Decimal::ONE));
        let step = step.map_or(Some(by), |step| step.common_multiple(by))?;
        step.divisor()?;
        self.step = Some(step);
        Some(())
    }

    /// Whether it has this number.
    pub(super) fn has(&self, number: Decimal) -> bool {
        let after = |end: End| number > end.at || number == end.at && !end.is_open;
        let before = |end: End| number < end.at || number == end.at && !end.is_open;
        self.low.is_none_or(after)
            && self.high.is_none_or(before)
            && (!self.whole || number.is_whole())
            && self.step.is_none_or(|step| number.is_multiple_of(step))
    }

    /// `None` if it has no number.
    pub(super) fn rule(&self) -> Option<NumberRule> {
        let (mut low, mut high) = (self.low, self.high);
        if self.whole {
            low = low.map(|end| closed(first_whole(end)));
            high = high.map(|end| closed(last_whole(end)));
        }
        if let (Some(low), Some(high)) = (low, high)
            && self.is_empty(low, high)
        {
            return None;
        }
        let low = low.map(|end| from(end, self.whole));
        let high = high.map(|end| up_to(end, self.whole));
        let mut patterns: Vec<String> = low.into_iter().chain(high).collect();
        if patterns.is_empty() {
            patterns.push(format!("-?{}", unsigned(self.whole)));
        }
        Some(NumberRule { patterns, divisor: self.step.and_then(Decimal::divisor) })
    }

    fn is_empty(&self, low: End, high: End) -> bool {
        let first = match self.step {
            Some(step) => {
                let first = low.at.first_multiple(step);
                let is_end = low.is_open && first == low.at;
                closed(if is_end { first.plus(step) } else { first })
            }
            None => low,
        };
        first.at > high.at || first.at == high.at && (first.is_open || high.is_open)
    }
}

const fn closed(at: Decimal) -> End {
    End { at, is_open: false }
}

/// The first integer behind a lower end.
fn first_whole(low: End) -> Decimal {
    let first = low.at.first_multiple(Decimal::ONE);
    if low.is_open && first == low.at { first.plus(Decimal::ONE) } else { first }
}

/// The last integer before an upper end.
fn last_whole(high: End) -> Decimal {
    first_whole(End { at: high.at.negated(), ..high }).negated()
}

/// All numbers without a sign.
fn unsigned(whole: bool) -> String {
    format!("(0|[1-9][0-9]*){}", decimals_of(whole))
}

const fn decimals_of(whole: bool) -> &'static str {
    if whole { "" } else { DECIMALS }
}

/// Numbers from a lower end. The ends of integers are closed ones.
fn from(low: End, whole: bool) -> String {
    if low.at < Decimal::ZERO {
        return format!("{}|-{}", unsigned(whole), at_most(low, whole));
    }
    at_least(low, whole)
}

/// Numbers up to an upper end.
fn up_to(high: End, whole: bool) -> String {
    if high.at < Decimal::ZERO || high.at == Decimal::ZERO && high.is_open {
        return format!("-{}", at_least(high, whole));
    }
    format!("-{}|{}", unsigned(whole), at_most(high, whole))
}

/// Numbers without a sign that are at least as large as the end's magnitude.
fn at_least(end: End, whole: bool) -> String {
    let ((integer, decimals), more) = (end.at.digits(), decimals_of(whole));
    let longer = match integer.as_str() {
        "0" => "*".to_owned(),
        _ => format!("{{{},}}", integer.len()),
    };
    let mut ways = vec![format!("[1-9][0-9]{longer}{more}")];
    for (at, digit) in integer.bytes().enumerate().filter(|(_, digit)| *digit < b'9') {
        let (same, above) = (&integer[..at], char::from(digit + 1));
        ways.push(format!("{same}[{above}-9]{}{more}", any(integer.len() - at - 1)));
    }
    if whole {
        ways.push(integer);
    } else if decimals.is_empty() && !end.is_open {
        ways.push(format!("{integer}{DECIMALS}"));
    } else {
        let rest = if end.is_open { "[0-9]*[1-9][0-9]*" } else { "[0-9]*" };
        ways.push(format!(r"{integer}\.{decimals}{rest}"));
        for (at, digit) in decimals.bytes().enumerate().filter(|(_, digit)| *digit < b'9') {
            let (same, above) = (&decimals[..at], char::from(digit + 1));
            ways.push(format!(r"{integer}\.{same}[{above}-9][0-9]*"));
        }
    }
    format!("({})", ways.join("|"))
}

/// Numbers without a sign that are at most as large as the end's magnitude. An open 0 has none.
fn at_most(end: End, whole: bool) -> String {
    let ((integer, decimals), more) = (end.at.digits(), decimals_of(whole));
    let mut ways = Vec::new();
    if integer.len() > 1 {
        ways.push(format!("(0|[1-9]{}){more}", fewer(integer.len() - 1)));
    }
    for (at, digit) in integer.bytes().enumerate() {
        let least = if at == 0 && integer.len() > 1 { b'1' } else { b'0' };
        if digit > least {
            let (least, below) = (char::from(least), char::from(digit - 1));
            let rest = any(integer.len() - at - 1);
            ways.push(format!("{}[{least}-{below}]{rest}{more}", &integer[..at]));
        }
    }
    let mut tails = Vec::new();
    for (at, digit) in decimals.bytes().enumerate() {
        if at > 0 {
            tails.push(decimals[..at].to_owned());
        }
        if digit > b'0' {
            tails.push(format!("{}[0-{}][0-9]*", &decimals[..at], char::from(digit - 1)));
        }
    }
    match (whole, decimals.is_empty(), end.is_open) {
        (true, _, _) => ways.push(integer),
        (false, true, true) => {}
        (false, true, false) => ways.push(format!(r"{integer}(\.0+)?")),
        (false, false, is_open) => {
            if !is_open {
                tails.push(format!("{decimals}0*"));
            }
            ways.push(format!(r"{integer}(\.({}))?", tails.join("|")));
        }
    }
    format!("({})", ways.join("|"))
}

/// So many digits.
fn any(count: usize) -> String {
    if count == 0 { String::new() } else { format!("[0-9]{{{count}}}") }
}

/// Fewer digits than so many.
fn fewer(count: usize) -> String {
    if count == 1 { String::new() } else { format!("[0-9]{{0,{}}}", count - 1) }
}

#[cfg(test)]
mod tests {
    use regex::Regex;
    use serde_json::json;

    use super::*;

    /// A text's number in thousandths.
    fn thousandths(text: &str) -> i128 {
        let unsigned = text.trim_start_matches('-');
        let (integer, decimals) = unsigned.split_once('.').unwrap_or((unsigned, ""));
        let magnitude: i128 = format!("{integer}{decimals:0<3}").parse().unwrap();
        if text.starts_with('-') { -magnitude } else { magnitude }
    }

    fn end(text: &str, is_open: bool) -> End {
        let number = serde_json::from_str(text).unwrap();
        End { at: Decimal::of(&number).unwrap(), is_open }
    }

    /// Texts of numbers around 0, 10 and 100, with up to three decimals.
    fn texts() -> Vec<String> {
        let integers = [0, 1, 2, 9, 10, 11, 19, 20, 99, 100, 101, 110, 1000];
        let decimals = ["", ".0", ".1", ".5", ".9", ".04", ".05", ".06", ".50", ".049", ".051"];
        let text = |integer: i32, decimals: &str| format!("{integer}{decimals}");
        let texts = integers.iter().flat_map(|it| decimals.map(|more| text(*it, more)));
        texts.flat_map(|it| [format!("-{it}"), it]).collect()
    }

    /// Whether a rule takes a text, its divisor aside.
    fn takes(patterns: &[Regex], text: &str) -> bool {
        patterns.iter().all(|pattern| pattern.is_match(text))
    }

    fn compiled(rule: &NumberRule) -> Vec<Regex> {
        let patterns = rule.patterns.iter();
        patterns.map(|it| Regex::new(&format!("^(?:{it})$")).unwrap()).collect()
    }

    #[test]
    fn numbers_are_taken_exactly_within_the_ends() {
        let (texts, mut seen) = (texts(), [0, 0]);
        let ends = ["0", "1", "10", "100", "0.5", "0.05", "9.9", "10.05"];
        let ends: Vec<String> =
            ends.into_iter().flat_map(|it| [it.to_owned(), format!("-{it}")]).collect();
        for (at, kind) in ends.iter().flat_map(|at| (0..8).map(move |kind| (at, kind))) {
            let (whole, is_open, is_low) = (kind & 1 > 0, kind & 2 > 0, kind & 4 > 0);
            let mut range = Range::new(whole);
            match is_low {
                true => range.begin(end(at, is_open)),
                false => range.finish(end(at, is_open)),
            }
            let patterns = compiled(&range.rule().unwrap());
            for text in &texts {
                let beyond = (thousandths(text) - thousandths(at)) * if is_low { 1 } else { -1 };
                let is_within = beyond > 0 || beyond == 0 && !is_open;
                let wanted = is_within && !(whole && text.contains('.'));
                let is_taken = takes(&patterns, text);
                // A zero with a sign need not be taken.
                let is_free = text.starts_with('-') && thousandths(text) == 0;
                assert!(is_taken == wanted || is_free && !is_taken, "{range:?}: {text}");
                seen[usize::from(is_taken)] += 1;
            }
        }
        assert!(seen.into_iter().all(|count| count > 1000), "{seen:?}");
    }

    #[test]
    fn integers_of_64_bits_are_told_from_their_neighbours() {
        let around = [
            (1_i128 << 53) + 1,
            (1 << 53) - 1,
            1_234_567_890_123_456_789,
            i128::from(i64::MAX),
            i128::from(i64::MIN),
            -9_999_999_999_999_999,
            i128::from(u64::MAX),
        ];
        for (at, whole) in around.into_iter().flat_map(|at| [(at, true), (at, false)]) {
            let closed = end(&at.to_string(), false);
            let (mut from, mut up_to, mut only) =
                (Range::new(whole), Range::new(whole), Range::new(whole));
            from.begin(closed);
            up_to.finish(closed);
            only.begin(closed);
            only.finish(closed);
            let [from, up_to, only] =
                [from, up_to, only].map(|range| compiled(&range.rule().unwrap()));
            for near in [at - 1000, at - 10, at - 1, at, at + 1, at + 9, at + 12_345] {
                let text = near.to_string();
                assert_eq!(takes(&from, &text), near >= at, "{at}: {near}");
                assert_eq!(takes(&up_to, &text), near <= at, "{at}: {near}");
                assert_eq!(takes(&only, &text), near == at, "{at}: {near}");
            }
        }
    }

    #[test]
    fn the_tighter_end_holds_and_at_one_number_the_open_one() {
        let bounds = [end("2", false), end("2", true), end("1", true)];
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let (mut from, mut up_to) = (Range::new(false), Range::new(false));
            for bound in order.map(|it| bounds[it]) {
                from.begin(bound);
                up_to.finish(End { at: bound.at.negated(), ..bound });
            }
            assert_eq!(from.low, Some(end("2", true)));
            assert_eq!(up_to.high, Some(end("-2", true)));
        }
    }

    #[test]
    fn ranges_without_a_number_have_no_rule() {
        let range = |whole, low, high, step: Option<serde_json::Value>| {
            let mut range = Range::new(whole);
            range.begin(low);
            range.finish(high);
            if let Some(step) = step {
                range.divide(Decimal::of(step.as_number().unwrap()).unwrap()).unwrap();
            }
            range
        };
        for empty in [
            range(false, end("1", true), end("1", false), None),
            range(true, end("0.1", false), end("0.9", false), None),
            range(true, end("1", true), end("2", true), None),
            range(false, end("0.71", false), end("0.76", false), Some(json!(0.07))),
            range(false, end("0.7", true), end("0.77", true), Some(json!(0.07))),
            range(true, end("1", false), end("6", false), Some(json!(0.07))),
        ] {
            assert_eq!(empty.rule(), None, "{empty:?}");
        }
        let one = range(false, end("0.7", true), end("0.77", false), Some(json!(0.07)));
        assert_eq!(one.rule().unwrap().divisor, Some(Divisor { digits: 7, decimals: 2 }));
        assert!(one.has(end("0.77", false).at) && !one.has(end("0.7", false).at));
        assert!(!one.has(end("0.75", false).at));
        // Integers that are multiples of 0.35.
        let one = range(true, end("1", false), end("7", false), Some(json!(0.35)));
        assert_eq!(one.rule().unwrap().divisor, Some(Divisor { digits: 7, decimals: 0 }));
    }
}
