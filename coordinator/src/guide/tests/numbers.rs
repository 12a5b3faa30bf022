//! Numbers of schemas: what is generated is what they say, at the edges of what grammars hold.
use super::*;

/// Whether a schema lets a property have this value and no more.
fn takes(model: &TextModel, grammar: &Arc<Grammar>, value: &str) -> bool {
    let mut guide = grammar.guide(false).unwrap();
    let tokens = model.encode(&format!("{{\"n\":{value}}}"), false).unwrap();
    tokens.iter().all(|token| known(&mut guide).allows(*token) && guide.accept(*token).is_ok())
}

/// The same of any text without its masks, which take longer than all the rest.
fn follows(model: &TextModel, grammar: &Arc<Grammar>, value: &str) -> bool {
    let mut guide = grammar.guide(false).unwrap();
    let tokens = model.encode(&format!("{{\"n\":{value}}}"), false).unwrap();
    tokens.iter().all(|token| guide.follow(*token).is_ok())
}

/// The number that a text is, in millionths.
fn millionths(text: &str) -> i128 {
    let unsigned = text.trim_start_matches('-');
    let (whole, decimals) = unsigned.split_once('.').unwrap_or((unsigned, ""));
    assert!(decimals.len() <= 6, "{text}");
    let magnitude: i128 = format!("{whole}{decimals:0<6}").parse().unwrap();
    if text.starts_with('-') { -magnitude } else { magnitude }
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
            &["0", "-5", "-9223372036854775808", "77"],
            &["-9223372036854775809", "-99999999999999999999"],
        ),
        (
            json!({"type": "integer", "maximum": i64::MAX}),
            &["9223372036854775807", "-1"],
            &["9223372036854775808", "99999999999999999999"],
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
            &["7", "-7", "9223372036854775807", "-9223372036854775808"],
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
    let big = 9_007_199_254_740_993_u64;
    for (schema, what) in [
        // More than 64 bits: whatever the digits were, only a float has arrived.
        (json!({"const": 1e30}), "1e"),
        (json!({"const": {"a": [2_f64.powi(64)]}}), "1.8446744073709552e"),
        (json!({"type": "integer", "minimum": -1e19, "maximum": -1e19}), "`maximum`"),
        (json!({"multipleOf": 1e-30}), "`multipleOf` "),
        // The library cannot merge what it does not hold.
        (json!({"anyOf": [{"const": big}, {"type": "null"}], "minimum": 5}), "9007199254740993"),
        (json!({"type": "integer", "anyOf": [{"minimum": big}, {"maximum": 5}]}), "`minimum`"),
        (json!({"type": "number", "anyOf": [{"multipleOf": 0.53}, {}]}), "`multipleOf` 0.53"),
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

/// Bounds and divisors in one place or in several, by exact arithmetic on all texts of a kind.
#[test]
fn numbers_are_those_that_arithmetic_allows() {
    /// What of a number's millionths makes it one that the schema allows.
    type Judge = fn(i128) -> bool;
    let cases: [(Value, Judge, &[&str]); 11] = [
        (
            json!({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}], "type": "number"}),
            |n| 0 < n && n <= 500_000,
            &["0.5", "0.1", "0.07"],
        ),
        (
            json!({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 1}], "type": "number"}),
            |n| 0 < n && n <= 1_000_000,
            &["1", "0.5", "0.07"],
        ),
        (
            json!({"type": "number", "allOf": [{"minimum": 2}, {"exclusiveMinimum": 2}],
                "maximum": 2.6}),
            |n| 2_000_000 < n && n <= 2_600_000,
            &["2.6", "2.5", "2.07"],
        ),
        (
            json!({"type": "number", "minimum": 2, "allOf": [{"maximum": 2.6}],
                "exclusiveMinimum": true}),
            |n| 2_000_000 < n && n <= 2_600_000,
            &["2.6", "2.5", "2.07"],
        ),
        (
            json!({"type": "number", "minimum": -0.5, "maximum": 5.5,
                "allOf": [{"anyOf": [{"exclusiveMaximum": 0}, {"exclusiveMinimum": 5}]}]}),
            |n| (-500_000..0).contains(&n) || 5_000_000 < n && n <= 5_500_000,
            &["-0.5", "-0.1", "5.5", "5.1"],
        ),
        (
            json!({"type": "number", "multipleOf": 0.07, "minimum": -1, "maximum": 1}),
            |n| n % 70_000 == 0 && (-1_000_000..=1_000_000).contains(&n),
            &["0", "0.07", "-0.14", "0.7", "-0.98"],
        ),
        (
            json!({"type": "number", "multipleOf": 0.53, "exclusiveMinimum": 0, "maximum": 3}),
            |n| n % 530_000 == 0 && 0 < n && n <= 3_000_000,
            &["0.53", "1.06", "2.65"],
        ),
        (
            json!({"type": "integer", "multipleOf": 0.35, "minimum": -20}),
            |n| n % 7_000_000 == 0 && n >= -20_000_000,
            &["0", "7", "-14", "70"],
        ),
        (
            json!({"type": "integer", "multipleOf": 0.57, "maximum": 20}),
            |n| n % 57_000_000 == 0 && n <= 20_000_000,
            &["0", "-57", "-114"],
        ),
        (
            json!({"type": "number", "allOf": [{"multipleOf": 0.53}, {"multipleOf": 0.2}],
                "minimum": 0, "maximum": 20}),
            |n| n % 10_600_000 == 0 && (0..=20_000_000).contains(&n),
            &["0", "10.6"],
        ),
        // Merged by the library.
        (
            json!({"type": "number", "anyOf": [{"multipleOf": 0.07}, {"multipleOf": 0.5}],
                "minimum": 0}),
            |n| (n % 70_000 == 0 || n % 500_000 == 0) && n >= 0,
            &["0", "0.07", "0.5", "7"],
        ),
    ];
    let wholes = ["0", "1", "2", "5", "7", "10", "20", "57"];
    let decimals = ["", ".0", ".07", ".1", ".5", ".53", ".6"];
    let unsigned = wholes.iter().flat_map(|whole| decimals.map(|more| format!("{whole}{more}")));
    let texts: Vec<String> = unsigned.flat_map(|text| [format!("-{text}"), text]).collect();
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    for (schema, allows, taken) in cases {
        let grammar = guides.compile(&property(&schema));
        let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error}"));
        for text in &texts {
            let is_allowed = allows(millionths(text));
            assert!(is_allowed || !follows(&model, &grammar, text), "{schema}: {text}");
        }
        for text in taken {
            assert!(allows(millionths(text)), "{schema}: {text}");
            assert!(follows(&model, &grammar, text), "{schema}: {text}");
        }
    }
}

