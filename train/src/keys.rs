//! The keys of a [`Config`].

use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{OneCycle, Schedule};
use phalanx_tensor::DType;

use crate::settings::{Given, Key, Keyed, Kind, Value};
use crate::{Asynchronous, Backend, Config, Error, OnDivergence, Plateau, Result, choices};

choices! {
    RecomputeMode { RecomputeMode::Never = "never", RecomputeMode::ExceptLast = "except-last", RecomputeMode::Always = "always" }
    Backend { Backend::Threads = "threads", Backend::Mpi = "mpi", Backend::Nccl = "nccl" }
}

const SCHEDULES: Kind =
    Kind::Choice(&["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream", "pipedream-2bw"]);
const RATES: Kind = Kind::Choice(&[
    "constant",
    "cosine",
    "linear",
    "inverse-sqrt",
    "warmup-stable-decay",
    "one-cycle",
    "step",
]);
const POLICIES: Kind = Kind::Choice(&["stop", "skip", "rollback"]);
const GRADIENTS: Kind = Kind::Choice(&["f32", "bf16", "f64"]);

/// Updates left out in a row, or returns to a checkpoint, unless a key says how many.
const BORNE: u32 = 10;
const PLATEAU: Plateau = Plateau { factor: 0.1, patience: 10 };

impl Keyed for Config {
    fn keys() -> Vec<Key<Config>> {
        [steps(), rates(), numbers(), layout(), checkpoints(), outcomes(), files()].concat()
    }

    fn settle(&mut self, given: &Given<'_>) -> Result<()> {
        self.settle_ranks(given)?;
        self.settle_pieces(given)?;
        self.settle_schedule(given)?;
        match self.on_divergence {
            OnDivergence::Stop if is_beside(given, "divergence-limit", "on-divergence") => {
                refuse("`divergence-limit` goes with `on-divergence` skip or rollback, and it is stop")
            }
            _ => Ok(()),
        }
    }
}

fn steps() -> Vec<Key<Config>> {
    let total = |c: &mut Config, text: &str| {
        c.steps = text.parse().ok()?;
        if let Some(total) = total(&mut c.lr) {
            *total = c.steps;
        }
        Some(())
    };
    vec![
        Key::with(
            "steps",
            "Optimizer steps in all, those before a resume included",
            Kind::Whole,
            |c| c.steps.text(),
            total,
        ),
        Key::new("batch", "Rows (sequences, of a text) in the global batch of one step", |c| &mut c.batch),
        Key::new("seed", "Seed of initial weights, dropout and the order of the data", |c| &mut c.seed),
    ]
}

fn rates() -> Vec<Key<Config>> {
    let set_schedule = |c: &mut Config, name: &str| {
        c.lr = named(name, &c.lr, c.steps)?;
        Some(())
    };
    vec![
        Key::with(
            "lr-schedule",
            "How the learning rate goes on after the warm-up",
            RATES,
            |c| Some(name(&c.lr).into()),
            set_schedule,
        ),
        Key::partial("lr", "Peak learning rate", |c: &mut Config| Some(peak(&mut c.lr))),
        Key::partial("warmup", "Steps of linear warm-up", |c: &mut Config| warmup(&mut c.lr)),
        Key::partial("lr-min", "The rate at the end of a cosine, a line or a decay", |c: &mut Config| {
            lowest(&mut c.lr)
        }),
        Key::partial(
            "lr-decay",
            "Steps at the end in which warmup-stable-decay goes down [default: half of all]",
            |c: &mut Config| {
                if let Schedule::WarmupStableDecay { decay, .. } = &mut c.lr { Some(decay) } else { None }
            },
        ),
        Key::partial(
            "lr-rise",
            "The share of one-cycle's steps in which the rate rises",
            |c: &mut Config| {
                if let Schedule::OneCycle(cycle) = &mut c.lr { Some(&mut cycle.pct_start) } else { None }
            },
        ),
        Key::partial(
            "lr-step",
            "Steps after which `step` lowers the rate, again and again [default: a third of all]",
            |c: &mut Config| {
                if let Schedule::Step { step_size, .. } = &mut c.lr { Some(step_size) } else { None }
            },
        ),
        Key::partial("lr-gamma", "What `step` multiplies the rate by", |c: &mut Config| {
            if let Schedule::Step { gamma, .. } = &mut c.lr { Some(gamma) } else { None }
        }),
        Key::with(
            "plateau-factor",
            "Multiply the rate by this where validations bring no lower loss",
            Kind::Number,
            |c| c.plateau.and_then(|plateau| plateau.factor.text()),
            |c, text| {
                c.plateau.get_or_insert(PLATEAU).factor = text.parse().ok()?;
                Some(())
            },
        ),
        Key::with(
            "plateau-patience",
            "After that many validations in a row without a lower loss",
            Kind::Whole,
            |c| c.plateau.and_then(|plateau| plateau.patience.text()),
            |c, text| {
                c.plateau.get_or_insert(PLATEAU).patience = text.parse().ok()?;
                Some(())
            },
        ),
        Key::with(
            "clip",
            "Largest global gradient norm; 0 for no clipping",
            Kind::Number,
            |c| c.clip.unwrap_or(0.0).text(),
            |c, text| {
                c.clip = Some(text.parse().ok()?).filter(|clip| *clip != 0.0);
                Some(())
            },
        ),
        Key::new(
            "ema",
            "Keep an average of the weights, of which this share stays at each step; it is validated and saved",
            |c| &mut c.ema,
        ),
    ]
}

