//! The table of a [`Config`]'s keys.

use phalanx_nn::Schedule;
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::DType;

use super::rates::{lowest, name, named, peak, total, warmup};
use super::{AUTO, Asynchronous, Backend, Config, Offload, OnDivergence, Plateau};
use crate::choices;
use crate::plan::{LINKS, links};
use crate::settings::{Key, SettingValue, ValueKind};

choices! {
    RecomputeMode { RecomputeMode::Never = "never", RecomputeMode::Attention = "attention", RecomputeMode::ExceptLast = "except-last", RecomputeMode::Always = "always" }
    Offload { Offload::None = "none", Offload::Optimizer = "optimizer", Offload::Parameters = "parameters" }
    Backend { Backend::Threads = "threads", Backend::Mpi = "mpi", Backend::Nccl = "nccl" }
}

const SCHEDULES: ValueKind = ValueKind::Choice(&[
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "pipedream",
    "pipedream-vertical-sync",
    "pipedream-2bw",
]);
const RATES: ValueKind = ValueKind::Choice(&[
    "constant",
    "cosine",
    "linear",
    "inverse-sqrt",
    "warmup-stable-decay",
    "one-cycle",
    "step",
]);
const POLICIES: ValueKind = ValueKind::Choice(&["stop", "skip", "rollback"]);
const GRADIENTS: ValueKind = ValueKind::Choice(&["f32", "bf16", "f64"]);

/// The default limit of skipped updates in a row, and of returns to a checkpoint.
const DIVERGENCES_MAX: u32 = 10;
const PLATEAU: Plateau = Plateau { factor: 0.1, patience: 10 };

/// All keys, in the order in which they are set.
pub(super) fn keys() -> Vec<Key<Config>> {
    [steps(), rates(), averages(), numbers(), layout(), pipeline(), checkpoints(), outcomes(), files()]
        .concat()
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
            ValueKind::Whole,
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
    ]
}

