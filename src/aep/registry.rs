//! Which fields of a registered type's `data` are content, and from which capture level on they may be present.
//!
//! The core table states facts of the public registry: for each of the 44 types with a payload, the fields
//! above `metadata`. A field that isn't named is `metadata`; a type that isn't named is unregistered. A test
//! holds the table against the public schemas. Operators add their own types from schema files.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::capture::Capture;
use super::event::quoted;
use super::json::{self, Kind};

/// One type and its gated fields. A path's steps are separated by `/`, for members' names hold dots; `[]` is
/// the step into an array's items.
type Row = (&'static str, &'static [(&'static str, Capture)]);

const R: Capture = Capture::Redacted;
const F: Capture = Capture::Full;

/// Spec: AEP-0002 §5.
const CORE: [Row; 44] = [
    ("agent.health", &[("detail", R)]),
    ("agent.heartbeat", &[]),
    ("agent.idle", &[]),
    ("agent.presence", &[]),
    ("assessment.evaluation.recorded", &[("gen_ai.evaluation.explanation", R)]),
    ("assessment.feedback.received", &[("comment", R), ("correction", R)]),
    ("assessment.guardrail.recorded", &[("guardrail/explanation", R)]),
    ("attention.answered", &[("answer/text", R)]),
    ("attention.requested", &[("context", F)]),
    ("attention.resolved", &[]),
    ("attention.routed", &[]),
    ("attention.timeout", &[]),
    ("control.accepted", &[]),
    ("control.attention.respond", &[("answer/text", R)]),
    ("control.cancel", &[("reason", R)]),
    ("control.pause", &[]),
    ("control.rejected", &[("detail", R)]),
    ("control.resume", &[]),
    ("delegation.subagent.started", &[]),
    ("delegation.subagent.stopped", &[]),
    ("error.raised", &[("error/message", R)]),
    ("progress.artifact.produced", &[("artifact/name", R), ("artifact/uri", R)]),
    ("progress.status", &[("message", R)]),
    ("progress.task.completed", &[("task/title", R)]),
    ("progress.task.planned", &[("task/title", R)]),
    (
        "resource.citation.recorded",
        &[
            ("citations/[]/source/uri", R),
            ("citations/[]/source/title", R),
            ("citations/[]/cited_text_redacted", R),
            ("citations/[]/cited_text", F),
        ],
    ),
    ("resource.retrieval.requested", &[("query", R)]),
    (
        "resource.retrieval.reranked",
        &[
            ("query", R),
            ("input_documents/[]/content_redacted", R),
            ("input_documents/[]/content", F),
            ("output_documents/[]/content_redacted", R),
            ("output_documents/[]/content", F),
        ],
    ),
    ("resource.retrieval.returned", &[("documents/[]/content_redacted", R), ("documents/[]/content", F)]),
    ("run.cancelled", &[("reason", R)]),
    ("run.failed", &[("error/message", R)]),
    ("run.finished", &[("summary", R)]),
    ("run.started", &[("prompt", R)]),
    ("run.step.finished", &[]),
    ("run.step.started", &[("name", R)]),
    ("session.compacted", &[]),
    ("session.ended", &[]),
    ("session.started", &[("label", R), ("cwd", R)]),
    ("state.delta", &[("delta", R)]),
    ("state.snapshot", &[("state", R)]),
    ("tool.completed", &[("result_redacted", R), ("result", F)]),
    ("tool.denied", &[]),
    ("tool.failed", &[("error/message", R)]),
    ("tool.requested", &[("args_redacted", R), ("args", F)]),
];

const ANNOTATION: &str = "x-aep-capture";
const STEP: char = '/';
const ITEMS: &str = "[]";

/// A field, and what stands beneath it.
#[derive(Debug, Clone, Default)]
struct Node {
    /// The least capture level at which the field may be present.
    level: Capture,
    /// The highest level in this field and beneath.
    highest: Capture,
    fields: BTreeMap<String, Node>,
    items: Option<Box<Node>>,
}

impl Node {
    fn insert(&mut self, path: &str, level: Capture) {
        let mut node = self;
        node.highest = node.highest.max(level);
        for step in path.split(STEP) {
            node = match step {
                ITEMS => node.items.get_or_insert_default(),
                name => node.fields.entry(name.to_owned()).or_default(),
            };
            node.highest = node.highest.max(level);
        }
        node.level = level;
    }

    /// Appends what is above `metadata` in this field, which stands at `path`, and beneath.
    fn gated(&self, path: &str, out: &mut Vec<(String, Capture)>) {
        if self.level > Capture::Metadata {
            out.push((path.to_owned(), self.level));
        }
        for (name, field) in &self.fields {
            field.gated(&step(path, name), out);
        }
        if let Some(items) = &self.items {
            items.gated(&step(path, ITEMS), out);
        }
    }
}

/// `path` and one more step.
fn step(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}{STEP}{name}") }
}

/// The registered types and their gated fields.
#[derive(Debug, Clone)]
pub struct Registry {
    types: BTreeMap<String, Node>,
}

/// What is gated at one place in a type's `data`.
#[derive(Debug, Clone, Copy)]
pub struct Gates<'r>(Option<&'r Node>);

/// Why a schema file says nothing usable about a type.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// Not a JSON object.
    #[error("not a JSON schema: {0}")]
    Json(#[from] json::JsonError),
    /// An annotation isn't one of the four levels.
    #[error("x-aep-capture of {0:?} must be one of none, metadata, redacted, full")]
    Level(String),
    /// An annotation stands where it isn't read, or something is said elsewhere by reference: what it gates would
    /// be shown.
    #[error(
        "{0:?} holds {1}, which is not read there: x-aep-capture counts beneath properties and items only"
    )]
    Unread(String, &'static str),
    /// Nests too deep to be a payload schema.
    #[error("nests deeper than {} levels", json::MAX_NESTING)]
    TooDeep,
}

