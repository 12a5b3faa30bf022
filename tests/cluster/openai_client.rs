//! The `openai` and `anthropic` Python packages against a running server.
use std::process::Command;

use testkit::fleet::Fleet;
use testkit::models::repository;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_and_anthropic_packages_work_unchanged() {
    let Some(python) = std::env::var_os("TUTTI_TEST_PYTHON") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set TUTTI_TEST_PYTHON; run tests/run");
        return;
    };
    // The coordinator's own front end, and a separate one.
    let fleet = Fleet::start(&["--tensor-parallel", "2"], 2, 1).await.unwrap();
    let [own, separate] = [&fleet.coordinator, &fleet.frontends[0]];
    for (server, script) in [
        (own, "test_openai_client.py"),
        (separate, "test_openai_client.py"),
        // A front end's requests go the coordinator's way as well.
        (separate, "test_responses.py"),
        (separate, "test_messages.py"),
        (separate, "test_embeddings.py"),
        // A front end's document is a part of the coordinator's.
        (own, "test_openapi.py"),
    ] {
        let output = Command::new(&python)
            .arg(repository().join("tests/openai").join(script))
            .env("TUTTI_BASE_URL", format!("{}/v1", server.base()))
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}\n{err}");
        assert!(out.contains("checks passed"), "{out}\n{err}");
    }
}
