//! A [`Bpe`] as `tokenizer.json`, the file of Hugging Face's `tokenizers`.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::Bpe;

/// What cuts a text into words, as `tokenizers` is told; the same as [`words`](super::bpe::words).
const PATTERN: &str = r" ?[_[\p{Alphabetic}&&[^\p{N}]]]+| ?\p{N}+| ?[^\s_\p{Alphabetic}\p{N}]+|\s+(?!\S)|\s";

/// The character that stands for a byte in the file: itself if it is printable, otherwise one beyond. Source: GPT-2's encoder.
fn character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + place).unwrap_or('?')
}

impl Bpe {
    /// As `tokenizer.json`.
    pub fn to_json(&self) -> Value {
        let name = |token: u32| -> String { self.decode(&[token]).into_iter().map(character).collect() };
        let names: Vec<String> = (0..self.vocabulary() as u32).map(name).collect();
        let vocabulary: Map<String, Value> =
            names.iter().cloned().zip((0..).map(|i: u32| i.into())).collect();
        let merges: Vec<Value> =
            self.merges().iter().map(|&(a, b)| json!([names[a as usize], names[b as usize]])).collect();
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let split =
            json!({"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false});
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes]},
            "post_processor": null,
            "decoder": bytes,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocabulary,
                "merges": merges,
            }
        })
    }

    /// That of a `tokenizer.json` that [`Bpe::to_json`] has written; none if the file is of another kind.
    pub fn from_json(file: &Value) -> Option<Bpe> {
        let pattern = file.pointer("/pre_tokenizer/pretokenizers/0/pattern/Regex")?;
        let model = file.get("model")?;
        if pattern.as_str() != Some(PATTERN) || model.get("type")?.as_str() != Some("BPE") {
            return None;
        }
        let mut numbers: HashMap<String, u32> =
            (0..=255u8).map(|byte| (character(byte).to_string(), byte.into())).collect();
        let mut merges = Vec::new();
        for pair in model.get("merges")?.as_array()? {
            let [first, second] = [pair.get(0)?.as_str()?, pair.get(1)?.as_str()?];
            merges.push((*numbers.get(first)?, *numbers.get(second)?));
            numbers.insert(format!("{first}{second}"), 255 + merges.len() as u32);
        }
        let known = model.get("vocab")?.as_object()?;
        let same = known.len() == numbers.len()
            && known.iter().all(|(name, number)| numbers.get(name).map(|&n| n.into()) == number.as_u64());
        same.then(|| Bpe::of(merges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_comes_back_from_its_file() {
        let bpe = Bpe::train(include_str!("json.rs"), 600);
        assert_eq!(bpe.vocabulary(), 600);
        let text = serde_json::to_string(&bpe.to_json()).unwrap();
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(Bpe::from_json(&read), Some(bpe));
        let mut other = read.clone();
        other["model"]["type"] = "Unigram".into();
        assert_eq!(Bpe::from_json(&other), None);
        other = read;
        other["model"]["vocab"]["zz"] = 3.into();
        assert_eq!(Bpe::from_json(&other), None);
    }

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let all: std::collections::HashSet<char> = (0..=255).map(character).collect();
        assert_eq!((all.len(), character(b' '), character(b'\n'), character(b'a')), (256, 'Ġ', 'Ċ', 'a'));
    }
}
