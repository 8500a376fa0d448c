//! [`Fields`]: the fields of a `config.json`, each of which is read, or known to change nothing, or refused.

use std::cell::RefCell;
use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Activation;

/// The fields of an object. A null field counts as absent.
pub(super) struct Fields<'a> {
    all: &'a Map<String, Value>,
    read: RefCell<HashSet<String>>,
}

pub(super) type Parsed<T> = std::result::Result<T, String>;

/// Fields that change neither logits nor losses nor gradients: of tokenizers, of generation, of where a file is from, of other tasks.
const NEUTRAL: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "embd_layer",
    "eos_token_id",
    "finetuning_task",
    "full_attn_mod",
    "gradient_checkpointing",
    "id2label",
    "interpolate_factor",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
];

impl<'a> Fields<'a> {
    pub(super) fn new(all: &'a Map<String, Value>) -> Fields<'a> {
        Fields { all, read: RefCell::default() }
    }

    pub(super) fn get<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Parsed<Option<T>> {
        self.read.borrow_mut().insert(name.to_string());
        match self.all.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| format!("{name} is {value}, wanted {wanted}")),
        }
    }

    /// Whether a field is there, also as null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    pub(super) fn text(&self, name: &str) -> Parsed<Option<&'a str>> {
        self.get(name, "a string", Value::as_str)
    }

    pub(super) fn size(&self, name: &str) -> Parsed<Option<usize>> {
        self.get(name, "a size", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(super) fn needed(&self, name: &str) -> Parsed<usize> {
        self.size(name)?.ok_or_else(|| format!("{name} is missing"))
    }

    pub(super) fn number(&self, name: &str, default: f64) -> Parsed<f64> {
        Ok(self.maybe_number(name)?.unwrap_or(default))
    }

    pub(super) fn maybe_number(&self, name: &str) -> Parsed<Option<f64>> {
        self.get(name, "a number", Value::as_f64)
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Parsed<bool> {
        Ok(self.get(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(super) fn object(&self, name: &str) -> Parsed<Option<&'a Map<String, Value>>> {
        self.get(name, "an object", Value::as_object)
    }

    pub(super) fn list(&self, name: &str) -> Parsed<Option<&'a Vec<Value>>> {
        self.get(name, "a list", Value::as_array)
    }

    pub(super) fn activation(&self, name: &str, default: &str) -> Parsed<Activation> {
        let text = self.text(name)?.unwrap_or(default);
        let known = ACTIVATIONS.iter().find(|(known, _)| *known == text);
        known.map(|(_, activation)| *activation).ok_or_else(|| format!("{name} {text:?} is not supported"))
    }

    pub(super) fn must_be(&self, name: &str, wanted: bool) -> Parsed<()> {
        let got = self.flag(name, wanted)?;
        if got == wanted { Ok(()) } else { Err(format!("{name} = {got} is not supported")) }
    }

    /// Refuses a number other than 0.
    pub(super) fn must_be_zero(&self, name: &str) -> Parsed<()> {
        match self.number(name, 0.0)? {
            0.0 => Ok(()),
            other => Err(format!("{name} = {other} is not supported, wanted 0")),
        }
    }

    /// [`Fields::all_read`] of fields of which those that are false or empty change nothing.
    pub(super) fn all_used(&self, neutral: &[&str]) -> Parsed<()> {
        let empty = |value: &Value| match value {
            Value::Bool(flag) => !flag,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        let unused = self.all.iter().filter(|(_, value)| empty(value)).map(|(name, _)| name.as_str());
        self.all_read(&neutral.iter().copied().chain(unused).collect::<Vec<_>>())
    }

    /// Refuses fields that were neither read nor are neutral.
    pub(super) fn all_read(&self, neutral: &[&str]) -> Parsed<()> {
        let read = self.read.borrow();
        let known = |name: &&String| {
            NEUTRAL.contains(&name.as_str())
                || neutral.contains(&name.as_str())
                || read.contains(name.as_str())
        };
        match self.all.iter().find(|(name, value)| !value.is_null() && !known(name)) {
            Some((name, value)) => Err(format!("{name} = {value} is not supported")),
            None => Ok(()),
        }
    }
}

const ACTIVATIONS: [(&str, Activation); 7] = [
    ("gelu_new", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("swish", Activation::Silu),
];

pub(super) fn activation_name(activation: Activation) -> &'static str {
    ACTIVATIONS.iter().find(|(_, known)| *known == activation).map_or("gelu_new", |(name, _)| name)
}
