//! PURE: grammars in EBNF (`root ::= ...`), the notation of GBNF and xgrammar, in Lark's.
//!
//! Rules that lead back to no rule, themselves included, become terminals, and what stands beside
//! each other and can be one terminal becomes one: llguidance takes the longest match of a
//! terminal, so several small ones could take from each other what only the next may have.
//!
//! - `read`: the notation
//! - `write`: Lark's
mod read;
mod write;

/// Deepest nesting of groups, and of terminals within terminals.
const DEPTH_MAX: usize = 64;
/// Most rules of a grammar.
const RULES_MAX: usize = 2048;

/// What a rule derives.
#[derive(Clone, Debug, PartialEq)]
enum Expr {
    /// One of these; an empty one derives nothing.
    OneOf(Vec<Expr>),
    /// All of these, one after the other.
    All(Vec<Expr>),
    /// A string.
    Literal(String),
    /// One character of a class, written as a regular expression.
    Class(String),
    /// What a rule derives, by its number.
    Rule(usize),
    /// So many times, without a bound if there is no second number.
    Times(Box<Expr>, u32, Option<u32>),
}

/// Whether a grammar is meant to be EBNF: some line says what `root` is, in that notation.
pub(super) fn is_ebnf(grammar: &str) -> bool {
    let defines = |line: &str| {
        let after = line.trim_start().strip_prefix("root");
        after.is_some_and(|after| after.trim_start().starts_with("::="))
    };
    grammar.lines().any(defines)
}

/// Returns the same grammar in Lark's notation.
///
/// # Errors
/// One sentence for the client, which continues after the field's name.
pub(super) fn to_lark(grammar: &str) -> Result<String, String> {
    let rules = read::rules(grammar).map_err(|error| format!("is not EBNF: {error}"))?;
    Ok(write::lark(&rules))
}

#[cfg(test)]
mod tests;
