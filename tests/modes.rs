//! Random draws and evaluation mode in an ordinary loop, with nothing set by hand: every training pass draws anew, under every way
//! of cutting or repeating it the same, and evaluation draws nothing.

use phalanx::autograd::ContextMode;
use phalanx::autograd::{checkpoint, is_grad_enabled};
use phalanx::nn::models::{GptConfig, ModelConfig, load_model, save_model};
use phalanx::nn::{
    BatchNormConfig, Dropout, Group, LinearConfig, Module, Parameters, Rule, Scope, Sequential, Sgd, Tanh,
    eval, inference, no_grad, state_dict,
};
use phalanx::parallel::pipeline::gpipe::{GPipe, GPipeConfig, Partition, Sequence};
use phalanx::{Context, DType, Device, Var};

fn scope(seed: u64) -> Scope {
    Scope::new(seed, DType::F32, Device::CPU)
}

fn ones(shape: &[usize]) -> Var {
    Var::from_slice(&vec![1f32; shape.iter().product()], shape, Device::CPU).unwrap()
}

fn values(var: &Var) -> Vec<f32> {
    var.to_vec().unwrap()
}

/// The output of a dropout of this scope in its first pass on a new thread.
fn first_mask(scope: Scope) -> Vec<f32> {
    let pass = move || values(&Dropout::new(0.5, &scope).unwrap().forward(&ones(&[64])).unwrap());
    std::thread::spawn(pass).join().unwrap()
}

#[test]
fn every_pass_of_a_plain_loop_draws_anew() {
    let layer = LinearConfig::new(64, 64).init(&scope(1).child("0")).unwrap();
    let dropout = Dropout::new(0.5, &scope(1).child("1")).unwrap();
    let mut optimizer = Sgd::default().init(vec![Group::new(layer.parameters(), 0.0)]).unwrap();
    let mut seen = Vec::new();
    for _ in 0..5 {
        optimizer.zero_grad().unwrap();
        let y = dropout.forward(&layer.forward(&ones(&[1, 64])).unwrap()).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        optimizer.step().unwrap();
        let mask: Vec<bool> = values(&y).iter().map(|y| *y == 0.0).collect();
        assert!(!seen.contains(&mask));
        seen.push(mask);
    }
}

#[test]
fn every_pass_without_a_backward_pass_draws_anew() {
    let dropout = Dropout::new(0.5, &scope(1)).unwrap();
    let _grad = no_grad();
    let masks: Vec<_> = (0..5).map(|_| values(&dropout.forward(&ones(&[64])).unwrap())).collect();
    for (i, mask) in masks.iter().enumerate() {
        assert!(!masks[..i].contains(mask));
    }
}

#[test]
fn the_same_program_draws_the_same_and_the_scopes_seed_decides_what() {
    assert_eq!(first_mask(scope(1)), first_mask(scope(1)));
    assert_ne!(first_mask(scope(1)), first_mask(scope(2)));
}

#[test]
fn two_dropouts_of_one_scope_draw_apart_whoever_sets_the_step() {
    let scope = scope(1);
    let [a, b] = [(); 2].map(|()| Dropout::new(0.5, &scope).unwrap());
    let masks = || [&a, &b].map(|layer| values(&layer.forward(&ones(&[64])).unwrap()));
    let [first, second] = masks();
    assert_ne!(first, second);
    let _step = Context::with(|c| c.rng.step = 7);
    let [first, second] = masks();
    assert_ne!(first, second);
    assert_eq!(masks(), [first, second], "a step that was set draws the same again");
}

#[test]
fn a_seed_that_is_set_begins_again() {
    let dropout = Dropout::new(0.5, &scope(1)).unwrap();
    let seeded = |seed| {
        Context::manual_seed(seed);
        let random = Var::randn(&[3], DType::F32, Device::CPU).unwrap();
        (values(&dropout.forward(&ones(&[64])).unwrap()), values(&random))
    };
    let first = seeded(3);
    assert_ne!(seeded(4), first);
    assert_eq!(seeded(3), first);
}

