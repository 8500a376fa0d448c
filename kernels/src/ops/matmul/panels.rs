//! [`WeightPanels`]: a weight in the order in which a CPU's products read it.

use phalanx_tensor::{DType, Device, Dims, Error, Result, Tensor};

use super::super::in_place::copy_;
use crate::gemm::{
    Batch, Epilogue, GemmElem, MatMut, MatRef, Write, gemm_batched, has_tiles, is_parallel, tile_shape,
};
use crate::real::for_real;
use crate::{check, flops};

/// A weight `[out, in]` that lies as the products of a CPU read it: the rows of the weight in panels of as many as a tile has columns, and in each
/// panel those of an input side by side, `[panels, in, rows of a panel]`. The last panel is filled up with zeros.
///
/// A product of one row, as in decoding token by token, reads it in a few streams from end to end, and turns nothing round; one of many rows packs
/// nothing. The bits are those of [`crate::linear`].
///
/// ```
/// use phalanx_kernels::{self as kernels, WeightPanels};
/// use phalanx_tensor::{DType, Device, Tensor};
/// let weight = kernels::full(&[100, 8], 0.5, DType::F32, Device::CPU)?;
/// if let Some(panels) = WeightPanels::new(&weight)? {
///     let y = panels.linear(&kernels::full(&[1, 8], 2.0, DType::F32, Device::CPU)?, None)?;
///     assert_eq!(y.to_vec::<f32>()?, [8.0; 100]);
/// }
/// # Ok::<(), phalanx_tensor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct WeightPanels {
    /// `[panels, in, rows of a panel]`
    panels: Tensor,
    /// Rows of the weight.
    rows: usize,
}

impl WeightPanels {
    /// A copy of a weight `[out, in]`. `None` if its products are as fast as it lies, or faster: on a GPU, of no more rows than a panel has, of bf16 on
    /// a CPU with tile instructions (AMX).
    ///
    /// # Errors
    /// If it is no matrix of a floating-point dtype, or memory is short.
    pub fn new(weight: &Tensor) -> Result<Option<WeightPanels>> {
        const OP: &str = "weight_panels";
        check::float(OP, weight)?;
        let &[rows, inputs] = weight.shape() else {
            return Err(Error::shape(OP, format!("a weight of shape {:?}", weight.shape()), "[out, in]"));
        };
        let by_tiles = weight.dtype() == DType::BF16 && has_tiles();
        let width =
            if weight.dtype() == DType::F64 { tile_shape::<f64>() } else { tile_shape::<f32>() }.cols();
        let elsewhere = weight.device().is_cuda() || weight.device().is_meta();
        if elsewhere || by_tiles || rows <= width || inputs == 0 {
            return Ok(None);
        }
        let panels =
            Tensor::zeros_for(OP, &[rows.div_ceil(width), inputs, width], weight.dtype(), weight.device())?;
        let whole = rows / width;
        let from = weight.narrow(0, 0, whole * width)?.reshape(&[
            whole as isize,
            width as isize,
            inputs as isize,
        ])?;
        copy_(&mut panels.narrow(0, 0, whole)?, &from.transpose(1, 2)?)?;
        let rest = rows - whole * width;
        if rest > 0 {
            let from = weight.narrow(0, whole * width, rest)?;
            copy_(&mut panels.select(0, whole)?.narrow(1, 0, rest)?, &from.transpose(0, 1)?)?;
        }
        Ok(Some(WeightPanels { panels, rows }))
    }

    /// `x weightᵀ + bias`, as [`crate::linear`].
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        const OP: &str = "linear";
        let [rows, inputs] = self.shape();
        check::same(OP, &[x, &self.panels])?;
        if x.shape().last() != Some(&inputs) {
            let got = format!("an input of shape {:?} and a weight of shape {:?}", x.shape(), self.shape());
            return Err(Error::shape(OP, got, "[.., in] and [out, in]"));
        }
        if let Some(bias) = bias {
            check::same(OP, &[x, bias])?;
            check::shape(OP, "a bias", bias, &[rows])?;
        }
        let mut shape = Dims::from_slice(x.shape());
        shape[x.rank() - 1] = rows;
        let mut out = Tensor::empty_for(OP, &shape, x.dtype(), x.device())?;
        flops::count_multiply_adds([out.numel(), inputs]);
        if out.numel() > 0 {
            let bias = bias.map(Tensor::contiguous).transpose()?;
            for_real!(OP, x.dtype(), T => self.multiply::<T>(OP, x, bias.as_ref(), &mut out))?;
        }
        Ok(out)
    }

    fn multiply<T: GemmElem + phalanx_tensor::Element>(
        &self,
        op: &'static str,
        x: &Tensor,
        bias: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result<()> {
        let [rows, inputs] = self.shape();
        let (m, width) = (out.numel() / rows, self.panels.shape()[2]);
        let x = x.reshape(&[m as isize, inputs as isize])?;
        let pool = if is_parallel(m, rows, inputs) { Some(out.device().pool()?) } else { None };
        let (x_data, w_data) = (x.read::<T>(op)?, self.panels.read::<T>(op)?);
        let bias = bias.map(|bias| Ok((bias.read::<T>(op)?, bias.offset()))).transpose()?;
        let bias = bias.as_ref().map(|(values, offset)| &values[*offset..][..rows]);
        let mut c = out.write::<T>(op)?;
        gemm_batched(
            pool.as_deref(),
            Batch { count: 1, a: 0, b: 0, c: 0 },
            super::mat(&x_data, &x, 0, 0),
            MatRef::in_panels(&w_data[self.panels.offset()..], inputs, rows, width),
            MatMut::row_major(&mut c, m, rows),
            Write::Store,
            Epilogue { bias, activation: None },
        );
        Ok(())
    }

    /// The weight's rows at the indices, of any shape, as [`crate::embedding`]: `[index's shape, in]`.
    ///
    /// # Errors
    /// If the indices are not i64 or i32, on another device, or one is out of range.
    pub fn embedding(&self, index: &Tensor) -> Result<Tensor> {
        const OP: &str = "embedding";
        let ([rows, inputs], width) = (self.shape(), self.panels.shape()[2]);
        let at = super::super::index::indices_below(OP, index, &self.panels, rows)?;
        let out = Tensor::empty_for(OP, &[at.len(), inputs], self.dtype(), self.device())?;
        for (place, row) in at.into_iter().enumerate() {
            let row = self.panels.select(0, row / width)?.select(1, row % width)?;
            copy_(&mut out.select(0, place)?, &row)?;
        }
        let shape: Vec<isize> = index.shape().iter().chain([&inputs]).map(|&size| size as isize).collect();
        out.reshape(&shape)
    }

    /// The weight, `[out, in]`.
    ///
    /// # Errors
    /// If memory is short.
    pub fn values(&self) -> Result<Tensor> {
        let [rows, inputs] = self.shape();
        self.panels.transpose(1, 2)?.reshape(&[-1, inputs as isize])?.narrow(0, 0, rows)?.copy()
    }

    /// The weight's shape, `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.panels.shape()[1]]
    }

    /// The weight's dtype.
    pub fn dtype(&self) -> DType {
        self.panels.dtype()
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.panels.device()
    }

    /// The panels, `[panels, in, rows of a panel]`.
    pub fn tensor(&self) -> &Tensor {
        &self.panels
    }
}
