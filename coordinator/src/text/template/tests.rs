//! What templates may use, compared with the results of transformers and Python.
use std::path::Path;

use serde_json::json;

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>".to_owned(), "</s>".to_owned()).unwrap()
}

fn user(content: &str) -> Conversation {
    Conversation::new(vec![json!({"role": "user", "content": content})])
}

/// Renders `source` with the client's variables.
fn with(source: &str, variables: serde_json::Value) -> Result<String, RenderError> {
    let variables = variables.as_object().unwrap().clone();
    template(source).render(&Conversation { variables, ..user("hi") })
}

#[test]
fn a_template_that_runs_away_or_objects_blames_the_conversation_and_one_that_fails_itself() {
    let runs = "{% for a in range(10000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}";
    let objects = "{% macro m() %}{{ raise_exception('roles must alternate') }}{% endmacro %}\
                   {{ m() }}";
    let mut many = "{% for a in range(17_000) %}".to_owned();
    many.push_str(&"x".repeat(1000));
    many.push_str("{% endfor %}");
    for source in [runs, &many] {
        let error = template(source).render(&user("hi")).unwrap_err();
        assert!(matches!(error, RenderError::TooLong(_)), "{error}");
    }
    let error = template(objects).render(&user("hi")).unwrap_err();
    assert!(matches!(error, RenderError::Conversation(_)), "{error}");
    assert!(template(objects).probe().unwrap_err().to_string().contains("roles must alternate"));
    for source in ["{{ 1 / 'a' }}", "{{ nothing.of.this }}", "{{ strftime_now('%Q') }}"] {
        let error = template(source).render(&user("hi")).unwrap_err();
        assert!(matches!(error, RenderError::Template(_)), "{error}");
        assert!(error.to_string().contains("line 1"), "{error}");
    }
    let broken = ChatTemplate::new("{% if %}", String::new(), String::new());
    assert!(broken.unwrap_err().contains("line 1"));
}

#[test]
fn generation_blocks_are_rendered_as_if_they_were_not_there() {
    let plain = "{% for m in messages %}\n<{{ m.role }}>\n  {{- m.content -}}  \n{% endfor %}";
    let marked = "{% for m in messages %}\n<{{ m.role }}>{% generation %}\n  {{- m.content -}}  \
                  {%- endgeneration %}\n{% endfor %}";
    let text = template(marked).render(&user("hi")).unwrap();
    assert_eq!(text, template(plain).render(&user("hi")).unwrap());
    assert_eq!(
        template("a {%- generation -%} b {%+ endgeneration +%}").render(&user("")).unwrap(),
        "ab "
    );
    assert_eq!(
        template("generation {% set generation = 1 %}").render(&user("")).unwrap(),
        "generation "
    );
}

#[test]
fn loops_can_be_left_and_objects_keep_their_order() {
    let source = "{% for key in it %}{% if key == 'c' %}{% continue %}{% endif %}{% if key == 'd' %}\
                  {% break %}{% endif %}{{ key }}{% endfor %}";
    assert_eq!(
        with(source, json!({"it": {"z": 1, "c": 2, "a": 3, "d": 4, "e": 5}})).unwrap(),
        "za"
    );
}

/// The expected texts are the output of Python's `json.dumps(it, ensure_ascii=False, ..)`.
#[test]
fn tojson_is_pythons() {
    let it = json!({"type": "function", "a": [1, 2.5, true, null], "é<&>'": "\"\\\n\u{1}🦊", "e": {}, "f": []});
    let cases = [
        (
            "{{ it | tojson }}",
            "{\"type\": \"function\", \"a\": [1, 2.5, true, null], \"é<&>'\": \"\\\"\\\\\\n\\u0001🦊\", \"e\": {}, \"f\": []}",
        ),
        ("{{ it.a | tojson(indent=2) }}", "[\n  1,\n  2.5,\n  true,\n  null\n]"),
        (
            "{{ {'b': 1, 'a': {'c': 2}} | tojson(indent=4, sort_keys=true) }}",
            "{\n    \"a\": {\n        \"c\": 2\n    },\n    \"b\": 1\n}",
        ),
        ("{{ it.a | tojson(separators=(',', ':')) }}", "[1,2.5,true,null]"),
        ("{{ '🦊é' | tojson(ensure_ascii=true) }}", "\"\\ud83e\\udd8a\\u00e9\""),
    ];
    for (source, expected) in cases {
        assert_eq!(with(source, json!({"it": it})).unwrap(), expected, "{source}");
    }
    assert!(with("{{ nothing | tojson }}", json!({})).is_err());
    assert!(with("{{ 1 | tojson(indnt=2) }}", json!({})).is_err());
}

