//! Operators' options: API keys, origins, limits; and the routes of probes.
use coordinator::http::keys::ApiKeys;
use coordinator::http::options::ApiOptions;
use coordinator::http::root_path::RootPath;
use coordinator::http::routes;
use coordinator::text::model::{SamplingDefaults, TextModel, TextOptions};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use testkit::models::demo;
use testkit::scrape::Scrape;

use crate::rig::{Rig, Script, described};

const COMPLETIONS: &str = "/v1/completions";

async fn send(rig: &Rig, method: Method, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request =
        reqwest::Client::new().request(method, format!("http://{}{path}", rig.address));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn with_keys_only_who_has_one_sees_the_models_work() {
    let keys = ApiKeys::new(["sesame", "other"]).unwrap();
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    let guarded = [
        "/v1/models",
        "/v1/models/demo",
        "/v1/completions",
        "/v1/nothing",
        "/%76%31/completions",
        "/v%31/models",
        "/%74okenize",
        "/health/%2e%2e/v1/models",
        "//v1/models",
        "/tokenize",
        "/detokenize",
    ];
    for path in guarded {
        for wrong in
            [None, Some("Bearer"), Some("Bearer sesam"), Some("Basic sesame"), Some("sesame")]
        {
            let headers: Vec<(&str, &str)> =
                wrong.map(|it| ("authorization", it)).into_iter().collect();
            let response = send(&rig, Method::GET, path, &headers).await;
            assert_eq!(response.status(), 401, "{path} {wrong:?}");
            assert_eq!(header(&response, "www-authenticate").as_deref(), Some("Bearer"));
            assert!(header(&response, "x-request-id").is_some());
            let body: Value = response.json().await.unwrap();
            assert_eq!(body["error"]["code"], "invalid_api_key", "{body}");
        }
    }
    let page = send(&rig, Method::GET, "/metrics", &[]).await.text().await.unwrap();
    let counted = Scrape::parse(&page).unwrap();
    let counted = counted.sum("tutti_requests_rejected_total", &[("reason", "unauthorized")]);
    assert_eq!(counted, 5.0 * guarded.len() as f64);
    for key in ["sesame", "other"] {
        let bearer = format!("Bearer {key}");
        let response = send(&rig, Method::GET, "/v1/models", &[("authorization", &bearer)]).await;
        assert_eq!(response.status(), 200, "{key}");
    }
    for path in OPEN {
        assert_eq!(send(&rig, Method::GET, path, &[]).await.status(), 200, "{path}");
    }
}

/// What answers without a key: probes and the like, as in vLLM.
const OPEN: [&str; 8] =
    ["/", "/health", "/live", "/load", "/metrics", "/ping", "/ready", "/version"];
/// What a key is of no use for: operators have another rule, the cluster's secret.
const OPERATED: [&str; 8] = [
    "/admin/actors/kill",
    "/admin/drain",
    "/admin/logs",
    "/admin/scale",
    "/admin/status",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
];

#[tokio::test]
async fn every_path_that_is_served_needs_a_key_or_is_known_not_to() {
    let (keys, root_path) = (ApiKeys::new(["sesame"]).unwrap(), RootPath::parse("/llm").unwrap());
    let api = ApiOptions { keys, root_path, ..ApiOptions::default() };
    let rig = Rig::chosen(Script::default(), described(), &api);
    let mut without = Vec::new();
    for (path, methods) in routes::paths() {
        let needs_none = OPEN.contains(&path) || OPERATED.contains(&path);
        without.extend(needs_none.then_some(path));
        // Alone, and as a proxy shows it.
        let paths = ["", "/llm"].map(|root| format!("{root}{}", path.replace("{id}", "demo")));
        let asked = methods.split(", ").flat_map(|method| paths.iter().map(move |it| (method, it)));
        for (method, path) in asked {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let status = send(&rig, method.clone(), path, &[]).await.status();
            assert_eq!(status == 401, !needs_none, "{method} {path}: {status}");
            let key = [("authorization", "Bearer sesame")];
            let status = send(&rig, method.clone(), path, &key).await.status();
            assert!(status != 401, "{method} {path}");
        }
    }
    assert_eq!(without.len(), OPEN.len() + OPERATED.len(), "{without:?}");
}

#[tokio::test]
async fn scripts_of_the_allowed_pages_may_use_the_api_and_of_no_others() {
    let page = "https://chat.example";
    let keys = ApiKeys::new(["sesame"]).unwrap();
    let allowed_origins = vec![page.to_owned()];
    let rig = Rig::with_api(&ApiOptions { allowed_origins, keys, ..ApiOptions::default() });
    let asks = |origin| {
        [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ]
    };
    let response = send(&rig, Method::OPTIONS, COMPLETIONS, &asks(page)).await;
    assert_eq!(response.status(), 200, "browsers ask without a key");
    assert_eq!(header(&response, "access-control-allow-origin").as_deref(), Some(page));
    let other = send(&rig, Method::OPTIONS, COMPLETIONS, &asks("https://evil.example")).await;
    assert_eq!(header(&other, "access-control-allow-origin"), None);
    let refused = send(&rig, Method::GET, "/v1/models", &[("origin", page)]).await;
    assert_eq!(refused.status(), 401);
    assert_eq!(
        header(&refused, "access-control-allow-origin").as_deref(),
        Some(page),
        "the page may read why"
    );
    let exposed = header(&refused, "access-control-expose-headers").unwrap_or_default();
    assert!(exposed.to_lowercase().contains("x-request-id"), "{exposed}");
    let closed = send(&Rig::saying("x"), Method::OPTIONS, COMPLETIONS, &asks(page)).await;
    assert_eq!(header(&closed, "access-control-allow-origin"), None, "off unless chosen");
}

#[tokio::test]
async fn limits_follow_the_model_and_the_operator() {
    let api = ApiOptions { max_body_bytes: Some(1000), max_logprobs: 3, ..ApiOptions::default() };
    let rig = Rig::with_api(&api);
    let long = rig.client.post(COMPLETIONS, &json!({"prompt": "a ".repeat(500)})).await.unwrap();
    assert_eq!(long.status, 413, "{}", long.body);
    for (logprobs, status) in [(3, 200), (4, 400)] {
        let request = json!({"prompt": "x", "logprobs": logprobs});
        assert_eq!(rig.client.post(COMPLETIONS, &request).await.unwrap().status, status);
    }
    let rig = Rig::with_api(&ApiOptions::default());
    let many =
        json!({"prompt": "x", "n": 128, "stop": vec!["q"; 16], "logprobs": 20, "max_tokens": 1});
    let answer = rig.client.post(COMPLETIONS, &many).await.unwrap().body;
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(128), "{answer}");
    let more = json!({"prompt": vec!["x"; 5], "n": 128});
    let answer = rig.client.post(COMPLETIONS, &more).await.unwrap();
    assert_eq!((answer.status, &answer.body["error"]["param"]), (400, &json!("n")));
}

