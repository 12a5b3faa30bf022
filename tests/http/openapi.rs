//! `/openapi.json` held against the server: its routes, and each field at the ends of its bounds
//! and beyond. That all answers are as it says is checked by [`crate::contract`] in every test.
use std::collections::BTreeMap;
use std::time::Duration;

use coordinator::http::options::ApiOptions;
use coordinator::text::reply::{CallFormat, Reasoning, ThinkMarks};
use reqwest::Method;
use serde_json::{Value, json};

use crate::classes;
use crate::rig::{Rig, Script, described};
use crate::thinking;

fn rig() -> Rig {
    let api = ApiOptions {
        tool_calls: Some(CallFormat::Hermes),
        reasoning: Some(Reasoning::Marked(ThinkMarks::THINK)),
        ..ApiOptions::default()
    };
    let script = Script { text: "x".to_owned(), ..Script::default() };
    Rig::chosen(script, described(), &api)
}

#[tokio::test]
async fn the_paths_are_served_and_with_no_other_methods() {
    let rig = rig();
    let document = rig.client.get("/openapi.json").await.unwrap().body;
    assert_eq!(document["openapi"], "3.1.0");
    let http = reqwest::Client::new();
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 15 && !paths.keys().any(|path| path.starts_with("/admin")));
    assert!(paths.contains_key("/tokenizer_info"));
    for (path, of) in paths {
        let url = format!("http://{}{}", rig.address, path.replace("{id}", "demo"));
        for method in ["GET", "HEAD", "POST", "PUT", "DELETE"] {
            let sent = http.request(Method::from_bytes(method.as_bytes()).unwrap(), &url);
            let status = sent.timeout(Duration::from_secs(60)).send().await.unwrap().status();
            let is_described = of.get(method.to_lowercase()).is_some();
            assert_eq!(status.as_u16() != 405, is_described, "{method} {path}: {status}");
            let is_missing = of[method.to_lowercase()]["responses"][status.as_str()].is_null();
            assert!(!is_described || !is_missing, "{method} {path}: {status}");
        }
    }
}

#[tokio::test]
async fn the_document_follows_the_model_and_the_options() {
    let bodies = |rig: &Rig| rig.client.contract().document["components"]["schemas"].clone();
    let schemas = bodies(&rig());
    let most = &schemas["CompletionRequest"]["properties"]["max_tokens"]["maximum"];
    assert_eq!(most, &json!(1023), "the demo model's length, less a prompt");
    let names = &schemas["ChatCompletionRequest"]["properties"]["model"]["enum"];
    assert_eq!(names, &json!(["demo", "org/demo", "", null]));
    let few = bodies(&Rig::with_api(&ApiOptions { max_logprobs: 3, ..ApiOptions::default() }));
    assert_eq!(few["CompletionRequest"]["properties"]["logprobs"]["maximum"], 3);
    let budget = |schemas: &Value| {
        schemas["ChatCompletionRequest"]["properties"]["thinking_token_budget"].clone()
    };
    let marks = Some(Reasoning::Marked(ThinkMarks::THINK));
    assert_eq!(budget(&bodies(&thinking::rig(marks).0))["maximum"], u32::MAX);
    assert_eq!(budget(&schemas)["enum"], json!([-1, null]), "none of its tokens is a mark");
    let free = bodies(&Rig::with_priorities());
    assert_eq!(free["CompletionRequest"]["properties"]["priority"]["minimum"], i32::MIN);
}

/// What generators of clients do not understand: they leave out what has it.
fn not_understood(schema: &Value, found: &mut Vec<String>) {
    let mut wrong = |what: &str| found.push(format!("{what}: {schema}"));
    if let Some(values) = schema["enum"].as_array() {
        let mut kinds: Vec<&str> = values.iter().filter(|it| !it.is_null()).map(kind_of).collect();
        kinds.dedup();
        if kinds.len() != 1 || !["string", "integer"].contains(&kinds[0]) {
            wrong("values of several types, or of one that has no enumerations");
        }
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        one => vec![one.clone()],
    };
    if kinds.contains(&json!("array")) && schema["items"].is_null() {
        wrong("a list of nothing");
    }
    if schema.get("properties").is_some_and(|it| it["type"].is_null())
        && !kinds.contains(&json!("object"))
    {
        wrong("properties of no object");
    }
    match schema {
        Value::Object(map) => map.values().for_each(|it| not_understood(it, found)),
        Value::Array(list) => list.iter().for_each(|it| not_understood(it, found)),
        _ => {}
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "string",
        Value::Number(number) if number.is_i64() => "integer",
        _ => "other",
    }
}

