//! [`Strided`]: the argument of a kernel that describes the strides of up to five tensors of one shape.

use phalanx_tensor::{Error, Loops, Result, Tensor};

/// Dimensions that a kernel loops over at most, after neighbouring ones are merged.
const RANK_MAX: usize = 8;
/// Tensors at most.
const TENSORS_MAX: usize = 5;

/// `layout.cuh`'s structure of this name.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Strided {
    rank: u64,
    sizes: [u64; RANK_MAX],
    /// The strides of each tensor, in elements.
    strides: [[u64; RANK_MAX]; TENSORS_MAX],
}

impl Strided {
    /// The strides of tensors that broadcast to `shape`. Offsets are not part of it, because arguments point to first elements.
    ///
    /// # Errors
    /// If a tensor does not broadcast, or more dimensions are left than a kernel loops over.
    pub(crate) fn new<const N: usize>(
        op: &'static str,
        shape: &[usize],
        tensors: [&Tensor; N],
    ) -> Result<Strided> {
        const { assert!(N <= TENSORS_MAX) };
        let seen = tensors.map(|t| t.broadcast_for(op, shape));
        let mut strides: [&[usize]; N] = [&[]; N];
        for (strides, seen) in strides.iter_mut().zip(&seen) {
            *strides = seen.as_ref().map_err(Clone::clone)?.strides();
        }
        Strided::of(op, &Loops::new(shape, strides))
    }

    /// The strides of given loops.
    ///
    /// # Errors
    /// If there are more than a kernel makes.
    pub(crate) fn of<const N: usize>(op: &'static str, loops: &Loops<N>) -> Result<Strided> {
        const { assert!(N <= TENSORS_MAX) };
        let rank = loops.sizes().len();
        if rank > RANK_MAX {
            let got = format!("{rank} dimensions that do not lie together, of sizes {:?}", loops.sizes());
            return Err(Error::shape(op, got, format!("at most {RANK_MAX} on a GPU")));
        }
        let mut layout =
            Strided { rank: rank as u64, sizes: [1; RANK_MAX], strides: [[0; RANK_MAX]; TENSORS_MAX] };
        for (d, (&size, strides)) in loops.sizes().iter().zip(loops.strides()).enumerate() {
            layout.sizes[d] = size as u64;
            for (n, &stride) in strides.iter().enumerate() {
                layout.strides[n][d] = stride as u64;
            }
        }
        Ok(layout)
    }

    /// Whether the innermost dimension falls into packets of `lanes` elements, which begin at multiples of `lanes`
    /// wherever they lie together.
    pub(crate) fn is_packed(&self, lanes: usize) -> bool {
        let (inner, lanes) = (self.rank as usize - 1, lanes as u64);
        let aligned = |strides: &[u64; RANK_MAX]| {
            strides[inner] != 1 || strides[..inner].iter().all(|stride| stride.is_multiple_of(lanes))
        };
        self.sizes[inner].is_multiple_of(lanes) && self.strides.iter().all(aligned)
    }

    /// Subtracts the strides of tensor `less` from those of tensor `n`.
    pub(crate) fn subtract(&mut self, n: usize, less: usize) {
        for d in 0..RANK_MAX {
            self.strides[n][d] = self.strides[n][d].wrapping_sub(self.strides[less][d]);
        }
    }
}
