//! `holdfast image`: works with disk image files, without a repository.

mod check;
mod compare;
mod convert;
mod create;
mod identity;
mod info;
mod map;
mod mount;
mod options;
mod resize;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `image`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    verb: ImageVerb,
}

verbs! {
    enum ImageVerb {
        /// Show the properties of an image
        "info" => Info(info::ImageInfoArgs),
        /// Show where the data of a disk is: in which file of the chain, at which offset
        "map" => Map(map::MapArgs),
        /// Check the metadata of an image, and repair it on request
        "check" => Check(check::ImageCheckArgs),
        /// Compare the disks in two images: exit code 0 if they are equal, 1 if not
        "compare" => Compare(compare::CompareArgs),
        /// Convert an image to another format or other options
        "convert" => Convert(convert::ConvertArgs),
        /// Create an empty image
        "create" => Create(create::CreateArgs),
        /// Resize an image
        "resize" => Resize(resize::ResizeArgs),
        /// Show or change the identity (UUID) of an image
        "identity" => Identity(identity::IdentityArgs),
        /// Mount the disk of an image as a raw file
        "mount" => Mount(mount::ImageMountArgs),
    }
    internal {
        /// Serve the disk of a mounted image
        "mount-server" => MountServer(mount::ImageMountServerArgs),
        /// Serve the disk of an image that is mounted for writing
        "mount-worker" => MountWorker(mount::ImageMountWorkerArgs),
    }
}

impl Verb for ImageArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Convert an image to a raw disk",
        line: "holdfast image convert web1.qcow2 web1.raw",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];
    const BELOW: &'static [VerbEntry] = ImageVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}
