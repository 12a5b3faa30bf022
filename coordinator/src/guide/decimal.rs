//! PURE: numbers of schemas by their digits, where floats would round. A float counts as the
//! shortest digits that give it, as JSON libraries write it.
use serde_json::Number;

/// Decimals that are counted.
const DECIMALS: u32 = 18;
/// Digits before the point that are counted: as many as integers of 64 bits have.
const WHOLE_DIGITS: usize = 20;
/// The number 1.
const ONE: i128 = 10_i128.pow(DECIMALS);

/// A number, exactly: in units of its last decimal that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Decimal(i128);

/// A positive divisor (`multipleOf`): its digits, of which so many are decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divisor {
    pub(super) digits: u32,
    pub(super) decimals: u32,
}

impl Decimal {
    pub(super) const ZERO: Self = Self(0);
    pub(super) const ONE: Self = Self(ONE);

    /// `None` if it has more digits than are counted.
    pub(super) fn of(number: &Number) -> Option<Self> {
        if let Some(integer) = number.as_i128() {
            return integer.checked_mul(ONE).map(Self);
        }
        // Without an exponent.
        let text = number.as_f64()?.to_string();
        let (sign, unsigned) = match text.strip_prefix('-') {
            Some(unsigned) => (-1, unsigned),
            None => (1, text.as_str()),
        };
        let (whole, decimals) = unsigned.split_once('.').unwrap_or((unsigned, ""));
        if whole.len() > WHOLE_DIGITS || decimals.len() > DECIMALS as usize {
            return None;
        }
        let digits: i128 = format!("{whole}{decimals:0<18}").parse().ok()?;
        Some(Self(sign * digits))
    }

    pub(super) const fn is_whole(self) -> bool {
        self.0 % ONE == 0
    }

    pub(super) const fn negated(self) -> Self {
        Self(-self.0)
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// The lowest multiple of a positive `step` that is not below it.
    pub(super) const fn first_multiple(self, step: Self) -> Self {
        Self(-(-self.0).div_euclid(step.0) * step.0)
    }

    pub(super) const fn is_multiple_of(self, step: Self) -> bool {
        self.0 % step.0 == 0
    }

    /// The least common multiple of two positive numbers.
    pub(super) fn common_multiple(self, other: Self) -> Option<Self> {
        let (mut a, mut b) = (self.0, other.0);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        (self.0 / a).checked_mul(other.0).map(Self)
    }

    /// The digits of its magnitude before the point, and those behind it without final zeros.
    pub(super) fn digits(self) -> (String, String) {
        let magnitude = self.0.abs();
        let decimals = format!("{:018}", magnitude % ONE);
        ((magnitude / ONE).to_string(), decimals.trim_end_matches('0').to_owned())
    }

    /// Its magnitude as a divisor; `None` if it is 0, or if it takes more than 32 bits to compute
    /// remainders by it, which is what grammars have.
    pub(super) fn divisor(self) -> Option<Divisor> {
        let (mut digits, mut decimals) = (self.0.unsigned_abs(), DECIMALS);
        while decimals > 0 && digits.is_multiple_of(10) {
            digits /= 10;
            decimals -= 1;
        }
        let digits = u32::try_from(digits).ok().filter(|it| *it > 0)?;
        // A remainder with one more digit behind it.
        let most = 10 * u64::from(digits) + 9 * 10_u64.pow(decimals);
        (most <= u64::from(u32::MAX)).then_some(Divisor { digits, decimals })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: &serde_json::Value) -> Option<Decimal> {
        Decimal::of(value.as_number().unwrap())
    }

    #[test]
    fn digits_are_those_that_were_written() {
        for (value, whole, decimals) in [
            (json!(0), "0", ""),
            (json!(u64::MAX), "18446744073709551615", ""),
            (json!(i64::MIN), "9223372036854775808", ""),
            (json!(0.07), "0", "07"),
            (json!(-12.5), "12", "5"),
            (json!(1e-18), "0", "000000000000000001"),
            (json!(1.8e19), "18000000000000000000", ""),
        ] {
            let digits = of(&value).unwrap().digits();
            assert_eq!(digits, (whole.to_owned(), decimals.to_owned()), "{value}");
        }
        for beyond in [json!(1e-19), json!(1e20), json!(-1e300)] {
            assert_eq!(of(&beyond), None, "{beyond}");
        }
    }

    #[test]
    fn integers_and_multiples_around_a_number_are_exact() {
        let of = |value| of(&value).unwrap();
        assert_eq!(of(json!(0.1)).first_multiple(of(json!(0.07))), of(json!(0.14)));
        assert_eq!(of(json!(-0.1)).first_multiple(of(json!(0.07))), of(json!(-0.07)));
        assert_eq!(of(json!(0.14)).first_multiple(of(json!(0.07))), of(json!(0.14)));
        assert!(of(json!(0.3)).is_multiple_of(of(json!(0.1))));
        assert!(!of(json!(0.3)).is_multiple_of(of(json!(0.07))));
        let common = |a, b| of(a).common_multiple(of(b));
        assert_eq!(common(json!(0.06), json!(0.04)), Some(of(json!(0.12))));
        assert_eq!(common(json!(0.35), json!(1)), Some(of(json!(7))));
    }

    #[test]
    fn divisors_are_those_that_32_bits_compute_with() {
        for (value, digits, decimals) in [
            (json!(0.07), 7, 2),
            (json!(-12.50), 125, 1),
            (json!(400), 400, 0),
            (json!(400_000_000), 400_000_000, 0),
            (json!(1e-8), 1, 8),
        ] {
            assert_eq!(of(&value).unwrap().divisor(), Some(Divisor { digits, decimals }));
        }
        for none in [json!(0), json!(430_000_000), json!(1e-9), json!(u64::MAX)] {
            assert_eq!(of(&none).unwrap().divisor(), None, "{none}");
        }
    }
}
