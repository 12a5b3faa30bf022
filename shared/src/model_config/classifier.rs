//! PURE: models that sort texts into classes: a decoder whose last token's vector goes through a
//! matrix with one row for each class.
use serde_json::Value;

/// Ending of their architectures' names, and of those of the models that they are made from.
const CLASSIFIES: &str = "ForSequenceClassification";
const GENERATES: &str = "ForCausalLM";
/// Those whose names differ in more than the ending.
const OTHERS: [[&str; 2]; 2] = [["Gemma3Text", "Gemma3"], ["Qwen3_5Text", "Qwen3_5"]];
/// Most classes of a model.
pub const CLASSES_MAX: usize = 4096;
/// Where sentence-transformers names the function that makes scores of numbers.
const FUNCTIONS: [&str; 2] =
    ["/sentence_transformers/activation_fn", "/sbert_ce_default_activation_function"];

/// How a model sorts texts into classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classifier {
    /// The name of each class.
    pub names: Vec<String>,
    /// Where its matrix comes from.
    pub head: ClassHeadSource,
    /// What makes probabilities of its numbers.
    pub activation: Activation,
    /// Whether a pair of texts is joined by what the tokenizer puts between them; otherwise the
    /// second text follows the first.
    pub separates: bool,
}

/// Where the matrix of classes comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClassHeadSource {
    /// The files have it.
    Own,
    /// Its rows are those of the output head for these tokens.
    Tokens(Vec<String>),
    /// Its only row is that of the output head for the second of these tokens, less that for the
    /// first: the sigmoid of the result is the second one's share of both probabilities.
    Contrast([String; 2]),
}

/// What makes probabilities of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing: they stay.
    Identity,
    /// Each class has a probability of its own.
    Sigmoid,
    /// The probabilities add up to 1.
    Softmax,
}

impl Activation {
    /// Turns numbers into probabilities.
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Sigmoid => values.iter_mut().for_each(|value| *value = sigmoid(*value)),
            Self::Softmax => softmax(values),
        }
    }
}

fn sigmoid(value: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(value)).exp())) as f32
}

fn softmax(values: &mut [f32]) {
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |value: f32| f64::from(value - most).exp();
    let sum: f64 = values.iter().map(|value| power(*value)).sum();
    values.iter_mut().for_each(|value| *value = (power(*value) / sum) as f32);
}

/// Returns how the model of a `config.json` sorts texts into classes, if it does: its architecture
/// says so, or the key `classifier_from_token`.
///
/// # Errors
/// One sentence naming the key, its value's problem and the bound.
pub fn classifier(config: &Value) -> Result<Option<Classifier>, String> {
    let tokens = &config["classifier_from_token"];
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    if !architecture.ends_with(CLASSIFIES) && tokens.is_null() {
        return Ok(None);
    }
    let head = if tokens.is_null() { ClassHeadSource::Own } else { of_tokens(config, tokens)? };
    let names = match &head {
        ClassHeadSource::Own => names(config)?,
        ClassHeadSource::Tokens(tokens) => numbered(tokens.len()),
        ClassHeadSource::Contrast(_) => numbered(1),
    };
    let usual = if names.len() > 1 { Activation::Softmax } else { Activation::Sigmoid };
    let activation = match &config["problem_type"] {
        Value::Null => function(config)?.unwrap_or(usual),
        said => match said.as_str() {
            Some("") => function(config)?.unwrap_or(usual),
            Some("single_label_classification") => usual,
            Some("multi_label_classification") => Activation::Sigmoid,
            Some("regression") => Activation::Identity,
            _ => {
                return Err(format!(
                    "problem_type is {said}, it must be \"regression\", \
                     \"single_label_classification\" or \"multi_label_classification\""
                ));
            }
        },
    };
    let separates = ["use_sep_token", "use_pad_token"].iter().find_map(|key| config[key].as_bool());
    let separates = separates.unwrap_or(head == ClassHeadSource::Own);
    Ok(Some(Classifier { names, head, activation, separates }))
}

/// Names the architecture as if the model generated text: it is the same decoder.
pub(super) fn as_decoder(mut config: Value) -> Value {
    let name = config["architectures"][0].as_str().and_then(|it| it.strip_suffix(CLASSIFIES));
    // In a multimodal model the decoder has another name.
    if let Some(name) = name.filter(|_| config["text_config"].is_null()) {
        let other = OTHERS.iter().find(|[classifies, _]| *classifies == name);
        let name = other.map_or(name, |[_, generates]| generates);
        config["architectures"] = serde_json::json!([format!("{name}{GENERATES}")]);
    }
    config
}

