//! The input that chat templates get from a request.
use coordinator::http::params::Limits;
use coordinator::text::model::TextModel;
use coordinator::text::template::ChatTemplate;
use serde_json::{Value, json};
use testkit::models::demo;

use crate::rig::{Rig, Script};

const CHAT: &str = "/v1/chat/completions";
/// A template that prints its whole input.
const SHOWS: &str = "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}|\
    {{ add_generation_prompt }}|{{ style | default('none') }}|{{ reasoning_effort | default('none') }}";

/// The text of the last prompt that the engine received.
async fn prompt(rig: &Rig, request: &Value) -> String {
    let reply = rig.client.post(CHAT, request).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let seen = rig.seen.lock().unwrap();
    rig.text.decode(&seen.requests.last().unwrap().prompt)
}

#[tokio::test]
async fn messages_reach_the_template_whole() {
    let rig = Rig::with_template(SHOWS);
    let request = json!({"messages": [
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": \"b\"}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": "c"}]});
    let given = prompt(&rig, &request).await;
    let messages = given.split('|').next().unwrap();
    assert_eq!(
        messages,
        "[{\"role\": \"user\", \"name\": \"Ann\", \"content\": \"a\\nb\"}, \
        {\"role\": \"assistant\", \"reasoning_content\": \"hm\", \"tool_calls\": [\
        {\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"z\": 1, \"a\": \"b\"}}}, \
        {\"id\": \"2\", \"type\": \"function\", \"function\": {\"name\": \"g\", \"arguments\": {}}}], \"content\": \"\", \"thinking\": \"hm\"}, \
        {\"role\": \"tool\", \"tool_call_id\": \"1\", \"content\": \"c\"}]"
    );
}

/// A model that knows calls by their number in the conversation gets such ids, whichever it has.
#[tokio::test]
async fn templates_of_kimi_are_given_the_ids_that_it_writes() {
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}\
        {% for call in message.tool_calls or [] %}<|tool_calls_section_begin|>{{ call.id }}{% endfor %}\
        [{{ message.tool_call_id }}]{% endfor %}";
    let rig = Rig::with_template(template);
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f"}});
    let request = json!({"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("a1b2c3d4e")]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "y"},
        {"role": "assistant", "tool_calls": [call("call_7")]},
        {"role": "tool", "tool_call_id": "call_7", "content": "z"}]});
    let given = prompt(&rig, &request).await;
    for id in ["begin|>functions.f:0", "[functions.f:0]", "begin|>functions.f:1", "[functions.f:1]"]
    {
        assert!(given.contains(id), "{id}: {given}");
    }
    let text = "<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|end|>";
    rig.script(|script| text.clone_into(&mut script.text));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let mut request = request;
    request["tools"] = tools;
    let answer = rig.ask(CHAT, &request).await;
    let choice = &answer["choices"][0];
    let function = json!({"name": "f", "arguments": "{\"a\": 1}"});
    assert_eq!(choice["message"]["tool_calls"][0]["function"], function, "{answer}");
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn templates_are_given_tools_documents_and_variables() {
    let rig = Rig::with_template(SHOWS);
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let request = json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool],
        "tool_choice": "none", "documents": [{"title": "t", "text": "d"}], "add_generation_prompt": false,
        "chat_template_kwargs": {"style": "brief"}, "reasoning_effort": "low"});
    let given = prompt(&rig, &request).await;
    let parts: Vec<&str> = given.split('|').skip(1).collect();
    let tools = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}]";
    let documents = "[{\"title\": \"t\", \"text\": \"d\"}]";
    assert_eq!((parts[0], parts[1], parts[3], parts[4]), (tools, documents, "brief", "low"));
    assert_eq!(parts[2].to_lowercase(), "false");
    let plain = prompt(&rig, &json!({"messages": [{"role": "user", "content": "x"}]})).await;
    let plain = plain.to_lowercase();
    assert!(plain.ends_with("|null|null|true|none|none"), "{plain}");
}

