//! Structured output fields: their valid values, and their effects.
use serde_json::{Map, Value, json};
use shared::protocol::{GuideSpec, TokenMask, Whitespace};

use crate::rig::Rig;

const PATHS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

fn body(path: &str, more: &Value) -> Value {
    let mut body = json!({"max_tokens": 4});
    match path {
        "/v1/completions" => body["prompt"] = json!("x"),
        _ => body["messages"] = json!([{"role": "user", "content": "x"}]),
    }
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn schema(schema: &Value) -> GuideSpec {
    GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::Usual }
}

fn named(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "one", "strict": true, "description": "d", "schema": schema}}})
}

/// Every way to give a structural tag makes the same grammar.
#[tokio::test]
async fn structural_tags_reach_the_engine_as_grammars() {
    let rig = Rig::saying("x");
    let tag = json!({"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]});
    let ways = [
        json!({"response_format": tag}),
        json!({"structural_tag": tag}),
        json!({"structural_tag": tag.to_string()}),
        json!({"structured_outputs": {"structural_tag": tag}}),
        json!({"structured_outputs": {"structural_tag": tag.to_string()}}),
    ];
    for path in PATHS {
        let mut specs = Vec::new();
        for more in &ways {
            let reply = rig.client.post(path, &body(path, more)).await.unwrap();
            assert_eq!(reply.status, 200, "{more}: {}", reply.body);
            let mut seen = rig.seen.lock().unwrap();
            specs.push(seen.requests.pop().unwrap().guide_spec.unwrap());
        }
        specs.dedup();
        assert_eq!(specs.len(), 1, "{specs:?}");
        let GuideSpec::Made(grammar) = &*specs[0] else { panic!("{specs:?}") };
        assert!(grammar.starts_with("start: ") && grammar.contains("\"<f\""), "{grammar}");
    }
}

#[tokio::test]
async fn every_way_to_say_it_reaches_the_engine() {
    let rig = Rig::saying("x");
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let spaced = |pattern: &str| GuideSpec::Json {
        schema: object.to_string(),
        whitespace: Whitespace::Pattern(pattern.to_owned()),
    };
    let compact = GuideSpec::Json { schema: object.to_string(), whitespace: Whitespace::None };
    let any = schema(&json!({"type": "object"}));
    let regex = GuideSpec::Regex("a+".to_owned());
    let choice = GuideSpec::Choice(vec!["a".to_owned(), "b".to_owned()]);
    let lark = GuideSpec::Lark("start: \"a\"".to_owned());
    let structured = |value: Value| json!({"structured_outputs": value});
    let ways = [
        (named(&object), Some(schema(&object))),
        (json!({"response_format": {"type": "json_object"}}), Some(any.clone())),
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"response_format": null, "structured_outputs": null}), None),
        (structured(json!({"json": object})), Some(schema(&object))),
        (structured(json!({"json": object.to_string()})), Some(schema(&object))),
        (structured(json!({"json": object, "disable_any_whitespace": true})), Some(compact)),
        (structured(json!({"json": object, "whitespace_pattern": " ?"})), Some(spaced(" ?"))),
        (
            structured(json!({"json": object, "disable_additional_properties": true})),
            Some(schema(&object)),
        ),
        (structured(json!({"json_object": true, "regex": null})), Some(any)),
        (structured(json!({"regex": "a+", "json_object": false})), Some(regex.clone())),
        (structured(json!({"choice": ["a", "b"]})), Some(choice.clone())),
        (structured(json!({"grammar": "start: \"a\""})), Some(lark.clone())),
        (json!({"guided_json": object}), Some(schema(&object))),
        (json!({"guided_json": object, "guided_whitespace_pattern": "_"}), Some(spaced("_"))),
        (json!({"guided_regex": "a+"}), Some(regex)),
        (json!({"guided_choice": ["a", "b"]}), Some(choice)),
        (json!({"guided_grammar": "start: \"a\""}), Some(lark)),
        (json!({"allowed_token_ids": [9, 7]}), Some(GuideSpec::Tokens(vec![9, 7]))),
        (
            json!({"allowed_token_ids": [9, 7], "stop_token_ids": [7], "min_tokens": 2}),
            Some(GuideSpec::Tokens(vec![9, 7])),
        ),
    ];
    for path in PATHS {
        for (more, wanted) in &ways {
            let mut asked = body(path, more);
            asked["n"] = json!(3);
            let reply = rig.client.post(path, &asked).await.unwrap();
            assert_eq!(reply.status, 200, "{path} {more}: {}", reply.body);
            let request = rig.seen.lock().unwrap().requests.pop().unwrap();
            assert_eq!(request.guide_spec.as_deref(), wanted.as_ref(), "{path} {more}");
            assert_eq!(request.guides.len(), if wanted.is_some() { 3 } else { 0 });
            if let Some(GuideSpec::Tokens(_)) = wanted {
                let allowed = TokenMask::Only(vec![7, 9]);
                assert_eq!(request.guides[2].allowed(), Some(&allowed));
            }
        }
    }
}

