//! A process that is killed at any moment while it saves leaves a complete checkpoint.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_parallel::checkpoint::{Checkpoint, Saver};
use phalanx_parallel::part::Part;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::{Place, settings};

/// Where the process that is killed saves.
const FOLDER: &str = "PHALANX_TEST_KILLED_FOLDER";
const ELEMENTS: usize = 40_000;

fn part(rank: usize, value: f64) -> Part {
    Part::whole(
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
            .args(["--exact", "killed::saves_until_it_is_killed"])
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
