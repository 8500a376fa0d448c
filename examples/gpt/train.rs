//! `train`: from the command line to a trained model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use phalanx::nn::models::{Decoder, ModelConfig, save_model};
use phalanx::nn::{Loader, Schedule, Windows, cut};
use phalanx::parallel::data_parallel::DataParallel;
use phalanx::parallel::launch;
use phalanx::parallel::pipeline::ranks::Pipeline;
use phalanx::{Device, Tensor};

use crate::ahead::Ahead;
use crate::args::{LrSchedule, TrainArgs};
use crate::asynchronous::stretch;
use crate::build::{FROM_FOLDER, Run, build, plan};
use crate::captured::Captured;
use crate::checkpoint::{self, resume, save};
use crate::metrics::{self, Metrics, Record, Summary};
use crate::outputs::{Outputs, remove_leftovers};
use crate::progress::Progress;
use crate::ranks::{self, Place};
use crate::step::{Outcome, Settings, train_step};
use crate::text::{self, TOKENIZER};
use crate::trace::{Lane, Trace};
use crate::{generate, memory, plot, room};

/// Trains as the arguments say.
pub fn train(args: &TrainArgs) -> Result<(), String> {
    ranks::start(args, |process| train_here(args, process))
}

/// What this process does of it: everything, or one rank's part.
fn train_here(args: &TrainArgs, process: Option<&launch::Rank>) -> Result<(), String> {
    args.check()?;
    let text = args.data.as_deref().map_or_else(text::bundled, text::read)?;
    let (config, codec, from_folder) = plan(args)?;
    let tokens = codec.encode(&text, config.vocabulary())?;
    let windows = Windows::new(tokens, args.context, args.seed)
        .map_err(|e| of_text(args, &format!("{e} (--context {}; {})", args.context, codec.source())))?;
    args.check_layout(&config)?;
    // What comes from a folder is as large as its files.
    room::check(args, args.init.is_none().then_some(&config))?;
    let (identity, codec) = (identity(args, &text, from_folder.then_some(&config)), Arc::new(codec));
    let processes = process.map(launch::Rank::comm);
    let trace = Trace::new(args.trace.is_some(), processes)?;
    let said = ranks::run(args, process, |place| {
        if process.is_some() {
            place.agree(&format!("{}{identity:?}", args.in_common()))?;
        }
        let lane = trace.lane(place.rank());
        let place = place.observed(lane.observer()).map_err(|e| e.to_string())?;
        let run = build(args, place, lane, config.clone(), codec.clone())?;
        train_rank(args, run, windows.clone(), &identity)
    })?;
    trace.finish(processes)?;
    said.into_iter().flatten().for_each(|said| crate::say(&said));
    Ok(())
}

/// One rank's part; what is to be said at the end.
fn train_rank(
    args: &TrainArgs,
    mut run: Run,
    windows: Windows,
    identity: &BTreeMap<String, String>,
) -> Result<Option<String>, String> {
    if args.device.is_meta() {
        return memory::report(args, &mut run, windows).map(Some);
    }
    let done = match &args.resume {
        Some(folder) => resume(folder, &mut run, identity)?,
        None => 0,
    };
    let out = args.out.as_deref().or(args.resume.as_deref());
    if done > args.steps {
        return Err(format!("--steps {} is the total, and the run has done {done}", args.steps));
    }
    steps(args, &mut run, windows, done, out, identity)?;
    let whole = checkpoint::whole(&run)?;
    let Some(model) = whole else { return Ok(None) };
    if let Some(out) = out {
        plot::loss(&out.join("loss.svg"), &metrics::losses(&out.join("metrics.jsonl")))?;
        save_hugging_face(&model, &run.config, out)?;
    }
    let sample = || Ok(format!("\n{}", generate::sample(&model, &run.codec, args.seed)?));
    (!args.quiet).then(sample).transpose()
}

/// An error of the text, with its name.
fn of_text(args: &TrainArgs, error: &str) -> String {
    let from = args.data.as_ref().map_or("the bundled text".into(), |p| p.display().to_string());
    format!("{from}: {error}")
}

