//! Constraints on a request's output: OpenAI's `response_format`, vLLM's `structured_outputs`, its
//! older `guided_*` fields and `allowed_token_ids`. Only one of them at a time.
use serde_json::{Map, Value};
use shared::protocol::guide::{MADE_BYTES_MAX, SCHEMA_BYTES_MAX};
use shared::protocol::{GuideSpec, Whitespace};

use super::error::ApiError;
use super::fields::{Fields, whole_number};
use super::limits::PATTERN_BYTES;
use super::structural_tag;
use crate::guide;
use crate::text::reply::grammar::{self, Special};

/// Maximum length of a schema's name, in bytes.
pub(super) const NAME_MAX: usize = 256;
/// The schema of a JSON object for which none is given.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// A constraint, and the field that set it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The field.
    pub field: &'static str,
    /// Its specification.
    pub spec: GuideSpec,
    /// The rules of a structural tag, of which the specification is made.
    tags: Option<String>,
}

/// Reads the fields; `None` if the text is unconstrained. `end_tokens` end the request's text;
/// `special` looks up tokens by their text.
///
/// # Errors
/// 400 naming the field.
pub fn read(
    fields: &Fields,
    vocab_size: u32,
    end_tokens: &[u32],
    special: Special<'_>,
) -> Result<Option<Asked>, ApiError> {
    let mut asked: Option<Asked> = None;
    let found = [
        response_format(fields, special)?,
        structured_outputs(fields, special)?,
        structural_tag(fields, special)?,
        guided(fields, "guided_json", Kind::Json)?,
        guided(fields, "guided_regex", Kind::Regex)?,
        guided(fields, "guided_choice", Kind::Choice)?,
        guided(fields, "guided_grammar", Kind::Grammar)?,
        allowed_token_ids(fields, vocab_size)?,
    ];
    for one in found.into_iter().flatten() {
        if let Some(before) = &asked {
            let message = format!(
                "`{}` and `{}` both constrain the output: use one at a time",
                one.field, before.field
            );
            return Err(ApiError::field(one.field, message));
        }
        one.spec.check().map_err(|error| wrong(one.field, &error))?;
        asked = Some(one);
    }
    let whitespace = "guided_whitespace_pattern";
    if fields.get(whitespace).is_some()
        && asked.as_ref().is_none_or(|asked| asked.field != "guided_json")
    {
        return Err(wrong(whitespace, "can only be used with `guided_json`"));
    }
    match &asked {
        Some(Asked { field, spec: GuideSpec::Tokens(tokens), .. }) => {
            check_goes_on(fields, field, tokens, end_tokens)?;
        }
        Some(Asked { field, .. }) => check_end(fields, field)?,
        None => {}
    }
    Ok(asked)
}

impl Asked {
    /// A constraint that a field set.
    #[must_use]
    pub fn new(field: &'static str, spec: GuideSpec) -> Self {
        Self { field, spec, tags: None }
    }

    /// The constraint of a structural tag; for `place` see [`structural_tag::rules`].
    fn tagged(
        place @ (field, _): (&'static str, &str),
        tag: &Map<String, Value>,
        special: Special<'_>,
    ) -> Result<Self, ApiError> {
        let tags = structural_tag::rules(place, tag, special)?;
        let rules = tags.clone() + &structural_tag::terminals(None);
        let spec = GuideSpec::Made(grammar::whole(structural_tag::ROOT, &rules));
        Ok(Self { field, spec, tags: Some(tags) })
    }

    /// Whether it is a structural tag: it says itself where calls are.
    #[must_use]
    pub fn is_tagged(&self) -> bool {
        self.tags.is_some()
    }

    /// Whether it concerns the whole output in any case: a client's own grammar, or a list of
    /// tokens.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let is_whole =
            matches!(self.spec, GuideSpec::Lark(_) | GuideSpec::Made(_) | GuideSpec::Tokens(_));
        is_whole && self.tags.is_none()
    }

    /// Whether it is a list of tokens.
    #[must_use]
    pub fn lists_tokens(&self) -> bool {
        matches!(self.spec, GuideSpec::Tokens(_))
    }

