//! Figures for an MLflow server, over its REST interface (<https://mlflow.org/docs/latest/rest-api.html>), from a thread
//! of their own: training never waits for the network.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::StatusCode;
use reqwest::blocking::{Client, RequestBuilder, Response};
use serde_json::{Value, json};

use super::Outcome;
use crate::config::LoggingConfig;
use crate::schema::flattened;
use crate::util::files;

/// Holds the run's id on the server: a resumed run continues there.
const RUN_FILE: &str = "mlflow_run_id";

/// What the server takes in a request, and of a value.
const MAX_METRICS: usize = 1000;
const MAX_PARAMS: usize = 100;
const MAX_PARAM_CHARS: usize = 6000;
/// Figures that wait for a server that does not answer.
const MAX_WAITING: usize = 200_000;

/// Between two requests; after a failure longer and longer.
const PERIOD: Duration = Duration::from_secs(2);
const MAX_PERIOD: Duration = Duration::from_mins(1);
/// For one request, and for the last ones at the end of the run.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sink: hands everything to its thread.
pub(super) struct MlFlow {
    messages: Option<Sender<Message>>,
    warnings: Receiver<String>,
    thread: JoinHandle<()>,
}

enum Message {
    Metrics(Vec<Value>),
    Params(Vec<Value>),
    End(Outcome),
}

impl MlFlow {
    /// Starts the thread, if the recipe names a server.
    pub(super) fn open(config: &LoggingConfig, run_dir: &Path, is_resumed: bool) -> io::Result<Option<Self>> {
        let Some(uri) = &config.mlflow_tracking_uri else { return Ok(None) };
        let run_file = run_dir.join(RUN_FILE);
        if !is_resumed {
            drop(std::fs::remove_file(&run_file));
        }
        let name = || run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let worker = Worker {
            client: Client::builder().timeout(PATIENCE).build().map_err(io::Error::other)?,
            uri: uri.trim_end_matches('/').to_owned(),
            experiment: config.mlflow_experiment_name.clone().unwrap_or_else(|| "Default".to_owned()),
            run_name: config.mlflow_run_name.clone().unwrap_or_else(name),
            run_file,
            run_id: None,
            params: Vec::new(),
            metrics: VecDeque::new(),
            status: None,
            num_lost: 0,
        };
        let (messages, received) = mpsc::channel();
        let (warn, warnings) = mpsc::channel();
        let thread = std::thread::Builder::new().name("mlflow".into()).spawn(move || worker.run(&received, &warn))?;
        Ok(Some(Self { messages: Some(messages), warnings, thread }))
    }

    /// Sends the recipe as parameters.
    pub(super) fn recipe(&self, toml: &str) {
        let recipe: toml::Table = toml.parse().unwrap_or_default();
        let param = |(key, value): (String, &toml::Value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            // The server allows no brackets in keys.
            let key = key.replace('[', ".").replace(']', "");
            json!({"key": key, "value": value.chars().take(MAX_PARAM_CHARS).collect::<String>()})
        };
        self.send(Message::Params(flattened(&recipe).into_iter().map(param).collect()));
    }

    /// Sends figures by their tags; JSON has no other numbers than finite ones.
    pub(super) fn scalars(&self, step: u64, scalars: &[(impl AsRef<str>, f64)]) {
        let now = now();
        let finite = scalars.iter().filter(|(_, value)| value.is_finite());
        let metric = |(key, value): (&str, f64)| json!({"key": key, "value": value, "timestamp": now, "step": step});
        self.send(Message::Metrics(finite.map(|(key, value)| metric((key.as_ref(), *value))).collect()));
    }

    /// Sends how the run ended, and waits for the thread to send what is left.
    pub(super) fn end(&mut self, outcome: Outcome) {
        self.send(Message::End(outcome));
        self.messages = None;
        let began = Instant::now();
        while !self.thread.is_finished() && began.elapsed() < 2 * PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the thread has to say since the last call.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.warnings.try_iter().collect()
    }

    fn send(&self, message: Message) {
        // After the end there is no thread.
        drop(self.messages.as_ref().map(|messages| messages.send(message)));
    }
}

