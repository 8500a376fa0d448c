//! [`Ema`]: an exponential moving average of the weights, beside any rule.

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Slice, Step};
use phalanx_tensor::Tensor;

use super::{Rule, StepHyperparameters, WholeRule, WholeStep};
use crate::error::check_decay;
use crate::{Error, Parameter, Result};

/// A rule that also averages the weights that it has made: `ema = decay ema + (1 - decay) p` after each update, beginning with the
/// weights of the first. They are its state `ema` ([`Optimizer::state_of`](super::Optimizer::state_of)), so checkpoints keep them.
/// Source: Polyak and Juditsky: Acceleration of stochastic approximation by averaging (1992), here with weights that fade.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ema<R> {
    /// The rule that updates the weights.
    pub rule: R,
    /// How much of the average stays at each step.
    pub decay: f64,
}

/// The name of the average in the state.
pub const EMA: &str = "ema";

impl<R: Rule> Ema<R> {
    /// Beside a rule.
    pub fn new(rule: R, decay: f64) -> Ema<R> {
        Ema { rule, decay }
    }
}

impl<R: Rule> Rule for Ema<R> {
    fn state(&self) -> Vec<&'static str> {
        let mut state = self.rule.state();
        state.push(EMA);
        state
    }

    fn initial(&self) -> f64 {
        self.rule.initial()
    }

    fn check(&self) -> Result<()> {
        check_decay("Ema", "a decay of", self.decay)?;
        self.rule.check()
    }

    fn fits(&self, parameter: &Parameter) -> Result<()> {
        self.rule.fits(parameter)
    }

    fn whole_state(&self, kind: &str, shape: &[usize]) -> Option<Vec<usize>> {
        self.rule.whole_state(kind, shape)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let Step { mut items, factor, numbers } = step;
        let inner = items.iter_mut().map(inner).collect::<Result<Vec<_>>>()?;
        self.rule.update(Step { items: inner, factor, numbers }, hyper)?;
        items.iter_mut().try_for_each(|item| self.average(item, hyper))
    }

    fn whole(&self) -> Option<&dyn WholeRule> {
        self.rule.whole().map(|_| self as &dyn WholeRule)
    }
}

impl<R: Rule> Ema<R> {
    /// Adds the item's weights to their average, its last state tensor.
    fn average(&self, item: &mut Item<'_>, hyper: StepHyperparameters) -> Result<()> {
        let Some(average) = item.state.last_mut() else { return Ok(()) };
        let weights = match &item.slice.master {
            Some(master) => (**master).clone(),
            None => kernels::cast(item.slice.param, average.dtype())?,
        };
        if hyper.step == 1 {
            return Ok(kernels::copy_(average, &weights)?);
        }
        kernels::scale_(average, self.decay)?;
        Ok(kernels::add_scaled_(average, &weights, 1.0 - self.decay)?)
    }

    fn inner_whole(&self) -> Result<&dyn WholeRule> {
        let why = "got a rule that updates parts of parameters, wanted one of whole parameters";
        self.rule.whole().ok_or_else(|| Error::invalid("Ema", why))
    }
}

/// The item of the rule beside the average.
fn inner<'a>(item: &'a mut Item<'_>) -> Result<Item<'a>> {
    let Some(others) = item.state.len().checked_sub(1) else {
        return Err(Error::invalid("Ema", "got no state, wanted its average"));
    };
    let Slice { param, master, grad, scale } = &mut item.slice;
    let slice = Slice { param, master: master.as_deref_mut(), grad, scale: *scale };
    Ok(Item { slice, state: &mut item.state[..others] })
}

impl<R: Rule> WholeRule for Ema<R> {
    fn proposals(&self) -> usize {
        self.rule.whole().map_or(0, WholeRule::proposals)
    }

    fn decides_number(&self) -> bool {
        self.rule.whole().is_some_and(WholeRule::decides_number)
    }

    fn propose(&self, item: &mut Item<'_>, step: &WholeStep<'_>) -> Result<Vec<Tensor>> {
        self.inner_whole()?.propose(&mut inner(item)?, step)
    }

    fn decide(&self, whole: &[Tensor], state: &mut [Tensor], step: &WholeStep<'_>) -> Result<Tensor> {
        let others = state.len().saturating_sub(1);
        self.inner_whole()?.decide(whole, &mut state[..others], step)
    }

    fn apply(
        &self,
        item: &mut Item<'_>,
        proposed: &[Tensor],
        decision: &Tensor,
        step: &WholeStep<'_>,
    ) -> Result<()> {
        self.inner_whole()?.apply(&mut inner(item)?, proposed, decision, step)?;
        self.average(item, step.hyper)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::optim::{AdamW, Group, Optimizer, Sgd};

    #[test]
    fn an_average_is_that_of_a_plain_loop_and_the_rule_is_as_without() {
        for dtype in [DType::F64, DType::BF16] {
            let parameter = || {
                let values = Tensor::from_slice(&[1.0, -2.0, 0.5], &[3], Device::CPU).unwrap();
                Parameter::new("w", kernels::cast(&values, dtype).unwrap()).unwrap()
            };
            let (p, q) = (parameter(), parameter());
            let mut with =
                Ema::new(AdamW::default(), 0.75).init(vec![Group::new(vec![p.clone()], 0.1)]).unwrap();
            let mut without = AdamW::default().init(vec![Group::new(vec![q.clone()], 0.1)]).unwrap();
            let values = |t: &Tensor| kernels::cast(t, DType::F64).unwrap().to_vec::<f64>().unwrap();
            let mut wanted = Vec::new();
            for step in 0..5 {
                for (p, optimizer) in [(&p, &mut with as &mut dyn Steps), (&q, &mut without)] {
                    let grad =
                        Tensor::from_slice(&[0.3, -0.1 * step as f64, 1.0], &[3], Device::CPU).unwrap();
                    p.set_grad(Some(kernels::cast(&grad, dtype).unwrap()));
                    optimizer.go();
                }
                let now = match dtype {
                    DType::F64 => values(&p.tensor()),
                    _ => values(&with.state_of("master")[0].1),
                };
                let old = if wanted.is_empty() { now.clone() } else { wanted };
                wanted = old.iter().zip(&now).map(|(old, now)| 0.75 * old + 0.25 * now).collect();
            }
            assert_eq!(values(&p.tensor()), values(&q.tensor()));
            let got = values(&with.state_of(EMA)[0].1);
            assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}, {wanted:?}");
        }
    }

    trait Steps {
        fn go(&mut self);
    }

    impl<R: Rule> Steps for Optimizer<R> {
        fn go(&mut self) {
            self.step().unwrap();
        }
    }

    #[test]
    fn a_decay_that_keeps_everything_is_refused() {
        let p = Parameter::new("w", Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap()).unwrap();
        let refused =
            Ema::new(Sgd::default(), 1.0).init(vec![Group::new(vec![p], 0.1)]).err().unwrap().to_string();
        assert!(refused.contains("Ema: got a decay of 1.0"), "{refused}");
    }
}
