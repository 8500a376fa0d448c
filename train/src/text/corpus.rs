//! [`Corpus`]: the training and validation data of a language model, from texts, token files, or folders of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Bpe, Codec, TOKENIZER};
#[cfg(feature = "chat")]
use super::{ChatTemplate, Conversations};
#[cfg(feature = "chat")]
use crate::data::Shuffled;
use crate::data::{
    Blend, Concat, Dataset, IndexedTokens, Packed, Samples, TokenFile, TokenWindows, Tokens, Width,
};
use crate::{Data, Error, Result, check_memory, choices, digest, keyed};

choices! { Width { Width::U16 = "u16", Width::U32 = "u32" } }
choices! { pub enum Answers { All = "all", Last = "last" } }

/// The names of a prepared folder's files; others write `val.bin` for the second.
pub const TRAINING: &str = "train.bin";
/// Tokens that are held out.
pub const VALIDATION: [&str; 2] = ["validation.bin", "val.bin"];
/// The number of tokens at a file's beginning and at its end that identify it.
const DIGEST_TOKENS: u64 = 1 << 16;
/// The number of tokens from which the mean bytes of a token are measured.
const MEASURED_TOKENS: u64 = 1 << 17;
/// Bytes in memory for each byte of a text: itself, and at most one token of four bytes.
const TEXT_BYTES: f64 = 5.0;
/// The allowed sizes of a vocabulary.
const VOCABULARIES: std::ops::RangeInclusive<usize> = 256..=1 << 20;

keyed! {
    /// The settings of a language model's data.
    pub struct CorpusConfig {
        /// Text to learn; a .jsonl file of conversations, whose answers are learned; a .bin file of tokens, with or without Megatron's .idx; or a
        /// folder that `prepare` has made. Given several times, they are mixed, by the weights of PATH=WEIGHT if there are such.
        "data" data: Vec<String> = Vec::new(),
        /// Data to measure the loss on, which the model is not trained on; a path of any of these kinds.
        "validation" validation: Vec<String> = Vec::new(),
        /// Learn that many byte pairs from the text as tokens, bytes included; without it bytes are the tokens.
        "vocabulary" vocabulary: Option<usize> = None,
        /// How many tokens the model knows [default: as many as the tokenizer beside the data has].
        "vocabulary-size" vocabulary_size: Option<usize> = None,
        /// Type of the tokens in a .bin file without an index [default: u16, or u32 if the vocabulary is larger].
        "token-width" token_width: Option<Width> = None,
        /// Tokens in a sequence.
        "context" context: usize = 256,
        /// Keep attention inside documents, of which a sequence may have several. Documents end where the index of the tokens says, as
        /// `prepare` makes it, or at `end-of-text`. Whole conversations are put into a sequence as long as they fit.
        "packed" packed: bool = false,
        /// Which answers of a conversation are learned; what follows the last one is left out then.
        "answers" answers: Answers = Answers::All,
        /// The token at which documents end.
        "end-of-text" end_of_text: Option<usize> = None,
    }
}

/// Where the tokens of a part come from: a text in memory, a token file, an indexed pair of files, or conversations.
enum CorpusSource {
    #[cfg(feature = "chat")]
    Conversations(Arc<Conversations>),
    Text(Vec<u8>),
    File(PathBuf),
    Indexed(PathBuf),
}

/// One path of `data` or `validation`.
struct CorpusPart {
    /// Its name in errors.
    name: String,
    source: CorpusSource,
    weight: f64,
}

impl CorpusPart {
    #[cfg(feature = "chat")]
    fn conversations(&self) -> Option<&Arc<Conversations>> {
        match &self.source {
            CorpusSource::Conversations(all) => Some(all),
            _ => None,
        }
    }
}

/// The rows of a part for a model.
struct Rows {
    /// What identifies them.
    identity: String,
    samples: Box<dyn Samples>,
    /// The same as data to measure the loss on.
    held_out: Arc<dyn Dataset>,
    /// The tokens of a text.
    tokens: Option<Arc<dyn Tokens>>,
}

