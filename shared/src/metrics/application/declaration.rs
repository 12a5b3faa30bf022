//! Declarations of application metrics, and which of them are legal.
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::metrics::labels::MAX_LABEL_VALUE_BYTES;
use crate::metrics::snapshot::{HistogramTotals, Value};

/// Maximum length of the name of a metric or tag.
const NAME_MAX: usize = 128;
/// Maximum length of a help text.
const HELP_MAX: usize = 200;
/// Maximum number of tags of a metric.
const TAGS_MAX: usize = 8;
/// Maximum number of bounds of a histogram.
const BOUNDS_MAX: usize = 64;
/// Name prefixes that are reserved.
const RESERVED: [&str; 3] = ["tutti_", "process_", "scrape_"];
/// The series by which Prometheus says whether a target answers.
const UP: &str = "up";
/// The suffix of counters.
const TOTAL: &str = "_total";
/// Labels with a meaning to Prometheus or its text format.
const RESERVED_TAGS: [&str; 4] = ["le", "quantile", "job", "instance"];

/// Declaration of one metric: everything that is fixed about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Declaration {
    /// The published name.
    pub name: String,
    /// What the value means.
    pub help: String,
    /// Names of the tags, which become labels.
    pub tags: Vec<String>,
    /// Counter, gauge or histogram.
    pub kind: Kind,
}

/// The kind of a metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kind {
    /// A total that only grows.
    Counter,
    /// A current value; it vanishes with its process.
    Gauge(GaugeMerge),
    /// Observations in buckets with these upper bounds.
    Histogram(Vec<f64>),
}

/// How gauges of several processes with equal tags are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GaugeMerge {
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
    /// Their minimum.
    Min,
}

/// Why a declaration or a recorded value is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The name of a metric or tag is not legal.
    #[error("`{name}` is not a valid name for {what}: {problem}")]
    Name {
        /// The name.
        name: String,
        /// What the name is for.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The buckets are not legal.
    #[error("the bounds of `{name}` {problem}")]
    Bounds {
        /// The histogram.
        name: String,
        /// What is wrong with them.
        problem: String,
    },
    /// The metric was declared differently before.
    #[error("`{name}` was declared as {was}; it cannot become {now}")]
    Changed {
        /// The metric.
        name: String,
        /// The first declaration.
        was: String,
        /// This one.
        now: String,
    },
    /// It would be published under a name of another metric.
    #[error("`{name}` and `{by}` would be published under the same name")]
    Taken {
        /// The metric.
        name: String,
        /// The other one.
        by: String,
    },
    /// The tags of a record do not fit the declaration.
    #[error("`{name}` {problem}")]
    Tags {
        /// The metric.
        name: String,
        /// What is wrong with them.
        problem: String,
    },
    /// The value makes no sense.
    #[error("`{name}` cannot take {value}")]
    Value {
        /// The metric.
        name: String,
        /// The value.
        value: f64,
    },
    /// A bound of the process is reached.
    #[error(
        "a process may have at most {max} {what} of application metrics, and has that many already"
    )]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// The bound.
        max: usize,
    },
}