    /// Returns it as a grammar rule named `head`; `None` if it concerns the whole output. Text
    /// without a form does not begin with `unless`.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn rules(&self, head: &str, unless: Option<&str>) -> Result<Option<String>, ApiError> {
        if let Some(tags) = &self.tags {
            let terminals = structural_tag::terminals(unless);
            return Ok(Some(format!("{head}: {}\n{tags}{terminals}", structural_tag::ROOT)));
        }
        Ok(match &self.spec {
            GuideSpec::Json { schema, whitespace } => {
                let schema = guide::json_schema(schema, whitespace);
                let schema = schema.map_err(|error| wrong(self.field, &error))?;
                Some(grammar::json(head, &schema))
            }
            GuideSpec::Regex(regex) => Some(grammar::regex(head, guide::without_anchors(regex))),
            GuideSpec::Choice(strings) => Some(grammar::choice(head, strings)),
            GuideSpec::Lark(_) | GuideSpec::Made(_) | GuideSpec::Tokens(_) => None,
        })
    }
}

/// Rejects other fields that say where the text ends.
///
/// # Errors
/// 400 naming the field.
pub(super) fn check_end(fields: &Fields, field: &str) -> Result<(), ApiError> {
    let message =
        format!("and `{field}` cannot be combined: the latter decides where the text ends");
    if least(fields)? > 0 {
        return Err(wrong("min_tokens", &message));
    }
    if fields.boolean("ignore_eos", false)? {
        return Err(wrong("ignore_eos", &message));
    }
    Ok(())
}

/// Rejects a list of only end tokens if the text may not end yet: no token could come.
fn check_goes_on(
    fields: &Fields,
    field: &str,
    tokens: &[u32],
    end_tokens: &[u32],
) -> Result<(), ApiError> {
    if least(fields)? > 0 && tokens.iter().all(|token| end_tokens.contains(token)) {
        let message = format!("and `{field}` cannot be combined: the latter lists only end tokens");
        return Err(wrong("min_tokens", &message));
    }
    Ok(())
}

fn least(fields: &Fields) -> Result<u32, ApiError> {
    Ok(fields.count("min_tokens", 0, u32::MAX)?.unwrap_or(0))
}

/// Makes an error of a field whose sentence continues after its name.
pub(super) fn wrong(field: &str, message: &str) -> ApiError {
    ApiError::field(field, format!("`{field}` {message}"))
}

fn response_format(fields: &Fields, special: Special<'_>) -> Result<Option<Asked>, ApiError> {
    let field = "response_format";
    let Some(value) = fields.get(field) else { return Ok(None) };
    let expected = "an object with the `type` \"text\", \"json_object\", \"json_schema\" or \
                    \"structural_tag\"";
    let format = value.as_object().ok_or_else(|| Fields::wrong(field, value, expected))?;
    let schema = match format.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        // Some clients put the schema here.
        Some("json_object") => match format.get("schema") {
            None | Some(Value::Null) => ANY_OBJECT.to_owned(),
            Some(schema @ Value::Object(_)) => written(schema, guide::loosened),
            Some(_) => return Err(wrong(field, "has a `schema` that is not an object")),
        },
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(Value::as_object);
            named_schema(schema.ok_or_else(|| wrong(field, "needs `json_schema`, an object"))?)?
        }
        Some("structural_tag") => {
            return tagged((field, ""), field, value, special).map(Some);
        }
        _ => return Err(Fields::wrong(field, value, expected)),
    };
    Ok(Some(Asked::new(field, json(schema, Whitespace::Usual))))
}

/// Reads vLLM's field of that name: JSON in a string, or as it is.
fn structural_tag(fields: &Fields, special: Special<'_>) -> Result<Option<Asked>, ApiError> {
    let field = "structural_tag";
    let Some(value) = fields.get(field) else { return Ok(None) };
    tagged((field, ""), field, value, special).map(Some)
}