/// Training data, validation data and tokenizer.
pub struct Corpus {
    config: CorpusConfig,
    training: Vec<CorpusPart>,
    held_out: Vec<CorpusPart>,
    codec: Codec,
}

impl Corpus {
    /// Opens the data that the configuration names. If it names none, `default` gives the texts. `codec` replaces the tokenizer beside the data.
    ///
    /// # Errors
    /// If a file cannot be read, is empty, or is a text that does not fit into memory, or keys do not go together.
    pub fn open(
        config: &CorpusConfig,
        codec: Option<Codec>,
        default: impl FnOnce() -> Result<[Vec<u8>; 2]>,
    ) -> Result<Corpus> {
        config.vocabulary.map_or(Ok(()), |size| check_vocabulary("vocabulary", size))?;
        if config.vocabulary_size == Some(0) || config.vocabulary_size > Some(u32::MAX as usize) {
            return refuse("`vocabulary-size` wants a number from 1 up that fits 32 bits".into());
        }
        if let Some(end) = config.end_of_text.filter(|_| !config.packed) {
            return refuse(format!("`end-of-text` {end} goes with `packed`, which is not given"));
        }
        let (mut training, mut held_out) = (Vec::new(), Vec::new());
        for text in &config.data {
            let (path, weight) = weighted(text)?;
            training.push(part(&path, &[TRAINING], weight, config, codec.as_ref())?);
            let names = VALIDATION.iter().filter(|name| path.join(name).exists());
            held_out
                .extend(names.map(|_| part(&path, &VALIDATION, weight, config, None)).next().transpose()?);
        }
        if let (Some(folder), false) = (held_out.first(), config.validation.is_empty()) {
            let name = &folder.name;
            return refuse(format!("`validation` does not go with {name}, which its `data` has held out"));
        }
        for text in &config.validation {
            held_out.push(part(Path::new(text), &VALIDATION, 1.0, config, codec.as_ref())?);
        }
        if config.data.is_empty() {
            let named = |name: &str, text| CorpusPart {
                name: name.into(),
                source: CorpusSource::Text(text),
                weight: 1.0,
            };
            let [text, rest] = default()?;
            training.push(named("the bundled text", text));
            if held_out.is_empty() && !rest.is_empty() {
                held_out.push(named("the bundled text", rest));
            }
        }
        let codec = codec.map_or_else(|| codec_of(config, &training), Ok)?;
        Ok(Corpus { config: config.clone(), training, held_out, codec })
    }

    /// The tokenizer.
    pub fn codec(&self) -> &Codec {
        &self.codec
    }

    /// Only the tokenizer, without the texts.
    pub fn into_codec(self) -> Codec {
        self.codec
    }

    /// The size of vocabulary that a model needs.
    pub fn vocabulary(&self) -> usize {
        self.config.vocabulary_size.unwrap_or(0).max(self.codec.vocabulary())
    }

    /// What files of conversations have, and what of them was cut off, a sentence each.
    pub fn summaries(&self) -> Vec<String> {
        #[cfg(feature = "chat")]
        let said = |part: &CorpusPart| Some(part.conversations()?.summary());
        #[cfg(not(feature = "chat"))]
        let said = |_: &CorpusPart| None;
        self.training.iter().chain(&self.held_out).filter_map(said).collect()
    }

