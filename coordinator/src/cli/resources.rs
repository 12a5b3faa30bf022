//! Options about what nodes offer and which workers go together.
use std::collections::BTreeMap;

use clap::Args;
use coordinator::cluster::PlacementRules;
use shared::protocol::NodeResources;

use super::CliError;
use super::options::parse_bytes;

/// What a worker's node offers.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ResourceArgs {
    /// Labels of this node, comma separated: rack=r1,zone=a
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = pair)]
    pub(crate) label: Vec<(String, String)>,
    /// Resources of this node besides cpus, gpus and memory, which are detected; whole numbers,
    /// comma separated: nvme=2,licence=1
    #[arg(long, value_name = "NAME=AMOUNT", value_delimiter = ',', value_parser = amount)]
    pub(crate) resource: Vec<(String, u64)>,
}

impl ResourceArgs {
    /// The node's own part of its offer.
    pub(crate) fn offer(&self) -> Result<NodeResources, CliError> {
        let offer = NodeResources {
            custom: once("--resource", &self.resource)?,
            labels: once("--label", &self.label)?,
            ..NodeResources::default()
        };
        let taken = ["cpus", "gpus", "memory"].into_iter().find(|n| offer.custom.contains_key(*n));
        if let Some(name) = taken {
            return Err(CliError::Usage(format!(
                "--resource {name}: this resource is detected and cannot be set"
            )));
        }
        let usage = |problem| CliError::Usage(format!("--label, --resource: {problem}"));
        offer.check().map_err(usage)?;
        Ok(offer)
    }
}

/// Which workers go together.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PlacementArgs {
    /// Labels whose values workers on different hosts should share to form a replica, comma
    /// separated, nearest first: rack,zone
    #[arg(long, value_name = "LABELS", value_delimiter = ',', value_parser = label)]
    pub(crate) placement_labels: Vec<String>,
    /// Resources that a worker must offer to become a rank, comma separated: gpus=1,memory=16GiB
    #[arg(long, value_name = "NAME=AMOUNT", value_delimiter = ',', value_parser = amount)]
    pub(crate) rank_resources: Vec<(String, u64)>,
    /// Workers to keep free as replacements when further replicas are formed
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub(crate) spares: u32,
}

impl PlacementArgs {
    /// The rules.
    pub(crate) fn rules(&self) -> Result<PlacementRules, CliError> {
        Ok(PlacementRules {
            needs: once("--rank-resources", &self.rank_resources)?,
            near: self.placement_labels.clone(),
            spares: self.spares,
        })
    }
}

/// Collects pairs; rejects a name given twice.
fn once<T: Clone>(option: &str, pairs: &[(String, T)]) -> Result<BTreeMap<String, T>, CliError> {
    let mut all = BTreeMap::new();
    for (name, value) in pairs {
        if all.insert(name.clone(), value.clone()).is_some() {
            return Err(CliError::Usage(format!("{option} names {name} twice")));
        }
    }
    Ok(all)
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn label(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => {
            Err("a label has no name: expected names with commas between, such as rack,zone"
                .to_owned())
        }
        name => Ok(name.to_owned()),
    }
}

fn amount(text: &str) -> Result<(String, u64), String> {
    let (name, amount) = pair(text).map_err(|_| "expected NAME=AMOUNT".to_owned())?;
    let parsed = parse_bytes(&amount).map_err(|_| {
        format!("the amount of {name} is '{amount}': expected a whole number above 0, or a size such as 16GiB")
    })?;
    Ok((name, parsed))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        offers: ResourceArgs,
        #[command(flatten)]
        wants: PlacementArgs,
    }

    fn line(words: &[&str]) -> Line {
        Line::parse_from([&["x"][..], words].concat())
    }

    #[test]
    fn lists_become_offers_and_rules() {
        let words = ["--label", "rack=r1,zone=a", "--resource", "nvme=2", "--label", "row=7"];
        let offer = line(&words).offers.offer().unwrap();
        assert_eq!((offer.labels.len(), offer.amount("nvme")), (3, 2));
        let words = ["--placement-labels", "rack,zone", "--rank-resources", "gpus=1,memory=2GiB"];
        let rules = line(&words).wants.rules().unwrap();
        assert_eq!(rules.near, ["rack", "zone"]);
        assert_eq!((rules.needs["gpus"], rules.needs["memory"]), (1, 2 << 30));
        assert_eq!(line(&[]).wants.rules().unwrap(), PlacementRules::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |words: &[&str]| line(words).offers.offer().unwrap_err().to_string();
        assert!(error(&["--resource", "gpus=2"]).contains("--resource gpus"));
        assert!(error(&["--label", "a=1,a=2"]).contains("names a twice"));
        assert!(error(&["--label", "a=b c"]).contains("\"b c\""));
        assert!(Line::try_parse_from(["x", "--label", "rack"]).is_err());
        assert!(Line::try_parse_from(["x", "--resource", "nvme=many"]).is_err());
    }
}
