//! Optimizers step by step, clipping by the norm, learning rates.

use phalanx::autograd::{Error, Result};
use phalanx::nn::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Group, Lion, OneCycle, Optimizer, Parameter, Rmsprop, Rule,
    Schedule, Sgd, clip_grad_norm_,
};
use phalanx::{Device, Tensor, Var, kernels};

use super::{Call, one};

/// The optim family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    if let Some(name) = call.op.strip_prefix("optim:") {
        return Some(steps(call, rule(call, name)?));
    }
    if let Some(name) = call.op.strip_prefix("lr_scheduler:") {
        return one(lrs(call, schedule(call, name)?));
    }
    (call.op == "clip_grad_norm_").then(|| clip(call))
}

fn rule(call: &Call<'_>, name: &str) -> Option<Box<dyn Rule>> {
    let attrs = call.attrs;
    let betas = |default: (f64, f64)| match attrs.floats("betas").as_deref() {
        Some(&[first, second]) => (first, second),
        _ => default,
    };
    let eps = |default| attrs.float_or("eps", default);
    Some(match name {
        "SGD" => Box::new(Sgd {
            momentum: attrs.float_or("momentum", 0.0),
            dampening: attrs.float_or("dampening", 0.0),
            nesterov: attrs.bool_or("nesterov", false),
        }),
        "Adam" => Box::new(Adam { betas: betas((0.9, 0.999)), eps: eps(1e-8) }),
        "AdamW" => Box::new(AdamW { betas: betas((0.9, 0.999)), eps: eps(1e-8) }),
        "RMSprop" => Box::new(Rmsprop {
            alpha: attrs.float_or("alpha", 0.99),
            eps: eps(1e-8),
            momentum: attrs.float_or("momentum", 0.0),
            centered: attrs.bool_or("centered", false),
        }),
        "Adagrad" => Box::new(Adagrad {
            lr_decay: attrs.float_or("lr_decay", 0.0),
            initial_accumulator_value: attrs.float_or("initial_accumulator_value", 0.0),
            eps: eps(1e-10),
        }),
        "Adadelta" => Box::new(Adadelta { rho: attrs.float_or("rho", 0.9), eps: eps(1e-6) }),
        "Adamax" => Box::new(Adamax { betas: betas((0.9, 0.999)), eps: eps(1e-8) }),
        "Lion" => Box::new(Lion { betas: betas((0.9, 0.99)) }),
        _ => return None,
    })
}

/// All parameters after each step.
fn steps(call: &Call<'_>, rule: Box<dyn Rule>) -> Result<Vec<Var>> {
    let (lr, weight_decay) = match call.op {
        "optim:AdamW" => (1e-3, 1e-2),
        "optim:Adam" | "optim:SGD" => (1e-3, 0.0),
        "optim:Lion" => (1e-4, 0.0),
        _ => (1e-2, 0.0),
    };
    let weight_decay = call.attrs.float_or("weight_decay", weight_decay);
    let (lr, lrs) = (call.attrs.float_or("lr", lr), call.attrs.floats("lrs"));
    let named = |(i, var): (usize, &Var)| Ok(Parameter::new(format!("{i}"), var.tensor().copy()?)?);
    let parameters = call.list("params").iter().enumerate().map(named).collect::<Result<Vec<_>>>()?;
    let group = Group::new(parameters.clone(), lr).with_weight_decay(weight_decay);
    let mut optimizer = Optimizer::new(rule, vec![group])?;
    let mut after = Vec::new();
    for t in 0..call.int("steps")? as usize {
        if let Some(lrs) = &lrs {
            optimizer.set_lr(*lrs.get(t).ok_or_else(|| Error::Custom(format!("no rate for step {t}")))?);
        }
        for (parameter, grad) in parameters.iter().zip(call.list(&format!("grads.{t}"))) {
            parameter.set_grad(Some(grad.into_tensor()));
        }
        optimizer.step()?;
        for parameter in &parameters {
            after.push(Var::new(parameter.tensor().copy()?));
        }
    }
    Ok(after)
}

/// The norm, then the gradients.
fn clip(call: &Call<'_>) -> Result<Vec<Var>> {
    let p = match call.attrs.str_or("norm_type", "") {
        "inf" => f64::INFINITY,
        _ => call.attrs.float_or("norm_type", 2.0),
    };
    let max_norm = call.attrs.float("max_norm").ok_or_else(|| Error::Custom("no max_norm".into()))?;
    let copy = |grad: &Var| Ok(grad.tensor().copy()?);
    let mut grads = call.list("grads").iter().map(copy).collect::<Result<Vec<Tensor>>>()?;
    let norm = clip_grad_norm_(&mut grads, max_norm, p)?;
    let form = grads.first().map_or((phalanx::DType::F32, Device::CPU), |g| (g.dtype(), g.device()));
    let norm = kernels::full(&[], norm, form.0, form.1)?;
    Ok([norm].into_iter().chain(grads).map(Var::new).collect())
}

fn schedule(call: &Call<'_>, name: &str) -> Option<Schedule> {
    let attrs = call.attrs;
    let count = |name| attrs.int_or(name, 0) as u64;
    let base = || attrs.float_or("base_lr", 0.0);
    Some(match name {
        "StepLR" => {
            Schedule::Step { lr: base(), step_size: count("step_size"), gamma: attrs.float_or("gamma", 0.1) }
        }
        "get_cosine_schedule_with_warmup" => Schedule::Cosine {
            lr: base(),
            warmup: count("num_warmup_steps"),
            total: count("num_training_steps"),
            cycles: attrs.float_or("num_cycles", 0.5),
            min: 0.0,
        },
        "OneCycleLR" => Schedule::OneCycle(OneCycle {
            max_lr: attrs.float_or("max_lr", 0.0),
            total: count("total_steps"),
            pct_start: attrs.float_or("pct_start", 0.3),
            linear: attrs.str_or("anneal_strategy", "cos") == "linear",
            div_factor: attrs.float_or("div_factor", 25.0),
            final_div_factor: attrs.float_or("final_div_factor", 1e4),
            three_phase: attrs.bool_or("three_phase", false),
        }),
        _ => return None,
    })
}

/// The rate of each step.
fn lrs(call: &Call<'_>, schedule: Schedule) -> Result<Var> {
    let lrs: Vec<f64> = (0..call.int("steps")? as u64).map(|step| schedule.lr(step)).collect();
    Var::from_slice(&lrs, &[lrs.len()], Device::CPU)
}
