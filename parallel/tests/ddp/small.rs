//! A small model, and runs of it on one device that have the order of additions of several ranks.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::{
    AdamW, Group, Linear, LinearConfig, Module, Optimizer, Parameter, Parameters, Rule, Scope, parameters,
};
use phalanx_parallel::Result;
use phalanx_tensor::{DType, Device, Tensor};

/// Two maps with a bend between them, and one that is seldom used.
pub struct Small {
    a: Linear,
    b: Linear,
    spare: Linear,
}
parameters!(Small { spare, a, b });

impl Small {
    pub fn new(device: Device) -> Small {
        let scope = Scope::new(11, DType::F32, device);
        let linear = |name: &str, from, to| LinearConfig::new(from, to).init(&scope.child(name)).unwrap();
        Small { a: linear("a", 3, 8), b: linear("b", 8, 2), spare: linear("spare", 3, 2) }
    }

    /// The loss over `rows` rows of data that are a function of `seed`; `spare` says whether that part is used too.
    pub fn loss(&self, seed: u64, rows: usize, spare: bool) -> Result<Var> {
        let number = |i: usize| (((i as u64 + 1) * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0;
        let device = self.parameters()[0].device();
        let x: Vec<f32> = (0..rows * 3).map(number).collect();
        let x = Var::from_slice(&x, &[rows, 3], device)?;
        let mut y = self.b.forward(&self.a.forward(&x)?.tanh()?)?;
        if spare {
            y = y.add(&self.spare.forward(&x)?)?;
        }
        let target: Vec<f32> = (0..rows * 2).map(|i| number(i * 31 + 5)).collect();
        let error = y.sub(&Var::from_slice(&target, &[rows, 2], device)?)?;
        Ok(error.mul(&error)?.sum_all()?)
    }

    pub fn optimizer(&self) -> Optimizer<AdamW> {
        AdamW::default().init(Group::decay_matrices(self.parameters(), 1e-2, 0.1)).unwrap()
    }

    /// The values' bytes.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        self.parameters().iter().map(|p| p.tensor().to_bytes().unwrap()).collect()
    }

    pub fn grads(&self) -> Vec<Option<Vec<f32>>> {
        self.parameters().iter().map(|p| p.grad().unwrap().map(|g| g.to_vec().unwrap())).collect()
    }

    pub fn zero_grad(&self) -> Result<()> {
        Ok(self.parameters().iter().try_for_each(Parameter::zero_grad)?)
    }
}

/// Runs `shares` backward one after the other, adds their gradients in order, each times `scale`, and leaves the sums.
pub fn add_shares(model: &Small, scale: f64, shares: impl IntoIterator<Item = impl FnOnce() -> Result<()>>) {
    let parameters = model.parameters();
    let mut sums: Vec<Option<Tensor>> = vec![None; parameters.len()];
    for share in shares {
        share().unwrap();
        for (sum, parameter) in sums.iter_mut().zip(&parameters) {
            let Some(mut grad) = parameter.take_grad().unwrap() else { continue };
            if scale != 1.0 {
                kernels::scale_(&mut grad, scale).unwrap();
            }
            match sum {
                Some(sum) => kernels::accumulate_(sum, &grad).unwrap(),
                None => *sum = Some(grad),
            }
        }
    }
    parameters.iter().zip(sums).for_each(|(parameter, sum)| parameter.set_grad(sum));
}
