//! Legal events of every kind, as text: every scope, optional attribute and kind of extension, strings with any
//! character and with or without escapes, number texts that a tree of doubles would change, any white space and
//! any order of members.

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// An event as its members, each name with its value's JSON, and how they are spaced.
#[derive(Debug, Clone)]
pub struct Draft {
    pub members: Vec<(String, String)>,
    spacing: Vec<u8>,
}

impl Draft {
    /// The event's text.
    pub fn text(&self) -> String {
        let mut spacing = self.spacing.iter().copied().cycle();
        let mut gap = || match spacing.next().unwrap_or_default() {
            0 => " ",
            1 => "\n  ",
            2 => "\r\n",
            3 => "\t",
            _ => "",
        };
        let mut out = format!("{}{{", gap());
        for (n, (name, json)) in self.members.iter().enumerate() {
            let name = quote(name, if gap() == "\t" { 1 } else { 0 });
            let comma = if n == 0 { "" } else { "," };
            out += &format!("{comma}{}{name}{}:{}{json}{}", gap(), gap(), gap(), gap());
        }
        out + "}" + gap()
    }

    /// The JSON of one member.
    pub fn json(&self, name: &str) -> Option<&str> {
        self.members.iter().find_map(|(known, json)| (known == name).then_some(json.as_str()))
    }
}

/// `text` as a JSON string: plain, with every character escaped, or with the solidus escaped.
pub fn quote(text: &str, style: u8) -> String {
    match style {
        1 => {
            let units = text.encode_utf16().map(|unit| format!("\\u{unit:04x}"));
            format!("\"{}\"", units.collect::<String>())
        }
        2 => serde_json::Value::from(text).to_string().replace('/', "\\/"),
        _ => serde_json::Value::from(text).to_string(),
    }
}

type Member = Option<(String, String)>;

/// A string that isn't empty: of names, of printable characters, of any characters at all.
pub fn characters() -> BoxedStrategy<String> {
    prop_oneof![
        4 => "[a-zA-Z0-9_.:/-]{1,12}",
        2 => "\\PC{1,8}",
        1 => vec(any::<char>(), 1..6).prop_map(String::from_iter),
        1 => select(vec!["\u{0}", "a\nb", "\r", "\u{85}", "%41", "\"q\"", " lead", "100%", "é\u{301}", "😀"])
            .prop_map(str::to_owned),
    ]
    .boxed()
}

fn quoted(text: impl Strategy<Value = String> + 'static) -> BoxedStrategy<String> {
    (text, 0..4_u8).prop_map(|(text, style)| quote(&text, style)).boxed()
}

fn required(name: &'static str, json: BoxedStrategy<String>) -> BoxedStrategy<Member> {
    json.prop_map(move |json| Some((name.to_owned(), json))).boxed()
}

fn optional(name: &'static str, json: BoxedStrategy<String>) -> BoxedStrategy<Member> {
    option::of(json).prop_map(move |json| json.map(|json| (name.to_owned(), json))).boxed()
}

fn counter() -> BoxedStrategy<String> {
    let value = prop_oneof![
        0..100_u64,
        select(vec![0, (1 << 31) - 1, 1 << 31, 1_751_537_640_000, (1 << 53) - 1, i64::MAX as u64]),
        0..=i64::MAX as u64,
    ];
    (value, select(vec!["", "", "", ".0", ".000", "e0", "E+0"]))
        .prop_map(|(value, tail)| format!("{value}{tail}"))
        .boxed()
}

fn time() -> BoxedStrategy<String> {
    let date = (0..=9999_u32, 1..=12_u32, 1..=28_u32);
    let clock = (0..24_u32, 0..60_u32, 0..60_u32);
    let tail =
        (select(vec!["", ".0", ".500", ".123456789"]), select(vec!["Z", "z", "+02:00", "-23:59", "-00:00"]));
    (date, clock, tail, select(vec!['T', 't']))
        .prop_map(|((y, mo, d), (h, mi, s), (fraction, offset), t)| {
            format!("{y:04}-{mo:02}-{d:02}{t}{h:02}:{mi:02}:{s:02}{fraction}{offset}")
        })
        .boxed()
}

/// A URI that every reading of RFC 3986 accepts.
fn source() -> BoxedStrategy<String> {
    prop_oneof![
        "aep://[a-z0-9-]{1,8}(/[a-zA-Z0-9_.~%]{1,8}){0,2}".prop_map(|uri| uri.replace('%', "%20")),
        "urn:[a-z]{2,6}:[a-z0-9:-]{1,12}",
    ]
    .boxed()
}

