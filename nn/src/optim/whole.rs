//! [`WholeRule`]: rules whose update of an element depends on the whole parameter; [`WholeExchange`]: how ranks that have parts of a
//! parameter get such an update.
//!
//! ```text
//! every rank that has a part   propose: updates the part's state, element by element ─┐  collect: parts go to the owner
//! the owner of the parameter                                                          └► decide: computes with whole tensors ─┐
//! every rank that has a part   apply: updates the part  ◄────────────── distribute: parts of the decision, and whole state ───┘
//! ```
//!
//! One rank decides what one device would decide, with the same operations on the same tensors. So the bits are those of one device
//! under every layout. A parameter that no rank has cut is decided where it is.

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Numbers, Slice, Step};
use phalanx_tensor::{DType, Tensor};

use super::{Optimizer, Rule, State, StepHyperparameters};
use crate::{Error, Parameter, Result};

/// A rule whose update of an element depends on the whole parameter. Its [`Rule::whole`](super::Rule::whole) returns itself.
pub trait WholeRule: Send + Sync {
    /// How many tensors [`WholeRule::propose`] returns.
    fn proposals(&self) -> usize {
        1
    }

    /// Whether the decision is one number for the parameter. Else it has the parameter's shape.
    fn decides_number(&self) -> bool {
        false
    }

    /// Updates the state that has a value for each element. Returns the tensors that the decision depends on, in the item's shape and
    /// the dtype of state. The item may be a part of the parameter; each element must be computed from its own values alone.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn propose(&self, item: &mut Item<'_>, step: &WholeStep<'_>) -> Result<Vec<Tensor>>;

    /// Decides on the update of a whole parameter, in the dtype of state, and updates the state that belongs to the whole.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn decide(&self, whole: &[Tensor], state: &mut [Tensor], step: &WholeStep<'_>) -> Result<Tensor>;

    /// Updates the item by what it proposed and its part of the decision, element by element.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn apply(
        &self,
        item: &mut Item<'_>,
        proposed: &[Tensor],
        decision: &Tensor,
        step: &WholeStep<'_>,
    ) -> Result<()>;
}

/// One step of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct WholeStep<'a> {
    /// The shape of the whole parameter.
    pub shape: &'a [usize],
    /// The group's numbers.
    pub hyper: StepHyperparameters,
    /// One element on the item's device that multiplies the gradient, besides the item's scale.
    pub factor: Option<&'a Tensor>,
}

/// Whether a state tensor of this kind belongs to a whole parameter: its name begins with `whole_`. Every rank that has a part of the
/// parameter keeps all of it. State of any other name has a value for each element.
pub fn is_whole_state(kind: &str) -> bool {
    kind.starts_with("whole_")
}

/// Ranks that have parts of each other's parameters.
pub trait Peers: Send + Sync {
    /// How these ranks exchange parts of such parameters. All of them call it, each with its own parameters.
    ///
    /// # Errors
    /// If parts of a parameter are missing, or the ranks cannot communicate.
    fn exchange(&self, parameters: &[Parameter]) -> Result<Box<dyn WholeExchange>>;
}

/// Exchanges parts of the parameters of one optimizer, which are named by their index. All ranks call its methods together.
pub trait WholeExchange: Send + Sync {
    /// Whether any rank has only a part of the parameter.
    fn is_cut(&self, index: usize) -> bool;

    /// Sends this rank's parts of tensors to the owners: `each` tensors for a parameter in `parts[index]`, of the part's elements and the
    /// dtype of state; none where the parameter has no gradient. Returns the whole tensors of the parameters that this rank owns.
    ///
    /// # Errors
    /// As a collective.
    fn collect(&self, each: usize, parts: &[Vec<Tensor>]) -> Result<Vec<(usize, Vec<Tensor>)>>;

    /// Sends to each rank its parts of the `decided` tensors of the parameters that this rank owns, or the numbers if `number`, and all of
    /// their whole state. `state[index]` are this rank's tensors of whole state, which are written. Returns this rank's parts.
    ///
    /// # Errors
    /// As a collective.
    fn distribute(
        &self,
        number: bool,
        decided: Vec<(usize, Tensor)>,
        state: &mut [Vec<Tensor>],
    ) -> Result<Vec<(usize, Tensor)>>;
}

