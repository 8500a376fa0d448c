//! Random numbers, each a function of the stream and of its element's place in the whole tensor alone: threads,
//! shards and repetitions draw the same ones.

mod bias_dropout_add;
mod cuda;
mod words;

use phalanx_tensor::{DType, Device, Error, PhiloxStream, Result, Tensor, Window};

use super::creation::fill_;
use crate::block_reader::{BLOCK, BlockReader};
use crate::check;
use crate::dispatch::{Kernels, by_device};
use crate::pointwise::{LineFn, Pointwise, apply, c, pointwise, run, update};
use crate::real::{Input, Output, Real, for_real};
use crate::simd::{Float, Isa, Kernel, dispatch};
use words::Words;

pub use bias_dropout_add::bias_dropout_add;

/// Numbers spread evenly from `low` up to, but not including, `high` (which rounding to the dtype may reach): the
/// part of `shape` that lies at the window's place in the whole. Every dtype gets the same numbers, rounded.
///
/// # Errors
/// If the bounds are not finite and in order, the dtype is no floating-point one, the shard does not fit the window, or it cannot be allocated.
pub fn uniform(
    shape: &[usize],
    window: &Window,
    stream: PhiloxStream,
    [low, high]: [f64; 2],
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    if !(low <= high && (high - low).is_finite()) {
        return Err(Error::range(
            "uniform",
            format!("{low:?} to {high:?}"),
            "finite bounds, the lower one first",
        ));
    }
    let make = Spread { low, width: high - low };
    draw("uniform", make, shape, window, stream, dtype, device)
}

/// Normally distributed numbers, by the method of Box and Muller; otherwise as [`uniform`].
///
/// # Errors
/// As [`uniform`]; if the standard deviation is negative.
pub fn normal(
    shape: &[usize],
    window: &Window,
    stream: PhiloxStream,
    [mean, std]: [f64; 2],
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    check::from_zero("normal", "a standard deviation of", std)?;
    draw("normal", BoxMuller { mean, std }, shape, window, stream, dtype, device)
}

/// [`normal`] without the numbers beyond two standard deviations: those are drawn anew.
///
/// # Errors
/// As [`normal`].
pub fn truncated_normal(
    shape: &[usize],
    window: &Window,
    stream: PhiloxStream,
    [mean, std]: [f64; 2],
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    const OP: &str = "truncated_normal";
    check::from_zero(OP, "a standard deviation of", std)?;
    if !dtype.is_float() {
        return Err(Error::dtype(OP, dtype, "a floating-point dtype"));
    }
    let words = Words::new(OP, stream, shape, window)?;
    let mut out = Tensor::empty_for(OP, shape, dtype, device)?;
    TRUNCATED.run(device, |fill| fill(OP, [mean, std], (&words, stream), &mut out))?;
    Ok(out)
}

const TRUNCATED: Kernels<Truncated> = Kernels { cpu: truncated_on_cpu, cuda: truncated_on_gpu };

