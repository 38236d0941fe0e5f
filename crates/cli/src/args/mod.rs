//! What all verbs share on the command line.

mod examples;
mod global;
mod luks;
mod mounts;
mod peer_words;
mod pool;
mod retention;
mod switches;
mod values;
mod verbs;
mod wrong_line;

pub use examples::{Example, examples_help};
pub use global::{
    ColorWhen, GlobalArgs, JobArgs, LikePasswordArgs, NO_HEADING, NewPasswordArgs, OutputArgs, PasswordArgs,
    ProgressHow, RepositoryArgs, ToPasswordArgs,
};
pub use luks::LuksArgs;
pub use mounts::MountOptionArgs;
pub use pool::PoolArgs;
pub use retention::RetentionArgs;
pub use switches::Switch;
pub use values::{parse_format, parse_rate};
pub use verbs::{Audience, CommandLine, SharedOptions, VerbEntry, VerbGroup};
