//! What a request to `/stream` asks for: read from the query, or from a JSON body with the same members.
//!
//! Everything is checked before the first byte of a stream goes out. What isn't understood is refused; unknown
//! parameters are ignored, so that a newer client can talk to an older relay.

use std::borrow::Cow;

use http::HeaderMap;
use serde_json::value::RawValue;

use super::refusal::Refusal;
use crate::aep::json::{self, Kind};
use crate::aep::{Capture, Filter, Position, ResumeToken};
use crate::relay::subscriber::{From, OnLoss, Subscription, Then};

/// Reads the parameters of `GET /stream`.
///
/// Spec: AEP-0003 §3.3.
pub(super) fn from_query(query: &str, headers: &HeaderMap, max_from: usize) -> Result<Subscription, Refusal> {
    let mut read = Reader::new(max_from);
    for (name, value) in pairs(query) {
        let value = value.ok_or_else(|| must("query", "be percent-encoded UTF-8"))?;
        match &*name {
            "filter" => read.filter(&value)?,
            "capture" => read.capture(&value)?,
            "from" if value == "all" => read.from(From::All)?,
            "from" => {
                let tokens = positions(&value, max_from)?;
                read.from(From::Tokens(tokens))?;
            }
            "live" => read.live(match &*value {
                "0" => Then::End,
                "1" => Then::Live,
                _ => return Err(must("live", "be 0 or 1")),
            })?,
            _ => {}
        }
    }
    read.finish(headers)
}

/// Reads the parameters of `POST /stream`.
pub(super) fn from_body(text: &str, headers: &HeaderMap, max_from: usize) -> Result<Subscription, Refusal> {
    let mut read = Reader::new(max_from);
    json::members(text, |name, value| match &*name {
        "filter" => read.filter(value.get()),
        "capture" => {
            let level = json::string(value).ok_or_else(wrong_capture)?;
            read.capture(&level)
        }
        "from" if json::string(value).as_deref() == Some("all") => read.from(From::All),
        "from" => {
            let tokens = positions(value.get(), max_from)?;
            read.from(From::Tokens(tokens))
        }
        "live" => read.live(match value.get() {
            "0" | "false" => Then::End,
            "1" | "true" => Then::Live,
            _ => return Err(must("live", "be 0, 1, true or false")),
        }),
        _ => Ok(()),
    })
    .map_err(|error| must("body", &format!("be a JSON object: {error}")))??;
    read.finish(headers)
}

/// Reads the parameters of a `subscribe` frame, which is always live.
///
/// Spec: AEP-0003 §6.5.
pub(super) fn from_frame(text: &str, max_from: usize) -> Result<Subscription, Refusal> {
    let subscription = from_body(text, &HeaderMap::new(), max_from)?;
    Ok(Subscription { then: Then::Live, ..subscription })
}

/// The names and values of a query, decoded. A value that isn't UTF-8 is `None`.
pub(super) fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Option<Cow<'_, str>>)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name).unwrap_or(Cow::Borrowed(name)), decode(value))
    })
}

fn decode(text: &str) -> Option<Cow<'_, str>> {
    if memchr::memchr2(b'%', b'+', text.as_bytes()).is_none() {
        return Some(Cow::Borrowed(text));
    }
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced).decode_utf8().ok().map(|text| Cow::Owned(text.into_owned()))
}

/// Reads a JSON array of `{session, epoch, seq}`; `epoch` defaults to 0, as an event's does.
///
/// Spec: AEP-0001 §7.6.
pub(super) fn positions(text: &str, max: usize) -> Result<Vec<ResumeToken>, Refusal> {
    let form = "be \"all\" or a JSON array of {session, epoch, seq}";
    let elements: Vec<&RawValue> = serde_json::from_str(text).map_err(|_| must("from", form))?;
    if elements.len() > max {
        return Err(Refusal::TooManyPositions { max, count: elements.len() });
    }
    let mut tokens = Vec::with_capacity(elements.len());
    for (n, element) in elements.into_iter().enumerate() {
        tokens.push(position(element).map_err(|wrong| must("from", &format!("{form}; entry {n}: {wrong}")))?);
    }
    Ok(tokens)
}