impl Default for Registry {
    fn default() -> Self {
        Self::core()
    }
}

impl Registry {
    /// The types of the public registry.
    #[must_use]
    pub fn core() -> Self {
        let types = CORE
            .iter()
            .map(|(name, gated)| {
                let mut node = Node::default();
                for (path, level) in *gated {
                    node.insert(path, *level);
                }
                ((*name).to_owned(), node)
            })
            .collect();
        Self { types }
    }

    /// Registers `event_type` by the `x-aep-capture` annotations in a JSON schema of its `data`, in place of
    /// what was known of it.
    ///
    /// # Errors
    /// When the text isn't a JSON schema with legal annotations.
    pub fn add_schema(&mut self, event_type: &str, schema: &str) -> Result<(), SchemaError> {
        if json::nests_deeper_than(schema, json::MAX_NESTING) {
            return Err(SchemaError::TooDeep);
        }
        let mut root = Node::default();
        read_schema(schema, &mut root, "")?;
        self.types.insert(event_type.to_owned(), root);
        Ok(())
    }

    /// The gates of a type's `data`; `None` for a type that isn't registered.
    #[must_use]
    pub fn gates(&self, event_type: &str) -> Option<Gates<'_>> {
        self.types.get(event_type).map(|node| Gates(Some(node)))
    }

    /// The registered types, in order of their names.
    pub fn types(&self) -> impl Iterator<Item = &str> {
        self.types.keys().map(String::as_str)
    }

    /// Every field above `metadata` as its type, its path and its level, in order of types and paths. A
    /// path's steps are separated by `/`, and `[]` is the step into an array's items.
    #[must_use]
    pub fn gated(&self) -> Vec<(&str, String, Capture)> {
        let mut gated = Vec::new();
        for (event_type, node) in &self.types {
            let mut fields = Vec::new();
            node.gated("", &mut fields);
            fields.sort();
            gated.extend(fields.into_iter().map(|(path, level)| (event_type.as_str(), path, level)));
        }
        gated
    }
}

impl<'r> Gates<'r> {
    /// The gates of a member of the object here.
    #[must_use]
    pub fn field(self, name: &str) -> Self {
        Self(self.0.and_then(|node| node.fields.get(name)))
    }

    /// The gates of the items of the array here.
    #[must_use]
    pub fn items(self) -> Self {
        Self(self.0.and_then(|node| node.items.as_deref()))
    }

    /// The least level at which this field may be present.
    #[must_use]
    pub fn level(self) -> Capture {
        self.0.map_or(Capture::Metadata, |node| node.level)
    }

    /// Whether something beneath this field is gated above `level`.
    #[must_use]
    pub fn gates_below(self, level: Capture) -> bool {
        self.0.is_some_and(|node| node.highest > level)
    }

    /// Whether the schema names members here.
    #[must_use]
    pub fn has_fields(self) -> bool {
        self.0.is_some_and(|node| !node.fields.is_empty())
    }

    /// Whether the schema names items here.
    #[must_use]
    pub fn has_items(self) -> bool {
        self.0.is_some_and(|node| node.items.is_some())
    }
}

/// Reads what `schema` says about the field at `node`, and beneath.
fn read_schema(schema: &str, node: &mut Node, path: &str) -> Result<(), SchemaError> {
    json::members(schema, |name, value| match &*name {
        ANNOTATION => {
            let level = json::string(value).as_deref().and_then(Capture::from_name);
            node.level = level.ok_or_else(|| SchemaError::Level(path.to_owned()))?;
            Ok(())
        }
        "properties" if json::kind(value) == Kind::Object => json::members(value.get(), |name, schema| {
            let path = step(path, &name);
            read_member(schema, node.fields.entry(name.into_owned()).or_default(), &path)
        })?,
        "items" => read_member(value, node.items.get_or_insert_default(), &step(path, ITEMS)),
        "$ref" | "$dynamicRef" => Err(SchemaError::Unread(path.to_owned(), "a reference")),
        _ if holds_annotation(value) => {
            Err(SchemaError::Unread(format!("{path}{STEP}{}", quoted(&name)), ANNOTATION))
        }
        _ => Ok(()),
    })??;
    let beneath = node.fields.values().map(|field| field.highest).chain(node.items.iter().map(|i| i.highest));
    node.highest = beneath.fold(node.level, Ord::max);
    Ok(())
}

