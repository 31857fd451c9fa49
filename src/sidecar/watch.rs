//! Files that may change while the process runs.
//!
//! A watch reads its files every two seconds and compares what is in them: that sees a file that was written
//! anew, one that was renamed over, a link that points elsewhere, and a mounted secret, on every file system.
//! Contents that differ are handed on; while they can't be used, or the files can't be read, what was read
//! before stays in force.
//!
//! Several files are never replaced in one step, nor is one that is written in place. So a failure counts once
//! it is seen twice in a row, and is told once for as long as it stays the same.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// How often the files are read.
const INTERVAL: Duration = Duration::from_secs(2);
/// The largest file that is read, in bytes.
const LARGEST: u64 = 4 * 1024 * 1024;

/// Why a file can't be read.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The operating system says why.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It holds more than such a file may.
    #[error("{}: is larger than 4 MiB", .0.display())]
    TooLarge(PathBuf),
}

/// `N` files that mean something together, and what was last made of them.
pub struct Watch<const N: usize> {
    /// The variables that name them, for the log.
    variables: &'static str,
    paths: [PathBuf; N],
    /// What is in force.
    contents: [Vec<u8>; N],
    state: State,
}

/// What is known of the files as they are now.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// They are in force.
    Good,
    /// They failed once: perhaps they are just being written.
    Suspect,
    /// They failed again, and it was told why.
    Failed(String),
}

/// What one look at the files found.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Unchanged,
    Replaced,
    Failed(String),
}

/// What there is to tell after a look.
#[derive(Debug, PartialEq, Eq)]
enum News {
    Replaced,
    Recovered,
    Failed(String),
}

impl<const N: usize> Watch<N> {
    /// Reads the files for the first time. `variables` are the ones that name them.
    ///
    /// # Errors
    /// When one of them can't be read.
    pub fn open(variables: &'static str, paths: [PathBuf; N]) -> Result<Self, WatchError> {
        let contents = read(&paths)?;
        Ok(Self { variables, paths, contents, state: State::Good })
    }

    /// What was last read and could be used.
    #[must_use]
    pub fn contents(&self) -> &[Vec<u8>; N] {
        &self.contents
    }

