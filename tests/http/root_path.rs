//! `--root-path`: the API under a proxy's path. Whatever applies to a path applies to the same one
//! behind it.
use std::time::Duration;

use coordinator::http::keys::ApiKeys;
use coordinator::http::options::ApiOptions;
use coordinator::http::root_path::RootPath;
use reqwest::{Method, Response};
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::scrape::Scrape;

use crate::bounds::raw;
use crate::rig::Rig;

fn shown_at(root: &str) -> ApiOptions {
    ApiOptions { root_path: RootPath::parse(root).unwrap(), ..ApiOptions::default() }
}

async fn send(rig: &Rig, method: Method, path: &str, key: Option<&str>) -> Response {
    let request = reqwest::Client::new().request(method, format!("http://{}{path}", rig.address));
    match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    }
    .send()
    .await
    .unwrap()
}

async fn get(rig: &Rig, path: &str, key: Option<&str>) -> (u16, Value) {
    let response = send(rig, Method::GET, path, key).await;
    (response.status().as_u16(), response.json().await.unwrap_or_default())
}

#[tokio::test]
async fn requests_are_served_with_it_and_without_it() {
    let rig = Rig::with_api(&shown_at("/llm/a"));
    let body = json!({"prompt": "x", "max_tokens": 3, "temperature": 0});
    let plain = rig.client.post("/v1/completions", &body).await.unwrap().body;
    let proxy = Client::new(&format!("{}/llm/a", rig.client.base())).unwrap();
    let answer = proxy.post("/v1/completions", &body).await.unwrap();
    assert_eq!((answer.status, &answer.body["choices"]), (200, &plain["choices"]));
    let streamed = json!({"prompt": "x", "max_tokens": 3, "stream": true});
    assert!(proxy.stream("/v1/completions", &streamed).await.unwrap().done);
    // What is behind a path, and names with slashes.
    assert_eq!(get(&rig, "/llm/a/v1/models/org/demo?x=/llm/a", None).await.1["id"], "org/demo");
    let root = get(&rig, "/", None).await;
    assert_eq!(root.1["name"], "tutti");
    for same in ["/llm/a", "/llm/a/", "/llm/a?x=1"] {
        assert_eq!(get(&rig, same, None).await, root, "{same}");
    }
    let document = get(&rig, "/llm/a/openapi.json", None).await.1;
    assert_eq!(document["servers"], json!([{"url": "/llm/a"}]));
    assert!(document["paths"].get("/v1/models").is_some(), "as the server knows them");
    // Errors are told as by the API of the rest of the path, which has its own methods.
    let error = proxy.post("/v1/messages", &json!({})).await.unwrap();
    assert_eq!((error.status, &error.body["type"]), (400, &json!("error")));
    assert_eq!(send(&rig, Method::GET, "/llm/a/v1/completions", None).await.status(), 405);
    for unknown in ["/llm/v1/models", "/llm/ab/v1/models", "/llm/a/llm/a/v1/models", "/a/v1/models"]
    {
        assert_eq!(get(&rig, unknown, None).await.0, 404, "{unknown}");
    }
    // Without the option there is no such path.
    let bare = Rig::saying("x");
    assert_eq!(get(&bare, "/llm/a/v1/models", None).await.0, 404);
    assert_eq!(get(&bare, "/openapi.json", None).await.1["servers"], json!([{"url": "/"}]));
}

#[tokio::test]
async fn keys_are_asked_for_however_a_path_is_written() {
    let keys = ApiKeys::new(["sesame"]).unwrap();
    let rig = Rig::with_api(&ApiOptions { keys, ..shown_at("/llm") });
    for guarded in [
        "/llm/v1/models",
        "/llm/v1/models/demo",
        "/llm/v1/completions",
        "/llm/v1/nothing",
        "/llm/%76%31/models",
        "/llm/v%31/models",
        "/llm//v1/models",
        "/llm//health",
        "/llm/llm/v1/models",
        "/llm/llm/health",
        "/llm%2fv1/models",
        "/%6clm/v1/models",
        "/%6clm/health",
        "//llm/v1/models",
        "/LLM/health",
        "/llmhealth",
        "/llm/openapi.json",
        "/llm/tokenize",
        "/v1/models",
    ] {
        let (status, body) = get(&rig, guarded, None).await;
        assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_api_key")), "{guarded}");
        assert_eq!(get(&rig, guarded, Some("sesam")).await.0, 401, "{guarded}");
        assert_ne!(get(&rig, guarded, Some("sesame")).await.0, 401, "{guarded}");
    }
    assert_eq!(get(&rig, "/llm/v1/models", Some("sesame")).await.0, 200);
    for open in ["", "/", "/health", "/live", "/load", "/metrics", "/ping", "/ready", "/version"] {
        assert_eq!(get(&rig, &format!("/llm{open}"), None).await.0, 200, "{open}");
    }
    // Operators' paths have their own rule, which is not that of keys.
    let other = get(&rig, "/llm/v1/load_lora_adapter", Some("sesame")).await.0;
    assert_eq!(other, get(&rig, "/v1/load_lora_adapter", Some("sesame")).await.0);
}

/// Clients' libraries would resolve some of these before they send them.
#[test]
fn no_path_is_taken_for_another_than_the_one_that_is_written() {
    let keys = ApiKeys::new(["sesame"]).unwrap();
    let rig = Rig::with_api(&ApiOptions { keys, ..shown_at("/llm") });
    for (path, expected) in [
        ("/llm/health/%2e%2e/v1/models", 401),
        ("/llm/health/../v1/models", 401),
        ("/health/../llm/v1/models", 401),
        ("/llm/../llm/v1/models", 401),
        ("/llm;x/v1/models", 401),
        ("/llm//admin/status", 401),
        // Nothing that is served, and no key would help.
        ("/llm/admin/../v1/models", 404),
        // As proxies are asked.
        ("http://x/llm/v1/models", 401),
        ("http://x/v1/models", 401),
        ("http://x/llm/health?y", 200),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let (status, answer) = raw(&rig, request.as_bytes());
        assert_eq!(status, expected, "{path}: {answer}");
    }
}

#[tokio::test]
async fn requests_are_counted_by_the_route_alone() {
    let rig = Rig::with_api(&shown_at("/llm"));
    for path in ["/llm/v1/models", "/v1/models", "/llm/v%31/models", "/llm/nothing"] {
        get(&rig, path, None).await;
    }
    let counted = |scrape: &Scrape| {
        let of = |route| scrape.sum("tutti_http_requests_total", &[("route", route)]);
        (of("/v1/models"), of("other"))
    };
    let all = |scrape: &Scrape| counted(scrape) == (3.0, 1.0);
    let scrape = rig.client.scrape_until(Duration::from_secs(20), all).await.unwrap();
    assert_eq!(counted(&scrape), (3.0, 1.0));
    let page = send(&rig, Method::GET, "/llm/metrics", None).await.text().await.unwrap();
    assert!(page.contains("/v1/models") && !page.contains("/llm"), "no label has it");
}
