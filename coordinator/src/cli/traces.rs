//! Starts the export of traces, as the option and OpenTelemetry's environment variables ask for.
use std::sync::Arc;

use coordinator::traces::settings::{self, OPTION, SERVICE_NAME, Settings};
use coordinator::traces::{self, Traces};
use rustls::crypto::ring;
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

use super::CliError;
use super::http_client::{FileNames, authorities, identity};
use super::work::{hostname, random};

/// The variables that name files, for errors about these.
const FILES: FileNames = FileNames {
    authorities: "OTEL_EXPORTER_OTLP_CERTIFICATE",
    certificate: "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
    key: "OTEL_EXPORTER_OTLP_CLIENT_KEY",
};

/// Starts to export traces, if they are to be; `endpoint` is the option's.
pub(crate) fn start(endpoint: Option<&str>) -> Result<Option<Traces>, CliError> {
    let variable = |name: &str| std::env::var(name).ok();
    let reading = settings::read(endpoint, variable).map_err(CliError::Usage)?;
    for warning in &reading.warnings {
        tracing::warn!("{warning}");
    }
    let Some(settings) = reading.settings else { return Ok(None) };
    let agent = match client(&settings) {
        Ok(agent) => agent,
        Err(error) if endpoint.is_some() => return Err(error),
        Err(error) => {
            // As for all faults of the environment, see `settings`.
            tracing::warn!("traces are not exported: {error}");
            return Ok(None);
        }
    };
    let started = Traces::start(&settings, agent, process());
    let traces = started.map_err(|error| {
        CliError::Failed(format!("{OPTION}: cannot start the thread that sends spans: {error}"))
    })?;
    tracing::info!(endpoint = settings.endpoint, "traces are exported");
    Ok(Some(traces))
}

/// The client that asks the collector.
fn client(settings: &Settings) -> Result<Agent, CliError> {
    if !settings.endpoint.starts_with("https:") {
        return Ok(traces::client(settings, None));
    }
    let own = settings.client.as_ref();
    let own = own.map(|(certificate, key)| identity(&FILES, certificate, key)).transpose()?;
    let roots = authorities(FILES.authorities, settings.certificate.as_deref())?;
    let tls = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&roots))
        .client_cert(own);
    Ok(traces::client(settings, Some(tls.build())))
}

/// What describes this process where the environment does not.
fn process() -> Vec<(String, String)> {
    let version = env!("CARGO_PKG_VERSION");
    [
        (SERVICE_NAME, "tutti".to_owned()),
        ("service.version", version.to_owned()),
        ("service.instance.id", format!("{:016x}{:016x}", random(), random())),
        ("host.name", hostname()),
        ("process.pid", std::process::id().to_string()),
        ("telemetry.sdk.name", "tutti".to_owned()),
        ("telemetry.sdk.language", "rust".to_owned()),
        ("telemetry.sdk.version", version.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}
