//! Structural tags, as vLLM and xgrammar have them: text in which some parts, such as calls of
//! tools, have a form, and others none. Written as rules of a grammar in Lark's notation.
//!
//! - today's form: `{"format": ..}`, of parts that contain each other
//! - the older one: `{"structures": [{"begin", "schema", "end"}], "triggers": [..]}`
use std::ops::Range;

use serde_json::{Map, Value};
use shared::protocol::Whitespace;

use super::error::ApiError;
use super::fields::{SHOWN_MAX, beginning};
use super::structured::wrong;
use crate::guide;
use crate::text::reply::grammar::{self, Special, mark, quoted};

/// Name of the first rule.
pub(crate) const ROOT: &str = "st_root";
/// Most parts within each other.
const DEPTH_MAX: usize = 16;
/// Most entries of a list: each tag is compared with each trigger.
const ENTRIES_MAX: usize = 512;
/// Longest special token that is looked for in a string, in bytes.
const MARK_BYTES_MAX: usize = 96;

/// The terminals that [`rules`] refer to: any text, and text that is not empty. Neither begins with
/// `unless`, the mark of reasoning, which could otherwise not be told from text.
#[must_use]
pub(crate) fn terminals(unless: Option<&str>) -> String {
    let except = unless.map_or_else(String::new, |mark| {
        // By their numbers: what is special in an expression differs from library to library.
        let mark: String = mark.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
        format!(" & ~/{mark}(?s:.*)/")
    });
    format!("ST_ANY: /(?s:.*)/{except}\nST_TEXT: /(?s:.+)/{except}\n")
}

/// Writes the rules of a structural tag: [`ROOT`], and those that it needs, without [`terminals`].
/// `base` is where the tag is in `field`, with a dot behind it, if it is not all of it. `special`
/// looks up tokens by their text: marks that are tokens of their own are no text.
///
/// # Errors
/// 400 naming the field, and the part within it.
pub(crate) fn rules(
    (field, base): (&str, &str),
    tag: &Map<String, Value>,
    special: Special<'_>,
) -> Result<String, ApiError> {
    let mut writer = Writer { field, base, special, rules: String::new(), count: 0 };
    let given = |key: &str| tag.get(key).filter(|value| !value.is_null());
    let body = match (given("format"), given("structures")) {
        (Some(format), None) => {
            writer.only("", tag, &["format"])?;
            writer.part("format", format, Place { depth: 0, is_last: true })?
        }
        (None, Some(_)) => {
            writer.only("", tag, &["structures", "triggers"])?;
            writer.older(tag)?
        }
        _ => {
            let within = base.trim_end_matches('.');
            let within = if within.is_empty() { String::new() } else { format!(" in `{within}`") };
            return Err(wrong(field, &format!("needs either `format` or `structures`{within}")));
        }
    };
    Ok(format!("{ROOT}: {body}\n{}", writer.rules))
}

/// Where a part is.
#[derive(Clone, Copy, Debug)]
struct Place {
    depth: usize,
    /// Whether nothing follows.
    is_last: bool,
}

impl Place {
    /// A part within this one.
    fn within(self, is_last: bool) -> Self {
        Self { depth: self.depth + 1, is_last: self.is_last && is_last }
    }
}

/// The path of `key` in the part at `path`.
fn within(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// A tag.
#[derive(Debug)]
struct Tag {
    begin: String,
    /// Name of the rule of what follows the beginning: its content and its end.
    rest: String,
}

struct Writer<'a> {
    field: &'a str,
    base: &'a str,
    special: Special<'a>,
    rules: String,
    /// Number of rules with a number in their name.
    count: usize,
}

