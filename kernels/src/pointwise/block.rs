//! A pointwise function over a block: inputs and output may be of any type that is computed in the vectors' type.
//!
//! Halves are widened and rounded in registers. Each strip of a few vectors branches on a slice's type, so
//! that a function is compiled once for f32 and halves. [`apply`] takes slices of one length, [`apply_to_lines`] broadcast lines,
//! [`map_apart`] inputs that are not contiguous.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use crate::block_reader::{BlockReader, BlockScratch, BlockSplit, GROUP};
use crate::real::{Input, Output, Real};

use super::Pointwise;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch, each};

/// Inputs seen as lines of one length, one for each line of the output; the output's lines lie one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a, W, const N: usize> {
    pub(crate) x: [Input<'a, W>; N],
    /// The stride of each input's lines; 0 if all lines are the same.
    pub(crate) steps: [usize; N],
    /// The length of a line.
    pub(crate) width: usize,
}

/// A pointwise function of `N` inputs as a trait object, so that the code around it is compiled once and not for every function. Only
/// [`apply`] and [`apply_to_lines`] call it.
pub(crate) type LineFn<'a, W, const N: usize> = &'a (dyn Fn(Lines<'_, W, N>, Output<'_, W>) + Sync);

/// Vectors that are computed together.
const STRIP: usize = GROUP / LANES_MAX;

/// Calls `f` for an output of any length, which shares no memory with the inputs. Inputs are as long, or one number. An
/// output shorter than [`GROUP`] is computed in a buffer of that length.
pub(crate) fn apply<W: Float, const N: usize>(
    f: LineFn<'_, W, N>,
    inputs: [Input<'_, W>; N],
    out: Output<'_, W>,
) {
    let len = out.len();
    let one = |x, width| Lines { x, steps: [0; N], width };
    if len >= GROUP {
        return f(one(inputs, len), out);
    }
    let (mut groups, mut results) = ([[W::ONE; GROUP]; N], [W::ZERO; GROUP]);
    let mut inputs: [Input<'_, W>; N] = inputs;
    for (x, group) in inputs.iter_mut().zip(&mut groups) {
        if !matches!(x, Input::Same(_)) {
            dispatch(Widen { x: *x, to: &mut group[..len] });
            *x = Input::Wide(group);
        }
    }
    f(one(inputs, GROUP), Output::Wide(&mut results));
    dispatch(Round { x: &results, to: out });
}

/// [`apply`] for lines of [`GROUP`] elements or more, or a single shorter one.
pub(crate) fn apply_to_lines<W: Float, const N: usize>(
    f: LineFn<'_, W, N>,
    lines: Lines<'_, W, N>,
    out: Output<'_, W>,
) {
    debug_assert!(lines.width >= GROUP || lines.width == out.len());
    if lines.width < GROUP { apply(f, lines.x, out) } else { f(lines, out) }
}

/// The body of a [`LineFn`]. Not inlined, so that f32 and halves share the code.
#[inline(never)]
pub(crate) fn run<W: Float, const N: usize>(
    f: impl Pointwise<N>,
    lines: Lines<'_, W, N>,
    out: Output<'_, W>,
) {
    dispatch(PointwiseBlock { f, lines, out });
}

struct PointwiseBlock<'a, W, F, const N: usize> {
    f: F,
    lines: Lines<'a, W, N>,
    out: Output<'a, W>,
}

impl<W: Float, F: Pointwise<N>, const N: usize> Kernel for PointwiseBlock<'_, W, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        // Without vectors a strip of one element needs less code.
        if W::Vec::<S>::LANES == 1 { self.strips::<S, 1>() } else { self.strips::<S, STRIP>() }
    }
}

