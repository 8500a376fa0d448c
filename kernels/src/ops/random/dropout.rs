//! Elements left out at random.

use phalanx_tensor::{Error, Result, Stream4, Tensor, Window};

use super::cuda;
use super::words::Words;
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::full::fill_;
use crate::pointwise::update;
use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, dispatch};
use crate::source::{BLOCK, Source};

/// `x / (1 - p)`, but 0 with probability `p`, element by element; the draws are those of the shard that `x` is at
/// the window's place in the whole. All zero for `p = 1`. The function is linear in `x`, and its own gradient: the
/// same draws on `dy`.
///
/// # Errors
/// If `p` is not between 0 and 1, the window does not hold `x`, or the dtype is no floating-point one.
pub fn dropout(x: &Tensor, p: f64, stream: Stream4, window: &Window) -> Result<Tensor> {
    const OP: &str = "dropout";
    if !(0.0..=1.0).contains(&p) {
        return Err(Error::range(OP, format!("the probability {p}"), "one from 0 to 1"));
    }
    check::float(OP, x)?;
    let words = Words::new(OP, stream, x.shape(), window)?;
    let mut out = x.empty_like_for(OP)?;
    DROPOUT.run(out.device(), |drop_out| drop_out(OP, x, p, (&words, stream), &mut out))?;
    Ok(out)
}

const DROPOUT: Kernels<Dropout> = Kernels { cpu: drop_out_on_cpu, cuda: drop_out_on_gpu };

type Dropout = fn(&'static str, &Tensor, f64, (&Words, Stream4), &mut Tensor) -> Result<()>;

fn drop_out_on_gpu(
    op: &'static str,
    x: &Tensor,
    p: f64,
    draws: (&Words, Stream4),
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
    (words, _): (&Words, Stream4),
    out: &mut Tensor,
) -> Result<()> {
    for_real!(op, x.dtype(), T => drop_out::<T>(op, x, p, words, out))
}

fn drop_out<T: Real>(op: &'static str, x: &Tensor, p: f64, words: &Words, out: &mut Tensor) -> Result<()> {
    let source = Source::<T>::open(op, x, x.shape())?;
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

    fn stream() -> Stream4 {
        RngKey { seed: 9, step: 2 }.site(4)
    }

    #[test]
    fn elements_are_kept_and_scaled_by_their_words() {
        for x in tensors(&|i| 1.0 + (i % 7) as f64) {
            let y = values(&dropout(&x, 0.25, stream(), &Window::whole(x.shape())).unwrap());
            for (i, (y, x0)) in y.into_iter().zip(values(&x)).enumerate() {
                let word = stream().block(i as u64 / 4, 0)[i % 4];
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
            dropout(&ones, 0.5, stream(), &Window::whole(&shape)).unwrap()
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
            assert_eq!(values(&dropout(&ones, 0.5, stream(), &window).unwrap()), values(&part));
        }
    }

    #[test]
    fn the_ends_of_the_range_drop_nothing_and_everything() {
        let x = make(&[100], DType::F32, &|i| i as f64 + 1.0);
        let window = Window::whole(&[100]);
        assert_eq!(values(&dropout(&x, 0.0, stream(), &window).unwrap()), values(&x));
        assert_eq!(values(&dropout(&x, 1.0, stream(), &window).unwrap()), [0.0; 100]);
        for p in [-0.1, 1.1, f64::NAN] {
            assert!(dropout(&x, p, stream(), &window).unwrap_err().to_string().contains("probability"));
        }
    }
}
