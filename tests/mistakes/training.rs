//! Backward passes, hooks, optimizers, schedules, data.

use phalanx::autograd::{
    GradCheck, Options, Result, Slot, backward, backward_inputs, grad, gradcheck, grads1, record, record_none,
};
use phalanx::nn::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Clip, Error, Group, Lamb, Lion, Loader, Muon,
    OneCycle, Optimizer, Parameter, Rmsprop, Rule, Schedule, Sgd, Windows, clip_grad_norm, clip_grad_norm_,
};
use phalanx::{DType, Device, Leaf, Var};

use crate::{Mistake, f, i, leaf, mistakes, of, scope, zeros};

fn parameter(name: &str) -> Parameter {
    Parameter::new(name, zeros(&[2], DType::F32)).unwrap()
}

fn with(rule: impl Rule) -> phalanx::nn::Result<()> {
    rule.init(vec![Group::new(vec![parameter("w")], 0.1)]).map(drop)
}

fn group(lr: f64, decay: f64) -> phalanx::nn::Result<Optimizer<Sgd>> {
    Sgd::default().init(vec![Group::new(vec![parameter("w")], lr).with_weight_decay(decay)])
}

fn step(change: impl Fn(&mut Optimizer<Sgd>)) -> phalanx::nn::Result<()> {
    let w = parameter("w");
    w.set_grad(Some(zeros(&[2], DType::F32)));
    let mut sgd = Sgd::default().init(vec![Group::new(vec![w], 0.1)])?;
    change(&mut sgd);
    sgd.step()
}

fn scaled(scale: f64) -> phalanx::nn::Result<()> {
    group(0.1, 0.0)?.step_scaled(scale)
}

/// A value whose backward pass needs its saved input.
fn square(x: &Var) -> Var {
    x.mul(x).unwrap().sum_all().unwrap()
}

fn cycle(total: u64, pct_start: f64) -> Schedule {
    let (max_lr, div_factor, final_div_factor) = (1.0, 25.0, 1e4);
    Schedule::OneCycle(OneCycle {
        max_lr,
        total,
        pct_start,
        linear: true,
        div_factor,
        final_div_factor,
        three_phase: false,
    })
}

fn loader(batch: usize, rows: std::ops::Range<usize>) -> phalanx::nn::Result<()> {
    let windows = Windows::new((0..100).collect::<Vec<u32>>(), 4, 0)?;
    Loader::new(windows, batch, vec![rows], Device::CPU, 0).next_step().map(drop)
}

pub fn mistakes() -> Vec<Mistake> {
    let mut all = passes();
    all.extend(updates());
    all
}

