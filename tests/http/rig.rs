//! A real server on a free port, with a scripted engine behind it.
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coordinator::adapters::ServedAdapters;
use coordinator::engine::{
    EngineCommand, EngineError, EngineEvent, EngineHandle, EventSender, FinishReason,
    GenerateRequest,
};
use coordinator::http::metrics::MetricsPage;
use coordinator::http::models::Models;
use coordinator::http::openapi;
use coordinator::http::options::ApiOptions;
use coordinator::http::params::Limits;
use coordinator::http::server;
use coordinator::http::state::{AppState, Readiness};
use coordinator::metrics::Hub;
use coordinator::metrics::exposition::PageOptions;
use coordinator::text::model::{TextModel, TextOptions};
use coordinator::text::reply::{CallFormat, Reasoning, ThinkMarks};
use coordinator::text::template::ChatTemplate;
use serde_json::Value;
use shared::clock::SystemClock;
use shared::ids::Incarnation;
use shared::protocol::{Adapter, Serving, TokenLogprobs};
use testkit::client::Client;
use testkit::models::demo;
use tokio::sync::mpsc;

use crate::contract::Checked;

/// A text of a model that thinks, then calls two tools.
pub(crate) const THOUGHT: &str = "<think>\nHm, so.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \
    \"arguments\": {}}\n</tool_call><|end|>";

/// What the engine does with every request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    /// The generated text; each choice gets all of it, unless a limit cuts it.
    pub(crate) text: String,
    /// Refuse at once.
    pub(crate) refuse: Option<EngineError>,
    /// Refuse every third request after this many, as if the queue were full.
    pub(crate) full_behind: Option<usize>,
    /// Fail after this many tokens.
    pub(crate) fail_after: Option<usize>,
    /// Generate one token, then nothing more.
    pub(crate) hang: bool,
    /// Generate nothing for prompts that begin with this token.
    pub(crate) silent: Option<u32>,
}

/// What the engine saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) requests: Vec<GenerateRequest>,
    /// Event sender of each request.
    pub(crate) events: Vec<EventSender>,
    pub(crate) cancelled: usize,
    /// Number of requests, and number refused as if the queue were full.
    pub(crate) asked: (usize, usize),
}

/// The text side of the demo model, with the description of its tokenizer.
pub(crate) fn described() -> TextModel {
    let options = TextOptions { describes_tokenizer: true, ..TextOptions::default() };
    TextModel::load_with(&demo(), &options).unwrap()
}

/// A running server.
pub(crate) struct Rig {
    pub(crate) address: SocketAddr,
    pub(crate) client: Checked,
    pub(crate) text: Arc<TextModel>,
    pub(crate) seen: Arc<Mutex<Seen>>,
    script: Arc<Mutex<Script>>,
}

impl Rig {
    pub(crate) fn new(script: Script) -> Self {
        Self::of(script, TextModel::load(&demo()).unwrap())
    }

    /// A rig with this chat template.
    pub(crate) fn with_template(source: &str) -> Self {
        let mut text = TextModel::load(&demo()).unwrap();
        text.template = Some(ChatTemplate::new(source, String::new(), String::new()).unwrap());
        Self::of(Script { text: "x".to_owned(), ..Script::default() }, text)
    }

    /// A rig with an operator's options.
    pub(crate) fn with_api(api: &ApiOptions) -> Self {
        let script = Script { text: "a b c d e f g h".to_owned(), ..Script::default() };
        Self::chosen(script, TextModel::load(&demo()).unwrap(), api)
    }

    /// A rig whose model thinks and calls tools, and generates `text`.
    pub(crate) fn thinking(text: &str) -> Self {
        let options = ApiOptions {
            tool_calls: Some(CallFormat::Hermes),
            reasoning: Some(Reasoning::Marked(ThinkMarks::THINK)),
            ..ApiOptions::default()
        };
        let rig = Self::with_api(&options);
        rig.script(|script| script.text = text.to_owned());
        rig
    }

