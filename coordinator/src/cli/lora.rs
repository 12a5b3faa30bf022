//! The options of LoRA adapters, named as vLLM does.
use clap::Args;
use shared::protocol::lora::ADAPTERS_MAX;

/// Adapters beside the model.
#[derive(Args, Clone, Debug)]
pub(crate) struct LoraArgs {
    /// LoRA adapters to serve beside the model, in PEFT's format: clients name one as their
    /// `model`. Names on Hugging Face's hub, or folders at the same paths on every worker's host;
    /// several separated by spaces or commas
    #[arg(long, value_name = "NAME=DIR", num_args = 1.., value_parser = parse_modules)]
    pub(crate) lora_modules: Vec<Modules>,
    /// Maximum rank of an adapter
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) max_lora_rank: u32,
    /// Keep room for this many adapters of --max-lora-rank, so that they can be loaded and unloaded
    /// while the cluster runs: `tutti adapters`, or vLLM's POST /v1/load_lora_adapter [default:
    /// only those of --lora-modules, which stay]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=ADAPTERS_MAX as i64))]
    pub(crate) max_loras: Option<u32>,
}

impl LoraArgs {
    /// The named adapters.
    pub(crate) fn adapters(&self) -> impl Iterator<Item = &Named> {
        self.lora_modules.iter().flat_map(|modules| &modules.0)
    }
}

/// The adapters of one value.
#[derive(Clone, Debug)]
pub(crate) struct Modules(Vec<Named>);

/// An adapter's name, and its folder or its name on the hub.
type Named = (String, String);

/// Parses `NAME=DIR`, several separated by commas, or one in vLLM's JSON.
fn parse_modules(text: &str) -> Result<Modules, String> {
    if text.trim_start().starts_with('{') {
        return of_json(text).map(|adapter| Modules(vec![adapter]));
    }
    text.split(',').map(parse_module).collect::<Result<_, _>>().map(Modules)
}

/// Parses `{"name": "sql", "path": "/adapters/sql"}`; vLLM's other keys (`base_model_name`) have no
/// effect.
fn of_json(text: &str) -> Result<Named, String> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let field = |name: &str| {
        let text = value[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        text.ok_or_else(|| {
            format!("{name} is missing: expected {{\"name\":\"sql\",\"path\":\"/adapters/sql\"}}")
        })
    };
    Ok((field("name")?, field("path")?))
}

/// Parses `NAME=DIR`.
fn parse_module(text: &str) -> Result<Named, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok((name.to_owned(), path.to_owned()))
        }
        _ => Err("expected NAME=DIR, such as sql=/adapters/sql".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_name_and_a_folder() {
        let named = |name: &str, path: &str| (name.to_owned(), path.to_owned());
        assert_eq!(parse_module("org/sql=/a=b").unwrap(), named("org/sql", "/a=b"));
        let both = parse_modules("a=/a,b=/b").unwrap().0;
        assert_eq!((both.len(), &both[1]), (2, &named("b", "/b")));
        let json = r#"{"name": "sql", "path": "/a,b", "base_model_name": "x"}"#;
        assert_eq!(parse_modules(json).unwrap().0, [named("sql", "/a,b")]);
        assert!(parse_modules(r#"{"name": "sql"}"#).unwrap_err().contains("path is missing"));
        for text in ["sql", "=/a", "sql="] {
            assert!(parse_module(text).unwrap_err().contains("NAME=DIR"), "{text}");
        }
    }
}
