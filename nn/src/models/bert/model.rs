//! [`Bert`]: embeddings, blocks and the head of a task, or a pipeline stage of them.

use std::sync::Arc;

use phalanx_autograd::{CrossEntropy, Reduction, Var};
use phalanx_tensor::{DType, Dims, Tensor};

use super::{BertConfig, BertTask};
use crate::layer_factory::EmbeddingSpec;
use crate::mode::modes;
use crate::models::encoder::{Blocks, Encoder};
use crate::models::{Activation, DecoderStage, RecomputeMode};
use crate::scope::join;
use crate::{
    AnyUnit, Batch, Buffer, Dropout, Embedding, EmbeddingConfig, Entry, Error, Head, LayerFactory, LayerNorm,
    Linear, LinearConfig, Mode, Module, OneDevice, Parameter, Parameters, Result, Scope, WrappedUnit,
    parameters,
};

/// A BERT, or a stage of one. [`BertConfig`] makes it and reads its folders.
pub struct Bert<L: LayerFactory = OneDevice> {
    embeddings: Option<WrappedUnit<Embeddings<L>>>,
    blocks: Blocks<L>,
    head: Option<WrappedUnit<TaskHead<L>>>,
    mode: Mode,
}

modes!([L: LayerFactory] Bert<L>);
parameters!([L: LayerFactory] Bert<L> { embeddings, blocks = "encoder.layer", head = "" });

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

impl<L: LayerFactory> Bert<L> {
    pub(super) fn build(
        config: &BertConfig,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Bert<L>>,
    ) -> Result<Bert<L>> {
        let words = config.words()?;
        let embeddings = stage.first.then(|| Embeddings::new(config, layers, scope, words)).transpose()?;
        let of_first = first.and_then(|first| first.embeddings.as_ref()).map(WrappedUnit::module);
        let table = embeddings.as_ref().or(of_first).map(|embeddings| &embeddings.word_embeddings);
        let head = || -> Result<TaskHead<L>> {
            Ok(match config.task {
                BertTask::MaskedLm => {
                    TaskHead::MaskedLm(Predictions::new(config, &**layers, scope, words, table)?)
                }
                BertTask::Classification => TaskHead::Classifier(Classifier::new(config, scope)?),
            })
        };
        let head = stage.last.then(head).transpose()?;
        let places = scope.child("encoder").child("layer");
        let model = Bert {
            embeddings: embeddings.map(WrappedUnit::of),
            blocks: Blocks::new(&config.block(), layers, &places, stage, config.layers)?,
            head: head.map(WrappedUnit::of),
            mode: Mode::default(),
        };
        layers.built(&model.parameters())?;
        Ok(model)
    }

    pub(super) fn mode(&self) -> &Mode {
        &self.mode
    }

    /// The stream after the last block, `[B, T, width]`.
    ///
    /// # Errors
    /// If this stage has no embedding, or the inputs do not fit.
    pub fn hidden(&self, input: BertInput<'_>) -> Result<Var> {
        self.hidden_after(None, input)
    }

