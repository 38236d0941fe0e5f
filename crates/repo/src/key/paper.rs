//! The master secret as text, to be printed and typed.
//!
//! ```text
//! HF1-XXXXc-XXXXc-...-XXXXc        14 groups
//! ```
//!
//! `HF`, the version symbol `1`, then groups of 5 symbols of Crockford's base 32 (no I, L, O, U). The first 13 groups carry the 256 bits
//! of the secret, first bit first, and 4 zero bits; the last carries the first 20 bits of a hash over version and secret. The fifth symbol
//! of each group is its check symbol: the sum over GF(32) (polynomial x⁵+x²+1) of 2ⁱ times symbol i, for the four symbols,
//! i = 1 to 4, and of 2⁵ times the number of the group. Any single wrong symbol, any two neighbours exchanged and any two
//! groups exchanged change it, so the check finds the group with the typing error. The hash detects errors that the check does not.

use std::fmt;

use zeroize::Zeroizing;

use super::secret::SECRET_BYTES;
use super::{KeyError, MasterSecret, Result};

const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
/// The version and its symbol.
const VERSION: u8 = 1;
const GROUP_SYMBOLS: usize = 4;
const GROUP_LENGTH: usize = GROUP_SYMBOLS + 1;
/// 13 groups of 20 bits hold 256 bits and 4 zeroes.
const SECRET_GROUPS: usize = 13;
const GROUPS: usize = SECRET_GROUPS + 1;
const HASH_CONTEXT: &str = "holdfast 2026 paper key v1 checksum";
/// Longer text is rejected.
const TEXT_BYTES_MAX: usize = 1024;

/// The master secret in a printable form: it opens the repository without any slot.
pub struct PaperKey(Zeroizing<String>);

impl PaperKey {
    /// The paper key of a secret.
    pub fn encode(master: &MasterSecret) -> Self {
        let mut bits = Zeroizing::new([0; GROUPS * GROUP_SYMBOLS]);
        split(master.as_bytes(), &mut bits[..SECRET_GROUPS * GROUP_SYMBOLS]);
        split(&checksum(master.as_bytes()), &mut bits[SECRET_GROUPS * GROUP_SYMBOLS..]);
        // Allocated in full at once, so that no copy remains in memory when it grows.
        let mut text = Zeroizing::new(String::with_capacity(3 + GROUPS * (GROUP_LENGTH + 1)));
        text.push_str("HF");
        text.push(ALPHABET[usize::from(VERSION)].into());
        for (number, group) in (0..).zip(bits.chunks(GROUP_SYMBOLS)) {
            text.push('-');
            for symbol in group.iter().chain([&check_symbol(number, group)]) {
                text.push(ALPHABET[usize::from(*symbol)].into());
            }
        }
        Self(text)
    }

    /// The text in one line; it may be broken at each dash.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Decodes the secret from typed text: small letters, other or missing spaces and dashes, O for 0, and I and L
    /// for 1 are accepted.
    pub fn decode(text: &str) -> Result<MasterSecret> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(KeyError::NoPaperKey {
                detail: "it is far too long",
            });
        }
        let typed = TypedSymbols::new(text)?;
        let mut symbols = Zeroizing::new([0; GROUPS * GROUP_SYMBOLS]);
        let groups = typed
            .symbols
            .chunks(GROUP_LENGTH)
            .zip(symbols.chunks_mut(GROUP_SYMBOLS));
        for (number, (group, symbols)) in (0..).zip(groups) {
            let (check, group) = group.split_last().expect("groups are whole");
            if check_symbol(number, group) != *check {
                return Err(KeyError::PaperKeyGroup {
                    group: usize::from(number) + 1,
                });
            }
            symbols.copy_from_slice(group);
        }
        let (secret_symbols, hash_symbols) = symbols.split_at(SECRET_GROUPS * GROUP_SYMBOLS);
        let mut secret = Zeroizing::new([0; SECRET_BYTES]);
        let mut hash = [0; 2];
        let rest = join(secret_symbols, &mut *secret);
        let hash_rest = join(hash_symbols, &mut hash);
        let expected = checksum(&secret);
        if rest != 0 || hash != expected[..2] || hash_rest != expected[2] >> 4 {
            return Err(KeyError::PaperKeyMixed);
        }
        Ok(MasterSecret::from_bytes(*secret))
    }
}

impl fmt::Debug for PaperKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PaperKey(..)")
    }
}

/// The symbols typed after `HF1`.
struct TypedSymbols {
    symbols: Zeroizing<Vec<u8>>,
}

