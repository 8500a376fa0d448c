//! Maps of one input whose outputs are cut: `y_i = enter(x) W_iᵀ + b_i`, as one operation.
//!
//! Derivative: `dx = leave(sum of dy_i W_i)`, `dW_i = dy_iᵀ enter(x)`, `db_i` the sum of `dy_i`'s rows. The exchange of
//! `dx` runs while the weights' gradients are computed, and where the stream is cut, `x` is gathered again while `dx` is:
//!
//! ```text
//! this thread   start gather | dy W | start sum | (gather done) dyᵀ x, db | (sum done)
//! exchange            [ gather x ]        [ sum of dx            ]
//! ```
//! Saves the stream's `x` as it came, so a rank's positions alone, and the weights. `dW_i` goes straight into the
//! weight's gradient buffer where there is one.
//! Source: Korthikanti et al. (2022), section 4.2.2; Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    Backward, Cx, Grads, Result, Saved, Saver, Var, begins, linear_weight_grad, record_many,
};

use super::exchange::Exchange;
use super::group::{Begun, TensorParallel};

/// A weight `[out, in]` and its bias.
pub(super) type Map = (Var, Option<Var>);

/// What the maps make of the stream `x`.
pub(super) fn columns(group: &TensorParallel, x: &Var, maps: &[Map]) -> Result<Vec<Var>> {
    begins();
    let exchanges = group.entering(x)?;
    let entered = exchanges[0].run(group.comm(), x.tensor(), false)?;
    let outputs = maps.iter().map(|(weight, bias)| {
        kernels::linear(&entered, weight.tensor(), bias.as_ref().map(Var::tensor)).map_err(Into::into)
    });
    let outputs = outputs.collect::<Result<_>>()?;
    drop(entered);
    let weights = maps.iter().map(|(weight, _)| weight);
    let biases = maps.iter().filter_map(|(_, bias)| bias.as_ref());
    let inputs: Vec<&Var> = [x].into_iter().chain(weights).chain(biases).collect();
    let save = |s: &Saver<'_>| {
        let trains = (1..=maps.len()).any(|i| s.needs(i));
        let weights = (1..=maps.len()).map(|i| s.needs(0).then(|| s.input(i)).transpose());
        Ok(Columns {
            group: group.clone(),
            exchanges,
            x: trains.then(|| s.input(0)).transpose()?,
            weights: weights.collect::<Result<_>>()?,
            biased: maps.iter().map(|(_, bias)| bias.is_some()).collect(),
        })
    };
    Ok(record_many("column_parallel", &inputs, outputs, save)?.into_vec())
}

struct Columns {
    group: TensorParallel,
    /// Of `x` on its way in, and of its gradient on its way out.
    exchanges: [Exchange; 2],
    x: Option<Saved>,
    weights: Vec<Option<Saved>>,
    biased: Vec<bool>,
}

impl Backward for Columns {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let count = self.weights.len();
        let dys = (0..count).map(|i| cx.dy_at(i).map(|dy| dy.flatten(0, -2)).transpose());
        let dys: Vec<Option<Var>> = dys.collect::<Result<_>>()?;
        let [enter, leave] = self.exchanges.clone();
        let begin = |x: Var, exchanges| Begun::new(x, self.group.comm(), exchanges, cx.create_graph());
        let x = self.x.as_ref().filter(|_| (1..=count).any(|i| cx.needs(i)));
        let x = x.map(|x| begin(cx.get(x)?, [enter.clone(), leave.clone()])).transpose()?;
        let dx = self.partial(cx, &dys)?.map(|dx| begin(dx, [leave, enter])).transpose()?;
        let x = x.map(|x| x.finish()?.flatten(0, -2)).transpose()?;
        let mut grads = Grads::from_elem(None, 1 + count);
        for (i, dy) in dys.iter().enumerate() {
            if let (Some(dy), Some(x), true) = (dy, &x, cx.needs(1 + i)) {
                grads[1 + i] = linear_weight_grad(cx, 1 + i, dy, x)?;
            }
        }
        for dy in dys.iter().zip(&self.biased).filter_map(|(dy, &biased)| biased.then_some(dy)) {
            let dy = dy.as_ref().filter(|_| cx.needs(grads.len()));
            grads.push(dy.map(|dy| dy.sum(&[0], false)).transpose()?);
        }
        grads[0] = dx.map(Begun::finish).transpose()?;
        Ok(grads)
    }
}

impl Columns {
    /// This rank's part of `dx`, if that is wanted: the sum of `dy_i W_i`.
    fn partial(&self, cx: &Cx<'_>, dys: &[Option<Var>]) -> Result<Option<Var>> {
        let mut sum: Option<Var> = None;
        for (dy, weight) in dys.iter().zip(&self.weights) {
            let (Some(dy), Some(weight), true) = (dy, weight, cx.needs(0)) else { continue };
            let weight = cx.get(weight)?;
            sum = Some(match sum {
                None => dy.matmul(&weight)?,
                Some(sum) if cx.create_graph() => sum.add(&dy.matmul(&weight)?)?,
                Some(sum) => {
                    let mut sum = sum.into_tensor();
                    kernels::matmul_accumulate_(&mut sum, dy.tensor(), weight.tensor())?;
                    Var::new(sum)
                }
            });
        }
        let lead =
            (0..dys.len()).find_map(|i| cx.dy_at(i)).map_or(&[][..], |dy| &dy.shape()[..dy.rank() - 1]);
        let shaped = |dx: Var| dx.reshape_to(&[lead, &dx.shape()[1..]].concat());
        sum.map(shaped).transpose()
    }
}
