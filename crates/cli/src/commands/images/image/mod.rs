//! `holdfast image`: disk image files, without a repository.

mod check;
mod compare;
mod convert;
mod create;
mod identity;
mod info;
mod map;
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
        /// Show what there is to know about an image
        "info" => Info(info::InfoArgs),
        /// Show where the bytes of a disk are: which file of the chain, and where in it
        "map" => Map(map::MapArgs),
        /// Compare the metadata of an image with itself, and mend it on request
        "check" => Check(check::CheckArgs),
        /// Compare the disks in two images: exit code 0 if they are equal, 1 if not
        "compare" => Compare(compare::CompareArgs),
        /// Convert an image to another format or other options
        "convert" => Convert(convert::ConvertArgs),
        /// Make an empty image
        "create" => Create(create::CreateArgs),
        /// Give an image another size
        "resize" => Resize(resize::ResizeArgs),
        /// Show by what hypervisors know an image, or give it another identity
        "identity" => Identity(identity::IdentityArgs),
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
