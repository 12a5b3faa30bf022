//! A server's own description of its API (`/openapi.json`) as an oracle: nothing that answers reads
//! it.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test ends by panicking")]
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Map, Value, json};

use crate::client::{Client, Reply};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A server's document.
#[derive(Debug)]
pub struct Contract {
    /// As it was served.
    pub document: Value,
    /// Its components, with answers that have nothing but what they list.
    strict: Value,
    validators: Mutex<HashMap<String, Arc<Validator>>>,
}

struct Validator(Schemas, SchemaIndex);

impl std::fmt::Debug for Validator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Validator")
    }
}

impl Contract {
    /// Makes the contract of a server with this document.
    #[must_use]
    pub fn new(document: Value) -> Self {
        // An answer has nothing that the document does not list. The document itself does not say
        // so: clients must not break when more is added.
        let mut components = document["components"].clone();
        for (name, schema) in components["schemas"].as_object_mut().unwrap() {
            if !name.ends_with("Request") {
                close(schema);
            }
        }
        Self { document, strict: components, validators: Mutex::default() }
    }

    /// Asks a running server for its document.
    ///
    /// # Errors
    /// When there was no reply.
    pub async fn of(client: &Client) -> Result<Self, Error> {
        Ok(Self::new(client.get("/openapi.json").await?.body))
    }

    /// Says what is wrong with a value by a schema of the document.
    #[must_use]
    pub fn wrong(&self, schema: &Value, value: &Value) -> Option<String> {
        let compile = || {
            let whole = json!({"allOf": [schema], "components": self.strict});
            let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
            compiler.add_resource("http://contract/", whole).unwrap();
            let place = compiler.compile("http://contract/", &mut schemas).unwrap();
            Arc::new(Validator(schemas, place))
        };
        let mut validators = self.validators.lock().unwrap();
        let validator = validators.entry(schema.to_string()).or_insert_with(compile).clone();
        drop(validators);
        let Validator(schemas, place) = &*validator;
        schemas.validate(value, *place).err().map(|error| error.to_string())
    }

    /// What a path does with a method, in lower case.
    #[must_use]
    pub fn operation(&self, method: &str, path: &str) -> Option<&Value> {
        let path = path.split('?').next().unwrap();
        let named = if path.starts_with("/v1/models/") { "/v1/models/{id}" } else { path };
        self.document["paths"].get(named)?.get(method)
    }

    /// Checks an answer, and the request if it was accepted.
    pub fn check(&self, method: &str, path: &str, asked: Option<&Value>, reply: &Reply) {
        let (status, answer) = (reply.status, &reply.body);
        let Some(operation) = self.operation(method, path) else {
            // What is not served, or not with this method, is not described.
            assert!(
                [401, 404, 405].contains(&status),
                "{method} {path} answers {status}: {answer}"
            );
            return;
        };
        let response = &operation["responses"][status.to_string()];
        assert!(!response.is_null(), "{method} {path} answers {status}: {answer}");
        let schema = &response["content"]["application/json"]["schema"];
        if !schema.is_null() {
            let wrong = self.wrong(schema, answer);
            assert_eq!(wrong, None, "{method} {path}, {status}: {answer}");
        }
        if let Some(asked) = asked.filter(|_| status == 200) {
            self.check_accepted(operation, path, asked);
        }
    }

    /// A request that was accepted is one by the document.
    pub fn check_accepted(&self, operation: &Value, path: &str, asked: &Value) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let Some(wrong) = self.wrong(schema, asked) else { return };
        // Numbers may be written as strings, which the document leaves out.
        let numbers: Map<String, Value> = asked
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| {
                let number = value.as_str().and_then(|text| serde_json::from_str(text).ok());
                (name.clone(), number.filter(Value::is_number).unwrap_or_else(|| value.clone()))
            })
            .collect();
        let again = self.wrong(schema, &Value::Object(numbers));
        assert_eq!(again, None, "{path} accepts {asked}, but by the document {wrong}");
    }
}

/// Lets objects have only the properties that they list.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.contains_key("properties") {
                map.insert("additionalProperties".to_owned(), false.into());
            }
            map.values_mut().for_each(close);
        }
        Value::Array(list) => list.iter_mut().for_each(close),
        _ => {}
    }
}
