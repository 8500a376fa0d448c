//! Batched products on a GPU: by cuBLASLt, or by our own kernel what that does not do. The batch dimensions become as few
//! launches as their strides allow.

use phalanx_tensor::cuda::{self, Epilogue, Matrices, Products};
use phalanx_tensor::{Loops, Result, Tensor, contiguous_strides};

use super::{Finish, start_of};
use crate::gemm::{Write, multiply_on_gpu};
use crate::ops::activation::gelu_;

/// Launches at most; operands that would need more are made contiguous first.
const TURNS_MAX: usize = 16;

/// `out = a b` for operands of one batch shape; `out` is contiguous, and of the operands' dtype or, where theirs is a half,
/// f32.
pub(in crate::ops) fn multiply(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &mut Tensor,
    finish: Finish<'_>,
) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    if a.shape().last() == Some(&0) && finish.write == Write::Accumulate {
        return Ok(()); // Adding a zero would turn -0 into 0.
    }
    let (whole, loops, inner) = Batch::new(a, b);
    let turns = loops.sizes().iter().product::<usize>() / whole.turn_count;
    if turns > TURNS_MAX && !(a.is_contiguous() && b.is_contiguous()) {
        return multiply(op, &a.contiguous()?, &b.contiguous()?, out, finish);
    }
    for turn in 0..turns {
        let starts = start_of(&loops, inner, turn);
        if !cuda::multiply(op, whole.products(starts, out, &finish, Epilogue::Plain))? {
            multiply_on_gpu(op, whole.products(starts, out, &finish, Epilogue::Plain))?;
        }
    }
    finish.activation.map_or(Ok(()), |kind| gelu_(op, out, kind))
}

/// [`multiply`] with an epilogue, which says what is done with the sums in place of an activation. Returns false and does nothing if
/// cuBLASLt does not do that by one call.
pub(super) fn multiply_fused(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &mut Tensor,
    finish: &Finish<'_>,
    epilogue: Epilogue<'_>,
) -> Result<bool> {
    if out.numel() == 0 || a.numel() == 0 {
        return Ok(false);
    }
    let (whole, loops, _) = Batch::new(a, b);
    let is_one = loops.sizes().iter().product::<usize>() == whole.turn_count;
    Ok(is_one && cuda::multiply(op, whole.products([0; 3], out, finish, epilogue))?)
}

/// Products that one launch computes.
struct Batch<'a> {
    a: &'a Tensor,
    b: &'a Tensor,
    /// m, n and k.
    size: [usize; 3],
    count: usize,
    /// The items that a turn of the loops around it has.
    turn_count: usize,
    /// From one item to the next, of A, B and C.
    steps: [usize; 3],
}

impl<'a> Batch<'a> {
    /// The longest loop over the batch dimensions, all of these loops, and which of them it is.
    fn new(a: &'a Tensor, b: &'a Tensor) -> (Batch<'a>, Loops<3>, usize) {
        let lead = a.rank() - 2;
        let size = [a.shape()[lead], b.shape()[lead + 1], a.shape()[lead + 1]];
        let batch = &a.shape()[..lead];
        let c_strides = contiguous_strides(&[batch, &[size[0], size[1]]].concat());
        let loops = Loops::new(batch, [&a.strides()[..lead], &b.strides()[..lead], &c_strides[..lead]]);
        let inner = (0..loops.sizes().len()).max_by_key(|&axis| loops.sizes()[axis]).unwrap_or(0);
        let (count, steps) = (loops.sizes()[inner], loops.strides()[inner]);
        (Batch { a, b, size, count, turn_count: count, steps }.folded(), loops, inner)
    }

    /// A batch that shares B and whose A and C go on where the item before ended is one product with more rows.
    fn folded(self) -> Self {
        let ([m, n, k], [a_step, b_step, c_step]) = (self.size, self.steps);
        let row = self.a.strides()[self.a.rank() - 2];
        // A single row's stride says nothing.
        let goes_on = if m == 1 { row == a_step } else { a_step == m * row };
        if self.count > 1 && b_step == 0 && goes_on && c_step == m * n {
            return Batch { size: [m * self.count, n, k], count: 1, ..self };
        }
        self
    }

    /// The strides of a factor's matrices.
    fn strides(&self, which: usize) -> [usize; 3] {
        let tensor = [self.a, self.b][which];
        let at = tensor.rank() - 2;
        [self.steps[which], tensor.strides()[at], tensor.strides()[at + 1]]
    }

    fn products<'p>(
        &'p self,
        [a, b, c]: [usize; 3],
        out: &'p mut Tensor,
        finish: &Finish<'p>,
        epilogue: Epilogue<'p>,
    ) -> Products<'p> {
        Products {
            count: self.count,
            size: self.size,
            a: Matrices { tensor: self.a, start: a, strides: self.strides(0) },
            b: Matrices { tensor: self.b, start: b, strides: self.strides(1) },
            c: (out, c, [self.steps[2], self.size[1]]),
            accumulate: finish.write == Write::Accumulate,
            bias: finish.bias,
            epilogue,
        }
    }
}
