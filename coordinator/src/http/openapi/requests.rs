//! PURE: the bodies of requests. Bounds are those that the readers of fields have.
use std::collections::BTreeSet;

use serde_json::{Value, json};
use shared::protocol::guide::{
    GRAMMAR_BYTES_MAX, GUIDE_ITEMS_MAX, MADE_BYTES_MAX, REGEX_BYTES_MAX, SCHEMA_BYTES_MAX,
};
use shared::protocol::lora::{ADAPTER_NAME_MAX, ADAPTER_PATH_MAX};

use super::super::embeddings::hidden_size_of;
use super::super::limits::{EFFORT_BYTES, Limits, MODEL_BYTES, PATTERN_BYTES, SALT_BYTES, ranges};
use super::super::pooling::task_of;
use super::super::refused::{self, Endpoint};
use super::super::{messages, responses, scores};
use super::parts::{
    function, input_item, message, messages_tool, messages_tool_choice, response_format,
    response_tool, response_tool_choice, structural_tag, text_block, text_format, thinking,
    tool_choice, turn,
};
use super::schema::{
    Properties, any_list, any_object, any_of, boolean, bytes, given, integer, list, nothing,
    number, only, properties, string, told, words,
};
use crate::text::model::TextModel;

/// What the bodies depend on.
#[derive(Debug)]
pub(super) struct Requests<'a> {
    pub(super) limits: &'a Limits,
    pub(super) text: &'a TextModel,
    /// The names that `model` may have.
    pub(super) models: Vec<String>,
    /// Whether a token ends reasoning.
    pub(super) budgets: bool,
    /// Whether the template reads `documents`.
    pub(super) documents: bool,
    /// Whether `reasoning_effort` must be one of harmony's words.
    pub(super) efforts: Option<&'static [&'static str]>,
}

const NO_EFFECT: &str = "No effect.";
const IDS: &str = "Token ids.";

/// Those of completions and chat that are not even read.
const UNREAD: [&str; 8] = [
    "metadata",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "session_id",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
];

/// Fields that are not even read, so that they may have any value.
fn unread(names: &[&str]) -> Properties {
    names.iter().map(|name| ((*name).to_owned(), json!({"description": NO_EFFECT}))).collect()
}

/// What an endpoint refuses, unless it asks for nothing.
fn refused(endpoint: Endpoint) -> Properties {
    let told_so = |(name, schema): (&str, Value)| {
        (name.to_owned(), told(schema, "Not supported: only values that ask for nothing."))
    };
    refused::schemas(endpoint).map(told_so).collect()
}

/// Fields that are said otherwise here.
fn moved(names: &[(&str, &str)]) -> Properties {
    let moved = |(name, now): &(&str, &str)| {
        ((*name).to_owned(), told(nothing(), &format!("Not supported: use `{now}`.")))
    };
    names.iter().map(moved).collect()
}

fn joined<const N: usize>(parts: [Properties; N]) -> Properties {
    parts.into_iter().flatten().collect()
}

