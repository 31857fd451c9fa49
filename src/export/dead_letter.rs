//! Events that a sink refused for good, kept readable and replayable.
//!
//! `dead-letters/<sink>.jsonl` holds one JSON object a line:
//!
//! ```json
//! {"event":{…as received…},"sink":"https://h/p","reason":"status-4xx","status":400,"detail":"…",
//!  "attempts":1,"first":"2026-07-03T10:14:01.500Z","last":"2026-07-03T10:14:01.500Z"}
//! ```
//!
//! `event` is what the sink was to get: lowered to its capture ceiling. `status` is `null` when there is none;
//! `first` and `last` are the times of the first and the last attempt. When the file reaches half the bound it is
//! renamed to `<sink>.jsonl.1`, whose letters are dropped. A batch of letters is flushed to disk before its events
//! count as handled.
//!
//! `dead-letters/lock` is locked by whoever changes or reads the files, for as long as that takes, so that letters
//! can be listed, replayed and dropped while a sidecar writes new ones. Nobody keeps a file open.

mod outbox;
pub mod shelf;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::retry::rfc3339;
use super::sink::Reason;
use super::state_dir::{private, private_folder};
pub(crate) use outbox::{Batch, Desk, Kept, Outbox};

use crate::aep::Event;
use crate::aep::json::write_string;

/// How many bytes of dead letters are kept by default: 64 MiB. One letter may exceed the bound.
pub const DEFAULT_BOUND: u64 = 64 << 20;

/// Where the files are, within the state directory.
const FOLDER: &str = "dead-letters";

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

    /// The event with why it was refused as extension attributes; as it is when it can't take them.
    fn annotated(&self, sink: &str) -> Event {
        let mut text = self.event.as_bytes().to_vec();
        // One object, so that this is its closing brace.
        text.pop();
        text.extend_from_slice(b",\"deadlettersink\":");
        write_string(&mut text, sink);
        text.extend_from_slice(b",\"deadletterreason\":");
        write_string(&mut text, self.reason.as_str());
        if let Some(status) = self.status {
            text.extend_from_slice(format!(",\"deadletterstatus\":{status}").as_bytes());
        }
        text.push(b'}');
        Event::parse(&text).unwrap_or_else(|_| self.event.clone())
    }
}

/// Where the dead letters of one sink go, for blocking work.
#[derive(Debug)]
pub(crate) struct DeadLetters {
    /// `None` in memory-only mode: letters are logged by identity and dropped.
    files: Option<Files>,
    /// What the letters call the sink.
    sink: String,
    bound: u64,
    /// Whether the last write failed.
    failing: bool,
}

/// The files of one sink's dead letters.
#[derive(Debug)]
struct Files {
    folder: PathBuf,
    current: PathBuf,
    older: PathBuf,
}

impl Files {
    fn of(state: &Path, name: &str) -> Self {
        let folder = state.join(FOLDER);
        Self {
            current: folder.join(format!("{name}.jsonl")),
            older: folder.join(format!("{name}.jsonl.1")),
            folder,
        }
    }

    /// Makes the folder and waits for the lock, which ends with the file.
    fn lock(&self) -> io::Result<File> {
        private_folder(&self.folder)?;
        let lock = private().create(true).truncate(false).open(self.folder.join("lock"))?;
        lock.lock()?;
        Ok(lock)
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }
}

impl DeadLetters {
    /// Those of the sink `name`, kept in the state directory `state`, where they call the sink `shown`.
    pub(crate) fn new(state: Option<&Path>, name: &str, shown: String, bound: u64) -> Self {
        Self { files: state.map(|state| Files::of(state, name)), sink: shown, bound, failing: false }
    }

