//! The bytes of a segment; the layout is described at the head of the module above.

/// What a segment file begins with.
const MAGIC: [u8; 8] = *b"AEPSPOOL";
/// The layout's version; a segment of another one can't be read.
const VERSION: u32 = 1;
/// Length of a segment's header, in bytes.
pub(super) const HEADER: usize = 32;
/// Length of a record without its payload, in bytes.
pub(super) const RECORD: usize = 17;
/// How much of a record its length field doesn't count, in bytes: the field itself and the checksum.
const UNCOUNTED: usize = 8;
/// The longest payload that is believed, in bytes: the longest event.
const LONGEST: usize = 256 << 20;
/// Numbers stay below this: a file that claims more isn't ours.
pub(super) const MOST: u64 = 1 << 56;

/// What a segment says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The number of its first event; also its file's name.
    pub(super) first: u64,
    /// The number after the last event of the segment before it. Numbers between the two were never given.
    pub(super) follows: u64,
}

impl Header {
    pub(super) fn write(self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&self.follows.to_le_bytes());
        let checksum = crc32fast::hash(out.get(start..).unwrap_or_default());
        out.extend_from_slice(&checksum.to_le_bytes());
    }

    /// `None` when the bytes don't begin with a header of this version.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (header, _) = bytes.split_first_chunk::<HEADER>()?;
        let (counted, checksum) = header.split_last_chunk::<4>()?;
        let (magic, rest) = counted.split_first_chunk::<8>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let (first, rest) = rest.split_first_chunk::<8>()?;
        let (follows, _) = rest.split_first_chunk::<8>()?;
        let legal = *magic == MAGIC
            && u32::from_le_bytes(*version) == VERSION
            && u32::from_le_bytes(*checksum) == crc32fast::hash(counted);
        legal.then(|| Self { first: u64::from_le_bytes(*first), follows: u64::from_le_bytes(*follows) })
    }
}

/// What a record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An event, as received.
    Event,
    /// Resume positions, as JSON; takes no number of its own.
    Positions,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Event => 0,
            Self::Positions => 1,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Event),
            1 => Some(Self::Positions),
            _ => None,
        }
    }
}

/// Appends a record. The caller has checked that the payload is no longer than the longest event.
pub(super) fn write_record(out: &mut Vec<u8>, number: u64, kind: Kind, payload: &[u8]) {
    let length = payload.len().saturating_add(RECORD - UNCOUNTED);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(&[kind.byte()]);
    hasher.update(payload);
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(&hasher.finalize().to_le_bytes());
    out.extend_from_slice(&number.to_le_bytes());
    out.push(kind.byte());
    out.extend_from_slice(payload);
}

/// The length of an event's record, in bytes.
pub(super) fn record_length(payload: usize) -> u64 {
    u64::try_from(payload.saturating_add(RECORD)).unwrap_or(u64::MAX)
}

/// The first bytes of what may be a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefix {
    /// Length of the whole record, in bytes.
    pub(super) length: usize,
    pub(super) number: u64,
    /// `None` for a kind that this version doesn't know.
    pub(super) kind: Option<Kind>,
    checksum: u32,
}

impl Prefix {
    /// `None` when no record can begin like this.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (checksum, rest) = rest.split_first_chunk::<4>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let kind = rest.first()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?.checked_add(UNCOUNTED)?;
        (RECORD..=LONGEST.saturating_add(RECORD)).contains(&length).then(|| Self {
            length,
            number: u64::from_le_bytes(*number),
            kind: Kind::of(*kind),
            checksum: u32::from_le_bytes(*checksum),
        })
    }

    /// Whether `record`, of this prefix's length, is what was written.
    pub(super) fn is_intact(&self, record: &[u8]) -> bool {
        record.len() == self.length
            && record.get(UNCOUNTED..).is_some_and(|counted| crc32fast::hash(counted) == self.checksum)
    }
}

/// The name of the segment whose first event has this number.
pub(super) fn segment_name(first: u64) -> String {
    format!("{first:020}.log")
}

/// The first number that a segment's name says; `None` when it isn't a segment's name.
pub(super) fn first_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".log")?;
    let first = digits.parse().ok().filter(|first| *first < MOST)?;
    (segment_name(first) == name).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_of_a_header_or_record_is_found() {
        let mut header = Vec::new();
        Header { first: 7, follows: 5 }.write(&mut header);
        assert_eq!(header.len(), HEADER);
        assert_eq!(Header::read(&header), Some(Header { first: 7, follows: 5 }));
        let mut record = Vec::new();
        write_record(&mut record, 9, Kind::Event, b"payload");
        assert_eq!(record_length(7), record.len() as u64);
        let intact = |bytes: &[u8]| Prefix::read(bytes).is_some_and(|prefix| prefix.is_intact(bytes));
        assert!(intact(&record));
        for bit in 0..record.len() * 8 {
            let mut damaged = record.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!intact(&damaged), "bit {bit} of the record");
        }
        for bit in 0..header.len() * 8 {
            let mut damaged = header.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::read(&damaged), None, "bit {bit} of the header");
        }
    }

    #[test]
    fn zeros_are_no_record() {
        assert_eq!(Prefix::read(&[0; 64]), None);
        assert_eq!(Header::read(&[0; 64]), None);
    }

    #[test]
    fn only_exact_names_are_segments() {
        assert_eq!(first_of(&segment_name(12)), Some(12));
        for wrong in [
            "12.log",
            "00000000000000000012.log.damaged-1",
            "+0000000000000000012.log",
            "0000000000000000001x.log",
        ] {
            assert_eq!(first_of(wrong), None, "{wrong}");
        }
        assert_eq!(first_of(&segment_name(MOST)), None);
    }
}
