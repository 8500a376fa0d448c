//! [`Bpe`]: byte-pair encoding, learned from a text.
//!
//! A text is first split into words (letters with underscores, digits, other marks, spaces; a space before a word belongs to it). Pairs are merged
//! inside words only. An encoding is saved as `tokenizer.json`, from which Hugging Face's libraries get the same tokens.
//! Source: Sennrich, Haddow and Birch: Neural machine translation of rare words with subword units (2016); bytes as in GPT-2 (2019).

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use serde_json::{Map, Value, json};

/// Two neighbouring tokens.
type Pair = (u32, u32);

/// A byte-pair encoding: tokens 0 to 255 are bytes, each later token merges two earlier ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bpe {
    /// The pair of each token beyond the bytes.
    merges: Vec<Pair>,
    /// The token of each pair.
    token_of: HashMap<Pair, u32>,
}

/// Bytes are the first tokens.
const BYTES: u32 = 256;

impl Bpe {
    /// Learns at most `vocabulary` tokens from a text: again and again the most frequent pair of neighbours becomes a token; of
    /// equally frequent ones the pair with the lowest numbers. A pair that occurs once becomes no token.
    pub fn train(text: &str, vocabulary: usize) -> Bpe {
        let mut counts: HashMap<&str, u64> = HashMap::new();
        words(text).for_each(|word| *counts.entry(word).or_default() += 1);
        let mut sorted: Vec<_> = counts.into_iter().collect();
        sorted.sort_unstable();
        let mut learner = Learner::new(sorted);
        let mut bpe = Bpe::default();
        while bpe.vocabulary() < vocabulary
            && let Some(pair) = learner.most_frequent()
        {
            let token = bpe.vocabulary() as u32;
            learner.merge(pair, token);
            bpe.push(pair);
        }
        bpe
    }

    /// An encoding of these pairs, in the order in which they were learned.
    pub(super) fn from_merges(merges: Vec<Pair>) -> Bpe {
        let mut bpe = Bpe::default();
        merges.into_iter().for_each(|pair| bpe.push(pair));
        bpe
    }

    /// The pair of each token beyond the bytes.
    pub(super) fn merges(&self) -> &[Pair] {
        &self.merges
    }

    fn push(&mut self, pair: Pair) {
        self.token_of.insert(pair, self.vocabulary() as u32);
        self.merges.push(pair);
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> usize {
        BYTES as usize + self.merges.len()
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let (mut tokens, mut known) = (Vec::with_capacity(text.len() / 3), HashMap::<&str, Vec<u32>>::new());
        for word in words(text) {
            tokens.extend_from_slice(known.entry(word).or_insert_with(|| self.encode_word(word)));
        }
        tokens
    }

    /// Merges pairs, those learned first before others, until there is none.
    fn encode_word(&self, word: &str) -> Vec<u32> {
        let mut tokens: Vec<u32> = word.bytes().map(u32::from).collect();
        loop {
            let known = tokens.windows(2).filter_map(|pair| self.token_of.get(&(pair[0], pair[1])));
            let Some(&token) = known.min() else { return tokens };
            let pair = self.merges[(token - BYTES) as usize];
            tokens = merged(&tokens, pair, token);
        }
    }

    /// The bytes of tokens. Unknown tokens have no bytes.
    pub fn decode(&self, tokens: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        tokens.iter().for_each(|&token| self.bytes_of(token, &mut bytes));
        bytes
    }

    fn bytes_of(&self, token: u32, bytes: &mut Vec<u8>) {
        if let Ok(byte) = u8::try_from(token) {
            bytes.push(byte);
        } else if let Some(&(first, second)) = self.merges.get((token - BYTES) as usize) {
            self.bytes_of(first, bytes);
            self.bytes_of(second, bytes);
        }
    }
}

/// The distinct words as tokens with their counts, and the pairs in them.
struct Learner {
    words: Vec<(Vec<u32>, u64)>,
    counts: HashMap<Pair, u64>,
    /// For each pair the words that may contain it; some have lost it since.
    words_with: HashMap<Pair, BTreeSet<u32>>,
    /// Pairs by counts, which may be outdated.
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
}

impl Learner {
    fn new(words: Vec<(&str, u64)>) -> Learner {
        let tokens = |word: &str| word.bytes().map(u32::from).collect::<Vec<u32>>();
        let words: Vec<_> = words.into_iter().map(|(word, count)| (tokens(word), count)).collect();
        let mut learner =
            Learner { words, counts: HashMap::new(), words_with: HashMap::new(), queue: BinaryHeap::new() };
        for word in 0..learner.words.len() {
            learner.count(word, true);
        }
        learner.queue = learner.counts.iter().map(|(&pair, &count)| (count, Reverse(pair))).collect();
        learner
    }

