//! The cursor's file: how it is written, and what is made of it at the start.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use super::Cursor;
use crate::export::state_dir::{StateDir, private, private_folder};

const MAGIC: &[u8; 8] = b"aepcurs1";
/// Where the records' payloads begin: after their length and checksum, in bytes.
const HEAD: usize = 8;
/// Length of a payload without ranges, in bytes.
const FIXED: usize = 12;
/// Length of a range, in bytes.
const RANGE: usize = 16;
/// A longer file is replaced, in bytes.
pub(super) const LONGEST: u64 = 1 << 20;
/// A much longer file is damaged, in bytes: reading it could exhaust memory.
const MAX_FILE: u64 = 64 << 20;
/// Where the files are, within the state directory.
const FOLDER: &str = "sinks";

/// One sink's file, for blocking work.
#[derive(Debug)]
pub(crate) struct CursorFile {
    dir: Arc<StateDir>,
    name: String,
    /// Open at its end; `None` when only a new file helps.
    file: Option<File>,
    /// Length of its good part, in bytes.
    good: u64,
}

/// What was found at the start.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) file: CursorFile,
    /// `None` for a sink that has none yet; [`Lost`] when its file can't be read.
    pub(crate) cursor: Option<Result<Cursor, Lost>>,
    /// Whether the file was damaged.
    pub(crate) damaged: bool,
}

/// The file was there, and no state in it is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lost;

impl CursorFile {
    /// Reads the file of the sink `name`.
    ///
    /// # Errors
    /// When the folder can't be made. A damaged file is none.
    pub(crate) fn open(dir: Arc<StateDir>, name: &str) -> io::Result<Found> {
        if !dir.file(FOLDER).is_dir() {
            private_folder(&dir.file(FOLDER))?;
            dir.sync()?;
        }
        let name = format!("{FOLDER}/{name}.cursor");
        let file = Self { dir, name, file: None, good: 0 };
        let (cursor, damaged) = match read(&file.dir.file(&file.name)) {
            // Set aside at an earlier start, which ended before a new one was written.
            Ok(None) if file.dir.has_set_aside(&file.name) => (Some(Err(Lost)), false),
            Ok(None) => (None, false),
            Ok(Some(bytes)) => {
                let Contents { cursor, good, damaged } = contents(&bytes);
                if damaged {
                    file.set_aside("a record in it is damaged");
                } else if good < bytes.len() {
                    tracing::warn!(
                        file = file.name,
                        bytes = bytes.len().saturating_sub(good),
                        "torn end of a sink's cursor cut off: what it said was done is delivered again"
                    );
                }
                (Some(cursor.ok_or(Lost)), damaged)
            }
            Err(error) => {
                file.set_aside(&error.to_string());
                (Some(Err(Lost)), true)
            }
        };
        if let Some(Err(Lost)) = cursor {
            tracing::error!(
                file = file.name,
                "a sink's cursor is lost: everything that the spool holds is delivered to it again"
            );
        }
        // Goes on with a new file, so that nothing is ever appended to one that wasn't whole.
        Ok(Found { file, cursor, damaged })
    }

    fn set_aside(&self, reason: &str) {
        match self.dir.set_aside(&self.name) {
            Ok(aside) => tracing::error!(file = self.name, aside, reason, "a sink's cursor is damaged"),
            Err(error) => {
                tracing::error!(file = self.name, reason, %error, "a sink's damaged cursor can't be set aside");
            }
        }
    }

    /// Writes a state. After an error the last one written before still counts.
    ///
    /// # Errors
    /// When it can't be written.
    pub(crate) fn write(&mut self, cursor: &Cursor) -> io::Result<()> {
        let record = record(cursor);
        let length = u64::try_from(record.len()).unwrap_or(u64::MAX);
        let Some(file) = self.file.as_mut().filter(|_| self.good < LONGEST) else {
            return self.replace(&record);
        };
        match file.write_all(&record) {
            Ok(()) => {
                self.good = self.good.saturating_add(length);
                Ok(())
            }
            Err(error) => {
                // Cutting needs no space. When even that fails, a torn record would hide later ones.
                if file.set_len(self.good).and_then(|()| file.seek(SeekFrom::End(0))).is_err() {
                    self.file = None;
                }
                Err(error)
            }
        }
    }

