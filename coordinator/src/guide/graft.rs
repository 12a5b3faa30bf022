//! Adds to a grammar what `exact` has taken out of its schemas: the numbers that the library does
//! not hold. A definition that refers to itself alone has become a symbol that derives nothing but
//! itself; here it gets a second rule, with the number's text.
use std::panic::AssertUnwindSafe;

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::derivre::RegexAst;
use llguidance::earley::{Grammar, SymbolProps};
use llguidance::{ParserFactory, TokenParser, panic_utils};

use super::exact;
use super::ranges::NumberRule;

/// A parser of a grammar whose schemas refer to these rules; `None` if the library fails: it cannot
/// merge them with other schemas.
pub(super) fn parser(
    factory: &ParserFactory,
    grammar: TopLevelGrammar,
    rules: &[NumberRule],
) -> Option<TokenParser> {
    let init = GrammarInit::Serialized(grammar);
    let (vocabulary, limits) = (factory.tok_env().clone(), factory.limits().clone());
    let made = AssertUnwindSafe(|| init.to_internal(Some(vocabulary), limits));
    let (mut grammar, mut lexer) = panic_utils::catch_unwind(made).ok()?;
    // Symbols are numbered, and only a grammar hands their numbers out.
    let mut numbers = Grammar::new(None);
    for _ in 0..grammar.num_symbols() {
        let symbol = numbers.fresh_symbol_ext("", SymbolProps::default());
        let rule = exact::rule_of(grammar.sym_name(symbol)).and_then(|rule| rules.get(rule));
        let Some(rule) = rule else { continue };
        let properties = grammar.sym_props(symbol).for_wrapper();
        // The schema's own class of lexemes, which tells what white space stands between them.
        let class = std::mem::replace(&mut lexer.current_class, properties.grammar_id);
        let lexeme =
            lexer.add_greedy_lexeme(String::new(), text_of(rule), false, None, usize::MAX).ok()?;
        lexer.current_class = class;
        let text = grammar.fresh_symbol_ext("number", properties);
        grammar.make_terminal(text, lexeme, &lexer).ok()?;
        grammar.add_rule(symbol, vec![text]).ok()?;
    }
    factory.create_parser_from_init_default(GrammarInit::Internal(grammar, lexer)).ok()
}

fn text_of(rule: &NumberRule) -> RegexAst {
    let patterns = rule.patterns.iter().cloned().map(RegexAst::Regex);
    let multiples = rule.divisor.map(|divisor| {
        let unsigned = RegexAst::MultipleOf(divisor.digits, divisor.decimals);
        RegexAst::Concat(vec![RegexAst::Regex("-?".to_owned()), unsigned])
    });
    RegexAst::And(patterns.chain(multiples).collect())
}