impl Writer<'_> {
    fn wrong(&self, path: &str, message: &str) -> ApiError {
        wrong(self.field, &format!("has a `{}{path}` {message}", self.base))
    }

    /// Refuses other keys than these, and `type`: what is ignored could be a promise.
    fn only(&self, path: &str, part: &Map<String, Value>, keys: &[&str]) -> Result<(), ApiError> {
        let known = |key: &str| key == "type" || keys.contains(&key);
        match part.iter().find(|(key, value)| !known(key) && !value.is_null()) {
            None => Ok(()),
            Some((key, _)) => {
                let path = within(path, &beginning(key, SHOWN_MAX));
                Err(self.wrong(&path, "that is not supported"))
            }
        }
    }

    /// Reads `path`'s `key`, which must be a string.
    fn text<'v>(
        &self,
        path: &str,
        part: &'v Map<String, Value>,
        key: &str,
    ) -> Result<&'v str, ApiError> {
        let text = part.get(key).and_then(Value::as_str);
        text.ok_or_else(|| self.wrong(&format!("{path}.{key}"), "that is not a string"))
    }

    fn list<'v>(
        &self,
        path: &str,
        part: &'v Map<String, Value>,
        key: &str,
    ) -> Result<&'v [Value], ApiError> {
        let path = within(path, key);
        let list = part.get(key).and_then(Value::as_array).filter(|list| !list.is_empty());
        match list.map(Vec::as_slice) {
            None => Err(self.wrong(&path, "that is not a list, or empty")),
            Some(list) if list.len() > ENTRIES_MAX => {
                let message = format!("of {} entries, the limit is {ENTRIES_MAX}", list.len());
                Err(self.wrong(&path, &message))
            }
            Some(list) => Ok(list),
        }
    }

    fn flag(&self, path: &str, part: &Map<String, Value>, key: &str) -> Result<bool, ApiError> {
        match part.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(&format!("{path}.{key}"), "that is neither true nor false")),
        }
    }

    fn object<'v>(&self, path: &str, value: &'v Value) -> Result<&'v Map<String, Value>, ApiError> {
        value.as_object().ok_or_else(|| self.wrong(path, "that is not an object"))
    }

    /// The special tokens that are written in a string, from the first to the last: between angle
    /// brackets, or square ones, as models' marks are.
    fn marks(&self, text: &str) -> Vec<Range<usize>> {
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(open) = text[at..].find(['<', '[']).map(|found| at + found) {
            let close = if text[open..].starts_with('<') { b'>' } else { b']' };
            let near = text.as_bytes()[open..].iter().take(MARK_BYTES_MAX);
            let end = near.copied().position(|byte| byte == close).map(|found| open + found + 1);
            match end.map(|end| (&text[open..end], end)) {
                Some((written, end)) if (self.special)(written).is_some() => {
                    found.push(open..end);
                    at = end;
                }
                _ => at = open + 1,
            }
        }
        found
    }

    /// A string as an expression, with the tokens that are written in it.
    fn literal(&self, text: &str) -> String {
        let (mut parts, mut from) = (Vec::new(), 0);
        for found in self.marks(text) {
            if from < found.start {
                parts.push(quoted(&text[from..found.start]));
            }
            from = found.end;
            parts.push(mark(&text[found], self.special));
        }
        if from < text.len() || parts.is_empty() {
            parts.push(quoted(&text[from..]));
        }
        parts.join(" ")
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("st{}", self.count)
    }

    /// Writes a rule of this expression, and returns its name.
    fn rule(&mut self, expression: &str) -> String {
        let name = self.name();
        self.rules += &format!("{name}: {expression}\n");
        name
    }

    fn schema(&mut self, path: &str, value: Option<&Value>) -> Result<String, ApiError> {
        let schema = match value {
            // As those of tools, which they mostly are.
            Some(schema @ Value::Object(_)) => guide::loosened(schema),
            // Any JSON.
            Some(Value::Bool(true)) => Value::Object(Map::new()),
            _ => return Err(self.wrong(path, "that is not a JSON schema, an object")),
        };
        let schema = guide::json_schema(&schema.to_string(), &Whitespace::Usual);
        let schema = schema.map_err(|error| self.wrong(path, &format!("that {error}")))?;
        let name = self.name();
        self.rules += &grammar::json(&name, &schema);
        Ok(name)
    }

    /// Any text and then `end`, which comes where it first can.
    fn text_until(&mut self, path: &str, end: &str) -> Result<String, ApiError> {
        // A token that is not text ends any text; otherwise the match must be lazy.
        let lazy = match self.marks(end).first() {
            None => "[lazy]",
            Some(Range { start: 0, .. }) => "",
            Some(_) => {
                let message = "that ends any text, and has a special token behind other text";
                return Err(self.wrong(path, message));
            }
        };
        let name = self.name();
        self.rules += &format!("{name}{lazy}: ST_ANY {}\n", self.literal(end));
        Ok(name)
    }

    /// The pattern of a regular expression.
    fn pattern<'v>(&self, path: &str, part: &'v Map<String, Value>) -> Result<&'v str, ApiError> {
        self.only(path, part, &["pattern"])?;
        let pattern = guide::without_anchors(self.text(path, part, "pattern")?);
        let escapes = pattern.len() - pattern.trim_end_matches('\\').len();
        if escapes % 2 == 1 {
            return Err(self.wrong(&format!("{path}.pattern"), "that ends within an escape"));
        }
        Ok(pattern)
    }

    /// A part as an expression.
    fn part(&mut self, path: &str, value: &Value, place: Place) -> Result<String, ApiError> {
        if place.depth > DEPTH_MAX {
            return Err(self.wrong(path, &format!("that is more than {DEPTH_MAX} parts deep")));
        }
        let part = self.object(path, value)?;
        Ok(match part.get("type").and_then(Value::as_str) {
            Some("const_string") => {
                self.only(path, part, &["value"])?;
                self.literal(self.text(path, part, "value")?)
            }
            Some("json_schema") => {
                self.only(path, part, &["json_schema", "style"])?;
                if part.get("style").is_some_and(|style| style != "json" && !style.is_null()) {
                    return Err(self.wrong(&format!("{path}.style"), "that is not supported"));
                }
                self.schema(&format!("{path}.json_schema"), part.get("json_schema"))?
            }
            Some("regex") => {
                let pattern = self.pattern(path, part)?;
                let name = self.name();
                self.rules += &grammar::regex(&name, pattern);
                name
            }
            Some("any_text") => {
                self.check_plain_text(path, part, &[])?;
                if !place.is_last {
                    return Err(self.wrong(
                        path,
                        "with text that something follows: it can be the `content` of a tag, \
                         which ends it, or the last part",
                    ));
                }
                "ST_TEXT?".to_owned()
            }
            Some(kind @ ("sequence" | "or")) => {
                self.only(path, part, &["elements"])?;
                let elements = self.list(path, part, "elements")?;
                let mut all = Vec::new();
                for (index, element) in elements.iter().enumerate() {
                    let path = format!("{path}.elements[{index}]");
                    let is_last = kind == "or" || index + 1 == elements.len();
                    all.push(self.part(&path, element, place.within(is_last))?);
                }
                format!("({})", all.join(if kind == "or" { " | " } else { " " }))
            }
            Some("tag") => {
                let tag = self.tag(path, value, place)?;
                format!("({})", self.any_of(&[tag]))
            }
            Some("triggered_tags") => self.triggered(path, part, place)?,
            Some("tags_with_separator") => self.separated(path, part, place)?,
            Some(other) => {
                let shown = quoted(&beginning(other, SHOWN_MAX));
                let message = format!("with the `type` {shown}, which is not supported");
                return Err(self.wrong(path, &message));
            }
            None => return Err(self.wrong(path, "without a `type`, a string")),
        })
    }

    /// Refuses what text must not contain, unless that is nothing.
    fn check_plain_text(
        &self,
        path: &str,
        part: &Map<String, Value>,
        keys: &[&str],
    ) -> Result<(), ApiError> {
        let nothing = ["excluded_str", "excludes"]
            .into_iter()
            .filter(|key| part.get(*key).and_then(Value::as_array).is_some_and(Vec::is_empty));
        let keys: Vec<&str> = keys.iter().copied().chain(nothing).collect();
        self.only(path, part, &keys)
    }

    fn tag(&mut self, path: &str, value: &Value, place: Place) -> Result<Tag, ApiError> {
        let tag = self.object(path, value)?;
        self.only(path, tag, &["begin", "content", "end"])?;
        let begin = self.text(path, tag, "begin")?.to_owned();
        let end = self.text(path, tag, "end")?;
        let at = format!("{path}.content");
        let content = tag.get("content").unwrap_or(&Value::Null);
        let kind = content.get("type").and_then(Value::as_str);
        let rest = match (content.as_object().filter(|_| !end.is_empty()), kind) {
            (Some(part), Some("any_text")) => {
                self.check_plain_text(&at, part, &[])?;
                self.text_until(&format!("{path}.end"), end)?
            }
            // What is matched never gives anything back, so its end has to be a part of it.
            (Some(part), Some("regex")) if self.marks(end).is_empty() => {
                let pattern = self.pattern(&at, part)?;
                let name = self.name();
                self.rules += grammar::regex(&format!("{name}[lazy]"), pattern).trim_end();
                self.rules += &format!(" {}\n", quoted(end));
                name
            }
            _ => {
                let content = self.part(&at, content, place.within(end.is_empty()))?;
                format!("{content} {}", self.literal(end))
            }
        };
        Ok(self.named(begin, &rest))
    }

    /// A tag whose rest has a rule: expressions would be written as often as they are used.
    fn named(&mut self, begin: String, rest: &str) -> Tag {
        Tag { begin, rest: self.rule(rest) }
    }

    /// One of these tags.
    fn any_of(&self, tags: &[Tag]) -> String {
        let whole = |tag: &Tag| format!("{} {}", self.literal(&tag.begin), tag.rest);
        tags.iter().map(whole).collect::<Vec<_>>().join(" | ")
    }

    fn tags(
        &mut self,
        path: &str,
        part: &Map<String, Value>,
        place: Place,
    ) -> Result<Vec<Tag>, ApiError> {
        let tags = self.list(path, part, "tags")?;
        let mut all = Vec::new();
        for (index, tag) in tags.iter().enumerate() {
            all.push(self.tag(&format!("{path}.tags[{index}]"), tag, place)?);
        }
        Ok(all)
    }

    fn triggered(
        &mut self,
        path: &str,
        part: &Map<String, Value>,
        place: Place,
    ) -> Result<String, ApiError> {
        let keys = ["triggers", "tags", "at_least_one", "stop_after_first"];
        self.check_plain_text(path, part, &keys)?;
        let at_least_one = self.flag(path, part, "at_least_one")?;
        let stops = self.flag(path, part, "stop_after_first")?;
        if !(place.is_last || at_least_one && stops) {
            return Err(self.wrong(
                path,
                "with tags within text that something follows: they can be the last part, or have \
                 both `at_least_one` and `stop_after_first`",
            ));
        }
        let triggers = self.triggers(path, part)?;
        let tags = self.tags(path, part, place.within(stops))?;
        let paths = [format!("{path}.triggers"), format!("{path}.tags")];
        self.dispatch(&paths, &triggers, &tags, (at_least_one, stops))
    }

    fn triggers<'v>(
        &self,
        path: &str,
        part: &'v Map<String, Value>,
    ) -> Result<Vec<&'v str>, ApiError> {
        let triggers = self.list(path, part, "triggers")?;
        let strings = triggers.iter().map(|it| it.as_str().filter(|it| !it.is_empty()));
        strings.collect::<Option<_>>().ok_or_else(|| {
            self.wrong(&within(path, "triggers"), "that are not all strings with a character")
        })
    }

    /// Text in which each trigger begins one of the tags; the paths are theirs.
    fn dispatch(
        &mut self,
        [trigger_path, tag_path]: &[String; 2],
        triggers: &[&str],
        tags: &[Tag],
        (at_least_one, stops): (bool, bool),
    ) -> Result<String, ApiError> {
        let mut behind: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for (index, tag) in tags.iter().enumerate() {
            let mut found = triggers.iter().enumerate();
            let of = |it: &(usize, &&str)| tag.begin.starts_with(*it.1);
            let (Some((at, trigger)), None) = (found.find(of), found.find(of)) else {
                let path = format!("{tag_path}[{index}].begin");
                return Err(self.wrong(&path, "that does not begin with exactly one trigger"));
            };
            let cut = trigger.len();
            if self.marks(&tag.begin).iter().any(|mark| mark.start < cut && cut < mark.end) {
                let message = "whose trigger ends within a special token: name all of it";
                return Err(self.wrong(&format!("{tag_path}[{index}].begin"), message));
            }
            let begin = &tag.begin[trigger.len()..];
            let begin = if begin.is_empty() { String::new() } else { self.literal(begin) };
            behind[at].push(format!("{begin} {}", tag.rest));
        }
        if at_least_one && stops {
            // The first comes at once, and nothing behind it.
            return Ok(format!("({})", self.any_of(tags)));
        }
        let mut any = Vec::new();
        let used = triggers.iter().zip(&behind).enumerate();
        for (index, (trigger, tags)) in used.filter(|(_, (_, tags))| !tags.is_empty()) {
            let text = self.text_until(&format!("{trigger_path}[{index}]"), trigger)?;
            any.push(format!("{text} ({})", tags.join(" | ")));
        }
        let name = self.rule(&any.join(" | "));
        Ok(match (at_least_one, stops) {
            (true, _) => format!("(({}) {name}* ST_TEXT?)", self.any_of(tags)),
            (false, true) => format!("({name} | ST_TEXT?)"),
            (false, false) => format!("({name}* ST_TEXT?)"),
        })
    }

    fn separated(
        &mut self,
        path: &str,
        part: &Map<String, Value>,
        place: Place,
    ) -> Result<String, ApiError> {
        self.only(path, part, &["tags", "separator", "at_least_one", "stop_after_first"])?;
        let tags = self.tags(path, part, place.within(false))?;
        let separator = self.literal(self.text(path, part, "separator")?);
        let name = self.rule(&self.any_of(&tags));
        let all = match self.flag(path, part, "stop_after_first")? {
            true => name,
            false => format!("{name} ({separator} {name})*"),
        };
        let optional = if self.flag(path, part, "at_least_one")? { "" } else { "?" };
        Ok(format!("({all}){optional}"))
    }

    /// The older form.
    fn older(&mut self, tag: &Map<String, Value>) -> Result<String, ApiError> {
        let structures = self.list("", tag, "structures")?;
        let triggers = self.triggers("", tag)?;
        let mut tags = Vec::new();
        for (index, structure) in structures.iter().enumerate() {
            let path = format!("structures[{index}]");
            let structure = self.object(&path, structure)?;
            self.only(&path, structure, &["begin", "schema", "end"])?;
            let begin = self.text(&path, structure, "begin")?.to_owned();
            let content = match structure.get("schema") {
                // Some clients write it in a string.
                Some(Value::String(text)) => serde_json::from_str(text).ok(),
                other => other.cloned(),
            };
            let content = self.schema(&format!("{path}.schema"), content.as_ref())?;
            let end = self.literal(self.text(&path, structure, "end")?);
            tags.push(self.named(begin, &format!("{content} {end}")));
        }
        let paths = ["triggers".to_owned(), "structures".to_owned()];
        self.dispatch(&paths, &triggers, &tags, (false, false))
    }
}