#[tokio::test]
async fn what_has_a_field_of_its_own_may_be_among_the_variables_too() {
    let rig = Rig::with_template(SHOWS);
    let documents = json!([{"text": "d"}]);
    let among = json!({"documents": documents, "add_generation_prompt": false, "style": "brief"});
    let mut request = json!({"messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": among});
    let given = prompt(&rig, &request).await.to_lowercase();
    assert!(given.ends_with("|[{\"text\": \"d\"}]|false|brief|none"), "{given}");
    // The fields themselves go before.
    request["documents"] = json!([{"text": "e"}]);
    request["add_generation_prompt"] = json!(true);
    let given = prompt(&rig, &request).await.to_lowercase();
    assert!(given.ends_with("|[{\"text\": \"e\"}]|true|brief|none"), "{given}");
    for (variables, says) in [
        (json!({"documents": "d"}), "`chat_template_kwargs.documents` must be a list"),
        (json!({"add_generation_prompt": 2}), "`chat_template_kwargs.add_generation_prompt` must"),
        (json!({"continue_final_message": true}), "needs `add_generation_prompt`: false"),
        (json!({"tokenize": false}), "`chat_template_kwargs.tokenize` cannot be given here"),
    ] {
        let request = json!({"messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": variables});
        let reply = rig.client.post(CHAT, &request).await.unwrap();
        assert_eq!(reply.status, 400, "{}", reply.body);
        let message = reply.body["error"]["message"].as_str().unwrap();
        assert!(message.contains(says), "{message}");
    }
}

#[tokio::test]
async fn reasoning_may_be_a_part_of_the_content() {
    let rig = Rig::with_template(
        "{% for it in messages %}{{ it.role }}[{{ it.content }}]({{ it.reasoning_content }}){% endfor %}",
    );
    let thought = |text: &str| json!({"type": "thinking", "thinking": text});
    let listed = json!({"type": "thinking", "thinking": [{"type": "text", "text": "b"}]});
    let text = json!({"type": "text", "text": "said"});
    let request = json!({"messages": [
        {"role": "system", "content": [text, listed]},
        {"role": "assistant", "content": [thought("a"), text]},
        {"role": "assistant", "reasoning_content": "own", "content": [thought("a"), text]}]});
    let given = prompt(&rig, &request).await;
    assert_eq!(given, "system[said\nb]()assistant[said](a)assistant[said](own)");
    let request = json!({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]});
    let reply = rig.client.post(CHAT, &request).await.unwrap();
    assert_eq!(reply.status, 400, "{}", reply.body);
}

#[tokio::test]
async fn roles_that_the_template_writes_are_taken_and_others_refused() {
    let document = json!({"role": "document 1", "content": " about x"});
    let request = json!({"messages": [document, {"role": "user", "content": "x?"}]});
    let rig =
        Rig::with_template("{% for it in messages %}{{ it.role }}:{{ it.content }};{% endfor %}");
    assert_eq!(prompt(&rig, &request).await, "document 1: about x;user:x?;");
    let rig = Rig::with_template(
        "{% for it in messages if it.role == 'user' %}{{ it.content }};{% endfor %}",
    );
    let reply = rig.client.post(CHAT, &request).await.unwrap();
    let error = &reply.body["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("messages")), "{}", reply.body);
    assert!(error["message"].as_str().unwrap().contains("the role \"document 1\""), "{error}");
    for role in [json!(""), json!("x".repeat(65)), json!(5)] {
        let request = json!({"messages": [{"role": role, "content": "x"}]});
        assert_eq!(rig.client.post(CHAT, &request).await.unwrap().status, 400);
    }
}

#[tokio::test]
async fn a_final_message_can_be_gone_on_with() {
    let rig = Rig::saying("x");
    let request = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}],
        "add_generation_prompt": false, "continue_final_message": true});
    rig.client.post(CHAT, &request).await.unwrap();
    let expected = "<|bos|><|user|>\nHi<|end|>\n<|assistant|>\nWell, ";
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests[0].prompt, rig.text.encode(expected, false).unwrap());
        assert!(seen.requests[0].goes_on);
    }
    let request = json!({"messages": [{"role": "user", "content": "Hi"}]});
    rig.client.post(CHAT, &request).await.unwrap();
    assert!(!rig.seen.lock().unwrap().requests[1].goes_on, "an answer begins a text");
}

