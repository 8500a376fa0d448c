//! Evenly spaced numbers and unit matrices; constants, without derivative.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Error, Tensor};

use super::composed::named;
use crate::{Result, Var};

impl Var {
    /// `steps` numbers from `start` to `end`, both included, evenly spaced; `start` alone for one step. Computed in f64 from
    /// whichever end is nearer, and converted to `dtype` (integers truncate).
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use crate::Var;

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
        assert!(Var::linspace(0.0, f64::NAN, 3, DType::F32, Device::CPU).is_err());
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
}
