//! An optimizer's rule over one item on a CPU: pieces for the pool's threads, blocks for the L1 cache.

use phalanx_tensor::{Element, Read, Result, Tensor};

use super::Rule;
use crate::block_reader::BLOCK;
use crate::pointwise::PIECE;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, Vector, dispatch, each};

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

/// [`Rule::eval`] over a block, as a trait object, so that the code around it is compiled once and not for
/// every rule.
type Apply<'a, T, const N: usize> = &'a (dyn Fn(RuleBlock<'_, T, N>) + Sync);

/// One item's update.
pub(super) fn run<T: Real, R: Rule<N>, const N: usize>(
    op: &'static str,
    rule: R,
    param: &mut Tensor,
    master: Option<&mut Tensor>,
    grad: &Tensor,
    scale: f64,
    state: [&mut Tensor; N],
) -> Result<()> {
    let apply = |block: RuleBlock<'_, T::Wide, N>| dispatch(Ruled { rule, block });
    run_by::<T, N>(op, &apply, param, master, grad, scale, state)
}

fn run_by<T: Real, const N: usize>(
    op: &'static str,
    apply: Apply<'_, T::Wide, N>,
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
        piece.iter_mut().for_each(|piece| step(apply, piece, &gradient, scale));
    });
    Ok(())
}

fn take_front<'a, T>(slice: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (front, rest) = std::mem::take(slice).split_at_mut(len);
    *slice = rest;
    front
}

/// One stretch, block by block, so that widened elements stay in the L1 cache.
fn step<T: Real, const N: usize>(
    apply: Apply<'_, T::Wide, N>,
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
                    T::widen_all(&all[at..at + len], &mut g_wide[..len]);
                    &g_wide[..len]
                }
            },
        };
        let state = piece.state.each_mut().map(|s| &mut s[start..start + len]);
        let stored = &mut piece.param[start..start + len];
        if let Some(master) = &mut piece.master {
            let p = &mut master[start..start + len];
            apply(RuleBlock { scale, p, g, state });
            T::narrow_all(&master[start..start + len], stored);
        } else if let Some(p) = T::as_wide_mut(stored) {
            apply(RuleBlock { scale, p, g, state });
        } else {
            let p = &mut p_wide[..len];
            T::widen_all(stored, p);
            apply(RuleBlock { scale, p: &mut *p, g, state });
            T::narrow_all(p, stored);
        }
    }
}

/// One block: every slice is of one length.
struct RuleBlock<'a, T, const N: usize> {
    scale: T,
    p: &'a mut [T],
    g: &'a [T],
    state: [&'a mut [T]; N],
}

struct Ruled<'a, T, R, const N: usize> {
    rule: R,
    block: RuleBlock<'a, T, N>,
}

impl<T: Float + Element, R: Rule<N>, const N: usize> Kernel for Ruled<'_, T, R, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Ruled { rule, block: mut b } = self;
        let lanes = <T::Vec<S> as Vector>::LANES;
        let whole = b.p.len() / lanes * lanes;
        let scale = T::Vec::<S>::splat(b.scale);
        for i in (0..whole).step_by(lanes) {
            let g = T::Vec::<S>::load(&b.g[i..]) * scale;
            let state = each(|n| T::Vec::<S>::load(&b.state[n][i..]));
            let (p, state) = rule.eval(T::Vec::<S>::load(&b.p[i..]), g, state);
            p.store(&mut b.p[i..]);
            for (to, x) in b.state.iter_mut().zip(state) {
                x.store(&mut to[i..]);
            }
        }
        if whole < b.p.len() {
            let load = |x: &[T]| T::Vec::<S>::load_partial(&x[whole..], T::ONE);
            let state = each(|n| load(b.state[n]));
            let (p, state) = rule.eval(load(b.p), load(b.g) * scale, state);
            p.store_partial(&mut b.p[whole..]);
            for (to, x) in b.state.iter_mut().zip(state) {
                x.store_partial(&mut to[whole..]);
            }
        }
    }
}
