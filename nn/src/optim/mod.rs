//! Optimizers: parameter groups, state, and the step that runs a rule over every parameter.
//!
//! A rule (torch: the optimizer class) is a struct of hyperparameters ([`AdamW`], [`Sgd`], ..); [`Rule::init`]
//! gives it parameters and state and so makes an [`Optimizer`]. The arithmetic is one fused kernel a rule.

mod adafactor;
mod captured;
mod disk;
mod ema;
mod lamb;
mod muon;
mod rules;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod whole;

pub use adafactor::Adafactor;
pub use captured::CapturedStep;
pub use ema::{EMA, Ema};
pub use lamb::Lamb;
pub use muon::{Muon, MuonScale};
pub use rules::{Adadelta, Adagrad, Adam, AdamW, Adamax, Lion, Rmsprop, Sgd};

use disk::in_blocks;
pub use whole::{Peers, WholeExchange, WholeRule, WholeStep, is_whole_state, update_whole};

use std::cell::Cell;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Slice, Step, optim_state_dtype};
use phalanx_tensor::{Category, Context, Tensor};

use crate::error::{check_non_negative, check_setting};
use crate::{Error, Mismatch, Parameter, Result, Usage};

/// Parameters that share a learning rate and a weight decay.
#[derive(Clone, Debug)]
pub struct Group {
    /// The parameters.
    pub parameters: Vec<Parameter>,
    /// Their learning rate.
    pub lr: f64,
    /// Their weight decay.
    pub weight_decay: f64,
}

impl Group {
    /// A group without weight decay.
    pub fn new(parameters: Vec<Parameter>, lr: f64) -> Group {
        Group { parameters, lr, weight_decay: 0.0 }
    }

    /// The group with this weight decay.
    #[must_use]
    pub fn with_weight_decay(self, weight_decay: f64) -> Group {
        Group { weight_decay, ..self }
    }

    /// Two groups: matrices, which decay, and the rest, which do not.
    pub fn decay_matrices(parameters: Vec<Parameter>, lr: f64, weight_decay: f64) -> Vec<Group> {
        let (matrices, rest): (Vec<_>, Vec<_>) = parameters.into_iter().partition(Parameter::is_matrix);
        vec![Group::new(matrices, lr).with_weight_decay(weight_decay), Group::new(rest, lr)]
    }
}

/// A group's hyperparameters in one step of its parameters.
#[derive(Clone, Copy, Debug)]
pub struct StepHyperparameters {
    /// The learning rate.
    pub lr: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// The number of the step, from 1. Parameters without gradients in some steps have made fewer.
    pub step: u64,
}

/// An optimizer's update rule: how it changes a parameter by its gradient and state.
pub trait Rule: Send + Sync {
    /// The names of the state tensors of a parameter. A name that begins with `whole_` is that of state which belongs to the whole
    /// parameter ([`Rule::whole_state`]); any other tensor has a value for each element.
    fn state(&self) -> Vec<&'static str>;

    /// The shape of state that belongs to a whole parameter of this shape; `None` if such a parameter has none.
    fn whole_state(&self, _kind: &str, _shape: &[usize]) -> Option<Vec<usize>> {
        None
    }

    /// The initial value of state tensors.
    fn initial(&self) -> f64 {
        0.0
    }

    /// Refuses hyperparameters of the rule that make no sense.
    ///
    /// # Errors
    /// The hyperparameter, its value and the values that are allowed.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Refuses a parameter that the rule cannot train.
    ///
    /// # Errors
    /// If it cannot.
    fn fits(&self, _parameter: &Parameter) -> Result<()> {
        Ok(())
    }

    /// One step, in place, of parameters that have made the same number of steps. Their state is in the order of [`Rule::state`].
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()>;

    /// The rule itself if the update of an element depends on the whole parameter. Then [`Rule::update`] takes whole parameters.
    fn whole(&self) -> Option<&dyn WholeRule> {
        None
    }

    /// An optimizer of these parameters by this rule.
    ///
    /// # Errors
    /// If there are no parameters (a rank of several may have none), two have one name, a number of the rule or of a group makes no
    /// sense, or state cannot be allocated.
    fn init(self, groups: Vec<Group>) -> Result<Optimizer<Self>>
    where
        Self: Sized,
    {
        Optimizer::new(self, groups)
    }
}

impl<R: Rule + ?Sized> Rule for Box<R> {
    fn state(&self) -> Vec<&'static str> {
        (**self).state()
    }
    fn whole_state(&self, kind: &str, shape: &[usize]) -> Option<Vec<usize>> {
        (**self).whole_state(kind, shape)
    }
    fn initial(&self) -> f64 {
        (**self).initial()
    }
    fn check(&self) -> Result<()> {
        (**self).check()
    }
    fn fits(&self, parameter: &Parameter) -> Result<()> {
        (**self).fits(parameter)
    }
    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        (**self).update(step, hyper)
    }
    fn whole(&self) -> Option<&dyn WholeRule> {
        (**self).whole()
    }
}

