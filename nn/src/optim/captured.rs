//! [`CapturedStep`]: a training step on a GPU, captured once and launched whole from then on.
//!
//! What changes from step to step is in the device's memory, where each launch finds it: the batch, the optimizer's numbers
//! (learning rate, bias corrections), the number of the step that random draws depend on. The gradients' norm never comes to
//! the host: the factor that clips is computed where it is used.
//!
//! ```text
//! run 0:  upload batch, numbers    forward .. backward .. clip .. update    as ever: kernels are compiled on the way
//! run 1:  upload batch, numbers    the same, captured, and launched
//! run 2:  upload batch, numbers    launch
//! ```

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Numbers, Slice, Step};
use phalanx_tensor::cuda::Graph;
use phalanx_tensor::{Category, Context, DType, Device, Tensor};

use super::{At, Optimizer, Rule, check_groups};
use crate::{Clip, Error, Result, grad_squares};

/// A step of one GPU over batches of one shape. Between runs gradients are gone: the update has used them.
///
/// The parameters, the optimizer's state and their tensors must not be exchanged for others while it is used; their values may
/// be read and set between runs.
pub struct CapturedStep {
    device: Device,
    /// Largest norm of the gradients, if there is one.
    max_norm: Option<f64>,
    inputs: Vec<Tensor>,
    numbers: Vec<Tensor>,
    /// The loss and the gradients' norm, f64.
    results: Tensor,
    captured: Captured,
}

/// How far a step has come.
enum Captured {
    /// It has not run: what it needs may have to be compiled.
    No,
    /// It has run once.
    Next,
    Yes(Graph),
    /// It cannot be.
    Never,
}

impl CapturedStep {
    /// On `device`, for batches of tensors like `batch`, wherever these are, and gradients clipped to `max_norm`.
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
        Ok(CapturedStep { device, max_norm, inputs, numbers: Vec::new(), results, captured: Captured::No })
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

    /// One step: `pass` makes the gradients of a batch, which is where it is told, and returns the loss (a scalar); then clipping
    /// and the optimizer's update. Nothing is waited for.
    ///
    /// `pass` is called for the first two batches only and must do the same for every batch. It is the context's step
    /// ([`Context::rng`]) whose draws are made. Where it does what cannot be captured, such as waiting for the device, it is
    /// called for every batch, with the same outcome.
    ///
    /// # Errors
    /// If the batch has other shapes, a parameter gets no gradient, or `pass` fails.
    pub fn run_with<R: Rule, E: From<Error>>(
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
                worked.map_err(|_: E| phalanx_tensor::Error::invalid("capture", "the step failed"))
            };
            // Why it failed is told by what is done instead.
            self.captured = Graph::capture(self.device, work).map_or(Captured::Never, Captured::Yes);
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

    /// Whether runs are launches of a graph: from the second on, unless the step cannot be captured.
    pub fn is_captured(&self) -> bool {
        matches!(self.captured, Captured::Yes(_))
    }

    /// The last run's loss and the norm of its gradients before clipping, f64 `[2]` on the device; the next run writes its own
    /// there.
    pub fn results(&self) -> &Tensor {
        &self.results
    }

    /// Puts each group's numbers where the kernels read them.
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
        let factor = self.max_norm.map(|max_norm| Clip::factor(&norm, max_norm)).transpose()?;
        optimizer.update_by(&self.numbers, factor.as_ref())?;
        let loss = kernels::cast(loss, DType::F64)?;
        for (at, number) in [loss, norm].iter().enumerate() {
            kernels::copy_(&mut self.results.select(0, at)?, &number.with_shape(&[])?)?;
        }
        optimizer.parameters().iter().for_each(|parameter| parameter.set_grad(None));
        Ok(())
    }
}

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
