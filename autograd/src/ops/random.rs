//! Random tensors: constants, of which no gradient is asked.
//!
//! Each is a function of a seed and of the number of its call, never of device or threads: the same on a CPU and on a GPU.

use phalanx_kernels::random;
use phalanx_tensor::{Context, DType, Device, Error as TensorError, RngKey, Stream4, Window};

use crate::{Result, Var, no_grad};

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
    fn next(&mut self) -> Stream4 {
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
    /// As all constructors here, it draws by the context's key ([`RngKey`]): anew in each call, and the same from run to run.
    /// [`Context::manual_seed`] or a guard sets the seed; [`Generator`] has one of its own.
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
    /// If a weight is negative, NaN or infinite, or fewer are above 0 than are drawn (the host looks, so it waits for the device), or the
    /// shape or dtype is another.
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<Var> {
        Generator::of_context().multinomial(self, count, replacement)
    }
}
