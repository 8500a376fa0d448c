//! [`RouterLosses`]: losses of the routers of mixtures of experts, which make experts evenly loaded and keep logits small.
//!
//! ```text
//! forward    each router: logits ──watch──► probabilities;  notes its loads and sums in the pass
//! loss       the sum over all routers is added to the cross entropy;  a node on the loss learns the loss's gradient
//! backward   loss's node ──► .. ──► each watch adds its part of the losses' gradient to that of the logits
//! ```
//! The balancing loss couples all blocks: the load that a router's gradient needs is counted over all of them. When backward comes to the
//! first router, the forward pass is over and the counts are complete. So no value has to leave a block beside the stream, and blocks may be
//! recomputed: a router that runs again notes the same numbers again.
//!
//! A stage of a pipeline passes its routers' sums on beside the stream, with those of the stages before. The losses are computed from all of
//! them at the end. Backward, the gradient of the sums comes back beside that of the stream:
//!
//! ```text
//! stage 0  ──stream, [1, 2E+1]──►  stage 1  ──stream, [2, 2E+1]──►  stage 2: sums of three routers ──► losses
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_autograd::{Backward, Cx, Grads, Result as GradResult, Var, begins, grads1, record};
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor, unpoisoned};

use crate::{Error, Result};

/// Factors of the losses of a model's routers, which [`Decoder::loss`](super::Decoder::loss) adds in training; 0 for none. Both are of the
/// router logits of all N = blocks × tokens of a micro-batch, with E experts:
///
/// ```text
/// balance * E * sum over e of f_e P_e     f_e: pairs of a token and its expert e, over N;  P_e: the mean probability of e
/// z * mean of logsumexp(logits)^2
/// ```
/// The first has gradients through P alone. A micro-batch counts as many times as it has targets that count, so the whole batch's losses are
/// means over its micro-batches. They do not depend on the layout beyond the micro-batches.
///
/// Sources: Fedus et al.: Switch transformers (2021), section 2.2, with all of a token's experts and over all blocks as transformers'
/// `load_balancing_loss_func` has it; Zoph et al.: ST-MoE (2022), equation 5.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// The factor of the load-balancing loss (transformers: `router_aux_loss_coef`, where `output_router_logits` is true).
    pub balance: f64,
    /// The factor of the z-loss.
    pub z: f64,
}

impl RouterLosses {
    /// Whether there are any.
    pub fn is_on(&self) -> bool {
        self.balance != 0.0 || self.z != 0.0
    }
}

/// The routers of one forward pass of a model, or of a stage of one.
pub(crate) struct RouterPass {
    losses: RouterLosses,
    /// How many experts a token takes.
    chosen: usize,
    /// What the stages before have summed up: see [`Decoder::router_sums`](super::Decoder::router_sums).
    before: Option<Var>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the number of the block.
    routers: BTreeMap<usize, Router>,
    /// The gradient of the sums of this stage's routers and of those before, as the sums. None before backward.
    slopes: Option<Tensor>,
}

/// What one router has done.
struct Router {
    /// Pairs of each expert.
    counts: Vec<usize>,
    /// `[experts]`: the probabilities of all tokens, added.
    probabilities: Tensor,
    /// A scalar: the squared logsumexps of all tokens, added.
    squares: Tensor,
}

/// The numbers of a router in the sums of all: pairs and probabilities of each expert, and one number of squares.
pub(crate) fn sums_of_router(experts: usize) -> usize {
    2 * experts + 1
}

thread_local! {
    /// The pass of the block that this thread runs, and the block's number.
    static CURRENT: RefCell<Option<(Arc<RouterPass>, usize)>> = const { RefCell::new(None) };
}

impl RouterPass {
    /// Of routers whose tokens take `chosen` experts, after those whose sums are `before`.
    pub(crate) fn new(losses: RouterLosses, chosen: usize, before: Option<Var>) -> Arc<RouterPass> {
        Arc::new(RouterPass { losses, chosen, before, state: Mutex::default() })
    }

    /// Runs a block, whose router is then part of `pass`, if there is one.
    pub(crate) fn in_block<T>(pass: Option<&Arc<RouterPass>>, block: usize, work: impl FnOnce() -> T) -> T {
        let _back = Back(CURRENT.replace(pass.map(|pass| (pass.clone(), block))));
        work()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }

