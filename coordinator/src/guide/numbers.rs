//! PURE: numbers of schemas, as llguidance holds them: floats of 64 bits, and integers of 64 bits
//! that it makes of those. A constant that would become another number is refused. A bound that
//! cannot be held is moved inwards where next to nothing is lost, and refused otherwise. So what is
//! generated always matches the schema. Only what `exact` has left in a schema gets here.
use serde_json::{Map, Number, Value};

use super::decimal::{Decimal, Divisor};

/// Up to here every integer is a float.
const EXACT_MAX: i64 = 1 << 53;
/// The largest float among the library's integers. It also takes their negatives, which the lowest
/// one has not.
const HELD_MAX: i64 = i64::MAX - 1023;
/// Keywords with an object whose keys are names, not keywords.
pub(super) const NAMES: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords by which schemas are merged with others.
const MERGING: [&str; 5] = ["allOf", "anyOf", "oneOf", "$ref", "patternProperties"];
/// So many floats on each side of a divisor are tried in its place.
const NEIGHBOURS: usize = 40;
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
    within(schema, &Ends::of(schema))
}

fn within(schema: &Value, ends: &Ends) -> Result<Value, String> {
    Ok(match schema {
        Value::Object(map) => Value::Object(object(map, false, ends)?),
        Value::Array(list) => {
            Value::Array(list.iter().map(|it| within(it, ends)).collect::<Result<_, _>>()?)
        }
        Value::Number(number) => Value::Number(annotation(number)),
        other => other.clone(),
    })
}

/// The same for an object; `named` tells whether its keys are names.
fn object(
    map: &Map<String, Value>,
    named: bool,
    ends: &Ends,
) -> Result<Map<String, Value>, String> {
    let mut made = Map::new();
    for (key, value) in map {
        let value = match (key.as_str(), stated(map, key, value)) {
            ("const", value) if !(named && value.is_object()) => checked(value)?,
            ("enum", value @ Value::Array(_)) => checked(value)?,
            ("multipleOf", Value::Number(number)) => Value::Number(divisor(number)?),
            (key, Value::Number(number)) => Value::Number(bound(map, key, number)?),
            (key, Value::Object(inner)) => {
                Value::Object(object(inner, !named && NAMES.contains(&key), ends)?)
            }
            (_, value) => within(value, ends)?,
        };
        made.insert(key.clone(), value);
    }
    move_open_ends(&mut made, ends);
    Ok(made)
}

/// The value of a keyword. As of draft 4, a flag says that the bound beside it is open, and stands
/// for it: the library reads a flag only together with its bound, but not what stands before and
/// behind `allOf` and its like.
pub(super) fn stated<'a>(map: &'a Map<String, Value>, key: &str, value: &'a Value) -> &'a Value {
    let flagged = match (key, value) {
        ("exclusiveMinimum", Value::Bool(true)) => map.get("minimum"),
        ("exclusiveMaximum", Value::Bool(true)) => map.get("maximum"),
        _ => None,
    };
    flagged.filter(|bound| bound.is_number()).unwrap_or(value)
}

/// Whether the library holds a bound as it is, or nobody can: its digits are lost.
pub(super) fn holds(map: &Map<String, Value>, key: &str, number: &Number) -> bool {
    // The library has no integers above the highest one with a sign, and takes that for them.
    let is_kept = |held: Number| held == *number && (number.is_f64() || number.is_i64());
    has_lost_digits(number) || bound(map, key, number).is_ok_and(is_kept)
}

/// A bound whose digits count: itself, or if they are lost, one that is certainly within it.
pub(super) fn certain(map: &Map<String, Value>, key: &str, number: &Number) -> Option<Number> {
    if has_lost_digits(number) { bound(map, key, number).ok() } else { Some(number.clone()) }
}

/// Whether the library divides by this number, or can be told to.
pub(super) fn divides(number: &Number) -> bool {
    divisor(number).is_ok()
}

/// Whether the library writes all numbers of a constant, or of a list of them, as they are.
pub(super) fn keeps(constant: &Value) -> bool {
    check(constant).is_ok()
}

