//! [`lstm`]: a layer of long short-term memory over all times. The caller has multiplied the inputs with their weight before: `x` holds each gate's
//! part of `x W' + b`.
//!
//! With `s = x[t] + h W' + b` for the gates i, f, g, o: `c = sigmoid(f) c + sigmoid(i) tanh(g)`, `h = sigmoid(o) tanh(c)`.
//! Each step is a product, the same as [`crate::linear`]'s, and one pass over the rows of the batch. Halves are computed in
//! f32; gates and states are rounded once a step. Backward goes from the last step to the first.
//!
//! Source: Hochreiter and Schmidhuber: Long short-term memory (1997).

use phalanx_tensor::{Error, Pool, Result, Tensor};

use crate::gemm::{Epilogue, GemmElem, MatMut, MatRef, gemm_again};
use crate::pointwise::PIECE;
use crate::real::{Real, for_real};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, Vector, dispatch, each};
use crate::{check, flops};

const OP: &str = "lstm";
/// Elements of a state that a thread takes at least: each has five functions.
const STATES: usize = PIECE / 8;
/// From so many time steps on, the weight is transposed once before.
const TRANSPOSED_TIMES: usize = 4;

/// The outputs `[B, T, hidden]`, the cells of all times, `[B, T, hidden]`, and the gates' values, `[B, T, 4 hidden]`, of `x
/// [B, T, 4 hidden]`, `weight [4 hidden, hidden]`, `bias [4 hidden]` and the first states `hidden` and `cell`, `[B, hidden]`.
///
/// # Errors
/// If shapes do not fit, the dtype is no floating-point one, dtypes or devices differ, or the device is a GPU.
pub fn lstm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    [hidden, cell]: [&Tensor; 2],
) -> Result<[Tensor; 3]> {
    let sizes = Sizes::of(x, weight, &[hidden, cell])?;
    if let Some(bias) = bias {
        check::same(OP, &[x, bias])?;
        check::shape(OP, "a bias", bias, &[sizes.gates()])?;
    }
    let [x, hidden, cell] = [x, hidden, cell].map(Tensor::contiguous);
    let (x, hidden, cell, bias) = (x?, hidden?, cell?, bias.map(Tensor::contiguous).transpose()?);
    // As steps read it, if they are many.
    let mut columns = weight.transpose(0, 1)?;
    if sizes.times >= TRANSPOSED_TIMES {
        columns = columns.contiguous()?;
    }
    let empty = |n: usize| Tensor::empty_for(OP, &[sizes.batch, sizes.times, n], x.dtype(), x.device());
    let [mut output, mut cells, mut gates] =
        [empty(sizes.hidden)?, empty(sizes.hidden)?, empty(sizes.gates())?];
    flops::count_multiply_adds([sizes.batch * sizes.times * sizes.gates(), sizes.hidden]);
    if !x.device().is_meta() && output.numel() > 0 {
        let inputs = [&x, &columns, &hidden, &cell];
        let outputs = [&mut output, &mut cells, &mut gates];
        for_real!(OP, x.dtype(), T => sizes.forward::<T>(inputs, bias.as_ref(), outputs))?;
    }
    Ok([output, cells, gates])
}