    /// Windows of the tokens and rows of conversations, in an order drawn from the seed, for a model with this vocabulary. Also returns the digest that identifies the data, and the mean bytes of text in a token of the validation data, if tokens stand for text.
    ///
    /// # Errors
    /// If tokens are beyond the vocabulary, files damaged, or there are fewer tokens than the context asks for; if texts and conversations are
    /// mixed.
    pub fn data(&self, vocabulary: usize, seed: u64) -> Result<(Data, String, Option<f64>)> {
        let open = |parts: &[CorpusPart]| {
            parts.iter().map(|part| self.rows(part, vocabulary, seed)).collect::<Result<Vec<_>>>()
        };
        let (training, held_out) = (open(&self.training)?, open(&self.held_out)?);
        let mut identity = String::new();
        for (part, rows) in self.training.iter().zip(&training) {
            identity += &format!("{} ", rows.identity);
            if training.len() > 1 && part.weight != 1.0 {
                identity += &format!("x{} ", part.weight);
            }
        }
        if self.config.packed {
            identity += &format!("packed {:?}", self.config.end_of_text);
        }
        let measured = held_out.first().unwrap_or(&training[0]);
        let bytes =
            measured.tokens.as_ref().map(|tokens| self.bytes_per_token(tokens)).transpose()?.flatten();
        let weights = self.training.iter().map(|part| part.weight);
        let mut sources: Vec<_> = training.into_iter().map(|rows| rows.samples).zip(weights).collect();
        let samples: Arc<dyn Samples> = match sources.len() {
            1 => Arc::from(sources.swap_remove(0).0),
            _ => Arc::new(Blend::new(sources, seed)?),
        };
        let mut parts: Vec<_> = held_out.into_iter().map(|rows| rows.held_out).collect();
        let validation = match parts.len() {
            0 | 1 => parts.pop(),
            _ => Some(Arc::new(Concat::new(parts)) as Arc<dyn Dataset>),
        };
        Ok((Data { samples, counted: self.config.context, validation }, identity.trim_end().into(), bytes))
    }

    fn rows(&self, part: &CorpusPart, vocabulary: usize, seed: u64) -> Result<Rows> {
        #[cfg(feature = "chat")]
        if let Some(all) = part.conversations() {
            all.check_vocabulary(vocabulary)?;
            let samples = Box::new(Shuffled::new(all.clone(), seed)?);
            return Ok(Rows { identity: all.identity(), samples, held_out: all.clone(), tokens: None });
        }
        let tokens = self.tokens(part, vocabulary)?;
        let windows = self.windows(part, &tokens, seed)?;
        let identity = format!("{} {:016x}", tokens.len(), self.digest_of_ends(&tokens)?);
        let unshifted = windows.clone().unshifted();
        let (samples, held_out): (Box<dyn Samples>, Arc<dyn Dataset>) = match self.config.packed {
            true => (Box::new(Packed::from(windows)), Arc::new(Packed::from(unshifted))),
            false => (Box::new(windows), Arc::new(unshifted)),
        };
        Ok(Rows { identity, samples, held_out, tokens: Some(tokens) })
    }

    fn windows(
        &self,
        part: &CorpusPart,
        tokens: &Arc<dyn Tokens>,
        seed: u64,
    ) -> Result<TokenWindows<Arc<dyn Tokens>>> {
        let context = self.config.context;
        TokenWindows::new(tokens.clone(), context, seed).map_err(|e| {
            Error::data(&part.name, format!("{e} (`context` {context}; {})", self.codec.source()))
        })
    }

    fn tokens(&self, part: &CorpusPart, vocabulary: usize) -> Result<Arc<dyn Tokens>> {
        let tokens = self.stored(part, vocabulary)?;
        let indexed = matches!(part.source, CorpusSource::Indexed(_));
        match self.config.end_of_text {
            Some(end) if end >= vocabulary => {
                refuse(format!("`end-of-text` is {end}, and there are {vocabulary} tokens"))
            }
            Some(end) => Ok(Arc::new(tokens.with_end_of_text(end as u32))),
            None if self.config.packed && !indexed => {
                let why = "`packed` wants documents: an index beside the tokens, as `prepare` writes it, or `end-of-text`";
                Err(Error::data(&part.name, why))
            }
            None => Ok(tokens),
        }
    }

