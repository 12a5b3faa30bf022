//! `docs/metrics.md` matches the catalogue.
use std::path::Path;

use coordinator::metrics::markdown::markdown;

#[test]
fn the_page_is_generated_from_the_catalogue() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let wanted = markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &wanted).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        page == wanted,
        "docs/metrics.md is out of date: run UPDATE_DOCS=1 cargo test -p tests --test metrics"
    );
}