/// The gradients of [`lstm`]'s `x`, `hidden` and `cell`, given those of what it gave, where there are any. `before` is the first
/// cell; `cells` and `gates` are what [`lstm`] gave. The gradient of the bias is the sum of the first over batch and times, that
/// of the weight its product with the hidden states before.
///
/// # Errors
/// As [`lstm`].
pub fn lstm_backward(
    [dy, dcells, dgates]: [Option<&Tensor>; 3],
    weight: &Tensor,
    before: &Tensor,
    [cells, gates]: [&Tensor; 2],
) -> Result<[Tensor; 3]> {
    let sizes = Sizes::of(gates, weight, &[before])?;
    check::same(OP, &[gates, cells])?;
    for (gradient, of) in [(dy, cells), (dcells, cells), (dgates, gates)] {
        if let Some(gradient) = gradient {
            check::same(OP, &[gates, gradient])?;
            check::shape(OP, "a gradient", gradient, of.shape())?;
        }
    }
    let dy = dy.map_or_else(|| cells.zeros_like(), Tensor::contiguous)?;
    let dcells = dcells.map(Tensor::contiguous).transpose()?;
    let (weight, before) = (weight.contiguous()?, before.contiguous()?);
    let mut dx = dgates.map_or_else(|| gates.zeros_like(), Tensor::copy)?;
    let [mut dhidden, mut dcell] = [before.empty_like()?, before.empty_like()?];
    flops::count_multiply_adds([sizes.batch * sizes.times * sizes.hidden, sizes.gates()]);
    if !dx.device().is_meta() && dy.numel() > 0 {
        let inputs = [&dy, &weight, &before, cells, gates];
        let outputs = [&mut dx, &mut dhidden, &mut dcell];
        for_real!(OP, gates.dtype(), T => sizes.backward::<T>(inputs, dcells.as_ref(), outputs))?;
    }
    Ok([dx, dhidden, dcell])
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    times: usize,
    hidden: usize,
}

impl Sizes {
    fn of(x: &Tensor, weight: &Tensor, states: &[&Tensor]) -> Result<Sizes> {
        check::float(OP, x)?;
        check::same(OP, &[x, weight])?;
        let &[gates, hidden] = weight.shape() else {
            return Err(Error::shape(
                OP,
                format!("a weight of shape {:?}", weight.shape()),
                "[4 hidden, hidden]",
            ));
        };
        let &[batch, times, _] = x.shape() else {
            return Err(Error::shape(OP, format!("an input of shape {:?}", x.shape()), "[B, T, 4 hidden]"));
        };
        check::shape(OP, "an input", x, &[batch, times, gates])?;
        check::shape(OP, "a weight", weight, &[4 * hidden, hidden])?;
        for state in states {
            check::same(OP, &[x, state])?;
            check::shape(OP, "a state", state, &[batch, hidden])?;
        }
        if x.device().is_cuda() {
            let why = "it is made of other operations there".into();
            return Err(Error::Unsupported { op: OP, device: x.device(), why });
        }
        Ok(Sizes { batch, times, hidden })
    }

    fn gates(&self) -> usize {
        4 * self.hidden
    }

    fn forward<T: GemmElem>(
        &self,
        inputs: [&Tensor; 4],
        bias: Option<&Tensor>,
        [output, cells, gates]: [&mut Tensor; 3],
    ) -> Result<()> {
        let (Sizes { batch, times, hidden: n }, pool) = (*self, output.device().pool()?);
        let _use = output.device().ledger()?.scratch_of((batch + n) * 4 * n * size_of::<T>());
        let read = |t: &Tensor| t.offset()..t.offset() + t.numel();
        let [x, weight, hidden, cell] = inputs;
        let (x_read, weight_read) = (x.read::<T>(OP)?, weight.read::<T>(OP)?);
        let (hidden_read, cell_read) = (hidden.read::<T>(OP)?, cell.read::<T>(OP)?);
        let (x, [row, column]) = (&x_read[read(x)], [weight.strides()[0], weight.strides()[1]]);
        let weight = MatRef::new(&weight_read[weight.offset()..], n, 4 * n, row, column);
        let (hidden, cell) = (&hidden_read[read(hidden)], &cell_read[read(cell)]);
        let bias = bias.map(|bias| Ok((bias.read::<T>(OP)?, read(bias)))).transpose()?;
        let bias = bias.as_ref().map(|(values, at)| &values[at.clone()]);
        let numel = batch * times * n;
        let (mut output, mut cells, mut gates) =
            (output.write::<T>(OP)?, cells.write::<T>(OP)?, gates.write::<T>(OP)?);
        let (output, cells, gates) = (&mut output[..numel], &mut cells[..numel], &mut gates[..4 * numel]);
        let (mut shares, mut panels) = (vec![T::zeroed(); batch * 4 * n], Vec::new());
        for t in 0..times {
            let before = match t {
                0 => MatRef::row_major(hidden, batch, n),
                _ => MatRef::new(&output[(t - 1) * n..], batch, n, times * n, 1),
            };
            let to = MatMut::row_major(&mut shares, batch, 4 * n);
            gemm_again(&pool, before, weight, to, Epilogue { bias, activation: None }, &mut panels);
            let line = times * n;
            let states = output.chunks_mut(line).zip(cells.chunks_mut(line)).zip(gates.chunks_mut(4 * line));
            self.each_row(&pool, states, |row, ((output, cells), gates)| {
                let (done, cells) = cells.split_at_mut(t * n);
                let shares = [&x[(row * times + t) * 4 * n..], &shares[row * 4 * n..]].map(|s| &s[..4 * n]);
                let cell_before = if t == 0 { &cell[row * n..][..n] } else { &done[(t - 1) * n..] };
                let to = [&mut gates[t * 4 * n..][..4 * n], &mut cells[..n], &mut output[t * n..][..n]];
                forward_row::<T>(shares, cell_before, to);
            });
        }
        Ok(())
    }

