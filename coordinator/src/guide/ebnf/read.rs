//! PURE: reads EBNF.
use std::collections::HashMap;
use std::fmt::Write as _;
use std::iter::Peekable;
use std::str::Chars;

use super::{DEPTH_MAX, Expr, RULES_MAX};

/// Longest name shown in an error, in characters.
const SHOWN: usize = 40;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    /// `::=`
    Is,
    Literal(String),
    Class(String),
    /// One of `( ) | * + ?`.
    Sign(char),
    Times(u32, Option<u32>),
}

/// Reads a grammar: what each rule derives, the rule `root` first.
pub(super) fn rules(grammar: &str) -> Result<Vec<Expr>, String> {
    let tokens = tokens(grammar)?;
    let mut names: HashMap<&str, usize> = HashMap::new();
    for pair in tokens.windows(2) {
        if let [(Token::Name(name), line), (Token::Is, _)] = pair
            && names.insert(name, names.len()).is_some()
        {
            return Err(format!("line {line} defines `{}` again", shown(name)));
        }
    }
    if names.len() > RULES_MAX {
        return Err(format!("it has {} rules, the limit is {RULES_MAX}", names.len()));
    }
    let Some(root) = names.get("root").copied() else {
        return Err("it has no rule `root`".to_owned());
    };
    let mut reader = Reader { tokens: &tokens, at: 0, names: &names };
    let mut rules = Vec::with_capacity(names.len());
    while reader.at < tokens.len() {
        let (Some(Token::Name(_)), true) = (reader.peek(0), reader.peek(1) == Some(&Token::Is))
        else {
            return Err(reader.wrong("a rule (`name ::= ...`) must begin here"));
        };
        reader.at += 2;
        rules.push(reader.one_of(0)?);
        if reader.peek(0) == Some(&Token::Sign(')')) {
            return Err(reader.wrong("`)` closes nothing"));
        }
    }
    // Numbers are in order of definition.
    rules.swap(0, root);
    for rule in &mut rules {
        renumber(rule, root);
    }
    Ok(rules)
}

/// Exchanges the numbers of the first rule and of `root`.
fn renumber(expr: &mut Expr, root: usize) {
    match expr {
        Expr::OneOf(list) | Expr::All(list) => {
            list.iter_mut().for_each(|expr| renumber(expr, root));
        }
        Expr::Times(expr, ..) => renumber(expr, root),
        Expr::Rule(number) if *number == root => *number = 0,
        Expr::Rule(number) if *number == 0 => *number = root,
        Expr::Rule(_) | Expr::Literal(_) | Expr::Class(_) => {}
    }
}

fn shown(name: &str) -> String {
    match name.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}...", &name[..at]),
        None => name.to_owned(),
    }
}

struct Reader<'a> {
    tokens: &'a [(Token, usize)],
    at: usize,
    names: &'a HashMap<&'a str, usize>,
}

impl Reader<'_> {
    fn peek(&self, ahead: usize) -> Option<&Token> {
        self.tokens.get(self.at + ahead).map(|(token, _)| token)
    }

    fn wrong(&self, what: &str) -> String {
        let last = self.tokens.last().map_or(1, |(_, line)| *line);
        let line = self.tokens.get(self.at).map_or(last, |(_, line)| *line);
        format!("line {line}: {what}")
    }

    fn one_of(&mut self, depth: usize) -> Result<Expr, String> {
        let mut choices = vec![self.all(depth)?];
        while self.peek(0) == Some(&Token::Sign('|')) {
            self.at += 1;
            choices.push(self.all(depth)?);
        }
        Ok(match choices.len() {
            1 => choices.swap_remove(0),
            _ => Expr::OneOf(choices),
        })
    }

    fn all(&mut self, depth: usize) -> Result<Expr, String> {
        let mut parts = Vec::new();
        loop {
            let part = match self.peek(0) {
                None | Some(Token::Sign('|' | ')')) => break,
                Some(Token::Name(_)) if self.peek(1) == Some(&Token::Is) => break,
                Some(Token::Name(name)) => {
                    let number = self.names.get(name.as_str()).copied();
                    Expr::Rule(number.ok_or_else(|| {
                        self.wrong(&format!("there is no rule `{}`", shown(name)))
                    })?)
                }
                Some(Token::Literal(text)) => Expr::Literal(text.clone()),
                Some(Token::Class(class)) => Expr::Class(class.clone()),
                Some(Token::Sign('(')) => {
                    if depth == DEPTH_MAX {
                        return Err(self.wrong(&format!("groups are nested {DEPTH_MAX} deep")));
                    }
                    self.at += 1;
                    let group = self.one_of(depth + 1)?;
                    if self.peek(0) != Some(&Token::Sign(')')) {
                        return Err(self.wrong("a group must end here, with `)`"));
                    }
                    group
                }
                Some(Token::Is) => return Err(self.wrong("`::=` has no name before it")),
                Some(Token::Sign(_) | Token::Times(..)) => {
                    return Err(self.wrong("there is nothing to repeat"));
                }
            };
            self.at += 1;
            parts.push(self.repeated(part)?);
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => Expr::All(parts),
        })
    }

    fn repeated(&mut self, part: Expr) -> Result<Expr, String> {
        let (least, most) = match self.peek(0) {
            Some(Token::Sign('*')) => (0, None),
            Some(Token::Sign('+')) => (1, None),
            Some(Token::Sign('?')) => (0, Some(1)),
            Some(Token::Times(least, most)) => (*least, *most),
            _ => return Ok(part),
        };
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("a repetition's second number must not be less than its first"));
        }
        self.at += 1;
        if matches!(self.peek(0), Some(Token::Sign('*' | '+' | '?') | Token::Times(..))) {
            return Err(self.wrong("a repetition is repeated: put it in parentheses"));
        }
        Ok(Expr::Times(Box::new(part), least, most))
    }
}

