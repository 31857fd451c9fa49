//! The files: which one is written to, when the next one begins, and how a torn one is mended.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::num::NonZeroUsize;
#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::export::retry::rfc3339;

const PREFIX: &str = "events-";
const SUFFIX: &str = ".jsonl";
const LOCK: &str = ".lock";

/// When a file is full, and how many are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rotation {
    /// A file of this size or more gets no further line, in bytes.
    pub(super) bytes: u64,
    /// Nor does one that is this old.
    pub(super) after: Duration,
    /// How many files are kept, the one that is written to included; all without.
    pub(super) keep: Option<NonZeroUsize>,
}

/// Writes to a directory. Everything blocks.
#[derive(Debug)]
pub(super) struct Writer {
    directory: PathBuf,
    rotation: Rotation,
    /// Held from the first delivery on.
    lock: Option<File>,
    /// What is written to; none before the first delivery and after a failure.
    open: Option<Open>,
    /// What last went wrong, to tell it once.
    told: Option<String>,
}

#[derive(Debug)]
struct Open {
    file: File,
    /// Its whole lines, in bytes; what is beyond is of no acknowledged line.
    length: u64,
    since: SystemTime,
}

impl Writer {
    pub(super) fn new(directory: PathBuf, rotation: Rotation) -> Self {
        Self { directory, rotation, lock: None, open: None, told: None }
    }

    /// Writes whole lines and flushes them to the disk. After a failure none of them counts as written, and what there
    /// is of them is cut off where that can be done.
    pub(super) fn append(&mut self, lines: &[u8], now: SystemTime) -> io::Result<()> {
        let written = self.write(lines, now);
        let trouble = written.as_ref().err().map(ToString::to_string);
        if self.told != trouble {
            if let Some(error) = &trouble {
                tracing::warn!(directory = %self.directory.display(), error, "events can't be written to files");
            }
            self.told = trouble;
        }
        written
    }

    fn write(&mut self, lines: &[u8], now: SystemTime) -> io::Result<()> {
        self.lock()?;
        let mut open = match self.open.take() {
            Some(open) => open,
            None => match newest(&self.directory)? {
                Some(name) => reopen(&self.directory.join(&name), &name, now)?,
                None => self.create(now)?,
            },
        };
        let age = now.duration_since(open.since).unwrap_or_default();
        // An empty file holds nothing that a new one could part from the next lines.
        if open.length > 0 && (open.length >= self.rotation.bytes || age >= self.rotation.after) {
            open = self.create(now)?;
            self.drop_oldest()?;
        }
        let written = open.file.write_all(lines).and_then(|()| open.file.sync_data());
        match written {
            Ok(()) => {
                open.length = open.length.saturating_add(u64::try_from(lines.len()).unwrap_or(u64::MAX));
                self.open = Some(open);
                Ok(())
            }
            Err(error) => {
                // The file is opened and looked at anew by the next attempt: after a failed flush the system may hold
                // for written what isn't.
                drop(open.file.set_len(open.length));
                Err(error)
            }
        }
    }

