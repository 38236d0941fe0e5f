//! Letters of short names: code page 437, which DOS, Windows and Linux use by default.

const UPPER_HALF: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀\
αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";

/// The letter of a byte.
pub(super) fn letter_of(byte: u8) -> char {
    match byte.checked_sub(0x80) {
        None => char::from(byte),
        Some(index) => UPPER_HALF
            .chars()
            .nth(usize::from(index))
            .unwrap_or(char::REPLACEMENT_CHARACTER),
    }
}

#[cfg(test)]
mod tests {
    use super::{UPPER_HALF, letter_of};

    #[test]
    fn the_table_is_complete() {
        assert_eq!(UPPER_HALF.chars().count(), 128);
        assert_eq!((letter_of(0x84), letter_of(0xe1), letter_of(b'A')), ('ä', 'ß', 'A'));
    }
}