    /// The tokens, with the documents of the index, if there is one.
    fn stored(&self, part: &CorpusPart, vocabulary: usize) -> Result<Arc<dyn Tokens>> {
        Ok(match &part.source {
            #[cfg(feature = "chat")]
            CorpusSource::Conversations(_) => {
                return Err(Error::data(&part.name, "got conversations, wanted a text or tokens"));
            }
            CorpusSource::Text(text) => Arc::new(self.codec.encode(text, vocabulary)?),
            CorpusSource::Indexed(path) => {
                Arc::new(IndexedTokens::open(path)?.with_vocabulary(vocabulary as u32))
            }
            CorpusSource::File(path) => {
                let wide = if vocabulary > 1 << 16 { Width::U32 } else { Width::U16 };
                let width = self.config.token_width.unwrap_or(wide);
                if width == Width::U16 && wide == Width::U32 {
                    let why = format!(
                        "a vocabulary of {vocabulary} tokens does not fit tokens of two bytes (`token-width`)"
                    );
                    return Err(Error::file(path, why));
                }
                Arc::new(TokenFile::open(path, width)?.with_vocabulary(vocabulary as u32))
            }
        })
    }

    /// A digest of the first and last tokens. Reading them also refuses a file without tokens before anything is written.
    fn digest_of_ends(&self, tokens: &Arc<dyn Tokens>) -> Result<u64> {
        let some = DIGEST_TOKENS.min(tokens.len());
        let mut ends = vec![0; 2 * some as usize];
        let (first, last) = ends.split_at_mut(some as usize);
        tokens.copy(0, first)?;
        tokens.copy(tokens.len() - some, last)?;
        Ok(digest(&ends.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>()))
    }

    fn bytes_per_token(&self, tokens: &Arc<dyn Tokens>) -> Result<Option<f64>> {
        let mut some = vec![0; MEASURED_TOKENS.min(tokens.len()) as usize];
        tokens.copy(0, &mut some)?;
        let bytes = |text: String| text.len() as f64 / some.len().max(1) as f64;
        Ok(if self.codec.is_text() { Some(bytes(self.codec.decode(&some)?)) } else { None })
    }
}

/// Refuses a vocabulary with fewer tokens than there are bytes, or with too many.
pub(super) fn check_vocabulary(key: &str, size: usize) -> Result<()> {
    let (least, most) = (VOCABULARIES.start(), VOCABULARIES.end());
    match VOCABULARIES.contains(&size) {
        true => Ok(()),
        false => refuse(format!("`{key}` is {size}, wanted {least} to {most}")),
    }
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::Config(why))
}

/// `PATH=WEIGHT`, or a path of weight 1.
fn weighted(text: &str) -> Result<(PathBuf, f64)> {
    let weight = |text: &str| text.parse::<f64>().ok();
    match text.rsplit_once('=').and_then(|(path, last)| Some((path, weight(last)?))) {
        Some((_, weight)) if !(weight > 0.0 && weight.is_finite()) => {
            refuse(format!("`data` {text}: the weight is {weight}, wanted a number above 0"))
        }
        Some((path, weight)) if !Path::new(text).exists() => Ok((path.into(), weight)),
        _ => Ok((text.into(), 1.0)),
    }
}

/// The path itself if it is a file; in a folder the first of `names` that exists.
fn part(
    path: &Path,
    names: &[&str],
    weight: f64,
    config: &CorpusConfig,
    codec: Option<&Codec>,
) -> Result<CorpusPart> {
    let inside = || names.iter().map(|name| path.join(name)).find(|path| path.exists());
    let path = match path.is_dir() {
        true => inside().ok_or_else(|| {
            Error::file(
                path,
                format!("got a folder without {}, wanted one that `prepare` has made", names[0]),
            )
        })?,
        false => path.to_path_buf(),
    };
    let is = |name: &str| path.extension().is_some_and(|extension| extension == name);
    let index = if is("idx") { path.clone() } else { path.with_extension("idx") };
    let source = match () {
        () if is("jsonl") => conversations(&path, config, codec)?,
        () if index.exists() && (is("bin") || is("idx") || !path.exists()) => CorpusSource::Indexed(index),
        () if is("bin") => CorpusSource::File(path.clone()),
        () if is("idx") => CorpusSource::Indexed(index),
        () => CorpusSource::Text(read(&path)?),
    };
    Ok(CorpusPart { name: path.display().to_string(), source, weight })
}

