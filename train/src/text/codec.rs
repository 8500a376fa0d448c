//! [`Codec`]: the tokenizer of a model.

#[cfg(feature = "chat")]
use std::ops::Range;
use std::path::{Path, PathBuf};

#[cfg(feature = "tokenizers")]
use tokenizers::Tokenizer;

use super::Bpe;
use crate::{Error, Result};

/// The tokenizer's file in a model's folder.
pub const TOKENIZER: &str = "tokenizer.json";

/// Files beside it that a chat needs.
const COMPANIONS: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"];

/// A tokenizer: encodes text to tokens and decodes tokens to text.
pub enum Codec {
    /// Each byte is a token. Used for a model's folder without a tokenizer.
    Bytes(Option<PathBuf>),
    /// Numbers below this, whose text is unknown.
    Numbers(usize),
    /// Byte pairs, learned or from a file of [`Codec::save`].
    Pairs(Bpe, Option<PathBuf>),
    /// A tokenizer of Hugging Face from a file.
    #[cfg(feature = "tokenizers")]
    Tokenizer(Box<Tokenizer>, PathBuf),
}

impl Codec {
    /// The tokenizer of a model's folder, or bytes if it has none.
    ///
    /// # Errors
    /// If its file cannot be read, or needs the feature `tokenizers`, which this build does not have.
    pub fn of(folder: &Path) -> Result<Codec> {
        let path = folder.join(TOKENIZER);
        if !path.exists() {
            return Ok(Codec::Bytes(Some(folder.into())));
        }
        let file = std::fs::read(&path).map_err(|e| Error::file(&path, e))?;
        let pairs = serde_json::from_slice(&file).ok().and_then(|file| Bpe::from_json(&file));
        pairs
            .map_or_else(|| Codec::in_file(path.clone()), |pairs| Ok(Codec::Pairs(pairs, Some(path.clone()))))
    }

