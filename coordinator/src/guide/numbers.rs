//! PURE: numbers of schemas, as llguidance holds them: floats of 64 bits, and integers of 64 bits
//! that it makes of those. A constant that would become another number is refused. A bound that
//! cannot be held is moved inwards where next to nothing is lost, and refused otherwise. So what is
//! generated always matches the schema.
use serde_json::{Map, Number, Value};

/// Up to here every integer is a float.
const EXACT_MAX: i64 = 1 << 53;
/// The largest float among the library's integers. It also takes their negatives, which the lowest
/// one has not.
const HELD_MAX: i64 = i64::MAX - 1023;
/// Keywords with an object whose keys are names, not keywords.
const NAMES: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// An open bound of 0 is moved by so many orders of magnitude less than the other bound has.
const NEAR_ZERO: i32 = 16;
/// Not nearer than this power of ten: there would be no such float.
const NEAR_ZERO_MIN: i32 = -300;

/// Returns the schema with numbers that the library holds. Looks everywhere, at schemas or not:
/// references may point anywhere.
///
/// # Errors
/// Which number cannot be held, in one sentence that continues after the field's name.
pub(super) fn held(schema: &Value) -> Result<Value, String> {
    Ok(match schema {
        Value::Object(map) => Value::Object(object(map, false)?),
        Value::Array(list) => Value::Array(list.iter().map(held).collect::<Result<_, _>>()?),
        Value::Number(number) => Value::Number(annotation(number)),
        other => other.clone(),
    })
}

/// The same for an object; `named` tells whether its keys are names.
fn object(map: &Map<String, Value>, named: bool) -> Result<Map<String, Value>, String> {
    let mut made = Map::new();
    for (key, value) in map {
        let value = match (key.as_str(), value) {
            ("const", value) if !(named && value.is_object()) => checked(value)?,
            ("enum", value @ Value::Array(_)) => checked(value)?,
            (key, Value::Number(number)) => Value::Number(bound(map, key, number)?),
            (key, Value::Object(inner)) => {
                Value::Object(object(inner, !named && NAMES.contains(&key))?)
            }
            (_, value) => held(value)?,
        };
        made.insert(key.clone(), value);
    }
    move_open_ends(&mut made);
    Ok(made)
}

/// A constant, or a list of them, whose numbers must come as they are.
fn checked(constant: &Value) -> Result<Value, String> {
    check(constant).map(|()| constant.clone())
}

fn check(constant: &Value) -> Result<(), String> {
    match constant {
        Value::Array(list) => list.iter().try_for_each(check),
        Value::Object(map) => map.values().try_for_each(check),
        Value::Number(number) if !is_kept(number) => Err(format!(
            "has the constant {number}, which might become another number: beyond {EXACT_MAX} \
             (2^53) grammars hold only some integers, and none of more than 64 bits; make it a \
             string"
        )),
        _ => Ok(()),
    }
}

/// Whether the library writes a constant as it is.
fn is_kept(number: &Number) -> bool {
    let Some(float) = number.as_f64() else { return false };
    match number.as_i64() {
        Some(integer) => float as i64 == integer && integer != i64::MIN,
        // An integer of more than 64 bits has become a float where it was read.
        None if number.is_f64() => float > i64::MIN as f64 && float < u64::MAX as f64,
        None => float.to_string() == number.to_string(),
    }
}

/// A number that says nothing of values. The lowest ones must not come before the library, wherever
/// they are: it would look for their negatives without end.
fn annotation(number: &Number) -> Number {
    match number.as_f64() {
        Some(float) if float <= i64::MIN as f64 => Number::from(-HELD_MAX),
        _ => number.clone(),
    }
}

