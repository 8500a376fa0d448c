//! [`Int8Blocks`]: a constant matrix in 8-bit blocks, made floats again for the operations that use it.
//!
//! ```text
//! a row   [ 64 values | 64 values | the rest ]     codes: u8, 128 more than whole numbers from -127 to 127
//!             scale        scale      scale        scales: f32, the largest absolute value of the block / 127
//! value = (code - 128) scale
//! ```
//! A value is off by at most half a scale. No block spans two rows, so rows can be cut anywhere, and columns at multiples of 64, without
//! another rounding. [`Int8Blocks::var`] makes the floats; they are not kept for backward, which makes them again.
//!
//! Source: Dettmers et al.: 8-bit Optimizers via Block-wise Quantization (2022), section 2.1, with evenly spaced codes instead of their
//! dynamic tree.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Error as TensorError, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::graph::rematerialized::{Rematerialized, Source};
use crate::{Result, Var};

/// Values that have a scale in common.
const BLOCK: usize = 64;
/// The code of 0.
const ZERO: f64 = 128.0;
/// The code of a block's largest absolute value, less that of 0.
const LARGEST: f64 = 127.0;
/// Elements that are f32 at a time.
const PANEL: usize = 1 << 20;

/// A constant matrix in 8-bit blocks: about a byte for each value, and 4 for each block of 64. A clone shares the memory.
///
/// ```
/// use phalanx_autograd::{Int8Blocks, tensor::{Device, Tensor}};
/// let x = Tensor::from_slice(&[0.5f32, -1.27, 0.003, 1.0], &[2, 2], Device::CPU)?;
/// let blocks = Int8Blocks::new(&x)?;
/// let near: Vec<f32> = blocks.values()?.to_vec()?;
/// assert!([0.5, -1.27, 0.0, 1.0].iter().zip(near).all(|(wanted, near)| (wanted - near).abs() < 1e-6));
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Int8Blocks {
    /// `[rows, blocks, 64]`, u8. What is behind a row's last value is 0.
    codes: Tensor,
    /// `[rows, blocks]`, f32.
    scales: Tensor,
    columns: usize,
    dtype: DType,
}

impl Int8Blocks {
    /// How many values of a row have a scale in common. Columns may be cut at its multiples.
    pub const BLOCK: usize = BLOCK;

    /// A matrix in blocks. A panel of its rows is in f32 at a time.
    ///
    /// # Errors
    /// If it is no matrix of floats, has a value that is not finite (which is found on all devices but `meta`), or memory is short.
    pub fn new(x: &Tensor) -> TensorResult<Int8Blocks> {
        let &[rows, columns] = x.shape() else {
            return Err(TensorError::invalid(
                OP,
                format!("got a tensor of shape {:?}, wanted a matrix", x.shape()),
            ));
        };
        if !x.dtype().is_float() {
            return Err(TensorError::invalid(
                OP,
                format!("got dtype {}, wanted a floating-point dtype", x.dtype()),
            ));
        }
        let blocks = columns.div_ceil(BLOCK);
        let codes = Tensor::empty(&[rows, blocks, BLOCK], DType::U8, x.device())?;
        let scales = Tensor::empty(&[rows, blocks], DType::F32, x.device())?;
        for (first, count) in panels(rows, blocks) {
            let panel = kernels::cast(&x.narrow(0, first, count)?, DType::F32)?;
            let panel = match blocks * BLOCK - columns {
                0 => panel.contiguous()?,
                rest => kernels::pad(&panel, &[(0, rest as isize)], 0.0.into())?,
            };
            let panel = panel.with_shape(&[count, blocks, BLOCK])?;
            let largest = kernels::amax(&kernels::abs(&panel)?, &[-1], true)?;
            let scale = kernels::mul_scalar(&largest, (1.0 / LARGEST).into())?;
            // A block of zeros has the scale 0 and is divided by another.
            let divisor = kernels::clamp(&scale, Some(f64::from(f32::MIN_POSITIVE).into()), None)?;
            // A conversion truncates; the sum is positive.
            let code = kernels::add_scalar(&kernels::div(&panel, &divisor)?, (ZERO + 0.5).into())?;
            let code = kernels::clamp(&code, Some(1.0.into()), Some(255.5.into()))?;
            kernels::copy_(&mut codes.narrow(0, first, count)?, &kernels::cast(&code, DType::U8)?)?;
            kernels::copy_(&mut scales.narrow(0, first, count)?, &scale.with_shape(&[count, blocks])?)?;
        }
        refuse_infinite(&scales)?;
        Ok(Int8Blocks { codes, scales, columns, dtype: x.dtype() })
    }