/// The settings that a resumed run must share with the one it continues: those that change the numbers by more than the
/// order of additions, which is the layout's.
fn identity(args: &TrainArgs, text: &[u8], of_folder: Option<&ModelConfig>) -> BTreeMap<String, String> {
    let digest = format!("{:016x}", ranks::digest(text));
    let mut settings = BTreeMap::from([("text".to_string(), digest)]);
    if let Some(config) = of_folder {
        settings.insert(FROM_FOLDER.into(), config.to_json(args.dtype.dtype()).to_string());
    }
    let mut put = |flag: &str, value: String| settings.insert(format!("--{flag}"), value);
    let [layers, heads, width] = args.sizes();
    put("layers", layers.to_string());
    put("heads", heads.to_string());
    put("width", width.to_string());
    put("batch", args.batch.to_string());
    put("context", args.context.to_string());
    put("seed", args.seed.to_string());
    put("dtype", format!("{:?}", args.dtype));
    put("grad-dtype", format!("{:?}", args.grad_dtype));
    put("dropout", args.dropout.to_string());
    settings
}

fn save_hugging_face(model: &Decoder, config: &ModelConfig, out: &Path) -> Result<(), String> {
    let folder = out.join("model");
    save_model(model, config, &folder).map_err(|e| e.to_string())?;
    copy_tokenizer(out, &folder)
}

fn copy_tokenizer(from: &Path, to: &Path) -> Result<(), String> {
    let (from, to) = (from.join(TOKENIZER), to.join(TOKENIZER));
    if !from.exists() || same_folder(&from, &to) {
        return Ok(());
    }
    std::fs::copy(&from, to).map(drop).map_err(|e| format!("{}: {e}", from.display()))
}

/// Keeps the tokenizer of the folder that a run begins with beside its checkpoint, for when it is resumed.
fn keep_tokenizer(args: &TrainArgs, out: &Path, fresh: &mut Outputs) -> Result<(), String> {
    let Some(from) = args.init.as_ref().or(args.resume.as_ref()) else { return Ok(()) };
    fresh.file(&out.join(TOKENIZER));
    copy_tokenizer(from, out)
}

fn same_folder(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}

fn schedule(args: &TrainArgs) -> Schedule {
    let (lr, warmup) = (args.lr, args.warmup);
    match args.lr_schedule {
        LrSchedule::Constant => Schedule::Constant { lr, warmup },
        LrSchedule::Cosine => Schedule::Cosine { lr, warmup, total: args.steps, cycles: 0.5 },
    }
}

/// The rows of each micro-batch of this rank's replica, in order.
pub fn pieces(args: &TrainArgs, place: &Place) -> Vec<std::ops::Range<usize>> {
    let replicas = place.replicas();
    let shares = match replicas.size() {
        1 => cut(args.batch, args.emulate_dp),
        ranks => vec![cut(args.batch, ranks).swap_remove(replicas.rank())],
    };
    let within = args.micro_batches.div_ceil(args.emulate_dp);
    let of_share = |share: std::ops::Range<usize>| {
        cut(share.len(), within).into_iter().map(move |r| share.start + r.start..share.start + r.end)
    };
    shares.into_iter().flat_map(of_share).collect()
}

/// How this rank does its steps.
pub fn settings<'a>(
    args: &TrainArgs,
    ranks: &'a Arc<dyn DataParallel>,
    pipeline: &'a Pipeline,
) -> Settings<'a> {
    let (groups, tokens) = (args.emulate_dp, args.batch * args.context);
    Settings { groups, tokens, ranks, pipeline, saver: None, clip: args.clip, seed: args.seed, watch: None }
}

/// What the first rank writes while a run goes.
struct Files {
    metrics: Metrics,
    /// Taken back if there is an error before the first step is done.
    fresh: Outputs,
}

impl Files {
    /// Those of a rank that writes nothing.
    fn none() -> Result<Files, String> {
        Ok(Files { metrics: Metrics::create(None, None, 0)?, fresh: Outputs::default() })
    }