fn position(element: &RawValue) -> Result<ResumeToken, &'static str> {
    if json::kind(element) != Kind::Object {
        return Err("not an object");
    }
    let (mut session, mut epoch, mut seq) = (None, None, None);
    json::members(element.get(), |name, value| {
        let twice = match &*name {
            "session" => {
                let text = json::string(value).filter(|text| !text.is_empty());
                session.replace(text.ok_or("session must be a non-empty string")?.into_owned()).is_some()
            }
            "epoch" => epoch.replace(counter(value).ok_or("epoch must be an integer from 0 on")?).is_some(),
            "seq" => seq.replace(integer(value).ok_or("seq must be an integer")?).is_some(),
            _ => false,
        };
        if twice { Err("a member stands twice") } else { Ok(()) }
    })
    .map_err(|_| "not an object")??;
    let epoch = epoch.unwrap_or(0);
    let position = match u64::try_from(seq.ok_or("seq is missing")?) {
        Ok(seq) => Some(Position::new(epoch, seq)),
        // A reader that has nothing of an epoch yet says so by -1.
        Err(_) => Position::before_epoch(epoch),
    };
    Ok(ResumeToken { session: session.ok_or("session is missing")?, position })
}

fn integer(value: &RawValue) -> Option<i64> {
    if json::kind(value) == Kind::Number { json::integer(value.get()) } else { None }
}

fn counter(value: &RawValue) -> Option<u64> {
    integer(value).and_then(|integer| u64::try_from(integer).ok())
}

struct Reader {
    max_from: usize,
    filter: Option<Filter>,
    capture: Option<Capture>,
    from: Option<From>,
    live: Option<Then>,
}

impl Reader {
    fn new(max_from: usize) -> Self {
        Self { max_from, filter: None, capture: None, from: None, live: None }
    }

    fn filter(&mut self, text: &str) -> Result<(), Refusal> {
        once(&mut self.filter, "filter", Filter::parse(text).map_err(Refusal::Filter)?)
    }

    fn capture(&mut self, text: &str) -> Result<(), Refusal> {
        once(&mut self.capture, "capture", Capture::from_name(text).ok_or_else(wrong_capture)?)
    }

    fn from(&mut self, from: From) -> Result<(), Refusal> {
        once(&mut self.from, "from", from)
    }

    fn live(&mut self, then: Then) -> Result<(), Refusal> {
        once(&mut self.live, "live", then)
    }

    /// `Last-Event-ID` counts where `from` is absent.
    fn finish(self, headers: &HeaderMap) -> Result<Subscription, Refusal> {
        let from = match self.from {
            Some(from) => from,
            None => match headers.get("last-event-id").map(|value| std::str::from_utf8(value.as_bytes())) {
                None | Some(Ok("")) => From::Now,
                Some(id) if self.max_from > 0 => {
                    let token = id.ok().and_then(ResumeToken::from_event_id);
                    let form = "be {session}:{epoch}:{seq}, the id of an event of this stream";
                    From::Tokens(vec![token.ok_or_else(|| must("last-event-id", form))?])
                }
                Some(_) => return Err(Refusal::TooManyPositions { max: 0, count: 1 }),
            },
        };
        Ok(Subscription {
            filter: self.filter.unwrap_or_default(),
            ceiling: self.capture,
            from,
            then: self.live.unwrap_or_default(),
            on_loss: OnLoss::End,
        })
    }
}

fn once<T>(slot: &mut Option<T>, name: &'static str, value: T) -> Result<(), Refusal> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(must(name, "be given once")),
    }
}

fn wrong_capture() -> Refusal {
    must("capture", "be one of none, metadata, redacted, full")
}

