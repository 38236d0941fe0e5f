//! `holdfast machines`: lists machines, and the disks that a backup would read.

use std::collections::HashMap;
use std::ffi::OsString;

use holdfast_block::error_text;
use holdfast_engine::{VirtualBox, VirtualBoxMachine};
use holdfast_host::{Decision, Description, DiskChoice, DiskKind, DiskSource, MachineDisk, TpmPlace, TpmVersion};
use serde::Serialize;

use crate::args::PoolArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::pools;
use crate::machines::virtualbox;
use crate::machines::{Everything, Hypervisors, MachineWord, WordsByHypervisor};
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// Arguments of `machines`.
#[derive(Debug, clap::Args)]
pub(crate) struct MachinesArgs {
    /// Only these: a name, a pattern ('web*'), tag:TAG, qmp:SOCKET, vbox:NAME (vbox: is all of VirtualBox), or
    /// xen://POOL [default: all machines of libvirt and VirtualBox]
    #[arg(value_name = "MACHINE")]
    machines: Vec<OsString>,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    #[command(flatten)]
    pools: PoolArgs,
}

impl Verb for MachinesArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See all machines, and what a backup would read of them",
            line: "holdfast machines",
        },
        Example {
            wish: "See those that backup tag:db means, for a script",
            line: "holdfast machines tag:db --json",
        },
        Example {
            wish: "See the machines of VirtualBox",
            line: "holdfast machines vbox:",
        },
        Example {
            wish: "See those of a pool of XenServer or XCP-ng",
            line: "holdfast machines xen://xen1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

impl MachinesArgs {
    fn everything(&self) -> Everything {
        if self.machines.is_empty() {
            Everything::Wanted
        } else {
            Everything::NotWanted
        }
    }
}

/// Report of `machines`.
#[derive(Debug, Serialize)]
struct MachinesListed {
    machines: Vec<Listing>,
}

/// A machine.
#[derive(Debug, Serialize)]
struct Listing {
    name: String,
    uuid: String,
    hypervisor: &'static str,
    /// "running", "paused", "shut off" or "in between".
    state: String,
    disks: Vec<Disk>,
    nvram: Option<String>,
    tpm: Option<Tpm>,
    has_agent_channel: bool,
    is_left_out: bool,
    tags: Vec<String>,
}

/// A disk of a machine.
#[derive(Debug, Serialize)]
struct Disk {
    name: String,
    /// "disk", "lun", "cdrom" or "floppy".
    kind: &'static str,
    size_bytes: Option<u64>,
    format: Option<String>,
    /// Its file or device, or a description of its location.
    source: Option<String>,
    /// Why a backup would exclude it.
    left_out: Option<String>,
}

/// An emulated TPM.
#[derive(Debug, Serialize)]
struct Tpm {
    version: Option<&'static str>,
    /// The file with its state.
    state: Option<String>,
    /// Why the path is unknown.
    unknown: Option<String>,
}

impl From<holdfast_host::Tpm> for Tpm {
    fn from(tpm: holdfast_host::Tpm) -> Self {
        let (state, unknown) = match tpm.place {
            TpmPlace::At(file) => (Some(file.path.display().to_string()), None),
            TpmPlace::Unknown(why) => (None, Some(why)),
        };
        Self {
            version: tpm.version.map(TpmVersion::number),
            state,
            unknown,
        }
    }
}

impl Listing {
    /// `size_of` returns the size of a disk.
    fn new(hypervisor: &'static str, size_of: &dyn Fn(&MachineDisk) -> Option<u64>, description: Description) -> Self {
        let decisions = description.decide(&DiskChoice::default());
        let disks = description.disks.iter().zip(decisions);
        Self {
            disks: disks
                .map(|(disk, decision)| Disk::new(size_of, disk, decision))
                .collect(),
            hypervisor,
            name: description.summary.name,
            uuid: description.summary.uuid,
            state: description.summary.state.to_string(),
            nvram: description.nvram.map(|path| path.display().to_string()),
            tpm: description.tpm.map(Tpm::from),
            has_agent_channel: description.has_agent_channel,
            is_left_out: description.mark.is_left_out,
            tags: description.mark.tags,
        }
    }

    /// Its parts other than disks.
    fn parts(&self) -> String {
        let mut parts = Vec::new();
        if self.has_agent_channel {
            parts.push("agent".to_owned());
        }
        if self.nvram.is_some() {
            parts.push("firmware variables".to_owned());
        }
        if let Some(tpm) = &self.tpm {
            parts.push(format!("TPM {}", tpm.version.unwrap_or_default()).trim_end().to_owned());
        }
        parts.join(", ")
    }

    fn row(&self) -> [String; 7] {
        let taken: Vec<&Disk> = self.disks.iter().filter(|disk| disk.left_out.is_none()).collect();
        let sizes: Option<u64> = taken.iter().map(|disk| disk.size_bytes).sum();
        [
            self.name.clone(),
            self.state.clone(),
            units::count(taken.len() as u64),
            sizes.map(units::bytes).unwrap_or_default(),
            self.parts(),
            self.tags.join(", "),
            if self.is_left_out {
                "by its own configuration"
            } else {
                ""
            }
            .to_owned(),
        ]
    }
}

impl Disk {
    fn new(size_of: &dyn Fn(&MachineDisk) -> Option<u64>, disk: &MachineDisk, decision: Decision) -> Self {
        Self {
            name: disk.target.clone(),
            kind: match disk.kind {
                DiskKind::Disk => "disk",
                DiskKind::Lun => "lun",
                DiskKind::Cdrom => "cdrom",
                DiskKind::Floppy => "floppy",
            },
            size_bytes: match disk.source {
                DiskSource::Empty => None,
                _ => size_of(disk),
            },
            format: disk.format.clone(),
            source: match &disk.source {
                DiskSource::File(path) | DiskSource::Device(path) => Some(path.display().to_string()),
                DiskSource::Other(place) => Some(place.clone()),
                DiskSource::Empty => None,
            },
            left_out: match decision {
                Decision::Take => None,
                Decision::Leave(why) => Some(why),
            },
        }
    }
}

impl Report for MachinesListed {
    fn command(&self) -> &'static str {
        "machines"
    }

    fn human(&self, page: &mut Page) {
        if self.machines.is_empty() {
            page.line("no machines");
            return;
        }
        let mut table = Table::new([
            Column::long_text("MACHINE"),
            Column::text("STATE"),
            Column::number("DISKS"),
            Column::number("SIZE"),
            Column::long_text("HAS"),
            Column::long_text("TAGS"),
            Column::long_text("LEFT OUT"),
        ]);
        for machine in &self.machines {
            table.row(machine.row());
        }
        page.table(&table);
        page.gap();
        let mut table = Table::new([
            Column::long_text("MACHINE"),
            Column::text("DISK"),
            Column::number("SIZE"),
            Column::text("FORMAT"),
            Column::long_text("WHERE"),
            Column::long_text("LEFT OUT"),
        ]);
        for (machine, disk) in self
            .machines
            .iter()
            .flat_map(|machine| machine.disks.iter().map(move |disk| (machine, disk)))
        {
            table.row([
                machine.name.clone(),
                disk.name.clone(),
                disk.size_bytes.map(units::bytes).unwrap_or_default(),
                disk.format.clone().unwrap_or_default(),
                disk.source.clone().unwrap_or_default(),
                disk.left_out.clone().unwrap_or_default(),
            ]);
        }
        page.table(&table);
    }
}

