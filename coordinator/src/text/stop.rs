//! Stop strings: found across piece boundaries, never shown in part.

/// Searches text that arrives in pieces for stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text held back: the beginning of some stop string.
    held: String,
    /// Include the stop string in the text.
    including: bool,
    /// Index of the stop string that was found.
    found: Option<usize>,
}

impl StopMatcher {
    /// Returns a matcher of `stops`, none of which may be empty.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), including: false, found: None }
    }

    /// Sets whether the stop string that is found belongs to the text.
    #[must_use]
    pub fn including(self, including: bool) -> Self {
        Self { including, ..self }
    }

    /// Takes a piece; appends to `text` what cannot be part of a stop string. Returns true when a
    /// stop string is complete: `text` then ends right before it, or after it if it is included.
    /// Unless `may_stop`, stop strings that the piece completes are plain text.
    pub fn push(&mut self, piece: &str, may_stop: bool, text: &mut String) -> bool {
        if self.stops.is_empty() {
            text.push_str(piece);
            return false;
        }
        let before = self.held.len();
        self.held.push_str(piece);
        if may_stop && let Some((at, length, index)) = self.first_complete(before) {
            self.found = Some(index);
            let end = if self.including { at + length } else { at };
            text.push_str(&self.held[..end]);
            self.held.clear();
            return true;
        }
        let keep = self.longest_beginning();
        let release = self.held.len() - keep;
        text.push_str(&self.held[..release]);
        self.held.drain(..release);
        false
    }

    /// The stop string that ended the text, if one did.
    #[must_use]
    pub fn found(&self) -> Option<&str> {
        self.found.and_then(|index| self.stops.get(index)).map(String::as_str)
    }

    /// Appends what was held back: the sequence ended for another reason.
    pub fn finish(&mut self, text: &mut String) {
        text.push_str(&self.held);
        self.held.clear();
    }

    /// Returns the start, length and index of the first stop string that ends after the first
    /// `before` bytes of `held`. One that ends earlier was complete while it was plain text.
    fn first_complete(&self, before: usize) -> Option<(usize, usize, usize)> {
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let mut from = (before + 1).saturating_sub(stop.len());
            while !self.held.is_char_boundary(from) {
                from += 1;
            }
            Some((from + self.held[from..].find(stop)?, stop.len(), index))
        });
        found.min()
    }

    /// Length in bytes of the end of `held` that begins some stop string.
    fn longest_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let most = longest.saturating_sub(1).min(self.held.len());
        (1..=most)
            .rev()
            .find(|len| {
                let at = self.held.len() - len;
                self.held.is_char_boundary(at)
                    && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
            })
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            if matcher.push(piece, true, &mut text) {
                return (text, true);
            }
        }
        matcher.finish(&mut text);
        (text, false)
    }

    #[test]
    fn a_stop_string_over_three_pieces_is_not_leaked() {
        assert_eq!(run(&["</end>"], &["ab<", "/en", "d>cd"]), ("ab".to_owned(), true));
        assert_eq!(run(&["</end>"], &["ab<", "/en", "ough"]), ("ab</enough".to_owned(), false));
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".to_owned(), false));
        assert_eq!(run(&["b", "abc"], &["xab"]), ("xa".to_owned(), true));
    }

    #[test]
    fn a_stop_string_is_part_of_the_text_where_that_is_wanted() {
        let mut matcher = StopMatcher::new(vec!["</end>".to_owned()]).including(true);
        let mut text = String::new();
        assert!(!matcher.push("ab</e", true, &mut text));
        assert_eq!(text, "ab");
        assert!(matcher.push("nd>cd", true, &mut text));
        assert_eq!((text.as_str(), matcher.found()), ("ab</end>", Some("</end>")));
    }

    #[test]
    fn before_the_minimum_a_stop_string_is_text() {
        let mut matcher = StopMatcher::new(vec![".".to_owned()]);
        let mut text = String::new();
        assert!(!matcher.push("a.", false, &mut text) && matcher.found().is_none());
        assert!(matcher.push("b.", true, &mut text));
        assert_eq!(text, "a.b");
    }

    #[test]
    fn what_was_plain_text_does_not_stop_later_and_what_begins_in_it_does() {
        let mut matcher = StopMatcher::new(vec!["ab".to_owned(), "abc".to_owned()]);
        let mut text = String::new();
        assert!(!matcher.push("xab", false, &mut text));
        assert_eq!(text, "x", "the second may go on");
        assert!(!matcher.push("d", true, &mut text));
        assert_eq!(text, "xabd", "the first was complete before it might stop");
        assert!(!matcher.push(".ab", false, &mut text));
        assert!(matcher.push("c", true, &mut text));
        assert_eq!((text.as_str(), matcher.found()), ("xabd.", Some("abc")));
    }

    proptest! {
        /// Only some pieces may stop the text: it ends at the first such piece that completes a
        /// stop string, before the earliest one completed. The oracle searches the whole text
        /// up to there.
        #[test]
        fn only_pieces_that_may_stop_the_text_do(
            pieces in prop::collection::vec(("[abé.]{0,4}", any::<bool>()), 0..12),
            including in any::<bool>(),
        ) {
            let stops = ["ab.", "bb", "abé", "b"];
            // Without the last one, beginnings are longer than what is found.
            for stops in [&stops[..], &stops[..3], &stops[1..3]] {
                let owned = stops.iter().map(|s| (*s).to_owned()).collect();
                let mut matcher = StopMatcher::new(owned).including(including);
                let (mut whole, mut text, mut stopped) = (String::new(), String::new(), false);
                let mut expected = None;
                for (piece, may_stop) in &pieces {
                    let before = whole.len();
                    whole.push_str(piece);
                    let ends = |(at, _): &(usize, char), stop: &str| {
                        whole[*at..].starts_with(stop) && at + stop.len() > before
                    };
                    let first = whole.char_indices().find_map(|at| {
                        let stop = stops.iter().filter(|stop| ends(&at, stop));
                        stop.map(|stop| (at.0, stop.len())).min()
                    });
                    stopped = matcher.push(piece, *may_stop, &mut text);
                    if *may_stop && let Some((at, length)) = first {
                        expected = Some(at + if including { length } else { 0 });
                    }
                    prop_assert_eq!(stopped, expected.is_some(), "{:?}", whole);
                    if stopped {
                        break;
                    }
                    prop_assert!(whole.starts_with(&text));
                }
                if !stopped {
                    matcher.finish(&mut text);
                }
                prop_assert_eq!(&text, &whole[..expected.unwrap_or(whole.len())]);
            }
        }

        /// However the text is split, the result is the text up to the first stop string that is
        /// complete.
        #[test]
        fn pieces_do_not_matter(text in "[ab.]{0,30}", cuts in prop::collection::vec(0usize..31, 0..6)) {
            let stops = ["ab.", "bb"];
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len()).collect();
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut at = 0;
            for cut in cuts.into_iter().chain([text.len()]) {
                pieces.push(&text[at..cut]);
                at = cut;
            }
            // A naive oracle: the stop string that is complete first, found character by character.
            let complete = (0..=text.len()).find(|end| stops.iter().any(|s| text[..*end].ends_with(s)));
            let (released, stopped) = run(&stops, &pieces);
            match complete {
                None => prop_assert_eq!((released, stopped), (text.clone(), false)),
                Some(_) => {
                    prop_assert!(stopped);
                    prop_assert!(text.starts_with(&released));
                    prop_assert!(stops.iter().any(|s| text[released.len()..].starts_with(s)));
                    prop_assert!(!stops.iter().any(|s| released.contains(s)));
                }
            }
        }
    }
}
