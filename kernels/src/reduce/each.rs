//! Reductions that go element by element, in order: of integers, of products, of what carries an index.

use phalanx_tensor::{Element, Result};

use super::Frame;
use crate::pointwise::PIECE;
use crate::source::{BLOCK, Source};

/// Sets every output to what `add(output, index along n, element)` makes of `start`, indices ascending.
pub(crate) fn fold_each<T: Element, A: Copy + Send + Sync>(
    op: &'static str,
    frame: &Frame,
    start: A,
    out: &mut [A],
    add: impl Fn(&mut A, usize, T) + Sync,
) -> Result<()> {
    let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
    let (n, inner, pool) = (frame.n, frame.inner, frame.view.device().pool()?);
    let width = PIECE.div_ceil(n.max(1)).next_multiple_of(inner.min(BLOCK));
    pool.for_each_chunk(out, width, |piece, out| {
        let mut scratch = [T::zeroed(); BLOCK];
        out.fill(start);
        let (mut output, end) = (piece * width, piece * width + out.len());
        while output < end {
            let len = (inner - output % inner).min(end - output).min(BLOCK);
            let first = output / inner * n * inner + output % inner;
            let out = &mut out[output - piece * width..][..len];
            if inner == 1 {
                for at in (0..n).step_by(BLOCK) {
                    let block = source.block(first + at, BLOCK.min(n - at), &mut scratch);
                    block.iter().enumerate().for_each(|(i, &x)| add(&mut out[0], at + i, x));
                }
            } else {
                for row in 0..n {
                    let block = source.block(first + row * inner, len, &mut scratch);
                    out.iter_mut().zip(block).for_each(|(to, &x)| add(to, row, x));
                }
            }
            output += len;
        }
    });
    Ok(())
}
