//! `holdfast key paper`.

use holdfast_engine::paper_key;
use serde::Serialize;

use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Report of `key paper`.
#[derive(Serialize)]
struct Printed {
    /// The repository that the key opens.
    id: String,
    location: String,
    paper_key: String,
}

impl Report for Printed {
    fn command(&self) -> &'static str {
        "key paper"
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("Holdfast repository {} ({})", self.id, self.location));
        page.gap();
        page.line(&self.paper_key);
        page.gap();
        page.line("Anyone who has this text can open the repository. Enter it where a password is asked for.");
    }
}

pub(super) fn run(context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    context.report(&Printed {
        id: repository.config().id.to_string(),
        location: repository.describe(),
        paper_key: paper_key(&repository).text().to_owned(),
    })
}
