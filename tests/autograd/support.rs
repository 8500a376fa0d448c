//! What these tests share: values, operations that tell when they run, and a dropout.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_autograd::{
    Cx, Error, Function, Grads, Leaf, Result, SaveContext, SavedVariable, Var, grads1, grads2, is_recomputing,
};
use phalanx_kernels as kernels;
use phalanx_tensor::{Context, Device, Tensor};

pub fn tensor(values: &[f64], device: Device) -> Tensor {
    Tensor::from_slice(values, &[values.len()], device).unwrap()
}

pub fn leaf(values: &[f64]) -> Var {
    leaf_on(values, Device::CPU)
}

pub fn leaf_on(values: &[f64], device: Device) -> Var {
    Var::leaf(tensor(values, device)).unwrap()
}

pub fn parameter(values: &[f64], device: Device) -> Leaf {
    Leaf::new(tensor(values, device), true).unwrap()
}

/// `n` numbers without a pattern, in (-1, 1), with full mantissas.
pub fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as f64 / u64::MAX as f64 * 2.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn grad_bits(leaf: &Leaf) -> Vec<u64> {
    leaf.grad().unwrap().to_vec::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

pub fn grad_of(var: &Var) -> Vec<f64> {
    var.grad().unwrap().to_vec().unwrap()
}

pub type Journal = Arc<Mutex<Vec<String>>>;

/// The identity, which notes in a journal when it runs.
#[derive(Clone)]
pub struct Note {
    pub name: &'static str,
    pub journal: Journal,
    /// How long its backward waits for that of `after`.
    pub patience: Duration,
    pub after: &'static str,
}

impl Note {
    pub fn new(name: &'static str, journal: &Journal) -> Note {
        Note { name, journal: journal.clone(), patience: Duration::ZERO, after: "" }
    }

    pub fn on(&self, x: &Var) -> Result<Var> {
        Ok(self.clone().apply(&[x])?.remove(0))
    }

    fn note(&self, what: &str) {
        self.journal.lock().unwrap().push(format!("{}:{what}", self.name));
    }
}

impl Function for Note {
    fn name(&self) -> &'static str {
        "note"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.note(if is_recomputing() { "again" } else { "forward" });
        Ok(vec![inputs[0].copy()?])
    }

    fn backward(&self, cx: &Cx<'_>, _: &[SavedVariable]) -> Result<Grads> {
        let (begin, after) = (Instant::now(), format!("{}:backward", self.after));
        while begin.elapsed() < self.patience && !self.journal.lock().unwrap().contains(&after) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.note("backward");
        grads1(cx.dy().clone())
    }
}

/// What was noted, in order, of backward only.
pub fn backwards(journal: &Journal) -> Vec<String> {
    let noted = journal.lock().unwrap();
    noted.iter().filter_map(|n| n.strip_suffix(":backward")).map(str::to_string).collect()
}

/// The identity, whose backward does what it is told.
pub struct Misbehave(pub fn() -> Result<()>);

impl Function for Misbehave {
    fn name(&self) -> &'static str {
        "misbehave"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].copy()?])
    }

    fn backward(&self, cx: &Cx<'_>, _: &[SavedVariable]) -> Result<Grads> {
        (self.0)()?;
        grads1(cx.dy().clone())
    }
}

/// Half of the elements, drawn from the context's key and the site.
pub fn dropout(x: &Var, site: u64) -> Result<Var> {
    let draws = Context::current().rng.site(site);
    let keep = |i: usize| f64::from(draws.block(i as u64, 0)[0] >> 31) * 2.0;
    let mask: Vec<f64> = (0..x.numel()).map(keep).collect();
    x.mul(&Var::from_slice(&mask, x.shape(), x.device())?)
}

/// `x * w`, which adds the gradient of `w` straight into its buffer where that is possible.
pub struct Scale;

impl Function for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![kernels::mul(inputs[0], inputs[1])?])
    }

    fn save(&self, ctx: &SaveContext<'_>) -> Result<Vec<SavedVariable>> {
        Ok(vec![ctx.input(0)?, ctx.input(1)?])
    }

    fn backward(&self, cx: &Cx<'_>, saved: &[SavedVariable]) -> Result<Grads> {
        let dx = cx.needs(0).then(|| cx.dy().mul(&cx.get(&saved[1])?)).transpose()?;
        let product = || kernels::mul(cx.dy().tensor(), cx.get(&saved[0])?.tensor()).map_err(Error::from);
        let direct = cx.accumulate_into(1, |buffer| {
            kernels::accumulate_(buffer, &product()?)?;
            DIRECT.with(|d| d.set(d.get() + 1));
            Ok(true)
        })?;
        let dw = (cx.needs(1) && !direct).then(|| product().map(Var::new)).transpose()?;
        grads2(dx, dw)
    }
}

thread_local! {
    /// How often [`Scale`] wrote to a buffer on this thread.
    pub static DIRECT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

pub fn scale(x: &Var, w: &Var) -> Result<Var> {
    Ok(Scale.apply(&[x, w])?.remove(0))
}