    /// [`Bert::hidden`] of a stage: after its last block, from the stream of the stage before. The first stage has none.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn hidden_after(&self, stream: Option<&Var>, input: BertInput<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let BertInput { tokens, types, visible } = input;
        let shape = tokens.shape();
        let other = |var: &&Var| var.shape() != shape;
        if let Some(odd) = [types, visible].into_iter().flatten().find(other) {
            let why = format!("got types or a mask of shape {:?} for tokens {shape:?}", odd.shape());
            return Err(Error::invalid("BERT", why));
        }
        let x = match (&self.embeddings, stream) {
            (Some(embeddings), None) => {
                let types = types.cloned();
                embeddings
                    .call(tokens, false, move |embeddings, tokens| embeddings.run(tokens, types.as_ref()))?
            }
            _ => self.blocks.received(stream)?,
        };
        if x.shape()[..2] != *shape {
            let why = format!("got a stream {:?} for tokens {shape:?}", x.shape());
            return Err(Error::invalid("BERT", why));
        }
        let seen = visible.map(|visible| match visible.dtype() {
            DType::Bool => Ok(visible.clone()),
            _ => visible.ne_scalar(0i64),
        });
        self.blocks.run(x, seen.transpose()?.as_ref())
    }

    /// The logits: of all tokens `[B, T, vocabulary]`, or of classes `[B, labels]`. [`CrossEntropyLoss::classes_last`] takes both.
    ///
    /// [`CrossEntropyLoss::classes_last`]: crate::CrossEntropyLoss::classes_last
    ///
    /// # Errors
    /// If this is not a whole model, or the inputs do not fit.
    pub fn logits(&self, input: BertInput<'_>) -> Result<Var> {
        self.logits_of(&self.hidden(input)?)
    }

    /// [`Bert::logits`] of the stream after the last block.
    ///
    /// # Errors
    /// If this stage has no head, or the stream does not fit.
    pub fn logits_of(&self, x: &Var) -> Result<Var> {
        let _mode = self.mode.enter();
        self.head()?.call(x, false, |head, x| match head {
            TaskHead::MaskedLm(head) => head.logits(x),
            TaskHead::Classifier(head) => head.run(x),
        })
    }

    /// The cross entropies of the labels, i64 `[B, T]` of tokens or `[B]` of classes (-100 is ignored), added and multiplied by `scale`.
    ///
    /// # Errors
    /// If this stage has no head, or stream or labels do not fit.
    pub fn loss(&self, x: &Var, labels: &Var, scale: f64) -> Result<Var> {
        let _mode = self.mode.enter();
        let labels = labels.clone();
        self.head()?.call(x, false, move |head, x| match head {
            TaskHead::MaskedLm(head) => head.loss(x, &labels, scale),
            TaskHead::Classifier(head) => {
                let reduction = Reduction::Sum;
                let config = CrossEntropy { reduction, scale, wide: true, ..CrossEntropy::default() };
                Ok(head.run(x)?.cross_entropy(&labels, &config)?)
            }
        })
    }

    fn head(&self) -> Result<&WrappedUnit<TaskHead<L>>> {
        self.head.as_ref().ok_or_else(|| Error::invalid("BERT", "this stage has no head"))
    }
}

/// Batches have tokens, labels and perhaps types and which tokens are seen, as [`BertInput`] says.
impl<L: LayerFactory> Encoder for Bert<L> {
    fn stage(&self) -> &DecoderStage {
        self.blocks.stage()
    }

    fn set_recompute(&mut self, mode: RecomputeMode) {
        self.blocks.set_recompute(mode);
    }

    fn stream(&self, batch: &Batch) -> Option<(Dims, DType)> {
        let [rows, positions] = *batch.tensors.first()?.shape() else { return None };
        Some(self.blocks.stream(rows, positions))
    }

    fn run(&self, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let vars: Vec<Var> = batch.tensors.iter().cloned().map(Var::new).collect();
        let ([tokens, labels, rest @ ..], 2..=4) = (&vars[..], vars.len()) else {
            let got = format!("got rows of {} tensors", vars.len());
            let why = format!("{got}, wanted tokens, labels and perhaps types and which tokens are seen");
            return Err(Error::invalid("BERT", why));
        };
        let x = self.hidden_after(input, BertInput { tokens, types: rest.first(), visible: rest.get(1) })?;
        if self.stage().last { self.loss(&x, labels, scale) } else { Ok(x) }
    }
}

/// Tokens to logits, all of one type and all seen.
impl<L: LayerFactory> Module for Bert<L> {
    fn forward(&self, tokens: &Var) -> Result<Var> {
        self.logits(BertInput { tokens, types: None, visible: None })
    }
}

struct Embeddings<L: LayerFactory> {
    word_embeddings: L::Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

parameters!([L: LayerFactory] Embeddings<L> {
    word_embeddings,
    position_embeddings,
    token_type_embeddings,
    norm = "LayerNorm"
});

impl<L: LayerFactory> Embeddings<L> {
    fn new(
        config: &BertConfig,
        layers: &Arc<L>,
        scope: &Scope,
        words: EmbeddingSpec,
    ) -> Result<Embeddings<L>> {
        let scope = scope.child("embeddings");
        // These tables are small, and every rank has all positions, so no layout cuts them.
        let table = |count: usize, name: &str| {
            EmbeddingConfig::new(count, config.width).with_init(config.normal()).init(&scope.child(name))
        };
        Ok(Embeddings {
            word_embeddings: layers.embedding(&scope.child("word_embeddings"), words)?,
            position_embeddings: table(config.context, "position_embeddings")?,
            token_type_embeddings: table(config.types, "token_type_embeddings")?,
            norm: config.norm(&scope)?,
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
        })
    }

