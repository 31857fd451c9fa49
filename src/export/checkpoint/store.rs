//! The checkpoint's files: how they are written, and what is made of them at the start.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::num::NonZeroUsize;
use std::sync::Arc;

use super::format::{self, Tail};
use super::{Checkpoint, Record};
use crate::export::seen::FingerprintKey;
use crate::export::state_dir::{StateDir, private};

const SNAPSHOT: &str = "checkpoint";
const PREVIOUS: &str = "checkpoint.previous";
const JOURNAL: &str = "checkpoint.journal";
/// A larger file is damaged, in bytes: reading it could exhaust memory.
const MAX_FILE: u64 = 1 << 30;

/// The files, for blocking work.
#[derive(Debug)]
pub(crate) struct Store {
    dir: Arc<StateDir>,
    /// Generation of the snapshot, and of the journal when there is one.
    generation: u64,
    key: FingerprintKey,
    /// Open at its end; `None` when only a new snapshot can be written.
    journal: Option<File>,
    /// Length of the journal's good part, in bytes.
    good: u64,
    /// Whether the journal on disk is damaged, and to be set aside when it is replaced.
    journal_is_damaged: bool,
}

/// What was found at the start.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) store: Store,
    pub(crate) checkpoint: Checkpoint,
    /// How many damaged files were set aside.
    pub(crate) damaged: u64,
    /// How many records the journal holds.
    pub(crate) records: usize,
    /// The first snapshot couldn't be written; the pipeline tries again.
    pub(crate) write_error: Option<io::Error>,
}

/// A step of the replacement of snapshot and journal, after which a crash may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Written,
    PreviousKept,
    SnapshotReplaced,
    DamagedJournalSetAside,
    JournalReplaced,
}

impl Store {
    /// Reads what is there. Never fails: what can't be read is set aside, and reported.
    pub(crate) fn open(dir: Arc<StateDir>, bound: NonZeroUsize) -> Loaded {
        let mut damaged = 0;
        let mut restored = None;
        let mut current = true;
        for name in [SNAPSHOT, PREVIOUS] {
            match read(&dir, name) {
                Ok(None) => {}
                Ok(Some(bytes)) => match format::read_snapshot(&bytes, bound) {
                    Ok(found) => {
                        restored = Some(found);
                        break;
                    }
                    Err(damage) => set_aside(&dir, name, &damage, &mut damaged),
                },
                Err(error) => set_aside(&dir, name, &error, &mut damaged),
            }
            current = false;
        }
        let journal = match read(&dir, JOURNAL) {
            Ok(None) => None,
            Ok(Some(bytes)) => match format::read_journal(&bytes) {
                Ok(journal) => Some((journal, bytes.len())),
                Err(damage) => {
                    set_aside(&dir, JOURNAL, &damage, &mut damaged);
                    None
                }
            },
            Err(error) => {
                set_aside(&dir, JOURNAL, &error, &mut damaged);
                None
            }
        };
        let (mut generation, mut checkpoint) = restored.unwrap_or_else(|| {
            // Without a snapshot, the journal still knows the key of its fingerprints.
            let key = journal.as_ref().map_or_else(FingerprintKey::random, |(journal, _)| journal.key);
            (0, Checkpoint::new(bound, key))
        });
        let key = checkpoint.seen.key();
        let mut store = Store { dir, generation, key, journal: None, good: 0, journal_is_damaged: false };
        let mut records = 0;
        if let Some((found, length)) = journal {
            let cut = length.saturating_sub(found.good);
            match found.end {
                None => {}
                Some(Tail::Torn) => {
                    tracing::warn!(file = JOURNAL, bytes = cut, "torn end of the checkpoint journal cut off");
                }
                Some(Tail::Damaged(damage)) => {
                    damaged += 1;
                    store.journal_is_damaged = true;
                    tracing::error!(
                        file = JOURNAL, bytes = cut, kept = found.records.len(), reason = %damage,
                        "checkpoint journal is damaged; what follows the damage is lost, and its events may be delivered twice"
                    );
                }
            }
            if found.key != key {
                damaged += 1;
                store.journal_is_damaged = true;
                tracing::error!(
                    file = JOURNAL,
                    "checkpoint journal belongs to another snapshot; it is ignored"
                );
            } else if found.generation >= generation {
                records = found.records.len();
                let whole = found.end.is_none() && found.generation == generation && current;
                generation = found.generation;
                for record in found.records {
                    checkpoint.apply(record);
                }
                if whole {
                    store.continue_journal(found.good);
                }
            }
        }
        store.generation = generation;
        let write_error = if store.journal.is_some() { None } else { store.replace(&checkpoint).err() };
        if write_error.is_none() && store.good <= HEAD {
            records = 0;
        }
        Loaded { store, checkpoint, damaged, records, write_error }
    }