/// Reads conversations, by the tokenizer and the template of a model's folder.
#[cfg(feature = "chat")]
fn conversations(path: &Path, config: &CorpusConfig, codec: Option<&Codec>) -> Result<CorpusSource> {
    let Some((codec, folder)) = codec.and_then(|codec| Some((codec, codec.folder()?))) else {
        return Err(Error::file(
            path,
            "conversations go with a model's folder and its chat template, wanted `init`",
        ));
    };
    if let Some(end) = config.end_of_text {
        let why =
            format!("conversations end where their lines do, and `end-of-text` is for texts; got {end}");
        return Err(Error::file(path, why));
    }
    let template = ChatTemplate::of(folder)?;
    let all = Conversations::open(path, codec, &template, config.context, config.answers)?;
    let all = if config.packed { all.packed() } else { all };
    Ok(CorpusSource::Conversations(Arc::new(all)))
}

#[cfg(not(feature = "chat"))]
fn conversations(path: &Path, _: &CorpusConfig, _: Option<&Codec>) -> Result<CorpusSource> {
    let why = "this build reads no conversations; one that does: a build with `--features chat`";
    Err(Error::file(path, why))
}

/// Reads a text, if it fits into memory.
fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::metadata(path).map_err(|e| Error::file(path, e))?.len();
    check_memory(&[("text in memory", bytes as f64 * TEXT_BYTES)]).map_err(|e| {
        Error::file(
            path,
            format!("{e}; `prepare` makes token files of large texts, which are read where they lie"),
        )
    })?;
    let text = std::fs::read(path).map_err(|e| Error::file(path, e))?;
    if text.is_empty() { Err(Error::file(path, "the file is empty")) } else { Ok(text) }
}

/// The tokenizer: learned from the text, or the one beside the tokens.
fn codec_of(config: &CorpusConfig, training: &[CorpusPart]) -> Result<Codec> {
    let mut beside_files: Option<(Codec, &CorpusPart)> = None;
    for part in training {
        let (CorpusSource::File(path) | CorpusSource::Indexed(path)) = &part.source else { continue };
        if let Some(vocabulary) = config.vocabulary {
            let name = &part.name;
            return refuse(format!(
                "{name}: its tokens are made, so `vocabulary` {vocabulary} does not go with it"
            ));
        }
        let folder = path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let codec = match config.vocabulary_size {
            _ if folder.join(TOKENIZER).exists() => Codec::of(folder)?,
            Some(size) => Codec::Numbers(size),
            None => {
                let wanted = "wanted a tokenizer.json beside it, or `vocabulary-size`";
                return Err(Error::data(
                    &part.name,
                    format!("how many tokens there are is unknown: {wanted}"),
                ));
            }
        };
        if let Some((other, first)) = beside_files.as_ref().filter(|(other, _)| !other.is_same(&codec)) {
            let (one, two) = (first.name.as_str(), part.name.as_str());
            let why = format!("its tokens are not those of {one} ({}; {})", codec.source(), other.source());
            return Err(Error::data(two, why));
        }
        beside_files.get_or_insert((codec, part));
    }
    match (beside_files, config.vocabulary) {
        (Some((codec, _)), _) => Ok(codec),
        (None, None) => Ok(Codec::Bytes(None)),
        (None, Some(vocabulary)) => {
            let texts = training.iter().filter_map(|part| match &part.source {
                CorpusSource::Text(text) => Some((part, std::str::from_utf8(text))),
                _ => None,
            });
            let mut all = String::new();
            for (part, text) in texts {
                all += text.map_err(|e| Error::data(&part.name, format!("the text is not UTF-8: {e}")))?;
            }
            Ok(Codec::Pairs(Bpe::train(&all, vocabulary), None))
        }
    }
}

#[cfg(test)]
mod tests;
