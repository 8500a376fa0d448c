//! [`PowerSgd`]: gradients of matrices sent as two thin factors, with what they leave out added to the next.
//!
//! For a parameter's gradient `G` [n, m] on one of the ranks, with its residual `E` and a `Q` [m, r] that all share:
//!
//! ```text
//! M = G + E
//! P = sum over ranks of M Q          sent: n r numbers
//! P^ = P, its columns orthonormal    the same on all ranks
//! Q' = M^T P^                        this rank's
//! E = M - P^ Q'^T                    what is left out here, for the next pass
//! Q = sum over ranks of Q'           sent: m r numbers; where the next pass begins
//! G = P^ Q^T                         the same on all ranks
//! ```
//!
//! So what a rank has sent and its residual add up to its gradients. Memory is kept by parameter, not by bucket: it
//! stays when buckets are filled anew. It is not part of a checkpoint: a run that goes on begins with none.
//!
//! Source: Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), algorithms 1 and 2; options as in PyTorch's
//! `powerSGD_hook`.

mod matrix;
mod orthonormal;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, RngKey, Tensor};

use super::hook::{AllReduce, Bucket, BucketHook, Rest};
use crate::Result;
use crate::comm::{Call, Comm, Reduction};
use matrix::{Flat, Matrix};

/// How much [`PowerSgd`] leaves out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerSgdConfig {
    /// Columns of the factors (1).
    pub rank: usize,
    /// Passes whose gradients are sent whole, while they change most (1000).
    pub start_after: u64,
    /// A matrix is sent as factors if that saves more than this factor, else whole (2).
    pub min_rate: f64,
    /// Whether what was left out is added to the next gradient (true).
    pub feedback: bool,
    /// Whether `Q` begins with the last pass's, else with random numbers (true).
    pub warm_start: bool,
    /// Added to a column's length before it is divided by (0).
    pub epsilon: f64,
    /// Of the random numbers, the same on all ranks (0).
    pub seed: u64,
}

impl Default for PowerSgdConfig {
    fn default() -> PowerSgdConfig {
        PowerSgdConfig {
            rank: 1,
            start_after: 1000,
            min_rate: 2.0,
            feedback: true,
            warm_start: true,
            epsilon: 0.0,
            seed: 0,
        }
    }
}

/// Sends gradients of matrices as factors of few columns. Vectors, and matrices for which that is not worth it, go
/// whole. Factors are computed and sent in f32 (f64 of f64 gradients). Every [`super::Ddp`] has a memory of its own.
pub struct PowerSgd {
    config: PowerSgdConfig,
    memory: Arc<Mutex<HashMap<usize, Memory>>>,
}

/// What is kept of a parameter.
#[derive(Default)]
struct Memory {
    passes: u64,
    /// [n, m]
    residual: Option<Tensor>,
    /// [m, r]
    q: Option<Tensor>,
}

fn lock(memory: &Mutex<HashMap<usize, Memory>>) -> MutexGuard<'_, HashMap<usize, Memory>> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PowerSgd {
    /// Without memory.
    ///
    /// # Errors
    /// If the rank is 0.
    pub fn new(config: PowerSgdConfig) -> Result<PowerSgd> {
        if config.rank == 0 {
            return Err(phalanx_nn::Error::invalid("PowerSgd", "got rank 0, wanted at least 1").into());
        }
        Ok(PowerSgd { config, memory: Arc::default() })
    }

    /// What this rank has not sent yet of a parameter's gradients, `[n, m]`; see [`Bucket::parameters`].
    pub fn residual(&self, parameter: usize) -> Option<Tensor> {
        lock(&self.memory).get(&parameter)?.residual.clone()
    }

    /// Counts a pass and makes of a gradient what is sent as factors; `None` if it goes whole.
    fn matrix(&self, number: usize, view: &Tensor) -> Result<Option<Matrix>> {
        let config = &self.config;
        let mut all = lock(&self.memory);
        let memory = all.entry(number).or_default();
        memory.passes += 1;
        let Some((rows, columns, rank)) =
            matrix::worth(config, view.shape()).filter(|_| memory.passes > config.start_after)
        else {
            return Ok(None);
        };
        let dtype = if view.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let m = kernels::cast(&view.with_shape(&[rows, columns])?, dtype)?;
        let m = match &memory.residual {
            Some(residual) => kernels::add(&m, residual)?,
            None => m.copy()?,
        };
        let stream = RngKey { seed: config.seed, step: memory.passes }.site(number as u64);
        let start = match &memory.q {
            Some(q) if config.warm_start => q.clone(),
            _ => Tensor::zeros(&[columns, rank], dtype, view.device())?,
        };
        let q = orthonormal::columns(&start, config.epsilon, Some(stream))?;
        Ok(Some(Matrix { number, view: view.clone(), m, q }))
    }
}

