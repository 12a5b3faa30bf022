//! PURE: which requests are traced, by the samplers that OpenTelemetry names.
use super::span::TraceId;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// What decides about a trace that begins here.
    root: Root,
    /// Whether a caller's decision about its trace is followed.
    follows_parent: bool,
}

/// What decides about a trace that begins here.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Root {
    All,
    None,
    /// This share of all traces.
    Ratio(f64),
}

impl Default for Sampler {
    fn default() -> Self {
        Self { root: Root::All, follows_parent: true }
    }
}

/// The names that [`Sampler::of_name`] knows.
pub const NAMES: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

impl Sampler {
    /// Returns the sampler with this name in `OTEL_TRACES_SAMPLER`; `ratio` is the share of one
    /// that takes a share.
    #[must_use]
    pub fn of_name(name: &str, ratio: f64) -> Option<Self> {
        let bare = name.strip_prefix("parentbased_");
        let root = match bare.unwrap_or(name) {
            "always_on" => Root::All,
            "always_off" => Root::None,
            "traceidratio" => Root::Ratio(ratio),
            _ => return None,
        };
        Some(Self { root, follows_parent: bare.is_some() })
    }

    /// Whether the request of a trace is traced; `parent` is whether its caller's is, if it has a
    /// caller that says so.
    #[must_use]
    pub fn samples(&self, trace: &TraceId, parent: Option<bool>) -> bool {
        if let Some(parent) = parent.filter(|_| self.follows_parent) {
            return parent;
        }
        match self.root {
            Root::All => true,
            Root::None => false,
            // Every process decides alike about one trace, by the half of its id that is random.
            Root::Ratio(ratio) => {
                let low = trace.iter().skip(8).fold(0_u64, |low, byte| low << 8 | u64::from(*byte));
                (low as f64) < ratio * 2_f64.powi(64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(low: u64) -> TraceId {
        let mut trace = [0xff; 16];
        trace[8..].copy_from_slice(&low.to_be_bytes());
        trace
    }

    #[test]
    fn samplers_follow_the_caller_or_not() {
        for name in NAMES {
            let sampler = Sampler::of_name(name, 0.0).unwrap();
            let alone = sampler.samples(&trace(7), None);
            assert_eq!(alone, name.ends_with("always_on"), "{name}");
            for parent in [true, false] {
                let expected = if name.starts_with("parentbased") { parent } else { alone };
                assert_eq!(sampler.samples(&trace(7), Some(parent)), expected, "{name}");
            }
        }
        assert_eq!(Sampler::of_name("parentbased_always_on", 0.5), Some(Sampler::default()));
        assert_eq!(Sampler::of_name("jaeger_remote", 0.5), None);
        assert_eq!(Sampler::of_name("parentbased_", 0.5), None);
    }

    #[test]
    fn a_share_of_traces_is_that_share_of_their_ids() {
        let sampler = Sampler::of_name("traceidratio", 0.25).unwrap();
        let quarter = u64::MAX / 4;
        for (low, sampled) in
            [(0, true), (quarter / 2, true), (quarter * 2, false), (u64::MAX, false)]
        {
            assert_eq!(sampler.samples(&trace(low), None), sampled, "{low}");
        }
        assert!(
            Sampler::of_name("traceidratio", 1.0).unwrap().samples(&trace(u64::MAX - 4096), None)
        );
    }
}
