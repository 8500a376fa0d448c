//! Optimizer updates: one pass over a parameter, its gradient and its state, in place.
//!
//! A rule states what happens to vectors, once; the frame here widens halves, applies the gradient's scale (from
//! clipping or loss scaling), keeps the master copy of a half-precision parameter, splits the work over the
//! device's threads and picks the instruction set. State is kept in the type that is computed in: f64 for f64
//! parameters, else f32.

mod adagrad;
mod adam;
mod lion;
mod rmsprop;
mod sgd;

use phalanx_tensor::{DType, Element, Error, Read, Result, Tensor};

pub use adagrad::{Adagrad, adagrad_};
pub use adam::{Adam, adam_, adamw_};
pub use lion::{Lion, lion_};
pub use rmsprop::{Rmsprop, rmsprop_};
pub use sgd::{Sgd, sgd_};

use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};
use crate::source::BLOCK;
use crate::{check, ops::cast::cast, pointwise::PIECE};

/// What an update works on: any part of a parameter, as long as all tensors have its shape.
pub struct Slice<'a> {
    /// The parameter, contiguous; perhaps a view into a flat buffer.
    pub param: &'a mut Tensor,
    /// Its f32 copy, if the parameter is bf16 or f16 and keeps one: then this is updated, and the parameter gets it
    /// rounded.
    pub master: Option<&'a mut Tensor>,
    /// The gradient, in any floating-point dtype.
    pub grad: &'a Tensor,
    /// What the gradient is multiplied with first.
    pub scale: f64,
}

/// The dtype of the state that belongs to a parameter of `dtype`, and of its master copy.
pub fn optim_state_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// An optimizer's formula, with `N` values of state to an element.
trait Rule<const N: usize>: Copy + Sync {
    /// The new element and state. To be marked `#[inline(always)]`.
    fn eval<V: Vector>(self, p: V, g: V, state: [V; N]) -> (V, [V; N]);
}

/// `x` in every lane.
#[inline(always)]
fn splat<V: Vector>(x: f64) -> V {
    V::splat(V::Elem::from_f64(x))
}

/// `g + decay * p`: weight decay as part of the gradient.
#[inline(always)]
fn decayed<V: Vector>(g: V, p: V, decay: f64) -> V {
    if decay == 0.0 { g } else { p.mul_add(splat(decay), g) }
}

/// Runs `rule` over a slice, in place.
fn update<const N: usize>(
    op: &'static str,
    rule: impl Rule<N>,
    slice: Slice<'_>,
    mut state: [&mut Tensor; N],
) -> Result<()> {
    let Slice { param, mut master, grad, scale } = slice;
    let wide = optim_state_dtype(param.dtype());
    check::float(op, param)?;
    check::float(op, grad)?;
    check::same_device(op, &[param, grad])?;
    check::shape(op, "a gradient", grad, param.shape())?;
    check_layout(op, param)?;
    for own in state.iter().map(|s| &**s).chain(master.as_deref()) {
        check::dtype(op, own, wide)?;
        check::same_device(op, &[param, own])?;
        check::shape(op, "state", own, param.shape())?;
        check_layout(op, own)?;
    }
    let grad = if grad.dtype() == param.dtype() { grad.clone() } else { cast(grad, wide)? }.contiguous()?;
    if param.device().is_meta() {
        param.bump_version();
        state.iter_mut().for_each(|s| s.bump_version());
        master.iter_mut().for_each(|m| m.bump_version());
        return Ok(());
    }
    for_real!(op, param.dtype(), T => run::<T, _, N>(op, rule, param, master, &grad, scale, state))
}

fn check_layout(op: &'static str, written: &Tensor) -> Result<()> {
    if written.is_contiguous() {
        return Ok(());
    }
    let got = format!("strides {:?} for shape {:?}", written.strides(), written.shape());
    Err(Error::shape(op, got, "contiguous parameters and state"))
}