    /// A rig with priority scheduling.
    pub(crate) fn with_priorities() -> Self {
        let script = Script { text: "a b".to_owned(), ..Script::default() };
        Self::built(script, TextModel::load(&demo()).unwrap(), &ApiOptions::default(), true, &[])
    }

    /// A rig with these adapters beside the model.
    pub(crate) fn with_adapters(adapters: &[Adapter]) -> Self {
        let script = Script { text: "a b".to_owned(), ..Script::default() };
        let (text, api) = (TextModel::load(&demo()).unwrap(), ApiOptions::default());
        Self::built(script, text, &api, false, adapters)
    }

    /// A rig that serves this model.
    pub(crate) fn of(script: Script, text: TextModel) -> Self {
        Self::chosen(script, text, &ApiOptions::default())
    }

    /// A rig that serves this model, with an operator's options.
    pub(crate) fn chosen(script: Script, text: TextModel, api: &ApiOptions) -> Self {
        Self::built(script, text, api, false, &[])
    }

    /// A rig whose connections end when nothing was asked on them for so long.
    pub(crate) fn keeping(kept: Duration) -> Self {
        let (text, api) = (TextModel::load(&demo()).unwrap(), ApiOptions::default());
        Self::tuned(Script::default(), text, &api, false, &[], |mut state| {
            state.connections = state.connections.kept_for(kept);
            state
        })
    }

    fn built(
        script: Script,
        text: TextModel,
        api: &ApiOptions,
        priorities: bool,
        adapters: &[Adapter],
    ) -> Self {
        Self::tuned(script, text, api, priorities, adapters, |state| state)
    }

