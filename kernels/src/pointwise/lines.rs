//! A piece of a pointwise result some of whose inputs lie otherwise than it does.

use super::{Function, Input, Lines, apply, apply_to_lines};
use crate::real::Real;
use crate::simd::Float;
use crate::source::{Cut, Scratch, Source};

/// Lines that are computed by one call at most: so many numbers of an input that has one for each.
const LINES_MAX: usize = 64;

/// A piece by whichever way its inputs allow: lines of `width` elements if there are such.
#[inline(never)]
pub(super) fn map_apart<T: Real, const N: usize>(
    f: Function<'_, T::Wide, N>,
    sources: &[Source<'_, T>; N],
    (cut, width): (Cut, Option<usize>),
    start: usize,
    target: &mut [T],
) {
    match width {
        Some(width) => map_lines(f, sources, width, start, target),
        None => map_gathered(f, sources, cut, start, target),
    }
}

/// Block by block, each gathered.
fn map_gathered<T: Real, const N: usize>(
    f: Function<'_, T::Wide, N>,
    sources: &[Source<'_, T>; N],
    cut: Cut,
    start: usize,
    target: &mut [T],
) {
    let mut scratch: [Scratch<T::Wide>; N] = std::array::from_fn(|_| Scratch::new());
    cut.blocks(start, target, |start, target| {
        let mut scratch = scratch.iter_mut();
        let x = std::array::from_fn(|n| match scratch.next() {
            Some(scratch) => scratch.input(&sources[n], start, target.len()),
            None => Input::Same(T::Wide::ZERO),
        });
        apply(f, x, T::output(target));
    });
}

/// Lines of `width` elements, see [`crate::source::line_width`], many by one call: elements are read where they lie. What a piece
/// has of lines that it shares with its neighbours is computed apart.
fn map_lines<T: Real, const N: usize>(
    f: Function<'_, T::Wide, N>,
    sources: &[Source<'_, T>; N],
    width: usize,
    mut start: usize,
    mut target: &mut [T],
) {
    let mut rooms = [[T::Wide::ZERO; LINES_MAX]; N];
    while !target.is_empty() {
        let lying = sources.each_ref().map(|source| source.lie(start, width));
        let left = (width - start % width).min(target.len());
        let (count, len) = match left == width {
            true => (lying.iter().fold(LINES_MAX.min(target.len() / width), |n, l| n.min(l.count)), width),
            false => (1, left),
        };
        let (here, after) = target.split_at_mut(count * len);
        let mut lines =
            Lines { x: [Input::Same(T::Wide::ZERO); N], steps: lying.map(|l| l.step), width: len };
        for (((x, source), lying), room) in lines.x.iter_mut().zip(sources).zip(lying).zip(&mut rooms) {
            *x = source.read_lines(lying, [count, len], room);
        }
        apply_to_lines(f, lines, T::output(here));
        (start, target) = (start + count * len, after);
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Tensor};

    use crate::ops::{add_scalar, maximum_backward, mul};
    use crate::testing::{FLOATS, floats, make, values};

    /// The tensor in a shape, every element in a place of its own.
    fn spread(x: &Tensor, shape: &[usize]) -> Tensor {
        x.broadcast_to(shape).unwrap().copy().unwrap()
    }

    #[test]
    fn what_is_broadcast_has_the_bits_of_what_is_spread_first() {
        let shapes: [(&[usize], &[usize]); 14] = [
            (&[70, 64], &[64]),
            (&[70, 64], &[70, 1]),
            (&[70, 1], &[1, 65]),
            (&[300, 100], &[100]),
            (&[300, 100], &[300, 1]),
            (&[5, 9, 700], &[9, 1]),
            (&[5, 9, 700], &[5, 1, 700]),
            (&[5, 9, 7, 100], &[9, 1, 1]),
            (&[5, 1, 7, 100], &[9, 1, 1]),
            (&[5, 9, 7, 100], &[5, 1, 7, 1]),
            (&[3, 5000], &[]),
            (&[1, 20_000], &[2, 1]),
            (&[200, 63], &[200, 1]),
            (&[200, 63], &[63]),
        ];
        for dtype in FLOATS {
            for (left, right) in shapes {
                let (a, b) = (make(left, dtype, &floats(-3.0, 3.0)), make(right, dtype, &floats(-2.0, 5.0)));
                for (a, b) in [(&a, &b), (&b, &a)] {
                    let got = mul(a, b).unwrap();
                    let shape = got.shape();
                    let wanted = mul(&spread(a, shape), &spread(b, shape)).unwrap();
                    assert_eq!(values(&got), values(&wanted), "{dtype} {left:?} {right:?}");
                    let got = maximum_backward(&got, a, b).unwrap();
                    let wanted = maximum_backward(&wanted, &spread(a, shape), &spread(b, shape)).unwrap();
                    assert_eq!(values(&got), values(&wanted), "{dtype} {left:?} {right:?}");
                }
            }
        }
    }

    #[test]
    fn rows_apart_and_parts_of_rows_are_read_where_they_lie() {
        for dtype in [DType::F32, DType::BF16] {
            let x = make(&[40, 3, 900], dtype, &floats(-3.0, 3.0));
            let column = make(&[40, 3, 1], dtype, &floats(-3.0, 3.0));
            for (first, len) in [(0, 900), (3, 64), (5, 129), (1, 899), (2, 33)] {
                for x in [
                    x.narrow(2, first, len).unwrap(),
                    x.narrow(2, first, len).unwrap().narrow(1, 1, 2).unwrap(),
                ] {
                    let copied = x.copy().unwrap();
                    let column = column.narrow(1, 0, x.shape()[1]).unwrap();
                    let wanted = mul(&copied, &spread(&column, x.shape())).unwrap();
                    assert_eq!(values(&mul(&x, &column).unwrap()), values(&wanted));
                    assert_eq!(values(&mul(&column, &x).unwrap()), values(&wanted));
                    let plus = add_scalar(&copied, 1.into()).unwrap();
                    assert_eq!(values(&add_scalar(&x, 1.into()).unwrap()), values(&plus));
                }
            }
        }
    }
}
