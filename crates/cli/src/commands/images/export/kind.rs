//! The kind of export, by option or by the name of the target; and options that do not fit it.

use holdfast_archive::Packing;

use super::ExportArgs;
use crate::errors::Error;

/// What is made of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ExportKind {
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

impl ExportKind {
    /// The name of the kind on the command line.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Xva => "xva",
            Self::Ova => "ova",
            Self::Vma => "vma",
            Self::Vbox => "vbox",
            Self::Dir => "dir",
        }
    }
}

/// The kind of export, and the compression that the target's name implies.
pub(super) fn kind_of(args: &ExportArgs) -> Result<(ExportKind, Option<Packing>), Error> {
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
        (None, "xva") => ExportKind::Xva,
        (None, "ova") => ExportKind::Ova,
        (None, "vma") => ExportKind::Vma,
        (None, _) => {
            return Err(Error::usage(
                format!("the name {} does not select a format", args.target.display()),
                "use --format xva, ova, vma, vbox or dir, or a name that ends in .xva, .ova or .vma, optionally followed by .gz or .zst",
            ));
        }
    };
    check_kind(args, kind)?;
    let given = [
        (
            ExportKind::Dir,
            args.packing.packing().is_some() || args.packing.level().is_some(),
            "--gzip, --zstd and --level",
        ),
        (ExportKind::Dir, args.force, "--force"),
        (
            ExportKind::Vbox,
            args.packing.packing().is_some() || args.packing.level().is_some(),
            "--gzip, --zstd and --level",
        ),
        (ExportKind::Vbox, args.force, "--force"),
        (ExportKind::Vbox, args.disk_format.is_some(), "--disk-format"),
        (ExportKind::Vbox, args.target.as_os_str() == "-", "standard output"),
        (ExportKind::Dir, args.target.as_os_str() == "-", "standard output"),
        (ExportKind::Ova, args.packing.packing().or(packing).is_some(), "packing"),
        (
            ExportKind::Ova,
            args.packing.level().is_some_and(|level| level < 1),
            "such a --level",
        ),
        (ExportKind::Ova, args.disk_format.is_some(), "--disk-format"),
        (ExportKind::Vma, args.disk_format.is_some(), "--disk-format"),
        (ExportKind::Xva, args.disk_format.is_some(), "--disk-format"),
    ];
    check_packing(args, kind, packing)?;
    match given.iter().find(|(of, is_given, _)| *of == kind && *is_given) {
        Some((_, _, what)) => Err(Error::usage(
            format!("{what} does not go with this format"),
            "remove it, or choose another --format",
        )),
        None => Ok((kind, packing)),
    }
}

/// Returns an error if an option does not apply to the kind.
fn check_kind(args: &ExportArgs, kind: ExportKind) -> Result<(), Error> {
    if args.with_memory && kind != ExportKind::Xva {
        return Err(Error::usage(
            "--with-memory goes with pools and --format xva only: another hypervisor cannot resume from it",
            "remove the option; the machine boots from its disks",
        ));
    }
    let given = [(args.register, "--register"), (args.new_identity, "--new-identity")];
    match given.iter().find(|(is_given, _)| *is_given && kind != ExportKind::Vbox) {
        Some((_, what)) => Err(Error::usage(
            format!("{what} goes with --format vbox only"),
            "remove the option, or use --format vbox",
        )),
        None => Ok(()),
    }
}

/// Returns an error if options and the target's name contradict each other.
fn check_packing(args: &ExportArgs, kind: ExportKind, packing: Option<Packing>) -> Result<(), Error> {
    if args.packing.level().is_some() && kind != ExportKind::Ova && args.packing.packing().or(packing).is_none() {
        return Err(Error::usage(
            "--level sets the compression, and the export is not compressed",
            "use --gzip or --zstd, or a name that ends in .gz or .zst",
        ));
    }
    if let (Some(asked), Some(named)) = (args.packing.packing(), packing)
        && asked != named
    {
        return Err(Error::usage(
            format!("the name means {}, and the option {}", named.name(), asked.name()),
            "remove the option, or choose another name",
        ));
    }
    if args.name.as_deref() == Some("") {
        return Err(Error::usage(
            "no hypervisor imports a machine without a name",
            "use --name NAME",
        ));
    }
    Ok(())
}
