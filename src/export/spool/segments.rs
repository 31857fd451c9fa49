//! Which files there are, what each holds, and which may go. Bookkeeping only: nothing here touches a file.

use std::collections::VecDeque;

use super::format::segment_name;
use super::scan::Extent;

/// How many damaged files are kept for a look; older ones are deleted.
const MAX_SET_ASIDE: usize = 4;

/// One file of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// The number of its first event.
    pub(super) first: u64,
    /// The number after its last event.
    pub(super) end: u64,
    /// Length of what was committed, in bytes.
    pub(super) length: u64,
    /// Length of the file, in bytes: more than `length` when it couldn't be cut back.
    pub(super) size: u64,
    /// Whether something in it was found lost.
    pub(super) damaged: bool,
    /// Damage before this offset was reported.
    pub(super) reported: u64,
}

impl Segment {
    /// One that holds no event yet.
    pub(super) fn new(first: u64, length: u64) -> Self {
        Self { first, end: first, length, size: length, damaged: false, reported: 0 }
    }

    pub(super) fn name(&self) -> String {
        segment_name(self.first)
    }

    pub(super) fn extent(&self) -> Extent {
        Extent { length: self.length, end: self.end }
    }
}

/// A file to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Doomed {
    pub(super) name: String,
    /// In bytes.
    pub(super) size: u64,
    pub(super) fate: Fate,
}

/// What becomes of a file that isn't needed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// A segment, removed.
    Remove,
    /// A damaged segment, renamed to `<name>.damaged-<n>`.
    SetAside,
    /// A damaged segment that was set aside before, removed.
    Forget,
}

/// Where an event is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// In this segment.
    In(Segment),
    /// In none; this number is the next that is in one.
    Before(u64),
    /// In none, and neither is any later one.
    Past,
}

/// The files of a spool.
#[derive(Debug, Default)]
pub(super) struct Segments {
    /// By number. The last one may be written to, as long as `last_is_open`; the others are never changed.
    list: VecDeque<Segment>,
    /// To be removed, oldest first.
    doomed: VecDeque<Doomed>,
    /// Damaged files that were renamed, with their numbers, oldest first; at most [`MAX_SET_ASIDE`].
    set_aside: VecDeque<(u64, Doomed)>,
    /// Bytes of all these, and of those that are being removed.
    size: u64,
}

impl Segments {
    /// Those that were found. `set_aside` are names, numbers and sizes of damaged files.
    pub(super) fn new(list: VecDeque<Segment>, set_aside: Vec<(String, u64, u64)>) -> Self {
        let mut segments = Self { list, ..Self::default() };
        segments.size = segments.list.iter().map(|segment| segment.size).fold(0, u64::saturating_add);
        for (name, number, size) in set_aside {
            segments.add(size);
            segments.set_aside.push_back((number, Doomed { name, size, fate: Fate::Forget }));
        }
        segments.set_aside.make_contiguous().sort_unstable_by_key(|(number, _)| *number);
        segments
    }

    /// Bytes of all files.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The number of the oldest event held.
    pub(super) fn first(&self) -> Option<u64> {
        self.list.front().map(|segment| segment.first)
    }

    pub(super) fn last(&self) -> Option<&Segment> {
        self.list.back()
    }

    fn add(&mut self, bytes: u64) {
        self.size = self.size.saturating_add(bytes);
    }

    fn subtract(&mut self, bytes: u64) {
        self.size = self.size.saturating_sub(bytes);
    }

    /// A new segment, the last from now on. It replaces one of the same number, which held nothing.
    pub(super) fn begin(&mut self, first: u64, length: u64) {
        if self.list.back().is_some_and(|last| last.first == first)
            && let Some(replaced) = self.list.pop_back()
        {
            self.subtract(replaced.size);
        }
        self.add(length);
        self.list.push_back(Segment::new(first, length));
    }

    /// The last segment has grown to `length`, and holds the events before `end`.
    pub(super) fn grow(&mut self, length: u64, end: u64) {
        if let Some(last) = self.list.back_mut() {
            let more = length.saturating_sub(last.size);
            (last.length, last.size, last.end) = (length, last.size.saturating_add(more), end);
            self.size = self.size.saturating_add(more);
        }
    }

    /// Up to `bytes` were written to the last segment, and couldn't be cut off.
    pub(super) fn waste(&mut self, bytes: u64) {
        if let Some(last) = self.list.back_mut() {
            let more = last.length.saturating_add(bytes).saturating_sub(last.size);
            last.size = last.size.saturating_add(more);
            self.size = self.size.saturating_add(more);
        }
    }

    /// Where the event of a number is.
    pub(super) fn place(&self, number: u64) -> Place {
        let after = self.list.partition_point(|segment| segment.first <= number);
        match after.checked_sub(1).and_then(|at| self.list.get(at)) {
            Some(segment) if number < segment.end => Place::In(segment.clone()),
            _ => self.list.get(after).map_or(Place::Past, |segment| Place::Before(segment.first)),
        }
    }

    /// Notes damage found at an offset of a segment: whether it is news.
    pub(super) fn report(&mut self, first: u64, offset: u64) -> bool {
        let Some(segment) = self.list.iter_mut().find(|segment| segment.first == first) else { return false };
        let news = offset >= segment.reported;
        if news {
            segment.reported = offset.saturating_add(1);
            segment.damaged = true;
        }
        news
    }