impl TypedSymbols {
    fn new(text: &str) -> Result<Self> {
        let is_separator =
            |character: char| character.is_whitespace() || matches!(character, '-' | '\u{2010}'..='\u{2015}');
        let mut characters = text.chars().filter(|character| !is_separator(*character));
        let start = [characters.next(), characters.next()].map(|first| first.map(|first| first.to_ascii_uppercase()));
        if start != [Some('H'), Some('F')] {
            return Err(KeyError::NoPaperKey {
                detail: "it does not start with HF1",
            });
        }
        match characters.next().map(|version| (version, symbol(version))) {
            Some((_, Some(VERSION))) => {}
            version => {
                return Err(KeyError::PaperKeyVersion {
                    version: version.map_or(' ', |(version, _)| version),
                });
            }
        }
        let mut symbols = Zeroizing::new(Vec::with_capacity(text.len()));
        for character in characters {
            let group = symbols.len() / GROUP_LENGTH + 1;
            symbols.push(symbol(character).ok_or(KeyError::PaperKeyCharacter { group, character })?);
        }
        if symbols.len() == GROUPS * GROUP_LENGTH {
            return Ok(Self { symbols });
        }
        // If the groups were typed separately, the group with missing characters can be reported.
        let groups = || text.split(is_separator).filter(|group| !group.is_empty()).skip(1);
        let odd = (1..)
            .zip(groups())
            .find(|(_, group)| group.chars().count() != GROUP_LENGTH);
        Err(match odd {
            Some((group, typed)) if groups().count() == GROUPS => KeyError::PaperKeyGroupLength {
                group,
                actual: typed.chars().count(),
            },
            _ => KeyError::PaperKeyLength {
                expected: GROUPS * GROUP_LENGTH,
                actual: symbols.len(),
            },
        })
    }
}

/// The symbol that a typed character stands for.
fn symbol(character: char) -> Option<u8> {
    let character = match character.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        other => other,
    };
    let at = ALPHABET.iter().position(|known| char::from(*known) == character)?;
    u8::try_from(at).ok()
}

/// The check symbol of the group `number`, counted from 0.
fn check_symbol(number: u8, group: &[u8]) -> u8 {
    // The sum by Horner's rule, the highest power first.
    let terms = [number].into_iter().chain(group.iter().rev().copied());
    terms.fold(0, |sum, term| double(sum ^ term))
}

/// Twice `element` in GF(32).
fn double(element: u8) -> u8 {
    let shifted = element << 1;
    shifted ^ if shifted & 0x20 == 0 { 0 } else { 0x25 }
}

/// The first bits of a hash over version and secret.
fn checksum(secret: &[u8; SECRET_BYTES]) -> [u8; 3] {
    let mut hasher = blake3::Hasher::new_derive_key(HASH_CONTEXT);
    hasher.update(&[VERSION]);
    hasher.update(secret);
    *hasher.finalize().as_bytes().first_chunk().expect("a hash is longer")
}

/// Cuts the bits of `bytes`, and zeroes after them, into symbols of 5 bits.
fn split(bytes: &[u8], symbols: &mut [u8]) {
    for (at, symbol) in symbols.iter_mut().enumerate() {
        let bit = |bit: usize| bytes.get(bit / 8).map_or(0, |byte| (byte >> (7 - bit % 8)) & 1);
        *symbol = (5 * at..5 * at + 5).fold(0, |symbol, at| (symbol << 1) | bit(at));
    }
}

