//! Random faults, each in one number of one rank: a gradient of a micro-batch that is not finite, a wrong bit in a gradient before its update
//! or in a weight after it. The error, or a replay, names the place, and the run goes on from its last checkpoint with the losses of an
//! undisturbed run.

use std::cell::RefCell;

use phalanx_kernels::optim;
use phalanx_nn::{AdamW, Group, Optimizer, Parameter, Parameters, Rule, StepHyperparameters};
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::tensor_parallel::TensorParallel;
use phalanx_tensor::Context;
use phalanx_train::{AnyRule, MeshRank, Replay, checkpoints};

use super::packed::{CONTEXT, models, packed, part};
use super::*;

const MICRO_BATCHES: usize = 2;
const STEPS: u64 = 6;
/// Steps done at the one checkpoint before the last step.
const SAVED: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Nan,
    Infinity,
    BitOfGradient,
    BitOfWeight,
}

/// Where a fault is. Parameter, element and bit are drawn by the rank itself.
#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: Kind,
    step: u64,
    rank: usize,
    micro_batch: usize,
    draws: [u32; 4],
}

impl Fault {
    fn draw(kind: Kind, ranks: usize, seed: u64) -> Fault {
        let draws = RngKey { seed, step: 0 }.site(77);
        let [step, rank, micro_batch, _] = draws.block(0, 0);
        Fault {
            kind,
            step: 1 + u64::from(step) % (STEPS - 1),
            rank: rank as usize % ranks,
            micro_batch: micro_batch as usize % MICRO_BATCHES,
            draws: draws.block(0, 1),
        }
    }

    /// A number that is wrong now: of an element that is not 0, so that the bit counts.
    fn flip(&self, tensor: &mut Tensor) -> phalanx_tensor::Result<()> {
        let mut values = tensor.to_vec::<f32>()?;
        let odd: Vec<usize> = (0..values.len()).filter(|at| values[*at] != 0.0).collect();
        let at = odd[self.draws[1] as usize % odd.len()];
        // The sign, or a bit of the first half of the mantissa. Those of the exponent make numbers that are seen without digests.
        let bit = 12 + self.draws[2] % 12;
        let bit = if bit == 23 { 31 } else { bit };
        values[at] = f32::from_bits(values[at].to_bits() ^ (1 << bit));
        tensor.copy_from(&Tensor::from_slice(&values, tensor.shape(), Device::CPU)?)
    }
}

/// AdamW, in whose step a bit is wrong.
struct Flipping(AdamW, Fault);

impl Rule for Flipping {
    fn state(&self) -> Vec<&'static str> {
        self.0.state()
    }

    fn update(&self, step: optim::Step<'_>, hyper: StepHyperparameters) -> phalanx_nn::Result<()> {
        let is_now = hyper.step == self.1.step + 1;
        let item = &step.items[0].slice;
        let (mut grad, mut param) = (item.grad.clone(), item.param.clone());
        if is_now && self.1.kind == Kind::BitOfGradient {
            self.1.flip(&mut grad)?;
        }
        self.0.update(step, hyper)?;
        if is_now && self.1.kind == Kind::BitOfWeight {
            self.1.flip(&mut param)?;
        }
        Ok(())
    }
}

thread_local! {
    /// The fault of this thread's rank, and the parameters of its part of the model.
    static OWN: RefCell<Option<(Fault, Vec<Parameter>)>> = const { RefCell::new(None) };
}

/// Spoils a gradient whenever a pass of the fault's step computes it.
fn spoil(parameter: &Parameter, fault: Fault) {
    let (calls, odd) = (AtomicU64::new(0), if fault.kind == Kind::Nan { f64::NAN } else { f64::INFINITY });
    let hook = move |grad: &Var| {
        let call = calls.fetch_add(1, Ordering::Relaxed) as usize;
        let is_now = Context::current().rng.step == fault.step && call % MICRO_BATCHES == fault.micro_batch;
        if !is_now {
            return Ok(None);
        }
        let mut spoilt = grad.tensor().copy()?;
        let at = fault.draws[1] as usize % spoilt.numel();
        phalanx_kernels::fill_(&mut spoilt.with_shape(&[spoilt.numel()])?.narrow(0, at, 1)?, odd)?;
        spoilt = spoilt.contiguous()?;
        Ok(Some(Var::new(spoilt)))
    };
    parameter.leaves()[0].var().on_grad(hook).unwrap();
}

/// A run, perhaps with a fault, and the name of the parameter that has it.
fn trained(config: &Config, fault: Option<Fault>, told: &Told) -> (Result<Summary>, String) {
    let named = Arc::new(Mutex::new(String::new()));
    let trainer = Trainer::new(config.clone()).samples(packed(), CONTEXT).callback(told.clone());
    let name = named.clone();
    let trainer = trainer.optimizers(move |mut parameters, lr| {
        let mut all = Vec::new();
        if let Some((fault, whole)) = OWN.take() {
            let of = |some: &[Parameter]| {
                let some: Vec<&Parameter> = some.iter().filter(|p| p.tensor().numel() > 0).collect();
                some[fault.draws[0] as usize % some.len()].clone()
            };
            let chosen = if let Kind::Nan | Kind::Infinity = fault.kind {
                let chosen = of(&whole);
                spoil(&chosen, fault);
                chosen
            } else {
                let chosen = of(&parameters);
                let rule: AnyRule = Box::new(Flipping(AdamW::default(), fault));
                parameters.retain(|p| !p.is(&chosen));
                all.push(Optimizer::new(rule, vec![Group::new(vec![chosen.clone()], lr)])?);
                chosen
            };
            *name.lock().unwrap() = chosen.name().into();
        }
        let rule: AnyRule = Box::<AdamW>::default();
        all.push(Optimizer::new(rule, vec![Group::new(parameters, lr)])?);
        Ok(all)
    });
    let done = trainer.run_parts(|rank| {
        let part = whole(config, rank)?;
        let own = fault.filter(|fault| fault.rank == rank.rank());
        OWN.set(own.map(|fault| (fault, part.parameters())));
        Ok(part)
    });
    let named = named.lock().unwrap().clone();
    (done, named)
}

