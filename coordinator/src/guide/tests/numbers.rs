//! Numbers of schemas: what is generated is what they say, at the edges of what grammars hold.
use super::*;

/// Whether a schema lets a property have this value and no more.
fn takes(model: &TextModel, grammar: &Arc<Grammar>, value: &str) -> bool {
    let mut guide = grammar.guide(false).unwrap();
    let tokens = model.encode(&format!("{{\"n\":{value}}}"), false).unwrap();
    tokens.iter().all(|token| known(&mut guide).allows(*token) && guide.accept(*token).is_ok())
}

fn property(schema: &Value) -> GuideSpec {
    json_spec(&json!({"type": "object", "properties": {"n": schema}, "required": ["n"]}))
}

#[test]
fn numbers_are_within_their_bounds() {
    let number = |bounds: Value| {
        let mut schema = json!({"type": "number"});
        schema.as_object_mut().unwrap().extend(bounds.as_object().unwrap().clone());
        schema
    };
    let cases: [(Value, &[&str], &[&str]); 12] = [
        (
            number(json!({"exclusiveMinimum": 0, "maximum": 0.1})),
            &["0.1", "0.05", "0.001"],
            &["0", "0.0", "-0", "0.11", "1"],
        ),
        (
            number(json!({"exclusiveMinimum": 2, "maximum": 2.5})),
            &["2.5", "2.1", "2.01"],
            &["2", "2.0", "2.6", "3"],
        ),
        (number(json!({"minimum": 2, "maximum": 2.5})), &["2", "2.5", "2.1"], &["2.6", "1"]),
        (number(json!({"exclusiveMinimum": 0, "maximum": 1})), &["1", "0.5"], &["0", "1.5"]),
        (
            number(json!({"minimum": -0.5, "exclusiveMaximum": 0})),
            &["-0.5", "-0.1"],
            &["0", "-0", "-0.0", "0.1"],
        ),
        (
            number(json!({"minimum": -2.5, "exclusiveMaximum": -2})),
            &["-2.5", "-2.1"],
            &["-2", "-2.0", "-2.6"],
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN}),
            &["0", "-5", "-9223372036854774784", "77"],
            &["-9223372036854775809", "-99999999999999999999"],
        ),
        (
            json!({"type": "integer", "maximum": i64::MAX}),
            &["9223372036854775807", "-1"],
            &["9223372036854775808", "99999999999999999999"],
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
            &["7", "-7", "9223372036854775807"],
            &["9223372036854775808", "-9223372036854775809"],
        ),
        (
            number(json!({"maximum": 1e19})),
            &["1", "-3.5", "9000000000000000000"],
            &["20000000000000000000"],
        ),
        (number(json!({"minimum": -1e300, "maximum": 1e300})), &["0.5", "-12"], &["\"a\""]),
        (
            json!({"enum": [9_007_199_254_740_992_u64, i64::MAX]}),
            &["9007199254740992", "9223372036854775807"],
            &["9007199254740993", "9223372036854775808"],
        ),
    ];
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    for (schema, taken, refused) in cases {
        let grammar = guides.compile(&property(&schema));
        let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error}"));
        for value in taken {
            assert!(takes(&model, &grammar, value), "{schema}: {value}");
        }
        for value in refused {
            assert!(!takes(&model, &grammar, value), "{schema}: {value}");
        }
    }
}

/// Never another number in its place, nor the end of the process.
#[test]
fn numbers_that_grammars_cannot_hold_are_refused_by_name() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    for (schema, what) in [
        (json!({"enum": [9_007_199_254_740_993_u64]}), "9007199254740993"),
        (json!({"type": "integer", "const": 1_234_567_890_123_456_789_u64}), "1234567890123456789"),
        (json!({"const": {"a": [[-9_007_199_254_740_993_i64]]}}), "-9007199254740993"),
        (json!({"type": "integer", "const": i64::MIN}), "-9223372036854775808"),
        (json!({"type": "integer", "minimum": -1e19, "maximum": -1e19}), "`maximum`"),
        (json!({"type": "integer", "maximum": 9_007_199_254_740_993_u64}), "`maximum`"),
    ] {
        let within = GuideSpec::Lark(format!("start: \"a\" body\nbody: %json {schema}\n"));
        for spec in [property(&schema), within] {
            let error = guides.compile(&spec).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}

#[test]
fn schemas_within_grammars_are_held_to_the_same_numbers() {
    let model = model("models/demo");
    let lowest = json!({"type": "integer", "minimum": i64::MIN, "maximum": 9});
    let grammar = format!("start: \"{{\\\"n\\\":\" n \"}}\"\nn: %json {lowest}\n");
    let grammar = Guides::new(&model).unwrap().compile(&GuideSpec::Lark(grammar)).unwrap();
    assert!(takes(&model, &grammar, "-12") && takes(&model, &grammar, "9"));
    assert!(!takes(&model, &grammar, "10") && !takes(&model, &grammar, "-9223372036854775809"));
}