fn numbers() -> Vec<Key<Config>> {
    vec![
        Key::new("dtype", "Type of weights and activations; bf16 keeps f32 master weights", |c| &mut c.dtype),
        Key::with(
            "grad-dtype",
            "Type of accumulated gradients [default: f32, f64 in an f64 run]",
            GRADIENTS,
            |c| c.grad_dtype.text(),
            |c, text| {
                c.grad_dtype = Some(DType::parse(text).filter(|dtype| *dtype != DType::F16)?);
                Some(())
            },
        ),
        Key::new(
            "loss-scaling",
            "Multiply losses before their backward pass, so that gradients in f16 do not vanish [default: in f16]",
            |c| &mut c.loss_scaling,
        ),
        Key::new(
            "device",
            "cpu, cuda[:i], or meta, which measures the memory of a step without computing it; several ranks take a GPU of their machine each",
            |c| &mut c.device,
        ),
        Key::new("threads", "Threads of a rank [default: cores / ranks]", |c| &mut c.threads),
        Key::with(
            "no-capture",
            "Give a GPU the kernels of a step one by one; by default a step of one GPU is captured once, as a CUDA graph, and launched whole",
            Kind::Switch,
            |c| (!c.capture).text(),
            |c, text| {
                c.capture = !bool::parse(text)?;
                Some(())
            },
        ),
        Key::new("workers", "Threads of a rank that read data; 0 for the rank's own", |c| &mut c.workers),
        Key::new("prefetch", "Steps that they read ahead", |c| &mut c.prefetch),
    ]
}

