//! Secrets that can't be printed, and may change while running.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How often a secret's file is read at most.
const EVERY: Duration = Duration::from_secs(2);

/// A secret text: fixed, or in a file that is read again. Clones share what was read.
#[derive(Clone)]
pub struct Secret(Arc<Source>);

enum Source {
    Fixed(Arc<str>),
    File {
        path: PathBuf,
        /// What was last read and when; changed by whoever asks for it next.
        last: Mutex<(Arc<str>, Option<Instant>)>,
    },
}

impl Secret {
    /// A secret that stays.
    #[must_use]
    pub fn fixed(text: &str) -> Self {
        Self(Arc::new(Source::Fixed(text.into())))
    }

    /// The content of a file, white space around it cut off: `text` for now, and what is there later on.
    #[must_use]
    pub fn in_file(path: PathBuf, text: &str) -> Self {
        Self(Arc::new(Source::File { path, last: Mutex::new((text.into(), None)) }))
    }

    /// The secret now. A file is read at most every two seconds, and one that can't be read changes nothing.
    #[must_use]
    pub fn current(&self) -> Arc<str> {
        match &*self.0 {
            Source::Fixed(text) => Arc::clone(text),
            Source::File { path, last } => {
                let now = Instant::now();
                let mut last = last.lock();
                if last.1.is_none_or(|read| now.duration_since(read) >= EVERY) {
                    last.1 = Some(now);
                    match std::fs::read_to_string(path) {
                        Ok(text) if text.trim() == &*last.0 => {}
                        Ok(text) => {
                            last.0 = text.trim().into();
                            tracing::info!(file = %path.display(), "a secret has changed and is used from now on");
                        }
                        Err(error) => {
                            tracing::warn!(file = %path.display(), %error, "a secret's file can't be read: what was read before is used");
                        }
                    }
                }
                Arc::clone(&last.0)
            }
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_file_is_read_again_and_its_loss_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "one\n").unwrap();
        let secret = Secret::in_file(path.clone(), "one");
        assert_eq!(&*secret.current(), "one");
        std::fs::write(&path, "two\n").unwrap();
        assert_eq!(&*secret.current(), "one", "not read at every use");
        tokio::time::advance(EVERY).await;
        assert_eq!(&*secret.current(), "two");
        std::fs::remove_file(&path).unwrap();
        tokio::time::advance(EVERY).await;
        assert_eq!(&*secret.current(), "two");
        assert!(!format!("{secret:?}").contains("two"));
    }
}
