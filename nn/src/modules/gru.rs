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
        let (output, [hidden]) = self.0.run(x, [hidden], |layer, shares, [mut h]| {
            let ((weight, bias), times) = (layer.of_hidden(), shares.shape()[1]);
            let mut outputs = Vec::with_capacity(times);
            // One node for all times: cutting them out one by one would cost each the gradient of the whole.
            for share in shares.split_sizes(&vec![1; times], 1)? {
                let (x, own) =
                    (share.squeeze(&[1])?.chunk(3, 1)?, h.linear(&weight, bias.as_ref())?.chunk(3, 1)?);
                let (r, z) = (x[0].add(&own[0])?.sigmoid()?, x[1].add(&own[1])?.sigmoid()?);
                let n = x[2].add(&r.mul(&own[2])?)?.tanh()?;
                h = n.add(&z.mul(&h.sub(&n)?)?)?;
                outputs.push(h.clone());
            }
            let output = match times {
                0 => shares.narrow(2, 0, h.shape()[1])?,
                _ => Var::stack(&outputs, 1)?,
            };
            Ok((output, [h]))
        })?;
        Ok((output, hidden))
    }
}
