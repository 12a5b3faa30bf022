//! The notation that is read, and what is written for it.
use super::*;

fn lark(grammar: &str) -> String {
    to_lark(grammar).unwrap()
}

#[test]
fn what_leads_back_to_nothing_is_one_terminal() {
    let grammar = r#"
        # As in the documentation of vLLM.
        root ::= select_statement
        select_statement ::= "SELECT " column " from " table " where " condition
        column ::= "col_1 " | "col_2 "
        table ::= "table_1 " | "table_2 "
        condition ::= column "= " number
        number ::= "1 " | "2 "
    "#;
    assert_eq!(
        lark(grammar),
        "start: R0\nR0: R1\nR1: (\"SELECT \" R2 \" from \" R3 \" where \" R4)\n\
         R2: (\"col_1 \" | \"col_2 \")\nR3: (\"table_1 \" | \"table_2 \")\n\
         R4: (R2 \"= \" R5)\nR5: (\"1 \" | \"2 \")\n"
    );
}

#[test]
fn rules_that_lead_back_stay_rules_with_terminals_between() {
    let grammar = "value ::= [0-9]+ ws | \"(\" ws root \")\" ws | \nroot ::= value (\",\" ws value)*\n\
                   ws ::= [ \\n]*";
    assert_eq!(
        lark(grammar),
        "start: r0\nr0: (r1 ((\",\" R2) r1)*)\n"
            .replace("((\",\" R2) r1)", "((T1 r1))")
            .replace("start: r0\n", "start: r0\nT1: \",\" R2\n")
            + "T2: ((/[\\x{30}-\\x{39}]/)+ R2)\nT3: \"(\" R2\nT4: \")\" R2\n\
               r1: (T2 | (T3 r0 T4))?\nR2: (/[\\x{20}\\x{A}]/)*\n"
    );
}

#[test]
fn strings_and_classes_are_read_with_their_escapes() {
    let grammar = r#"root ::= "a\"\\\n\x41\u00e4\U0001F600/" [^\]\\a-f-] . ("x"{2} | "y"{1,} | "z"{0,3} | "")"#;
    assert_eq!(
        lark(grammar),
        "start: R0\nR0: (\"a\\\"\\\\\\nAä😀/\" /[^\\x{5D}\\x{5C}\\x{61}-\\x{66}\\x{2D}]/ \
         /[\\x{0}-\\x{10FFFF}]/ ((\"x\"){2,2} | (\"y\"){1,} | (\"z\"){0,3})?)\n"
            .replace("(\"y\"){1,}", "(\"y\")+")
    );
}

#[test]
fn what_is_not_understood_is_said_with_its_line() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65));
    let many: String = (0..2048).map(|n| format!("r{n} ::= \"a\"\n")).collect();
    for (grammar, error) in [
        ("roots ::= \"a\"", "it has no rule `root`"),
        ("root ::= other", "line 1: there is no rule `other`"),
        ("root ::= \"a\n\"", "line 1: a string has no end"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2 defines `root` again"),
        ("root ::= (\"a\"\nb ::= \"c\"", "line 2: a group must end here, with `)`"),
        ("root ::= \"a\")", "line 1: `)` closes nothing"),
        ("\"a\" root ::= \"a\"", "line 1: a rule (`name ::= ...`) must begin here"),
        ("root ::= * \"a\"", "line 1: there is nothing to repeat"),
        ("root ::= \"a\"*+", "line 1: a repetition is repeated: put it in parentheses"),
        ("root ::= \"a\"{3,2}", "line 1: a repetition's second number must not be less"),
        ("root ::= \"a\"{x}", "line 1: a repetition must be {m}, {m,} or {m,n}"),
        ("root ::= \"a\"{99999999999999999999999999999999", "line 1: a repetition must be"),
        ("root ::= []", "line 1: a class of characters is empty"),
        ("root ::= [z-a]", "line 1: the range z-a is in the wrong order"),
        ("root ::= [a", "line 1: a class of characters has no end"),
        ("root ::= \"\\q\"", "line 1: `\\q` is no escape"),
        ("root ::= \"\\x4\"", "line 1: `\\x` needs 2 hexadecimal digits"),
        ("root ::= \"\\ud800\"", "line 1: `\\ud800` is no character"),
        ("root ::= 'a'", "line 1: '\\'' has no meaning here"),
        (&deep, "line 1: groups are nested 64 deep"),
        (&format!("root ::= \"a\"\n{many}"), "it has 2049 rules, the limit is 2048"),
    ] {
        let said = to_lark(grammar).unwrap_err();
        assert!(said.contains(error), "{grammar:?}: {said}");
    }
}