fn read_member(schema: &RawValue, node: &mut Node, path: &str) -> Result<(), SchemaError> {
    match json::kind(schema) {
        Kind::Object => read_schema(schema.get(), node, path),
        _ if holds_annotation(schema) => Err(SchemaError::Unread(path.to_owned(), ANNOTATION)),
        // `true` and `false` are schemas too; they say nothing about capture.
        _ => Ok(()),
    }
}

/// Whether an annotation may stand somewhere in there. A string holds none, whatever it speaks of.
fn holds_annotation(value: &RawValue) -> bool {
    matches!(json::kind(value), Kind::Object | Kind::Array) && value.get().contains(ANNOTATION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_core_table_is_sorted_and_whole() {
        assert!(CORE.is_sorted_by_key(|(name, _)| *name));
        assert_eq!(Registry::core().types().count(), 44);
    }

    #[test]
    fn member_names_with_dots_are_one_step() {
        let registry = Registry::core();
        let gates = registry.gates("assessment.evaluation.recorded").unwrap();
        assert_eq!(gates.field("gen_ai.evaluation.explanation").level(), Capture::Redacted);
        assert!(gates.gates_below(Capture::Metadata) && !gates.gates_below(Capture::Redacted));
    }

    #[test]
    fn gated_fields_are_listed_with_their_paths() {
        let mut registry = Registry { types: BTreeMap::new() };
        registry
            .add_schema(
                "x.acme.session.blob",
                r#"{"properties":{"b":{"items":{"properties":{"c":{"x-aep-capture":"full"},"d":{}}}},"a.a":{"x-aep-capture":"redacted"}}}"#,
            )
            .unwrap();
        assert_eq!(
            registry.gated(),
            [
                ("x.acme.session.blob", "a.a".to_owned(), Capture::Redacted),
                ("x.acme.session.blob", "b/[]/c".to_owned(), Capture::Full),
            ]
        );
    }

    #[test]
    fn a_schema_registers_a_vendor_type() {
        let mut registry = Registry::core();
        assert!(registry.gates("x.acme.session.blob").is_none());
        registry
            .add_schema(
                "x.acme.session.blob",
                r#"{"type":"object","properties":{"a":{"x-aep-capture":"full"},
                   "list":{"type":"array","items":{"properties":{"b":{"x-aep-capture":"redacted"},"c":true}}}}}"#,
            )
            .unwrap();
        let gates = registry.gates("x.acme.session.blob").unwrap();
        assert_eq!(gates.field("a").level(), Capture::Full);
        assert_eq!(gates.field("list").items().field("b").level(), Capture::Redacted);
        assert_eq!(gates.field("list").items().field("c").level(), Capture::Metadata);
        assert!(gates.field("list").gates_below(Capture::Metadata));
    }

    #[test]
    fn a_wrong_schema_says_what_is_wrong() {
        let mut registry = Registry::core();
        let error = registry
            .add_schema("x.a.b.c", r#"{"properties":{"p":{"properties":{"q":{"x-aep-capture":"secret"}}}}}"#)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "x-aep-capture of \"p/q\" must be one of none, metadata, redacted, full"
        );
        let gated = r#"{"x-aep-capture":"full"}"#;
        for unread in [
            format!(r#"{{"$defs":{{"d":{gated}}}}}"#),
            format!(r#"{{"properties":{{"a":{{"anyOf":[{gated}]}}}}}}"#),
            format!(r#"{{"properties":{{"a":{{"prefixItems":[{gated}]}}}}}}"#),
            format!(r#"{{"properties":{{"a":{{"items":[{gated}]}}}}}}"#),
            format!(r#"{{"additionalProperties":{gated}}}"#),
            format!(r#"{{"patternProperties":{{"^a":{gated}}}}}"#),
            r##"{"properties":{"a":{"$ref":"#/$defs/d"}}}"##.to_owned(),
        ] {
            let error = registry.add_schema("x.a.b.c", &unread).unwrap_err();
            assert!(matches!(error, SchemaError::Unread(..)), "{unread}: {error}");
        }
        assert!(registry.add_schema("x.a.b.c", "[]").is_err());
        assert!(registry.add_schema("x.a.b.c", &"{\"items\":".repeat(100_000)).is_err());
        assert!(registry.gates("x.a.b.c").is_none());
    }
}
