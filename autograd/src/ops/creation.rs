//! Tensors that are created: random ones, evenly spaced numbers, unit matrices, grids. All are constants, without
//! derivative.

use std::borrow::Borrow;

use phalanx_kernels::{self as kernels, random};
use phalanx_tensor::{
    Context, DType, Device, Dims, Error, Error as TensorError, PhiloxStream, RngKey, Scalar, Tensor, Window,
};

use super::frame::named;
use crate::{Result, Var, no_grad};

// Random tensors: constants, of which no gradient is asked.
//
// Each is a function of a seed and of the number of its call, never of device or threads: the same on a CPU and on a GPU.

/// A source of random tensors with a seed of its own, which no context and no other source touches: PyTorch's `Generator`.
///
/// ```
/// use phalanx_autograd::{Generator, tensor::{DType, Device}};
/// let shuffled = Generator::new(7).randperm(5, Device::CPU)?.to_vec::<i64>()?;
/// assert_eq!(Generator::new(7).randperm(5, Device::CPU)?.to_vec::<i64>()?, shuffled);
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Generator {
    key: RngKey,
    calls: u64,
}

impl Generator {
    /// A source that gives the same tensors, in the same order, for the same seed.
    pub fn new(seed: u64) -> Generator {
        Generator { key: RngKey { seed, step: 0 }, calls: 0 }
    }

    /// The context's: every call draws anew, and a seed that is set begins again.
    fn of_context() -> Generator {
        Generator { key: Context::current().rng, calls: Context::next_draw() }
    }

