//! The definition of a verb (arguments, examples, action), and the tables of verbs.

use crate::args::{Audience, Example, SharedOptions, VerbEntry};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// The arguments of a verb and its action.
pub(crate) trait Verb: clap::Args {
    /// Examples for its help and manual page.
    const EXAMPLES: &'static [Example];
    /// Options that all verbs accept but that have no effect on this one: its help omits them.
    const UNUSED: &'static [SharedOptions] = &[];
    /// The verbs below it.
    const BELOW: &'static [VerbEntry] = &[];

    /// Runs the verb.
    fn run(&self, context: &Context) -> Result<Exit, Error>;
}

/// A table of verbs, created by [`verbs`].
pub(crate) trait VerbSet: clap::Subcommand {
    /// The rows, in the order of the help.
    const TABLE: &'static [VerbEntry];

    /// Runs the selected verb.
    fn run(&self, context: &Context) -> Result<Exit, Error>;
}

/// The table row of a verb.
pub(crate) const fn entry<V: Verb>(name: &'static str) -> VerbEntry {
    VerbEntry {
        name,
        examples: V::EXAMPLES,
        unused: V::UNUSED,
        below: V::BELOW,
        audience: Audience::People,
    }
}

/// Defines a table of verbs: description, name and arguments of each. Verbs in `internal` are started by the program
/// itself, and are hidden from help, manual and completion.
macro_rules! verbs {
    (
        $vis:vis enum $set:ident {
            $( $(#[$about:meta])* $name:literal => $variant:ident($args:ty), )+
        }
        $( internal { $( $(#[$hidden_about:meta])* $hidden_name:literal => $hidden:ident($hidden_args:ty), )+ } )?
    ) => {
        #[derive(Debug, clap::Subcommand)]
        $vis enum $set {
            $( $(#[$about])* #[command(name = $name)] $variant(Box<$args>), )+
            $( $( $(#[$hidden_about])* #[command(name = $hidden_name, hide = true)] $hidden(Box<$hidden_args>), )+ )?
        }

        impl $crate::commands::verb::VerbSet for $set {
            const TABLE: &'static [$crate::args::VerbEntry] = &[
                $( $crate::commands::verb::entry::<$args>($name), )+
                $( $( $crate::commands::verb::entry::<$hidden_args>($hidden_name).internal(), )+ )?
            ];

            fn run(
                &self,
                context: &$crate::context::Context,
            ) -> Result<$crate::exit::Exit, $crate::errors::Error> {
                use $crate::commands::verb::Verb as _;
                match self {
                    $( Self::$variant(args) => args.run(context), )+
                    $( $( Self::$hidden(args) => args.run(context), )+ )?
                }
            }
        }
    };
}

/// Groups all verbs: the heading of each group in the help, and its table.
macro_rules! groups {
    ( $( $title:literal => $variant:ident($set:ty), )+ ) => {
        /// All verbs.
        #[derive(Debug, clap::Subcommand)]
        pub(crate) enum AnyVerb {
            $( #[command(flatten)] $variant($set), )+
        }

        /// The groups, in the order of the help.
        const GROUPS: &[$crate::args::VerbGroup] = &[
            $( $crate::args::VerbGroup { title: $title, verbs: <$set>::TABLE }, )+
        ];

        impl AnyVerb {
            /// Runs the selected verb.
            pub(crate) fn run(
                &self,
                context: &$crate::context::Context,
            ) -> Result<$crate::exit::Exit, $crate::errors::Error> {
                match self {
                    $( Self::$variant(verbs) => verbs.run(context), )+
                }
            }
        }
    };
}

pub(crate) use {groups, verbs};
