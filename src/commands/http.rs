//! What the commands that answer HTTP requests share: `serve` and `report --watch`.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, HeaderName, header};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;

use crate::schema::Problem;
use crate::util::failure::Failure;

/// How long a connection may take for the head of a request, and so how long it may be idle.
const MAX_HEAD_TIME: Duration = Duration::from_secs(5);
/// Connections at once; others wait.
const MAX_CONNECTIONS: usize = 512;
/// Requests at once that are prepared beside the one thread of the connections.
const MAX_PREPARED: usize = 32;

/// Listens on an address; port 0 takes a free one.
pub(super) fn bind(host: IpAddr, port: u16) -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind((host, port)).map_err(|error| {
        let problem = Problem::new(format!("cannot listen on {host}:{port}: {error}"));
        Failure::from(problem.hint("--port N takes another port, --port 0 a free one"))
    })?;
    listener.set_nonblocking(true).map_err(Failure::running)?;
    Ok(listener)
}

/// Answers requests for as long as the process runs.
pub(super) fn answer(listener: TcpListener, router: Router) -> Result<(), Failure> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().max_blocking_threads(MAX_PREPARED).build();
    runtime.and_then(|runtime| runtime.block_on(connect(listener, router))).map_err(Failure::running)
}

/// As `axum::serve`, but connections that send nothing end, and there are only so many.
async fn connect(listener: TcpListener, router: Router) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(MAX_HEAD_TIME);
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            // The client has gone, or the process may open no more files until a connection ends.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
        tokio::spawn(async move {
            // Where a client has gone, nobody has to know.
            drop(connection.await);
            drop(place);
        });
    }
    Ok(())
}

/// A header's text; empty where the request has none.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether a request has several `Host` headers, of which others may read another (RFC 9112, section 3.2).
pub(super) fn names_several_hosts(headers: &HeaderMap) -> bool {
    headers.get_all(header::HOST).iter().nth(1).is_some()
}

/// Whether a request's body is JSON.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let kind = text(headers, &header::CONTENT_TYPE).split(';').next().unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("application/json")
}

/// Whether a request means this machine. A page of another site may reach it through a name of its own.
pub(super) fn is_for_this_machine(headers: &HeaderMap) -> bool {
    !names_several_hosts(headers) && is_own_name(text(headers, &header::HOST))
}

/// Whether a `Host` header names this machine.
fn is_own_name(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.strip_suffix('.').unwrap_or(name).eq_ignore_ascii_case("localhost")
        || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_let_in_without_a_token() {
        for own in [
            "localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "[::1]", "127.9.9.9", "LocalHost:1",
            "localhost.",
        ] {
            assert!(is_own_name(own), "{own}");
        }
        for other in ["", "evil.example", "localhost.evil.example:8000", "10.0.0.1:8000", "[::2]:1", "localhost..", "."]
        {
            assert!(!is_own_name(other), "{other}");
        }
    }

    #[test]
    fn a_request_has_one_host_and_a_body_of_json_in_any_case_and_charset() {
        let headers = |name: HeaderName, values: &[&str]| {
            let values = values.iter().map(|value| (name.clone(), value.parse().unwrap()));
            values.collect::<HeaderMap>()
        };
        for (value, is_json) in [
            ("application/json", true),
            ("Application/JSON ; charset=utf-8", true),
            ("application/jsonxyz", false),
            ("text/plain", false),
            ("", false),
        ] {
            assert_eq!(super::is_json(&headers(header::CONTENT_TYPE, &[value])), is_json, "{value}");
        }
        assert!(is_for_this_machine(&headers(header::HOST, &["localhost"])));
        assert!(!is_for_this_machine(&headers(header::HOST, &["localhost", "localhost"])));
    }
}
