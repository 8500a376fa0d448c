//! [`WeightPanels`]: a weight in the order in which a CPU's products read it.

use std::sync::Mutex;

use phalanx_tensor::{DType, Device, Dims, Element, Error, Read, Result, Tensor, Write, unpoisoned};

use super::super::in_place::copy_;
use crate::gemm::{
    Batch, Epilogue, GemmElem, MatMut, MatRef, gemm_batched, gemm_each, is_parallel, place_in_group, shares,
    tile_shape,
};
use crate::real::for_real;
use crate::simd::Runner;
use crate::{check, flops, gemm};

/// What [`WeightPanels::linear`] is called in errors.
const OP: &str = "linear";
/// A product of its own.
const ONE: Batch = Batch { count: 1, a: 0, b: 0, c: 0 };

/// A weight, its elements, those of its bias with where it begins, and those of the result.
type Opened<'a, T> = (&'a WeightPanels, Read<'a, T>, Option<(Read<'a, T>, usize)>, Write<'a, T>);

/// A weight `[out, in]` that lies as the products of a CPU read it: the rows of the weight in panels of as many as a tile has columns, and in each
/// panel those of an input side by side, `[panels, in, rows of a panel, 1]`. Of bf16 each row has two inputs together, as the CPU multiplies or
/// widens them (the second one first, but not for AMX's tiles): `[panels, in / 2, rows of a panel, 2]`. What is missing at the ends is filled up with
/// zeros, of bf16 to a multiple of 32 inputs.
///
/// A product of one row, as in decoding token by token, reads it in a few streams from end to end, and turns nothing round; one of many rows reads
/// f32 and f64 as they lie, and widens halves panel by panel. The bits are those of [`crate::linear`].
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
    /// `[panels, groups of inputs, rows of a panel, inputs of a group]`
    panels: Tensor,
    /// The weight's shape.
    shape: [usize; 2],
}

impl WeightPanels {
    /// A copy of a weight `[out, in]`. `None` if its products are as fast as it lies, or faster: on a GPU, of no more rows than a panel has.
    ///
    /// # Errors
    /// If it is no matrix of a floating-point dtype, or memory is short.
    pub fn new(weight: &Tensor) -> Result<Option<WeightPanels>> {
        const OP: &str = "weight_panels";
        check::float(OP, weight)?;
        let &[rows, inputs] = weight.shape() else {
            return Err(Error::shape(OP, format!("a weight of shape {:?}", weight.shape()), "[out, in]"));
        };
        let width =
            if weight.dtype() == DType::F64 { tile_shape::<f64>() } else { tile_shape::<f32>() }.cols();
        let elsewhere = weight.device().is_cuda() || weight.device().is_meta();
        if elsewhere || rows <= width || inputs == 0 {
            return Ok(None);
        }
        let (group, steps) =
            for_real!(OP, weight.dtype(), T => Ok((<T as GemmElem>::GROUP, <T as GemmElem>::PANEL_STEPS)))?;
        let shape = [rows.div_ceil(width), inputs.next_multiple_of(steps) / group, width, group];
        let panels = Tensor::zeros_for(OP, &shape, weight.dtype(), weight.device())?;
        let panels = WeightPanels { panels, shape: [rows, inputs] };
        for (from, mut to) in panels.parts(weight)? {
            copy_(&mut to, &from)?;
        }
        Ok(Some(panels))
    }

    /// Views of the elements of a matrix that has the weight's shape, and of their places in the panels.
    fn parts(&self, matrix: &Tensor) -> Result<Vec<(Tensor, Tensor)>> {
        let ([rows, inputs], width, mut parts) = (self.shape, self.panels.shape()[2], Vec::new());
        let (whole, rest) = (rows / width, rows % width);
        for nth in 0..self.group().min(inputs) {
            let (of_matrix, of_panels) = (matrix.slice(1, nth, inputs, self.group())?, self.inputs(nth)?);
            let panelled = [whole, width, of_matrix.shape()[1]].map(|size| size as isize);
            let panelled = of_matrix.narrow(0, 0, whole * width)?.reshape(&panelled)?;
            parts.push((panelled.transpose(1, 2)?, of_panels.narrow(0, 0, whole)?));
            if rest > 0 {
                let last = of_matrix.narrow(0, whole * width, rest)?;
                parts.push((last.transpose(0, 1)?, of_panels.select(0, whole)?.narrow(1, 0, rest)?));
            }
        }
        Ok(parts)
    }

