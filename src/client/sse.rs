//! Reads server-sent events from bytes as they come, in whatever pieces.
//!
//! Lines end with CR, LF or CRLF; a byte order mark before the first is dropped. A message is its `data` lines,
//! joined, once a blank line ends it; `event` and `id` say nothing that the event itself doesn't, and are
//! passed over. What a message may take is bounded: past the bound nothing of it is kept, and it is told as too
//! long where it ends. A message that the stream's end cuts off is none.
//!
//! Spec: AEP-0003 §3.3.

use std::time::Duration;

use bytes::{Buf as _, Bytes};

/// What is kept allocated between two messages, in bytes.
const KEPT: usize = 64 * 1024;
/// What a line may hold beside a message's longest data: its field name, at least.
const LINE_SLACK: usize = 1024;
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// One thing on a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item<'p> {
    /// The data of a message.
    Data(&'p [u8]),
    /// A message was longer than the bound.
    TooLong,
    /// A comment, without its colon and the space after it.
    Comment(&'p [u8]),
    /// How long the server wants to be left alone after the end of the stream.
    Retry(Duration),
}

/// The state between two pieces of a stream.
#[derive(Debug)]
pub(super) struct Parser {
    /// The most bytes of data in one message.
    longest: usize,
    /// The line so far, at most `longest` and [`LINE_SLACK`].
    line: Vec<u8>,
    /// Whether the line outgrew its bound, so that only its start is there.
    line_is_cut: bool,
    /// Whether the line has ended and been read, and only stays to be shown.
    line_is_read: bool,
    /// The message so far, at most `longest`; each line of it ends with a line feed.
    data: Vec<u8>,
    /// Whether the message outgrew its bound.
    data_is_cut: bool,
    /// Whether the message has ended, and only stays to be shown.
    data_is_read: bool,
    /// Whether a line feed would be the second half of a line's end.
    after_cr: bool,
    /// Whether the line is the stream's first.
    first: bool,
}

/// What a line ended.
enum Ended {
    Message,
    TooLong,
    Comment,
    Retry(Duration),
}

impl Parser {
    /// A parser at the start of a stream, for messages of at most `longest` bytes.
    pub(super) fn new(longest: usize) -> Self {
        Self {
            longest,
            line: Vec::new(),
            line_is_cut: false,
            line_is_read: false,
            data: Vec::new(),
            data_is_cut: false,
            data_is_read: false,
            after_cr: false,
            first: true,
        }
    }

    /// The next thing in `input`, which is consumed as far as it was read; `None` when all of it was and more
    /// is needed.
    pub(super) fn next<'p>(&'p mut self, input: &mut Bytes) -> Option<Item<'p>> {
        let ended = self.advance(input)?;
        Some(match ended {
            // Without the line feed that its last line ended with.
            Ended::Message => Item::Data(self.data.split_last().map_or(&[], |(_, data)| data)),
            Ended::TooLong => Item::TooLong,
            Ended::Comment => {
                let text = self.line.strip_prefix(b":").unwrap_or_default();
                Item::Comment(text.strip_prefix(b" ").unwrap_or(text))
            }
            Ended::Retry(wait) => Item::Retry(wait),
        })
    }

    fn advance(&mut self, input: &mut Bytes) -> Option<Ended> {
        loop {
            self.forget_what_was_shown();
            if self.after_cr
                && let Some(next) = input.first()
            {
                self.after_cr = false;
                if *next == b'\n' {
                    input.advance(1);
                }
            }
            let end = memchr::memchr2(b'\n', b'\r', input);
            let text = input.split_to(end.unwrap_or(input.len()));
            self.keep(&text);
            // Without an end the input is empty now.
            self.after_cr = *input.first()? == b'\r';
            input.advance(1);
            self.line_is_read = true;
            if std::mem::take(&mut self.first) && self.line.starts_with(BYTE_ORDER_MARK) {
                self.line.drain(..BYTE_ORDER_MARK.len());
            }
            if let Some(ended) = self.end_line() {
                return Some(ended);
            }
        }
    }

    fn forget_what_was_shown(&mut self) {
        if std::mem::take(&mut self.line_is_read) {
            self.line_is_cut = false;
            self.line.clear();
            self.line.shrink_to(KEPT);
        }
        if std::mem::take(&mut self.data_is_read) {
            self.data.clear();
            self.data.shrink_to(KEPT);
        }
    }

    /// Adds to the line what fits.
    fn keep(&mut self, text: &[u8]) {
        let room = self.longest.saturating_add(LINE_SLACK).saturating_sub(self.line.len());
        match text.get(..room) {
            Some(start) if start.len() < text.len() => {
                self.line.extend_from_slice(start);
                self.line_is_cut = true;
            }
            _ => self.line.extend_from_slice(text),
        }
    }

    fn end_line(&mut self) -> Option<Ended> {
        if self.line.is_empty() {
            if std::mem::take(&mut self.data_is_cut) {
                return Some(Ended::TooLong);
            }
            self.data_is_read = !self.data.is_empty();
            // One empty data line is no message either.
            return (self.data.len() > 1).then_some(Ended::Message);
        }
        if self.line.first() == Some(&b':') {
            return (!self.line_is_cut).then_some(Ended::Comment);
        }
        let (field, value) = match memchr::memchr(b':', &self.line) {
            Some(colon) => {
                let (field, value) = self.line.split_at(colon);
                let value = value.strip_prefix(b":").unwrap_or_default();
                (field, value.strip_prefix(b" ").unwrap_or(value))
            }
            None => (self.line.as_slice(), &[][..]),
        };
        match field {
            b"data" => {
                let whole = self.data.len().saturating_add(value.len());
                if self.data_is_cut || self.line_is_cut || whole > self.longest {
                    self.data_is_cut = true;
                    self.data = Vec::new();
                } else {
                    self.data.extend_from_slice(value);
                    self.data.push(b'\n');
                }
                None
            }
            b"retry" if !value.is_empty() && value.iter().all(u8::is_ascii_digit) => {
                let millis = std::str::from_utf8(value).ok()?.parse().unwrap_or(u64::MAX);
                Some(Ended::Retry(Duration::from_millis(millis)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    /// What a stream holds when it comes in these pieces, in words.
    fn read(longest: usize, pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = Parser::new(longest);
        let mut found = Vec::new();
        for piece in pieces {
            let mut input = Bytes::copy_from_slice(piece);
            while let Some(item) = parser.next(&mut input) {
                found.push(match item {
                    Item::Data(data) => format!("data {}", String::from_utf8_lossy(data)),
                    Item::TooLong => "too long".to_owned(),
                    Item::Comment(text) => format!("comment {}", String::from_utf8_lossy(text)),
                    Item::Retry(wait) => format!("retry {}", wait.as_millis()),
                });
            }
            assert!(input.is_empty());
            assert!(parser.line.len() <= longest + LINE_SLACK && parser.data.len() <= longest + 1);
        }
        found
    }

    fn whole(text: &str) -> Vec<String> {
        read(1000, &[text.as_bytes()])
    }

    #[test]
    fn a_message_is_its_data_lines() {
        assert_eq!(whole("event: a.b\ndata: {}\nid: s:0:1\n\n"), ["data {}"]);
        assert_eq!(whole("data:1\ndata:  2\n\ndata: 3\n\n"), ["data 1\n 2", "data 3"]);
        assert_eq!(whole("data\ndata: x\n\n"), ["data \nx"]);
        assert_eq!(whole("data\n\ndata:\n\n\n\n"), [""; 0], "no data, no message");
        assert_eq!(whole("data: cut off\n"), [""; 0]);
        assert_eq!(whole("datum: x\nDATA: x\n data: x\n\n"), [""; 0]);
    }

    #[test]
    fn every_line_end_ends_a_line() {
        for end in ["\n", "\r", "\r\n"] {
            let text = ["data: 1", "data: 2", "", ": c", "", "data: 3", "", ""].join(end);
            assert_eq!(whole(&text), ["data 1\n2", "comment c", "data 3"], "{end:?}");
        }
        assert_eq!(whole("data: 1\r\n\rdata: 2\n\r\n"), ["data 1", "data 2"]);
    }

    #[test]
    fn only_the_first_mark_is_dropped() {
        assert_eq!(whole("\u{feff}data: 1\n\n\u{feff}data: 2\n\n"), ["data 1"]);
        assert_eq!(whole("\u{feff}\u{feff}data: 1\n\n"), [""; 0]);
        assert_eq!(whole("\u{feff}\ndata: 1\n\n"), ["data 1"]);
    }

    #[test]
    fn what_is_too_long_is_told_once_and_not_held() {
        let long = "x".repeat(5000);
        for text in [
            format!("data: {long}\n\ndata: 1\n\n"),
            format!("data: {}\ndata: {}\ndata: y\n\ndata: 1\n\n", "x".repeat(600), "y".repeat(600)),
        ] {
            assert_eq!(whole(&text), ["too long", "data 1"]);
        }
        assert_eq!(whole(&format!("id: {long}\n: {long}\ndata: 1\n\n")), ["data 1"]);
        let just = "x".repeat(1000);
        assert_eq!(whole(&format!("data: {just}\n\n")), [format!("data {just}")]);
        assert_eq!(whole(&format!("data: {just}y\n\n")), ["too long"]);
    }

    #[test]
    fn a_wait_is_plain_digits() {
        assert_eq!(whole("retry: 1500\nretry: 1s\nretry:\nretry: -1\n"), ["retry 1500"]);
        assert_eq!(whole("retry: 99999999999999999999\n"), [format!("retry {}", u64::MAX)]);
    }

    /// Texts that are made of what matters to the parser.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            select(vec![
                "data: 1",
                "data:",
                "data",
                "\n",
                "\n",
                "\r",
                "\r\n",
                "\n\n",
                ":",
                ": c",
                "retry: 5",
                "\u{feff}",
                "event: a",
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
            ])
            .prop_map(|text| text.as_bytes().to_vec()),
            vec(any::<u8>(), 0..4),
        ];
        vec(part, 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(text in stream(), cuts in vec(any::<prop::sample::Index>(), 0..12)) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect();
            prop_assert_eq!(read(20, &pieces), read(20, &[&text]));
            let bytes: Vec<&[u8]> = text.chunks(1).collect();
            prop_assert_eq!(read(20, &bytes), read(20, &[&text]));
        }

        #[test]
        fn what_is_written_is_read(lines in vec("[^\r\n]{0,20}", 1..5)) {
            let text: String = lines.iter().map(|line| format!("data: {line}\n")).collect::<String>() + "\n";
            let expected = lines.join("\n");
            let expected = if expected.is_empty() { vec![] } else { vec![format!("data {expected}")] };
            prop_assert_eq!(read(1000, &[text.as_bytes()]), expected);
        }
    }
}