impl Requests<'_> {
    fn id(&self) -> Value {
        integer(0, i64::from(self.text.vocab_size) - 1)
    }

    fn ids(&self) -> Value {
        told(any_list(self.id()), IDS)
    }

    fn request_id(&self) -> Value {
        let max = self.limits.request_id_bytes;
        json!({"type": "string", "pattern": format!("^[A-Za-z0-9_.:/+=@~-]{{1,{max}}}$")})
    }

    fn model(&self) -> Value {
        let names = self.models.iter().map(String::as_str);
        let names: Vec<&str> = names.chain([""]).collect();
        let mut schema = words(&names);
        schema["maxLength"] = MODEL_BYTES.into();
        told(schema, "The model, or an adapter. Absent or empty: the model.")
    }

    fn effort(&self) -> Value {
        match self.efforts {
            Some(efforts) => words(efforts),
            None => bytes(0, EFFORT_BYTES),
        }
    }

    fn stops(&self) -> Value {
        let one = bytes(1, self.limits.stop_bytes);
        any_of([one.clone(), list(one, 0, self.limits.stops)])
    }

    /// Constraints on the output, one at a time.
    fn structured(&self) -> Properties {
        let schema = any_of([any_object(), bytes(0, SCHEMA_BYTES_MAX)]);
        let choice = list(string(), 1, GUIDE_ITEMS_MAX);
        let regex = bytes(0, REGEX_BYTES_MAX);
        let grammar = bytes(0, GRAMMAR_BYTES_MAX);
        let tag = any_of([structural_tag(&[]), bytes(0, MADE_BYTES_MAX)]);
        let structured = given(
            &[],
            properties(json!({
                "json": schema, "json_object": boolean(), "regex": regex, "choice": choice,
                "grammar": grammar, "structural_tag": tag, "disable_any_whitespace": boolean(),
                "whitespace_pattern": regex, "disable_fallback": boolean(),
                "disable_additional_properties": boolean(),
            })),
        );
        let mut structured = told(
            structured,
            "Exactly one of json, json_object, regex, choice, grammar, structural_tag.",
        );
        structured["additionalProperties"] = nothing();
        properties(json!({
            "response_format": response_format(),
            "structured_outputs": structured,
            "guided_json": schema,
            "guided_regex": regex,
            "guided_choice": choice,
            "guided_grammar": grammar,
            "guided_whitespace_pattern": bytes(0, PATTERN_BYTES),
            "structural_tag": tag,
            "allowed_token_ids": told(list(self.id(), 1, GUIDE_ITEMS_MAX), IDS),
        }))
    }

    /// Fields of all endpoints that reach the engine.
    fn common(&self) -> Properties {
        let limits = self.limits;
        let (low, high) = ranges::TOP_P;
        let bias = json!({
            "type": "object", "maxProperties": limits.logit_bias,
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": number(ranges::LOGIT_BIAS),
        });
        let usage = json!({"include_usage": boolean(), "continuous_usage_stats": boolean()});
        let priority = match limits.priorities {
            true => integer(i32::MIN, i32::MAX),
            false => json!({"type": "integer", "enum": [0]}),
        };
        let kept = integer(1, limits.max_model_len);
        let mut own = properties(json!({
            "model": self.model(),
            "user": told(bytes(0, limits.user_bytes), NO_EFFECT),
            "n": integer(1, limits.n),
            "best_of": told(integer(1, limits.n), "The same as `n`."),
            "stream": boolean(),
            "stream_options": told(given(&[], properties(usage)), "Only with `stream`."),
            "ignore_eos": boolean(),
            "stop": self.stops(),
            "stop_token_ids": list(self.id(), 0, limits.stop_token_ids),
            "min_tokens": self.output(0),
            "temperature": number(ranges::TEMPERATURE),
            "top_p": {"type": "number", "exclusiveMinimum": low, "maximum": high},
            "top_k": integer(ranges::TOP_K.0, ranges::TOP_K.1),
            "min_p": number(ranges::MIN_P),
            "presence_penalty": number(ranges::PENALTY),
            "frequency_penalty": number(ranges::PENALTY),
            "repetition_penalty": number(ranges::REPETITION_PENALTY),
            "logit_bias": bias,
            "seed": integer(i64::MIN, i64::MAX),
            "priority": priority,
            "cache_salt": bytes(1, SALT_BYTES),
            "include_stop_str_in_output": boolean(),
            "skip_special_tokens": boolean(),
            "add_special_tokens": boolean(),
            "truncate_prompt_tokens": any_of([json!({"type": "integer", "enum": [-1]}), kept]),
            "request_id": self.request_id(),
        }));
        own.extend(self.structured());
        own
    }

    /// See [`crate::http::thinking`].
    fn thinking_budget(&self) -> Value {
        match self.budgets {
            true => told(integer(-1_i64, u32::MAX), "Tokens of reasoning; -1: any number."),
            false => json!({"type": "integer", "enum": [-1]}),
        }
    }

    /// What completions and chat may tell of tokens, and which must not come.
    fn of_tokens(&self) -> Properties {
        let prompt = integer(0, self.limits.logprobs);
        properties(json!({
            "bad_words": list(bytes(1, self.limits.stop_bytes), 0, self.limits.bad_words),
            "return_token_ids": boolean(),
            "return_tokens_as_token_ids": boolean(),
            "prompt_logprobs": told(prompt, "Only without `stream`."),
        }))
    }

    /// The tokens that a choice may have.
    fn output(&self, least: u32) -> Value {
        integer(least, self.limits.max_output())
    }

    pub(super) fn completions(&self) -> Value {
        let own = json!({
            "prompt": self.inputs(self.limits.prompts),
            "echo": boolean(),
            "logprobs": integer(0, self.limits.logprobs),
            "max_tokens": told(self.output(0), "Absent: 16. 0 only with `echo`."),
            "thinking_token_budget": self.thinking_budget(),
        });
        let unread = unread(&UNREAD);
        given(
            &["prompt"],
            joined([
                self.common(),
                self.of_tokens(),
                properties(own),
                refused(Endpoint::Completions),
                unread,
            ]),
        )
    }

    /// A text or tokens, or several.
    fn inputs(&self, max: usize) -> Value {
        let text = string();
        let tokens = json!({"type": "array", "items": self.id(), "minItems": 1});
        any_of([text.clone(), told(tokens.clone(), IDS), list(any_of([text, tokens]), 1, max)])
    }

    pub(super) fn chat(&self) -> Value {
        given(
            &["messages"],
            joined([
                self.common(),
                self.of_tokens(),
                self.conversation(),
                self.of_chat(),
                refused(Endpoint::Chat),
            ]),
        )
    }

    fn of_chat(&self) -> Properties {
        let mut own = properties(json!({
            "logprobs": boolean(),
            "top_logprobs": told(integer(0, self.limits.top_logprobs), "Only with `logprobs`."),
            "max_tokens": told(self.output(1), "Absent: what the model's length leaves."),
            "max_completion_tokens": told(self.output(1), "Goes before `max_tokens`."),
            "parallel_tool_calls": boolean(),
            "tool_choice": tool_choice(),
            "include_reasoning": boolean(),
            "thinking_token_budget": self.thinking_budget(),
        }));
        own.extend(unread(&UNREAD));
        own
    }

    /// What the template is given.
    fn conversation(&self) -> Properties {
        let documents = match self.documents {
            true => list(any_object(), 0, self.limits.messages),
            false => list(any_object(), 0, 0),
        };
        let mut function_of = function("parameters");
        function_of.retain(|name, _| name != "description" && name != "strict");
        let function = given(&["name"], function_of);
        let tool = given(
            &["function"],
            properties(json!({"type": only("function"), "function": function})),
        );
        properties(json!({
            "messages": list(message(), 1, self.limits.messages),
            "tools": list(tool, 0, self.limits.tools),
            "documents": documents,
            "add_generation_prompt": boolean(),
            "continue_final_message": told(boolean(), "Needs `add_generation_prompt`: false."),
            "chat_template_kwargs": any_object(),
            "reasoning_effort": self.effort(),
        }))
    }

    /// Everything that chat has, by name.
    fn of_chat_named(&self, names: &[&str]) -> Properties {
        let mut all = joined([self.common(), self.conversation(), self.of_chat()]);
        all.retain(|name, _| names.contains(&name.as_str()));
        all
    }

    pub(super) fn responses(&self) -> Value {
        let limits = self.limits;
        let (entries, key, value) = responses::METADATA;
        let ignored = || told(bytes(0, limits.user_bytes), NO_EFFECT);
        let obfuscation = json!({"include_obfuscation": only(false)});
        let own = json!({
            "input": any_of([string(), list(input_item(), 1, limits.messages)]),
            "instructions": string(),
            "max_output_tokens": integer(1, u32::MAX),
            "max_tool_calls": told(integer(1, u32::MAX), NO_EFFECT),
            "metadata": {
                "type": "object", "maxProperties": entries, "propertyNames": {"maxLength": key},
                "additionalProperties": {"type": "string", "maxLength": value},
            },
            "include": any_list(words(responses::INCLUDE)),
            "top_logprobs": integer(0, limits.top_logprobs),
            "truncation": words(&["auto", "disabled"]),
            "text": given(&[], properties(json!({
                "format": text_format(), "verbosity": words(&refused::VERBOSITIES),
            }))),
            "reasoning": given(&[], properties(json!({
                "effort": self.effort(), "summary": bytes(0, EFFORT_BYTES),
            }))),
            "tools": list(response_tool(), 0, limits.tools),
            "tool_choice": response_tool_choice(),
            "prompt_cache_key": ignored(),
            "prompt_cache_retention": ignored(),
            "safety_identifier": ignored(),
            "store": told(boolean(), NO_EFFECT),
            "stream_options": told(given(&[], properties(obfuscation)), "Only with `stream`."),
        });
        given(
            &["input"],
            joined([
                self.of_chat_named(responses::SAME),
                refused(Endpoint::Responses),
                moved(responses::MOVED),
                properties(own),
            ]),
        )
    }

    pub(super) fn messages(&self) -> Value {
        given(&["messages", "max_tokens"], self.of_messages())
    }

    fn of_messages(&self) -> Properties {
        let limits = self.limits;
        let text = text_block();
        let ignored = || told(bytes(0, limits.user_bytes), NO_EFFECT);
        let edits = any_list(given(
            &["type"],
            properties(json!({"type": {"type": "string", "pattern": "^clear_thinking_"}})),
        ));
        let format = given(
            &["type", "schema"],
            properties(json!({"type": only("json_schema"), "schema": any_object()})),
        );
        let efforts = words(&["low", "medium", "high", "xhigh", "max"]);
        let own = json!({
            "messages": list(turn(), 1, limits.messages),
            "system": any_of([string(), any_list(text)]),
            "max_tokens": integer(1, u32::MAX),
            "stop_sequences": self.stops(),
            "service_tier": ignored(),
            "inference_geo": ignored(),
            "metadata": told(any_object(), NO_EFFECT),
            "cache_control": told(any_object(), NO_EFFECT),
            "diagnostics": told(any_object(), NO_EFFECT),
            "context_management": given(&[], properties(json!({"edits": edits}))),
            "output_config": given(&[], properties(json!({"effort": efforts, "format": format}))),
            "output_format": format,
            "tools": list(messages_tool(), 0, limits.tools),
            "tool_choice": messages_tool_choice(),
            "thinking": thinking(),
        });
        joined([
            self.of_chat_named(messages::SAME),
            refused(Endpoint::Messages),
            moved(messages::MOVED),
            properties(own),
        ])
    }

    /// Like `/v1/messages`; what would only concern the answer is not read.
    pub(super) fn count_tokens(&self) -> Value {
        let read = ["model", "chat_template_kwargs", "add_special_tokens", "documents"];
        let unread_here: Vec<&str> = messages::SAME
            .iter()
            .copied()
            .filter(|name| !read.contains(name))
            .chain(["stop_sequences"])
            .collect();
        given(&["messages"], joined([self.of_messages(), unread(&unread_here)]))
    }

    pub(super) fn embeddings(&self) -> Value {
        let own = json!({
            "input": self.inputs(self.limits.inputs),
            "encoding_format": words(&["float", "base64"]),
            "dimensions": integer(1, hidden_size_of(self.text)),
        });
        given(&["input"], joined([self.common(), properties(own), refused(Endpoint::Embeddings)]))
    }

    pub(super) fn classify(&self) -> Value {
        let own = json!({
            "input": self.inputs(self.limits.inputs), "use_activation": activation(),
        });
        given(&["input"], joined([self.common(), properties(own), refused(Endpoint::Classify)]))
    }

    pub(super) fn pooling(&self) -> Value {
        let own = json!({
            "input": self.inputs(self.limits.inputs),
            "encoding_format": words(&["float", "base64"]),
            "dimensions": match self.text.classifier {
                Some(_) => nothing(),
                None => integer(1, hidden_size_of(self.text)),
            },
            "task": words(&[task_of(self.text)]),
            "use_activation": activation(),
        });
        given(&["input"], joined([self.common(), properties(own), refused(Endpoint::Pooling)]))
    }

    /// Texts that are compared.
    fn compared(&self) -> Value {
        let text = string();
        let one = any_of([text.clone(), given(&["text"], properties(json!({"text": text})))]);
        any_of([one.clone(), list(one, 1, self.limits.inputs)])
    }

    /// What rerank and score have in common.
    fn comparison(&self) -> Properties {
        let most = || told(integer(0, u32::MAX), "The others are left out. 0: all.");
        let activation = match self.text.classifier {
            Some(_) => activation(),
            None => json!({"anyOf": [{"type": "null"}, {"const": true}]}),
        };
        let own = json!({
            "max_tokens_per_query": most(), "max_tokens_per_doc": most(),
            "use_activation": activation,
        });
        joined([self.common(), properties(own)])
    }

    pub(super) fn rerank(&self) -> Value {
        let text = string();
        let own = json!({
            "query": any_of([text.clone(), given(&["text"], properties(json!({"text": text})))]),
            "documents": self.compared(),
            "top_n": told(integer(scores::TOP_N, u32::MAX), "The closest ones. 0 or less: all."),
            "return_documents": told(boolean(), "Absent: true."),
        });
        given(
            &["query", "documents"],
            joined([self.comparison(), properties(own), refused(Endpoint::Rerank)]),
        )
    }

    /// One pair of texts for each way to name them: a body has one of these forms.
    pub(super) fn scores(&self) -> [Value; 4] {
        let names: BTreeSet<&str> = scores::PAIRS.into_iter().flat_map(<[_; 2]>::from).collect();
        scores::PAIRS.map(|(left, right)| {
            let of = |name: &&str| match [left, right].contains(name) {
                true => ((*name).to_owned(), self.compared()),
                false => ((*name).to_owned(), nothing()),
            };
            let own = names.iter().map(of).collect();
            given(&[left, right], joined([self.comparison(), own, refused(Endpoint::Score)]))
        })
    }

    /// What is tokenized without a template.
    pub(super) fn tokenize_prompt(&self) -> Value {
        let own = json!({"prompt": string(), "messages": nothing()});
        given(&["prompt"], joined([self.tokenizing(), properties(own)]))
    }

    /// What is tokenized with the template.
    pub(super) fn tokenize_chat(&self) -> Value {
        let own = json!({"prompt": nothing(), "chat_template": nothing()});
        given(&["messages"], joined([self.tokenizing(), self.conversation(), properties(own)]))
    }

    fn tokenizing(&self) -> Properties {
        properties(json!({
            "model": self.model(), "return_token_strs": boolean(),
            "add_special_tokens": boolean(),
        }))
    }

    pub(super) fn detokenize(&self) -> Value {
        let own = json!({"model": self.model(), "tokens": self.ids()});
        given(&["tokens"], properties(own))
    }
}

/// Whether numbers become probabilities.
fn activation() -> Value {
    told(boolean(), "Absent: true. False: the numbers as the model makes them.")
}

pub(super) fn load_adapter() -> Value {
    let own = json!({
        "lora_name": bytes(1, ADAPTER_NAME_MAX), "lora_path": bytes(1, ADAPTER_PATH_MAX),
        "load_inplace": boolean(),
    });
    given(&["lora_name", "lora_path"], properties(own))
}

pub(super) fn unload_adapter() -> Value {
    let own = json!({"lora_name": bytes(1, ADAPTER_NAME_MAX)});
    given(&["lora_name"], properties(own))
}
