//! BERT: an encoder that sees both sides of each token, with a head that guesses masked tokens or one that classifies a text.
//!
//! ```text
//! x = norm(word + position + type)
//! x = norm1(x + attention(x));   x = norm2(x + linear2(act(linear1(x))))
//! logits = table . norm(act(dense(x))) + bias          masked language model, with the embedding's table
//! logits = classifier(tanh(pooler(x of token 0)))      classification
//! ```
//! Here are the settings, and `model` has the model, whole or a stage of it.
//! Source: Devlin et al.: BERT (2019).

mod model;

use std::sync::Arc;

use phalanx_tensor::DType;
use serde_json::{Map, Value, json};

use super::check::{check_layers, check_numbers, check_sizes};
use super::encoder::{BlockConfig, EncoderConfig};
use super::fields::{Fields, activation_name, dtype_name, numbered_labels, set_labels};
use super::pretrained::{Pretrained, renamed};
use super::{Activation, DecoderStage};
use crate::layer_factory::EmbeddingSpec;
use crate::{Error, Init, LayerFactory, LayerNorm, LayerNormConfig, Mode, OneDevice, Result, Scope};

pub use model::{Bert, BertInput};

/// A BERT's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// What it is for.
    pub task: BertTask,
    /// The number of tokens.
    pub vocabulary: usize,
    /// The largest number of positions of a sequence.
    pub context: usize,
    /// The number of types of tokens, such as of the first text and of the second.
    pub types: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside a block's perceptron.
    pub inner: usize,
    /// The nonlinearity of perceptrons and of the head for masked tokens.
    pub activation: Activation,
    /// Added to variances in norms.
    pub eps: f64,
    /// The token of padding, whose embedding is not trained; none if absent.
    pub padding: Option<i64>,
    /// Whether the head for masked tokens shares the embedding's table.
    pub tied: bool,
    /// Dropout of the embedding and of the branches' outputs.
    pub dropout: f64,
    /// Dropout of attention's probabilities.
    pub attention_dropout: f64,
    /// Dropout before the classifier; `dropout` if absent.
    pub classifier_dropout: Option<f64>,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// Standard deviation of initial weights.
    pub init_std: f64,
}

/// What a BERT is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertTask {
    /// Logits of all tokens at each position.
    MaskedLm,
    /// Logits of classes of each text.
    Classification,
}

const CLASSES: [(BertTask, &str); 2] =
    [(BertTask::MaskedLm, "BertForMaskedLM"), (BertTask::Classification, "BertForSequenceClassification")];

/// What files call the parts of a block.
const LAYER: [(&str, &[&str]); 6] = [
    ("self_attn.in_proj_", &["attention.self.query.", "attention.self.key.", "attention.self.value."]),
    ("self_attn.out_proj.", &["attention.output.dense."]),
    ("linear1.", &["intermediate.dense."]),
    ("linear2.", &["output.dense."]),
    ("norm1.", &["attention.output.LayerNorm."]),
    ("norm2.", &["output.LayerNorm."]),
];

impl BertConfig {
    /// BERT's settings for a model of that size, with two types of tokens, two classes and dropout of 0.1.
    pub fn new(
        task: BertTask,
        vocabulary: usize,
        context: usize,
        layers: usize,
        heads: usize,
        width: usize,
    ) -> BertConfig {
        BertConfig {
            task,
            vocabulary,
            context,
            types: 2,
            layers,
            heads,
            width,
            inner: width.saturating_mul(4),
            activation: Activation::Gelu,
            eps: 1e-12,
            padding: Some(0),
            tied: true,
            dropout: 0.1,
            attention_dropout: 0.1,
            classifier_dropout: None,
            labels: numbered_labels(2),
            init_std: 0.02,
        }
    }

    fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("types", self.types),
            ("heads", self.heads),
            ("width", self.width),
            ("inner", self.inner),
            ("labels", self.labels.len()),
        ])?;
        check_layers(self.layers)?;
        let dropouts = [self.dropout, self.attention_dropout, self.classifier_dropout.unwrap_or(0.0)];
        check_numbers(self.eps, self.init_std, &dropouts)
    }

    fn normal(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.init_std }
    }

    fn norm(&self, scope: &Scope) -> Result<LayerNorm> {
        LayerNormConfig::new(&[self.width]).with_eps(self.eps).init(&scope.child("LayerNorm"))
    }

    /// The table of the tokens' embeddings.
    fn words(&self) -> Result<EmbeddingSpec> {
        let padding = self.padding.map(|token| {
            let row = usize::try_from(if token < 0 { token + self.vocabulary as i64 } else { token });
            row.ok().filter(|row| *row < self.vocabulary).ok_or_else(|| {
                let why = format!("got the padding token {token}, wanted one of {} tokens", self.vocabulary);
                Error::invalid("BERT", why)
            })
        });
        let tied = self.tied && self.task == BertTask::MaskedLm;
        let (count, width, init) = (self.vocabulary, self.width, self.normal());
        Ok(EmbeddingSpec { count, width, init, tied, padding: padding.transpose()? })
    }

    fn block(&self) -> BlockConfig {
        BlockConfig {
            width: self.width,
            heads: self.heads,
            inner: self.inner,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            activation: self.activation,
            eps: self.eps,
            norm_first: false,
            qkv_bias: true,
            init: self.normal(),
        }
    }
}