/// [`Rule::update`](super::Rule::update) of a rule of whole parameters, for items that are whole.
///
/// # Errors
/// If the step's numbers are in a GPU's memory, or the tensors do not fit.
pub fn update_whole(
    name: &str,
    rule: &(impl WholeRule + ?Sized),
    step: Step<'_>,
    hyper: StepHyperparameters,
) -> Result<()> {
    let Numbers::Given = step.numbers else {
        let why = "got a captured step, wanted one that is not: its updates depend on whole parameters";
        return Err(Error::invalid(name, why));
    };
    for mut item in step.items {
        let shape = item.slice.param.shape().to_vec();
        let whole = WholeStep { shape: &shape, hyper, factor: step.factor };
        let proposed = rule.propose(&mut item, &whole)?;
        let decision = rule.decide(&proposed, item.state, &whole)?;
        rule.apply(&mut item, &proposed, &decision, &whole)?;
    }
    Ok(())
}

impl<R: Rule> Optimizer<R> {
    /// One step of a rule of whole parameters.
    pub(super) fn step_whole(&mut self, scale: f64, factor: Option<&Tensor>) -> Result<()> {
        let Optimizer { rule, groups, states, exchange, .. } = self;
        let Some(whole) = rule.whole() else { return Ok(()) };
        // On a GPU this would be a wait.
        if let Some(factor) = factor.filter(|f| !f.device().is_cuda() && !f.device().is_meta())
            && !kernels::cast(factor, DType::F64)?.item::<f64>()?.is_finite()
        {
            return Ok(());
        }
        let is_cut = |index: usize| exchange.as_ref().is_some_and(|exchange| exchange.is_cut(index));
        let all = groups.iter().flat_map(|group| &group.parameters).enumerate();
        all.filter(|(index, _)| !is_cut(*index)).try_for_each(|(_, parameter)| check_whole(parameter))?;
        let (mut cut, mut parts) = (Vec::new(), Vec::new());
        // Whole state is written where the decision comes from another rank.
        let mut whole_state = Vec::new();
        for (group, states) in groups.iter().zip(states) {
            for (parameter, state) in group.parameters.iter().zip(states) {
                let index = parts.len();
                parts.push(Vec::new());
                whole_state.push(state.whole());
                let Some(grad) = parameter.finish_grad()? else { continue };
                let shape = parameter.whole_shape();
                if shape.contains(&0) {
                    continue;
                }
                state.step += 1;
                let hyper =
                    StepHyperparameters { lr: group.lr, weight_decay: group.weight_decay, step: state.step };
                let mut due =
                    Due { index, shape, hyper, param: parameter.tensor(), grad, state, proposed: vec![] };
                if is_cut(index) {
                    due.proposed = due.with_item(scale, factor, |item, step| whole.propose(item, step))?;
                    parts[index] = due.proposed.clone();
                    due.state.release_pages();
                    cut.push(due);
                } else {
                    due.update_here(rule, scale, factor)?;
                }
            }
        }
        let Some(exchange) = exchange else { return Ok(()) };
        let mut decided = Vec::new();
        for (index, tensors) in exchange.collect(whole.proposals(), &parts)? {
            let Some(due) = cut.iter_mut().find(|due| due.index == index) else { continue };
            let shaped = tensors.iter().map(|tensor| tensor.with_shape(&due.shape));
            let tensors = shaped.collect::<phalanx_tensor::Result<Vec<_>>>()?;
            let step = WholeStep { shape: &due.shape, hyper: due.hyper, factor };
            decided.push((index, whole.decide(&tensors, &mut due.state.tensors, &step)?));
        }
        for (index, part) in exchange.distribute(whole.decides_number(), decided, &mut whole_state)? {
            let Some(due) = cut.iter_mut().find(|due| due.index == index) else { continue };
            let proposed = std::mem::take(&mut due.proposed);
            let part = if whole.decides_number() { part } else { part.with_shape(due.param.shape())? };
            due.with_item(scale, factor, |item, step| whole.apply(item, &proposed, &part, step))?;
            due.state.release_pages();
        }
        Ok(())
    }
}

/// Refuses a parameter of which this rank has a part.
fn check_whole(parameter: &Parameter) -> Result<()> {
    if parameter.is_whole() {
        return Ok(());
    }
    let (name, all) = (parameter.name(), parameter.whole_shape().iter().product::<usize>());
    let why = format!(
        "got {} of {all} elements of `{name}`, wanted them all or the ranks that have the rest: \
         `optimizer.with_peers(wrapper.peers())`",
        parameter.range().len()
    );
    Err(Error::invalid("optimizer.step", why))
}

/// A parameter that is updated in this step.
struct Due<'a> {
    index: usize,
    /// The whole parameter's.
    shape: Vec<usize>,
    hyper: StepHyperparameters,
    param: Tensor,
    grad: Tensor,
    state: &'a mut State,
    proposed: Vec<Tensor>,
}