    fn lock(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        builder.mode(0o750);
        builder.recursive(true).create(&self.directory)?;
        let file = shut().write(true).create(true).truncate(false).open(self.directory.join(LOCK))?;
        match file.try_lock() {
            Ok(()) => {
                self.lock = Some(file);
                Ok(())
            }
            Err(TryLockError::WouldBlock) => Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                "another process writes to this directory: each sidecar needs its own",
            )),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Begins a new file, whose name is on the disk before its first line is.
    fn create(&self, now: SystemTime) -> io::Result<Open> {
        let mut time = now;
        loop {
            let path = self.directory.join(name(time));
            match shut().append(true).create_new(true).open(&path) {
                Ok(file) => {
                    File::open(&self.directory)?.sync_all()?;
                    return Ok(Open { file, length: 0, since: now });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    time = time.checked_add(Duration::from_millis(1)).ok_or(error)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn drop_oldest(&self) -> io::Result<()> {
        let Some(keep) = self.rotation.keep else { return Ok(()) };
        let names = names(&self.directory)?;
        for name in names.iter().take(names.len().saturating_sub(keep.get())) {
            std::fs::remove_file(self.directory.join(name))?;
            tracing::info!(file = name, "the oldest file of events is dropped: so many are kept");
        }
        Ok(())
    }
}

/// For files that only their owner and its group may read.
fn shut() -> OpenOptions {
    #[allow(unused_mut, reason = "where there are no modes, nothing is changed")]
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    options.mode(0o640);
    options
}

/// A file's name, in which names sort as their times do.
fn name(time: SystemTime) -> String {
    format!("{PREFIX}{}{SUFFIX}", rfc3339(time).replace(['-', ':'], ""))
}

/// The names of files of events, the oldest first.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let time = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        let digits = |time: &str| time.bytes().all(|byte| byte.is_ascii_digit() || b"TZ.".contains(&byte));
        if time.is_some_and(|time| time.len() == "20260703T101401.500Z".len() && digits(time)) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn newest(directory: &Path) -> io::Result<Option<String>> {
    Ok(names(directory)?.pop())
}

/// Opens a file to go on with it, and cuts off what follows its last newline.
fn reopen(path: &Path, name: &str, now: SystemTime) -> io::Result<Open> {
    let mut file = OpenOptions::new().read(true).append(true).open(path)?;
    let size = file.metadata()?.len();
    let length = end_of_lines(&mut file, size)?;
    if length < size {
        tracing::warn!(
            file = name,
            bytes = size.saturating_sub(length),
            "a torn line is cut off: its event comes again"
        );
        file.set_len(length)?;
        file.sync_data()?;
    }
    Ok(Open { file, length, since: time(name).unwrap_or(now) })
}

/// Where the last newline ends, in bytes.
fn end_of_lines(file: &mut File, size: u64) -> io::Result<u64> {
    /// How much is read at once, backwards.
    const CHUNK: u64 = 64 << 10;
    let mut end = size;
    while end > 0 {
        let start = end.saturating_sub(CHUNK);
        file.seek(SeekFrom::Start(start))?;
        let mut chunk = Vec::new();
        (&*file).take(end.saturating_sub(start)).read_to_end(&mut chunk)?;
        if let Some(at) = memchr::memrchr(b'\n', &chunk) {
            return Ok(start.saturating_add(u64::try_from(at).unwrap_or(u64::MAX)).saturating_add(1));
        }
        end = start;
    }
    Ok(0)
}

/// When a file was begun, by its name.
fn time(name: &str) -> Option<SystemTime> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let (date, clock) = digits.split_once('T')?;
    let (year, rest) = date.split_at_checked(4)?;
    let (month, day) = rest.split_at_checked(2)?;
    let (hours, rest) = clock.split_at_checked(2)?;
    let (minutes, seconds) = rest.split_at_checked(2)?;
    humantime::parse_rfc3339(&format!("{year}-{month}-{day}T{hours}:{minutes}:{seconds}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn writer(directory: &Path, bytes: u64, keep: Option<usize>) -> Writer {
        let keep = keep.and_then(NonZeroUsize::new);
        Writer::new(directory.to_owned(), Rotation { bytes, after: 10 * SECOND, keep })
    }

    fn contents(directory: &Path) -> Vec<String> {
        let names = names(directory).unwrap();
        names.iter().map(|name| std::fs::read_to_string(directory.join(name)).unwrap()).collect()
    }

    #[test]
    fn a_name_is_a_time() {
        assert_eq!(name(at(1_783_073_641)), "events-20260703T101401.000Z.jsonl");
        let now = at(1_783_073_641) + Duration::from_millis(5);
        assert_eq!(time(&name(now)), Some(now));
        assert_eq!(time("events-x.jsonl"), None);
    }

    #[test]
    fn files_are_parted_by_size_and_age_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("events-mine.jsonl"), "x").unwrap();
        let mut writer = writer(dir.path(), 4, Some(2));
        for (line, now) in [("a\n", 0), ("b\n", 1), ("c\n", 2), ("d\n", 12), ("e\n", 13)] {
            writer.append(line.as_bytes(), at(now)).unwrap();
        }
        assert_eq!(contents(dir.path()), ["c\n", "d\ne\n"]);
        assert!(dir.path().join("events-mine.jsonl").exists(), "what isn't its own stays");
    }

    #[test]
    fn several_files_of_one_moment_have_names_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = writer(dir.path(), 1, None);
        for line in ["a\n", "b\n", "c\n"] {
            writer.append(line.as_bytes(), at(0)).unwrap();
        }
        assert_eq!(contents(dir.path()), ["a\n", "b\n", "c\n"]);
    }

    #[test]
    fn a_torn_tail_is_cut_off_and_the_file_goes_on() {
        let whole = "x".repeat(100_000) + "\n";
        for (tail, expected) in [("", &*whole), ("{\"torn", &whole), (&"y".repeat(200_000), &whole)] {
            let dir = tempfile::tempdir().unwrap();
            writer(dir.path(), 1 << 20, None).append(whole.as_bytes(), at(0)).unwrap();
            let path = dir.path().join(name(at(0)));
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(tail.as_bytes()).unwrap();
            writer(dir.path(), 1 << 20, None).append(b"next\n", at(1)).unwrap();
            assert_eq!(contents(dir.path()), [format!("{expected}next\n")]);
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(name(at(0))), "only torn").unwrap();
        writer(dir.path(), 1 << 20, None).append(b"next\n", at(1)).unwrap();
        assert_eq!(contents(dir.path()), ["next\n"]);
    }

    #[test]
    fn a_directory_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = writer(dir.path(), 1 << 20, None);
        first.append(b"a\n", at(0)).unwrap();
        let mut second = writer(dir.path(), 1 << 20, None);
        assert_eq!(second.append(b"b\n", at(0)).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        second.append(b"b\n", at(0)).unwrap();
        assert_eq!(contents(dir.path()), ["a\nb\n"]);
    }
}
