//! [`T5`]: embedding, encoder, decoder and head, or a pipeline [`T5Stage`] of them.

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_tensor::{DType, Device, Dims};

use super::super::RecomputeMode;
use super::block::T5Block;
use super::{T5Config, T5Stage};
use crate::layer_factory::EmbeddingSpec;
use crate::mode::{Mode, modes};
use crate::modules::{Dropout, RmsNorm};
use crate::scope::join;
use crate::{
    AnyUnit, Entry, Error, Head, Init, LayerFactory, Module, OneDevice, Parameter, Parameters, Result, Scope,
    WrappedUnit, parameters,
};

/// An encoder-decoder model, or a stage of one.
pub struct T5<L: LayerFactory = OneDevice> {
    stage: T5Stage,
    /// Blocks of the whole model's encoder and decoder.
    blocks_of_all: [usize; 2],
    width: usize,
    dtype: DType,
    layers: Arc<L>,
    shared: Option<WrappedUnit<InputEmbedding<L>>>,
    encoder: Stack<L>,
    decoder: Stack<L>,
    lm_head: Option<WrappedUnit<OutputHead<L>>>,
    recompute: RecomputeMode,
    mode: Mode,
}

modes!([L: LayerFactory] T5<L>);

/// The table of both inputs.
struct InputEmbedding<L: LayerFactory> {
    table: L::Embedding,
    dropout: Dropout,
}

/// Blocks of the encoder or of the decoder that are in this stage, and its final norm if that is here.
struct Stack<L: LayerFactory> {
    first: usize,
    blocks: Vec<WrappedUnit<T5Block<L>>>,
    end: Option<WrappedUnit<FinalNorm>>,
}

/// A stack's final norm, with dropout.
struct FinalNorm {
    final_layer_norm: RmsNorm,
    dropout: Dropout,
}

parameters!(FinalNorm { final_layer_norm });

struct OutputHead<L: LayerFactory> {
    head: L::Head,
}

impl<L: LayerFactory> T5<L> {
    pub(super) fn build(config: &T5Config, layers: &Arc<L>, scope: &Scope, stage: T5Stage) -> Result<T5<L>> {
        let fits = |range: &std::ops::Range<usize>, all: usize| range.start <= range.end && range.end <= all;
        let T5Config { vocabulary, width, encoder_layers, decoder_layers, .. } = *config;
        if !fits(&stage.encoder, encoder_layers) || !fits(&stage.decoder, decoder_layers) {
            let got = format!("got blocks {:?} and {:?}", stage.encoder, stage.decoder);
            let why = format!("{got}, wanted ranges inside 0..{encoder_layers} and 0..{decoder_layers}");
            return Err(Error::invalid("T5", why));
        }
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        let table = EmbeddingSpec { count: vocabulary, width, init, tied: false, padding: None };
        let embed = || -> Result<_> {
            let dropout = Dropout::new(config.dropout, &scope.child("dropout"))?;
            Ok(InputEmbedding { table: layers.embedding(&scope.child("shared"), table)?, dropout })
        };
        let head =
            || -> Result<_> { Ok(OutputHead { head: layers.head(&scope.child("lm_head"), table, None)? }) };
        let model = T5 {
            blocks_of_all: [encoder_layers, decoder_layers],
            width,
            dtype: scope.dtype(),
            layers: layers.clone(),
            shared: stage.first.then(embed).transpose()?.map(WrappedUnit::of),
            encoder: Stack::new(config, layers, scope, &stage, false)?,
            decoder: Stack::new(config, layers, scope, &stage, true)?,
            lm_head: stage.last.then(head).transpose()?.map(WrappedUnit::of),
            stage,
            recompute: RecomputeMode::Never,
            mode: Mode::default(),
        };
        layers.built(&model.parameters())?;
        Ok(model)
    }

    /// Sets which blocks recompute their activations from now on. Attention keeps no scores, so there is nothing to free under
    /// [`RecomputeMode::Attention`].
    pub fn set_recompute(&mut self, mode: RecomputeMode) {
        self.recompute = mode;
    }

    /// Which part of the model this is.
    pub fn stage(&self) -> &T5Stage {
        &self.stage
    }

    /// The device of the parameters.
    pub fn device(&self) -> Device {
        self.parameters().first().map_or(Device::CPU, Parameter::device)
    }

    /// Shape and dtype of what one stage sends to the next, for `rows` pairs of `source` and `target` positions.
    pub fn stream(&self, rows: usize, source: usize, target: usize) -> (Dims, DType) {
        (Dims::from_slice(&[rows, source + target, self.width]), self.dtype)
    }

