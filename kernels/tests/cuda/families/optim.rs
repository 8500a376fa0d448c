//! Optimizer steps, and work that is captured once and launched again, which gives what running it again gives.

use phalanx_kernels::optim::{
    Adadelta, Adagrad, Adam, Item, Lion, Numbers, Rmsprop, Sgd, Slice, Step, adadelta_, adagrad_, adam_,
    adamax_, adamw_, lamb_direction_, lion_, optim_state_dtype, rmsprop_, sgd_,
};
use phalanx_kernels::{cast, copy_, embedding_backward_accumulate_, linear, matmul_accumulate_};
use phalanx_tensor::cuda::Graph;
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread};

pub fn cases() -> Vec<Case> {
    let mut all = optim_cases();
    all.extend(captured_cases());
    all
}

type Update = fn(Step<'_>, u64) -> Result<()>;

const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-3, weight_decay: 0.1, step: 0 };
const SGD: Sgd = Sgd { lr: 0.1, momentum: 0.8, dampening: 0.1, nesterov: true, weight_decay: 0.1, step: 0 };
const RMSPROP: Rmsprop =
    Rmsprop { lr: 0.01, alpha: 0.9, eps: 0.1, weight_decay: 0.1, momentum: 0.5, centered: true };

/// Name, state tensors, the step.
const RULES: &[(&str, usize, Update)] = &[
    ("adam", 2, |step, t| adam_(step, Adam { step: t, ..ADAM })),
    ("adamw", 2, |step, t| adamw_(step, Adam { step: t, ..ADAM })),
    ("adamw without decay", 2, |step, t| adamw_(step, Adam { step: t, weight_decay: 0.0, ..ADAM })),
    ("sgd", 0, |step, t| sgd_(step, Sgd { step: t, momentum: 0.0, weight_decay: 0.0, ..SGD })),
    ("sgd with momentum", 1, |step, t| sgd_(step, Sgd { step: t, ..SGD })),
    ("rmsprop", 3, |step, _| rmsprop_(step, RMSPROP)),
    ("rmsprop plain", 1, |step, _| rmsprop_(step, Rmsprop { centered: false, momentum: 0.0, ..RMSPROP })),
    ("adagrad", 1, |step, t| {
        adagrad_(step, Adagrad { lr: 0.1, lr_decay: 0.1, eps: 0.01, weight_decay: 0.1, step: t })
    }),
    ("lion", 1, |step, _| lion_(step, Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 })),
    ("adadelta", 2, |step, _| adadelta_(step, Adadelta { lr: 0.5, rho: 0.9, eps: 0.01, weight_decay: 0.1 })),
    ("lamb", 2, |step, t| lamb_direction_(step, Adam { step: t, ..ADAM })),
    ("adamax", 2, |step, t| adamax_(step, Adam { step: t, ..ADAM })),
];

fn optim_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for &(name, states, update) in RULES {
        for dtype in FLOATS {
            let sizes: &[usize] = &[1, 7, 0, 33, 8, 1024, 9000];
            all.push(Case::new(format!("optim {name} {dtype}"), dtype, move |d| {
                steps(update, states, sizes, dtype, d, Told::Given)
            }));
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        all.push(Case::new(format!("optim 130 tensors of {dtype}"), dtype, move |d| {
            steps(RULES[1].2, 2, &[3; 130], dtype, d, Told::Given)
        }));
        for rule in [1, 3, 5] {
            let (name, states, update) = RULES[rule];
            all.push(Case::new(format!("optim {name} {dtype} told on the device"), dtype, move |d| {
                steps(update, states, &[5, 70], dtype, d, Told::OnDevice)
            }));
        }
    }
    all
}

#[derive(Clone, Copy, PartialEq)]
enum Told {
    Given,
    OnDevice,
}

struct Owned {
    param: Tensor,
    master: Option<Tensor>,
    state: Vec<Tensor>,
}

