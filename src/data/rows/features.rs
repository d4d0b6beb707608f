//! What `datasets` says of a file's columns beside their types, in its metadata: names of classes, JSON in texts.

use serde_json::Value;

/// The key of the metadata.
pub(super) const KEY: &str = "huggingface";

/// What values mean that are stored as something simpler. Elements of a list mean what is said of the list.
#[derive(Debug, PartialEq)]
pub(super) enum Features {
    /// Texts are JSON.
    Json,
    /// Numbers stand for these names, from 0.
    Classes(Vec<Value>),
    Fields(Vec<(String, Features)>),
}

impl Features {
    /// What the metadata of a file says; `None` where values are what they are stored as.
    pub(super) fn of_metadata(text: &str) -> Option<Self> {
        let metadata: Value = serde_json::from_str(text).ok()?;
        Self::of(&metadata["info"]["features"])
    }

    fn of(feature: &Value) -> Option<Self> {
        match (feature, feature["_type"].as_str()) {
            (_, Some("Json")) => Some(Self::Json),
            (_, Some("ClassLabel")) => feature["names"].as_array().cloned().map(Self::Classes),
            (Value::Object(_), Some(_)) => Self::of(&feature["feature"]),
            // The older form of a list.
            (Value::Array(items), _) => Self::of(items.first()?),
            (Value::Object(fields), None) => {
                let fields = fields.iter().filter_map(|(name, feature)| Some((name.clone(), Self::of(feature)?)));
                Some(fields.collect::<Vec<_>>()).filter(|fields| !fields.is_empty()).map(Self::Fields)
            }
            _ => None,
        }
    }

    /// Makes of a stored value what it means.
    pub(super) fn apply(&self, value: &mut Value) {
        match (self, &mut *value) {
            (_, Value::Array(items)) => items.iter_mut().for_each(|item| self.apply(item)),
            (Self::Fields(fields), Value::Object(row)) => fields.iter().for_each(|(name, feature)| {
                row.get_mut(name).into_iter().for_each(|value| feature.apply(value));
            }),
            (Self::Json, Value::String(text)) => {
                if let Ok(parsed) = serde_json::from_str(text) {
                    *value = parsed;
                }
            }
            // -1 stands for no class.
            (Self::Classes(names), Value::Number(number)) => {
                let at = number.as_u64().and_then(|at| usize::try_from(at).ok());
                if let Some(name) = at.and_then(|at| names.get(at)) {
                    *value = name.clone();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_with_json_are_objects_and_classes_have_their_names_at_any_depth() {
        let (text, json) = (json!({"dtype": "string", "_type": "Value"}), json!({"_type": "Json"}));
        let class = json!({"names": ["bad", "good"], "_type": "ClassLabel"});
        let list = |feature: &Value| json!({"feature": feature, "_type": "List"});
        let message = json!({"role": text, "tool_calls": list(&json)});
        let features = json!({"id": text, "messages": [message], "more": list(&message), "label": class, "labels": list(&class), "any": json});
        let metadata = json!({"info": {"features": features}}).to_string();
        let features = Features::of_metadata(&metadata).unwrap();
        let stored = r#"{"name":"f","arguments":{"x":null,"y":[1]}}"#;
        let call: Value = serde_json::from_str(stored).unwrap();
        let message = |call: Value| json!([{"role": "{}", "tool_calls": [call]}, {"role": "user", "tool_calls": null}]);
        let row = |call: Value, [bad, good]: [Value; 2], any: Value| json!({"id": "7", "messages": message(call.clone()), "more": message(call), "label": good, "labels": [bad, good, -1], "any": any});
        let mut value = row(stored.into(), [json!(0), json!(1)], "[{\"a\": null}]".into());
        features.apply(&mut value);
        assert_eq!(value, row(call, [json!("bad"), json!("good")], json!([{"a": null}])));
        let plain = json!({"info": {"features": {"a": text, "b": list(&text), "c": {"d": text}}}}).to_string();
        assert_eq!(
            [Features::of_metadata(&plain), Features::of_metadata("{}"), Features::of_metadata("no")],
            [None, None, None]
        );
    }
}
