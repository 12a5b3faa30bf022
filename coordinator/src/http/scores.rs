//! `POST /rerank` and `POST /score`: how much texts have in common, as the cosine of the angle
//! between their vectors. Cohere's and Jina's form of the first, vLLM's of both.
use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::Value;
use shared::clock::since_1970;

use super::embeddings::Usage;
use super::error::ApiError;
use super::fields::Fields;
use super::refused::Endpoint;
use super::state::AppState;
use super::vectors::{Computed, Group, Input, Vectors};

/// The names that the two sides of `/score` have: one of these pairs.
pub(super) const PAIRS: [(&str, &str); 4] =
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")];

/// Orders documents by how close they are to a query.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub(super) async fn rerank(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let asked = Vectors::read(state, &fields, Endpoint::Rerank, "rerank-")?;
    let query = texts(state, &fields, "query", "max_tokens_per_query")?;
    if query.inputs.len() != 1 || fields.get("query").is_some_and(Value::is_array) {
        return Err(ApiError::field("query", "`query` must be a string"));
    }
    let documents = texts(state, &fields, "documents", "max_tokens_per_doc")?;
    let most = fields.count("top_n", 0, u32::MAX)?.filter(|most| *most > 0);
    let most = most.map_or(usize::MAX, |most| most as usize);
    let kept = fields.boolean("return_documents", true)?;
    let kept = kept.then(|| documents.inputs.clone());
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let computed = asked.compute(state, fields, vec![query, documents]).await?;
    let usage = computed.usage();
    let Some((query, documents)) = computed.vectors.split_first() else {
        return Err(ApiError::internal("the engine gave no embedding"));
    };
    let mut ranks = Vec::with_capacity(documents.len());
    for (index, document) in documents.iter().enumerate() {
        ranks.push((index, closeness(query, document)?));
    }
    // In the request's order where they are equally close.
    ranks.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let results = ranks.into_iter().take(most).map(|(index, relevance_score)| {
        let text = kept.as_ref().and_then(|kept| kept.get(index)).and_then(Input::text);
        Rank { index, document: text.map(|text| Document { text }), relevance_score }
    });
    let results = results.collect();
    Ok(HttpResponse::Ok().json(Ranking { id: &id, model: &model, usage, results }))
}

/// Scores pairs of texts: one with each of several, or each with the one at its place.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub(super) async fn score(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let asked = Vectors::read(state, &fields, Endpoint::Score, "score-")?;
    let (left, right) = sides(&fields)?;
    let ones = texts(state, &fields, left, "max_tokens_per_query")?;
    let others = texts(state, &fields, right, "max_tokens_per_doc")?;
    let (count, of_others) = (ones.inputs.len(), others.inputs.len());
    if count != 1 && count != of_others {
        let message = format!(
            "`{left}` has {count} texts and `{right}` {of_others}: `{left}` must have one, or as \
             many"
        );
        return Err(ApiError::field(left, message));
    }
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let computed = asked.compute(state, fields, vec![ones, others]).await?;
    let usage = computed.usage();
    let (ones, others) = computed.vectors.split_at(count.min(computed.vectors.len()));
    let mut data = Vec::with_capacity(others.len());
    for (index, (one, other)) in ones.iter().cycle().zip(others).enumerate() {
        data.push(Score { index, object: "score", score: closeness(one, other)? });
    }
    let created = since_1970().as_secs();
    Ok(HttpResponse::Ok().json(Scores {
        id: &id,
        object: "list",
        created,
        model: &model,
        data,
        usage,
    }))
}

impl Computed {
    fn usage(&self) -> Usage {
        Usage { prompt_tokens: self.tokens, total_tokens: self.tokens }
    }
}

/// The fields of the two sides.
fn sides(fields: &Fields) -> Result<(&'static str, &'static str), ApiError> {
    let has = |name: &str| fields.get(name).is_some();
    let mut given = PAIRS.into_iter().filter(|(left, right)| has(left) && has(right));
    let Some((left, right)) = given.next() else {
        // The one that is missing beside what is there.
        let half = PAIRS.into_iter().find(|(left, right)| has(left) || has(right));
        let (left, right) = half.unwrap_or(PAIRS[0]);
        let missing = if has(left) { right } else { left };
        let pairs: Vec<String> =
            PAIRS.iter().map(|(left, right)| format!("`{left}` and `{right}`")).collect();
        let message = format!("`{missing}` is missing: give {}", pairs.join(", or "));
        return Err(ApiError::field(missing, message));
    };
    let other = |name: &&str| ![left, right].contains(name) && has(name);
    match PAIRS.into_iter().flat_map(<[_; 2]>::from).find(other) {
        None => Ok((left, right)),
        Some(more) => {
            let message = format!("`{more}` cannot be combined with `{left}` and `{right}`");
            Err(ApiError::field(more, message))
        }
    }
}

/// Reads the texts of a field: a string, or a list of strings and objects with a `text`. `most` is
/// the field that says how many tokens of each count, 0 for all.
fn texts(
    state: &AppState,
    fields: &Fields,
    name: &'static str,
    most: &str,
) -> Result<Group, ApiError> {
    let max = state.limits.inputs;
    let wrong = || {
        let message = format!(
            "`{name}` must be a string, or a list of 1 to {max} strings or objects with a `text`; \
             none may be empty"
        );
        ApiError::field(name, message)
    };
    let one = |value: &Value| -> Result<Input, ApiError> {
        let text = value.as_str().or_else(|| value.get("text")?.as_str());
        let text = text.filter(|text| !text.is_empty()).ok_or_else(wrong)?;
        Ok(Input::Text(text.to_owned()))
    };
    let inputs = match fields.get(name) {
        None => return Err(ApiError::field(name, format!("`{name}` is required"))),
        Some(Value::Array(list)) if (1..=max).contains(&list.len()) => {
            list.iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        Some(Value::Array(_)) => return Err(wrong()),
        Some(value) => vec![one(value)?],
    };
    let keep = fields.count(most, 0, u32::MAX)?.filter(|most| *most > 0);
    let keep = keep.map(|keep| keep.min(state.limits.max_model_len) as usize);
    Ok(Group { field: name, inputs, keep })
}

/// The cosine of the angle between two vectors of length 1.
fn closeness(one: &[f32], other: &[f32]) -> Result<f32, ApiError> {
    let both = one.iter().zip(other);
    let cosine: f64 = both.map(|(one, other)| f64::from(*one) * f64::from(*other)).sum();
    match cosine.is_finite() {
        true => Ok(cosine.clamp(-1.0, 1.0) as f32),
        false => Err(ApiError::internal("an embedding is no vector of finite numbers")),
    }
}

#[derive(Serialize)]
struct Ranking<'a> {
    id: &'a str,
    model: &'a str,
    usage: Usage,
    /// The closest first.
    results: Vec<Rank<'a>>,
}

#[derive(Serialize)]
struct Rank<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document<'a>>,
    relevance_score: f32,
}

#[derive(Serialize)]
struct Document<'a> {
    text: &'a str,
}

#[derive(Serialize)]
struct Scores<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<Score>,
    usage: Usage,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}