    fn run(&self, tokens: &Var, types: Option<&Var>) -> Result<Var> {
        let (shape, context) = (tokens.shape(), self.position_embeddings.weight.tensor().shape()[0]);
        if shape.len() != 2 || shape[1] > context {
            let why = format!("got tokens of shape {shape:?}, wanted [B, T] with T up to {context}");
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

enum TaskHead<L: LayerFactory> {
    MaskedLm(Predictions<L>),
    Classifier(Classifier),
}

impl<L: LayerFactory> Parameters for TaskHead<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        match self {
            TaskHead::MaskedLm(head) => head.visit(path, visitor),
            TaskHead::Classifier(head) => head.visit(path, visitor),
        }
    }

    fn borrowed(&self) -> Vec<Parameter> {
        match self {
            TaskHead::MaskedLm(head) => head.borrowed(),
            TaskHead::Classifier(_) => Vec::new(),
        }
    }
}

/// Guesses tokens: `table . norm(act(dense(x))) + bias`.
struct Predictions<L: LayerFactory> {
    dense: Linear,
    norm: LayerNorm,
    activation: Activation,
    /// With the embedding's table, or one of its own.
    head: L::Head,
    bias: Parameter,
    tied: bool,
    /// What the head's table is called here; nothing if the embedding of this stage has it.
    table: Option<&'static str>,
    /// Transformers has a second bias beside an untied table, which it stores and does not use.
    unused: Option<Buffer>,
}

const PLACE: &str = "cls.predictions";

impl<L: LayerFactory> Predictions<L> {
    fn new(
        config: &BertConfig,
        layers: &L,
        scope: &Scope,
        words: EmbeddingSpec,
        embedding: Option<&L::Embedding>,
    ) -> Result<Predictions<L>> {
        let place = scope.child(PLACE);
        let (transform, own) = (place.child("transform"), place.child("decoder"));
        let dense = LinearConfig::new(config.width, config.width).with_init(config.normal());
        let embedding = embedding.filter(|_| config.tied);
        let (name, padding) = match config.tied {
            true => ("embeddings.word_embeddings", words.padding),
            false => ("cls.predictions.decoder", None),
        };
        let table = EmbeddingSpec { padding, ..words };
        Ok(Predictions {
            dense: dense.init(&transform.child("dense"))?,
            norm: config.norm(&transform)?,
            activation: config.activation,
            head: layers.head(&scope.child(name), table, embedding)?,
            bias: layers.head_bias(if config.tied { &place } else { &own }, config.vocabulary)?,
            tied: config.tied,
            table: embedding.is_none().then_some(name),
            unused: match config.tied {
                true => None,
                false => {
                    Some(Buffer::new(Tensor::zeros(&[config.vocabulary], scope.dtype(), scope.device())?))
                }
            },
        })
    }

    fn transformed(&self, x: &Var) -> Result<Var> {
        self.norm.forward(&self.activation.apply(&self.dense.forward(x)?)?)
    }

    fn logits(&self, x: &Var) -> Result<Var> {
        self.head.logits(&self.transformed(x)?, Some(&self.bias))
    }

    fn loss(&self, x: &Var, labels: &Var, scale: f64) -> Result<Var> {
        self.head.loss_of(&self.head.scores(&self.transformed(x)?, Some(&self.bias))?, labels, scale)
    }
}

impl<L: LayerFactory> Parameters for Predictions<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let at = |name: &str| join(path, format!("{PLACE}.{name}"));
        self.dense.visit(&at("transform.dense"), visitor);
        self.norm.visit(&at("transform.LayerNorm"), visitor);
        if let Some(table) = self.table {
            self.head.visit(&join(path, table), visitor);
        }
        self.bias.visit(&at(if self.tied { "bias" } else { "decoder.bias" }), visitor);
        self.unused.visit(&at("bias"), visitor);
    }

    fn visit_units(&self, _visitor: &mut dyn FnMut(&dyn AnyUnit)) {}

    fn borrowed(&self) -> Vec<Parameter> {
        if self.table.is_none() { self.head.parameters() } else { Vec::new() }
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
