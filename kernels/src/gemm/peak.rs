//! Measures a device's peak floating-point operations a second ([`peak_flops`]), those that it keeps up ([`sustained_flops`]) and its memory
//! bandwidth ([`peak_bandwidth`]). A profile sets the speed of a training step beside them.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use phalanx_tensor::{DType, Device, Error, Pool, Result};

use super::element::{GemmElem, PanelElem};
use crate::dispatch::Kernels;
use crate::ops::{add, full, matmul, matmul_into};
use crate::real::for_real;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::{BLOCK, Tiles};
use crate::simd::{Float, Isa, Kernel, Runner, Vector, dispatch};

/// How long a peak is tried for.
const TRIED_FOR: Duration = Duration::from_millis(60);
/// Independent chains of multiply-adds: as many sums as 16 registers have room for, and more than a core executes at once, so that latency is
/// hidden.
const CHAINS: usize = 12;
/// Multiply-adds of a chain in a piece: a piece takes a fraction of a millisecond.
const ROUNDS: usize = 1 << 14;
/// Bytes of each of the three arrays: beyond all caches.
const ARRAY: usize = 64 << 20;
/// Rows and columns of a GPU's matrices, which are multiplied there instead.
const SIZE_ON_GPU: usize = 4096;
/// Seconds after which a smaller problem is accepted, on the emulator for example.
const ENOUGH: f64 = 2e-3;

/// The most floating-point operations a second for elements of this dtype, as measured now. On a CPU all of the device's threads run chains of
/// the instruction that matrix products are made of between registers, with nothing to load or to store: a fused multiply-add, or for
/// bf16 a product of tiles or a dot product of pairs where the processor has a fast one. On a GPU it is the fastest product of large matrices.
///
/// # Errors
/// If the dtype is no floating-point one; of a meta device.
pub fn peak_flops(dtype: DType, device: Device) -> Result<f64> {
    const OP: &str = "peak_flops";
    computes(OP, device)?;
    FLOPS.on(device)(OP, dtype, device, Timing::Fastest)
}

/// The floating-point operations a second of the instructions of [`peak_flops`] over a stretch of `time`: all that a program can do in as long
/// a stretch. Where other programs, or other guests of the same machine, use the cores too, the clock and the share of a core change within
/// milliseconds, and a peak of a good one is not kept up. To say how good a computation of seconds is, measure this before it and after it.
///
/// # Errors
/// If the dtype is no floating-point one; of a meta device.
pub fn sustained_flops(dtype: DType, device: Device, time: Duration) -> Result<f64> {
    const OP: &str = "sustained_flops";
    computes(OP, device)?;
    FLOPS.on(device)(OP, dtype, device, Timing::Mean(time))
}

const FLOPS: Kernels<Flops> = Kernels { cpu: flops_on_cpu, cuda: flops_on_gpu };
const BANDWIDTH: Kernels<Bandwidth> = Kernels { cpu: bandwidth_on_cpu, cuda: bandwidth_on_gpu };

type Flops = fn(&'static str, DType, Device, Timing) -> Result<f64>;
type Bandwidth = fn(Device) -> Result<f64>;

/// Which of several runs counts.
#[derive(Clone, Copy)]
enum Timing {
    /// The fastest of those of [`TRIED_FOR`].
    Fastest,
    /// The mean of those of this stretch.
    Mean(Duration),
}

fn flops_on_gpu(_: &'static str, dtype: DType, device: Device, timing: Timing) -> Result<f64> {
    growing(128, SIZE_ON_GPU, timing, |size, timing| {
        let a = full(&[size, size], 1.0, dtype, device)?;
        let mut c = matmul(&a, &a)?;
        Ok((2.0 * (size as f64).powi(3), seconds(device, timing, || matmul_into(&mut c, &a, &a))?))
    })
}

fn flops_on_cpu(op: &'static str, dtype: DType, device: Device, timing: Timing) -> Result<f64> {
    let pool = device.pool()?;
    #[cfg(target_arch = "x86_64")]
    if dtype == DType::BF16 && Runner::current().for_tiles().is_some() {
        return flops_of_tiles(&pool, device, timing);
    }
    for_real!(op, dtype, T => flops_of::<<T as GemmElem>::PanelElem>(&pool, device, timing))
}

fn flops_of<P: PanelElem>(pool: &Pool, device: Device, timing: Timing) -> Result<f64> {
    // Pieces are taken in turns: of more of them no thread does twice as much as another.
    let pieces = 8 * pool.threads();
    let chains = || P::run(Runner::current(), Chains::<P>(PhantomData));
    let seconds = seconds(device, timing, || {
        pool.for_each(pieces, |_| {
            std::hint::black_box(chains());
        });
        Ok(())
    })?;
    Ok((pieces * CHAINS * ROUNDS * chains().1 * 2) as f64 / seconds)
}

/// The same of tiles of bf16.
#[cfg(target_arch = "x86_64")]
fn flops_of_tiles(pool: &Pool, device: Device, timing: Timing) -> Result<f64> {
    let pieces = 8 * pool.threads();
    // SAFETY: the runner's instruction set has tiles.
    let products = || unsafe { Tiles::new(BLOCK) }.multiply_registers(ROUNDS);
    let seconds = seconds(device, timing, || {
        pool.for_each(pieces, |_| {
            products();
        });
        Ok(())
    })?;
    Ok(pieces as f64 * products() / seconds)
}

/// [`CHAINS`] sums of [`ROUNDS`] products each. Returns their total, so that the compiler keeps the loop, and the number of products that one
/// instruction adds.
struct Chains<P>(PhantomData<P>);

impl<P: PanelElem> Kernel for Chains<P> {
    type Output = (P::Acc, usize);

    #[inline(always)]
    fn run<S: Isa>(self) -> (P::Acc, usize) {
        type Of<P, S> = <<P as PanelElem>::Acc as Float>::Vec<S>;
        let factor = |x| Of::<P, S>::splat(std::hint::black_box(P::Acc::from_f64(x)));
        let (a, b) = (factor(1.0), factor(1.0 / 1024.0));
        let mut sums = [Of::<P, S>::zero(); CHAINS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = factor(i as f64);
        }
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = P::add::<S>(a, b, *sum);
            }
        }
        let mut all = Of::<P, S>::zero();
        for sum in sums {
            all = all + sum;
        }
        (all.reduce_sum(), Of::<P, S>::LANES * P::steps::<S>())
    }
}

