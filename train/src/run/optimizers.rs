//! [`Optimizers`]: a run's optimizers, each with its own rule, at rates that follow one schedule; [`Averaged`]: the averaged weights in
//! the model for a while.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::{
    Adafactor, AdamW, EMA, Ema, Group, Lamb, Muon, Optimizer, Parameter, Peers, Rule, Schedule,
    is_one_of_ranks,
};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_tensor::Tensor;

use crate::{Error, Result};

/// A rule that is chosen at run time.
pub type AnyRule = Box<dyn Rule>;

/// Optimizers of different parameters, which are updated together.
pub(crate) struct Optimizers {
    all: Vec<Optimizer<AnyRule>>,
    /// Of each optimizer, the rate that each group was given.
    rates: Vec<Vec<f64>>,
}

/// AdamW with decays 0.9 and 0.95 of its moments, and a weight decay of 0.1 for matrices. It is a run's default.
///
/// # Errors
/// As [`Rule::init`].
pub fn adamw(parameters: Vec<Parameter>, lr: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    adamw_with(parameters, lr, 0.1)
}

/// The same with another weight decay.
///
/// # Errors
/// As [`Rule::init`].
pub fn adamw_with(parameters: Vec<Parameter>, lr: f64, weight_decay: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    let rule: AnyRule = Box::new(AdamW::default().with_betas(0.9, 0.95));
    Ok(vec![Optimizer::new(rule, Group::decay_matrices(parameters, lr, weight_decay))?])
}

/// Muon with a weight decay for the parameters for which `inside` returns true, and AdamW without one for the others.
/// Source: Jordan and others: Muon (2024), where AdamW trains a language model's embedding and head.
///
/// # Errors
/// As [`Rule::init`].
pub fn muon(
    parameters: Vec<Parameter>,
    lr: f64,
    weight_decay: f64,
    inside: impl Fn(&Parameter) -> bool,
) -> Result<Vec<Optimizer<AnyRule>>> {
    beside_adamw(Box::<Muon>::default(), parameters, lr, weight_decay, inside)
}

/// [`Adafactor`] with a weight decay for matrices and without one for the rest.
///
/// # Errors
/// As [`Rule::init`].
pub fn adafactor(parameters: Vec<Parameter>, lr: f64, weight_decay: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    let rule: AnyRule = Box::<Adafactor>::default();
    Ok(vec![Optimizer::new(rule, Group::decay_matrices(parameters, lr, weight_decay))?])
}

/// [`Lamb`] with a weight decay for matrices, and AdamW without one for the rest, which have norms that say little.
///
/// # Errors
/// As [`Rule::init`].
pub fn lamb(parameters: Vec<Parameter>, lr: f64, weight_decay: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    beside_adamw(Box::<Lamb>::default(), parameters, lr, weight_decay, Parameter::is_matrix)
}

/// A rule with a weight decay for the parameters for which `inside` returns true, and AdamW without one for the others.
fn beside_adamw(
    rule: AnyRule,
    parameters: Vec<Parameter>,
    lr: f64,
    weight_decay: f64,
    inside: impl Fn(&Parameter) -> bool,
) -> Result<Vec<Optimizer<AnyRule>>> {
    let (inside, rest): (Vec<_>, Vec<_>) = parameters.into_iter().partition(inside);
    let adamw: AnyRule = Box::new(AdamW::default().with_betas(0.9, 0.95));
    let mut all = vec![Optimizer::new(adamw, vec![Group::new(rest, lr)])?];
    // All ranks exchange parts of matrices, also one that has none.
    if !inside.is_empty() || is_one_of_ranks() {
        let group = Group::new(inside, lr).with_weight_decay(weight_decay);
        all.push(Optimizer::new(rule, vec![group])?);
    }
    Ok(all)
}