    /// The matrix that it stands for, in its dtype. A panel of rows is in f32 at a time.
    ///
    /// # Errors
    /// If memory is short.
    pub fn values(&self) -> TensorResult<Tensor> {
        values(&self.codes, &self.scales, self.columns, self.dtype)
    }

    /// The matrix as a constant. An operation that saves it for backward keeps the blocks instead, and makes the values again.
    ///
    /// # Errors
    /// If memory is short.
    pub fn var(&self) -> Result<Var> {
        let (made, columns, dtype) = (self.values()?, self.columns, self.dtype);
        let sources = [&self.codes, &self.scales].map(Source::of).into_iter().collect();
        let again = move |of: &[Tensor]| values(&of[0], &of[1], columns, dtype);
        let again = Rematerialized::new(OP, &made, sources, again);
        Ok(Var::made_again(made, again))
    }

    /// [`Int8Blocks::var`] of blocks that may be elsewhere between forward and backward, which asks for the values that it uses. They must be
    /// the same.
    ///
    /// # Errors
    /// If memory is short.
    pub fn var_by(&self, values: impl Fn() -> TensorResult<Tensor> + Send + Sync + 'static) -> Result<Var> {
        let made = self.values()?;
        let again = Rematerialized::new(OP, &made, SmallVec::new(), move |_| values());
        Ok(Var::made_again(made, again))
    }

    /// The same matrix with its codes and scales in these tensors, which may be on another device.
    ///
    /// # Errors
    /// If they have other shapes or dtypes, or are on two devices.
    pub fn with_tensors(&self, [codes, scales]: [Tensor; 2]) -> TensorResult<Int8Blocks> {
        for (held, given) in self.tensors().into_iter().zip([&codes, &scales]) {
            if (held.shape(), held.dtype()) != (given.shape(), given.dtype()) {
                let of = |t: &Tensor| format!("{:?} {}", t.shape(), t.dtype());
                return Err(TensorError::invalid(OP, format!("got {}, wanted {}", of(given), of(held))));
            }
        }
        if codes.device() != scales.device() {
            let why = format!(
                "got codes on {} and scales on {}, wanted one device",
                codes.device(),
                scales.device()
            );
            return Err(TensorError::invalid(OP, why));
        }
        Ok(Int8Blocks { codes, scales, ..*self })
    }

    /// Codes `[rows, blocks, 64]` (u8) and scales `[rows, blocks]` (f32): what is sent, compared or counted.
    pub fn tensors(&self) -> [&Tensor; 2] {
        [&self.codes, &self.scales]
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.codes.shape()[0], self.columns]
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.codes.device()
    }
}

const OP: &str = "int8_blocks";

/// The first row of each panel, and its number of rows.
fn panels(rows: usize, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
    let each = (PANEL / (blocks * BLOCK).max(1)).max(1);
    (0..rows).step_by(each).map(move |first| (first, each.min(rows - first)))
}

