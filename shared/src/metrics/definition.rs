//! The parts of a series' declaration. The declarations are in [`super::catalogue`].
use super::catalogue::CATALOGUE;
use super::labels::Label;

/// Position of a series in the catalogue, within one process; between processes, series go by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeriesId(pub(super) u16);

impl SeriesId {
    /// Returns the position.
    #[must_use]
    pub const fn index(self) -> u16 {
        self.0
    }

    /// Returns the series at this position, if there is one.
    #[must_use]
    pub fn from_index(index: u16) -> Option<Self> {
        (usize::from(index) < CATALOGUE.len()).then_some(Self(index))
    }

    /// Returns the declaration.
    #[must_use]
    pub fn definition(self) -> &'static Definition {
        // In bounds: a `SeriesId` is made by the catalogue or by `from_index`.
        &CATALOGUE[usize::from(self.0)]
    }
}

/// A counter with `L` labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterId<const L: usize>(pub(super) SeriesId);

/// A gauge with `L` labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GaugeId<const L: usize>(pub(super) SeriesId);

/// A histogram with `L` labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistogramId<const L: usize>(pub(super) SeriesId);

macro_rules! series_of {
    ($($id:ident),*) => {$(
        impl<const L: usize> $id<L> {
            /// Returns the series.
            #[must_use]
            pub const fn series(self) -> SeriesId {
                self.0
            }
        }
    )*};
}
series_of!(CounterId, GaugeId, HistogramId);

/// Declaration of one series: everything that is fixed about it.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// The published name.
    pub name: &'static str,
    /// Counter, gauge or histogram, with the details of that kind.
    pub kind: Kind,
    /// Unit of the value.
    pub unit: Unit,
    /// Whether the published series also carries the served model's name: the same for all series
    /// of a cluster, so it is added when they are published and not stored with each of them.
    pub model: bool,
    /// Labels that distinguish its series, sorted by name.
    pub labels: &'static [Label],
    /// Who reports it.
    pub owner: Owner,
    /// Help text, for `# HELP` and the documentation.
    pub help: &'static str,
    /// Condition under which the series appears, if it does not always exist.
    pub when: Option<&'static str>,
}

impl Definition {
    /// Returns the number of a counter's integer steps per unit: seconds are counted in 1e-9.
    #[must_use]
    pub fn counter_scale(&self) -> f64 {
        match self.unit {
            Unit::Seconds => 1e9,
            _ => 1.0,
        }
    }

    /// Upper bounds of a histogram's buckets without the infinite one; empty for other kinds.
    #[must_use]
    pub fn buckets(&self) -> &'static [f64] {
        match self.kind {
            Kind::Histogram(bounds) => bounds,
            Kind::Counter | Kind::Gauge(_) => &[],
        }
    }

    /// Describes how values of several sources with the same labels are merged.
    #[must_use]
    pub fn merge_rule(&self) -> &'static str {
        match self.kind {
            Kind::Counter => "sum, never falls",
            Kind::Histogram(_) => "sum per bucket, never falls",
            Kind::Gauge(GaugeMerge::Sum) => "sum of live sources",
            Kind::Gauge(GaugeMerge::Max) => "maximum of live sources",
            Kind::Gauge(GaugeMerge::Ratio { .. }) => "rebuilt from numerator and denominator",
        }
    }
}

/// The kind of a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A total that only grows.
    Counter,
    /// A current value; it vanishes with its source.
    Gauge(GaugeMerge),
    /// Observations counted in buckets with these finite, strictly increasing upper bounds; a
    /// bucket for everything above is implied.
    Histogram(&'static [f64]),
}

/// How gauges with equal labels are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GaugeMerge {
    /// The sum, for sources that hold disjoint things.
    Sum,
    /// The maximum, for points in time and for the constant 1 of info series.
    Max,
    /// Never reported by a source: computed after merging as numerator / denominator for each set
    /// of labels; absent where the denominator is 0.
    Ratio {
        /// Numerator: a summed gauge or a counter with the same labels.
        numerator: SeriesId,
        /// Denominator: a summed gauge or a counter with the same labels.
        denominator: SeriesId,
    },
}

/// Who may report a series. A report that contains another owner's series is refused, which
/// prevents a replica's tokens from being counted once per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The coordinator, which accepts every token and so loses nothing when a worker dies.
    Coordinator,
    /// Every rank, labelled; we never add these up over ranks.
    EveryRank,
    /// Whatever process serves HTTP: the coordinator or a separate front end.
    Frontend,
    /// Any process, for what each has of its own.
    Process,
}

impl Owner {
    /// Returns its name in the documentation.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::EveryRank => "every rank",
            Self::Frontend => "front end",
            Self::Process => "every process",
        }
    }
}

/// Unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Requests.
    Requests,
    /// Tokens.
    Tokens,
    /// Seconds; for gauges also seconds since 1970. Counters count in 1e-9 s.
    Seconds,
    /// Bytes.
    Bytes,
    /// KV cache blocks.
    Blocks,
    /// Engine steps.
    Steps,
    /// Parts of 1.
    Ratio,
    /// Degrees Celsius.
    Celsius,
    /// Watts.
    Watts,
    /// Occurrences of anything else.
    Events,
    /// Things that exist now.
    Items,
    /// The value of a parameter.
    Value,
    /// Always 1; the labels are the information.
    Info,
}

impl Unit {
    /// Returns its name in the documentation.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::Seconds => "seconds",
            Self::Bytes => "bytes",
            Self::Blocks => "blocks",
            Self::Steps => "steps",
            Self::Ratio => "ratio",
            Self::Celsius => "degrees Celsius",
            Self::Watts => "watts",
            Self::Events => "events",
            Self::Items => "items",
            Self::Value => "value",
            Self::Info => "info",
        }
    }
}
