//! The bytes of snapshots and journals; the layout stands at the head of [`super`].

use std::num::NonZeroUsize;

use super::{Checkpoint, Record, SavedPosition};
use crate::aep::Position;
use crate::export::seen::{Fingerprint, FingerprintKey};

const SNAPSHOT: &[u8; 8] = b"aepckpt1";
const JOURNAL: &[u8; 8] = b"aepjrnl1";
/// Length of a journal's head, in bytes.
pub(super) const JOURNAL_HEAD: usize = 36;
/// Length of a record's head, in bytes.
const RECORD_HEAD: usize = 8;

/// Why bytes aren't a snapshot or a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Damage {
    #[error("it starts like no such file")]
    Magic,
    #[error("it is cut short")]
    Short,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("its checksum is right and its content is out of form")]
    Form,
}

/// A journal, as far as it can be read.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) generation: u64,
    pub(super) key: FingerprintKey,
    pub(super) records: Vec<Record>,
    /// How many bytes are good.
    pub(super) good: usize,
    /// What ends it before the end of the file.
    pub(super) end: Option<Tail>,
}

/// What follows the last good record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tail {
    /// A record that was being written in a crash.
    Torn,
    /// Anything else.
    Damaged(Damage),
}

/// A snapshot of `checkpoint`.
pub(super) fn snapshot(checkpoint: &Checkpoint, generation: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(checkpoint.seen.len().saturating_mul(16).saturating_add(4096));
    body.extend_from_slice(&generation.to_le_bytes());
    body.extend_from_slice(&checkpoint.seen.key().0);
    let sessions = checkpoint.positions().count();
    body.extend_from_slice(&u32::try_from(sessions).unwrap_or(u32::MAX).to_le_bytes());
    for saved in checkpoint.positions() {
        write_position(saved, &mut body);
    }
    body.extend_from_slice(&u64::try_from(checkpoint.seen.len()).unwrap_or(u64::MAX).to_le_bytes());
    for Fingerprint(event) in checkpoint.seen.iter() {
        body.extend_from_slice(&event.to_le_bytes());
    }
    let mut out = Vec::with_capacity(body.len().saturating_add(20));
    out.extend_from_slice(SNAPSHOT);
    out.extend_from_slice(&u64::try_from(body.len()).unwrap_or(u64::MAX).to_le_bytes());
    out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// Reads a snapshot: its generation and what it holds, the events cut to `bound`.
pub(super) fn read_snapshot(bytes: &[u8], bound: NonZeroUsize) -> Result<(u64, Checkpoint), Damage> {
    let mut head = Reader(bytes);
    if head.array().ok_or(Damage::Short)? != *SNAPSHOT {
        return Err(Damage::Magic);
    }
    let length = head.u64().ok_or(Damage::Short)?;
    let checksum = head.u32().ok_or(Damage::Short)?;
    let Reader(body) = head;
    if u64::try_from(body.len()) != Ok(length) {
        return Err(Damage::Short);
    }
    if crc32fast::hash(body) != checksum {
        return Err(Damage::Checksum);
    }
    read_body(Reader(body), bound).ok_or(Damage::Form)
}

fn read_body(mut body: Reader<'_>, bound: NonZeroUsize) -> Option<(u64, Checkpoint)> {
    let generation = body.u64()?;
    let mut checkpoint = Checkpoint::new(bound, FingerprintKey(body.array()?));
    for _ in 0..body.u32()? {
        checkpoint.save(body.position()?);
    }
    for _ in 0..body.u64()? {
        checkpoint.seen.insert(Fingerprint(body.u128()?));
    }
    body.0.is_empty().then_some((generation, checkpoint))
}

/// The head of a journal.
pub(super) fn journal_head(generation: u64, key: FingerprintKey) -> Vec<u8> {
    let mut out = Vec::with_capacity(JOURNAL_HEAD);
    out.extend_from_slice(JOURNAL);
    out.extend_from_slice(&generation.to_le_bytes());
    out.extend_from_slice(&key.0);
    let checksum = crc32fast::hash(&out);
    out.extend_from_slice(&checksum.to_le_bytes());
    out
}

/// Appends a record.
pub(super) fn write_record(record: &Record, out: &mut Vec<u8>) {
    let mut payload = Vec::with_capacity(64);
    payload.extend_from_slice(&record.event.0.to_le_bytes());
    payload.push(u8::from(record.position.is_some()));
    if let Some(saved) = &record.position {
        write_position(saved, &mut payload);
    }
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&record_checksum(length, &payload).to_le_bytes());
    out.extend_from_slice(&payload);
}

