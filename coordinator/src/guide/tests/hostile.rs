//! Grammars and schemas that would cost too much.
use super::*;

fn chain(rules: usize, rule: impl Fn(usize) -> String) -> String {
    (0..rules).map(rule).collect()
}

/// Grammars that are unreasonably expensive: each is rejected, or works, or ends with an error.
/// None may end the process, and no token may take long.
#[test]
fn hostile_grammars_cost_what_is_bounded() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let schema = |schema: String| GuideSpec::Json { schema, whitespace: Whitespace::Usual };
    let refs = |rules: usize| {
        let defs = chain(rules, |i| format!(r##""d{i}":{{"$ref":"#/$defs/d{}"}},"##, i + 1));
        schema(format!(
            r##"{{"$ref":"#/$defs/d0","$defs":{{{defs}"d{rules}":{{"type":"null"}}}}}}"##
        ))
    };
    let doubled = chain(20, |i| {
        format!(
            r##""d{i}":{{"allOf":[{{"$ref":"#/$defs/d{0}"}},{{"$ref":"#/$defs/d{0}"}}]}},"##,
            i + 1
        )
    });
    let optional = chain(2000, |i| format!(r#""p{i}":{{"type":"integer"}},"#));
    let nested = |open: &str, close: &str| {
        format!("start: {}\"a\"{}", open.repeat(30_000), close.repeat(30_000))
    };
    let specs = [
        GuideSpec::Regex("(".repeat(8000) + "a" + &")".repeat(8000)),
        GuideSpec::Regex("a".repeat(16_000)),
        GuideSpec::Regex("a?".repeat(2000) + &"a".repeat(2000)),
        GuideSpec::Regex("((a{1,100}){1,100}b){1,100}".to_owned()),
        GuideSpec::Regex("(.*a.{20}){5}".to_owned()),
        GuideSpec::Regex(r"\p{L}{1,1000}\w{1,1000}".to_owned()),
        GuideSpec::Lark(nested("(", ")")),
        GuideSpec::Lark(nested("[", "]")),
        // Recursion as deep as the limit on bytes allows.
        GuideSpec::Lark(chain(4500, |i| format!("r{i}:r{}\n", i + 1)) + "r4500:\"a\"\nstart:r0\n"),
        GuideSpec::Lark(chain(4500, |i| format!("R{i}:R{}\n", i + 1)) + "R4500:\"a\"\nstart:R0\n"),
        GuideSpec::Lark("start: start start | \"a\" | ".to_owned()),
        GuideSpec::Lark("start: (((\"a\"~1..1000)~1..1000)~1..1000)\n".to_owned()),
        refs(5000),
        schema(format!(
            r##"{{"$ref":"#/$defs/d0","$defs":{{{doubled}"d20":{{"type":"object"}}}}}}"##
        )),
        schema(r#"{"type":"string","maxLength":1000000}"#.to_owned()),
        schema(r#"{"type":"array","items":{"type":"string"},"minItems":100000}"#.to_owned()),
        schema(format!(r#"{{"type":"object","properties":{{{optional}"z":{{}}}}}}"#)),
        schema(r#"{"type":"integer","multipleOf":9973}"#.to_owned()),
        schema(format!("{}{{}}{}", r#"{"type":"array","items":"#.repeat(120), "}".repeat(120))),
    ];
    let mut followed = 0;
    for spec in specs {
        spec.check().unwrap();
        let name: String = format!("{spec:?}").chars().take(60).collect();
        let grammar = match guides.compile(&spec) {
            Ok(grammar) => grammar,
            Err(error) => {
                assert!(error.len() < 2000 && !error.contains('\n'), "{error}");
                assert!(!error.contains("panic"), "{error}");
                continue;
            }
        };
        let (mut guide, mut dice) = (grammar.guide(false).unwrap(), Dice(7));
        for _ in 0..50 {
            let Ok(allowed) = wait(&mut guide) else { break };
            let text = |token: &u32| allowed.allows(*token) && !model.end_tokens.contains(token);
            let allowed: Vec<u32> = (0..model.vocab_size).filter(text).collect();
            let Some(token) = allowed.get(dice.below(allowed.len().max(1))) else { break };
            let start = Instant::now();
            let went = guide.accept(*token);
            // A hundred times what it takes on an idle machine.
            assert!(start.elapsed().as_secs() < 3, "{name}: {:?}", start.elapsed());
            match went {
                Ok(Guided::GoesOn) => {}
                Ok(Guided::IsOver) => break,
                Err(GuideEnd::Broke(error)) => panic!("{name}: {error}"),
                Err(GuideEnd::Refused(error)) => {
                    assert!(error.len() < 2000 && !error.contains('\n'), "{error}");
                    break;
                }
            }
        }
        followed += 1;
    }
    assert!(followed >= 10, "{followed}");
}

/// Schemas whose parts are compared in pairs or multiplied are rejected quickly, also inside a
/// grammar. Without the bounds these take minutes, or most of a gigabyte.
#[test]
fn dear_schemas_are_refused_before_they_are_compiled() {
    let guides = Guides::new(&model("models/demo")).unwrap();
    let patterns = chain(800, |i| format!(r#""^a{i}[bc]*d.{{3}}$":{{}},"#));
    let patterns = format!(r#"{{"type":"object","patternProperties":{{{patterns}"z":{{}}}}}}"#);
    let objects = vec![json!({"type": "object", "properties": {"x": {}}}); 400];
    let many: serde_json::Map<_, _> = (0..1500).map(|i| (format!("p{i}"), json!({}))).collect();
    let merged = json!({"allOf": [{"anyOf": objects}, {"properties": many}]}).to_string();
    for (schema, what) in [(patterns, "801 entries of `patternProperties`"), (merged, "400 alt")] {
        let within = GuideSpec::Lark(format!("start: \"a\" body\nbody: %json {schema}\n"));
        for spec in [GuideSpec::Json { schema, whitespace: Whitespace::Usual }, within] {
            let start = Instant::now();
            let error = guides.compile(&spec).unwrap_err();
            assert!(error.contains(what), "{error}");
            assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
}
