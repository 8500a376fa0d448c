//! Recomputation: the gradients of the plain graph, bit for bit, in whatever surroundings, and the memory that it saves.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use phalanx_autograd::{
    Error, Leaf, Options, Result, Slot, Var, backward, checkpoint, checkpoint_apart, grad, is_checkpointing,
    is_recomputing, no_grad,
};
use phalanx_kernels as kernels;
use phalanx_tensor::{Context, DType, Device, RngKey, Tensor};

use crate::support::{
    Journal, Misbehave, Note, dropout, grad_bits, grad_of, leaf, leaf_on, numbers, parameter, scale, tensor,
};

#[test]
fn each_part_is_recomputed_right_before_its_backward() {
    let journal = Journal::default();
    let part = |name, x: &Var| {
        let note = Note::new(name, &journal);
        checkpoint(move |v| note.on(&v[0]), &[x]).unwrap()
    };
    let a = part("a", &leaf(&[1.0]));
    part("b", &a).backward().unwrap();
    let noted = journal.lock().unwrap();
    assert_eq!(*noted, ["a:forward", "b:forward", "b:again", "b:backward", "a:again", "a:backward"]);
}

#[test]
fn the_output_is_tracked_although_no_input_needs_a_gradient() {
    let x = Var::new(tensor(&[2.0], Device::CPU));
    let y = checkpoint(|v| v[0].mul_scalar(2.0), &[&x]).unwrap();
    assert!(y.requires_grad());
    y.backward().unwrap();
    let w = parameter(&[3.0], Device::CPU);
    let inside = w.clone();
    let y = checkpoint(move |v| v[0].mul(&inside.var()), &[&x]).unwrap();
    y.backward().unwrap();
    assert_eq!(grad_of(&w.var()), [2.0]);
}

#[test]
fn layers_see_which_run_it_is() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = seen.clone();
    let f = move |v: &[Var]| {
        kept.lock().unwrap().push((is_checkpointing(), is_recomputing()));
        v[0].tanh()
    };
    let x = leaf(&[1.0]);
    checkpoint(f, &[&x]).unwrap().backward().unwrap();
    assert_eq!(*seen.lock().unwrap(), [(true, false), (false, true)]);
    assert!(!is_checkpointing() && !is_recomputing());
}

#[test]
fn without_gradients_it_is_the_function() {
    let x = leaf(&[1.0]);
    let _plain = no_grad();
    assert_eq!(checkpoint(|v| Ok(v[0].clone()), &[&x]).unwrap().op(), Some("leaf"));
}

/// How a block of the test model is run.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mode {
    Plain,
    Checkpointed,
    Nested,
    Late,
}

fn block(w: &Leaf, shared: &Leaf, outside: &Var, site: u64, v: &[Var], nested: bool) -> Result<[Var; 2]> {
    let h = v[0].mul(&w.var())?.tanh()?;
    let inner = {
        let shared = shared.clone();
        move |v: &[Var]| dropout(&v[0].mul(&shared.var())?.tanh()?, site)
    };
    let h = if nested { checkpoint(inner, &[&h])? } else { inner(&[h])? };
    let y = h.add(&v[1])?.mul(&shared.var())?.add(outside)?;
    Ok([y, h.mul(&h)?])
}