    /// The inputs that are the nth of their groups, `[panels, inputs, rows of a panel]`.
    fn inputs(&self, nth: usize) -> Result<Tensor> {
        let group = self.group();
        let count = (self.shape[1] - nth).div_ceil(group);
        self.panels.select(3, place_in_group(Runner::current(), group, nth))?.narrow(1, 0, count)
    }

    /// How many inputs lie together.
    fn group(&self) -> usize {
        self.panels.shape()[3]
    }

    /// `x weightᵀ + bias`, as [`crate::linear`].
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(Self::linear_each(x, &[(self, bias)])?.remove(0))
    }

    /// [`WeightPanels::linear`] by several weights, each with its bias. If `x` is one row, or many that have to be packed, threads share all weights, wait
    /// for each other once, and pack `x` once.
    ///
    /// # Errors
    /// As [`WeightPanels::linear`].
    pub fn linear_each(x: &Tensor, maps: &[(&WeightPanels, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
        let outs = maps.iter().map(|(panels, bias)| panels.output(x, *bias));
        let mut outs: Vec<Tensor> = outs.collect::<Result<_>>()?;
        let biases = maps.iter().map(|(_, bias)| bias.map(Tensor::contiguous).transpose());
        let biases: Vec<Option<Tensor>> = biases.collect::<Result<_>>()?;
        let maps: Vec<_> = maps.iter().map(|(panels, _)| *panels).zip(&biases).collect();
        let rows: usize = maps.iter().map(|(panels, _)| panels.shape[0]).sum();
        let is_row = maps.len() > 1 && x.shape().last() == Some(&x.numel());
        if is_row && is_parallel(1, rows, x.numel()) {
            for_real!(OP, x.dtype(), T => Self::multiply_row::<T>(x, &maps, &mut outs))?;
        } else if outs.iter().any(|out| out.numel() > 0) {
            for_real!(OP, x.dtype(), T => Self::multiply::<T>(x, &maps, &mut outs))?;
        }
        Ok(outs)
    }

    /// The result of [`WeightPanels::linear`] before it is computed.
    fn output(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
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
        let out = Tensor::empty_for(OP, &shape, x.dtype(), x.device())?;
        flops::count_multiply_adds([out.numel(), inputs]);
        Ok(out)
    }

    /// Opens weights, biases (with where each begins) and results.
    fn open<'a, T: Element>(
        maps: &[(&'a WeightPanels, &'a Option<Tensor>)],
        outs: &'a mut [Tensor],
    ) -> Result<Vec<Opened<'a, T>>> {
        let open = |((weight, bias), out): (&(&'a WeightPanels, &'a Option<Tensor>), &'a mut Tensor)| {
            let bias = bias.as_ref().map(|bias| Ok((bias.read::<T>(OP)?, bias.offset()))).transpose()?;
            Ok((*weight, weight.panels.read::<T>(OP)?, bias, out.write::<T>(OP)?))
        };
        maps.iter().zip(outs).map(open).collect()
    }

    /// One row by several weights, whose biases are contiguous: pieces of their panels, of which each thread takes the next one.
    fn multiply_row<T: GemmElem + Element>(
        x: &Tensor,
        maps: &[(&WeightPanels, &Option<Tensor>)],
        outs: &mut [Tensor],
    ) -> Result<()> {
        let (inputs, pool) = (x.numel(), x.device().pool()?);
        let x = x.reshape(&[1, inputs as isize])?;
        let x_data = x.read::<T>(OP)?;
        let mut held = Self::open::<T>(maps, outs)?;
        let sizes = maps[0].0.panels.shape();
        let (width, len) = (sizes[2], sizes[1] * sizes[2] * sizes[3]);
        let all = maps.iter().map(|(weight, _)| weight.panels.shape()[0]).sum();
        let (mut pieces, mut first) = (Vec::new(), 0);
        for (weight, data, bias, out) in &mut held {
            let end = first + weight.panels.shape()[0];
            let (data, mut out) = (&data[weight.panels.offset()..], &mut out[..weight.shape[0]]);
            let mut bias = bias.as_ref().map(|(values, offset)| &values[*offset..]);
            for share in shares(pool.threads(), all, len * size_of::<T>(), usize::MAX) {
                let panels = share.start.max(first)..share.end.min(end);
                if panels.is_empty() {
                    continue;
                }
                let (piece, rest) = out.split_at_mut((panels.len() * width).min(out.len()));
                let (values, others) = bias.map_or((None, None), |bias| {
                    let (values, others) = bias.split_at(piece.len());
                    (Some(values), Some(others))
                });
                let b = MatRef::in_panels(&data[(panels.start - first) * len..], inputs, piece.len(), width);
                pieces.push(Mutex::new((b, values, piece)));
                (out, bias) = (rest, others);
            }
            first = end;
        }
        pool.for_each(pieces.len(), |piece| {
            let (b, bias, out) = &mut *unpoisoned(pieces[piece].lock());
            let (a, c) = (super::mat(&x_data, &x, 0, 0), MatMut::row_major(out, 1, b.cols()));
            gemm_batched(None, ONE, a, *b, c, gemm::Write::Store, Epilogue { bias: *bias, activation: None });
        });
        Ok(())
    }

    /// Rows by weights, whose biases are contiguous.
    fn multiply<T: GemmElem + Element>(
        x: &Tensor,
        maps: &[(&WeightPanels, &Option<Tensor>)],
        outs: &mut [Tensor],
    ) -> Result<()> {
        let inputs = maps[0].0.shape[1];
        let x = x.reshape(&[(x.numel() / inputs) as isize, inputs as isize])?;
        let rows = maps.iter().map(|(weight, _)| weight.shape[0]).sum();
        let pool = if is_parallel(x.shape()[0], rows, inputs) { Some(x.device().pool()?) } else { None };
        let x_data = x.read::<T>(OP)?;
        let mut held = Self::open::<T>(maps, outs)?;
        let mut items = Vec::with_capacity(maps.len());
        for (weight, data, bias, out) in &mut held {
            let (rows, width) = (weight.shape[0], weight.panels.shape()[2]);
            let b = MatRef::in_panels(&data[weight.panels.offset()..], inputs, rows, width);
            let bias = bias.as_ref().map(|(values, offset)| &values[*offset..][..rows]);
            items.push((b, MatMut::row_major(out, x.shape()[0], rows), bias));
        }
        gemm_each(pool.as_deref(), super::mat(&x_data, &x, 0, 0), &mut items);
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
        for nth in 0..self.group().min(inputs) {
            let (panels, out) = (self.inputs(nth)?, out.slice(1, nth, inputs, self.group())?);
            for (place, row) in at.iter().enumerate() {
                let row = panels.select(0, row / width)?.select(1, row % width)?;
                copy_(&mut out.select(0, place)?, &row)?;
            }
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
        let out = Tensor::empty_for("weight_panels", &[rows, inputs], self.dtype(), self.device())?;
        for (mut to, from) in self.parts(&out)? {
            copy_(&mut to, &from)?;
        }
        Ok(out)
    }

    /// The weight's shape, `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// The weight's dtype.
    pub fn dtype(&self) -> DType {
        self.panels.dtype()
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.panels.device()
    }

    /// The panels, `[panels, groups of inputs, rows of a panel, inputs of a group]`.
    pub fn tensor(&self) -> &Tensor {
        &self.panels
    }
}
