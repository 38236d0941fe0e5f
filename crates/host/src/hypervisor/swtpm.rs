//! A running swtpm. Its command line has its socket and the path of its state.
//!
//! The control socket is not used: it serves one client, which is QEMU. A command line proves nothing, since any user
//! can start a program with any arguments. So a process counts only if the kernel reports that it runs a program
//! named swtpm and has the socket open. Its state is opened with the rights of its user.

use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use crate::hypervisor::tpm::{TpmPlace, TpmStore, TpmVersion};
use crate::system::processes::{Process, bound_sockets};
use crate::system::rights::Rights;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Swtpm {
    version: TpmVersion,
    /// The control socket, which QEMU uses.
    control: Option<PathBuf>,
    store: TpmStore,
    path: PathBuf,
}

/// The TPM whose swtpm listens at a socket.
pub(crate) fn at_socket(socket: &Path) -> Option<(TpmVersion, TpmPlace)> {
    find_only(|swtpm, _| swtpm.control.as_deref() == Some(socket))
}

#[cfg(feature = "libvirt")]
/// The TPM of the libvirt machine with this UUID. A session daemon starts swtpm as its own user. The system daemon
/// has the sockets in a folder that only root can write.
pub(crate) fn of_machine(uuid: &str, libvirt: &Rights) -> Option<(TpmVersion, TpmPlace)> {
    find_only(|swtpm, rights| {
        let is_of_system = swtpm
            .control
            .as_ref()
            .is_some_and(|path| SYSTEM_SOCKETS.iter().any(|folder| path.starts_with(folder)));
        is_of_machine(swtpm, uuid) && (rights == libvirt || is_of_system && *libvirt == Rights::Own)
    })
}

#[cfg(feature = "libvirt")]
/// The folders of the system daemon's sockets.
const SYSTEM_SOCKETS: [&str; 2] = ["/run/libvirt", "/var/run/libvirt"];

#[cfg(any(feature = "libvirt", test))]
/// Whether the path belongs to this machine. libvirt names a folder by the machine's UUID, and the folder inside by
/// the TPM's version.
fn is_of_machine(swtpm: &Swtpm, uuid: &str) -> bool {
    let above = swtpm.path.parent().and_then(Path::file_name);
    let is_called_so = above.and_then(|name| name.to_str()).is_some_and(|name| name == uuid);
    swtpm.store == TpmStore::Folder && is_called_so && swtpm.path.ends_with(swtpm.version.folder())
}

/// The only matching swtpm. None if there are several: all but one are leftovers, and it is unknown which ones.
fn find_only(is_wanted: impl Fn(&Swtpm, &Rights) -> bool) -> Option<(TpmVersion, TpmPlace)> {
    let bound = bound_sockets();
    let all = Process::all().filter_map(|process| {
        let reported = parse(&process.command_line()?)?;
        let swtpm = resolved(reported.clone(), &process);
        let user = process.identity()?;
        let is_own = user.user == geteuid().as_raw() && user.user != 0;
        let rights = Rights::of(user);
        let is_match = is_wanted(&swtpm, &rights) && is_running(&process, &reported, &bound).unwrap_or(is_own);
        is_match.then_some((swtpm, rights, process))
    });
    let (inside, outside): (Vec<_>, Vec<_>) = all.partition(|(.., process)| !process.sees_other_files());
    // A process with another root directory can bind any name there.
    let Some((swtpm, rights, _)) = inside.first() else {
        let (swtpm, ..) = outside.first()?;
        let why = "its swtpm runs in a container with another file system".to_owned();
        return Some((swtpm.version, TpmPlace::Unknown(why)));
    };
    let is_other = |(other, whose, _): &(Swtpm, Rights, Process)| other != swtpm || whose != rights;
    let place = if inside.iter().any(is_other) {
        TpmPlace::Unknown("several swtpm processes could be its own".to_owned())
    } else {
        TpmPlace::of(swtpm.store, &swtpm.path, Some(swtpm.version)).with_rights(rights.clone())
    };
    Some((swtpm.version, place))
}

