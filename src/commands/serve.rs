//! `lora-train serve`: a model and its adapters behind OpenAI's HTTP interface, with a page to try them.

mod api;
mod body;
mod error;
mod prompt;
mod reply;
mod responses;
mod sight;
mod texts;

use std::convert::Infallible;
use std::future::ready;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::UNIX_EPOCH;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, Uri, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use super::named::{Asked, BASE, LoadArgs, ModelArgs, Named, OpenedModel, stops, template, warn_of};
use super::{http, say};
use crate::data::template::{ChatTemplate, Stops};
use crate::generate::calls::{Allowed, CallForm, CallReader, functions};
use crate::generate::{Grammar, Grammars, NewText, check};
use crate::images::Image;
use crate::save::export::PromptForm;
use crate::schema::Problem;
use crate::train::stop::Stop;
use crate::util::failure::Failure;

use api::{AskedContent, Asking, Endpoint, ToolChoice};
use body::Bodies;
use error::ApiError;
use prompt::Prompting;
use reply::Reply;
use responses::AsResponse;
use sight::Sight;
use texts::{NewOf, TextJob, ToScore, Work, write_texts};

/// A page to talk with the model and to compare adapters side by side.
const PAGE: &str = include_str!("serve/page.html");
/// What the page may do: ask this server, and no more; and no other page may show it.
const PAGE_HEADERS: [(HeaderName, &str); 2] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_FRAME_OPTIONS, "DENY"),
];
/// What is answered.
const PATHS: &str = "GET /v1/models, GET /v1/models/ID, POST /v1/chat/completions, POST /v1/responses, \
                     POST /v1/completions, POST /v1/score, GET /health";
/// What a request is answered where the model has failed.
const STOPPED: &str = "the model has stopped";

/// Arguments of `lora-train serve`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Runs or adapters of one model, or the model
    #[arg(value_name = "RUN|MODEL", required_unless_present_any = ["model", "adapter"])]
    names: Vec<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// Port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    port: u16,

    /// Address to listen on; any but this machine's own needs --token
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,

    /// Answer only requests with `Authorization: Bearer TOKEN`
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,

    #[command(flatten)]
    load: LoadArgs,
}

/// Answers requests until it is stopped.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    // A signal ends the process: nothing is lost.
    let _stop = Stop::on_signals().map_err(Failure::running)?;
    if !args.host.is_loopback() && args.token.is_none() {
        let problem = Problem::new(format!("`--host {}` without `--token`: anybody could use the model", args.host));
        return Err(problem.hint("give --token, or leave --host out to answer this machine alone").into());
    }
    let listener = http::bind(args.host, args.port)?;
    let address = listener.local_addr().map_err(Failure::running)?;

    let named = Named::find(&args.names, &args.model)?;
    let base = named.base.path.clone();
    let mut opened = named.read(args.load.quiet)?.load(&args.load)?;
    // These endpoints are asked for by name, whatever the form that an adapter was trained in.
    let templates = opened.adapters.iter().map(|adapter| {
        template(Asked::Chat, adapter.form.as_ref(), &opened.tokenizer).ok().and_then(|(template, _)| template)
    });
    let templates: Vec<Option<ChatTemplate>> = templates.collect();
    warn_of(templates[0].as_ref());
    let adapters = opened.adapters.iter().zip(&templates);
    let stops = adapters.map(|(adapter, template)| stops(template.as_ref(), adapter.form.as_ref(), &opened.tokenizer));
    let stops: Arc<Vec<Stops>> = Arc::new(stops.collect());
    let sight = Sight::of(&opened, &templates).map(Arc::new);
    if let Some(sight) = &sight {
        opened.model = opened.model.with_features(sight.features());
    }
    let opened = Arc::new(opened);
    let (jobs, queue) = mpsc::channel();
    let server = Server {
        sight: sight.clone(),
        bodies: Bodies::new(sight.is_some()),
        created: opened.adapters.iter().map(|adapter| modified(&adapter.file)).collect(),
        call_forms: opened.adapters.iter().map(|_| OnceLock::new()).collect(),
        grammars: OnceLock::new(),
        max_bytes: opened.model.config.max_position_embeddings.saturating_mul(opened.tokenizer.longest_token()),
        templates,
        stops: Arc::clone(&stops),
        base,
        token: args.token.clone(),
        jobs: Mutex::new(jobs),
        opened: Arc::clone(&opened),
    };
    say(&ready_line(address, &opened));
    let answer = move || {
        if let Err(failure) = http::answer(listener, router(server)) {
            say(&format!("error: the server has ended: {failure}"));
        }
    };
    std::thread::Builder::new().name("http".into()).spawn(answer).map_err(Failure::running)?;
    // On this thread, so that a failing device ends the program.
    write_texts(&opened, &stops, sight.as_deref(), &queue)
}