/// Reads a structural tag, JSON in a string or as it is; `name` is where it was.
fn tagged(
    place @ (field, _): (&'static str, &str),
    name: &str,
    value: &Value,
    special: Special<'_>,
) -> Result<Asked, ApiError> {
    let wrong = |message: String| ApiError::field(field, format!("`{name}` {message}"));
    let bytes = match value {
        Value::String(text) => text.len(),
        other => other.to_string().len(),
    };
    if bytes > MADE_BYTES_MAX {
        return Err(wrong(format!("has {bytes} bytes, the limit is {MADE_BYTES_MAX}")));
    }
    let expected = "must be a structural tag: an object, or one in a string";
    match value {
        Value::Object(tag) => Asked::tagged(place, tag, special),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(tag)) => Asked::tagged(place, &tag, special),
            Ok(_) => Err(wrong(expected.to_owned())),
            Err(error) => Err(wrong(format!("{expected}; this is not JSON: {error}"))),
        },
        _ => Err(wrong(expected.to_owned())),
    }
}

/// Writes a schema without what `changed` takes out of it. One that is too long, and is refused for
/// that, is not looked through.
fn written(schema: &Value, changed: fn(&Value) -> Value) -> String {
    let written = schema.to_string();
    match written.len() <= SCHEMA_BYTES_MAX {
        true => changed(schema).to_string(),
        false => written,
    }
}

fn json(schema: String, whitespace: Whitespace) -> GuideSpec {
    GuideSpec::Json { schema, whitespace }
}

