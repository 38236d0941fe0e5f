//! Metadata contexts: the available ones, and those that a client selects.

use super::super::export::{BITMAP_CONTEXT_PREFIX, Export};
use super::option::{OptionError, Parts, option_error, reply};
use super::{Progress, ServerHandshake, ServerState};
use crate::nbd::wire::{HeaderStyle, OptionKind, OptionReplyKind};

/// Limit of queries of one option.
const QUERY_COUNT_MAX: u32 = 1000;
/// Limit of contexts that one client may select: each is a chunk in every reply to a block status query.
const SELECTED_COUNT_MAX: usize = 32;

impl ServerHandshake {
    pub(super) fn meta_context(
        &mut self,
        option: OptionKind,
        data: &[u8],
        server: ServerState<'_>,
        output: &mut Vec<u8>,
    ) -> Result<Progress, OptionError> {
        let selects = option == OptionKind::SET_META_CONTEXT;
        if selects {
            // "replaces all previously-set metadata contexts (including when this command fails)"
            self.negotiated.contexts = None;
        }
        if selects && self.negotiated.style == HeaderStyle::Simple {
            return option_error(
                OptionReplyKind::ERR_INVALID,
                "structured replies have to be agreed on first",
            );
        }
        let mut parts = Parts(data);
        let name = parts.string()?;
        let queries = queries(&mut parts)?;
        let export = self.open(name, server)?;
        let contexts = if selects {
            let selected = |context: &str| queries.contains(&context);
            export.contexts().filter(|(_, context)| selected(context)).collect()
        } else {
            matching(&export, &queries)
        };
        if selects && contexts.len() > SELECTED_COUNT_MAX {
            return option_error(OptionReplyKind::ERR_TOO_BIG, "these are too many contexts at once");
        }
        for (number, context) in &contexts {
            // "The metadata context ID in these replies is reserved and SHOULD be set to zero"
            let id = if selects { *number } else { 0 };
            let data = [&id.to_be_bytes(), context.as_bytes()].concat();
            reply(output, option, OptionReplyKind::META_CONTEXT, &data);
        }
        if selects {
            let numbers = contexts.into_iter().map(|(number, _)| number).collect();
            self.negotiated.contexts = Some((name.to_owned(), numbers));
        }
        Ok(Progress::Continue)
    }
}

fn queries<'a>(parts: &mut Parts<'a>) -> Result<Vec<&'a str>, OptionError> {
    let count = parts.u32()?;
    if count > QUERY_COUNT_MAX {
        return option_error(OptionReplyKind::ERR_TOO_BIG, "these are too many queries at once");
    }
    let queries = (0..count).map(|_| parts.string()).collect::<Result<_, _>>()?;
    if !parts.0.is_empty() {
        return option_error(OptionReplyKind::ERR_INVALID, "bytes follow the last query");
    }
    Ok(queries)
}

/// The contexts that match the queries of a list; all contexts if there are no queries.
///
/// A query with only a namespace, or only a namespace and a kind of context, matches all contexts in it. This applies
/// to lists only: in a selection an empty leaf "SHOULD NOT select any contexts".
fn matching(export: &Export, queries: &[&str]) -> Vec<(u32, String)> {
    let found = |context: &str| {
        queries.is_empty()
            || queries.iter().any(|query| {
                *query == context
                    || (matches!(*query, "base:" | "qemu:" | BITMAP_CONTEXT_PREFIX) && context.starts_with(query))
            })
    };
    export.contexts().filter(|(_, context)| found(context)).collect()
}
