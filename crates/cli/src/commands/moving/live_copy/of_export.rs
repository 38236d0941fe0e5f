//! An export of an NBD server.

use std::ffi::OsStr;

use holdfast_block::error_text;
use holdfast_image::Format;
use holdfast_live_copy::StillSource;
use holdfast_serve::nbd::client::{Error as NbdError, ExportContent, NbdDevice, NbdOptions, NbdUri};

use super::super::far::CopyTarget;
use super::report::CopiedFrom;
use super::{LiveCopyArgs, NamedSource};
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;

const SCHEMES: [&str; 4] = ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"];

/// The address of an export, if the source is one.
pub(super) fn export_of(source: &OsStr) -> Option<&str> {
    let text = source.to_str()?;
    SCHEMES.iter().any(|scheme| text.starts_with(scheme)).then_some(text)
}

impl LiveCopyArgs {
    /// Copies an export, which the commands freeze, or to which nothing writes.
    pub(super) fn copy_export(&self, address: &str, target: &CopyTarget, context: &Context) -> Result<Exit, Error> {
        if self.format.is_some_and(|format| format != Format::Raw) {
            return Err(Error::usage(
                "an export has the content of a disk, without a format",
                "remove the option --format",
            ));
        }
        let uri: NbdUri = address.parse().map_err(|error: NbdError| {
            Error::usage(
                error_text(&error),
                "write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH",
            )
        })?;
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
        let device = NbdDevice::connect_to(&uri, options).map_err(|error| {
            Error::refused(
                Kind::Io,
                error_text(&error),
                "check the address, and that the server runs",
            )
        })?;
        let name = NamedSource {
            shown: address.to_owned(),
            identity: address.as_bytes().to_vec(),
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::export_of;

    #[test]
    fn an_export_has_the_address_of_a_server() {
        for address in ["nbd://host/disk", "nbd+unix:///disk?socket=/run/nbd"] {
            assert_eq!(export_of(OsStr::new(address)), Some(address));
        }
        for other in ["/srv/nbd.raw", "nbd", "ssh://host/disk"] {
            assert_eq!(export_of(OsStr::new(other)), None);
        }
    }
}