fn layout() -> Vec<Key<Config>> {
    let checked = |_: &mut Config, text: &str| usize::parse(text).map(drop);
    vec![
        Key::with("ranks", "Ranks in all [default: dp x tp x pp]", Kind::Whole, |_| None, checked),
        Key::new("dp", "Data-parallel ranks", |c| &mut c.layout.dp),
        Key::new("tp", "Tensor-parallel ranks", |c| &mut c.layout.tp),
        Key::new("pp", "Pipeline ranks", |c| &mut c.layout.pp),
        Key::with(
            "schedule",
            "Pipeline schedule [default: 1f1b]; pipedream and pipedream-2bw do not flush between steps: gradients are of weights some steps old, clip is for each stage's norm, and there are flushes where checkpoints are saved",
            SCHEDULES,
            |c| match c.asynchronous {
                None => (c.layout.pp > 1).then(|| c.layout.schedule.clone()),
                Some(Asynchronous::WeightStashing) => Some("pipedream".into()),
                Some(Asynchronous::DoubleBuffered) => Some("pipedream-2bw".into()),
            },
            |c, text| {
                let Kind::Choice(names) = SCHEDULES else { return None };
                let name = names.iter().find(|name| **name == text)?;
                c.asynchronous = match *name {
                    "pipedream" => Some(Asynchronous::WeightStashing),
                    "pipedream-2bw" => Some(Asynchronous::DoubleBuffered),
                    _ => None,
                };
                c.layout.schedule = if c.asynchronous.is_some() { "1f1b" } else { name }.into();
                Some(())
            },
        ),
        Key::with(
            "virtual-stages",
            "Stages of a pipeline rank in interleaved schedules [default: 2]; zb-v always has 2",
            Kind::Whole,
            |c| {
                ["interleaved", "zb-v"].contains(&&c.layout.schedule[..]).then(|| c.layout.chunks.to_string())
            },
            |c, text| {
                c.layout.chunks = text.parse().ok()?;
                Some(())
            },
        ),
        Key::with(
            "micro-batches",
            "Pieces into which a rank cuts its share of the batch",
            Kind::Whole,
            |c| (c.layout.micro_batches * c.chains).text(),
            checked,
        ),
        Key::with(
            "emulate-dp",
            "Add gradients in the order in which that many data-parallel ranks would",
            Kind::Whole,
            |c| c.chains.text(),
            checked,
        ),
        Key::new(
            "zero",
            "What data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too",
            |c| &mut c.zero,
        ),
        Key::new("find-unused", "Some parameters may get no gradient in a step", |c| &mut c.find_unused),
        Key::new(
            "sequence-parallel",
            "Split norms and dropout along the sequence between tensor-parallel ranks",
            |c| &mut c.layout.sequence_parallel,
        ),
        Key::new(
            "recompute",
            "What repeats its forward pass in backward instead of keeping activations: blocks, or in a pipeline the stages of micro-batches",
            |c| &mut c.layout.recompute,
        ),
        Key::new(
            "backend",
            "How ranks talk: as threads of this process, as processes that mpirun has started, or over NCCL, each with a GPU [default: threads; TCP between processes where RANK and WORLD_SIZE are set]",
            |c| &mut c.backend,
        ),
    ]
}

fn checkpoints() -> Vec<Key<Config>> {
    vec![
        Key::new("save-every", "Steps between checkpoints; 0 for one at the end only", |c| &mut c.save_every),
        Key::new("keep-last", "Checkpoints that are kept", |c| &mut c.keep_last),
        Key::new("keep-best", "Keep the checkpoint with the lowest validation loss, too", |c| {
            &mut c.keep_best
        }),
        Key::new("restore-best", "End with the weights of that checkpoint", |c| &mut c.restore_best),
    ]
}

fn outcomes() -> Vec<Key<Config>> {
    vec![
        Key::new("validate-every", "Steps between validations; 0 for one at the end only", |c| {
            &mut c.validate_every
        }),
        Key::new(
            "validation-rows",
            "Rows of the validation data that are used, drawn by the seed [default: all]",
            |c| &mut c.validation_rows,
        ),
        Key::new("patience", "Validations in a row without a lower loss after which the run stops", |c| {
            &mut c.patience
        }),
        Key::with(
            "on-divergence",
            "What happens when the loss or a gradient is no number, or the loss explodes: an error that names the parameter, a step without an update, or a return to the last checkpoint",
            POLICIES,
            |c| {
                let policy = match c.on_divergence {
                    OnDivergence::Stop => "stop",
                    OnDivergence::Skip { .. } => "skip",
                    OnDivergence::Rollback { .. } => "rollback",
                };
                Some(policy.into())
            },
            |c, text| {
                c.on_divergence = match text {
                    "stop" => OnDivergence::Stop,
                    "skip" => OnDivergence::Skip { most: BORNE },
                    "rollback" => OnDivergence::Rollback { most: BORNE },
                    _ => return None,
                };
                Some(())
            },
        ),
        Key::partial(
            "divergence-limit",
            "Updates that are left out in a row, or returns to a checkpoint in a run, at most [default: 10]",
            |c: &mut Config| match &mut c.on_divergence {
                OnDivergence::Stop => None,
                OnDivergence::Skip { most } | OnDivergence::Rollback { most } => Some(most),
            },
        ),
        Key::new(
            "explodes-at",
            "How many times the mean of the last losses a loss is that explodes, if it is above the first ones, too",
            |c| &mut c.explodes_at,
        ),
    ]
}