    fn tuned(
        script: Script,
        text: TextModel,
        api: &ApiOptions,
        priorities: bool,
        adapters: &[Adapter],
        tune: impl FnOnce(AppState) -> AppState,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let text = Arc::new(text);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let script = Arc::new(Mutex::new(script));
        let (engine, commands) = EngineHandle::channel();
        let hub = Arc::new(Hub::new(Incarnation(1), shared::metrics::Limits::default()));
        let stats = hub.frontend().clone();
        let page = MetricsPage::new(hub, Arc::new(SystemClock::start()), PageOptions::default());
        let serving = Serving {
            model: "/models/demo".to_owned(),
            served_model_name: "demo".to_owned(),
            model_aliases: vec!["org/demo".to_owned()],
            adapters: adapters.to_vec(),
            max_model_len: text.max_positions,
            text_fingerprint: text.fingerprint,
            priorities,
        };
        let state = AppState::new(
            text.clone(),
            engine,
            Limits::new(text.max_positions).with_priorities(priorities),
            Arc::new(SystemClock::start()),
            stats,
            Arc::new(|| Readiness { ready: true, message: "serving".to_owned() }),
            7,
        )
        .with_models(Models::of(&serving, ServedAdapters::of(adapters)))
        .with_api(api)
        .with_metrics(Arc::new(page));
        let state = tune(state);
        let document = openapi::document(&state);
        let (model, log, told) = (text.clone(), seen.clone(), script.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(run_engine(commands, model, log, told));
        });
        std::thread::spawn(move || {
            actix_web::rt::System::new().block_on(async move {
                server::start(listener, state, 1).unwrap().await.unwrap();
            });
        });
        let client = Client::new(&format!("http://{address}")).unwrap();
        let client = Checked::new(client, document);
        Self { address, client, text, seen, script }
    }

    /// A rig whose engine generates `text`.
    pub(crate) fn saying(text: &str) -> Self {
        Self::new(Script { text: text.to_owned(), ..Script::default() })
    }

    pub(crate) fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }

    /// The answer to a request that succeeds.
    pub(crate) async fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.client.post(path, body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.body
    }

    /// Waits until the engine has seen a cancellation.
    pub(crate) async fn cancelled(&self) -> bool {
        for _ in 0..6000 {
            if self.seen.lock().unwrap().cancelled > 0 {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }
}

async fn run_engine(
    mut commands: mpsc::Receiver<EngineCommand>,
    model: Arc<TextModel>,
    seen: Arc<Mutex<Seen>>,
    script: Arc<Mutex<Script>>,
) {
    while let Some(command) = commands.recv().await {
        match command {
            EngineCommand::Cancel { .. } => seen.lock().unwrap().cancelled += 1,
            EngineCommand::Submit { mut request, events } => {
                let script = script.lock().unwrap().clone();
                let full = {
                    let asked = &mut seen.lock().unwrap().asked;
                    asked.0 += 1;
                    let full = script
                        .full_behind
                        .is_some_and(|it| asked.0 > it && asked.0.is_multiple_of(3));
                    asked.1 += usize::from(full);
                    full.then_some(EngineError::QueueFull { queued: 1, max: 1, retry_after_s: 1 })
                };
                if let Some(error) = script.refuse.clone().or(full) {
                    let _ = events.send(EngineEvent::Failed(error));
                    continue;
                }
                {
                    // Under the lock: a test that has the answer also finds the request.
                    let mut seen = seen.lock().unwrap();
                    if script.silent.is_none() || request.prompt.first() != script.silent.as_ref() {
                        generate(&script, &model, &mut request, &events);
                    }
                    seen.requests.push(*request);
                    seen.events.push(events);
                }
            }
        }
    }
}

/// What the engine makes of a prompt of so many tokens with a model that has classes.
pub(crate) fn numbers(tokens: usize, classes: usize) -> Vec<f32> {
    (0..classes).map(|class| ((tokens + 3 * class) % 5) as f32 / 2.0 - 1.0).collect()
}

fn logprobs(token: u32) -> TokenLogprobs {
    TokenLogprobs { token, logprob: -0.5, rank: 1, top: vec![(token, -0.5), (33, -2.0)] }
}

/// Those of a prompt's token, which is not among the likely ones.
fn of_prompt(token: u32) -> TokenLogprobs {
    TokenLogprobs { rank: token + 2, top: vec![(33, -0.25), (34, -0.375)], ..logprobs(token) }
}

fn generate(
    script: &Script,
    model: &TextModel,
    request: &mut GenerateRequest,
    events: &EventSender,
) {
    let tokens = model.encode(&script.text, false).unwrap();
    if request.sampling[0].prompt_logprobs.is_some() {
        let prompt = request.prompt[1..].iter().map(|token| of_prompt(*token)).collect();
        let _ = events.send(EngineEvent::PromptLogprobs(prompt));
    }
    if request.sampling[0].pooling.is_some() {
        if script.fail_after.is_some() {
            let _ = events.send(EngineEvent::Failed(EngineError::Corrupted));
            return;
        }
        // An embedding that identifies its prompt.
        let first = request.prompt[0] as f32;
        let vector = match &model.classifier {
            Some(classifier) => numbers(request.prompt.len(), classifier.names.len()),
            None => vec![first, request.prompt.len() as f32, 0.0, -1.0],
        };
        let _ = events.send(EngineEvent::Embedding(vector));
        let reason = FinishReason::Complete;
        let _ = events.send(EngineEvent::Finished { choice: 0, reason, cached: 0 });
        return;
    }
    for (choice, sampling) in (0u32..).zip(&request.sampling) {
        let mut reason = FinishReason::Length;
        for (index, token) in tokens.iter().take(request.max_tokens as usize).enumerate() {
            if script.fail_after == Some(index) {
                let _ = events.send(EngineEvent::Failed(EngineError::Corrupted));
                return;
            }
            let reported = sampling.logprobs.map(|_| logprobs(*token));
            let event = EngineEvent::Token { choice, token: *token, logprobs: reported };
            let _ = events.send(event);
            if script.hang {
                return;
            }
            if request.end_tokens.contains(token) {
                reason = FinishReason::EndToken(*token);
                break;
            }
            let check = request.stop_checks.get_mut(choice as usize);
            if check.is_some_and(|check| check.push(*token)) {
                reason = FinishReason::StopString;
                break;
            }
        }
        let _ = events.send(EngineEvent::Finished { choice, reason, cached: 0 });
    }
}