/// The expected texts are the output of GNU date.
#[test]
fn dates_are_as_strftime_writes_them() {
    let cases = [
        (0, "%d %b %Y", "01 Jan 1970"),
        (951_782_400, "%A, %B %-d, %Y %j", "Tuesday, February 29, 2000 060"),
        (1_735_689_599, "%F %T %a %y %I %p", "2024-12-31 23:59:59 Tue 24 11 PM"),
        (1_772_323_200, "%e|%H:%M:%S|%D|%%|%Z", " 1|00:00:00|03/01/26|%|UTC"),
        (4_107_542_400, "%Y-%m-%d %I", "2100-03-01 12"),
    ];
    for (seconds, format, expected) in cases {
        assert_eq!(date::strftime(format, seconds).unwrap(), expected, "{seconds}");
    }
    let year: u32 =
        template("{{ strftime_now('%Y') }}").render(&user("")).unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year));
}

#[test]
fn a_final_message_is_left_open_where_its_content_ends() {
    let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ bos_token }}";
    let trimming = source.replace("m.content", "m.content | trim");
    let cases = [("b ", "[a b ][b ", "[a b][b"), (" a", "[a b ][ a", "[a b][a")];
    for (last, kept, trimmed) in cases {
        let conversation = Conversation {
            messages: vec![json!({"content": "a b "}), json!({"content": last})],
            continue_final_message: true,
            ..user("")
        };
        assert_eq!(template(source).render(&conversation).unwrap(), kept);
        assert_eq!(template(&trimming).render(&conversation).unwrap(), trimmed);
    }
    // The content may also occur elsewhere in the prompt, after or within itself.
    let source = "{% for m in messages %}[{{ m.content }}]{% endfor %} Say b or end.";
    for last in ["b", "end", "[", "a b"] {
        let conversation = Conversation {
            messages: vec![json!({"content": "a b "}), json!({"content": last})],
            continue_final_message: true,
            ..user("")
        };
        assert_eq!(template(source).render(&conversation).unwrap(), format!("[a b ][{last}"));
    }
    let lost = Conversation { continue_final_message: true, ..user("gone") };
    assert!(matches!(template("x").render(&lost), Err(RenderError::Conversation(_))));
    let empty = Conversation { continue_final_message: true, ..user(" ") };
    assert!(template(source).render(&empty).is_err());
}

#[test]
fn what_a_template_reads_is_known() {
    let template = template("{% if tools is defined and tools %}{{ tools }}{% endif %}{{ x.y }}");
    let knows = |name| template.knows(name, false) && template.knows(name, true);
    assert!(knows("tools") && knows("x") && !knows("documents"));
}

#[test]
fn conversations_with_tools_may_have_a_template_of_their_own() {
    let template = template("plain {{ x }}").with_tool_use("tools {{ documents }}").unwrap();
    let with = |tools| Conversation { tools, ..user("a") };
    assert_eq!(template.render(&with(None)).unwrap(), "plain ");
    let tools = with(Some(json!([{"type": "function"}])));
    assert_eq!(template.render(&tools).unwrap(), "tools None");
    assert!(template.knows("x", false) && !template.knows("x", true));
    assert!(template.knows("documents", true) && !template.knows("documents", false));
    let wrong = ChatTemplate::new("x", String::new(), String::new()).unwrap();
    assert!(wrong.with_tool_use("{% if %}").unwrap_err().contains("tool_use"));
}