    fn routers_before(&self) -> usize {
        self.before.as_ref().map_or(0, |before| before.shape()[0])
    }

    /// The sums of all routers up to here, f64 `[routers, 2 experts + 1]`: each one's pairs of every expert, the probabilities of every
    /// expert, the squares. Both kinds of numbers have the same bits as in their own dtypes. `None` without routers.
    fn sums(&self) -> Result<Option<Tensor>> {
        let state = self.lock();
        let mut parts: Vec<Tensor> = self.before.iter().map(|before| before.tensor().clone()).collect();
        for Router { counts, probabilities, squares } in state.routers.values() {
            let counts: Vec<f64> = counts.iter().map(|&count| count as f64).collect();
            let counts = Tensor::from_slice(&counts, &[counts.len()], probabilities.device())?;
            let [p, squares] =
                [probabilities, &squares.with_shape(&[1])?].map(|x| kernels::cast(x, DType::F64));
            let row = kernels::cat(&[&counts, &p?, &squares?], 0)?;
            parts.push(row.with_shape(&[1, sums_of_router(counts.numel())])?);
        }
        let parts: Vec<&Tensor> = parts.iter().collect();
        Ok(if parts.is_empty() { None } else { Some(kernels::cat(&parts, 0)?) })
    }

    /// The losses of all routers, with their factors: a scalar, and its gradient with respect to a router's probabilities `[experts]` and
    /// squares, both in `wide`. `None` without routers.
    fn losses(&self, wide: DType) -> Result<Option<Losses>> {
        let Some(sums) = self.sums()? else { return Ok(None) };
        let (routers, experts) = (sums.shape()[0], sums.shape()[1] / 2);
        let pairs = kernels::sum(&sums.narrow(1, 0, experts)?, &[0], false)?;
        let tokens =
            kernels::mul_scalar(&kernels::sum(&pairs, &[0], false)?, (1.0 / self.chosen as f64).into())?;
        // balance E f_e / N, where f_e = pairs / N.
        let balance = kernels::mul_scalar(&pairs, (self.losses.balance * experts as f64).into())?;
        let slopes = kernels::div(&kernels::div(&balance, &tokens)?, &tokens)?;
        let z = kernels::div(&kernels::full(&[], self.losses.z, DType::F64, tokens.device())?, &tokens)?;
        let (slopes, z) = (kernels::cast(&slopes, wide)?, kernels::cast(&z, wide)?);
        let mut value: Option<Tensor> = None;
        for router in 0..routers {
            let own = kernels::cast(&sums.narrow(0, router, 1)?.squeeze(0)?, wide)?;
            let (p, squares) = (own.narrow(0, experts, experts)?, own.narrow(0, 2 * experts, 1)?);
            let own = kernels::sum(&kernels::mul(&slopes, &p)?, &[0], false)?;
            let own = kernels::add(&own, &kernels::mul(&squares.squeeze(0)?, &z)?)?;
            value = Some(value.map_or(Ok(own.clone()), |value| kernels::add(&value, &own))?);
        }
        Ok(value.map(|value| Losses { value, slopes, z, routers }))
    }
}

/// The losses of all routers of a pass.
struct Losses {
    value: Tensor,
    /// `[experts]`: the gradient with respect to the probabilities of any router.
    slopes: Tensor,
    /// A scalar: the gradient with respect to the squares of any router.
    z: Tensor,
    routers: usize,
}

/// The gradient of the losses with respect to a router's logits `[tokens, experts]`. `slopes` is that with respect to the router's row of the
/// sums, of which the pairs have none.
fn gradient(logits: &Tensor, slopes: &Tensor) -> GradResult<Tensor> {
    let experts = logits.shape()[1];
    let slopes = Var::new(kernels::cast(slopes, logits.dtype())?);
    let (slope, z) = (slopes.narrow(0, experts, experts)?, slopes.narrow(0, 2 * experts, 1)?);
    let logits = Var::new(logits.clone());
    // Through the softmax; d logsumexp = p.
    let p = logits.softmax(-1)?;
    let mean = p.mul(&slope)?.sum(&[-1], true)?;
    let z = logits.logsumexp(&[-1], true)?.mul_scalar(2.0)?.mul(&z)?;
    Ok(p.mul(&slope.sub(&mean)?.add(&z)?)?.into_tensor())
}