impl<W: Float, F: Pointwise<N>, const N: usize> PointwiseBlock<'_, W, F, N> {
    /// In strips of `M` vectors. The last one of a line overlaps the one before it if the length is no multiple of a strip's.
    #[inline(always)]
    fn strips<S: Isa, const M: usize>(self) {
        let PointwiseBlock { f, lines: Lines { x: inputs, steps, width }, mut out } = self;
        let lanes = W::Vec::<S>::LANES;
        let last = width - M * lanes;
        for row in 0..out.len() / width {
            let mut next = 0;
            while next < width {
                let at = next.min(last);
                next += M * lanes;
                let mut x = [[W::Vec::<S>::zero(); M]; N];
                for n in 0..N {
                    x[n] = load::<W, S, M>(inputs[n], row, row * steps[n] + at, lanes);
                }
                let mut y = [W::Vec::<S>::zero(); M];
                for (j, y) in y.iter_mut().enumerate() {
                    *y = f.eval(each(|n| x[n][j]));
                }
                store::<W, S, M>(y, &mut out, row * width + at, lanes);
            }
        }
    }
}

/// Widens the first elements of an input.
struct Widen<'a, W> {
    x: Input<'a, W>,
    to: &'a mut [W],
}

impl<W: Float> Kernel for Widen<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = W::Vec::<S>::LANES;
        for (i, to) in self.to.chunks_mut(lanes).enumerate() {
            let [x] = load::<W, S, 1>(self.x, 0, i * lanes, to.len());
            x.store_partial(to);
        }
    }
}

/// Rounds the first elements of a group to the output's type.
struct Round<'a, W> {
    x: &'a [W; GROUP],
    to: Output<'a, W>,
}

impl<W: Float> Kernel for Round<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let (lanes, len) = (W::Vec::<S>::LANES, self.to.len());
        for at in (0..len).step_by(lanes) {
            let x = W::Vec::<S>::load(&self.x[at..]);
            store::<W, S, 1>([x], &mut self.to, at, lanes.min(len - at));
        }
    }
}

/// `M` vectors of `count` elements each from place `at` on, which is in a line.
#[inline(always)]
fn load<W: Float, S: Isa, const M: usize>(
    x: Input<'_, W>,
    line: usize,
    at: usize,
    count: usize,
) -> [W::Vec<S>; M] {
    let mut vectors = [W::Vec::<S>::zero(); M];
    match x {
        Input::Wide(x) => {
            for (vector, x) in vectors.iter_mut().zip(x[at..][..M * count].chunks_exact(count)) {
                let whole = count == W::Vec::<S>::LANES;
                *vector = if whole { W::Vec::<S>::load(x) } else { W::Vec::<S>::load_partial(x, W::ONE) };
            }
        }
        Input::Bf16(x) => {
            for (vector, x) in vectors.iter_mut().zip(x[at..][..M * count].chunks_exact(count)) {
                *vector = W::load_bf16::<S>(x);
            }
        }
        Input::F16(x) => {
            for (vector, x) in vectors.iter_mut().zip(x[at..][..M * count].chunks_exact(count)) {
                *vector = W::load_f16::<S>(x);
            }
        }
        Input::Same(x) => vectors = [W::Vec::<S>::splat(x); M],
        Input::Each(x) => vectors = [W::Vec::<S>::splat(x[line]); M],
    }
    vectors
}

/// The converse of [`load`].
#[inline(always)]
fn store<W: Float, S: Isa, const M: usize>(
    y: [W::Vec<S>; M],
    to: &mut Output<'_, W>,
    at: usize,
    count: usize,
) {
    match to {
        Output::Wide(to) => {
            for (y, to) in y.iter().zip(to[at..][..M * count].chunks_exact_mut(count)) {
                if count == W::Vec::<S>::LANES { y.store(to) } else { y.store_partial(to) }
            }
        }
        Output::Bf16(to) => {
            for (&y, to) in y.iter().zip(to[at..][..M * count].chunks_exact_mut(count)) {
                W::store_bf16::<S>(y, to);
            }
        }
        Output::F16(to) => {
            for (&y, to) in y.iter().zip(to[at..][..M * count].chunks_exact_mut(count)) {
                W::store_f16::<S>(y, to);
            }
        }
    }
}

/// Lines that are computed by one call at most: an input that has a number for each line needs a buffer of so many.
const LINES_MAX: usize = 64;

