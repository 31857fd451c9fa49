//! Makes a spool of whatever files are there.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::core::Core;
use super::files::{Files, SpoolFile};
use super::format::{HEADER, Header, RECORD, first_of, segment_name};
use super::log::Log;
use super::positions::Positions;
use super::scan::{Extent, Found, Scan, wide};
use super::segments::{Segment, Segments};
use super::shared::Shared;
use super::{SpoolConfig, SpoolMetrics, SpoolSync};
use crate::aep::position::SessionKey;
use crate::aep::{Event, EventKey, Position};
use crate::export::seen::{FingerprintKey, Seen};

/// Opens a spool. Blocks.
pub(super) fn open(
    files: Option<Arc<dyn Files>>,
    config: SpoolConfig,
    floor: u64,
    metrics: SpoolMetrics,
) -> io::Result<Shared> {
    let key = FingerprintKey::random();
    let mut seen = Seen::new(config.dedupe, key);
    let mut positions = Positions::new(key, most_positions(&config));
    let Some(files) = files else {
        let core = Core::new(seen, floor, Segments::default(), None);
        return Ok(Shared::new(config, metrics, None, core, positions));
    };
    let Folder { mut list, mut set_aside } = Folder::read(&*files)?;
    let durable = config.sync == SpoolSync::Fsync;
    let mut log = Log::new(Arc::clone(&files), durable);
    let mut end = floor;
    while let Some(last) = list.back_mut() {
        let recovered = recover_last(&*files, last, durable, &metrics);
        end = end.max(last.end);
        match recovered {
            Last::Resumed(file, length) if last.end == end => log.resume(last.first, file, length),
            // A gap in the numbers needs a segment that says so.
            Last::Resumed(..) | Last::Sealed => {}
            Last::Empty if discard(&*files, last, &mut set_aside, &metrics) => {
                list.pop_back();
                continue;
            }
            Last::Empty => {}
        }
        break;
    }
    restore(&*files, &list, &config, &mut seen, &mut positions);
    let core = Core::new(seen, end, Segments::new(list, set_aside), Some(Box::new(log)));
    Ok(Shared::new(config, metrics, Some(files), core, positions))
}

/// How many bytes of positions are kept. Those that aren't saved are as many as the largest segment saves.
fn most_positions(config: &SpoolConfig) -> usize {
    if config.keeps_positions { config.snapshot_size() } else { 2 << 20 }
}

/// The files of a spool, as their names and headers tell.
struct Folder {
    list: VecDeque<Segment>,
    /// Names, numbers and sizes of damaged files that were set aside.
    set_aside: Vec<(String, u64, u64)>,
}

impl Folder {
    fn read(files: &dyn Files) -> io::Result<Self> {
        let mut found = Vec::new();
        let mut set_aside = Vec::new();
        for (name, size) in files.list()? {
            let damaged = name.rsplit_once(".damaged-").and_then(|(_, number)| number.parse().ok());
            match (first_of(&name), damaged) {
                (Some(first), _) => found.push((first, size)),
                (None, Some(number)) => set_aside.push((name, number, size)),
                (None, None) => tracing::warn!(file = name, "file in the spool's folder is none of its own"),
            }
        }
        found.sort_unstable();
        let mut list: VecDeque<Segment> = VecDeque::with_capacity(found.len());
        for (first, size) in found {
            let header = read_header(files, first).filter(|header| header.first == first);
            let before = header.map_or(first, |header| header.follows.min(first));
            if let Some(last) = list.back_mut() {
                // Its numbers end where this segment says, as far as that can be.
                last.end = before.max(last.first);
            }
            let damaged = header.is_none();
            list.push_back(Segment { damaged, size, ..Segment::new(first, size) });
        }
        Ok(Self { list, set_aside })
    }
}

fn read_header(files: &dyn Files, first: u64) -> Option<Header> {
    let mut header = [0; HEADER];
    let mut filled = 0;
    let mut file = files.open(&segment_name(first)).ok()?;
    while let Some(free) = header.get_mut(filled..).filter(|free| !free.is_empty()) {
        match file.read_at(wide(filled), free).ok()? {
            0 => return None,
            more => filled = filled.saturating_add(more),
        }
    }
    Header::read(&header)
}

/// What becomes of the last segment.
enum Last {
    /// It is written to, being so many bytes long.
    Resumed(Box<dyn SpoolFile>, u64),
    /// It is only read.
    Sealed,
    /// It has no header and holds no record: it is none.
    Empty,
}

