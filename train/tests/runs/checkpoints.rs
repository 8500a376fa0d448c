//! The checkpoints in a run's folder: which are kept, and that ranks read the same.

use std::fs;

use phalanx_nn::Linear;
use phalanx_parallel::checkpoint::Checkpoint;
use phalanx_train::{Run, checkpoints::latest};

use super::*;

#[test]
fn the_last_checkpoints_are_kept() {
    let folder = Folder::new();
    let config = Config {
        keep_last: 3,
        save_every: 2,
        out: Some(folder.path().into()),
        ..config(Layout::default(), 0)
    };
    run(config, &Told::default()).unwrap();
    assert_eq!(names(&folder), ["checkpoint", "checkpoint-00000008", "checkpoint-00000010"]);
}

/// The names of the checkpoints in a folder, in order.
fn names(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("checkpoint") || name.starts_with("abandoned"))
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_that_goes_on_from_an_earlier_checkpoint_keeps_its_own_and_not_the_abandoned_ones() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base = Config { keep_last: 3, save_every: 4, validate_every: 0, out, ..config(Layout::default(), 0) };
    let train = |config: Config| Trainer::new(config).data(data()[0].clone()).run_layers(layers, loss);
    train(base.clone()).unwrap();
    assert_eq!(names(&folder), ["checkpoint", "checkpoint-00000004", "checkpoint-00000008"]);
    let resume = Some(folder.path().join("checkpoint-00000004"));
    // Until a second save nothing is lost of the branch that was abandoned.
    train(Config { steps: 6, save_every: 2, resume: resume.clone(), ..base.clone() }).unwrap();
    let all = ["abandoned-00000008", "abandoned-00000012", "checkpoint", "checkpoint-00000004"];
    assert_eq!(names(&folder), all);
    train(Config { steps: 10, save_every: 2, resume, ..base }).unwrap();
    assert_eq!(names(&folder), ["checkpoint", "checkpoint-00000006", "checkpoint-00000008"]);
    assert_eq!(newest_step(&folder), "10");
}

fn newest_step(folder: &Folder) -> String {
    latest(folder.path()).unwrap().settings()["step"].clone()
}

/// A run that ends with an error in its first step.
fn fail(config: Config) {
    let fails = |_: &Var, _: &Batch| Err(phalanx_train::Error::Config("fails on purpose".into()));
    let [training, held_out] = data();
    let trainer = Trainer::new(config).data(training).validation(held_out);
    let error = trainer.run_layers(layers, fails).unwrap_err();
    assert!(error.to_string().contains("fails on purpose"), "{error}");
}

#[test]
fn a_run_that_fails_before_its_first_save_does_not_return_to_abandoned_checkpoints() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base = Config { keep_last: 3, save_every: 4, out: out.clone(), ..config(Layout::default(), 0) };
    let base = Config { keep_best: true, validate_every: 4, ..base };
    run(base.clone(), &Told::default()).unwrap();
    let named = |name: &str| Some(folder.path().join(name));
    let resumed = |resume: Option<PathBuf>| Config { steps: 16, resume, ..base.clone() };
    fail(resumed(named("checkpoint-00000004")));
    assert_eq!(newest_step(&folder), "4");
    // Nor does the next one, which is not told from where to go on.
    fail(resumed(out.clone()));
    assert_eq!(newest_step(&folder), "4");
    // The branch can be taken up again.
    fail(resumed(named("abandoned-00000012")));
    assert_eq!(newest_step(&folder), "12");
    assert_eq!(names(&folder), ["abandoned-00000008", "checkpoint", "checkpoint-00000004"]);
    // A checkpoint that cannot be read is left behind for an earlier one.
    fs::write(folder.path().join("checkpoint/checkpoint.json"), "damaged").unwrap();
    assert!(latest(folder.path()).is_err());
    fail(resumed(named("checkpoint-00000004")));
    assert_eq!(newest_step(&folder), "4");
    run(resumed(out), &Told::default()).unwrap();
    assert_eq!(newest_step(&folder), "16");
    assert_eq!(names(&folder), ["checkpoint", "checkpoint-00000008", "checkpoint-00000012"]);
}