#[test]
fn a_recomputation_repeats_the_draws_and_the_mode_of_its_forward_pass() {
    let dropout = Dropout::new(0.5, &scope(1).child("dropout")).unwrap();
    let norm = BatchNormConfig::new(3).init_1d(&scope(1).child("norm")).unwrap();
    norm.eval();
    let x = Var::leaf(ones(&[8, 3]).into_tensor()).unwrap();
    for _ in 0..2 {
        x.as_leaf().unwrap().zero_grad().unwrap();
        let (twice, frozen) = (dropout.clone(), norm.clone());
        let f = move |v: &[Var]| {
            let noise = Var::rand(&[8, 3], DType::F32, Device::CPU)?;
            let y = twice.forward(&twice.forward(&v[0])?)?;
            frozen.forward(&y)?.mul(&noise)
        };
        let y = checkpoint(f, &[&x]).unwrap();
        // What happens between the passes is not seen by the second.
        dropout.forward(&ones(&[8, 3])).unwrap();
        dropout.eval();
        norm.train();
        let kept: Vec<bool> = values(&y).iter().map(|y| *y != 0.0).collect();
        y.sum_all().unwrap().backward().unwrap();
        dropout.train();
        norm.eval();
        let grads = values(&x.grad().unwrap());
        assert_eq!(grads.iter().map(|dx| *dx != 0.0).collect::<Vec<_>>(), kept);
        assert!(kept.contains(&true) && kept.contains(&false));
    }
    assert_eq!(norm.num_batches_tracked.unwrap().tensor().item::<i64>().unwrap(), 0);
}

/// Two layers with dropouts behind them, each at its place.
fn layers(scope: impl Fn(usize) -> Scope) -> Sequence {
    Sequence::new()
        .with(LinearConfig::new(6, 6).init(&scope(0)).unwrap())
        .with(Dropout::new(0.5, &scope(1)).unwrap())
        .with(LinearConfig::new(6, 6).init(&scope(2)).unwrap())
        .with(Dropout::new(0.5, &scope(3)).unwrap())
}

#[test]
fn a_pipeline_draws_what_the_plain_model_draws_without_a_step_that_was_set() {
    // Batches that are cut into micro-batches of different sizes, one pass after the other.
    let run = |devices: [Device; 2], micro_batches: usize| -> Vec<Vec<f32>> {
        let pass = move || {
            let partition = Partition::new(&[2, 2], &devices).unwrap();
            let place = |i: usize| Scope::new(3, DType::F32, partition.device(i).unwrap()).child(i);
            let model = layers(place);
            let pipe = GPipe::new(model, partition, GPipeConfig::new(micro_batches)).unwrap();
            let step = |rows: usize| {
                let x = Var::from_slice(&vec![1f32; rows * 6], &[rows, 6], devices[0]).unwrap();
                let y = pipe.run(x).unwrap().into_values().remove(0);
                y.sum_all().unwrap().backward().unwrap();
                values(&y)
            };
            [8, 6, 8, 3, 8].map(step).to_vec()
        };
        std::thread::spawn(pass).join().unwrap()
    };
    let plain = run([Device::Cpu(700), Device::Cpu(700)], 1);
    assert_eq!(run([Device::Cpu(701), Device::Cpu(702)], 4), plain);
    assert_ne!(plain[0], plain[2]);
}

#[test]
fn guards_undo_what_they_set_dropped_in_any_order() {
    {
        let _both = (no_grad(), Context::with(|c| c.set_train(false)));
    }
    assert!(is_grad_enabled() && Context::current().train());
    let (first, second) = (inference(), eval());
    drop(first);
    assert!(is_grad_enabled() && !Context::current().train());
    drop(second);
    assert!(Context::current().train());
    let unwound = std::panic::catch_unwind(|| {
        let _inference = inference();
        panic!("on purpose");
    });
    assert!(unwound.is_err() && is_grad_enabled() && Context::current().train());
    assert!(std::thread::spawn(is_grad_enabled).join().unwrap());
}

#[test]
fn a_layer_in_evaluation_mode_stays_so_in_a_model_that_trains() {
    let norm = BatchNormConfig::new(4).init_1d(&scope(1).child("1")).unwrap();
    let model = Sequential::new()
        .with(LinearConfig::new(4, 4).init(&scope(1).child("0")).unwrap())
        .with(norm.clone())
        .with(Tanh {});
    norm.eval();
    let statistics = || state_dict(&norm).into_iter().map(|(_, t)| t.to_bytes().unwrap()).collect::<Vec<_>>();
    let before = statistics();
    let x = Var::randn(&[8, 4], DType::F32, Device::CPU).unwrap();
    model.forward(&x).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(statistics(), before);
    norm.train();
    model.forward(&x).unwrap();
    assert_ne!(statistics(), before);
}

