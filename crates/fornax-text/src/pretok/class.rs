//! Text as characters with their classes, the alphabet that splitting rules are written in. It must not
//! know the rules.

use unicode_general_category::{GeneralCategory as G, get_general_category};

/// Letter (`\p{L}`).
pub(super) const L: u16 = 1;
/// Uppercase or titlecase letter (`\p{Lu}`, `\p{Lt}`).
pub(super) const UPPER: u16 = 2;
/// Lowercase letter (`\p{Ll}`).
pub(super) const LOWER: u16 = 4;
/// Letter without case (`\p{Lm}`, `\p{Lo}`).
pub(super) const CASELESS: u16 = 8;
/// Mark (`\p{M}`).
pub(super) const M: u16 = 16;
/// Number (`\p{N}`).
pub(super) const N: u16 = 32;
/// Punctuation (`\p{P}`).
pub(super) const P: u16 = 64;
/// Symbol (`\p{S}`).
pub(super) const S: u16 = 128;
/// White space (`\s`).
pub(super) const SPACE: u16 = 256;
/// Carriage return or line feed.
pub(super) const NEWLINE: u16 = 512;

/// One character, or one byte that is not part of any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ch {
    /// The character; U+FFFD (a symbol) for a stray byte.
    pub(super) c: char,
    class: u16,
    /// Bytes in the text.
    pub(super) len: u8,
}

impl Ch {
    /// Whether the character is of any of the classes.
    pub(super) fn is(self, classes: u16) -> bool {
        self.class & classes != 0
    }
}

fn class_of(c: char) -> u16 {
    let general = match get_general_category(c) {
        G::UppercaseLetter | G::TitlecaseLetter => L | UPPER,
        G::LowercaseLetter => L | LOWER,
        G::ModifierLetter | G::OtherLetter => L | CASELESS,
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => M,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => N,
        G::ConnectorPunctuation
        | G::DashPunctuation
        | G::OpenPunctuation
        | G::ClosePunctuation
        | G::InitialPunctuation
        | G::FinalPunctuation
        | G::OtherPunctuation => P,
        G::MathSymbol | G::CurrencySymbol | G::ModifierSymbol | G::OtherSymbol => S,
        _ => 0,
    };
    let space = if c.is_whitespace() { SPACE } else { 0 };
    let newline = if matches!(c, '\r' | '\n') { NEWLINE } else { 0 };
    general | space | newline
}

/// The classes of `text`. Bytes that are not UTF-8 become one symbol each.
pub(crate) fn classify(text: &[u8], out: &mut Vec<Ch>) {
    out.clear();
    out.reserve(text.len());
    for chunk in text.utf8_chunks() {
        out.extend(chunk.valid().chars().map(|c| Ch {
            c,
            class: class_of(c),
            len: c.len_utf8() as u8,
        }));
        let stray = Ch { c: char::REPLACEMENT_CHARACTER, class: S, len: 1 };
        out.extend(chunk.invalid().iter().map(|_| stray));
    }
}

/// Bytes of `text` that the characters were.
pub(crate) fn byte_len(chars: &[Ch]) -> usize {
    chars.iter().map(|c| c.len as usize).sum()
}