/// Splits a grammar into tokens, each with its line.
fn tokens(grammar: &str) -> Result<Vec<(Token, usize)>, String> {
    let (mut chars, mut line, mut tokens) = (grammar.chars().peekable(), 1, Vec::new());
    while let Some(next) = chars.next() {
        let here = |what: String| format!("line {line}: {what}");
        let token = match next {
            '\n' => {
                line += 1;
                continue;
            }
            _ if next.is_whitespace() => continue,
            '#' => {
                while chars.next_if(|next| *next != '\n').is_some() {}
                continue;
            }
            ':' if chars.next() == Some(':') && chars.next() == Some('=') => Token::Is,
            '"' => Token::Literal(literal(&mut chars).map_err(here)?),
            '[' => Token::Class(class(&mut chars).map_err(here)?),
            '.' => Token::Class(r"[\x{0}-\x{10FFFF}]".to_owned()),
            '{' => times(&mut chars).map_err(here)?,
            '(' | ')' | '|' | '*' | '+' | '?' => Token::Sign(next),
            _ if next.is_ascii_alphabetic() || next == '_' => {
                let mut name = String::from(next);
                let goes_on = |next: &char| next.is_ascii_alphanumeric() || "_-.".contains(*next);
                while let Some(next) = chars.next_if(goes_on) {
                    name.push(next);
                }
                Token::Name(name)
            }
            _ => return Err(here(format!("{next:?} has no meaning here"))),
        };
        tokens.push((token, line));
    }
    Ok(tokens)
}

fn literal(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut text = String::new();
    loop {
        match chars.next() {
            Some('"') => return Ok(text),
            Some('\\') => text.push(escaped(chars)?),
            None | Some('\n') => return Err("a string has no end".to_owned()),
            Some(next) => text.push(next),
        }
    }
}

/// The character that an escape stands for.
fn escaped(chars: &mut Peekable<Chars<'_>>) -> Result<char, String> {
    let next = chars.next().unwrap_or(' ');
    let digits = match next {
        'n' => return Ok('\n'),
        'r' => return Ok('\r'),
        't' => return Ok('\t'),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ if next.is_ascii_punctuation() => return Ok(next),
        _ => return Err(format!("`\\{}` is no escape", next.escape_default())),
    };
    let mut number = 0;
    for _ in 0..digits {
        let digit = chars.next().and_then(|digit| digit.to_digit(16));
        let digit = digit.ok_or_else(|| format!("`\\{next}` needs {digits} hexadecimal digits"))?;
        number = number * 16 + digit;
    }
    char::from_u32(number).ok_or_else(|| format!("`\\{next}{number:x}` is no character"))
}

/// Reads a class of characters, as a regular expression in which every character is a number.
fn class(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut class = String::from("[");
    if chars.next_if_eq(&'^').is_some() {
        class.push('^');
    }
    let one = |chars: &mut Peekable<Chars<'_>>| match chars.next() {
        Some('\\') => escaped(chars),
        None | Some('\n') => Err("a class of characters has no end".to_owned()),
        Some(next) => Ok(next),
    };
    let mut is_empty = true;
    while chars.next_if_eq(&']').is_none() {
        let first = one(chars)?;
        is_empty = false;
        let _ = write!(class, r"\x{{{:X}}}", u32::from(first));
        if chars.next_if_eq(&'-').is_some() {
            if chars.peek() == Some(&']') {
                class.push_str(r"\x{2D}");
                continue;
            }
            let last = one(chars)?;
            if last < first {
                let (first, last) = (first.escape_default(), last.escape_default());
                return Err(format!("the range {first}-{last} is in the wrong order"));
            }
            let _ = write!(class, r"-\x{{{:X}}}", u32::from(last));
        }
    }
    if is_empty {
        return Err("a class of characters is empty".to_owned());
    }
    class.push(']');
    Ok(class)
}

/// Reads `m}`, `m,}` or `m,n}`.
fn times(chars: &mut Peekable<Chars<'_>>) -> Result<Token, String> {
    let wrong = || "a repetition must be {m}, {m,} or {m,n}".to_owned();
    let inside: String = chars.by_ref().take_while(|next| *next != '}').take(24).collect();
    let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
    Ok(match inside.split_once(',') {
        None => Token::Times(number(&inside)?, Some(number(&inside)?)),
        Some((least, most)) if most.trim().is_empty() => Token::Times(number(least)?, None),
        Some((least, most)) => Token::Times(number(least)?, Some(number(most)?)),
    })
}
