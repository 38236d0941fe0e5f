//! Text output, collected line by line and printed at once.

use super::{Paint, Style, Table, printable};

/// The text form of a report.
///
/// All text is passed through [`printable`], so that verbs need not sanitize names.
#[derive(Debug)]
pub struct Page {
    width: Option<usize>,
    paint: Paint,
    text: String,
}

impl Page {
    /// An empty page; `width` is that of the terminal, `None` for unlimited lines.
    pub fn new(width: Option<usize>, paint: Paint) -> Self {
        Self {
            width,
            paint,
            text: String::new(),
        }
    }

    /// The width of the terminal; `None` for unlimited lines.
    pub fn width(&self) -> Option<usize> {
        self.width
    }

    /// A line of ordinary text.
    pub fn line(&mut self, text: &str) {
        self.styled(Style::Plain, text);
    }

    /// A line in one style.
    pub fn styled(&mut self, style: Style, text: &str) {
        self.text.push_str(&self.paint.paint(style, &printable(text)));
        self.text.push('\n');
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.text.push('\n');
    }

    /// Names with their values, aligned.
    pub fn fields(&mut self, fields: &[(&str, String)]) {
        let width = fields
            .iter()
            .map(|(name, _)| name.chars().count())
            .max()
            .unwrap_or_default();
        for (name, value) in fields {
            let name = self.paint.paint(
                Style::Faint,
                &format!("{:<width$}", format!("{name}:"), width = width + 1),
            );
            self.text.push_str("  ");
            self.text.push_str(&name);
            self.text.push_str("  ");
            self.text.push_str(&printable(value));
            self.text.push('\n');
        }
    }

    /// A table, at most as wide as the terminal.
    pub fn table(&mut self, table: &Table) {
        self.text.push_str(&table.render(self.width, self.paint));
    }

    /// The complete text.
    pub fn into_text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::Page;
    use crate::output::{Paint, Style};

    #[test]
    fn values_stand_below_one_another_and_names_cannot_break_the_page() {
        let mut page = Page::new(None, Paint::Plain);
        page.styled(Style::Heading, "disk");
        page.fields(&[("size", "1.5 GiB".to_owned()), ("name", "a\nb\u{1b}c".to_owned())]);
        page.gap();
        page.line("end\r");
        assert_eq!(
            page.into_text(),
            "disk\n  size:  1.5 GiB\n  name:  a\\nb\\u{1b}c\n\nend\\r\n"
        );
    }
}