    /// The draws of the next call.
    fn next(&mut self) -> PhiloxStream {
        const SITE: u64 = 0x7261_6e64_5f74_656e;
        let site = SITE.wrapping_add(self.calls.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        self.calls += 1;
        self.key.site(site)
    }

    /// See [`Var::rand`].
    ///
    /// # Errors
    /// As there.
    pub fn rand(&mut self, shape: &[usize], dtype: DType, device: Device) -> Result<Var> {
        Ok(Var::new(random::uniform(shape, &Window::whole(shape), self.next(), [0.0, 1.0], dtype, device)?))
    }

    /// See [`Var::randn`].
    ///
    /// # Errors
    /// As there.
    pub fn randn(&mut self, shape: &[usize], dtype: DType, device: Device) -> Result<Var> {
        Ok(Var::new(random::normal(shape, &Window::whole(shape), self.next(), [0.0, 1.0], dtype, device)?))
    }

    /// See [`Var::randint`].
    ///
    /// # Errors
    /// As there.
    pub fn randint(&mut self, low: i64, high: i64, shape: &[usize], device: Device) -> Result<Var> {
        const WIDEST: u64 = 1 << 52;
        let width = high.checked_sub(low).filter(|&width| width > 0 && width as u64 <= WIDEST);
        let Some(width) = width else {
            let wanted = "the second above the first, by 2^52 at most";
            return Err(TensorError::range("randint", format!("from {low} up to {high}"), wanted).into());
        };
        let unit = self.rand(shape, DType::F64, device)?;
        unit.mul_scalar(width as f64)?.to(DType::I64)?.clamp(None, Some((width - 1).into()))?.add_scalar(low)
    }

    /// See [`Var::randperm`].
    ///
    /// # Errors
    /// As there.
    pub fn randperm(&mut self, n: usize, device: Device) -> Result<Var> {
        Ok(self.rand(&[n], DType::F64, device)?.sort(0, false)?.1)
    }

    /// See [`Var::bernoulli`].
    ///
    /// # Errors
    /// As there.
    pub fn bernoulli(&mut self, probabilities: &Var) -> Result<Var> {
        const OP: &str = "bernoulli";
        check_probabilities(OP, probabilities, Some(1.0))?;
        let p = probabilities.detach();
        let unit = self.rand(p.shape(), DType::F64, p.device())?;
        unit.lt(&p.to(DType::F64)?)?.to(p.dtype())
    }

    /// See [`Var::multinomial`].
    ///
    /// # Errors
    /// As there.
    pub fn multinomial(&mut self, weights: &Var, count: usize, replacement: bool) -> Result<Var> {
        const OP: &str = "multinomial";
        let shape = weights.shape();
        if !(1..=2).contains(&shape.len()) || shape.contains(&0) || count == 0 {
            let got = format!("weights of shape {shape:?} for {count} draws");
            return Err(
                TensorError::shape(OP, got, "[C] or [B, C] with elements, and at least one draw").into()
            );
        }
        check_probabilities(OP, weights, None)?;
        let _constants = no_grad();
        let p = weights.detach().to(DType::F64)?;
        let possible = p.gt_scalar(0.0)?.to(DType::I64)?.sum(&[-1], false)?;
        let wanted = if replacement { 1 } else { count };
        if !p.device().is_meta() && possible.lt_scalar(wanted as i64)?.to_vec::<bool>()?.contains(&true) {
            let why = format!("got {} draws without replacement of fewer weights above 0", count);
            let why = if replacement { "got no weight above 0".into() } else { why };
            return Err(TensorError::invalid(OP, why).into());
        }
        if replacement {
            return self.with_replacement(&p, count);
        }
        // The first to arrive of clocks that ring at these rates.
        let waits = self.rand(p.shape(), DType::F64, p.device())?.log()?.neg()?;
        Ok(p.div(&waits)?.topk(count, -1, true)?.1)
    }

    /// The class in whose share of the sum a number falls.
    fn with_replacement(&mut self, p: &Var, count: usize) -> Result<Var> {
        let classes = p.shape()[p.rank() - 1];
        let upto = p.cumsum(-1)?;
        let all = upto.narrow(p.rank() - 1, classes - 1, 1)?;
        let shape: Vec<usize> = p.shape()[..p.rank() - 1].iter().copied().chain([count]).collect();
        // Rounding must not reach the sum itself.
        let at =
            self.rand(&shape, DType::F64, p.device())?.mul(&all)?.mul_scalar(1.0 - 2.0 * f64::EPSILON)?;
        let passed = upto.unsqueeze(-2)?.le(&at.unsqueeze(-1)?)?;
        passed.to(DType::I64)?.sum(&[-1], false)
    }
}

/// Sets the seed of this thread's random draws, dropout's and random tensors', and counts its steps from 0 again
/// ([`Context::manual_seed`]). Initial values have the seed of their scope.
pub fn manual_seed(seed: u64) {
    Context::manual_seed(seed);
}

/// Refuses weights that are negative, NaN or infinite, or above `most`; waits for the device.
fn check_probabilities(op: &'static str, p: &Var, most: Option<f64>) -> Result<()> {
    if !p.dtype().is_float() {
        return Err(TensorError::dtype(op, p.dtype(), "a floating-point dtype").into());
    }
    if p.device().is_meta() || p.numel() == 0 {
        return Ok(());
    }
    let all: Vec<f64> = p.detach().to(DType::F64)?.to_vec()?;
    let most = most.unwrap_or(f64::MAX);
    match all.iter().find(|p| !(0.0..=most).contains(*p)) {
        None => Ok(()),
        Some(odd) if most == 1.0 => {
            Err(TensorError::range(op, format!("a probability of {odd}"), "0 to 1").into())
        }
        Some(odd) => {
            Err(TensorError::range(op, format!("a weight of {odd}"), "finite ones from 0 on").into())
        }
    }
}

impl Var {
    /// Numbers spread evenly from 0 up to 1.
    ///
    /// As all constructors here, it draws by the context's key ([`RngKey`]): anew in each call, and the same from run
    /// to run. [`Context::manual_seed`] or a guard sets the seed; [`Generator`] has one of its own.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or it cannot be allocated.
    ///
    /// ```
    /// use phalanx_autograd::{Var, tensor::{Context, DType, Device}};
    /// Context::manual_seed(3);
    /// let x = Var::rand(&[2, 3], DType::F32, Device::CPU)?;
    /// assert_ne!(x.to_vec::<f32>()?, Var::rand(&[2, 3], DType::F32, Device::CPU)?.to_vec::<f32>()?);
    /// Context::manual_seed(3);
    /// assert_eq!(x.to_vec::<f32>()?, Var::rand(&[2, 3], DType::F32, Device::CPU)?.to_vec::<f32>()?);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn rand(shape: &[usize], dtype: DType, device: Device) -> Result<Var> {
        Generator::of_context().rand(shape, dtype, device)
    }

