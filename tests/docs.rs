//! The documentation, held against the code: tables that must say the same, and commands that must run as written.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::print_stderr, reason = "a test that is skipped says so")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/process.rs"]
mod process;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use aep_sidecar::export::Reason;
use aep_sidecar::sidecar::{Settings, VARIABLES};
use process::{Judge, Sidecar, binary};

/// Where the sidecar listens in the documentation.
const DOCUMENTED: &str = "127.0.0.1:8787";

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// What stands between two texts.
fn between<'t>(text: &'t str, start: &str, end: &str) -> &'t str {
    let (_, rest) = text.split_once(start).unwrap_or_else(|| panic!("{start:?} isn't there"));
    rest.split_once(end).unwrap_or_else(|| panic!("{end:?} doesn't follow {start:?}")).0
}

#[test]
fn the_configuration_page_lists_the_variables() {
    const PAGE: &str = "docs/configuration.md";
    const START: &str = "<!-- variables -->\n";
    const END: &str = "<!-- end -->";
    let mut table = String::from("\n| variable | value | default | what it does |\n|---|---|---|---|\n");
    for variable in VARIABLES {
        let code = |text: &str| if text.is_empty() { String::new() } else { format!("`{text}`") };
        let per_sink = if variable.per_sink { " Per sink." } else { "" };
        let secret = if variable.secret { " Secret." } else { "" };
        let (name, form, default, doc) =
            (variable.name, variable.form, code(variable.default), variable.doc.replace('|', "\\|"));
        writeln!(table, "| `{name}` | {form} | {default} | {doc}{per_sink}{secret} |").unwrap();
    }
    table.push('\n');
    let page = read(PAGE);
    let committed = between(&page, START, END);
    if committed == table {
        return;
    }
    #[allow(clippy::disallowed_methods, reason = "settings.rs reads the sidecar's environment, not a test's")]
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    assert!(update, "{PAGE} is out of date: UPDATE_DOCS=1 cargo test --test docs");
    let committed = format!("{START}{committed}{END}");
    std::fs::write(path(PAGE), page.replace(&committed, &format!("{START}{table}{END}"))).unwrap();
}

