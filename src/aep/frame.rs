//! The frames of the WebSocket binding: connection-scoped messages beside events.
//!
//! A text message is an event when it reads as one, else a frame when its `type` has no dot. Frames that a peer
//! may send are read here without judging more than their form; those that the relay sends are written here.
//!
//! Spec: AEP-0003 §2, §4, §6.5.

use serde::Serialize;
use serde_json::value::RawValue;

use super::event::{Event, EventError};
use super::json::{self, JsonError};
use super::position::Position;

/// The longest `hello` that is read, in bytes: what it declares is kept as long as the connection.
pub const LONGEST_HELLO: usize = 64 * 1024;

/// The longest `capabilities.control` and `capabilities.emits`, in bytes: the roster repeats them with every claim.
pub const LONGEST_DECLARATION: usize = 4 * 1024;

/// A text message from a peer.
#[derive(Debug)]
pub enum Incoming {
    /// An event.
    Event(Event),
    /// A frame.
    Frame(Frame),
    /// Not a JSON object.
    BadJson,
    /// An object with a dotted `type`, or none, that is no legal event.
    InvalidEvent {
        /// What is wrong.
        error: EventError,
        /// Its `id`, when it has one that is a string.
        id: Option<String>,
    },
}

/// A frame from a peer.
#[derive(Debug)]
pub enum Frame {
    /// The first frame.
    Hello(Box<Hello>),
    /// Asks for events.
    Subscribe {
        /// Names the subscription; `None` when it is missing, empty or no string.
        id: Option<String>,
        /// The frame's text, which holds the parameters.
        text: String,
    },
    /// Ends a subscription.
    Unsubscribe {
        /// Names it.
        id: Option<String>,
    },
    /// Asks who is connected.
    Roster {
        /// Comes back in the answer.
        id: Option<String>,
    },
    /// Asks for a sign of life.
    Ping {
        /// Comes back in the answer, as exact JSON.
        t: Option<String>,
    },
    /// Any other: signs of life, and frames from newer versions. Ignored.
    Other,
}

/// What a peer says of itself.
#[derive(Debug, Clone, Default)]
pub struct Hello {
    /// The versions that it speaks, the preferred one first.
    pub versions: Vec<String>,
    /// What it is.
    pub role: Role,
    /// `identity.agent`.
    pub agent: Option<String>,
    /// `identity.instance`.
    pub instance: Option<String>,
    /// `capabilities.control`, its exact JSON.
    pub control: Option<Box<RawValue>>,
    /// `capabilities.emits`, its exact JSON.
    pub emits: Option<Box<RawValue>>,
    /// `capabilities.control.accepts`, when it is declared as a list.
    pub accepts: Option<Vec<String>>,
}

/// What a peer is.
///
/// Spec: AEP-0003 §4 #2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Sends events, and takes commands.
    Emitter,
    /// Reads events, and sends commands.
    Consumer,
    /// Both; also what a peer is that names no role, or one that isn't known.
    #[default]
    Both,
}

impl Incoming {
    /// Reads a text message.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let error = match Event::parse_str(text) {
            Ok(event) => return Self::Event(event),
            Err(EventError::Json(JsonError::Syntax(_) | JsonError::NotAnObject | JsonError::Utf8(_))) => {
                return Self::BadJson;
            }
            Err(error) => error,
        };
        let members = Members::of(text);
        match members.string("type") {
            Some(name) if !name.contains('.') => Self::Frame(Frame::read(&name, &members, text)),
            _ => Self::InvalidEvent { error, id: members.string("id") },
        }
    }
}

impl Frame {
    fn read(name: &str, members: &Members<'_>, text: &str) -> Self {
        let id = members.string("id").filter(|id| !id.is_empty());
        match name {
            "hello" => Self::Hello(Box::new(Hello::read(members))),
            "subscribe" => Self::Subscribe { id, text: text.to_owned() },
            "unsubscribe" => Self::Unsubscribe { id },
            "roster" => Self::Roster { id },
            "ping" => Self::Ping { t: members.json("t").map(|json| json.get().to_owned()) },
            _ => Self::Other,
        }
    }
}

impl Hello {
    /// Whether a declaration is longer than [`LONGEST_DECLARATION`].
    #[must_use]
    pub fn declares_too_much(&self) -> bool {
        let declared = [&self.control, &self.emits];
        declared.into_iter().flatten().any(|json| json.get().len() > LONGEST_DECLARATION)
    }

