//! `container create --template`.

use std::path::Path;

use holdfast_engine::{TemplateContainer, TemplateContainerRequest, TemplateReference, create_container_from_template};
use holdfast_image::Format;

use crate::args::{JobArgs, Switch as _};
use crate::commands::images::template::{TrustArgs, signatures};
use crate::context::Context;
use crate::errors::Error;

/// The template of a new container.
#[derive(Debug, clap::Args)]
pub(super) struct TemplateSourceArgs {
    /// Copy the disk of a template in the repository
    #[arg(long, value_name = "NAME[:TAG]|NAME@DIGEST", conflicts_with_all = ["from", "filesystem"])]
    pub(super) template: Option<TemplateReference>,
    /// Accept a template without a trusted signature
    #[arg(long, requires = "template")]
    unsigned: bool,
    #[command(flatten)]
    trust: TrustArgs,
}

/// The container to create from a template.
pub(super) struct TemplateContainerPlan<'a> {
    pub(super) template: &'a TemplateReference,
    pub(super) folder: &'a Path,
    pub(super) size_bytes: Option<u64>,
    pub(super) format: Format,
    pub(super) dry_run: bool,
}

impl TemplateSourceArgs {
    /// Returns an error for options that need a template if there is none.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.trust.given_option() {
            Some(option) if self.template.is_none() => Err(Error::usage(
                format!("{option} is about the signatures of templates"),
                "add --template, or remove the option",
            )),
            _ => Ok(()),
        }
    }

    /// Creates the container, or plans that.
    pub(super) fn create(
        &self,
        plan: &TemplateContainerPlan<'_>,
        context: &Context,
    ) -> Result<TemplateContainer, Error> {
        let request = TemplateContainerRequest {
            template: plan.template.clone(),
            unsigned: self.unsigned.acceptance(),
            folder: plan.folder.to_owned(),
            size_bytes: plan.size_bytes,
            format: plan.format,
            execution: plan.dry_run.execution(),
        };
        let repository = context.open_repository()?;
        let signatures = signatures(context);
        let trust = self.trust.trust(&signatures, context);
        let _noted = (!plan.dry_run).then(|| crate::machines::runs::note_places([plan.folder], context));
        context.work(JobArgs::default().thread_count(), |job| {
            create_container_from_template(&repository, &request, &trust, job)
        })
    }
}