/// The number of the keyword `key` of `map`, moved inwards if it is a bound that cannot be held.
fn bound(map: &Map<String, Value>, key: &str, number: &Number) -> Result<Number, String> {
    // As of draft 4, a flag says that the bound beside it is open.
    let is_open = |flag: &str| map.get(flag) == Some(&Value::Bool(true));
    let (outwards, is_open): (i32, bool) = match key {
        "minimum" => (-1, is_open("exclusiveMinimum")),
        "maximum" => (1, is_open("exclusiveMaximum")),
        "exclusiveMinimum" => (-1, true),
        "exclusiveMaximum" => (1, true),
        _ => return Ok(annotation(number)),
    };
    let Some(float) = number.as_f64() else { return Ok(number.clone()) };
    let (far, farthest) = (float * f64::from(outwards), HELD_MAX as f64);
    if far < -farthest {
        return Err(format!(
            "has `{key}` {number}: under such a bound no number of 64 bits can be generated"
        ));
    }
    let integers = names_type(map, "integer");
    if far > farthest {
        // Closed, the library's highest integer is itself the end of its integers.
        let is_highest = number.as_i64().is_none_or(|it| it == i64::MAX);
        let integers_only = integers == Some(true) && names_type(map, "number") == Some(false);
        let is_own_end = outwards > 0 && !is_open && integers_only && is_highest;
        return Ok(match is_own_end {
            true => number.clone(),
            false => Number::from(HELD_MAX * i64::from(outwards)),
        });
    }
    if float.fract() != 0.0 {
        return Ok(number.clone());
    }
    let exact = number.as_i128().unwrap_or(float as i128);
    let step = if is_open { outwards } else { 0 };
    // The last integer within the bound, as the library computes it.
    if (float - f64::from(step)) as i128 == exact - i128::from(step) {
        return Ok(number.clone());
    }
    // A schema without a type may be merged with one of integers.
    if integers.unwrap_or(true) {
        return Err(format!(
            "has `{key}` {number}, which would become another bound: beyond {EXACT_MAX} (2^53) \
             grammars hold only some integers"
        ));
    }
    let is_outside = (float as i128 - exact) * i128::from(outwards) > 0;
    let float = match (is_outside, outwards > 0) {
        (false, _) => float,
        (true, true) => float.next_down(),
        (true, false) => float.next_up(),
    };
    Ok(Number::from(float as i64))
}

/// Whether a schema names this type; `None` if it names none.
fn names_type(map: &Map<String, Value>, name: &str) -> Option<bool> {
    Some(match map.get("type")? {
        Value::Array(names) => names.iter().any(|it| it.as_str() == Some(name)),
        one => one.as_str() == Some(name),
    })
}

