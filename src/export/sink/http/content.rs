//! What a request says of its events: headers and body, the same on every attempt.

use std::io::{self, Write as _};

use bytes::Bytes;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

use super::own::{Compression, Own};
use crate::aep::cloudevents::{self, CloudEvent, Overrides};
use crate::export::sink::{Delivery, DeliveryError, Mode, Reason};

/// Headers and body.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Content {
    /// Maps the events.
    pub(super) async fn of(
        delivery: &Delivery,
        mode: Mode,
        own: &Own,
        overrides: &Overrides,
    ) -> Result<Self, DeliveryError> {
        /// A body from which on compressing takes too long to do it between other tasks, in bytes.
        const LARGE: usize = 64 << 10;
        let (mut headers, body) = plain(delivery, mode, own, overrides)?;
        let Some(compression) = own.compression.filter(|_| !body.is_empty()) else {
            return Ok(Self { headers, body: body.into() });
        };
        let compressed = if body.len() < LARGE {
            compression.apply(&body)
        } else {
            let compress = tokio::task::spawn_blocking(move || compression.apply(&body));
            compress.await.map_err(io::Error::other).flatten()
        };
        // Only memory could be missing.
        let body = compressed
            .map_err(|_| DeliveryError::Transient { reason: Reason::Protocol, retry_after: None })?;
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compression.name()));
        Ok(Self { headers, body: body.into() })
    }
}

fn plain(
    delivery: &Delivery,
    mode: Mode,
    own: &Own,
    overrides: &Overrides,
) -> Result<(HeaderMap, Vec<u8>), DeliveryError> {
    let mut mapped = Vec::with_capacity(delivery.events.len());
    for event in &delivery.events {
        mapped.push(CloudEvent::of(event)?.overridden(overrides));
    }
    let mut headers = HeaderMap::new();
    let body = match (mode, mapped.as_slice()) {
        (Mode::Structured, [one]) => {
            headers.insert(
                CONTENT_TYPE,
                HeaderValue::from_static("application/cloudevents+json; charset=UTF-8"),
            );
            one.structured()
        }
        (Mode::Binary, [one]) => {
            let binary = one.binary(own.header_values);
            for (name, value) in binary.headers {
                let header = HeaderName::from_bytes(name.as_bytes()).ok();
                let value = HeaderValue::from_bytes(value.as_bytes()).ok();
                let (Some(header), Some(value)) = (header, value) else {
                    return Err(DeliveryError::Rejected {
                        reason: Reason::Mapping,
                        status: None,
                        detail: format!("{name} can't be a header"),
                    });
                };
                headers.insert(header, value);
            }
            binary.body
        }
        (Mode::Batch, all) => {
            headers.insert(
                CONTENT_TYPE,
                HeaderValue::from_static("application/cloudevents-batch+json; charset=UTF-8"),
            );
            cloudevents::batch(all)
        }
        // Sinks in these modes are given one at a time.
        (Mode::Structured | Mode::Binary, _) => {
            return Err(DeliveryError::Rejected {
                reason: Reason::TooLarge,
                status: None,
                detail: "a request in this mode holds one event".to_owned(),
            });
        }
    };
    Ok((headers, body))
}

impl Compression {
    const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    fn apply(self, body: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip => {
                let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                writer.write_all(body)?;
                writer.finish()
            }
            Self::Zstd => zstd::stream::encode_all(body, zstd::DEFAULT_COMPRESSION_LEVEL),
        }
    }
}
