//! Dead letters as a person sees them: listed, taken out, put to use again.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{FOLDER, Files};
use crate::aep::{Event, EventError};
use crate::export::state_dir::private;

/// One sink's dead letters. Usable while a sidecar writes new ones.
#[derive(Debug)]
pub struct Shelf {
    files: Files,
}

/// A dead letter as it stands in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shelved {
    /// The whole line, without its newline.
    pub line: String,
}

/// What a letter says.
#[derive(Debug, Deserialize)]
pub struct Written<'l> {
    #[serde(borrow)]
    event: &'l RawValue,
    /// The sink as it was configured, without secrets.
    pub sink: String,
    /// Why the event was refused.
    pub reason: String,
    /// The HTTP status, when there was one.
    pub status: Option<u16>,
    /// What the sink said.
    pub detail: String,
    /// How often it was tried.
    pub attempts: u32,
    /// When it was tried first, RFC 3339.
    pub first: String,
    /// When it was tried last, RFC 3339.
    pub last: String,
}

impl Written<'_> {
    /// The refused event.
    ///
    /// # Errors
    /// When it is no legal event.
    pub fn event(&self) -> Result<Event, EventError> {
        Event::parse_str(self.event.get())
    }
}

impl Shelved {
    /// Reads the letter.
    ///
    /// # Errors
    /// When the line isn't one, as one that a crash left unfinished.
    pub fn read(&self) -> Result<Written<'_>, serde_json::Error> {
        serde_json::from_str(&self.line)
    }
}

impl Shelf {
    /// The dead letters of the sink `name` in the state directory.
    #[must_use]
    pub fn of(state: &Path, name: &str) -> Self {
        Self { files: Files::of(state, name) }
    }

    /// The names of the sinks that have dead letters, in order.
    ///
    /// # Errors
    /// When the folder can't be read.
    pub fn names(state: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(state.join(FOLDER)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let name = name.to_str().unwrap_or_default();
            names.extend(
                name.strip_suffix(".jsonl").or_else(|| name.strip_suffix(".jsonl.1")).map(str::to_owned),
            );
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Hands out every letter that is there when it is called, the oldest first, until `each` says to stop. However
    /// long that takes, new ones can be written meanwhile.
    ///
    /// # Errors
    /// When the files can't be read, or `each` fails.
    pub fn read(&self, mut each: impl FnMut(Shelved) -> io::Result<()>) -> io::Result<()> {
        if !self.files.folder.is_dir() {
            return Ok(());
        }
        // What is there now, and no longer locked than it takes to say so: whoever reads may be slow, a person with a
        // pager for instance, and no sink can put down a letter while the lock is held.
        let files = {
            let _lock = self.files.lock()?;
            [lines(&self.files.older)?, lines(&self.files.current)?]
        };
        for line in files.into_iter().flatten() {
            each(Shelved { line: line? })?;
        }
        Ok(())
    }

    /// Takes out the letters that `take` picks: how many there were. What is left is flushed to disk before the old
    /// files go.
    ///
    /// # Errors
    /// When the files can't be read or written; every letter is still there then, or has been taken.
    pub fn remove(&self, mut take: impl FnMut(&Shelved) -> bool) -> io::Result<u64> {
        if !self.files.folder.is_dir() {
            return Ok(0);
        }
        let _lock = self.files.lock()?;
        let mut taken = 0;
        for path in [&self.files.older, &self.files.current] {
            let temporary = temporary(path);
            let mut rest = io::BufWriter::new(private().create(true).truncate(true).open(&temporary)?);
            let (mut took, mut left) = (0, 0_u64);
            for line in lines(path)? {
                let letter = Shelved { line: line? };
                if take(&letter) {
                    took += 1;
                } else {
                    left += 1;
                    rest.write_all(letter.line.as_bytes()).and_then(|()| rest.write_all(b"\n"))?;
                }
            }
            rest.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            match (took, left) {
                (0, _) => fs::remove_file(&temporary)?,
                (_, 0) => {
                    fs::remove_file(path)?;
                    fs::remove_file(&temporary)?;
                }
                _ => fs::rename(&temporary, path)?,
            }
            taken += took;
        }
        self.files.sync()?;
        Ok(taken)
    }
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

/// The lines that a file has now, none when there is no such file. Bytes that aren't UTF-8 are replaced: such a line is no letter.
fn lines(path: &Path) -> io::Result<impl Iterator<Item = io::Result<String>>> {
    let file = match File::open(path) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let length = file.as_ref().map_or(Ok(0), |file| file.metadata().map(|metadata| metadata.len()))?;
    let lines = file.map(|file| BufReader::new(file.take(length)).split(b'\n'));
    Ok(lines.into_iter().flatten().map(|line| line.map(|line| String::from_utf8_lossy(&line).into_owned())))
}

#[cfg(test)]
mod tests {
    use super::super::tests::letter;
    use super::super::{DEFAULT_BOUND, DeadLetters};
    use super::*;

    fn ids(shelf: &Shelf) -> Vec<String> {
        let mut ids = Vec::new();
        shelf
            .read(|letter| {
                ids.push(letter.read().unwrap().event().unwrap().id().to_owned());
                Ok(())
            })
            .unwrap();
        ids
    }

    #[test]
    fn letters_are_read_and_taken_while_new_ones_come() {
        let temp = tempfile::tempdir().unwrap();
        let mut letters = DeadLetters::new(Some(temp.path()), "bus", "https://h/p".to_owned(), DEFAULT_BOUND);
        let shelf = Shelf::of(temp.path(), "bus");
        assert_eq!(ids(&shelf), Vec::<String>::new());
        letters.write([letter("1"), letter("2"), letter("3")].iter()).unwrap();
        assert_eq!(Shelf::names(temp.path()).unwrap(), ["bus"]);
        let taken = shelf.remove(|letter| letter.line.contains(r#""id":"2""#)).unwrap();
        letters.write([letter("4")].iter()).unwrap();
        assert_eq!((taken, ids(&shelf)), (1, vec!["1".to_owned(), "3".to_owned(), "4".to_owned()]));
        assert_eq!(shelf.remove(|_| true).unwrap(), 3);
        assert_eq!(Shelf::names(temp.path()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn both_halves_are_read_the_older_first() {
        let temp = tempfile::tempdir().unwrap();
        let mut letters = DeadLetters::new(Some(temp.path()), "bus", "https://h/p".to_owned(), 2000);
        for n in 0..4 {
            letters.write([letter(&n.to_string())].iter()).unwrap();
        }
        assert_eq!(ids(&Shelf::of(temp.path(), "bus")), ["0", "1", "2", "3"]);
        assert!(temp.path().join("dead-letters/bus.jsonl.1").exists());
    }

    #[test]
    fn a_slow_reader_keeps_nobody_from_writing() {
        let temp = tempfile::tempdir().unwrap();
        let mut letters = DeadLetters::new(Some(temp.path()), "bus", "https://h/p".to_owned(), 2000);
        letters.write([letter("1"), letter("2")].iter()).unwrap();
        let shelf = Shelf::of(temp.path(), "bus");
        let mut read = Vec::new();
        shelf
            .read(|shelved| {
                let lock = private().open(temp.path().join("dead-letters/lock")).unwrap();
                lock.try_lock().expect("nobody holds the lock while a letter is looked at");
                drop(lock);
                // One more of these, and the files change places.
                letters.write([letter("new")].iter()).unwrap();
                read.push(shelved.read().unwrap().event().unwrap().id().to_owned());
                Ok(())
            })
            .unwrap();
        assert_eq!(read, ["1", "2"]);
    }
}
