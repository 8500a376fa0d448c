//! The end of a transformer's branch: a bias, dropout and the addition to the residual stream in one pass.

use phalanx_tensor::{PhiloxStream, Result, Tensor, Window};

use super::words::Words;
use super::{cuda, dropout, threshold};
use crate::block_reader::{BLOCK, BlockReader};
use crate::check;
use crate::dispatch::{Kernels, has_branch_kernel};
use crate::ops::{add, cast};
use crate::pointwise::update;
use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, dispatch};

const OP: &str = "bias_dropout_add";

/// `residual + dropout(x + bias)`, element by element, with the draws of [`dropout`](super::dropout). The bias has the size of the last
/// dimension. Each step is rounded to the dtype, so the bits are those of the three operations by themselves. Nothing is drawn for
/// `p = 0`. The residual, and so the sum, may have another dtype than `x` and the bias: a stream in f32 beside a branch in 16 bits is one
/// pass on a GPU. Source: Megatron-LM's `bias_dropout_add`.
///
/// # Errors
/// If `p` is not between 0 and 1, the window does not hold `x`, shapes do not fit, or the dtypes are no floating-point ones.
pub fn bias_dropout_add(
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
    p: f64,
    stream: PhiloxStream,
    window: &Window,
) -> Result<Tensor> {
    let draw = Draw::of(OP, p)?;
    check::float(OP, x)?;
    check::float(OP, residual)?;
    check::same_device(OP, &[x, residual])?;
    check::shape(OP, "a residual", residual, x.shape())?;
    if let Some(bias) = bias {
        check::same(OP, &[x, bias])?;
        let last = x.shape().len().saturating_sub(1);
        check::shape(OP, "a bias", bias, &x.shape()[last..])?;
    }
    let words = Words::new(OP, stream, x.shape(), window)?;
    if !has_branch_kernel(x.device(), residual.dtype(), x.dtype()) {
        let biased = bias.map(|bias| add(x, bias)).transpose()?;
        let dropped = dropout(biased.as_ref().unwrap_or(x), p, stream, window)?;
        return add(residual, &cast(&dropped, residual.dtype())?);
    }
    let mut out = Tensor::empty_for(OP, x.shape(), residual.dtype(), x.device())?;
    KERNELS.run(out.device(), |run| run([x, residual], bias, draw, (&words, stream), &mut out))?;
    Ok(out)
}

const KERNELS: Kernels<Run> = Kernels { cpu: on_cpu, cuda: cuda::bias_dropout_add };

type Run = fn([&Tensor; 2], Option<&Tensor>, Draw, (&Words, PhiloxStream), &mut Tensor) -> Result<()>;

/// How elements are left out: those whose words are below the threshold. Where none is drawn the words are 0.
#[derive(Clone, Copy)]
pub(super) struct Draw {
    pub(super) is_drawn: bool,
    pub(super) threshold: u32,
    pub(super) scale: f64,
}

impl Draw {
    fn of(op: &'static str, p: f64) -> Result<Draw> {
        super::check_probability(op, p)?;
        Ok(match threshold(p) {
            Some(threshold) => Draw { is_drawn: threshold > 0, threshold, scale: 1.0 / (1.0 - p) },
            None => Draw { is_drawn: false, threshold: 1, scale: 1.0 },
        })
    }
}

fn on_cpu(
    inputs: [&Tensor; 2],
    bias: Option<&Tensor>,
    draw: Draw,
    (words, _): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    for_real!(OP, out.dtype(), T => run::<T>(inputs, bias, draw, words, out))
}

fn run<T: Real>(
    inputs: [&Tensor; 2],
    bias: Option<&Tensor>,
    draw: Draw,
    words: &Words,
    out: &mut Tensor,
) -> Result<()> {
    let shape = inputs[0].shape();
    let [x, residual] = BlockReader::<T>::open_all(OP, inputs, shape)?;
    let bias = bias.map(|bias| BlockReader::<T>::open(OP, bias, shape)).transpose()?;
    let scale = T::Wide::from_f64(draw.scale);
    update(OP, out, |start, target: &mut [T]| {
        let (mut draws, mut scratch, mut y) = ([0; BLOCK], [T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            let (draws, y) = (&mut draws[..len], &mut y[..len]);
            if draw.is_drawn {
                words.fill(0, start, draws);
            }
            x.copy_wide(start, y);
            if let Some(bias) = &bias {
                dispatch(AddTo { y, x: bias.wide(start, len, &mut scratch) });
                round::<T>(y, target);
            }
            dispatch(DropOut { y, draws, threshold: draw.threshold, scale });
            round::<T>(y, target);
            dispatch(AddTo { y, x: residual.wide(start, len, &mut scratch) });
            T::narrow_all(y, target);
        }
    })
}

/// Rounds to the dtype, by way of `scratch`.
fn round<T: Real>(y: &mut [T::Wide], scratch: &mut [T]) {
    if T::as_wide(scratch).is_none() {
        T::narrow_all(y, scratch);
        T::widen_all(scratch, y);
    }
}

struct AddTo<'a, W> {
    y: &'a mut [W],
    x: &'a [W],
}

