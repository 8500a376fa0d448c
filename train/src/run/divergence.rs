//! [`LossWatch`] finds a loss that is not finite or explodes; [`local_cause`] names the batch or the parameter that it comes from.

use std::collections::VecDeque;

use phalanx_kernels as kernels;
use phalanx_nn::{Batch, Parameter, Squares};
use phalanx_tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::step::Outcome;
use crate::{Config, OnDivergence, Result};

/// Losses that an exploding one is compared with.
const REMEMBERED: usize = 32;
/// The number of losses before which no loss counts as exploding.
const REMEMBERED_MIN: usize = 8;
/// Names that a message lists.
const LISTED: usize = 3;

/// Judges each step's loss by the losses before it, and decides by the policy what happens.
pub(crate) struct LossWatch {
    policy: OnDivergence,
    explodes_at: f64,
    losses: VecDeque<f64>,
    /// The first losses of the run.
    first: Vec<f64>,
    /// Skipped updates in a row, or returns to a checkpoint.
    times: u32,
}

/// The state of a [`LossWatch`] in a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LossWatchState {
    /// The bits of the last losses.
    pub losses: Vec<u64>,
    /// The bits of the first losses.
    #[serde(default)]
    pub first: Vec<u64>,
    /// Skipped updates in a row, or returns to a checkpoint.
    pub times: u32,
}

/// A cause of divergence: its kind (0 the batch, 1 a parameter, 2 a gradient, 3 the largest gradient), a key that orders causes of one
/// kind, and its text. The smallest is reported.
pub(crate) type Cause = (u8, u64, String);

/// What the run does about a step.
pub(crate) enum Verdict {
    Fine,
    Stop(String),
    Skip(String),
    Rollback(String),
}

impl LossWatch {
    /// A watch in the state after the run's last step.
    pub fn new(config: &Config, state: &LossWatchState) -> LossWatch {
        let Config { on_divergence: policy, explodes_at, .. } = *config;
        let mut watch =
            LossWatch { policy, explodes_at, losses: VecDeque::new(), first: Vec::new(), times: state.times };
        watch.remember(state);
        watch
    }

    /// Restores the losses of a checkpoint.
    pub fn remember(&mut self, state: &LossWatchState) {
        self.losses = state.losses.iter().map(|&bits| f64::from_bits(bits)).collect();
        self.first = state.first.iter().map(|&bits| f64::from_bits(bits)).collect();
    }

    /// Its state for a checkpoint.
    pub fn state(&self) -> LossWatchState {
        LossWatchState {
            losses: self.losses.iter().map(|loss| loss.to_bits()).collect(),
            first: self.first.iter().map(|loss| loss.to_bits()).collect(),
            times: self.times,
        }
    }

    /// Judges a step by its numbers, which are the same on all ranks. `details` is called for the message if the step has diverged.
    pub fn judge(&mut self, outcome: Outcome, details: impl FnOnce() -> Result<String>) -> Result<Verdict> {
        let why = match self.wrong(outcome) {
            None => {
                self.losses.push_back(outcome.loss);
                if self.first.len() < REMEMBERED_MIN {
                    self.first.push(outcome.loss);
                }
                if self.losses.len() > REMEMBERED {
                    self.losses.pop_front();
                }
                if let OnDivergence::Skip { .. } = self.policy {
                    self.times = 0;
                }
                return Ok(Verdict::Fine);
            }
            Some(why) => format!("{why}{}", details()?),
        };
        self.times += 1;
        Ok(match self.policy {
            OnDivergence::Skip { most } if self.times <= most => Verdict::Skip(why),
            OnDivergence::Rollback { most } if self.times <= most => Verdict::Rollback(why),
            OnDivergence::Stop => Verdict::Stop(why),
            _ => Verdict::Stop(format!(
                "{why}; this is time {} of what was to be borne {} times",
                self.times,
                self.times - 1
            )),
        })
    }

    fn wrong(&self, Outcome { loss, grad_norm }: Outcome) -> Option<String> {
        if !loss.is_finite() {
            return Some(format!("the loss is {loss}"));
        }
        if !grad_norm.is_finite() {
            return Some(format!("the loss is {loss}, and the gradients' norm {grad_norm}"));
        }
        let mean = self.losses.iter().sum::<f64>() / self.losses.len().max(1) as f64;
        // At the end of a run losses may be so small that a loss many times as large is still small. So it must also exceed the first
        // losses.
        let first = self.first.iter().sum::<f64>() / self.first.len().max(1) as f64;
        let explodes =
            self.losses.len() >= REMEMBERED_MIN && loss > mean.abs() * self.explodes_at && loss > first;
        explodes.then(|| {
            format!("the loss is {loss}, more than {} times the last ones' mean {mean}", self.explodes_at)
        })
    }
}

/// The cause of a diverged loss on this rank: numbers that are not finite in the batch, the parameters or the gradients. If there are
/// none, the parameter with the largest gradient.
pub(crate) fn local_cause(
    batches: &[Batch],
    parameters: &[Parameter],
    squares: &Squares,
) -> Result<Option<Cause>> {
    for batch in batches {
        for (index, tensor) in batch.tensors.iter().enumerate() {
            if !all_finite(tensor)? {
                let first = batch.first_row;
                return Ok(Some((
                    0,
                    0,
                    format!(
                        "; tensor {index} of the batch has numbers that are not finite, in the rows from {first} on"
                    ),
                )));
            }
        }
    }
    let mut odd = Vec::new();
    for parameter in parameters {
        if !all_finite(&parameter.tensor())? {
            odd.push(parameter.name().to_string());
        }
    }
    if !odd.is_empty() {
        return Ok(Some((1, 0, format!("; parameters with values that are not finite: {}", listed(&odd)))));
    }
    let sums = squares.sums.to_vec::<f64>()?;
    let sums = squares.of.iter().map(|square| &square.name).zip(sums);
    let odd: Vec<String> = sums.clone().filter(|(_, sum)| !sum.is_finite()).map(|(n, _)| n.clone()).collect();
    if !odd.is_empty() {
        return Ok(Some((2, 0, format!("; gradients that are not finite: {}", listed(&odd)))));
    }
    let largest = sums.max_by(|(_, a), (_, b)| a.total_cmp(b));
    // The bits of numbers that are not negative are in the order of the numbers.
    Ok(largest.map(|(name, sum)| (3, !sum.to_bits(), format!("; the largest gradient is that of {name}"))))
}

fn all_finite(tensor: &Tensor) -> Result<bool> {
    if !tensor.dtype().is_float() || tensor.numel() == 0 || tensor.why_withheld().is_some() {
        return Ok(true);
    }
    // x - x is NaN for an infinite x, too.
    Ok(!kernels::any_nan(&kernels::sub(tensor, tensor)?)?)
}

/// The first names, and how many more.
fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(LISTED)].join(", "))
}
