//! What the option and the environment come to.
use std::time::Duration;

use super::*;

fn of(option: Option<&str>, variables: &[(&str, &str)]) -> Result<Reading, String> {
    read(option, |name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

/// Settings without a warning.
fn settings(option: Option<&str>, variables: &[(&str, &str)]) -> Settings {
    let reading = of(option, variables).unwrap();
    assert!(reading.warnings.is_empty(), "{:?}", reading.warnings);
    reading.settings.unwrap()
}

const URL: Option<&str> = Some("http://c:4318/v1/traces");

#[test]
fn without_an_address_nothing_is_exported() {
    let others = [("OTEL_SERVICE_NAME", "a"), ("OTEL_TRACES_SAMPLER", "wrong"), (ENDPOINT, " ")];
    let reading = of(None, &others).unwrap();
    assert!(reading.settings.is_none() && reading.warnings.is_empty());
}

#[test]
fn addresses_are_as_opentelemetry_means_them() {
    let endpoint = |option, variables: &[(&str, &str)]| settings(option, variables).endpoint;
    assert_eq!(endpoint(None, &[(ENDPOINT, "http://c:4318")]), "http://c:4318/v1/traces");
    assert_eq!(endpoint(None, &[(ENDPOINT, "http://c/otlp/")]), "http://c/otlp/v1/traces");
    // As it is.
    assert_eq!(endpoint(None, &[(TRACES_ENDPOINT, "https://c/x")]), "https://c/x");
    assert_eq!(endpoint(None, &[(TRACES_ENDPOINT, "http://c:4318")]), "http://c:4318");
    let both = [(ENDPOINT, "http://a"), (TRACES_ENDPOINT, "http://b/v1/traces")];
    assert_eq!(endpoint(None, &both), "http://b/v1/traces");
    assert_eq!(endpoint(Some("http://c:4318/"), &both), "http://c:4318/v1/traces");
    assert_eq!(endpoint(Some("http://c/p?q=1"), &both), "http://c/p?q=1");
}

#[test]
fn an_address_that_cannot_be_is_an_error_of_the_option_and_a_warning_of_the_environment() {
    for (url, what) in [
        ("grpc://c:4317", "gRPC is not supported"),
        ("c:4318", "such as http://HOST:4318/v1/traces"),
        ("/v1/traces", "such as"),
        ("ftp://c", "such as"),
        ("http://", "such as"),
        ("http://a b", "such as"),
        ("http://user:hidden@c", "OTEL_EXPORTER_OTLP_HEADERS"),
    ] {
        let error = of(Some(url), &[]).unwrap_err();
        assert!(error.contains(OPTION) && error.contains(what), "{error}");
        assert!(!error.contains("hidden"));
        let reading = of(None, &[(TRACES_ENDPOINT, url)]).unwrap();
        let warning = &reading.warnings[0];
        assert!(reading.settings.is_none() && warning.contains("not exported"), "{warning}");
        assert!(warning.contains(TRACES_ENDPOINT) && warning.contains(what), "{warning}");
    }
    let reading = of(Some("http://c:4317"), &[]).unwrap();
    assert!(reading.warnings[0].contains("port 4317") && reading.settings.is_some());
}

#[test]
fn what_is_not_supported_is_said_in_one_line() {
    const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
    assert!(of(URL, &[(PROTOCOL, "grpc")]).unwrap_err().contains("http/json"));
    let reading = of(None, &[(ENDPOINT, "http://c"), (PROTOCOL, "grpc")]).unwrap();
    assert!(reading.settings.is_none() && reading.warnings[0].contains(PROTOCOL));
    for (name, value, what) in [
        (PROTOCOL, "http/protobuf", "as http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip", "without compression"),
        ("OTEL_TRACES_EXPORTER", "otlp,console", "OTLP alone"),
        ("OTEL_PROPAGATORS", "b3,jaeger", "traceparent"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "1", "without effect"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_always_on is followed"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a", "no ="),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=%zz", "badly encoded"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "10000 is used"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "2048 is used"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem", "https"),
    ] {
        let reading = of(URL, &[(name, value)]).unwrap();
        let [warning] = reading.warnings.as_slice() else { panic!("{name}: {reading:?}") };
        assert!(warning.contains(what), "{warning}");
        let settings = reading.settings.unwrap();
        assert_eq!(settings, self::settings(URL, &[]), "{name}");
    }
    for (name, value) in [
        (PROTOCOL, "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none"),
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_PROPAGATORS", "tracecontext,baggage"),
        ("OTEL_SDK_DISABLED", "false"),
    ] {
        settings(URL, &[(name, value)]);
    }
}

#[test]
fn the_environment_can_switch_traces_off() {
    for (name, value) in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
        let reading = of(URL, &[(name, value)]).unwrap();
        assert!(reading.settings.is_none() && reading.warnings[0].contains(name));
    }
}

