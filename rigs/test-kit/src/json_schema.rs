//! Validates JSON against a schema. Supports the keywords of draft 2020-12 that the schemas of this project use; any
//! other keyword is an error, so that no part of a schema is left unchecked.

use serde_json::Value;

/// Keywords that do not restrict values.
const ANNOTATIONS: [&str; 6] = ["$schema", "$id", "$defs", "title", "description", "$comment"];

/// The violations of `schema` in `value`, each with a path and a reason. Empty if `value` is valid.
pub fn violations(schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    Validation {
        root: schema,
        found: &mut found,
    }
    .check(schema, value, "$");
    found
}

struct Validation<'a> {
    root: &'a Value,
    found: &'a mut Vec<String>,
}

impl Validation<'_> {
    fn fails(&self, schema: &Value, value: &Value) -> bool {
        let mut found = Vec::new();
        Validation {
            root: self.root,
            found: &mut found,
        }
        .check(schema, value, "");
        !found.is_empty()
    }

    fn check(&mut self, schema: &Value, value: &Value, path: &str) {
        let keywords = match schema {
            Value::Bool(true) => return,
            Value::Bool(false) => return self.found.push(format!("{path} is not allowed")),
            _ => schema.as_object().expect("a schema is an object, true or false"),
        };
        for (keyword, wanted) in keywords {
            self.check_keyword(keyword, wanted, schema, value, path);
        }
    }

    fn check_keyword(&mut self, keyword: &str, wanted: &Value, schema: &Value, value: &Value, path: &str) {
        let list = || wanted.as_array().expect("it is a list");
        let fits = match keyword {
            "$ref" => {
                let pointer = wanted.as_str().and_then(|text| text.strip_prefix('#'));
                let target = pointer.and_then(|pointer| self.root.pointer(pointer));
                return self.check(target.expect("a reference leads somewhere"), value, path);
            }
            "allOf" => return list().iter().for_each(|one| self.check(one, value, path)),
            "if" => {
                let branch = if self.fails(wanted, value) { "else" } else { "then" };
                return schema
                    .get(branch)
                    .into_iter()
                    .for_each(|one| self.check(one, value, path));
            }
            "properties" | "additionalProperties" | "items" => return self.check_inside(keyword, schema, value, path),
            "anyOf" => list().iter().any(|one| !self.fails(one, value)),
            "not" => self.fails(wanted, value),
            "type" => match wanted {
                Value::Array(types) => types.iter().any(|one| is_of_type(one, value)),
                one => is_of_type(one, value),
            },
            "const" => wanted == value,
            "enum" => list().contains(value),
            "minimum" => value.as_f64().is_none_or(|number| number >= wanted.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|number| number <= wanted.as_f64().unwrap()),
            "required" => match value {
                Value::Object(fields) => list().iter().all(|name| fields.contains_key(name.as_str().unwrap())),
                _ => true,
            },
            "then" | "else" => true,
            _ => {
                assert!(ANNOTATIONS.contains(&keyword), "keyword {keyword} is not known here");
                true
            }
        };
        if !fits {
            self.found.push(format!("{path}: {value} is not {keyword} {wanted}"));
        }
    }

    /// Checks the fields of an object, or the items of a list.
    fn check_inside(&mut self, keyword: &str, schema: &Value, value: &Value, path: &str) {
        match (keyword, value) {
            ("items", Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.check(&schema["items"], item, &format!("{path}[{index}]"));
                }
            }
            ("properties", Value::Object(fields)) => {
                let known = schema["properties"].as_object().expect("properties are an object");
                for (name, of_field) in known {
                    if let Some(field) = fields.get(name) {
                        self.check(of_field, field, &format!("{path}.{name}"));
                    }
                }
            }
            ("additionalProperties", Value::Object(fields)) => {
                let known = schema.get("properties").and_then(Value::as_object);
                let others = fields
                    .iter()
                    .filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)));
                for (name, field) in others {
                    self.check(&schema["additionalProperties"], field, &format!("{path}.{name}"));
                }
            }
            _ => {}
        }
    }
}

fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str().expect("a type is a word") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("there is no type {other}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::violations;

    fn fits(schema: &Value, value: &Value) -> bool {
        violations(schema, value).is_empty()
    }

    #[test]
    fn each_keyword_is_checked() {
        let cases = [
            (json!({"type": "integer"}), json!(1), json!(1.5)),
            (json!({"type": ["string", "null"]}), json!(null), json!(1)),
            (json!({"const": 1}), json!(1), json!(2)),
            (json!({"enum": ["a", "b"]}), json!("b"), json!("c")),
            (json!({"minimum": 0}), json!(0), json!(-1)),
            (json!({"maximum": 5}), json!(5), json!(6)),
            (json!({"required": ["a"]}), json!({"a": 1}), json!({})),
            (
                json!({"properties": {"a": {"type": "null"}}}),
                json!({"b": 1}),
                json!({"a": 1}),
            ),
            (
                json!({"properties": {"a": true}, "additionalProperties": false}),
                json!({"a": 1}),
                json!({"b": 1}),
            ),
            (json!({"items": {"type": "string"}}), json!(["a"]), json!(["a", 1])),
            (json!({"not": {"const": 1}}), json!(2), json!(1)),
            (json!({"anyOf": [{"const": 1}, {"const": 2}]}), json!(2), json!(3)),
            (json!({"allOf": [{"minimum": 1}, {"maximum": 2}]}), json!(2), json!(3)),
            (
                json!({"if": {"const": 1}, "then": false, "else": true}),
                json!(2),
                json!(1),
            ),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}),
                json!(1),
                json!(2),
            ),
        ];
        for (schema, good, bad) in cases {
            assert!(fits(&schema, &good), "{schema} of {good}");
            assert!(!fits(&schema, &bad), "{schema} of {bad}");
        }
    }
}