    /// Hands contents that differ to `apply` until `stop`. What it refuses, with the reason, isn't in force: it
    /// is asked again for as long as the files stay like this.
    pub async fn run(
        mut self,
        mut apply: impl FnMut(&[Vec<u8>; N]) -> Result<(), String>,
        stop: CancellationToken,
    ) {
        let mut interval = tokio::time::interval(INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let watch = async {
            loop {
                interval.tick().await;
                let paths = self.paths.clone();
                // Only a panic or the runtime's end fails the join.
                let Ok(read) = tokio::task::spawn_blocking(move || read(&paths)).await else { return };
                let look = self.look(read, &mut apply);
                for news in self.note(look) {
                    self.tell(&news);
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = watch => {}
        }
    }

    fn look(
        &mut self,
        read: Result<[Vec<u8>; N], WatchError>,
        apply: &mut impl FnMut(&[Vec<u8>; N]) -> Result<(), String>,
    ) -> Look {
        match read {
            Ok(contents) if contents == self.contents => Look::Unchanged,
            Ok(contents) => match apply(&contents) {
                Ok(()) => {
                    self.contents = contents;
                    Look::Replaced
                }
                Err(reason) => Look::Failed(reason),
            },
            Err(error) => Look::Failed(error.to_string()),
        }
    }

    /// Whatever changes the state is news; what leaves it as it is isn't.
    fn note(&mut self, look: Look) -> Vec<News> {
        let (next, news) = match (&self.state, look) {
            (State::Good, Look::Failed(_)) => (State::Suspect, vec![]),
            (State::Failed(told), Look::Failed(reason)) if *told == reason => return vec![],
            (_, Look::Failed(reason)) => (State::Failed(reason.clone()), vec![News::Failed(reason)]),
            (State::Failed(_), Look::Unchanged) => (State::Good, vec![News::Recovered]),
            (State::Failed(_), Look::Replaced) => (State::Good, vec![News::Recovered, News::Replaced]),
            (_, Look::Unchanged) => (State::Good, vec![]),
            (_, Look::Replaced) => (State::Good, vec![News::Replaced]),
        };
        self.state = next;
        news
    }

    fn tell(&self, news: &News) {
        let variables = self.variables;
        match news {
            News::Replaced => tracing::info!(variables, "reloaded"),
            News::Recovered => tracing::info!(variables, "what is configured can be used again"),
            News::Failed(reason) => {
                tracing::error!(variables, reason, "can't be reloaded: what was read before stays in force");
            }
        }
    }
}

impl<const N: usize> fmt::Debug for Watch<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The contents are secrets.
        let Self { variables, paths, contents: _, state } = self;
        f.debug_struct("Watch")
            .field("variables", variables)
            .field("paths", paths)
            .field("state", state)
            .finish_non_exhaustive()
    }
}

fn read<const N: usize>(paths: &[PathBuf; N]) -> Result<[Vec<u8>; N], WatchError> {
    let mut contents = [const { Vec::new() }; N];
    for (path, slot) in paths.iter().zip(&mut contents) {
        *slot = read_file(path)?;
    }
    Ok(contents)
}

fn read_file(path: &Path) -> Result<Vec<u8>, WatchError> {
    let mut contents = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut contents));
    match read {
        Ok(bytes) if u64::try_from(bytes).is_ok_and(|bytes| bytes <= LARGEST) => Ok(contents),
        Ok(_) => Err(WatchError::TooLarge(path.to_owned())),
        Err(error) => Err(WatchError::Read { path: path.to_owned(), error }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    /// A watch of two files in a directory that is gone with it.
    fn watch() -> (tempfile::TempDir, Watch<2>) {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        for path in &paths {
            std::fs::write(path, "0").unwrap();
        }
        (dir, Watch::open("A and B", paths).unwrap())
    }

    /// One turn: what is in the files is legal when both hold the same.
    fn turn(watch: &mut Watch<2>) -> Vec<News> {
        let read = read(&watch.paths);
        let look = watch.look(read, &mut |[a, b]: &[Vec<u8>; 2]| {
            if a == b { Ok(()) } else { Err("not a pair".to_owned()) }
        });
        watch.note(look)
    }

    #[test]
    fn what_changed_is_handed_on_once() {
        let (dir, mut watch) = watch();
        assert_eq!(turn(&mut watch), []);
        for name in ["a", "b"] {
            std::fs::write(dir.path().join(name), "1").unwrap();
        }
        assert_eq!(turn(&mut watch), [News::Replaced]);
        assert_eq!(watch.contents(), &[b"1".to_vec(), b"1".to_vec()]);
        assert_eq!(turn(&mut watch), []);
    }

    #[test]
    fn a_change_that_is_under_way_is_no_failure() {
        let (dir, mut watch) = watch();
        std::fs::write(dir.path().join("a"), "1").unwrap();
        assert_eq!(turn(&mut watch), []);
        std::fs::write(dir.path().join("b"), "1").unwrap();
        assert_eq!(turn(&mut watch), [News::Replaced]);
    }

    #[test]
    fn a_failure_is_told_once_and_so_is_its_end() {
        let (dir, mut watch) = watch();
        let a = dir.path().join("a");
        std::fs::write(&a, "1").unwrap();
        assert_eq!(turn(&mut watch), []);
        assert_eq!(turn(&mut watch), [News::Failed("not a pair".into())]);
        assert_eq!(turn(&mut watch), []);
        assert_eq!(watch.contents(), &[b"0".to_vec(), b"0".to_vec()], "what was before stays");
        std::fs::remove_file(&a).unwrap();
        let [News::Failed(reason)] = &turn(&mut watch)[..] else { panic!("another failure is news") };
        assert!(reason.starts_with(a.to_str().unwrap()), "{reason}");
        assert_eq!(turn(&mut watch), []);
        std::fs::write(&a, "0").unwrap();
        assert_eq!(turn(&mut watch), [News::Recovered]);
        std::fs::write(&a, "1").unwrap();
        assert_eq!((turn(&mut watch), turn(&mut watch).len()), (vec![], 1));
        std::fs::write(dir.path().join("b"), "1").unwrap();
        assert_eq!(turn(&mut watch), [News::Recovered, News::Replaced]);
        assert_eq!(turn(&mut watch), []);
    }

    #[test]
    fn what_can_not_be_read_at_the_start_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big");
        let error = Watch::open("A", [path.clone()]).unwrap_err();
        assert!(matches!(error, WatchError::Read { .. }));
        File::create(&path).unwrap().set_len(LARGEST + 1).unwrap();
        let error = Watch::open("A", [path]).unwrap_err();
        assert!(matches!(error, WatchError::TooLarge(_)));
    }

    #[test]
    fn contents_are_never_printed() {
        let (dir, _) = watch();
        std::fs::write(dir.path().join("a"), "hunter2").unwrap();
        let watch = Watch::open("A", [dir.path().join("a")]).unwrap();
        assert!(!format!("{watch:?}").contains(&format!("{:?}", b"hunter2")));
    }

    #[tokio::test(start_paused = true)]
    async fn it_runs_until_it_is_stopped() {
        let (dir, watch) = watch();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stop = CancellationToken::new();
        std::fs::write(dir.path().join("a"), "1").unwrap();
        let apply = |contents: &[Vec<u8>; 2]| {
            seen.lock().push(contents.clone());
            stop.cancel();
            Ok(())
        };
        watch.run(apply, stop.clone()).await;
        assert_eq!(*seen.lock(), [[b"1".to_vec(), b"0".to_vec()]]);
    }
}
