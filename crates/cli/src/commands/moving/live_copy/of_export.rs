//! An export of an NBD server.

use holdfast_block::error_text;
use holdfast_image::Format;
use holdfast_live_copy::StillSource;
use holdfast_serve::nbd::client::{ExportContent, NbdDevice, NbdOptions};

use super::super::copy_target::{CopyTarget, ExportAddress, TargetPlace};
use super::report::CopiedFrom;
use super::{LiveCopyArgs, NamedSource};
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;

impl LiveCopyArgs {
    /// Copies an export, which the commands freeze, or to which nothing writes.
    pub(super) fn copy_export(
        &self,
        source: &ExportAddress,
        target: &CopyTarget,
        context: &Context,
    ) -> Result<Exit, Error> {
        if self.format.is_some_and(|format| format != Format::Raw) {
            return Err(Error::usage(
                "an export has the content of a disk, without a format",
                "remove the option --format",
            ));
        }
        if let TargetPlace::Export(other) = &target.place
            && other.is_same(source)
        {
            return Err(Error::usage("the target is the source", "name another export"));
        }
        let commands = self
            .freezing
            .freeze_command
            .as_ref()
            .zip(self.freezing.thaw_command.as_ref());
        let options = NbdOptions {
            content: if commands.is_some() {
                ExportContent::Changing
            } else {
                ExportContent::Fixed
            },
            is_stopped: Some(context.interrupt()?.question()),
            ..NbdOptions::default()
        };
        let device = NbdDevice::connect_to(&source.uri, options).map_err(|error| {
            Error::refused(
                Kind::Io,
                error_text(&error),
                "check the address, and that the server runs",
            )
        })?;
        let name = NamedSource {
            shown: source.text.clone(),
            identity: source.text.as_bytes().to_vec(),
        };
        if let Some((freeze, thaw)) = commands {
            return self.copy_compared([freeze, thaw], &device, target, &name, context);
        }
        context
            .console()
            .note("an export cannot be locked: nothing may write to it until the copy is complete");
        self.copy(&StillSource::new(&device), target, &name, CopiedFrom::Unlocked, context)
    }
}
