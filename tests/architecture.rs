//! The plan of the crate, held against its source: imports point down, the protocol is pure, files stay short.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What each room may name. `main` is the binary and the library's root.
const ALLOWED: &[(&str, &[&str])] = &[
    ("main", &["cli", "sidecar", "relay", "export", "client", "aep"]),
    ("cli", &["sidecar", "relay", "export", "client", "aep"]),
    ("sidecar", &["relay", "export", "client", "aep"]),
    ("relay", &["aep"]),
    ("export", &["aep"]),
    ("client", &["aep"]),
    ("aep", &[]),
];

/// What would make the protocol impure.
const IMPURE: &[&str] = &[
    "tokio",
    "std::fs",
    "std::net",
    "std::process",
    "std::env",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];

/// The longest file, in lines before its tests.
const LONGEST: usize = 500;

/// Files that are longer, and how long each may be.
const LONGER: &[(&str, usize)] = &[];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file beneath a folder of the project, by its path within the project; none when there is no such folder.
fn files(folder: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root().join(folder)) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.unwrap();
        let path = PathBuf::from(folder).join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(path.to_str().unwrap()));
        } else {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn source(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A file's module path: `src/relay/http/stream.rs` is `relay::http::stream`.
fn module(path: &Path) -> Vec<String> {
    let path = path.strip_prefix("src").unwrap().with_extension("");
    let names: Vec<String> = path.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
    if names == ["main"] || names == ["lib"] { Vec::new() } else { names }
}

/// The source before its tests, without comments and string literals.
fn code(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
    while let Some(c) = rest.chars().next() {
        let literal = if rest.starts_with("//") {
            rest.find('\n')
        } else if rest.starts_with("r#\"") {
            rest.find("\"#").map(|at| at + 2)
        } else if c == '"' {
            let mut escaped = false;
            let end = rest.char_indices().skip(1).find(|(_, c)| {
                let end = *c == '"' && !escaped;
                escaped = *c == '\\' && !escaped;
                end
            });
            end.map(|(at, _)| at + 1)
        } else if rest.starts_with("'\"'") {
            Some(3)
        } else {
            out.push(c);
            rest = rest.get(c.len_utf8()..).unwrap();
            continue;
        };
        out.push(' ');
        rest = literal.and_then(|end| rest.get(end..)).unwrap_or_default();
    }
    out
}

/// Every path that the source names, with the groups of `use` spelled out: `a::{b, c::{d, e}}` is `a::b`,
/// `a::c::d` and `a::c::e`.
fn paths(code: &str) -> BTreeSet<Vec<String>> {
    let spaced = code.replace("::", " :: ");
    let mut tokens = Vec::new();
    for word in spaced.split_whitespace() {
        let mut start = 0;
        for (at, c) in word.char_indices() {
            if !(c.is_alphanumeric() || c == '_' || c == ':') {
                tokens.push(word.get(start..at).unwrap());
                tokens.push(word.get(at..at + c.len_utf8()).unwrap());
                start = at + c.len_utf8();
            }
        }
        tokens.push(word.get(start..).unwrap());
    }
    tokens.retain(|token| !token.is_empty());
    let mut found = BTreeSet::new();
    // What stands before each open brace: a path before a group, nothing before a block.
    let mut open: Vec<Vec<String>> = Vec::new();
    let mut path: Vec<String> = Vec::new();
    let mut joined = false;
    for token in tokens {
        let is_name = token.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        let whole = [open.last().cloned().unwrap_or_default(), path.clone()].concat();
        match token {
            "::" => {
                joined = true;
                continue;
            }
            name if is_name && joined => path.push(name.to_owned()),
            "{" if joined => {
                open.push(whole);
                path.clear();
            }
            _ => {
                if !path.is_empty() {
                    found.insert(whole);
                }
                path.clear();
                match token {
                    "{" => open.push(Vec::new()),
                    "}" => drop(open.pop()),
                    name if is_name => path.push(name.to_owned()),
                    _ => {}
                }
            }
        }
        joined = false;
    }
    found
}

/// The room that a path leads into: from the crate's root, or up from a module.
fn room(path: &[String], module: &[String]) -> Option<String> {
    let first = path.first()?.as_str();
    if first == "crate" || first == "aep_sidecar" {
        return path.get(1).cloned();
    }
    let ups = path.iter().take_while(|name| *name == "super").count();
    if ups == 0 {
        return None;
    }
    let left = module.len().checked_sub(ups)?;
    if left == 0 { path.get(ups).cloned() } else { module.first().cloned() }
}

#[test]
fn imports_point_down() {
    let mut wrong = Vec::new();
    let mut edges = BTreeSet::new();
    for file in files("src") {
        let module = module(&file);
        let here = module.first().map_or("main", String::as_str).to_owned();
        let (_, allowed) = ALLOWED
            .iter()
            .find(|(room, _)| *room == here)
            .unwrap_or_else(|| panic!("{} is in a room that ALLOWED doesn't name", file.display()));
        for path in paths(&code(&source(&file))) {
            let Some(there) = room(&path, &module) else { continue };
            let is_room = ALLOWED.iter().any(|(room, _)| *room == there);
            if !is_room || there == here {
                continue;
            }
            edges.insert(format!("{here} → {there}"));
            if !allowed.contains(&there.as_str()) {
                wrong.push(format!("{}: {}", file.display(), path.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that point up or across:\n{}", wrong.join("\n"));
    for edge in ["main → cli", "cli → sidecar", "sidecar → relay", "sidecar → export", "relay → aep"]
    {
        assert!(edges.contains(edge), "the test sees imports: {edges:?}");
    }
}

#[test]
fn the_protocol_is_pure() {
    for file in files("src").into_iter().filter(|file| module(file).first().is_some_and(|room| room == "aep"))
    {
        for path in paths(&code(&source(&file))) {
            let path = path.join("::");
            let impure = IMPURE.iter().find(|name| path == **name || path.starts_with(&format!("{name}::")));
            assert!(impure.is_none(), "{}: {path}", file.display());
        }
    }
}

#[test]
fn files_are_short() {
    for file in files("src") {
        let text = source(&file);
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        let name = file.to_str().unwrap();
        let bound = LONGER.iter().find(|(longer, _)| *longer == name).map_or(LONGEST, |(_, bound)| *bound);
        assert!(lines <= bound, "{name} has {lines} lines before its tests");
    }
}

#[test]
fn no_file_names_a_machine() {
    let folders = [".ci", "benches", "docs", "examples", "fuzz", "helm", "scripts", "src", "tests"];
    let mut all: Vec<PathBuf> = folders.into_iter().flat_map(files).collect();
    all.extend(
        ["Cargo.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(PathBuf::from),
    );
    for file in all {
        let Ok(text) = std::fs::read_to_string(root().join(&file)) else { continue };
        for home in ["work", "home", "root", "Users"] {
            let path = format!("/{home}/");
            for (n, line) in text.lines().enumerate() {
                // Within a URL or a longer path it is a name like any other.
                let named = line.split(|c: char| c.is_whitespace() || "\"'`(=".contains(c));
                let found = named.into_iter().any(|word| word.starts_with(&path));
                assert!(!found, "{}:{}: {line}", file.display(), n + 1);
            }
        }
    }
}

#[test]
fn groups_and_ups_are_seen() {
    let code = code(
        "use crate::{aep::{Event, json::{self, Kind}}, relay::Hub}; fn f() { g(b'\"', crate::main::h) } // crate::cli\nlet x = \"crate::export\"; crate::sidecar::run();",
    );
    let found: Vec<String> = paths(&code).iter().map(|path| path.join("::")).collect();
    for path in [
        "crate::aep::Event",
        "crate::aep::json::Kind",
        "crate::relay::Hub",
        "crate::main::h",
        "crate::sidecar::run",
    ] {
        assert!(found.iter().any(|one| one == path), "{path} in {found:?}");
    }
    assert!(!found.iter().any(|path| path.contains("cli") || path.contains("export")), "{found:?}");
    let names = |path: &str| path.split("::").map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(room(&names("super::super::export::Sink"), &names("relay::http")), Some("export".to_owned()));
    assert_eq!(room(&names("super::hub::Hub"), &names("relay::http")), Some("relay".to_owned()));
    assert_eq!(room(&names("std::fs"), &names("relay::http")), None);
}
