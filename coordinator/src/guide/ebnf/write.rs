//! PURE: writes rules in Lark's notation.
use std::fmt::Write as _;

use super::{DEPTH_MAX, Expr};

/// Writes a grammar; the first rule is where it begins.
pub(super) fn lark(rules: &[Expr]) -> String {
    let mut writer = Writer { is_terminal: terminals(rules), text: String::new(), made: 0 };
    let start = writer.name(0);
    let _ = writeln!(writer.text, "start: {start}");
    for (number, rule) in rules.iter().enumerate() {
        let name = writer.name(number);
        let body = writer.expr(rule, writer.is_terminal[number]);
        let _ = writeln!(writer.text, "{name}: {body}");
    }
    writer.text
}

/// Which rules are terminals: those that lead back to no rule, and not too deep.
fn terminals(rules: &[Expr]) -> Vec<bool> {
    let mut depth: Vec<Option<usize>> = vec![None; rules.len()];
    for _ in 0..DEPTH_MAX {
        let mut changes = false;
        for (number, rule) in rules.iter().enumerate() {
            if depth[number].is_none()
                && let Some(below) = deepest(rule, &depth)
                && below < DEPTH_MAX
            {
                depth[number] = Some(below + 1);
                changes = true;
            }
        }
        if !changes {
            break;
        }
    }
    depth.iter().map(Option::is_some).collect()
}

/// How deep the rules of an expression are, if all are terminals.
fn deepest(expr: &Expr, depth: &[Option<usize>]) -> Option<usize> {
    match expr {
        Expr::OneOf(list) | Expr::All(list) => {
            list.iter().try_fold(0, |most, expr| Some(most.max(deepest(expr, depth)?)))
        }
        Expr::Times(expr, ..) => deepest(expr, depth),
        Expr::Rule(number) => depth[*number],
        Expr::Literal(_) | Expr::Class(_) => Some(0),
    }
}

struct Writer {
    is_terminal: Vec<bool>,
    text: String,
    /// Number of terminals made of parts of rules.
    made: usize,
}

impl Writer {
    fn name(&self, number: usize) -> String {
        match self.is_terminal[number] {
            true => format!("R{number}"),
            false => format!("r{number}"),
        }
    }

    fn can_be_terminal(&self, expr: &Expr) -> bool {
        match expr {
            Expr::OneOf(list) | Expr::All(list) => list.iter().all(|it| self.can_be_terminal(it)),
            Expr::Times(expr, ..) => self.can_be_terminal(expr),
            Expr::Rule(number) => self.is_terminal[*number],
            Expr::Literal(_) | Expr::Class(_) => true,
        }
    }

    /// Writes an expression as one item; `within` a terminal or not.
    fn expr(&mut self, expr: &Expr, within: bool) -> String {
        if !within && is_composed(expr) && self.can_be_terminal(expr) {
            let body = self.expr(expr, true);
            return self.terminal(&body);
        }
        match expr {
            Expr::OneOf(choices) => {
                let (empty, choices): (Vec<&Expr>, Vec<&Expr>) =
                    choices.iter().partition(|it| is_empty(it));
                let optional = if empty.is_empty() { "" } else { "?" };
                let choices: Vec<String> =
                    choices.into_iter().map(|it| self.expr(it, within)).collect();
                match choices.is_empty() {
                    true => "\"\"".to_owned(),
                    false => format!("({}){optional}", choices.join(" | ")),
                }
            }
            Expr::All(parts) => self.all(parts, within),
            Expr::Literal(text) => serde_json::Value::from(text.as_str()).to_string(),
            Expr::Class(class) => format!("/{class}/"),
            Expr::Rule(number) => self.name(*number),
            Expr::Times(expr, least, most) => {
                let item = self.expr(expr, within);
                match (least, most) {
                    (0, None) => format!("({item})*"),
                    (1, None) => format!("({item})+"),
                    (0, Some(1)) => format!("({item})?"),
                    (0, Some(0)) => "\"\"".to_owned(),
                    (least, None) => format!("({item}){{{least},}}"),
                    (least, Some(most)) => format!("({item}){{{least},{most}}}"),
                }
            }
        }
    }

    fn all(&mut self, parts: &[Expr], within: bool) -> String {
        let mut items: Vec<String> = Vec::new();
        let mut rest: Vec<&Expr> = parts.iter().filter(|part| !is_empty(part)).collect();
        while !rest.is_empty() {
            let together = match within {
                true => 0,
                false => rest.iter().take_while(|part| self.can_be_terminal(part)).count(),
            };
            if together > 1 {
                let parts = rest.drain(..together);
                let written: Vec<String> = parts.map(|part| self.expr(part, true)).collect();
                items.push(self.terminal(&written.join(" ")));
            } else {
                items.push(self.expr(rest.remove(0), within));
            }
        }
        match items.len() {
            0 => "\"\"".to_owned(),
            1 => items.swap_remove(0),
            _ => format!("({})", items.join(" ")),
        }
    }

    /// Makes a terminal of what stands together; returns its name.
    fn terminal(&mut self, body: &str) -> String {
        self.made += 1;
        let name = format!("T{}", self.made);
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }
}

/// Whether an expression has parts.
const fn is_composed(expr: &Expr) -> bool {
    matches!(expr, Expr::OneOf(_) | Expr::All(_) | Expr::Times(..))
}

/// Whether an expression derives nothing but the empty text, as it is written.
fn is_empty(expr: &Expr) -> bool {
    match expr {
        Expr::All(parts) => parts.iter().all(is_empty),
        Expr::Literal(text) => text.is_empty(),
        _ => false,
    }
}