/// A rule with the parameters that it trains and their state. Parameters of bf16 and f16 have an f32 master copy: a step updates the
/// master and rounds it to the parameter.
pub struct Optimizer<R> {
    rule: R,
    groups: Vec<Group>,
    /// For each group, for each parameter.
    states: Vec<Vec<State>>,
    /// How ranks get the updates of a [`WholeRule`] for parameters that they have cut.
    exchange: Option<Box<dyn WholeExchange>>,
    /// Elements of a parameter that are updated at a time where its state is in a file.
    disk_block: usize,
}

/// Elements of a parameter that are updated at a time where its state is in a file: 16 MiB of each state tensor in f32.
const DISK_BLOCK: usize = 4 << 20;

struct State {
    step: u64,
    /// The names of the tensors.
    kinds: Vec<&'static str>,
    tensors: Vec<Tensor>,
    master: Option<Tensor>,
}

impl State {
    fn new(rule: &impl Rule, parameter: &Parameter) -> Result<State> {
        let _category = Context::with(|c| c.category = Category::OptimizerState);
        let held = parameter.tensor();
        let dtype = optim_state_dtype(held.dtype());
        let (mut kinds, mut tensors) = (Vec::new(), Vec::new());
        for kind in rule.state() {
            let shape = match is_whole_state(kind) {
                true => rule.whole_state(kind, &parameter.whole_shape()),
                false => Some(held.shape().to_vec()),
            };
            let Some(shape) = shape else { continue };
            kinds.push(kind);
            tensors.push(kernels::full(&shape, rule.initial(), dtype, held.device())?);
        }
        let master = (dtype != held.dtype()).then(|| kernels::cast(&held, dtype)).transpose()?;
        let state = State { step: 0, kinds, tensors, master };
        state.release_pages();
        Ok(state)
    }
}

impl<R: Rule> Optimizer<R> {
    /// See [`Rule::init`].
    ///
    /// # Errors
    /// As [`Rule::init`]; or if a wrapper owns these parameters and has others for an optimizer.
    pub fn new(rule: R, groups: Vec<Group>) -> Result<Optimizer<R>> {
        if groups.iter().all(|group| group.parameters.is_empty()) && !is_one_of_ranks() {
            return Err(Error::invalid("optimizer", "got no parameters, wanted at least one"));
        }
        rule.check()?;
        check_groups(&groups)?;
        refuse_duplicate_names(&groups)?;
        let mut all = groups.iter().flat_map(|g| &g.parameters);
        all.try_for_each(|p| p.check_usage("optimizer", Usage::Update).and_then(|()| rule.fits(p)))?;
        let states = |group: &Group| group.parameters.iter().map(|p| State::new(&rule, p)).collect();
        let states = groups.iter().map(states).collect::<Result<_>>()?;
        Ok(Optimizer { rule, groups, states, exchange: None, disk_block: DISK_BLOCK })
    }

    /// The same, where other ranks have parts of the parameters: `peers` are those of the data-parallel wrapper. A [`WholeRule`] needs
    /// them to update parameters that are cut. All ranks call it, also those without parameters.
    ///
    /// # Errors
    /// As [`Peers::exchange`].
    pub fn with_peers(mut self, peers: Option<Arc<dyn Peers>>) -> Result<Optimizer<R>> {
        if let Some(peers) = peers.filter(|_| self.rule.whole().is_some()) {
            self.exchange = Some(peers.exchange(&self.parameters())?);
        }
        Ok(self)
    }

    /// Sets how many elements of a parameter a step reads, updates and writes at a time where the parameter's state is in a file
    /// ([`HostMemory`](phalanx_tensor::HostMemory)): 2^22, unless set. The bits are the same. A [`WholeRule`] takes whole parameters.
    #[must_use]
    pub fn with_disk_block(self, elements: usize) -> Optimizer<R> {
        Optimizer { disk_block: elements.max(1), ..self }
    }

    /// Whether its steps can be captured ([`CapturedStep`]). Those of a [`WholeRule`] cannot.
    pub fn can_be_captured(&self) -> bool {
        self.rule.whole().is_none()
    }

