//! `docs/options.md` matches the options that the program describes.
use crate::{program, tree};

const PAGE: &str = "docs/options.md";

#[test]
fn the_page_is_what_the_program_prints() {
    let output = program::run(&["options", "--markdown"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let wanted = String::from_utf8(output.stdout).unwrap();
    assert!(wanted.contains("| `--max-num-seqs` N | 64 | up, coordinator |"), "{wanted}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(tree::root().join(PAGE), &wanted).unwrap();
    }
    let page = tree::read(PAGE).map(|file| file.text);
    assert!(
        page.as_ref() == Some(&wanted),
        "{PAGE} is out of date: run UPDATE_DOCS=1 cargo test -p tests --test tidy options"
    );
}
