//! What an LSTM does to a row of one step: four gates and the two states, forward and backward.

use crate::simd::{Float, Isa, Kernel, Vector, each};

/// A row of a step: its inputs, and what becomes of them. The gates i, f, g, o lie one after the other.
pub(super) struct Forward<'a, W> {
    /// The gates' shares of the input and of the hidden state.
    pub(super) shares: [&'a [W]; 2],
    pub(super) cell_before: &'a [W],
    pub(super) gates: &'a mut [W],
    pub(super) cell: &'a mut [W],
    pub(super) hidden: &'a mut [W],
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
pub(super) struct Backward<'a, W> {
    /// The gates' values.
    pub(super) gates: &'a [W],
    pub(super) cells: [&'a [W]; 2],
    /// The gradient of the output, and that of the hidden state by way of the next step.
    pub(super) dy: [&'a [W]; 2],
    /// The gradient of the cell, then of the cell before.
    pub(super) dcell: &'a mut [W],
    /// The gradients of the gates' values, then of what they are functions of.
    pub(super) dgates: &'a mut [W],
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
