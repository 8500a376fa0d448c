//! A layer of long short-term memory over all times: one node for all its steps.
//!
//! `x` `[B, T, 4 n]` are the gates' shares of the inputs, `W` is `[4 n, n]`, `b` `[4 n]`; the gates i, f, g, o are
//! stacked. With `s = x[t] + h Wᵀ + b`: `c = sigmoid(f) c + sigmoid(i) tanh(g)`, `h = sigmoid(o) tanh(c)`.
//!
//! Derivative: `ds` of each step from the last to the first, where `dh = dy[t] + ds[t + 1] W`; `dx = ds`, `db` is the
//! sum of its rows, `dW = dsᵀ h` with the hidden states before each step. Saves the outputs, the cells and the gates'
//! values of all times, `W` and the first states. Cells and gates are outputs of the node, so that the derivative can
//! be written with them.
//!
//! Source: Hochreiter and Schmidhuber: Long short-term memory (1997).

use phalanx_kernels as kernels;
use smallvec::SmallVec;

use super::linear::linear_weight_grad;
use super::matmul::rows;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, record_many};

impl Var {
    /// The outputs `[B, T, n]` of an LSTM and its last cell `[B, n]`, of its gates' shares of the inputs, this, `[B, T,
    /// 4 n]`, and of the first hidden state and cell, `[B, n]`. The weight of the hidden state is `[4 n, n]`, its bias
    /// `[4 n]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn lstm(&self, weight: &Var, bias: Option<&Var>, [hidden, cell]: [&Var; 2]) -> Result<(Var, Var)> {
        if self.device().is_cuda() {
            return composed(self, weight, bias, [hidden, cell]);
        }
        begins();
        let states = [hidden.tensor(), cell.tensor()];
        let [output, cells, gates] =
            kernels::lstm(self.tensor(), weight.tensor(), bias.map(Var::tensor), states)?;
        let inputs: SmallVec<[&Var; 5]> = [self, weight, hidden, cell].into_iter().chain(bias).collect();
        let made = [output, cells, gates].into_iter().collect();
        let mut made = record_many("lstm", &inputs, made, |s: &SaveContext<'_>| {
            let before =
                s.needs(1).then(|| Ok::<_, crate::Error>([s.input(2)?, s.output(0)?])).transpose()?;
            Ok(Lstm {
                before,
                weight: s.input(1)?,
                cell: s.input(3)?,
                cells: s.output(1)?,
                gates: s.output(2)?,
                has_bias: bias.is_some(),
            })
        })?;
        let times = self.shape()[1];
        let last = if times == 0 { cell.clone() } else { made[1].select(1, times - 1)? };
        Ok((made.remove(0), last))
    }
}

/// The same as operations of their own.
fn composed(x: &Var, weight: &Var, bias: Option<&Var>, [hidden, cell]: [&Var; 2]) -> Result<(Var, Var)> {
    let (mut h, mut c, mut outputs) = (hidden.clone(), cell.clone(), Vec::new());
    // One node for all times: cutting them out one by one would cost each the gradient of the whole.
    for share in x.split_sizes(&vec![1; x.shape()[1]], 1)? {
        let gates = share.squeeze(&[1])?.add(&h.linear(weight, bias)?)?.chunk(4, 1)?;
        let kept = gates[1].sigmoid()?.mul(&c)?;
        c = kept.add(&gates[0].sigmoid()?.mul(&gates[2].tanh()?)?)?;
        h = gates[3].sigmoid()?.mul(&c.tanh()?)?;
        outputs.push(h.clone());
    }
    match outputs.is_empty() {
        true => Ok((x.narrow(2, 0, hidden.shape()[1])?, c)),
        false => Ok((Var::stack(&outputs, 1)?, c)),
    }
}

struct Lstm {
    /// The first hidden state and the outputs: the hidden states before and after each step.
    before: Option<[SavedVariable; 2]>,
    weight: SavedVariable,
    cell: SavedVariable,
    cells: SavedVariable,
    gates: SavedVariable,
    has_bias: bool,
}

impl Backward for Lstm {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let [weight, cell, cells, gates] =
            [&self.weight, &self.cell, &self.cells, &self.gates].map(|saved| cx.get(saved));
        let (weight, cell, cells, gates) = (weight?, cell?, cells?, gates?);
        let [dx, dhidden, dcell] = match cx.create_graph() {
            true => differentiable(cx, &weight, &cell, [&cells, &gates])?,
            false => {
                let given = [0, 1, 2].map(|i| cx.dy_at(i).map(Var::tensor));
                let saved = [cells.tensor(), gates.tensor()];
                kernels::lstm_backward(given, weight.tensor(), cell.tensor(), saved)?.map(Var::new)
            }
        };
        let (sums, mut dweight) = (rows(&dx)?, None);
        if let Some([first, output]) = self.before.as_ref().filter(|_| cx.needs(1)) {
            let (first, output) = (cx.get(first)?.unsqueeze(1)?, cx.get(output)?);
            let times = output.shape()[1];
            let (first, later) = (first.narrow(1, 0, times.min(1))?, times.saturating_sub(1));
            let before = Var::cat(&[first, output.narrow(1, 0, later)?], 1)?;
            dweight = linear_weight_grad(cx, 1, &sums, &rows(&before)?)?;
        }
        let mut grads: Grads = [None, dweight, Some(dhidden), Some(dcell)].into_iter().collect();
        if self.has_bias {
            grads.push(cx.needs(4).then(|| sums.sum(&[0], false)).transpose()?);
        }
        grads[0] = Some(dx);
        Ok(grads)
    }
}