/// Two steps of a model of four blocks that share a parameter, use a value computed outside, and drop elements.
fn gradients(mode: Mode, spread: bool) -> Vec<Vec<u64>> {
    let place = |i: usize| Device::Cpu(if spread { i as u16 % 2 } else { 0 });
    let on = |i: usize, seed| parameter(&numbers(seed, 16), place(i));
    let (ws, shared): (Vec<Leaf>, Vec<Leaf>) =
        ((0..4).map(|i| on(i, i as u64)).collect(), (0..2).map(|i| on(i, 9)).collect());
    let x = leaf(&numbers(5, 16));
    for step in 0..2 {
        let _context = Context::with(|c| c.rng = RngKey { seed: 7, step });
        let (mut h, mut extra) = (x.clone(), x.mul_scalar(0.5).unwrap());
        for (i, w) in ws.iter().enumerate() {
            (h, extra) = (h.to_device(place(i)).unwrap(), extra.to_device(place(i)).unwrap());
            let (w, shared) = (w.clone(), shared[if spread { i % 2 } else { 0 }].clone());
            let outside = x.to_device(place(i)).unwrap().tanh().unwrap();
            let f = move |v: &[Var]| block(&w, &shared, &outside, i as u64, v, mode == Mode::Nested);
            [h, extra] = match mode {
                Mode::Plain => f(&[h, extra]),
                Mode::Late => checkpoint_apart(f, &[&h, &extra]).map(|r| r.0),
                _ => checkpoint(f, &[&h, &extra]),
            }
            .unwrap();
        }
        let loss = h.add(&extra).unwrap().sum_all().unwrap();
        drop((h, extra));
        let _other = Context::with(|c| c.rng = RngKey { seed: 1, step: 1 });
        loss.to_device(Device::CPU).unwrap().backward().unwrap();
    }
    let x = x.as_leaf().unwrap();
    let used = ws.iter().chain(&shared).chain([&x]).filter(|l| l.grad().is_some());
    used.map(grad_bits).collect()
}

#[test]
fn gradients_are_those_of_the_plain_graph_bit_for_bit() {
    for spread in [false, true] {
        let plain = gradients(Mode::Plain, spread);
        assert_eq!(plain.len(), if spread { 7 } else { 6 });
        for mode in [Mode::Checkpointed, Mode::Nested, Mode::Late] {
            assert_eq!(gradients(mode, spread), plain, "{mode:?}, spread {spread}");
        }
    }
}

#[test]
fn integers_constants_and_outputs_without_gradient_pass_through() {
    let x = leaf(&[1.0, 2.0]);
    let index = Var::from_slice(&[4i64, 5], &[2], Device::CPU).unwrap();
    let constant = Var::new(tensor(&[3.0, 4.0], Device::CPU));
    let f = |v: &[Var]| Ok(vec![v[1].clone(), v[0].mul(&v[2])?, v[2].clone(), v[0].clone()]);
    let out = checkpoint(f, &[&x, &index, &constant]).unwrap();
    assert_eq!(out[0].to_vec::<i64>().unwrap(), [4, 5]);
    assert!(!out[0].requires_grad());
    let loss = out[1].add(&out[2]).unwrap().add(&out[3]).unwrap().sum_all().unwrap();
    loss.backward().unwrap();
    assert_eq!(grad_of(&x), [4.0, 5.0]);
    let only_integers = checkpoint(|v| Ok(v[1].clone()), &[&x, &index]).unwrap();
    assert!(!only_integers.requires_grad());
}

#[test]
fn an_output_may_be_a_captured_parameter_or_unused() {
    let (x, w) = (leaf(&[1.0]), parameter(&[2.0], Device::CPU));
    let inside = w.clone();
    let [a, b] = checkpoint(move |v| Ok([v[0].mul(&inside.var())?, inside.var()]), &[&x]).unwrap();
    b.mul_scalar(3.0).unwrap().backward().unwrap();
    assert_eq!(grad_of(&w.var()), [3.0]);
    assert!(x.grad().is_none() || grad_of(&x) == [0.0]);
    drop(a);
}

#[test]
fn gradients_of_anything_can_be_asked_for() {
    let (x, w) = (leaf(&numbers(1, 4)), parameter(&numbers(2, 4), Device::CPU));
    let inside = w.clone();
    let y = checkpoint(move |v| v[0].mul(&inside.var())?.tanh(), &[&x]).unwrap().sum_all().unwrap();
    let got = grad(&[(y, None)], &[&w.var(), &x], Options::default()).unwrap();
    x.mul(&w.var()).unwrap().tanh().unwrap().sum_all().unwrap().backward().unwrap();
    for (got, wanted) in got.iter().zip([w.var(), x]) {
        assert_eq!(got.as_ref().unwrap().to_vec::<f64>().unwrap(), grad_of(&wanted));
    }
}

