//! The report of a check.

use crate::Error;

/// Problems found in the metadata of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Problems that lose data, or will when the image is written.
    pub corruption_count: u64,
    /// Allocated clusters that nothing refers to.
    pub leak_count: u64,
    /// The first problems, at most [`CheckReport::PROBLEM_COUNT_MAX`].
    pub problems: Vec<Problem>,
    /// Clusters of the disk.
    pub cluster_count: u64,
    /// Allocated clusters of the active state.
    pub allocated_count: u64,
    /// Compressed clusters among these.
    pub compressed_count: u64,
    /// End of the last host cluster in use.
    pub image_end: u64,
}

/// One problem in the metadata of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Whether data is lost.
    pub severity: Severity,
    /// The kind of the problem.
    pub kind: ProblemKind,
}

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Space is wasted.
    Leak,
    /// Data is lost, or will be when the image is written.
    Corruption,
}

/// The kind of a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProblemKind {
    /// The refcount of a host cluster is not the number of references to it.
    Refcount {
        /// Offset of the cluster.
        offset: u64,
        /// The refcount.
        stored: u64,
        /// References found.
        counted: u64,
    },
    /// The copied flag of an entry does not match the refcount: it must be set if, and only if, that is 1.
    CopiedFlag {
        /// The host offset in the entry.
        offset: u64,
        /// The refcount of that cluster.
        refcount: u64,
    },
    /// Two structures use the same cluster.
    Overlap {
        /// Offset of the cluster.
        offset: u64,
        /// The first structure.
        first: &'static str,
        /// The second one.
        second: &'static str,
    },
    /// Two ranges of the disk use the same storage: one of them has the data of the other.
    Shared {
        /// Kind of storage: "cluster".
        what: &'static str,
        /// Offset in the file.
        offset: u64,
        /// The affected part of the disk.
        disk_offset: u64,
        /// What else uses it.
        other: String,
    },
    /// A pointer leads past the end of the file, or is not aligned.
    Pointer {
        /// What the pointer leads to.
        what: &'static str,
        /// The offset it contains.
        offset: u64,
    },
    /// An entry is invalid.
    Entry {
        /// Offset of the disk that it maps.
        disk_offset: u64,
        /// The reason.
        detail: String,
    },
    /// Allocated units of the file that nothing refers to.
    Unreferenced {
        /// Kind of unit: "blocks".
        what: &'static str,
        /// How many.
        count: u64,
    },
    /// A problem in one of several files of a disk.
    InFile {
        /// Name of the file.
        name: String,
        /// How many problems it counts as.
        count: u64,
        /// The problem.
        detail: String,
    },
    /// A structure and its redundant copy differ: the last update may be in one of them only.
    Copies {
        /// Kind of structure: "directories".
        what: &'static str,
        /// How many entries differ.
        count: u64,
    },
    /// A structure is unreadable.
    Structure {
        /// The reason.
        detail: String,
    },
}

impl std::fmt::Display for ProblemKind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refcount {
                offset,
                stored,
                counted,
            } => {
                write!(
                    formatter,
                    "cluster at {offset}: refcount {stored}, used {counted} times"
                )
            }
            Self::CopiedFlag { offset, refcount } => {
                write!(
                    formatter,
                    "cluster at {offset}: the copied flag contradicts refcount {refcount}"
                )
            }
            Self::Overlap { offset, first, second } => {
                write!(formatter, "cluster at {offset} is used by both {first} and {second}")
            }
            Self::Shared {
                what,
                offset,
                disk_offset,
                other,
            } => write!(
                formatter,
                "entry for disk offset {disk_offset}: its {what} at {offset} is also used by {other}"
            ),
            Self::Pointer { what, offset } => write!(formatter, "{what} at {offset}: outside the file or not aligned"),
            Self::Copies { what, count } => write!(formatter, "its two {what} differ in {count} entries"),
            Self::Entry { disk_offset, detail } => write!(formatter, "entry for disk offset {disk_offset}: {detail}"),
            Self::Unreferenced { what, count } => write!(formatter, "unreferenced {what}: {count}"),
            Self::InFile { name, detail, .. } => write!(formatter, "{name}: {detail}"),
            Self::Structure { detail } => formatter.write_str(detail),
        }
    }
}

impl Problem {
    /// How many problems it counts as.
    pub fn count(&self) -> u64 {
        match self.kind {
            ProblemKind::Unreferenced { count, .. } | ProblemKind::InFile { count, .. } => count,
            _ => 1,
        }
    }
}

impl CheckReport {
    /// Maximum length of [`problems`](Self::problems); further ones are only counted.
    pub const PROBLEM_COUNT_MAX: usize = 100;

    /// Whether no problem was found.
    pub fn is_clean(&self) -> bool {
        self.corruption_count == 0 && self.leak_count == 0
    }

    /// The report of an image whose damage prevents checking it.
    pub(crate) fn of_damage(error: &Error) -> Self {
        let mut report = Self::default();
        let detail = error.to_string();
        report.add(Severity::Corruption, ProblemKind::Structure { detail });
        report
    }

    pub(crate) fn add(&mut self, severity: Severity, kind: ProblemKind) {
        let problem = Problem { severity, kind };
        match severity {
            Severity::Leak => self.leak_count += problem.count(),
            Severity::Corruption => self.corruption_count += problem.count(),
        }
        if self.problems.len() < Self::PROBLEM_COUNT_MAX {
            self.problems.push(problem);
        }
    }

    /// Appends the problems of `other`.
    pub(crate) fn take_problems(&mut self, other: Self) {
        self.corruption_count += other.corruption_count;
        self.leak_count += other.leak_count;
        self.problems.extend(other.problems);
        self.problems.truncate(Self::PROBLEM_COUNT_MAX);
    }

    /// Adds the report of file `name`, one of several that a disk consists of.
    pub(crate) fn absorb(&mut self, mut of_file: Self, name: &str) {
        self.cluster_count = self.cluster_count.max(of_file.cluster_count);
        self.allocated_count += of_file.allocated_count;
        self.compressed_count += of_file.compressed_count;
        self.image_end = self.image_end.max(of_file.image_end);
        for problem in &mut of_file.problems {
            problem.kind = ProblemKind::InFile {
                name: name.to_owned(),
                count: problem.count(),
                detail: problem.kind.to_string(),
            };
        }
        self.take_problems(of_file);
    }

    /// Adds `count` unreferenced units, if there are any.
    pub(crate) fn add_unreferenced(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            self.add(Severity::Leak, ProblemKind::Unreferenced { what, count });
        }
    }
}
