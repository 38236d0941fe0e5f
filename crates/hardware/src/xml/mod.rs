//! XML: read within bounds, changed by ranges, and written by construction.
//!
//! Nothing outside of this module writes a tag or escapes a value: it builds an [`Element`], or has [`Edits`] change a text.

mod edits;
mod element;
mod escape;
mod read;

pub use edits::Edits;
pub use element::{Element, Quote};
pub(crate) use escape::is_representable;
pub(crate) use read::{attribute, child, children, named, parse, text};
