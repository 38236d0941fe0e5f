//! `holdfast key list`.

use holdfast_engine::list_keys;
use jiff::Timestamp;
use serde::Serialize;

use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Table};
use crate::process::time;

/// Report of `key list`.
#[derive(Debug, Serialize)]
struct Keys {
    keys: Vec<Key>,
    /// Damaged keys, and why.
    damaged: Vec<Damaged>,
}

#[derive(Debug, Serialize)]
struct Key {
    id: String,
    /// "password", "key file" or "open key slot".
    kind: String,
    label: String,
    created: String,
    #[serde(skip)]
    created_local: String,
}

#[derive(Debug, Serialize)]
struct Damaged {
    object: String,
    reason: String,
}

impl Report for Keys {
    fn command(&self) -> &'static str {
        "key list"
    }

    fn exit(&self) -> Exit {
        if self.damaged.is_empty() {
            Exit::Ok
        } else {
            Exit::Damage
        }
    }

    fn human(&self, page: &mut Page) {
        let mut table = Table::new([
            Column::text("KEY"),
            Column::text("KIND"),
            Column::text("CREATED"),
            Column::long_text("LABEL"),
        ]);
        for key in &self.keys {
            table.row([
                key.id.clone(),
                key.kind.clone(),
                key.created_local.clone(),
                key.label.clone(),
            ]);
        }
        page.table(&table);
        for damaged in &self.damaged {
            page.line(&format!("damaged: {} ({})", damaged.object, damaged.reason));
        }
    }
}

pub(super) fn run(context: &Context) -> Result<Exit, Error> {
    let listing = list_keys(&context.location()?)?;
    let keys = listing.slots.iter().map(|slot| {
        let seconds = i64::try_from(slot.created_unix_seconds).unwrap_or(i64::MAX);
        let created = Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
        Key {
            id: slot.id.to_string(),
            kind: slot.kind.to_string(),
            label: slot.label.clone(),
            created: created.to_string(),
            created_local: time::local(created, context.zone()),
        }
    });
    let damaged = listing.damaged.iter().map(|(object, error)| Damaged {
        object: object.to_string(),
        reason: error.to_string(),
    });
    context.report(&Keys {
        keys: keys.collect(),
        damaged: damaged.collect(),
    })
}
