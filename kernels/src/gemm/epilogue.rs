//! The epilogue of a product: bias, activation, rounding, and addition to what C holds ([`Epilogue`], [`Write`]). The macro-kernel, `thin.rs` and
//! `gemv.rs` apply it to each tile of finished sums ([`FinishTile`]).

#![allow(unsafe_code)]

use super::element::GemmElem;
use crate::ops::Gelu;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector};

/// Whether a product replaces C or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// C = A B
    Store,
    /// C = C + A B, the finished product added once.
    Accumulate,
    /// C = C + A B, the chains of additions going on from C. So a product whose steps come in parts has the bits of the whole. For
    /// elements of the sums' type, in rows, without an epilogue.
    Continue,
}

/// Steps applied to the product before it is written, in the order of the fields. Each has the bits of a step of its
/// own: in half precision the value is rounded between them.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a, T> {
    /// Added to every row: one value per column.
    pub(crate) bias: Option<&'a [T]>,
    /// Applied to every element.
    pub(crate) activation: Option<Gelu>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue { bias: None, activation: None }
    }
}

impl<T> Epilogue<'_, T> {
    /// Whether there is neither bias nor activation.
    pub(super) fn is_empty(&self) -> bool {
        self.bias.is_none() && self.activation.is_none()
    }
}

/// A tile whose sums are complete, and the epilogue that takes it to C.
pub(super) struct FinishTile<'a, T: GemmElem> {
    pub(super) sums: &'a mut [T::Acc],
    /// Elements from one row of sums to the next.
    pub(super) sums_row: usize,
    /// The bias of the tile's columns.
    pub(super) bias: Option<&'a [T]>,
    pub(super) activation: Option<Gelu>,
    pub(super) write: Write,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The tile's first element in C.
    pub(super) c: *mut T,
    pub(super) c_strides: (usize, usize),
}

impl<T: GemmElem> FinishTile<'_, T> {
    /// # Safety
    ///
    /// C's elements in the tile are valid and the caller's alone.
    pub(super) unsafe fn run_on(self, runner: Runner) {
        runner.run(Finish(self));
    }
}

/// Made only by [`FinishTile::run_on`], whose caller vouches for C.
struct Finish<'a, T: GemmElem>(FinishTile<'a, T>);

impl<T: GemmElem> Kernel for Finish<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        self.0.rows_with::<S, <T::Acc as Float>::Vec<S>>();
    }
}

impl<T: GemmElem> FinishTile<'_, T> {
    /// All rows of the tile.
    #[inline(always)]
    fn rows_with<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let plain = self.bias.is_none() && self.activation.is_none() && self.write == Write::Store;
        if plain && self.c_strides.1 == 1 {
            return self.store_rows::<S, V>();
        }
        for i in 0..self.rows {
            for first in (0..self.cols).step_by(V::LANES) {
                let len = (self.cols - first).min(V::LANES);
                let sums = &self.sums[i * self.sums_row + first..][..len];
                let sums = if len == V::LANES { V::load(sums) } else { V::load_partial(sums, T::Acc::ZERO) };
                let bias = match self.bias {
                    Some(bias) => Some(T::load::<S>(&bias[first..first + len])),
                    None => None,
                };
                let c = self.c.wrapping_add(i * self.c_strides.0 + first * self.c_strides.1);
                if self.c_strides.1 == 1 {
                    // SAFETY: neighbours in a row of the tile, the caller's of `run_on`.
                    self.lanes::<S, V>(sums, bias, unsafe { std::slice::from_raw_parts_mut(c, len) });
                    continue;
                }
                let mut near = [T::narrow(T::Acc::ZERO); LANES_MAX];
                for (j, near) in near[..len].iter_mut().enumerate() {
                    // SAFETY: an element of the tile.
                    *near = unsafe { c.add(j * self.c_strides.1).read() };
                }
                self.lanes::<S, V>(sums, bias, &mut near[..len]);
                for (j, near) in near[..len].iter().enumerate() {
                    // SAFETY: an element of the tile.
                    unsafe { c.add(j * self.c_strides.1).write(*near) }
                }
            }
        }
    }

    /// Rows without bias, activation and addition: sums are rounded and stored.
    #[inline(always)]
    fn store_rows<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        for i in 0..self.rows {
            let sums = &self.sums[i * self.sums_row..][..self.cols];
            let c = self.c.wrapping_add(i * self.c_strides.0);
            // SAFETY: a row of the tile, the caller's of `run_on`.
            let c = unsafe { std::slice::from_raw_parts_mut(c, self.cols) };
            let whole = self.cols - self.cols % V::LANES;
            let (c, c_rest) = c.split_at_mut(whole);
            for (sums, c) in sums.chunks_exact(V::LANES).zip(c.chunks_exact_mut(V::LANES)) {
                T::store::<S>(V::load(sums), c);
            }
            if !c_rest.is_empty() {
                T::store::<S>(V::load_partial(&sums[whole..], T::Acc::ZERO), c_rest);
            }
        }
    }

    /// The epilogue of a vector of neighbours in a row; `c` is what they are stored to.
    #[inline(always)]
    fn lanes<S: Isa, V: Vector<Elem = T::Acc>>(&self, sums: V, bias: Option<V>, c: &mut [T])
    where
        T::Acc: Float<Vec<S> = V>,
    {
        // Rounded after each operation, as operations of their own would have stored it.
        let mut value = sums;
        if let Some(bias) = bias {
            value = T::round::<S>(value) + bias;
        }
        if let Some(activation) = self.activation {
            value = activation.apply(T::round::<S>(value));
        }
        if self.write == Write::Accumulate {
            value = T::load::<S>(c) + T::round::<S>(value);
        }
        T::store::<S>(value, c);
    }
}
