//! Every refusal of the HTTP bindings, defined once: status, code, body and headers.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::aep::cloudevents::inverse::InverseError;
use crate::aep::json::JsonError;
use crate::aep::{EventError, FilterError};
use crate::relay::auth::Permission;
use crate::relay::keep::NotKept;

/// Why a request was refused.
#[derive(Debug)]
pub enum Refusal {
    /// No token, or the wrong one.
    Unauthorized,
    /// A token that doesn't let its bearer do this.
    Forbidden {
        /// What it would have to permit.
        permission: Permission,
    },
    /// A command over HTTP: control flows on the WebSocket only.
    CommandOverHttp {
        /// Its index in the batch, from 0.
        line: usize,
    },
    /// No `AEP-Version`, or one that isn't spoken here.
    VersionUnsupported,
    /// A body of a media type that isn't taken here.
    MediaType {
        /// What is taken.
        expected: &'static str,
    },
    /// A body in a content encoding that isn't taken here.
    Encoding,
    /// A body that doesn't decompress.
    Compression,
    /// An event that can't be read or isn't legal.
    Event {
        /// What is wrong.
        error: EventError,
        /// Its index in the batch, from 0.
        line: usize,
    },
    /// A CloudEvent that isn't one of our events.
    CloudEvent {
        /// What is wrong.
        error: InverseError,
        /// Its index in the batch, from 0.
        line: usize,
    },
    /// A body over the bound.
    PayloadTooLarge {
        /// The bound, in bytes.
        max_bytes: usize,
    },
    /// A batch over the bound.
    TooManyEvents {
        /// The bound.
        max: usize,
        /// How many there were.
        count: usize,
    },
    /// The body didn't arrive in time.
    BodyTimeout,
    /// The connection broke off within the body.
    BodyIncomplete,
    /// What was asked for can't be given now.
    Unavailable {
        /// Why.
        reason: &'static str,
        /// When to ask again.
        retry_after: Duration,
    },
    /// A filter that isn't legal.
    Filter(FilterError),
    /// A subscription parameter that is out of form.
    Parameter {
        /// The parameter.
        name: &'static str,
        /// What it must be.
        must: String,
    },
    /// More resume positions than are taken.
    TooManyPositions {
        /// The bound.
        max: usize,
        /// How many there were.
        count: usize,
    },
    /// A request to `/socket` that is no WebSocket handshake.
    NotAHandshake,
    /// No such path.
    NotFound,
    /// A path that doesn't take the method.
    MethodNotAllowed {
        /// The methods that it takes.
        allow: &'static str,
    },
}

impl From<NotKept> for Refusal {
    fn from(not_kept: NotKept) -> Self {
        match not_kept {
            NotKept::Now { reason, retry_after } => Self::Unavailable { reason, retry_after },
            NotKept::TooLarge { max_bytes } => Self::PayloadTooLarge { max_bytes },
        }
    }
}

