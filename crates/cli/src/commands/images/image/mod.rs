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

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `image`.
#[derive(Debug, clap::Args)]
pub struct ImageArgs {
    #[command(subcommand)]
    verb: ImageVerb,
}

#[derive(Debug, clap::Subcommand)]
enum ImageVerb {
    /// Show what there is to know about an image
    Info(info::InfoArgs),
    /// Show where the bytes of a disk are: which file of the chain, and where in it
    Map(map::MapArgs),
    /// Compare the metadata of an image with itself, and mend it on request
    Check(check::CheckArgs),
    /// Compare the disks in two images: exit code 0 if they are equal, 1 if not
    Compare(compare::CompareArgs),
    /// Convert an image to another format or other options
    Convert(convert::ConvertArgs),
    /// Make an empty image
    Create(create::CreateArgs),
    /// Give an image another size
    Resize(resize::ResizeArgs),
    /// Show by what hypervisors know an image, or give it another identity
    Identity(identity::IdentityArgs),
}

/// What a person may want of all of them.
const EXAMPLES: &[Example] = &[Example {
    wish: "Convert an image to a raw disk",
    line: "holdfast image convert web1.qcow2 web1.raw",
}];

/// Examples of the verb at `path`, which is `image` or begins with `image `.
pub(in crate::commands) fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "image" => EXAMPLES,
        "image info" => info::EXAMPLES,
        "image map" => map::EXAMPLES,
        "image check" => check::EXAMPLES,
        "image compare" => compare::EXAMPLES,
        "image convert" => convert::EXAMPLES,
        "image create" => create::EXAMPLES,
        "image resize" => resize::EXAMPLES,
        "image identity" => identity::EXAMPLES,
        _ => &[],
    }
}

/// Does what the second word says.
pub(in crate::commands) fn run(args: &ImageArgs, context: &Context) -> Result<Exit, Error> {
    match &args.verb {
        ImageVerb::Info(args) => info::run(args, context),
        ImageVerb::Map(args) => map::run(args, context),
        ImageVerb::Check(args) => check::run(args, context),
        ImageVerb::Compare(args) => compare::run(args, context),
        ImageVerb::Convert(args) => convert::run(args, context),
        ImageVerb::Create(args) => create::run(args, context),
        ImageVerb::Resize(args) => resize::run(args, context),
        ImageVerb::Identity(args) => identity::run(args, context),
    }
}