/// The most bytes a second between memory and registers, as measured now: `a = b + 3 c` over arrays beyond all caches by all of the device's
/// threads, counted as three arrays. On a GPU it is a sum of two tensors. Source: McCalpin: STREAM, the triad (1995).
///
/// # Errors
/// If memory is short; of a meta device.
pub fn peak_bandwidth(device: Device) -> Result<f64> {
    computes("peak_bandwidth", device)?;
    BANDWIDTH.on(device)(device)
}

/// Elements of an array.
const ELEMENTS: usize = ARRAY / size_of::<f32>();

fn bandwidth_on_gpu(device: Device) -> Result<f64> {
    growing(1 << 12, ELEMENTS, Timing::Fastest, |elements, timing| {
        let b = full(&[elements], 1.0, DType::F32, device)?;
        let c = b.copy()?;
        Ok((12.0 * elements as f64, seconds(device, timing, || add(&b, &c).map(drop))?))
    })
}

fn bandwidth_on_cpu(device: Device) -> Result<f64> {
    let elements = ELEMENTS;
    let pool = device.pool()?;
    let [mut a, b, c] = [0f32, 1.0, 2.0].map(|x| vec![x; elements]);
    let chunk = elements / (8 * pool.threads()) + 1;
    let seconds = seconds(device, Timing::Fastest, || {
        pool.for_each_chunk(&mut a, chunk, |piece, a| {
            let here = piece * chunk..piece * chunk + a.len();
            dispatch(Triad { a, b: &b[here.clone()], c: &c[here] });
        });
        Ok(())
    })?;
    Ok(3.0 * ARRAY as f64 / seconds)
}

struct Triad<'a> {
    a: &'a mut [f32],
    b: &'a [f32],
    c: &'a [f32],
}

impl Kernel for Triad<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let factor = S::F32::splat(3.0);
        let lanes = S::F32::LANES;
        // The few elements behind the last whole vector are left as they are.
        for ((a, b), c) in
            self.a.chunks_exact_mut(lanes).zip(self.b.chunks_exact(lanes)).zip(self.c.chunks_exact(lanes))
        {
            S::F32::load(c).mul_add(factor, S::F32::load(b)).store(a);
        }
    }
}

/// Refuses a meta device, on which nothing takes time.
fn computes(op: &'static str, device: Device) -> Result<()> {
    match device.is_meta() {
        true => Err(Error::invalid(op, format!("got {device}, wanted a device that computes"))),
        false => Ok(()),
    }
}

/// Runs problems of size `least`, twice that, and so on up to `most`, until one takes long enough ([`ENOUGH`]); `run` returns the work done and
/// its seconds. Returns the work a second of the last, by `timing`.
fn growing(
    least: usize,
    most: usize,
    timing: Timing,
    mut run: impl FnMut(usize, Timing) -> Result<(f64, f64)>,
) -> Result<f64> {
    let mut size = least;
    let (mut done, mut seconds) = run(size, Timing::Fastest)?;
    while size < most && seconds <= ENOUGH {
        size *= 2;
        (done, seconds) = run(size, Timing::Fastest)?;
    }
    if let Timing::Mean(_) = timing {
        (done, seconds) = run(size, timing)?;
    }
    Ok(done / seconds)
}

/// The seconds of a run, after the first.
fn seconds(device: Device, timing: Timing, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    device.synchronize()?;
    let stretch = match timing {
        Timing::Fastest => TRIED_FOR,
        Timing::Mean(time) => time,
    };
    let (begin, mut end) = (Instant::now(), Duration::ZERO);
    let (mut fastest, mut runs) = (Duration::MAX, 0.0);
    while end < stretch || runs == 0.0 {
        run()?;
        device.synchronize()?;
        let start = std::mem::replace(&mut end, begin.elapsed());
        fastest = fastest.min(end - start);
        runs += 1.0;
    }
    Ok(match timing {
        Timing::Fastest => fastest.as_secs_f64(),
        Timing::Mean(_) => end.as_secs_f64() / runs,
    })
}
