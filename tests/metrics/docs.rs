//! `docs/metrics.md` matches the catalogue.
use coordinator::metrics::markdown::markdown;
use testkit::models::repository;

#[test]
fn the_page_is_generated_from_the_catalogue() {
    let path = repository().join("docs/metrics.md");
    let wanted = markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &wanted).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        page == wanted,
        "docs/metrics.md is out of date: run UPDATE_DOCS=1 cargo test -p computing --test metrics"
    );
}
