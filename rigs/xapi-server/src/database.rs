//! The records of a pool: objects by class and reference, and their events.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::failure::{Answer, Failure};
use crate::schema;

/// The null reference.
pub(crate) const NULL: &str = "OpaqueRef:NULL";

/// The fields of an object.
pub(crate) type Record = Map<String, Value>;

/// An event of an object.
#[derive(Debug, Clone)]
pub(crate) struct Happening {
    /// The number of the event, from 1 since the server was started.
    pub(crate) number: u64,
    pub(crate) class: &'static str,
    /// `add`, `mod` or `del`.
    pub(crate) operation: &'static str,
    pub(crate) reference: String,
    /// The record afterwards; `None` if the object was deleted.
    pub(crate) snapshot: Option<Record>,
}

#[derive(Debug, Default)]
pub(crate) struct Database {
    tables: BTreeMap<&'static str, BTreeMap<String, Record>>,
    happenings: Vec<Happening>,
}

/// Creates a random UUID.
pub(crate) fn new_uuid() -> String {
    let mut bytes = [0_u8; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has randomness");
    bytes[6] = bytes[6] & 0x0F | 0x40;
    bytes[8] = bytes[8] & 0x3F | 0x80;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// Creates a new reference.
pub(crate) fn new_reference() -> String {
    format!("OpaqueRef:{}", new_uuid())
}

/// A text field; empty if the field is not a text.
pub(crate) fn text<'a>(record: &'a Record, field: &str) -> &'a str {
    record.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// A field that is a list of texts.
pub(crate) fn texts(record: &Record, field: &str) -> Vec<String> {
    let list = record.get(field).and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

/// A Boolean field.
pub(crate) fn flag(record: &Record, field: &str) -> bool {
    record.get(field).and_then(Value::as_bool).unwrap_or_default()
}

/// A numeric field.
pub(crate) fn number(record: &Record, field: &str) -> u64 {
    record.get(field).and_then(Value::as_u64).unwrap_or_default()
}

impl Database {
    /// Creates an object of `class` with the given `fields` and the defaults of the class; returns its reference.
    pub(crate) fn add(&mut self, class: &'static str, fields: Value) -> String {
        let mut record = schema::blank(class);
        record.insert("uuid".to_owned(), json!(new_uuid()));
        if let Value::Object(fields) = fields {
            record.extend(fields);
        }
        self.insert(class, record)
    }

    /// Inserts a whole record; returns its reference.
    pub(crate) fn insert(&mut self, class: &'static str, record: Record) -> String {
        let reference = new_reference();
        self.note(class, "add", &reference, Some(record.clone()));
        self.tables.entry(class).or_default().insert(reference.clone(), record);
        reference
    }

    fn note(&mut self, class: &'static str, operation: &'static str, reference: &str, snapshot: Option<Record>) {
        self.happenings.push(Happening {
            number: self.happening_count() + 1,
            class,
            operation,
            reference: reference.to_owned(),
            snapshot,
        });
    }

    /// Number of events so far.
    pub(crate) fn happening_count(&self) -> u64 {
        self.happenings.len() as u64
    }

    /// The events after event `number`.
    pub(crate) fn happenings_after(&self, number: u64) -> impl Iterator<Item = &Happening> {
        self.happenings.iter().filter(move |it| it.number > number)
    }

    pub(crate) fn get(&self, class: &'static str, reference: &str) -> Answer<&Record> {
        self.tables
            .get(class)
            .and_then(|table| table.get(reference))
            .ok_or_else(|| Failure::new("HANDLE_INVALID", &[class, reference]))
    }

    pub(crate) fn exists(&self, class: &'static str, reference: &str) -> bool {
        self.get(class, reference).is_ok()
    }

    /// Changes the record of an object.
    pub(crate) fn change(
        &mut self,
        class: &'static str,
        reference: &str,
        change: impl FnOnce(&mut Record),
    ) -> Answer<()> {
        let record = self
            .tables
            .get_mut(class)
            .and_then(|table| table.get_mut(reference))
            .ok_or_else(|| Failure::new("HANDLE_INVALID", &[class, reference]))?;
        change(record);
        let after = record.clone();
        self.note(class, "mod", reference, Some(after));
        Ok(())
    }

    /// Sets one field.
    pub(crate) fn set(&mut self, class: &'static str, reference: &str, field: &str, value: Value) -> Answer<()> {
        self.change(class, reference, |record| {
            record.insert(field.to_owned(), value);
        })
    }

    pub(crate) fn remove(&mut self, class: &'static str, reference: &str) -> Answer<Record> {
        let removed = self.tables.get_mut(class).and_then(|table| table.remove(reference));
        let record = removed.ok_or_else(|| Failure::new("HANDLE_INVALID", &[class, reference]))?;
        self.note(class, "del", reference, None);
        Ok(record)
    }

    /// Reference and record of each object of `class`.
    pub(crate) fn all(&self, class: &'static str) -> impl Iterator<Item = (&String, &Record)> {
        self.tables.get(class).into_iter().flatten()
    }

    /// References of the objects of `class` whose `field` is `value`.
    pub(crate) fn having(&self, class: &'static str, field: &str, value: &str) -> Vec<String> {
        self.all(class)
            .filter(|(_, record)| text(record, field) == value)
            .map(|(reference, _)| reference.clone())
            .collect()
    }

    /// Number of objects of each class.
    pub(crate) fn counts(&self) -> Value {
        let counts = self
            .tables
            .iter()
            .map(|(class, table)| ((*class).to_lowercase(), json!(table.len())));
        Value::Object(counts.collect())
    }

    pub(crate) fn by_uuid(&self, class: &'static str, uuid: &str) -> Answer<String> {
        let mut found = self.having(class, "uuid", uuid);
        found.pop().ok_or_else(|| Failure::new("UUID_INVALID", &[class, uuid]))
    }

    /// The object with the reference or UUID `name`.
    pub(crate) fn by_reference_or_uuid(&self, class: &'static str, name: &str) -> Answer<String> {
        if self.exists(class, name) {
            return Ok(name.to_owned());
        }
        self.by_uuid(class, name)
    }

    /// Adds `item` to a list field.
    pub(crate) fn append(&mut self, class: &'static str, reference: &str, field: &str, item: &str) -> Answer<()> {
        self.change(class, reference, |record| {
            if let Some(list) = record.get_mut(field).and_then(Value::as_array_mut) {
                list.push(json!(item));
            }
        })
    }

    /// Removes `item` from a list field, if the object still exists.
    pub(crate) fn take_out(&mut self, class: &'static str, reference: &str, field: &str, item: &str) {
        if self.exists(class, reference) {
            let taken = self.change(class, reference, |record| {
                if let Some(list) = record.get_mut(field).and_then(Value::as_array_mut) {
                    list.retain(|known| known != item);
                }
            });
            debug_assert!(taken.is_ok(), "it exists");
        }
    }
}