/// The JSON of a refusal; absent members are omitted.
#[derive(Debug, Default, Serialize)]
struct Answer {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    versions: Option<[&'static str; 1]>,
}

impl Refusal {
    /// The wire code, also the label under which it is counted.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unauthorized | Self::CommandOverHttp { .. } => "unauthorized",
            Self::Forbidden { .. } => "forbidden",
            Self::VersionUnsupported => "version-unsupported",
            Self::MediaType { .. } => "unsupported-media-type",
            Self::Encoding => "unsupported-encoding",
            Self::Compression => "invalid-encoding",
            Self::Event { error, .. } | Self::CloudEvent { error: InverseError::Event(error), .. } => {
                error.code()
            }
            Self::CloudEvent { error, .. } => match error {
                InverseError::Foreign(_) => "foreign-event",
                InverseError::ContentType(_) => "unsupported-media-type",
                InverseError::Json(JsonError::Syntax(_) | JsonError::Utf8(_)) => "invalid-json",
                _ => "invalid-event",
            },
            Self::PayloadTooLarge { .. } => "payload-too-large",
            Self::TooManyEvents { .. } => "too-many-events",
            Self::BodyTimeout => "body-timeout",
            Self::BodyIncomplete => "body-incomplete",
            Self::Unavailable { .. } => "unavailable",
            Self::Filter(_) => "invalid-filter",
            Self::Parameter { name, .. } => match *name {
                "capture" => "invalid-capture",
                "from" => "invalid-from",
                "last-event-id" => "invalid-last-event-id",
                "live" => "invalid-live",
                _ => "invalid-request",
            },
            Self::TooManyPositions { .. } => "limit-exceeded",
            Self::NotAHandshake => "websocket-required",
            Self::NotFound => "not-found",
            Self::MethodNotAllowed { .. } => "method-not-allowed",
        }
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } | Self::CommandOverHttp { .. } => StatusCode::FORBIDDEN,
            Self::VersionUnsupported => StatusCode::UPGRADE_REQUIRED,
            Self::MediaType { .. } | Self::Encoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::CloudEvent { error: InverseError::Foreign(_), .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::CloudEvent { error: InverseError::ContentType(_), .. } => {
                StatusCode::UNSUPPORTED_MEDIA_TYPE
            }
            Self::Compression
            | Self::CloudEvent { .. }
            | Self::Event { .. }
            | Self::BodyIncomplete
            | Self::Filter(_)
            | Self::Parameter { .. }
            | Self::NotAHandshake
            | Self::TooManyPositions { .. } => StatusCode::BAD_REQUEST,
            Self::PayloadTooLarge { .. } | Self::TooManyEvents { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    /// What is wrong, for people.
    #[must_use]
    pub fn detail(&self) -> String {
        self.answer().detail.unwrap_or_default()
    }

    fn answer(&self) -> Answer {
        let detail =
            |text: String| Answer { error: Some(self.code()), detail: Some(text), ..Answer::default() };
        match self {
            Self::Unauthorized => detail("a bearer token is required: Authorization: Bearer …".into()),
            Self::Forbidden { permission } => {
                detail(format!("this token does not permit {}", permission.as_str()))
            }
            Self::CommandOverHttp { line } => {
                Answer { line: Some(*line), ..detail("commands flow on the WebSocket only".into()) }
            }
            // AEP-0003 §3.2 #2 fixes this body.
            Self::VersionUnsupported => Answer { versions: Some([crate::aep::VERSION]), ..Answer::default() },
            Self::MediaType { expected } => detail(format!("content-type must be {expected}")),
            Self::Encoding => detail("content-encoding must be gzip, zstd or identity".into()),
            Self::Compression => detail("the body doesn't decompress as its content-encoding says".into()),
            Self::Event { error, line } => Answer { line: Some(*line), ..detail(error.to_string()) },
            Self::CloudEvent { error, line } => Answer { line: Some(*line), ..detail(error.to_string()) },
            Self::PayloadTooLarge { max_bytes } => {
                Answer { error: Some(self.code()), max_bytes: Some(*max_bytes), ..Answer::default() }
            }
            Self::TooManyEvents { max, count } => {
                Answer { error: Some(self.code()), max: Some(*max), count: Some(*count), ..Answer::default() }
            }
            Self::BodyTimeout => detail("the body stopped arriving".into()),
            Self::BodyIncomplete => detail("the body broke off".into()),
            Self::Unavailable { reason, .. } => detail((*reason).into()),
            Self::Filter(error) => detail(error.to_string()),
            Self::Parameter { name, must } => detail(format!("{name}: must {must}")),
            Self::TooManyPositions { max, count } => Answer {
                max: Some(*max),
                count: Some(*count),
                ..detail(format!("from: holds {count} positions, AEP_MAX_FROM allows {max}"))
            },
            Self::NotAHandshake => detail("this path takes WebSocket handshakes".into()),
            Self::NotFound => detail("no such path".into()),
            Self::MethodNotAllowed { allow } => detail(format!("this path takes {allow}")),
        }
    }

    fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        match self {
            Self::Unauthorized => Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            Self::Encoding => Some((header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, zstd"))),
            Self::Unavailable { retry_after, .. } => {
                Some((header::RETRY_AFTER, HeaderValue::from(retry_after.as_secs().max(1))))
            }
            Self::MethodNotAllowed { allow } => Some((header::ALLOW, HeaderValue::from_static(allow))),
            // What is left of the body may be long: the connection isn't used again.
            Self::PayloadTooLarge { .. } | Self::BodyTimeout => {
                Some((header::CONNECTION, HeaderValue::from_static("close")))
            }
            _ => None,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = json(self.status(), &self.answer());
        if let Some((name, value)) = self.header() {
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(Refused(self.code()));
        response
    }
}

/// Marks a response as a refusal, with its code, for counting.
#[derive(Debug, Clone, Copy)]
pub struct Refused(pub &'static str);

/// A JSON response.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    // The bodies are structs of this module's own, which always serialize.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