#[test]
fn second_derivatives_pass_through() {
    let inputs = [tensor(&numbers(3, 4), Device::CPU), tensor(&numbers(4, 4), Device::CPU)];
    let f = |v: &[Var]| {
        let twice = |v: &[Var]| v[0].mul(&v[1])?.tanh()?.mul(&v[0]);
        checkpoint(twice, &[&checkpoint(twice, &[&v[0], &v[1]])?, &v[1]])
    };
    phalanx_autograd::gradcheck(f, &inputs, Default::default()).unwrap();
    phalanx_autograd::gradgradcheck(f, &inputs, Default::default()).unwrap();
}

#[test]
fn a_retained_graph_recomputes_each_time() {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let x = leaf(&[0.5]);
    let f = move |v: &[Var]| {
        count.fetch_add(1, Relaxed);
        v[0].tanh()
    };
    let y = checkpoint(f, &[&x]).unwrap();
    backward(&[(y.clone(), None)], Options { retain_graph: true, ..Options::default() }).unwrap();
    let once = grad_of(&x)[0];
    y.backward().unwrap();
    assert_eq!((grad_of(&x)[0], runs.load(Relaxed)), (2.0 * once, 3));
    assert!(matches!(y.backward(), Err(Error::Freed { .. })));
}

#[test]
fn recomputation_may_be_tied_to_a_later_value() {
    let journal = Journal::default();
    let (note, x) = (Note::new("part", &journal), leaf(&[1.0]));
    let (y, recompute) = checkpoint_apart(move |v| note.on(&v[0]), &[&x]).unwrap();
    let later = Note::new("later", &journal).on(&y).unwrap();
    let last = recompute.unwrap().before(&later).unwrap();
    last.backward().unwrap();
    let noted = journal.lock().unwrap();
    assert_eq!(*noted, ["part:forward", "later:forward", "part:again", "later:backward", "part:backward"]);
}

#[test]
fn what_was_modified_before_it_is_used_again_is_named() {
    let (x, w) = (leaf(&[1.0, 2.0]), parameter(&[3.0, 4.0], Device::CPU));
    let inside = w.clone();
    let forward = |x: &Var| {
        let inside = inside.clone();
        checkpoint(move |v| v[0].mul_scalar(2.0)?.mul(&inside.var())?.tanh(), &[x])
            .unwrap()
            .sum_all()
            .unwrap()
    };
    let is = |loss: &Var, wanted: (&str, &str)| match loss.backward() {
        Err(Error::Modified { op, value, .. }) => assert_eq!((op, value.as_str()), wanted),
        other => panic!("{other:?}"),
    };
    let loss = forward(&x);
    kernels::fill_(&mut w.tensor(), 1.0).unwrap();
    is(&loss, ("mul", "input 1"));
    let loss = forward(&x);
    kernels::fill_(&mut x.tensor().clone(), 1.0).unwrap();
    is(&loss, ("checkpoint", "input 0"));
    let middle = x.tanh().unwrap();
    let loss = forward(&middle);
    kernels::fill_(&mut middle.tensor().clone(), 1.0).unwrap();
    is(&loss, ("checkpoint", "input 0"));
    // A parameter's storage may go and come back.
    let loss = forward(&x);
    w.set_tensor(Tensor::empty(&[0], DType::F64, Device::CPU).unwrap()).unwrap();
    w.set_tensor(tensor(&[1.0, 1.0], Device::CPU)).unwrap();
    loss.backward().unwrap();
}

#[test]
fn an_input_that_the_function_itself_modifies_is_found() {
    for constant in [false, true] {
        let (x, y) = (leaf(&[1.0]), leaf(&[5.0]));
        let y = if constant { y.detach() } else { y };
        let f = |v: &[Var]| {
            let mut target = v[1].tensor().clone();
            kernels::fill_(&mut target, v[1].item::<f64>()? + 1.0)?;
            v[0].mul(&v[1])
        };
        let z = checkpoint(f, &[&x, &y]).unwrap();
        // Computed again, it would add once more, and the gradient would be 7.
        let error = z.backward().unwrap_err().to_string();
        assert!(error.contains("checkpoint: input 1 was modified in place"), "{error}");
    }
}