    #[cfg(feature = "tokenizers")]
    fn in_file(path: PathBuf) -> Result<Codec> {
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| Error::file(&path, e))?;
        Ok(Codec::Tokenizer(Box::new(tokenizer), path))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn in_file(path: PathBuf) -> Result<Codec> {
        let why = "this build reads no tokenizers; one that does: a build with `--features tokenizers`";
        Err(Error::file(&path, why))
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Codec::Bytes(_) => 256,
            Codec::Numbers(vocabulary) => *vocabulary,
            Codec::Pairs(pairs, _) => pairs.vocabulary(),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, _) => t.get_vocab_size(true),
        }
    }

    /// Whether tokens can be decoded to text.
    pub fn is_text(&self) -> bool {
        !matches!(self, Codec::Numbers(_))
    }

    /// Whether two tokenizers give the same tokens.
    pub(super) fn is_same(&self, other: &Codec) -> bool {
        match (self, other) {
            (Codec::Bytes(_), Codec::Bytes(_)) => true,
            (Codec::Numbers(a), Codec::Numbers(b)) => a == b,
            (Codec::Pairs(a, _), Codec::Pairs(b, _)) => a == b,
            #[cfg(feature = "tokenizers")]
            (Codec::Tokenizer(a, _), Codec::Tokenizer(b, _)) => a.get_vocab(true) == b.get_vocab(true),
            _ => false,
        }
    }

    /// A description for messages.
    pub fn source(&self) -> String {
        match self {
            Codec::Bytes(None) => "bytes are the tokens".into(),
            Codec::Bytes(Some(folder)) => {
                format!("{}: without a {TOKENIZER}, bytes are the tokens", folder.display())
            }
            Codec::Numbers(vocabulary) => format!("tokens are numbers below {vocabulary}"),
            Codec::Pairs(pairs, None) => format!("{} tokens were learned from the text", pairs.vocabulary()),
            Codec::Pairs(_, Some(path)) => path.display().to_string(),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(_, path) => path.display().to_string(),
        }
    }

    /// Encodes a text. All tokens are in the model's vocabulary.
    ///
    /// # Errors
    /// If the text is not UTF-8 where bytes are not the tokens, or a token is beyond the vocabulary.
    pub fn encode(&self, text: &[u8], vocabulary: usize) -> Result<Vec<u32>> {
        self.encode_with(text, vocabulary, false)
    }

    /// [`Codec::encode`] of a text that a model continues, with the special tokens that the tokenizer puts in front of it, if it does.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn encode_prompt(&self, text: &[u8], vocabulary: usize) -> Result<Vec<u32>> {
        self.encode_with(text, vocabulary, true)
    }

    #[cfg_attr(not(feature = "tokenizers"), allow(unused_variables))] // only tokenizers have special tokens
    fn encode_with(&self, text: &[u8], vocabulary: usize, special: bool) -> Result<Vec<u32>> {
        let utf8 =
            || std::str::from_utf8(text).map_err(|e| Error::Config(format!("the text is not UTF-8: {e}")));
        let tokens: Vec<u32> = match self {
            Codec::Bytes(_) => text.iter().map(|&b| b.into()).collect(),
            Codec::Numbers(_) => {
                let why =
                    "got a text where tokens are only known as numbers, wanted a tokenizer.json beside them";
                return Err(Error::Config(why.into()));
            }
            Codec::Pairs(pairs, _) => pairs.encode(utf8()?),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, _) => {
                let encoding =
                    t.encode_fast(utf8()?, special).map_err(|e| Error::data(self.source(), e.to_string()))?;
                encoding.get_ids().to_vec()
            }
        };
        match tokens.iter().max() {
            Some(&top) if top as usize >= vocabulary => {
                let why = format!("got token {top}, wanted one of the model's vocabulary of {vocabulary}");
                Err(Error::data(self.source(), why))
            }
            _ => Ok(tokens),
        }
    }

    /// The tokens of a text, and for each of its spans of bytes which tokens begin in it.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    #[cfg(feature = "chat")]
    pub(super) fn encode_spans(
        &self,
        text: &str,
        spans: &[Range<usize>],
    ) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let (tokens, places) = match self {
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, _) => {
                let encoding =
                    t.encode(text, false).map_err(|e| Error::data(self.source(), e.to_string()))?;
                (encoding.get_ids().to_vec(), encoding.get_offsets().to_vec())
            }
            _ => {
                let tokens = self.encode(text.as_bytes(), usize::MAX)?;
                let lengths = tokens.iter().map(|&token| match self {
                    Codec::Pairs(pairs, _) => pairs.decode(&[token]).len(),
                    _ => 1,
                });
                let place = |end: &mut usize, length: usize| {
                    *end += length;
                    Some((*end - length, *end))
                };
                let places = lengths.scan(0, place).collect::<Vec<_>>();
                (tokens, places)
            }
        };
        // A token of white space may have an empty place, and belongs to the span if one before it and one behind it do.
        let within = |span: &Range<usize>| {
            let begins = |(start, end): &(usize, usize)| end > start && span.contains(start);
            let first = places.iter().position(begins).unwrap_or(0);
            first..places.iter().rposition(begins).map_or(first, |last| last + 1)
        };
        let spans = spans.iter().map(within).collect();
        Ok((tokens, spans))
    }

    /// The folder of a tokenizer that comes from one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Codec::Bytes(folder) => folder.as_deref(),
            Codec::Numbers(_) => None,
            Codec::Pairs(_, path) => path.as_deref()?.parent(),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(_, path) => path.parent(),
        }
    }

    /// Decodes tokens. Bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// Those of Hugging Face's tokenizer.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let bytes = match self {
            Codec::Bytes(_) => tokens.iter().map(|&t| t as u8).collect(),
            Codec::Numbers(_) => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ").into_bytes(),
            Codec::Pairs(pairs, _) => pairs.decode(tokens),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, path) => return t.decode(tokens, false).map_err(|e| Error::file(path, e)),
        };
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Writes learned pairs as `tokenizer.json` into a model's folder, or copies the tokenizer's file there. The chat template, special tokens
    /// and end tokens of the folder from which the tokenizer comes are copied too.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        for name in COMPANIONS {
            let Some(from) = self.folder().map(|own| own.join(name)).filter(|from| from.exists()) else {
                continue;
            };
            let bytes = std::fs::read(&from).map_err(|e| Error::file(&from, e))?;
            phalanx_tensor::io::atomic::write(folder.join(name), |file| file.write_all(&bytes))?;
        }
        let to = folder.join(TOKENIZER);
        let bytes = match self {
            Codec::Bytes(_) | Codec::Numbers(_) => return Ok(()),
            Codec::Pairs(pairs, _) => {
                serde_json::to_vec(&pairs.to_json()).map_err(|e| Error::file(&to, e))?
            }
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(_, from) => std::fs::read(from).map_err(|e| Error::file(from, e))?,
        };
        Ok(phalanx_tensor::io::atomic::write(&to, |file| file.write_all(&bytes))?)
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_the_special_tokens_in_front() {
        let added = r#"[{"id": 2, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}]"#;
        let template = r#"{"type": "TemplateProcessing", "pair": [], "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}}"#;
        let model = r#"{"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<s>": 2}, "unk_token": "a"}"#;
        let text = format!(
            r#"{{"version": "1.0", "added_tokens": {added}, "pre_tokenizer": {{"type": "Whitespace"}},
                "post_processor": {template}, "model": {model}}}"#
        );
        let codec = Codec::Tokenizer(Box::new(text.parse().unwrap()), TOKENIZER.into());
        assert_eq!(codec.encode(b"b a", 3).unwrap(), [1, 0]);
        assert_eq!(codec.encode_prompt(b"b a", 3).unwrap(), [2, 1, 0]);
        assert!(codec.encode_prompt(b"b", 2).is_err());
        assert_eq!(Codec::Bytes(None).encode_prompt(b"b", 256).unwrap(), [98]);
    }
}