    /// Adds a word's pairs, or takes them away; those that it has.
    fn count(&mut self, word: usize, add: bool) -> Vec<Pair> {
        let (tokens, times) = &self.words[word];
        let pairs: Vec<Pair> = tokens.windows(2).map(|pair| (pair[0], pair[1])).collect();
        for &pair in &pairs {
            let count = self.counts.entry(pair).or_default();
            if add {
                *count += times;
                self.words_with.entry(pair).or_default().insert(word as u32);
            } else {
                *count -= times;
            }
        }
        pairs
    }

    /// The most frequent pair, if one occurs twice.
    fn most_frequent(&mut self) -> Option<Pair> {
        while let Some((count, Reverse(pair))) = self.queue.pop() {
            match self.counts.get(&pair) {
                Some(&now) if now == count => return (count > 1).then_some(pair),
                _ => {}
            }
        }
        None
    }

    /// Replaces a pair by one token in all words.
    fn merge(&mut self, pair: Pair, token: u32) {
        let mut changed = BTreeSet::new();
        for word in self.words_with.remove(&pair).unwrap_or_default() {
            let word = word as usize;
            changed.extend(self.count(word, false));
            self.words[word].0 = merged(&self.words[word].0, pair, token);
            changed.extend(self.count(word, true));
        }
        for pair in changed {
            match self.counts.get(&pair) {
                Some(0) | None => drop(self.counts.remove(&pair)),
                Some(&count) => self.queue.push((count, Reverse(pair))),
            }
        }
    }
}

/// Replaces each `pair` of the tokens, from the left, by `token`.
fn merged(tokens: &[u32], pair: Pair, token: u32) -> Vec<u32> {
    let mut joined = Vec::with_capacity(tokens.len());
    let mut rest = tokens;
    while let [first, others @ ..] = rest {
        match others {
            [second, others @ ..] if (*first, *second) == pair => {
                joined.push(token);
                rest = others;
            }
            _ => {
                joined.push(*first);
                rest = others;
            }
        }
    }
    joined
}

/// The classes of characters. A word has characters of one class.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CharacterClass {
    Letter,
    Digit,
    Mark,
    Space,
}

fn class_of(c: char) -> CharacterClass {
    match c {
        '_' => CharacterClass::Letter,
        c if c.is_whitespace() => CharacterClass::Space,
        c if c.is_numeric() => CharacterClass::Digit,
        c if c.is_alphabetic() => CharacterClass::Letter,
        _ => CharacterClass::Mark,
    }
}

/// Splits a text into words: runs of one class, with one space (`' '`) before them if there is one. Of
/// white space before a word the last character is a word of its own.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let after = &rest[first.len_utf8()..];
        let run = |text: &str, of: CharacterClass| text.find(|c| class_of(c) != of).unwrap_or(text.len());
        let next = after.chars().next().map(class_of);
        let length = match (class_of(first), next) {
            (CharacterClass::Space, Some(next)) if first == ' ' && next != CharacterClass::Space => {
                1 + run(after, next)
            }
            (CharacterClass::Space, _) => {
                let all = run(rest, CharacterClass::Space);
                let last = rest[..all].chars().next_back().map_or(0, char::len_utf8);
                if all == rest.len() || all == last { all } else { all - last }
            }
            (of, _) => run(rest, of),
        };
        let word;
        (word, rest) = rest.split_at(length);
        Some(word)
    })
}

