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

/// Fields in `value`, at any depth, that `schema` knows nothing of: their paths. `root` is what references start from.
pub fn unknown_fields(root: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    find_unknown(root, &[schema], value, "$", &mut found);
    found
}

fn find_unknown(root: &Value, schemas: &[&Value], value: &Value, path: &str, found: &mut Vec<String>) {
    let mut parts = Vec::new();
    for schema in schemas {
        add_parts(root, schema, &mut parts);
    }
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let named = parts
                    .iter()
                    .filter_map(|part| part["properties"].get(name).or(part.get("additionalProperties")));
                let of_field: Vec<&Value> = named.collect();
                let path = format!("{path}.{name}");
                if of_field.is_empty() {
                    found.push(path);
                } else {
                    find_unknown(root, &of_field, field, &path, found);
                }
            }
        }
        Value::Array(items) => {
            let of_items: Vec<&Value> = parts.iter().filter_map(|part| part.get("items")).collect();
            for (index, item) in items.iter().enumerate() {
                find_unknown(root, &of_items, item, &format!("{path}[{index}]"), found);
            }
        }
        _ => {}
    }
}

/// A schema, and all that it refers to or is made of.
fn add_parts<'a>(root: &'a Value, schema: &'a Value, parts: &mut Vec<&'a Value>) {
    parts.push(schema);
    if let Some(reference) = schema["$ref"].as_str() {
        add_parts(root, target(root, reference), parts);
    }
    for keyword in ["allOf", "anyOf"] {
        for one in schema[keyword].as_array().into_iter().flatten() {
            add_parts(root, one, parts);
        }
    }
}

fn target<'a>(root: &'a Value, reference: &str) -> &'a Value {
    let pointer = reference.strip_prefix('#');
    let target = pointer.and_then(|pointer| root.pointer(pointer));
    target.unwrap_or_else(|| panic!("the reference {reference} leads nowhere"))
}

/// What a description begins with of an object or a list that may hold anything; it says why.
const FREE_FORM: &str = "Free-form: ";

/// Where a schema leaves open what is in an object or a list, or says nothing of a value at all: the paths.
pub fn untyped(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    find_untyped(schema, schema, "#", &mut found);
    found
}

fn find_untyped(root: &Value, schema: &Value, path: &str, found: &mut Vec<String>) {
    if let Some(reference) = schema["$ref"].as_str() {
        target(root, reference);
    }
    let keywords = schema.as_object();
    let says_nothing = keywords.is_none_or(|words| words.keys().all(|word| ANNOTATIONS.contains(&&word[..])));
    let is_free_form = schema["description"]
        .as_str()
        .is_some_and(|text| text.starts_with(FREE_FORM));
    let has = |keyword| schema.get(keyword).is_some();
    let is_open = is_of(schema, "object") && !has("properties") && !has("additionalProperties")
        || is_of(schema, "array") && !has("items");
    if says_nothing || is_open && !is_free_form {
        found.push(path.to_owned());
    }
    for keyword in ["properties", "$defs"] {
        for (name, below) in schema[keyword].as_object().into_iter().flatten() {
            find_untyped(root, below, &format!("{path}/{keyword}/{name}"), found);
        }
    }
    for keyword in ["allOf", "anyOf"] {
        for (index, below) in schema[keyword].as_array().into_iter().flatten().enumerate() {
            find_untyped(root, below, &format!("{path}/{keyword}/{index}"), found);
        }
    }
    for keyword in ["items", "additionalProperties", "not", "if", "then", "else"] {
        if let Some(below) = schema.get(keyword) {
            find_untyped(root, below, &format!("{path}/{keyword}"), found);
        }
    }
}

/// Whether a schema names this type, alone or among others.
fn is_of(schema: &Value, name: &str) -> bool {
    match &schema["type"] {
        Value::Array(types) => types.iter().any(|one| one == name),
        one => one == name,
    }
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
                let target = target(self.root, wanted.as_str().expect("a reference is text"));
                return self.check(target, value, path);
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
            "minItems" => value
                .as_array()
                .is_none_or(|items| items.len() as u64 >= wanted.as_u64().unwrap()),
            "maxItems" => value
                .as_array()
                .is_none_or(|items| items.len() as u64 <= wanted.as_u64().unwrap()),
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

    use super::{unknown_fields, untyped, violations};

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
            (json!({"minItems": 1}), json!([1]), json!([])),
            (json!({"maxItems": 1}), json!([1]), json!([1, 2])),
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

    #[test]
    fn unknown_fields_are_found_at_any_depth() {
        let schema = json!({
            "$defs": {"a": {"properties": {"b": {"type": "string"}}}},
            "properties": {
                "list": {"items": {"anyOf": [{"$ref": "#/$defs/a"}, {"properties": {"c": {"type": "null"}}}]}},
                "map": {"additionalProperties": {"type": "string"}},
            },
        });
        let value = json!({"list": [{"b": ""}, {"c": null, "d": 1}], "map": {"any": ""}, "e": 1});
        assert_eq!(unknown_fields(&schema, &schema, &value), ["$.e", "$.list[1].d"]);
    }

    #[test]
    fn schemas_that_leave_a_type_open_are_found() {
        let schema = json!({
            "$defs": {"a": {"type": "array"}, "b": {"type": ["object", "null"]}},
            "type": "object",
            "properties": {
                "anything": true,
                "described": {"description": "What it is."},
                "free": {"type": "object", "description": "Free-form: its keys are names of users."},
                "list": {"type": "array", "items": {"type": "object"}},
                "map": {"type": "object", "additionalProperties": {"type": "string"}},
                "number": {"type": "integer"},
            },
        });
        let open = [
            "#/properties/anything",
            "#/properties/described",
            "#/properties/list/items",
            "#/$defs/a",
            "#/$defs/b",
        ];
        assert_eq!(untyped(&schema), open);
    }

    /// Users generate types from the schema: one that it leaves open is a type for nothing.
    #[test]
    fn the_schema_of_the_documents_leaves_nothing_open() {
        let schema: Value = serde_json::from_str(include_str!("../../../docs/json.schema.json")).unwrap();
        let open = untyped(&schema);
        assert!(
            open.is_empty(),
            "give these in docs/json.schema.json items or properties: {open:#?}"
        );
    }
}
