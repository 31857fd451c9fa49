//! The few things that the spool asks of a file system.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;

use crate::export::state_dir::{StateDir, private};

/// A directory of files, told by their names. Everything blocks.
pub(super) trait Files: fmt::Debug + Send + Sync {
    /// The files and their lengths in bytes, in any order.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;
    /// Creates an empty file; fails when there is one of that name.
    fn create(&self, name: &str) -> io::Result<Box<dyn SpoolFile>>;
    /// Opens a file for reading and appending.
    fn open(&self, name: &str) -> io::Result<Box<dyn SpoolFile>>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations durable.
    fn sync(&self) -> io::Result<()>;
}

/// One open file. It stays readable when it is removed meanwhile.
pub(super) trait SpoolFile: fmt::Debug + Send {
    /// Writes at the end. After a failure some of the bytes may be there.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    fn truncate(&mut self, length: u64) -> io::Result<()>;
    /// Makes what was appended durable.
    fn sync(&mut self) -> io::Result<()>;
    /// Reads some bytes from an offset; 0 at the end.
    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize>;
}

/// The real file system.
#[derive(Debug)]
pub(super) struct Disk {
    folder: PathBuf,
    /// Keeps the state directory locked.
    dir: Arc<StateDir>,
}

impl Disk {
    pub(super) fn new(dir: Arc<StateDir>) -> Self {
        Self { folder: dir.file("spool"), dir }
    }

    fn make_folder(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        match builder.create(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.and_then(|()| self.dir.sync()),
        }
    }

    fn options() -> OpenOptions {
        let mut options = private();
        // What is appended lands at the end whatever was read or cut before.
        options.append(true);
        options
    }
}

impl Files for Disk {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_file() {
                files.push((entry.file_name().to_string_lossy().into_owned(), metadata.len()));
            }
        }
        Ok(files)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn SpoolFile>> {
        let path = self.folder.join(name);
        let created = match Self::options().create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folder()?;
                Self::options().create_new(true).open(&path)
            }
            other => other,
        };
        Ok(Box::new(OnDisk(created?)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn SpoolFile>> {
        Ok(Box::new(OnDisk(Self::options().open(self.folder.join(name))?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.folder.join(from), self.folder.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.folder.join(name))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }
}

#[derive(Debug)]
struct OnDisk(File);

impl SpoolFile for OnDisk {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.seek(SeekFrom::Start(at))?;
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}
