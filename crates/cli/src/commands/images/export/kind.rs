//! What `export` is to make: by option, or by the name of its target; and options that do not go with it.

use holdfast_archive::Packing;

use super::ExportArgs;
use crate::errors::Error;

/// What is made of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Kind {
    /// An archive of XenServer and XCP-ng
    Xva,
    /// A package of VMware and VirtualBox
    Ova,
    /// A backup of Proxmox VE
    Vma,
    /// A folder of VirtualBox
    Vbox,
    /// A folder
    Dir,
}

/// What to make, and how its name says that it is packed.
pub(super) fn kind_of(args: &ExportArgs) -> Result<(Kind, Option<Packing>), Error> {
    let name = args
        .target
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let (base, packing) = match name.rsplit_once('.') {
        Some((base, "gz")) => (base, Some(Packing::Gzip)),
        Some((base, "zst" | "zstd")) => (base, Some(Packing::Zstd)),
        _ => (&name[..], None),
    };
    let extension = base.rsplit_once('.').map_or("", |(_, extension)| extension);
    let kind = match (args.format, extension) {
        (Some(kind), _) => kind,
        (None, "xva") => Kind::Xva,
        (None, "ova") => Kind::Ova,
        (None, "vma") => Kind::Vma,
        (None, _) => {
            return Err(Error::usage(
                format!("{} does not say what to make", args.target.display()),
                "give --format xva, ova, vma, vbox or dir, or a name that ends in .xva, .ova or .vma, or in these with .gz or .zst",
            ));
        }
    };
    check_kind(args, kind)?;
    let given = [
        (
            Kind::Dir,
            args.packing.packing().is_some() || args.packing.level().is_some(),
            "--gzip, --zstd and --level",
        ),
        (Kind::Dir, args.force, "--force"),
        (
            Kind::Vbox,
            args.packing.packing().is_some() || args.packing.level().is_some(),
            "--gzip, --zstd and --level",
        ),
        (Kind::Vbox, args.force, "--force"),
        (Kind::Vbox, args.disk_format.is_some(), "--disk-format"),
        (Kind::Vbox, args.target.as_os_str() == "-", "standard output"),
        (Kind::Dir, args.target.as_os_str() == "-", "standard output"),
        (Kind::Ova, args.packing.packing().or(packing).is_some(), "packing"),
        (
            Kind::Ova,
            args.packing.level().is_some_and(|level| level < 1),
            "such a --level",
        ),
        (Kind::Ova, args.disk_format.is_some(), "--disk-format"),
        (Kind::Vma, args.disk_format.is_some(), "--disk-format"),
        (Kind::Xva, args.disk_format.is_some(), "--disk-format"),
    ];
    check_packing(args, kind, packing)?;
    match given.iter().find(|(of, is_given, _)| *of == kind && *is_given) {
        Some((_, _, what)) => Err(Error::usage(
            format!("{what} does not go with this format"),
            "leave it out, or choose another --format",
        )),
        None => Ok((kind, packing)),
    }
}

/// Options that only one kind understands.
fn check_kind(args: &ExportArgs, kind: Kind) -> Result<(), Error> {
    if args.with_memory && kind != Kind::Xva {
        return Err(Error::usage(
            "--with-memory goes with pools and --format xva only: another hypervisor cannot go on from it",
            "leave it out, and the machine starts",
        ));
    }
    let given = [(args.register, "--register"), (args.new_identity, "--new-identity")];
    match given.iter().find(|(is_given, _)| *is_given && kind != Kind::Vbox) {
        Some((_, what)) => Err(Error::usage(
            format!("{what} goes with --format vbox only"),
            "leave it out, or choose that format",
        )),
        None => Ok(()),
    }
}

/// Options and names that contradict each other.
fn check_packing(args: &ExportArgs, kind: Kind, packing: Option<Packing>) -> Result<(), Error> {
    if args.packing.level().is_some() && kind != Kind::Ova && args.packing.packing().or(packing).is_none() {
        return Err(Error::usage(
            "--level is about packing, and nothing is packed",
            "give --gzip or --zstd, or a name that ends in .gz or .zst",
        ));
    }
    if let (Some(asked), Some(named)) = (args.packing.packing(), packing)
        && asked != named
    {
        return Err(Error::usage(
            format!("the name says {}, and the option {}", named.name(), asked.name()),
            "leave the option out, or choose another name",
        ));
    }
    if args.name.as_deref() == Some("") {
        return Err(Error::usage(
            "no hypervisor imports a machine without a name",
            "give --name NAME",
        ));
    }
    Ok(())
}
