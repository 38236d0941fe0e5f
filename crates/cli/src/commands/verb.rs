//! What makes a verb: its arguments, its examples, and what is done with them; and the tables of verbs.

use crate::args::{Audience, Example, SharedOptions, VerbEntry};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// The arguments of a verb, and what is done with them.
pub(crate) trait Verb: clap::Args {
    /// Ways to use it, for its help and its manual.
    const EXAMPLES: &'static [Example];
    /// Options that all verbs accept, and that do nothing here: its help leaves them out.
    const UNUSED: &'static [SharedOptions] = &[];
    /// The verbs below it.
    const BELOW: &'static [VerbEntry] = &[];

    /// Does it.
    fn run(&self, context: &Context) -> Result<Exit, Error>;
}

/// A table of verbs, which [`verbs`] makes.
pub(crate) trait VerbSet: clap::Subcommand {
    /// Its rows, in the order of the help.
    const TABLE: &'static [VerbEntry];

    /// Does what the verb says that was chosen.
    fn run(&self, context: &Context) -> Result<Exit, Error>;
}

/// The row of a verb.
pub(crate) const fn entry<V: Verb>(name: &'static str) -> VerbEntry {
    VerbEntry {
        name,
        examples: V::EXAMPLES,
        unused: V::UNUSED,
        below: V::BELOW,
        audience: Audience::People,
    }
}

/// A table of verbs: what each is for, its name, and its arguments. Verbs in `internal` are started by the program itself, and appear in no
/// help, no manual and no completion.
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

/// All verbs, in groups: the heading of each group in the help, and its table.
macro_rules! groups {
    ( $( $title:literal => $variant:ident($set:ty), )+ ) => {
        /// All verbs.
        #[derive(Debug, clap::Subcommand)]
        pub(crate) enum AnyVerb {
            $( #[command(flatten)] $variant($set), )+
        }

        /// Their groups, in the order of the help.
        const GROUPS: &[$crate::args::VerbGroup] = &[
            $( $crate::args::VerbGroup { title: $title, verbs: <$set>::TABLE }, )+
        ];

        impl AnyVerb {
            /// Does what the verb says that was chosen.
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