fn passes() -> Vec<Mistake> {
    mistakes! {
        "backward: | does not require a gradient" => f(&[]).backward();
        "backward: | [2] | one element | backward_with" => leaf(&[2]).mul_scalar(2.0).unwrap().backward();
        "mul: | gradient of [3] | [2]" => leaf(&[2]).mul_scalar(2.0).unwrap().backward_with(f(&[3]));
        "mul: | f64 | f32" => leaf(&[2]).mul_scalar(2.0).unwrap().backward_with(of(&[2], DType::F64));
        "sum: | freed | retain_graph: true" => {
            let y = square(&leaf(&[2]));
            y.backward().unwrap();
            y.backward()
        };
        "leaf: | i64 | floating-point" => Var::leaf(zeros(&[2], DType::I64));
        "mul: | modified in place" => {
            let x = leaf(&[2]);
            let y = square(&x);
            phalanx::kernels::fill_(&mut x.as_leaf().unwrap().tensor(), 3).unwrap();
            y.backward()
        };
        "mul: | gradient of [3] | [2]" => {
            let y = leaf(&[2]).mul_scalar(2.0).unwrap();
            y.on_grad(|_| Ok(Some(f(&[3])))).unwrap();
            y.sum_all().unwrap().backward()
        };
        "the hook's own words" => {
            let y = leaf(&[2]).mul_scalar(2.0).unwrap();
            y.on_grad(|_| Err(phalanx::autograd::Error::Custom("the hook's own words".into()))).unwrap();
            y.sum_all().unwrap().backward()
        };
        "mul: | panicked | oh" => {
            let y = leaf(&[2]).mul_scalar(2.0).unwrap();
            y.on_grad(|_| panic!("oh")).unwrap();
            y.sum_all().unwrap().backward()
        };
        "round: | no derivative | detach" => record_none("round", &[&leaf(&[2])], zeros(&[2], DType::F32));
        "backward: | does not require" => grad(&[(f(&[]), None)], &[&leaf(&[2])], Options::default());
        "backward: | does not require" => backward(&[], Options::default());
        "backward: | [2]" => backward_inputs(&[(leaf(&[2]).mul_scalar(1.0).unwrap(), None)]).map(drop);
        "mine: | got" => {
            struct Wrong;
            impl phalanx::autograd::Backward for Wrong {
                fn backward(&self, _: &phalanx::autograd::Cx<'_>) -> Result<phalanx::autograd::Grads> {
                    grads1(f(&[7]))
                }
            }
            let x = leaf(&[2]);
            record("mine", &[&x], zeros(&[], DType::F32), |_| Ok(Wrong)).unwrap().backward()
        };
        "gradcheck: | f32 | f64" => gradcheck(|v| v[0].tanh(), &[zeros(&[2], DType::F32)], GradCheck::default());
        "gradcheck: | at least one of f64" => gradcheck(|v| v[0].clone().add_scalar(1), &[zeros(&[2], DType::I64)], GradCheck::default());
        "gradcheck: | element" => gradcheck(|v| v[0].detach().tanh(), &[zeros(&[2], DType::F64)], GradCheck::default());
        "set_tensor: | [3] | [2]" => leaf(&[2]).as_leaf().unwrap().set_tensor(zeros(&[3], DType::F32));
        "set_slot: | [3] | [2]" => leaf(&[2]).as_leaf().unwrap().set_slot(Slot::Into(zeros(&[3], DType::F32)));
        "accumulate: | [3] | [2]" => leaf(&[2]).as_leaf().unwrap().accumulate(zeros(&[3], DType::F32));
        "leaf: | bool | floating-point" => Leaf::new(zeros(&[2], DType::Bool), true);
    }
}