fn ready_line(address: SocketAddr, opened: &OpenedModel) -> String {
    format!("http://{address} serves {}: a page to try them, and OpenAI's API below /v1", opened.names())
}

/// When a file was written, in seconds since 1970; 0 where that is not known.
fn modified(file: &std::path::Path) -> u64 {
    let at = file.metadata().and_then(|metadata| metadata.modified()).ok();
    at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
}

/// What every request is answered from.
struct Server {
    opened: Arc<OpenedModel>,
    /// What reads images, if the model sees some.
    sight: Option<Arc<Sight>>,
    bodies: Bodies,
    /// When each adapter was written, in seconds since 1970.
    created: Vec<u64>,
    /// By adapter.
    templates: Vec<Option<ChatTemplate>>,
    /// How each template writes calls, where that is understood.
    call_forms: Vec<OnceLock<Option<CallForm>>>,
    grammars: OnceLock<Result<Grammars, String>>,
    /// Bytes of the longest text that the model has positions for.
    max_bytes: usize,
    /// Where texts end, by adapter.
    stops: Arc<Vec<Stops>>,
    /// The base model, as the user named it.
    base: String,
    token: Option<String>,
    jobs: Mutex<mpsc::Sender<Work>>,
}

fn router(server: Server) -> Router {
    let server = Arc::new(server);
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/completions", post(completions))
        .route("/v1/score", post(score))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&server), admit))
        .route("/", get(|| ready((PAGE_HEADERS, Html(PAGE)))))
        // For those who watch over servers, who have no token.
        .route("/health", get(|| ready(Json(json!({"status": "ok"})))))
        .fallback(|uri: Uri| ready(ApiError::not_found(&format!("there is no {} here; there are {PATHS}", uri.path()))))
        .method_not_allowed_fallback(|| ready(ApiError::wrong_method()))
        .with_state(server)
}

async fn admit(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    if http::names_several_hosts(request.headers()) {
        return ApiError::wrong("the request has several `Host` headers", None).into_response();
    }
    if server.lets_in(request.headers()) { next.run(request).await } else { ApiError::not_admitted().into_response() }
}

async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let models: Vec<Value> = (0..server.templates.len()).map(|adapter| server.model(adapter)).collect();
    Json(json!({ "object": "list", "data": models }))
}

async fn model(State(server): State<Arc<Server>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(server.model(server.adapter(Some(&id))?)))
}

async fn chat(State(server): State<Arc<Server>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    server.answer(Endpoint::Chat, &headers, body).await
}

async fn responses(State(server): State<Arc<Server>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    server.answer(Endpoint::Response, &headers, body).await.map_err(ApiError::of_response)
}

async fn completions(State(server): State<Arc<Server>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    server.answer(Endpoint::Completion, &headers, body).await
}

async fn score(State(server): State<Arc<Server>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    server.answer(Endpoint::Score, &headers, body).await
}

/// What is written, as it is written.
type Texts = UnboundedReceiver<NewOf>;

/// A request that is ready for the model.
struct PreparedRequest {
    asking: Asking,
    adapter: usize,
    prompt_ids: Vec<Vec<u32>>,
    images: Vec<Arc<Image>>,
    grammar: Option<Grammar>,
    /// Finds the calls in the answer, where there may be any.
    reader: Option<CallReader>,
    /// The form of the answer, where it is that of `/v1/responses`.
    as_response: Option<AsResponse>,
}

impl Server {
    /// With a token, whether a request has it; without one, whether it means this machine, so that no page of another site
    /// reaches the model through a name of its own.
    fn lets_in(&self, headers: &HeaderMap) -> bool {
        match &self.token {
            Some(token) => http::text(headers, &header::AUTHORIZATION).strip_prefix("Bearer ") == Some(token),
            None => http::is_for_this_machine(headers),
        }
    }

    fn model(&self, adapter: usize) -> Value {
        let name = &self.opened.adapters[adapter].name;
        let is_base = name == BASE;
        json!({
            "id": name, "object": "model", "created": self.created[adapter], "owned_by": "lora-train",
            "root": is_base.then_some(&self.base), "parent": (!is_base).then_some(BASE),
            "has_chat_template": self.templates[adapter].is_some(),
            "sees_images": self.sight.is_some() && self.templates[adapter].as_ref().is_some_and(ChatTemplate::reads_parts),
        })
    }

