//! [`Modules`]: which of a model's layers, as PEFT's `adapter_config.json` says it.

use std::collections::BTreeMap;

use regex_lite::Regex;
use serde_json::{Value, json};

use crate::models::fields::Parsed;

/// The paths of embeddings in transformers' models.
pub(super) const EMBEDDINGS: [&str; 3] = ["model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"];

/// Some modules of a model, by their paths in transformers' model, such as `model.layers.0.self_attn.q_proj`.
#[derive(Clone, Debug, PartialEq)]
pub enum Modules {
    /// Those whose path, or its end after a dot, is one of these. The names of a model's own parameters are such paths, too.
    Names(Vec<String>),
    /// Those whose whole path matches a regular expression, which has no look-around and no backreferences.
    Pattern(String),
}

impl Default for Modules {
    /// None.
    fn default() -> Modules {
        Modules::Names(Vec::new())
    }
}

impl std::fmt::Display for Modules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Modules::Names(names) => f.write_str(&names.join(",")),
            Modules::Pattern(pattern) => f.write_str(pattern),
        }
    }
}

/// A layer of a model.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// Its path in the model.
    pub(super) path: String,
    /// Its path in transformers' model. Layers whose weights files join have one.
    pub(super) peft: String,
    /// The path of its weight there, which experts have together.
    pub(super) parameter: String,
}

impl Layer {
    /// The layer of these paths.
    pub(super) fn new(path: &str, peft: &str) -> Layer {
        let parameter =
            Expert::of(peft).map_or_else(|| format!("{peft}.weight"), |expert| expert.parameter());
        Layer { path: path.into(), peft: peft.into(), parameter }
    }

    /// Whether its weight's path, or the end of it after a dot, is one of these.
    pub(super) fn has_weight(&self, names: &[String]) -> bool {
        ends_with_any(&self.parameter, names)
    }

    /// Whether one of its paths, or the end of one after a dot, is that name.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.is_called_in_files(name) || has_end(&self.path, name)
    }

    /// The same of its path in transformers' model alone.
    pub(super) fn is_called_in_files(&self, name: &str) -> bool {
        has_end(&self.peft, name)
    }
}

/// A layer of an expert. Transformers' model joins the weights of experts: `gate_up_proj` `[experts, 2 inner, width]`, whose first half are those
/// of gates, and `down_proj` `[experts, width, inner]`.
#[derive(Clone)]
pub(super) struct Expert {
    /// The path of all experts there.
    pub(super) experts: String,
    pub(super) number: usize,
    pub(super) part: ExpertPart,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum ExpertPart {
    Gate,
    Up,
    Down,
}

impl Expert {
    /// By the path that files of weights have.
    pub(super) fn of(path: &str) -> Option<Expert> {
        let (mixture, layer) = path.rsplit_once(".experts.")?;
        let (number, layer) = layer.split_once('.')?;
        let part = match layer {
            "gate_proj" | "w1" => ExpertPart::Gate,
            "up_proj" | "w3" => ExpertPart::Up,
            "down_proj" | "w2" => ExpertPart::Down,
            _ => return None,
        };
        let experts = format!("{}.experts", mixture.replace(".block_sparse_moe", ".mlp"));
        Some(Expert { experts, number: number.parse().ok()?, part })
    }

    /// The path of the joined weight.
    pub(super) fn parameter(&self) -> String {
        let joined = if self.part == ExpertPart::Down { "down_proj" } else { "gate_up_proj" };
        format!("{}.{joined}", self.experts)
    }
}

/// Whether a path, or its end after a dot, is one of these names.
pub(super) fn ends_with_any(path: &str, names: &[String]) -> bool {
    names.iter().any(|name| has_end(path, name))
}

/// Whether a path, or its end after a dot, is that name.
fn has_end(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a parameter of this path is in a module whose path ends with one of these texts.
pub(super) fn is_within(path: &str, modules: &[String]) -> bool {
    let is_end = |of: &str| modules.iter().any(|module| of.ends_with(&**module));
    path.match_indices('.').any(|(end, _)| is_end(&path[..end]))
}

/// The path of a parameter in transformers' model, by its name in files: some families' have others there.
pub(super) fn in_model(stored: &str) -> String {
    stored.replace("embed_out.", "lm_head.").replace(".block_sparse_moe.gate.", ".mlp.gate.")
}

impl Modules {
    /// From a list of names or an expression.
    pub(super) fn of(value: &Value) -> Option<Modules> {
        match value {
            Value::String(pattern) => Some(Modules::Pattern(pattern.clone())),
            Value::Array(names) => {
                let name = |v: &Value| v.as_str().map(str::to_string);
                names.iter().map(name).collect::<Option<_>>().map(Modules::Names)
            }
            _ => None,
        }
    }

    pub(super) fn json(&self) -> Value {
        match self {
            Modules::Names(names) => json!(names),
            Modules::Pattern(pattern) => json!(pattern),
        }
    }

    pub(super) fn has(&self, layer: &Layer) -> Parsed<bool> {
        match self {
            Modules::Names(names) => Ok(names.iter().any(|name| layer.is_called(name))),
            Modules::Pattern(pattern) => {
                // The pattern alone, too: one as `a)|(b` is no expression, but would be one between the parentheses below.
                expression(pattern)?;
                Ok(expression(&format!("^(?:{pattern})$"))?.is_match(&layer.peft))
            }
        }
    }

    /// Refuses an expression that is not supported.
    pub(super) fn check(&self) -> Parsed<()> {
        match self {
            Modules::Names(_) => Ok(()),
            Modules::Pattern(pattern) => expression(pattern).map(drop),
        }
    }
}

pub(super) fn expression(pattern: &str) -> Parsed<Regex> {
    let wanted = "wanted one without look-around and backreferences";
    Regex::new(pattern).map_err(|e| format!("got the regular expression {pattern:?} ({e}), {wanted}"))
}

/// What the first expression of a map says that matches a path, or its end after a dot.
pub(super) fn first_match<T: Copy>(of: &BTreeMap<String, T>, path: &str) -> Parsed<Option<T>> {
    for (pattern, value) in of {
        if expression(&format!("^(?:(.*\\.)?({pattern})$)"))?.is_match(path) {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// The number of a layer's block: what follows the first match of one of these expressions, or of any name inside the path.
pub(super) fn block(path: &str, patterns: &[String]) -> Parsed<Option<usize>> {
    let any = [r"^.*?\.[^.]*\.(?P<number>[0-9]+)\.".to_string()];
    let each = |pattern: &String| format!(r"^(?:(?:^|.*?\.){pattern}\.(?P<number>[0-9]+)\.)");
    let patterns = if patterns.is_empty() { any.to_vec() } else { patterns.iter().map(each).collect() };
    for pattern in patterns {
        if let Some(found) = expression(&pattern)?.captures(path) {
            return Ok(found.name("number").and_then(|number| number.as_str().parse().ok()));
        }
    }
    Ok(None)
}
