//! An swtpm that runs: its command line says for whom, and where it keeps its state.
//!
//! It is not spoken to: its socket serves one client, which is QEMU.

use std::path::{Path, PathBuf};

use crate::other_process::Process;
use crate::tpm::{TpmPlace, TpmStore, TpmVersion};

/// An swtpm.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Swtpm {
    version: TpmVersion,
    /// The socket through which QEMU tells it what to do.
    control: Option<PathBuf>,
    store: TpmStore,
    path: PathBuf,
}

/// The TPM whose swtpm listens at a socket.
pub(crate) fn at_socket(socket: &Path) -> Option<(TpmVersion, TpmPlace)> {
    found(|swtpm| swtpm.control.as_deref() == Some(socket))
}

#[cfg(feature = "libvirt")]
/// The TPM of libvirt's machine of this UUID, wherever libvirt has its state.
pub(crate) fn of_machine(uuid: &str) -> Option<(TpmVersion, TpmPlace)> {
    found(|swtpm| is_of_machine(swtpm, uuid))
}

#[cfg(any(feature = "libvirt", test))]
/// libvirt calls a folder by the machine's UUID, and the one in it by the TPM's version.
fn is_of_machine(swtpm: &Swtpm, uuid: &str) -> bool {
    let above = swtpm.path.parent().and_then(Path::file_name);
    let is_called_so = above.and_then(|name| name.to_str()).is_some_and(|name| name == uuid);
    swtpm.store == TpmStore::Folder && is_called_so && swtpm.path.ends_with(swtpm.version.folder())
}

/// The only swtpm that is meant. Where there are several, one is a remainder, and nobody knows which.
fn found(is_meant: impl Fn(&Swtpm) -> bool) -> Option<(TpmVersion, TpmPlace)> {
    let all = Process::all().filter_map(|process| {
        let swtpm = resolved(parse(&process.command_line()?)?, &process);
        is_meant(&swtpm).then_some((swtpm, process))
    });
    let mut all: Vec<_> = all.collect();
    let (swtpm, process) = all.pop()?;
    let place = if all.iter().any(|(other, _)| *other != swtpm) {
        TpmPlace::Unknown("there are several swtpm that could be its".to_owned())
    } else if process.sees_other_files() {
        TpmPlace::Unknown("its swtpm runs in a container, with files of its own".to_owned())
    } else {
        TpmPlace::of(swtpm.store, &swtpm.path, Some(swtpm.version))
    };
    Some((swtpm.version, place))
}

fn resolved(swtpm: Swtpm, process: &Process) -> Swtpm {
    Swtpm {
        control: swtpm.control.map(|path| process.resolve(&path)),
        path: process.resolve(&swtpm.path),
        ..swtpm
    }
}

/// What a command line says; none where it is that of another program, or says it elsewhere.
fn parse(words: &[String]) -> Option<Swtpm> {
    let (program, words) = words.split_first()?;
    if Path::new(program).file_name()? != "swtpm" {
        return None;
    }
    let state = option(words, "--tpmstate")?;
    let (store, path) = match (value(state, "dir"), value(state, "backend-uri")) {
        (Some(folder), _) => (TpmStore::Folder, folder),
        (None, Some(uri)) => match (uri.strip_prefix("dir://"), uri.strip_prefix("file://")) {
            (Some(folder), _) => (TpmStore::Folder, folder),
            (None, file) => (TpmStore::Single, file?),
        },
        (None, None) => return None,
    };
    Some(Swtpm {
        version: if words.iter().any(|word| word == "--tpm2") {
            TpmVersion::V2
        } else {
            TpmVersion::V1
        },
        control: option(words, "--ctrl")
            .and_then(|control| value(control, "path"))
            .map(Into::into),
        store,
        path: path.into(),
    })
}

/// The value of an option: the next word, or what follows its `=`.
fn option<'w>(words: &'w [String], name: &str) -> Option<&'w str> {
    let mut after = words.iter().skip_while(|word| {
        let rest = word.strip_prefix(name);
        !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    });
    let word = after.next()?;
    match word.split_once('=') {
        Some((_, value)) => Some(value),
        None => after.next().map(String::as_str),
    }
}

/// One of the parts of a value: "path" of "type=unixio,path=/run/a,mode=0600".
fn value<'w>(text: &'w str, name: &str) -> Option<&'w str> {
    let mut parts = text.split(',').filter_map(|part| part.split_once('='));
    parts.find(|(key, _)| *key == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::{Swtpm, is_of_machine, parse};
    use crate::tpm::{TpmStore, TpmVersion};

    fn parsed(line: &str) -> Option<Swtpm> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    /// As libvirt 9.0 starts it, as later versions do, and as people do.
    #[test]
    fn a_command_line_tells_whose_it_is_and_where_its_state_is() {
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