    /// From the encoder's tokens `source` `[B, S]` and the decoder's `target` `[B, T]` (i64) to what the next stage gets, or on the last
    /// stage to the decoder's stream `[B, T, width]` for [`T5::loss`] and [`T5::logits`]. `input` is what the stage before gives; the first
    /// stage has none. All rows have the same lengths; there is no padding.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward(&self, input: Option<&Var>, source: &Var, target: &Var) -> Result<Var> {
        let lengths = self.check_tokens(source, target)?;
        let _mode = self.mode.enter();
        let both = match (&self.shared, input) {
            (Some(shared), None) => {
                let tokens = Var::cat(&[source, target], 1)?;
                shared.call(&tokens, false, |shared, tokens| {
                    shared.dropout.forward(&shared.table.forward(tokens)?)
                })?
            }
            (None, Some(input)) => input.clone(),
            (Some(_), Some(_)) => {
                return Err(Error::invalid("T5", "got an input for the first stage, wanted none"));
            }
            (None, None) => {
                return Err(Error::invalid("T5", "got no input, wanted what the stage before gives"));
            }
        };
        let parts = both.split_sizes(&lengths, 1)?;
        drop(both);
        let (mut memory, mut y) = (parts[0].clone(), parts[1].clone());
        drop(parts);
        for (i, block) in self.encoder.numbered() {
            memory = block.call(&memory, self.recomputes(i), |block, x| block.run(x, None))?;
        }
        memory = self.encoder.ended(memory)?;
        for (i, block) in self.decoder.numbered() {
            let (recompute, memory) = (self.recomputes(self.blocks_of_all[0] + i), memory.clone());
            y = block.call(&y, recompute, move |block, x| block.run(x, Some(&memory)))?;
        }
        if self.stage.last { self.decoder.ended(y) } else { Ok(Var::cat(&[&memory, &y], 1)?) }
    }

    /// Scores of the next token, `[B, T, vocabulary]`, from the decoder's stream.
    ///
    /// # Errors
    /// If this stage has no head.
    pub fn logits(&self, x: &Var) -> Result<Var> {
        self.head()?.call(x, false, |head, x| head.head.logits(x, None))
    }

    /// The cross entropies of the labels `[B, T]` (i64; -100 is ignored), added and multiplied by `scale`.
    ///
    /// # Errors
    /// If this stage has no head, or the labels do not fit.
    pub fn loss(&self, x: &Var, labels: &Var, scale: f64) -> Result<Var> {
        let labels = labels.clone();
        self.head()?.call(x, false, move |head, x| head.head.loss(x, &labels, scale, usize::MAX))
    }

    /// Whether block `i` of encoder and decoder together computes its activations again.
    fn recomputes(&self, i: usize) -> bool {
        i < self.recompute.recomputed(self.blocks_of_all.iter().sum())
    }

    /// The lengths of both sequences.
    fn check_tokens(&self, source: &Var, target: &Var) -> Result<[usize; 2]> {
        let fits = |tokens: &Var| tokens.rank() == 2 && tokens.shape()[1] > 0 && tokens.dtype() == DType::I64;
        if !fits(source) || !fits(target) || source.shape()[0] != target.shape()[0] {
            let [source, target] = [source, target].map(|x| format!("{:?} {}", x.shape(), x.dtype()));
            let why = format!("got {source} and {target}, wanted [B, S] i64 and [B, T] i64");
            return Err(Error::invalid("T5", why));
        }
        let lengths = [source.shape()[1], target.shape()[1]];
        let both = lengths[0] + lengths[1];
        if self.layers.stream(both)?.len() != both {
            let why = "got sequence parallelism, which would cut the two sequences as one; wanted it off";
            return Err(Error::invalid("T5", why));
        }
        Ok(lengths)
    }

    fn head(&self) -> Result<&WrappedUnit<OutputHead<L>>> {
        self.lm_head.as_ref().ok_or_else(|| Error::invalid("T5", "this stage has no head"))
    }
}

impl<L: LayerFactory> Stack<L> {
    fn new(
        config: &T5Config,
        layers: &Arc<L>,
        scope: &Scope,
        stage: &T5Stage,
        is_decoder: bool,
    ) -> Result<Stack<L>> {
        let (name, range, ends) = match is_decoder {
            false => ("encoder", stage.encoder.clone(), stage.encoder_end),
            true => ("decoder", stage.decoder.clone(), stage.last),
        };
        let scope = scope.child(name);
        let (first, mut bias, mut blocks) = (range.start, None, Vec::new());
        for i in range {
            let scope = scope.child("block").child(i);
            let block = T5Block::new(config, layers, &scope, is_decoder, bias.clone())?;
            if config.shared_bias {
                bias = block.bias().cloned();
            }
            blocks.push(WrappedUnit::of(block));
        }
        let end = || -> Result<_> {
            let final_layer_norm = config.norm(&scope.child("final_layer_norm"))?;
            Ok(FinalNorm {
                final_layer_norm,
                dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            })
        };
        Ok(Stack { first, blocks, end: ends.then(end).transpose()?.map(WrappedUnit::of) })
    }

    /// The blocks with their numbers in the whole stack.
    fn numbered(&self) -> impl Iterator<Item = (usize, &WrappedUnit<T5Block<L>>)> {
        (self.first..).zip(&self.blocks)
    }

    /// The stream after the final norm, if that is here.
    fn ended(&self, x: Var) -> Result<Var> {
        match &self.end {
            None => Ok(x),
            Some(end) => end.call(&x, false, |end, x| end.dropout.forward(&end.final_layer_norm.forward(x)?)),
        }
    }
}

impl<L: LayerFactory> Parameters for Stack<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let blocks = join(path, "block");
        self.numbered().for_each(|(i, block)| block.visit(&join(&blocks, i), visitor));
        self.end.visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.blocks.visit_units(visitor);
        self.end.visit_units(visitor);
    }

    // The table of relative positions that a block borrows is another block's of this stack.
}

parameters!([L: LayerFactory] T5<L> { shared, encoder, decoder, lm_head });

impl<L: LayerFactory> Parameters for InputEmbedding<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.table.visit(path, visitor);
    }
}

impl<L: LayerFactory> Parameters for OutputHead<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.head.visit(path, visitor);
    }
}