#[test]
fn a_run_goes_on_from_its_best_checkpoint_if_that_is_later_than_all_others() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base =
        Config { keep_best: true, validate_every: 1, save_every: 2, out, ..config(Layout::default(), 0) };
    let base = Config { steps: 4, ..base };
    run(base.clone(), &Told::default()).unwrap();
    let best = phalanx_train::checkpoints::best(folder.path()).unwrap();
    let step = best.settings()["step"].clone();
    fs::remove_dir_all(folder.path().join("checkpoint")).unwrap();
    assert!(phalanx_train::checkpoints::is_there(folder.path()));
    assert_eq!(newest_step(&folder), step);
    // From an earlier one than the best, which is not the best of that branch then.
    run(Config { steps: 12, resume: base.out.clone(), ..base }, &Told::default()).unwrap();
    assert_eq!(newest_step(&folder), "12");
}

/// The newest checkpoint of another branch may have the step of the one that is taken up again.
#[test]
fn a_checkpoint_that_is_taken_up_again_is_not_replaced_by_another_of_its_step() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base = Config { keep_last: 3, save_every: 4, validate_every: 0, out, ..config(Layout::default(), 0) };
    let train = |config: Config| Trainer::new(config).data(data()[0].clone()).run_layers(layers, loss);
    train(base.clone()).unwrap();
    let resume = |name: &str| Some(folder.path().join(name));
    train(Config { save_every: 0, resume: resume("checkpoint-00000004"), ..base.clone() }).unwrap();
    let before = ["abandoned-00000008", "abandoned-00000012", "checkpoint", "checkpoint-00000004"];
    assert_eq!(names(&folder), before);
    let taken = Checkpoint::open(folder.path().join("abandoned-00000012")).unwrap().checksum();
    fs::write(folder.path().join("abandoned-00000012/mark"), "").unwrap();
    train(Config { steps: 12, resume: resume("abandoned-00000012"), ..base }).unwrap();
    let other = folder.path().join("abandoned-00000012-other");
    assert!(folder.path().join("checkpoint/mark").exists() && other.join("checkpoint.json").exists());
    assert_eq!(latest(folder.path()).unwrap().checksum(), taken);
}

/// A run that was killed after it saved its best checkpoint, before the next one, knows what its validations had found.
#[test]
fn the_lowest_loss_is_kept_if_the_best_checkpoint_is_of_a_later_step() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base =
        Config { keep_best: true, validate_every: 1, save_every: 2, out, ..config(Layout::default(), 0) };
    let base = Config { steps: 4, keep_last: 3, ..base };
    let told = Told::default();
    run(base.clone(), &told).unwrap();
    let [earlier, newest] = ["checkpoint-00000002", "checkpoint"].map(|name| folder.path().join(name));
    let lowest = Checkpoint::open(&earlier).unwrap().settings()["best_loss"].clone();
    fs::remove_dir_all(&newest).unwrap();
    fs::rename(earlier, newest).unwrap();
    let best = phalanx_train::checkpoints::best(folder.path()).unwrap();
    assert!(best.settings()["step"].parse::<u64>().unwrap() > 2);
    let summary = run(Config { steps: 2, resume: base.out.clone(), ..base }, &Told::default()).unwrap();
    assert_eq!(summary.best_validation_loss.unwrap().to_string(), lowest);
    let kept = phalanx_train::checkpoints::best(folder.path()).unwrap();
    assert_eq!(kept.checksum(), best.checksum());
}

