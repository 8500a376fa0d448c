//! The slow twin of `PowerSgd`: algorithms 1 and 2 of Vogels, Karimireddy and Jaggi (2019) in plain f64 loops, and the hook held
//! against it.

use std::sync::Arc;

use phalanx_nn::Parameters;
use phalanx_parallel::data_parallel::{BucketHook, Ddp, DdpConfig, PowerSgd, PowerSgdConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, RngKey};

use crate::Small;
use crate::power_sgd::{ALL, close, gradients, send, values};

/// A matrix: its rows.
type Rows = Vec<Vec<f64>>;

fn product(a: &Rows, b: &Rows) -> Rows {
    let dot = |row: &Vec<f64>, column: usize| row.iter().zip(b).map(|(x, row)| x * row[column]).sum();
    a.iter().map(|row| (0..b[0].len()).map(|column| dot(row, column)).collect()).collect()
}

fn transposed(a: &Rows) -> Rows {
    (0..a[0].len()).map(|column| a.iter().map(|row| row[column]).collect()).collect()
}

fn sum(a: &Rows, b: &Rows, factor: f64) -> Rows {
    let row = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(x, y)| x + factor * y).collect();
    a.iter().zip(b).map(row).collect()
}

fn sum_of_all(parts: Vec<Rows>) -> Rows {
    parts.into_iter().reduce(|a, b| sum(&a, &b, 1.0)).unwrap()
}

/// Gram and Schmidt's orthonormal columns.
fn orthonormal(a: &Rows) -> Rows {
    let mut columns = transposed(a);
    for i in 0..columns.len() {
        let (done, rest) = columns.split_at_mut(i);
        for other in done {
            let along: f64 = other.iter().zip(&rest[0]).map(|(x, y)| x * y).sum();
            rest[0].iter_mut().zip(other).for_each(|(x, y)| *x -= along * *y);
        }
        let length = rest[0].iter().map(|x| x * x).sum::<f64>().sqrt();
        rest[0].iter_mut().for_each(|x| *x /= length);
    }
    transposed(&columns)
}

/// One parameter's gradients on all ranks.
struct Twin {
    config: PowerSgdConfig,
    /// The parameter.
    number: u64,
    passes: u64,
    q: Option<Rows>,
    /// Each rank's.
    residuals: Vec<Rows>,
}

impl Twin {
    fn new(config: PowerSgdConfig, number: u64) -> Twin {
        Twin { config, number, passes: 0, q: None, residuals: vec![] }
    }

    /// A rank's gradients become the sum that all get.
    fn pass(&mut self, gradients: Vec<Rows>) -> Rows {
        self.passes += 1;
        let (n, m) = (gradients[0].len(), gradients[0][0].len());
        let rank = self.config.rank.min(n).min(m);
        let saves = ((n + m) * rank) as f64 * self.config.min_rate < (n * m) as f64;
        if self.passes <= self.config.start_after || !saves {
            return sum_of_all(gradients);
        }
        let with_residual = |(i, g): (usize, &Rows)| match self.residuals.get(i) {
            Some(residual) => sum(g, residual, 1.0),
            None => g.clone(),
        };
        let all: Vec<Rows> = gradients.iter().enumerate().map(with_residual).collect();
        let q = self.q.take().filter(|_| self.config.warm_start).unwrap_or_else(|| self.random(m, rank));
        let p = orthonormal(&sum_of_all(all.iter().map(|m| product(m, &q)).collect()));
        let each: Vec<Rows> = all.iter().map(|m| product(&transposed(m), &p)).collect();
        if self.config.feedback {
            let left = |(m, q): (&Rows, &Rows)| sum(m, &product(&p, &transposed(q)), -1.0);
            self.residuals = all.iter().zip(&each).map(left).collect();
        }
        let q = sum_of_all(each);
        let sums = product(&p, &transposed(&q));
        self.q = Some(q);
        sums
    }

    /// The numbers in which the hook begins.
    fn random(&self, rows: usize, columns: usize) -> Rows {
        let stream = RngKey { seed: self.config.seed, step: self.passes }.site(self.number);
        let number = |place: usize| {
            let word = stream.block(place as u64 / 4, 0)[place % 4];
            (f64::from(word) + 0.5) / f64::from(1u32 << 31) - 1.0
        };
        (0..rows).map(|row| (0..columns).map(|column| number(row * columns + column)).collect()).collect()
    }
}