/// Reads the last segment whole: where its numbers end, and what becomes of it.
fn recover_last(files: &dyn Files, last: &mut Segment, durable: bool, metrics: &SpoolMetrics) -> Last {
    let (name, size) = (last.name(), last.size);
    // No more records than this fit: numbers above aren't believed.
    let most = last.first.saturating_add(size / wide(RECORD)).saturating_add(1);
    last.end = most;
    let scanned = files.open(&name).and_then(|file| {
        let mut scan = Scan::new(file, last.first);
        let (mut lost, mut end) = (0_u64, last.first);
        loop {
            match scan.next(last.extent())? {
                Found::Event { number, lost: missing, .. } => {
                    lost = lost.saturating_add(missing);
                    end = number.saturating_add(1);
                }
                Found::Positions(_) => {}
                Found::End { .. } => return Ok((scan, lost, end)),
            }
        }
    });
    let (scan, lost, end) = match scanned {
        Ok(scanned) => scanned,
        Err(error) => {
            tracing::error!(file = name, %error, "the last spool file can't be read");
            return Last::Sealed;
        }
    };
    last.end = end;
    let good = scan.good();
    let cut = size.saturating_sub(good);
    if last.damaged && end == last.first {
        return Last::Empty;
    }
    if last.damaged || lost > 0 {
        tracing::error!(file = name, "the last spool file is damaged; a new one is begun");
        last.damaged = true;
        return Last::Sealed;
    }
    last.length = good;
    let resumed = files.open(&name).and_then(|mut file| {
        if cut > 0 {
            metrics.cut_bytes.inc_by(cut);
            tracing::warn!(file = name, bytes = cut, "torn end of the spool cut off");
            file.truncate(good)?;
            last.size = good;
        }
        if durable {
            // What is found counts as committed from now on, whoever wrote it.
            file.sync()?;
            files.sync()?;
        }
        Ok(file)
    });
    match resumed {
        // One that holds no event may lack the positions that it is to begin with: it is begun anew.
        Ok(_) if end == last.first => Last::Sealed,
        Ok(file) => Last::Resumed(file, good),
        Err(error) => {
            tracing::warn!(file = name, %error, "the last spool file can't be written to; a new one is begun");
            Last::Sealed
        }
    }
}

/// Gets a file that is no segment out of the way: whether it is.
fn discard(
    files: &dyn Files,
    last: &Segment,
    set_aside: &mut Vec<(String, u64, u64)>,
    metrics: &SpoolMetrics,
) -> bool {
    let name = last.name();
    metrics.cut_bytes.inc_by(last.size);
    let result = if last.size <= wide(HEADER) {
        tracing::warn!(file = name, bytes = last.size, "half-made spool file removed");
        files.remove(&name)
    } else {
        tracing::error!(file = name, bytes = last.size, "spool file holds nothing readable; set aside");
        let number = set_aside.iter().map(|(_, number, _)| *number).max().unwrap_or(0).saturating_add(1);
        let aside = format!("{name}.damaged-{number}");
        files.rename(&name, &aside).map(|()| set_aside.push((aside, number, last.size)))
    };
    if let Err(error) = &result {
        tracing::warn!(file = name, %error, "spool file can't be moved out of the way");
    }
    result.is_ok()
}

/// Reads back as many events as the dedupe memory takes, for it and for the positions.
fn restore(
    files: &dyn Files,
    list: &VecDeque<Segment>,
    config: &SpoolConfig,
    seen: &mut Seen,
    positions: &mut Positions,
) {
    let Some(last) = list.back() else { return };
    let from = last.end.saturating_sub(wide(config.dedupe.get()));
    let start = list.partition_point(|segment| segment.first <= from).saturating_sub(1);
    for segment in list.range(start..) {
        if let Err(error) = restore_segment(files, segment, from, seen, positions) {
            tracing::error!(file = segment.name(), %error, "spool file can't be read");
        }
    }
}

fn restore_segment(
    files: &dyn Files,
    segment: &Segment,
    from: u64,
    seen: &mut Seen,
    positions: &mut Positions,
) -> io::Result<()> {
    let mut scan = Scan::new(files.open(&segment.name())?, segment.first);
    loop {
        match scan.next(Extent { length: segment.length, end: segment.end })? {
            Found::Event { number, payload, .. } => {
                // One that isn't legal any more is found by its reader.
                let Some(names) = Names::read(payload) else { continue };
                if let (Some(session), Some(seq)) = (&names.session, names.seq) {
                    let session = SessionKey { source: &names.source, session };
                    positions.reach_position(session, Position::new(names.epoch.unwrap_or(0), seq));
                }
                if number >= from {
                    let event = EventKey { source: &names.source, id: &names.id };
                    seen.insert(seen.key().event(event));
                }
            }
            Found::Positions(snapshot) => positions.read(snapshot),
            Found::End { .. } => return Ok(()),
        }
    }
}

/// What the memory keeps of an event. Reading only that takes half the time that reading an event does.
#[derive(serde::Deserialize)]
struct Names<'a> {
    #[serde(borrow)]
    source: Cow<'a, str>,
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(borrow)]
    session: Option<Cow<'a, str>>,
    epoch: Option<u64>,
    seq: Option<u64>,
}

impl<'a> Names<'a> {
    fn read(payload: &'a [u8]) -> Option<Self> {
        // A number that isn't written in digits is left to the full reading.
        serde_json::from_slice(payload).ok().or_else(|| {
            let event = Event::parse(payload).ok()?;
            let owned = |name: &str| Cow::Owned(name.to_owned());
            Some(Self {
                source: owned(event.source()),
                id: owned(event.id()),
                session: event.session().map(owned),
                epoch: event.declared_epoch(),
                seq: event.seq(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_the_event_says() {
        let text = |members: &str| {
            format!(
                r#"{{"aep":"0.1","id":"i\u0064","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s\n",{members}}}"#
            )
        };
        for members in
            [r#""seq":3"#, r#""epoch":2,"seq":3,"data":{"id":"no","seq":9}"#, r#""epoch":2e0,"seq":3.0"#]
        {
            let text = text(members);
            let event = Event::parse_str(&text).unwrap();
            let names = Names::read(text.as_bytes()).unwrap();
            assert_eq!((&*names.source, &*names.id), (event.source(), event.id()));
            assert_eq!(names.session.as_deref(), event.session());
            assert_eq!((names.epoch, names.seq), (event.declared_epoch(), event.seq()), "{members}");
        }
        assert!(Names::read(b"{}").is_none());
    }
}