    fn replace(&mut self, record: &[u8]) -> io::Result<()> {
        let (path, temporary) = (self.dir.file(&self.name), self.dir.file(&format!("{}.new", self.name)));
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(record);
        let mut file = private().create(true).truncate(true).open(&temporary)?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).inspect_err(|_| {
            // Half a file is of no use, and the space may be what is missing.
            drop(fs::remove_file(&temporary));
        })?;
        fs::rename(&temporary, &path)?;
        // A sink without a file is a new one, for which nothing of what is there counts: the name must last, too.
        File::open(self.dir.file(FOLDER))?.sync_all()?;
        self.good = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.file = Some(file);
        Ok(())
    }
}

/// The number after the highest one that any cursor file in the directory says is done, whether its sink is still
/// configured or not; and the sinks that aren't among `configured`, each with its cursor.
pub(crate) fn furthest(dir: &StateDir, configured: &[&str]) -> (u64, Vec<(String, Cursor)>) {
    let mut end = 0;
    let mut others = Vec::new();
    let Ok(entries) = fs::read_dir(dir.file(FOLDER)) else { return (0, others) };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let Some((name, rest)) = name.to_str().and_then(|name| name.split_once(".cursor")) else { continue };
        let Ok(Some(bytes)) = read(&entry.path()) else { continue };
        let Some(cursor) = contents(&bytes).cursor else { continue };
        end = cursor.end().max(end);
        if rest.is_empty() && !configured.contains(&name) {
            others.push((name.to_owned(), cursor));
        }
    }
    (end, others)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "far too long"));
    }
    Ok(Some(bytes))
}

fn record(cursor: &Cursor) -> Vec<u8> {
    let ranges = cursor.beyond();
    let payload = FIXED.saturating_add(RANGE.saturating_mul(ranges.len()));
    let mut out = Vec::with_capacity(HEAD.saturating_add(payload));
    // As many ranges as events are held at most, far from these bounds.
    let length = u32::try_from(payload).unwrap_or(u32::MAX).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&cursor.next().to_le_bytes());
    out.extend_from_slice(&u32::try_from(ranges.len()).unwrap_or(u32::MAX).to_le_bytes());
    for range in ranges {
        out.extend_from_slice(&range.start.to_le_bytes());
        out.extend_from_slice(&range.end.to_le_bytes());
    }
    let sum = checksum(&length, out.get(HEAD..).unwrap_or_default());
    for (place, byte) in out.iter_mut().skip(4).zip(sum.to_le_bytes()) {
        *place = byte;
    }
    out
}

fn checksum(length: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(length);
    hasher.update(payload);
    hasher.finalize()
}

/// What a file says.
#[derive(Debug, PartialEq, Eq)]
struct Contents {
    /// The last whole state.
    cursor: Option<Cursor>,
    /// Where what could be read ends.
    good: usize,
    /// Whether something in it is neither whole nor a torn end.
    damaged: bool,
}

fn contents(bytes: &[u8]) -> Contents {
    let magic = bytes.starts_with(MAGIC);
    let mut found = Contents { cursor: None, good: if magic { MAGIC.len() } else { 0 }, damaged: !magic };
    let mut at = found.good;
    while at < bytes.len() {
        match whole(bytes.get(at..).unwrap_or_default()) {
            Some((cursor, length)) => {
                // Whole records after something that isn't: that was no torn end.
                found.damaged |= found.good != at;
                found.cursor = Some(cursor);
                at = at.saturating_add(length);
                found.good = at;
            }
            None => at = at.saturating_add(1),
        }
    }
    found
}