impl BucketHook for PowerSgd {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<Rest> {
        let (mut whole, mut thin) = (Vec::new(), Vec::new());
        for (&number, view) in bucket.parameters.iter().zip(bucket.views()?) {
            match self.matrix(number, &view)? {
                Some(matrix) => thin.push(matrix),
                None => whole.push(view),
            }
        }
        if thin.is_empty() {
            return AllReduce.start(bucket, comm);
        }
        let mut rest = Flat::new(whole.iter().map(Tensor::shape), bucket.gradients)?;
        whole.iter().zip(&mut rest.parts).try_for_each(|(view, part)| kernels::copy_(part, view))?;
        let mut p = Flat::new(thin.iter().map(|t| [t.m.shape()[0], t.q.shape()[1]]), &thin[0].m)?;
        for (matrix, part) in thin.iter().zip(&mut p.parts) {
            kernels::copy_(part, &kernels::matmul(&matrix.m, &matrix.q)?)?;
        }
        let sum = |flat: &Flat| comm.start(Call::all_reduce(flat.all.clone(), Reduction::Sum));
        let (rest_sums, p_sums) = (sum(&rest), sum(&p));
        let (config, memory, comm) = (self.config, Arc::clone(&self.memory), Arc::clone(comm));
        Ok(Box::new(move || {
            p_sums.wait()?;
            second_half(&config, &memory, &comm, (thin, &p))?;
            rest_sums.wait()?;
            Ok(whole.iter_mut().zip(&rest.parts).try_for_each(|(view, part)| kernels::copy_(view, part))?)
        }))
    }

    fn fresh(&self) -> Option<Arc<dyn BucketHook>> {
        Some(Arc::new(PowerSgd { config: self.config, memory: Arc::default() }))
    }
}

/// From the sums of `P` to the gradients.
fn second_half(
    config: &PowerSgdConfig,
    memory: &Mutex<HashMap<usize, Memory>>,
    comm: &Comm,
    (mut thin, p): (Vec<Matrix>, &Flat),
) -> Result<()> {
    let mut q = Flat::new(thin.iter().map(|t| t.q.shape()), &thin[0].m)?;
    let mut bases = Vec::new();
    for ((matrix, p), q) in thin.iter().zip(&p.parts).zip(&mut q.parts) {
        let base = orthonormal::columns(p, config.epsilon, None)?;
        let own = kernels::matmul(&matrix.m.transpose(0, 1)?, &base)?;
        kernels::copy_(q, &own)?;
        if config.feedback {
            let residual = kernels::sub(&matrix.m, &kernels::matmul(&base, &own.transpose(0, 1)?)?)?;
            // A gradient that is no number is no reason to send none for ever.
            let sound = residual.device().is_meta() || !kernels::any_nan(&residual)?;
            lock(memory).entry(matrix.number).or_default().residual = sound.then_some(residual);
        }
        bases.push(base);
    }
    comm.all_reduce(&mut q.all, Reduction::Sum)?;
    for ((matrix, base), q) in thin.iter_mut().zip(&bases).zip(&q.parts) {
        let sums = kernels::matmul(base, &q.transpose(0, 1)?)?.with_shape(matrix.view.shape())?;
        let sums = kernels::cast(&sums, matrix.view.dtype())?;
        kernels::copy_(&mut matrix.view, &sums)?;
        if config.warm_start {
            lock(memory).entry(matrix.number).or_default().q = Some(q.copy()?);
        }
    }
    Ok(())
}

impl fmt::Debug for PowerSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}