    /// Goes on writing to the journal on disk, which is whole and `good` bytes long.
    fn continue_journal(&mut self, good: usize) {
        let file = private().open(self.dir.file(JOURNAL)).and_then(|mut file| {
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        });
        self.journal = file.ok();
        self.good = u64::try_from(good).unwrap_or(u64::MAX);
    }

    /// Whether records can be appended; else only [`Store::replace`] helps.
    pub(crate) fn takes_records(&self) -> bool {
        self.journal.is_some()
    }

    /// Appends records in one write. After an error nothing of them is in the journal.
    pub(crate) fn append(&mut self, records: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.journal else {
            return Err(io::Error::other("there is no journal to append to"));
        };
        match file.write_all(records) {
            Ok(()) => {
                self.good = self.good.saturating_add(u64::try_from(records.len()).unwrap_or(u64::MAX));
                Ok(())
            }
            Err(error) => {
                // Cutting needs no space. When even that fails, a torn record would hide later ones.
                if file.set_len(self.good).and_then(|()| file.seek(SeekFrom::End(0))).is_err() {
                    self.journal = None;
                }
                Err(error)
            }
        }
    }

    /// Writes a snapshot of everything and starts a new journal.
    pub(crate) fn replace(&mut self, checkpoint: &Checkpoint) -> io::Result<()> {
        self.replace_with(self.snapshot(checkpoint), |_| ())
    }

    /// The next snapshot's bytes, for [`Store::replace_by`].
    pub(crate) fn snapshot(&self, checkpoint: &Checkpoint) -> Vec<u8> {
        format::snapshot(checkpoint, self.generation.saturating_add(1))
    }

    /// As [`Store::replace`], with the bytes that [`Store::snapshot`] gave.
    pub(crate) fn replace_by(&mut self, snapshot: Vec<u8>) -> io::Result<()> {
        self.replace_with(snapshot, |_| ())
    }

    /// Calls `after` after every step.
    #[allow(clippy::needless_pass_by_value, reason = "the bytes are freed with the call")]
    pub(super) fn replace_with(&mut self, snapshot: Vec<u8>, mut after: impl FnMut(Step)) -> io::Result<()> {
        let dir = Arc::clone(&self.dir);
        let temporary = dir.file("checkpoint.new");
        write_whole(&temporary, &snapshot)?;
        after(Step::Written);
        match fs::rename(dir.file(SNAPSHOT), dir.file(PREVIOUS)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => after(Step::PreviousKept),
        }
        fs::rename(&temporary, dir.file(SNAPSHOT))?;
        // From here on the journal on disk is part of the snapshot, and what is appended to it is lost.
        self.journal = None;
        self.generation = self.generation.saturating_add(1);
        dir.sync()?;
        after(Step::SnapshotReplaced);
        if self.journal_is_damaged {
            let name = dir.set_aside(JOURNAL)?;
            tracing::warn!(file = name, "damaged checkpoint journal set aside");
            self.journal_is_damaged = false;
            after(Step::DamagedJournalSetAside);
        }
        let temporary = dir.file("checkpoint.journal.new");
        let file = write_whole(&temporary, &format::journal_head(self.generation, self.key))?;
        fs::rename(&temporary, dir.file(JOURNAL))?;
        dir.sync()?;
        after(Step::JournalReplaced);
        self.journal = Some(file);
        self.good = HEAD;
        Ok(())
    }
}