#[test]
fn every_refusal_is_documented() {
    let page = read("docs/http.md");
    let mut codes = Vec::new();
    for (file, function) in [("src/relay/http/refusal.rs", "fn code("), ("src/aep/event.rs", "fn code(")] {
        // Every code is a literal in one of these two functions.
        let source = read(file);
        let body = between(&source, function, "\n    }\n");
        codes.extend(body.split("=> \"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()));
    }
    assert!(codes.len() > 15, "{codes:?}");
    for code in codes {
        assert!(page.contains(&format!("| `{code}` |")), "docs/http.md doesn't list the refusal {code:?}");
    }
}

#[test]
fn tables_that_stand_in_the_code_are_the_same_in_the_documentation() {
    for (source, page) in [
        ("src/export/sink.rs", "docs/delivery.md"),
        ("src/export/sink/kafka.rs", "docs/destinations.md"),
        ("src/export/sink/nats.rs", "docs/destinations.md"),
        ("src/export/sink/redis.rs", "docs/destinations.md"),
        ("src/export/sink/mqtt.rs", "docs/destinations.md"),
        ("src/export/sink/amqp.rs", "docs/destinations.md"),
        ("src/aep/cloudevents.rs", "docs/cloudevents.md"),
    ] {
        let (code, text) = (read(source), read(page));
        let rows: Vec<&str> = code.lines().filter_map(|line| line.strip_prefix("//! |")).collect();
        assert!(rows.len() > 5, "{source} has a table");
        for row in rows {
            assert!(text.lines().any(|line| line.strip_prefix('|') == Some(row)), "{page} lacks |{row}");
        }
    }
    let page = read("docs/delivery.md");
    for reason in Reason::ALL {
        assert!(page.contains(&format!("`{reason}`")), "docs/delivery.md lacks the reason {reason}");
    }
}

#[test]
fn the_counters_that_the_documentation_names_are_counted() {
    let counted =
        ["src/export/metrics.rs", "src/export/spool/metrics.rs", "src/client/metrics.rs"].map(read).concat();
    let mut named = 0;
    for page in pages() {
        let text = read(&page);
        for counter in text.split('`').filter(|code| code.starts_with("aep_") && !code.contains("::")) {
            let name = counter.split('{').next().unwrap();
            let name = name.strip_suffix("_total").unwrap_or(name);
            assert!(counted.contains(&format!("\"{name}\"")), "{page} names {counter}");
            named += 1;
        }
    }
    assert!(named > 5, "{named} are named");
}

#[test]
fn what_the_documentation_links_to_is_there() {
    for page in pages() {
        let text = read(&page);
        let folder = path(&page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap()) {
            assert!(
                link.is_empty() || link.starts_with("https://") || folder.join(link).exists(),
                "{page} links to {link}"
            );
        }
        for file in text.split('`').filter(|code| code.starts_with("src/") && !code.contains(' ')) {
            assert!(path(file).exists(), "{page} names {file}");
        }
    }
    assert!(read("README.md").lines().count() < 150, "the README is short");
}

fn pages() -> Vec<String> {
    let mut pages: Vec<String> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(str::to_owned).into();
    for folder in ["docs", "docs/decisions"] {
        for entry in std::fs::read_dir(path(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if Path::new(&name).extension().is_some_and(|extension| extension == "md") {
                pages.push(format!("{folder}/{name}"));
            }
        }
    }
    pages
}

/// The code blocks under a heading: language and text.
fn blocks(page: &str, heading: &str) -> Vec<(String, String)> {
    let text = read(page);
    let section = text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("{page}: {heading}")).1;
    let section = section.split("\n## ").next().unwrap();
    let fenced = section.split("```").skip(1).step_by(2);
    fenced
        .map(|block| block.split_once('\n').unwrap())
        .map(|(language, text)| (language.to_owned(), text.trim_end().to_owned()))
        .collect()
}

/// Whether a command is there; its absence is told, and the test skipped.
fn has(test: &str, command: &str) -> bool {
    let there = Command::new(command).arg("--version").output().is_ok();
    if !there {
        eprintln!("SKIPPED: {test}: {command} isn't installed");
    }
    there
}

/// Runs a command as it is written, with what is on the terminal as its output.
fn run(command: &str, directory: &Path) -> String {
    let binary = binary();
    let command = command
        .replace("cargo run --release --", "aep-sidecar")
        .replace("aep-sidecar export", &format!("{} export", binary.display()))
        .replace("aep-sidecar dead-letters", &format!("{} dead-letters", binary.display()));
    let script = format!("exec 2>&1\n{command}\n");
    let output = Command::new("bash").args(["-c", &script]).current_dir(directory).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{command}\n{text}");
    text.trim_end().to_owned()
}

/// Goes through the blocks under a heading: `sh` is run, `text` must be its output, `json` must be the next line
/// on the sidecar's stdout.
fn walk(page: &str, heading: &str, sidecar: &Sidecar) {
    let mut output = String::new();
    let mut commands = 0;
    for (language, text) in blocks(page, heading) {
        match language.as_str() {
            "sh" => {
                assert!(text.contains(DOCUMENTED), "{text}");
                output = run(&text.replace(DOCUMENTED, &sidecar.address), &path(""));
                commands += 1;
            }
            "text" => assert_eq!(output, text, "{page}: {heading}"),
            "json" => assert_eq!(sidecar.process.line(), text, "{page}: {heading}"),
            other => panic!("{page}: a block in {other}"),
        }
    }
    assert!(commands > 0, "{page}: {heading} has commands");
}

#[test]
fn the_minute_with_curl_goes_as_the_readme_says() {
    if !has("the_minute_with_curl_goes_as_the_readme_says", "curl") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    walk("README.md", "## A minute with curl", &sidecar);
    // The first event once more, as the README asks for: nothing but the second one is still to be exported.
    let first = blocks("README.md", "## A minute with curl").remove(0).1;
    run(&first.replace(DOCUMENTED, &sidecar.address), &path(""));
    let rest = sidecar.stop();
    assert_eq!(rest.len(), 1, "{rest:?}");
    assert!(rest.concat().contains(r#""id":"e2""#), "{rest:?}");
}

#[test]
fn the_requests_of_the_http_page_go_as_it_says() {
    if !has("the_requests_of_the_http_page_go_as_it_says", "curl") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    walk("docs/http.md", "## POST /events", &sidecar);
    walk("docs/http.md", "## GET /stream", &sidecar);
}

#[test]
fn a_file_is_exported_as_the_readme_says() {
    let blocks = blocks("README.md", "## From a file");
    let [(_, command), (_, output)] = blocks.as_slice() else { panic!("{blocks:?}") };
    assert_eq!(run(command, &path("")), *output);
}

#[test]
fn the_dead_letter_commands_go_as_the_delivery_page_says() {
    /// Where the page has its receiver.
    const RECEIVER: &str = "http://127.0.0.1:8090/";
    let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    let jq = has("the_dead_letter_commands_go_as_the_delivery_page_says", "jq");
    let judge = Judge::start("127.0.0.1:0");
    let receiver = format!("{}/", judge.url.trim_end_matches('/'));
    let directory = tempfile::tempdir().unwrap();
    let letters = directory.path().join("aep-state/dead-letters");
    std::fs::create_dir_all(&letters).unwrap();
    let (mut output, mut commands) = (None, Vec::new());
    for (language, text) in blocks("docs/delivery.md", "## Dead letters") {
        match language.as_str() {
            "json" => std::fs::write(letters.join("default.jsonl"), text + "\n").unwrap(),
            "sh" if text.contains("jq") && !jq => output = None,
            "sh" => {
                output = Some(run(&text.replace(RECEIVER, &receiver), directory.path()));
                commands.push(text);
            }
            "text" => {
                if let Some(output) = output.take() {
                    assert_eq!(lines(&output), lines(&text), "after {:?}", commands.last());
                }
            }
            other => panic!("a block in {other}"),
        }
    }
    for command in ["list", "replay", "drop"] {
        assert!(commands.iter().any(|text| text.contains(&format!("dead-letters {command}"))), "{command}");
    }
    assert_eq!(judge.event()["id"], "e1");
    let left = run("aep-sidecar dead-letters list", directory.path());
    assert_eq!(left, "", "each letter was sent again or dropped");
}

#[test]
fn the_sinks_of_the_delivery_page_can_be_configured() {
    let mut variables = Vec::new();
    for (_, text) in blocks("docs/delivery.md", "## Many sinks") {
        for line in text.lines() {
            let (name, value) = line.strip_prefix("export ").unwrap().split_once('=').unwrap();
            variables.push((name.into(), value.trim_matches('\'').into()));
        }
    }
    let settings = Settings::read(variables).unwrap();
    assert_eq!(settings.unknown, []);
    let names: Vec<_> = settings.export.sinks.iter().map(|sink| sink.name.as_str()).collect();
    assert_eq!(names, ["bus", "audit-log"]);
}

#[test]
fn the_help_lists_every_variable() {
    let help = run(&format!("{} --help", binary().display()), &path(""));
    for variable in VARIABLES {
        assert!(help.contains(variable.name), "--help lacks {}", variable.name);
    }
}