/// The pattern for `tokenizers` that splits a text as [`words`](super::bpe::words) does.
const PATTERN: &str = r" ?[_[\p{Alphabetic}&&[^\p{N}]]]+| ?\p{N}+| ?[^\s_\p{Alphabetic}\p{N}]+|\s+(?!\S)|\s";

/// The character for a byte in `tokenizer.json`: itself if it is printable, otherwise one from 256 on. Source: GPT-2's encoder.
fn character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + rank).unwrap_or('?')
}

impl Bpe {
    /// The contents of `tokenizer.json`.
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

    /// Reads a `tokenizer.json` of [`Bpe::to_json`]; none if the file is of another kind.
    pub fn from_json(file: &Value) -> Option<Bpe> {
        let pattern = file.pointer("/pre_tokenizer/pretokenizers/0/pattern/Regex")?;
        let model = file.get("model")?;
        // Tokens that were added by hand are no pairs.
        let more = file.get("added_tokens").and_then(Value::as_array).is_some_and(|added| !added.is_empty());
        if more || pattern.as_str() != Some(PATTERN) || model.get("type")?.as_str() != Some("BPE") {
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
        same.then(|| Bpe::from_merges(merges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_text() {
        let text = "fn main() {\n    let x_1 = a+b;  // é 12\n}\n\n";
        let cut: Vec<&str> = words(text).collect();
        assert_eq!(cut.concat(), text);
        let wanted = [
            "fn", " main", "()", " {", "\n   ", " let", " x_", "1", " =", " a", "+", "b", ";", " ", " //",
            " é", " 12", "\n", "}", "\n\n",
        ];
        assert_eq!(cut, wanted);
    }

    #[test]
    fn the_most_frequent_pairs_become_tokens() {
        // ab: 4 times, abc: 3 times.
        let bpe = Bpe::train("abc abc\nabc\nab", 300);
        assert_eq!(bpe.merges[0], (97, 98));
        assert_eq!(bpe.encode("abc"), [257]);
        assert_eq!(bpe.decode(&bpe.encode("zabcab\u{1F600}")), "zabcab\u{1F600}".as_bytes());
    }

    #[test]
    fn learning_pair_by_pair_and_counting_anew_agree() {
        let text: String = (0..3000u32).map(|i| char::from(b"abcd  e\n"[(i * i / 7 % 8) as usize])).collect();
        let bpe = Bpe::train(&text, 300);
        let mut words: Vec<Vec<u32>> = words(&text).map(|w| w.bytes().map(u32::from).collect()).collect();
        for (i, &pair) in bpe.merges.iter().enumerate() {
            let mut counts: HashMap<Pair, u64> = HashMap::new();
            words
                .iter()
                .flat_map(|w| w.windows(2))
                .for_each(|p| *counts.entry((p[0], p[1])).or_default() += 1);
            let best = counts.iter().max_by_key(|&(&pair, &count)| (count, Reverse(pair)));
            assert_eq!(best.map(|(&pair, _)| pair), Some(pair), "merge {i}");
            words.iter_mut().for_each(|w| *w = merged(w, pair, BYTES + i as u32));
        }
        assert_eq!(bpe.encode(&text), words.concat());
    }

    #[test]
    fn nothing_and_little_text_are_taken() {
        assert_eq!(Bpe::train("", 1000).vocabulary(), 256);
        assert!(Bpe::train("a", 1000).encode("").is_empty());
    }

    #[test]
    fn a_tokenizer_comes_back_from_its_file() {
        let bpe = Bpe::train(include_str!("bpe.rs"), 600);
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