/// The record at the start of `bytes`, and its length.
fn whole(bytes: &[u8]) -> Option<(Cursor, usize)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let size = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    if size < FIXED || !size.saturating_sub(FIXED).is_multiple_of(RANGE) {
        return None;
    }
    let payload = rest.get(..size)?;
    if checksum(length, payload) != u32::from_le_bytes(*sum) {
        return None;
    }
    let (next, rest) = payload.split_first_chunk::<8>()?;
    let (count, rest) = rest.split_first_chunk::<4>()?;
    if usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(RANGE)? != rest.len() {
        return None;
    }
    let mut cursor = Cursor::at(u64::from_le_bytes(*next));
    let (ranges, _) = rest.as_chunks::<RANGE>();
    for range in ranges {
        let (start, rest) = range.split_first_chunk::<8>()?;
        let (end, _) = rest.split_first_chunk::<8>()?;
        cursor.done(u64::from_le_bytes(*start)..u64::from_le_bytes(*end));
    }
    Some((cursor, HEAD.saturating_add(size)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dir() -> (tempfile::TempDir, Arc<StateDir>) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Arc::new(StateDir::open(temp.path()).unwrap());
        (temp, dir)
    }

    fn open(dir: &Arc<StateDir>) -> Found {
        CursorFile::open(Arc::clone(dir), "s").unwrap()
    }

    fn states(count: u64) -> Vec<Cursor> {
        let mut cursor = Cursor::at(3);
        let step = |n| {
            cursor.done(n * 2..n * 2 + 1);
            cursor.clone()
        };
        (2..2 + count).map(step).collect()
    }

    #[test]
    fn the_last_state_counts_and_the_file_stays_short() {
        let (_temp, dir) = dir();
        let mut found = open(&dir);
        assert!(found.cursor.is_none());
        let states = states(200);
        for state in &states {
            found.file.write(state).unwrap();
            found.file.write(&Cursor::at(1)).unwrap();
            found.file.write(state).unwrap();
            assert_eq!(open(&dir).cursor, Some(Ok(state.clone())));
        }
        for n in 0..5_000 {
            found.file.write(&states[n % 200]).unwrap();
        }
        let length = fs::metadata(dir.file("sinks/s.cursor")).unwrap().len();
        assert!(length <= LONGEST + 4096, "{length}");
    }

    #[test]
    fn a_torn_end_costs_the_last_state_only() {
        let (_temp, dir) = dir();
        let states = states(4);
        for state in &states {
            let mut found = open(&dir);
            found.file.write(state).unwrap();
            found.file.write(state).unwrap();
        }
        let path = dir.file("sinks/s.cursor");
        let whole = fs::read(&path).unwrap();
        let last = record(&states[3]).len();
        for cut in whole.len() - last + 1..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let found = open(&dir);
            assert_eq!((found.cursor, found.damaged), (Some(Ok(states[3].clone())), false), "cut at {cut}");
        }
        fs::write(&path, b"").unwrap();
        let found = open(&dir);
        assert_eq!((found.cursor, found.damaged), (Some(Err(Lost)), true));
    }

    proptest! {
        #[test]
        fn damage_never_invents_a_state(at in any::<prop::sample::Index>(), flip in 1_u8.., cut in any::<prop::sample::Index>()) {
            let states = states(6);
            let mut bytes = MAGIC.to_vec();
            states.iter().for_each(|state| bytes.extend(record(state)));
            let length = bytes.len();
            bytes[at.index(length)] ^= flip;
            bytes.truncate(cut.index(length + 1));
            let cursor = contents(&bytes).cursor;
            prop_assert!(cursor.is_none_or(|cursor| states.contains(&cursor)));
        }
    }

    #[test]
    fn the_furthest_cursor_counts_whoever_it_belongs_to() {
        let (_temp, dir) = dir();
        open(&dir).file.write(&Cursor::at(7)).unwrap();
        let mut other = CursorFile::open(Arc::clone(&dir), "t").unwrap();
        let mut cursor = Cursor::at(9);
        cursor.done(20..30);
        other.file.write(&cursor).unwrap();
        assert_eq!(furthest(&dir, &["s"]), (30, vec![("t".to_owned(), cursor)]));
    }

    #[test]
    fn a_damaged_file_that_was_never_replaced_is_still_lost() {
        let (_temp, dir) = dir();
        open(&dir).file.write(&Cursor::at(7)).unwrap();
        fs::write(dir.file("sinks/s.cursor"), b"aepcurs1 and nothing else").unwrap();
        for start in ["the one that finds it", "one after a start that failed"] {
            assert_eq!(open(&dir).cursor, Some(Err(Lost)), "{start}");
        }
        let mut found = open(&dir);
        found.file.write(&Cursor::at(5)).unwrap();
        assert_eq!(open(&dir).cursor, Some(Ok(Cursor::at(5))));
    }
}
