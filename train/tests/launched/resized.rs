//! Processes that are lost for good, and others that come in their place: the run goes on with as many ranks as there are, with the losses of
//! runs that are resumed under the same layouts at the same steps.

use super::launcher::launcher;
use super::replaced::said;
use super::*;

const STEPS: usize = 50;
const LONG: Duration = Duration::from_secs(100);
/// How a notice begins that other ranks than before have met.
const MET: &str = "notice: the ranks met again; ";

/// Waits until the value is there.
fn wait<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < end, "{what} in vain");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The variables of a process.
fn variables_of(process: &str) -> Vec<(String, String)> {
    let all = fs::read_to_string(format!("/proc/{process}/environ")).unwrap();
    let pairs = all.split('\0').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.into(), value.into())).collect()
}

/// The step of a notice that the run goes on with other ranks.
fn step_in(notice: &str, change: &str) -> usize {
    let begin = format!("the run goes on with {change} from step ");
    let step = notice.strip_prefix(&begin).unwrap_or_else(|| panic!("{notice}, wanted {begin}"));
    step.split([',', ' ']).next().unwrap().parse().unwrap()
}

/// Runs ranks of which one is killed and not started again. When the others have gone on, a process comes in its place.
fn shrinks_and_grows(name: &str, ranks: usize, flags: &str) {
    let left = ranks - 1;
    let folder = Folder::new(&format!("resized-{name}"));
    let [out, logs, twin, slow] = ["out", "logs", "twin", "slow"].map(|name| folder.path(name));
    let losses = |out: &str| numbers_in(&Path::new(out).join("metrics.jsonl"), "loss");
    let flags = format!("--batch 6 {flags}");
    let mut command = Command::new(launcher());
    command.args(["-n", &format!("{left}:{ranks}"), "--max-restarts", "0", "--quiet", "--log-dir", &logs]);
    command.arg(std::env::current_exe().unwrap()).args(["child", "--exact", "--ignored", "--nocapture"]);
    command.env("FLAGS", format!("{flags} --dp auto --steps {STEPS} --out {out}")).env("SLOW", &slow);
    fs::write(&slow, "").unwrap();
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait("steps", || (losses(&out).len() > 7).then_some(()));
    let victim = said(&logs, 1, "process ").pop().unwrap();
    let variables = variables_of(&victim);
    assert!(Command::new("kill").args(["-9", &victim]).status().unwrap().success());
    let notices = || said(&logs, 0, MET);
    wait("a run of fewer ranks", || notices().pop());
    let fewer = losses(&out).len();
    wait("more steps", || (losses(&out).len() > fewer + 2).then_some(()));
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["child", "--exact", "--ignored", "--nocapture"]).env_clear().envs(variables);
    let other = other.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait("a run of all ranks", || notices().get(1).cloned());
    fs::remove_file(&slow).unwrap();
    wait("the end", || run.try_wait().unwrap());
    let output = run.wait_with_output().unwrap();
    assert_eq!(
        (ended(other), said(&logs, 0, "ended ")),
        ("well".into(), vec!["well".to_string()]),
        "{output:?}"
    );

    let notices = notices();
    assert_eq!(notices.len(), 2, "{notices:?}");
    let fewer = step_in(
        &notices[0],
        &format!("{} (dp {ranks} -> {left})", if left == 1 { "1 rank" } else { "2 ranks" }),
    );
    let more = step_in(&notices[1], &format!("{ranks} ranks (dp {left} -> {ranks})"));
    assert!(0 < fewer && fewer < more && more < STEPS, "{notices:?}");
    // No step is run again when another rank comes.
    let all = fs::read_to_string(format!("{logs}/rank0/stdout.log")).unwrap();
    let (before, _) = all.rsplit_once(MET).unwrap();
    let last = before.rsplit_once("after ").and_then(|(_, number)| number.lines().next());
    assert_eq!(last, Some(&more.to_string()[..]), "{notices:?}");
    for (dp, steps, resume) in [(ranks, fewer, "--out"), (left, more, "--resume"), (ranks, STEPS, "--resume")]
    {
        let flags = format!("{flags} --dp {dp} --steps {steps} {resume} {twin}");
        assert_eq!(outcomes(&vec![rank(flags); dp]), vec!["well"; dp]);
    }
    let steps: Vec<u64> = losses(&out).iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, Vec::from_iter(0..STEPS as u64));
    assert_eq!(losses(&out), losses(&twin));
    let file = fs::read_to_string(Path::new(&out).join("config.toml")).unwrap();
    assert!(file.contains("\ndp = \"auto\"\n"), "{file}");
}

#[test]
fn replicas_go_on_with_fewer_and_more() {
    shrinks_and_grows("replicas", 3, "");
}

#[test]
fn a_rank_goes_on_alone_until_another_comes() {
    shrinks_and_grows("alone", 2, "--zero 1");
}

#[test]
fn shards_go_on_with_fewer_and_more() {
    shrinks_and_grows("shards", 3, "--zero 3 --memory-checkpoint-every 3");
}

#[test]
fn without_copies_in_memory_the_disk_carries_the_run_to_fewer_and_more() {
    shrinks_and_grows("disk", 3, "--memory-checkpoint-every 0 --save-every 3");
}

#[test]
fn a_number_of_ranks_that_does_not_fit_is_named() {
    for (flags, wanted) in [
        ("--dp 2", "wants 2 ranks, and the launcher has started 3; `--dp auto` takes as many as there are"),
        ("--dp auto --tp 2", "a multiple of tp 2 x pp 1, which is 2, and the launcher has started 3 ranks"),
        ("--dp auto", "a batch of 4 rows cannot be shared by `dp` 3"),
    ] {
        let said = outcomes(&vec![rank(flags); 3]);
        let is_named = said.iter().any(|said| said.contains(wanted));
        assert!(is_named && !said.contains(&"well".to_string()), "{flags}: {said:?}");
    }
    // As many threads as `ranks` says, and else one.
    for (flags, dp) in [("--dp auto --ranks 2", 2), ("--dp auto", 1)] {
        let mut settings = Settings::new(Config::default());
        settings.words(flags.split(' ').map(String::from)).unwrap();
        let config = settings.resolve().unwrap().for_process(None).unwrap();
        assert_eq!((config.layout.dp, config.ranks()), (dp, dp));
    }
}
