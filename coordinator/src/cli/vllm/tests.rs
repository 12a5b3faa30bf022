//! Command lines as people bring them from vLLM, and the document that says what becomes of them.
use super::*;

fn words(text: &str) -> Vec<OsString> {
    text.split(' ').map(OsString::from).collect()
}

fn refusal(line: &str) -> String {
    understood(&words(line)).unwrap_err().to_string()
}

#[test]
fn what_asks_for_nothing_is_left_out_and_the_rest_is_told() {
    let given = "tutti up --enable-prefix-caching --model a --enable_chunked_prefill --enable-lora";
    assert_eq!(understood(&words(given)).unwrap(), words("tutti up --model a"));
    let ours = words("tutti up --uds /run/a --root-path /llm --enable-tokenizer-info-endpoint");
    assert_eq!(understood(&ours).unwrap(), ours, "they are options here too");
    let other = words("tutti status --port 1");
    assert_eq!(understood(&other).unwrap(), other, "another role");
    for (line, told) in [
        ("tutti up --port 8000", "--listen IP:PORT"),
        ("tutti up --host=0.0.0.0", "`--host` is a vLLM option; here: `--listen"),
        ("tutti worker --port 8000", "`--port` is a vLLM option; here: `--listen"),
        ("tutti coordinator -tp 2", "--tensor-parallel N"),
        ("tutti serve org/model --port 1", "`tutti up --model org/model`"),
        ("tutti serve", "`tutti up --model MODEL`"),
        ("tutti up -O3", "`-O3` is a vLLM option; here: nothing is compiled"),
        ("tutti up -O 3", "`-O` is a vLLM option"),
        ("tutti up -cc.mode=3", "`-cc.mode` is a vLLM option; here: nothing is compiled"),
        ("tutti up --compilation-config.level 3", "nothing is compiled"),
        ("tutti up --max-log-len 100", "`--max-log-len` is a vLLM option; here: prompts and"),
        (
            "tutti up --rope-theta 1e6",
            "`--hf-overrides JSON` (docs/configuration.md#long-contexts)",
        ),
        ("tutti up --convert classify", "`--hf-overrides JSON`, with `architectures` (docs/api.md"),
        ("tutti up --nnodes 2", "other hosts (README.md#several-machines)"),
        ("tutti up --no-enable-log-deltas", "`--no-enable-log-deltas` is a vLLM option; here: pr"),
        ("tutti up --task embed", "text and embeddings, or classes"),
    ] {
        let error = refusal(line);
        assert!(error.contains(told) && !error.contains("tip:"), "{line}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
    assert!(hint("rope-scaling").unwrap().contains("--hf-overrides"));
    assert!(hint("hf-overrides").is_none(), "it is an option here too");
    assert!(hint("enable_chunked_prefill").unwrap().contains("always the case"));
    assert!(hint("model").is_none());
}

/// vLLM's flags with a value, as some versions take them and generated command lines have them.
#[test]
fn flags_with_a_value_do_as_it_says_or_are_refused() {
    for line in [
        "tutti up --enable-prefix-caching=True",
        "tutti up --enable-chunked-prefill=1",
        "tutti up --no-enable-log-requests",
        "tutti up --enforce-eager=False",
        "tutti up --no-enforce-eager",
        "tutti up --no-trust-remote-code",
        "tutti up --disable_log_stats=false",
    ] {
        assert_eq!(understood(&words(line)).unwrap(), words("tutti up"), "{line}");
    }
    for (line, told) in [
        ("--enable-prefix-caching=False", "`--no-enable-prefix-caching` turns it off"),
        ("--enable_prefix_caching=0", "`--no-enable-prefix-caching` turns it off"),
        ("--enable-chunked-prefill=false", "always the case here; it cannot be turned off"),
        ("--no-enable-chunked-prefill", "always the case here; it cannot be turned off"),
        ("--disable-log-requests=False", "`--access-log` logs requests"),
        ("--enforce-eager=True", "`--no-cuda-graphs`"),
        ("--no-enforce-eager=false", "`--no-cuda-graphs`"),
        ("--enforce-eager=maybe", "takes no value but true or false"),
    ] {
        let (error, name) = (refusal(&format!("tutti up {line}")), line.split('=').next().unwrap());
        assert!(error.contains(told) && error.contains(name), "{line}: {error}");
    }
    // It is an option here too.
    let ours = words("tutti up --no-enable-prefix-caching");
    assert_eq!(understood(&ours).unwrap(), ours);
}

#[test]
fn no_option_of_ours_is_taken_for_one_of_theirs() {
    let command = super::super::options::command();
    let ours = command.get_subcommands().flat_map(|it| it.get_arguments().map(move |of| (it, of)));
    for (subcommand, argument) in ours {
        let names = argument.get_long_and_visible_aliases().unwrap_or_default();
        let hidden = argument.get_all_aliases().unwrap_or_default();
        for name in names.into_iter().chain(hidden) {
            assert!(ROWS.iter().all(|row| !row.names.contains(&name)), "{name}");
        }
        // Those of this command are vLLM's.
        let theirs = if subcommand.get_name() == "run-batch" { "hVio" } else { "hV" };
        assert_eq!(argument.get_short().filter(|short| !theirs.contains(*short)), None);
    }
}

#[test]
fn options_are_in_one_row() {
    let mut names: Vec<&str> = ROWS.iter().flat_map(|row| row.names).copied().collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/from-vllm.md");
/// Around the rows of the table in the document.
const HEAD: &str = "| vLLM | here |\n| --- | --- |\n";

/// The table as the document has it.
fn rows() -> String {
    let row = |row: &table::Row| {
        let shown = |name: &&str| match name.starts_with('-') {
            true => format!("`{name}`"),
            false => format!("`--{name}`"),
        };
        let names: Vec<String> = row.names.iter().map(shown).collect();
        let here = match row.here {
            Always(otherwise) => format!("accepted: this is always the case; {otherwise}"),
            Unneeded(why) => format!("accepted with a note: {why}"),
            Flag(what) | Other(what) => what.to_owned(),
        };
        format!("| {} | {here} |\n", names.join(", "))
    };
    ROWS.iter().map(row).collect()
}

#[test]
fn the_documentation_has_the_table() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(HEAD).unwrap();
    let (_, after) = rest.split_once("\n\n").unwrap();
    let wanted = format!("{before}{HEAD}{}\n{after}", rows());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, &wanted).unwrap();
        return;
    }
    assert!(
        page == wanted,
        "docs/from-vllm.md is out of date: run UPDATE_DOCS=1 cargo test -p coordinator vllm"
    );
}

#[test]
fn lengths_have_suffixes() {
    for (text, tokens) in [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("1M", 1 << 20),
        ("2m", 2_000_000),
    ] {
        assert_eq!(parse_length(text), Ok(tokens), "{text}");
    }
    for bad in ["1", "", "k", "1.5K", "1.5", "-1", "1g", "99999M", "1 parsec"] {
        assert!(parse_length(bad).unwrap_err().contains("4K (4,096)"), "{bad}");
    }
}