    /// The names of the tensors that its rule keeps for a parameter.
    pub fn kinds(&self) -> Vec<&'static str> {
        self.rule.state()
    }

    /// The rule and the groups, without the state.
    pub fn into_parts(self) -> (R, Vec<Group>) {
        (self.rule, self.groups)
    }

    /// Each parameter with its state tensor of this kind, one of [`Optimizer::kinds`] or `master`. The tensors are the optimizer's own, not
    /// copies. Parameters without one are left out.
    pub fn state_of(&self, kind: &str) -> Vec<(Parameter, Tensor)> {
        let of = |state: &State| match kind {
            "master" => state.master.clone(),
            _ => state.tensors.get(state.kinds.iter().position(|known| *known == kind)?).cloned(),
        };
        self.each().filter_map(|(parameter, state)| Some((parameter.clone(), of(state)?))).collect()
    }

    /// The groups. Their rates and decays may be changed at any time; parameters may not be added.
    pub fn groups_mut(&mut self) -> &mut [Group] {
        &mut self.groups
    }

    /// All parameters.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.groups.iter().flat_map(|g| g.parameters.iter().cloned()).collect()
    }

    /// Sets the learning rate of every group. The next step refuses a rate that is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|group| group.lr = lr);
    }

    /// Removes all gradients.
    ///
    /// # Errors
    /// If a gradient buffer cannot be written.
    pub fn zero_grad(&self) -> Result<()> {
        self.groups.iter().flat_map(|g| &g.parameters).try_for_each(Parameter::zero_grad)
    }

    /// One step. Parameters without a gradient do not change.
    ///
    /// # Errors
    /// If a group's rate or decay is negative or not finite, or a tensor does not fit or is in use; if the parallel wrapper that owns a
    /// parameter refuses the update ([`Parameter::set_owner`]). A step that refuses its numbers changes nothing.
    pub fn step(&mut self) -> Result<()> {
        self.step_scaled(1.0)
    }

    /// One step with gradients multiplied by `scale`, as they are read.
    ///
    /// # Errors
    /// If the scale is not finite, as it is for gradients with a NaN; else as [`Optimizer::step`].
    pub fn step_scaled(&mut self, scale: f64) -> Result<()> {
        check_setting("step_scaled", "a scale of", scale, scale.is_finite(), "a finite number")?;
        self.step_times(scale, None)
    }

    /// One step with gradients multiplied by `factor`, as they are read. The factor is one element, f32 or f64. If it is on the
    /// parameters' device, the host does not wait for it; otherwise it is copied there. If it is not finite, parameters and their
    /// state do not change ([`crate::UpdateGuard`]), but the step counts; on a GPU a [`WholeRule`] then takes a gradient of 0.
    ///
    /// # Errors
    /// If a tensor does not fit or is in use.
    pub fn step_by(&mut self, factor: &Tensor) -> Result<()> {
        let home = self.parameters().first().map_or(factor.device(), Parameter::device);
        self.step_times(1.0, Some(&factor.to_device(home, false)?))
    }

    /// Refuses parameters that a wrapper has come to own since.
    fn check_usage(&self) -> Result<()> {
        let mut all = self.groups.iter().flat_map(|g| &g.parameters);
        all.try_for_each(|p| p.check_usage("optimizer.step", Usage::Update))
    }

    fn step_times(&mut self, scale: f64, factor: Option<&Tensor>) -> Result<()> {
        check_groups(&self.groups)?;
        self.check_usage()?;
        if self.rule.whole().is_some() {
            return self.step_whole(scale, factor);
        }
        for (group, states) in self.groups.iter().zip(&mut self.states) {
            let mut due = Vec::new();
            for (parameter, state) in group.parameters.iter().zip(states) {
                if let Some(grad) = parameter.finish_grad()? {
                    state.step += 1;
                    due.push((parameter.tensor(), grad, state));
                }
            }
            // Parameters that had no gradient in some steps have made fewer steps than the others.
            due.sort_by_key(|(_, _, state)| state.step);
            for same in due.chunk_by_mut(|a, b| a.2.step == b.2.step) {
                let step = same.first().map_or(0, |(_, _, state)| state.step);
                let hyper = StepHyperparameters { lr: group.lr, weight_decay: group.weight_decay, step };
                if same.iter().any(|(_, _, state)| state.is_on_disk()) {
                    let numbers = (scale, factor, hyper);
                    same.iter_mut()
                        .try_for_each(|due| in_blocks(&self.rule, self.disk_block, due, numbers))?;
                    continue;
                }
                let items = same.iter_mut().map(|(param, grad, state)| {
                    let slice = Slice { param, master: state.master.as_mut(), grad, scale };
                    Item { slice, state: &mut state.tensors }
                });
                self.rule.update(Step { factor, ..Step::new(items.collect()) }, hyper)?;
            }
        }
        Ok(())
    }

    /// All state as tensors: `NAME.step` (i64), `NAME.master` if there is one, and the rule's state, such as `NAME.exp_avg`. The tensors
    /// are the optimizer's own, not copies.
    ///
    /// # Errors
    /// If a step's number cannot be allocated.
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        let mut entries = Vec::new();
        for (parameter, state) in self.each() {
            let name = parameter.name();
            let step = Tensor::scalar(state.step as i64, parameter.device())?;
            entries.push((format!("{name}.step"), step));
            let named = state.kinds.iter().copied().zip(&state.tensors);
            let named = named.chain(state.master.as_ref().map(|m| ("master", m)));
            entries.extend(named.map(|(kind, tensor)| (format!("{name}.{kind}"), tensor.clone())));
        }
        Ok(entries)
    }

    fn each(&self) -> impl Iterator<Item = (&Parameter, &State)> {
        self.groups.iter().zip(&self.states).flat_map(|(group, states)| group.parameters.iter().zip(states))
    }

    /// Restores state, bit for bit. The given tensors may be those of [`Optimizer::state_dict`] itself, written in place.
    ///
    /// # Errors
    /// If tensors are missing, not known or of another shape; then nothing is changed.
    pub fn load_state_dict(&mut self, entries: impl IntoIterator<Item = (String, Tensor)>) -> Result<()> {
        let mut given: std::collections::HashMap<String, Tensor> = entries.into_iter().collect();
        let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
        for (name, own) in self.state_dict()? {
            match given.remove(&name) {
                None => problems.missing.push(name),
                Some(t) if t.shape() != own.shape() => {
                    problems.misshaped.push((name, t.shape().into(), own.shape().into()));
                }
                Some(t) => fitting.push((own, t)),
            }
        }
        problems.unexpected = given.into_keys().collect();
        problems.unexpected.sort();
        problems.check("optimizer state")?;
        let steps = fitting.iter().filter(|(own, _)| own.dtype() == phalanx_tensor::DType::I64);
        let steps: Vec<u64> = steps.map(|(own, t)| step_number(own, t)).collect::<Result<_>>()?;
        for (mut own, values) in fitting.into_iter().filter(|(own, values)| !own.shares_storage(values)) {
            let values = kernels::cast(&values.to_device(own.device(), false)?, own.dtype())?;
            kernels::copy_(&mut own, &values)?;
        }
        self.states.iter_mut().flatten().zip(steps).for_each(|(state, step)| state.step = step);
        Ok(())
    }
}

