//! [`Fields`]: the fields of a `config.json`, each of which is read, or known to change nothing, or refused.

use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;

use phalanx_tensor::DType;
use serde_json::{Map, Value};

use super::Activation;
use crate::{Error, Result};

/// The fields of an object. A null field counts as absent.
pub(super) struct Fields<'a> {
    all: &'a Map<String, Value>,
    read: RefCell<HashSet<String>>,
}

pub(super) type Parsed<T> = std::result::Result<T, String>;

/// The fields of the text of a `config.json`; `path` names it in errors.
pub(super) fn parse_fields(text: &str, path: &Path) -> Result<Map<String, Value>> {
    let wrong = |why: String| Error::invalid(path.display().to_string(), why);
    match serde_json::from_str(text).map_err(|e| wrong(format!("not valid JSON: {e}")))? {
        Value::Object(fields) => Ok(fields),
        _ => Err(wrong("not a JSON object".into())),
    }
}

/// Fields that change neither logits nor losses nor gradients: of tokenizers, of generation, of where a file is from, of other tasks.
const NEUTRAL: &[&str] = &[
    "_num_labels",
    "_rope_scaling_validation",
    "_sliding_window_pattern",
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
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "embd_layer",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "full_attn_mod",
    "gradient_checkpointing",
    "id2label",
    "interpolate_factor",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "seq_length",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
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
        self.get(name, "a size", as_size)
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
        known.map(|(_, activation)| *activation).ok_or_else(|| {
            let names = ACTIVATIONS.map(|(known, _)| known).join(", ");
            format!("{name} {text:?} is not supported, wanted one of {names}")
        })
    }

    pub(super) fn must_be(&self, name: &str, wanted: bool) -> Parsed<()> {
        let got = self.flag(name, wanted)?;
        if got == wanted { Ok(()) } else { Err(format!("{name} = {got} is not supported")) }
    }

    /// Refuses a text other than `wanted`, if there is one.
    pub(super) fn must_say(&self, name: &str, wanted: &str) -> Parsed<()> {
        match self.text(name)? {
            Some(other) if other != wanted => {
                Err(format!("{name} {other:?} is not supported, wanted {wanted:?}"))
            }
            _ => Ok(()),
        }
    }

    /// A list of sizes.
    pub(super) fn sizes(&self, name: &str) -> Parsed<Option<Vec<usize>>> {
        self.get(name, "a list of sizes", |list| list.as_array()?.iter().map(as_size).collect())
    }

    /// A size for height and width, or both.
    pub(super) fn height_and_width(&self, name: &str) -> Parsed<Option<[usize; 2]>> {
        self.get(name, "a size or two", |value| match value {
            Value::Array(both) => both.iter().map(as_size).collect::<Option<Vec<_>>>()?.try_into().ok(),
            one => Some([as_size(one)?; 2]),
        })
    }

    /// The names of the classes of a classifier.
    pub(super) fn labels(&self) -> Parsed<Vec<String>> {
        let names = self.object("id2label")?;
        let count = self.size("num_labels")?.unwrap_or(names.map_or(2, Map::len));
        if count > LABELS_MAX {
            return Err(format!("num_labels is {count}, wanted at most {LABELS_MAX}"));
        }
        let Some(names) = names.filter(|names| names.len() == count) else {
            return Ok(numbered_labels(count));
        };
        let name = |i: usize| names.get(&i.to_string()).and_then(Value::as_str).map(str::to_string);
        (0..count).map(|i| name(i).ok_or_else(|| format!("id2label has no name for {i}"))).collect()
    }

    /// The class in transformers that a file was written by; it must be one of these.
    pub(super) fn architecture(&self, known: &[&str]) -> Parsed<&'a str> {
        let class = self.list("architectures")?.and_then(|all| all.first()).and_then(Value::as_str);
        match class {
            Some(class) if known.contains(&class) => Ok(class),
            Some(class) => Err(format!("architectures has {class}, wanted {}", known.join(" or "))),
            None => Err(format!("architectures is missing, wanted {}", known.join(" or "))),
        }
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

/// The most classes of a classifier: a damaged file may ask for any number.
const LABELS_MAX: usize = 1 << 20;

/// The names that classes have until they get others.
pub(super) fn numbered_labels(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("LABEL_{i}")).collect()
}

/// Writes the names of classes.
pub(super) fn set_labels(json: &mut Value, labels: &[String]) {
    let by_number = labels.iter().enumerate().map(|(i, name)| (i.to_string(), name.clone().into()));
    json["id2label"] = by_number.collect::<Map<_, _>>().into();
    json["label2id"] =
        labels.iter().enumerate().map(|(i, name)| (name.clone(), i.into())).collect::<Map<_, _>>().into();
}

pub(super) fn as_size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
}

/// The name of a dtype in a `config.json`.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

const ACTIVATIONS: [(&str, Activation); 20] = [
    ("gelu_new", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("swish", Activation::Silu),
    ("gelu_python", Activation::Gelu),
    ("gelu_accurate", Activation::GeluTanh),
    ("gelu_python_tanh", Activation::GeluTanh),
    ("quick_gelu", Activation::QuickGelu),
    ("relu2", Activation::SquaredRelu),
    ("tanh", Activation::Tanh),
    ("sigmoid", Activation::Sigmoid),
    ("leaky_relu", Activation::LeakyRelu),
    ("relu6", Activation::Relu6),
    ("mish", Activation::Mish),
    ("hardswish", Activation::HardSwish),
    ("gelu_10", Activation::ClippedGelu),
    ("linear", Activation::Identity),
];

pub(super) fn activation_name(activation: Activation) -> &'static str {
    ACTIVATIONS.iter().find(|(_, known)| *known == activation).map_or("gelu_new", |(name, _)| name)
}