#[test]
fn indentation_makes_no_more_text_than_a_prompt_may_have() {
    let template = template("{{ tools | tojson(indent=64) }}");
    let mut tools = json!(vec![0; 10_000]);
    for _ in 0..50 {
        tools = json!([tools]);
    }
    // 10,000 lines of 50 levels are 32 MB.
    let conversation = Conversation { tools: Some(tools), ..user("x") };
    let error = template.render(&conversation).unwrap_err();
    assert!(matches!(&error, RenderError::TooLong(it) if it.contains("tojson")), "{error:?}");
}

/// A session of an agent: calls and their results, `count` messages in all.
fn session(count: usize) -> Conversation {
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    let pair = [call, json!({"role": "tool", "content": "done"})];
    let begin = json!({"role": "user", "content": "Go on."});
    let messages = [begin].into_iter().chain(pair.into_iter().cycle()).take(count).collect();
    Conversation::new(messages)
}

#[test]
fn long_sessions_of_agents_are_rendered() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models");
    let harmony = std::fs::read_to_string(folder.join("harmony.jinja")).unwrap();
    // This one looks at each earlier message again behind each call.
    let rendered = template(&harmony).render(&session(1501)).unwrap();
    assert_eq!(rendered.matches("to=functions.f").count(), 750);
    let error = template(&harmony).render(&session(16 << 10)).unwrap_err();
    assert!(matches!(error, RenderError::TooLong(_)), "{error}");
    // Others take so many steps for each message, and a bound's worth of messages is well within.
    let step = "{% if m.role == 'user' %}{{ m.content }}{% endif %}".repeat(50);
    let linear = format!("{{% for m in messages %}}{step}.{{% endfor %}}");
    let rendered = template(&linear).render(&session(16 << 10)).unwrap();
    assert_eq!(rendered.matches('.').count(), 50 + (16 << 10));
}

/// DeepSeek's template, whose arguments are the text that the model wrote.
#[test]
fn arguments_are_text_for_templates_that_join_them_to_text() {
    let source = "{% for m in messages %}{% if m['tool_calls'] is defined %}{% for tool in \
                  m['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + \
                  '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}\
                  {% endfor %}{% endif %}{% endfor %}";
    let call = |name: &str, arguments: serde_json::Value| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let calls =
        json!([call("f", json!({"city": "S\u{e3}o", "days": [1, 2]})), call("g", json!({}))]);
    let called = Conversation::new(vec![
        json!({"role": "user", "content": "x"}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ]);
    assert_eq!(
        template(source).render(&called).unwrap(),
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\": \"S\u{e3}o\", \"days\": [1, 2]}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    );
    // One that fails either way tells how it failed first.
    let error =
        template("{{ messages[1].tool_calls[0].function.arguments.city + 1 }}").render(&called);
    assert!(
        matches!(&error, Err(RenderError::Template(why)) if !why.contains("city")),
        "{error:?}"
    );
    let objects =
        "{% for t in messages[1].tool_calls %}{{ t.function.arguments | tojson }}{% endfor %}";
    let expected = "{\"city\": \"S\u{e3}o\", \"days\": [1, 2]}{}";
    assert_eq!(template(objects).render(&called).unwrap(), expected);
}

/// Distilled models have DeepSeek's template, which says nothing about tools.
#[test]
fn a_template_that_tells_of_no_tools_teaches_no_calls() {
    let shows = "{{ messages }} <tool_call>";
    assert_eq!(template(shows).calls(), None);
    assert_eq!(template(&format!("{shows} {{{{ tools }}}}")).calls(), Some(CallFormat::Hermes));
    // Llama 3.1 sets the variable before it reads it.
    let llama = "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}\
                 {%- if not tools is defined %}{%- set tools = none %}{%- endif %}\
                 {%- if tools is not none %}{{ '\"parameters\": dictionary of argument name and its \
                 value' }}{%- endif %}";
    assert_eq!(template(llama).calls(), Some(CallFormat::Llama3Json));
}

/// Harmony conversations rendered as by transformers on one day; the template uses what that of
/// gpt-oss does.
#[test]
fn harmony_is_rendered_as_transformers_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models");
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&read("harmony.json")).unwrap();
    let mut template = template(&read("harmony.jinja"));
    assert_eq!(template.calls(), Some(CallFormat::Harmony));
    for has_tools in [false, true] {
        assert!(template.knows("reasoning_effort", has_tools));
        assert!(template.knows("builtin_tools", has_tools));
    }
    let noon = |format: &str| date::strftime(format, 1_751_112_000);
    template.environment.add_function("strftime_now", noon);
    let cases = golden.as_array().unwrap();
    assert!(cases.len() > 15);
    for case in cases {
        let is = |name: &str, default: bool| case[name].as_bool().unwrap_or(default);
        let given = ["model_identity", "reasoning_effort", "builtin_tools"];
        let given =
            given.iter().filter_map(|name| Some(((*name).to_owned(), case.get(name)?.clone())));
        let conversation = Conversation {
            tools: case.get("tools").cloned(),
            add_generation_prompt: is("add_generation_prompt", true),
            continue_final_message: is("continue_final_message", false),
            variables: given.collect(),
            ..Conversation::new(case["messages"].as_array().unwrap().clone())
        };
        let rendered = template.render(&conversation);
        match case["rendered"].as_str() {
            Some(expected) => assert_eq!(rendered.as_deref(), Ok(expected), "{}", case["name"]),
            None => {
                let raised = case["raises"].as_str().unwrap();
                let is_raised = matches!(&rendered,
                    Err(RenderError::Conversation(message)) if message.contains(raised));
                assert!(is_raised, "{}: {rendered:?}", case["name"]);
            }
        }
    }
}