    /// Normally distributed numbers of mean 0 and variance 1; see [`Var::rand`].
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or it cannot be allocated.
    pub fn randn(shape: &[usize], dtype: DType, device: Device) -> Result<Var> {
        Generator::of_context().randn(shape, dtype, device)
    }

    /// [`Var::rand`] of this one's shape, dtype and device.
    ///
    /// # Errors
    /// As there.
    pub fn rand_like(&self) -> Result<Var> {
        Var::rand(self.shape(), self.dtype(), self.device())
    }

    /// [`Var::randn`] of this one's shape, dtype and device.
    ///
    /// # Errors
    /// As there.
    pub fn randn_like(&self) -> Result<Var> {
        Var::randn(self.shape(), self.dtype(), self.device())
    }

    /// Integers (i64) from `low` up to, but not including, `high`; see [`Var::rand`].
    ///
    /// # Errors
    /// If there is none between, more than 2^52 are, or it cannot be allocated.
    pub fn randint(low: i64, high: i64, shape: &[usize], device: Device) -> Result<Var> {
        Generator::of_context().randint(low, high, shape, device)
    }

    /// The numbers from 0 to `n - 1` (i64) in a random order; see [`Var::rand`].
    ///
    /// # Errors
    /// If it cannot be allocated.
    ///
    /// ```
    /// use phalanx_autograd::{Var, tensor::Device};
    /// // Mini-batches of 4 of ten samples, shuffled.
    /// let data = Var::from_slice(&[0f32, 1., 2., 3., 4., 5., 6., 7., 8., 9.], &[10, 1], Device::CPU)?;
    /// for indices in Var::randperm(10, Device::CPU)?.split(4, 0)? {
    ///     let batch = data.index_select(0, &indices)?;
    ///     assert!(batch.shape()[0] <= 4);
    /// }
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn randperm(n: usize, device: Device) -> Result<Var> {
        Generator::of_context().randperm(n, device)
    }

    /// 1 with the probability that stands here, else 0, in this dtype; see [`Var::rand`].
    ///
    /// # Errors
    /// If an element is no probability (the host looks, so it waits for the device), or the dtype is no floating-point one.
    pub fn bernoulli(&self) -> Result<Var> {
        Generator::of_context().bernoulli(self)
    }

    /// Indices (i64) of classes, each drawn with a probability in proportion to its weight: `[C]` to `[count]`, `[B, C]` to
    /// `[B, count]`. Without replacement no class comes twice in a row. See [`Var::rand`].
    ///
    /// # Errors
    /// If a weight is negative, NaN or infinite, or fewer are above 0 than are drawn (the host looks, so it waits for
    /// the device), or the shape or dtype is another.
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<Var> {
        Generator::of_context().multinomial(self, count, replacement)
    }
}