fn averages() -> Vec<Key<Config>> {
    vec![
        Key::with(
            "plateau-factor",
            "Multiply the rate by this where validations bring no lower loss",
            ValueKind::Number,
            |c| c.plateau.and_then(|plateau| plateau.factor.text()),
            |c, text| {
                c.plateau.get_or_insert(PLATEAU).factor = text.parse().ok()?;
                Some(())
            },
        ),
        Key::with(
            "plateau-patience",
            "After that many validations in a row without a lower loss",
            ValueKind::Whole,
            |c| c.plateau.and_then(|plateau| plateau.patience.text()),
            |c, text| {
                c.plateau.get_or_insert(PLATEAU).patience = text.parse().ok()?;
                Some(())
            },
        ),
        Key::with(
            "clip",
            "Largest global gradient norm; 0 for no clipping",
            ValueKind::Number,
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
            ValueKind::Switch,
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
        Key::with("ranks", "Ranks in all [default: dp x tp x pp]", ValueKind::Whole, |_| None, checked),
        Key::with(
            "dp",
            "Data-parallel ranks; auto: as many as the launched ranks make, ranks / (tp x pp), also after ranks were lost or have come",
            ValueKind::WholeOr(AUTO),
            |c| if c.dp_auto { Some(AUTO.into()) } else { c.layout.dp.text() },
            |c, text| {
                (c.dp_auto, c.layout.dp) = match text {
                    AUTO => (true, 1),
                    number => (false, number.parse().ok()?),
                };
                Some(())
            },
        ),
        Key::new("tp", "Tensor-parallel ranks", |c| &mut c.layout.tp),
        Key::new("pp", "Pipeline ranks", |c| &mut c.layout.pp),
        Key::new(
            "ep",
            "Expert-parallel ranks: how many data-parallel ranks in a row divide the experts of mixtures",
            |c| &mut c.layout.ep,
        ),
        Key::new(
            "plan",
            "File of a pipeline's plan, which says the layers and the replicas of each stage; there are as many pipeline ranks",
            |c| &mut c.plan,
        ),
        Key::with(
            "links",
            "Network for which a plan is made [default: all ranks at 1e10 bytes a second]",
            ValueKind::Form(LINKS),
            |c| c.links.clone(),
            |c, text| {
                links(text)?;
                c.links = Some(text.into());
                Some(())
            },
        ),
        Key::with(
            "schedule",
            "Pipeline schedule [default: 1f1b]; pipedream, pipedream-vertical-sync and pipedream-2bw do not flush between steps: gradients are of weights some steps old, clip is for each stage's norm, and there are flushes where checkpoints are saved",
            SCHEDULES,
            |c| match c.asynchronous {
                None => (c.layout.pp > 1).then(|| c.layout.schedule.clone()),
                Some(Asynchronous::WeightStashing) => Some("pipedream".into()),
                Some(Asynchronous::VerticalSync) => Some("pipedream-vertical-sync".into()),
                Some(Asynchronous::DoubleBuffered) => Some("pipedream-2bw".into()),
            },
            |c, text| {
                let ValueKind::Choice(names) = SCHEDULES else { return None };
                let name = names.iter().find(|name| **name == text)?;
                c.asynchronous = match *name {
                    "pipedream" => Some(Asynchronous::WeightStashing),
                    "pipedream-vertical-sync" => Some(Asynchronous::VerticalSync),
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
            ValueKind::Whole,
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
            ValueKind::Whole,
            |c| (c.layout.micro_batches * c.chains).text(),
            checked,
        ),
        Key::with(
            "emulate-dp",
            "Add gradients in the order in which that many data-parallel ranks would",
            ValueKind::Whole,
            |c| c.chains.text(),
            checked,
        ),
    ]
}

fn pipeline() -> Vec<Key<Config>> {
    vec![
        Key::new(
            "zero",
            "What data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too",
            |c| &mut c.zero,
        ),
        Key::new(
            "offload",
            "What a rank keeps in the host's memory, whose CPU then updates the parameters: optimizer state and gradients, or with `zero` 3 its share of the parameters too",
            |c| &mut c.offload,
        ),
        Key::new(
            "offload-dir",
            "Folder for a file of each rank that has the optimizer's state, in place of the host's memory, with `offload`; it is removed at the end",
            |c| &mut c.offload_dir,
        ),
        Key::new(
            "offload-activations",
            "Keep the activations that a forward pass saves in the host's memory until their backward pass; with `recompute`, what that leaves of them",
            |c| &mut c.offload_activations,
        ),
        Key::new("find-unused", "Some parameters may get no gradient in a step", |c| &mut c.find_unused),
        Key::new(
            "sequence-parallel",
            "Split norms and dropout along the sequence between tensor-parallel ranks",
            |c| &mut c.layout.sequence_parallel,
        ),
        Key::new(
            "scatter-gather",
            "Each tensor-parallel rank sends its part of what a pipeline stage sends, and the next stage's ranks gather the parts",
            |c| &mut c.layout.scatter_gather,
        ),
        Key::new(
            "recompute",
            "What repeats its forward pass in backward instead of keeping activations: blocks, or in a pipeline the stages of micro-batches, or attention alone",
            |c| &mut c.layout.recompute,
        ),
        Key::new(
            "logits-max",
            "Logits that a rank holds at a time; the others are computed again in backward. Changes memory and time, no bit on a CPU [default: all]",
            |c| &mut c.layout.logits_max,
        ),
        Key::new(
            "backend",
            "How ranks talk: as threads of this process, as processes that mpirun has started, or over NCCL, each with a GPU [default: threads; TCP between processes where RANK and WORLD_SIZE are set]",
            |c| &mut c.backend,
        ),
        Key::new(
            "timeout",
            "Seconds that a rank waits for others in a collective, before the run ends with an error that names those that did not come",
            |c| &mut c.timeout_s,
        ),
        Key::new("join-timeout", "Seconds that a process waits for the others at the start", |c| {
            &mut c.join_timeout_s
        }),
        Key::new(
            "tls",
            "Encrypt what ranks send over TCP, in a build with the feature `tls`. All ranks need a secret (PHALANX_SECRET); the variable PHALANX_TLS=1 does the same",
            |c| &mut c.tls,
        ),
    ]
}

fn checkpoints() -> Vec<Key<Config>> {
    vec![
        Key::new("save-every", "Steps between checkpoints; 0 for one at the end only", |c| &mut c.save_every),
        Key::new(
            "save-memory",
            "MiB of tensors that a save copies when the disk is slower than a step",
            |c| &mut c.save_memory_mib,
        ),
        Key::new("keep-last", "Checkpoints that are kept", |c| &mut c.keep_last),
        Key::new("keep-best", "Keep the checkpoint with the lowest validation loss, too", |c| {
            &mut c.keep_best
        }),
        Key::new("restore-best", "End with the weights of that checkpoint", |c| &mut c.restore_best),
        Key::new(
            "memory-checkpoint-every",
            "Steps between checkpoints in the ranks' memory, from which the run goes on after a process has died and was replaced; 0 for none [default: 1 if the launcher replaces processes, else 0]",
            |c| &mut c.memory_checkpoint_every,
        ),
        Key::with(
            "no-redundant-shards",
            "Checkpoints in memory have no second copy, in another process, of what only one process has; without replicas a process that dies takes them along",
            ValueKind::Switch,
            |c| (!c.redundant_shards).text(),
            |c, text| {
                c.redundant_shards = !bool::parse(text)?;
                Some(())
            },
        ),
        Key::new(
            "allow-not-finite",
            "Save and resume checkpoints with weights or optimizer state that are not finite",
            |c| &mut c.allow_not_finite,
        ),
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
            "What happens when the loss or a gradient is no number, or the loss or the norm explodes: an error that names rank, micro-batch and parameter, a step without an update, or a return to the last checkpoint",
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
                    "skip" => OnDivergence::Skip { most: DIVERGENCES_MAX },
                    "rollback" => OnDivergence::Rollback { most: DIVERGENCES_MAX },
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
        Key::new("norm-explodes-at", "As `explodes-at`, of the gradients' norm before clipping", |c| {
            &mut c.norm_explodes_at
        }),
        Key::new(
            "digests",
            "Steps between digests of loss, gradients and parameters in metrics.jsonl, which `replay` compares; 0 for none",
            |c| &mut c.digests,
        ),
        Key::new(
            "check-replicas",
            "Steps between comparisons of the copies of gradients and parameters that ranks must have alike; 0 for none",
            |c| &mut c.check_replicas,
        ),
    ]
}

fn files() -> Vec<Key<Config>> {
    vec![
        Key::new("out", "Folder for metrics.jsonl, report.html, config.toml and checkpoints", |c| &mut c.out),
        Key::new(
            "resume",
            "Go on with the run in this folder, or from one checkpoint in it; auto: with the run in `out` if it has a checkpoint, else anew",
            |c| &mut c.resume,
        ),
        Key::new(
            "trace",
            "File for a trace of what ran when: two lanes a rank, one for its communication",
            |c| &mut c.trace,
        ),
    ]
}