/// The thread's side.
struct Worker {
    client: Client,
    uri: String,
    experiment: String,
    run_name: String,
    run_file: PathBuf,
    run_id: Option<String>,
    params: Vec<Value>,
    metrics: VecDeque<Value>,
    status: Option<(&'static str, u64)>,
    num_lost: usize,
}

/// Why a request failed.
struct Trouble {
    message: String,
    /// The server does not want it, and will not want it later.
    is_final: bool,
}

impl Worker {
    fn run(mut self, messages: &Receiver<Message>, warnings: &Sender<String>) {
        let (mut period, mut has_warned) = (PERIOD, false);
        loop {
            let is_over = self.collect(messages, Instant::now() + period);
            let sent = self.send_all();
            period = if sent.is_ok() { PERIOD } else { MAX_PERIOD.min(2 * period) };
            if let Err(trouble) = sent
                && !std::mem::replace(&mut has_warned, true)
            {
                let then = "training continues, and it is tried again";
                drop(warnings.send(format!("MLflow at {}: {}; {then}", self.uri, trouble.message)));
            }
            if is_over {
                let num_lost = self.num_lost + self.metrics.len();
                if num_lost > 0 {
                    drop(warnings.send(format!("MLflow lacks {num_lost} of the figures; metrics.jsonl has all")));
                }
                return;
            }
        }
    }

    /// Takes messages until a time, or until the last message; returns whether the last message came.
    fn collect(&mut self, messages: &Receiver<Message>, until: Instant) -> bool {
        loop {
            match messages.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Message::Metrics(metrics)) => self.metrics.extend(metrics),
                Ok(Message::Params(params)) => self.params = params,
                Ok(Message::End(outcome)) => {
                    self.status = Some((status(outcome), now()));
                    return true;
                }
                Err(error) => return error == mpsc::RecvTimeoutError::Disconnected,
            }
            let excess = self.metrics.len().saturating_sub(MAX_WAITING);
            self.num_lost += self.metrics.drain(..excess).count();
        }
    }

    fn send_all(&mut self) -> Result<(), Trouble> {
        let run_id = match &self.run_id {
            Some(run_id) => run_id.clone(),
            None => self.continued().map_or_else(|| self.create_run(), Ok)?,
        };
        self.run_id = Some(run_id.clone());
        while !self.params.is_empty() {
            let batch: Vec<Value> = self.params.drain(..MAX_PARAMS.min(self.params.len())).collect();
            self.post("runs/log-batch", &json!({"run_id": run_id, "params": batch}))?;
        }
        while !self.metrics.is_empty() {
            let batch: Vec<&Value> = self.metrics.iter().take(MAX_METRICS).collect();
            let (num, body) = (batch.len(), json!({"run_id": run_id, "metrics": batch}));
            let sent = self.post("runs/log-batch", &body);
            let is_refused = sent.as_ref().is_err_and(|trouble| trouble.is_final);
            self.num_lost += if is_refused { num } else { 0 };
            if sent.is_ok() || is_refused {
                self.metrics.drain(..num);
            }
            sent?;
        }
        if let Some((status, time)) = self.status {
            self.post("runs/update", &json!({"run_id": run_id, "status": status, "end_time": time}))?;
        }
        Ok(())
    }

    /// The run of an earlier start, if the server still has it. Its parameters are there, and cannot be changed.
    fn continued(&mut self) -> Option<String> {
        let run_id = std::fs::read_to_string(&self.run_file).ok()?;
        self.post("runs/update", &json!({"run_id": run_id, "status": "RUNNING"})).ok()?;
        self.params.clear();
        Some(run_id)
    }

    fn create_run(&self) -> Result<String, Trouble> {
        let tag = |(key, value): (&str, &str)| json!({"key": key, "value": value});
        let tags = [
            ("mlflow.source.name", "lora-train"),
            ("mlflow.source.type", "LOCAL"),
            ("lora_train.version", env!("CARGO_PKG_VERSION")),
        ];
        let answer = self.post(
            "runs/create",
            &json!({
                "experiment_id": self.experiment_id()?, "run_name": self.run_name, "start_time": now(),
                "tags": tags.map(tag),
            }),
        )?;
        let run_id = text_at(&answer, "/run/info/run_id")?;
        // Without the file, a resumed run would be a new one there.
        drop(files::write(&self.run_file, &run_id));
        Ok(run_id)
    }

    /// Makes the experiment where there is none of its name.
    fn experiment_id(&self) -> Result<String, Trouble> {
        let name = ("experiment_name", self.experiment.as_str());
        let found = self.client.get(self.url("experiments/get-by-name")).query(&[name]);
        let answer = with_credentials(found, variable).send().map_err(|error| unreachable(&error))?;
        if answer.status() == StatusCode::NOT_FOUND {
            let made = self.post("experiments/create", &json!({"name": self.experiment}))?;
            return text_at(&made, "/experiment_id");
        }
        text_at(&value(answer)?, "/experiment/experiment_id")
    }

    fn url(&self, method: &str) -> String {
        format!("{}/api/2.0/mlflow/{method}", self.uri)
    }

    fn post(&self, method: &str, body: &Value) -> Result<Value, Trouble> {
        let request = self.client.post(self.url(method)).header("Content-Type", "application/json");
        let request = with_credentials(request, variable).body(body.to_string());
        value(request.send().map_err(|error| unreachable(&error))?)
    }
}

