//! Events from JSON lines: a file, or standard input.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncBufRead, AsyncBufReadExt};

use super::{Feed, FeedError};
use crate::aep::capture::{Capture, down_level};
use crate::aep::{Event, EventError, Filter, Registry};

/// A line that holds no legal event. It is reported and skipped.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {error}")]
pub struct BadLine {
    /// The physical line, counted from 1, blank lines included.
    pub line: u64,
    /// What is wrong with it.
    pub error: BadLineError,
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub enum BadLineError {
    /// It isn't one legal event.
    #[error(transparent)]
    Event(#[from] EventError),
    /// It is longer than the feed's bound, and wasn't kept.
    #[error("longer than {0} bytes")]
    TooLong(usize),
}

/// How far a [`FileFeed`] has read. Clones share the counts, which stay readable while the feed runs.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    bytes: AtomicU64,
    lines: AtomicU64,
    events: AtomicU64,
    bad: AtomicU64,
}

impl Progress {
    /// Bytes read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Physical lines read.
    #[must_use]
    pub fn lines(&self) -> u64 {
        self.0.lines.load(Ordering::Relaxed)
    }

    /// Legal events read, those that the filter drops included.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.0.events.load(Ordering::Relaxed)
    }

    /// Bad lines.
    #[must_use]
    pub fn bad_lines(&self) -> u64 {
        self.0.bad.load(Ordering::Relaxed)
    }
}

/// A feed of JSON lines. A bad line never stops it; blank lines are ignored; the last line needs no newline.
///
/// Memory is bounded by the longest allowed line and the reader's own buffer.
pub struct FileFeed<R> {
    reader: R,
    filter: Filter,
    ceiling: Option<(Capture, Arc<Registry>)>,
    on_bad_line: Box<dyn FnMut(BadLine) + Send>,
    progress: Progress,
    max_line: usize,
    /// The line read so far, without its newline.
    line: Vec<u8>,
    /// Whether the line has outgrown `max_line`, and is being skipped.
    too_long: bool,
    ended: bool,
}

impl<R> std::fmt::Debug for FileFeed<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileFeed").field("progress", &self.progress).finish_non_exhaustive()
    }
}

impl<R: AsyncBufRead + Unpin + Send> FileFeed<R> {
    /// A feed of every event in `reader`; a line longer than `max_line` bytes is a bad line.
    pub fn new(reader: R, max_line: NonZeroUsize) -> Self {
        Self {
            reader,
            filter: Filter::default(),
            ceiling: None,
            on_bad_line: Box::new(|_| {}),
            progress: Progress::default(),
            max_line: max_line.get(),
            line: Vec::new(),
            too_long: false,
            ended: false,
        }
    }

    /// Only events that `filter` matches. It is applied before the ceiling.
    #[must_use]
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// Lowers every event to `ceiling`.
    #[must_use]
    pub fn ceiling(mut self, ceiling: Capture, registry: Arc<Registry>) -> Self {
        self.ceiling = Some((ceiling, registry));
        self
    }

    /// Calls `report` with every bad line, in order.
    #[must_use]
    pub fn on_bad_line(mut self, report: impl FnMut(BadLine) + Send + 'static) -> Self {
        self.on_bad_line = Box::new(report);
        self
    }

    /// How far the feed has read.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Takes in bytes of the current line.
    fn extend(&mut self, part: &[u8]) {
        if self.too_long || self.line.len().saturating_add(part.len()) > self.max_line {
            self.too_long = true;
            self.line = Vec::new();
        } else {
            self.line.extend_from_slice(part);
        }
    }

    /// Ends the current line: its event, when it holds one that is wanted.
    fn end_line(&mut self) -> Option<Event> {
        let line = self.progress.0.lines.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let parsed = if self.too_long {
            Err(BadLineError::TooLong(self.max_line))
        } else if self.line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            self.line.clear();
            return None;
        } else {
            Event::parse(&self.line).map_err(BadLineError::Event)
        };
        self.line.clear();
        self.too_long = false;
        match parsed {
            Ok(event) => {
                self.progress.0.events.fetch_add(1, Ordering::Relaxed);
                self.filter.matches(&event).then(|| match &self.ceiling {
                    Some((ceiling, registry)) => down_level(&event, *ceiling, registry),
                    None => event,
                })
            }
            Err(error) => {
                self.progress.0.bad.fetch_add(1, Ordering::Relaxed);
                (self.on_bad_line)(BadLine { line, error });
                None
            }
        }
    }
}

