//! `holdfast key add`, `key rotate` and `key remove`.

use holdfast_engine::{Unlock, add_key, check_password, plan_key_removal, plan_rotation, remove_key, rotate_key};
use holdfast_repo::key::SlotId;
use serde::Serialize;

use super::{AddArgs, KeyRemoveArgs, RotateArgs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Report of all three verbs.
#[derive(Debug, Serialize)]
struct KeyChanged {
    #[serde(skip)]
    command: &'static str,
    dry_run: bool,
    /// The new key.
    added: Option<String>,
    /// The removed key.
    removed: Option<String>,
}

impl Report for KeyChanged {
    fn command(&self) -> &'static str {
        self.command
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        if self.dry_run {
            if self.command != "key remove" {
                page.line("would add a key for the new password");
            }
            if let Some(removed) = &self.removed {
                page.line(&format!("would remove key {removed}"));
            }
            return;
        }
        if let Some(added) = &self.added {
            page.line(&format!("added key {added}"));
        }
        if let Some(removed) = &self.removed {
            page.line(&format!("removed key {removed}"));
            page.line("copies of the repository from before still open with it");
        }
    }
}

pub(super) fn add(args: &AddArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let password = context.new_password(&args.new_password)?;
    let slot = if args.dry_run {
        check_password(password.as_bytes())?;
        None
    } else {
        Some(add_key(&repository, password.as_bytes(), &args.label)?)
    };
    context.report(&KeyChanged {
        command: "key add",
        dry_run: args.dry_run,
        added: slot.map(|slot| slot.to_string()),
        removed: None,
    })
}

/// Replaces the password that opened the repository with a new one.
pub(super) fn rotate(args: &RotateArgs, context: &Context) -> Result<Exit, Error> {
    let location = context.location()?;
    let old = context.unlocking_password(&location)?;
    let repository = context.open_with(&location, old.as_ref())?;
    let new = context.new_password(&args.new_password)?;
    let unlock = old
        .as_ref()
        .map_or(Unlock::Nothing, |old| Unlock::Password(old.as_bytes()));
    if args.dry_run {
        let slot = plan_rotation(&location, unlock, new.as_bytes())?;
        return context.report(&KeyChanged {
            command: "key rotate",
            dry_run: true,
            added: None,
            removed: Some(slot.to_string()),
        });
    }
    let report = rotate_key(
        &location,
        unlock,
        new.as_bytes(),
        args.label.as_deref(),
        &repository,
        &context.environment(),
    )?;
    context.report(&KeyChanged {
        command: "key rotate",
        dry_run: false,
        added: Some(report.new.to_string()),
        removed: Some(report.old.to_string()),
    })
}

/// Removes a key. A password is required, which proves that the user keeps a valid key.
pub(super) fn remove(args: &KeyRemoveArgs, context: &Context) -> Result<Exit, Error> {
    let slot: SlotId = args.key.parse()?;
    context.open_repository()?;
    let location = context.location()?;
    if args.dry_run {
        plan_key_removal(&location, slot)?;
    } else {
        remove_key(&location, slot, &context.environment())?;
    }
    context.report(&KeyChanged {
        command: "key remove",
        dry_run: args.dry_run,
        added: None,
        removed: Some(slot.to_string()),
    })
}
