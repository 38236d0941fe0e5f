//! What is asked in a handshake, and in which words.

use super::{Goal, Handshake, Wait};
use crate::nbd::wire::{InfoKind, OPTION_MAGIC, OptionKind, STRING_BYTES_MAX};

impl Handshake {
    /// Asks for what stands first in a fixed newstyle handshake.
    pub(super) fn ask_first(&mut self) {
        match self.goal {
            Goal::Transmit { .. } => self.ask(OptionKind::EXTENDED_HEADERS, &[]),
            Goal::List => self.ask(OptionKind::LIST, &[]),
            Goal::Describe => self.ask(OptionKind::STRUCTURED_REPLY, &[]),
        }
    }

    pub(super) fn ask(&mut self, option: OptionKind, data: &[u8]) {
        self.output.extend(OPTION_MAGIC.to_be_bytes());
        self.output.extend(option.0.to_be_bytes());
        let length = u32::try_from(data.len()).expect("options are short");
        self.output.extend(length.to_be_bytes());
        self.output.extend(data);
        self.option = option;
        self.reply_count = 0;
        self.text_bytes = 0;
        self.wait = Wait::ReplyHeader;
    }

    pub(super) fn ask_for_export_name(&mut self) {
        let name = self.export.clone();
        self.ask(OptionKind::EXPORT_NAME, name.as_bytes());
        self.wait = Wait::ExportReply;
    }

    pub(super) fn ask_for_contexts(&mut self) {
        let queries: &[String] = match &self.goal {
            Goal::Transmit { contexts } if contexts.is_empty() => return self.ask_for_export(),
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
        self.ask(option, &data);
    }

    pub(super) fn ask_for_export(&mut self) {
        const ASKED: [InfoKind; 3] = [InfoKind::NAME, InfoKind::DESCRIPTION, InfoKind::BLOCK_SIZE];
        let mut data = Vec::new();
        push_string(&mut data, &self.export);
        data.extend(u16::try_from(ASKED.len()).expect("a few").to_be_bytes());
        for kind in ASKED {
            data.extend(kind.0.to_be_bytes());
        }
        let option = match self.goal {
            Goal::Transmit { .. } => OptionKind::GO,
            Goal::List | Goal::Describe => OptionKind::INFO,
        };
        self.ask(option, &data);
    }

    /// Takes leave; whether the server answers is all the same.
    pub(super) fn leave(&mut self) {
        self.ask(OptionKind::ABORT, &[]);
        self.wait = Wait::Nothing;
    }
}

fn push_string(data: &mut Vec<u8>, string: &str) {
    debug_assert!(string.len() <= STRING_BYTES_MAX, "names are checked where they come in");
    let length = u32::try_from(string.len()).expect("names are checked where they come in");
    data.extend(length.to_be_bytes());
    data.extend(string.as_bytes());
}
