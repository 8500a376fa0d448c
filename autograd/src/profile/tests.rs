//! Profiles of small graphs whose arithmetic and bytes are known.

use super::*;
use crate::checkpoint;
use phalanx_tensor::DType;

fn leaf(shape: &[usize]) -> Var {
    Var::leaf(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap()).unwrap()
}

fn of<'a>(seen: &'a [OperationTime], name: &str, pass: Pass) -> &'a OperationTime {
    let found = seen.iter().find(|o| o.name == name && o.pass == pass);
    found.unwrap_or_else(|| panic!("no {name} in {pass:?} of {seen:?}"))
}

#[test]
fn a_product_counts_its_multiplications_and_what_it_reads_and_writes() {
    let (x, w) = (leaf(&[6, 5]), leaf(&[7, 5]));
    let profiler = Profiler::begin(Device::CPU).unwrap();
    let y = x.linear(&w, None).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    let seen = profiler.end();
    let product = 2.0 * (6 * 5 * 7) as f64;
    let forward = of(&seen, "linear", Pass::Forward);
    assert_eq!((forward.calls, forward.flops), (1, product));
    assert_eq!(forward.bytes, 4.0 * (6 * 5 + 7 * 5 + 6 * 7) as f64);
    // The gradient of each input is a product; the gradient of the result and both inputs are read, two gradients written.
    let backward = of(&seen, "linear", Pass::Backward);
    assert_eq!((backward.calls, backward.flops), (1, 2.0 * product));
    assert_eq!(backward.bytes, 4.0 * (6 * 7 + 2 * (6 * 5 + 7 * 5)) as f64);
}

#[test]
fn an_elementwise_operation_counts_its_elements_and_a_view_nothing() {
    let x = leaf(&[8, 3]);
    let profiler = Profiler::begin(Device::CPU).unwrap();
    x.reshape_to(&[24]).unwrap().relu().unwrap().sum_all().unwrap().backward().unwrap();
    let seen = profiler.end();
    assert_eq!(of(&seen, "relu", Pass::Forward).flops, 24.0);
    assert_eq!(of(&seen, "relu", Pass::Forward).bytes, 2.0 * 24.0 * 4.0);
    assert!(!seen.iter().any(|o| o.name == "reshape" && o.pass == Pass::Forward), "{seen:?}");
    assert_eq!(of(&seen, "reshape", Pass::Backward).bytes, 0.0);
}

/// Recomputed operations have rows of their own: they are not in those of the forward pass, nor in that of the node that asks for them.
#[test]
fn recomputation_is_a_pass_of_its_own() {
    let (x, w) = (leaf(&[6, 5]), leaf(&[7, 5]));
    let profiler = Profiler::begin(Device::CPU).unwrap();
    let y = checkpoint(move |v| v[0].linear(&w, None)?.relu(), &[&x]).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    let seen = profiler.end();
    for pass in [Pass::Forward, Pass::Recompute] {
        assert_eq!(of(&seen, "linear", pass).flops, 2.0 * (6 * 5 * 7) as f64);
        assert_eq!(of(&seen, "relu", pass).calls, 1);
    }
    assert_eq!(of(&seen, "linear", Pass::Backward).flops, 4.0 * (6 * 5 * 7) as f64);
    let again = of(&seen, "recompute", Pass::Backward);
    assert!(again.flops < 10.0, "{again:?}");
}

/// Each moment belongs to one operation at most, and large operations have most of them.
#[test]
fn the_times_are_parts_of_the_whole() {
    let (x, w) = (leaf(&[256, 256]), leaf(&[256, 256]));
    let profiler = Profiler::begin(Device::CPU).unwrap();
    let begin = Instant::now();
    for _ in 0..5 {
        let y = x.linear(&w, None).unwrap().gelu(phalanx_kernels::Gelu::Tanh).unwrap();
        y.log_softmax(-1).unwrap().sum_all().unwrap().backward().unwrap();
    }
    let all = begin.elapsed();
    let seen = profiler.end();
    let timed: Duration = seen.iter().map(|o| o.time).sum();
    assert!(timed <= all, "{timed:?} of {all:?}");
    assert!(timed > all.mul_f64(0.5), "{timed:?} of {all:?}: {seen:?}");
}

/// What runs after a backward function that fails is no part of it.
#[test]
fn a_failed_backward_function_is_forgotten() {
    let x = leaf(&[3]);
    let profiler = Profiler::begin(Device::CPU).unwrap();
    let w = x.exp().unwrap();
    let square = w.mul(&w).unwrap();
    phalanx_kernels::fill_(&mut w.tensor().clone(), 2.0).unwrap();
    assert!(square.sum_all().unwrap().backward().is_err(), "the saved value was modified");
    x.tanh().unwrap();
    assert!(profiler.end().iter().any(|o| o.name == "tanh" && o.pass == Pass::Forward));
}

#[test]
fn a_thread_has_one_profiler_and_after_it_none() {
    let profiler = Profiler::begin(Device::CPU).unwrap();
    assert!(Profiler::begin(Device::CPU).is_err());
    drop(profiler);
    leaf(&[2]).relu().unwrap();
    assert!(PROFILE.with_borrow(Option::is_none));
    let profiler = Profiler::begin(Device::CPU).unwrap();
    assert!(profiler.end().is_empty());
}

#[test]
fn waiting_has_a_name_of_its_own() {
    let profiler = Profiler::begin(Device::CPU).unwrap();
    waiting("receive", || std::thread::sleep(Duration::from_millis(20)));
    leaf(&[2]).relu().unwrap();
    let seen = profiler.end();
    let waited = of(&seen, "receive", Pass::Wait);
    assert_eq!((waited.calls, waited.flops, waited.bytes), (1, 0.0, 0.0));
    assert!(waited.time >= Duration::from_millis(20));
    assert!(of(&seen, "relu", Pass::Forward).time < Duration::from_millis(20));
}