/// Evenly spaced numbers and unit matrices; constants, without derivative.
impl Var {
    /// `steps` numbers from `start` to `end`, both included, evenly spaced; `start` alone for one step. Computed in f64
    /// from whichever end is nearer, and converted to `dtype` (integers truncate).
    ///
    /// # Errors
    /// If a bound is not finite, or there is no memory for so many.
    ///
    /// ```
    /// use phalanx_autograd::{Var, tensor::{DType, Device}};
    /// let x = Var::linspace(0.0, 1.0, 5, DType::F32, Device::CPU)?;
    /// assert_eq!(x.to_vec::<f32>()?, [0.0, 0.25, 0.5, 0.75, 1.0]);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn linspace(start: f64, end: f64, steps: usize, dtype: DType, device: Device) -> Result<Var> {
        const OP: &str = "linspace";
        if !start.is_finite() || !end.is_finite() {
            let why = format!("got {start} to {end}, wanted finite bounds");
            return Err(Error::invalid(OP, why).into());
        }
        let count =
            i64::try_from(steps).map_err(|_| Error::range(OP, format!("{steps} steps"), "below 2^63"))?;
        let step = if steps > 1 { end / (count - 1) as f64 - start / (count - 1) as f64 } else { 0.0 };
        let made = || -> Result<Var> {
            let front =
                Var::arange(0, count / 2, 1, DType::F64, device)?.mul_scalar(step)?.add_scalar(start)?;
            let behind = Var::arange(1 - (count - count / 2), 1, 1, DType::F64, device)?;
            let behind = behind.mul_scalar(step)?.add_scalar(if steps == 1 { start } else { end })?;
            Var::cat(&[front, behind], 0)?.to(dtype)
        };
        named(OP, made())
    }

    /// The `[rows, columns]` matrix of zeros with 1 on its diagonal.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn eye(rows: usize, columns: usize, dtype: DType, device: Device) -> Result<Var> {
        const OP: &str = "eye";
        let made = || -> Result<Var> {
            let matrix = Tensor::zeros(&[rows, columns], dtype, device)?;
            let mut diagonal = matrix.as_strided(&[rows.min(columns)], &[columns.saturating_add(1)], 0)?;
            kernels::fill_(&mut diagonal, 1)?;
            Ok(Var::new(matrix))
        };
        named(OP, made())
    }
}

/// Tensors made of indices and numbers; constants, without derivative.
impl Var {
    /// `[this shape, classes]` of i64: 1 where the last dimension's place is the index, else 0.
    ///
    /// # Errors
    /// If this is not i64 or i32, or an index is out of range.
    pub fn one_hot(&self, classes: usize) -> Result<Var> {
        Ok(Var::new(kernels::one_hot(self.tensor(), classes)?))
    }

    /// `start, start + step, ..` up to but not including `end`.
    ///
    /// # Errors
    /// If `step` is 0 or leads away from `end`, a bound is not finite, or an integer dtype cannot hold a number.
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        dtype: DType,
        device: Device,
    ) -> Result<Var> {
        Ok(Var::new(kernels::arange(start, end, step, dtype, device)?))
    }
}

// Coordinates of the points of a grid.
//
// Views; derivative: the sum over what was repeated.

/// Which dimension of [`Var::meshgrid`]'s results belongs to which input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MeshIndexing {
    /// Dimension `i` to input `i`, as PyTorch's default.
    #[default]
    Ij,
    /// The first two exchanged, as NumPy's default: rows belong to the second input.
    Xy,
}