#[tokio::test]
async fn generators_of_clients_understand_it() {
    let rig = rig();
    let schemas = &rig.client.contract().document["components"]["schemas"];
    // Generated clients have a type of this name.
    assert!(schemas["Response"].is_null());
    let mut found = Vec::new();
    schemas.as_object().unwrap().values().for_each(|it| not_understood(it, &mut found));
    assert_eq!(found, Vec::<String>::new());
    for wrong in [
        json!({"enum": [null, "", []]}),
        json!({"enum": [false]}),
        json!({"items": {"type": ["array", "null"]}}),
        json!({"anyOf": [{"properties": {"a": {}}}]}),
    ] {
        let mut found = Vec::new();
        not_understood(&wrong, &mut found);
        assert_eq!(found.len(), 1, "{wrong}");
    }
}

#[tokio::test]
async fn an_answer_that_differs_from_the_document_is_noticed() {
    let rig = rig();
    let asked = json!({"prompt": "x", "max_tokens": 1});
    let answer = rig.client.post("/v1/completions", &asked).await.unwrap().body;
    let schema = json!({"$ref": "#/components/schemas/Completion"});
    let wrong = |change: &dyn Fn(&mut Value)| {
        let mut answer = answer.clone();
        change(&mut answer);
        rig.client.contract().wrong(&schema, &answer)
    };
    assert_eq!(wrong(&|_| {}), None);
    assert!(wrong(&|it| it["more"] = json!(1)).unwrap().contains("more"));
    assert!(wrong(&|it| it["choices"][0]["more"] = json!(1)).is_some());
    assert!(wrong(&|it| it["choices"][0]["finish_reason"] = json!("tired")).is_some());
    assert!(wrong(&|it| it["usage"]["total_tokens"] = json!("3")).is_some());
    assert!(wrong(&|it| drop(it.as_object_mut().unwrap().remove("id"))).is_some());
}

/// A request that is accepted, for each path.
fn bases() -> Vec<(&'static str, Value)> {
    let turn = json!([{"role": "user", "content": "x"}]);
    vec![
        ("/v1/completions", json!({"prompt": [300], "max_tokens": 1})),
        // So that a prompt leaves room for the longest output.
        ("/v1/chat/completions", json!({"messages": turn, "truncate_prompt_tokens": 1})),
        ("/v1/responses", json!({"input": "x", "truncate_prompt_tokens": 1})),
        ("/v1/messages", json!({"messages": turn, "max_tokens": 1, "truncate_prompt_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": turn})),
        ("/v1/embeddings", json!({"input": "x"})),
        ("/rerank", json!({"query": "x", "documents": ["x"]})),
        ("/score", json!({"text_1": "x", "text_2": "x"})),
        ("/pooling", json!({"input": "x"})),
        ("/classify", json!({"input": "x"})),
        ("/tokenize", json!({"messages": turn})),
        ("/detokenize", json!({"tokens": [300]})),
    ]
}

/// What other fields must say for a value to mean something.
fn needs(path: &str, field: &str, value: &Value) -> Value {
    let function = match path {
        "/v1/responses" => json!({"type": "function", "name": "a"}),
        "/v1/messages" | "/v1/messages/count_tokens" => {
            json!({"name": "a", "input_schema": {}})
        }
        _ => json!({"type": "function", "function": {"name": "a"}}),
    };
    match field {
        "best_of" if value.is_number() => json!({"n": value}),
        "stream_options" => json!({"stream": true}),
        "top_logprobs" if path == "/v1/responses" => {
            json!({"include": ["message.output_text.logprobs"]})
        }
        // It is refused there, and so would the other be.
        "top_logprobs" if path.starts_with("/v1/messages") => json!({}),
        "top_logprobs" => json!({"logprobs": true}),
        "min_tokens" if ["/v1/completions", "/v1/messages"].contains(&path) => {
            json!({"max_tokens": 1023})
        }
        "max_tokens" if *value == json!(0) => json!({"echo": true}),
        "guided_whitespace_pattern" => json!({"guided_json": {}}),
        "continue_final_message" if *value == json!(true) => {
            json!({"add_generation_prompt": false})
        }
        "tool_choice" => json!({"tools": [function]}),
        "prompt" if path == "/tokenize" => json!({"messages": null}),
        "messages" if path == "/tokenize" => json!({}),
        "truncation" => json!({"truncate_prompt_tokens": null}),
        _ if path == "/score" && SIDES.contains(&field) && !value.is_null() => {
            let other = match field {
                "queries" => "items",
                "documents" | "items" => "queries",
                "data_1" => "data_2",
                _ => "data_1",
            };
            json!({"text_1": null, "text_2": null, other: "x"})
        }
        _ => json!({}),
    }
}

