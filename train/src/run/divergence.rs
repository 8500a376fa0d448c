//! [`LossWatch`] finds a loss or a gradient norm that is not finite or explodes, and decides what happens.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::step::Outcome;
use crate::{Config, OnDivergence, Result};

/// Numbers that an exploding one is compared with.
const REMEMBERED: usize = 32;
/// The number of steps before which nothing counts as exploding.
const REMEMBERED_MIN: usize = 8;

/// Judges each step's loss and gradient norm by those before it, and decides by the policy what happens.
pub(crate) struct LossWatch {
    policy: OnDivergence,
    losses: History,
    norms: History,
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
    /// The bits of the last gradient norms.
    #[serde(default)]
    pub norms: Vec<u64>,
    /// The bits of the first gradient norms.
    #[serde(default)]
    pub first_norms: Vec<u64>,
    /// Skipped updates in a row, or returns to a checkpoint.
    pub times: u32,
}

/// A number's last values and its first ones.
struct History {
    /// How many times the mean of the last ones a number is that explodes.
    explodes_at: f64,
    last: VecDeque<f64>,
    first: Vec<f64>,
}

impl History {
    fn new(explodes_at: f64) -> History {
        History { explodes_at, last: VecDeque::new(), first: Vec::new() }
    }

    fn restore(&mut self, last: &[u64], first: &[u64]) {
        self.last = last.iter().map(|&bits| f64::from_bits(bits)).collect();
        self.first = first.iter().map(|&bits| f64::from_bits(bits)).collect();
    }

    fn push(&mut self, x: f64) {
        self.last.push_back(x);
        if self.first.len() < REMEMBERED_MIN {
            self.first.push(x);
        }
        if self.last.len() > REMEMBERED {
            self.last.pop_front();
        }
    }

    /// The mean of the last ones, if `x` is too many times as large.
    fn exploded(&self, x: f64) -> Option<f64> {
        let mean = self.last.iter().sum::<f64>() / self.last.len().max(1) as f64;
        // At the end of a run numbers may be so small that one many times as large is still small. So it must also exceed the first ones.
        let first = self.first.iter().sum::<f64>() / self.first.len().max(1) as f64;
        let known = self.last.len() >= REMEMBERED_MIN && mean != 0.0;
        let explodes = known && x > mean.abs() * self.explodes_at && x > first;
        explodes.then_some(mean)
    }
}

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
        let Config { on_divergence: policy, explodes_at, norm_explodes_at, .. } = *config;
        let (losses, norms) = (History::new(explodes_at), History::new(norm_explodes_at));
        let mut watch = LossWatch { policy, losses, norms, times: state.times };
        watch.remember(state);
        watch
    }

    /// Restores the losses and norms of a checkpoint.
    pub fn remember(&mut self, state: &LossWatchState) {
        self.losses.restore(&state.losses, &state.first);
        self.norms.restore(&state.norms, &state.first_norms);
    }

    /// Its state for a checkpoint.
    pub fn state(&self) -> LossWatchState {
        let bits = |x: &f64| x.to_bits();
        LossWatchState {
            losses: self.losses.last.iter().map(bits).collect(),
            first: self.losses.first.iter().map(bits).collect(),
            norms: self.norms.last.iter().map(bits).collect(),
            first_norms: self.norms.first.iter().map(bits).collect(),
            times: self.times,
        }
    }

    /// Judges a step by its numbers, which are the same on all ranks. `details` is called for the message if the step has diverged.
    pub fn judge(&mut self, outcome: Outcome, details: impl FnOnce() -> Result<String>) -> Result<Verdict> {
        let why = match self.wrong(outcome) {
            None => {
                self.losses.push(outcome.loss);
                self.norms.push(outcome.grad_norm);
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
        if let Some(mean) = self.losses.exploded(loss) {
            let times = self.losses.explodes_at;
            return Some(format!("the loss is {loss}, more than {times} times the last ones' mean {mean}"));
        }
        let (mean, times) = (self.norms.exploded(grad_norm)?, self.norms.explodes_at);
        Some(format!(
            "the loss is {loss}, and the gradients' norm {grad_norm}, more than {times} times the last ones' mean {mean}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_of_the_loss_or_of_the_norm_is_seen_in_its_step() {
        let config = Config { explodes_at: 10.0, norm_explodes_at: 100.0, ..Config::default() };
        let judged = |last: Outcome, resumes: bool| {
            let mut watch = LossWatch::new(&config, &LossWatchState::default());
            for step in 0..20 {
                let outcome = Outcome { loss: 3.0 - 0.1 * f64::from(step), grad_norm: 0.5 };
                assert!(matches!(watch.judge(outcome, || Ok(String::new())), Ok(Verdict::Fine)));
                if resumes {
                    watch = LossWatch::new(&config, &watch.state());
                }
            }
            match watch.judge(last, || Ok("; here".into())).unwrap() {
                Verdict::Stop(why) => why,
                _ => String::new(),
            }
        };
        for resumes in [false, true] {
            let judged = |loss, grad_norm| judged(Outcome { loss, grad_norm }, resumes);
            assert_eq!(judged(19.0, 49.0), "");
            let why = judged(21.0, 0.5);
            assert!(
                why.starts_with("the loss is 21, more than 10 times") && why.ends_with("; here"),
                "{why}"
            );
            let why = judged(1.0, 51.0);
            assert!(why.contains("norm 51, more than 100 times the last ones' mean 0.5; here"), "{why}");
            assert_eq!(judged(1.0, f64::INFINITY), "the loss is 1, and the gradients' norm inf; here");
            assert_eq!(judged(f64::NEG_INFINITY, 1.0), "the loss is -inf; here");
        }
    }
}
