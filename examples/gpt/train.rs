//! `train`: from the command line to a trained model.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx::nn::models::{ModelConfig, save_model};
use phalanx::parallel::launch;
use phalanx::train::data::{Dataset, Samples, TokenWindows, Tokens};
use phalanx::train::text::Codec;
use phalanx::train::{self, Callback, Data, Error, Event, Reporter, Run, Trace, ranks, start};

use crate::args::TrainArgs;
use crate::model::{self, FROM_FOLDER, plan};
use crate::progress::Progress;
use crate::text::Corpus;
use crate::{generate, room};

/// Trains as the arguments say.
pub fn train(args: &TrainArgs) -> Result<(), String> {
    args.check()?;
    let stop = ctrl_c();
    let told = Cell::new(false);
    let tell = |error: &str| {
        crate::complain(error);
        told.set(true);
    };
    let done = start(&args.config(), tell, |process| train_here(args, process, &stop).map_err(Error::Config));
    done.map_err(|error| match error {
        // It was printed, here or by another process.
        _ if told.get() => String::new(),
        Error::Elsewhere => String::new(),
        error => error.to_string(),
    })
}

/// A flag that Ctrl-C sets. The run ends after the step in which it is set.
fn ctrl_c() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let heard = stop.clone();
    // A second one ends the process at once. Where there is no handler, the first does.
    let _ = ctrlc::set_handler(move || {
        if heard.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    stop
}

/// What this process does of it: everything, or one rank's part.
fn train_here(
    args: &TrainArgs,
    process: Option<&launch::Rank>,
    stop: &Arc<AtomicBool>,
) -> Result<(), String> {
    let corpus = Corpus::of(args)?;
    let (config, codec, from_folder) = plan(args, &corpus)?;
    let codec = Arc::new(codec);
    let (data, bytes_per_token, digest) = data(args, &codec, &config, &corpus)?;
    args.check_layout(&config)?;
    // What comes from a folder is as large as its files.
    room::check(args, args.init.is_none().then_some(&config))?;
    let identity = identity(args, digest, from_folder.then_some(&config));
    let (how, processes) = (args.config(), process.map(launch::Rank::comm));
    let run = || -> train::Result<Vec<Option<String>>> {
        let trace = Trace::new(&how, processes)?;
        let said = ranks(&how, process, |place| {
            if process.is_some() {
                place.agree(&format!("{}{identity:?}", how.in_common()))?;
            }
            let lane = trace.lane(place.rank());
            let place = place.observed(lane.observer())?;
            let run = model::run(args, place, lane, &config, data.clone())?.with_identity(identity.clone());
            train_rank(args, run, &config, &codec, bytes_per_token, stop)
        })?;
        trace.finish(processes)?;
        Ok(said)
    };
    let said = run().map_err(|e| e.to_string())?;
    said.into_iter().flatten().for_each(|said| crate::say(&said));
    Ok(())
}

/// Tokens that say how long tokens are.
const MEASURED: u64 = 1 << 17;

/// The windows of the text in the order of training, and those of what is held out; bytes a token of the latter, and what tells the text
/// from others.
fn data(
    args: &TrainArgs,
    codec: &Codec,
    config: &ModelConfig,
    corpus: &Corpus,
) -> Result<(Data, f64, String), String> {
    let [training, held_out] = corpus.tokens(codec, config.vocabulary())?;
    let training = training.ok_or("there is no text")?;
    let digest = corpus.digest(&*training)?;
    let windows = |tokens: Arc<dyn Tokens>| {
        TokenWindows::new(tokens, args.context, args.seed)
            .map_err(|e| of_text(args, &format!("{e} (--context {}; {})", args.context, codec.source())))
    };
    let mut measured = vec![0; held_out.as_ref().unwrap_or(&training).len().min(MEASURED) as usize];
    held_out.as_ref().unwrap_or(&training).copy(0, &mut measured).map_err(|e| e.to_string())?;
    let bytes = codec.decode(&measured).map_err(|e| e.to_string())?.len();
    let samples: Arc<dyn Samples> = Arc::new(windows(training)?);
    let validation = match held_out.filter(|_| !args.device.is_meta()) {
        Some(tokens) => Some(Arc::new(windows(tokens)?.unshifted()) as Arc<dyn Dataset>),
        None => None,
    };
    let data = Data { samples, counted: args.context, validation, workers: 1 };
    Ok((data, bytes as f64 / measured.len().max(1) as f64, digest))
}

/// One rank's part; what is to be said at the end.
fn train_rank(
    args: &TrainArgs,
    run: Run,
    config: &ModelConfig,
    codec: &Arc<Codec>,
    bytes_per_token: f64,
    stop: &Arc<AtomicBool>,
) -> train::Result<Option<String>> {
    let mut run = run.with_metrics(args.metrics.iter().cloned().collect()).with_stop(stop.clone());
    if args.device.is_meta() {
        return run.memory_report().map(Some);
    }
    let mut run = run.with_flops(config.flops_per_token(args.context));
    if let Some(folder) = &args.resume {
        run.resume(folder)?;
    }
    if args.profile {
        let profile = run.profile(PROFILED.min(args.steps))?;
        return reporter(args, &run, bytes_per_token)
            .profiled(&run, &profile)
            .map(|()| run.place().is_first().then(|| profile.table()));
    }
    let (sampled, written, prompt) = (config.clone(), codec.clone(), args.prompt.clone());
    let mut run = match args.quiet {
        true => run,
        false => run.every(args.sample_every, move |run| {
            let Some(model) = model::whole(run, &sampled)? else { return Ok(None) };
            generate::sample(&model, &written, &prompt, run.config().seed).map(Some).map_err(Error::Config)
        }),
    };
    let mut callbacks: Vec<Box<dyn Callback>> = vec![Box::new(Keeper(codec.clone(), args.written.clone()))];
    if !args.quiet {
        callbacks.push(Box::new(Progress::new(bytes_per_token)));
    }
    if run.config().folder().is_some() {
        callbacks.push(Box::new(reporter(args, &run, bytes_per_token)));
    }
    let summary = run.train(&mut callbacks)?;
    let Some(model) = model::whole(&run, config)? else { return Ok(None) };
    if let Some(out) = run.config().folder() {
        let folder = out.join("model");
        save_model(&model, config, &folder)?;
        codec.save(&folder)?;
    }
    let go_on = run.config().folder().filter(|_| summary.stopped.is_some());
    let go_on = go_on.map(|out| format!("go on with: --resume {}", out.display()));
    Ok(go_on)
}

/// Steps that `profile` times.
const PROFILED: u64 = 5;

/// What writes the run's report.
fn reporter(args: &TrainArgs, run: &Run, bytes_per_token: f64) -> Reporter {
    let settings = args.written.lines().filter_map(|line| line.split_once(" = "));
    let settings =
        settings.map(|(key, value)| (key.to_string(), value.trim_matches('"').to_string())).collect();
    Reporter::new("gpt", run.config(), settings).of_bytes(bytes_per_token)
}

/// Keeps the tokenizer beside the checkpoint, for when the run is resumed, and the flags, for when it is repeated.
struct Keeper(Arc<Codec>, String);

impl Callback for Keeper {
    fn event(&mut self, event: &Event<'_>) -> train::Result<()> {
        match event {
            Event::Saving { path, .. } => {
                let folder = path.parent().unwrap_or(Path::new("."));
                self.0.save(folder)?;
                let path = folder.join("config.toml");
                std::fs::write(&path, &self.1)
                    .map_err(|e| Error::data(path.display().to_string(), e.to_string()))
            }
            _ => Ok(()),
        }
    }
}

/// An error of the text, with its name.
fn of_text(args: &TrainArgs, error: &str) -> String {
    let from = args.data.as_ref().map_or("the bundled text".into(), |p| p.display().to_string());
    format!("{from}: {error}")
}

/// The settings that a resumed run must share with the one it continues: those that change the numbers by more than the
/// order of additions, which is the layout's.
fn identity(args: &TrainArgs, text: String, of_folder: Option<&ModelConfig>) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::from([("text".to_string(), text)]);
    if let Some(config) = of_folder {
        settings.insert(FROM_FOLDER.into(), config.to_json(args.dtype.dtype()).to_string());
    }
    let mut put = |flag: &str, value: String| settings.insert(format!("--{flag}"), value);
    let [layers, heads, width] = args.sizes();
    put("layers", layers.to_string());
    put("heads", heads.to_string());
    put("width", width.to_string());
    put("architecture", format!("{:?}", args.architecture));
    put("vocabulary", format!("{:?}", args.vocabulary));
    put("optimizer", format!("{:?}", args.optimizer));
    put("batch", args.batch.to_string());
    put("context", args.context.to_string());
    put("seed", args.seed.to_string());
    put("dtype", format!("{:?}", args.dtype));
    put("grad-dtype", format!("{:?}", args.grad_dtype));
    put("dropout", args.dropout.to_string());
    settings
}
