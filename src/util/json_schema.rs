//! JSON Schemas.

use std::fmt::{self, Debug, Formatter};
use std::path::Path;

use boon::{Compiler, Draft, SchemaIndex, Schemas};
use serde_json::Value;

/// What a JSON value is held against. Schemas that it refers to are read from their files, none from the network.
pub struct JsonSchema {
    all: Schemas,
    index: SchemaIndex,
}

impl Debug for JsonSchema {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("JsonSchema").finish_non_exhaustive()
    }
}

impl JsonSchema {
    /// Reads a schema; one that does not say its draft is of 2020-12.
    ///
    /// # Errors
    /// A file that cannot be read; one that is no JSON, or no schema.
    pub fn open(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
        let value: Value = serde_json::from_str(&text).map_err(|error| format!("not valid JSON: {error}"))?;
        let place = std::path::absolute(path).map_err(|error| error.to_string())?;
        let place = place.to_str().ok_or("its path is no text")?;
        let mut compiler = Compiler::new();
        compiler.set_default_draft(Draft::V2020_12);
        let mut all = Schemas::new();
        let failed = |error: boon::CompileError| format!("no JSON Schema: {error:#}");
        compiler.add_resource(place, value).map_err(failed)?;
        let index = compiler.compile(place, &mut all).map_err(failed)?;
        Ok(Self { all, index })
    }

    /// Whether a value satisfies it.
    #[must_use]
    pub fn is_satisfied_by(&self, value: &Value) -> bool {
        self.all.validate(value, self.index).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_held_against_a_schema_and_those_it_refers_to() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        write("year.json", r#"{"type": "integer", "minimum": 1900}"#);
        let schema = r#"{"type": "object", "required": ["name"], "additionalProperties": false,
                         "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "year": {"$ref": "year.json"}}}"#;
        let schema = JsonSchema::open(&write("schema.json", schema)).unwrap();
        for (value, is_right) in [
            (json!({"name": "Ann", "year": 1990}), true),
            (json!({"name": "Ann"}), true),
            (json!({"name": "ann"}), false),
            (json!({"name": "Ann", "year": 1800}), false),
            (json!({"name": "Ann", "age": 3}), false),
            (json!({"year": 1990}), false),
            (json!(["Ann"]), false),
        ] {
            assert_eq!(schema.is_satisfied_by(&value), is_right, "{value}");
        }
        for (name, text, reason) in [
            ("a.json", "{", "not valid JSON"),
            ("b.json", r#"{"type": "objekt"}"#, "no JSON Schema"),
            ("c.json", r#"{"$ref": "absent.json"}"#, "no JSON Schema"),
            ("d.json", r#"{"$ref": "https://example.com/x.json"}"#, "no JSON Schema"),
        ] {
            let error = JsonSchema::open(&write(name, text)).unwrap_err();
            assert!(error.starts_with(reason), "{error}");
        }
        assert!(JsonSchema::open(&folder.path().join("nothing.json")).unwrap_err().starts_with("cannot be read"));
    }
}