#[tokio::test]
async fn what_clients_types_say_besides_is_no_error() {
    let rig = Rig::saying("x");
    let schema = json!({"type": "object", "properties": {
        "a": {"type": "string", "format": "password"},
        "b": {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": true}}});
    // As zod writes maps and addresses, and pydantic decimals.
    let loose = json!({"type": "object", "properties": {
        "map": {"type": "object", "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "string"}},
        "email": {"type": "string", "format": "email",
            "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z]+@[a-z]+\\.[a-z]{2,}$"},
        "price": {"anyOf": [{"type": "number"},
            {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]},
        "not": {"not": {"type": "null"}, "type": "string"}}});
    let ways = [
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "a", "schema": schema}}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "a", "strict": false, "schema": loose}}}),
        json!({"response_format": {"type": "json_object", "schema": loose}}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
    ];
    for path in PATHS {
        for way in &ways {
            let reply = rig.client.post(path, &body(path, way)).await.unwrap();
            assert_eq!(reply.status, 200, "{path} {way}: {}", reply.body);
        }
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_the_field_and_the_reason() {
    let rig = Rig::saying("x");
    let format = |value: Value| json!({"response_format": value});
    let json_schema = |value: Value| format(json!({"type": "json_schema", "json_schema": value}));
    let structured = |value: Value| json!({"structured_outputs": value});
    let long = "a".repeat(1 << 17);
    let name = "a".repeat(257);
    let dear = (0..65).map(|n| (format!("^a{n}b*c$"), json!({}))).collect::<Map<_, _>>();
    let both = |other: Value| {
        let mut both = format(json!({"type": "json_object"}));
        both[other.as_object().unwrap().keys().next().unwrap()] =
            other[other.as_object().unwrap().keys().next().unwrap()].clone();
        both
    };
    let cases = [
        (format(json!("json")), "response_format", "must be an object with the `type`"),
        (format(json!({"type": "xml"})), "response_format", "\"json_object\""),
        (format(json!({"type": "json_thing"})), "response_format", "\"json_object\""),
        (format(json!({"type": "structural_tag"})), "response_format", "`format` or `structures`"),
        (format(json!({"type": "json_schema"})), "response_format", "needs `json_schema`"),
        (json_schema(json!({"schema": {}})), "response_format", "json_schema.name"),
        (json_schema(json!({"schema": {}, "name": ""})), "response_format", "json_schema.name"),
        (json_schema(json!({"schema": {}, "name": name})), "response_format", "1 to 256"),
        (json_schema(json!({"name": "a"})), "response_format", "json_schema.schema"),
        (json_schema(json!({"name": "a", "schema": "{}"})), "response_format", "an object"),
        (
            json_schema(json!({"name": "a", "schema": {}, "strict": 1})),
            "response_format",
            "json_schema.strict",
        ),
        (named(&json!({"type": "strin"})), "response_format", "Invalid type: strin"),
        (named(&json!({"$ref": "#/$defs/x"})), "response_format", "'/$defs/x' does not exist"),
        (
            json_schema(json!({"name": "a", "strict": true,
                "schema": {"type": "array", "uniqueItems": true}})),
            "response_format",
            "uniqueItems",
        ),
        (
            json_schema(json!({"name": "a", "strict": true,
                "schema": {"type": "object", "propertyNames": {"pattern": "^a"}}})),
            "response_format",
            "propertyNames",
        ),
        (
            structured(json!({"json": {"type": "object", "propertyNames": {"pattern": "^a"}}})),
            "structured_outputs",
            "propertyNames",
        ),
        (named(&json!({"patternProperties": dear})), "response_format", "the limit is 64"),
        (structured(json!([])), "structured_outputs", "must be an object"),
        (structured(json!({})), "structured_outputs", "must have exactly one of"),
        (structured(json!({"json_object": false})), "structured_outputs", "not 0"),
        (structured(json!({"regex": "a", "choice": ["a"]})), "structured_outputs", "not 2"),
        (structured(json!({"regex": 1})), "structured_outputs", "`structured_outputs.regex` must"),
        (structured(json!({"structural_tag": "a"})), "structured_outputs", "a structural tag"),
        (structured(json!({"structural_tag": {}})), "structured_outputs", "either `format` or"),
        (json!({"structural_tag": 1}), "structural_tag", "a structural tag"),
        (json!({"structural_tag": "<".repeat(1 << 20)}), "structural_tag", "the limit is 524288"),
        (
            structured(json!({"structural_tag": {"format": {"type": "x"}}})),
            "structured_outputs",
            "`structural_tag.format`",
        ),
        (
            structured(json!({"structural_tag": {"format": {"type": "any_text"}},
                "disable_any_whitespace": true})),
            "structured_outputs",
            "white space",
        ),
        (
            json!({"response_format": {"type": "structural_tag", "format": {"type": "any"}}}),
            "response_format",
            "has a `format` with the `type` \"any\"",
        ),
        (
            structured(json!({"json": {}, "disable_additional_properties": 1})),
            "structured_outputs",
            "must be true or false",
        ),
        (json!({"guided_regex": "("}), "guided_regex", "unclosed group"),
        (json!({"guided_regex": long}), "guided_regex", "the limit is 16384"),
        (json!({"guided_choice": "a"}), "guided_choice", "a list of strings"),
        (json!({"guided_choice": []}), "guided_choice", "0 entries"),
        (json!({"guided_grammar": "root ::= other"}), "guided_grammar", "no rule `other`"),
        (json!({"guided_grammar": long}), "guided_grammar", "the limit is 65536"),
        (json!({"guided_json": "{"}), "guided_json", "is not JSON"),
        (json!({"guided_json": 5}), "guided_json", "a JSON schema"),
        (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern", "guided_json"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids", "0 entries"),
        (json!({"allowed_token_ids": [1 << 20]}), "allowed_token_ids", "from 0 to 2047"),
        (both(json!({"guided_regex": "a"})), "guided_regex", "one at a time"),
        (both(json!({"min_tokens": 3})), "min_tokens", "response_format"),
        (
            json!({"allowed_token_ids": [7, 9], "stop_token_ids": [9, 7], "min_tokens": 1}),
            "min_tokens",
            "only end tokens",
        ),
        (both(json!({"ignore_eos": true})), "ignore_eos", "response_format"),
    ];
    for path in PATHS {
        for (more, field, what) in &cases {
            let reply = rig.client.post(path, &body(path, more)).await.unwrap();
            let error = &reply.body["error"];
            assert_eq!((reply.status, &error["param"]), (400, &json!(field)), "{more}: {error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.starts_with(&format!("`{field}")), "{message}");
            assert!(message.contains(what), "{message}");
            assert!(message.len() < 700 && !message.contains('\n'), "{message}");
        }
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty());
}