fn files() -> Vec<Key<Config>> {
    vec![
        Key::new("out", "Folder for metrics.jsonl, report.html, config.toml and checkpoints", |c| &mut c.out),
        Key::new("resume", "Go on with the run in this folder, or from one checkpoint in it", |c| {
            &mut c.resume
        }),
        Key::new(
            "trace",
            "File for a trace of what ran when: two lanes a rank, one for its communication",
            |c| &mut c.trace,
        ),
    ]
}

fn refuse(why: impl Into<String>) -> Result<()> {
    Err(Error::Config(why.into()))
}

/// A key's whole number, which was checked when it was given.
fn whole(given: &Given<'_>, name: &str) -> Option<usize> {
    given(name)?.1.parse().ok()
}

/// Whether a key is given, and the other by no later source, which would mean that this one counts no more.
fn is_beside(given: &Given<'_>, name: &str, other: &str) -> bool {
    given(name).is_some_and(|(source, _)| given(other).is_none_or(|(other, _)| other <= source))
}

impl Config {
    /// As many replicas as `ranks` says.
    fn settle_ranks(&mut self, given: &Given<'_>) -> Result<()> {
        let Some(all) = whole(given, "ranks").filter(|_| is_beside(given, "ranks", "dp")) else {
            return Ok(());
        };
        if all == 0 {
            return refuse("`ranks` is 0, wanted at least 1");
        }
        let (tp, pp) = (self.layout.tp, self.layout.pp);
        let has_dp = is_beside(given, "dp", "ranks");
        if !has_dp {
            self.layout.dp = (all / tp.saturating_mul(pp).max(1)).max(1);
        }
        let (dp, ranks) = (self.layout.dp, self.ranks());
        match has_dp {
            _ if ranks == all => Ok(()),
            true => {
                refuse(format!("`ranks` {all} is not `dp` {dp} x `tp` {tp} x `pp` {pp}, which is {ranks}"))
            }
            false => refuse(format!(
                "`ranks` {all} is no multiple of `tp` {tp} x `pp` {pp}; the nearest is `dp` {dp}, {ranks} ranks"
            )),
        }
    }

    /// A rank's pieces, of which each chain has its part.
    fn settle_pieces(&mut self, given: &Given<'_>) -> Result<()> {
        let (pieces, chains) = (whole(given, "micro-batches"), whole(given, "emulate-dp"));
        let pieces = pieces.unwrap_or(self.layout.micro_batches.saturating_mul(self.chains));
        self.chains = chains.unwrap_or(self.chains);
        let chains = self.chains;
        if chains == 0 || pieces == 0 {
            let key = if chains == 0 { "emulate-dp" } else { "micro-batches" };
            return refuse(format!("`{key}` is 0, wanted at least 1"));
        }
        if !self.batch.is_multiple_of(chains) {
            return refuse(format!("`emulate-dp` {chains} does not divide `batch` {}", self.batch));
        }
        if !pieces.is_multiple_of(chains) {
            return refuse(format!("`emulate-dp` {chains} does not divide `micro-batches` {pieces}"));
        }
        self.layout.micro_batches = pieces / chains;
        Ok(())
    }

    /// Refuses keys of a pipeline that would do nothing.
    fn settle_schedule(&mut self, given: &Given<'_>) -> Result<()> {
        if let Some((_, schedule)) =
            given("schedule").filter(|_| given("pp").is_none() && self.layout.pp == 1)
        {
            return refuse(format!("`schedule` {schedule} goes with `pp`, which is not given"));
        }
        let stages =
            whole(given, "virtual-stages").filter(|_| is_beside(given, "virtual-stages", "schedule"));
        match (&self.layout.schedule[..], stages) {
            (_, None) | ("interleaved", _) | ("zb-v", Some(2)) => Ok(()),
            ("zb-v", Some(n)) => refuse(format!("`virtual-stages` is {n}, and zb-v always has 2")),
            (other, Some(n)) => refuse(format!(
                "`virtual-stages` {n} goes with `schedule` interleaved, and the schedule is {other}"
            )),
        }
    }
}

