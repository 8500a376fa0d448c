//! Skip connections: the plain model's gradients, straight copies, memory that goes early, and what is refused.

use phalanx_nn::autograd::Var;
use phalanx_parallel::pipeline::gpipe::{
    Batch, Checkpoint, GPipe, GPipeConfig, Layer, Namespace, Partition, Phase, Sequence, Skip, Skippable,
    Skips, Timeline,
};
use phalanx_tensor::Device;

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
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), Device::CPU);
    for balance in [&[8][..], &[4, 4], &[1, 2, 5], &[2, 2, 2, 2], &[1, 3, 2, 2]] {
        for mode in MODES {
            for micro_batches in [1, 2, 3, 5] {
                let partition = Partition::new(balance, &own).unwrap();
                let config = GPipeConfig::new(micro_batches).with_checkpoint(mode);
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
        let config = GPipeConfig::new(2).with_checkpoint(mode).with_observer(timeline.observer());
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
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), Device::CPU);
    for mode in MODES {
        let model = each(layers(), &own, GPipeConfig::new(3).with_checkpoint(mode));
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
    let wanted = outcome(|x| plain.run(x).and_then(Batch::one).unwrap(), Device::CPU);
    for mode in MODES {
        let model = each(layers(), &own, GPipeConfig::new(2).with_checkpoint(mode));
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
    // No value is saved for backward: what is left is what somebody holds.
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
    let model = each(layers, &own, GPipeConfig::new(1).with_checkpoint(Checkpoint::Never));
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
                GPipeConfig::new(2).with_checkpoint(mode),
            );
            let _context = phalanx_tensor::Context::with(|c| c.train = train);
            let x = constant(1, &[4, 100], own[0]);
            let before = bytes();
            let y = model.run(&x).and_then(Batch::one).unwrap();
            if mode != Checkpoint::Never && train {
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
