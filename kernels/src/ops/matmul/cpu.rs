//! Batched products on the CPU: the batch dimensions become as few calls of `gemm` as their strides allow.

use phalanx_tensor::{Element, Loops, Result, Tensor, contiguous_strides};

use super::Finish;
use crate::gemm::{
    Batch, COLUMN_STEPS_MIN, Epilogue, GemmElem, MatMut, MatRef, gemm_batched, gemm_column, is_parallel,
};

/// `out = a b` for operands of one batch shape; `out` is contiguous.
pub(in crate::ops) fn multiply<T: GemmElem + Element>(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &mut Tensor,
    finish: Finish<'_>,
) -> Result<()> {
    let lead = a.rank() - 2;
    let [m, k, n] = [a.shape()[lead], a.shape()[lead + 1], b.shape()[lead + 1]];
    if out.numel() == 0 {
        return Ok(());
    }
    let (offset, numel) = (out.offset(), out.numel());
    // To ask for the threads takes as long as a tiny product.
    let pool = if is_parallel(numel, 1, k) { Some(out.device().pool()?) } else { None };
    let (a_data, b_data) = (a.read::<T>(op)?, b.read::<T>(op)?);
    let bias = finish.bias.map(|bias| Ok((bias.read::<T>(op)?, bias.offset()))).transpose()?;
    let epilogue = Epilogue {
        bias: bias.as_ref().map(|(values, offset)| &values[*offset..][..n]),
        activation: finish.activation,
    };
    let mut c_data = out.write::<T>(op)?;
    let c_data = &mut c_data[offset..][..numel];
    let mut run =
        |count: usize, [a_start, b_start, c_start]: [usize; 3], [a_step, b_step, c_step]: [usize; 3]| {
            let a_mat = mat(&a_data, a, a_start, a_step);
            let b_mat = mat(&b_data, b, b_start, b_step);
            let c_mat = MatMut::row_major(&mut c_data[c_start..], m, n);
            let batch = Batch { count, a: a_step, b: b_step, c: c_step };
            // Not for one row, too: it may be one of a batch that was cut, and has the bits that it has there.
            let multiply = if n == 1 && k >= COLUMN_STEPS_MIN { gemm_column } else { gemm_batched };
            multiply(pool.as_deref(), batch, a_mat, b_mat, c_mat, finish.write, epilogue);
        };
    if lead == 0 {
        run(1, [0; 3], [0; 3]);
        return Ok(());
    }
    let batch = &a.shape()[..lead];
    let mut c_strides = contiguous_strides(batch);
    c_strides.iter_mut().for_each(|stride| *stride *= m * n);
    let loops = Loops::new(batch, [&a.strides()[..lead], &b.strides()[..lead], &c_strides]);
    // Items may run in any order: the longest loop is the batch, the others go around it.
    let inner = (0..loops.sizes().len()).max_by_key(|&axis| loops.sizes()[axis]).unwrap_or(0);
    let (count, steps) = (loops.sizes()[inner], loops.strides()[inner]);
    for index in 0..loops.sizes().iter().product::<usize>() / count {
        run(count, start_of(&loops, inner, index), steps);
    }
    Ok(())
}

/// The matrix in the last two dimensions, `start` elements after the tensor's first.
fn mat<'a, T>(data: &'a [T], tensor: &Tensor, start: usize, step: usize) -> MatRef<'a, T> {
    let (&[.., rows, cols], &[.., row_stride, col_stride]) = (tensor.shape(), tensor.strides()) else {
        unreachable!("a matrix has two dimensions")
    };
    // A single row's stride says nothing: with the batch's, the batch may become rows of one product.
    let row_stride = if rows == 1 { step } else { row_stride };
    let data = data.get(tensor.offset() + start..).unwrap_or(&[]); // only a tensor without elements ends before
    MatRef::new(data, rows, cols, row_stride, col_stride)
}

/// Where turn `index` of the loops around `inner` begins.
pub(super) fn start_of(loops: &Loops<3>, inner: usize, mut index: usize) -> [usize; 3] {
    let mut at = [0; 3];
    for axis in (0..loops.sizes().len()).rev().filter(|&axis| axis != inner) {
        let step = index % loops.sizes()[axis];
        index /= loops.sizes()[axis];
        for (at, stride) in at.iter_mut().zip(loops.strides()[axis]) {
            *at += step * stride;
        }
    }
    at
}
