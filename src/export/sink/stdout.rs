//! CloudEvents as JSON lines.

use std::fmt;
use std::io;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Mutex;

use super::{Delivery, DeliveryError, Reason, Sink};
use crate::aep::cloudevents::CloudEvent;

/// Writes one structured CloudEvent a line to standard output, or to any writer.
pub struct StdoutSink {
    /// Guards the writer for one line at a time.
    writer: Mutex<Writer>,
}

struct Writer {
    to: Box<dyn AsyncWrite + Send + Unpin>,
    /// Whether an attempt ended within a line: the next one starts with a newline.
    within_a_line: bool,
}

impl fmt::Debug for StdoutSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StdoutSink").finish_non_exhaustive()
    }
}

impl StdoutSink {
    /// A sink to standard output.
    #[must_use]
    pub fn stdout() -> Self {
        Self::new(tokio::io::stdout())
    }

    /// A sink to any writer.
    #[must_use]
    pub fn new(writer: impl AsyncWrite + Send + Unpin + 'static) -> Self {
        Self { writer: Mutex::new(Writer { to: Box::new(writer), within_a_line: false }) }
    }
}

impl Sink for StdoutSink {
    /// One write and one flush. The reader's going away is [`DeliveryError::Closed`].
    ///
    /// # Cancel safety
    /// A future that is dropped may leave part of a line behind; the next event starts on a new one.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut lines = Vec::new();
        for event in &delivery.events {
            CloudEvent::of(event)?.write_structured(&mut lines);
            lines.push(b'\n');
        }
        let mut writer = self.writer.lock().await;
        if writer.within_a_line {
            lines.insert(0, b'\n');
        }
        writer.within_a_line = true;
        let written = match writer.to.write_all(&lines).await {
            Ok(()) => writer.to.flush().await,
            error => error,
        };
        writer.within_a_line = written.is_err();
        written.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => DeliveryError::Closed { reason: Reason::BrokenPipe },
            _ => DeliveryError::Transient { reason: Reason::Write, retry_after: None },
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::aep::Event;

    fn delivery() -> Delivery {
        let event = Event::parse_str(
            r#"{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":1}"#,
        );
        Delivery::of(event.unwrap())
    }

    #[tokio::test]
    async fn an_event_is_one_line() {
        let (mut reader, writer) = tokio::io::duplex(4096);
        let sink = StdoutSink::new(writer);
        sink.deliver(&delivery()).await.unwrap();
        sink.deliver(&delivery()).await.unwrap();
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).await.unwrap();
        let line = String::from_utf8(CloudEvent::of(&delivery().events[0]).unwrap().structured()).unwrap();
        assert_eq!(text, format!("{line}\n{line}\n"));
    }

    #[tokio::test]
    async fn a_reader_that_has_gone_is_the_end() {
        let (reader, writer) = tokio::io::duplex(4096);
        drop(reader);
        let error = StdoutSink::new(writer).deliver(&delivery()).await.unwrap_err();
        assert_eq!(error, DeliveryError::Closed { reason: Reason::BrokenPipe });
    }
}