/// Puts symbols of 5 bits together to bytes, and returns the bits after them, fewer than 8.
fn join(symbols: &[u8], bytes: &mut [u8]) -> u8 {
    let bit = |bit: usize| (symbols[bit / 5] >> (4 - bit % 5)) & 1;
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (8 * at..8 * at + 8).fold(0, |byte, at| (byte << 1) | bit(at));
    }
    (8 * bytes.len()..5 * symbols.len()).fold(0, |rest, at| (rest << 1) | bit(at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, prop_assume, proptest};

    use super::*;

    fn secret(seed: u8) -> MasterSecret {
        MasterSecret::from_bytes(std::array::from_fn(|at| {
            u8::try_from(at).unwrap().wrapping_mul(37).wrapping_add(seed)
        }))
    }

    fn text(seed: u8) -> String {
        PaperKey::encode(&secret(seed)).text().to_owned()
    }

    /// Paper keys must remain valid for decades.
    #[test]
    fn paper_keys_never_change() {
        let expected = include_str!("../../tests/fixtures/keys/paper-v1.txt").trim_end();
        assert_eq!(text(5), expected);
        assert_eq!(PaperKey::decode(expected).unwrap(), secret(5));
    }

    #[test]
    fn the_way_of_typing_does_not_matter() {
        let text = text(5);
        assert!(
            text.contains('0') && text.contains('1'),
            "the example has what is mistaken: {text}"
        );
        for typed in [
            text.to_lowercase(),
            text.replace('-', " "),
            text.replace('-', ""),
            text.replace('-', "\n"),
            format!("  {text}\r\n"),
            text.replace('0', "O").replace('1', "l"),
            text.replace('0', "o").replace('1', "I"),
            text.replace('-', " \u{2013} "),
        ] {
            assert_eq!(PaperKey::decode(&typed).unwrap(), secret(5), "{typed}");
        }
    }

    #[test]
    fn a_single_wrong_character_is_found_and_its_group_named() {
        let text = text(5);
        for at in text
            .char_indices()
            .skip(4)
            .filter(|(_, character)| *character != '-')
            .map(|(at, _)| at)
        {
            for other in ALPHABET {
                let mut typed = text.clone().into_bytes();
                if typed[at] == *other {
                    continue;
                }
                typed[at] = *other;
                let error = PaperKey::decode(str::from_utf8(&typed).unwrap()).unwrap_err();
                let expected = (at - 4) / 6 + 1;
                assert!(
                    matches!(error, KeyError::PaperKeyGroup { group } if group == expected),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn characters_and_groups_in_the_wrong_place_are_found() {
        let text = text(5);
        let groups: Vec<&str> = text.split('-').collect();
        for first in 1..groups.len() {
            for second in first + 1..groups.len() {
                let mut typed = groups.clone();
                typed.swap(first, second);
                let error = PaperKey::decode(&typed.join("-")).unwrap_err();
                assert!(
                    matches!(error, KeyError::PaperKeyGroup { group } if group == first),
                    "{error}"
                );
            }
        }
        let characters: Vec<char> = text.chars().collect();
        for at in 4..characters.len() - 1 {
            let mut typed = characters.clone();
            typed.swap(at, at + 1);
            let is_same =
                typed == characters || typed.contains(&'-') && [at, at + 1].iter().any(|at| characters[*at] == '-');
            let typed: String = typed.into_iter().collect();
            assert_eq!(PaperKey::decode(&typed).is_ok(), is_same, "{typed}");
        }
    }

    #[test]
    fn errors_name_the_group_length_character_or_version() {
        let text = text(5);
        let without = |at: usize| [&text[..at], &text[at + 1..]].concat();
        assert!(matches!(
            PaperKey::decode(&without(4 + 6 * 2)),
            Err(KeyError::PaperKeyGroupLength { group: 3, actual: 4 })
        ));
        assert!(matches!(
            PaperKey::decode(&without(4 + 6 * 2).replace('-', "")),
            Err(KeyError::PaperKeyLength {
                expected: 70,
                actual: 69
            })
        ));
        assert!(matches!(
            PaperKey::decode(&text[..text.len() - 6]),
            Err(KeyError::PaperKeyLength { actual: 65, .. })
        ));
        let foreign = format!("{}U{}", &text[..4 + 6], &text[4 + 7..]);
        assert!(matches!(
            PaperKey::decode(&foreign),
            Err(KeyError::PaperKeyCharacter {
                group: 2,
                character: 'U'
            })
        ));
        assert!(matches!(
            PaperKey::decode(&text.replace("HF1", "HF2")),
            Err(KeyError::PaperKeyVersion { version: '2' })
        ));
        for nothing in ["", "H", "HG1", "secret"] {
            assert!(
                matches!(PaperKey::decode(nothing), Err(KeyError::NoPaperKey { .. })),
                "{nothing}"
            );
        }
        assert!(PaperKey::decode("HF").is_err());
        assert!(PaperKey::decode(&"HF1".repeat(1000)).is_err());
    }

    /// Groups of two keys are valid by themselves; the overall hash detects the mixture.
    #[test]
    fn groups_of_two_keys_do_not_mix() {
        let (text, other) = (text(5), text(6));
        for at in 1..=GROUPS {
            let mut groups: Vec<&str> = text.split('-').collect();
            groups[at] = other.split('-').nth(at).unwrap();
            if groups[at] == text.split('-').nth(at).unwrap() {
                continue;
            }
            assert!(matches!(
                PaperKey::decode(&groups.join("-")),
                Err(KeyError::PaperKeyMixed)
            ));
        }
    }

    proptest! {
        #[test]
        fn every_secret_is_read_back(bytes in any::<[u8; 32]>()) {
            let master = MasterSecret::from_bytes(bytes);
            let paper = PaperKey::encode(&master);
            prop_assert_eq!(paper.text().len(), 3 + 14 * 6);
            prop_assert!(PaperKey::decode(paper.text()).unwrap() == master);
        }

        #[test]
        fn arbitrary_text_is_an_error(text in "(HF1)?[ -~]{0,90}", unicode in "(HF1)?.{0,80}") {
            prop_assert!(PaperKey::decode(&text).is_err());
            prop_assert!(PaperKey::decode(&unicode).is_err());
        }

        /// Two wrong characters may deceive the check of a group, but not that of the group and the hash.
        #[test]
        fn two_wrong_characters_are_found(a in 0..70usize, b in 0..70usize, x in 1..32u8, y in 1..32u8) {
            prop_assume!(a != b);
            let mut typed = TypedSymbols::new(&text(5)).unwrap().symbols.to_vec();
            typed[a] ^= x;
            typed[b] ^= y;
            let typed: String = typed.iter().map(|symbol| char::from(ALPHABET[usize::from(*symbol)])).collect();
            prop_assert!(PaperKey::decode(&["HF1", &typed].concat()).is_err());
        }
    }
}