#[tokio::test]
async fn strings_in_a_list_are_parts_of_a_content() {
    let rig = Rig::with_template(SHOWS);
    let content = json!(["a", {"type": "text", "text": "b"}, ""]);
    let request = json!({"messages": [{"role": "user", "content": content}]});
    // The client holds what is accepted against the document, too.
    let given = prompt(&rig, &request).await;
    assert!(given.contains("\"content\": \"a\\nb\\n\""), "{given}");
    for content in [json!([1]), json!(["a", null]), json!([["a"]])] {
        let request = json!({"messages": [{"role": "user", "content": content}]});
        let reply = rig.client.post(CHAT, &request).await.unwrap();
        assert_eq!(reply.status, 400, "{request}: {}", reply.body);
    }
}

/// Agents send back what models wrote: imperfect histories must not end a conversation.
#[tokio::test]
async fn histories_may_be_imperfect() {
    let rig = Rig::with_template(SHOWS);
    for arguments in ["{\"a\": 1", "null", "", "[1]", "text"] {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let request = json!({"messages": [
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": null}]});
        let given = prompt(&rig, &request).await;
        assert!(given.contains("\"arguments\": {}"), "{arguments}: {given}");
        assert!(given.contains("\"tool_call_id\": \"1\", \"content\": \"\""), "{given}");
    }
    let request = json!({"messages": [
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"},
            {"type": "refusal", "refusal": "b"}], "tool_calls": [], "reasoning": "hm"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]}]});
    let given = prompt(&rig, &request).await;
    assert!(!given.contains("tool_calls"), "{given}");
    assert!(given.contains("\"a\\nb\"") && given.contains("\"c\""), "{given}");
    assert!(given.contains("\"reasoning_content\": \"hm\""), "{given}");
}

#[tokio::test]
async fn what_templates_cannot_be_given_is_refused_by_name() {
    let rig = Rig::with_template(SHOWS);
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let cases = [
        ("tools", json!({"tools": [tool]})),
        ("tools", json!({"tools": [tool], "tool_choice": "auto"})),
        ("tools", json!({"tools": [{"type": "function"}], "tool_choice": "none"})),
        ("tools", json!({"tools": "f", "tool_choice": "none"})),
        ("tool_choice", json!({"tool_choice": {"type": "function", "function": {"name": "f"}}})),
        ("continue_final_message", json!({"continue_final_message": true})),
        ("chat_template_kwargs", json!({"chat_template_kwargs": {"messages": []}})),
        ("chat_template_kwargs", json!({"chat_template_kwargs": 1})),
        ("documents", json!({"documents": ["a"]})),
        (
            "messages",
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]}),
        ),
        ("messages", json!({"messages": [{"role": "assistant", "tool_calls": {}}]})),
        ("messages", json!({"messages": [{"role": "assistant", "tool_calls": [1]}]})),
        ("messages", json!({"messages": [{"role": "user", "content": "x", "name": 1}]})),
    ];
    for (field, change) in cases {
        let mut request = json!({"messages": [{"role": "user", "content": "x"}]});
        for (name, value) in change.as_object().unwrap() {
            request[name] = value.clone();
        }
        let reply = rig.client.post(CHAT, &request).await.unwrap();
        assert_eq!(
            (reply.status, &reply.body["error"]["param"]),
            (400, &json!(field)),
            "{request}: {}",
            reply.body
        );
    }
}

