//! Colours on terminals.

use crate::args::ColorWhen;
use crate::process::environment::Environment;
use crate::process::terminal::StreamKind;

/// The role of a text, which decides its appearance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Ordinary text.
    Plain,
    /// A heading.
    Heading,
    /// Less important than the surrounding text.
    Faint,
    /// Success.
    Good,
    /// Something needs attention.
    Warning,
    /// Something failed.
    Bad,
}

/// Whether styles are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    /// As colours.
    Color,
    /// Not at all.
    Plain,
}

impl Paint {
    /// Decides for one stream: `--color always` and `never` take precedence, then NO_COLOR, then whether the stream
    /// is a terminal.
    pub fn choose(when: ColorWhen, environment: &Environment, kind: StreamKind) -> Self {
        let is_dumb = environment.get("TERM").is_some_and(|term| term == "dumb");
        let wanted = match when {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            ColorWhen::Auto => kind != StreamKind::File && environment.get("NO_COLOR").is_none() && !is_dumb,
        };
        if wanted { Self::Color } else { Self::Plain }
    }

    /// `text` in `style`.
    pub fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Plain => "",
            Style::Heading => "1",
            Style::Faint => "2",
            Style::Good => "32",
            Style::Warning => "33",
            Style::Bad => "1;31",
        };
        if self == Self::Plain || code.is_empty() || text.is_empty() {
            text.to_owned()
        } else {
            format!("\x1b[{code}m{text}\x1b[0m")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Paint, Style};
    use crate::args::ColorWhen;
    use crate::process::environment::Environment;
    use crate::process::terminal::StreamKind;

    const TERMINAL: StreamKind = StreamKind::Terminal { width: 80 };

    fn choose(when: ColorWhen, variables: &[(&str, &str)], kind: StreamKind) -> Paint {
        Paint::choose(when, &variables.iter().copied().collect::<Environment>(), kind)
    }

    #[test]
    fn colours_are_for_terminals_unless_switched_off() {
        assert_eq!(choose(ColorWhen::Auto, &[], TERMINAL), Paint::Color);
        assert_eq!(choose(ColorWhen::Auto, &[], StreamKind::File), Paint::Plain);
        assert_eq!(choose(ColorWhen::Auto, &[("NO_COLOR", "1")], TERMINAL), Paint::Plain);
        assert_eq!(choose(ColorWhen::Auto, &[("NO_COLOR", "")], TERMINAL), Paint::Color);
        assert_eq!(choose(ColorWhen::Auto, &[("TERM", "dumb")], TERMINAL), Paint::Plain);
        assert_eq!(
            choose(ColorWhen::Always, &[("NO_COLOR", "1")], StreamKind::File),
            Paint::Color
        );
        assert_eq!(choose(ColorWhen::Never, &[], TERMINAL), Paint::Plain);
    }

    #[test]
    fn plain_paint_adds_nothing() {
        assert_eq!(Paint::Color.paint(Style::Bad, "x"), "\x1b[1;31mx\x1b[0m");
        assert_eq!(Paint::Color.paint(Style::Plain, "x"), "x");
        assert_eq!(Paint::Plain.paint(Style::Bad, "x"), "x");
    }
}
