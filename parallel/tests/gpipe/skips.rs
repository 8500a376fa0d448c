//! Skip connections: the plain model's gradients, straight copies, memory that goes early, and what is refused; and
//! torchgpipe's `1to3`, with its weights: three convolutions and a skip from the first to the last.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::ContextMode;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Conv2d, Conv2dConfig, Module, Scope, parameters};
use phalanx_parallel::Result;
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Namespace, Partition, Phase, Sequence, Skip, Skippable, Skips,
    Timeline, scatter,
};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::*;

type Run = fn(Batch, &mut Skips) -> phalanx_parallel::Result<Batch>;

fn skip(name: &str) -> Skip {
    Skip::new(name)
}

/// Stashes `x`, and passes `tanh(x)` on.
fn stash(skip: Skip) -> Box<dyn Layer> {
    let declared = Skippable::new().stash(skip.clone());
    Box::new(Skipping(declared, move |batch: Batch, skips: &mut Skips| {
        let x = batch.one()?;
        skips.stash(&skip, x.clone())?;
        Ok(x.tanh()?.into())
    }))
}

/// Multiplies by what was stashed, thrice over: three gradients meet at the popped value.
fn pop(skip: Skip) -> Box<dyn Layer> {
    let declared = Skippable::new().pop(skip.clone());
    Box::new(Skipping(declared, move |batch: Batch, skips: &mut Skips| {
        let (x, Some(stashed)) = (batch.one()?, skips.pop(&skip)?) else {
            return Err(phalanx_parallel::Error::Config("nothing was stashed".into()));
        };
        Ok(x.mul(&stashed)?.add(&stashed)?.mul(&stashed.tanh()?)?.into())
    }))
}

fn pass() -> Box<dyn Layer> {
    apply(|b| Ok(b.map(|x| x.mul_scalar(1.5))?))
}

/// Crossing skips, one of them in two namespaces, one within a stage.
fn crossing() -> Vec<Box<dyn Layer>> {
    let (m, n) = (Namespace::new(), Namespace::new());
    vec![
        stash(m.skip("a")),
        stash(n.skip("a")),
        pass(),
        stash(skip("near")),
        pop(skip("near")),
        pop(m.skip("a")),
        pass(),
        pop(n.skip("a")),
    ]
}

fn outcome(model: impl Fn(&Var) -> Var, device: Device) -> [Vec<u64>; 2] {
    let x = leaf(1, &[5, 3], device);
    let y = model(&x);
    y.sum_all().unwrap().backward().unwrap();
    [bits(&y), bits(&x.grad().unwrap())]
}

#[test]
fn gradients_through_skips_are_the_plain_models() {
    let own = devices(4);
    let plain = Sequence::from(crossing());
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), plain_device());
    for balance in [&[8][..], &[4, 4], &[1, 2, 5], &[2, 2, 2, 2], &[1, 3, 2, 2]] {
        for mode in MODES {
            for micro_batches in [1, 2, 3, 5] {
                let partition = Partition::new(balance, &own).unwrap();
                let config = GPipeConfig::new(micro_batches).with_recompute(mode);
                let model = GPipe::new(crossing().into(), partition, config).unwrap();
                let got = outcome(|x| model.run(x).and_then(Batch::one).unwrap(), own[0]);
                assert!(got == wanted, "{balance:?}, {micro_batches} micro-batches, {mode}");
            }
        }
    }
}

#[test]
fn a_skip_goes_straight_to_the_stage_that_pops_it() {
    let own = devices(3);
    let timeline = Timeline::new();
    for mode in MODES {
        let config = GPipeConfig::new(2).with_recompute(mode).with_observer(timeline.observer());
        let model = each(vec![stash(skip("a")), pass(), pop(skip("a"))], &own, config);
        let y = model.run(leaf(1, &[2, 3], own[0])).and_then(Batch::one).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        let mut copies: Vec<Device> =
            timeline.take().iter().filter(|s| s.phase == Phase::Copy).map(|s| s.device).collect();
        copies.sort();
        // Two micro-batches: to stage 1, and to stage 2 twice; their gradients to stage 1 and twice to stage 0.
        let wanted = [(own[0], 4), (own[1], 4), (own[2], 4)];
        for (device, count) in wanted {
            assert_eq!(copies.iter().filter(|&&d| d == device).count(), count, "{mode} {device}");
        }
    }
}