/// Types, and whether `session` and `seq` go with them.
fn event_type() -> BoxedStrategy<(String, bool, bool)> {
    let core = "(session|run|progress|tool|delegation|resource|error|state|assessment|message)(\\.[a-z0-9_]{1,6}){1,3}";
    let registered =
        select(vec!["attention.requested", "attention.answered", "tool.completed", "control.accepted"]);
    let command =
        select(vec!["control.attention.respond", "control.cancel", "control.pause", "control.resume"]);
    prop_oneof![
        3 => core.prop_map(|text| (text, true, true)),
        2 => registered.prop_map(|text| (text.to_owned(), true, true)),
        1 => "x\\.[a-z0-9_-]{1,6}\\.(foo|tool|agent|controls)(\\.[a-z0-9_]{1,5}){1,2}".prop_map(|text| (text, true, true)),
        1 => command.prop_map(|text| (text.to_owned(), true, false)),
        1 => "x\\.[a-z0-9_-]{1,6}\\.control(\\.[a-z0-9_]{1,5}){1,2}".prop_map(|text| (text, true, false)),
        1 => Just(("attention.routed".to_owned(), true, false)),
        1 => "agent(\\.[a-z0-9_]{1,6}){1,2}".prop_map(|text| (text, false, false)),
    ]
    .boxed()
}

/// Names that extension attributes may have and that the mapping to CloudEvents doesn't write itself.
fn extension_name() -> impl Strategy<Value = String> {
    const TAKEN: [&str; 3] = ["specversion", "datacontenttype", "dataschema"];
    const CORE: [&str; 17] = [
        "aep",
        "id",
        "type",
        "subject",
        "time",
        "source",
        "agent",
        "session",
        "run",
        "step",
        "seq",
        "epoch",
        "cause",
        "traceparent",
        "severity",
        "capture",
        "data",
    ];
    "[a-z0-9]{1,20}".prop_filter("names with a meaning", |name| {
        !name.starts_with("aep") && !TAKEN.contains(&name.as_str()) && !CORE.contains(&name.as_str())
    })
}

/// The JSON of an extension attribute's value.
fn extension_json() -> BoxedStrategy<String> {
    let edge = select(vec![0, -1, i64::from(i32::MIN), i64::from(i32::MAX) + 1, (1 << 53) + 1, i64::MIN]);
    prop_oneof![
        3 => quoted(prop_oneof![characters(), Just(String::new())].boxed()),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => edge.prop_map(|n| n.to_string()),
        1 => (-9..=9_i64).prop_map(|n| format!("{n}.0")),
        1 => any::<bool>().prop_map(|b| b.to_string()),
    ]
    .boxed()
}

/// The JSON of any value, a few levels deep, as text.
fn any_json() -> BoxedStrategy<String> {
    let numbers = [
        "0",
        "-0",
        "1.0",
        "1e2",
        "1E+2",
        "-12.50e-3",
        "0.10",
        "9007199254740993",
        "12345678901234567890",
        "1e400",
        "3.141592653589793238462643",
    ];
    let leaf = prop_oneof![
        select(numbers.to_vec()).prop_map(str::to_owned),
        select(vec!["true", "false", "null", "{}", "[ ]", "\"\\ud800\"", "\"\\/\\u0000\""])
            .prop_map(str::to_owned),
        quoted(characters()),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            (vec(inner.clone(), 0..4), select(vec![",", " ,\t", ",\n"]))
                .prop_map(|(elements, comma)| format!("[{}]", elements.join(comma))),
            object(inner),
        ]
    })
    .boxed()
}

/// An object with the given values; the same name may stand twice.
fn object(value: impl Strategy<Value = String> + 'static) -> BoxedStrategy<String> {
    let name = prop_oneof![select(vec!["a", "b", "prompt", "id"]).prop_map(str::to_owned), characters()];
    (vec((quoted(name), value), 0..4), select(vec![":", " : ", ":\r\n"]))
        .prop_map(|(members, colon)| {
            let members: Vec<_> = members.into_iter().map(|(name, json)| name + colon + &json).collect();
            format!("{{{}}}", members.join(","))
        })
        .boxed()
}

/// Any legal event.
pub fn event() -> BoxedStrategy<Draft> {
    event_type()
        .prop_flat_map(|(event_type, session, seq)| {
            let scoped = |member: BoxedStrategy<Member>, present: bool| {
                if present { member } else { Just(None).boxed() }
            };
            let traceparent = quoted("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}");
            let severities = vec!["debug", "info", "notice", "warning", "error", "critical"];
            let captures = vec!["none", "metadata", "redacted", "full"];
            let parts = vec![
                required("aep", quoted(Just("0.1".to_owned()))),
                required("id", quoted(characters())),
                required("type", quoted(Just(event_type))),
                optional("subject", quoted(characters())),
                required("time", quoted(time())),
                required("source", quoted(source())),
                required("agent", quoted(characters())),
                scoped(required("session", quoted(characters())), session),
                scoped(optional("run", quoted(characters())), session),
                scoped(optional("step", quoted(characters())), session),
                scoped(required("seq", counter()), seq),
                optional("epoch", counter()),
                optional("cause", quoted(characters())),
                optional("traceparent", traceparent),
                optional("severity", quoted(select(severities).prop_map(str::to_owned))),
                optional("capture", quoted(select(captures).prop_map(str::to_owned))),
                optional("data", object(any_json())),
            ];
            let extensions = btree_map(extension_name(), extension_json(), 0..4);
            let members = (parts, extensions).prop_map(|(parts, extensions)| {
                parts.into_iter().flatten().chain(extensions).collect::<Vec<_>>()
            });
            (members.prop_shuffle(), vec(0..16_u8, 1..24))
        })
        .prop_map(|(members, spacing)| Draft { members, spacing })
        .boxed()
}
