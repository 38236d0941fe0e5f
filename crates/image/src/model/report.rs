//! What a check found.

use crate::Error;

/// What was found in an image's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Contradictions that lose data, or will when the image is written.
    pub corruption_count: u64,
    /// Clusters that take space for nothing.
    pub leak_count: u64,
    /// The first problems, at most [`CheckReport::PROBLEM_COUNT_MAX`].
    pub problems: Vec<Problem>,
    /// Clusters of the disk.
    pub cluster_count: u64,
    /// Clusters of the active state that are stored.
    pub allocated_count: u64,
    /// Those of them that are compressed.
    pub compressed_count: u64,
    /// End of the last host cluster in use.
    pub image_end: u64,
}

/// One contradiction in an image's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub kind: ProblemKind,
}

/// How bad a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Space is wasted.
    Leak,
    /// Data is lost, or will be when the image is written.
    Corruption,
}

/// What contradicts what.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProblemKind {
    /// A host cluster is used more or less often than its refcount says.
    Refcount {
        /// Offset of the cluster.
        offset: u64,
        /// The refcount.
        stored: u64,
        /// The uses found.
        counted: u64,
    },
    /// The `copied` flag of an entry does not say whether the refcount is 1.
    CopiedFlag {
        /// The host offset in the entry.
        offset: u64,
        /// The refcount of that cluster.
        refcount: u64,
    },
    /// Two structures claim one cluster.
    Overlap {
        /// Offset of the cluster.
        offset: u64,
        /// Who has it.
        first: &'static str,
        /// Who wants it too.
        second: &'static str,
    },
    /// What belongs to two parts of the disk: one of both has what is the other's.
    Shared {
        /// What it is: "cluster".
        what: &'static str,
        /// Where it is.
        offset: u64,
        /// The affected part of the disk.
        disk_offset: u64,
        /// Whose it is, too.
        other: String,
    },
    /// A pointer leads out of the file, or into the middle of a cluster.
    Pointer {
        /// What points there.
        what: &'static str,
        /// Where it leads.
        offset: u64,
    },
    /// An entry that means nothing.
    Entry {
        /// Offset of the disk that it describes.
        disk_offset: u64,
        /// Why.
        detail: String,
    },
    /// Pieces of the file that hold nothing of the disk.
    Unreferenced {
        /// What they are: "blocks".
        what: &'static str,
        /// How many.
        count: u64,
    },
    /// What is wrong with one of several files that a disk is made of.
    InFile {
        /// Its name.
        name: String,
        /// How many of those that are counted it stands for.
        count: u64,
        /// What it is.
        detail: String,
    },
    /// A structure and its copy differ: what was written last may be in one of them only.
    Copies {
        /// What they are: "directories".
        what: &'static str,
        /// In how many entries.
        count: u64,
    },
    /// A structure that cannot be read.
    Structure {
        /// Why.
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
                write!(formatter, "cluster at {offset}: both {first} and {second}")
            }
            Self::Shared {
                what,
                offset,
                disk_offset,
                other,
            } => write!(
                formatter,
                "entry for disk offset {disk_offset}: its {what} at {offset} is that of {other}, too"
            ),
            Self::Pointer { what, offset } => write!(formatter, "{what} at {offset}: outside the file or not aligned"),
            Self::Copies { what, count } => write!(formatter, "its two {what} differ in {count} entries"),
            Self::Entry { disk_offset, detail } => write!(formatter, "entry for disk offset {disk_offset}: {detail}"),
            Self::Unreferenced { what, count } => write!(formatter, "{what} that belong to nothing: {count}"),
            Self::InFile { name, detail, .. } => write!(formatter, "{name}: {detail}"),
            Self::Structure { detail } => formatter.write_str(detail),
        }
    }
}

impl Problem {
    /// How many of those that a report counts it stands for.
    pub fn count(&self) -> u64 {
        match self.kind {
            ProblemKind::Unreferenced { count, .. } | ProblemKind::InFile { count, .. } => count,
            _ => 1,
        }
    }
}

impl CheckReport {
    /// Problems that are kept; the others are only counted.
    pub const PROBLEM_COUNT_MAX: usize = 100;

    /// Whether there is no problem at all.
    pub fn is_clean(&self) -> bool {
        self.corruption_count == 0 && self.leak_count == 0
    }

    /// That of an image which is damaged in a way that keeps it from being looked at.
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

    /// Takes over the problems of `other`.
    pub(crate) fn take_problems(&mut self, other: Self) {
        self.corruption_count += other.corruption_count;
        self.leak_count += other.leak_count;
        self.problems.extend(other.problems);
        self.problems.truncate(Self::PROBLEM_COUNT_MAX);
    }

    /// Takes up what was found in one file, `name`, of several that a disk is made of.
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

    /// Pieces of the file that hold nothing, where there are some.
    pub(crate) fn add_unreferenced(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            self.add(Severity::Leak, ProblemKind::Unreferenced { what, count });
        }
    }
}
