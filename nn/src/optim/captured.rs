//! The parts of a step that a [`CapturedStep`](crate::CapturedStep) does apart: what the host counts, and what the device does.

use phalanx_kernels::optim::{Item, Numbers, Slice, Step};
use phalanx_tensor::Tensor;

use super::check::check_groups;
use super::{At, Optimizer, Rule};
use crate::{Error, Result};

impl<R: Rule> Optimizer<R> {
    /// Counts a step of every parameter, and tells the numbers that the rule has for it, group by group: for
    /// [`Optimizer::update_by`].
    pub(crate) fn advance(&mut self) -> Result<Vec<Vec<f64>>> {
        check_groups(&self.groups)?;
        self.check_usage()?;
        let mut all = Vec::new();
        for (group, states) in self.groups.iter().zip(&mut self.states) {
            states.iter_mut().for_each(|state| state.step += 1);
            let step = states.first().map_or(1, |state| state.step);
            if let Some(other) = states.iter().find(|state| state.step != step) {
                let why = format!("parameters of one group are at steps {step} and {}", other.step);
                return Err(Error::invalid("captured_step", why));
            }
            let at = At { lr: group.lr, weight_decay: group.weight_decay, step };
            let mut numbers = Vec::new();
            let ask = Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut numbers) };
            self.rule.update(ask, at)?;
            all.push(numbers);
        }
        Ok(all)
    }

    /// Updates every parameter by numbers in its GPU's memory, its gradient multiplied by `factor` there.
    pub(crate) fn update_by(&mut self, numbers: &[Tensor], factor: Option<&Tensor>) -> Result<()> {
        for ((group, states), numbers) in self.groups.iter().zip(&mut self.states).zip(numbers) {
            let (mut due, number) = (Vec::new(), states.first().map_or(1, |state| state.step));
            for (parameter, state) in group.parameters.iter().zip(states) {
                let none =
                    || Error::invalid("captured_step", format!("{:?} got no gradient", parameter.name()));
                due.push((parameter.tensor(), parameter.finish_grad()?.ok_or_else(none)?, state));
            }
            let items = due.iter_mut().map(|(param, grad, state)| {
                let slice = Slice { param, master: state.master.as_mut(), grad, scale: 1.0 };
                Item { slice, state: &mut state.tensors }
            });
            let step = Step { items: items.collect(), factor, numbers: Numbers::OnDevice(numbers) };
            // The rule's own numbers only say what it leaves out, and whether it is the first step.
            let at = At { lr: group.lr, weight_decay: group.weight_decay, step: number };
            self.rule.update(step, at)?;
        }
        Ok(())
    }

    /// Notes that a launch has written parameters and state, of which the host knows nothing.
    pub(crate) fn note_update(&mut self) {
        for (group, states) in self.groups.iter().zip(&mut self.states) {
            group.parameters.iter().for_each(|parameter| parameter.tensor().bump_version());
            let tensors =
                states.iter_mut().flat_map(|state| state.tensors.iter_mut().chain(&mut state.master));
            tensors.for_each(Tensor::bump_version);
        }
    }
}