#[test]
fn a_skip_may_be_nothing() {
    let own = devices(2);
    let layers = || -> Vec<Box<dyn Layer>> {
        let none: Run = |batch, skips| {
            skips.stash(&Skip::new("a"), None)?;
            Ok(batch)
        };
        let gone: Run = |batch, skips| match skips.pop(&Skip::new("a"))? {
            None => Ok(batch.map(|x| x.tanh())?),
            Some(_) => Err(phalanx_parallel::Error::Config("got something".into())),
        };
        vec![
            Box::new(Skipping(Skippable::new().stash(skip("a")), none)),
            Box::new(Skipping(Skippable::new().pop(skip("a")), gone)),
        ]
    };
    let plain = Sequence::from(layers());
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), plain_device());
    for mode in MODES {
        let model = each(layers(), &own, GPipeConfig::new(3).with_recompute(mode));
        assert!(outcome(|x| model.run(x).and_then(Batch::one).unwrap(), own[0]) == wanted, "{mode}");
    }
}

#[test]
fn a_skip_without_gradient_crosses_and_gets_none() {
    let own = devices(3);
    let layers = || -> Vec<Box<dyn Layer>> {
        let detached: Run = |batch, skips| {
            let x = batch.one()?;
            skips.stash(&Skip::new("a"), x.detach())?;
            Ok(x.into())
        };
        vec![Box::new(Skipping(Skippable::new().stash(skip("a")), detached)), pass(), pop(skip("a"))]
    };
    let plain = Sequence::from(layers());
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), plain_device());
    for mode in MODES {
        let model = each(layers(), &own, GPipeConfig::new(2).with_recompute(mode));
        assert!(outcome(|x| model.run(x).and_then(Batch::one).unwrap(), own[0]) == wanted, "{mode}");
    }
}

#[test]
fn a_skip_leaves_its_device_when_it_has_been_copied_and_the_next_one_when_it_is_popped() {
    let own = devices(3);
    let bytes = |device: Device| device.ledger().unwrap().total().now;
    let size = 2 * 1000 * 8;
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    // The stage between sees neither the source nor itself hold the skip.
    let (noted, places) = (seen.clone(), own.clone());
    let between = apply(move |b: Batch| {
        // That copy has a lane of its own, and ends when it does.
        soon(|| bytes(places[0]) == size);
        noted.lock().unwrap().push([bytes(places[0]), bytes(places[1]), bytes(places[2])]);
        Ok(b.map(|x| x.mul_scalar(1.5))?)
    });
    // No value is saved for backward: only tensors with a live handle are left.
    let copying: Run = |batch, skips| {
        let x = batch.one()?;
        skips.stash(&Skip::new("a"), x.mul_scalar(2.0)?)?;
        Ok(x.mul_scalar(3.0)?.into())
    };
    let popping: Run = |batch, skips| {
        let stashed = skips.pop(&Skip::new("a"))?;
        let x = batch.one()?;
        Ok(stashed.map_or(Ok(x.clone()), |s| x.add(&s))?.into())
    };
    let layers: Vec<Box<dyn Layer>> = vec![
        Box::new(Skipping(Skippable::new().stash(skip("a")), copying)),
        between,
        Box::new(Skipping(Skippable::new().pop(skip("a")), popping)),
    ];
    let model = each(layers, &own, GPipeConfig::new(1).with_recompute(RecomputeMode::Never));
    let x = constant(1, &[2, 1000], own[0]);
    let y = model.run(&x).unwrap();
    assert_eq!(*seen.lock().unwrap(), [[size, size, size]], "the input, the batch between, the skip ahead");
    assert_eq!([bytes(own[1]), bytes(own[2])], [0, size], "only the output");
    drop(y);
    assert_eq!(own.iter().map(|&d| bytes(d)).collect::<Vec<_>>(), [size, 0, 0]);
}

#[test]
fn nothing_stays_of_skips_after_forward_or_backward() {
    let own = devices(3);
    let bytes = || own.iter().map(|d| d.ledger().unwrap().total().now).collect::<Vec<_>>();
    for mode in MODES {
        for train in [true, false] {
            let model = each(
                vec![stash(skip("a")), pass(), pop(skip("a"))],
                &own,
                GPipeConfig::new(2).with_recompute(mode),
            );
            let _context = phalanx_tensor::Context::with(|c| c.set_train(train));
            let x = constant(1, &[4, 100], own[0]);
            let before = bytes();
            let y = model.run(&x).and_then(Batch::one).unwrap();
            if mode != RecomputeMode::Never && train {
                let requires = y.requires_grad();
                y.sum_all().unwrap().backward().unwrap();
                assert!(requires, "what is recomputed is tracked");
            }
            drop(y);
            assert_eq!(bytes(), before, "{mode} {train}");
        }
    }
}