    fn backward<T: GemmElem>(
        &self,
        inputs: [&Tensor; 5],
        dcells: Option<&Tensor>,
        [dx, dhidden, dcell]: [&mut Tensor; 3],
    ) -> Result<()> {
        let (Sizes { batch, times, hidden: n }, pool) = (*self, dx.device().pool()?);
        let weights = 4 * n * n * size_of::<T>();
        let _use = dx.device().ledger()?.scratch_of(batch * n * size_of::<T::Wide>() + weights);
        let read = |t: &Tensor| t.offset()..t.offset() + t.numel();
        let [dy, weight, before, cells, gates] = inputs;
        let (dy_read, weight_read, before_read) =
            (dy.read::<T>(OP)?, weight.read::<T>(OP)?, before.read::<T>(OP)?);
        let (cells_read, gates_read) = (cells.read::<T>(OP)?, gates.read::<T>(OP)?);
        let (dy, weight, before) =
            (&dy_read[read(dy)], &weight_read[read(weight)], &before_read[read(before)]);
        let (cells, gates) = (&cells_read[read(cells)], &gates_read[read(gates)]);
        let dcells = dcells.map(|dcells| Ok((dcells.read::<T>(OP)?, read(dcells)))).transpose()?;
        let dcells = dcells.as_ref().map(|(values, at)| &values[at.clone()]);
        let (mut dstate, mut panels) = (vec![T::Wide::ZERO; batch * n], Vec::new());
        let (mut dx, mut dhidden) = (dx.write::<T>(OP)?, dhidden.write::<T>(OP)?);
        let (dx, dhidden) = (&mut dx[..batch * times * 4 * n], &mut dhidden[..batch * n]);
        dhidden.fill(T::zeroed());
        let weight = MatRef::row_major(weight, 4 * n, n);
        for t in (0..times).rev() {
            let next = &*dhidden;
            let states = dx.chunks_mut(times * 4 * n).zip(dstate.chunks_mut(n));
            self.each_row(&pool, states, |row, (dx, dcell)| {
                let at = row * times + t;
                let cell_before = if t == 0 { &before[row * n..][..n] } else { &cells[(at - 1) * n..][..n] };
                let gates = &gates[at * 4 * n..][..4 * n];
                let cells = [cell_before, &cells[at * n..][..n]];
                let dy = [&dy[at * n..][..n], &next[row * n..][..n]];
                if let Some(dcells) = dcells {
                    let more = &dcells[at * n..][..n];
                    dcell.iter_mut().zip(more).for_each(|(to, more)| *to += more.widen());
                }
                backward_row::<T>(gates, cells, dy, dcell, &mut dx[t * 4 * n..][..4 * n]);
            });
            let dgates = MatRef::new(&dx[t * 4 * n..], batch, 4 * n, times * 4 * n, 1);
            let to = MatMut::row_major(dhidden, batch, n);
            gemm_again(&pool, dgates, weight, to, Epilogue::default(), &mut panels);
        }
        T::narrow_all(&dstate, &mut dcell.write::<T>(OP)?[..batch * n]);
        Ok(())
    }

