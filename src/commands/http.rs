//! What the commands that answer HTTP requests share: `serve` and `report --watch`.

use std::net::{IpAddr, TcpListener};

use axum::Router;
use axum::http::{HeaderMap, HeaderName, header};

use crate::schema::Problem;
use crate::util::failure::Failure;

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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let serve = async { axum::serve(tokio::net::TcpListener::from_std(listener)?, router).await };
    runtime.and_then(|runtime| runtime.block_on(serve)).map_err(Failure::running)
}

/// A header's text; empty where the request has none.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether a request means this machine. A page of another site may reach it through a name of its own.
pub(super) fn is_for_this_machine(headers: &HeaderMap) -> bool {
    is_own_name(text(headers, &header::HOST))
}

/// Whether a `Host` header names this machine.
fn is_own_name(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_let_in_without_a_token() {
        for own in ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "[::1]", "127.9.9.9"] {
            assert!(is_own_name(own), "{own}");
        }
        for other in ["", "evil.example", "localhost.evil.example:8000", "10.0.0.1:8000", "[::2]:1"] {
            assert!(!is_own_name(other), "{other}");
        }
    }
}