/// What a schedule is called.
fn name(schedule: &Schedule) -> &'static str {
    match schedule {
        Schedule::Constant { .. } => "constant",
        Schedule::Cosine { .. } => "cosine",
        Schedule::Linear { .. } => "linear",
        Schedule::InverseSqrt { .. } => "inverse-sqrt",
        Schedule::WarmupStableDecay { .. } => "warmup-stable-decay",
        Schedule::OneCycle(_) => "one-cycle",
        Schedule::Step { .. } => "step",
    }
}

/// The schedule of that name, with the rate and the warm-up of another.
fn named(wanted: &str, other: &Schedule, total: u64) -> Option<Schedule> {
    let mut other = *other;
    if name(&other) == wanted {
        return Some(other);
    }
    let (lr, warmup) = (*peak(&mut other), warmup(&mut other).map_or(0, |warmup| *warmup));
    let min = lowest(&mut other).map_or(0.0, |min| *min);
    Some(match wanted {
        "constant" => Schedule::Constant { lr, warmup },
        "cosine" => Schedule::Cosine { lr, warmup, total, cycles: 0.5, min },
        "linear" => Schedule::Linear { lr, warmup, total, min },
        "inverse-sqrt" => Schedule::InverseSqrt { lr, warmup: warmup.max(1) },
        "warmup-stable-decay" => Schedule::WarmupStableDecay { lr, warmup, decay: total / 2, total, min },
        "one-cycle" => Schedule::OneCycle(OneCycle {
            max_lr: lr,
            total,
            pct_start: 0.3,
            linear: false,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }),
        "step" => Schedule::Step { lr, step_size: (total / 3).max(1), gamma: 0.1 },
        _ => return None,
    })
}

fn peak(schedule: &mut Schedule) -> &mut f64 {
    match schedule {
        Schedule::Constant { lr, .. }
        | Schedule::Cosine { lr, .. }
        | Schedule::Linear { lr, .. }
        | Schedule::InverseSqrt { lr, .. }
        | Schedule::WarmupStableDecay { lr, .. }
        | Schedule::Step { lr, .. } => lr,
        Schedule::OneCycle(cycle) => &mut cycle.max_lr,
    }
}

fn warmup(schedule: &mut Schedule) -> Option<&mut u64> {
    match schedule {
        Schedule::Constant { warmup, .. }
        | Schedule::Cosine { warmup, .. }
        | Schedule::Linear { warmup, .. }
        | Schedule::InverseSqrt { warmup, .. }
        | Schedule::WarmupStableDecay { warmup, .. } => Some(warmup),
        Schedule::Step { .. } | Schedule::OneCycle(_) => None,
    }
}

fn lowest(schedule: &mut Schedule) -> Option<&mut f64> {
    match schedule {
        Schedule::Cosine { min, .. }
        | Schedule::Linear { min, .. }
        | Schedule::WarmupStableDecay { min, .. } => Some(min),
        _ => None,
    }
}