/// Whether a process runs a program named swtpm and has the socket open that its command line names; none if this
/// cannot be inspected.
fn is_running(process: &Process, reported: &Swtpm, bound: &[(PathBuf, u64)]) -> Option<bool> {
    let program = process.program()?;
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // The kernel appends this suffix after an update has replaced the program's file.
    if name.strip_suffix(" (deleted)").unwrap_or(name) != "swtpm" {
        return Some(false);
    }
    let Some(control) = &reported.control else {
        return Some(true);
    };
    let its = bound.iter().filter(|(path, _)| path == control);
    process.has_socket(&its.map(|(_, inode)| *inode).collect::<Vec<_>>())
}

fn resolved(swtpm: Swtpm, process: &Process) -> Swtpm {
    Swtpm {
        control: swtpm.control.map(|path| process.resolve(&path)),
        path: process.resolve(&swtpm.path),
        ..swtpm
    }
}

/// Parses a command line; none if the program is not swtpm, or the command line lacks the arguments.
fn parse(arguments: &[String]) -> Option<Swtpm> {
    let (program, arguments) = arguments.split_first()?;
    if Path::new(program).file_name()? != "swtpm" {
        return None;
    }
    let state = option(arguments, "--tpmstate")?;
    let (store, path) = match (value(state, "dir"), value(state, "backend-uri")) {
        (Some(folder), _) => (TpmStore::Folder, folder),
        (None, Some(uri)) => match (uri.strip_prefix("dir://"), uri.strip_prefix("file://")) {
            (Some(folder), _) => (TpmStore::Folder, folder),
            (None, file) => (TpmStore::Single, file?),
        },
        (None, None) => return None,
    };
    Some(Swtpm {
        version: if arguments.iter().any(|word| word == "--tpm2") {
            TpmVersion::V2
        } else {
            TpmVersion::V1
        },
        control: option(arguments, "--ctrl")
            .and_then(|control| value(control, "path"))
            .map(Into::into),
        store,
        path: path.into(),
    })
}

/// The value of an option: the next argument, or the text after `=`.
fn option<'w>(arguments: &'w [String], name: &str) -> Option<&'w str> {
    let mut after = arguments.iter().skip_while(|word| {
        let rest = word.strip_prefix(name);
        !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    });
    let word = after.next()?;
    match word.split_once('=') {
        Some((_, value)) => Some(value),
        None => after.next().map(String::as_str),
    }
}

/// The value of a key: "path" of "type=unixio,path=/run/a,mode=0600".
fn value<'w>(text: &'w str, name: &str) -> Option<&'w str> {
    let mut parts = text.split(',').filter_map(|part| part.split_once('='));
    parts.find(|(key, _)| *key == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::{Swtpm, is_of_machine, parse};
    use crate::hypervisor::tpm::{TpmStore, TpmVersion};

    fn parsed(line: &str) -> Option<Swtpm> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    /// Command lines as libvirt 9.0 writes them, as later versions do, and as started by hand.
    #[test]
    fn machine_and_state_are_read_from_the_command_line() {
        let folder = "/var/lib/libvirt/swtpm/7219d2ac-133f-465f-897f-011cd0b714f1/tpm2";
        let of_libvirt = Swtpm {
            version: TpmVersion::V2,
            control: Some("/run/libvirt/qemu/swtpm/1-t1-swtpm.sock".into()),
            store: TpmStore::Folder,
            path: folder.into(),
        };
        let start = "/usr/bin/swtpm socket --ctrl type=unixio,path=/run/libvirt/qemu/swtpm/1-t1-swtpm.sock,mode=0600";
        let end = "--log file=/a,b=dir=/c --terminate --tpm2";
        for state in [
            format!("dir={folder},mode=0600"),
            format!("backend-uri=dir://{folder},mode=0600"),
        ] {
            assert_eq!(
                parsed(&format!("{start} --tpmstate {state} {end}")).as_ref(),
                Some(&of_libvirt)
            );
        }
        assert!(is_of_machine(&of_libvirt, "7219d2ac-133f-465f-897f-011cd0b714f1"));
        assert!(!is_of_machine(&of_libvirt, "7219d2ac-133f-465f-897f-011cd0b714f2"));
        let own = Swtpm {
            version: TpmVersion::V1,
            control: None,
            store: TpmStore::Single,
            path: "state".into(),
        };
        assert_eq!(parsed("swtpm socket --tpmstate=backend-uri=file://state"), Some(own));
        for line in [
            "",
            "/bin/swtpm_setup --tpmstate dir=/a",
            "swtpm socket --tpm2",
            "swtpm socket --tpmstate",
        ] {
            assert_eq!(parsed(line), None, "{line}");
        }
    }
}