#[tokio::test]
async fn probes_are_answered_and_heads_have_no_bodies() {
    let rig = Rig::saying("x");
    for path in
        ["/health", "/live", "/ready", "/version", "/ping", "/v1/models", "/metrics", "/load"]
    {
        let response = send(&rig, Method::HEAD, path, &[]).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.bytes().await.unwrap().len(), 0, "{path}");
    }
    assert_eq!(send(&rig, Method::POST, "/ping", &[]).await.status(), 200);
    let load: Value = send(&rig, Method::GET, "/load", &[]).await.json().await.unwrap();
    assert_eq!(load, json!({"server_load": 0}));
    let wrong = send(&rig, Method::POST, "/health", &[]).await;
    assert_eq!(
        (wrong.status().as_u16(), header(&wrong, "allow").as_deref()),
        (405, Some("GET, HEAD"))
    );
}

#[tokio::test]
async fn compressed_bodies_are_refused_as_such() {
    let rig = Rig::saying("x");
    let http = reqwest::Client::new();
    for (encoding, status) in [("gzip", 415), ("identity", 200)] {
        let request = http.post(format!("http://{}{COMPLETIONS}", rig.address));
        let request = request.header("content-encoding", encoding).json(&json!({"prompt": "x"}));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{encoding}");
        let text = response.text().await.unwrap();
        assert!(status == 200 || text.contains("Content-Encoding"), "{text}");
    }
}

#[tokio::test]
async fn streams_report_usage_where_the_operator_wants_it() {
    let rig = Rig::with_api(&ApiOptions { reports_usage: true, ..ApiOptions::default() });
    for options in [Value::Null, json!({"include_usage": false})] {
        let body =
            json!({"prompt": "x", "max_tokens": 3, "stream": true, "stream_options": options});
        let streamed = rig.client.stream(COMPLETIONS, &body).await.unwrap();
        let (last, before) = streamed.events.split_last().unwrap();
        assert_eq!(
            (&last["choices"], &last["usage"]["completion_tokens"]),
            (&json!([]), &json!(3))
        );
        assert!(before.iter().all(|event| event["usage"].is_null()));
    }
    // Of one that asks for more, more.
    let more = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": "x", "max_tokens": 3, "stream": true, "stream_options": more});
    let streamed = rig.client.stream(COMPLETIONS, &body).await.unwrap();
    assert!(streamed.events.iter().all(|event| event["usage"]["prompt_tokens"].is_u64()));
}

#[tokio::test]
async fn requests_get_the_operators_defaults_where_they_set_none() {
    let overrides = r#"{"temperature": 0.25, "top_k": 7, "max_new_tokens": 4}"#;
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&template, "{{ tone }} {{ other }} {{ messages[0].content }}").unwrap();
    let options = TextOptions {
        chat_template: Some(template.path().to_owned()),
        variables: json!({"tone": "calm", "other": 1}).as_object().unwrap().clone(),
        sampling: SamplingDefaults::parse(overrides).unwrap(),
        ..TextOptions::default()
    };
    let text = TextModel::load_with(&demo(), &options).unwrap();
    let plain = TextModel::load(&demo()).unwrap().fingerprint;
    assert_ne!(text.fingerprint, plain, "front ends must have the same");
    let rig = Rig::of(Script { text: "a b c d e f g h".to_owned(), ..Script::default() }, text);
    let taken = || rig.seen.lock().unwrap().requests.pop().unwrap();
    let answer = rig.ask(COMPLETIONS, &json!({"prompt": "x", "max_tokens": 100})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let request = taken();
    assert_eq!((request.max_tokens, request.sampling[0].top_k), (4, 7));
    assert_eq!(request.sampling[0].temperature, 0.25);
    let own = json!({"prompt": "x", "max_tokens": 2, "temperature": 0.5, "top_k": -1});
    rig.ask(COMPLETIONS, &own).await;
    let request = taken();
    assert_eq!((request.max_tokens, request.sampling[0].top_k), (2, 0));
    assert_eq!(request.sampling[0].temperature, 0.5);
    for (given, expected) in
        [(json!({}), "calm 1 Hi"), (json!({"tone": "gay", "third": 3}), "gay 1 Hi")]
    {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let body = json!({"messages": messages, "chat_template_kwargs": given});
        rig.ask("/v1/chat/completions", &body).await;
        assert_eq!(rig.text.decode(&taken().prompt), expected);
    }
}
