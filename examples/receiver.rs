//! A CloudEvents receiver to point the sidecar at: prints every event it takes as one line of JSON.
//!
//! ```sh
//! cargo run --example receiver -- 127.0.0.1:8090
//! ```
//!
//! The address may have port 0; the first line printed is the one that was bound. It takes all three content
//! modes of the HTTP binding, reads them with the CloudEvents SDK, and answers 202, or 400 with the reason. In
//! binary mode the SDK leaves `data` as bytes, printed as `data_base64`, and header values percent-encoded.
//! `--fail-first K` answers 503 to the first K requests, `--status N` answers N to every one that is legal.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest as _, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use cloudevents::AttributesReader as _;
use http::StatusCode;
use http::header::CONTENT_TYPE;

/// The largest request that is read, in bytes.
const MAX_BODY: usize = 64 << 20;

struct Answers {
    /// What a legal request is answered with.
    status: StatusCode,
    /// How many requests are still to be refused; each refusal takes one.
    failures: AtomicU32,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut address = SocketAddr::from(([127, 0, 0, 1], 8090));
    let mut answers = Answers { status: StatusCode::ACCEPTED, failures: AtomicU32::new(0) };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--status" => answers.status = value()?.parse()?,
            "--fail-first" => answers.failures = AtomicU32::new(value()?.parse()?),
            text => address = text.parse()?,
        }
    }
    let listener = tokio::net::TcpListener::bind(address).await?;
    print_line(&format!("listening on http://{}", listener.local_addr()?))?;
    let app = Router::new().fallback(post(receive)).with_state(Arc::new(answers));
    axum::serve(listener, app).await?;
    Ok(())
}

/// One request, in whichever content mode its media type says.
async fn receive(State(answers): State<Arc<Answers>>, request: Request) -> Response {
    let failing = answers.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    if failing.is_ok() {
        return (StatusCode::SERVICE_UNAVAILABLE, "asked to fail first").into_response();
    }
    let events = match read(request).await {
        Ok(events) => events,
        Err(reason) => return (StatusCode::BAD_REQUEST, reason).into_response(),
    };
    for event in &events {
        let printed = serde_json::to_string(event).map_err(std::io::Error::from);
        if let Err(error) = printed.and_then(|line| print_line(&line)) {
            return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response();
        }
    }
    answers.status.into_response()
}

async fn read(request: Request) -> Result<Vec<cloudevents::Event>, String> {
    let media = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // The batch's media type starts with the single event's, which is all that the SDK looks at.
    let events = if media.to_ascii_lowercase().starts_with("application/cloudevents-batch") {
        let body = to_bytes(request.into_body(), MAX_BODY).await.map_err(|error| error.to_string())?;
        serde_json::from_slice::<Vec<cloudevents::Event>>(&body).map_err(|error| error.to_string())?
    } else {
        match cloudevents::Event::from_request(request, &()).await {
            Ok(event) => vec![event],
            Err(refusal) => return Err(text(refusal.into_body()).await),
        }
    };
    match events
        .iter()
        .find(|event| event.id().is_empty() || event.source().is_empty() || event.ty().is_empty())
    {
        None => Ok(events),
        Some(event) => Err(format!("id, source and type must not be empty: {:?}", event.id())),
    }
}

async fn text(body: Body) -> String {
    let bytes = to_bytes(body, MAX_BODY).await.unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Prints a line at once, whatever stdout is.
fn print_line(line: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
