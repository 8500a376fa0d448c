//! [`end_tokens`]: where a model ends a text.

use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// The files that name the tokens at which a model ends a text.
const FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// The tokens at which the model of a folder ends a text: `eos_token_id`, one or a list, of `generation_config.json` and `config.json`.
///
/// # Errors
/// If a file cannot be read, or has something else there.
pub fn end_tokens(folder: &Path) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    for name in FILES {
        all.extend(end_tokens_in(&folder.join(name))?);
    }
    Ok(all)
}

/// The `eos_token_id` of a file, if it is there: a number, a list of numbers, or nothing.
fn end_tokens_in(path: &Path) -> Result<Vec<u32>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let file = std::fs::read(path).map_err(|e| Error::file(path, e))?;
    let values: Value = serde_json::from_slice(&file).map_err(|e| Error::file(path, e))?;
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let tokens = match &values["eos_token_id"] {
        Value::Null => Some(Vec::new()),
        Value::Array(all) => all.iter().map(token).collect(),
        one => token(one).map(|token| vec![token]),
    };
    tokens.ok_or_else(|| {
        let got = &values["eos_token_id"];
        Error::file(path, format!("`eos_token_id`: got {got}, wanted a token's number or a list of such"))
    })
}
