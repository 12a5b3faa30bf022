//! Every answer of every test is what `/openapi.json` says, and so is every request that was
//! accepted.
use std::ops::Deref;
use std::sync::Arc;

use serde_json::Value;
use testkit::client::{Client, Reply, Streamed};
use testkit::contract::Contract;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A client whose requests and answers are held against the document.
#[derive(Clone)]
pub(crate) struct Checked {
    client: Client,
    contract: Arc<Contract>,
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
