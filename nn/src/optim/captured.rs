//! [`CapturedStep`]: a training step on a GPU, captured as a CUDA graph and launched whole from then on.
//!
//! The values that change from step to step are in the device's memory, where each launch reads them: the batch, the optimizer's
//! numbers (learning rate, bias corrections) and the number of the step for random draws. The gradients' norm stays on the device,
//! which computes the clipping factor.
//!
//! ```text
//! run 0:  upload batch, numbers    forward .. backward .. clip .. update    without a graph: kernels are compiled
//! run 1:  upload batch, numbers    the same, captured, and launched
//! run 2:  upload batch, numbers    launch
//! ```

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Numbers, Slice, Step};
use phalanx_tensor::cuda::Graph;
use phalanx_tensor::{Category, Context, DType, Device, Tensor};

use super::{Optimizer, Rule, StepHyperparameters, check_groups};
use crate::{Error, Result, UpdateGuard, grad_squares};

/// A step of one GPU over batches of one shape. The update consumes the gradients, so there are none between runs. If the gradients' norm
/// is not finite, parameters and state do not change.
///
/// The tensors of the parameters and of the optimizer's state must not be replaced while it is used. Their values may be read and set
/// between runs.
pub struct CapturedStep {
    device: Device,
    /// The bound of the gradients' norm, if they are clipped.
    max_norm: Option<f64>,
    guard: UpdateGuard,
    inputs: Vec<Tensor>,
    numbers: Vec<Tensor>,
    /// The loss and the gradients' norm, f64.
    results: Tensor,
    captured: Captured,
}

/// Whether the step is captured.
enum Captured {
    /// It has not run yet, and kernels may have to be compiled.
    No,
    /// It has run once; the next run captures it.
    Next,
    /// It is captured.
    Yes(Graph),
    /// Capturing has failed, for this reason; every step runs without a graph.
    Never(String),
}

impl CapturedStep {
    /// A step on `device`, for batches with the shapes and dtypes of `batch`, which may be on any device, and gradients clipped to
    /// `max_norm`.
    ///
    /// # Errors
    /// If the device is no GPU, or the bound is not positive.
    pub fn new(device: Device, batch: &[Tensor], max_norm: Option<f64>) -> Result<CapturedStep> {
        const OP: &str = "captured_step";
        if !device.is_cuda() {
            return Err(Error::invalid(OP, format!("got {device}, wanted a CUDA device")));
        }
        if let Some(max_norm) = max_norm.filter(|bound| bound.is_nan() || *bound <= 0.0) {
            return Err(Error::invalid(OP, format!("got a bound of {max_norm}, wanted more than 0")));
        }
        let _category = Context::with(|c| c.category = Category::Buffers);
        let room = |like: &Tensor| Tensor::zeros(like.shape(), like.dtype(), device);
        let inputs = batch.iter().map(room).collect::<phalanx_tensor::Result<_>>()?;
        let results = Tensor::zeros(&[2], DType::F64, device)?;
        let (guard, numbers) = (UpdateGuard::once(), Vec::new());
        Ok(CapturedStep { device, max_norm, guard, inputs, numbers, results, captured: Captured::No })
    }

    /// The same with this guard in place of [`UpdateGuard::once`].
    #[must_use]
    pub fn with_guard(self, guard: UpdateGuard) -> CapturedStep {
        CapturedStep { guard, ..self }
    }

    /// One step: `loss` of the batch (a scalar), its gradients, clipping, the optimizer's update: [`CapturedStep::run_with`].
    ///
    /// # Errors
    /// As there.
    pub fn run<R: Rule>(
        &mut self,
        optimizer: &mut Optimizer<R>,
        batch: &[Tensor],
        loss: impl Fn(&[Var]) -> Result<Var>,
    ) -> Result<()> {
        self.run_with(optimizer, batch, |inputs| {
            let inputs: Vec<Var> = inputs.iter().cloned().map(Var::new).collect();
            let loss = loss(&inputs)?;
            loss.backward()?;
            Ok(loss.into_tensor())
        })
    }

