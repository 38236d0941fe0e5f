//! Names of objects that a run creates inside QEMU, by which later runs recognize them.

use std::fmt;

/// Prefix of the names of all objects that Holdfast creates.
const PREFIX: &str = "hf-";

/// The number of a run: eight hexadecimal digits in the names of all its objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId(pub u32);

impl fmt::Display for RunId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:08x}", self.0)
    }
}

/// The purpose of a node that Holdfast created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Receives the data that the filter saves before it is overwritten.
    Scratch,
    /// The copy-before-write filter.
    Filter,
    /// Shows the frozen disk.
    Frozen,
    /// Receives copied ranges of the frozen disk.
    Spool,
    /// Has no data; writes to it request ranges to be copied.
    Marks,
    /// The filter of the copy job, which QEMU adds and removes.
    Copying,
    /// Is between a device and its disk, and can be switched to the filter.
    Switch,
}

impl Role {
    const ALL: [Self; 7] = [
        Self::Scratch,
        Self::Filter,
        Self::Frozen,
        Self::Spool,
        Self::Marks,
        Self::Copying,
        Self::Switch,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Scratch => "scratch",
            Self::Filter => "filter",
            Self::Frozen => "frozen",
            Self::Spool => "spool",
            Self::Marks => "marks",
            Self::Copying => "copying",
            Self::Switch => "switch",
        }
    }
}

impl RunId {
    /// The name of a node: at most 31 bytes, QEMU's limit.
    pub(crate) fn node(self, disk: usize, role: Role) -> String {
        format!("{PREFIX}{self}-{disk}-{}", role.word())
    }

    /// The name of another object of this run.
    pub(crate) fn thing(self, what: &str) -> String {
        format!("{PREFIX}{self}-{what}")
    }
}

/// The run that created the object of this name; none if Holdfast did not create it.
pub(crate) fn run_of(name: &str) -> Option<RunId> {
    let (digits, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
    let is_number = digits.len() == 8 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_number.then(|| u32::from_str_radix(digits, 16).ok().map(RunId))?
}

/// The role of the node of this name; none if Holdfast did not create it.
pub(crate) fn role_of(name: &str) -> Option<Role> {
    run_of(name)?;
    Role::ALL.into_iter().find(|role| name.ends_with(role.word()))
}

/// The name of the bitmap with the changes until this point in time.
pub(crate) fn changes_name(run: RunId) -> String {
    run.thing("changes")
}

#[cfg(test)]
mod tests {
    use super::{Role, RunId, role_of, run_of};

    #[test]
    fn names_contain_the_run_and_the_role() {
        let run = RunId(0x00ab_cdef);
        let name = run.node(12, Role::Filter);
        assert_eq!(name, "hf-00abcdef-12-filter");
        assert!(name.len() <= 31);
        assert_eq!((run_of(&name), role_of(&name)), (Some(run), Some(Role::Filter)));
        assert_eq!(run_of(&run.thing("nbd")), Some(run));
    }

    #[test]
    fn other_names_have_no_run() {
        for name in [
            "libvirt-1-format",
            "hf-",
            "hf-xyz",
            "hf-0000000-1-filter",
            "hf-0000000G-1-filter",
            "hf-00ABCDEF-1-filter",
        ] {
            assert_eq!(run_of(name), None, "{name}");
            assert_eq!(role_of(name), None, "{name}");
        }
    }
}