/// Length of an empty journal.
const HEAD: u64 = 36;
const _: () = assert!(format::JOURNAL_HEAD == 36);

/// Appends a record to a batch for [`Store::append`].
pub(crate) fn encode(record: &Record, batch: &mut Vec<u8>) {
    format::write_record(record, batch);
}

fn write_whole(path: &std::path::Path, bytes: &[u8]) -> io::Result<File> {
    let mut file = private().create(true).truncate(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

/// The bytes of a file, `None` when there is none.
fn read(dir: &StateDir, name: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(dir.file(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    if file.take(MAX_FILE.saturating_add(1)).read_to_end(&mut bytes)?
        > usize::try_from(MAX_FILE).unwrap_or(usize::MAX)
    {
        return Err(io::Error::other("longer than 1 GiB"));
    }
    Ok(Some(bytes))
}

fn set_aside(dir: &StateDir, name: &'static str, reason: &dyn std::error::Error, damaged: &mut u64) {
    *damaged += 1;
    match dir.set_aside(name) {
        Ok(aside) => tracing::error!(
            file = name, aside, %reason,
            "checkpoint file is damaged and set aside; events may be delivered twice"
        ),
        Err(error) => tracing::error!(
            file = name, %error, %reason,
            "checkpoint file is damaged and can't be set aside; events may be delivered twice"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::aep::Position;
    use crate::export::checkpoint::SavedPosition;
    use crate::export::seen::Fingerprint;

    const BOUND: NonZeroUsize = NonZeroUsize::new(1000).unwrap();

    fn open(path: &Path) -> Loaded {
        Store::open(Arc::new(StateDir::open(path).unwrap()), BOUND)
    }

    fn record(n: u128) -> Record {
        let seq = u64::try_from(n).unwrap();
        let position = SavedPosition {
            source: "aep://h".into(),
            session: format!("s{}", n % 3).into(),
            position: Position::new(0, seq),
        };
        Record { event: Fingerprint(n), position: Some(position) }
    }

    fn append(loaded: &mut Loaded, records: std::ops::Range<u128>) {
        let mut batch = Vec::new();
        for n in records {
            encode(&record(n), &mut batch);
            loaded.checkpoint.apply(record(n));
        }
        loaded.store.append(&batch).unwrap();
    }

    fn knows(loaded: &mut Loaded, records: std::ops::Range<u128>) -> bool {
        records.into_iter().all(|n| loaded.checkpoint.seen.recall(Fingerprint(n)))
    }

    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }

    /// A directory with a previous snapshot (events 0 to 9), a snapshot (to 19) and a journal (to 29).
    fn filled(path: &Path) {
        let mut loaded = open(path);
        for start in [0, 10] {
            append(&mut loaded, start..start + 10);
            loaded.store.replace(&loaded.checkpoint).unwrap();
        }
        append(&mut loaded, 20..30);
    }

    #[test]
    fn everything_is_there_again() {
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        let mut loaded = open(temp.path());
        assert_eq!((loaded.damaged, loaded.records), (0, 10));
        assert!(knows(&mut loaded, 0..30));
        let mut saved: Vec<_> = loaded.checkpoint.positions().map(|s| s.position.seq).collect();
        saved.sort_unstable();
        assert_eq!(saved, [27, 28, 29]);
    }

    #[test]
    fn a_kill_at_every_step_of_the_replacement_loses_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let (live, copies) = (temp.path().join("live"), temp.path().join("copies"));
        filled(&live);
        for damaged in [false, true] {
            let mut loaded = open(&live);
            loaded.store.journal_is_damaged = damaged;
            let snapshot = loaded.store.snapshot(&loaded.checkpoint);
            let mut steps = Vec::new();
            loaded
                .store
                .replace_with(snapshot, |step| {
                    copy(&live, &copies.join(format!("{damaged}-{step:?}")));
                    steps.push(step);
                })
                .unwrap();
            assert_eq!(steps.len(), if damaged { 5 } else { 4 });
            for step in steps {
                let mut copy = open(&copies.join(format!("{damaged}-{step:?}")));
                assert!(knows(&mut copy, 0..30), "{step:?}");
                assert_eq!(copy.damaged, 0, "{step:?}");
                append(&mut copy, 30..40);
                drop(copy);
                let mut copy = open(&copies.join(format!("{damaged}-{step:?}")));
                assert!(knows(&mut copy, 0..40), "{step:?}");
            }
            append(&mut loaded, 30..31);
        }
    }

    #[test]
    fn a_torn_record_is_cut_off_and_no_damage() {
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        let journal = temp.path().join(JOURNAL);
        let bytes = fs::read(&journal).unwrap();
        fs::write(&journal, &bytes[..bytes.len() - 3]).unwrap();
        let mut loaded = open(temp.path());
        assert_eq!(loaded.damaged, 0);
        assert!(knows(&mut loaded, 0..29) && !knows(&mut loaded, 29..30));
        append(&mut loaded, 29..35);
        drop(loaded);
        assert!(knows(&mut open(temp.path()), 0..35));
    }

    #[test]
    fn a_damaged_snapshot_is_survived_by_the_one_before() {
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        fs::write(temp.path().join(SNAPSHOT), "garbage").unwrap();
        let mut loaded = open(temp.path());
        assert_eq!(loaded.damaged, 1);
        assert!(knows(&mut loaded, 0..10) && knows(&mut loaded, 20..30));
        assert!(temp.path().join("checkpoint.damaged-1").exists());
        drop(loaded);
        assert_eq!(open(temp.path()).damaged, 0, "healed");
    }

    #[test]
    fn without_any_snapshot_the_journal_still_counts() {
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        for name in [SNAPSHOT, PREVIOUS] {
            fs::write(temp.path().join(name), "").unwrap();
        }
        let mut loaded = open(temp.path());
        assert_eq!(loaded.damaged, 2);
        assert!(knows(&mut loaded, 20..30));
        drop(loaded);
        let mut loaded = open(temp.path());
        assert!(knows(&mut loaded, 20..30));
    }

    #[test]
    fn damage_within_the_journal_keeps_what_stands_before_it() {
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        let journal = temp.path().join(JOURNAL);
        let mut bytes = fs::read(&journal).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&journal, bytes).unwrap();
        let mut loaded = open(temp.path());
        assert_eq!(loaded.damaged, 1);
        assert!(knows(&mut loaded, 0..24));
        assert!(temp.path().join("checkpoint.journal.damaged-1").exists());
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let temp = tempfile::tempdir().unwrap();
        filled(temp.path());
        for name in [SNAPSHOT, PREVIOUS, JOURNAL, "lock"] {
            let mode = fs::metadata(temp.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn whatever_the_damage_it_opens_and_goes_on(
            name in prop::sample::select(vec![SNAPSHOT, PREVIOUS, JOURNAL]),
            cut in prop::option::of(any::<prop::sample::Index>()),
            flips in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..8), 0..4),
        ) {
            let temp = tempfile::tempdir().unwrap();
            filled(temp.path());
            let path = temp.path().join(name);
            let whole = fs::read(&path).unwrap();
            let mut bytes = whole.clone();
            if let Some(cut) = cut {
                bytes.truncate(cut.index(whole.len()));
            }
            for (at, bit) in flips {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] ^= 1 << bit;
                }
            }
            fs::write(&path, &bytes).unwrap();
            let mut loaded = open(temp.path());
            prop_assert!(loaded.write_error.is_none());
            let all = knows(&mut loaded, 0..30);
            // What is lost is said, but for the torn end of the journal.
            prop_assert!(all || loaded.damaged > 0 || name == JOURNAL);
            prop_assert!(knows(&mut loaded, 0..10));
            append(&mut loaded, 30..40);
            drop(loaded);
            let mut again = open(temp.path());
            prop_assert_eq!(again.damaged, 0);
            prop_assert!(knows(&mut again, 30..40));
        }
    }
}
