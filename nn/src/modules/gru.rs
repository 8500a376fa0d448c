//! Gated recurrent units.

use phalanx_autograd::Var;

use super::recurrent::{RecurrentConfig, Weights};
use crate::{Entry, Parameters, Result, Scope};

/// `n = tanh(x_n + sigmoid(r) h_n)`, `h = (1 - sigmoid(z)) n + sigmoid(z) h`, with the gates r, z, n stacked in the
/// weights; `x_n` and `h_n` are the inputs' and the hidden state's shares of n, each with its bias.
/// Source: Cho et al.: Learning phrase representations (2014).
pub struct Gru(Weights);

impl RecurrentConfig {
    /// A GRU.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_gru(self, scope: &Scope) -> Result<Gru> {
        Ok(Gru(self.weights(scope, 3)?))
    }
}

impl Parameters for Gru {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.visit(path, visitor);
    }
}

impl Gru {
    /// Runs over `[B, T, in]`, from the state given (`[layers, B, hidden]`) or from 0: the outputs `[B, T, hidden]` and
    /// the last ones, `[layers, B, hidden]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward(&self, x: &Var, hidden: Option<&Var>) -> Result<(Var, Var)> {
        let (output, [hidden]) = self.0.run(x, [hidden], |layer, share, [h]| {
            let (x, own) = (share.chunk(3, 1)?, layer.of_hidden(&h)?.chunk(3, 1)?);
            let (r, z) = (x[0].add(&own[0])?.sigmoid()?, x[1].add(&own[1])?.sigmoid()?);
            let n = x[2].add(&r.mul(&own[2])?)?.tanh()?;
            Ok([n.add(&z.mul(&h.sub(&n)?)?)?])
        })?;
        Ok((output, hidden))
    }
}