/// What `/score` compares, besides `text_1` and `text_2`. All other fields are those of `/rerank`.
const SIDES: &[&str] = &["queries", "documents", "items", "data_1", "data_2"];

/// What `/classify` and `/pooling` have that `/v1/embeddings` has not, or reads otherwise.
const OF_CLASSES: &[&str] = &["data", "dimensions", "softmax", "task", "use_activation"];

/// Fields whose values may be refused for what they mean, which no schema can say: a grammar that
/// is none, a list without a constraint, a conversation that says nothing.
const MEANING: &[&str] = &[
    "best_of",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "input",
    "messages",
    "prompt",
    "query",
    "response_format",
    "structural_tag",
    "structured_outputs",
    "text",
    "output_config",
    "output_format",
    "tool_choice",
    "allowed_token_ids",
];

#[tokio::test]
async fn each_field_is_accepted_up_to_its_bounds_and_refused_beyond() {
    let (usual, sorting) = (rig(), classes::rig(3));
    let (mut accepted, mut refused, mut by_meaning) = (0, 0, 0);
    for (path, base) in bases() {
        let rig = if path == "/classify" { &sorting } else { &usual };
        let schemas = &rig.client.contract().document["components"]["schemas"];
        let operation = &rig.client.contract().document["paths"][path]["post"];
        let body = &operation["requestBody"]["content"]["application/json"]["schema"];
        for (field, of_field) in &fields_of(schemas, body) {
            // A side of `/score` may be refused for what the other says.
            let is_side = field.starts_with("text_") || SIDES.contains(&field.as_str());
            let is_own = path == "/score" && is_side;
            if path == "/score" && !is_own {
                continue;
            }
            if ["/classify", "/pooling"].contains(&path) && !OF_CLASSES.contains(&field.as_str()) {
                continue;
            }
            for value in candidates(of_field, 0) {
                let mut body = base.clone();
                body[field] = value.clone();
                for (name, value) in needs(path, field, &value).as_object().unwrap() {
                    body[name] = value.clone();
                }
                let wrong = rig.client.contract().wrong(of_field, &value);
                let reply = match body["stream"] == json!(true) && wrong.is_none() {
                    true => {
                        let reply = rig.client.open(path, &body).await.unwrap();
                        let status = reply.status().as_u16();
                        (status, reply.text().await.unwrap())
                    }
                    false => {
                        let reply = rig.client.post(path, &body).await.unwrap();
                        (reply.status, reply.body.to_string())
                    }
                };
                let shown: String = value.to_string().chars().take(200).collect();
                let what = format!("{path} {field} = {shown}: {} {}", reply.0, reply.1);
                match (wrong, reply.0) {
                    (None, 200) => accepted += 1,
                    (None, 400) if is_own || MEANING.contains(&field.as_str()) => by_meaning += 1,
                    (Some(_), 400 | 404) => refused += 1,
                    (wrong, _) => panic!("{what}\nby the document: {wrong:?}"),
                }
                rig.seen.lock().unwrap().requests.clear();
                rig.seen.lock().unwrap().events.clear();
            }
        }
    }
    println!("{accepted} accepted, {refused} refused, {by_meaning} for what they mean");
    assert!(accepted > 500 && refused > 1000 && by_meaning * 4 < accepted);
}

/// The fields of a body, in any of its forms.
fn fields_of(schemas: &Value, body: &Value) -> BTreeMap<String, Value> {
    let named = |it: &Value| &schemas[it["$ref"].as_str().unwrap().rsplit('/').next().unwrap()];
    let whole = named(body);
    let forms = whole["anyOf"].as_array();
    let forms = forms.map_or_else(|| vec![whole], |forms| forms.iter().map(named).collect());
    let mut all: BTreeMap<String, Value> = BTreeMap::new();
    for (field, of_form) in forms.iter().flat_map(|form| form["properties"].as_object().unwrap()) {
        let of_field = all.entry(field.clone()).or_insert_with(|| of_form.clone());
        if of_field != of_form {
            *of_field = json!({"anyOf": [of_field, of_form]});
        }
    }
    all
}

