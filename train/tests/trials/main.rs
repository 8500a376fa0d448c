//! Trials: a run of processes over TCP to which something happens at a random moment. A rank is killed or stopped, a link is cut, a disk is
//! full, a flag is wrong, strangers connect. Whatever it is, all processes end in time, the message names the rank and the cause, the losses
//! so far are those of the undisturbed run, and so are the others once the run is resumed.
//!
//! ```text
//! trial       a layout and faults with their moments, drawn from a number
//! rank        the program that every rank runs
//! ranks       processes as ranks: starts them, brings the faults at their moments, collects how they end
//! links       cuts the connection of two ranks, or lets it swallow what it is given
//! strangers   connections by what is no rank of the run
//! judge       what a trial has to come to
//! ```
//! `PHALANX_TRIALS=1000` makes so many, `PHALANX_TRIAL=417` one; `PHALANX_TRIALS_FROM` and `PHALANX_TRIALS_JOBS` say where they begin and how
//! many run at a time.
#![cfg(target_os = "linux")]

#[path = "../../../parallel/tests/comm/port.rs"]
mod port;

#[path = "../launched/launcher.rs"]
mod launcher;

mod judge;
mod links;
mod rank;
mod ranks;
mod strangers;
mod trial;

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use judge::{Undisturbed, Verdict, try_launched, try_ranks};
use trial::Trial;

/// What the tests of a workspace make of a few seconds.
const COUNT: u64 = 16;
/// Trials at a time, at most: as many as there are cores. Most of their time is waiting.
const JOBS: u64 = 4;
/// The two tests take turns, so that no rank is late only because the cores are busy.
static TURN: Mutex<()> = Mutex::new(());

/// One rank of a trial.
#[test]
#[ignore = "a part of the trials"]
fn child() {
    std::process::exit(rank::run());
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text}")))
}

/// Set in the process that may mount file systems.
const MOUNTS: &str = "PHALANX_TRIALS_MOUNT";

/// Disks of a size of their own can be mounted only in a name space where this process may: the test begins anew in one.
#[test]
fn faults_end_in_time_and_change_no_loss() {
    let _turn = TURN.lock().unwrap_or_else(|failed| failed.into_inner());
    let anew = |mut command: Command| {
        command.args(["faults_end_in_time_and_change_no_loss", "--exact", "--nocapture"]);
        assert!(command.env(MOUNTS, "1").status().is_ok_and(|status| status.success()), "trials have failed");
    };
    if std::env::var_os(MOUNTS).is_some() {
        return trials(true);
    }
    let mut unshare = Command::new("unshare");
    unshare.arg("-rm");
    match Command::new("unshare").args(["-rm", "true"]).status().is_ok_and(|status| status.success()) {
        true => {
            unshare.arg(std::env::current_exe().unwrap());
            anew(unshare);
        }
        false => {
            println!("`unshare -rm` is not allowed here: trials with full disks are skipped");
            trials(false);
        }
    }
}

fn trials(mounts: bool) {
    make("trial", Trial::draw, |trial, undisturbed| {
        (mounts || !trial.mounts()).then(|| try_ranks(trial, undisturbed))
    });
}

#[test]
fn a_launched_run_ends_by_itself_as_if_nothing_had_happened() {
    let _turn = TURN.lock().unwrap_or_else(|failed| failed.into_inner());
    make("launched trial", Trial::draw_launched, |trial, undisturbed| Some(try_launched(trial, undisturbed)));
}

/// Makes the trials that the environment asks for. `try_out` skips those for which it returns nothing.
fn make(
    name: &str,
    draw: impl Fn(u64) -> Trial + Sync,
    try_out: impl Fn(&Trial, &Undisturbed) -> Option<Verdict> + Sync,
) {
    let from = number("PHALANX_TRIAL").or(number("PHALANX_TRIALS_FROM")).unwrap_or(0);
    let one = number("PHALANX_TRIAL").map(|_| 1);
    let count = one.or(number("PHALANX_TRIALS")).unwrap_or(COUNT);
    let (next, undisturbed) = (AtomicU64::new(from), Undisturbed::default());
    let (failed, counts) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<String, u64>::new()));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= from + count {
                return;
            }
            let (trial, begin) = (draw(number), Instant::now());
            let Some(Verdict { complaints, said }) = try_out(&trial, &undisturbed) else { continue };
            let (well, seconds) = (complaints.is_empty(), begin.elapsed().as_secs_f64());
            println!("{name} {trial}: {} ({seconds:.1} s)", if well { "well" } else { "FAILED" });
            complaints.iter().for_each(|complaint| println!("    {complaint}"));
            said.iter().filter(|_| !well || count == 1).for_each(|line| println!("        {line}"));
            let mut counts = counts.lock().unwrap();
            trial.names().into_iter().for_each(|name| *counts.entry(name).or_default() += 1);
            failed.lock().unwrap().extend((!well).then_some(number));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let jobs = number("PHALANX_TRIALS_JOBS").unwrap_or(JOBS.min(cores));
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    let (failed, counts) = (failed.into_inner().unwrap(), counts.into_inner().unwrap());
    println!("{counts:?}");
    assert!(failed.is_empty(), "{name}s {failed:?} have failed; PHALANX_TRIAL={} repeats one", failed[0]);
}