    /// How many segments that nobody needs there are, all events before `done` being done with. The last
    /// segment isn't among them: it is written to.
    fn history(&self, done: u64) -> impl Iterator<Item = &Segment> {
        let sealed = self.list.len().saturating_sub(1);
        self.list.iter().take(sealed).take_while(move |segment| segment.end <= done)
    }

    /// Bytes that can't be freed.
    pub(super) fn needed(&self, done: u64) -> u64 {
        let history = self.history(done).count();
        self.list.iter().skip(history).map(|segment| segment.size).fold(0, u64::saturating_add)
    }

    /// Gives up history beyond `keep` bytes, and as much more as brings everything down to `total` bytes.
    pub(super) fn give_up(&mut self, done: u64, keep: u64, total: u64) {
        let mut history = self.history(done).map(|segment| segment.size).fold(0, u64::saturating_add);
        let mut count = self.history(done).count();
        let doomed = self.doomed.iter().map(|doomed| doomed.size).fold(0, u64::saturating_add);
        let mut left = self.size.saturating_sub(doomed);
        while left > total
            && let Some((_, doomed)) = self.set_aside.pop_front()
        {
            left = left.saturating_sub(doomed.size);
            self.doomed.push_back(doomed);
        }
        while count > 0
            && (history > keep || left > total)
            && let Some(segment) = self.list.pop_front()
        {
            count = count.saturating_sub(1);
            history = history.saturating_sub(segment.size);
            left = left.saturating_sub(segment.size);
            let fate = if segment.damaged { Fate::SetAside } else { Fate::Remove };
            self.doomed.push_back(Doomed { name: segment.name(), size: segment.size, fate });
        }
    }

    /// The next file to remove, whose bytes count until it is [`removed`](Self::removed).
    pub(super) fn next_doomed(&mut self) -> Option<Doomed> {
        self.doomed.pop_front()
    }

    pub(super) fn any_doomed(&self) -> bool {
        !self.doomed.is_empty()
    }

    /// A file couldn't be removed: it stays doomed.
    pub(super) fn not_removed(&mut self, doomed: Doomed) {
        self.doomed.push_front(doomed);
    }

    /// A file is gone.
    pub(super) fn removed(&mut self, doomed: &Doomed) {
        self.subtract(doomed.size);
    }

    /// The number of the next damaged file that is set aside.
    pub(super) fn next_aside(&self) -> u64 {
        self.set_aside.back().map_or(1, |(number, _)| number.saturating_add(1))
    }

    /// A damaged segment was renamed. Beyond the number that is kept, the oldest is doomed.
    pub(super) fn put_aside(&mut self, name: String, number: u64, size: u64) {
        self.set_aside.push_back((number, Doomed { name, size, fate: Fate::Forget }));
        while self.set_aside.len() > MAX_SET_ASIDE
            && let Some((_, oldest)) = self.set_aside.pop_front()
        {
            self.doomed.push_back(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(firsts: &[u64]) -> Segments {
        let mut segments = Segments::default();
        for first in firsts {
            segments.begin(*first, 10);
            segments.grow(100, first + 10);
        }
        segments
    }

    fn doomed(segments: &mut Segments) -> Vec<String> {
        std::iter::from_fn(|| segments.next_doomed()).map(|doomed| doomed.name).collect()
    }

    #[test]
    fn history_is_kept_to_its_bound_and_given_up_for_space() {
        let mut log = segments(&[0, 10, 20, 30]);
        assert_eq!((log.size(), log.needed(0), log.needed(20), log.needed(40)), (400, 400, 200, 100));
        log.give_up(20, 100, 1000);
        assert_eq!(doomed(&mut log), [segment_name(0)]);
        log.give_up(20, 100, 0);
        assert_eq!(doomed(&mut log), [segment_name(10)], "20 is needed");
        log.give_up(40, 0, 0);
        assert_eq!(doomed(&mut log), [segment_name(20)], "the last is written to");
        assert_eq!(log.size(), 400, "counted until it is gone");
    }

    #[test]
    fn numbers_are_found_and_gaps_stepped_over() {
        let mut log = segments(&[5, 20]);
        assert!(matches!(log.place(14), Place::In(Segment { first: 5, .. })));
        assert_eq!(log.place(3), Place::Before(5));
        assert_eq!(log.place(17), Place::Before(20));
        assert_eq!(log.place(30), Place::Past);
        log.begin(30, 10);
        log.begin(30, 12);
        assert_eq!(log.size(), 212, "an empty segment is replaced");
    }

    #[test]
    fn damaged_segments_are_set_aside_and_bounded() {
        let mut log = segments(&[0, 10]);
        assert!(log.report(0, 50) && !log.report(0, 50) && log.report(0, 70));
        log.give_up(20, 0, 1000);
        assert_eq!(log.next_doomed().map(|doomed| doomed.fate), Some(Fate::SetAside));
        for number in 1..=6 {
            assert_eq!(log.next_aside(), number);
            log.put_aside(number.to_string(), number, 50);
        }
        assert_eq!(doomed(&mut log), ["1", "2"]);
        log.give_up(20, 0, 0);
        assert_eq!(doomed(&mut log), ["3", "4", "5", "6"], "given up when space is needed");
    }
}
