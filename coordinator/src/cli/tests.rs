//! Options and configuration files: precedence and error texts.
use std::io::Write as _;

use coordinator::scheduler::{Method, NgramConfig};
use shared::model_config::ConfigOverrides;

use super::options::Workers;
use super::*;

fn parse_words(words: &[&str]) -> Result<Command, String> {
    let args: Vec<OsString> = words.iter().map(OsString::from).collect();
    parse(&args).map_err(|error| error.to_string())
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn up(words: &[&str], text: &str) -> Result<UpArgs, String> {
    let file = file(text);
    let path = file.path().to_str().unwrap();
    let mut all = vec!["tutti", "up", "--config", path];
    all.extend(words);
    match parse_words(&all)? {
        Command::Up(args) => Ok(args),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn a_file_supplies_what_the_command_line_does_not_say() {
    let args = up(&["--workers", "3"], "workers = 8\ntensor-parallel = 4\nmax-num-seqs = 7\n");
    let args = args.unwrap();
    assert_eq!(args.workers, Some(Workers::Number(3)));
    assert_eq!(args.serving.tensor_parallel, Some(4));
    assert_eq!(args.serving.max_num_seqs, 7);
    assert_eq!(args.serving.block_size, 16);
}

#[test]
fn the_version_names_the_protocol() {
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(" {version} (protocol {})\n", shared::protocol::PROTOCOL_VERSION);
    for (words, name) in
        [(&["tutti", "--version"][..], "tutti"), (&["tutti", "up", "-V"], "tutti-up")]
    {
        assert_eq!(parse_words(words).unwrap_err(), format!("{name}{expected}"));
    }
}

#[test]
fn a_model_may_have_several_names() {
    let names = |words: &[&str], file: &str| up(words, file).unwrap().serving.served_model_name;
    let words = ["--served-model-name", "a", "org/b", "--workers", "1"];
    assert_eq!(names(&words, ""), ["a", "org/b"]);
    assert_eq!(names(&["--served-model-name", "a,b"], ""), ["a", "b"]);
    assert_eq!(names(&[], "served-model-name = \"a,b\""), ["a", "b"]);
    assert!(names(&[], "").is_empty(), "the folder's name");
}

#[test]
fn a_node_to_be_is_checked_with_its_own_options() {
    let workers = |words: &[&str]| match parse_words(&[&["tutti", "doctor"], words].concat()) {
        Ok(Command::Doctor(args)) => args.workers,
        other => panic!("{other:?}"),
    };
    assert_eq!(workers(&["--workers", "all"]), Some(Workers::All));
    assert_eq!(workers(&["--workers", "3"]), Some(Workers::Number(3)));
    let file = file("workers = \"all\"\ncoordinator = \"10.0.0.1:8001\"");
    assert_eq!(workers(&["--config", file.path().to_str().unwrap()]), Some(Workers::All));
}

#[test]
fn keys_of_other_roles_are_left_alone() {
    let args = up(&[], "coordinator = \"10.0.0.1:8001\"\nlisten = \"127.0.0.1:9\"").unwrap();
    assert_eq!(args.serving.listen.port(), 9);
}

#[test]
fn http_is_at_an_address_or_on_a_unix_socket() {
    let at = |words: &[&str], file: &str| {
        let serving = up(words, file).map(|args| args.serving)?;
        Ok::<_, String>(options::endpoint(serving.listen, serving.uds.as_ref()).to_string())
    };
    let is_at = |words: &[&str], file: &str, expected: &str| {
        assert_eq!(at(words, file).as_deref(), Ok(expected), "{words:?} {file}");
    };
    is_at(&[], "", "127.0.0.1:8000");
    is_at(&["--uds", "/run/a"], "", "unix:/run/a");
    is_at(&[], "uds = \"/run/a\"", "unix:/run/a");
    // Whatever the command line says, it says in place of the file.
    is_at(&["--uds", "/run/a"], "listen = \"127.0.0.1:9\"", "unix:/run/a");
    is_at(&["--uds", "/run/a"], "uds = \"/run/b\"", "unix:/run/a");
    is_at(&["--listen", "127.0.0.1:9"], "uds = \"/run/a\"", "127.0.0.1:9");
    is_at(&["--listen=127.0.0.1:8000"], "uds = \"/run/a\"", "127.0.0.1:8000");
    let error = at(&["--uds", "/run/a", "--listen", "127.0.0.1:9"], "").unwrap_err();
    assert!(error.contains("--uds") && error.contains("--listen"), "{error}");
    let error = at(&[], "uds = \"/run/a\"\nlisten = \"127.0.0.1:9\"").unwrap_err();
    assert!(error.contains("'listen' and 'uds' cannot be combined"), "{error}");
    is_at(&["--uds", &"x".repeat(107)], "", &format!("unix:{}", "x".repeat(107)));
    for (path, bytes) in
        [("x".repeat(108), "108"), ("\u{e9}".repeat(54), "108"), (String::new(), "0")]
    {
        let told = format!("1 to 107 bytes, this one has {bytes}");
        for error in [
            at(&["--uds", &path], "").unwrap_err(),
            at(&[], &format!("uds = \"{path}\"")).unwrap_err(),
        ] {
            assert!(error.contains("--uds") && error.contains(&told), "{error}");
        }
    }
    for role in ["coordinator", "frontend", "doctor"] {
        assert!(parse_words(&["tutti", role, "--uds", "/run/a"]).is_ok(), "{role}");
        let both = ["tutti", role, "--uds", "/run/a", "--listen", "127.0.0.1:9"];
        assert!(parse_words(&both).is_err(), "{role}");
    }
    assert!(parse_words(&["tutti", "worker", "--uds", "/run/a"]).is_err());
}

#[test]
fn what_would_be_ignored_without_etcd_is_refused_on_the_command_line() {
    let etcd = ["--etcd", "http://h:2379"];
    let cases = [
        (&["coordinator"][..], ["--leader-lease", "9"]),
        (&["coordinator"], ["--checkpoint-interval", "9"]),
        (&["coordinator"], ["--cluster-name", "c"]),
        (&["worker"], ["--cluster-name", "c"]),
        (&["frontend"], ["--cluster-name", "c"]),
        (&["status"], ["--cluster-name", "c"]),
        (&["adapters", "unload", "a"], ["--cluster-name", "c"]),
    ];
    for (role, option) in cases {
        let words = [&["tutti"][..], role, &option].concat();
        let error = parse_words(&words).unwrap_err();
        let told = format!("error: {} is given without --etcd\n", option[0]);
        assert_eq!(error, told, "{words:?}");
        assert!(parse_words(&[&words[..], &etcd].concat()).is_ok(), "{words:?}");
    }
    // A file may be for all roles, and for clusters with etcd and without.
    let shared = file("leader-lease = 9\ncheckpoint-interval = 9\ncluster-name = \"c\"");
    let path = shared.path().to_str().unwrap();
    for role in ["coordinator", "worker", "frontend"] {
        assert!(parse_words(&["tutti", role, "--config", path]).is_ok(), "{role}");
    }
    let shared = file("etcd = \"http://h:2379\"");
    let words = ["tutti", "coordinator", "--config", shared.path().to_str().unwrap()];
    assert!(parse_words(&[&words[..], &["--leader-lease", "9"]].concat()).is_ok());
    // Checks of a node to be take what they can use.
    assert!(parse_words(&["tutti", "doctor", "--cluster-name", "c"]).is_ok());
}

#[test]
fn statistics_that_nobody_takes_are_not_written() {
    let check = |text: &str| up::check_numbers(&up(&[], text).unwrap());
    assert!(check("log-stats-json = \"f\"\nlog-stats-interval = 1").is_ok());
    assert!(check("log-stats-interval = 0").is_ok());
    let error = check("log-stats-json = \"f\"\nlog-stats-interval = 0").unwrap_err();
    let (code, error) = (error.code(), error.to_string());
    assert!(code == 2 && error.contains("--log-stats-json f"), "{error}");
    assert!(error.contains("--log-stats-interval 0"), "{error}");
}

#[test]
fn an_unknown_key_is_named_with_its_nearest_neighbour() {
    let error = up(&[], "tensor_paralel = 2").unwrap_err();
    assert!(error.contains("unknown key 'tensor_paralel'"), "{error}");
    assert!(error.contains("did you mean 'tensor-parallel'?"), "{error}");
    assert!(error.contains(".toml"), "{error}");
}

#[test]
fn keys_may_have_the_other_names_of_options() {
    let args = up(&[], "tensor-parallel-size = 4\nkv-cache-memory-bytes = \"2MiB\"").unwrap();
    assert_eq!(
        (args.serving.tensor_parallel, args.serving.kv_cache_memory),
        (Some(4), Some(2 << 20))
    );
    let error = up(&[], "tensor-parallel = 4\ntensor-parallel-size = 2").unwrap_err();
    assert!(
        error.contains("'tensor-parallel-size' is another name of 'tensor-parallel'"),
        "{error}"
    );
}

#[test]
fn a_file_is_checked_as_its_processes_would() {
    let check = |text: &str| {
        let file = file(text);
        config_file::check(file.path()).map(|(keys, _)| keys).map_err(|error| error.to_string())
    };
    assert_eq!(check("workers = 2\ncoordinator = \"h:1\""), Ok(2));
    for key in ["server = \"h\"", "json = true", "lines = 9", "dead = true"] {
        let error = check(key).unwrap_err();
        assert!(error.contains("unknown key"), "{key}: {error}");
    }
    let error = check("coordinator = \"h:1\"\netcd = \"http://h:2\"").unwrap_err();
    assert!(error.contains("--coordinator h:1 and --etcd") && error.contains(".toml"), "{error}");
}

#[test]
fn a_node_may_not_be_called_like_the_coordinator_or_at_length() {
    for role in ["worker", "frontend"] {
        let named = |name: &str| parse_words(&["tutti", role, "--node", name]);
        assert!(named("gpu-1").is_ok() && named(&"n".repeat(119)).is_ok());
        for (name, told) in [
            ("coordinator".to_owned(), "the coordinator's own name"),
            ("n".repeat(5000), "1 to 119 bytes, this one has 5000"),
            (String::new(), "1 to 119 bytes"),
            ("a\nb".to_owned(), "control characters"),
        ] {
            let error = named(&name).unwrap_err();
            assert!(error.contains("--node") && error.contains(told), "{error}");
        }
    }
}

#[test]
fn a_bad_value_is_named_with_its_bound_and_file() {
    let error = up(&[], "workers = 0").unwrap_err();
    assert!(error.contains("--workers") && error.contains("1 to 256"), "{error}");
    assert!(error.contains(".toml"), "{error}");
    let error = up(&[], "workers = [1]").unwrap_err();
    assert!(error.contains("'workers' is an array"), "{error}");
    let error = up(&[], "kv-cache-memory = \"3 parsecs\"").unwrap_err();
    assert!(error.contains("unknown unit 'parsecs'"), "{error}");
    let error = up(&[], "workers = ").unwrap_err();
    assert!(error.contains("not TOML"), "{error}");
}

#[test]
fn an_error_in_a_file_names_its_line_and_does_not_show_it() {
    for (text, line) in [("workers = 2\napi-key = sk-abc", 2), ("api-key = \"sk-abc", 1)] {
        let error = up(&[], text).unwrap_err();
        let told = format!("not TOML: line {line}: ");
        assert!(error.contains(&told) && !error.contains("sk-abc"), "{error}");
    }
}

#[test]
fn a_dtype_is_one_of_three() {
    use shared::protocol::Dtype;

    assert_eq!(up(&[], "").unwrap().serving.dtype, Dtype::Auto);
    assert_eq!(up(&[], "dtype = \"float32\"").unwrap().serving.dtype, Dtype::Float32);
    let args = up(&["--dtype", "bfloat16"], "dtype = \"float32\"").unwrap();
    assert_eq!(args.serving.dtype, Dtype::Bfloat16);
    let error = up(&["--dtype", "float16"], "").unwrap_err();
    assert!(error.contains("--dtype") && error.contains("choose bfloat16 or float32"), "{error}");
    let error = up(&[], "dtype = \"int8\"").unwrap_err();
    assert!(error.contains("auto, float32, bfloat16") && error.contains(".toml"), "{error}");
}

#[test]
fn a_kv_cache_is_in_fp8_or_has_the_dtype_of_activations() {
    use shared::protocol::KvCacheDtype;

    let dtype = |words: &[&str], file| up(words, file).map(|args| args.serving.kv_cache_dtype);
    assert_eq!(dtype(&[], ""), Ok(KvCacheDtype::Auto));
    assert_eq!(dtype(&[], "kv-cache-dtype = \"fp8\""), Ok(KvCacheDtype::Fp8));
    for (name, means) in
        [("auto", KvCacheDtype::Auto), ("fp8", KvCacheDtype::Fp8), ("fp8_e4m3", KvCacheDtype::Fp8)]
    {
        assert_eq!(dtype(&["--kv-cache-dtype", name], "kv-cache-dtype = \"fp8\""), Ok(means));
    }
    for (name, told) in [
        ("fp8_e5m2", "the only 8-bit type is E4M3"),
        ("int8", "auto, fp8, fp8_e4m3"),
        ("bfloat16", "choose auto, and --dtype"),
    ] {
        let error = dtype(&["--kv-cache-dtype", name], "").unwrap_err();
        assert!(error.contains("--kv-cache-dtype") && error.contains(told), "{error}");
    }
}

#[test]
fn swap_space_is_in_gib() {
    let space = |words: &[&str], file| up(words, file).map(|args| args.serving.swap_space);
    assert_eq!(space(&[], ""), Ok(0));
    assert_eq!(space(&["--swap-space", "4"], ""), Ok(4 << 30));
    assert_eq!(space(&[], "swap-space = 0.5"), Ok(512 << 20));
    assert_eq!(space(&[], "swap-space = \"64MiB\""), Ok(64 << 20));
    for bad in ["-1", "nan", "2000000", "4 parsecs"] {
        let error = space(&[&format!("--swap-space={bad}")], "").unwrap_err();
        assert!(error.contains("--swap-space") && error.contains("GiB"), "{error}");
    }
}

#[test]
fn weights_are_quantised_when_that_is_asked_for() {
    use shared::protocol::Quantization;

    assert_eq!(up(&[], "").unwrap().serving.quantization, Quantization::None);
    assert_eq!(
        up(&[], "quantization = \"int8\"").unwrap().serving.quantization,
        Quantization::Int8
    );
    let args = up(&["--quantization", "none"], "quantization = \"int8\"").unwrap();
    assert_eq!(args.serving.quantization, Quantization::None);
    let error = up(&["--quantization", "fp8"], "").unwrap_err();
    assert!(error.contains("--quantization") && error.contains("none, int8"), "{error}");
}

#[test]
fn keys_of_a_models_configuration_are_json_on_the_command_line_and_in_a_file() {
    let given = |words: &[&str], file| up(words, file).map(|args| args.serving.api.hf_overrides);
    let parsed = |text| Some(ConfigOverrides::parse(text).unwrap());
    assert_eq!(given(&[], ""), Ok(None));
    assert_eq!(given(&[], "hf-overrides = '{\"a\": 1}'"), Ok(parsed("{\"a\": 1}")));
    let words = ["--hf-overrides", "{\"b\": {\"c\": null}}"];
    assert_eq!(given(&words, "hf-overrides = '{\"a\": 1}'"), Ok(parsed(words[1])));
    let error = given(&["--hf-overrides", "[1]"], "").unwrap_err();
    assert!(error.contains("--hf-overrides") && error.contains("not a JSON object"), "{error}");
    let error = given(&[], "hf-overrides = 'rope'").unwrap_err();
    assert!(error.contains("not a JSON object") && error.contains(".toml"), "{error}");
    for role in ["coordinator", "frontend", "doctor", "bench"] {
        assert!(parse_words(&["tutti", role, "--hf-overrides", "{}"]).is_ok(), "{role}");
    }
    assert!(parse_words(&["tutti", "worker", "--hf-overrides", "{}"]).is_err(), "it is told");
}

#[test]
fn a_missing_file_is_named() {
    let error = parse_words(&["tutti", "worker", "--config", "/no/such.toml"]).unwrap_err();
    assert!(error.contains("/no/such.toml") && error.contains("cannot read"), "{error}");
}

#[test]
fn options_have_no_conflicts() {
    options::command().debug_assert();
}

#[test]
fn speculation_is_json_on_the_command_line_and_in_a_file() {
    let config = |tokens: u32| {
        format!(r#"{{"method":"ngram","num_speculative_tokens":{tokens},"prompt_lookup_max":3}}"#)
    };
    assert_eq!(up(&[], "").unwrap().serving.speculative_config, None);
    let args = up(&[], &format!("speculative-config = '{}'", config(4))).unwrap();
    let speculation = args.serving.speculative_config.unwrap().speculation;
    let lookup = NgramConfig { prompt_lookup_max: 3, prompt_lookup_min: 3 };
    assert_eq!(
        (speculation.num_speculative_tokens, speculation.method),
        (4, Method::Ngram(lookup))
    );
    let error = up(&["--speculative-config", &config(65)], "").unwrap_err();
    assert!(error.contains("--speculative-config"), "{error}");
    assert!(error.contains("num_speculative_tokens is 65, it must be 1 to 64"), "{error}");
    let error = up(&[], "speculative-config = 'ngram'").unwrap_err();
    assert!(error.contains("it is not JSON") && error.contains(".toml"), "{error}");
}
