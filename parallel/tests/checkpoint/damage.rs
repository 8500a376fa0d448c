//! Damaged, cut, missing and foreign files are refused, with an error that names them and without a panic. A process that is
//! killed at any moment while it saves leaves a complete checkpoint.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_parallel::checkpoint::{Checkpoint, Saver};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Place, save, settings};

fn tensor(n: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..n).map(|i| (i * i) as f32).collect();
    phalanx_kernels::cast(&Tensor::from_slice(&values, &[n], Device::CPU).unwrap(), dtype).unwrap()
}

fn parts() -> Vec<ShardedTensor> {
    let moments = tensor(33, DType::F64).with_shape(&[3, 11]).unwrap();
    vec![ShardedTensor::whole("w", tensor(50, DType::F32)), ShardedTensor::whole("v", moments)]
}

fn saved(place: &Place, ranks: usize) -> std::path::PathBuf {
    let folder = place.join("saved");
    launch::threads(ranks, |rank| save(&rank, &folder, parts(), &settings(7))).unwrap();
    folder
}

/// The bytes that are read.
fn read(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let saved = Checkpoint::open(folder)?;
    saved.verify()?;
    assert_eq!(saved.settings(), &settings(7));
    let parts: Vec<ShardedTensor> =
        parts().into_iter().map(|p| ShardedTensor { values: p.values.zeros_like().unwrap(), ..p }).collect();
    saved.read(&parts)?;
    parts.iter().map(|part| Ok(part.values.to_bytes()?)).collect()
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let place = Place::new("flips");
    let folder = saved(&place, 2);
    read(&folder).unwrap();
    for name in ["rank-0.safetensors", "rank-1.safetensors", "checkpoint.json"] {
        let path = folder.join(name);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            // Without optimisation eight reads for each byte take too long.
            let bits = if cfg!(debug_assertions) { at % 8..at % 8 + 1 } else { 0..8 };
            for bit in bits {
                damaged[at] = bytes[at] ^ 1 << bit;
                fs::write(&path, &damaged).unwrap();
                let error = read(&folder).expect_err(&format!("{name}, bit {bit} of byte {at}")).to_string();
                assert!(error.contains(name), "{error}");
            }
            fs::write(&path, &bytes[..at]).unwrap();
            let error = read(&folder).expect_err(&format!("{name}, cut at {at}")).to_string();
            assert!(error.contains(name), "{error}");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        let error = read(&folder).expect_err(&format!("{name}, longer")).to_string();
        assert!(error.contains(name), "{error}");
        fs::remove_file(&path).unwrap();
        assert!(read(&folder).unwrap_err().to_string().contains(name));
        fs::write(&path, &bytes).unwrap();
    }
    read(&folder).unwrap();
}

