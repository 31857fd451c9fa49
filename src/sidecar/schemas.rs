//! Payload schemas that the operator adds, for types that the public registry doesn't know.

use std::io;
use std::path::{Path, PathBuf};

use crate::aep::registry::SchemaError;
use crate::aep::{EventType, Registry};

/// How a schema file's name ends; what stands before it is the type.
const SUFFIX: &str = ".schema.json";
/// No payload schema is longer, in bytes.
const LONGEST: u64 = 1024 * 1024;

/// Why the schemas can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SchemasError {
    /// The directory or a file in it can't be read.
    #[error("AEP_SCHEMAS: {path}: {error}", path = .path.display())]
    Read {
        /// What couldn't be read.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file whose name isn't that of a type.
    #[error("AEP_SCHEMAS: {path}: its name must be an event type and {SUFFIX}", path = .0.display())]
    Name(PathBuf),
    /// A file that is too long to be a schema.
    #[error("AEP_SCHEMAS: {path}: longer than {LONGEST} bytes", path = .0.display())]
    TooLong(PathBuf),
    /// A file that isn't a schema.
    #[error("AEP_SCHEMAS: {path}: {error}", path = .path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: SchemaError,
    },
}

/// The public registry, and the types of every `{type}.schema.json` in `directory`.
///
/// # Errors
/// When the directory or one of these files can't be used: a ceiling that keeps less than an operator meant it
/// to is found at start, not by a reader.
pub fn load(directory: Option<&Path>) -> Result<Registry, SchemasError> {
    let mut registry = Registry::core();
    let Some(directory) = directory else { return Ok(registry) };
    let unreadable = |path: &Path| {
        let path = path.to_path_buf();
        |error| SchemasError::Read { path, error }
    };
    for entry in std::fs::read_dir(directory).map_err(unreadable(directory))? {
        let path = entry.map_err(unreadable(directory))?.path();
        let Some(name) =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(SUFFIX))
        else {
            continue;
        };
        if EventType::parse(name).is_none() {
            return Err(SchemasError::Name(path));
        }
        if std::fs::metadata(&path).map_err(unreadable(&path))?.len() > LONGEST {
            return Err(SchemasError::TooLong(path));
        }
        let text = std::fs::read_to_string(&path).map_err(unreadable(&path))?;
        registry.add_schema(name, &text).map_err(|error| SchemasError::Schema { path, error })?;
    }
    Ok(registry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_registered_by_their_names() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("x.acme.session.blob.schema.json", r#"{"properties":{"a":{"x-aep-capture":"full"}}}"#);
        write("README.md", "not a schema");
        let registry = load(Some(directory.path())).unwrap();
        assert!(registry.gates("x.acme.session.blob").is_some());
        write("nonsense.schema.json", "{}");
        assert!(matches!(load(Some(directory.path())), Err(SchemasError::Name(_))));
        std::fs::remove_file(directory.path().join("nonsense.schema.json")).unwrap();
        write("x.acme.session.other.schema.json", "[]");
        let error = load(Some(directory.path())).unwrap_err().to_string();
        assert!(error.contains("x.acme.session.other.schema.json: not a JSON schema"), "{error}");
        assert!(load(Some(Path::new("/does/not/exist"))).is_err());
        assert!(load(None).is_ok());
    }
}