fn values(codes: &Tensor, scales: &Tensor, columns: usize, dtype: DType) -> TensorResult<Tensor> {
    let &[rows, blocks] = scales.shape() else { unreachable!("scales are a matrix: `new` has made them") };
    let made = Tensor::empty(&[rows, columns], dtype, codes.device())?;
    for (first, count) in panels(rows, blocks) {
        let codes = kernels::cast(&codes.narrow(0, first, count)?, DType::F32)?;
        let scales = scales.narrow(0, first, count)?.unsqueeze(-1)?;
        let panel = kernels::mul(&kernels::add_scalar(&codes, (-ZERO).into())?, &scales)?;
        drop(codes);
        let panel = panel.with_shape(&[count, blocks * BLOCK])?.narrow(1, 0, columns)?;
        kernels::copy_(&mut made.narrow(0, first, count)?, &panel)?;
    }
    Ok(made)
}

/// An infinite value has an infinite scale, and NaN has NaN.
fn refuse_infinite(scales: &Tensor) -> TensorResult<()> {
    if scales.device().is_meta() || scales.numel() == 0 {
        return Ok(());
    }
    let sum = kernels::cast(&kernels::sum(&kernels::cast(scales, DType::F64)?, &[0, 1], false)?, DType::F64)?;
    match sum.item::<f64>()?.is_finite() {
        true => Ok(()),
        false => Err(TensorError::invalid(OP, "got NaN or an infinite value, wanted finite ones")),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels as kernels;
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{BLOCK, Int8Blocks};
    use crate::{Options, Var, backward, save_on_cpu};

    fn matrix(rows: usize, columns: usize, device: Device) -> Tensor {
        let value = |i: usize| (i as f32 * 0.7).sin() * if i.is_multiple_of(5) { 3.0 } else { 0.1 };
        let values: Vec<f32> = (0..rows * columns).map(value).collect();
        Tensor::from_slice(&values, &[rows, columns], device).unwrap()
    }

    /// The slow twin: one block after the other.
    fn twin(row: &[f32]) -> Vec<f32> {
        let of_block = |block: &[f32]| {
            let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) * (1.0 / 127.0);
            let divisor = scale.max(f32::MIN_POSITIVE);
            let code = |x: &f32| (x / divisor + 128.5).floor().clamp(1.0, 255.0) - 128.0;
            block.iter().map(|x| code(x) * scale).collect::<Vec<_>>()
        };
        row.chunks(BLOCK).flat_map(of_block).collect()
    }

    #[test]
    fn a_row_is_its_blocks_and_off_by_half_a_scale() {
        for columns in [1, 63, 64, 65, 200] {
            let x = matrix(3, columns, Device::CPU);
            let blocks = Int8Blocks::new(&x).unwrap();
            assert_eq!(blocks.shape(), [3, columns]);
            let (rows, made) =
                (x.to_vec::<f32>().unwrap(), blocks.values().unwrap().to_vec::<f32>().unwrap());
            for (row, made) in rows.chunks(columns).zip(made.chunks(columns)) {
                assert_eq!(made, twin(row), "{columns}");
                for (block, made) in row.chunks(BLOCK).zip(made.chunks(BLOCK)) {
                    let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
                    assert!(block.iter().zip(made).all(|(a, b)| (a - b).abs() <= 0.5001 * scale));
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        let x = matrix(4, 192, Device::CPU);
        let whole = Int8Blocks::new(&x).unwrap().values().unwrap();
        for (dim, from, count) in [(0, 1, 2), (1, 64, 64), (1, 128, 64)] {
            let part = Int8Blocks::new(&x.narrow(dim, from, count).unwrap()).unwrap().values().unwrap();
            let wanted = whole.narrow(dim, from, count).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(part.to_vec::<f32>().unwrap(), wanted);
        }
    }

    #[test]
    fn zeros_stay_and_dtypes_are_kept() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let x = kernels::cast(&matrix(2, 70, Device::CPU), dtype).unwrap();
            kernels::fill_(&mut x.narrow(0, 1, 1).unwrap(), 0.0).unwrap();
            let made = Int8Blocks::new(&x).unwrap().values().unwrap();
            assert_eq!(made.dtype(), dtype);
            let made = kernels::cast(&made, DType::F32).unwrap().to_vec::<f32>().unwrap();
            assert!(made[70..].iter().all(|&x| x == 0.0) && made[..70].iter().any(|&x| x != 0.0));
        }
        let none = Int8Blocks::new(&Tensor::zeros(&[0, 5], DType::F32, Device::CPU).unwrap()).unwrap();
        assert_eq!(none.values().unwrap().shape(), [0, 5]);
    }

    #[test]
    fn other_tensors_must_fit() {
        let blocks = Int8Blocks::new(&matrix(2, 70, Device::CPU)).unwrap();
        let [codes, scales] = blocks.tensors().map(Clone::clone);
        let same = blocks.with_tensors([codes.copy().unwrap(), scales.clone()]).unwrap();
        assert_eq!(
            same.values().unwrap().to_vec::<f32>().unwrap(),
            blocks.values().unwrap().to_vec::<f32>().unwrap()
        );
        let said = |tensors: [Tensor; 2]| blocks.with_tensors(tensors).unwrap_err().to_string();
        assert!(said([scales.clone(), scales.clone()]).contains("got [2, 2] f32, wanted [2, 2, 64] u8"));
        let elsewhere = scales.to_device(Device::Cpu(64), true).unwrap();
        assert!(said([codes, elsewhere]).contains("scales on cpu:64, wanted one device"));
    }

    #[test]
    fn what_has_no_blocks_is_refused() {
        let said = |x: &Tensor| Int8Blocks::new(x).unwrap_err().to_string();
        let x = matrix(2, 3, Device::CPU);
        assert!(
            said(&x.narrow(0, 0, 1).unwrap().squeeze(0).unwrap())
                .contains("got a tensor of shape [3], wanted a matrix")
        );
        assert!(said(&kernels::cast(&x, DType::I64).unwrap()).contains("got dtype i64"));
        for wrong in [f32::NAN, f32::INFINITY] {
            kernels::fill_(&mut x.narrow(1, 1, 1).unwrap(), wrong).unwrap();
            assert!(said(&x).contains("got NaN or an infinite value"));
        }
    }

    /// Backward makes the values again, on the host's saved values too, and no graph keeps them.
    #[test]
    fn gradients_are_those_of_the_values_which_no_graph_keeps() {
        for (device, keep) in [(Device::Cpu(61), false), (Device::Cpu(62), true), (Device::Meta(61), false)] {
            let now = || device.ledger().unwrap().total().now;
            let x = Var::leaf(matrix(2, 4096, device)).unwrap();
            let blocks = Int8Blocks::new(&matrix(128, 4096, device)).unwrap();
            let bytes: usize = blocks.tensors().iter().map(|t| t.numel() * t.dtype().size()).sum();
            assert_eq!(bytes, 128 * 4096 + 128 * 64 * 4);
            let _kept = keep.then(|| save_on_cpu(Device::Cpu(63)));
            let run = |weight: &dyn Fn() -> Var| {
                let before = now();
                let weight = weight();
                let y = x.linear(&weight, None).unwrap();
                drop(weight);
                let held = now() - before;
                backward(&[(y.sum_all().unwrap(), None)], Options::default()).unwrap();
                let leaf = x.as_leaf().unwrap();
                let dx = leaf.grad().unwrap().into_tensor();
                let dx = if device.is_meta() { Vec::new() } else { dx.to_vec::<f32>().unwrap() };
                leaf.zero_grad().unwrap();
                (held, dx)
            };
            let (held, dx) = run(&|| blocks.var().unwrap());
            assert!(held < 128 * 4096, "{held} bytes stay");
            let (held_floats, wanted) = run(&|| Var::new(blocks.values().unwrap()));
            assert!(dx == wanted && (keep || held_floats > 4 * 128 * 4096), "{held_floats}");
        }
    }
}
