//! Bounds on reasoning: `thinking_token_budget`, and Anthropic's `budget_tokens`.
use std::path::Path;

use coordinator::http::options::ApiOptions;
use coordinator::text::model::TextModel;
use coordinator::text::reply::{CallFormat, Reasoning, ThinkMarks};
use serde_json::{Value, json};
use shared::protocol::{ThinkingBudget, TokenMask};
use testkit::models::demo;

use crate::rig::{Rig, Script};

const CHAT: &str = "/v1/chat/completions";

/// The demo model's text side, whose template opens reasoning where `enable_thinking` is true. Its
/// marks are tokens, as in Qwen3 not special ones. Returns the two tokens as well.
fn model() -> (TextModel, u32, u32) {
    let read = |file: &Path| std::fs::read_to_string(file).unwrap();
    let parse = |file: &str| serde_json::from_str::<Value>(&read(&demo().join(file))).unwrap();
    let (mut tokenizer, mut config) = (parse("tokenizer.json"), parse("config.json"));
    let first = config["vocab_size"].as_u64().unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((first..).zip(["<think>", "</think>"]).map(|(id, mark)| {
        json!({"id": id, "content": mark, "special": false, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    }));
    config["vocab_size"] = json!(first + 2);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    write("config.json", &config.to_string());
    write(
        "chat_template.jinja",
        "{% for it in messages %}{{ it.content }}{% endfor %}{{ '<think>' if enable_thinking }}",
    );
    (TextModel::load(folder.path()).unwrap(), first as u32, first as u32 + 1)
}

/// A rig that serves it, with the two tokens.
pub(crate) fn rig(reasoning: Option<Reasoning>) -> (Rig, u32, u32) {
    let api =
        ApiOptions { tool_calls: Some(CallFormat::Hermes), reasoning, ..ApiOptions::default() };
    let (text, open, close) = model();
    let script = Script { text: "a b".to_owned(), ..Script::default() };
    (Rig::chosen(script, text, &api), open, close)
}

fn chat(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// What the engine is told of a request's reasoning.
async fn told(rig: &Rig, path: &str, body: &Value) -> Option<ThinkingBudget> {
    let reply = rig.client.post(path, body).await.unwrap();
    assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
    let request = rig.seen.lock().unwrap().requests.pop().unwrap();
    request.thinking.as_deref().cloned()
}

#[tokio::test]
async fn the_engine_is_told_the_budget_and_the_tokens_around_reasoning() {
    let (rig, open, close) = rig(Some(Reasoning::Marked(ThinkMarks::THINK)));
    let budget = |tokens, is_open| {
        Some(ThinkingBudget { tokens, open: Some(open), closes: vec![close], is_open })
    };
    let thinks = json!({"enable_thinking": true});
    let opened = json!({"thinking_token_budget": 7, "chat_template_kwargs": thinks});
    assert_eq!(told(&rig, CHAT, &chat(&opened)).await, budget(7, true));
    let plain = json!({"thinking_token_budget": 0});
    assert_eq!(told(&rig, CHAT, &chat(&plain)).await, budget(0, false));
    for none in
        [json!({}), json!({"thinking_token_budget": -1}), json!({"thinking_token_budget": null})]
    {
        assert_eq!(told(&rig, CHAT, &chat(&none)).await, None, "{none}");
    }
    let responses = json!({"input": "x", "thinking_token_budget": 7});
    assert_eq!(told(&rig, "/v1/responses", &responses).await, budget(7, false));
    // Completions are told by the prompt's tokens whether reasoning is open.
    for (prompt, is_open) in [
        ("x", false),
        ("x <think>", true),
        ("x <think> a b", true),
        ("<think> a </think> b", false),
        ("<think> a </think> b <think>", true),
    ] {
        let body = json!({"prompt": prompt, "thinking_token_budget": 7});
        assert_eq!(told(&rig, "/v1/completions", &body).await, budget(7, is_open), "{prompt:?}");
    }
}

#[tokio::test]
async fn every_choice_is_guided_beside_a_constraint_of_its_own() {
    let (rig, _, close) = rig(Some(Reasoning::Marked(ThinkMarks::THINK)));
    let thinks = json!({"enable_thinking": true});
    let end = TokenMask::Only(vec![close]);
    for more in [json!({}), json!({"response_format": {"type": "json_object"}})] {
        let mut body = chat(&more);
        body["thinking_token_budget"] = json!(0);
        body["chat_template_kwargs"] = thinks.clone();
        body["n"] = json!(2);
        let reply = rig.client.post(CHAT, &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let request = rig.seen.lock().unwrap().requests.pop().unwrap();
        assert_eq!(request.guide_spec.is_some(), more != json!({}));
        let first: Vec<_> = request.guides.iter().map(|guide| guide.allowed().cloned()).collect();
        assert_eq!(first, vec![Some(end.clone()); 2], "{more}");
    }
}

/// Anthropic's clients name a budget to all models.
#[tokio::test]
async fn anthropics_budget_bounds_reasoning_where_a_token_ends_it() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let (with, open, close) = rig(Some(Reasoning::Marked(ThinkMarks::THINK)));
    let budget =
        ThinkingBudget { tokens: 1024, open: Some(open), closes: vec![close], is_open: true };
    assert_eq!(told(&with, "/v1/messages", &body).await, Some(budget));
    let (without, ..) = rig(Some(Reasoning::Marked(ThinkMarks::MISTRAL)));
    assert_eq!(told(&without, "/v1/messages", &body).await, None);
}

#[tokio::test]
async fn what_cannot_be_bounded_is_refused() {
    let (with, ..) = rig(Some(Reasoning::Marked(ThinkMarks::THINK)));
    let (untold, ..) = rig(None);
    let (unmarked, ..) = rig(Some(Reasoning::Marked(ThinkMarks::MISTRAL)));
    let prompt = json!({"prompt": "x", "thinking_token_budget": 7});
    let of_messages = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
        "thinking_token_budget": 7});
    let (_, _, close) = rig(None);
    let stops = json!({"thinking_token_budget": 7, "min_tokens": 2, "stop_token_ids": [close]});
    for (rig, path, body, what) in [
        (&with, CHAT, chat(&stops), "`stop_token_ids`"),
        (&untold, CHAT, chat(&json!({"thinking_token_budget": 7})), "--reasoning-parser"),
        (&unmarked, CHAT, chat(&json!({"thinking_token_budget": 7})), "no token `[/THINK]`"),
        (&untold, "/v1/completions", prompt, "--reasoning-parser"),
        (&with, CHAT, chat(&json!({"thinking_token_budget": -2})), "from -1 to 4294967295"),
        (&with, CHAT, chat(&json!({"thinking_token_budget": 1.5})), "from -1 to 4294967295"),
        (&with, "/v1/messages", of_messages, "here it is `thinking.budget_tokens`"),
        (&with, "/v1/embeddings", json!({"input": "x", "thinking_token_budget": 7}), "is not"),
    ] {
        let reply = rig.client.post(path, &body).await.unwrap();
        let said = reply.body["error"]["message"].as_str().unwrap_or_default();
        let names = said.contains("thinking_token_budget");
        assert!(reply.status == 400 && names && said.contains(what), "{path} {body}: {said}");
    }
}
