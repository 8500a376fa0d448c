//! [`Case`]: an operation on given inputs, run on the CPU and on a GPU.

use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_kernels::cast;
use phalanx_tensor::{DType, Device, Error, Result, Tensor};

/// An operation on inputs that it makes for the device it is given ([`on`]), returning all that it computed.
pub struct Case {
    pub name: String,
    pub run: Box<dyn Fn(Device) -> Result<Vec<Tensor>>>,
    /// Relative to the largest of the CPU's values (at least 1), for floats; integers must be equal.
    pub tolerance: f64,
}

/// What became of a case.
pub enum Outcome {
    Passed,
    Failed(String),
}

impl Case {
    /// With the tolerance of one rounding in `dtype`, times a few.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        run: impl Fn(Device) -> Result<Vec<Tensor>> + 'static,
    ) -> Case {
        Case { name: name.into(), run: Box::new(run), tolerance: tolerance(dtype) }
    }

    /// With another tolerance.
    pub fn within(mut self, tolerance: f64) -> Case {
        self.tolerance = tolerance;
        self
    }

    /// Runs it on both.
    pub fn run(&self) -> Outcome {
        let attempt = catch_unwind(AssertUnwindSafe(|| self.compare()));
        match attempt {
            Ok(Ok(())) => Outcome::Passed,
            Ok(Err(why)) => Outcome::Failed(why),
            Err(_) => Outcome::Failed("panicked".into()),
        }
    }

    fn compare(&self) -> Result<(), String> {
        let want = (self.run)(Device::CPU);
        let got = (self.run)(Device::Cuda(0));
        let (want, got) = match (want, got) {
            (Ok(want), Ok(got)) => (want, got),
            // What the CPU refuses the GPU refuses too, if only when it is asked for the result.
            // A failure of the device or of a program is no refusal.
            (Err(_), Err(error)) if !matches!(error, Error::Gpu { .. }) => return Ok(()),
            (Err(want), Ok(got)) => {
                let waited = got.iter().try_for_each(|t| t.to_device(Device::CPU, false).map(drop));
                return waited.err().map(|_| ()).ok_or(format!("succeeded where the CPU says: {want}"));
            }
            (_, Err(error)) => return Err(error.to_string()),
        };
        if want.len() != got.len() {
            return Err(format!("{} results, wanted {}", got.len(), want.len()));
        }
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            self.agree(got, want).map_err(|why| format!("result {i}: {why}"))?;
        }
        Ok(())
    }

    fn agree(&self, got: &Tensor, want: &Tensor) -> Result<(), String> {
        let form = |t: &Tensor| format!("{:?} {}", t.shape(), t.dtype());
        if got.shape() != want.shape() || got.dtype() != want.dtype() {
            return Err(format!("{}, wanted {}", form(got), form(want)));
        }
        let (got_values, want_values) = (values(got)?, values(want)?);
        let float = want.dtype().is_float();
        let scale = want_values.iter().filter(|x| x.is_finite()).fold(1f64, |m, x| m.max(x.abs()));
        let close = |a: f64, b: f64| {
            a == b || (a.is_nan() && b.is_nan()) || (float && (a - b).abs() <= self.tolerance * scale)
        };
        let wrong = got_values.iter().zip(&want_values).position(|(&a, &b)| !close(a, b));
        match wrong {
            None => Ok(()),
            Some(at) => {
                Err(format!("{} at {at}: got {:e}, wanted {:e}", form(want), got_values[at], want_values[at]))
            }
        }
    }
}

fn values(t: &Tensor) -> Result<Vec<f64>, String> {
    let host = t.to_device(Device::CPU, false).map_err(|e| e.to_string())?;
    cast(&host, DType::F64).and_then(|t| t.to_vec()).map_err(|e| e.to_string())
}

/// The number of kernels that `work` launches on a GPU; on a CPU `wanted`, so that a case that returns it fails where the two differ.
pub fn launches(device: Device, wanted: i64, work: impl FnOnce() -> Result<()>) -> Result<Tensor> {
    let before = if device.is_cuda() { device.gpu()?.launches() } else { 0 };
    work()?;
    let counted = if device.is_cuda() { (device.gpu()?.launches() - before) as i64 } else { wanted };
    Tensor::from_slice(&[counted], &[1], Device::CPU)
}

/// A few roundings.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 4e-6,
        DType::F16 => 4e-3,
        _ => 3.2e-2,
    }
}

/// The floating-point dtypes.
pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// A tensor on `device` of `value(0), value(1), ..`, rounded to the dtype.
pub fn make(shape: &[usize], dtype: DType, device: Device, value: impl Fn(usize) -> f64) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    let host = Tensor::from_slice(&values, shape, Device::CPU).and_then(|t| cast(&t, dtype));
    host.and_then(|t| t.to_device(device, false)).unwrap_or_else(|e| panic!("{e}"))
}

/// A deterministic spread of numbers between two bounds; another one for each seed.
pub fn spread(seed: usize, low: f64, high: f64) -> impl Fn(usize) -> f64 {
    move |i| low + (high - low) * (((i + 1000 * seed) as f64 * 0.618_033_988_749_894_9).fract())
}