type Truncated = fn(&'static str, [f64; 2], (&Words, PhiloxStream), &mut Tensor) -> Result<()>;

fn truncated_on_cpu(
    op: &'static str,
    moments: [f64; 2],
    (words, _): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    for_real!(op, out.dtype(), T => fill_truncated::<T>(op, moments, words, out))
}

fn truncated_on_gpu(
    op: &'static str,
    moments: [f64; 2],
    draws: (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    let make = BoxMuller { mean: 0.0, std: 1.0 };
    cuda::fill_truncated(op, make, (moments, BOUND, TRIES), draws, out)
}

/// Standard deviations that are kept.
const BOUND: f64 = 2.0;
/// Draws that an element gets at most; one in 10^13 is outside after all of them, and becomes the mean.
const TRIES: u64 = 10;

fn fill_truncated<T: Real>(
    op: &'static str,
    [mean, std]: [f64; 2],
    words: &Words,
    out: &mut Tensor,
) -> Result<()> {
    let (mean, std) = (T::Wide::from_f64(mean), T::Wide::from_f64(std));
    let bound = T::Wide::from_f64(BOUND);
    let normal = BoxMuller { mean: 0.0, std: 1.0 };
    let outside = move |z: T::Wide| z > bound || z < -bound;
    update(op, out, |start, target: &mut [T]| {
        let [mut u, mut v, mut next, mut kept] = [[T::Wide::ZERO; BLOCK]; 4];
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            kept[..len].fill(T::Wide::INFINITY);
            for round in 0..TRIES {
                units(words, 4 * round, start, &mut u[..len]);
                units(words, 4 * round + 1, start, &mut v[..len]);
                let uv = [Input::Wide(&u[..len]), Input::Wide(&v[..len])];
                apply(&|uv, next| run(normal, uv, next), uv, Output::Wide(&mut next[..len]));
                let pairs = kept[..len].iter_mut().zip(&next);
                pairs.filter(|(kept, _)| outside(**kept)).for_each(|(kept, next)| *kept = *next);
                if !kept[..len].iter().any(|z| outside(*z)) {
                    break;
                }
            }
            kept[..len].iter_mut().for_each(|z| *z = if outside(*z) { mean } else { mean + *z * std });
            T::narrow_all(&kept[..len], target);
        }
    })
}

// Of two independent numbers from 0 to 1, the first one above 0.
pointwise!(Spread { low, width }, |u, _v| u.mul_add(c(width), c(low)));
pointwise!(BoxMuller { mean, std }, |u, v| {
    let radius = (u.ln() * c(-2.0)).sqrt();
    let angle = (v - c(0.5)) * c(2.0 * std::f64::consts::PI);
    (radius * angle.cos()).mul_add(c(std), c(mean))
});

fn draw(
    op: &'static str,
    make: impl Pointwise<2>,
    shape: &[usize],
    window: &Window,
    stream: PhiloxStream,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    if !dtype.is_float() {
        return Err(Error::dtype(op, dtype, "a floating-point dtype"));
    }
    let words = Words::new(op, stream, shape, window)?;
    let mut out = Tensor::empty_for(op, shape, dtype, device)?;
    by_device(
        &mut out,
        |out| for_real!(op, dtype, T => fill::<T>(op, &|uv, out| run(make, uv, out), &words, out)),
        |out| cuda::fill(op, make, (&words, stream), out),
    )?;
    Ok(out)
}

fn fill<T: Real>(
    op: &'static str,
    make: LineFn<'_, T::Wide, 2>,
    words: &Words,
    out: &mut Tensor,
) -> Result<()> {
    update(op, out, |start, target: &mut [T]| {
        let (mut u, mut v) = ([T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            units(words, 0, start, &mut u[..len]);
            units(words, 1, start, &mut v[..len]);
            apply(make, [Input::Wide(&u[..len]), Input::Wide(&v[..len])], T::output(target));
        }
    })
}

/// Numbers between 0 and 1 from word `lane`; f64 takes further digits from word `lane + 2`. The step and its half
/// above 0 are the type's own, so that the logarithm of the smallest is finite.
fn units<W: Float>(words: &Words, lane: u64, start: usize, to: &mut [W]) {
    let mut high = [0; BLOCK];
    let high = &mut high[..to.len()];
    words.fill(lane, start, high);
    if size_of::<W>() == 4 {
        let unit = |word: u32| (f64::from(word >> 8) + 0.5) * (1.0 / f64::from(1u32 << 24));
        return to.iter_mut().zip(high).for_each(|(to, high)| *to = W::from_f64(unit(*high)));
    }
    let mut low = [0; BLOCK];
    let low = &mut low[..to.len()];
    words.fill(lane + 2, start, low);
    let unit = |high: u32, low: u32| {
        let digits = (u64::from(high) << 32 | u64::from(low)) >> 12;
        (digits as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
    };
    to.iter_mut().zip(high).zip(low).for_each(|((to, high), low)| *to = W::from_f64(unit(*high, *low)));
}

/// `x / (1 - p)`, but 0 with probability `p`, element by element; the draws are those of the shard that `x` is at
/// the window's place in the whole. All zero for `p = 1`. The function is linear in `x`, and its own gradient: the
/// same draws on `dy`.
///
/// # Errors
/// If `p` is not between 0 and 1, the window does not hold `x`, or the dtype is no floating-point one.
pub fn dropout(x: &Tensor, p: f64, stream: PhiloxStream, window: &Window) -> Result<Tensor> {
    const OP: &str = "dropout";
    check_probability(OP, p)?;
    check::float(OP, x)?;
    let words = Words::new(OP, stream, x.shape(), window)?;
    let mut out = x.empty_like_for(OP)?;
    DROPOUT.run(out.device(), |drop_out| drop_out(OP, x, p, (&words, stream), &mut out))?;
    Ok(out)
}

fn check_probability(op: &'static str, p: f64) -> Result<()> {
    match (0.0..=1.0).contains(&p) {
        true => Ok(()),
        false => Err(Error::range(op, format!("the probability {p}"), "one from 0 to 1")),
    }
}

const DROPOUT: Kernels<Dropout> = Kernels { cpu: drop_out_on_cpu, cuda: drop_out_on_gpu };

type Dropout = fn(&'static str, &Tensor, f64, (&Words, PhiloxStream), &mut Tensor) -> Result<()>;

fn drop_out_on_gpu(
    op: &'static str,
    x: &Tensor,
    p: f64,
    draws: (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    match threshold(p) {
        Some(threshold) => cuda::drop_out(op, x, (threshold, 1.0 / (1.0 - p)), draws, out),
        None => fill_(out, 0.0),
    }
}

fn drop_out_on_cpu(
    op: &'static str,
    x: &Tensor,
    p: f64,
    (words, _): (&Words, PhiloxStream),
    out: &mut Tensor,
) -> Result<()> {
    for_real!(op, x.dtype(), T => drop_out::<T>(op, x, p, words, out))
}

fn drop_out<T: Real>(op: &'static str, x: &Tensor, p: f64, words: &Words, out: &mut Tensor) -> Result<()> {
    let source = BlockReader::<T>::open(op, x, x.shape())?;
    let threshold = threshold(p);
    let scale = T::Wide::from_f64(1.0 / (1.0 - p));
    update(op, out, |start, target: &mut [T]| {
        let Some(threshold) = threshold else { return target.fill(T::zeroed()) };
        let (mut draws, mut scratch, mut kept) = ([0; BLOCK], [T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            words.fill(0, start, &mut draws[..len]);
            let x = source.wide(start, len, &mut scratch);
            dispatch(Keep { x, draws: &draws[..len], threshold, scale, out: &mut kept[..len] });
            T::narrow_all(&kept[..len], target);
        }
    })
}

/// An element stays if its word is not below p 2^32, which is beyond every word for p = 1.
fn threshold(p: f64) -> Option<u32> {
    u32::try_from((p * 2f64.powi(32)).round() as u64).ok()
}

struct Keep<'a, W> {
    x: &'a [W],
    draws: &'a [u32],
    threshold: u32,
    scale: W,
    out: &'a mut [W],
}

impl<W: Float> Kernel for Keep<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for ((to, &x), &draw) in self.out.iter_mut().zip(self.x).zip(self.draws) {
            *to = if draw >= self.threshold { x * self.scale } else { W::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Dims, RngKey};

    use super::*;
    use crate::testing::{FLOATS, assert_close, make, tensors, tolerance, values};

    const CPU: Device = Device::Cpu(0);

    fn stream() -> PhiloxStream {
        RngKey { seed: 5, step: 0 }.site(1)
    }

    #[test]
    fn a_shard_draws_its_part_of_the_whole_in_every_dtype() {
        let whole = [61, 7, 40];
        let window = Window { global: Dims::from_slice(&whole), offset: Dims::from_slice(&[17, 2, 3]) };
        for draw in [uniform, normal, truncated_normal] {
            let exact =
                values(&draw(&whole, &Window::whole(&whole), stream(), [1.0, 3.0], DType::F64, CPU).unwrap());
            for dtype in FLOATS {
                let of = |shape: &[usize], window: &Window| {
                    draw(shape, window, stream(), [1.0, 3.0], dtype, CPU).unwrap()
                };
                let all = of(&whole, &Window::whole(&whole));
                let cut = all.narrow(0, 17, 30).unwrap().narrow(1, 2, 5).unwrap().narrow(2, 3, 37).unwrap();
                assert_eq!(values(&of(&[30, 5, 37], &window)), values(&cut));
                let close = if dtype == DType::F32 { 2e-5 } else { tolerance(dtype).max(2e-5) };
                for (got, want) in values(&all).into_iter().zip(&exact) {
                    assert_close(got, *want, close * 3.0);
                }
            }
        }
    }

    #[test]
    fn threads_do_not_change_the_numbers() {
        let shape = [123_457];
        let of = |threads: usize| {
            let device = Device::Cpu(900 + threads as u16);
            device.set_threads(threads).unwrap();
            normal(&shape, &Window::whole(&shape), stream(), [0.0, 1.0], DType::F32, device)
                .unwrap()
                .to_vec::<f32>()
        };
        let one = of(1).unwrap();
        assert_eq!(one, of(2).unwrap());
        assert_eq!(one, of(8).unwrap());
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let shape = [200_000];
        for dtype in [DType::F32, DType::F64] {
            let moments = |x: &Tensor| {
                let x = values(x);
                let moment = |p: i32| x.iter().map(|x| x.powi(p)).sum::<f64>() / x.len() as f64;
                [moment(1), moment(2), moment(3), moment(4)]
            };
            let window = Window::whole(&shape);
            let normal = normal(&shape, &window, stream(), [0.0, 1.0], dtype, CPU).unwrap();
            for (got, want) in moments(&normal).into_iter().zip([0.0, 1.0, 0.0, 3.0]) {
                assert_close(got, want, 0.02);
            }
            let cut = truncated_normal(&shape, &window, stream(), [0.0, 1.0], dtype, CPU).unwrap();
            assert!(values(&cut).iter().all(|x| x.abs() <= 2.0));
            // The variance of the normal distribution cut at 2: 1 - 4 pdf(2) / (2 cdf(2) - 1).
            for (got, want) in moments(&cut).into_iter().take(2).zip([0.0, 0.774_137]) {
                assert_close(got, want, 0.01);
            }
            let uniform = uniform(&shape, &window, stream(), [0.0, 1.0], dtype, CPU).unwrap();
            assert!(values(&uniform).iter().all(|&x| (0.0..1.0).contains(&x)));
            for (got, want) in moments(&uniform).into_iter().zip([1.0 / 2.0, 1.0 / 3.0, 1.0 / 4.0, 1.0 / 5.0])
            {
                assert_close(got, want, 0.005);
            }
        }
    }

    fn dropout_stream() -> PhiloxStream {
        RngKey { seed: 9, step: 2 }.site(4)
    }

    #[test]
    fn elements_are_kept_and_scaled_by_their_words() {
        for x in tensors(&|i| 1.0 + (i % 7) as f64) {
            let y = values(&dropout(&x, 0.25, dropout_stream(), &Window::whole(x.shape())).unwrap());
            for (i, (y, x0)) in y.into_iter().zip(values(&x)).enumerate() {
                let word = dropout_stream().block(i as u64 / 4, 0)[i % 4];
                let want = if word >= 1 << 30 { x0 / 0.75 } else { 0.0 };
                assert_close(y, want, tolerance(x.dtype()));
            }
        }
    }

    #[test]
    fn the_mask_does_not_depend_on_threads_shards_or_dtype() {
        let shape = [301, 333];
        let mask = |threads: usize| {
            let device = Device::Cpu(910 + threads as u16);
            device.set_threads(threads).unwrap();
            let ones = crate::ops::full(&shape, 1.0, DType::F32, device).unwrap();
            dropout(&ones, 0.5, dropout_stream(), &Window::whole(&shape)).unwrap()
        };
        let whole = mask(1);
        assert_eq!(values(&whole), values(&mask(2)));
        assert_eq!(values(&whole), values(&mask(8)));
        let kept = values(&whole).iter().filter(|&&x| x > 0.0).count() as f64;
        assert!((kept / (301.0 * 333.0) - 0.5).abs() < 0.01);
        for dtype in FLOATS {
            let ones = crate::ops::full(&[100, 33], 1.0, dtype, Device::CPU).unwrap();
            let window = Window { global: Dims::from_slice(&shape), offset: Dims::from_slice(&[150, 300]) };
            let part = whole.narrow(0, 150, 100).unwrap().narrow(1, 300, 33).unwrap();
            assert_eq!(values(&dropout(&ones, 0.5, dropout_stream(), &window).unwrap()), values(&part));
        }
    }

    #[test]
    fn the_ends_of_the_range_drop_nothing_and_everything() {
        let x = make(&[100], DType::F32, &|i| i as f64 + 1.0);
        let window = Window::whole(&[100]);
        assert_eq!(values(&dropout(&x, 0.0, dropout_stream(), &window).unwrap()), values(&x));
        assert_eq!(values(&dropout(&x, 1.0, dropout_stream(), &window).unwrap()), [0.0; 100]);
        for p in [-0.1, 1.1, f64::NAN] {
            assert!(
                dropout(&x, p, dropout_stream(), &window).unwrap_err().to_string().contains("probability")
            );
        }
    }
}
