//! Events that the sink refused for good, kept readable and replayable.
//!
//! `dead-letters.jsonl` holds one JSON object a line:
//!
//! ```json
//! {"event":{…as received…},"sink":"https://h/p","reason":"status-4xx","status":400,"detail":"…",
//!  "attempts":1,"first":"2026-07-03T10:14:01.500Z","last":"2026-07-03T10:14:01.500Z"}
//! ```
//!
//! `status` is `null` when there is none; `first` and `last` are the times of the first and the last attempt.
//! When the file reaches half the bound it is renamed to `dead-letters.jsonl.1`, whose letters are dropped.
//! A batch of letters is flushed to disk before its events count as handled.

mod outbox;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::time::SystemTime;

use super::retry::rfc3339;
use super::sink::Reason;
use super::state_dir::{StateDir, private};
pub(crate) use outbox::Outbox;

use crate::aep::Event;
use crate::aep::json::write_string;

/// How many bytes of dead letters are kept by default: 64 MiB. One letter may exceed the bound.
pub const DEFAULT_BOUND: u64 = 64 << 20;

const CURRENT: &str = "dead-letters.jsonl";
const OLDER: &str = "dead-letters.jsonl.1";

/// One refused event.
#[derive(Debug, Clone)]
pub(crate) struct Letter {
    pub(crate) event: Event,
    pub(crate) reason: Reason,
    pub(crate) status: Option<u16>,
    pub(crate) detail: String,
    pub(crate) attempts: u32,
    pub(crate) first: SystemTime,
    pub(crate) last: SystemTime,
}

impl Letter {
    fn write(&self, sink: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"event\":");
        out.extend_from_slice(self.event.as_bytes());
        for (name, text) in [(",\"sink\":", sink), (",\"reason\":", self.reason.as_str())] {
            out.extend_from_slice(name.as_bytes());
            write_string(out, text);
        }
        let status = self.status.map_or_else(|| "null".to_owned(), |status| status.to_string());
        out.extend_from_slice(format!(",\"status\":{status},\"detail\":").as_bytes());
        write_string(out, &self.detail);
        let (first, last) = (rfc3339(self.first), rfc3339(self.last));
        let tail = format!(",\"attempts\":{},\"first\":\"{first}\",\"last\":\"{last}\"}}\n", self.attempts);
        out.extend_from_slice(tail.as_bytes());
    }
}

/// Where dead letters go, for blocking work.
#[derive(Debug)]
pub(crate) struct DeadLetters {
    /// `None` in memory-only mode: letters are logged by identity and dropped.
    dir: Option<Arc<StateDir>>,
    sink: String,
    bound: u64,
    /// Opened with the first letter.
    current: Option<Current>,
    /// Whether the last write failed.
    failing: bool,
}

#[derive(Debug)]
struct Current {
    /// Open at its end.
    file: File,
    /// Length, in bytes.
    length: u64,
}

impl DeadLetters {
    pub(crate) fn new(dir: Option<Arc<StateDir>>, sink: String, bound: u64) -> Self {
        Self { dir, sink, bound, current: None, failing: false }
    }

    /// Records letters, all or none: how many older ones were dropped for them.
    pub(crate) fn write<'l>(&mut self, letters: impl Iterator<Item = &'l Letter>) -> io::Result<u64> {
        let Some(dir) = self.dir.clone() else {
            for Letter { event, reason, status, .. } in letters {
                tracing::error!(
                    id = event.id(), source = event.source(), %reason, status,
                    "event refused by the sink and dropped: there is no state directory for dead letters"
                );
            }
            return Ok(0);
        };
        let mut lines = Vec::new();
        for letter in letters {
            letter.write(&self.sink, &mut lines);
        }
        let written = self.append(&dir, &lines);
        match &written {
            Ok(dropped) => {
                if *dropped > 0 {
                    tracing::error!(dropped, "dead letters are full: the oldest were dropped");
                }
                if std::mem::replace(&mut self.failing, false) {
                    tracing::info!("dead letters can be written again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(%error, "dead letters can't be written; their events are kept and retried");
                }
            }
        }
        written
    }

    fn append(&mut self, dir: &StateDir, lines: &[u8]) -> io::Result<u64> {
        let length = u64::try_from(lines.len()).unwrap_or(u64::MAX);
        let mut current = match self.current.take() {
            Some(current) => current,
            None => Current::open(dir)?,
        };
        let mut dropped = 0;
        if current.length > 0 && current.length.saturating_add(length) > self.bound / 2 {
            dropped = count_lines(dir)?;
            fs::rename(dir.file(CURRENT), dir.file(OLDER))?;
            current = Current::open(dir)?;
            dir.sync()?;
        }
        match current.file.write_all(lines).and_then(|()| current.file.sync_data()) {
            Ok(()) => {
                current.length = current.length.saturating_add(length);
                self.current = Some(current);
                Ok(dropped)
            }
            Err(error) => {
                // Opened anew next time, when a torn line is ended if it can't be cut off now.
                drop(current.file.set_len(current.length));
                Err(error)
            }
        }
    }
}

