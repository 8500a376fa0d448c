//! Long short-term memory.

use phalanx_autograd::Var;

use super::recurrent::{RecurrentConfig, Weights};
use crate::{Entry, Error, Parameters, Result, Scope};

/// `c = sigmoid(f) c + sigmoid(i) tanh(g)`, `h = sigmoid(o) tanh(c)`, with the gates i, f, g, o stacked in the weights.
/// Source: Hochreiter and Schmidhuber: Long short-term memory (1997).
pub struct Lstm(Weights);

impl RecurrentConfig {
    /// An LSTM.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_lstm(self, scope: &Scope) -> Result<Lstm> {
        Ok(Lstm(self.weights(scope, 4)?))
    }
}

impl Parameters for Lstm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.visit(path, visitor);
    }
}

/// What an LSTM gives.
pub struct LstmOutput {
    /// `[B, T, hidden]`
    pub output: Var,
    /// The last outputs, `[layers, B, hidden]`.
    pub hidden: Var,
    /// The last cells, `[layers, B, hidden]`.
    pub cell: Var,
}

impl Lstm {
    /// Runs over `[B, T, in]`, from the states given (`[layers, B, hidden]`), hidden and cell together, or from 0.
    ///
    /// # Errors
    /// If the inputs do not fit, or one state comes without the other.
    pub fn forward(&self, x: &Var, hidden: Option<&Var>, cell: Option<&Var>) -> Result<LstmOutput> {
        if hidden.is_some() != cell.is_some() {
            let (came, missing) = if hidden.is_some() { ("hidden", "cell") } else { ("cell", "hidden") };
            let why = format!("got a {came} state without a {missing} state, wanted both or neither");
            return Err(Error::invalid("Lstm", why));
        }
        let (output, [hidden, cell]) = self.0.run(x, [hidden, cell], |layer, share, [h, c]| {
            let gates = share.add(&layer.of_hidden(&h)?)?.chunk(4, 1)?;
            let kept = gates[1].sigmoid()?.mul(&c)?;
            let c = kept.add(&gates[0].sigmoid()?.mul(&gates[2].tanh()?)?)?;
            Ok([gates[3].sigmoid()?.mul(&c.tanh()?)?, c])
        })?;
        Ok(LstmOutput { output, hidden, cell })
    }
}
