//! Reads XML within limits, edits it by ranges, and writes it.
//!
//! Only this module writes tags and escapes values. Other modules build an [`Element`], or change a text with
//! [`Edits`].

mod edits;
mod element;
mod escape;
mod read;

pub use edits::Edits;
pub use element::{Element, Quote};
pub(crate) use escape::is_representable;
pub(crate) use read::{attribute, child, children, named, parse, text};
