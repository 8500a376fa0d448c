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

use std::cell::RefCell;
use std::collections::BTreeMap;
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

/// The routers of one forward pass.
pub(crate) struct RouterPass {
    losses: RouterLosses,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the number of the block.
    routers: BTreeMap<usize, Router>,
    /// The gradient of the losses' sum, a scalar. None before backward.
    dy: Option<Tensor>,
}

/// What one router has done.
struct Router {
    tokens: usize,
    /// Pairs of each expert.
    counts: Vec<usize>,
    /// `[experts]`: the probabilities of all tokens, added.
    probabilities: Tensor,
    /// A scalar: the squared logsumexps of all tokens, added.
    squares: Tensor,
}

thread_local! {
    /// The pass of the block that this thread runs, and the block's number.
    static CURRENT: RefCell<Option<(Arc<RouterPass>, usize)>> = const { RefCell::new(None) };
}

impl RouterPass {
    pub(crate) fn new(losses: RouterLosses) -> Arc<RouterPass> {
        Arc::new(RouterPass { losses, state: Mutex::default() })
    }

    /// Runs a block, whose router is then part of `pass`, if there is one.
    pub(crate) fn in_block<T>(pass: Option<&Arc<RouterPass>>, block: usize, work: impl FnOnce() -> T) -> T {
        let _back = Back(CURRENT.replace(pass.map(|pass| (pass.clone(), block))));
        work()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }

    /// The losses of all routers so far, with their factors: a scalar. `None` without routers.
    fn value(&self) -> Result<Option<Tensor>> {
        let state = self.lock();
        let tokens = state.tokens() as f64;
        let mut value: Option<Tensor> = None;
        for router in state.routers.values() {
            let f = state.loads(&router.probabilities)?;
            let balance = kernels::sum(&kernels::mul(&f, &router.probabilities)?, &[0], false)?;
            let factor = self.losses.balance * router.counts.len() as f64 / tokens;
            let z = kernels::mul_scalar(&router.squares, (self.losses.z / tokens).into())?;
            let own = kernels::add(&kernels::mul_scalar(&balance, factor.into())?, &z)?;
            value = Some(value.map_or(Ok(own.clone()), |value| kernels::add(&value, &own))?);
        }
        Ok(value)
    }

    /// The gradient of the losses with respect to a router's logits `[tokens, experts]`, where that of their sum is `dy`.
    fn gradient(&self, state: &State, logits: &Tensor, dy: &Tensor) -> GradResult<Tensor> {
        let logits = Var::new(logits.clone());
        let tokens = state.tokens() as f64;
        let p = logits.softmax(-1)?;
        // dP_e = balance E f_e / N of each token, through the softmax; d logsumexp = p.
        let f = Var::new(state.loads(logits.tensor())?);
        let slope = f.mul_scalar(self.losses.balance * logits.shape()[1] as f64 / tokens)?;
        let mean = p.mul(&slope)?.sum(&[-1], true)?;
        let z = logits.logsumexp(&[-1], true)?.mul_scalar(2.0 * self.losses.z / tokens)?;
        let dy = Var::new(kernels::cast(dy, logits.dtype())?);
        Ok(p.mul(&slope.sub(&mean)?.add(&z)?)?.mul(&dy)?.into_tensor())
    }
}

impl State {
    /// Tokens of all routers.
    fn tokens(&self) -> usize {
        self.routers.values().map(|router| router.tokens).sum()
    }

    /// `[experts]`: each expert's pairs over the tokens of all routers, as `like` is stored.
    fn loads(&self, like: &Tensor) -> phalanx_tensor::Result<Tensor> {
        let experts = self.routers.values().map(|router| router.counts.len()).max().unwrap_or(0);
        let pairs = |expert| self.routers.values().map(|router| router.counts[expert]).sum::<usize>();
        let loads: Vec<f64> =
            (0..experts).map(|expert| pairs(expert) as f64 / self.tokens().max(1) as f64).collect();
        kernels::cast(&Tensor::from_slice(&loads, &[experts], like.device())?, like.dtype())
    }
}