impl Current {
    fn open(dir: &StateDir) -> io::Result<Self> {
        let mut file = private().create(true).truncate(false).open(dir.file(CURRENT))?;
        let mut length = file.seek(SeekFrom::End(0))?;
        if length > 0 {
            let mut last = [0];
            file.seek(SeekFrom::Start(length.saturating_sub(1)))?;
            io::Read::read_exact(&mut file, &mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
                length = length.saturating_add(1);
            }
        }
        Ok(Self { file, length })
    }
}

/// How many letters are in the older half.
fn count_lines(dir: &StateDir) -> io::Result<u64> {
    let mut reader = match File::open(dir.file(OLDER)) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut lines: u64 = 0;
    while reader.skip_until(b'\n')? > 0 {
        lines = lines.saturating_add(1);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(id: &str) -> Letter {
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{id}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":1, "data":{{"x": 1.0}}}}"#
        ));
        Letter {
            event: event.unwrap(),
            reason: Reason::Status4xx,
            status: Some(400),
            detail: "no \"good\"".to_owned(),
            attempts: 2,
            first: SystemTime::UNIX_EPOCH,
            last: SystemTime::UNIX_EPOCH,
        }
    }

    fn letters(bound: u64) -> (tempfile::TempDir, Arc<StateDir>, DeadLetters) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Arc::new(StateDir::open(temp.path()).unwrap());
        let letters = DeadLetters::new(Some(Arc::clone(&dir)), "https://h/p".to_owned(), bound);
        (temp, dir, letters)
    }

    #[test]
    fn a_letter_is_one_line_with_the_original_bytes() {
        let (_temp, dir, mut letters) = letters(DEFAULT_BOUND);
        letters.write([letter("1"), letter("2")].iter()).unwrap();
        let text = fs::read_to_string(dir.file(CURRENT)).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with(&format!("{{\"event\":{}", letter("1").event.as_str())));
        assert!(lines[0].ends_with(
            r#","sink":"https://h/p","reason":"status-4xx","status":400,"detail":"no \"good\"","attempts":2,"first":"1970-01-01T00:00:00.000Z","last":"1970-01-01T00:00:00.000Z"}"#
        ));
        serde_json::from_str::<serde_json::Value>(lines[1]).unwrap();
    }

    #[test]
    fn a_full_store_drops_its_older_half_and_says_how_many() {
        let (_temp, dir, mut letters) = letters(2000);
        let dropped: u64 = (0..20).map(|n| letters.write([letter(&n.to_string())].iter()).unwrap()).sum();
        let read = |name| fs::read_to_string(dir.file(name)).unwrap();
        let (older, current) = (read(OLDER), read(CURRENT));
        assert!(older.len() + current.len() <= 2000);
        assert_eq!(older.lines().count() as u64 + current.lines().count() as u64 + dropped, 20);
        assert!(current.contains(r#""id":"19""#));
    }

    #[test]
    fn a_torn_line_never_swallows_the_next_letter() {
        let (_temp, dir, mut letters) = letters(DEFAULT_BOUND);
        fs::write(dir.file(CURRENT), "{\"event\":{\"ae").unwrap();
        letters.write([letter("1")].iter()).unwrap();
        let text = fs::read_to_string(dir.file(CURRENT)).unwrap();
        assert!(text.lines().nth(1).unwrap().starts_with("{\"event\":{\"aep\""));
    }

    #[test]
    fn a_failure_to_write_is_an_error_and_heals() {
        let (_temp, dir, mut letters) = letters(DEFAULT_BOUND);
        fs::create_dir(dir.file(CURRENT)).unwrap();
        letters.write([letter("1")].iter()).unwrap_err();
        fs::remove_dir(dir.file(CURRENT)).unwrap();
        letters.write([letter("1")].iter()).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let (_temp, dir, mut letters) = letters(DEFAULT_BOUND);
        letters.write([letter("1")].iter()).unwrap();
        assert_eq!(fs::metadata(dir.file(CURRENT)).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