    fn prepare(&self, endpoint: Endpoint, body: &[u8]) -> Result<PreparedRequest, ApiError> {
        let OpenedModel { model, tokenizer, adapters, .. } = &*self.opened;
        let (mut asking, as_response) = Asking::parse(endpoint, body)?;
        let adapter = self.adapter(asking.model.as_deref())?;
        if adapters[adapter].set.score().is_some() != (endpoint == Endpoint::Score) {
            let scores = "scores texts: ask /v1/score";
            let is = if endpoint == Endpoint::Score { "writes texts, and has no head that scores" } else { scores };
            return Err(ApiError::wrong(format!("`{}` {is}", adapters[adapter].name), Some("model")));
        }
        let prompting = Prompting {
            sight: self.sight.as_deref(),
            tokenizer,
            template: self.templates[adapter].as_ref(),
            system: adapters[adapter].form.as_ref().and_then(PromptForm::system),
            max_tokens: model.config.max_position_embeddings,
            vocab_size: model.config.vocab_size,
            max_bytes: self.max_bytes,
        };
        let (prompt_ids, images) = prompting.ids(&asking)?;
        for ids in &prompt_ids {
            check(model, ids).map_err(|error| ApiError::of_prompt(&error))?;
        }
        self.sight.as_ref().map_or(Ok(()), |sight| sight.check(&images))?;
        // With images it may be large.
        asking.content = AskedContent::Messages(Vec::new());
        let form = asking.tools.as_ref().map(|_| self.call_form(adapter)).transpose()?;
        let grammar = self.grammar(&asking, form)?;
        let tools = asking.tools.as_ref().zip(form);
        let reader = tools.map(|(tools, form)| CallReader::new(form.clone(), tools, asking.one_call));
        Ok(PreparedRequest { asking, adapter, prompt_ids, images, grammar, reader, as_response })
    }

    /// What the answer is held to.
    fn grammar(&self, asking: &Asking, form: Option<&CallForm>) -> Result<Option<Grammar>, ApiError> {
        let Asking { tools, tool_choice, schema, one_call, .. } = asking;
        let is_call = *tool_choice != ToolChoice::Auto;
        if !is_call && schema.is_none() {
            return Ok(None);
        }
        let OpenedModel { model, tokenizer, .. } = &*self.opened;
        let grammars = || Grammars::new(tokenizer, model.config.vocab_size).map_err(|error| error.to_string());
        let grammars = self.grammars.get_or_init(grammars).as_ref();
        let param = if is_call { "tool_choice" } else { "response_format" };
        let wrong = |error: String| ApiError::wrong(format!("`{param}`: {error}"), Some(param));
        let grammars = grammars.map_err(|error| wrong(error.clone()))?;
        let (Some(tools), Some(form)) = (tools, form) else {
            let schema = schema.as_ref().map(|schema| grammars.of_schema(schema));
            return schema.transpose().map_err(|error| wrong(error.to_string()));
        };
        let unknown = "an answer cannot be held to the form in which this model's chat template writes calls: leave it out, or \
                       `tools`";
        let written = form.written.as_ref().ok_or_else(|| wrong(unknown.to_owned()))?;
        let is_meant = |function: &&Value| match tool_choice {
            ToolChoice::Function(name) => function["name"] == name.as_str(),
            _ => true,
        };
        let allowed = Allowed {
            functions: &functions(tools).filter(is_meant).collect::<Vec<_>>(),
            several: !one_call && !matches!(tool_choice, ToolChoice::Function(_)),
            content: schema.as_ref().filter(|_| !is_call),
        };
        written.grammar(allowed, grammars).map(Some).map_err(wrong)
    }

    /// The form of calls.
    fn call_form(&self, adapter: usize) -> Result<&CallForm, ApiError> {
        let of_template = || CallForm::of(self.templates[adapter].as_ref()?, &self.opened.tokenizer);
        let form = self.call_forms[adapter].get_or_init(of_template).as_ref();
        let unknown = "`tools`: the form in which this model's chat template writes calls is not understood";
        form.ok_or_else(|| ApiError::wrong(unknown, Some("tools")))
    }