/// A value that a schema allows.
fn example(schema: &Value) -> Value {
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().find(|it| !it.is_null()).cloned().unwrap_or_default();
    }
    if let Some(schemas) = schema["anyOf"].as_array() {
        let chosen = example(&schemas[0]);
        if schema["properties"].is_null() {
            return chosen;
        }
    }
    match kind(schema) {
        "integer" | "number" => schema["minimum"].clone(),
        "boolean" => json!(true),
        "string" if schema["pattern"] == "^clear_thinking_" => json!("clear_thinking_1"),
        "string" => json!("a"),
        "array" => {
            let least = schema["minItems"].as_u64().unwrap_or(0);
            (0..least).map(|_| example(&schema["items"])).collect()
        }
        "object" => {
            let required = schema["required"].as_array().into_iter().flatten();
            let mut object = json!({});
            for name in required.map(|name| name.as_str().unwrap()) {
                object[name] = example(&schema["properties"][name]);
            }
            object
        }
        _ => Value::Null,
    }
}

/// The type, besides null.
fn kind(schema: &Value) -> &str {
    match &schema["type"] {
        Value::String(kind) => kind,
        Value::Array(kinds) => kinds[0].as_str().unwrap(),
        _ => "",
    }
}

/// Values at the ends of a schema's bounds and just beyond, and one of each type.
fn candidates(schema: &Value, depth: usize) -> Vec<Value> {
    let mut all = vec![json!(null), json!("?"), json!(5.5), json!(true), json!([]), json!({})];
    if let Some(schemas) = schema["anyOf"].as_array() {
        all.extend(schemas.iter().flat_map(|it| candidates(it, depth)));
    }
    all.extend(schema["enum"].as_array().into_iter().flatten().cloned());
    all.extend(schema.get("const").cloned());
    match kind(schema) {
        "integer" => {
            for (bound, beyond) in [("minimum", -1), ("maximum", 1)] {
                let Some(bound) = schema.get(bound) else { continue };
                all.push(bound.clone());
                let next = bound.as_i64().and_then(|it| it.checked_add(beyond));
                // Beyond what has 64 bits.
                all.push(next.map_or_else(|| json!(2e19 * beyond as f64), Value::from));
            }
        }
        "number" => {
            for (bound, beyond) in [("minimum", -0.01), ("maximum", 0.01)] {
                let Some(bound) = schema[bound].as_f64() else { continue };
                all.extend([json!(bound), json!(bound + beyond)]);
            }
            if let Some(bound) = schema["exclusiveMinimum"].as_f64() {
                all.extend([json!(bound), json!(bound + 0.01)]);
            }
        }
        "boolean" => all.push(json!(false)),
        "string" => {
            all.extend([json!(""), json!("a")]);
            if let Some(most) = schema["maxLength"].as_u64() {
                let most = usize::try_from(most).unwrap();
                all.extend([json!("a".repeat(most)), json!("a".repeat(most + 1))]);
            }
            if schema["pattern"].is_string() {
                for length in [64, 65, 100, 101] {
                    all.push(json!("a".repeat(length)));
                }
                all.extend([json!("a b"), json!("clear_thinking_1"), json!("clear_tool_uses")]);
            }
        }
        "array" => {
            let items = &schema["items"];
            if depth < 4 {
                all.extend(candidates(items, depth + 1).into_iter().map(|it| json!([it])));
            }
            let one = example(items);
            for bound in ["minItems", "maxItems"] {
                let Some(bound) = schema[bound].as_u64() else { continue };
                for count in [bound, bound + 1] {
                    all.push((0..count).map(|_| one.clone()).collect());
                }
            }
        }
        "object" => {
            let base = example(schema);
            let of = schema["properties"].as_object().into_iter().flatten();
            for (name, of_one) in of.filter(|_| depth < 4) {
                for value in candidates(of_one, depth + 1) {
                    let mut object = base.clone();
                    object[name] = value;
                    all.push(object);
                }
            }
            let others = &schema["additionalProperties"];
            if others.is_object() && depth < 4 {
                all.extend(candidates(others, depth + 1).into_iter().map(|it| json!({"7": it})));
                all.push(json!({"a name": example(others)}));
            }
            if let Some(most) = schema["maxProperties"].as_u64() {
                for count in [most, most + 1] {
                    let entry = |at: u64| (at.to_string(), example(others));
                    all.push(Value::Object((0..count).map(entry).collect()));
                }
            }
        }
        _ => {}
    }
    all
}