/// The credentials that MLflow's own client takes: a token, or a name and a password.
fn with_credentials(request: RequestBuilder, variable: impl Fn(&str) -> Option<String>) -> RequestBuilder {
    match (variable("MLFLOW_TRACKING_USERNAME"), variable("MLFLOW_TRACKING_TOKEN")) {
        (Some(name), _) => request.basic_auth(name, variable("MLFLOW_TRACKING_PASSWORD")),
        (None, Some(token)) => request.bearer_auth(token),
        (None, None) => request,
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn unreachable(error: &reqwest::Error) -> Trouble {
    let message = if error.is_timeout() { "no answer" } else { "cannot be reached" };
    Trouble { message: message.to_owned(), is_final: false }
}

fn value(answer: Response) -> Result<Value, Trouble> {
    let status = answer.status();
    let value: Value = serde_json::from_str(&answer.text().unwrap_or_default()).unwrap_or_default();
    if status.is_success() {
        return Ok(value);
    }
    let said = value.get("message").and_then(Value::as_str).unwrap_or_default();
    let is_final = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
    Err(Trouble { message: format!("answered {status} {said}").trim_end().to_owned(), is_final })
}

fn text_at(answer: &Value, pointer: &str) -> Result<String, Trouble> {
    let text = answer.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    text.ok_or_else(|| Trouble { message: "does not answer as MLflow does".to_owned(), is_final: false })
}

fn status(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Finished | Outcome::StoppedEarly => "FINISHED",
        Outcome::Interrupted | Outcome::StoppedByWatchdog => "KILLED",
        Outcome::Failed => "FAILED",
    }
}

/// Milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Method and body of each request.
    type Requests = Arc<Mutex<Vec<(String, Value)>>>;

    /// A server that takes everything; its address, and what it was asked.
    fn server() -> (String, Requests) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (uri, seen) = (format!("http://{}", listener.local_addr().unwrap()), Arc::default());
        let requests: Requests = Arc::clone(&seen);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let lines: Vec<String> =
                    reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
                let length =
                    lines.iter().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
                let mut body = vec![0; length.unwrap_or(0)];
                reader.read_exact(&mut body).unwrap();
                let method = lines[0].split("/mlflow/").nth(1).unwrap().split(' ').next().unwrap().to_owned();
                let is_search = method.starts_with("experiments/get-by-name");
                requests.lock().unwrap().push((method, serde_json::from_slice(&body).unwrap_or_default()));
                let answer = r#"{"experiment_id": "7", "run": {"info": {"run_id": "abc"}}}"#;
                let status = if is_search { 404 } else { 200 };
                let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}", answer.len());
                write!(stream, "{head}\r\n\r\n{answer}").unwrap();
            }
        });
        (uri, seen)
    }

    fn open(uri: &str, run_dir: &Path, is_resumed: bool) -> MlFlow {
        let name = |name: &str| Some(name.to_owned());
        let config = LoggingConfig {
            mlflow_tracking_uri: name(uri),
            mlflow_experiment_name: name("mine"),
            ..LoggingConfig::default()
        };
        MlFlow::open(&config, run_dir, is_resumed).unwrap().unwrap()
    }

    #[test]
    fn figures_and_recipe_arrive_in_batches_and_a_resumed_run_continues_its_own() {
        let (folder, (uri, seen)) = (tempfile::tempdir().unwrap(), server());
        let take = || std::mem::take(&mut *seen.lock().unwrap());
        let mut sink = open(&uri, folder.path(), false);
        let many: String = (0..130).map(|key| format!("k{key} = \"{}\"\n", "x".repeat(7000))).collect();
        sink.recipe(&format!("seed = 3\n[[data.train]]\npath = \"a\"\n[many]\n{many}"));
        for step in 1..=600 {
            sink.scalars(step, &[("train/loss", 0.5), ("train/grad_norm", f64::NAN), ("gpu/power", 70.0)]);
        }
        sink.end(Outcome::Interrupted);
        assert_eq!(sink.warnings(), Vec::<String>::new());
        let requests = take();
        let methods: Vec<&str> = requests.iter().map(|(method, _)| method.as_str()).collect();
        let batch = "runs/log-batch";
        let search = "experiments/get-by-name?experiment_name=mine";
        let expected = [search, "experiments/create", "runs/create", batch, batch, batch, batch, "runs/update"];
        assert_eq!(methods, expected);
        let sent = |at: usize, key: &str| requests[at].1[key].as_array().unwrap().len();
        assert_eq!((sent(3, "params"), sent(4, "params")), (100, 32));
        assert_eq!((sent(5, "metrics"), sent(6, "metrics")), (1000, 200));
        let params = requests[3].1["params"].as_array().unwrap();
        assert!(params.contains(&json!({"key": "data.train.0.path", "value": "a"})), "{params:?}");
        assert!(params.iter().all(|param| param["value"].as_str().unwrap().len() <= 6000));
        assert_eq!((&requests[7].1["status"], &requests[7].1["run_id"]), (&json!("KILLED"), &json!("abc")));

        let mut again = open(&uri, folder.path(), true);
        again.recipe("seed = 4");
        again.end(Outcome::Finished);
        let states: Vec<Value> = take().into_iter().map(|(_, body)| body["status"].clone()).collect();
        assert_eq!(states, ["RUNNING", "FINISHED"]);
    }

    #[test]
    fn a_server_that_is_not_there_is_one_warning_and_what_it_lacks_at_the_end() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut sink = open(&format!("http://{closed}/"), folder.path(), false);
        sink.scalars(1, &[("train/loss", 0.5)]);
        sink.end(Outcome::Finished);
        let then = "cannot be reached; training continues, and it is tried again";
        let lacks = "MLflow lacks 1 of the figures; metrics.jsonl has all".to_owned();
        assert_eq!(sink.warnings(), [format!("MLflow at http://{closed}: {then}"), lacks]);
    }

    #[test]
    fn credentials_are_those_of_mlflows_own_client() {
        let header = |variables: &[(&str, &str)]| {
            let variable = |name: &str| Some(variables.iter().find(|(key, _)| *key == name)?.1.to_owned());
            let request = with_credentials(Client::new().get("http://127.0.0.1"), variable).build().unwrap();
            request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(header(&[("MLFLOW_TRACKING_TOKEN", "t")]).unwrap(), "Bearer t");
        let both =
            [("MLFLOW_TRACKING_USERNAME", "me"), ("MLFLOW_TRACKING_PASSWORD", "p"), ("MLFLOW_TRACKING_TOKEN", "t")];
        assert_eq!((header(&both).unwrap().as_str(), header(&[])), ("Basic bWU6cA==", None));
    }
}