/// Computes a piece of the output: by lines of `width` elements if the inputs have such, else by gathered blocks.
#[inline(never)]
pub(super) fn map_apart<T: Real, const N: usize>(
    f: LineFn<'_, T::Wide, N>,
    sources: &[BlockReader<'_, T>; N],
    (cut, width): (BlockSplit, Option<usize>),
    start: usize,
    target: &mut [T],
) {
    match width {
        Some(width) => map_lines(f, sources, width, start, target),
        None => map_gathered(f, sources, cut, start, target),
    }
}

/// Computes a piece block by block, each gathered.
fn map_gathered<T: Real, const N: usize>(
    f: LineFn<'_, T::Wide, N>,
    sources: &[BlockReader<'_, T>; N],
    cut: BlockSplit,
    start: usize,
    target: &mut [T],
) {
    let mut scratch: [BlockScratch<T::Wide>; N] = std::array::from_fn(|_| BlockScratch::new());
    cut.blocks(start, target, |start, target| {
        let mut scratch = scratch.iter_mut();
        let x = std::array::from_fn(|n| match scratch.next() {
            Some(scratch) => scratch.input(&sources[n], start, target.len()),
            None => Input::Same(T::Wide::ZERO),
        });
        apply(f, x, T::output(target));
    });
}

/// Computes a piece by lines of `width` elements ([`crate::block_reader::line_width`]), many by one call: elements are read in place. A line that
/// the piece shares with its neighbours is computed by itself.
fn map_lines<T: Real, const N: usize>(
    f: LineFn<'_, T::Wide, N>,
    sources: &[BlockReader<'_, T>; N],
    width: usize,
    mut start: usize,
    mut target: &mut [T],
) {
    let mut rooms = [[T::Wide::ZERO; LINES_MAX]; N];
    while !target.is_empty() {
        let lying = sources.each_ref().map(|source| source.line_layout(start, width));
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
    use phalanx_tensor::{DType, Tensor, bf16, f16};

    use super::super::pointwise;
    use super::{apply, run};
    use crate::ops::{add_scalar, maximum_backward, mul};
    use crate::real::Real;
    use crate::real::{Input, Output};
    use crate::testing::{FLOATS, floats, make, values};

    pointwise!(Sum, |x, y, z| x.mul_add(y, z));

    fn number(i: usize) -> f32 {
        [1.5, -0.0, f32::NAN, 3.0e38, 1.0e-40, f32::INFINITY][i % 7 % 6] * (i as f32 * 0.37 - 11.0)
    }

    /// Every length and type, into every type, against the elements one by one.
    fn check<A: Real<Wide = f32>, B: Real<Wide = f32>>() {
        for len in [0, 1, 7, 33, 63, 64, 65, 129, 1000] {
            let x: Vec<A> = (0..len).map(|i| A::narrow(number(i))).collect();
            let z: Vec<f32> = (0..len).map(|i| number(3 * i + 1)).collect();
            let mut y = vec![B::narrow(7.0); len];
            let inputs = [A::input(&x), Input::Same(-2.0), Input::Wide(&z)];
            apply(&|x, y| run(Sum, x, y), inputs, B::output(&mut y));
            for ((x, z), y) in x.iter().zip(&z).zip(&y) {
                let wanted = B::narrow(x.widen().mul_add(-2.0, *z));
                assert!(
                    bytemuck::bytes_of(y) == bytemuck::bytes_of(&wanted)
                        || y.widen().is_nan() && wanted.widen().is_nan()
                );
            }
        }
    }

    #[test]
    fn elements_of_every_type_are_widened_and_rounded_once() {
        check::<f32, f32>();
        check::<f32, bf16>();
        check::<bf16, bf16>();
        check::<bf16, f16>();
        check::<f16, f32>();
        check::<f16, f16>();
    }

    #[test]
    fn f64_is_computed_as_it_is() {
        let x: Vec<f64> = (0..100).map(|i| f64::from(number(i))).collect();
        for len in [1, 8, 70, 100] {
            let mut y = vec![0.0; len];
            let inputs = [Input::Wide(&x[..len]), Input::Same(0.3), Input::Same(1.0)];
            apply(&|x, y| run(Sum, x, y), inputs, Output::Wide(&mut y));
            let wanted = x.iter().map(|x| x.mul_add(0.3, 1.0));
            assert!(
                y.iter()
                    .zip(wanted)
                    .all(|(y, wanted)| y.to_bits() == wanted.to_bits() || y.is_nan() && wanted.is_nan())
            );
        }
    }

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