#[test]
fn headers_are_decoded_and_never_shown() {
    const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
    let settings = settings(URL, &[(HEADERS, " api-key = hid%20den ,x=1,")]);
    let headers: Vec<(&str, &str)> = settings
        .headers
        .iter()
        .map(|(key, value)| (key.as_str(), value.to_str().unwrap()))
        .collect();
    assert_eq!(headers, [("api-key", "hid den"), ("x", "1")]);
    assert!(settings.headers.iter().all(|(_, value)| value.is_sensitive()));
    assert!(!format!("{settings:?}").contains("hid"));
    let own = [(HEADERS, "a=1"), ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "b=2")];
    assert_eq!(self::settings(URL, &own).headers[0].0.as_str(), "b");
    for wrong in ["hidden", "a b=hidden", "a=hidden%0a", "=hidden", "a=hidden%e9"] {
        let error = of(URL, &[(HEADERS, wrong)]).unwrap_err();
        assert!(error.contains(HEADERS) && !error.contains("hidden"), "{error}");
    }
}

#[test]
fn a_service_has_its_name_and_attributes() {
    const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
    let of = |variables: &[(&str, &str)]| {
        let resource = settings(URL, variables).resource;
        resource.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>()
    };
    let attributes = (ATTRIBUTES, "service.name=a,deployment.environment.name=p%C3%A9");
    assert_eq!(of(&[attributes]), ["service.name=a", "deployment.environment.name=p\u{e9}"]);
    let both = [attributes, ("OTEL_SERVICE_NAME", "b")];
    assert_eq!(of(&both), ["deployment.environment.name=p\u{e9}", "service.name=b"]);
    let many = (0..=PAIRS_MAX).map(|n| format!("k{n}=v")).collect::<Vec<_>>().join(",");
    let reading = read(URL, |name| (name == ATTRIBUTES).then(|| many.clone())).unwrap();
    assert!(
        reading.warnings[0].contains("128 entries")
            && reading.settings.unwrap().resource.is_empty()
    );
}

#[test]
fn numbers_and_samplers_are_followed() {
    let given = [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "20000"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "250"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "400"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "7000"),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
    ];
    let settings = settings(URL, &given);
    assert_eq!(settings.timeout, Duration::from_secs(3));
    let expected = Batches {
        delay: Duration::from_millis(250),
        queued: 100,
        spans: 100,
        patience: Duration::from_secs(7),
    };
    assert_eq!(settings.batches, expected);
    assert_eq!(settings.sampler, Sampler::of_name("traceidratio", 0.25).unwrap());
    let wrong = [("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "25")];
    assert!(of(URL, &wrong).unwrap().warnings[0].contains("0 to 1"));
    let one = [("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/k")];
    assert!(of(URL, &one).unwrap_err().contains("belong together"));
    let both = [one[0], ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/c")];
    let client = self::settings(Some("https://c"), &both).client;
    assert_eq!(client, Some(("/c".into(), "/k".into())));
}
