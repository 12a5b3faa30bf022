//! Parses a `/metrics` page (text format 0.0.4).
use std::collections::BTreeMap;

/// One sample: name, labels, value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The sample's name, with `_bucket`, `_sum` or `_count`.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// One scrape.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    samples: Vec<Sample>,
}

impl Scrape {
    /// Parses a page.
    ///
    /// # Errors
    /// The line that is not a sample.
    pub fn parse(page: &str) -> Result<Self, String> {
        let lines = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let samples: Result<_, _> = lines.map(parse_line).collect();
        Ok(Self { samples: samples? })
    }

    /// All samples.
    #[must_use]
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The sum of all samples of this name whose labels include `labels`; 0 when there are none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// Whether there is a sample of this name whose labels include `labels`.
    #[must_use]
    pub fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.matching(name, labels).next().is_some()
    }

    fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
        })
    }
}

fn parse_line(line: &str) -> Result<Sample, String> {
    let bad = || format!("not a sample: {line}");
    let (series, value) = match line.rfind('}') {
        Some(end) => line.split_at(end + 1),
        None => line.split_once(' ').ok_or_else(bad)?,
    };
    let value = value.split_whitespace().next().ok_or_else(bad)?;
    let value = if value == "+Inf" { f64::INFINITY } else { value.parse().map_err(|_| bad())? };
    let (name, labels) = match series.split_once('{') {
        Some((name, rest)) => (name, parse_labels(rest.trim_end_matches('}')).ok_or_else(bad)?),
        None => (series, BTreeMap::new()),
    };
    Ok(Sample { name: name.to_owned(), labels, value })
}

fn parse_labels(text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"")?;
        let end = after.find('"')?;
        labels.insert(key.trim_start_matches(',').to_owned(), after[..end].to_owned());
        rest = after[end + 1..].trim_start_matches(',');
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_plain_and_labelled_samples() {
        let page = "# HELP a b\na 1\nb_bucket{le=\"0.5\",x=\"y\"} 3\nb_bucket{le=\"+Inf\"} 4\n";
        let scrape = Scrape::parse(page).unwrap();
        assert_eq!(scrape.sum("a", &[]), 1.0);
        assert_eq!(scrape.sum("b_bucket", &[("le", "0.5")]), 3.0);
        assert_eq!(scrape.sum("b_bucket", &[]), 7.0);
        assert!(!scrape.has("c", &[]));
        assert!(Scrape::parse("nonsense").is_err());
    }
}
