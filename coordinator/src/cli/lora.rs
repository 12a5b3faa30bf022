//! The options of LoRA adapters, named as vLLM does.
use clap::Args;
use shared::protocol::Adapter;

/// Adapters beside the model.
#[derive(Args, Clone, Debug)]
pub(crate) struct LoraArgs {
    /// LoRA adapters to serve beside the model, in PEFT's format: clients name one as their `model`.
    /// The folders are at the same paths on every worker's host; several separated by spaces or commas
    #[arg(long, value_name = "NAME=DIR", num_args = 1.., value_delimiter = ',', value_parser = parse_module)]
    pub(crate) lora_modules: Vec<Adapter>,
    /// The greatest rank that an adapter may have
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) max_lora_rank: u32,
    /// As vLLM has it: needs --lora-modules, which says it already
    #[arg(long, hide = true)]
    pub(crate) enable_lora: bool,
}

/// Parses `NAME=DIR`.
fn parse_module(text: &str) -> Result<Adapter, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(Adapter { name: name.to_owned(), path: path.to_owned() })
        }
        _ => Err("expected NAME=DIR, such as sql=/adapters/sql".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_name_and_a_folder() {
        let adapter = parse_module("org/sql=/a=b").unwrap();
        assert_eq!((adapter.name.as_str(), adapter.path.as_str()), ("org/sql", "/a=b"));
        for text in ["sql", "=/a", "sql="] {
            assert!(parse_module(text).unwrap_err().contains("NAME=DIR"), "{text}");
        }
    }
}
