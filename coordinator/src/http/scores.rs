//! `POST /rerank` and `POST /score`: how well texts go together. A model that was made for it is
//! given each pair; of the others it is the cosine of the angle between the texts' vectors.
//! Cohere's and Jina's form of the first, vLLM's of both.
use std::sync::Arc;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::Value;

use super::classes::frame;
use super::embeddings::Usage;
use super::error::ApiError;
use super::fields::Fields;
use super::refused::Endpoint;
use super::state::AppState;
use super::vectors::{Group, Input, Texts, Vectors, list};

/// The names that the two sides of `/score` have: one of these pairs.
pub(super) const PAIRS: [(&str, &str); 4] =
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")];

/// The least `top_n`: like 0, it stands for all, as in vLLM.
pub(super) const TOP_N: i32 = i32::MIN;

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
    let most = fields.integer("top_n", TOP_N.into(), u32::MAX.into())?.filter(|most| *most > 0);
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let returns = fields.boolean("return_documents", true)?;
    // The documents stay until the answer is sent, and so does the body's share of the room.
    let kept = returns.then(|| (documents.inputs.clone(), fields.share()));
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let (scores, tokens) = judge(state, asked, fields, query, documents).await?;
    let mut ranks: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    // In the request's order where they are equally close.
    ranks.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    ranks.truncate(most);
    let head = RankingHead { id: &id, model: &model, usage: Usage::of(tokens) };
    let head = serde_json::to_string(&head);
    let head = head.map_err(|error| ApiError::internal(error.to_string()))?;
    let head = format!("{},\"results\":[", head.strip_suffix('}').unwrap_or(&head));
    let results = ranks.into_iter().map(move |(index, relevance_score)| {
        let document = kept.as_ref().and_then(|(documents, _)| documents.get(index)?.text());
        let document = document.cloned().map(|text| Document { text });
        Rank { index, document, relevance_score }
    });
    Ok(list(head, results, "]}".to_owned()))
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
    let (scores, tokens) = judge(state, asked, fields, ones, others).await?;
    let (head, tail) = frame(&id, &model, tokens)?;
    let scores = scores.into_iter().enumerate();
    let data = scores.map(|(index, score)| Score { index, object: "score", score });
    Ok(list(head, data, tail))
}

/// Scores each of the `others` with the one at its place, or with the only one. Returns the scores,
/// and the number of tokens.
async fn judge(
    state: &AppState,
    asked: Vectors,
    fields: Fields,
    ones: Group,
    others: Group,
) -> Result<(Vec<f32>, usize), ApiError> {
    let (count, of_others) = (ones.inputs.len(), others.inputs.len());
    if state.text.classifier.is_none() {
        if !asked.activates {
            let message =
                "`use_activation` is not supported by this model, whose scores are cosines";
            return Err(ApiError::field("use_activation", message));
        }
        let mut compared = Compared::with(count, of_others);
        let texts = Texts::Each(vec![ones, others]);
        let tokens = asked.compute(state, fields, texts, |vector| compared.take(vector)).await?;
        return Ok((compared.scores, tokens));
    }
    let mut scores = Vec::with_capacity(of_others);
    let take = |numbers: Vec<f32>| {
        let score = numbers.first().copied();
        scores.push(score.ok_or_else(|| ApiError::internal("the engine gave no score"))?);
        Ok(())
    };
    let tokens = asked.compute(state, fields, Texts::Pairs(ones, others), take).await?;
    Ok((scores, tokens))
}

/// The scores so far. Only the vectors of the left side are kept: each of the right side is needed
/// once.
struct Compared {
    /// Texts on the left side.
    count: usize,
    ones: Vec<Vec<f32>>,
    scores: Vec<f32>,
}

impl Compared {
    fn with(count: usize, of_others: usize) -> Self {
        let (ones, scores) = (Vec::with_capacity(count), Vec::with_capacity(of_others));
        Self { count, ones, scores }
    }

    /// Takes the next vector: those of the left side come first.
    fn take(&mut self, vector: Vec<f32>) -> Result<(), ApiError> {
        if self.ones.len() < self.count {
            self.ones.push(vector);
            return Ok(());
        }
        let one = self.ones.get(self.scores.len() % self.count.max(1));
        let one = one.ok_or_else(|| ApiError::internal("a text has nothing to compare with"))?;
        self.scores.push(closeness(one, &vector)?);
        Ok(())
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
            "`{name}` must be a string, or a list of 1 to {max} strings or objects with a `text`"
        );
        ApiError::field(name, message)
    };
    let one = |value: &Value| -> Result<Input, ApiError> {
        let text = value.as_str().or_else(|| value.get("text")?.as_str());
        Ok(Input::Text(text.ok_or_else(wrong)?.into()))
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

/// The answer of `/rerank`, before its results.
#[derive(Serialize)]
struct RankingHead<'a> {
    id: &'a str,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Rank {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
    relevance_score: f32,
}

#[derive(Serialize)]
struct Document {
    text: Arc<str>,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::room::Room;
    use super::super::state::tests::state_of;
    use super::*;
    use crate::engine::{EngineCommand, EngineEvent, EngineHandle, FinishReason};

    #[actix_rt::test]
    async fn documents_that_are_returned_keep_their_share_of_the_room() {
        let (engine, mut commands) = EngineHandle::channel();
        let (state, _hub) = state_of(engine);
        let room = Room::new(state.limits.body_bytes);
        let empty = room.left();
        for returns in [true, false] {
            let body = json!({"query": "a", "documents": ["b ".repeat(1 << 16)],
                "max_tokens_per_doc": 1, "return_documents": returns});
            let mut received = room.body();
            received.push(body.to_string().as_bytes()).unwrap();
            let (bytes, share) = received.whole();
            let fields = Fields::parse(&bytes, &state.limits).unwrap().in_room(share);
            let asked = {
                let state = state.clone();
                actix_rt::spawn(async move { rerank(&state, fields).await })
            };
            for _ in 0..2 {
                let Some(EngineCommand::Submit { events, .. }) = commands.recv().await else {
                    panic!("a text is missing")
                };
                assert_eq!(room.left() < empty, returns, "while they are computed");
                let (choice, reason, cached) = (0, FinishReason::Complete, 0);
                events.send(EngineEvent::Embedding(vec![1.0])).unwrap();
                events.send(EngineEvent::Finished { choice, reason, cached }).unwrap();
            }
            let answer = asked.await.unwrap().unwrap();
            assert_eq!(room.left() < empty, returns, "until the answer is sent");
            let text = actix_web::body::to_bytes(answer.into_body()).await.unwrap();
            let answer: Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(answer["results"][0].get("document").is_some(), returns);
            assert_eq!(room.left(), empty);
        }
    }
}
