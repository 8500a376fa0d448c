//! Processes that are killed and replaced by the launcher: the others go on in their place with the new one, with the losses of an
//! undisturbed run.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_train::checkpoints;

use super::launcher::launcher;
use super::*;

const STEPS: usize = 40;

/// The lines of a rank's output that begin in this way, without the beginning.
pub fn said(logs: &str, rank: usize, begin: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("{logs}/rank{rank}/stdout.log")).unwrap_or_default();
    text.lines().filter_map(|line| Some(line.split_once(begin)?.1.to_string())).collect()
}

/// Runs ranks under the launcher and kills each of `victims`, one after the other, some time after so many steps are recorded. The run ends by itself,
/// with the bits of the run that nothing disturbs; the victims alone get new processes. Returns the notices, but for those of slow ranks.
fn survives(flags: &str, ranks: usize, victims: &[(usize, usize)], later: Duration) -> Vec<String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = Folder::new(&format!("replaced-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    let flags = format!("{flags} --steps {STEPS}");
    let plain = undisturbed(&format!("{flags} --out {}", folder.path("plain")), ranks, &folder.path("plain"));
    survives_as(&plain, &folder, &flags, ranks, victims, later)
}

fn losses(out: &str) -> Vec<(u64, f64)> {
    numbers_in(&Path::new(out).join("metrics.jsonl"), "loss")
}

/// The losses of a run that nothing disturbs.
fn undisturbed(flags: &str, ranks: usize, out: &str) -> Vec<(u64, f64)> {
    assert_eq!(outcomes(&vec![rank(flags.to_string()); ranks]), vec!["well"; ranks]);
    losses(out)
}

/// [`survives`] with these losses, in the folder `out`.
fn survives_as(
    plain: &[(u64, f64)],
    folder: &Folder,
    flags: &str,
    ranks: usize,
    victims: &[(usize, usize)],
    later: Duration,
) -> Vec<String> {
    let [out, logs] = ["out", "logs"].map(|name| folder.path(name));
    let mut command = Command::new(launcher());
    command.args(["-n", &ranks.to_string(), "--max-restarts", "2", "--backoff", "0.05", "--quiet"]);
    command.args(["--log-dir", &logs]).arg(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--ignored", "--nocapture"]);
    let held: Vec<String> = victims.iter().map(|(_, steps)| steps.to_string()).collect();
    command.env("HELD_AT", held.join(" ")).env("GO_ON", folder.path("go-on-"));
    command.env("FLAGS", format!("{flags} --out {out}")).stdout(Stdio::null()).stderr(Stdio::piped());
    let (mut run, end) = (command.spawn().unwrap(), Instant::now() + Duration::from_secs(120));
    let mut killed: Vec<String> = Vec::new();
    for (victim, steps) in victims {
        let process = loop {
            let process = said(&logs, *victim, "process ").pop().filter(|process| !killed.contains(process));
            if let Some(process) = process.filter(|_| losses(&out).len() == *steps) {
                break process;
            }
            assert!(Instant::now() < end && run.try_wait().unwrap().is_none(), "{:?}", losses(&out));
            std::thread::sleep(Duration::from_millis(2));
        };
        let go_on = || fs::write(folder.path(&format!("go-on-{steps}")), "").unwrap();
        // The run waits in this step.
        if !later.is_zero() {
            go_on();
            std::thread::sleep(later);
        }
        assert!(Command::new("kill").args(["-9", &process]).status().unwrap().success());
        go_on();
        killed.push(process);
    }
    while run.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            run.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{victims:?}, {later:?}: {output:?}");
    assert_eq!((losses(&out).len(), &losses(&out)[..]), (STEPS, plain));
    for rank in 0..ranks {
        let processes: BTreeSet<String> = said(&logs, rank, "process ").into_iter().collect();
        let killed = victims.iter().filter(|(victim, _)| *victim == rank).count();
        assert_eq!(processes.len(), 1 + killed, "rank {rank}: {processes:?}");
        // A run that has ended is gone before the next one begins.
        let ledger = said(&logs, rank, "ledger ");
        assert!(ledger.iter().all(|bytes| *bytes == ledger[0]), "rank {rank}: {ledger:?}");
    }
    // A busy machine has slow ranks.
    said(&logs, 0, "notice: ").into_iter().filter(|notice| !notice.contains("% of the time for it")).collect()
}

/// The step from which the run goes on is the last recorded one, or the one before.
fn check(notice: &str, victim: usize, steps: usize) {
    let (begin, rest) = notice.split_once("goes on from step ").unwrap_or_else(|| panic!("{notice}"));
    assert_eq!(begin, format!("rank {victim} was replaced; the run "));
    let (from, holder) = rest.split_once(", held by rank ").unwrap_or_else(|| panic!("{notice}"));
    assert_eq!(holder, (1 - victim).to_string());
    assert!(from.parse::<usize>().unwrap() + 1 >= steps, "{notice}, {steps}");
}

#[test]
fn a_killed_process_is_replaced_and_no_step_is_lost() {
    for flags in ["--dp 2", "--tp 2"] {
        let victims = [(1, 7), (0, 19)];
        let notices = survives(flags, 2, &victims, Duration::ZERO);
        // Rank 0 says both: the first process, and the one that takes its place.
        assert_eq!(notices.len(), 2, "{notices:?}");
        notices.iter().zip(victims).for_each(|(notice, (victim, steps))| check(notice, victim, steps));
    }
}

#[test]
fn shards_of_a_killed_process_are_with_its_partner() {
    let notices = survives("--dp 2 --zero 3", 2, &[(0, 11)], Duration::ZERO);
    check(&notices[0], 0, 11);
}

#[test]
fn a_replaced_process_does_not_resume_again() {
    let (folder, flags) =
        (Folder::new("resumed"), format!("--dp 2 --save-every 5 --keep-last 9 --steps {STEPS}"));
    let out = folder.path("out");
    let plain = undisturbed(&format!("{flags} --out {out}"), 2, &out);
    let resumed = format!("{flags} --resume {out}/checkpoint-00000010");
    survives_as(&plain, &folder, &resumed, 2, &[(1, 22), (0, 31)], Duration::ZERO);
    // The checkpoints of this run's own steps have stayed. A process that dies may take one with it that is being saved.
    let listed = checkpoints::list(Path::new(&out));
    let kept: Vec<u64> =
        listed.iter().map(|listed| listed.step).filter(|step| ![20, 30].contains(step)).collect();
    assert_eq!(kept, [5, 10, 15, 25, 35, 40]);
}

/// `PHALANX_FUZZ_TRIALS` of them, from the seed `PHALANX_FUZZ_SEED` on.
#[test]
#[ignore = "takes minutes"]
fn processes_killed_at_random_are_replaced() {
    let number = |name: &str, other: u64| std::env::var(name).map_or(other, |text| text.parse().unwrap());
    let first = number("PHALANX_FUZZ_SEED", 1);
    for seed in first..first + number("PHALANX_FUZZ_TRIALS", 10) {
        let draws = phalanx_tensor::RngKey { seed, step: 0 }.site(0).block(0, 0).map(|draw| draw as usize);
        let layouts = [
            ("--dp 2", 2),
            ("--dp 2 --zero 1", 2),
            ("--dp 3 --zero 2 --batch 6", 3),
            ("--dp 2 --zero 3", 2),
            ("--tp 2", 2),
            ("--pp 2 --schedule zb-v --micro-batches 2", 2),
            ("--dp 2 --pp 2", 4),
            ("--dp 2 --tp 2 --zero 3", 4),
        ];
        let (flags, ranks) = layouts[draws[0] % layouts.len()];
        let victims =
            [(draws[1] % ranks, draws[2] % 20), (draws[1] / ranks % ranks, 20 + draws[2] / 20 % 10)];
        let later = Duration::from_micros(draws[3] as u64 % 20_000);
        println!("{seed}: {flags}, {victims:?}, {later:?}");
        survives(flags, ranks, &victims, later).iter().for_each(|notice| println!("  {notice}"));
    }
}
