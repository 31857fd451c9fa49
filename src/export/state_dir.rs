//! The state directory: whose it is, and the files in it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// How many damaged files of one name are kept for a look; older ones are deleted.
const MAX_DAMAGED: usize = 4;

/// Why a state directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// It can't be created.
    #[error("state directory {path:?} can't be created")]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It can't be written to.
    #[error("state directory {path:?} can't be written to; mount a writable volume there")]
    Write {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process uses it.
    #[error("state directory {path:?} is in use by another process")]
    Locked {
        /// The directory.
        path: PathBuf,
    },
}

/// A directory that this process alone uses, as long as this value lives.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    /// Holds the lock, which the system releases with the file, however the process ends.
    _lock: File,
}

impl StateDir {
    /// Creates the directory when it isn't there, locks it and tries to write to it. A full disk is no error.
    pub(crate) fn open(path: &Path) -> Result<Self, StateDirError> {
        let named = || path.to_owned();
        fs::create_dir_all(path).map_err(|source| StateDirError::Create { path: named(), source })?;
        let unwritable = |source| StateDirError::Write { path: named(), source };
        let lock = private().create(true).append(true).open(path.join("lock"));
        let lock = match lock {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => private().open(path.join("lock")),
            other => other,
        };
        let lock = lock.map_err(unwritable)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StateDirError::Locked { path: named() }),
            Err(TryLockError::Error(source)) => return Err(unwritable(source)),
        }
        let probe = path.join("probe");
        let written = private().create(true).truncate(true).open(&probe).and_then(|mut f| f.write_all(b"ok"));
        match written.and_then(|()| fs::remove_file(&probe)) {
            Err(error) if error.kind() != io::ErrorKind::StorageFull => Err(unwritable(error)),
            _ => Ok(Self { path: named(), _lock: lock }),
        }
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes renames in the directory durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Whether a damaged file of that name was set aside.
    pub(crate) fn has_set_aside(&self, name: &str) -> bool {
        let path = self.file(&format!("{name}.damaged-"));
        let start = path.file_name().and_then(|start| start.to_str()).unwrap_or_default();
        let entries = fs::read_dir(path.parent().unwrap_or(&self.path)).into_iter().flatten();
        entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(start)))
    }

    /// Renames a damaged file to `<name>.damaged-<n>`, out of the way and there to be looked at. The numbers
    /// grow; the last [`MAX_DAMAGED`] are kept. The new name.
    pub(crate) fn set_aside(&self, name: &str) -> io::Result<String> {
        let prefix = format!("{name}.damaged-");
        let path = self.file(&prefix);
        let (folder, start) = (path.parent(), path.file_name().and_then(|start| start.to_str()));
        let start = start.unwrap_or_default();
        let mut numbers: Vec<u64> = fs::read_dir(folder.unwrap_or(&self.path))?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix(start)?.parse().ok())
            .collect();
        numbers.sort_unstable();
        let aside = format!("{prefix}{}", numbers.last().map_or(1, |last| last.saturating_add(1)));
        fs::rename(self.file(name), self.file(&aside))?;
        let extra = numbers.len().saturating_sub(MAX_DAMAGED.saturating_sub(1));
        for number in numbers.into_iter().take(extra) {
            fs::remove_file(self.file(&format!("{prefix}{number}")))?;
        }
        Ok(aside)
    }
}

/// Makes a folder for the owner's eyes only, when it isn't there.
pub(crate) fn private_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Opens files for reading and writing, creating them for the owner's eyes only.
pub(crate) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_never_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let first = StateDir::open(&path).unwrap();
        let error = StateDir::open(&path).unwrap_err();
        assert!(matches!(error, StateDirError::Locked { .. }), "{error}");
        assert!(error.to_string().contains("a/b"), "{error}");
        drop(first);
        StateDir::open(&path).unwrap();
    }

    #[test]
    fn a_file_in_the_way_is_a_clear_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::write(&path, "").unwrap();
        assert!(matches!(StateDir::open(&path), Err(StateDirError::Create { .. })));
    }

    #[test]
    fn a_bounded_number_of_damaged_files_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        fs::create_dir(state.file("folder")).unwrap();
        for name in ["x", "folder/x"] {
            for n in 1..=6 {
                fs::write(state.file(name), "").unwrap();
                assert_eq!(state.set_aside(name).unwrap(), format!("{name}.damaged-{n}"));
            }
            let there = |n: &i32| state.file(&format!("{name}.damaged-{n}")).exists();
            assert_eq!((1..=6).filter(there).collect::<Vec<_>>(), [3, 4, 5, 6]);
        }
    }
}