    fn read(members: &Members<'_>) -> Self {
        let within = |name| members.json(name).map_or_else(Members::default, |json| Members::of(json.get()));
        let (identity, capabilities) = (within("identity"), within("capabilities"));
        let control = capabilities.json("control");
        let accepts = control.and_then(|control| strings(Members::of(control.get()).json("accepts")?));
        Self {
            versions: members.json("versions").and_then(strings).unwrap_or_default(),
            role: match members.string("role").as_deref() {
                Some("emitter") => Role::Emitter,
                Some("consumer") => Role::Consumer,
                _ => Role::Both,
            },
            agent: identity.string("agent"),
            instance: identity.string("instance"),
            control: control.map(ToOwned::to_owned),
            emits: capabilities.json("emits").map(ToOwned::to_owned),
            accepts,
        }
    }
}

/// An object's members; of one that stands twice, the first.
#[derive(Default)]
struct Members<'a>(Vec<(json::Name<'a>, &'a RawValue)>);

impl<'a> Members<'a> {
    /// None for what isn't an object.
    fn of(text: &'a str) -> Self {
        let mut members = Vec::new();
        let read = json::members::<()>(text, |name, value| {
            members.push((name, value));
            Ok(())
        });
        if read.is_ok() { Self(members) } else { Self::default() }
    }

    fn json(&self, name: &str) -> Option<&'a RawValue> {
        self.0.iter().find_map(|(known, value)| (known == name).then_some(*value))
    }

    fn string(&self, name: &str) -> Option<String> {
        self.json(name).and_then(json::string).map(std::borrow::Cow::into_owned)
    }
}

/// An array of strings; `None` for anything else.
fn strings(value: &RawValue) -> Option<Vec<String>> {
    let elements = json::elements(value)?;
    elements.into_iter().map(|element| json::string(element).map(std::borrow::Cow::into_owned)).collect()
}

/// A frame that the relay sends.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Outgoing<'a, C: Serialize = ()> {
    /// The relay's answer to `hello`.
    Hello {
        /// The one version of this connection.
        versions: [&'static str; 1],
        /// What the relay is.
        role: Role,
        /// Who it is.
        identity: Identity<'a>,
        /// What it can do.
        capabilities: C,
    },
    /// A subscription has begun.
    Subscribed {
        /// Names it.
        id: &'a str,
    },
    /// A subscription has ended.
    Unsubscribed {
        /// Names it.
        id: &'a str,
    },
    /// Something can't be replayed any more.
    ReplayExhausted {
        /// The subscription.
        sub: &'a str,
        /// The session.
        session: &'a str,
        /// Where the replay starts instead.
        earliest: Place,
    },
    /// Who is connected.
    Roster {
        /// The request's id.
        id: &'a str,
        /// One entry for each claim.
        entries: Vec<RosterEntry>,
    },
    /// A refusal.
    Error {
        /// The request's id.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<&'a str>,
        /// Why, from a closed set.
        code: &'a str,
        /// What is wrong, for people.
        #[serde(skip_serializing_if = "Option::is_none")]
        detail: Option<&'a str>,
        /// The id of the event that is refused.
        #[serde(skip_serializing_if = "Option::is_none")]
        cause: Option<&'a str>,
        /// The versions that are spoken here.
        #[serde(skip_serializing_if = "Option::is_none")]
        versions: Option<[&'static str; 1]>,
    },
    /// Asks for a sign of life.
    Ping {
        /// Milliseconds since the connection opened.
        t: u64,
    },
    /// A sign of life.
    Pong {
        /// What the peer's ping held.
        #[serde(skip_serializing_if = "Option::is_none")]
        t: Option<&'a RawValue>,
    },
    /// The last frame before a deliberate close.
    Closing {
        /// Why.
        reason: &'a str,
        /// What was delivered last.
        delivered: Vec<Delivered>,
    },
}

/// Who a party is.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Identity<'a> {
    /// Its logical name.
    pub agent: &'a str,
}

/// A position in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Restart generation.
    pub epoch: u64,
    /// Counter within it.
    pub seq: u64,
}

impl From<Position> for Place {
    fn from(position: Position) -> Self {
        Self { epoch: position.epoch, seq: position.seq }
    }
}

/// The last position of a session that a subscription was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Delivered {
    /// The subscription.
    pub sub: String,
    /// The session.
    pub session: String,
    /// The position.
    #[serde(flatten)]
    pub place: Place,
}

/// One live claim, with what its connection declared, verbatim.
///
/// Spec: AEP-0003 §4.1 #4.
#[derive(Debug, Clone, Serialize)]
pub struct RosterEntry {
    /// The claimed session.
    pub session: String,
    /// The claimant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Which process of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Its declared control block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<Box<RawValue>>,
    /// Its declared categories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub emits: Option<Box<RawValue>>,
}

