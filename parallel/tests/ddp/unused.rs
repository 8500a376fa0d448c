//! Parameters that a pass does not use: known before backward begins, so that no bucket waits for them. Graphs that stay the
//! same. Parameters that were frozen when they were wrapped.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{HookHandle, Var, checkpoint};
use phalanx_nn::{Linear, LinearConfig, Module, Parameter, Parameters, Scope, parameters};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{AllReduce, Bucket, BucketHook, Ddp, DdpConfig, PendingBucket};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::threaded;

/// Two maps one after the other, and one that is seldom used. It is registered last, so its gradients are in the first buckets.
struct Late {
    a: Linear,
    b: Linear,
    spare: Linear,
}
parameters!(Late { a, b, spare });

/// How a pass uses a [`Late`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum Uses {
    /// Without `spare`.
    Main,
    /// With it.
    All,
    /// Main, and `b` a second time.
    Twice,
}

impl Late {
    fn new(device: Device) -> Late {
        let scope = Scope::new(23, DType::F32, device);
        let linear = |name: &str| LinearConfig::new(3, 3).init(&scope.child(name)).unwrap();
        Late { a: linear("a"), b: linear("b"), spare: linear("spare") }
    }

    /// The loss over rows that are a function of `seed`; with `recomputed`, nothing but the last sum is kept for backward.
    fn loss(self: &Arc<Late>, seed: u64, uses: Uses, recomputed: bool) -> Result<Var> {
        let number = |i: u64| (((i + 1) * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0;
        let values: Vec<f32> = (0..6).map(number).collect();
        let x = Var::from_slice(&values, &[2, 3], self.parameters()[0].device())?;
        let model = Arc::clone(self);
        let body = move |inputs: &[Var]| -> phalanx_nn::autograd::Result<Var> {
            let [x] = inputs else { unreachable!() };
            let forward = || -> phalanx_nn::Result<Var> {
                let y = model.b.forward(&model.a.forward(x)?.tanh()?)?;
                Ok(match uses {
                    Uses::Main => y,
                    Uses::All => y.add(&model.spare.forward(x)?)?,
                    Uses::Twice => model.b.forward(&y.tanh()?)?,
                })
            };
            forward().map_err(Into::into)
        };
        let y = if recomputed { checkpoint(body, &[&x])? } else { body(&[x])? };
        Ok(y.mul(&y)?.sum_all()?)
    }

    fn grads(&self) -> Vec<Option<Vec<f32>>> {
        self.parameters().iter().map(|p| p.grad().unwrap().map(|g| g.to_vec().unwrap())).collect()
    }

    fn zero_grad(&self) -> Result<()> {
        Ok(self.parameters().iter().try_for_each(Parameter::zero_grad)?)
    }
}

/// What happened on a rank, in order: buckets started, and gradients that arrived.
#[derive(Clone, Debug, Default)]
struct Events(Arc<Mutex<Vec<String>>>);

impl Events {
    fn note(&self, event: impl Into<String>) {
        self.0.lock().unwrap().push(event.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// Notes the gradients of a model from now on.
    fn of(&self, model: &Late) -> Vec<HookHandle> {
        let watch = |p: &Parameter| {
            let (events, name) = (self.clone(), p.name().to_string());
            p.leaves()[0].on_accumulate(move |_| {
                events.note(name.clone());
                Ok(())
            })
        };
        model.parameters().iter().map(watch).collect()
    }
}

impl BucketHook for Events {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
        self.note(format!("bucket {}", bucket.index));
        AllReduce.start(bucket, comm)
    }
}

/// A bucket for each parameter.
fn single_buckets(config: DdpConfig) -> DdpConfig {
    DdpConfig { first_bucket_bytes: 1, bucket_bytes: 1, ..config }
}

fn finding(events: &Events) -> DdpConfig {
    let config = DdpConfig { find_unused: true, hook: Arc::new(events.clone()), ..DdpConfig::default() };
    single_buckets(config)
}

/// The buckets that were started before the last gradient had come.
fn started_early(events: &[String]) -> usize {
    let is_bucket = |event: &&String| event.starts_with("bucket");
    let last = events.iter().rposition(|event| !is_bucket(&event)).expect("a gradient");
    events[..last].iter().filter(is_bucket).count()
}

#[test]
fn buckets_do_not_wait_for_parameters_that_the_graph_of_the_loss_does_not_reach() {
    for (recomputed, announced) in [(false, false), (true, false), (false, true)] {
        let all = launch::threads(2, |rank| -> Result<_> {
            let model = Arc::new(Late::new(rank.device()));
            let events = Events::default();
            let _watch = events.of(&model);
            let ddp = Ddp::new(&model, rank.comm().clone(), finding(&events))?;
            // No rank uses it, and it has the first buckets; or only rank 1, and, filled anew, it has the last.
            let sometimes = if rank.rank() == 1 { Uses::All } else { Uses::Main };
            for (uses, wanted) in [(Uses::Main, 4), (sometimes, 3)] {
                let loss = model.loss(rank.rank() as u64, uses, recomputed)?;
                if announced {
                    ddp.begin_from(&[&loss])?;
                    loss.backward()?;
                    ddp.finish()?;
                } else {
                    ddp.backward(&loss)?;
                }
                let events = events.take();
                assert!(started_early(&events) >= wanted, "{uses:?}: {events:?}");
                model.zero_grad()?;
            }
            Ok(())
        });
        all.unwrap();
    }
}

#[test]
fn what_the_graph_tells_changes_no_bits() {
    let run = |early: bool, recomputed: bool| {
        let body = |rank: launch::Rank| -> Result<_> {
            let model = Arc::new(Late::new(rank.device()));
            let config = single_buckets(DdpConfig { find_unused: true, ..DdpConfig::default() });
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let mut seen = Vec::new();
            for step in 0..5u64 {
                let uses =
                    [Uses::Main, Uses::All][usize::from((step + rank.rank() as u64).is_multiple_of(3))];
                for micro in 0..2 {
                    let _accumulate = (micro == 0).then(|| ddp.no_sync());
                    let uses = if micro == 0 { Uses::All } else { uses };
                    let loss = model.loss(step * 9 + micro * 3 + rank.rank() as u64, uses, recomputed)?;
                    if early {
                        ddp.backward(&loss)?;
                    } else {
                        ddp.begin()?;
                        loss.backward()?;
                        ddp.finish()?;
                    }
                }
                seen.push(model.grads());
                model.zero_grad()?;
            }
            Ok(seen)
        };
        launch::threads(3, body).unwrap()
    };
    let wanted = run(false, false);
    assert_eq!(wanted[0], wanted[2]);
    assert_eq!(run(true, false), wanted);
    assert_eq!(run(true, true), wanted);
}

fn fixed() -> DdpConfig {
    single_buckets(DdpConfig { static_graph: true, ..DdpConfig::default() })
}

#[test]
fn a_static_graph_is_learned_in_its_first_pass_and_gives_the_same_bits() {
    let run = |config: &DdpConfig, uses: fn(usize) -> Uses, recomputed: bool| {
        let body = |rank: launch::Rank| -> Result<_> {
            let model = Arc::new(Late::new(rank.device()));
            let ddp = Ddp::new(&model, rank.comm().clone(), config.clone())?;
            let mut seen = Vec::new();
            for step in 0..4 {
                ddp.backward(&model.loss(step * 5 + rank.rank() as u64, uses(rank.rank()), recomputed)?)?;
                seen.push(model.grads());
                model.zero_grad()?;
            }
            Ok(seen)
        };
        launch::threads(3, body).unwrap()
    };
    let finding = single_buckets(DdpConfig { find_unused: true, ..DdpConfig::default() });
    let on_threads = || DdpConfig { engine: threaded(), ..fixed() };
    let kinds: [fn(usize) -> Uses; 4] =
        [|_| Uses::Main, |_| Uses::All, |_| Uses::Twice, |rank| [Uses::Main, Uses::All, Uses::Twice][rank]];
    for uses in kinds {
        let wanted = run(&finding, uses, false);
        for recomputed in [false, true] {
            assert_eq!(run(&fixed(), uses, recomputed), wanted);
        }
        // One rank alone has an engine of its own.
        let body = |rank: launch::Rank| -> Result<()> {
            let model = Arc::new(Late::new(rank.device()));
            let ddp = Ddp::new(&model, rank.comm().clone(), on_threads())?;
            for step in 0..4 {
                ddp.backward(&model.loss(step * 5 + rank.rank() as u64, uses(rank.rank()), false)?)?;
                assert_eq!(model.grads(), wanted[rank.rank()][step as usize]);
                model.zero_grad()?;
            }
            Ok(())
        };
        launch::threads(3, body).unwrap();
    }
}

#[test]
fn buckets_of_a_static_graph_overlap_with_backward_from_the_second_pass_on() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let model = Arc::new(Late::new(rank.device()));
        let events = Events::default();
        let _watch = events.of(&model);
        let config = DdpConfig { hook: Arc::new(events.clone()), ..fixed() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let mut early = Vec::new();
        for _ in 0..3 {
            ddp.backward(&model.loss(rank.rank() as u64, Uses::Main, true)?)?;
            early.push(started_early(&events.take()));
            model.zero_grad()?;
        }
        Ok(early)
    });
    for early in all.unwrap() {
        assert!(early[0] == 0 && early[1..].iter().all(|&buckets| buckets >= 2), "{early:?}");
    }
}

#[test]
fn a_parameter_of_a_static_graph_may_get_several_gradients_in_a_pass() {
    let run = |is_static: bool| {
        let body = |rank: launch::Rank| -> Result<_> {
            let model = Arc::new(Late::new(rank.device()));
            let config = if is_static { fixed() } else { single_buckets(DdpConfig::default()) };
            let config = DdpConfig { find_unused: !is_static, ..config };
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let mut seen = Vec::new();
            for step in 0..3 {
                let seed = step * 10 + rank.rank() as u64;
                let losses = [model.loss(seed, Uses::Main, false)?, model.loss(seed + 4, Uses::All, true)?];
                if is_static {
                    ddp.begin()?;
                    losses.iter().try_for_each(Var::backward)?;
                    ddp.finish()?;
                } else {
                    let accumulate = ddp.no_sync();
                    ddp.backward(&losses[0])?;
                    drop(accumulate);
                    ddp.backward(&losses[1])?;
                }
                seen.push(model.grads());
                model.zero_grad()?;
            }
            Ok(seen)
        };
        launch::threads(2, body).unwrap()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_static_graph_that_changes_is_an_error_that_names_the_parameter() {
    let told = |first: Uses, second: Uses, passes: usize| {
        let body = |rank: launch::Rank| -> Result<()> {
            let model = Arc::new(Late::new(rank.device()));
            let ddp = Ddp::new(&model, rank.comm().clone(), fixed())?;
            ddp.backward(&model.loss(1, first, false)?)?;
            model.zero_grad()?;
            ddp.begin()?;
            (0..passes).try_for_each(|_| model.loss(1, second, false)?.backward())?;
            ddp.finish()
        };
        launch::threads(2, body).unwrap_err().to_string()
    };
    let fewer = told(Uses::All, Uses::Main, 1);
    assert!(fewer.contains("spare.weight") && fewer.contains("got 0 gradients"), "{fewer}");
    let more = told(Uses::Main, Uses::All, 1);
    assert!(more.contains("spare.") && more.contains("no rank's first pass"), "{more}");
    let twice = told(Uses::Main, Uses::Main, 2);
    assert!(twice.contains("got 2 gradients in this pass, and 1 in the first"), "{twice}");
    for message in [fewer, more, twice] {
        assert!(message.contains("`DdpConfig::static_graph`"), "{message}");
    }
}

#[test]
fn a_parameter_that_was_frozen_gets_no_gradient_of_one_rank_alone() {
    // However backward is called, and even if it gives no other parameter a gradient.
    let run = |rank: launch::Rank, announced: bool| -> Result<()> {
        let model = Arc::new(Late::new(rank.device()));
        model.parameters()[2..].iter().for_each(Parameter::freeze);
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        if announced {
            ddp.begin()?;
        } else {
            model.parameters()[..2].iter().for_each(Parameter::freeze);
        }
        model.b.weight.unfreeze();
        Ok(model.loss(1, Uses::Main, false)?.backward()?)
    };
    for announced in [false, true] {
        let error = launch::threads(2, |rank| run(rank, announced)).unwrap_err().to_string();
        let words = ["b.weight", "is trained now, and was frozen when `Ddp` was made; make it anew"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn a_parameter_that_another_wrapper_trains_may_be_frozen_in_the_first() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = Arc::new(Late::new(rank.device()));
        let (ours, theirs) = (&model.parameters()[..2], &model.parameters()[2..4]);
        theirs.iter().for_each(Parameter::freeze);
        let first =
            Ddp::new(&model, rank.comm().clone(), DdpConfig { find_unused: true, ..DdpConfig::default() })?;
        theirs.iter().for_each(Parameter::unfreeze);
        let second = Ddp::new(&model.b, rank.comm().clone(), DdpConfig::default())?;
        for _ in 0..2 {
            ours.iter().for_each(Parameter::freeze);
            second.backward(&model.loss(1, Uses::Main, false)?)?;
            ours.iter().for_each(Parameter::unfreeze);
            theirs.iter().for_each(Parameter::freeze);
            first.backward(&model.loss(1, Uses::Main, false)?)?;
            theirs.iter().for_each(Parameter::unfreeze);
        }
        Ok(())
    };
    launch::threads(2, run).unwrap();
    // Made anew after they were unfrozen, while the earlier one lives.
    let again = |rank: launch::Rank| -> Result<()> {
        let model = Arc::new(Late::new(rank.device()));
        model.parameters().iter().for_each(Parameter::freeze);
        let _first = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        model.parameters().iter().for_each(Parameter::unfreeze);
        let second = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        second.backward(&model.loss(1, Uses::All, false)?)
    };
    launch::threads(2, again).unwrap();
}