/// The step's number; 0 on a `meta` device, which stores no number.
fn step_number(own: &Tensor, given: &Tensor) -> Result<u64> {
    if own.device().is_meta() || given.device().is_meta() {
        return Ok(0);
    }
    let step = kernels::cast(given, phalanx_tensor::DType::I64)?.item::<i64>()?;
    u64::try_from(step).map_err(|_| Error::invalid("optimizer state", format!("a step of number {step}")))
}

thread_local! {
    /// Whether this thread is one of several ranks.
    static ONE_OF_RANKS: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread is one of `ranks` ranks. A rank of several may have no parameters: its stage or its ZeRO share is empty. Its
/// optimizer may then be empty.
#[doc(hidden)]
pub fn note_ranks(ranks: usize) {
    ONE_OF_RANKS.set(ranks > 1);
}

/// Whether this thread is one of several ranks, by [`note_ranks`].
#[doc(hidden)]
pub fn is_one_of_ranks() -> bool {
    ONE_OF_RANKS.get()
}

/// Refuses rates and decays that are negative or not finite.
pub(super) fn check_groups(groups: &[Group]) -> Result<()> {
    let odd = |x: f64| !x.is_finite() || x < 0.0;
    let Some((i, group)) = groups.iter().enumerate().find(|(_, g)| odd(g.lr) || odd(g.weight_decay)) else {
        return Ok(());
    };
    let what = format!("optimizer, group {i}");
    check_non_negative(&what, "a learning rate of", group.lr)?;
    check_non_negative(&what, "a weight decay of", group.weight_decay)
}

/// Refuses two parameters of one name, since their state is saved under the name.
pub(super) fn refuse_duplicate_names(groups: &[Group]) -> Result<()> {
    let mut sorted: Vec<_> = groups.iter().flat_map(|g| &g.parameters).collect();
    sorted.sort_by(|a, b| a.name().cmp(b.name()));
    let Some(pair) = sorted.windows(2).find(|pair| pair[0].name() == pair[1].name()) else { return Ok(()) };
    let name = pair[0].name();
    let why = match pair[0].is(pair[1]) {
        true => format!("the parameter {name:?} came twice, wanted it once"),
        false => format!(
            "two parameters are called {name:?}, wanted a name for each: make each layer in a scope of its own, \
             `scope.child(\"fc1\")`"
        ),
    };
    Err(Error::invalid("optimizer", why))
}
