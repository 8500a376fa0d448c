//! T5 v1.1: an encoder and a decoder that attends to it, relative positions, RMS norms, gated perceptrons, one table for both inputs.
//!
//! ```text
//! encoder   x += o(attention(q(n), k(n), v(n) + relative positions))     n = layer_norm(x)     every position sees every other
//!           x += wo(gelu(wi_0(n)) * wi_1(n))
//! decoder   the same with a causal mask, and between the two
//!           x += o(attention(q(n), k(memory), v(memory)))                memory = the encoder's normed output
//! ```
//! **Pipelines.** What goes from stage to stage is one tensor, `[B, S + T, width]`: the encoder's stream of S positions and the decoder's
//! of T, side by side. The first stage looks up both inputs at once, so it alone has the table. Encoder stages pass the decoder's
//! embedded input on; decoder stages pass the encoder's output on, and add to its gradient on the way back.
//!
//! ```text
//!   stage 0            stage 1            stage 2            stage 3
//!   embed both
//!   encoder blocks --> encoder blocks --> memory ----------> memory
//!                      final norm          |                  |
//!   decoder's input -> passed on -------> decoder blocks --> decoder blocks, norm, head
//! ```
//! Parameters have the names of Hugging Face's files.
//! Source: Raffel et al.: Exploring the limits of transfer learning with a unified text-to-text transformer (2020), and its release 1.1;
//! Chung et al.: UniMax (2023), for relative positions of each block (umT5).

mod block;
mod relative_bias;
mod stage;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use super::check::{check_numbers, check_sizes};
use crate::modules::{RmsNorm, RmsNormConfig};
use crate::{Error, LayerFactory, OneDevice, Result, Scope};

pub use stage::T5;

/// A T5's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// The number of tokens.
    pub vocabulary: usize,
    /// Blocks of the encoder.
    pub encoder_layers: usize,
    /// Blocks of the decoder.
    pub decoder_layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside the perceptron.
    pub inner: usize,
    /// Buckets of relative positions (32).
    pub buckets: usize,
    /// The distance from which on all keys are in one bucket (128).
    pub max_distance: usize,
    /// Whether the blocks of a stack share the relative positions of its first block, as T5's do. Then a stack is in one pipeline stage.
    /// Otherwise each block has its own, as in umT5.
    pub shared_bias: bool,
    /// Added to mean squares in norms (1e-6).
    pub eps: f64,
    /// Dropout everywhere (0).
    pub dropout: f64,
}

impl T5Config {
    /// T5 v1.1's settings for a model of that size, with as many blocks in the decoder as in the encoder.
    pub fn new(vocabulary: usize, layers: usize, heads: usize, head_dim: usize, width: usize) -> T5Config {
        T5Config {
            vocabulary,
            encoder_layers: layers,
            decoder_layers: layers,
            heads,
            head_dim,
            width,
            inner: (width.saturating_mul(8) / 3).next_multiple_of(64),
            buckets: 32,
            max_distance: 128,
            shared_bias: true,
            eps: 1e-6,
            dropout: 0.0,
        }
    }

    /// The whole model on one device.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init(&self, scope: &Scope) -> Result<T5> {
        self.init_stage(&Arc::new(OneDevice), scope, T5Stage::whole(self))
    }

    /// A stage of the model, of these layers.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init_stage<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: T5Stage,
    ) -> Result<T5<L>> {
        self.check().map_err(|why| Error::invalid("T5", why))?;
        T5::build(self, layers, scope, stage)
    }

    /// Divides the blocks among pipeline stages: the encoder's evenly among the first `encoder_stages`, the decoder's among the others;
    /// earlier stages take the remainders. (Megatron-LM's `pipeline_model_parallel_split_rank`.) A single stage has everything.
    ///
    /// # Errors
    /// If encoder or decoder would have no stage, or blocks of several stages share relative positions.
    pub fn split(&self, stages: usize, encoder_stages: usize) -> Result<Vec<T5Stage>> {
        if stages == 1 {
            return Ok(vec![T5Stage::whole(self)]);
        }
        let refuse = |why: String| Err(Error::invalid("T5", why));
        if encoder_stages == 0 || encoder_stages >= stages {
            return refuse(format!(
                "got {encoder_stages} of {stages} stages for the encoder, wanted at least 1 and 1 for the decoder"
            ));
        }
        let decoder_stages = stages - encoder_stages;
        if self.shared_bias && encoder_stages.max(decoder_stages) > 1 {
            return refuse(format!(
                "got {encoder_stages} stages of the encoder and {decoder_stages} of the decoder, whose blocks share relative \
                 positions; wanted 1 of each, or `shared_bias: false`"
            ));
        }
        let encoder = crate::cut(self.encoder_layers, encoder_stages);
        let decoder = crate::cut(self.decoder_layers, decoder_stages);
        let first = encoder.into_iter().enumerate().map(|(i, encoder)| T5Stage {
            encoder,
            decoder: 0..0,
            first: i == 0,
            encoder_end: i + 1 == encoder_stages,
            last: false,
        });
        let rest = decoder.into_iter().enumerate().map(|(i, decoder)| T5Stage {
            encoder: 0..0,
            decoder,
            first: false,
            encoder_end: false,
            last: i + 1 == decoder_stages,
        });
        Ok(first.chain(rest).collect())
    }

    fn norm(&self, scope: &Scope) -> Result<RmsNorm> {
        RmsNormConfig::new(&[self.width]).with_eps(self.eps).init(scope)
    }

    /// Refuses sizes that do not fit each other.
    fn check(&self) -> std::result::Result<(), String> {
        check_sizes(&[
            ("vocabulary", self.vocabulary),
            ("encoder_layers", self.encoder_layers),
            ("decoder_layers", self.decoder_layers),
            ("heads", self.heads),
            ("head_dim", self.head_dim),
            ("width", self.width),
            ("inner", self.inner),
        ])?;
        // A direction of the encoder has half of the buckets, of which half are exact.
        if self.buckets < 4 || !self.buckets.is_multiple_of(2) || self.max_distance <= self.buckets / 2 {
            return Err(format!(
                "got {} buckets up to a distance of {}, wanted an even number from 4 up, and more than half of it",
                self.buckets, self.max_distance
            ));
        }
        check_numbers(self.eps, 1.0, &[self.dropout])
    }
}

/// A pipeline stage of a T5: which of its parts are built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct T5Stage {
    /// Blocks of the encoder.
    pub encoder: Range<usize>,
    /// Blocks of the decoder.
    pub decoder: Range<usize>,
    /// Whether the embedding belongs to it.
    pub first: bool,
    /// Whether the encoder's final norm belongs to it.
    pub encoder_end: bool,
    /// Whether the decoder's final norm and the head belong to it.
    pub last: bool,
}

impl T5Stage {
    /// The whole of a model.
    pub fn whole(config: &T5Config) -> T5Stage {
        let (encoder, decoder) = (0..config.encoder_layers, 0..config.decoder_layers);
        T5Stage { encoder, decoder, first: true, encoder_end: true, last: true }
    }
}