/// The gradient as it is stored: in the parameter's dtype or in the one that is computed in.
enum Gradient<'a, T: Real> {
    Stored(Read<'a, T>),
    Wide(Read<'a, T::Wide>),
}

/// A stretch of all tensors of a slice.
struct Piece<'a, T: Real, const N: usize> {
    start: usize,
    param: &'a mut [T],
    master: Option<&'a mut [T::Wide]>,
    state: [&'a mut [T::Wide]; N],
}

fn run<T: Real, R: Rule<N>, const N: usize>(
    op: &'static str,
    rule: R,
    param: &mut Tensor,
    mut master: Option<&mut Tensor>,
    grad: &Tensor,
    scale: f64,
    state: [&mut Tensor; N],
) -> Result<()> {
    let (at, numel, pool) = (param.offset(), param.numel(), param.device().pool()?);
    let offsets = state.each_ref().map(|s| s.offset());
    let mut opened = Vec::with_capacity(N);
    for tensor in state {
        opened.push(tensor.write::<T::Wide>(op)?);
    }
    let mut states: [&mut [T::Wide]; N] = std::array::from_fn(|_| Default::default());
    for ((slot, write), offset) in states.iter_mut().zip(&mut opened).zip(offsets) {
        *slot = &mut write[offset..offset + numel];
    }
    let master_offset = master.as_ref().map_or(0, |m| m.offset());
    let mut master = master.as_mut().map(|m| m.write::<T::Wide>(op)).transpose()?;
    let mut masters = master.as_mut().map(|m| &mut m[master_offset..master_offset + numel]);
    let gradient = match grad.dtype() == param.dtype() {
        true => Gradient::Stored(grad.read::<T>(op)?),
        false => Gradient::Wide(grad.read::<T::Wide>(op)?),
    };
    let mut param = param.write::<T>(op)?;
    let mut params = &mut param[at..at + numel];
    let mut pieces = Vec::with_capacity(numel.div_ceil(PIECE));
    for start in (0..numel).step_by(PIECE) {
        let len = PIECE.min(numel - start);
        let master = masters.as_mut().map(|m| take_front(m, len));
        let state = states.each_mut().map(|s| take_front(s, len));
        pieces.push(Piece {
            start: grad.offset() + start,
            param: take_front(&mut params, len),
            master,
            state,
        });
    }
    let scale = T::Wide::from_f64(scale);
    pool.for_each_chunk(&mut pieces, 1, |_, piece| {
        piece.iter_mut().for_each(|piece| step(rule, piece, &gradient, scale));
    });
    Ok(())
}

fn take_front<'a, T>(slice: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (front, rest) = std::mem::take(slice).split_at_mut(len);
    *slice = rest;
    front
}

/// One stretch, block by block, so that what is widened stays in the first-level cache.
fn step<T: Real, R: Rule<N>, const N: usize>(
    rule: R,
    piece: &mut Piece<'_, T, N>,
    gradient: &Gradient<'_, T>,
    scale: T::Wide,
) {
    let (mut g_wide, mut p_wide) = ([T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);
    for start in (0..piece.param.len()).step_by(BLOCK) {
        let len = BLOCK.min(piece.param.len() - start);
        let at = piece.start + start;
        let g = match gradient {
            Gradient::Wide(all) => &all[at..at + len],
            Gradient::Stored(all) => match T::as_wide(&all[at..at + len]) {
                Some(wide) => wide,
                None => {
                    g_wide.iter_mut().zip(&all[at..at + len]).for_each(|(to, x)| *to = x.widen());
                    &g_wide[..len]
                }
            },
        };
        let state = piece.state.each_mut().map(|s| &mut s[start..start + len]);
        let stored = &mut piece.param[start..start + len];
        let narrow = |from: &[T::Wide], to: &mut [T]| {
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = T::narrow(x));
        };
        if let Some(master) = &mut piece.master {
            let p = &mut master[start..start + len];
            dispatch(Block { rule, scale, p, g, state });
            narrow(&master[start..start + len], stored);
        } else if let Some(p) = T::as_wide_mut(stored) {
            dispatch(Block { rule, scale, p, g, state });
        } else {
            let p = &mut p_wide[..len];
            p.iter_mut().zip(&*stored).for_each(|(to, x)| *to = x.widen());
            dispatch(Block { rule, scale, p: &mut *p, g, state });
            narrow(p, stored);
        }
    }
}

/// One block: every slice is of one length.
struct Block<'a, T, R, const N: usize> {
    rule: R,
    scale: T,
    p: &'a mut [T],
    g: &'a [T],
    state: [&'a mut [T]; N],
}

impl<T: Float + Element, R: Rule<N>, const N: usize> Kernel for Block<'_, T, R, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let lanes = <T::Vec<S> as Vector>::LANES;
        let whole = self.p.len() / lanes * lanes;
        let scale = T::Vec::<S>::splat(self.scale);
        for i in (0..whole).step_by(lanes) {
            let g = T::Vec::<S>::load(&self.g[i..]) * scale;
            let state = std::array::from_fn(|n| T::Vec::<S>::load(&self.state[n][i..]));
            let (p, state) = self.rule.eval(T::Vec::<S>::load(&self.p[i..]), g, state);
            p.store(&mut self.p[i..]);
            for (to, x) in self.state.iter_mut().zip(state) {
                x.store(&mut to[i..]);
            }
        }
        if whole < self.p.len() {
            let load = |x: &[T]| T::Vec::<S>::load_partial(&x[whole..], T::ONE);
            let state = std::array::from_fn(|n| load(self.state[n]));
            let (p, state) = self.rule.eval(load(self.p), load(self.g) * scale, state);
            p.store_partial(&mut self.p[whole..]);
            for (to, x) in self.state.iter_mut().zip(state) {
                x.store_partial(&mut to[whole..]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