fn updates() -> Vec<Mistake> {
    mistakes! {
        "optimizer: | no parameters | at least one" => Sgd::default().init(vec![]).map(drop);
        "optimizer: | no parameters" => Sgd::default().init(vec![Group::new(vec![], 0.1)]).map(drop);
        "optimizer: | \"w\" | scope.child" => Sgd::default().init(vec![Group::new(vec![parameter("w"), parameter("w")], 0.1)]).map(drop);
        "optimizer: | \"w\" came twice" => {
            let w = parameter("w");
            Sgd::default().init(vec![Group::new(vec![w.clone(), w], 0.1)]).map(drop)
        };
        "optimizer, group 0: | learning rate of -1" => group(-1.0, 0.0).map(drop);
        "optimizer, group 0: | learning rate of NaN" => group(f64::NAN, 0.0).map(drop);
        "optimizer, group 0: | learning rate of inf" => group(f64::INFINITY, 0.0).map(drop);
        "optimizer, group 0: | weight decay of -0.1" => group(0.1, -0.1).map(drop);
        "optimizer, group 0: | learning rate of NaN" => step(|sgd| sgd.set_lr(f64::NAN));
        "optimizer, group 0: | learning rate of -1" => step(|sgd| sgd.groups_mut()[0].lr = -1.0);
        "optimizer, group 0: | weight decay of NaN" => step(|sgd| sgd.groups_mut()[0].weight_decay = f64::NAN);
        "step_scaled: | NaN | finite" => scaled(f64::NAN);
        "step_scaled: | inf | finite" => scaled(f64::INFINITY);
        "AdamW: | first beta 1.0 | less than 1" => with(AdamW::default().with_betas(1.0, 0.9));
        "AdamW: | second beta -0.1" => with(AdamW::default().with_betas(0.9, -0.1));
        "Adam: | eps of -1" => with(Adam::default().with_eps(-1.0));
        "Adam: | eps of NaN" => with(Adam::default().with_eps(f64::NAN));
        "Lion: | first beta 2" => with(Lion { betas: (2.0, 0.9) });
        "Sgd: | momentum of -0.9" => with(Sgd { momentum: -0.9, ..Sgd::default() });
        "Sgd: | Nesterov | momentum" => with(Sgd { nesterov: true, ..Sgd::default() });
        "Rmsprop: | alpha of 2" => with(Rmsprop { alpha: 2.0, ..Rmsprop::default() });
        "Rmsprop: | eps of -1" => with(Rmsprop { eps: -1.0, ..Rmsprop::default() });
        "Adagrad: | decay of the rate of -1" => with(Adagrad { lr_decay: -1.0, ..Adagrad::default() });
        "Adadelta: | rho of 2" => with(Adadelta { rho: 2.0, ..Adadelta::default() });
        "Adadelta: | eps of -1" => with(Adadelta { eps: -1.0, ..Adadelta::default() });
        "Lamb: | second beta 1.5 | less than 1" => with(Lamb::default().with_betas(0.9, 1.5));
        "Lamb: | eps of -1" => with(Lamb::default().with_eps(-1.0));
        "Adafactor: | beta2_decay of 0.8 | 0 or less" => with(Adafactor { beta2_decay: 0.8, ..Adafactor::default() });
        "Adafactor: | second eps of -1" => with(Adafactor { eps: (None, -1.0), ..Adafactor::default() });
        "Adafactor: | clip of 0.5 | 1 or more" => with(Adafactor { clip: 0.5, ..Adafactor::default() });
        "Muon: | `w` of shape [2] | AdamW" => with(Muon::default());
        "Adamax: | second beta 1.0 | less than 1" => with(Adamax::default().with_betas(0.9, 1.0));
        "optimizer state: | missing | w.step" => {
            Adam::default().init(vec![Group::new(vec![parameter("w")], 0.1)]).unwrap().load_state_dict(vec![])
        };
        "sgd: | gradient | [3] | [2]" => {
            let w = parameter("w");
            w.set_grad(Some(zeros(&[3], DType::F32)));
            Sgd::default().init(vec![Group::new(vec![w], 0.1)]).unwrap().step()
        };
        "clip_grad_norm: | bound of 0 | more than 0" => clip_grad_norm(&[parameter("w")], 0.0);
        "clip_grad_norm: | bound of NaN" => clip_grad_norm(&[parameter("w")], f64::NAN);
        "clip_grad_norm_: | bound of -1" => clip_grad_norm_(&mut [zeros(&[2], DType::F32)], -1.0, 2.0);
        "clip_grad_norm_: | order 0" => clip_grad_norm_(&mut [zeros(&[2], DType::F32)], 1.0, 0.0);
        "Clip::factor: | bound of -1" => Clip::factor(&zeros(&[], DType::F64), -1.0);
        "Schedule: | step size of 0 | at least 1" => Schedule::Step { lr: 1.0, step_size: 0, gamma: 0.1 }.check();
        "Schedule: | total of steps of 0" => Schedule::Cosine { lr: 1.0, warmup: 0, total: 0, cycles: 0.5, min: 0.0 }.check();
        "Schedule: | share | 2" => cycle(10, 2.0).check();
        "Schedule: | total of steps of 0" => cycle(0, 0.3).check();
        "optimizer, group 0: | NaN" => step(|sgd| sgd.set_lr(cycle(0, 0.3).lr(1)));
        "Windows: | 3 tokens | context of 5" => Windows::new(vec![1, 2, 3], 5, 0);
        "Windows: | context of 0" => Windows::new(vec![1, 2, 3], 0, 0);
        "Loader: | 0 windows | at least 1" => loader(0, 0..0);
        "Loader: | 2..5 | batch of 4" => loader(4, 2..5);
        "w: | at least one site" => parameter("w").with_sites(0);
        "w: | i64" => parameter("w").set_grad_dtype(DType::I64);
        "set_tensor: | [3] | [2]" => parameter("w").set_tensor(zeros(&[3], DType::F32));
        "copy: | [3] | [2]" => parameter("w").load(&zeros(&[3], DType::F32));
        "reshape: | 2" => scope().shard("w", &[3], phalanx::nn::Shard::whole(&[2]), phalanx::nn::Init::ZEROS);
        "captured_step: | cpu:0 | CUDA" => phalanx::nn::CapturedStep::new(Device::CPU, &[], None).map(drop);
        "mul: | i64 | f32" => leaf(&[2]).mul(&i(&[1, 2])).map_err(Error::from);
    }
}