/// The function that sentence-transformers names, if it does: what it says counts only where
/// `problem_type` says nothing, as in vLLM.
fn function(config: &Value) -> Result<Option<Activation>, String> {
    let named = FUNCTIONS.iter().find_map(|key| Some((key, config.pointer(key)?.as_str()?)));
    match named {
        None => Ok(None),
        Some((_, name)) if name.ends_with(".Identity") => Ok(Some(Activation::Identity)),
        Some((_, name)) if name.ends_with(".Sigmoid") => Ok(Some(Activation::Sigmoid)),
        Some((key, name)) => {
            let key = key.trim_start_matches('/').replace('/', ".");
            Err(format!("{key} is \"{name}\", supported are torch's Identity and Sigmoid"))
        }
    }
}

fn of_tokens(config: &Value, said: &Value) -> Result<ClassHeadSource, String> {
    let list = said.as_array().filter(|list| (1..=CLASSES_MAX).contains(&list.len()));
    let tokens: Option<Vec<String>> =
        list.and_then(|list| list.iter().map(|token| token.as_str().map(str::to_owned)).collect());
    let tokens = tokens.ok_or_else(|| {
        format!("classifier_from_token is {said}, it must be a list of 1 to {CLASSES_MAX} tokens")
    })?;
    let is_original = config["is_original_qwen3_reranker"] == true;
    match (config["method"].as_str(), is_original) {
        (Some("no_post_processing"), false) => Ok(ClassHeadSource::Tokens(tokens)),
        (Some("from_2_way_softmax"), _) | (None, true) => {
            let count = tokens.len();
            let pair = <[String; 2]>::try_from(tokens).map_err(|_| {
                format!("classifier_from_token has {count} tokens, it must have 2: no and yes")
            })?;
            Ok(ClassHeadSource::Contrast(pair))
        }
        _ => Err(format!(
            "classifier_from_token needs is_original_qwen3_reranker: true, or method \
             \"from_2_way_softmax\" or \"no_post_processing\"; method is {}",
            config["method"]
        )),
    }
}

/// The classes' names: of `id2label`, or as many as `num_labels`, by default 2, as in transformers.
fn names(config: &Value) -> Result<Vec<String>, String> {
    let named = config["id2label"].as_object().filter(|named| !named.is_empty());
    let (what, count) = match (named, &config["num_labels"]) {
        (Some(named), _) => ("the number of entries of id2label", Some(named.len())),
        (None, Value::Null) => ("num_labels", Some(2)),
        (None, said) => ("num_labels", said.as_u64().and_then(|n| usize::try_from(n).ok())),
    };
    let count = count.filter(|count| (1..=CLASSES_MAX).contains(count));
    let count = count.ok_or_else(|| format!("{what} must be 1 to {CLASSES_MAX}"))?;
    let mut names = numbered(count);
    for (index, name) in names.iter_mut().enumerate() {
        if let Some(said) = named.and_then(|named| named.get(&index.to_string())?.as_str()) {
            said.clone_into(name);
        }
    }
    Ok(names)
}

