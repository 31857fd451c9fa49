//! What is made of a secret text, made anew when the text changes.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::export::sink::{BuildError, Secret};

/// Something made of a secret.
pub(super) struct Derived<T> {
    secret: Secret,
    /// What the variable's name ends in.
    variable: &'static str,
    /// Says what the text must be.
    make: fn(&str) -> Result<T, &'static str>,
    /// The text last seen, and what was last made; changed by whoever asks for it next.
    last: Mutex<(Arc<str>, Arc<T>)>,
}

impl<T> Derived<T> {
    pub(super) fn new(
        secret: Secret,
        variable: &'static str,
        make: fn(&str) -> Result<T, &'static str>,
    ) -> Result<Self, BuildError> {
        let text = secret.current();
        let made = make(&text).map_err(|must| BuildError::setting(variable, must))?;
        Ok(Self { secret, variable, make, last: Mutex::new((text, Arc::new(made))) })
    }

    /// What the text of now makes. One that makes nothing is told once, and changes nothing.
    pub(super) fn current(&self) -> Arc<T> {
        let text = self.secret.current();
        let mut last = self.last.lock();
        if last.0 != text {
            last.0 = Arc::clone(&text);
            match (self.make)(&text) {
                Ok(made) => last.1 = Arc::new(made),
                Err(must) => {
                    tracing::error!(
                        setting = self.variable,
                        must,
                        "a secret that was read again can't be used: what was read before is"
                    );
                }
            }
        }
        Arc::clone(&last.1)
    }
}
