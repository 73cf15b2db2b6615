//! The byte-level alphabet: one printable character for each byte, so that a vocabulary of bytes can be
//! written as text. It must not know vocabularies.
//!
//! Source: GPT-2's `bytes_to_unicode`. Printable Latin-1 stands for itself; the other 68 bytes, in order,
//! are U+0100 onwards.

/// The byte that a character of the alphabet stands for.
fn byte_of(c: char) -> Option<u8> {
    match c as u32 {
        v @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(v as u8),
        v @ 0x100..=0x120 => Some((v - 0x100) as u8),
        v @ 0x121..=0x142 => Some((v - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes of a token text. A text with any character outside the alphabet stands for itself.
pub(crate) fn to_bytes(text: &str) -> Vec<u8> {
    text.chars()
        .map(byte_of)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| text.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [0u32; 256];
        for c in (0..0x200).filter_map(char::from_u32) {
            if let Some(b) = byte_of(c) {
                seen[b as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(to_bytes("Ġhi"), b" hi");
        assert_eq!(to_bytes("Ċ"), b"\n");
        assert_eq!(to_bytes("<｜x｜>"), "<｜x｜>".as_bytes());
    }
}