impl Due<'_> {
    /// What `f` makes of it.
    fn with_item<T>(
        &mut self,
        scale: f64,
        factor: Option<&Tensor>,
        f: impl FnOnce(&mut Item<'_>, &WholeStep<'_>) -> Result<T>,
    ) -> Result<T> {
        let slice =
            Slice { param: &mut self.param, master: self.state.master.as_mut(), grad: &self.grad, scale };
        let mut item = Item { slice, state: &mut self.state.tensors };
        f(&mut item, &WholeStep { shape: &self.shape, hyper: self.hyper, factor })
    }

    /// The update of a parameter that is whole here. A wrapper may keep it in one dimension.
    fn update_here(self, rule: &impl Rule, scale: f64, factor: Option<&Tensor>) -> Result<()> {
        let Due { shape, hyper, param, grad, state, .. } = self;
        let shaped = |tensor: &Tensor| tensor.with_shape(&shape);
        let (mut param, grad) = (shaped(&param)?, shaped(&grad)?);
        let mut master = state.master.as_ref().map(shaped).transpose()?;
        let of = |(kind, tensor): (&&str, &Tensor)| {
            if is_whole_state(kind) { Ok(tensor.clone()) } else { shaped(tensor) }
        };
        let mut tensors =
            state.kinds.iter().zip(&state.tensors).map(of).collect::<phalanx_tensor::Result<Vec<_>>>()?;
        let slice = Slice { param: &mut param, master: master.as_mut(), grad: &grad, scale };
        let items = vec![Item { slice, state: &mut tensors }];
        rule.update(Step { factor, ..Step::new(items) }, hyper)?;
        state.release_pages();
        Ok(())
    }
}

impl State {
    /// The tensors that belong to the whole parameter.
    fn whole(&self) -> Vec<Tensor> {
        let named = self.kinds.iter().zip(&self.tensors);
        named.filter(|(kind, _)| is_whole_state(kind)).map(|(_, tensor)| tensor.clone()).collect()
    }
}

/// The item's gradient in the dtype of state, multiplied by the item's scale and the step's factor. On a GPU, where the step does not wait
/// for the factor, the gradient is 0 if the factor is not finite.
pub(super) fn scaled_grad(item: &Item<'_>, dtype: DType, step: &WholeStep<'_>) -> Result<Tensor> {
    let Slice { grad, scale, .. } = &item.slice;
    let grad = kernels::mul_scalar(&kernels::cast(grad, dtype)?, (*scale).into())?;
    let Some(factor) = step.factor else { return Ok(grad) };
    let factor = kernels::cast(factor, dtype)?.with_shape(&[])?;
    let scaled = kernels::mul(&grad, &factor)?;
    if !factor.device().is_cuda() {
        return Ok(scaled);
    }
    // x - x is 0 if x is finite, else NaN.
    let odd = kernels::ne_scalar(&kernels::sub(&factor, &factor)?, 0.0.into())?;
    Ok(kernels::masked_fill(&scaled, &odd, 0.0.into())?)
}

/// The item's weights in the dtype of state: the master copy if there is one.
pub(super) fn weights(item: &Item<'_>, dtype: DType) -> Result<Tensor> {
    match &item.slice.master {
        Some(master) => Ok((**master).clone()),
        None => Ok(kernels::cast(item.slice.param, dtype)?),
    }
}

/// `p = keep p + rate update`. If there is a master copy, it is updated, and the parameter gets it rounded.
pub(super) fn move_weights(item: &mut Item<'_>, keep: f64, update: &Tensor, rate: f64) -> Result<()> {
    let Slice { param, master, .. } = &mut item.slice;
    let held = match master {
        Some(master) => &mut **master,
        None => &mut **param,
    };
    kernels::scale_(held, keep)?;
    kernels::add_scaled_(held, update, rate)?;
    if let Some(master) = master {
        kernels::copy_(param, &kernels::cast(master, param.dtype())?)?;
    }
    Ok(())
}

/// The Euclidean norm of a tensor: f64 `[1]` on its device. Squares are added by the tree of [`crate::norm_tree`].
pub(super) fn norm(x: &Tensor) -> Result<Tensor> {
    let blocks = 0..x.numel().div_ceil(kernels::NORM_BLOCK);
    Ok(kernels::sqrt(&kernels::sums_of_squares(x.device(), &[(x.clone(), vec![blocks])])?)?)
}