struct Back(Option<(Arc<RouterPass>, usize)>);

impl Drop for Back {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
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

    /// The logits, whose gradient will have that of the losses.
    pub(crate) fn watch(&self, logits: &Var) -> Result<Var> {
        begins();
        let (pass, block) = (self.pass.clone(), self.block);
        let held = logits.tensor().clone();
        Ok(record("router_losses", &[logits], held.clone(), |_| Ok(Watch { pass, block, logits: held }))?)
    }

    /// Notes what the router has done with these logits and their probabilities `[tokens, experts]`.
    pub(crate) fn note(&self, logits: &Tensor, probabilities: &Tensor, counts: &[usize]) -> Result<()> {
        let sums = kernels::logsumexp(logits, &[1], false)?;
        let router = Router {
            tokens: logits.shape()[0],
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
}

impl Backward for Watch {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        refuse_second(cx)?;
        let state = self.pass.lock();
        // Without a loss of the model nothing is added.
        let Some(dy) = state.dy.clone().filter(|_| state.routers.contains_key(&self.block)) else {
            return grads1(cx.dy().clone());
        };
        let own = self.pass.gradient(&state, &self.logits, &dy)?;
        grads1(cx.dy().add(&Var::new(own))?)
    }
}

/// The loss with `factor` times the losses of a pass's routers.
pub(crate) fn with_router_losses(loss: &Var, pass: &Arc<RouterPass>, factor: f64) -> Result<Var> {
    let Some(value) = pass.value()? else { return Ok(loss.clone()) };
    begins();
    let value = kernels::cast(&kernels::mul_scalar(&value, factor.into())?, loss.dtype())?;
    let sum = kernels::add(loss.tensor(), &value)?;
    Ok(record("router_losses", &[loss], sum, |_| Ok(Total { pass: pass.clone(), factor }))?)
}

/// The node of [`with_router_losses`].
struct Total {
    pass: Arc<RouterPass>,
    factor: f64,
}

impl Backward for Total {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        refuse_second(cx)?;
        let wide = if cx.dy().dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let dy = kernels::cast(cx.dy().tensor(), wide)?;
        self.pass.lock().dy = Some(kernels::mul_scalar(&dy, self.factor.into())?);
        grads1(cx.dy().clone())
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

    /// Two routers with unlike numbers of tokens, of which each takes two experts.
    #[test]
    fn values_and_gradients_are_those_of_the_formula_over_all_routers() {
        let routers = [rows(0.7, 5), rows(1.3, 3)];
        for losses in [RouterLosses { balance: 0.3, z: 0.0 }, RouterLosses { balance: 0.02, z: 0.1 }] {
            let pass = RouterPass::new(losses);
            let leaf = |rows: &Vec<Vec<f64>>| {
                Var::leaf(Tensor::from_slice(&rows.concat(), &[rows.len(), 4], Device::CPU).unwrap()).unwrap()
            };
            let leaves = routers.each_ref().map(leaf);
            let mut total = Var::leaf(Tensor::scalar(1.5f64, Device::CPU).unwrap()).unwrap();
            for (block, x) in leaves.iter().enumerate() {
                let router = RouterPass::in_block(Some(&pass), block, WatchedRouter::here).unwrap();
                let watched = router.watch(x).unwrap();
                let p = watched.softmax(-1).unwrap();
                let chosen = x.tensor().to_vec::<f64>().unwrap();
                let mut counts = vec![0; 4];
                for row in chosen.chunks(4) {
                    let mut order = [0, 1, 2, 3];
                    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
                    order[..2].iter().for_each(|&expert: &usize| counts[expert] += 1);
                }
                router.note(watched.tensor(), p.tensor(), &counts).unwrap();
                total = total.add(&watched.sum_all().unwrap().mul_scalar(0.25).unwrap()).unwrap();
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
}
