//! When a result agrees with what was expected.

use phalanx::{DType, Device, Tensor, kernels};

/// `|a - e| <= atol + rtol |e|` everywhere, or both NaN, or equal; shapes and dtypes must agree, integers be equal.
pub fn compare(what: &str, got: &Tensor, want: &Tensor, rtol: f64, atol: f64) -> Result<(), String> {
    if got.shape() != want.shape() || got.dtype() != want.dtype() {
        let form = |t: &Tensor| format!("{:?} {}", t.shape(), t.dtype());
        return Err(format!("{what} is {}, wanted {}", form(got), form(want)));
    }
    let host = |t: &Tensor| t.to_device(Device::CPU, false).map_err(|e| e.to_string());
    let (got, want) = (&host(got)?, &host(want)?);
    if !got.dtype().is_float() {
        let ints = |t: &Tensor| {
            kernels::cast(t, DType::I64).and_then(|t| t.to_vec::<i64>()).map_err(|e| e.to_string())
        };
        let (a, e) = (ints(got)?, ints(want)?);
        return first_bad(
            what,
            got.shape(),
            a.iter().zip(&e).map(|(a, e)| (a == e, a.to_string(), e.to_string())),
        );
    }
    let floats =
        |t: &Tensor| kernels::cast(t, DType::F64).and_then(|t| t.to_vec::<f64>()).map_err(|e| e.to_string());
    let (a, e) = (floats(got)?, floats(want)?);
    let agree =
        |a: f64, e: f64| a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= atol + rtol * e.abs();
    first_bad(
        what,
        got.shape(),
        a.iter().zip(&e).map(|(&a, &e)| (agree(a, e), format!("{a:e}"), format!("{e:e}"))),
    )
}

fn first_bad(
    what: &str,
    shape: &[usize],
    pairs: impl Iterator<Item = (bool, String, String)>,
) -> Result<(), String> {
    let bad: Vec<_> = pairs.enumerate().filter(|(_, (ok, ..))| !ok).collect();
    match bad.first() {
        None => Ok(()),
        Some((at, (_, got, want))) => {
            Err(format!("{what} {shape:?}: {} wrong, the first at {at}: got {got}, wanted {want}", bad.len()))
        }
    }
}