#[tokio::test]
async fn without_effort_a_model_that_can_does_not_reason() {
    let rig = Rig::with_template(
        "{{ 'yes' if enable_thinking is not defined or enable_thinking else 'no' }}",
    );
    let prompt = async |path: &str, more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        if path != CHAT {
            body = json!({"input": "x"});
        }
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = rig.client.post(path, &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let request = rig.seen.lock().unwrap().requests.pop().unwrap();
        rig.text.tokenizer.decode(&request.prompt, false).unwrap()
    };
    assert_eq!(prompt(CHAT, json!({"reasoning_effort": "none"})).await, "no");
    assert_eq!(prompt(CHAT, json!({"reasoning_effort": "low"})).await, "yes");
    let none = json!({"reasoning": {"effort": "none"}});
    assert_eq!(prompt("/v1/responses", none).await, "no");
    let off = json!({"reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(prompt(CHAT, off).await, "no");
    let both = json!({"reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(prompt(CHAT, both).await, "yes", "what a client says itself goes before");
}

#[tokio::test]
async fn a_template_that_objects_is_the_clients_fault_and_one_that_fails_is_not() {
    let objects =
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x";
    let rig = Rig::with_template(objects);
    let one = json!({"role": "user", "content": "x"});
    let reply = rig.client.post(CHAT, &json!({"messages": [one, one]})).await.unwrap();
    assert_eq!(
        (reply.status, &reply.body["error"]["param"]),
        (400, &json!("messages")),
        "{}",
        reply.body
    );
    assert!(reply.body["error"]["message"].as_str().unwrap().contains("one message only"));
    let rig = Rig::with_template("{% if messages | length > 1 %}{{ nothing.at.all }}{% endif %}x");
    assert_eq!(rig.client.post(CHAT, &json!({"messages": [one]})).await.unwrap().status, 200);
    let reply = rig.client.post(CHAT, &json!({"messages": [one, one]})).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["type"]), (500, &json!("server_error")));
    assert!(reply.body["error"]["message"].as_str().unwrap().contains("chat template"));
    let context = json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]});
    let reply = Rig::saying("x").client.post(CHAT, &context).await.unwrap();
    assert_eq!(reply.body["error"]["code"], "context_length_exceeded", "{}", reply.body);
    assert_eq!(reply.body["error"]["param"], "messages");
}

/// Agents send all that was said and done again and again, until they are told that it is too long,
/// by the word that their API has for that; then they make it shorter.
#[tokio::test]
async fn a_long_session_goes_on_until_it_is_too_long() {
    let template = "{% for m in messages %}{{ m.role[0] }}{% endfor %}";
    let mut text = TextModel::load(&demo()).unwrap();
    text.template = Some(ChatTemplate::new(template, String::new(), String::new()).unwrap());
    text.max_positions = 131_072;
    let rig = Rig::of(Script { text: "x".to_owned(), ..Script::default() }, text);
    let turn = |index: usize| {
        let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": "x"})
    };
    let limit = Limits::new(131_072).messages;
    for (path, field) in
        [(CHAT, "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")]
    {
        let ask = async |count: usize| {
            let turns: Vec<Value> = (0..count).map(turn).collect();
            let mut body = json!({(field): turns});
            if path == "/v1/messages" {
                body["max_tokens"] = json!(1);
            }
            rig.client.post(path, &body).await.unwrap()
        };
        for count in [5001, limit - 1] {
            assert_eq!(ask(count).await.status, 200, "{path} with {count}");
            let prompt = rig.seen.lock().unwrap().requests.pop().unwrap().prompt;
            assert_eq!(rig.text.decode(&prompt).len(), count, "{path}");
        }
        let refused = ask(limit + 1).await;
        let error = &refused.body["error"];
        let message = error["message"].as_str().unwrap();
        assert!(refused.status == 400 && message.contains("16385 messages"), "{path}: {error}");
        if path == "/v1/messages" {
            assert!(message.starts_with("prompt is too long"), "{message}");
        } else {
            let told = (&error["code"], &error["param"]);
            assert_eq!(told, (&json!("context_length_exceeded"), &json!(field)), "{path}");
        }
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty());
}

/// A conversation that takes too many steps of its template is too long as well.
#[tokio::test]
async fn a_template_that_runs_out_of_steps_says_that_the_conversation_is_too_long() {
    let template = "{% for m in messages %}{% for a in range(100000) %}{% for b in range(100000) \
                    %}{% endfor %}{% endfor %}{% endfor %}";
    let rig = Rig::with_template(template);
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let refused = rig.client.post(CHAT, &body).await.unwrap();
    assert_eq!(refused.body["error"]["code"], "context_length_exceeded", "{}", refused.body);
}