struct Back(Option<(Arc<RouterPass>, usize)>);

impl Drop for Back {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// The positions of each row, and those that are this rank's.
#[derive(Clone, Debug)]
pub(crate) struct Positions {
    pub(crate) all: usize,
    pub(crate) own: Range<usize>,
}

impl Positions {
    /// Makes what is not of this rank's positions 0, in `[rows * positions, ..]`.
    fn keep_own(&self, x: &Tensor) -> Result<()> {
        let Positions { all, own } = self;
        if own.len() == *all {
            return Ok(());
        }
        let rows = x.with_shape(&[x.shape()[0] / all, *all, x.shape()[1]])?;
        for others in [0..own.start, own.end..*all] {
            kernels::fill_(&mut rows.narrow(1, others.start, others.len())?, 0.0)?;
        }
        Ok(())
    }
}

/// A router inside a pass.
pub(crate) struct WatchedRouter {
    pass: Arc<RouterPass>,
    block: usize,
}

impl WatchedRouter {
    /// The router of the block that this thread runs, if its pass has losses.
    pub(crate) fn here() -> Option<WatchedRouter> {
        CURRENT.with_borrow(|current| current.clone()).map(|(pass, block)| WatchedRouter { pass, block })
    }

    /// The logits `[rows * positions, experts]`, whose gradient will have that of the losses at this rank's positions.
    pub(crate) fn watch(&self, logits: &Var, positions: Positions) -> Result<Var> {
        begins();
        let (pass, block) = (self.pass.clone(), self.block);
        let held = logits.tensor().clone();
        let watch = Watch { pass, block, logits: held.clone(), positions };
        Ok(record("router_losses", &[logits], held, |_| Ok(watch))?)
    }

    /// Notes what the router has done with these logits and their probabilities `[tokens, experts]`.
    pub(crate) fn note(&self, logits: &Tensor, probabilities: &Tensor, counts: &[usize]) -> Result<()> {
        let sums = kernels::logsumexp(logits, &[1], false)?;
        let router = Router {
            counts: counts.to_vec(),
            probabilities: kernels::sum(probabilities, &[0], false)?,
            squares: kernels::sum(&kernels::mul(&sums, &sums)?, &[0], false)?,
        };
        self.pass.lock().routers.insert(self.block, router);
        Ok(())
    }
}

/// The node of [`WatchedRouter::watch`].
struct Watch {
    pass: Arc<RouterPass>,
    block: usize,
    logits: Tensor,
    positions: Positions,
}

impl Backward for Watch {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        refuse_second(cx)?;
        let state = self.pass.lock();
        // Without a loss of the model nothing is added.
        let place = state.routers.keys().position(|block| *block == self.block);
        let (Some(slopes), Some(place)) = (&state.slopes, place) else {
            return grads1(cx.dy().clone());
        };
        let slopes = slopes.narrow(0, self.pass.routers_before() + place, 1)?.squeeze(0)?;
        let own = gradient(&self.logits, &slopes)?;
        self.positions.keep_own(&own)?;
        grads1(cx.dy().add(&Var::new(own))?)
    }
}

/// The loss with `factor` times the losses of all routers up to the end of a pass.
pub(crate) fn with_router_losses(loss: &Var, pass: &Arc<RouterPass>, factor: f64) -> Result<Var> {
    let wide = if loss.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let Some(losses) = pass.losses(wide)? else { return Ok(loss.clone()) };
    begins();
    let value = kernels::cast(&kernels::mul_scalar(&losses.value, factor.into())?, loss.dtype())?;
    let sum = kernels::add(loss.tensor(), &value)?;
    let inputs = [Some(loss), pass.before.as_ref()];
    let inputs: Vec<&Var> = inputs.into_iter().flatten().collect();
    Ok(record("router_losses", &inputs, sum, |_| Ok(Total { pass: pass.clone(), losses, factor }))?)
}

/// The node of [`with_router_losses`].
struct Total {
    pass: Arc<RouterPass>,
    losses: Losses,
    factor: f64,
}

