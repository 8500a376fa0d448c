//! BERT: an encoder that sees both sides of each token, with a head that guesses masked tokens or one that classifies a text.
//!
//! ```text
//! x = norm(word + position + type)
//! x = norm1(x + attention(x));   x = norm2(x + linear2(act(linear1(x))))
//! logits = table . norm(act(dense(x))) + bias          masked language model, with the embedding's table
//! logits = classifier(tanh(pooler(x of token 0)))      classification
//! ```
//! Source: Devlin et al.: BERT (2019).

use phalanx_autograd::Var;
use phalanx_tensor::{DType, Tensor};
use serde_json::{Map, Value, json};

use super::Activation;
use super::check::{check_layers, check_numbers, check_sizes};
use super::fields::{Fields, activation_name, dtype_name, numbered_labels, set_labels};
use super::pretrained::{Pretrained, renamed};
use crate::mode::modes;
use crate::scope::join;
use crate::{
    AttentionMasks, Buffer, Dropout, Embedding, EmbeddingConfig, Entry, Error, Init, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Mode, Module, Parameter, Parameters, Result, Scope,
    TransformerEncoderLayer, TransformerEncoderLayerConfig, parameters,
};

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
        self.check().map_err(|why| Error::invalid("BERT", why))?;
        let embeddings = scope.child("embeddings");
        let init = self.normal();
        let tied = self.tied && self.task == BertTask::MaskedLm;
        let table = |count: usize| EmbeddingConfig::new(count, self.width).with_init(init);
        let words = table(self.vocabulary).with_tied_head(tied);
        let words = self.padding.map_or(words, |token| words.with_padding(token as isize));
        let layer = TransformerEncoderLayerConfig {
            inner: self.inner,
            dropout: self.dropout,
            attention_dropout: Some(self.attention_dropout),
            inner_dropout: Some(0.0),
            activation: self.activation,
            eps: self.eps,
            init: Some(init),
            ..TransformerEncoderLayerConfig::new(self.width, self.heads)
        };
        let encoder = scope.child("encoder").child("layer");
        let word_embeddings = words.init(&embeddings.child("word_embeddings"))?;
        Ok(Bert {
            head: match self.task {
                BertTask::MaskedLm => Head::MaskedLm(Predictions::new(self, scope, &word_embeddings)?),
                BertTask::Classification => Head::Classifier(Classifier::new(self, scope)?),
            },
            embeddings: Embeddings {
                word_embeddings,
                position_embeddings: table(self.context).init(&embeddings.child("position_embeddings"))?,
                token_type_embeddings: table(self.types).init(&embeddings.child("token_type_embeddings"))?,
                norm: self.norm(&embeddings)?,
                dropout: Dropout::new(self.dropout, &embeddings.child("dropout"))?,
            },
            layers: (0..self.layers).map(|i| layer.init(&encoder.child(i))).collect::<Result<_>>()?,
            mode: Mode::default(),
        })
    }

    fn mode(model: &Bert) -> &Mode {
        &model.mode
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

/// A BERT. [`BertConfig`] makes it and reads its folders.
pub struct Bert {
    embeddings: Embeddings,
    layers: Vec<TransformerEncoderLayer>,
    head: Head,
    mode: Mode,
}

modes!(Bert);
parameters!(Bert { embeddings, layers = "encoder.layer", head = "" });

/// Texts, `[B, T]` each.
#[derive(Clone, Copy, Debug)]
pub struct BertInput<'a> {
    /// The tokens, i64.
    pub tokens: &'a Var,
    /// Their types, i64; 0 if absent.
    pub types: Option<&'a Var>,
    /// Which tokens are seen: i64, 0 for padding, or bool; all if absent.
    pub visible: Option<&'a Var>,
}

impl Bert {
    /// The stream after the last block, `[B, T, width]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn hidden(&self, input: BertInput<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let mut x = self.embeddings.run(input)?;
        let hidden = input.visible.map(|visible| match visible.dtype() {
            DType::Bool => visible.eq_scalar(false),
            _ => visible.eq_scalar(0i64),
        });
        let hidden = hidden.transpose()?;
        let masks = AttentionMasks { keys: hidden.as_ref(), mask: None };
        for layer in &self.layers {
            x = layer.forward_masked(&x, masks)?;
        }
        Ok(x)
    }

    /// The logits: of all tokens `[B, T, vocabulary]`, or of classes `[B, labels]`. [`CrossEntropyLoss::classes_last`] takes both.
    ///
    /// [`CrossEntropyLoss::classes_last`]: crate::CrossEntropyLoss::classes_last
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn logits(&self, input: BertInput<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let x = self.hidden(input)?;
        match &self.head {
            Head::MaskedLm(head) => head.run(&x),
            Head::Classifier(head) => head.run(&x),
        }
    }
}

/// Tokens to logits, all of one type and all seen.
impl Module for Bert {
    fn forward(&self, tokens: &Var) -> Result<Var> {
        self.logits(BertInput { tokens, types: None, visible: None })
    }
}

struct Embeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