    async fn answer(
        self: Arc<Self>,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Response, ApiError> {
        // Pages of other sites can send other types without asking.
        if !http::is_json(headers) {
            return Err(ApiError::wrong("the content type is not application/json", None));
        }
        let (body, place) = self.bodies.read(body).await?;
        let server = Arc::clone(&self);
        // A template and a tokenizer may take seconds: other requests do not wait.
        let prepared = tokio::task::spawn_blocking(move || server.prepare(endpoint, &body)).await;
        let prepared = prepared.map_err(|error| ApiError::failed(&error.to_string()))??;
        let PreparedRequest { asking, adapter, prompt_ids, images, grammar, reader, as_response } = prepared;
        let model = asking.model.clone().unwrap_or_else(|| self.id(adapter));
        if endpoint == Endpoint::Score {
            return self.score(model, adapter, prompt_ids).await;
        }
        let mut reply = Reply::new(asking.endpoint, model, &prompt_ids, &self.opened);
        let num_texts = prompt_ids.len();
        // What is continued as it is goes through no template, and JSON ends by itself and may have any text in it.
        let is_free = asking.endpoint == Endpoint::Chat && grammar.is_none();
        let of_template = if is_free { &self.stops[adapter].texts[..] } else { &[] };
        let stop = [&asking.stop[..], of_template].concat();
        let (events, mut texts) = tokio::sync::mpsc::unbounded_channel();
        for (index, prompt_ids) in prompt_ids.into_iter().enumerate() {
            let job = TextJob {
                adapter,
                prompt_ids,
                images: images.clone(),
                options: asking.options(),
                stop: stop.clone(),
                top_logprobs: asking.top_logprobs,
                special_tokens: reader.is_some(),
                grammar: grammar.clone(),
                index,
                events: events.clone(),
            };
            self.ask(Work::Write(job))?;
        }
        // The stream ends with the last text.
        drop(events);
        reply.reader = reader;
        // A prompt that is refused is refused before anything is streamed.
        let first = next_of(&mut texts).await?;
        drop(place);
        if asking.stream {
            Ok(stream_of(reply, first, texts, asking.include_usage, as_response))
        } else {
            let whole = whole(reply, num_texts, first, texts).await?;
            Ok(Json(as_response.map_or_else(|| whole.clone(), |form| form.whole(&whole))).into_response())
        }
    }

    fn ask(&self, work: Work) -> Result<(), ApiError> {
        let sent = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send(work);
        sent.map_err(|_| ApiError::failed(STOPPED))
    }

    async fn score(&self, model: String, adapter: usize, texts: Vec<Vec<u32>>) -> Result<Response, ApiError> {
        let num_tokens: usize = texts.iter().map(Vec::len).sum();
        let (reply, scores) = oneshot::channel();
        self.ask(Work::Score(ToScore { adapter, texts, reply }))?;
        let scores = scores.await.map_err(|_| ApiError::failed(STOPPED))?;
        let one = |(index, score): (usize, f32)| json!({"index": index, "object": "score", "score": score});
        let data: Vec<Value> = scores.into_iter().enumerate().map(one).collect();
        let usage = json!({"prompt_tokens": num_tokens, "total_tokens": num_tokens});
        Ok(Json(json!({"object": "list", "model": model, "data": data, "usage": usage})).into_response())
    }

    /// The adapter of this name; the first one where the request has none.
    fn adapter(&self, model: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = model else { return Ok(0) };
        let name = if name == self.base { BASE } else { name };
        self.opened.adapter(name).ok_or_else(|| {
            ApiError::no_model(&format!("there is no model `{name}`; this server has: {}", self.opened.names()))
        })
    }

    fn id(&self, adapter: usize) -> String {
        self.opened.adapters[adapter].name.clone()
    }
}

async fn next_of(texts: &mut Texts) -> Result<(usize, NewText), ApiError> {
    match texts.recv().await {
        Some((index, text)) => Ok((index, text.map_err(|error| ApiError::of_prompt(&error))?)),
        None => Err(ApiError::failed(STOPPED)),
    }
}

async fn whole(
    mut reply: Reply,
    num_texts: usize,
    first: (usize, NewText),
    mut texts: Texts,
) -> Result<Value, ApiError> {
    let mut all = vec![Vec::new(); num_texts];
    let (mut num_open, mut next) = (num_texts, first);
    loop {
        let (index, text) = next;
        num_open -= usize::from(text.ending.is_some());
        all[index].push(text);
        if num_open == 0 {
            return reply.whole(&all);
        }
        next = next_of(&mut texts).await?;
    }
}

fn stream_of(
    mut reply: Reply,
    (index, first): (usize, NewText),
    mut texts: Texts,
    include_usage: bool,
    mut as_response: Option<AsResponse>,
) -> Response {
    let rest = stream::poll_fn(move |context| texts.poll_recv(context));
    let mut start = reply.start();
    let events = stream::iter([(index, Ok(first))]).chain(rest).flat_map(move |(index, text)| {
        let text = text.map_err(|error| ApiError::of_prompt(&error));
        let was_open = !reply.has_ended();
        let parts = start.take().into_iter().chain(reply.parts((index, text), include_usage));
        let is_last = was_open && reply.has_ended();
        let mut events: Vec<Event> = match &mut as_response {
            Some(form) => parts.flat_map(|part| form.events(&part)).collect(),
            None => parts.map(|part| Event::default().data(part.to_string())).collect(),
        };
        match &mut as_response {
            Some(form) if is_last => events.extend(form.end()),
            None if is_last => events.push(Event::default().data("[DONE]")),
            _ => {}
        }
        stream::iter(events)
    });
    Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(KeepAlive::default()).into_response()
}
