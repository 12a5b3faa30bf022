//! What agents send, as their published sources and reports show it: groups of tools, tools whose
//! input is text, tools that only OpenAI's servers run, pictures that tools found, several messages
//! with instructions.
use coordinator::http::options::ApiOptions;
use coordinator::text::model::TextModel;
use coordinator::text::reply::CallFormat;
use coordinator::text::template::ChatTemplate;
use serde_json::{Value, json};
use testkit::models::demo;

use crate::rig::{Rig, Script};

const RESPONSES: &str = "/v1/responses";
const PATCH: &str = "*** Begin Patch\n\"é\"\n*** End Patch";

/// Shows all of a conversation, and takes instructions only at the beginning.
const TEMPLATE: &str = "{% for it in tools or [] %}{{ it.function | tojson }}{{ '\n' }}{% endfor %}\
    {% for it in messages %}{% if it.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    {{ it.role }}:{{ it.content }}{% for call in it.tool_calls or [] %}\
    <{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}{{ '\n' }}{% endfor %}";

fn rig(text: &str) -> Rig {
    let mut model = TextModel::load(&demo()).unwrap();
    model.template = Some(ChatTemplate::new(TEMPLATE, String::new(), String::new()).unwrap());
    let options = ApiOptions { tool_calls: Some(CallFormat::Hermes), ..ApiOptions::default() };
    Rig::chosen(Script { text: text.to_owned(), ..Script::default() }, model, &options)
}

/// The last prompt.
fn prompt(rig: &Rig) -> String {
    let request = rig.seen.lock().unwrap().requests.pop().unwrap();
    rig.text.tokenizer.decode(&request.prompt, false).unwrap()
}

/// The tools of Codex with an MCP server.
fn tools() -> Value {
    let text = |name: &str| json!({"type": "object", "properties": {name: {"type": "string"}}});
    json!([
        {"type": "function", "name": "shell", "strict": false, "parameters": text("command")},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
        {"type": "namespace", "name": "mcp__docs__", "description": "Docs", "tools": [
            {"type": "function", "name": "search", "parameters": text("query")},
            {"type": "custom", "name": "note", "description": "Writes it down."}]},
        {"type": "web_search", "external_web_access": false},
        {"type": "image_generation", "output_format": "png"},
    ])
}

fn call(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>\n")
}