/// The names that classes have in transformers if nobody names them.
fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("LABEL_{index}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(more: Value) -> Result<Classifier, String> {
        let mut config = json!({"architectures": ["Qwen3ForSequenceClassification"]});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        classifier(&config).map(Option::unwrap)
    }

    #[test]
    fn classes_have_the_names_of_the_file_or_numbers() {
        assert_eq!(classifier(&json!({"architectures": ["Qwen3ForCausalLM"]})), Ok(None));
        assert_eq!(found(json!({})).unwrap().names, ["LABEL_0", "LABEL_1"]);
        assert_eq!(found(json!({"num_labels": 1})).unwrap().names, ["LABEL_0"]);
        let named = json!({"num_labels": 7, "id2label": {"1": "bad", "0": "good", "2": 5}});
        assert_eq!(found(named).unwrap().names, ["good", "bad", "LABEL_2"]);
        for (wrong, says) in [
            (json!({"num_labels": 0}), "num_labels must be 1 to 4096"),
            (json!({"num_labels": 4097}), "num_labels must be 1 to 4096"),
            (json!({"num_labels": "3"}), "num_labels must be 1 to 4096"),
            (json!({"problem_type": "ranking"}), "problem_type is \"ranking\""),
            (
                json!({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}),
                "sbert_ce_default_activation_function is",
            ),
        ] {
            let error = found(wrong).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn probabilities_are_made_as_the_file_says() {
        let of = |more: Value| {
            let found = found(more).unwrap();
            (found.activation, found.separates)
        };
        use Activation::{Identity, Sigmoid, Softmax};
        assert_eq!(of(json!({})), (Softmax, true));
        assert_eq!(of(json!({"num_labels": 1})), (Sigmoid, true));
        assert_eq!(of(json!({"problem_type": "regression"})), (Identity, true));
        let several = json!({"problem_type": "multi_label_classification", "use_pad_token": false});
        assert_eq!(of(several), (Sigmoid, false));
        let identity = "torch.nn.modules.linear.Identity";
        let newer = json!({"num_labels": 1, "sentence_transformers": {"activation_fn": identity}});
        assert_eq!(of(newer), (Identity, true));
        let older = json!({"num_labels": 1, "problem_type": null,
            "sbert_ce_default_activation_function": identity});
        assert_eq!(of(older), (Identity, true));
        // Where both are there, `problem_type` counts.
        let regression = json!({"num_labels": 1, "problem_type": "regression",
            "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"});
        assert_eq!(of(regression), (Identity, true));
        let single = json!({"num_labels": 1, "problem_type": "single_label_classification",
            "sbert_ce_default_activation_function": identity});
        assert_eq!(of(single), (Sigmoid, true));
    }

    #[test]
    fn rows_of_the_output_head_can_stand_for_classes() {
        let tokens = |tokens: Value, key: &str, value: Value| {
            found(json!({"classifier_from_token": tokens, key: value}))
        };
        let (flag, pair) = ("is_original_qwen3_reranker", json!(["no", "yes"]));
        let reranker = tokens(pair.clone(), flag, json!(true)).unwrap();
        assert_eq!(reranker.head, ClassHeadSource::Contrast(["no".into(), "yes".into()]));
        assert_eq!((reranker.names.len(), reranker.separates), (1, false));
        assert_eq!(reranker.activation, Activation::Sigmoid);
        assert_eq!(tokens(pair.clone(), "method", json!("from_2_way_softmax")), Ok(reranker));
        let one = tokens(json!(["Yes"]), "method", json!("no_post_processing")).unwrap();
        assert_eq!(one.head, ClassHeadSource::Tokens(vec!["Yes".into()]));
        let causal = json!({"architectures": ["Qwen3ForCausalLM"], flag: true,
            "classifier_from_token": ["no", "yes"]});
        assert!(classifier(&causal).unwrap().is_some());
        for (wrong, says) in [
            (tokens(json!(["a"]), flag, json!(true)), "has 1 tokens"),
            (tokens(json!([5]), flag, json!(true)), "it must be a list"),
            (tokens(json!([]), flag, json!(true)), "it must be a list"),
            (tokens(pair, "method", json!("x")), "method is \"x\""),
        ] {
            let error = wrong.unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn numbers_become_probabilities() {
        let of = |activation: Activation, mut values: Vec<f32>| {
            activation.apply(&mut values);
            values
        };
        let close = |found: Vec<f32>, expected: &[f32]| {
            let all = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(all && found.len() == expected.len(), "{found:?} {expected:?}");
        };
        close(of(Activation::Identity, vec![3.0, -2.0]), &[3.0, -2.0]);
        // Logarithms whose powers are 1, 2 and 5 of 8.
        let logs = |shift: f32| [1.0f32, 2.0, 5.0].map(|value| value.ln() + shift).to_vec();
        close(of(Activation::Softmax, logs(0.0)), &[0.125, 0.25, 0.625]);
        close(of(Activation::Softmax, logs(88.0)), &[0.125, 0.25, 0.625]);
        close(of(Activation::Sigmoid, vec![0.0, 3f32.ln(), -3f32.ln()]), &[0.5, 0.75, 0.25]);
        close(of(Activation::Sigmoid, vec![-1e4, 1e4]), &[0.0, 1.0]);
    }

    #[test]
    fn the_decoder_is_that_of_the_generating_model() {
        let name =
            |name: &str| as_decoder(json!({"architectures": [name]}))["architectures"][0].clone();
        assert_eq!(name("LlamaForSequenceClassification"), "LlamaForCausalLM");
        assert_eq!(name("Gemma3TextForSequenceClassification"), "Gemma3ForCausalLM");
        assert_eq!(name("LlamaForCausalLM"), "LlamaForCausalLM");
        let outer = json!({"architectures": ["Gemma3ForSequenceClassification"],
            "text_config": {"hidden_size": 8}});
        assert_eq!(as_decoder(outer.clone()), outer);
    }
}