impl Var {
    /// Of vectors (or single numbers) one tensor each, of all their sizes, that varies along its own dimension only.
    ///
    /// # Errors
    /// If there is none, one has more than one dimension, or dtypes or devices differ.
    pub fn meshgrid<V: Borrow<Var>>(vars: &[V], indexing: MeshIndexing) -> Result<Vec<Var>> {
        const OP: &str = "meshgrid";
        let Some(first) = vars.first().map(Borrow::borrow) else {
            return Err(Error::invalid(OP, "got no tensors, wanted at least one").into());
        };
        let vars = || vars.iter().map(Borrow::borrow);
        if let Some(wide) = vars().find(|v| v.rank() > 1) {
            return Err(Error::shape(OP, format!("{:?}", wide.shape()), "at most one dimension").into());
        }
        if let Some(other) = vars().find(|v| v.dtype() != first.dtype()) {
            let wanted = format!("{}, as the first operand", first.dtype());
            return Err(Error::dtype(OP, other.dtype(), wanted).into());
        }
        if let Some(other) = vars().find(|v| v.device() != first.device()) {
            return Err(Error::Device { op: OP, left: first.device(), right: other.device() }.into());
        }
        let shape: Dims = vars().map(Var::numel).collect();
        let grid = |(i, v): (usize, &Var)| -> Result<Var> {
            let mut own = Dims::from_elem(1, shape.len());
            own[i] = shape[i];
            let grid = v.reshape_to(&own)?.broadcast_to(&shape)?;
            let swaps = indexing == MeshIndexing::Xy && shape.len() > 1;
            if swaps { grid.transpose(0, 1) } else { Ok(grid) }
        };
        named(OP, vars().enumerate().map(grid).collect())
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::MeshIndexing;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn both_ends_are_exact_and_integers_truncate() {
        let run = |start, end, steps| Var::linspace(start, end, steps, DType::F64, Device::CPU).unwrap();
        for steps in [2, 3, 7, 10] {
            let x = run(-0.3, 1.1, steps).to_vec::<f64>().unwrap();
            assert_eq!((x.len(), x[0], x[steps - 1]), (steps, -0.3, 1.1));
            assert!(x.windows(2).all(|pair| (pair[1] - pair[0] - 1.4 / (steps - 1) as f64).abs() < 1e-12));
        }
        assert_eq!(run(3.0, 5.0, 1).to_vec::<f64>().unwrap(), [3.0]);
        assert_eq!(run(3.0, 5.0, 0).shape(), [0]);
        let whole = Var::linspace(0.0, 10.0, 4, DType::I64, Device::CPU).unwrap();
        assert_eq!(whole.to_vec::<i64>().unwrap(), [0, 3, 6, 10]);
        assert_eq!(run(-f64::MAX, f64::MAX, 3).to_vec::<f64>().unwrap()[1], 0.0);
        let refused = Var::linspace(0.0, f64::NAN, 3, DType::F32, Device::CPU).err().unwrap().to_string();
        assert!(refused.contains("linspace: got 0 to NaN"), "{refused}");
        let endless = Var::linspace(0.0, 1.0, usize::MAX, DType::F32, Device::Meta(0)).unwrap_err();
        assert!(endless.to_string().starts_with("linspace"));
    }

    #[test]
    fn unit_matrices_have_any_shape_and_dtype() {
        let run = |rows, columns, dtype| Var::eye(rows, columns, dtype, Device::CPU).unwrap();
        assert_eq!(run(2, 3, DType::F32).to_vec::<f32>().unwrap(), [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(run(3, 1, DType::Bool).to_vec::<bool>().unwrap(), [true, false, false]);
        assert_eq!((run(0, 4, DType::I64).numel(), run(4, 0, DType::F16).numel()), (0, 0));
        assert_eq!(Var::eye(1 << 20, 1 << 20, DType::F64, Device::Meta(0)).unwrap().rank(), 2);
        let error = Var::eye(usize::MAX, usize::MAX, DType::F64, Device::CPU).unwrap_err();
        assert!(error.to_string().starts_with("eye"));
    }

    #[test]
    fn grids_are_numpys_and_have_their_derivatives() {
        let x = Var::from_slice(&[1i64, 2, 3], &[3], Device::CPU).unwrap();
        let y = Var::from_slice(&[4i64, 5], &[2], Device::CPU).unwrap();
        for (indexing, shape) in [(MeshIndexing::Ij, [3, 2]), (MeshIndexing::Xy, [2, 3])] {
            let grids = Var::meshgrid(&[&x, &y], indexing).unwrap();
            assert!(grids.iter().all(|grid| grid.shape() == shape));
            let along = grids[0].select(usize::from(indexing == MeshIndexing::Ij), 0).unwrap();
            assert_eq!(along.to_vec::<i64>().unwrap(), [1, 2, 3]);
        }
        check_twice(&[&[3], &[], &[2]], |v| {
            let grids = Var::meshgrid(v, MeshIndexing::Xy)?;
            grids[0].mul(&grids[1])?.mul(&grids[2])
        });
        assert!(Var::meshgrid::<Var>(&[], MeshIndexing::Ij).is_err());
        assert!(Var::meshgrid(&[x.clone(), y.to(DType::F32).unwrap()], MeshIndexing::Ij).is_err());
        assert!(Var::meshgrid(&[x.unsqueeze(0).unwrap()], MeshIndexing::Ij).is_err());
    }
}
