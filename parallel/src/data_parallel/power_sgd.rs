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

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, PhiloxStream, RngKey, Tensor, unpoisoned};

use super::hook::{AllReduce, Bucket, BucketHook, PendingBucket};
use crate::Result;
use crate::comm::{Call, Comm, Reduction};

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
    memory: Arc<Mutex<HashMap<usize, ParameterMemory>>>,
}

/// A parameter's passes, residual and factor.
#[derive(Default)]
struct ParameterMemory {
    passes: u64,
    /// [n, m]
    residual: Option<Tensor>,
    /// [m, r]
    q: Option<Tensor>,
}

fn lock(memory: &Mutex<HashMap<usize, ParameterMemory>>) -> MutexGuard<'_, HashMap<usize, ParameterMemory>> {
    unpoisoned(memory.lock())
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

    /// The part of a parameter's gradients that this rank has not sent yet, `[n, m]`; see [`Bucket::parameters`].
    pub fn residual(&self, parameter: usize) -> Option<Tensor> {
        lock(&self.memory).get(&parameter)?.residual.clone()
    }

    /// Counts a pass, and returns the matrix whose factors are sent; `None` if the gradient is sent whole.
    fn matrix(&self, number: usize, view: &Tensor) -> Result<Option<Matrix>> {
        let config = &self.config;
        let mut all = lock(&self.memory);
        let memory = all.entry(number).or_default();
        memory.passes += 1;
        let Some((rows, columns, rank)) =
            factor_sizes(config, view.shape()).filter(|_| memory.passes > config.start_after)
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
        let q = orthonormal_columns(&start, config.epsilon, Some(stream))?;
        Ok(Some(Matrix { number, view: view.clone(), m, q }))
    }
}

impl BucketHook for PowerSgd {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
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
            finish_factors(&config, &memory, &comm, (thin, &p))?;
            rest_sums.wait()?;
            Ok(whole.iter_mut().zip(&rest.parts).try_for_each(|(view, part)| kernels::copy_(view, part))?)
        }))
    }

    fn fresh(&self) -> Option<Arc<dyn BucketHook>> {
        Some(Arc::new(PowerSgd { config: self.config, memory: Arc::default() }))
    }
}