/// The selected machines of VirtualBox. If no hypervisor is named, a VirtualBox that cannot be read is a warning: the
/// machines of the others are listed.
fn of_virtualbox_or_warning<'a>(
    place: &'a VirtualBox,
    words: &[String],
    everything: Everything,
    context: &Context,
) -> Result<Vec<VirtualBoxMachine<'a>>, Error> {
    match virtualbox::choose(place, words, &[], context) {
        Err(error) if everything == Everything::Wanted => {
            let causes = error_text(&error);
            let message = format!("the machines of VirtualBox are not listed: {causes}");
            context.console().warning(&message);
            Ok(Vec::new())
        }
        other => Ok(other?.chosen),
    }
}

fn run(args: &MachinesArgs, context: &Context) -> Result<Exit, Error> {
    let WordsByHypervisor {
        mut of_virtualbox,
        of_pools,
        containers,
        others: words,
    } = MachineWord::by_hypervisor(MachineWord::parse_all(&args.machines)?);
    if let Some(folder) = containers.first() {
        return Err(Error::usage(
            format!("{} is a container, and no machine", folder.display()),
            "holdfast container info shows a container",
        ));
    }
    let everything = args.everything();
    let is_everything = everything == Everything::Wanted;
    let hypervisors = Hypervisors::new(args.connect.as_deref(), context);
    let mut machines = Vec::new();
    let is_without_libvirt = is_everything && hypervisors.is_without_libvirt();
    if is_without_libvirt {
        context.console().note("no libvirt is in use on this host");
    }
    let chosen = if is_without_libvirt || (words.is_empty() && !is_everything) {
        Vec::new()
    } else {
        hypervisors.all_of(words)?
    };
    for chosen in chosen {
        let found = match hypervisors.find(&chosen) {
            // The machine ended meanwhile.
            Err(error) if is_everything && error.is_no_such_machine() => continue,
            other => other?,
        };
        let description = found.machine.describe().map_err(holdfast_engine::Error::from)?;
        let size_of = |disk: &MachineDisk| found.machine.size_of(disk);
        machines.push(Listing::new(found.hypervisor, &size_of, description));
    }
    let place = virtualbox::place(context);
    if is_everything && place.registry_file().exists() {
        of_virtualbox.push(String::new());
    }
    let chosen = of_virtualbox_or_warning(&place, &of_virtualbox, everything, context)?;
    let is_one = chosen.len() == 1;
    for machine in chosen {
        let description = match machine.describe() {
            Err(error) if !is_one => {
                let causes = error_text(&Error::from(error));
                context.console().warning(&format!("{}: {causes}", machine.name()));
                continue;
            }
            other => other?,
        };
        let size_of = |disk: &MachineDisk| machine.size_of(disk);
        machines.push(Listing::new("virtualbox", &size_of, description));
    }
    for address in &of_pools {
        let interrupt = context.interrupt()?;
        let way = args.pools.way(address, context)?;
        let pool = pools::log_in(way.login, context, &interrupt)?;
        for machine in pools::machines(&pool, &way.address, &[])? {
            let sizes = machine.disks.iter().map(|disk| (disk.device.clone(), disk.size_bytes));
            let sizes: HashMap<String, u64> = sizes.collect();
            let size_of = |disk: &MachineDisk| sizes.get(&disk.target).copied();
            machines.push(Listing::new("xen", &size_of, machine.describe()));
        }
    }
    context.report(&MachinesListed { machines })
}