#[tokio::test]
async fn tools_of_groups_and_those_that_take_text_are_called_as_the_client_knows_them() {
    let calls = [
        call("shell", &json!({"command": "ls"})),
        call("mcp__docs__search", &json!({"query": "fox"})),
        call("apply_patch", &json!({"input": PATCH})),
        call("mcp__docs__note", &json!({"input": "n"})),
        // Not as it was told to.
        call("apply_patch", &json!({"patch": 1})),
        call("made_up", &json!({})),
    ];
    let rig = rig(&(calls.concat() + "<|end|>"));
    let body = json!({"instructions": "You are Codex.", "tools": tools(), "store": false,
        "parallel_tool_calls": true, "max_output_tokens": 400, "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}]});
    let whole = rig.ask(RESPONSES, &body).await;
    assert_eq!(whole["tools"].as_array().unwrap().len(), 5, "they are repeated as they came");
    let shown = prompt(&rig);
    assert!(shown.ends_with("system:You are Codex.\n\nSandbox.\nuser:Go.\n"), "{shown}");
    for told in ["\"shell\"", "\"mcp__docs__search\"", "\"mcp__docs__note\"", "lark grammar"] {
        assert!(shown.contains(told), "{told}: {shown}");
    }
    assert!(!shown.contains("web_search") && !shown.contains("image_generation"), "{shown}");

    let item = |kind: &str, namespace: Option<&str>, name: &str, what: &str, said: &str| {
        let mut item = json!({"type": kind, "name": name, what: said, "status": "completed"});
        if let Some(namespace) = namespace {
            item["namespace"] = namespace.into();
        }
        item
    };
    let (function, custom, docs) = ("function_call", "custom_tool_call", Some("mcp__docs__"));
    let expected = [
        item(function, None, "shell", "arguments", "{\"command\":\"ls\"}"),
        item(function, docs, "search", "arguments", "{\"query\":\"fox\"}"),
        item(custom, None, "apply_patch", "input", PATCH),
        item(custom, docs, "note", "input", "n"),
        item(custom, None, "apply_patch", "input", "{\"patch\":1}"),
        item(function, None, "made_up", "arguments", "{}"),
    ];
    let without_ids = |output: &Value| {
        let mut items = output.as_array().unwrap().clone();
        for item in &mut items {
            let item = item.as_object_mut().unwrap();
            let prefix = if item["type"] == "custom_tool_call" { "ctc_" } else { "fc_" };
            let id = item.remove("id").unwrap();
            assert!(id.as_str().unwrap().starts_with(prefix), "{id}");
            assert_eq!(item.remove("call_id").unwrap().as_str().unwrap().len(), 9);
        }
        Value::Array(items)
    };
    assert_eq!(without_ids(&whole["output"]), json!(expected));

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = rig.client.stream(RESPONSES, &streamed).await.unwrap().events;
    let response = &events.last().unwrap()["response"];
    assert_eq!(without_ids(&response["output"]), json!(expected));
    let of = |index: usize, kind: &str| -> Vec<&Value> {
        let of_index = events.iter().filter(|event| event["output_index"] == index);
        of_index.filter(|event| event["type"] == format!("response.{kind}")).collect()
    };
    let (added, done) = ("output_item.added", "output_item.done");
    assert_eq!(of(1, added)[0]["item"]["namespace"], "mcp__docs__");
    assert_eq!(of(1, "function_call_arguments.done")[0]["name"], "search");
    assert_eq!(of(2, added)[0]["item"]["input"], "");
    assert_eq!(of(2, "custom_tool_call_input.delta")[0]["delta"], PATCH);
    assert_eq!(of(2, "custom_tool_call_input.done")[0]["input"], PATCH);
    assert_eq!(of(2, done)[0]["item"]["input"], PATCH);
    assert!(of(2, "function_call_arguments.delta").is_empty());

    // All of it comes back, with what the tools said.
    let mut input = body["input"].as_array().unwrap().clone();
    for item in whole["output"].as_array().unwrap() {
        let is_custom = item["type"] == "custom_tool_call";
        let kind = if is_custom { "custom_tool_call_output" } else { "function_call_output" };
        input.push(item.clone());
        let picture = json!({"type": "input_image", "image_url": "data:image/png;base64,aGk="});
        let output = json!([{"type": "input_text", "text": "ok"}, picture]);
        input.push(json!({"type": kind, "call_id": item["call_id"], "output": output}));
    }
    let mut again = body.clone();
    again["input"] = input.into();
    rig.ask(RESPONSES, &again).await;
    let shown = prompt(&rig);
    for told in [
        "<shell {\"command\": \"ls\"}>",
        "<mcp__docs__search {\"query\": \"fox\"}>",
        "<mcp__docs__note {\"input\": \"n\"}>",
        "tool:ok\n[image left out: this model reads only text]\n",
    ] {
        assert!(shown.contains(told), "{told}: {shown}");
    }
}

#[tokio::test]
async fn a_tool_of_a_group_can_be_chosen_and_groups_are_checked() {
    let rig = rig("x");
    let chosen = |choice: Value| json!({"input": "x", "tools": tools(), "tool_choice": choice});
    for (choice, told, untold) in [
        (json!({"type": "custom", "name": "apply_patch"}), "apply_patch", "search"),
        (json!({"type": "function", "name": "search"}), "mcp__docs__search", "shell"),
        (
            json!({"type": "custom", "namespace": "mcp__docs__", "name": "note"}),
            "mcp__docs__note",
            "apply_patch",
        ),
        (
            json!({"type": "allowed_tools", "mode": "required",
                "tools": [{"type": "function", "name": "search"}]}),
            "mcp__docs__search",
            "shell",
        ),
    ] {
        rig.ask(RESPONSES, &chosen(choice)).await;
        let request = rig.seen.lock().unwrap().requests.pop().unwrap();
        let grammar = format!("{:?}", request.guide_spec);
        assert!(grammar.contains(told) && !grammar.contains(untold), "{grammar}");
    }
    let tools = |tools: Value| json!({"input": "x", "tools": tools});
    let group = |tools: Value| json!({"type": "namespace", "name": "a", "tools": tools});
    let plain = |name: &str| json!({"type": "function", "name": name});
    for (body, says) in [
        (tools(json!([{"type": "namespace", "name": "a"}])), "`tools[0].tools`"),
        (tools(json!([{"type": "namespace", "tools": []}])), "`tools[0].name`"),
        (tools(json!([group(json!([{"type": "function"}]))])), "`tools[0].tools[0].name`"),
        (tools(json!([group(json!([5]))])), "`tools[0].tools[0]` must be an object"),
        (tools(json!([{"type": "custom", "name": "a", "format": 5}])), "`tools[0].format`"),
        (tools(json!([plain("a__b"), group(json!([plain("b")]))])), "that of another tool"),
        (tools(json!([group(json!(vec![plain("b"); 1025]))])), "1025 tools, the limit is 1024"),
        (
            chosen(json!({"type": "allowed_tools", "mode": "auto",
                "tools": vec![plain("shell"); 1025]})),
            "`tool_choice` lists 1025 tools",
        ),
        (chosen(json!({"type": "custom", "name": "shell"})), "`tool_choice` must be"),
        (chosen(json!({"type": "custom", "name": "other"})), "not in `tools`"),
        (chosen(json!({"type": "web_search"})), "`tool_choice`"),
    ] {
        let reply = rig.client.post(RESPONSES, &body).await.unwrap();
        let message = reply.body["error"]["message"].as_str().unwrap_or_default();
        assert!(reply.status == 400 && message.contains(says), "{body}: {}", reply.body);
    }
}

#[tokio::test]
async fn instructions_anywhere_are_taken_by_templates_that_want_them_first() {
    let rig = rig("x");
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = [
        said("system", "a"),
        said("developer", "b"),
        said("user", "c"),
        said("assistant", "d"),
        said("system", "e"),
        said("user", "f"),
    ];
    rig.ask("/v1/chat/completions", &json!({"messages": messages})).await;
    assert_eq!(prompt(&rig), "system:a\n\nb\nuser:c\nassistant:d\nuser:e\n\nf\n");
}
