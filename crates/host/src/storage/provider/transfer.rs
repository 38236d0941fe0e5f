//! Detects running transfers of ZFS datasets.

use std::path::Path;

use crate::system::processes::Process;

/// Whether a `zfs send` or `zfs receive` on this host uses a dataset.
pub fn is_in_transfer(dataset: &str) -> bool {
    Process::all()
        .filter_map(|process| process.command_line())
        .any(|arguments| transfers(&arguments, dataset))
}

fn transfers(arguments: &[String], dataset: &str) -> bool {
    let mut arguments = arguments.iter().map(String::as_str);
    let is_zfs = arguments
        .next()
        .is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == "zfs"));
    let is_transfer = arguments
        .next()
        .is_some_and(|verb| matches!(verb, "send" | "receive" | "recv"));
    // "tank/vm", "tank/vm@a", "tank/vm#b"
    let is_of_it = |word: &str| {
        let rest = word.strip_prefix(dataset);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['@', '#']))
    };
    is_zfs && is_transfer && arguments.any(is_of_it)
}

#[cfg(test)]
mod tests {
    use super::transfers;

    #[test]
    fn transfers_are_recognized_by_command_line() {
        let is = |line: &str| {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            transfers(&arguments, "tank/vm")
        };
        for line in [
            "zfs send -w -i @a tank/vm@b",
            "/usr/sbin/zfs receive -s tank/vm",
            "zfs recv tank/vm@x",
            "zfs send -i tank/vm#a tank/x@b",
        ] {
            assert!(is(line), "{line}");
        }
        for line in [
            "zfs send tank/vm2@a",
            "zfs list tank/vm",
            "xzfs send tank/vm@a",
            "zfs",
            "zfs send tank@vm",
            "sh -c zfs send tank/vm@a",
        ] {
            assert!(!is(line), "{line}");
        }
    }
}