#[test]
fn skips_that_do_not_match_are_refused_before_anything_runs() {
    let own = devices(2);
    let partition = Partition::new(&[1, 1], &own).unwrap();
    let model = Sequence::from(vec![stash(skip("a")), pop(skip("b"))]);
    let message = GPipe::new(model, partition, GPipeConfig::new(1)).err().unwrap().to_string();
    assert_eq!(
        message,
        "gpipe: skip connections do not match: layer 1 pops `b`, which no layer before it stashes; no layer pops \
         `a`, which is stashed"
    );
}

#[test]
fn a_layer_is_held_to_what_it_declares() {
    let device = devices(1)[0];
    let message = |declared: Skippable, run: Run| {
        // The second layer makes the declarations match; the plain model checks them too.
        let other = Skippable { stashes: declared.pops.clone(), pops: declared.stashes.clone() };
        let fill: Run = |batch, skips| {
            for skip in [Skip::new("a"), Skip::new("b")] {
                let _ = skips.stash(&skip, batch[0].clone());
                let _ = skips.pop(&skip);
            }
            Ok(batch)
        };
        let first_pops = !declared.pops.is_empty();
        let mut layers: Vec<Box<dyn Layer>> =
            vec![Box::new(Skipping(declared, run)), Box::new(Skipping(other, fill))];
        if first_pops {
            layers.reverse();
        }
        Sequence::from(layers).run(constant(1, &[1, 1], device)).map(drop).unwrap_err().to_string()
    };
    let pass: Run = |batch, _| Ok(batch);
    assert_eq!(
        message(Skippable::new().stash(skip("a")), pass),
        "gpipe: layer 0 declares that it stashes `a`, but has not"
    );
    assert_eq!(
        message(Skippable::new().pop(skip("a")), pass),
        "gpipe: layer 1 declares that it pops `a`, but has not"
    );
    let wrong: Run = |batch, skips| {
        skips.stash(&Skip::new("b"), batch[0].clone())?;
        Ok(batch)
    };
    let undeclared = "gpipe: layer 0 stashes `b`, which it does not declare or has done already";
    assert_eq!(message(Skippable::new(), wrong), undeclared);
    let twice: Run = |batch, skips| {
        skips.stash(&Skip::new("a"), batch[0].clone())?;
        skips.stash(&Skip::new("a"), batch[0].clone())?;
        Ok(batch)
    };
    assert!(message(Skippable::new().stash(skip("a")), twice).contains("has done already"));
    let wrong: Run = |batch, skips| skips.pop(&Skip::new("b")).map(|_| batch);
    assert_eq!(
        message(Skippable::new(), wrong),
        "gpipe: layer 0 pops `b`, which it does not declare or has done already"
    );
}

/// Weights and biases that PyTorch 1.x and later draw for seed 0.
const WEIGHTS: [([f64; 9], [f64; 3]); 3] = [
    (
        [
            -0.004322518,
            0.30971584,
            -0.47518533,
            -0.4248946,
            -0.22236897,
            0.15482073,
            -0.011439145,
            0.45777494,
            -0.0512364,
        ],
        [0.15277413, -0.1744828, -0.11348708],
    ),
    (
        [
            -0.5515707,
            -0.38236874,
            -0.23799711,
            0.021387115,
            0.22824688,
            0.34642333,
            -0.39140946,
            -0.25141457,
            0.20970349,
        ],
        [0.4794247, -0.11881878, 0.43203798],
    ),
    (
        [
            -0.09305926,
            0.0610918,
            0.5227769,
            -0.5355907,
            -0.36346388,
            -0.14616501,
            -0.22505105,
            0.4988311,
            -0.3742267,
        ],
        [-0.2657733, -0.40336025, -0.54072374],
    ),
];

struct Third {
    conv: Conv2d,
    place: usize,
}
parameters!(Third { conv });

impl Third {
    fn new(place: usize, dtype: DType, device: Device) -> Third {
        let conv = Conv2dConfig::new(3, 3, [1, 1]).init(&Scope::new(0, dtype, device).child(place)).unwrap();
        let (weight, bias) = WEIGHTS[place];
        conv.weight.load(&Tensor::from_slice(&weight, &[3, 3, 1, 1], device).unwrap()).unwrap();
        conv.bias.as_ref().unwrap().load(&Tensor::from_slice(&bias, &[3], device).unwrap()).unwrap();
        Third { conv, place }
    }
}