/// Reads the schema of OpenAI's `json_schema`.
fn named_schema(named: &Map<String, Value>) -> Result<String, ApiError> {
    let field = "response_format";
    // Clients' libraries take the name of a type, such as `Result[Item]`.
    let is_name = |name: &str| (1..=NAME_MAX).contains(&name.len());
    if !named.get("name").and_then(Value::as_str).is_some_and(is_name) {
        let message = format!("needs `json_schema.name`, a string of 1 to {NAME_MAX} bytes");
        return Err(wrong(field, &message));
    }
    let absent = |key: &str| named.get(key).is_none_or(Value::is_null);
    if !absent("description") && !named["description"].is_string() {
        return Err(wrong(field, "has a `json_schema.description` that is not a string"));
    }
    if !absent("strict") && !named["strict"].is_boolean() {
        return Err(wrong(field, "has a `json_schema.strict` that is neither true nor false"));
    }
    let strict = named.get("strict").and_then(Value::as_bool).unwrap_or(false);
    match named.get("schema") {
        Some(schema @ Value::Object(_)) if strict => Ok(written(schema, guide::without_truisms)),
        Some(schema @ Value::Object(_)) => Ok(written(schema, guide::loosened)),
        _ => Err(wrong(field, "needs `json_schema.schema`, an object")),
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Json,
    Regex,
    Choice,
    Grammar,
}

impl Kind {
    /// Converts a value of this kind; `name` is where it was.
    fn read(self, field: &str, name: &str, value: &Value) -> Result<GuideSpec, ApiError> {
        let wrong = |expected: &str| ApiError::field(field, format!("`{name}` must be {expected}"));
        let text = || value.as_str().map(str::to_owned).ok_or_else(|| wrong("a string"));
        Ok(match self {
            Self::Json => match value {
                Value::Object(_) => {
                    json(written(value, guide::without_unique_items), Whitespace::Usual)
                }
                Value::String(text) => {
                    // One that is too long is refused for that, and one that is no JSON where it is
                    // parsed as a schema.
                    let parsed = match text.len() <= SCHEMA_BYTES_MAX {
                        true => serde_json::from_str::<Value>(text).ok(),
                        false => None,
                    };
                    let schema = parsed.map_or_else(
                        || text.clone(),
                        |schema| written(&schema, guide::without_unique_items),
                    );
                    json(schema, Whitespace::Usual)
                }
                _ => return Err(wrong("a JSON schema: an object, or one in a string")),
            },
            Self::Regex => GuideSpec::Regex(text()?),
            Self::Grammar => GuideSpec::Lark(text()?),
            Self::Choice => {
                let list = value.as_array().map(|list| {
                    list.iter().map(|one| one.as_str().map(str::to_owned)).collect::<Option<_>>()
                });
                GuideSpec::Choice(list.flatten().ok_or_else(|| wrong("a list of strings"))?)
            }
        })
    }
}

fn guided(fields: &Fields, field: &'static str, kind: Kind) -> Result<Option<Asked>, ApiError> {
    let Some(value) = fields.get(field) else { return Ok(None) };
    let mut spec = kind.read(field, field, value)?;
    let pattern = fields.string("guided_whitespace_pattern", PATTERN_BYTES)?;
    if let (GuideSpec::Json { whitespace, .. }, Some(pattern)) = (&mut spec, pattern) {
        *whitespace = Whitespace::Pattern(pattern.to_owned());
    }
    Ok(Some(Asked::new(field, spec)))
}

fn structured_outputs(fields: &Fields, special: Special<'_>) -> Result<Option<Asked>, ApiError> {
    let field = "structured_outputs";
    let Some(value) = fields.get(field) else { return Ok(None) };
    let map = value.as_object().ok_or_else(|| Fields::wrong(field, value, "an object"))?;
    let (mut found, mut whitespace) = (Vec::new(), Whitespace::Usual);
    let of = |spec| Asked::new(field, spec);
    for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
        let name = format!("{field}.{key}");
        let flag = || {
            let wrong = || ApiError::field(field, format!("`{name}` must be true or false"));
            value.as_bool().ok_or_else(wrong)
        };
        match key.as_str() {
            "json" => found.push(of(Kind::Json.read(field, &name, value)?)),
            "regex" => found.push(of(Kind::Regex.read(field, &name, value)?)),
            "choice" => found.push(of(Kind::Choice.read(field, &name, value)?)),
            "grammar" => found.push(of(Kind::Grammar.read(field, &name, value)?)),
            "structural_tag" => {
                let place = (field, "structural_tag.");
                found.push(tagged(place, &name, value, special)?);
            }
            "json_object" if flag()? => {
                found.push(of(json(ANY_OBJECT.to_owned(), Whitespace::Usual)));
            }
            "disable_any_whitespace" if flag()? => whitespace = Whitespace::None,
            "json_object" | "disable_any_whitespace" => {}
            "whitespace_pattern" => match value.as_str() {
                Some(pattern) => whitespace = Whitespace::Pattern(pattern.to_owned()),
                None => return Err(ApiError::field(field, format!("`{name}` must be a string"))),
            },
            // There is nothing to fall back on, and objects are closed anyway.
            "disable_fallback" | "disable_additional_properties" => {
                flag()?;
            }
            _ => return Err(ApiError::field(field, format!("`{name}` is not supported"))),
        }
    }
    if found.len() != 1 {
        let message = format!(
            "must have exactly one of `json`, `json_object`, `regex`, `choice`, `grammar` and \
             `structural_tag`, not {}",
            found.len()
        );
        return Err(wrong(field, &message));
    }
    let mut asked = found.pop();
    match &mut asked {
        Some(asked) if asked.is_tagged() && whitespace != Whitespace::Usual => {
            return Err(wrong(field, "has a `structural_tag`, whose white space cannot be chosen"));
        }
        Some(Asked { spec: GuideSpec::Json { whitespace: usual, .. }, .. }) => *usual = whitespace,
        _ => {}
    }
    Ok(asked)
}

/// Reads vLLM's `allowed_token_ids`: no other tokens, end tokens included.
fn allowed_token_ids(fields: &Fields, vocab_size: u32) -> Result<Option<Asked>, ApiError> {
    let field = "allowed_token_ids";
    let Some(value) = fields.get(field) else { return Ok(None) };
    let id = |id: &Value| {
        let id = whole_number(id).and_then(|id| u32::try_from(id).ok());
        id.filter(|id| *id < vocab_size)
    };
    let tokens = value.as_array().and_then(|list| list.iter().map(id).collect::<Option<_>>());
    let expected = format!("a list of token ids from 0 to {}", vocab_size.saturating_sub(1));
    let tokens = tokens.ok_or_else(|| Fields::wrong(field, value, &expected))?;
    Ok(Some(Asked::new(field, GuideSpec::Tokens(tokens))))
}
