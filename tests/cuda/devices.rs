//! Which devices are found, with and without a driver.
use serde_json::Value;
use testkit::fake_cuda::{fake_cuda, fake_cuda_of};

use crate::{described, fake, options, tutti, with_fake};

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or_default()
}

#[test]
fn a_gpu_is_described() {
    let (code, stdout, stderr) = with_fake(&["devices"], &[("FAKE_CUDA_DEVICES", "2")]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    for words in [
        "cpu: ",
        "cuda:0: Fake GPU A, 4.0 GiB of 4.0 GiB free, compute capability 9.0, PCI 0000:17:00.0, GPU-abab",
        "cuda:1: Fake GPU B",
        "NVIDIA driver: CUDA 13.0",
        "cuBLASLt: found",
        "CUDA is usable: 2 GPU(s)",
    ] {
        assert!(stdout.contains(words), "{words:?} is not in:\n{stdout}");
    }
}

#[test]
fn json_says_the_same() {
    let (code, stdout, _) = with_fake(&["devices", "--json"], &[]);
    assert_eq!(code, 0);
    let found: Value = serde_json::from_str(&stdout).unwrap();
    let cuda = &found["cuda"];
    assert_eq!(cuda["usable"], true);
    assert_eq!(cuda["driver"], 13_000);
    assert_eq!(cuda["cublaslt"], true);
    assert_eq!(cuda["devices"][0]["memory_total_bytes"], 4u64 << 30);
    assert_eq!(cuda["devices"][0]["compute_capability"], "9.0");
    assert!(found["cpu"]["cores"].as_u64().unwrap() >= 1);
}

/// This holds with a driver, too: the last line is about kernels then.
#[test]
fn without_a_driver_the_cpu_is_listed_and_that_is_no_failure() {
    let (code, stdout, stderr) = described(&tutti(&["devices"], &[]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.starts_with("cpu: "), "{stdout}");
    assert!(last_line(&stdout).starts_with("CUDA is "), "{stdout}");
}

#[test]
fn what_is_wrong_is_said_in_the_last_line() {
    let cases: &[(&str, &str, &str)] = &[
        ("FAKE_CUDA_DEVICES", "0", "no GPU is visible"),
        ("FAKE_CUDA_VERSION", "12040", "supports CUDA 12.4, but this program needs CUDA 13.0"),
        ("FAKE_CUDA_CAPABILITY", "75", "compute capability 7.5, this program needs 8.0"),
        ("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1=46", "the GPU is busy"),
        ("FAKE_CUDA_FAIL", "cuInit:1=803", "restart the host or its container"),
        ("FAKE_CUDA_FAIL", "cuInit:1=999", "CUDA_ERROR_UNKNOWN"),
    ];
    for (name, value, words) in cases {
        let (code, stdout, _) = with_fake(&["devices"], &[(name, value)]);
        let line = last_line(&stdout);
        assert_eq!(code, 0, "{stdout}");
        assert!(line.starts_with("CUDA is not usable here: ") && line.contains(words), "{line}");
        // Requesting an unavailable device ends the program at once, with the same message.
        let bench = ["bench", "--device", "cuda", "--model", "tests/models/llama-gqa"];
        let (code, _, stderr) = with_fake(&bench, &[(name, value)]);
        assert_eq!(code, 69, "{stderr}");
        assert!(stderr.contains(words) && stderr.trim_end().lines().count() == 1, "{stderr}");
    }
}

#[test]
fn a_driver_without_a_symbol_is_no_panic() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let old = fake_cuda(folder, Some("cuGraphLaunch")).unwrap();
    let options = options(&old);
    let args: Vec<&str> =
        ["devices"].into_iter().chain(options.iter().map(String::as_str)).collect();
    let (code, stdout, stderr) = described(&tutti(&args, &[]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(last_line(&stdout).contains("lacks cuGraphLaunch"), "{stdout}");
}

/// A container may have its own driver library beside the host's, and one of the two does not load.
#[test]
fn a_driver_that_does_not_load_costs_nothing_where_another_does() {
    let broken = tempfile::tempdir().unwrap();
    std::fs::write(broken.path().join("libcuda.so.1"), "no library").unwrap();
    let (broken, well) = (broken.path().to_str().unwrap(), fake().libraries.to_str().unwrap());
    for folders in [format!("{broken},{well}"), format!("{well},{broken}")] {
        let kernels = fake().kernels.to_str().unwrap();
        let args = ["devices", "--cuda-lib-dir", &folders, "--cuda-kernels", kernels];
        let (code, stdout, stderr) = described(&tutti(&args, &[]));
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(last_line(&stdout).starts_with("CUDA is usable: 1 GPU(s)"), "{stdout}");
    }
    // Alone it is reported, with the reason; beside a working driver there is nothing to report.
    let (_, stdout, _) = described(&tutti(&["devices", "--cuda-lib-dir", broken], &[]));
    let line = last_line(&stdout);
    assert!(line.contains("libcuda.so.1: file too short") || line.contains("usable"), "{stdout}");
    assert!(line.contains(broken) || !line.contains("not usable"), "{stdout}");
}

/// A toolkit's folder in the loader's path has its stub of the driver, and its own cuBLASLt, under
/// names without a version.
#[test]
fn the_folder_that_is_named_comes_before_what_the_loader_knows() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let others = fake_cuda_of(target, 3).unwrap();
    let toolkit = tempfile::tempdir().unwrap();
    let driver = others.libraries.join("libcuda.so.1");
    std::fs::copy(driver, toolkit.path().join("libcuda.so")).unwrap();
    std::fs::write(toolkit.path().join("libcublasLt.so"), "no library").unwrap();
    let path = [("LD_LIBRARY_PATH", toolkit.path().to_str().unwrap())];
    let (code, stdout, stderr) = with_fake(&["devices"], &path);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(last_line(&stdout).starts_with("CUDA is usable: 1 GPU(s)"), "{stdout}");
    assert!(stdout.contains("cuBLASLt: found"), "{stdout}");
    // Without the option, the loader's is taken.
    let kernels = fake().kernels.to_str().unwrap();
    let (_, stdout, _) = described(&tutti(&["devices", "--cuda-kernels", kernels], &path));
    let is_known = stdout.contains("CUDA is usable: 3 GPU(s)");
    let has_own = stdout.contains("NVIDIA driver: ") && !stdout.contains("Fake GPU");
    assert!(is_known || has_own, "{stdout}");
}

/// The folders of pip's packages, for CUDA 12 and 13.
#[test]
fn cublaslt_is_found_among_pythons_packages() {
    let driver = tempfile::tempdir().unwrap();
    std::fs::copy(fake().libraries.join("libcuda.so.1"), driver.path().join("libcuda.so.1"))
        .unwrap();
    let kernels = fake().kernels.to_str().unwrap();
    let options = ["--cuda-lib-dir", driver.path().to_str().unwrap(), "--cuda-kernels", kernels];
    let said = |home: &std::path::Path| {
        let args: Vec<&str> = ["devices"].into_iter().chain(options).collect();
        let none = ("CUDA_HOME", "/nowhere");
        let home = home.to_str().unwrap();
        let (code, stdout, _) = described(&tutti(&args, &[("HOME", home), none]));
        assert_eq!(code, 0, "{stdout}");
        stdout.contains("cuBLASLt: found")
    };
    for (package, file) in
        [("nvidia/cublas/lib", "libcublasLt.so.12"), ("nvidia/cu13/lib", "libcublasLt.so.13")]
    {
        let home = tempfile::tempdir().unwrap();
        assert!(!said(home.path()), "this host has one of its own: nothing is tested");
        let folder = home.path().join(".local/lib/python3.12/site-packages").join(package);
        std::fs::create_dir_all(&folder).unwrap();
        let library = fake().libraries.join("libcublasLt.so.13");
        std::fs::copy(library, folder.join(file)).unwrap();
        assert!(said(home.path()), "{package}");
    }
}

/// Every worker of a host opens its own GPU only.
#[test]
fn a_gpu_that_is_named_is_the_only_one_with_a_context() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let path = log.path().to_str().unwrap();
    let args = ["bench", "--device", "cuda:1", "--model", "tests/models/llama-gqa"];
    let args = [&args[..], &["--prompt-tokens", "8", "--batches", "1"]].concat();
    let (code, stdout, stderr) =
        with_fake(&args, &[("FAKE_CUDA_DEVICES", "3"), ("FAKE_CUDA_LOG", path)]);
    assert_eq!(code, 0, "{stdout} {stderr}");
    let log = std::fs::read_to_string(path).unwrap();
    let contexts: Vec<&str> = log.lines().filter(|line| line.starts_with("context")).collect();
    assert!(
        !contexts.is_empty() && contexts.iter().all(|line| *line == "context 1"),
        "{contexts:?}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let bench = ["bench", "--device", "cuda:3", "--model", "tests/models/llama-gqa"];
    let (code, _, stderr) = with_fake(&bench, &[]);
    assert_eq!(code, 69);
    assert!(stderr.contains("there is no GPU 3: 1 visible"), "{stderr}");
    let (code, _, stderr) = described(&tutti(&["bench", "--device", "gpu"], &[]));
    assert_eq!(code, 2);
    assert!(stderr.contains("cuda:N"), "{stderr}");
}