/// Moves open bounds that the library takes for closed ones: whole numbers, where nothing else
/// before the other bound has the same digits before its point.
fn move_open_ends(map: &mut Map<String, Value>) {
    let ends = [
        ("exclusiveMinimum", "minimum", ["maximum", "exclusiveMaximum"], 1.0),
        ("exclusiveMaximum", "maximum", ["minimum", "exclusiveMinimum"], -1.0),
    ];
    for (open, closed, others, sign) in ends {
        let key = if map.get(open) == Some(&Value::Bool(true)) { closed } else { open };
        let bound = |key: &str| map.get(key).and_then(Value::as_f64).map(|it| it * sign);
        let Some(end) = bound(key) else { continue };
        let other = others.into_iter().filter_map(bound).fold(f64::INFINITY, f64::min);
        if end < 0.0 || end.fract() != 0.0 || other <= end || other >= end + 1.0 {
            continue;
        }
        let moved = if end > 0.0 {
            end.next_up()
        } else {
            let power = (other.log10().floor() as i32 - NEAR_ZERO).max(NEAR_ZERO_MIN);
            // From its digits, since a computed power has others.
            format!("1e{power}").parse::<f64>().unwrap_or(f64::MIN_POSITIVE)
        };
        map.insert(key.to_owned(), (moved * sign).into());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn constants_are_kept_or_refused_by_name() {
        for kept in [
            json!({"enum": [9_007_199_254_740_992_u64, -9_007_199_254_740_992_i64, 1.5, 1e16]}),
            json!({"const": [{"a": 1_152_921_504_606_846_976_u64}, i64::MAX]}),
            // Names are not keywords.
            json!({"properties": {"const": {"type": "integer"}, "enum": {"enum": [1]}}}),
        ] {
            assert_eq!(held(&kept), Ok(kept));
        }
        for (refused, number) in [
            (json!({"enum": [1, 9_007_199_254_740_993_u64]}), "9007199254740993"),
            (json!({"items": {"const": [{"a": -9_007_199_254_740_993_i64}]}}), "-9007199254740993"),
            (json!({"anyOf": [{"enum": [[u64::MAX]]}]}), "18446744073709551615"),
            (json!({"const": i64::MIN}), "-9223372036854775808"),
            (json!({"properties": {"const": {"const": i64::MAX - 1}}}), "9223372036854775806"),
            (json!({"const": 1e30}), "1e"),
        ] {
            let error = held(&refused).unwrap_err();
            assert!(error.contains(number) && error.contains("2^53"), "{error}");
        }
    }

    #[test]
    fn bounds_are_kept_or_moved_inwards_or_refused_by_name() {
        let lowest = json!(-HELD_MAX);
        for (schema, made) in [
            (
                json!({"type": "integer", "minimum": i64::MIN}),
                json!({"type": "integer", "minimum": lowest}),
            ),
            (json!({"minimum": -1e300}), json!({"minimum": lowest})),
            (json!({"maximum": 1e19}), json!({"maximum": HELD_MAX})),
            (json!({"exclusiveMaximum": i64::MAX}), json!({"exclusiveMaximum": HELD_MAX})),
            (
                json!({"type": "number", "maximum": 9_007_199_254_740_995_u64}),
                json!({"type": "number", "maximum": 9_007_199_254_740_994_u64}),
            ),
            (
                json!({"type": "number", "minimum": 9_007_199_254_740_993_u64}),
                json!({"type": "number", "minimum": 9_007_199_254_740_994_u64}),
            ),
            // Not a bound, but a reference could have it read as one.
            (json!({"examples": [[i64::MIN]]}), json!({"examples": [[lowest]]})),
        ] {
            assert_eq!(held(&schema), Ok(made));
        }
        for kept in [
            json!({"type": "integer", "minimum": -9_007_199_254_740_991_i64,
                "maximum": 9_007_199_254_740_991_u64}),
            json!({"exclusiveMaximum": 9_007_199_254_740_992_u64, "minimum": 0.25}),
            json!({"type": "integer", "maximum": 9_007_199_254_740_994_u64}),
            json!({"type": ["integer", "null"], "maximum": i64::MAX}),
            json!({"type": "integer", "maximum": u64::MAX, "minimum": 0}),
        ] {
            assert_eq!(held(&kept), Ok(kept));
        }
        for (refused, what) in [
            (
                json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64}),
                "`minimum` 9007199254740993",
            ),
            (json!({"maximum": -9_007_199_254_740_993_i64}), "`maximum` -9007199254740993"),
            // A float has no next integer there.
            (
                json!({"type": "integer", "exclusiveMinimum": 9_007_199_254_740_992_u64}),
                "`exclusiveMinimum` 9007199254740992",
            ),
            (
                json!({"maximum": 9_007_199_254_740_996_u64, "exclusiveMaximum": true}),
                "`maximum` 9007199254740996",
            ),
            (json!({"type": "integer", "minimum": -1e19, "maximum": -1e19}), "`maximum` -1e"),
            (json!({"minimum": u64::MAX}), "`minimum` 18446744073709551615"),
        ] {
            let error = held(&refused).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn open_whole_bounds_near_the_other_are_moved_off_their_number() {
        for (schema, made) in [
            (
                json!({"exclusiveMinimum": 0, "maximum": 0.1}),
                json!({"exclusiveMinimum": 1e-17, "maximum": 0.1}),
            ),
            (
                json!({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}),
                json!({"exclusiveMinimum": 2.000_000_000_000_000_4, "exclusiveMaximum": 2.5}),
            ),
            (
                json!({"minimum": 2, "exclusiveMinimum": true, "maximum": 2.5}),
                json!({"minimum": 2.000_000_000_000_000_4, "exclusiveMinimum": true,
                    "maximum": 2.5}),
            ),
            (
                json!({"exclusiveMaximum": 0, "minimum": -0.1}),
                json!({"exclusiveMaximum": -1e-17, "minimum": -0.1}),
            ),
        ] {
            assert_eq!(held(&schema), Ok(made));
        }
        for kept in [
            json!({"minimum": 2, "maximum": 2.5}),
            json!({"exclusiveMinimum": 0, "maximum": 1}),
            json!({"exclusiveMinimum": 0}),
            json!({"exclusiveMinimum": -1, "maximum": -0.5}),
            json!({"exclusiveMinimum": 0.5, "maximum": 0.75}),
        ] {
            assert_eq!(held(&kept), Ok(kept));
        }
    }
}