impl<R: AsyncBufRead + Unpin + Send> Feed for FileFeed<R> {
    /// # Cancel safety
    /// Cancel safe: the only wait is for the reader's buffer, and what was read of a line is kept.
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        while !self.ended {
            let chunk = self.reader.fill_buf().await?.to_vec();
            let mut batch = Vec::new();
            if chunk.is_empty() {
                self.ended = true;
                if !self.line.is_empty() || self.too_long {
                    batch.extend(self.end_line());
                }
            } else {
                self.reader.consume(chunk.len());
                let bytes = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
                self.progress.0.bytes.fetch_add(bytes, Ordering::Relaxed);
                let mut rest = chunk.as_slice();
                while let Some((line, tail)) =
                    memchr::memchr(b'\n', rest).and_then(|at| rest.split_at_checked(at))
                {
                    self.extend(line);
                    batch.extend(self.end_line());
                    rest = tail.get(1..).unwrap_or_default();
                }
                self.extend(rest);
            }
            if !batch.is_empty() {
                return Ok(Some(batch));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::io::BufReader;

    use super::*;

    fn line(id: &str) -> String {
        format!(
            r#"{{"aep":"0.1","id":"{id}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":1}}"#
        )
    }

    /// The ids and the bad lines of a text, read through a buffer of `buffer` bytes.
    async fn read(text: &[u8], buffer: usize, max_line: usize) -> (Vec<String>, Vec<String>, Progress) {
        let bad = Arc::new(Mutex::new(Vec::new()));
        let reported = Arc::clone(&bad);
        let mut feed =
            FileFeed::new(BufReader::with_capacity(buffer, text), NonZeroUsize::new(max_line).unwrap())
                .filter(Filter::parse(r#"{"type":"run.*"}"#).unwrap())
                .on_bad_line(move |bad| reported.lock().unwrap().push(bad.to_string()));
        let progress = feed.progress();
        let mut ids = Vec::new();
        while let Some(batch) = feed.next().await.unwrap() {
            ids.extend(batch.iter().map(|event| event.id().to_owned()));
        }
        assert!(feed.next().await.unwrap().is_none());
        (ids, std::mem::take(&mut bad.lock().unwrap()), progress)
    }

    #[tokio::test]
    async fn bad_lines_are_reported_by_number_and_never_stop_the_feed() {
        let mut text = format!("{}\r\n\n \t\r\nnot json\n", line("1")).into_bytes();
        text.extend_from_slice(b"\"\xff\"\n");
        text.extend_from_slice(format!("{}\n{}\n{}", "x".repeat(500), line("2"), line("3")).as_bytes());
        for buffer in [1, 7, 64, 8192] {
            let (ids, bad, progress) = read(&text, buffer, 300).await;
            assert_eq!(ids, ["1", "2", "3"], "buffer {buffer}");
            assert_eq!(bad.len(), 3, "{bad:?}");
            assert!(bad[0].starts_with("line 4: "), "{bad:?}");
            assert!(bad[1].starts_with("line 5: "), "{bad:?}");
            assert_eq!(bad[2], "line 6: longer than 300 bytes");
            assert_eq!(progress.lines(), 8);
            assert_eq!(progress.bytes(), text.len() as u64);
            assert_eq!((progress.events(), progress.bad_lines()), (3, 3));
        }
    }

    #[tokio::test]
    async fn an_endless_line_takes_no_memory() {
        let text = vec![b'x'; 1 << 20];
        let mut feed = FileFeed::new(BufReader::new(text.as_slice()), NonZeroUsize::new(100).unwrap());
        assert!(feed.next().await.unwrap().is_none());
        assert_eq!(feed.line.capacity(), 0);
        assert_eq!(feed.progress().bad_lines(), 1);
    }

    #[tokio::test]
    async fn filter_and_ceiling_are_applied() {
        let text = format!(
            "{}\n{}\n",
            line("1").replace("run.started", "session.started"),
            line("2").replace(r#""seq":1"#, r#""seq":1,"capture":"full","data":{"x":"secret"}"#)
        );
        let mut feed = FileFeed::new(text.as_bytes(), NonZeroUsize::new(1000).unwrap())
            .filter(Filter::parse(r#"{"type":"run.started"}"#).unwrap())
            .ceiling(Capture::None, Arc::new(Registry::core()));
        let batch = feed.next().await.unwrap().unwrap();
        assert_eq!(batch.len(), 1);
        assert_eq!(batch[0].capture(), Capture::None);
        assert!(!batch[0].as_str().contains("secret"));
    }
}