/// Three steps; the second with gradients in f32, the third with a factor. Parameters are views into one buffer, that begin
/// where no packet does.
fn steps(
    update: Update,
    states: usize,
    sizes: &[usize],
    dtype: DType,
    d: Device,
    told: Told,
) -> Result<Vec<Tensor>> {
    let (wide, mut all, mut start) = (optim_state_dtype(dtype), Vec::new(), 1);
    let buffer = make(&[1 + sizes.iter().sum::<usize>()], dtype, d, spread(1, -2.0, 2.0));
    for (i, &n) in sizes.iter().enumerate() {
        let param =
            if i % 2 == 0 { buffer.narrow(0, start, n)? } else { make(&[n], dtype, d, spread(i, -2.0, 2.0)) };
        start += n;
        let master = (dtype.size() == 2 && i % 3 != 0).then(|| cast(&param, wide)?.copy()).transpose()?;
        let state = (0..states).map(|_| Tensor::zeros(&[n], wide, d)).collect::<Result<_>>()?;
        all.push(Owned { param, master, state });
    }
    for t in 1..=3u64 {
        let grad_dtype = if t == 2 { wide } else { dtype };
        let grads: Vec<_> =
            sizes.iter().map(|&n| make(&[n], grad_dtype, d, spread(t as usize, -1.0, 1.5))).collect();
        let factor = make(&[], wide, d, |_| 0.25);
        let factor = (t == 3).then_some(&factor);
        let mut asked = Vec::new();
        // The CPU, which has no such numbers, gets them as ever.
        if told == Told::OnDevice && d.is_cuda() {
            let step = Step { items: items(&mut all, &grads), factor, numbers: Numbers::Ask(&mut asked) };
            update(step, t)?;
            let numbers = Tensor::from_slice(&asked, &[asked.len()], Device::CPU)?.to_device(d, false)?;
            let step = Step { items: items(&mut all, &grads), factor, numbers: Numbers::OnDevice(&numbers) };
            // Of the rule itself only the structure counts: another step's numbers change nothing.
            update(step, t + 50)?;
        } else {
            update(Step { items: items(&mut all, &grads), factor, numbers: Numbers::Given }, t)?;
        }
    }
    let results = all.into_iter().flat_map(|o| [o.param].into_iter().chain(o.master).chain(o.state));
    Ok(results.chain([buffer]).collect())
}

fn items<'a>(all: &'a mut [Owned], grads: &'a [Tensor]) -> Vec<Item<'a>> {
    let item = |(owned, grad): (&'a mut Owned, &'a Tensor)| Item {
        slice: Slice { param: &mut owned.param, master: owned.master.as_mut(), grad, scale: 0.5 },
        state: &mut owned.state,
    };
    all.iter_mut().zip(grads).map(item).collect()
}

fn captured_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        all.push(Case::new(format!("captured products and indices {dtype}"), dtype, move |d| {
            captured_sums(dtype, d)
        }));
        all.push(Case::new(format!("captured steps of adamw {dtype}"), dtype, move |d| {
            captured_steps(dtype, d)
        }));
    }
    all
}

/// Runs `work` three times; on a GPU the last two are launches of a capture, before each of which `prepare` is called.
fn thrice(
    d: Device,
    mut prepare: impl FnMut(u64) -> Result<()>,
    mut work: impl FnMut(u64) -> Result<()>,
) -> Result<()> {
    prepare(1)?;
    work(1)?;
    let mut graph = d.is_cuda().then(|| Graph::capture(d, || work(50))).transpose()?;
    for t in 2..=3 {
        prepare(t)?;
        match &mut graph {
            Some(graph) => graph.launch(t)?,
            None => work(t)?,
        }
    }
    Ok(())
}

fn captured_sums(dtype: DType, d: Device) -> Result<Vec<Tensor>> {
    let x = make(&[33, 16], dtype, d, spread(1, -1.0, 1.0));
    let (w, b) = (make(&[8, 16], dtype, d, spread(2, -1.0, 1.0)), make(&[8], dtype, d, spread(3, -1.0, 1.0)));
    let index = make(&[33], DType::I64, d, |i| (i * i % 5) as f64);
    let [mut dw, mut table] = [[8, 16], [5, 8]].map(|shape| make(&shape, dtype, d, |_| 0.0));
    thrice(
        d,
        |_| Ok(()),
        |_| {
            let y = linear(&x, &w, Some(&b))?;
            matmul_accumulate_(&mut dw, &y.transpose(0, 1)?, &x)?;
            assert!(embedding_backward_accumulate_(&mut table, &y, &index, None)?);
            Ok(())
        },
    )?;
    Ok(vec![dw, table])
}

fn captured_steps(dtype: DType, d: Device) -> Result<Vec<Tensor>> {
    let mut param = make(&[70], dtype, d, spread(1, -1.0, 1.0));
    let grad = make(&[70], dtype, d, spread(2, -1.0, 1.0));
    let factor = make(&[], DType::F32, d, |_| 0.5);
    let mut state = vec![Tensor::zeros(&[70], DType::F32, d)?, Tensor::zeros(&[70], DType::F32, d)?];
    let rule =
        |step| Adam { lr: 0.1 / step as f64, beta1: 0.9, beta2: 0.99, eps: 1e-3, weight_decay: 0.1, step };
    let mut asked = Vec::new();
    adamw_(Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut asked) }, rule(1))?;
    let numbers = Tensor::zeros(&[asked.len()], DType::F64, d)?;
    let prepare = |t| {
        let mut asked = Vec::new();
        adamw_(Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut asked) }, rule(t))?;
        let told = Tensor::from_slice(&asked, &[asked.len()], Device::CPU)?;
        copy_(&mut numbers.clone(), &told.to_device(d, false)?)
    };
    thrice(d, prepare, |t| {
        let slice = Slice { param: &mut param, master: None, grad: &grad, scale: 1.0 };
        let numbers = if d.is_cuda() { Numbers::OnDevice(&numbers) } else { Numbers::Given };
        let items = vec![Item { slice, state: &mut state }];
        adamw_(Step { items, factor: Some(&factor), numbers }, rule(t))
    })?;
    Ok([param].into_iter().chain(state).collect())
}
