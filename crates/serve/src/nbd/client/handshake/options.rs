//! The options that the client sends.

use super::{ClientHandshake, ExpectedInput, Goal};
use crate::nbd::wire::{InfoKind, OPTION_MAGIC, OptionKind, STRING_BYTES_MAX};

impl ClientHandshake {
    /// Sends the first option of a fixed newstyle handshake.
    pub(super) fn send_first_option(&mut self) {
        match self.goal {
            Goal::Transmit { .. } => self.send_option(OptionKind::EXTENDED_HEADERS, &[]),
            Goal::List => self.send_option(OptionKind::LIST, &[]),
            Goal::Describe => self.send_option(OptionKind::STRUCTURED_REPLY, &[]),
        }
    }

    pub(super) fn send_option(&mut self, option: OptionKind, data: &[u8]) {
        self.output.extend(OPTION_MAGIC.to_be_bytes());
        self.output.extend(option.0.to_be_bytes());
        let length = u32::try_from(data.len()).expect("options are short");
        self.output.extend(length.to_be_bytes());
        self.output.extend(data);
        self.option = option;
        self.reply_count = 0;
        self.text_bytes = 0;
        self.expected = ExpectedInput::ReplyHeader;
    }

    pub(super) fn send_export_name(&mut self) {
        let name = self.export.clone();
        self.send_option(OptionKind::EXPORT_NAME, name.as_bytes());
        self.expected = ExpectedInput::ExportReply;
    }

    pub(super) fn send_context_queries(&mut self) {
        let queries: &[String] = match &self.goal {
            Goal::Transmit { contexts } if contexts.is_empty() => return self.send_go_or_info(),
            Goal::Transmit { contexts } => contexts,
            Goal::List | Goal::Describe => &[],
        };
        let option = match self.goal {
            Goal::Transmit { .. } => OptionKind::SET_META_CONTEXT,
            Goal::List | Goal::Describe => OptionKind::LIST_META_CONTEXT,
        };
        let mut data = Vec::new();
        push_string(&mut data, &self.export);
        data.extend(u32::try_from(queries.len()).expect("a few contexts").to_be_bytes());
        for query in queries {
            push_string(&mut data, query);
        }
        self.send_option(option, &data);
    }

    pub(super) fn send_go_or_info(&mut self) {
        const REQUESTED: [InfoKind; 3] = [InfoKind::NAME, InfoKind::DESCRIPTION, InfoKind::BLOCK_SIZE];
        let mut data = Vec::new();
        push_string(&mut data, &self.export);
        data.extend(u16::try_from(REQUESTED.len()).expect("a few").to_be_bytes());
        for kind in REQUESTED {
            data.extend(kind.0.to_be_bytes());
        }
        let option = match self.goal {
            Goal::Transmit { .. } => OptionKind::GO,
            Goal::List | Goal::Describe => OptionKind::INFO,
        };
        self.send_option(option, &data);
    }

    /// Ends the handshake without waiting for the server's answer.
    pub(super) fn send_abort(&mut self) {
        self.send_option(OptionKind::ABORT, &[]);
        self.expected = ExpectedInput::Nothing;
    }
}

fn push_string(data: &mut Vec<u8>, string: &str) {
    debug_assert!(string.len() <= STRING_BYTES_MAX, "names are checked where they come in");
    let length = u32::try_from(string.len()).expect("names are checked where they come in");
    data.extend(length.to_be_bytes());
    data.extend(string.as_bytes());
}