impl Total {
    /// The gradient of the sums, where that of the loss is `dy`. All routers have the same.
    fn slopes(&self, dy: &Tensor) -> GradResult<Tensor> {
        let Losses { slopes, z, routers, .. } = &self.losses;
        let dy = kernels::mul_scalar(&kernels::cast(dy, slopes.dtype())?, self.factor.into())?;
        let pairs = slopes.zeros_like()?;
        let (slopes, z) = (kernels::mul(slopes, &dy)?, kernels::mul(z, &dy)?);
        let row = kernels::cat(&[&pairs, &slopes, &z.with_shape(&[1])?], 0)?;
        let row = kernels::cast(&row, DType::F64)?.with_shape(&[1, row.numel()])?;
        Ok(kernels::cat(&vec![&row; *routers], 0)?)
    }
}

impl Backward for Total {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        refuse_second(cx)?;
        let slopes = self.slopes(cx.dy().tensor())?;
        let before = self.pass.take_slopes(slopes)?;
        Ok([Some(Some(cx.dy().clone())), before.map(Some)].into_iter().flatten().collect())
    }
}

/// The sums of all routers up to the end of a pass that ends with the stream `x`, for the stages after it. Their gradient comes to the routers
/// before that of `x` does, of which the node is an input. `None` without routers.
pub(crate) fn router_sums(x: &Var, pass: &Arc<RouterPass>) -> Result<Option<Var>> {
    let Some(sums) = pass.sums()? else { return Ok(None) };
    begins();
    let inputs = [Some(x), pass.before.as_ref()];
    let inputs: Vec<&Var> = inputs.into_iter().flatten().collect();
    Ok(Some(record("router_sums", &inputs, sums, |_| Ok(Sums { pass: pass.clone() }))?))
}

/// The node of [`router_sums`].
struct Sums {
    pass: Arc<RouterPass>,
}

impl Backward for Sums {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        refuse_second(cx)?;
        let before = self.pass.take_slopes(cx.dy().tensor().clone())?;
        Ok([Some(None), before.map(Some)].into_iter().flatten().collect())
    }
}

impl RouterPass {
    /// Keeps the gradient of the sums for the routers, and returns that of the sums before.
    fn take_slopes(&self, slopes: Tensor) -> GradResult<Option<Var>> {
        let before = match self.routers_before() {
            0 => None,
            routers => Some(Var::new(slopes.narrow(0, 0, routers)?.contiguous()?)),
        };
        self.lock().slopes = Some(slopes);
        Ok(before)
    }
}