    /// One step: `pass` computes the gradients of the batch in the tensors that it is given, and returns the loss (a scalar); then
    /// gradients are clipped and the optimizer updates. The host waits for nothing.
    ///
    /// `pass` is called for the first two batches only and must do the same for every batch. Random draws are those of the context's
    /// step ([`Context::rng`]). If `pass` cannot be captured, since it waits for the device, say, it is called for every batch, with
    /// the same result.
    ///
    /// # Errors
    /// If the batch has other shapes, a parameter gets no gradient, or `pass` fails.
    pub fn run_with<R: Rule, E: From<Error> + std::fmt::Display>(
        &mut self,
        optimizer: &mut Optimizer<R>,
        batch: &[Tensor],
        pass: impl Fn(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        if batch.len() != self.inputs.len() {
            let got = format!("got {} inputs, wanted {}", batch.len(), self.inputs.len());
            return Err(Error::invalid("captured_step", got).into());
        }
        let _pass = Context::one_pass();
        for (to, from) in self.inputs.iter_mut().zip(batch) {
            to.copy_from(from).map_err(Error::from)?;
        }
        self.upload(&optimizer.advance()?)?;
        if let Captured::Next = self.captured {
            let work = || {
                let worked = self.work(optimizer, &pass);
                worked.map_err(|e: E| phalanx_tensor::Error::invalid("capture", e.to_string()))
            };
            // If capturing has failed, the step below runs without a graph and reports the error of the step, if it has one.
            self.captured = match Graph::capture(self.device, work) {
                Ok(graph) => Captured::Yes(graph),
                Err(why) => Captured::Never(why.to_string()),
            };
        }
        let Captured::Yes(graph) = &mut self.captured else {
            self.work(optimizer, &pass)?;
            if let Captured::No = self.captured {
                self.captured = Captured::Next;
            }
            return Ok(());
        };
        graph.launch(Context::current().rng.step).map_err(Error::from)?;
        optimizer.note_update();
        Ok(())
    }

    /// Whether runs launch a graph. They do from the second on, unless the step cannot be captured.
    pub fn is_captured(&self) -> bool {
        matches!(self.captured, Captured::Yes(_))
    }

    /// Why the step cannot be captured, if it cannot: known from the second run on.
    pub fn why_not_captured(&self) -> Option<&str> {
        match &self.captured {
            Captured::Never(why) => Some(why),
            _ => None,
        }
    }

    /// The last run's loss and the norm of its gradients before clipping, f64 `[2]` on the device. The next run overwrites them.
    pub fn results(&self) -> &Tensor {
        &self.results
    }

    /// Copies each group's numbers to the device.
    fn upload(&mut self, numbers: &[Vec<f64>]) -> Result<()> {
        for (group, numbers) in numbers.iter().enumerate() {
            let given = Tensor::from_slice(numbers, &[numbers.len()], Device::CPU)?;
            match self.numbers.get_mut(group) {
                Some(held) if held.same_shape(&given) => held.copy_from(&given)?,
                // A rule may have other numbers for its first step.
                Some(held) => *held = given.to_device(self.device, false)?,
                None => self.numbers.push(given.to_device(self.device, false)?),
            }
        }
        Ok(())
    }

    fn work<R: Rule, E: From<Error>>(
        &self,
        optimizer: &mut Optimizer<R>,
        pass: impl Fn(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        optimizer.zero_grad()?;
        let loss = pass(&self.inputs)?;
        Ok(self.update(optimizer, &loss)?)
    }

    fn update<R: Rule>(&self, optimizer: &mut Optimizer<R>, loss: &Tensor) -> Result<()> {
        let norm = grad_squares(&optimizer.parameters())?.norm()?;
        optimizer.update_by(&self.numbers, Some(&self.guard.factor(&norm, self.max_norm)?))?;
        let loss = kernels::cast(loss, DType::F64)?;
        for (at, number) in [loss, norm].iter().enumerate() {
            kernels::copy_(&mut self.results.select(0, at)?, &number.with_shape(&[])?)?;
        }
        optimizer.parameters().iter().for_each(|parameter| parameter.set_grad(None));
        Ok(())
    }
}

impl<R: Rule> Optimizer<R> {
    /// Counts a step of every parameter, and returns the rule's numbers for it, group by group, for [`Optimizer::update_by`].
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
            let hyper = StepHyperparameters { lr: group.lr, weight_decay: group.weight_decay, step };
            let mut numbers = Vec::new();
            let ask = Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut numbers) };
            self.rule.update(ask, hyper)?;
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
            // The kernels read their numbers from the device; these only select the kernel: what it leaves out, and the first step.
            let hyper = StepHyperparameters { lr: group.lr, weight_decay: group.weight_decay, step: number };
            self.rule.update(step, hyper)?;
        }
        Ok(())
    }

    /// Bumps the versions of parameters and state, which a launch has written without the host.
    pub(crate) fn note_update(&mut self) {
        for (group, states) in self.groups.iter().zip(&mut self.states) {
            group.parameters.iter().for_each(|parameter| parameter.tensor().bump_version());
            let tensors =
                states.iter_mut().flat_map(|state| state.tensors.iter_mut().chain(&mut state.master));
            tensors.for_each(Tensor::bump_version);
        }
    }
}