    /// Records letters, all or none: how many older ones were dropped for them.
    pub(crate) fn write<'l>(&mut self, letters: impl Iterator<Item = &'l Letter>) -> io::Result<u64> {
        let Some(files) = &self.files else {
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
        let written = append(files, &lines, self.bound);
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
}

fn append(files: &Files, lines: &[u8], bound: u64) -> io::Result<u64> {
    let _lock = files.lock()?;
    let length = u64::try_from(lines.len()).unwrap_or(u64::MAX);
    let (mut file, mut before) = open(&files.current)?;
    let mut dropped = 0;
    if before > 0 && before.saturating_add(length) > bound / 2 {
        dropped = count_lines(&files.older)?;
        fs::rename(&files.current, &files.older)?;
        (file, before) = open(&files.current)?;
    }
    if before == 0 {
        files.sync()?;
    }
    file.write_all(lines).and_then(|()| file.sync_data()).inspect_err(|_| {
        // A torn line that can't be cut off now is ended by the next write.
        drop(file.set_len(before));
    })?;
    Ok(dropped)
}

/// The file, at its end, and its length. A line that a crash left unfinished is ended.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let mut file = private().create(true).truncate(false).open(path)?;
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
    Ok((file, length))
}

/// How many letters are in the older half.
fn count_lines(path: &Path) -> io::Result<u64> {
    let mut reader = match File::open(path) {
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
pub(crate) mod tests {
    use super::*;

    pub(crate) fn letter(id: &str) -> Letter {
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

    fn letters(bound: u64) -> (tempfile::TempDir, Files, DeadLetters) {
        let temp = tempfile::tempdir().unwrap();
        let letters = DeadLetters::new(Some(temp.path()), "bus", "https://h/p".to_owned(), bound);
        let files = Files::of(temp.path(), "bus");
        (temp, files, letters)
    }

    #[test]
    fn a_letter_is_one_line_with_the_original_bytes() {
        let (_temp, files, mut letters) = letters(DEFAULT_BOUND);
        letters.write([letter("1"), letter("2")].iter()).unwrap();
        let text = fs::read_to_string(files.current).unwrap();
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
        let (_temp, files, mut letters) = letters(2000);
        let dropped: u64 = (0..20).map(|n| letters.write([letter(&n.to_string())].iter()).unwrap()).sum();
        let (older, current) =
            (fs::read_to_string(files.older).unwrap(), fs::read_to_string(files.current).unwrap());
        assert!(older.len() + current.len() <= 2000);
        assert_eq!(older.lines().count() as u64 + current.lines().count() as u64 + dropped, 20);
        assert!(current.contains(r#""id":"19""#));
    }

    #[test]
    fn a_torn_line_never_swallows_the_next_letter() {
        let (_temp, files, mut letters) = letters(DEFAULT_BOUND);
        fs::create_dir_all(&files.folder).unwrap();
        fs::write(&files.current, "{\"event\":{\"ae").unwrap();
        letters.write([letter("1")].iter()).unwrap();
        let text = fs::read_to_string(files.current).unwrap();
        assert!(text.lines().nth(1).unwrap().starts_with("{\"event\":{\"aep\""));
    }

    #[test]
    fn a_failure_to_write_is_an_error_and_heals() {
        let (_temp, files, mut letters) = letters(DEFAULT_BOUND);
        fs::create_dir_all(&files.current).unwrap();
        letters.write([letter("1")].iter()).unwrap_err();
        fs::remove_dir(files.current).unwrap();
        letters.write([letter("1")].iter()).unwrap();
    }

    #[test]
    fn an_annotated_event_says_why() {
        let event = letter("1").annotated("bus");
        let text = event.as_str();
        assert!(
            text.ends_with(
                r#","deadlettersink":"bus","deadletterreason":"status-4xx","deadletterstatus":400}"#
            ),
            "{text}"
        );
        let again = Letter { event: event.clone(), ..letter("1") };
        assert_eq!(again.annotated("bus"), event, "a name that is taken is left alone");
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let (_temp, files, mut letters) = letters(DEFAULT_BOUND);
        letters.write([letter("1")].iter()).unwrap();
        assert_eq!(fs::metadata(files.current).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
