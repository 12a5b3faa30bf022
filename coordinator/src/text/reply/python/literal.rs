//! Python's literals as JSON.
use std::iter::Peekable;
use std::str::Chars;

use serde_json::{Map, Value};

/// Deepest nesting of lists and dictionaries.
const DEPTH_MAX: u32 = 64;

/// The value of a literal; `None` if it is none. Tuples and sets become lists, keys of dictionaries
/// strings.
pub(in crate::text::reply) fn parse(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text.chars().peekable() };
    let value = parser.value(0)?;
    parser.skip_space();
    parser.rest.next().is_none().then_some(value)
}

struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Parser<'_> {
    fn skip_space(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }

    fn value(&mut self, depth: u32) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.skip_space();
        match *self.rest.peek()? {
            '"' | '\'' => self.strings(false),
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '{' => self.braces(depth),
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => match self.word().as_str() {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                // Prefixes of strings.
                "u" if matches!(self.rest.peek(), Some('"' | '\'')) => self.strings(false),
                "r" if matches!(self.rest.peek(), Some('"' | '\'')) => self.strings(true),
                _ => None,
            },
        }
    }

    fn word(&mut self) -> String {
        let is_part = |c: &char| c.is_alphanumeric() || matches!(c, '_' | '.' | '+' | '-');
        std::iter::from_fn(|| self.rest.next_if(is_part)).collect()
    }

    fn number(&mut self) -> Option<Value> {
        let word = self.word().replace('_', "").to_lowercase();
        let (is_negative, digits) = match word.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, word.strip_prefix('+').unwrap_or(&word)),
        };
        let whole = |radix, digits| {
            let number = i64::from_str_radix(digits, radix).ok()?;
            Some(Value::from(if is_negative { number.checked_neg()? } else { number }))
        };
        for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
            if let Some(digits) = digits.strip_prefix(prefix) {
                return digits
                    .starts_with(|c: char| c.is_alphanumeric())
                    .then(|| whole(radix, digits))?;
            }
        }
        let is_whole = digits.bytes().all(|c| c.is_ascii_digit());
        let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
            && digits.contains(|c: char| c.is_ascii_digit());
        if !is_number {
            return None;
        }
        if is_whole {
            let word = if is_negative { word.as_str() } else { digits };
            if let Ok(number) = word.parse::<i64>() {
                return Some(number.into());
            }
            // What is larger would become another number.
            return word.parse::<u64>().ok().map(Value::from);
        }
        let number: f64 = digits.parse().ok()?;
        let number = if is_negative { -number } else { number };
        serde_json::Number::from_f64(number).map(Value::Number)
    }

    /// Strings side by side are one.
    fn strings(&mut self, is_raw: bool) -> Option<Value> {
        let mut text = String::new();
        while matches!(self.rest.peek(), Some('"' | '\'')) {
            self.string(is_raw, &mut text)?;
            self.skip_space();
        }
        Some(text.into())
    }

    fn string(&mut self, is_raw: bool, text: &mut String) -> Option<()> {
        let quote = self.rest.next()?;
        let mut quotes = 1;
        while quotes < 3 && self.rest.next_if_eq(&quote).is_some() {
            quotes += 1;
        }
        if quotes == 2 {
            return Some(());
        }
        let mut seen = 0;
        loop {
            let c = self.rest.next()?;
            if c == quote {
                seen += 1;
                if seen == quotes {
                    return Some(());
                }
                continue;
            }
            (0..std::mem::take(&mut seen)).for_each(|_| text.push(quote));
            match c {
                '\\' if is_raw => text.extend(['\\', self.rest.next()?]),
                '\\' => self.escape(text)?,
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Option<()> {
        let simple = match self.rest.next()? {
            '\n' => return Some(()),
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'a' => '\u{7}',
            c @ ('\\' | '\'' | '"' | '/') => c,
            'x' => self.code(2)?,
            'u' => self.code(4)?,
            'U' => self.code(8)?,
            c @ '0'..='7' => {
                let mut code = c.to_digit(8)?;
                for _ in 0..2 {
                    let Some(digit) = self.rest.next_if(|c| c.is_digit(8)) else { break };
                    code = code * 8 + digit.to_digit(8)?;
                }
                char::from_u32(code)?
            }
            // As in Python, others stand for themselves.
            c => {
                text.push('\\');
                c
            }
        };
        text.push(simple);
        Some(())
    }

    /// The character of a code in so many hexadecimal digits, or of two surrogates.
    fn code(&mut self, digits: u32) -> Option<char> {
        let first = self.hexadecimal(digits)?;
        if !(0xd800..0xdc00).contains(&first) {
            return char::from_u32(first);
        }
        self.rest.next_if_eq(&'\\')?;
        self.rest.next_if_eq(&'u')?;
        let second = self.hexadecimal(4)?.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
        char::from_u32(0x10000 + ((first - 0xd800) << 10) + second)
    }

    fn hexadecimal(&mut self, digits: u32) -> Option<u32> {
        (0..digits).try_fold(0u32, |code, _| {
            let digit = self.rest.next()?.to_digit(16)?;
            code.checked_mul(16)?.checked_add(digit)
        })
    }

    /// Behind the opening bracket: values with commas between.
    fn list(&mut self, end: char, depth: u32) -> Option<Value> {
        self.rest.next()?;
        let (mut list, mut had_comma) = (Vec::new(), false);
        loop {
            self.skip_space();
            if self.rest.next_if_eq(&end).is_some() {
                break;
            }
            if !list.is_empty() && !had_comma {
                return None;
            }
            list.push(self.value(depth + 1)?);
            self.skip_space();
            had_comma = self.rest.next_if_eq(&',').is_some();
        }
        // One value in parentheses is that value.
        if end == ')' && list.len() == 1 && !had_comma {
            return list.pop();
        }
        Some(list.into())
    }

    /// A dictionary or a set.
    fn braces(&mut self, depth: u32) -> Option<Value> {
        self.rest.next()?;
        let (mut map, mut set) = (Map::new(), Vec::new());
        loop {
            self.skip_space();
            if self.rest.next_if_eq(&'}').is_some() {
                return Some(if set.is_empty() { map.into() } else { set.into() });
            }
            let key = self.value(depth + 1)?;
            self.skip_space();
            if self.rest.next_if_eq(&':').is_some() {
                let key = match key {
                    Value::String(key) => key,
                    Value::Array(_) | Value::Object(_) => return None,
                    key => key.to_string(),
                };
                map.insert(key, self.value(depth + 1)?);
            } else {
                set.push(key);
            }
            if !map.is_empty() && !set.is_empty() {
                return None;
            }
            self.skip_space();
            if self.rest.next_if_eq(&',').is_none() && self.rest.peek() != Some(&'}') {
                return None;
            }
        }
    }
}