impl EncoderConfig for BertConfig {
    type Of<L: LayerFactory> = Bert<L>;

    fn blocks(&self) -> usize {
        self.layers
    }

    fn init_stage_beside<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Bert<L>>,
    ) -> Result<Bert<L>> {
        self.check().map_err(|why| Error::invalid("BERT", why))?;
        Bert::build(self, layers, scope, stage, first)
    }
}

impl Pretrained for BertConfig {
    type Model = Bert;

    fn from_json(fields: &Map<String, Value>) -> Result<BertConfig, String> {
        let f = Fields::new(fields);
        f.must_say("model_type", "bert")?;
        let class = f.architecture(&CLASSES.map(|(_, class)| class))?;
        let task = CLASSES.iter().find(|(_, known)| *known == class).map_or(CLASSES[0].0, |(task, _)| *task);
        ["is_decoder", "add_cross_attention"].iter().try_for_each(|name| f.must_be(name, false))?;
        f.must_say("position_embedding_type", "absolute")?;
        let padding = f.get("pad_token_id", "a token", Value::as_i64)?;
        let size = |name: &str, usual| Ok::<_, String>(f.size(name)?.unwrap_or(usual));
        let config = BertConfig {
            task,
            vocabulary: size("vocab_size", 30522)?,
            context: size("max_position_embeddings", 512)?,
            types: size("type_vocab_size", 2)?,
            layers: size("num_hidden_layers", 12)?,
            heads: size("num_attention_heads", 12)?,
            width: size("hidden_size", 768)?,
            inner: size("intermediate_size", 3072)?,
            activation: f.activation("hidden_act", "gelu")?,
            eps: f.number("layer_norm_eps", 1e-12)?,
            padding: if f.has("pad_token_id") { padding } else { Some(0) },
            tied: f.flag("tie_word_embeddings", true)?,
            dropout: f.number("hidden_dropout_prob", 0.1)?,
            attention_dropout: f.number("attention_probs_dropout_prob", 0.1)?,
            classifier_dropout: f.maybe_number("classifier_dropout")?,
            labels: f.labels()?,
            init_std: f.number("initializer_range", 0.02)?,
        };
        f.all_read(POOLERS)?;
        config.check()?;
        Ok(config)
    }

    fn to_json(&self, dtype: DType) -> Value {
        let class = CLASSES.iter().find(|(task, _)| *task == self.task).map(|(_, class)| class);
        let mut json = json!({
            "architectures": [class], "model_type": "bert", "dtype": dtype_name(dtype),
            "vocab_size": self.vocabulary, "max_position_embeddings": self.context,
            "type_vocab_size": self.types, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "hidden_size": self.width, "intermediate_size": self.inner,
            "hidden_act": activation_name(self.activation), "layer_norm_eps": self.eps,
            "pad_token_id": self.padding, "tie_word_embeddings": self.tied,
            "hidden_dropout_prob": self.dropout, "attention_probs_dropout_prob": self.attention_dropout,
            "classifier_dropout": self.classifier_dropout, "initializer_range": self.init_std,
            "is_decoder": false, "add_cross_attention": false, "use_cache": true,
            "bos_token_id": null, "eos_token_id": null,
        });
        set_labels(&mut json, &self.labels);
        json
    }

    fn init(&self, scope: &Scope) -> Result<Bert> {
        self.init_stage_beside(&Arc::new(OneDevice), scope, DecoderStage::whole(self.layers), None)
    }

    fn mode(model: &Bert) -> &Mode {
        model.mode()
    }

    fn matrix_elements(&self) -> f64 {
        let f = |n: usize| n as f64;
        let block = 4.0 * f(self.width) + 2.0 * f(self.inner);
        (f(self.vocabulary) + f(self.context) + f(self.types) + f(self.layers) * block) * f(self.width)
    }

    fn file_names(&self, name: &str) -> Vec<String> {
        match name.split('.').next() {
            Some("cls" | "classifier") => vec![name.to_string()],
            _ => renamed(&format!("bert.{name}"), &LAYER),
        }
    }

    /// Files of pretraining have the heads of both tasks; old files have the positions, and a tied table twice.
    fn is_unused(&self, stored: &str) -> bool {
        let of_pretraining = ["bert.pooler.", "cls.seq_relationship."];
        let again = ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"];
        stored == "bert.embeddings.position_ids"
            || self.task == BertTask::MaskedLm && of_pretraining.iter().any(|part| stored.starts_with(part))
            || self.tied && again.contains(&stored)
    }
}

/// Settings of poolers that BERT has not.
const POOLERS: &[&str] = &[
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
];