    /// Calls `f` for each row of the batch with its part of what is written.
    fn each_row<P: Send>(
        &self,
        pool: &Pool,
        parts: impl Iterator<Item = P>,
        f: impl Fn(usize, &mut P) + Sync,
    ) {
        if self.batch * self.hidden <= STATES {
            return parts.enumerate().for_each(|(row, mut part)| f(row, &mut part));
        }
        let (rows, mut parts) = (STATES.div_ceil(self.hidden), parts.collect::<Vec<_>>());
        pool.for_each_chunk(&mut parts, rows, |chunk, parts| {
            parts.iter_mut().enumerate().for_each(|(i, part)| f(chunk * rows + i, part));
        });
    }
}

/// Elements in the type that is computed in: themselves, or widened into the front of `scratch`, which is then shorter.
fn wide<'a, T: Real>(x: &'a [T], scratch: &mut &'a mut [T::Wide]) -> &'a [T::Wide] {
    if let Some(wide) = T::as_wide(x) {
        return wide;
    }
    let (front, rest) = std::mem::take(scratch).split_at_mut(x.len());
    *scratch = rest;
    T::widen_all(x, front);
    front
}

fn forward_row<T: Real>(shares: [&[T]; 2], cell_before: &[T], [gates, cell, hidden]: [&mut [T]; 3]) {
    let n = cell.len();
    let narrow = T::as_wide(&[]).is_none();
    with_scratch(if narrow { 15 * n } else { 0 }, |scratch: &mut [T::Wide]| {
        let mut scratch = &mut *scratch;
        let shares = shares.map(|share| wide(share, &mut scratch));
        let cell_before = wide(cell_before, &mut scratch);
        if !narrow
            && let (Some(gates), Some(cell), Some(hidden)) =
                (T::as_wide_mut(gates), T::as_wide_mut(cell), T::as_wide_mut(hidden))
        {
            return dispatch(Forward { shares, cell_before, gates, cell, hidden });
        }
        let (gates_wide, rest) = scratch.split_at_mut(4 * n);
        let (cell_wide, hidden_wide) = rest.split_at_mut(n);
        dispatch(Forward {
            shares,
            cell_before,
            gates: &mut *gates_wide,
            cell: &mut *cell_wide,
            hidden: &mut *hidden_wide,
        });
        T::narrow_all(gates_wide, gates);
        T::narrow_all(cell_wide, cell);
        T::narrow_all(hidden_wide, hidden);
    });
}

fn backward_row<T: Real>(
    gates: &[T],
    cells: [&[T]; 2],
    dy: [&[T]; 2],
    dcell: &mut [T::Wide],
    dgates: &mut [T],
) {
    let n = dcell.len();
    let narrow = T::as_wide(&[]).is_none();
    with_scratch(if narrow { 12 * n } else { 0 }, |scratch: &mut [T::Wide]| {
        let mut scratch = &mut *scratch;
        let gates = wide(gates, &mut scratch);
        let cells = cells.map(|cell| wide(cell, &mut scratch));
        let dy = dy.map(|dy| wide(dy, &mut scratch));
        if let Some(dgates) = T::as_wide_mut(dgates) {
            return dispatch(Backward { gates, cells, dy, dcell, dgates });
        }
        T::widen_all(dgates, scratch);
        dispatch(Backward { gates, cells, dy, dcell, dgates: &mut *scratch });
        T::narrow_all(scratch, dgates);
    });
}

