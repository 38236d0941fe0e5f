//! The stages of a login, and the transitions between them.

use super::super::pdu::FLAG_FINAL;

/// A stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// No request came yet: the first one may begin with either stage.
    Start,
    Security,
    Operational,
    FullFeature,
}

impl Stage {
    /// The number of the stage in requests and responses.
    pub(super) fn bits(self) -> u8 {
        match self {
            Self::Start | Self::Security => 0,
            Self::Operational => 1,
            Self::FullFeature => 3,
        }
    }

    fn of(bits: u8) -> Option<Self> {
        match bits & 3 {
            0 => Some(Self::Security),
            1 => Some(Self::Operational),
            3 => Some(Self::FullFeature),
            _ => None,
        }
    }
}

/// The stage of a request, and the stage that the initiator wants to enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transition {
    pub(super) current: Stage,
    pub(super) next: Option<Stage>,
}

impl Transition {
    /// Decodes the flags of a request; `None` if the request is not allowed now.
    pub(super) fn of(flags: u8, now: Stage) -> Option<Self> {
        let current = Stage::of(flags >> 2)?;
        let is_current = match now {
            Stage::Start => current != Stage::FullFeature,
            Stage::Security | Stage::Operational => current == now,
            Stage::FullFeature => false,
        };
        if !is_current {
            return None;
        }
        let next = if flags & FLAG_FINAL == 0 {
            None
        } else {
            let next = Stage::of(flags)?;
            if next.bits() <= current.bits() {
                return None;
            }
            Some(next)
        };
        Some(Self { current, next })
    }
}

#[cfg(test)]
mod tests {
    use super::{Stage, Transition};

    #[test]
    fn only_forward_transitions_are_allowed() {
        let next = |flags, now| Transition::of(flags, now).map(|transition| transition.next);
        assert_eq!(next(0x00, Stage::Start), Some(None));
        assert_eq!(next(0x81, Stage::Start), Some(Some(Stage::Operational)));
        assert_eq!(next(0x83, Stage::Security), Some(Some(Stage::FullFeature)));
        assert_eq!(next(0x87, Stage::Operational), Some(Some(Stage::FullFeature)));
        for (flags, now) in [
            (0x80, Stage::Security),
            (0x84, Stage::Operational),
            (0x85, Stage::Operational),
            (0x82, Stage::Security),
            (0x08, Stage::Start),
            (0x8f, Stage::Start),
            (0x00, Stage::Operational),
            (0x04, Stage::Security),
            (0x87, Stage::FullFeature),
        ] {
            assert_eq!(next(flags, now), None, "{flags:#x} in {now:?}");
        }
    }
}