/// From the sums of `P` to the gradients.
fn finish_factors(
    config: &PowerSgdConfig,
    memory: &Mutex<HashMap<usize, ParameterMemory>>,
    comm: &Comm,
    (mut thin, p): (Vec<Matrix>, &Flat),
) -> Result<()> {
    let mut q = Flat::new(thin.iter().map(|t| t.q.shape()), &thin[0].m)?;
    let mut bases = Vec::new();
    for ((matrix, p), q) in thin.iter().zip(&p.parts).zip(&mut q.parts) {
        let base = orthonormal_columns(p, config.epsilon, None)?;
        let own = kernels::matmul(&matrix.m.transpose(0, 1)?, &base)?;
        kernels::copy_(q, &own)?;
        if config.feedback {
            let residual = kernels::sub(&matrix.m, &kernels::matmul(&base, &own.transpose(0, 1)?)?)?;
            // A residual with a NaN would make all later gradients NaN.
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

/// A gradient that is sent as factors.
pub(super) struct Matrix {
    /// Of the parameter.
    pub(super) number: usize,
    /// Its gradient, in the bucket.
    pub(super) view: Tensor,
    /// [n, m]: gradient and residual.
    pub(super) m: Tensor,
    /// [m, r]: where this pass begins.
    pub(super) q: Tensor,
}

/// Rows and columns of a gradient of this shape, and of its factors; `None` if it goes whole.
pub(super) fn factor_sizes(config: &PowerSgdConfig, shape: &[usize]) -> Option<(usize, usize, usize)> {
    let [rows, ref others @ ..] = *shape else { return None };
    let columns = others.iter().product::<usize>();
    if others.is_empty() || rows.min(columns) == 0 {
        return None;
    }
    let rank = config.rank.min(rows).min(columns);
    let sent = ((rows + columns) * rank) as f64;
    (sent * config.min_rate < (rows * columns) as f64).then_some((rows, columns, rank))
}

/// Tensors side by side in one message.
pub(super) struct Flat {
    pub(super) all: Tensor,
    pub(super) parts: Vec<Tensor>,
}

impl Flat {
    /// Of these shapes, in the dtype and on the device of another tensor.
    pub(super) fn new<S: AsRef<[usize]>>(shapes: impl Iterator<Item = S>, like: &Tensor) -> Result<Flat> {
        let shapes: Vec<S> = shapes.collect();
        let elements = |shape: &S| shape.as_ref().iter().product::<usize>();
        let all = Tensor::empty(&[shapes.iter().map(elements).sum()], like.dtype(), like.device())?;
        let mut at = 0;
        let mut part = |shape: &S| -> Result<Tensor> {
            let part = all.narrow(0, at, elements(shape))?;
            at += elements(shape);
            Ok(part.with_shape(shape.as_ref())?)
        };
        let parts = shapes.iter().map(&mut part).collect::<Result<_>>()?;
        Ok(Flat { all, parts })
    }
}

/// The fraction of a column's length that must be new for it to count as a direction of its own.
const NEW_FRACTION_MIN: f64 = 1e-10;

/// An orthonormal basis of what the columns of `matrix` [n, r] span, r <= n; `epsilon` is added to lengths that are
/// divided by. A column that depends on those before it, or is no number, becomes 0; with `random` numbers it becomes
/// a random direction. The bits depend on the values alone.
pub(super) fn orthonormal_columns(
    matrix: &Tensor,
    epsilon: f64,
    random: Option<PhiloxStream>,
) -> Result<Tensor> {
    if matrix.device().is_meta() {
        return Ok(matrix.clone());
    }
    let (rows, rank) = (matrix.shape()[0], matrix.shape()[1]);
    let values = kernels::cast(matrix, DType::F64)?.to_vec::<f64>()?;
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(rank);
    for number in 0..rank {
        let mut column: Vec<f64> = (0..rows).map(|row| values[row * rank + number]).collect();
        let mut done = orthonormalise(&mut column, &basis, epsilon);
        if let Some(stream) = random.filter(|_| !done || column.iter().any(|x| !x.is_finite())) {
            column = (0..rows).map(|row| draw(&stream, row * rank + number)).collect();
            done = orthonormalise(&mut column, &basis, epsilon);
        }
        if !done {
            column.fill(0.0);
        }
        basis.push(column);
    }
    let flat: Vec<f64> = (0..rows * rank).map(|i| basis[i % rank][i / rank]).collect();
    Ok(kernels::cast(&Tensor::from_slice(&flat, &[rows, rank], matrix.device())?, matrix.dtype())?)
}

/// Subtracts the components along `basis`, and scales the rest to length 1; false if nothing is left.
fn orthonormalise(column: &mut [f64], basis: &[Vec<f64>], epsilon: f64) -> bool {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let before = dot(column, column).sqrt();
    // Twice: the second time removes the rounding errors of the first.
    for direction in basis.iter().chain(basis) {
        let along = dot(column, direction);
        column.iter_mut().zip(direction).for_each(|(x, d)| *x -= along * d);
    }
    let length = dot(column, column).sqrt();
    if length <= NEW_FRACTION_MIN * before {
        return false;
    }
    column.iter_mut().for_each(|x| *x /= length + epsilon);
    true
}

/// Even in (-1, 1).
fn draw(stream: &PhiloxStream, place: usize) -> f64 {
    let word = stream.block(place as u64 / 4, 0)[place % 4];
    (f64::from(word) + 0.5) / f64::from(1u32 << 31) - 1.0
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, RngKey};

    use super::*;

    #[test]
    fn what_saves_little_goes_whole() {
        let config = PowerSgdConfig { rank: 2, min_rate: 2.0, ..PowerSgdConfig::default() };
        assert_eq!(factor_sizes(&config, &[100]), None);
        assert_eq!(factor_sizes(&config, &[8, 8]), None, "2 (8 + 8) 2 = 64");
        assert_eq!(factor_sizes(&config, &[8, 9]), Some((8, 9, 2)), "2 (8 + 9) 2 = 68");
        assert_eq!(factor_sizes(&config, &[30, 3, 5, 5]), Some((30, 75, 2)));
        assert_eq!(factor_sizes(&config, &[0, 5]), None);
        let all = PowerSgdConfig { rank: 50, min_rate: 0.0, ..config };
        assert_eq!(factor_sizes(&all, &[4, 7]), Some((4, 7, 4)));
    }

    fn basis(values: &[f64], shape: [usize; 2], random: bool) -> Vec<f64> {
        let matrix = Tensor::from_slice(values, &shape, Device::CPU).unwrap();
        let stream = RngKey { seed: 1, step: 1 }.site(1);
        orthonormal_columns(&matrix, 0.0, random.then_some(stream)).unwrap().to_vec().unwrap()
    }

    /// `b^T b`.
    fn products(b: &[f64], rank: usize) -> Vec<f64> {
        let column = |i: usize| b.iter().skip(i).step_by(rank);
        let pair = |i: usize| column(i / rank).zip(column(i % rank)).map(|(x, y)| x * y).sum();
        (0..rank * rank).map(pair).collect()
    }

    #[test]
    fn columns_are_orthonormal_and_span_the_same() {
        let b = basis(&[3.0, 1.0, 4.0, 1.0 + 1e-7, 0.0, 2.0], [3, 2], false);
        assert!((b[0] - 0.6).abs() < 1e-15 && (b[2] - 0.8).abs() < 1e-15 && b[4] == 0.0);
        let p = products(&b, 2);
        assert!((p[0] - 1.0).abs() < 1e-15 && p[1].abs() < 1e-15 && (p[3] - 1.0).abs() < 1e-15, "{p:?}");
    }

    #[test]
    fn what_depends_on_others_is_zero_or_random() {
        let dependent = [1.0, 2.0, f64::NAN, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0];
        let b = basis(&dependent, [3, 3], true);
        let p = products(&b, 3);
        let identity = |i: usize| f64::from(u8::from(i.is_multiple_of(4)));
        assert!(p.iter().enumerate().all(|(i, x)| (x - identity(i)).abs() < 1e-12), "{p:?}");
        assert_eq!(basis(&[1.0, 2.0, 1.0, 2.0], [2, 2], false)[1], 0.0);
        assert!(basis(&dependent, [3, 3], false)[2].is_nan(), "a gradient that is no number is not hidden");
        let zeros = basis(&[0.0; 6], [3, 2], true);
        assert!((products(&zeros, 2)[0] - 1.0).abs() < 1e-12);
    }
}