#[test]
fn a_loaded_model_answers_without_dropout_until_it_is_told_to_train() {
    let config = ModelConfig::Gpt(GptConfig { dropout: [0.5; 3], ..GptConfig::new(17, 8, 2, 2, 8) });
    let folder = std::env::temp_dir().join(format!("phalanx-modes-{}", std::process::id()));
    let made = config.init(&scope(5)).unwrap();
    save_model(&made, &config, &folder).unwrap();
    let (_, model) = load_model(&folder, &scope(6)).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let tokens = Var::from_slice(&[1i64, 2, 3, 4], &[1, 4], Device::CPU).unwrap();
    let _grad = no_grad();
    let logits = |model: &phalanx::nn::models::Decoder| {
        values(&model.logits(&model.forward(&tokens).unwrap()).unwrap())
    };
    let answer = {
        let _inference = inference();
        logits(&made)
    };
    assert_eq!(logits(&model), answer);
    model.train();
    assert_ne!(logits(&model), answer);
    assert_ne!(logits(&model), logits(&model));
}

#[test]
fn random_tensors_have_their_ranges() {
    Context::manual_seed(1);
    let cpu = Device::CPU;
    let unit = Var::rand(&[1000], DType::F64, cpu).unwrap().to_vec::<f64>().unwrap();
    assert!(unit.iter().all(|x| (0.0..1.0).contains(x)));
    assert!((unit.iter().sum::<f64>() / 1000.0 - 0.5).abs() < 0.05);
    let normal = Var::randn(&[4000], DType::F32, cpu).unwrap();
    let (mean, square) = (normal.mean_all().unwrap(), normal.square().unwrap().mean_all().unwrap());
    assert!(mean.item::<f32>().unwrap().abs() < 0.1 && (square.item::<f32>().unwrap() - 1.0).abs() < 0.1);
    let dice = Var::randint(-3, 3, &[600], cpu).unwrap().to_vec::<i64>().unwrap();
    assert!((-3..3).all(|face| dice.iter().filter(|x| **x == face).count() > 50));
    assert!(dice.iter().all(|x| (-3..3).contains(x)));
    let mut order = Var::randperm(33, cpu).unwrap().to_vec::<i64>().unwrap();
    assert!(order.windows(2).any(|pair| pair[0] > pair[1]));
    order.sort_unstable();
    assert_eq!(order, (0..33).collect::<Vec<_>>());
    let weights = Var::from_slice(&[0.0, 1.0, 3.0, 0.0], &[4], cpu).unwrap();
    let drawn = weights.multinomial(400, true).unwrap().to_vec::<i64>().unwrap();
    let twos = drawn.iter().filter(|class| **class == 2).count();
    assert!(drawn.iter().all(|class| [1, 2].contains(class)) && (250..350).contains(&twos), "{twos}");
    let mut both = weights.multinomial(2, false).unwrap().to_vec::<i64>().unwrap();
    both.sort_unstable();
    assert_eq!(both, [1, 2]);
    assert!(weights.multinomial(3, false).unwrap_err().to_string().contains("multinomial"));
    let coins = Var::from_slice(&[0.0f32, 1.0, 0.5], &[3], cpu).unwrap().bernoulli().unwrap();
    assert_eq!(values(&coins)[..2], [0.0, 1.0]);
    for error in [
        Var::randint(3, 3, &[1], cpu).unwrap_err(),
        Var::rand(&[1], DType::I64, cpu).unwrap_err(),
        Var::from_slice(&[2f32], &[1], cpu).unwrap().bernoulli().unwrap_err(),
        Var::from_slice(&[-1f32], &[1], cpu).unwrap().multinomial(1, true).unwrap_err(),
    ] {
        assert!(error.to_string().contains(", wanted"), "{error}");
    }
    let meta = Var::randn(&[2, 3], DType::F32, Device::Meta(0)).unwrap();
    assert_eq!(meta.multinomial(2, true).unwrap().shape(), [2, 2]);
}
