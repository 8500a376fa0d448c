//! A `meta` device's books equal a CPU's, to the byte and category by category, for whole training steps.

use phalanx::nn::models::{GptConfig, RecomputeMode};
use phalanx::nn::{Adagrad, Adam, AdamW, Group, Lion, Optimizer, Rmsprop, Rule, Sgd};
use phalanx::nn::{Parameters, Result, Scope, grad_norm};
use phalanx::tensor::Category;
use phalanx::{DType, Device, Tensor, Var};

/// Bytes now and at peak: each category, then all.
type Books = Vec<(String, usize, usize)>;

fn books(device: Device) -> Books {
    let ledger = device.ledger().expect("a ledger");
    let mut books: Books = Category::ALL
        .iter()
        .map(|&c| (format!("{c:?}"), ledger.category(c).now, ledger.category(c).peak))
        .collect();
    books.push(("total".into(), ledger.total().now, ledger.total().peak));
    books
}

/// The books after `f` has trained on a CPU and on a meta device, which are this test's own.
fn assert_equal_books(what: &str, number: u16, f: impl Fn(Device) -> Result<()>) {
    let run = |device: Device| {
        let ledger = device.ledger().expect("a ledger");
        assert_eq!(ledger.total().now, 0, "{device} is in use");
        ledger.reset_peak();
        f(device).unwrap_or_else(|e| panic!("{what} on {device}: {e}"));
        books(device)
    };
    let (cpu, meta) = (run(Device::Cpu(number)), run(Device::Meta(number)));
    assert!(cpu.last().is_some_and(|total| total.2 > 0));
    assert_eq!(cpu, meta, "{what}");
}

fn tokens(device: Device, step: i64) -> Result<(Var, Var)> {
    let ids: Vec<i64> = (0..4 * 16).map(|i| (i * 7 + step) % 301).collect();
    let tensor = |ids: &[i64]| Tensor::from_slice(ids, &[4, 16], device);
    Ok((Var::new(tensor(&ids)?), Var::new(tensor(&ids)?)))
}

fn train_gpt<R: Rule>(rule: R, dtype: DType, mode: RecomputeMode, device: Device) -> Result<()> {
    let config = GptConfig::new(301, 16, 3, 2, 24).with_dropout(0.1);
    let mut model = config.init(&Scope::new(1, dtype, device))?;
    model.set_recompute(mode);
    let mut optimizer: Optimizer<R> = rule.init(Group::decay_matrices(model.parameters(), 1e-3, 0.1))?;
    for step in 0..3 {
        let (x, y) = tokens(device, step)?;
        optimizer.zero_grad()?;
        let hidden = model.forward(&x)?;
        model.loss(&hidden, &y, 1.0 / 64.0)?.backward()?;
        drop(hidden);
        grad_norm(&model.parameters())?;
        optimizer.step()?;
    }
    Ok(())
}

#[test]
fn a_gpt_step_takes_the_same_bytes_in_each_dtype_and_recompute_mode() {
    let mut number = 100;
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for mode in [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always] {
            let what = format!("{dtype} {mode:?}");
            assert_equal_books(&what, number, |device| train_gpt(AdamW::default(), dtype, mode, device));
            number += 1;
        }
    }
}

#[test]
fn a_gpt_step_takes_the_same_bytes_with_each_optimizer() {
    let never = RecomputeMode::Never;
    let with =
        |what: &str, number: u16, f: &dyn Fn(Device) -> Result<()>| assert_equal_books(what, number, f);
    for (i, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
        let at = 140 + 10 * i as u16;
        with("sgd", at, &|d| train_gpt(Sgd { momentum: 0.9, ..Sgd::default() }, dtype, never, d));
        with("adam", at + 1, &|d| train_gpt(Adam::default(), dtype, never, d));
        with("rmsprop", at + 2, &|d| train_gpt(Rmsprop::default(), dtype, never, d));
        with("adagrad", at + 3, &|d| train_gpt(Adagrad::default(), dtype, never, d));
        with("lion", at + 4, &|d| train_gpt(Lion::default(), dtype, never, d));
    }
}