parameters!(Embeddings {
    word_embeddings,
    position_embeddings,
    token_type_embeddings,
    norm = "LayerNorm"
});

impl Embeddings {
    fn run(&self, input: BertInput<'_>) -> Result<Var> {
        let BertInput { tokens, types, .. } = input;
        let (shape, context) = (tokens.shape(), self.position_embeddings.weight.tensor().shape()[0]);
        if shape.len() != 2 || shape[1] > context {
            let why = format!("got tokens of shape {shape:?}, wanted [B, T] with T up to {context}");
            return Err(Error::invalid("BERT", why));
        }
        let other = |var: &&Var| var.shape() != shape;
        if let Some(odd) = [types, input.visible].into_iter().flatten().find(other) {
            let why = format!("got types or a mask of shape {:?} for tokens {shape:?}", odd.shape());
            return Err(Error::invalid("BERT", why));
        }
        let zeros = || Ok::<_, Error>(Var::new(Tensor::zeros(shape, DType::I64, tokens.device())?));
        let types = types.map_or_else(zeros, |types| Ok(types.clone()))?;
        let positions = Var::arange(0, shape[1] as i64, 1, DType::I64, tokens.device())?;
        let x = self.word_embeddings.forward(tokens)?.add(&self.token_type_embeddings.forward(&types)?)?;
        let x = x.add(&self.position_embeddings.forward(&positions)?)?;
        self.dropout.forward(&self.norm.forward(&x)?)
    }
}

enum Head {
    MaskedLm(Predictions),
    Classifier(Classifier),
}

impl Parameters for Head {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        match self {
            Head::MaskedLm(head) => head.visit(path, visitor),
            Head::Classifier(head) => head.visit(path, visitor),
        }
    }

    fn borrowed(&self) -> Vec<Parameter> {
        match self {
            Head::MaskedLm(head) => head.borrowed(),
            Head::Classifier(_) => Vec::new(),
        }
    }
}

/// Guesses tokens: `table . norm(act(dense(x))) + bias`.
struct Predictions {
    dense: Linear,
    norm: LayerNorm,
    activation: Activation,
    /// The embedding's table, or one of its own.
    table: Parameter,
    bias: Parameter,
    tied: bool,
    /// Transformers has a second bias beside an untied table, which it stores and does not use.
    unused: Option<Buffer>,
}

impl Predictions {
    fn new(config: &BertConfig, scope: &Scope, words: &Embedding) -> Result<Predictions> {
        let scope = scope.child("cls").child("predictions");
        let (transform, own) = (scope.child("transform"), scope.child("decoder"));
        let (shape, zeros) = ([config.vocabulary], Init::ZEROS);
        let dense = LinearConfig::new(config.width, config.width).with_init(config.normal());
        Ok(Predictions {
            dense: dense.init(&transform.child("dense"))?,
            norm: config.norm(&transform)?,
            activation: config.activation,
            table: match config.tied {
                true => words.weight.clone(),
                false => own.parameter("weight", &[config.vocabulary, config.width], config.normal())?,
            },
            bias: if config.tied { &scope } else { &own }.parameter("bias", &shape, zeros)?,
            tied: config.tied,
            unused: match config.tied {
                true => None,
                false => Some(Buffer::new(Tensor::zeros(&shape, scope.dtype(), scope.device())?)),
            },
        })
    }

    fn run(&self, x: &Var) -> Result<Var> {
        let x = self.norm.forward(&self.activation.apply(&self.dense.forward(x)?)?)?;
        Ok(x.linear(&self.table.var(), Some(&self.bias.var()))?)
    }
}

impl Parameters for Predictions {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let at = |name: &str| join(path, format!("cls.predictions.{name}"));
        self.dense.visit(&at("transform.dense"), visitor);
        self.norm.visit(&at("transform.LayerNorm"), visitor);
        if !self.tied {
            self.table.visit(&at("decoder.weight"), visitor);
        }
        self.bias.visit(&at(if self.tied { "bias" } else { "decoder.bias" }), visitor);
        self.unused.visit(&at("bias"), visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        if self.tied { vec![self.table.clone()] } else { Vec::new() }
    }
}

/// Classifies a text by what its first token has.
struct Classifier {
    pooler: Linear,
    dropout: Dropout,
    classifier: Linear,
}

parameters!(Classifier { pooler = "pooler.dense", classifier });

impl Classifier {
    fn new(config: &BertConfig, scope: &Scope) -> Result<Classifier> {
        let linear = |outputs: usize| LinearConfig::new(config.width, outputs).with_init(config.normal());
        let dropout = config.classifier_dropout.unwrap_or(config.dropout);
        Ok(Classifier {
            pooler: linear(config.width).init(&scope.child("pooler").child("dense"))?,
            dropout: Dropout::new(dropout, &scope.child("dropout"))?,
            classifier: linear(config.labels.len()).init(&scope.child("classifier"))?,
        })
    }

    fn run(&self, x: &Var) -> Result<Var> {
        let x = self.pooler.forward(&x.select(1, 0)?)?.tanh()?;
        self.classifier.forward(&self.dropout.forward(&x)?)
    }
}