#[test]
fn integers_of_64_bits_are_told_from_their_neighbours() {
    const BIG: i128 = (1 << 53) + 1;
    const LONG: i128 = 1_234_567_890_123_456_789;
    const LOWEST: i128 = i64::MIN as i128;
    const HIGHEST: i128 = u64::MAX as i128;
    let (big, long) = (BIG as i64, LONG as i64);
    type Allows = fn(i128) -> bool;
    let cases: [(Value, Allows); 9] = [
        (json!({"type": "integer", "minimum": big}), |n| n >= BIG),
        (json!({"type": "integer", "exclusiveMaximum": -big}), |n| n < -BIG),
        (json!({"type": "number", "maximum": long}), |n| n <= LONG),
        (json!({"type": "integer", "minimum": i64::MIN, "exclusiveMaximum": i64::MAX}), |n| {
            (LOWEST..i64::MAX.into()).contains(&n)
        }),
        (json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}), |n| {
            (0..=HIGHEST).contains(&n)
        }),
        (json!({"enum": [big, "x", i64::MIN, 5, u64::MAX]}), |n| {
            [BIG, LOWEST, 5, HIGHEST].contains(&n)
        }),
        (json!({"type": "integer", "const": long}), |n| n == LONG),
        (
            json!({"type": "integer", "allOf": [{"minimum": big}, {"exclusiveMaximum": big + 2}]}),
            |n| (BIG..BIG + 2).contains(&n),
        ),
        (json!({"type": ["null", "integer"], "minimum": u64::MAX - 1}), |n| n >= HIGHEST - 1),
    ];
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    for (schema, allows) in cases {
        let grammar = guides.compile(&property(&schema));
        let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error}"));
        let places = [0, 5, BIG, -BIG, LONG, LOWEST, i64::MAX.into(), HIGHEST];
        for (at, by) in places.into_iter().flat_map(|at| [-1000, -1, 0, 1, 2].map(|by| (at, by))) {
            let (number, is_allowed) = (at + by, allows(at + by));
            let text = number.to_string();
            assert_eq!(follows(&model, &grammar, &text), is_allowed, "{schema}: {text}");
            if by == 0 {
                // White space follows as elsewhere.
                let text = format!("{text} ");
                assert_eq!(follows(&model, &grammar, &text), is_allowed, "{schema}: {text:?}");
            }
        }
        let is_null = schema["type"].is_array();
        assert_eq!(follows(&model, &grammar, "null"), is_null, "{schema}");
    }
    let nested = json!({"const": {"a": [[-big], "x"]}});
    let grammar = guides.compile(&property(&nested)).unwrap();
    assert!(follows(&model, &grammar, "{\"a\":[[-9007199254740993],\"x\"]}"));
    for other in ["{\"a\":[[-9007199254740992],\"x\"]}", "{\"a\":[[],\"x\"]}", "{}"] {
        assert!(!follows(&model, &grammar, other), "{other}");
    }
}

/// At random, in a schema and in a grammar around it: never a dead end, nor another number.
#[test]
fn what_is_written_by_rules_of_ones_own_is_within_them() {
    let step = json!({"type": "number", "multipleOf": 0.53, "minimum": -60, "maximum": 99});
    let mut list = json!({"type": "array", "items": step, "minItems": 1, "maxItems": 2});
    let alone = GuideSpec::Json { schema: list.to_string(), whitespace: Whitespace::None };
    list["x-guidance"] = json!({"whitespace_flexible": false});
    let within = GuideSpec::Lark(format!("start: \"is \" list\nlist: %json {list}\n"));
    let model = model("models/demo");
    for (spec, before) in [(alone, ""), (within, "is ")] {
        let texts = texts(&model, &spec, 60);
        assert!(texts.len() > 20, "{texts:?}");
        for text in texts {
            let list = text.strip_prefix(before).and_then(|it| it.strip_prefix('['));
            for number in list.and_then(|it| it.strip_suffix(']')).unwrap().split(',') {
                let number = millionths(number);
                let is_within = (-60_000_000..=99_000_000).contains(&number);
                assert!(is_within && number % 530_000 == 0, "{text}");
            }
        }
    }
}
