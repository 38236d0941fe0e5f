//! Tables with aligned columns.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::{Paint, Style, printable};

/// Characters between two columns.
const GAP: &str = "  ";
/// A shortened column keeps at least this many characters, including the ellipsis.
const WIDTH_MIN: usize = 8;

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A column of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    name: &'static str,
    align: Align,
    gives_way: bool,
}

impl Column {
    /// Text that is always shown in full: ids, times.
    pub const fn text(name: &'static str) -> Self {
        Self {
            name,
            align: Align::Left,
            gives_way: false,
        }
    }

    /// Text that is shortened if the terminal is too narrow: names, tags, paths.
    pub const fn long_text(name: &'static str) -> Self {
        Self {
            name,
            align: Align::Left,
            gives_way: true,
        }
    }

    /// Numbers and sizes.
    pub const fn number(name: &'static str) -> Self {
        Self {
            name,
            align: Align::Right,
            gives_way: false,
        }
    }
}

/// Rows of cells below column names.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<(Style, String)>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: impl Into<Vec<Column>>) -> Self {
        Self {
            columns: columns.into(),
            rows: Vec::new(),
        }
    }

    /// Appends a row of ordinary text, with one cell per column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.styled_row(cells.into_iter().map(|cell| (Style::Plain, cell)));
    }

    /// Appends a row, with one cell per column.
    pub fn styled_row(&mut self, cells: impl IntoIterator<Item = (Style, String)>) {
        let row: Vec<_> = cells
            .into_iter()
            .map(|(style, cell)| (style, printable(&cell).into_owned()))
            .collect();
        assert_eq!(row.len(), self.columns.len(), "a row has one cell per column");
        self.rows.push(row);
    }

    /// The table as lines.
    ///
    /// If `width_max` is too narrow, columns of long text are shortened, the widest first. If that is not enough, the
    /// lines are longer than the terminal, since a truncated number is worse than a wrapped line.
    pub fn render(&self, width_max: Option<usize>, paint: Paint) -> String {
        let widths = self.widths(width_max);
        let header = self
            .columns
            .iter()
            .map(|column| (Style::Heading, column.name.to_owned()))
            .collect::<Vec<_>>();
        let mut text = String::new();
        for row in std::iter::once(&header).chain(&self.rows) {
            text.push_str(&self.render_row(row, &widths, paint));
        }
        text
    }

    fn render_row(&self, row: &[(Style, String)], widths: &[usize], paint: Paint) -> String {
        let mut line = String::new();
        let mut spaces_owed = 0;
        for ((column, (style, cell)), &width) in self.columns.iter().zip(row).zip(widths) {
            let cell = cut(cell, width);
            let padding = width - cell.width().min(width);
            let (before, after) = match column.align {
                Align::Left => (0, padding),
                Align::Right => (padding, 0),
            };
            // Spaces are written only before text, so that no line ends in spaces.
            if cell.is_empty() {
                spaces_owed += width + GAP.len();
            } else {
                line.push_str(&" ".repeat(spaces_owed + before));
                line.push_str(&paint.paint(*style, &cell));
                spaces_owed = after + GAP.len();
            }
        }
        line.push('\n');
        line
    }

    fn widths(&self, width_max: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|column| column.name.width()).collect();
        for row in &self.rows {
            for (width, (_, cell)) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.width());
            }
        }
        let gaps = GAP.len() * self.columns.len().saturating_sub(1);
        let Some(width_max) = width_max else { return widths };
        while widths.iter().sum::<usize>() + gaps > width_max {
            let widest = widths
                .iter_mut()
                .zip(&self.columns)
                .filter(|(width, column)| column.gives_way && **width > WIDTH_MIN)
                .max_by_key(|(width, _)| **width);
            match widest {
                Some((width, _)) => *width -= 1,
                None => break,
            }
        }
        widths
    }
}

/// `text` in at most `width` characters; an ellipsis replaces the rest.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut kept_width = 0;
    for character in text.chars() {
        let next = kept_width + character.width().unwrap_or_default();
        if next + 1 > width {
            break;
        }
        kept.push(character);
        kept_width = next;
    }
    if width > 0 {
        kept.push('…');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::{Column, Table, cut};
    use crate::output::{Paint, Style};

    fn table() -> Table {
        let mut table = Table::new([
            Column::text("ID"),
            Column::long_text("MACHINE"),
            Column::number("SIZE"),
            Column::text("TAGS"),
        ]);
        table.row(["3fa2", "web1", "1.5 GiB", ""].map(str::to_owned));
        table.row(["beef", "データベース", "100 B", "daily"].map(str::to_owned));
        table
    }

    #[test]
    fn columns_line_up_also_with_wide_characters() {
        assert_eq!(
            table().render(None, Paint::Plain),
            "ID    MACHINE          SIZE  TAGS\n\
             3fa2  web1          1.5 GiB\n\
             beef  データベース    100 B  daily\n"
        );
    }

    #[test]
    fn a_narrow_terminal_cuts_only_what_may_be_cut() {
        assert_eq!(
            table().render(Some(31), Paint::Plain),
            "ID    MACHINE       SIZE  TAGS\n\
             3fa2  web1       1.5 GiB\n\
             beef  データベ…    100 B  daily\n"
        );
        let narrowest = table().render(Some(1), Paint::Plain);
        assert!(narrowest.contains("1.5 GiB"), "{narrowest}");
    }

    #[test]
    fn colours_do_not_move_columns() {
        let mut table = Table::new([Column::text("A"), Column::number("B")]);
        table.styled_row([(Style::Bad, "x".to_owned()), (Style::Plain, "1".to_owned())]);
        assert_eq!(
            table.render(Some(80), Paint::Color),
            "\x1b[1mA\x1b[0m  \x1b[1mB\x1b[0m\n\x1b[1;31mx\x1b[0m  1\n"
        );
    }

    #[test]
    fn a_cell_stays_on_its_line() {
        let mut table = Table::new([Column::text("A")]);
        table.row(["x\ny\u{1b}[0m".to_owned()]);
        assert_eq!(table.render(None, Paint::Plain), "A\nx\\ny\\u{1b}[0m\n");
    }

    #[test]
    fn cutting_counts_columns_not_characters() {
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdef", 5), "abcd…");
        assert_eq!(cut("データ", 5), "デー…");
        assert_eq!(cut("データ", 4), "デ…");
        assert_eq!(cut("a", 0), "");
    }
}
