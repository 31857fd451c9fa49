//! Other people's code as judge: the public Python SDK, unmodified, against the real binary.
//!
//! The tests themselves are the Python scripts in `tests/sdk`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The exit code with which `scripts/sdk-venv` says that something can't be had here.
const UNAVAILABLE: i32 = 69;

#[test]
fn the_python_sdk_works_against_the_sidecar() {
    let Some(python) = python() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python)
        // The SDK leaves some sockets to the garbage collector.
        .args(["-B", "-W", "ignore::ResourceWarning", "-m", "unittest", "discover", "--verbose"])
        .arg("--start-directory")
        .arg(root.join("tests/sdk"))
        .env("AEP_SIDECAR_BIN", env!("CARGO_BIN_EXE_aep-sidecar"))
        .env("NO_PROXY", "127.0.0.1")
        .env("no_proxy", "127.0.0.1")
        .output()
        .unwrap();
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse().ok());
    assert!(ran > Some(0_usize), "no test ran: {said}");
}

/// The Python of an environment that holds the SDK; `None`, and a line on stderr, where there can be none.
fn python() -> Option<PathBuf> {
    let binary = Path::new(env!("CARGO_BIN_EXE_aep-sidecar"));
    // target/{profile}/{binary}
    let target = binary.ancestors().nth(2).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/sdk-venv");
    let output = match Command::new(&script).arg(target.join("sdk-venv")).output() {
        Ok(output) => output,
        Err(error) => return skipped(&format!("{}: {error}", script.display())),
    };
    if output.status.code() == Some(UNAVAILABLE) {
        return skipped(said(&output).trim());
    }
    assert!(output.status.success(), "{}: {}", script.display(), said(&output));
    Some(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end()))
}

#[allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
fn skipped(reason: &str) -> Option<PathBuf> {
    writeln!(std::io::stderr(), "SKIPPED: the_python_sdk_works_against_the_sidecar: {reason}").unwrap();
    None
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}