fn whole(config: &Config, rank: &MeshRank) -> Result<impl phalanx_parallel::hybrid::StagedModel + use<>> {
    part(config, &models()[0], Arc::new(TensorParallel::new(rank.groups.along(Axis::Tp))), rank)
}

/// The first step of the repeated ones that differs, and what differs.
fn replayed(config: &Config, from: PathBuf) -> (u64, String) {
    let start = checkpoints::latest(&from).unwrap().settings()["step"].parse().unwrap();
    let optimizers = |parameters, lr| {
        let rule: AnyRule = Box::<AdamW>::default();
        Ok(vec![Optimizer::new(rule, vec![Group::new(parameters, lr)])?])
    };
    let trainer = Trainer::new(config.clone()).samples(packed(), CONTEXT).optimizers(optimizers);
    let replayed = trainer.replay(&Replay { from, steps: start..STEPS }, |rank| whole(config, rank)).unwrap();
    replayed.difference.expect("a step differs")
}

#[test]
fn a_random_fault_is_named_by_its_place_and_gets_into_no_checkpoint() {
    let layout = |dp, tp, pp| Layout { dp, tp, pp, micro_batches: MICRO_BATCHES, ..Layout::default() };
    let layouts = [
        (layout(1, 1, 1), 0),
        (layout(3, 1, 1), 0),
        (layout(2, 2, 1), 0),
        (layout(1, 1, 2), 0),
        (layout(2, 1, 1), 2),
        (layout(2, 1, 1), 3),
    ];
    for (number, (layout, zero)) in layouts.into_iter().enumerate() {
        let base = config(layout, zero);
        let config = Config { batch: 12, steps: STEPS, validate_every: 0, digests: 1, ..base };
        let config = Config { check_replicas: 1, save_every: SAVED, keep_last: 2, timeout_s: 20.0, ..config };
        let undisturbed = Told::default();
        trained(&config, None, &undisturbed).0.unwrap();
        for seed in 0..3 {
            for kind in [Kind::Nan, Kind::Infinity, Kind::BitOfGradient, Kind::BitOfWeight] {
                let fault = Fault::draw(kind, config.ranks(), 100 * number as u64 + 10 * seed + kind as u64);
                check(&config, fault, &undisturbed.losses());
            }
        }
    }
}

fn check(config: &Config, fault: Fault, undisturbed: &[u64]) {
    let folder = Folder::new();
    let config = Config { out: Some(folder.path().into()), ..config.clone() };
    let (done, name) = trained(&config, Some(fault), &Told::default());
    let Fault { kind, step, rank, micro_batch, .. } = fault;
    let case = format!(
        "dp {} x tp {} x pp {}, ZeRO {}: {fault:?}, {name}",
        config.layout.dp, config.layout.tp, config.layout.pp, config.zero
    );
    let replicas = config.layout.dp > 1 && config.zero == 0;
    if !replicas && !matches!(kind, Kind::Nan | Kind::Infinity) {
        // Every rank has its part alone, so only a repetition shows the wrong bit.
        done.unwrap();
        if step < SAVED {
            return;
        }
        let (found, what) = replayed(&config, folder.path().join(format!("checkpoint-{SAVED:08}")));
        assert_eq!(found, step, "{case}: {what}");
        assert!(what.contains(&format!("in the updated parameter {name};")), "{case}: {what}");
        return;
    }
    let error = done.expect_err(&case).to_string();
    assert!(error.contains(&format!("step {step}: ")), "{case}: {error}");
    if let Kind::Nan | Kind::Infinity = kind {
        let layer = name.rsplit_once('.').unwrap().0;
        let wanted = format!(
            "gradients that are not finite in micro-batch {micro_batch} of rank {rank}: 1, from `{name}` (layer `{layer}`)"
        );
        assert!(error.contains(&wanted), "{case}: {error}, wanted {wanted}");
    } else {
        let is_named = error.contains(&format!("corruption: of parameter {name}, "))
            || error.contains(&format!("corruption: of optimizer state {name}."));
        assert!(is_named, "{case}: {error}");
        let alone = error.contains(&format!(", rank {rank} has a copy unlike that of ranks "));
        let pair = [rank % 2, rank % 2 + 2];
        let is_of_pair = error.contains(&format!(", ranks {}, {} have copies that differ", pair[0], pair[1]));
        assert!(alone || config.layout.tp > 1 && is_of_pair, "{case}: {error}");
    }
    // What was saved before is good.
    if step >= SAVED {
        let resumed = Told::default();
        let config = Config { resume: config.out.clone(), ..config };
        trained(&config, None, &resumed).0.unwrap();
        assert_eq!(resumed.losses(), undisturbed[SAVED as usize..], "{case}");
    }
}