fn must(name: &'static str, must: &str) -> Refusal {
    Refusal::Parameter { name, must: must.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Result<Subscription, String> {
        from_query(text, &HeaderMap::new(), 3).map_err(|refusal| refusal.code().to_owned())
    }

    fn token(session: &str, epoch: u64, seq: u64) -> ResumeToken {
        ResumeToken { session: session.to_owned(), position: Some(Position::new(epoch, seq)) }
    }

    #[test]
    fn a_query_is_read() {
        let asked = query("filter=%7B%22agent%22%3A%22a+b%22%7D&capture=none&live=0&access_token=t&new=1&from=%5B%7B%22session%22%3A%22s%3A1%22%2C%22epoch%22%3A2%2C%22seq%22%3A5.0%7D%5D").unwrap();
        assert_eq!(asked.filter, Filter::parse(r#"{"agent":"a b"}"#).unwrap());
        assert_eq!((asked.ceiling, asked.then), (Some(Capture::None), Then::End));
        assert_eq!(asked.from, From::Tokens(vec![token("s:1", 2, 5)]));
        assert_eq!(query("from=all").unwrap().from, From::All);
        assert_eq!(query("from=[]").unwrap().from, From::Tokens(vec![]));
        assert_eq!(query("").unwrap().from, From::Now);
    }

    #[test]
    fn a_negative_seq_is_before_its_epoch() {
        for (text, position) in [
            (r#"from=[{"session":"s","seq":-1}]"#, None),
            (r#"from=[{"session":"s","epoch":0,"seq":-5}]"#, None),
            (r#"from=[{"session":"s","epoch":3,"seq":-1}]"#, Some(Position::new(2, u64::MAX))),
        ] {
            let token = ResumeToken { session: "s".to_owned(), position };
            assert_eq!(query(text).unwrap().from, From::Tokens(vec![token]), "{text}");
        }
    }

    #[test]
    fn a_body_means_the_same() {
        let text =
            r#"{"filter":{"agent":"a"},"capture":"redacted","from":[{"session":"s","seq":1}],"live":false}"#;
        let asked = from_body(text, &HeaderMap::new(), 3).unwrap();
        assert_eq!((asked.ceiling, asked.then), (Some(Capture::Redacted), Then::End));
        assert_eq!(asked.from, From::Tokens(vec![token("s", 0, 1)]));
        assert_eq!(from_body(r#"{"from":"all"}"#, &HeaderMap::new(), 3).unwrap().from, From::All);
        for wrong in [
            "",
            "[]",
            "{",
            r#"{"filter":"x"}"#,
            r#"{"capture":1}"#,
            r#"{"live":2}"#,
            r#"{"from":"x"}"#,
            r#"{"from":null}"#,
            r#"{"live":0,"live":0}"#,
        ] {
            assert!(from_body(wrong, &HeaderMap::new(), 3).is_err(), "{wrong}");
        }
    }

    #[test]
    fn everything_malformed_is_refused_by_its_own_code() {
        for (text, code) in [
            ("filter=x", "invalid-filter"),
            ("filter=", "invalid-filter"),
            ("filter={}&filter={}", "invalid-request"),
            ("capture=secret", "invalid-capture"),
            ("capture=", "invalid-capture"),
            ("live=yes", "invalid-live"),
            ("live=", "invalid-live"),
            ("from=", "invalid-from"),
            ("from=ALL", "invalid-from"),
            ("from={}", "invalid-from"),
            ("from=[null]", "invalid-from"),
            ("from=[1]", "invalid-from"),
            (r#"from=[{"session":1}]"#, "invalid-from"),
            (r#"from=[{"session":"s"}]"#, "invalid-from"),
            (r#"from=[{"seq":1}]"#, "invalid-from"),
            (r#"from=[{"session":"","seq":1}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":1,"epoch":-1}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":1.5}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":"1"}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":1,"seq":2}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":1,"epoch":null}]"#, "invalid-from"),
            (r#"from=[{"session":"s","seq":99999999999999999999}]"#, "invalid-from"),
            ("from=%ff", "invalid-request"),
            (
                r#"from=[{"session":"s","seq":1},{"session":"s","seq":1},{"session":"s","seq":1},{"session":"s","seq":1}]"#,
                "limit-exceeded",
            ),
        ] {
            let expected = if text.starts_with("filter={}&") { "invalid-request" } else { code };
            assert_eq!(query(text).unwrap_err(), expected, "{text}");
        }
    }

    #[test]
    fn last_event_id_counts_where_from_is_absent() {
        let mut headers = HeaderMap::new();
        headers.insert("last-event-id", http::HeaderValue::from_bytes("a:é:1:7".as_bytes()).unwrap());
        assert_eq!(from_query("", &headers, 3).unwrap().from, From::Tokens(vec![token("a:é", 1, 7)]));
        assert_eq!(from_query("from=all", &headers, 3).unwrap().from, From::All);
        headers.insert("last-event-id", http::HeaderValue::from_static("nonsense"));
        assert_eq!(from_query("", &headers, 3).unwrap_err().code(), "invalid-last-event-id");
        headers.insert("last-event-id", http::HeaderValue::from_static(""));
        assert_eq!(from_query("", &headers, 3).unwrap().from, From::Now);
    }
}
