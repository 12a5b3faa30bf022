//! What the declaration of a series consists of. The declarations are in [`super::catalogue`].
use super::catalogue::CATALOGUE;
use super::labels::Label;

/// Position of a series in the catalogue. Sources with another catalogue are refused by its hash,
/// so the number is enough on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeriesId(pub(super) u16);

impl SeriesId {
    /// The number that travels.
    #[must_use]
    pub const fn index(self) -> u16 {
        self.0
    }

    /// The series with this number, if there is one.
    #[must_use]
    pub fn from_index(index: u16) -> Option<Self> {
        (usize::from(index) < CATALOGUE.len()).then_some(Self(index))
    }

    /// The declaration.
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
            /// The position in the catalogue.
            #[must_use]
            pub const fn series(self) -> SeriesId {
                self.0
            }
        }
    )*};
}
series_of!(CounterId, GaugeId, HistogramId);

/// One series: everything that is fixed about it.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// The published name.
    pub name: &'static str,
    /// Counter, gauge or histogram, with what only that kind has.
    pub kind: Kind,
    /// What one unit of the value is.
    pub unit: Unit,
    /// Whether the published series also carries the served model's name: the same for all of a
    /// cluster's series, so it is written when they are published and not kept with each of them.
    pub model: bool,
    /// The labels whose values tell its series apart, sorted by name.
    pub labels: &'static [Label],
    /// Who measures it.
    pub owner: Owner,
    /// What the value means, for `# HELP` and the documentation.
    pub help: &'static str,
    /// What makes the series appear, where it is not always there.
    pub when: Option<&'static str>,
}

impl Definition {
    /// How many of a counter's integers make 1 of its unit: seconds are counted in 1e-9.
    #[must_use]
    pub fn counter_scale(&self) -> f64 {
        match self.unit {
            Unit::Seconds => 1e9,
            _ => 1.0,
        }
    }

    /// The upper bounds of a histogram's buckets without the infinite one; empty for other kinds.
    #[must_use]
    pub fn buckets(&self) -> &'static [f64] {
        match self.kind {
            Kind::Histogram(bounds) => bounds,
            Kind::Counter | Kind::Gauge(_) => &[],
        }
    }

    /// How values of several sources under the same labels become one, in words.
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
    /// A present value; it vanishes with its source.
    Gauge(GaugeMerge),
    /// Observations counted in buckets with these upper bounds, strictly increasing and finite; a
    /// bucket for everything above is implied.
    Histogram(&'static [f64]),
}

/// How gauges with equal labels are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GaugeMerge {
    /// The sources hold disjoint things: add.
    Sum,
    /// The largest: points in time, and the constant 1 of information series.
    Max,
    /// Never reported by a source: computed after merging as numerator / denominator for each set
    /// of labels, absent where the denominator is 0.
    Ratio {
        /// A summed gauge or a counter with the same labels.
        numerator: SeriesId,
        /// A summed gauge or a counter with the same labels.
        denominator: SeriesId,
    },
}

/// Who may report a series. A report that holds another source's series is refused, which keeps a
/// replica's tokens from being counted once per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The coordinator, which accepts every token and therefore loses nothing with a worker.
    Coordinator,
    /// Rank 0 of a replica alone: what every rank sees alike.
    RankZero,
    /// Every rank, labelled; never added up over ranks by us.
    EveryRank,
    /// Whoever serves HTTP: the coordinator, or a front end of its own.
    Frontend,
    /// Any process: what each has of its own.
    Process,
}

impl Owner {
    /// In words, for the documentation.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::RankZero => "rank 0",
            Self::EveryRank => "every rank",
            Self::Frontend => "front end",
            Self::Process => "every process",
        }
    }
}

/// What one unit of a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Requests.
    Requests,
    /// Tokens.
    Tokens,
    /// Seconds; with gauges also seconds since 1970. Counters hold 1e-9 of them.
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
    /// The parameter itself.
    Value,
    /// Always 1; the labels are the information.
    Info,
}

impl Unit {
    /// In words, for the documentation.
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