impl<W: Float> Kernel for AddTo<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        self.y.iter_mut().zip(self.x).for_each(|(y, &x)| *y += x);
    }
}

struct DropOut<'a, W> {
    y: &'a mut [W],
    draws: &'a [u32],
    threshold: u32,
    scale: W,
}

impl<W: Float> Kernel for DropOut<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (y, &draw) in self.y.iter_mut().zip(self.draws) {
            *y = if draw >= self.threshold { *y * self.scale } else { W::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Dims, RngKey};

    use super::*;
    use crate::ops::full;
    use crate::testing::{FLOATS, floats, make, values};

    fn stream() -> PhiloxStream {
        RngKey { seed: 5, step: 2 }.site(1)
    }

    fn inputs(shape: &[usize], dtype: DType) -> [Tensor; 3] {
        let width = shape.last().map_or(&[][..], std::slice::from_ref);
        let mut low = -2.0;
        [shape, width, shape].map(|shape| {
            low += 0.7;
            make(shape, dtype, &floats(low, low + 1.9))
        })
    }

    /// The three operations by themselves.
    fn apart(x: &Tensor, bias: Option<&Tensor>, residual: &Tensor, p: f64, window: &Window) -> Tensor {
        let y = bias.map_or_else(|| x.clone(), |bias| add(x, bias).unwrap());
        add(residual, &dropout(&y, p, stream(), window).unwrap()).unwrap()
    }

    #[test]
    fn a_branch_of_another_dtype_has_the_bits_of_a_cast_of_its_own() {
        for (branch, stream_dtype) in
            [(DType::BF16, DType::F32), (DType::F32, DType::F64), (DType::F32, DType::F16)]
        {
            for shape in [&[3, 0][..], &[7], &[3, 5, 33]] {
                let ([x, bias, _], [.., residual]) = (inputs(shape, branch), inputs(shape, stream_dtype));
                let window = Window::whole(shape);
                for (p, bias) in [(0.0, None), (0.0, Some(&bias)), (0.4, Some(&bias))] {
                    let y = bias_dropout_add(&x, bias, &residual, p, stream(), &window).unwrap();
                    let zeros = cast(&full(shape, 0.0, DType::F32, x.device()).unwrap(), branch).unwrap();
                    let dropped = cast(&apart(&x, bias, &zeros, p, &window), stream_dtype).unwrap();
                    assert_eq!(y.dtype(), stream_dtype);
                    assert_eq!(bits(&y), bits(&add(&residual, &dropped).unwrap()), "{branch} {shape:?} {p}");
                }
            }
        }
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        values(x).into_iter().map(f64::to_bits).collect()
    }

    #[test]
    fn the_bits_are_those_of_three_operations() {
        for dtype in FLOATS {
            for shape in [&[][..], &[0], &[3, 0], &[7], &[5, 1], &[3, 5, 37], &[2, 1030]] {
                let [x, bias, residual] = inputs(shape, dtype);
                let mut window = Window::whole(shape);
                window.global.iter_mut().for_each(|size| *size += 3);
                window.offset.iter_mut().for_each(|at| *at = 2);
                for p in [0.0, 0.3, 0.9, 1.0] {
                    for bias in [None, Some(&bias)] {
                        let y = bias_dropout_add(&x, bias, &residual, p, stream(), &window).unwrap();
                        assert_eq!(
                            bits(&y),
                            bits(&apart(&x, bias, &residual, p, &window)),
                            "{dtype} {shape:?} {p}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn strides_do_not_matter() {
        let [x, _, residual] = inputs(&[9, 12], DType::F32);
        let bias = make(&[12, 2], DType::F32, &floats(0.0, 1.0)).select(1, 1).unwrap();
        let turned = |t: &Tensor| t.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap();
        let window = Window { global: Dims::from_slice(&[9, 12]), offset: Dims::from_slice(&[0, 0]) };
        let of = |x: &Tensor, residual: &Tensor| {
            bits(&bias_dropout_add(x, Some(&bias), residual, 0.4, stream(), &window).unwrap())
        };
        let plain = of(&x, &residual);
        assert_eq!(plain, bits(&apart(&x, Some(&bias), &residual, 0.4, &window)));
        assert_eq!(of(&turned(&x), &residual), plain);
        assert_eq!(of(&x, &turned(&residual)), plain);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let [x, bias, residual] = inputs(&[3, 4], DType::F32);
        let run = |bias: &Tensor, residual: &Tensor, p| {
            let window = Window::whole(x.shape());
            bias_dropout_add(&x, Some(bias), residual, p, stream(), &window).unwrap_err().to_string()
        };
        let [_, wide, odd] = inputs(&[3, 5], DType::F32);
        for (error, words) in [
            (run(&wide, &residual, 0.1), ["a bias of shape [5]", "[4]"]),
            (run(&bias, &odd, 0.1), ["a residual of shape [3, 5]", "[3, 4]"]),
            (run(&bias, &residual, 1.5), ["probability 1.5", "0 to 1"]),
            (run(&inputs(&[3, 4], DType::F64)[1], &residual, 0.1), ["f64", "f32"]),
        ] {
            assert!(error.contains(OP) && words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