impl<C: Serialize> Outgoing<'_, C> {
    /// The frame's text.
    #[must_use]
    pub fn to_text(&self) -> String {
        // Strings, numbers and JSON that was read before: always serializes.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A frame that needs no capabilities.
pub type Plain<'a> = Outgoing<'a, ()>;

impl<'a> Plain<'a> {
    /// A refusal with nothing but its code.
    #[must_use]
    pub fn error(code: &'a str) -> Self {
        Self::Error { id: None, code, detail: None, cause: None, versions: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_events_are_told_by_the_dot() {
        let event = r#"{"aep":"0.1","id":"e","type":"agent.idle","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a"}"#;
        assert!(matches!(Incoming::read(event), Incoming::Event(_)));
        assert!(
            matches!(Incoming::read(r#"{"type":"ping","t":1.50}"#), Incoming::Frame(Frame::Ping { t: Some(t) }) if t == "1.50")
        );
        assert!(matches!(Incoming::read(r#"{"type":"wombat"}"#), Incoming::Frame(Frame::Other)));
        for text in ["", "nonsense", "[]", "5", "{"] {
            assert!(matches!(Incoming::read(text), Incoming::BadJson), "{text}");
        }
        for text in ["{}", r#"{"type":5}"#, r#"{"id":"x","type":"run.started"}"#] {
            assert!(matches!(Incoming::read(text), Incoming::InvalidEvent { .. }), "{text}");
        }
        let Incoming::InvalidEvent { error, id } = Incoming::read(r#"{"id":"x","type":"run.started"}"#)
        else {
            panic!()
        };
        assert_eq!((error.to_string().as_str(), id.as_deref()), ("aep is required", Some("x")));
    }

    #[test]
    fn a_hello_is_read_leniently_and_kept_verbatim() {
        let text = r#"{"type":"hello","versions":["0.1"],"role":"emitter","identity":{"agent":"a","instance":"i","card":null},
            "capabilities":{"emits":["run"],"control":{"accepts":["control.cancel"],"ack_window_ms":1e4},"new":{}}}"#;
        let Incoming::Frame(Frame::Hello(hello)) = Incoming::read(text) else { panic!() };
        assert_eq!(
            (hello.role, hello.agent.as_deref(), hello.instance.as_deref()),
            (Role::Emitter, Some("a"), Some("i"))
        );
        assert_eq!(hello.control.unwrap().get(), r#"{"accepts":["control.cancel"],"ack_window_ms":1e4}"#);
        assert_eq!(hello.accepts, Some(vec!["control.cancel".to_owned()]));
        for text in [
            r#"{"type":"hello"}"#,
            r#"{"type":"hello","versions":5,"identity":[],"capabilities":{"control":[]}}"#,
            r#"{"type":"hello","versions":["0.1",1]}"#,
        ] {
            let Incoming::Frame(Frame::Hello(hello)) = Incoming::read(text) else { panic!() };
            assert_eq!((hello.versions.len(), hello.role, hello.accepts), (0, Role::Both, None));
        }
    }

    #[test]
    fn frames_are_written_as_the_specification_shows() {
        let error = Plain::Error {
            id: Some("s"),
            code: "invalid-filter",
            detail: Some("x"),
            cause: None,
            versions: None,
        };
        assert_eq!(error.to_text(), r#"{"type":"error","id":"s","code":"invalid-filter","detail":"x"}"#);
        assert_eq!(Plain::error("bad-json").to_text(), r#"{"type":"error","code":"bad-json"}"#);
        let marker = Plain::ReplayExhausted { sub: "1", session: "s", earliest: Position::new(1, 2).into() };
        assert_eq!(
            marker.to_text(),
            r#"{"type":"replay-exhausted","sub":"1","session":"s","earliest":{"epoch":1,"seq":2}}"#
        );
        let delivered =
            vec![Delivered { sub: "1".into(), session: "s".into(), place: Position::new(0, 7).into() }];
        let closing = Plain::Closing { reason: "shutting-down", delivered };
        assert_eq!(
            closing.to_text(),
            r#"{"type":"closing","reason":"shutting-down","delivered":[{"sub":"1","session":"s","epoch":0,"seq":7}]}"#
        );
        assert_eq!(Plain::Pong { t: None }.to_text(), r#"{"type":"pong"}"#);
        let t = RawValue::from_string("1.50".into()).unwrap();
        assert_eq!(Plain::Pong { t: Some(&t) }.to_text(), r#"{"type":"pong","t":1.50}"#);
    }
}