/// Whether a number may have had other digits: of more than 64 bits, it became a float where it was
/// read.
fn has_lost_digits(number: &Number) -> bool {
    number.is_f64() && number.as_f64().is_none_or(|float| float.abs() > HELD_MAX as f64)
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
            "has the constant {number}, which might become another number: where schemas are \
             merged (`allOf`, keywords beside `anyOf` or `$ref`) grammars hold only some integers \
             beyond {EXACT_MAX} (2^53), and nowhere any of more than 64 bits; make it a string"
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
    let (outwards, is_open): (i32, bool) = match key {
        "minimum" => (-1, false),
        "maximum" => (1, false),
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
            "has `{key}` {number}, which would become another bound: where schemas are merged \
             (`allOf`, keywords beside `anyOf` or `$ref`) grammars hold only some integers beyond \
             {EXACT_MAX} (2^53)"
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

/// A divisor as a float that the library reads as these very digits.
fn divisor(number: &Number) -> Result<Number, String> {
    let Some(float) = number.as_f64().filter(|float| *float != 0.0) else {
        return Ok(number.clone());
    };
    let error = || {
        format!(
            "has `multipleOf` {number}, by which grammars cannot divide, at least where schemas \
             are merged (`allOf`, keywords beside `anyOf` or `$ref`)"
        )
    };
    let wanted = Decimal::of(number).and_then(Decimal::divisor).ok_or_else(error)?;
    let (mut below, mut above) = (float.abs(), float.abs());
    if read(above) == Some(wanted) {
        return Ok(number.clone());
    }
    for _ in 0..NEIGHBOURS {
        (below, above) = (below.next_down(), above.next_up());
        let found = [below, above].into_iter().find(|it| read(*it) == Some(wanted));
        if let Some(found) = found.and_then(Number::from_f64) {
            return Ok(found);
        }
    }
    Err(error())
}

/// The digits that the library reads off a divisor: it multiplies by 10 until there are no
/// decimals, and rounding may add some.
fn read(mut float: f64) -> Option<Divisor> {
    let mut decimals = 0;
    while float.fract() != 0.0 {
        float *= 10.0;
        decimals += 1;
    }
    if float > f64::from(u32::MAX) {
        return None;
    }
    let mut digits = float as u32;
    while decimals > 0 && digits.is_multiple_of(10) {
        digits /= 10;
        decimals -= 1;
    }
    Some(Divisor { digits, decimals })
}

/// The bounds in a document whose schemas may be merged, in their order; without such, none. The
/// library computes with the tightest ones, wherever they stand.
#[derive(Default)]
struct Ends {
    upper: Vec<f64>,
    /// With the other sign.
    lower: Vec<f64>,
    merges: bool,
}

impl Ends {
    fn of(document: &Value) -> Self {
        let mut ends = Self::default();
        ends.add(document);
        if !ends.merges {
            return Self::default();
        }
        ends.upper.sort_unstable_by(f64::total_cmp);
        ends.lower.sort_unstable_by(f64::total_cmp);
        ends
    }

    fn add(&mut self, value: &Value) {
        match value {
            Value::Array(list) => list.iter().for_each(|it| self.add(it)),
            Value::Object(map) => {
                for (key, value) in map {
                    match key.as_str() {
                        "maximum" | "exclusiveMaximum" => self.upper.extend(value.as_f64()),
                        "minimum" | "exclusiveMinimum" => {
                            self.lower.extend(value.as_f64().map(|it| -it));
                        }
                        key => self.merges |= MERGING.contains(&key),
                    }
                    self.add(value);
                }
            }
            _ => {}
        }
    }
}

/// Moves open bounds that the library takes for closed ones: whole numbers, where nothing else
/// before the other bound has the same digits before its point.
fn move_open_ends(map: &mut Map<String, Value>, ends: &Ends) {
    let sides = [
        ("exclusiveMinimum", ["maximum", "exclusiveMaximum"], &ends.upper, 1.0),
        ("exclusiveMaximum", ["minimum", "exclusiveMinimum"], &ends.lower, -1.0),
    ];
    for (open, others, elsewhere, sign) in sides {
        let bound = |key: &str| map.get(key).and_then(Value::as_f64).map(|it| it * sign);
        let Some(end) = bound(open) else { continue };
        let beside = others.into_iter().filter_map(bound).fold(f64::INFINITY, f64::min);
        let beyond = elsewhere.get(elsewhere.partition_point(|it| *it <= end)).copied();
        let other = beyond.map_or(beside, |it| it.min(beside));
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
        map.insert(open.to_owned(), (moved * sign).into());
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
                "`exclusiveMaximum` 9007199254740996",
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
                json!({"minimum": 2, "exclusiveMinimum": 2.000_000_000_000_000_4,
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

    /// The library merges bounds wherever they stand.
    #[test]
    fn open_bounds_are_moved_where_the_other_one_is_elsewhere() {
        let parts = |open: Value, other: Value| json!({"allOf": [open, {"items": [other]}]});
        for (open, other, made) in [
            (
                json!({"exclusiveMinimum": 0}),
                json!({"maximum": 0.1}),
                json!({"exclusiveMinimum": 1e-17}),
            ),
            (
                json!({"exclusiveMaximum": -2, "minimum": -9}),
                json!({"minimum": -2.5}),
                json!({"exclusiveMaximum": -2.000_000_000_000_000_4, "minimum": -9}),
            ),
            (
                json!({"minimum": 2, "exclusiveMinimum": true}),
                json!({"exclusiveMaximum": 2.5}),
                json!({"minimum": 2, "exclusiveMinimum": 2.000_000_000_000_000_4}),
            ),
        ] {
            assert_eq!(held(&parts(open, other.clone())), Ok(parts(made, other)));
        }
        for kept in [
            parts(json!({"exclusiveMinimum": 0}), json!({"maximum": 1})),
            parts(json!({"exclusiveMinimum": 0}), json!({"maximum": -0.5})),
            // Nothing is merged here.
            json!({"items": [{"exclusiveMinimum": 0}, {"maximum": 0.1}]}),
        ] {
            assert_eq!(held(&kept), Ok(kept));
        }
    }

    #[test]
    fn divisors_are_those_that_the_library_reads() {
        for (divisor, digits, decimals) in [
            (json!(0.07), 7, 2),
            (json!(0.007), 7, 3),
            (json!(-0.3), 3, 1),
            (json!(12.5), 125, 1),
            (json!(1e-8), 1, 8),
            (json!(400), 400, 0),
        ] {
            let made = held(&json!({ "multipleOf": divisor })).unwrap();
            let read = read(made["multipleOf"].as_f64().unwrap().abs());
            assert_eq!(read, Some(Divisor { digits, decimals }), "{divisor}");
        }
        for kept in [json!(7), json!(0.25), json!(1e-4), json!(0)] {
            let kept = json!({ "multipleOf": kept });
            assert_eq!(held(&kept), Ok(kept));
        }
        for refused in [json!(0.53), json!(1e-9), json!(430_000_000), json!(1e300)] {
            let error = held(&json!({ "multipleOf": refused })).unwrap_err();
            assert!(error.contains("`multipleOf` "), "{error}");
        }
    }
}
