//! Marks in a text that goes on: where the first one is, and what may become one.
use super::SPACE_MAX;

/// The first of `marks` in the text, and where.
pub(super) fn first_of<'a>(
    text: &str,
    marks: impl Iterator<Item = &'a str>,
) -> Option<(usize, &'a str)> {
    marks.filter_map(|mark| Some((text.find(mark)?, mark))).min()
}

/// Number of bytes at the end of `text` that the following text decides about: the beginning of one
/// of `marks`, and the white space before it.
pub(super) fn undecided<'a>(text: &str, marks: impl Iterator<Item = &'a str> + Clone) -> usize {
    let Some(longest) = marks.clone().map(str::len).max() else { return 0 };
    let most = longest.saturating_sub(1).min(text.len());
    let begun = (1..=most).rev().find(|length| {
        let at = text.len() - length;
        text.is_char_boundary(at) && marks.clone().any(|mark| mark.starts_with(&text[at..]))
    });
    let begun = begun.unwrap_or(0);
    let before = &text[..text.len() - begun];
    let space = before.len() - before.trim_end().len();
    if space > SPACE_MAX { begun } else { space + begun }
}