impl Optimizers {
    /// The optimizers of the `trained` parameters, of which other ranks (`peers`) may have parts. It is an error unless each parameter is
    /// in one optimizer. All ranks call it.
    pub fn new(
        mut all: Vec<Optimizer<AnyRule>>,
        trained: &[Parameter],
        ema: Option<f64>,
        peers: Option<Arc<dyn Peers>>,
    ) -> Result<Optimizers> {
        let mut given: HashMap<String, usize> = HashMap::new();
        for parameter in all.iter().flat_map(Optimizer::parameters) {
            *given.entry(parameter.name().into()).or_default() += 1;
        }
        for parameter in trained {
            let times = given.get(parameter.name()).copied().unwrap_or(0);
            if times != 1 {
                let name = parameter.name();
                let why = format!(
                    "train: got {times} optimizers for `{name}`, wanted one; freeze what is not trained"
                );
                return Err(Error::Config(why));
            }
        }
        if let Some(decay) = ema {
            let averaged = |optimizer: Optimizer<AnyRule>| {
                let (rule, groups) = optimizer.into_parts();
                let rule: AnyRule = Box::new(Ema::new(rule, decay));
                Optimizer::new(rule, groups)
            };
            all = all.into_iter().map(averaged).collect::<Result<_, _>>()?;
        }
        all = all.into_iter().map(|o| o.with_peers(peers.clone())).collect::<phalanx_nn::Result<_>>()?;
        let rates = all.iter_mut().map(|o| o.groups_mut().iter().map(|g| g.lr).collect()).collect();
        Ok(Optimizers { all, rates })
    }

    /// The parameters of all optimizers.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.all.iter().flat_map(Optimizer::parameters).collect()
    }

    /// The parameters with the averages of their weights, if the run keeps averages.
    pub fn averages(&self) -> Vec<(Parameter, Tensor)> {
        self.all.iter().flat_map(|optimizer| optimizer.state_of(EMA)).collect()
    }

    /// Sets each group's rate for a step: the schedule's rate times `factor`, times the group's own rate over the schedule's peak.
    pub fn set_lr(&mut self, schedule: &Schedule, step: u64, factor: f64) {
        let (lr, peak) = (schedule.lr(step) * factor, schedule.peak());
        for (optimizer, rates) in self.all.iter_mut().zip(&self.rates) {
            for (group, &given) in optimizer.groups_mut().iter_mut().zip(rates) {
                group.lr = if given == peak || peak == 0.0 { lr } else { given * lr / peak };
            }
        }
    }

    /// One step, gradients multiplied by the factor.
    pub fn step(&mut self, factor: Option<&Tensor>) -> Result<()> {
        for optimizer in &mut self.all {
            match factor {
                Some(factor) => optimizer.step_by(factor)?,
                None => optimizer.step()?,
            }
        }
        Ok(())
    }

    /// One step, gradients multiplied by the scale.
    pub fn step_scaled(&mut self, scale: f64) -> Result<()> {
        self.all.iter_mut().try_for_each(|optimizer| Ok(optimizer.step_scaled(scale)?))
    }

    /// The optimizer, if there is only one.
    pub fn only(&mut self) -> Option<&mut Optimizer<AnyRule>> {
        if let [only] = &mut self.all[..] { Some(only) } else { None }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Optimizer<AnyRule>> {
        self.all.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Optimizer<AnyRule>> {
        self.all.iter_mut()
    }
}

/// While it lives, the model has the averages of its weights.
#[must_use = "the weights come back when it is dropped"]
pub struct Averaged {
    weights: Vec<(Parameter, Tensor)>,
    data_parallel: Arc<dyn DataParallel>,
}

impl Averaged {
    pub(crate) fn new(
        averages: Vec<(Parameter, Tensor)>,
        data_parallel: Arc<dyn DataParallel>,
    ) -> Result<Averaged> {
        let mut weights = Vec::new();
        for (parameter, average) in averages {
            weights.push((parameter.clone(), parameter.tensor().copy()?));
            kernels::copy_(&mut parameter.tensor(), &kernels::cast(&average, parameter.dtype())?)?;
        }
        data_parallel.updated()?;
        Ok(Averaged { weights, data_parallel })
    }

    fn put_back(&self) -> Result<()> {
        for (parameter, weights) in &self.weights {
            kernels::copy_(&mut parameter.tensor(), weights)?;
        }
        Ok(self.data_parallel.updated()?)
    }
}

impl Drop for Averaged {
    fn drop(&mut self) {
        // If a rank is lost meanwhile, the next step returns the error.
        let _ = self.put_back();
    }
}