/// A checkpoint replaces the one before by two renames.
#[test]
fn a_checkpoint_that_was_about_to_be_replaced_is_kept() {
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let base = Config { steps: 2, out: out.clone(), ..config(Layout::default(), 0) };
    run(base.clone(), &Told::default()).unwrap();
    fs::rename(folder.path().join("checkpoint"), folder.path().join(".checkpoint.old")).unwrap();
    run(Config { steps: 4, keep_last: 2, resume: out, ..base }, &Told::default()).unwrap();
    assert_eq!(names(&folder), ["checkpoint", "checkpoint-00000002"]);
}

#[test]
fn ranks_that_find_different_checkpoints_read_none() {
    let folders = [1, 2].map(|seed| {
        let folder = Folder::new();
        let base = Config { keep_best: true, validate_every: 2, ..config(Layout::default(), 0) };
        run(Config { seed, steps: 2, out: Some(folder.path().into()), ..base }, &Told::default()).unwrap();
        folder
    });
    let paths = [0, 1].map(|rank: usize| folders[rank].path().to_path_buf());
    let layout = Layout { dp: 2, ..Layout::default() };
    let config = Config { steps: 2, validate_every: 2, ..config(layout, 0) };
    let unlike = |config: Config, read: fn(&mut Run, &[PathBuf; 2]) -> Result<()>| {
        let ([training, held_out], paths) = (data(), paths.clone());
        let trainer = Trainer::new(config).data(training).validation(held_out);
        let trainer = trainer.at_end(move |run| read(run, &paths));
        let error = trainer.run_layers(layers, loss).unwrap_err().to_string();
        let wanted =
            "the ranks were given different things: the checkpoint to read is step 2 with the index ";
        assert!(
            error.contains(wanted) && error.contains(" on rank 0, and step 2 with the index "),
            "{error}"
        );
    };
    unlike(config.clone(), |run, paths| run.resume(&paths[run.mesh_rank().rank()]));
    let fresh = Folder::new();
    let out = Some(fresh.path().to_path_buf());
    unlike(Config { out, keep_best: true, ..config }, |run, [other, _]| {
        // Rank 0 has found its best checkpoint when another takes the place.
        if run.mesh_rank().rank() == 1 {
            std::thread::sleep(std::time::Duration::from_millis(500));
            let best = run.config().folder().unwrap().join("best");
            fs::remove_dir_all(&best).unwrap();
            fs::rename(other.join("best"), best).unwrap();
        }
        run.load_best()
    });
}

/// A model of many numbers, so that a save takes a while.
fn of_many(folder: &Path, steps: u64, looks: bool, told: &Told) -> Summary {
    let (resume, x) = (folder.join("checkpoint"), vec![0.5f32; 16 * 64]);
    let config = Config {
        out: Some(folder.into()),
        resume: resume.exists().then(|| folder.into()),
        steps,
        save_every: 1,
        ema: Some(0.5),
        validate_every: 0,
        ..config(Layout::default(), 0)
    };
    let x = Tensor::from_slice(&x, &[16, 64], Device::CPU).unwrap();
    let trainer = Trainer::new(config).data(TensorDataset::new(vec![x]).unwrap()).callback(told.clone());
    let look = move |run: &Run| {
        if looks {
            drop(run.averaged()?.expect("the run keeps averages"));
        }
        Ok(None)
    };
    let loss = |layer: &Linear, batch: &Batch| {
        let [x] = batch.vars()?;
        Ok(layer.forward(&x)?.square()?.mean_all()?)
    };
    trainer.every(1, look).run(|scope| Ok(LinearConfig::new(64, 2048).init(scope)?), loss).unwrap()
}

#[test]
fn averages_take_the_place_of_weights_once_these_are_saved() {
    let (plain, looking) = (Folder::new(), Folder::new());
    let losses = |folder: &Folder, looks: bool| {
        of_many(folder.path(), 3, looks, &Told::default());
        let told = Told::default();
        of_many(folder.path(), 5, false, &told);
        told.losses()
    };
    assert_eq!(losses(&looking, true), losses(&plain, false));
}
