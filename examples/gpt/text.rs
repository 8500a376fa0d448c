//! The text to learn, and the tokens that it is made of.

use std::path::{Path, PathBuf};

#[cfg(feature = "tokenizers")]
use tokenizers::Tokenizer;

/// The tokenizer's file in a model's folder.
pub const TOKENIZER: &str = "tokenizer.json";

/// How text becomes tokens: bytes (of a model's folder that says nothing else), or a tokenizer that came in a file.
pub enum Codec {
    Bytes(Option<PathBuf>),
    #[cfg(feature = "tokenizers")]
    Tokenizer(Box<Tokenizer>, PathBuf),
}

impl Codec {
    /// The tokenizer of a model folder, or bytes where it has none.
    pub fn of(folder: &Path) -> Result<Codec, String> {
        let path = folder.join(TOKENIZER);
        if !path.exists() {
            return Ok(Codec::Bytes(Some(folder.into())));
        }
        Codec::in_file(path)
    }

    #[cfg(feature = "tokenizers")]
    fn in_file(path: PathBuf) -> Result<Codec, String> {
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Codec::Tokenizer(Box::new(tokenizer), path))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn in_file(path: PathBuf) -> Result<Codec, String> {
        let build = "cargo run --release --features tokenizers --example gpt -- ..";
        Err(format!("{}: this build reads no tokenizers; one that does: {build}", path.display()))
    }

    /// What decides on the tokens, for messages.
    pub fn source(&self) -> String {
        match self {
            Codec::Bytes(None) => "bytes are the tokens".into(),
            Codec::Bytes(Some(folder)) => {
                format!("{}: without a tokenizer.json, bytes are the tokens", folder.display())
            }
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(_, path) => path.display().to_string(),
        }
    }

    /// The tokens of a text, all of them in the model's vocabulary.
    pub fn encode(&self, text: &[u8], vocabulary: usize) -> Result<Vec<u32>, String> {
        let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", self.source());
        let tokens: Vec<u32> = match self {
            Codec::Bytes(_) => text.iter().map(|&b| b.into()).collect(),
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, _) => {
                let text = std::str::from_utf8(text).map_err(|e| format!("the text is not UTF-8: {e}"))?;
                t.encode_fast(text, false).map_err(|e| wrong(&e))?.get_ids().to_vec()
            }
        };
        match tokens.iter().max() {
            Some(&top) if top as usize >= vocabulary => {
                Err(wrong(&format!("got token {top}, wanted one of the model's vocabulary of {vocabulary}")))
            }
            _ => Ok(tokens),
        }
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        match self {
            Codec::Bytes(_) => {
                let bytes: Vec<u8> = tokens.iter().map(|&t| t as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            #[cfg(feature = "tokenizers")]
            Codec::Tokenizer(t, path) => {
                t.decode(tokens, false).map_err(|e| format!("{}: {e}", path.display()))
            }
        }
    }
}

/// The bytes of a file.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    let text = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    if text.is_empty() { Err(format!("{}: the file is empty", path.display())) } else { Ok(text) }
}

/// The sources and pages of this workspace, in the order of their paths.
pub fn bundled() -> Result<Vec<u8>, String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders: Vec<PathBuf> =
        ["tensor/src", "kernels/src", "autograd/src", "nn/src", "parallel/src"].map(|f| root.join(f)).into();
    let list =
        |folder: &Path| std::fs::read_dir(folder).map(|l| l.flatten().map(|e| e.path()).collect::<Vec<_>>());
    files.extend(
        list(root).unwrap_or_default().into_iter().filter(|p| p.extension().is_some_and(|e| e == "md")),
    );
    while let Some(folder) = folders.pop() {
        for path in list(&folder).unwrap_or_default() {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    let text: Vec<u8> = files.iter().filter_map(|path| std::fs::read(path).ok()).flatten().collect();
    if text.is_empty() {
        let wanted =
            "the workspace's own sources, which are the default text, are not there; name a text with --data";
        return Err(format!("{}: {wanted}", root.display()));
    }
    Ok(text)
}
