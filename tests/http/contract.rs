//! Every answer of every test is what `/openapi.json` says, and so is every request that was
//! accepted: the document is an oracle of its own, which nothing that answers reads.
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Map, Value, json};
use testkit::client::{Client, Reply, Streamed};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A server's document.
pub(crate) struct Contract {
    pub(crate) document: Value,
    strict: Value,
    validators: Mutex<HashMap<String, Arc<(Schemas, SchemaIndex)>>>,
}

/// A client whose requests and answers are held against the document.
#[derive(Clone)]
pub(crate) struct Checked {
    client: Client,
    contract: Arc<Contract>,
}

impl Contract {
    pub(crate) fn new(document: Value) -> Self {
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

    /// Says what is wrong with a value by a schema of the document.
    pub(crate) fn wrong(&self, schema: &Value, value: &Value) -> Option<String> {
        let compile = || {
            let whole = json!({"allOf": [schema], "components": self.strict});
            let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
            compiler.add_resource("http://contract/", whole).unwrap();
            let place = compiler.compile("http://contract/", &mut schemas).unwrap();
            Arc::new((schemas, place))
        };
        let mut validators = self.validators.lock().unwrap();
        let validator = validators.entry(schema.to_string()).or_insert_with(compile).clone();
        drop(validators);
        let (schemas, place) = &*validator;
        schemas.validate(value, *place).err().map(|error| error.to_string())
    }

    fn operation(&self, method: &str, path: &str) -> Option<&Value> {
        let path = path.split('?').next().unwrap();
        let named = if path.starts_with("/v1/models/") { "/v1/models/{id}" } else { path };
        self.document["paths"].get(named)?.get(method)
    }

    fn check(&self, method: &str, path: &str, asked: Option<&Value>, reply: &Reply) {
        // What is not served, or not with this method, is not described.
        let Some(operation) = self.operation(method, path) else { return };
        let (status, answer) = (reply.status, &reply.body);
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
    fn check_accepted(&self, operation: &Value, path: &str, asked: &Value) {
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

impl Deref for Checked {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Checked {
    pub(crate) fn new(client: Client, document: Value) -> Self {
        Self { client, contract: Arc::new(Contract::new(document)) }
    }

    pub(crate) fn contract(&self) -> &Contract {
        &self.contract
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Reply, Error> {
        let reply = self.client.get(path).await?;
        self.contract.check("get", path, None, &reply);
        Ok(reply)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Reply, Error> {
        let reply = self.client.post(path, body).await?;
        self.contract.check("post", path, Some(body), &reply);
        Ok(reply)
    }

    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Result<Streamed, Error> {
        let streamed = self.client.stream(path, body).await?;
        let operation = self.contract.operation("post", path).unwrap();
        let schema =
            &operation["responses"]["200"]["content"]["text/event-stream"]["x-event-schema"];
        for event in &streamed.events {
            let wrong = self.contract.wrong(schema, event);
            assert_eq!(wrong, None, "an event of {path}: {event}");
        }
        self.contract.check_accepted(operation, path, body);
        Ok(streamed)
    }
}
