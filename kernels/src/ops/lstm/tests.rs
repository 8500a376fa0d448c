//! An LSTM held against its formula, and its gradients against differences.

use phalanx_tensor::{DType, Device, Tensor};

use super::{lstm, lstm_backward};
use crate::ops::{full, linear};
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

struct Case {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    states: [Tensor; 2],
}

fn case([batch, times, n]: [usize; 3], dtype: DType) -> Case {
    Case {
        x: make(&[batch, times, 4 * n], dtype, &floats(-2.0, 2.0)),
        weight: make(&[4 * n, n], dtype, &floats(-0.5, 0.7)),
        bias: make(&[4 * n], dtype, &floats(-1.0, 0.3)),
        states: [make(&[batch, n], dtype, &floats(-1.0, 1.0)), make(&[batch, n], dtype, &floats(-0.4, 2.0))],
    }
}

impl Case {
    fn run(&self) -> [Tensor; 3] {
        lstm(&self.x, &self.weight, Some(&self.bias), [&self.states[0], &self.states[1]]).unwrap()
    }

    /// The outputs and the cells of all times, in f64.
    fn plain(&self) -> [Vec<f64>; 2] {
        let [batch, times, n] = [self.x.shape()[0], self.x.shape()[1], self.weight.shape()[1]];
        let (x, w, b) = (values(&self.x), values(&self.weight), values(&self.bias));
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mut all = [vec![0.0; batch * times * n], vec![0.0; batch * times * n]];
        for row in 0..batch {
            let mut state = self.states.each_ref().map(|s| values(s)[row * n..][..n].to_vec());
            for t in 0..times {
                let gate = |k: usize| {
                    let own: f64 = (0..n).map(|j| w[k * n + j] * state[0][j]).sum();
                    x[(row * times + t) * 4 * n + k] + own + b[k]
                };
                let gates: Vec<f64> = (0..4 * n).map(gate).collect();
                for j in 0..n {
                    let c = sigmoid(gates[n + j]) * state[1][j] + sigmoid(gates[j]) * gates[2 * n + j].tanh();
                    state[1][j] = c;
                    state[0][j] = sigmoid(gates[3 * n + j]) * c.tanh();
                }
                all.iter_mut()
                    .zip(&state)
                    .for_each(|(all, s)| all[(row * times + t) * n..][..n].copy_from_slice(s));
            }
        }
        all
    }
}

const SIZES: [[usize; 3]; 6] = [[1, 1, 1], [2, 3, 7], [3, 5, 33], [1, 2, 129], [0, 2, 3], [40, 2, 64]];

#[test]
fn equals_its_formula_in_every_dtype() {
    for dtype in FLOATS {
        for sizes in SIZES {
            let case = case(sizes, dtype);
            let ([output, cells, _], [want, want_cells]) = (case.run(), case.plain());
            let tolerance = tolerance(dtype) * 20.0;
            values(&output).iter().zip(&want).for_each(|(&got, &want)| assert_close(got, want, tolerance));
            values(&cells)
                .iter()
                .zip(&want_cells)
                .for_each(|(&got, &want)| assert_close(got, want, tolerance));
        }
    }
}

#[test]
fn backward_gives_the_slopes_of_the_formula() {
    for sizes @ [batch, times, n] in [[1, 1, 1], [2, 3, 7], [2, 4, 17]] {
        let case = case(sizes, DType::F64);
        let [_, cells, gates] = case.run();
        let dy = make(&[batch, times, n], DType::F64, &floats(-1.0, 1.0));
        let dcells = make(&[batch, times, n], DType::F64, &floats(-1.0, 2.0));
        let given = [Some(&dy), Some(&dcells), None];
        let got = lstm_backward(given, &case.weight, &case.states[1], [&cells, &gates]).unwrap();
        let (dy, dcells) = (values(&dy), values(&dcells));
        let loss = |case: &Case| -> f64 {
            let dot = |y: Vec<f64>, dy: &[f64]| y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>();
            let [output, cells] = case.plain();
            dot(output, &dy) + dot(cells, &dcells)
        };
        for (which, got) in got.iter().enumerate() {
            for (i, got) in values(got).into_iter().enumerate().step_by(5) {
                let at = |step: f64| {
                    let mut moved = Case {
                        x: case.x.clone(),
                        weight: case.weight.clone(),
                        bias: case.bias.clone(),
                        states: case.states.clone(),
                    };
                    let input = [&case.x, &case.states[0], &case.states[1]][which];
                    let mut all = values(input);
                    all[i] += step;
                    let input = Tensor::from_slice(&all, input.shape(), Device::CPU).unwrap();
                    match which {
                        0 => moved.x = input,
                        1 => moved.states[0] = input,
                        _ => moved.states[1] = input,
                    }
                    loss(&moved)
                };
                assert_close(got, (at(1e-5) - at(-1e-5)) / 2e-5, 1e-7);
            }
        }
    }
}

#[test]
fn strides_threads_and_other_rows_change_no_bit() {
    for dtype in FLOATS {
        let case = case([40, 3, 65], dtype);
        let want = case.run().map(|t| values(&t));
        let device = Device::Cpu(932);
        device.set_threads(3).unwrap();
        let there = |t: &Tensor| {
            let transposed =
                t.transpose(0, -1).unwrap().contiguous().unwrap().to_device(device, true).unwrap();
            transposed.transpose(0, -1).unwrap()
        };
        let moved = Case {
            x: there(&case.x),
            weight: there(&case.weight),
            bias: case.bias.to_device(device, true).unwrap(),
            states: case.states.each_ref().map(there),
        };
        let got = moved.run();
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(&values(&got.to_device(Device::CPU, true).unwrap()), want);
        }
        let part = |t: &Tensor| t.narrow(0, 7, 2).unwrap();
        let few = Case { x: part(&case.x), states: case.states.each_ref().map(part), ..case };
        let (few, n) = (few.run(), want[0].len() / 40);
        assert_eq!(values(&few[0]), want[0][7 * n..][..2 * n]);
        let dy = full(&[2, 3, 65], 0.5, dtype, Device::CPU).unwrap();
        let whole = full(&[40, 3, 65], 0.5, dtype, device).unwrap();
        let [weight, cell] = [&moved.weight, &moved.states[1]];
        let all = lstm_backward([Some(&whole), None, None], weight, cell, [&got[1], &got[2]]).unwrap();
        let weight = weight.to_device(Device::CPU, true).unwrap();
        let cell = part(&cell.to_device(Device::CPU, true).unwrap());
        let parts = lstm_backward([Some(&dy), None, None], &weight, &cell, [&few[1], &few[2]]).unwrap();
        for (part_of, all) in parts.iter().zip(&all) {
            let all = values(&all.to_device(Device::CPU, true).unwrap());
            let n = all.len() / 40;
            assert_eq!(values(part_of), all[7 * n..][..2 * n]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let case = case([2, 3, 4], DType::F32);
    let [hidden, cell] = &case.states;
    let short = case.x.narrow(2, 0, 12).unwrap();
    let message = lstm(&short, &case.weight, None, [hidden, cell]).unwrap_err().to_string();
    assert!(message.contains("lstm") && message.contains("[2, 3, 16]"), "{message}");
    assert!(lstm(&case.x, &case.weight, Some(hidden), [hidden, cell]).is_err());
    assert!(lstm(&case.x, hidden, None, [hidden, cell]).is_err());
    let share = linear(hidden, &case.weight, None).unwrap();
    assert!(lstm(&case.x, &case.weight, None, [hidden, &share]).is_err());
}