/// How many steps a schedule is made for.
pub(crate) fn total(schedule: &mut Schedule) -> Option<&mut u64> {
    match schedule {
        Schedule::Cosine { total, .. }
        | Schedule::Linear { total, .. }
        | Schedule::WarmupStableDecay { total, .. } => Some(total),
        Schedule::OneCycle(cycle) => Some(&mut cycle.total),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use phalanx_parallel::hybrid::Layout;
    use phalanx_tensor::Device;

    use super::*;
    use crate::{Settings, Source};

    /// A configuration in which every setting that has a key is other than the default.
    fn unlike() -> Config {
        let layout = Layout {
            dp: 2,
            tp: 3,
            pp: 4,
            schedule: "interleaved".into(),
            chunks: 5,
            micro_batches: 6,
            recompute: RecomputeMode::ExceptLast,
            sequence_parallel: true,
        };
        Config {
            steps: 9,
            batch: 24,
            seed: u64::MAX,
            lr: Schedule::WarmupStableDecay { lr: 0.01, warmup: 1, decay: 3, total: 9, min: 1e-9 },
            clip: None,
            dtype: DType::F16,
            grad_dtype: Some(DType::BF16),
            device: Device::Meta(0),
            threads: Some(3),
            layout,
            zero: 2,
            find_unused: true,
            chains: 1,
            asynchronous: None,
            backend: Some(Backend::Threads),
            capture: false,
            workers: 0,
            prefetch: 7,
            save_every: 5,
            keep_last: 3,
            keep_best: true,
            restore_best: true,
            validate_every: 2,
            validation_rows: Some(8),
            plateau: Some(Plateau { factor: 0.25, patience: 2 }),
            ema: Some(0.75),
            loss_scaling: Some(false),
            patience: Some(4),
            on_divergence: OnDivergence::Rollback { most: 3 },
            explodes_at: 2.5,
            out: Some("a \"b\"\n".into()),
            rescue: None,
            resume: Some("true".into()),
            trace: Some(PathBuf::from("1.5")),
        }
    }

    #[test]
    fn a_file_of_all_keys_gives_every_setting_back() {
        let schedules = [
            unlike().lr,
            Schedule::Constant { lr: 2.0, warmup: 3 },
            Schedule::Cosine { lr: 0.1, warmup: 3, total: 9, cycles: 0.5, min: 0.01 },
            Schedule::Linear { lr: 0.1, warmup: 3, total: 9, min: 0.02 },
            Schedule::InverseSqrt { lr: 0.1, warmup: 3 },
            Schedule::Step { lr: 0.1, step_size: 4, gamma: 0.5 },
        ];
        for lr in schedules {
            let wanted = Config { lr, ..unlike() };
            let mut read = Settings::new(Config::default());
            read.read_text(&Settings::new(wanted.clone()).to_toml(&[]), "run.toml").unwrap();
            assert_eq!(read.resolve().unwrap(), wanted);
        }
    }

    #[test]
    fn a_key_of_a_later_source_wins_over_one_that_it_rules_out() {
        let resolve = |file: &str, words: &[&str]| {
            let mut settings = Settings::new(Config::default());
            settings.read_text(file, "run.toml").unwrap();
            settings.words(words.iter().map(|word| word.to_string())).unwrap();
            settings.resolve().map(|config| config.layout.dp)
        };
        assert_eq!(resolve("dp = 1", &["--ranks", "4"]).unwrap(), 4);
        assert_eq!(resolve("ranks = 4", &["--dp", "2"]).unwrap(), 2);
        assert_eq!(resolve("ranks = 4\ntp = 2", &[]).unwrap(), 2);
        assert!(
            resolve("ranks = 4\ndp = 2", &[]).unwrap_err().to_string().contains("`ranks` 4 is not `dp` 2")
        );
        assert_eq!(
            resolve("schedule = \"interleaved\"\npp = 2\nvirtual-stages = 3", &["--schedule", "1f1b"])
                .unwrap(),
            1
        );
        assert!(resolve("virtual-stages = 3", &[]).is_err());
        let mut both = Settings::new(Config::default());
        both.set("steps", "5", Source::Words).unwrap();
        both.read_text("steps = 6", "run.toml").unwrap();
        assert_eq!(both.resolve().unwrap().steps, 5);
    }

    #[test]
    fn steps_are_those_of_the_schedule_too() {
        let mut settings = Settings::new(Config::default());
        settings.words(["--lr-schedule", "one-cycle", "--steps", "50"].map(String::from)).unwrap();
        let config = settings.resolve().unwrap();
        config.check().unwrap();
        assert!(matches!(config.lr, Schedule::OneCycle(OneCycle { total: 50, .. })));
        let error = Config { steps: 51, ..config }.check().unwrap_err().to_string();
        assert!(error.contains("`steps` is 51") && error.contains("ends after 50"), "{error}");
    }

    #[test]
    fn keys_have_names_of_their_own() {
        let mut names: Vec<&str> = Config::keys().iter().map(|key| key.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