fn refuse_second(cx: &Cx<'_>) -> GradResult<()> {
    match cx.create_graph() {
        false => Ok(()),
        true => {
            let why = "got a backward pass that is to be differentiated again, wanted none";
            Err(Error::invalid("router losses", why).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    /// transformers' `load_balancing_loss_func` and the z-loss, of the logits of all routers one after the other.
    fn formula(logits: &[Vec<f64>], chosen: usize, losses: RouterLosses) -> f64 {
        let (n, experts) = (logits.len() as f64, logits[0].len());
        let mut pairs = vec![vec![0.0; experts]; chosen];
        let (mut mean, mut z) = (vec![0.0; experts], 0.0);
        for row in logits {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            order[..chosen].iter().enumerate().for_each(|(slot, &expert)| pairs[slot][expert] += 1.0 / n);
            mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x.exp() / sum / n);
            z += sum.ln().powi(2) / n;
        }
        let product = |slot: &Vec<f64>| slot.iter().zip(&mean).map(|(f, p)| f * p).sum::<f64>();
        losses.balance * experts as f64 * pairs.iter().map(product).sum::<f64>() + losses.z * z
    }

    fn rows(seed: f64, count: usize) -> Vec<Vec<f64>> {
        let number = |row: usize, expert: usize| ((row * 5 + expert * 7) as f64 * seed).sin() * 2.0;
        (0..count).map(|row| (0..4).map(|expert| number(row, expert)).collect()).collect()
    }

    /// Notes what a router with these logits does, whose tokens take two experts; the logits for what follows.
    fn routed(pass: &Arc<RouterPass>, block: usize, x: &Var) -> Var {
        let router = RouterPass::in_block(Some(pass), block, WatchedRouter::here).unwrap();
        let watched = router.watch(x, Positions { all: 1, own: 0..1 }).unwrap();
        let p = watched.softmax(-1).unwrap();
        let chosen = x.tensor().to_vec::<f64>().unwrap();
        let mut counts = vec![0; 4];
        for row in chosen.chunks(4) {
            let mut order = [0, 1, 2, 3];
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            order[..2].iter().for_each(|&expert: &usize| counts[expert] += 1);
        }
        router.note(watched.tensor(), p.tensor(), &counts).unwrap();
        watched.sum_all().unwrap().mul_scalar(0.25).unwrap()
    }

    fn leaf(rows: &[Vec<f64>]) -> Var {
        Var::leaf(Tensor::from_slice(&rows.concat(), &[rows.len(), 4], Device::CPU).unwrap()).unwrap()
    }

    /// Two routers with unlike numbers of tokens, of which each takes two experts.
    #[test]
    fn values_and_gradients_are_those_of_the_formula_over_all_routers() {
        let routers = [rows(0.7, 5), rows(1.3, 3)];
        for losses in [RouterLosses { balance: 0.3, z: 0.0 }, RouterLosses { balance: 0.02, z: 0.1 }] {
            let pass = RouterPass::new(losses, 2, None);
            let leaves = routers.each_ref().map(|rows| leaf(rows));
            let mut total = Var::leaf(Tensor::scalar(1.5f64, Device::CPU).unwrap()).unwrap();
            for (block, x) in leaves.iter().enumerate() {
                total = total.add(&routed(&pass, block, x)).unwrap();
            }
            assert!(WatchedRouter::here().is_none());
            let loss = with_router_losses(&total, &pass, 3.0).unwrap();
            let all = routers.concat();
            let plain = total.item::<f64>().unwrap();
            let wanted = plain + 3.0 * formula(&all, 2, losses);
            assert!((loss.item::<f64>().unwrap() - wanted).abs() < 1e-14, "{losses:?}");
            // Twice the loss: the gradient of the losses follows that of the loss.
            loss.mul_scalar(2.0).unwrap().backward().unwrap();
            let got: Vec<f64> =
                leaves.iter().flat_map(|x| x.grad().unwrap().tensor().to_vec::<f64>().unwrap()).collect();
            for (i, got) in got.into_iter().enumerate() {
                let at = |step: f64| {
                    let mut moved = all.clone();
                    moved[i / 4][i % 4] += step;
                    formula(&moved, 2, losses)
                };
                let wanted = 2.0 * (0.25 + 3.0 * (at(1e-6) - at(-1e-6)) / 2e-6);
                assert!((got - wanted).abs() < 1e-8, "{losses:?}, element {i}: {got}, wanted {wanted}");
            }
        }
    }

    /// Three routers on two stages, or on three of which the second has none.
    #[test]
    fn sums_that_stages_pass_on_have_the_bits_of_one_pass() {
        let (routers, losses) =
            ([0.7, 1.3, 2.1].map(|seed| rows(seed, 5)), RouterLosses { balance: 0.3, z: 0.1 });
        // The stages end after so many routers.
        let run = |stages: &[usize]| {
            let leaves = routers.each_ref().map(|rows| leaf(rows));
            let mut total = Var::leaf(Tensor::scalar(1.5f64, Device::CPU).unwrap()).unwrap();
            let mut before = None;
            for (stage, &end) in stages.iter().enumerate() {
                let pass = RouterPass::new(losses, 2, before.take());
                let first = stage.checked_sub(1).map_or(0, |earlier| stages[earlier]);
                for (block, x) in leaves.iter().enumerate().take(end).skip(first) {
                    total = total.add(&routed(&pass, block, x)).unwrap();
                }
                if stage + 1 == stages.len() {
                    total = with_router_losses(&total, &pass, 3.0).unwrap();
                } else {
                    before = router_sums(&total, &pass).unwrap();
                    assert_eq!(before.as_ref().unwrap().shape(), [end, sums_of_router(4)]);
                }
            }
            total.mul_scalar(2.0).unwrap().backward().unwrap();
            let bits = |x: &Var| x.grad().unwrap().tensor().to_bytes().unwrap();
            (total.tensor().to_bytes().unwrap(), leaves.each_ref().map(bits))
        };
        let whole = run(&[3]);
        for stages in [&[2, 3][..], &[1, 1, 3], &[3, 3]] {
            assert!(run(stages) == whole, "{stages:?}");
        }
    }
}
