//! The suite, the fuzz and killed processes under `mpirun`. Without MPI a line on the terminal says what was skipped.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What `ranks` processes of this program print that each do `what`, and how long they took; nothing without MPI.
fn mpirun(ranks: usize, what: &str) -> Option<(String, Duration)> {
    let absent = if !cfg!(feature = "mpi") {
        "the feature `mpi` is off"
    } else if Command::new("mpirun")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_err()
    {
        "there is no mpirun"
    } else {
        let start = Instant::now();
        let mut command = Command::new("mpirun");
        // Open MPI would refuse more ranks than cores, and root; other MPIs do not care.
        let allow =
            ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
        command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
        command.args(["mpi::child", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        let output =
            command.envs(allow.map(|name| (name, "1"))).env("PHALANX_COMM_CHILD", what).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        return Some((text.concat(), start.elapsed()));
    };
    // Written directly: the test harness shows nothing that a test prints and passes.
    let _ = writeln!(std::io::stderr(), "skipped under mpirun: {what}: {absent}");
    None
}

#[test]
fn every_number_of_ranks_passes_the_suite() {
    for ranks in [1, 2, 3] {
        let Some((output, _)) = mpirun(ranks, "suite") else { return };
        assert_eq!(output.matches(" outcome: ok").count(), ranks, "{output}");
    }
}

#[test]
fn a_killed_process_ends_all() {
    let Some((output, took)) = mpirun(3, "kill") else { return };
    assert!(output.contains("signal 9") || output.contains("rank 1"), "{output}");
    assert!(!output.contains(" outcome: ok") && took < Duration::from_secs(20), "{took:?}: {output}");
}

#[cfg(feature = "mpi")]
mod ranks {
    use std::time::Duration;

    use phalanx_parallel::comm::Error;
    use phalanx_parallel::launch::{Backend, Environment, Rank};

    use super::mpirun;
    use crate::faults::{Fault, Trial, first_seed, patiently, trials_over_wires};
    use crate::processes::LONG;
    use crate::{suite, training};

    /// Processes of a busy machine come at very different times.
    const SHORT: Duration = Duration::from_secs(1);

    /// What `ranks` processes print of `what`, a part of a test, with a timeout; and whether they took too long.
    fn launch(ranks: usize, what: &str, seed: u64, timeout: Duration) -> Option<String> {
        let (output, took) = mpirun(ranks, &format!("{what} {seed} {}", timeout.as_millis()))?;
        assert!(took < Duration::from_secs(120), "{what} {seed} took {took:?}: {output}");
        Some(output)
    }

    #[test]
    fn random_programs() {
        let first = first_seed();
        for seed in first..first + trials_over_wires(6) {
            let trial = Trial::random(seed);
            patiently(trial.fault == Fault::Stall, SHORT, |timeout| {
                let Some(output) = launch(trial.size, "fuzz", seed, timeout) else { return Ok(()) };
                let outcomes: Vec<&str> =
                    output.lines().filter_map(|line| line.split(" outcome: ").nth(1)).collect();
                assert!(!outcomes.is_empty(), "{trial:?}: {output}");
                let outcome = |said: &str| if said == "ok" { Ok(()) } else { Err(said.to_string()) };
                outcomes.into_iter().try_for_each(|said| trial.judge(outcome(said)))
            });
        }
    }

    #[test]
    fn random_faults_in_training() {
        let first = first_seed();
        for seed in first..first + trials_over_wires(6) {
            let trial = training::Trial::random(seed, true);
            patiently(trial.stalls(), SHORT, |timeout| {
                let Some(output) = launch(trial.size, "training", seed, timeout) else { return Ok(()) };
                let said: Vec<_> = output.lines().filter_map(heard).collect();
                // The launcher ends the others when it sees one end in disorder, so not all come to say something.
                let reported = trial.is_named_by_launcher(&output);
                assert!(
                    reported || said.iter().any(|(rank, _)| trial.is_innocent(*rank)),
                    "{trial:?}: {output}"
                );
                trial.judge(&said)
            });
        }
    }

    /// A rank's number and how its training has ended, from the line it printed.
    fn heard(line: &str) -> Option<(usize, Result<(), String>)> {
        let (rank, outcome) = line.split(" trained: ").nth(1)?.split_once(' ')?;
        Some((rank.parse().ok()?, if outcome == "ok" { Ok(()) } else { Err(outcome.into()) }))
    }

    fn train(rank: &Rank, seed: u64) -> Result<(), String> {
        let outcome = training::Trial::random(seed, true).run(rank);
        let said = outcome.clone().map_or_else(|why| why, |()| "ok".into());
        println!("\nrank trained: {} {said}", rank.rank());
        outcome
    }

    /// What the processes do.
    pub fn child(what: &str) {
        let text = |e: Error| e.to_string();
        let mpi = Environment::new().backend(Backend::Mpi).timeout(LONG);
        let words: Vec<&str> = what.split(' ').collect();
        let outcome = match words[..] {
            [what, seed, timeout_ms] => {
                let seed = seed.parse().unwrap();
                mpi.timeout(Duration::from_millis(timeout_ms.parse().unwrap())).run(|rank: Rank| match what {
                    "fuzz" => Trial::random(seed).run(rank.comm(), rank.device()),
                    _ => train(&rank, seed),
                })
            }
            _ if what == "suite" => mpi.run(|rank: Rank| suite::all(rank.comm(), rank.device())),
            _ => mpi.run(|rank: Rank| {
                rank.comm().barrier().map_err(text)?;
                if rank.rank() == 1 {
                    let me = std::process::id().to_string();
                    std::process::Command::new("kill").args(["-9", &me]).status().unwrap();
                }
                rank.comm().barrier().map_err(text)
            }),
        };
        println!("\nrank outcome: {}", outcome.map_or_else(text, |()| "ok".into()));
    }
}

#[test]
#[ignore = "a part of the other tests"]
fn child() {
    #[cfg(feature = "mpi")]
    if let Ok(what) = std::env::var("PHALANX_COMM_CHILD") {
        ranks::child(&what);
    }
}