#[test]
fn errors_and_panics_of_the_recomputation_end_the_pass() {
    for (again, wanted) in [
        ((|| Err(Error::Custom("refused".into()))) as fn() -> Result<Var>, "backward of recompute: refused"),
        (|| panic!("on purpose"), "recompute: panicked in backward: on purpose"),
        (
            || Ok(Var::new(tensor(&[1.0, 2.0], Device::CPU))),
            "backward of recompute: checkpoint: the recomputation has other outputs than the forward pass had",
        ),
    ] {
        let x = leaf(&[1.0]);
        let f = move |v: &[Var]| if is_recomputing() { again() } else { v[0].tanh() };
        let y = checkpoint(f, &[&x]).unwrap();
        assert_eq!(y.backward().unwrap_err().to_string(), wanted);
    }
    let inner = checkpoint(
        |v| Ok(phalanx_autograd::Function::apply(Misbehave(|| panic!("deep")), &[&v[0]])?.remove(0)),
        &[&leaf(&[1.0])],
    );
    assert_eq!(inner.unwrap().backward().unwrap_err().to_string(), "misbehave: panicked in backward: deep");
}

#[test]
fn operations_inside_write_to_buffers_directly_with_the_same_bits() {
    let run = |checkpointed: bool| {
        let buffer = tensor(&numbers(6, 8), Device::CPU);
        let (x, w) = (leaf(&numbers(7, 8)), parameter(&numbers(8, 8), Device::CPU));
        w.set_slot(Slot::Into(buffer.clone())).unwrap();
        let inside = w.clone();
        let f = move |v: &[Var]| scale(&v[0].tanh()?, &inside.var())?.tanh();
        let y = if checkpointed { checkpoint(f, &[&x]) } else { f(std::slice::from_ref(&x)) };
        let before = crate::support::DIRECT.get();
        y.unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(crate::support::DIRECT.get() - before, 1);
        (buffer.to_vec::<f64>().unwrap(), grad_of(&x))
    };
    assert_eq!(run(true), run(false));
}

// What recomputation is for: values that are not kept.

const WIDTH: usize = 1000;
const BYTES: usize = WIDTH * 8;

/// Four parts of ten steps each: bytes that the forward pass leaves behind, and the backward pass's peak beyond the
/// bytes before.
fn bytes(checkpointed: bool, device: Device) -> (usize, usize) {
    let x = leaf_on(&numbers(1, WIDTH), device);
    let ledger = device.ledger().unwrap();
    let before = ledger.total().now;
    let part = |v: &[Var]| (0..10).try_fold(v[0].clone(), |y, _| y.tanh());
    let y = (0..4)
        .fold(x.clone(), |y, _| if checkpointed { checkpoint(part, &[&y]) } else { part(&[y]) }.unwrap());
    let kept = ledger.total().now - before;
    let dy = Var::new(y.tensor().copy().unwrap());
    ledger.reset_peak();
    y.backward_with(dy).unwrap();
    let peak = ledger.total().peak - before;
    drop(y);
    assert_eq!(ledger.total().now - before, BYTES, "the gradient of x is left");
    (kept, peak)
}

#[test]
fn inner_values_are_not_kept() {
    let (kept, peak) = bytes(false, Device::Cpu(38));
    assert_eq!(kept, 40 * BYTES);
    assert!(peak <= 42 * BYTES);
    let (kept, peak) = bytes(true, Device::Cpu(39));
    assert_eq!(kept, 4 * BYTES, "one output a part");
    // Beside them: the root's gradient, the part's ten values and one that is being made.
    assert!(peak <= (4 + 1 + 10 + 1) * BYTES, "{}", peak / BYTES);
}

#[test]
fn the_ledger_of_a_meta_device_agrees() {
    assert_eq!(bytes(true, Device::Meta(38)), bytes(true, Device::Cpu(40)));
}
