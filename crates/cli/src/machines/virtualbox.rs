//! The VirtualBox machines that the words of a command line select, and the connections to them.

use std::path::PathBuf;

use holdfast_block::error_text;
use holdfast_engine::{ExchangeError, VirtualBox, VirtualBoxError, VirtualBoxMachine};
use holdfast_host::virtualbox::{PROGRAM, VBoxManage, home_folder};
use holdfast_policy::Glob;

use crate::context::Context;
use crate::context::search_path;
use crate::errors::Error;
use crate::process::environment;

/// The reason that is reported for excluded machines.
const EXCLUDED: &str = "it is excluded";

/// The VirtualBox installation of the current user.
pub fn place(context: &Context) -> VirtualBox {
    let folder = |name: &str| {
        context
            .variable(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let said = folder(environment::VIRTUALBOX_HOME);
    let home = home_folder(
        said.as_deref(),
        folder(environment::HOME).as_deref(),
        context.configuration_folder().as_deref(),
    );
    let manager =
        search_path::find(PROGRAM, context).map(|program| VBoxManage::new(&program, said.as_deref(), context.clock()));
    VirtualBox::new(home, manager)
}

/// The error of a request that requires `VBoxManage`.
pub fn no_manager(what: &'static str) -> Error {
    holdfast_engine::Error::from(ExchangeError::VirtualBox(VirtualBoxError::NoManager { what })).into()
}

/// Selected machines.
#[derive(Default)]
pub struct VirtualBoxChoice<'a> {
    /// Machines to use.
    pub chosen: Vec<VirtualBoxMachine<'a>>,
    /// Matching machines that are excluded: the name and the reason.
    pub left_out: Vec<(String, &'static str)>,
}

/// The selected machines, each once. If several are selected, unreadable ones are reported and skipped.
///
/// # Errors
/// A pattern matches no machine, or no machine has a name.
pub fn choose<'a>(
    place: &'a VirtualBox,
    words: &[String],
    excluded: &[Glob],
    context: &Context,
) -> Result<VirtualBoxChoice<'a>, Error> {
    let mut choice = VirtualBoxChoice::default();
    for word in words {
        let is_pattern = Glob::is_one(word) && !word.contains('/');
        if !word.is_empty() && !is_pattern {
            choice.add(place.find(word)?);
            continue;
        }
        let glob = match &word[..] {
            "" => None,
            pattern => Some(Glob::parse(pattern).map_err(|detail| {
                Error::usage(detail, "'vbox:web*' matches all machines whose names begin with web")
            })?),
        };
        let (machines, inaccessible) = place.machines()?;
        for machine in inaccessible {
            let error = Error::from(machine.error);
            context.console().warning(&format!(
                "VirtualBox lists the machine {}, which cannot be read: {}",
                machine.uuid,
                error_text(&error)
            ));
        }
        let mut is_empty = true;
        for machine in machines {
            if glob.as_ref().is_some_and(|glob| !glob.matches(machine.name())) {
                continue;
            }
            is_empty = false;
            if excluded.iter().any(|glob| glob.matches(machine.name())) {
                choice.left_out.push((machine.name().to_owned(), EXCLUDED));
            } else {
                choice.add(machine);
            }
        }
        if is_empty && glob.is_some() {
            return Err(Error::NoMachines {
                said: format!("vbox:{word}"),
                uri: place.registry_file().display().to_string(),
            });
        }
    }
    Ok(choice)
}

impl<'a> VirtualBoxChoice<'a> {
    fn add(&mut self, machine: VirtualBoxMachine<'a>) {
        let is_known = |known: &VirtualBoxMachine<'_>| known.settings_file() == machine.settings_file();
        if !self.chosen.iter().any(is_known) {
            self.chosen.push(machine);
        }
    }
}
