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
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use phalanx_parallel::comm::Error;
    use phalanx_parallel::launch::{Backend, Environment, Rank};

    use super::mpirun;
    use crate::fuzz::{Fault, Trial, first_seed, trials_over_wires};
    use crate::{suite, training};

    const LONG: Duration = Duration::from_secs(20);

    fn trial(seed: u64) -> (Trial, Duration) {
        let short = Duration::from_secs(2);
        let timeout = if Trial::random(seed, None, short).fault == Fault::Stall { short } else { LONG };
        (Trial::random(seed, None, timeout), timeout)
    }

    #[test]
    fn random_programs() {
        let first = first_seed();
        for seed in first..first + trials_over_wires(6) {
            let trial = trial(seed).0;
            let start = Instant::now();
            let Some((output, _)) = mpirun(trial.size, &format!("fuzz {seed}")) else { return };
            let outcomes: Vec<&str> =
                output.lines().filter_map(|line| line.split(" outcome: ").nth(1)).collect();
            assert!(!outcomes.is_empty(), "{trial:?}: {output}");
            for outcome in outcomes {
                trial.judge(if outcome == "ok" { Ok(()) } else { Err(outcome.into()) });
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{trial:?} took {:?}", start.elapsed());
        }
    }

    fn training(seed: u64) -> training::Trial {
        training::Trial::random(seed, true, Duration::from_secs(2))
    }

    #[test]
    fn random_faults_in_training() {
        let first = first_seed();
        for seed in first..first + trials_over_wires(6) {
            let trial = training(seed);
            let Some((output, took)) = mpirun(trial.size, &format!("training {seed}")) else { return };
            let (mut said, mut late) = (vec![], Duration::ZERO);
            // A rank's number, how late it was, and its error, if any.
            for line in output.lines().filter_map(|line| line.split(" trained: ").nth(1)) {
                let mut parts = line.splitn(3, ' ');
                let mut number = || parts.next().unwrap().parse::<u64>().unwrap();
                let rank = number() as usize;
                late = late.max(Duration::from_millis(number()));
                said.push((rank, parts.next().map_or(Ok(()), |error| Err(error.to_string()))));
            }
            trial.judge(&said, late);
            // The launcher ends the others when it sees one end in disorder, so not all come to say something.
            let reported = trial.is_named_by_launcher(&output);
            assert!(reported || said.iter().any(|(rank, _)| trial.is_innocent(*rank)), "{trial:?}: {output}");
            assert!(took < Duration::from_secs(60), "{trial:?} took {took:?}");
        }
    }

    fn train(mpi: Environment, trial: &training::Trial) -> Result<(), Error> {
        let late = Mutex::default();
        mpi.timeout(trial.timeout).run(|rank: Rank| {
            let outcome = trial.run(&rank, &late);
            let late = late.lock().unwrap().as_millis();
            let error = outcome.as_ref().map_or_else(|why| format!(" {why}"), |()| String::new());
            println!("\nrank trained: {} {late}{error}", rank.rank());
            outcome
        })
    }

    /// What the processes do.
    pub fn child(what: &str) {
        let text = |e: Error| e.to_string();
        let mpi = Environment::new().backend(Backend::Mpi).timeout(LONG);
        let outcome = match what.split_once(' ') {
            Some(("fuzz", seed)) => {
                let (trial, timeout) = trial(seed.parse().unwrap());
                mpi.timeout(timeout).run(|rank: Rank| trial.run(rank.comm(), rank.device()))
            }
            Some(("training", seed)) => train(mpi, &training(seed.parse().unwrap())),
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