/// A gradient's elements as rows of so many.
fn rows(elements: &[f64], columns: usize) -> Rows {
    elements.chunks(columns).map(<[f64]>::to_vec).collect()
}

const PASSES: u64 = 8;

#[test]
fn the_hook_gives_what_the_algorithm_says_in_every_pass() {
    let rank_2 = PowerSgdConfig { rank: 2, ..ALL };
    let configs = [
        rank_2,
        PowerSgdConfig { rank: 1, ..ALL },
        PowerSgdConfig { rank: 4, seed: 11, ..ALL },
        PowerSgdConfig { warm_start: false, ..rank_2 },
        PowerSgdConfig { feedback: false, ..rank_2 },
        PowerSgdConfig { start_after: 3, ..rank_2 },
        PowerSgdConfig { min_rate: 1.0, ..rank_2 },
        PowerSgdConfig { min_rate: 3.0, ..rank_2 },
    ];
    for config in configs {
        for ranks in [1, 2, 3] {
            for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 2e-4)] {
                let got = launch::threads(ranks, |rank| -> Result<Vec<Vec<f64>>> {
                    let hook = PowerSgd::new(config)?;
                    let pass = |pass| send(&hook, &gradients(rank.rank(), pass, dtype), rank.comm());
                    (0..PASSES).map(pass).collect()
                });
                let got = got.unwrap();
                assert!(got.iter().all(|rank| *rank == got[0]), "ranks differ");
                // The parameter's number is 4, see `send`.
                let mut twin = Twin::new(config, 4);
                for (pass, got) in got[0].iter().enumerate() {
                    let all: Vec<Vec<f64>> =
                        (0..ranks).map(|r| values(&gradients(r, pass as u64, dtype)).unwrap()).collect();
                    let matrices = all.iter().map(|own| rows(&own[..108], 9)).collect();
                    let mut wanted = twin.pass(matrices).concat();
                    wanted.extend((108..113).map(|i| all.iter().map(|own| own[i]).sum::<f64>()));
                    close(got, &wanted, tolerance);
                }
            }
        }
    }
}

#[test]
fn the_gradients_of_a_wrapped_model_are_those_of_the_algorithm() {
    let config = PowerSgdConfig { rank: 1, start_after: 1, min_rate: 1.0, ..ALL };
    for bucket_bytes in [1, 60, 1 << 20] {
        let all = launch::threads(3, |rank| -> Result<_> {
            let model = Small::new(rank.device());
            let hook: Arc<dyn BucketHook> = Arc::new(PowerSgd::new(config)?);
            let sizes = DdpConfig { first_bucket_bytes: bucket_bytes, bucket_bytes, ..DdpConfig::default() };
            let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig { hook, ..sizes })?;
            let plain = Small::new(rank.device());
            let (mut own, mut sums) = (Vec::new(), Vec::new());
            for pass in 0..PASSES {
                let seed = 7 * pass + rank.rank() as u64;
                plain.loss(seed, 4, true)?.backward()?;
                ddp.backward(&model.loss(seed, 4, true)?)?;
                own.push(plain.grads());
                sums.push(model.grads());
                plain.zero_grad()?;
                model.zero_grad()?;
            }
            let shapes: Vec<Vec<usize>> =
                model.parameters().iter().map(|p| p.tensor().shape().to_vec()).collect();
            Ok((own, sums, shapes))
        });
        let all = all.unwrap();
        let wide =
            |grad: &Option<Vec<f32>>| -> Vec<f64> { grad.iter().flatten().map(|&x| x.into()).collect() };
        for (number, shape) in all[0].2.iter().enumerate() {
            let mut twin = Twin::new(config, number as u64);
            for pass in 0..PASSES as usize {
                let gradients =
                    all.iter().map(|(own, ..)| rows(&wide(&own[pass][number]), shape[shape.len() - 1]));
                let gradients: Vec<Rows> = gradients.collect();
                // A vector goes whole.
                let wanted = if shape.len() == 1 { sum_of_all(gradients) } else { twin.pass(gradients) };
                let wanted = wanted.concat();
                let size = wanted.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
                all.iter().for_each(|(_, sums, _)| close(&wide(&sums[pass][number]), &wanted, 1e-4 * size));
            }
        }
    }
}
