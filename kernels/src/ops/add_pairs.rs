//! A few numbers added in an order that the caller gives: what ranks have sent of sums, put together.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Error, Result, Tensor};

use crate::check;
use crate::cuda::{File, PRELUDE};
use crate::dispatch::Kernels;

const OP: &str = "add_pairs";
/// Pairs of a launch: its arguments stay below 4 KiB.
const PAIRS: usize = 480;

/// `x[to] += x[from]` for each pair `(to, from)`, one after another, in place; `x` is f64 `[N]`, contiguous. Nothing waits for
/// it.
///
/// # Errors
/// If `x` is something else, or a pair names a place beyond it.
pub fn add_pairs_(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    check::dtype(OP, x, DType::F64)?;
    let n = x.numel();
    if x.rank() != 1 || !x.is_contiguous() {
        let got = format!("shape {:?}, strides {:?}", x.shape(), x.strides());
        return Err(Error::shape(OP, got, "a contiguous vector"));
    }
    if let Some((to, from)) = pairs.iter().find(|(to, from)| to.max(from) >= &n) {
        return Err(Error::range(OP, format!("the pair ({to}, {from})"), format!("places below {n}")));
    }
    if x.device().is_meta() {
        x.bump_version();
        return Ok(());
    }
    ADD_PAIRS.run(x.device(), |add_pairs| add_pairs(x, pairs))
}

const ADD_PAIRS: Kernels<AddPairs> = Kernels { cpu: add_pairs_on_cpu, cuda: add_pairs_on_gpu };

type AddPairs = fn(&mut Tensor, &[(usize, usize)]) -> Result<()>;

fn add_pairs_on_cpu(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    let (start, n) = (x.offset(), x.numel());
    let mut values = x.write::<f64>(OP)?;
    let values = &mut values[start..start + n];
    pairs.iter().for_each(|&(to, from)| values[to] += values[from]);
    Ok(())
}

fn add_pairs_on_gpu(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    pairs.chunks(PAIRS).try_for_each(|pairs| launch(x, pairs))
}

fn launch(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, ("add_pairs.cu", include_str!("add_pairs.cu"))];
    let program = Program { name: "add_pairs.cu", files: FILES, defines: &[] };
    let gpu = x.device().gpu()?;
    let mut args = Args::new(OP, gpu).write(x)?.value(pairs.len() as u64);
    for &(to, from) in pairs {
        args = args.value([to as u32, from as u32]);
    }
    for _ in pairs.len()..PAIRS {
        args = args.value([0u32; 2]);
    }
    gpu.kernel(OP, &program, "add_pairs")?.launch(Grid::new(1, 1), args)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn pairs_are_added_one_after_another() {
        let all = Tensor::from_slice(&[0.0, 1e16, 1.0, 1.0], &[4], Device::CPU).unwrap();
        let mut x = all.narrow(0, 1, 3).unwrap();
        add_pairs_(&mut x, &[(1, 2), (0, 1)]).unwrap();
        assert_eq!(all.to_vec::<f64>().unwrap(), [0.0, 1e16 + 2.0, 2.0, 1.0]);
        add_pairs_(&mut x, &[(2, 2), (2, 2)]).unwrap();
        assert_eq!(all.to_vec::<f64>().unwrap()[3], 4.0);
        for wrong in [(3, 0), (0, 3)] {
            let error = add_pairs_(&mut x, &[wrong]).unwrap_err().to_string();
            assert!(error.contains("places below 3"), "{error}");
        }
        let mut matrix = x.with_shape(&[1, 3]).unwrap();
        assert!(add_pairs_(&mut matrix, &[]).is_err());
    }
}