fn record_checksum(length: [u8; 4], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length);
    hasher.update(payload);
    hasher.finalize()
}

/// Reads a journal up to its first bad record.
pub(super) fn read_journal(bytes: &[u8]) -> Result<Journal, Damage> {
    let (head, mut rest) = bytes.split_at_checked(JOURNAL_HEAD).ok_or(Damage::Short)?;
    let (head, checksum) = head.split_at_checked(JOURNAL_HEAD - 4).ok_or(Damage::Short)?;
    let mut head_reader = Reader(head);
    if head_reader.array().ok_or(Damage::Short)? != *JOURNAL {
        return Err(Damage::Magic);
    }
    if crc32fast::hash(head).to_le_bytes() != checksum {
        return Err(Damage::Checksum);
    }
    let generation = head_reader.u64().ok_or(Damage::Short)?;
    let key = FingerprintKey(head_reader.array().ok_or(Damage::Short)?);
    let mut journal = Journal { generation, key, records: Vec::new(), good: JOURNAL_HEAD, end: None };
    while !rest.is_empty() {
        match read_record(rest) {
            Ok((record, tail)) => {
                journal.records.push(record);
                journal.good = journal.good.saturating_add(rest.len().saturating_sub(tail.len()));
                rest = tail;
            }
            Err(tail) => {
                // A file system may leave zeros where a crash cut a write off.
                let zeros = rest.iter().all(|byte| *byte == 0);
                journal.end = Some(if zeros { Tail::Torn } else { tail });
                break;
            }
        }
    }
    Ok(journal)
}

fn read_record(bytes: &[u8]) -> Result<(Record, &[u8]), Tail> {
    let (head, rest) = bytes.split_at_checked(RECORD_HEAD).ok_or(Tail::Torn)?;
    let mut head = Reader(head);
    let (Some(length), Some(checksum)) = (head.array::<4>(), head.u32()) else {
        return Err(Tail::Torn);
    };
    let length_in_bytes = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    let (payload, rest) = rest.split_at_checked(length_in_bytes).ok_or(Tail::Torn)?;
    if record_checksum(length, payload) != checksum {
        return Err(Tail::Damaged(Damage::Checksum));
    }
    let record = read_payload(Reader(payload)).ok_or(Tail::Damaged(Damage::Form))?;
    Ok((record, rest))
}

fn read_payload(mut payload: Reader<'_>) -> Option<Record> {
    let event = Fingerprint(payload.u128()?);
    let position = match payload.array()? {
        [0] => None,
        [1] => Some(payload.position()?),
        _ => return None,
    };
    payload.0.is_empty().then_some(Record { event, position })
}

fn write_position(saved: &SavedPosition, out: &mut Vec<u8>) {
    for text in [&saved.source, &saved.session] {
        out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    }
    out.extend_from_slice(&saved.position.epoch.to_le_bytes());
    out.extend_from_slice(&saved.position.seq.to_le_bytes());
}

/// Takes values off the front of bytes; `None` when they end too early.
struct Reader<'b>(&'b [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    fn string(&mut self) -> Option<Box<str>> {
        let length = usize::try_from(self.u32()?).ok()?;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        std::str::from_utf8(text).ok().map(Box::from)
    }

    fn position(&mut self) -> Option<SavedPosition> {
        let (source, session) = (self.string()?, self.string()?);
        let position = Position::new(self.u64()?, self.u64()?);
        Some(SavedPosition { source, session, position })
    }
}
