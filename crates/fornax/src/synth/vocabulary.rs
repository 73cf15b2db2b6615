//! The smallest byte-level BPE vocabulary of a given size that readers of GGUF files accept.
//! The 256 bytes, pairs of printable characters with their merges, filler, and two control tokens.

use fornax_gguf::{Metadata, StrArray};

/// `tokenizer.ggml.token_type` of a normal, a control and an unused token.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// So that chats can be measured, too.
const CHAT: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant:' }}";

/// Writes a vocabulary of `size` tokens (at least 258) for the pre-tokenizer `pre`.
pub(crate) fn describe(metadata: &mut Metadata, size: u32, pre: &str) {
    let bytes: Vec<char> = (0..=255).map(byte_char).collect();
    let mut tokens: Vec<String> = bytes.iter().map(|c| c.to_string()).collect();
    let mut merges = Vec::new();
    let plain = size as usize - 2;
    // Printable ASCII, the space first: what a prompt is mostly made of.
    let common: Vec<char> = (b' '..=b'~').map(|b| bytes[usize::from(b)]).collect();
    for pair in common.iter().flat_map(|a| common.iter().map(move |b| (a, b))) {
        if tokens.len() >= plain {
            break;
        }
        tokens.push(format!("{}{}", pair.0, pair.1));
        merges.push(format!("{} {}", pair.0, pair.1));
    }
    let mut kinds = vec![NORMAL; tokens.len()];
    for i in tokens.len()..plain {
        tokens.push(format!("<|filler_{i}|>"));
        kinds.push(UNUSED);
    }
    tokens.extend(["<|begin|>".to_owned(), "<|end|>".to_owned()]);
    kinds.extend([CONTROL, CONTROL]);
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", pre);
    metadata.set("tokenizer.ggml.tokens", tokens.iter().collect::<StrArray>());
    metadata.set("tokenizer.ggml.token_type", kinds);
    metadata.set("tokenizer.ggml.merges", merges.iter().collect::<StrArray>());
    metadata.set("tokenizer.ggml.bos_token_id", size - 2);
    metadata.set("tokenizer.ggml.eos_token_id", size - 1);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    metadata.set("tokenizer.chat_template", CHAT);
}

/// The printable character that stands for a byte in byte-level vocabularies (GPT-2's table).
fn byte_char(byte: u8) -> char {
    let own = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !own(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_characters_that_readers_expect() {
        for (byte, want) in
            [(b' ', 'Ġ'), (b'\n', 'Ċ'), (b'a', 'a'), (0xe9, 'é'), (0xad, 'Ń'), (0, 'Ā')]
        {
            assert_eq!(byte_char(byte), want, "{byte:#x}");
        }
    }

    #[test]
    fn a_vocabulary_has_its_size_and_no_token_twice() {
        let mut metadata = Metadata::new();
        describe(&mut metadata, 49_152, "smollm");
        let tokens = metadata.require_str_array("tokenizer.ggml.tokens").unwrap();
        let distinct: std::collections::HashSet<&str> = tokens.iter().collect();
        assert_eq!((tokens.len(), distinct.len()), (49_152, 49_152));
        assert_eq!(metadata.u32("tokenizer.ggml.eos_token_id").unwrap(), Some(49_151));
        assert!(metadata.require_str("tokenizer.chat_template").unwrap().contains("m.content"));
    }
}
