//! The series that a separate front-end process publishes at its own `/metrics`, and their names.
//!
//! The coordinator publishes the totals of all front ends. A single front end's share has other
//! names, so that a Prometheus server that scrapes both counts nothing twice.
use super::{
    FILE_RELOADS, HTTP_CONNECTIONS_REFUSED, HTTP_REQUEST_DURATION, HTTP_REQUESTS,
    HTTP_REQUESTS_IN_FLIGHT, REQUESTS_EXPIRED, REQUESTS_REJECTED, SeriesId, TRACE_SPANS_DROPPED,
    TRACE_SPANS_EXPORTED,
};

/// Names at a front end, and the coordinator's series that they are part of.
pub const FRONTEND_PAGE: [(&str, SeriesId); 9] = [
    ("tutti_frontend_http_requests_total", HTTP_REQUESTS.series()),
    ("tutti_frontend_http_request_duration_seconds", HTTP_REQUEST_DURATION.series()),
    ("tutti_frontend_http_requests_in_flight", HTTP_REQUESTS_IN_FLIGHT.series()),
    ("tutti_frontend_http_connections_refused_total", HTTP_CONNECTIONS_REFUSED.series()),
    ("tutti_frontend_requests_rejected_total", REQUESTS_REJECTED.series()),
    ("tutti_frontend_requests_expired_total", REQUESTS_EXPIRED.series()),
    ("tutti_frontend_secret_file_reloads_total", FILE_RELOADS.series()),
    ("tutti_frontend_trace_spans_exported_total", TRACE_SPANS_EXPORTED.series()),
    ("tutti_frontend_trace_spans_dropped_total", TRACE_SPANS_DROPPED.series()),
];

#[cfg(test)]
mod tests {
    use super::super::CATALOGUE;
    use super::*;
    use crate::metrics::definition::Owner;

    #[test]
    fn all_that_front_ends_count_has_a_name_of_its_own() {
        for definition in CATALOGUE.iter().filter(|it| it.owner == Owner::Frontend) {
            let own: Vec<_> = FRONTEND_PAGE
                .iter()
                .filter(|(_, of)| std::ptr::eq(of.definition(), definition))
                .collect();
            assert_eq!(own.len(), 1, "{}", definition.name);
            let rest = definition.name.strip_prefix("tutti_").unwrap();
            assert_eq!(own[0].0, format!("tutti_frontend_{rest}"));
            assert!(CATALOGUE.iter().all(|it| it.name != own[0].0), "{}", own[0].0);
        }
        assert!(FRONTEND_PAGE.iter().all(|(_, of)| of.definition().owner == Owner::Frontend));
    }
}