impl Layer for Third {
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch> {
        let (x, skip) = (input.one()?, Skip::new("1to3"));
        if self.place == 0 {
            skips.stash(&skip, x.clone())?;
        }
        let y = self.conv.forward(&x)?;
        let skipped = if self.place == 2 { skips.pop(&skip)? } else { None };
        Ok(skipped.iter().try_fold(y, |y, skipped| y.add(skipped))?.into())
    }

    fn skippable(&self) -> Skippable {
        let skip = Skip::new("1to3");
        match self.place {
            0 => Skippable::new().stash(skip),
            1 => Skippable::new(),
            _ => Skippable::new().pop(skip),
        }
    }
}

fn model(dtype: DType, place: impl Fn(usize) -> Device) -> Sequence {
    (0..3).map(|i| Third::new(i, dtype, place(i))).fold(Sequence::new(), Sequence::with)
}

/// The gradient of the mean of `rows` images' outputs by `y`.
fn of_the_mean(y: &Var, rows: usize) -> Var {
    let whole = y.numel() / y.shape()[0] * rows;
    Var::new(kernels::full(y.shape(), 1.0 / whole as f64, y.dtype(), y.device()).unwrap())
}

#[test]
fn every_balance_and_mode_gives_the_plain_models_bits() {
    let own = devices(3);
    let (rows, shape) = (10, [10, 3, 7, 5]);
    let plain = model(DType::F64, |_| plain_device());
    let part = |(part, _): (Batch, _)| Var::leaf(part.one().unwrap().into_tensor()).unwrap();
    let xs = scatter(&constant(4, &shape, plain_device()).into(), 3).unwrap();
    let xs: Vec<Var> = xs.into_iter().map(part).collect();
    let ys: Vec<Var> = xs.iter().map(|x| plain.run(x).and_then(Batch::one).unwrap()).collect();
    ys.iter().rev().for_each(|y| y.backward_with(of_the_mean(y, rows)).unwrap());
    let dx = xs.iter().flat_map(|x| bits(&x.grad().unwrap())).collect::<Vec<_>>();
    let wanted = (ys.iter().flat_map(bits).collect::<Vec<_>>(), dx, gradients(&plain));
    for balance in [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]] {
        for mode in MODES {
            let partition = Partition::new(balance, &own).unwrap();
            let layers = model(DType::F64, |layer| partition.device(layer).unwrap());
            let config = GPipeConfig::new(3).with_recompute(mode);
            let piped = GPipe::new(layers, partition, config).unwrap();
            let x = leaf(4, &shape, own[0]);
            let y = piped.run(&x).and_then(Batch::one).unwrap();
            y.backward_with(of_the_mean(&y, rows)).unwrap();
            let got = (bits(&y), bits(&x.grad().unwrap()), gradients(&piped));
            assert!(got == wanted, "{balance:?}, {mode}");
        }
    }
}

#[test]
fn norms_are_torchgpipes() {
    let own = devices(3);
    let partition = Partition::new(&[1, 1, 1], &own).unwrap();
    let layers = model(DType::F32, |layer| own[layer]);
    let piped = GPipe::new(layers, partition, GPipeConfig::new(3)).unwrap();
    let (rows, shape) = (30, [30, 3, 224, 224]);
    // Uniform in [0, 1), as torch's rand.
    let values: Vec<f32> =
        numbers(5, shape.iter().product()).into_iter().map(|v| (v / 2.0 + 0.5) as f32).collect();
    let x = Var::leaf(Tensor::from_slice(&values, &shape, own[0]).unwrap()).unwrap();
    let y = piped.run(&x).and_then(Batch::one).unwrap();
    y.backward_with(of_the_mean(&y, rows)).unwrap();
    let norm = |v: &Var| v.to_vec::<f32>().unwrap().iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    // The gradient depends on the weights alone. The output is of other draws than torchgpipe's; PyTorch makes 1038.8108 of
    // these.
    let (output, gradient) = (norm(&y), norm(&x.grad().unwrap()));
    assert!((gradient / 0.000_453_305_3 - 1.0).abs() < 1e-6, "{gradient}");
    assert!((output / 1038.8108 - 1.0).abs() < 1e-6 && (output / 1039.159 - 1.0).abs() < 1e-3, "{output}");
}