impl Declaration {
    /// Creates a declaration and checks it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(name: &str, help: &str, tags: &[&str], kind: Kind) -> Result<Self, Error> {
        let declaration = Self {
            name: name.to_owned(),
            help: help.to_owned(),
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            kind,
        };
        declaration.check()?;
        Ok(declaration)
    }

    /// Checks a declaration, which may have come from another process.
    ///
    /// # Errors
    /// [`Error`].
    pub fn check(&self) -> Result<(), Error> {
        let name = |problem: &str| Error::Name {
            name: self.name.clone(),
            what: "a metric",
            problem: problem.to_owned(),
        };
        if let Some(problem) = malformed(&self.name) {
            return Err(name(&problem));
        }
        if let Some(reserved) = RESERVED.iter().find(|reserved| self.name.starts_with(**reserved)) {
            return Err(name(&format!("names that begin with `{reserved}` are reserved")));
        }
        if self.name == UP {
            return Err(name("Prometheus itself has a series of this name"));
        }
        let is_counter = self.kind == Kind::Counter;
        if is_counter != self.name.ends_with(TOTAL) {
            return Err(name("counters end with `_total`, and nothing else does"));
        }
        for suffix in ["_bucket", "_sum", "_count", "_created"] {
            if self.name.ends_with(suffix) {
                return Err(name(&format!("`{suffix}` is a suffix that the format itself adds")));
            }
        }
        if self.help.is_empty() || self.help.len() > HELP_MAX {
            let length = self.help.len();
            return Err(name(&format!(
                "its help has {length} bytes, it must have 1 to {HELP_MAX}"
            )));
        }
        self.check_tag_names()?;
        match &self.kind {
            Kind::Histogram(bounds) => self.check_bounds(bounds),
            Kind::Counter | Kind::Gauge(_) => Ok(()),
        }
    }

    fn check_tag_names(&self) -> Result<(), Error> {
        let tags = |problem: String| Error::Tags { name: self.name.clone(), problem };
        if self.tags.len() > TAGS_MAX {
            return Err(tags(format!(
                "has {} tags, at most {TAGS_MAX} are allowed",
                self.tags.len()
            )));
        }
        for (index, tag) in self.tags.iter().enumerate() {
            let problem = malformed(tag).or_else(|| {
                let reserved = RESERVED_TAGS.contains(&tag.as_str()) || tag.starts_with("__");
                let twice = self.tags[..index].contains(tag);
                match (reserved, twice) {
                    (true, _) => Some("it has a meaning to Prometheus".to_owned()),
                    (_, true) => Some("it is given twice".to_owned()),
                    _ => None,
                }
            });
            if let Some(problem) = problem {
                return Err(Error::Name { name: tag.clone(), what: "a tag", problem });
            }
        }
        Ok(())
    }

    fn check_bounds(&self, bounds: &[f64]) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::Bounds { name: self.name.clone(), problem });
        if bounds.is_empty() || bounds.len() > BOUNDS_MAX {
            return bad(format!("number {}, but there must be 1 to {BOUNDS_MAX}", bounds.len()));
        }
        if !bounds.iter().all(|bound| bound.is_finite()) {
            return bad("must be finite; the infinite one is implied".to_owned());
        }
        if !bounds.is_sorted_by(|a, b| a < b) {
            return bad("must increase".to_owned());
        }
        Ok(())
    }

    /// Checks the values of tags against the declaration.
    ///
    /// # Errors
    /// [`Error::Tags`].
    pub fn check_tags(&self, tags: &[impl AsRef<str>]) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::Tags { name: self.name.clone(), problem });
        if tags.len() != self.tags.len() {
            let (declared, given) = (self.tags.join(", "), tags.len());
            return bad(format!("has the tags [{declared}], {given} values were given"));
        }
        match tags.iter().find(|tag| tag.as_ref().len() > MAX_LABEL_VALUE_BYTES) {
            Some(tag) => bad(format!(
                "was given a tag of {} bytes, at most {MAX_LABEL_VALUE_BYTES} are allowed",
                tag.as_ref().len()
            )),
            None => Ok(()),
        }
    }

    /// Whether totals of both may be added: everything but the help text is equal.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        (&self.name, &self.tags, &self.kind) == (&other.name, &other.tags, &other.kind)
    }

    /// Whether two metrics would be published under the same name, of a family or of its samples:
    /// OpenMetrics names the family of a counter without `_total`.
    #[must_use]
    pub fn clashes_with(&self, other: &Self) -> bool {
        self.name != other.name && (self.takes_name_of(other) || other.takes_name_of(self))
    }

    /// Whether a name of `other` is that of this family or of its samples.
    fn takes_name_of(&self, other: &Self) -> bool {
        let suffixes: &[&str] = match self.kind {
            Kind::Counter => &["", TOTAL],
            Kind::Gauge(_) => &[""],
            Kind::Histogram(_) => &["", "_bucket", "_sum", "_count"],
        };
        let names = [other.family_name(), other.name.as_str()];
        let mut rests = names.into_iter().filter_map(|name| name.strip_prefix(self.family_name()));
        rests.any(|rest| suffixes.contains(&rest))
    }

    fn family_name(&self) -> &str {
        match self.kind {
            Kind::Counter => self.name.strip_suffix(TOTAL).unwrap_or(&self.name),
            Kind::Gauge(_) | Kind::Histogram(_) => &self.name,
        }
    }
}

impl Kind {
    /// Returns the value before anything was recorded.
    pub(super) fn empty(&self) -> Value {
        match self {
            Self::Counter => Value::Counter(0),
            Self::Gauge(_) => Value::Gauge(0.0),
            Self::Histogram(bounds) => Value::Histogram(HistogramTotals::empty(bounds.len())),
        }
    }
}

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Counter => f.write_str("a counter")?,
            Kind::Gauge(merge) => {
                write!(f, "a gauge merged by {}", format!("{merge:?}").to_lowercase())?;
            }
            Kind::Histogram(bounds) => write!(f, "a histogram with the bounds {bounds:?}")?,
        }
        write!(f, " and the tags [{}]", self.tags.join(", "))
    }
}

/// Returns what is wrong with a name, if anything.
fn malformed(name: &str) -> Option<String> {
    let legal = |(index, c): (usize, char)| {
        c.is_ascii_alphabetic() || c == '_' || (index > 0 && c.is_ascii_digit())
    };
    if name.is_empty() || name.len() > NAME_MAX {
        return Some(format!("it has {} bytes, it must have 1 to {NAME_MAX}", name.len()));
    }
    (!name.chars().enumerate().all(legal))
        .then(|| "it must match [a-zA-Z_][a-zA-Z0-9_]*".to_owned())
}