    fn create(args: &TrainArgs, lane: &Lane, out: Option<&Path>, done: u64) -> Result<Files, String> {
        let mut fresh = Outputs::default();
        if let Some(out) = out {
            let continued = args.resume.as_deref().is_some_and(|from| same_folder(from, out));
            if !continued && out.join(checkpoint::NAME).exists() {
                let out = out.display();
                return Err(format!(
                    "{out} holds a run: continue it with --resume {out}, or choose another --out"
                ));
            }
            fresh.folder(out)?;
            remove_leftovers(out);
            keep_tokenizer(args, out, &mut fresh)?;
        }
        let metrics = out.map(|o| o.join("metrics.jsonl"));
        for path in [args.metrics.as_ref(), metrics.as_ref(), args.trace.as_ref()].into_iter().flatten() {
            fresh.file(path);
        }
        let metrics = Metrics::create(args.metrics.as_deref(), metrics.as_deref(), done)?;
        args.trace.as_ref().map_or(Ok(()), |path| lane.open(path))?;
        Ok(Files { metrics, fresh })
    }
}

/// Runs the steps from `done` on; the losses of this process.
fn steps(
    args: &TrainArgs,
    run: &mut Run,
    windows: Windows,
    done: u64,
    out: Option<&Path>,
    identity: &BTreeMap<String, String>,
) -> Result<Vec<(u64, f64)>, String> {
    let (place, lane) = (run.place.clone(), run.lane.clone());
    let Files { mut metrics, mut fresh } = match place.is_first() {
        true => Files::create(args, &lane, out, done)?,
        false => Files::none()?,
    };
    let progress = Progress::new(args.quiet || !place.is_first(), done, args.steps);
    let (schedule, begin, mut losses) = (schedule(args), Instant::now(), Vec::new());
    let ledger = place.device.ledger().map_err(|e| e.to_string())?;
    // Peaks are the steps', not those of building the model.
    ledger.reset_peak();
    let peak = || ledger.total().peak;
    let mut feed = Feed::new(args, run, windows, done);
    let mut ahead = Ahead::new(place.device, place.size() == 1, args.trace.is_some());
    let mut step = done;
    while step < args.steps {
        let (since, end) = (Instant::now(), next_save(args, step));
        let mut told = Vec::new();
        match args.scheme() {
            None => {
                let results = feed.step(args, run, step, schedule.lr(step))?;
                ahead.begun(step, since, peak(), &results).map_err(|e| e.to_string())?;
                step += 1;
                while let Some(own) = ahead.next(step == end).map_err(|e| e.to_string())? {
                    told.push(of_all(&place, own).map_err(|e| e.to_string())?);
                }
            }
            Some(scheme) => {
                told = stretch(args, scheme, run, &feed.windows, step..end, schedule)
                    .map_err(|e| e.to_string())?;
                told.iter_mut().for_each(|told| told.peak = peak());
                step = end;
            }
        }
        for told in told {
            let record = record(args, &place, &told, schedule.lr(told.step))?;
            metrics.step(&record)?;
            fresh.keep();
            progress.step(&record);
            losses.push((told.step, told.outcome.loss));
        }
        if let Some(out) = out.filter(|_| step == end) {
            lane.span("checkpoint", step - 1, || save(run, out, step, identity))?;
        }
    }
    run.saver.wait().map_err(|e| e.to_string())?;
    fresh.keep();
    progress.finish();
    let peaks = peaks(&place, peak())?;
    metrics.summary(&summary(args, run, &losses, begin.elapsed().as_secs_f64(), peaks))?;
    Ok(losses)
}

/// Whether a run's steps are to be captured: on one GPU, unless told otherwise. Ranks meet on the host in each step, and a trace
/// wants to know what a step consists of.
fn captures(args: &TrainArgs) -> bool {
    let alone = args.all_ranks() == 1 && args.zero == 0 && args.scheme().is_none();
    args.device.is_cuda() && alone && args.trace.is_none() && !args.no_capture
}

