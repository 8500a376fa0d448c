//! What goes ahead of a tensor whose shape the receiver does not know.

use phalanx_tensor::{Category, Context, DType, Device, Dims, Tensor};

use super::Spec;
use crate::comm::Comm;
use crate::{Error, Result};

/// Numbers of a header: the dtype, the number of dimensions, and as many sizes as there may be.
const HEADER: usize = 2 + MAX_DIMS;
const MAX_DIMS: usize = 8;

/// What goes ahead of a tensor.
pub(super) fn header(spec: &Spec, device: Device) -> Result<Tensor> {
    if spec.shape.len() > MAX_DIMS {
        let why = format!("got an output of shape {:?}, wanted at most {MAX_DIMS} dimensions", spec.shape);
        return Err(Error::Config(why));
    }
    let dtype = DType::ALL.iter().position(|&d| d == spec.dtype).unwrap_or_default();
    let mut numbers = [0; HEADER];
    (numbers[0], numbers[1]) = (dtype as i64, spec.shape.len() as i64);
    numbers[2..].iter_mut().zip(&spec.shape).for_each(|(number, &size)| *number = size as i64);
    let _category = Context::with(|c| c.category = Category::Buffers);
    Ok(Tensor::from_slice(&numbers, &[HEADER], device.host())?)
}

/// Receives a header.
pub(super) fn receive_spec(comm: &Comm, from: usize, device: Device) -> Result<Spec> {
    let _category = Context::with(|c| c.category = Category::Buffers);
    let mut header = Tensor::empty(&[HEADER], DType::I64, device.host())?;
    comm.recv(&mut header, from)?;
    let numbers = header.to_vec::<i64>()?;
    let spec = || {
        let numbers: Vec<usize> = numbers.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>()?;
        let dtype = *DType::ALL.get(numbers[0])?;
        Some(Spec { shape: Dims::from_slice(numbers[2..].get(..numbers[1])?), dtype })
    };
    spec()
        .ok_or_else(|| Error::Config(format!("got {numbers:?}, wanted a dtype, a number of sizes and sizes")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch;

    #[test]
    fn shapes_and_dtypes_come_as_they_were() {
        let got = launch::threads(2, |rank| -> Result<_> {
            let (comm, device) = (rank.comm(), rank.device());
            let mut specs = Vec::new();
            for (shape, dtype) in [(&[][..], DType::F64), (&[2, 0, 3], DType::BF16), (&[5; 8], DType::I32)] {
                let spec = Spec { shape: Dims::from_slice(shape), dtype };
                match rank.rank() {
                    0 => comm.send(&header(&spec, device)?, 1)?,
                    _ => {
                        assert_eq!(receive_spec(comm, 0, device)?, spec);
                        specs.push(spec);
                    }
                }
            }
            Ok(specs.len())
        });
        assert_eq!(got.unwrap(), [0, 3]);
        let nine = Spec { shape: Dims::from_slice(&[1; 9]), dtype: DType::F32 };
        let error = header(&nine, Device::CPU).unwrap_err().to_string();
        assert!(error.contains("[1, 1, 1, 1, 1, 1, 1, 1, 1], wanted at most 8 dimensions"), "{error}");
    }
}