/// The gradients of x and of the first states with a graph of their own.
fn differentiable(cx: &Cx<'_>, weight: &Var, cell: &Var, [cells, gates]: [&Var; 2]) -> Result<[Var; 3]> {
    let (times, zero) = (cells.shape()[1], cell.mul_scalar(0.0)?);
    let (mut dh, mut dc, mut all) = (zero.clone(), zero, Vec::new());
    let plus = |x: Var, more: Option<Var>| more.map_or(Ok(x.clone()), |more| x.add(&more));
    let given = |i: usize, t: usize| cx.dy_at(i).map(|dy| dy.select(1, t)).transpose();
    for t in (0..times).rev() {
        let values = gates.select(1, t)?.chunk(4, 1)?;
        let more = given(2, t)?.map(|more| more.chunk(4, 1)).transpose()?;
        let before = if t == 0 { cell.clone() } else { cells.select(1, t - 1)? };
        let dy = plus(dh, given(0, t)?)?;
        let bent = cells.select(1, t)?.tanh()?;
        let through = dy.mul(&values[3])?.mul(&bent.square()?.rsub_scalar(1.0)?)?;
        dc = plus(dc, given(1, t)?)?.add(&through)?;
        let made = [dc.mul(&values[2])?, dc.mul(&before)?, dc.mul(&values[0])?, dy.mul(&bent)?];
        let mut sums = Vec::with_capacity(4);
        for (gate, made) in made.into_iter().enumerate() {
            let (made, value) = (plus(made, more.as_ref().map(|more| more[gate].clone()))?, &values[gate]);
            let slope = match gate {
                2 => value.square()?.rsub_scalar(1.0)?,
                _ => value.mul(&value.rsub_scalar(1.0)?)?,
            };
            sums.push(made.mul(&slope)?);
        }
        all.push(Var::cat(&sums, 1)?);
        dh = all[all.len() - 1].matmul(weight)?;
        dc = dc.mul(&values[1])?;
    }
    all.reverse();
    let dx = if all.is_empty() { gates.clone() } else { Var::stack(&all, 1)? };
    Ok([dx, dh, dc])
}

#[cfg(test)]
mod tests {
    use super::composed;
    use crate::ops::testing::check_twice;
    use crate::{Options, Var, grad};

    #[test]
    fn first_and_second_derivatives_hold() {
        for [batch, times, n] in [[1, 1, 1], [2, 3, 2]] {
            let state = [batch, n];
            let shapes = [&[batch, times, 4 * n][..], &[4 * n, n], &state, &state, &[4 * n]];
            check_twice(&shapes, |v| {
                let (output, last) = v[0].lstm(&v[1], Some(&v[4]), [&v[2], &v[3]])?;
                output.sum(&[1], false)?.mul(&last)
            });
            check_twice(&shapes[..4], |v| Ok(v[0].lstm(&v[1], None, [&v[2], &v[3]])?.0));
            check_twice(&shapes[..4], |v| Ok(v[0].lstm(&v[1], None, [&v[2], &v[3]])?.1));
        }
    }

    #[test]
    fn one_node_gives_what_many_give() {
        let value = |shape: &[usize], salt: f64| {
            let numbers: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * salt).sin()).collect();
            let tensor = phalanx_tensor::Tensor::from_slice(&numbers, shape, phalanx_tensor::Device::CPU);
            Var::leaf(tensor.unwrap()).unwrap()
        };
        let [x, w, h, c, b] = [
            value(&[3, 5, 28], 0.7),
            value(&[28, 7], 1.3),
            value(&[3, 7], 0.4),
            value(&[3, 7], 2.1),
            value(&[28], 0.9),
        ];
        let gradients = |(output, last): (Var, Var), create_graph: bool| {
            let loss = output.square().unwrap().sum_all().unwrap().add(&last.sum_all().unwrap()).unwrap();
            let options = Options { create_graph, ..Options::default() };
            grad(&[(loss, None)], &[&x, &w, &h, &c, &b], options).unwrap()
        };
        let many = gradients(composed(&x, &w, Some(&b), [&h, &c]).unwrap(), false);
        for create_graph in [false, true] {
            let one = gradients(x.lstm(&w, Some(&b), [&h, &c]).unwrap(), create_graph);
            for (one, many) in one.into_iter().zip(&many) {
                let [one, many] = [one, many.clone()].map(|d| d.unwrap().to_vec::<f64>().unwrap());
                assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() < 1e-12));
            }
        }
        let none = x.narrow(1, 0, 0).unwrap();
        let (output, last) = none.lstm(&w, None, [&h, &c]).unwrap();
        assert_eq!((output.shape(), last.shape()), (&[3, 0, 7][..], &[3, 7][..]));
    }
}