/// What is known of a step when it is done.
pub struct Told {
    pub step: u64,
    pub outcome: Outcome,
    pub seconds: f64,
    /// The most bytes in tensors so far, on this rank.
    pub peak: usize,
}

/// What steps are made of.
struct Feed {
    windows: Windows,
    loader: Loader,
    /// The step as a graph, if it is to be one.
    captured: Option<Captured>,
}

impl Feed {
    fn new(args: &TrainArgs, run: &Run, windows: Windows, done: u64) -> Feed {
        let captured = captures(args).then(|| Captured::new(run.place.device));
        // What is captured has room of its own for the batch.
        let device = if captured.is_some() { Device::CPU } else { run.place.device };
        let loader = Loader::new(windows.clone(), args.batch, pieces(args, &run.place), device, done);
        Feed { windows, loader, captured }
    }

    /// A step of this rank: its part of the loss, and the norm.
    fn step(&mut self, args: &TrainArgs, run: &mut Run, step: u64, lr: f64) -> Result<Tensor, String> {
        let lane = run.lane.clone();
        let micros = lane.span("data", step, || self.loader.next_step().map_err(|e| e.to_string()))?;
        run.optimizer.set_lr(lr);
        // What cannot be written is said by the next span.
        let watch = |phase: &'static str, begin| drop(lane.note(phase, step, begin));
        let settings = settings(args, &run.share, &run.pipeline);
        let settings = Settings { watch: Some(&watch), saver: Some(&run.saver), ..settings };
        lane.begin(step);
        let (model, optimizer) = (&run.model, &mut run.optimizer);
        lane.span("step", step, || {
            let results = match &mut self.captured {
                Some(captured) => captured.step(model, optimizer, &micros, settings, step).cloned(),
                None => train_step(model, optimizer, &micros, settings, step),
            };
            // In a trace a step lasts until the device has done it.
            let traced = args.trace.as_ref().map_or(Ok(()), |_| run.place.device.synchronize());
            results
                .and_then(|results| traced.map(|()| results).map_err(Into::into))
                .map_err(|e| e.to_string())
        })
    }
}

/// A step of all ranks, whose loss is the whole batch's.
fn of_all(place: &Place, own: Told) -> phalanx::parallel::Result<Told> {
    let loss = place.sum(if place.tells_loss() { own.outcome.loss } else { 0.0 })?;
    Ok(Told { outcome: Outcome { loss, ..own.outcome }, ..own })
}

/// Every rank's peak.
fn peaks(place: &Place, own: usize) -> Result<Vec<usize>, String> {
    let peaks = place.all(own as f64).map_err(|e| e.to_string())?;
    Ok(peaks.into_iter().map(|peak| peak as usize).collect())
}

fn record(args: &TrainArgs, place: &Place, told: &Told, lr: f64) -> Result<Record, String> {
    let Told { step, outcome, seconds, peak } = *told;
    Ok(Record {
        step,
        loss: outcome.loss,
        grad_norm: outcome.grad_norm,
        lr,
        step_ms: seconds * 1e3,
        tokens_per_s: (args.batch * args.context) as f64 / seconds,
        peak_bytes: peaks(place, peak)?,
    })
}

/// The number of steps after which a checkpoint is due, once there are more than `done`.
fn next_save(args: &TrainArgs, done: u64) -> u64 {
    let every = if args.save_every == 0 { args.steps } else { args.save_every };
    ((done / every + 1) * every).min(args.steps)
}

fn summary(
    args: &TrainArgs,
    run: &Run,
    losses: &[(u64, f64)],
    seconds: f64,
    peak_bytes: Vec<usize>,
) -> Summary {
    Summary {
        steps: losses.len() as u64,
        parameters: run.parameters,
        first_loss: losses.first().map_or(f64::NAN, |l| l.1),
        last_loss: losses.last().map_or(f64::NAN, |l| l.1),
        seconds,
        tokens_per_s: (losses.len() * args.batch * args.context) as f64 / seconds,
        peak_bytes,
    }
}