#[test]
fn of_several_damages_the_first_is_named_each_time() {
    let place = Place::new("first");
    let folder = place.join("saved");
    let parts =
        || (0..64).map(|n| ShardedTensor::whole(format!("t{n:02}"), tensor(1000, DType::F32))).collect();
    launch::threads(1, |rank| save(&rank, &folder, parts(), &settings(7))).unwrap();
    let path = folder.join("rank-0.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = bytes.len() - 64 * 4000;
    bytes[header..].iter_mut().for_each(|byte| *byte = !*byte);
    fs::write(&path, &bytes).unwrap();
    let damaged = Checkpoint::open(&folder).unwrap();
    for _ in 0..200 {
        let error = damaged.verify().unwrap_err().to_string();
        assert!(error.contains("tensor \"t00\""), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    let place = Place::new("fit");
    let saved = Checkpoint::open(saved(&place, 1)).unwrap();
    let part = |name: &str, values: Tensor| ShardedTensor::whole(name, values);
    let seven = || phalanx_kernels::full(&[50], 7.0, DType::F32, Device::CPU).unwrap();
    for (wrong, says) in [
        (part("x", tensor(50, DType::F32)), "missing: x"),
        (part("v", tensor(34, DType::F64)), "got [3, 11], wanted [34]"),
        (part("v", tensor(33, DType::F32)), "saved as f64, wanted f32"),
        (part("v", tensor(66, DType::F64).slice(0, 0, 66, 2).unwrap()), "contiguous"),
        (ShardedTensor { range: 0..60, ..part("w", tensor(60, DType::F32)) }, "got [50], wanted [60]"),
        (ShardedTensor { range: 1..51, ..part("w", seven()) }, "elements 1..51"),
    ] {
        let fitting = part("w", seven());
        let error = saved.read(&[fitting.clone(), wrong]).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(fitting.values.to_vec::<f32>().unwrap(), [7.0; 50]);
    }
    let narrow = part("v", tensor(33, DType::F32).zeros_like().unwrap());
    saved.read_converted(std::slice::from_ref(&narrow)).unwrap();
    assert_eq!(narrow.values.to_vec::<f32>().unwrap(), tensor(33, DType::F32).to_vec::<f32>().unwrap());
}

#[test]
fn a_tensor_that_no_rank_wants_is_named_on_all() {
    let place = Place::new("unwanted");
    let folder = saved(&place, 1);
    let run = |rank: launch::Rank| -> Result<String> {
        let mine = &parts()[..rank.rank().min(1)];
        Ok(Checkpoint::open(&folder)?.load(rank.comm(), mine).unwrap_err().to_string())
    };
    for error in launch::threads(3, run).unwrap() {
        assert!(error.contains("unexpected: v") && !error.contains("w,"), "{error}");
    }
    let run = |rank: launch::Rank| -> Result<()> {
        Checkpoint::open(&folder)?.load(rank.comm(), &parts()[rank.rank()..][..1])
    };
    launch::threads(2, run).unwrap();
}

#[test]
fn what_goes_wrong_on_one_rank_all_hear() {
    let place = Place::new("hear");
    let folder = saved(&place, 1);
    let run = |rank: launch::Rank| -> Result<String> {
        let names = ["w", "w", "other"];
        let part = ShardedTensor { name: names[rank.rank()].into(), ..parts().remove(0) };
        Ok(Checkpoint::open(&folder)?.load(rank.comm(), &[part]).unwrap_err().to_string())
    };
    for error in launch::threads(3, run).unwrap() {
        assert!(error.contains("rank 2") && error.contains("missing: other"), "{error}");
    }
}

#[test]
fn folders_without_a_checkpoint_are_refused() {
    let place = Place::new("none");
    assert!(Checkpoint::open(place.join("nothing")).unwrap_err().to_string().contains("nothing"));
    fs::create_dir(place.join("foreign")).unwrap();
    fs::write(place.join("foreign/checkpoint.json"), "{\"step\": 3}").unwrap();
    let error = Checkpoint::open(place.join("foreign")).unwrap_err().to_string();
    assert!(error.contains("no checkpoint"), "{error}");
    fs::create_dir(place.join("other")).unwrap();
    fs::write(place.join("other/thesis.tex"), "..").unwrap();
    let run = |rank: launch::Rank| save(&rank, &place.join("other"), parts(), &settings(7));
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("is there and is no checkpoint"), "{error}");
    assert!(place.join("other/thesis.tex").exists());
}

/// Where the process that is killed saves.
const FOLDER: &str = "PHALANX_TEST_KILLED_FOLDER";
const ELEMENTS: usize = 40_000;

fn part(rank: usize, value: f64) -> ShardedTensor {
    ShardedTensor::whole(
        format!("w{rank}"),
        phalanx_kernels::full(&[ELEMENTS], value, DType::F32, Device::CPU).unwrap(),
    )
}

/// Saves again and again; no test unless it is told where.
#[test]
fn saves_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let run = |rank: launch::Rank| -> Result<()> {
        let mut saver = Saver::new(rank.comm())?.with_block(4096)?;
        let first = saved_step(folder.as_ref()).map_or(1, |step| step as u64 + 1);
        (first..u64::MAX).try_for_each(|step| {
            saver.save(&folder, vec![part(rank.rank(), step as f64)], &settings(step))?;
            saver.wait()
        })
    };
    launch::threads(2, run).unwrap();
}

/// The step that was saved, if one was; everything is that step's.
fn saved_step(folder: &Path) -> Option<f32> {
    let saved = Checkpoint::open(folder).ok()?;
    let parts = [part(0, 0.0), part(1, 0.0)];
    saved.read(&parts).unwrap();
    let step = saved.settings()["step"].parse().unwrap();
    for part in parts {
        assert_eq!(part.values.to_vec::<f32>().unwrap(), [step; ELEMENTS]);
    }
    Some(step)
}

#[test]
fn a_process_that_is_killed_leaves_a_complete_checkpoint() {
    let place = Place::new("process");
    let folder = place.join("saved");
    for trial in 0..8u64 {
        let before = saved_step(&folder);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "damage::saves_until_it_is_killed"])
            .env(FOLDER, &folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (start, age) =
            (Instant::now(), || std::fs::metadata(folder.join("checkpoint.json")).ok()?.modified().ok());
        let old = age();
        while age() == old && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(23 * trial));
        child.kill().unwrap();
        child.wait().unwrap();
        let after = saved_step(&folder);
        assert!(after > before, "trial {trial}: {after:?} after {before:?}");
    }
}