/// A row of a step: its inputs, and what becomes of them. The gates i, f, g, o lie one after the other.
struct Forward<'a, W> {
    /// The gates' shares of the input and of the hidden state.
    shares: [&'a [W]; 2],
    cell_before: &'a [W],
    gates: &'a mut [W],
    cell: &'a mut [W],
    hidden: &'a mut [W],
}

impl<W: Float> Kernel for Forward<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (n, lanes) = (self.cell.len(), W::Vec::<S>::LANES);
        for (gate, gates) in self.gates.chunks_mut(n).enumerate() {
            let [x, h] = self.shares.map(|share| &share[gate * n..][..n]);
            for at in (0..n).step_by(lanes) {
                let sum = load::<W::Vec<S>>(x, at) + load(h, at);
                store(if gate == 2 { sum.tanh() } else { sum.sigmoid() }, gates, at);
            }
        }
        for at in (0..n).step_by(lanes) {
            let [i, f, g, o] = [0, 1, 2, 3].map(|gate| gate * n).map(|gate| &self.gates[gate..][..n]);
            let kept = load::<W::Vec<S>>(f, at) * load(self.cell_before, at);
            let cell = load::<W::Vec<S>>(i, at).mul_add(load(g, at), kept);
            store(cell, self.cell, at);
            store(load::<W::Vec<S>>(o, at) * cell.tanh(), self.hidden, at);
        }
    }
}

/// A row of a step backward.
struct Backward<'a, W> {
    /// The gates' values.
    gates: &'a [W],
    cells: [&'a [W]; 2],
    /// The gradient of the output, and that of the hidden state by way of the next step.
    dy: [&'a [W]; 2],
    /// The gradient of the cell, then of the cell before.
    dcell: &'a mut [W],
    /// The gradients of the gates' values, then of what they are functions of.
    dgates: &'a mut [W],
}

impl<W: Float> Kernel for Backward<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (n, lanes, one) = (self.dcell.len(), W::Vec::<S>::LANES, W::Vec::<S>::splat(W::ONE));
        let [before, cell] = self.cells;
        for at in (0..n).step_by(lanes) {
            let gates = [0, 1, 2, 3].map(|gate| &self.gates[gate * n..][..n]);
            let [i, f, g, o]: [W::Vec<S>; 4] = each(|gate| load(gates[gate], at));
            let dy = load::<W::Vec<S>>(self.dy[0], at) + load(self.dy[1], at);
            let bent = load::<W::Vec<S>>(cell, at).tanh();
            let dcell = load::<W::Vec<S>>(self.dcell, at) + dy * o * (one - bent * bent);
            let of_before = load::<W::Vec<S>>(before, at);
            let slopes = [i * (one - i), f * (one - f), one - g * g, o * (one - o)];
            let gradients = [dcell * g, dcell * of_before, dcell * i, dy * bent];
            for (gate, dgates) in self.dgates.chunks_mut(n).enumerate().take(4) {
                let dgate = load::<W::Vec<S>>(dgates, at) + gradients[gate];
                store(dgate * slopes[gate], dgates, at);
            }
            store(dcell * f, self.dcell, at);
        }
    }
}

/// The lanes from `at` on.
#[inline(always)]
fn load<V: Vector>(x: &[V::Elem], at: usize) -> V {
    let x = &x[at..];
    if x.len() < V::LANES { V::load_partial(x, V::Elem::ZERO) } else { V::load(x) }
}

#[inline(always)]
fn store<V: Vector>(x: V, to: &mut [V::Elem], at: usize) {
    let to = &mut to[at..];
    if to.len() < V::LANES { x.store_partial(to) } else { x.store(to) }
}

#[cfg(test)]
mod tests;
