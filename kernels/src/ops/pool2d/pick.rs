//! [`max_pick2d`]: the pixels at the places that max pooling found; [`max_unpool2d`]: its transpose, the gradient of max pooling.

use phalanx_tensor::{DType, Result, Tensor};

use super::{cuda, image, piece, resized};
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::simd::Float;

/// The pixels at `places`, which are [`super::max_pool2d`]'s.
///
/// # Errors
/// If the shapes do not belong together, or a place is outside its plane.
pub fn max_pick2d(x: &Tensor, places: &Tensor) -> Result<Tensor> {
    const OP: &str = "max_pick2d";
    let size = paired(OP, x, places)?;
    let (x, places) = (x.contiguous()?, places.contiguous()?);
    let mut out = Tensor::empty_for(OP, places.shape(), x.dtype(), x.device())?;
    if out.numel() > 0 {
        PICK.run(out.device(), |pick| pick(OP, &x, &places, size, &mut out))?;
    }
    Ok(out)
}

const PICK: Kernels<Picked> = Kernels { cpu: pick_on_cpu, cuda: cuda::pick };
const UNPOOL: Kernels<Picked> = Kernels { cpu: unpool_on_cpu, cuda: cuda::unpool };

/// For pixels, places and the size of the images that the places are in.
type Picked = fn(&'static str, &Tensor, &Tensor, [usize; 2], &mut Tensor) -> Result<()>;

fn pick_on_cpu(
    op: &'static str,
    x: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    for_real!(op, x.dtype(), T => pick::<T>(op, x, places, size, out))
}

fn unpool_on_cpu(
    op: &'static str,
    dy: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    for_real!(op, dy.dtype(), T => unpool::<T>(op, dy, places, size, out))
}

/// The transpose of [`max_pick2d`]: for each pixel of images of `size` the sum of `dy` where its place is named.
///
/// # Errors
/// As [`max_pick2d`].
pub fn max_unpool2d(dy: &Tensor, places: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    const OP: &str = "max_unpool2d";
    paired(OP, dy, places)?;
    check::shape(OP, "places", places, dy.shape())?;
    let (dy, places) = (dy.contiguous()?, places.contiguous()?);
    let mut out = Tensor::empty_for(OP, &resized(dy.shape(), size), dy.dtype(), dy.device())?;
    if out.numel() > 0 {
        UNPOOL.run(out.device(), |unpool| unpool(OP, &dy, &places, size, &mut out))?;
    }
    Ok(out)
}

/// The image size of `x`, whose planes are as many as those of `places`.
fn paired(op: &'static str, x: &Tensor, places: &Tensor) -> Result<[usize; 2]> {
    check::float(op, x)?;
    check::dtype(op, places, DType::I32)?;
    check::same_device(op, &[x, places])?;
    let size = image(op, x)?;
    check::shape(op, "places", places, &resized(x.shape(), image(op, places)?))?;
    Ok(size)
}

fn pick<T: Real>(
    op: &'static str,
    x: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let [height, width] = image(op, places)?;
    let (plane, outputs) = (size[0] * size[1], height * width);
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let (source, from) = (x.read::<T>(op)?, places.read::<i32>(op)?);
    let (source, from) = (&source[x.offset()..][..x.numel()], &from[places.offset()..][..numel]);
    let chunk = piece(outputs);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        for (j, out) in out.chunks_exact_mut(outputs).enumerate() {
            let image = i * (chunk / outputs) + j;
            let source = &source[image * plane..][..plane];
            for (to, &place) in out.iter_mut().zip(&from[image * outputs..]) {
                let pixel = usize::try_from(place).ok().and_then(|place| source.get(place).copied());
                *to = pixel.unwrap_or_else(|| T::narrow(-T::Wide::INFINITY));
            }
        }
    });
    Ok(())
}

fn unpool<T: Real>(
    op: &'static str,
    dy: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let [height, width] = image(op, dy)?;
    let (plane, outputs) = (size[0] * size[1], height * width);
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let (source, to) = (dy.read::<T>(op)?, places.read::<i32>(op)?);
    let (source, to) = (&source[dy.offset()..][..dy.numel()], &to[places.offset()..][..dy.numel()]);
    let chunk = piece(plane);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        let mut wide = vec![T::Wide::ZERO; if T::as_wide(&[]).is_some() { 0 } else { plane }];
        for (j, out) in out.chunks_exact_mut(plane).enumerate() {
            let start = (i * (chunk / plane) + j) * outputs;
            let add = |sums: &mut [T::Wide]| {
                sums.fill(T::Wide::ZERO);
                for (dy, &place) in source[start..start + outputs].iter().zip(&to[start..]) {
                    if let Some(sum) = usize::try_from(place).ok().and_then(|place| sums.get_mut(place)) {
                        *sum += dy.widen();
                    }
                }
            };
            match T::as_wide_mut(out) {
                Some(sums) => add(sums),
                None => {
                    add(&mut wide);
                    T::narrow_all(&wide, out);
                }
            }
        }
    });
    Ok(())
}