/// The rule by which DeepSeek's R1 distills write earlier calls, from their published template.
const DEEPSEEK: &str = "{%- for message in messages %}\
    {%- if message['role'] == 'user' %}{{'<U>' + message['content']}}{%- endif %}\
    {%- if message['role'] == 'assistant' and message['content'] is none %}\
    {%- for tool in message['tool_calls'] %}\
    {{'<A><calls><call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n' + '```json' \
    + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<end>'}}\
    {%- endfor %}{%- endif %}\
    {%- if message['role'] == 'assistant' and message['content'] is not none %}\
    {{'<A>' + message['content'] + '<eos>'}}{%- endif %}\
    {%- if message['role'] == 'tool' %}{{'<out>' + message['content']}}{%- endif %}\
    {%- endfor %}";

#[test]
fn calls_without_text_have_no_content_where_a_template_asks_for_that() {
    let calls = json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
    let said = |content: &str, calls: &serde_json::Value| {
        let called = json!({"role": "assistant", "content": content, "tool_calls": calls});
        let user = json!({"role": "user", "content": "hi"});
        let result = json!({"role": "tool", "content": ""});
        Conversation::new(vec![user, called, result])
    };
    let render = |source: &str, said: &Conversation| template(source).render(said).unwrap();
    assert_eq!(
        render(DEEPSEEK, &said("", &calls)),
        "<U>hi<A><calls><call>function<sep>f\n```json\n{\"a\": 1}\n```<end><out>"
    );
    assert_eq!(render(DEEPSEEK, &said("so", &calls)), "<U>hi<A>so<eos><out>");
    assert_eq!(render(DEEPSEEK, &said("", &json!([]))), "<U>hi<A><eos><out>");
    // Others, which would print it or fail, get text as before.
    for (source, text) in [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[hi][][]"),
        ("{% for m in messages %}{{ m.content + '|' }}{% endfor %}", "hi|||"),
        (
            "{% for m in messages %}{% if m.content is not none %}<{{ m.content }}>{% endif %}\
             {% endfor %}",
            "<hi><><>",
        ),
    ] {
        assert_eq!(render(source, &said("", &calls)), text, "{source}");
    }
    // Also where the template for tools is a file of its own.
    let both = template("{{ messages[0].content }}").with_tool_use(DEEPSEEK).unwrap();
    let with_tools = Conversation { tools: Some(json!([])), ..said("", &calls) };
    assert!(both.render(&with_tools).unwrap().contains("<sep>f"));
}
