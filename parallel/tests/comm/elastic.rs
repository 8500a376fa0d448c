//! Ranks that outlive others: processes that meet at a store again and again, are killed, stopped, and replaced.

use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::Reduction;
use phalanx_parallel::launch::{Environment, Rank};
use phalanx_rendezvous::{Credentials, Node, Store};
use phalanx_tensor::Tensor;

use crate::port::free_port;
use crate::processes::LONG;

/// What a process started by the tests below does: adds numbers with the others until a file tells it to end, and says after the first
/// sum of each epoch what it has got. Rank `FAILS` ends with an error of its own in epoch 0, and rank `LAGS` ends that epoch
/// later than the others.
#[test]
#[ignore = "a part of another test"]
fn member() {
    let folder = PathBuf::from(std::env::var_os("FOLDER").unwrap());
    let timeout = Duration::from_secs_f64(std::env::var("TIMEOUT").unwrap().parse().unwrap());
    let named = |name| std::env::var(name).ok().and_then(|rank| rank.parse().ok());
    let (fails, lags) = (named("FAILS"), named("LAGS"));
    let outcome = Environment::new().timeout(timeout).join_timeout(LONG).run_elastic(|rank: Rank| {
        let me = rank.rank();
        let add = |x: usize| -> Result<f32, String> {
            let mut x = Tensor::scalar(x as f32, rank.device()).map_err(|e| e.to_string())?;
            rank.comm().all_reduce(&mut x, Reduction::Sum).map_err(|e| e.to_string())?;
            x.item().map_err(|e| e.to_string())
        };
        let sum = add(me + 1)?;
        if fails == Some(me) && rank.epoch() == 0 {
            return Err("it is its own mistake".to_string());
        }
        let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        let sockets = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let sockets = sockets.filter_map(|file| std::fs::read_link(file.path()).ok());
        let sockets = sockets.filter(|link| link.to_string_lossy().starts_with("socket:")).count();
        println!("\n> {} {me} {} {sum} {threads} {sockets}", rank.epoch(), std::process::id());
        loop {
            // All ranks get the same sum, and so do the same.
            let told = 1000 * usize::from(folder.join("end").exists()) + usize::from(rank.wants_to_change());
            match add(told)? {
                0.0 => std::thread::sleep(Duration::from_millis(5)),
                told if told < 1000.0 => {
                    rank.meet_again();
                    return Ok(());
                }
                _ => break,
            }
        }
        if lags == Some(me) && rank.epoch() == 0 {
            std::thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    });
    println!("\n> {}", outcome.map_or_else(|error| error.to_string(), |()| "ended well".into()));
}

/// What a process has said after the first sum of an epoch.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    epoch: u64,
    rank: usize,
    pid: u32,
    sum: f32,
    threads: usize,
    sockets: usize,
}

/// The store, the processes by rank, and what they say.
struct Run {
    port: u16,
    size: usize,
    /// The number of ranks that their launcher has named.
    named: usize,
    name: &'static str,
    timeout: &'static str,
    folder: PathBuf,
    children: Vec<Child>,
    say: Sender<(u32, String)>,
    heard: Receiver<(u32, String)>,
    /// Lines that are no sums.
    outcomes: Vec<(u32, String)>,
    stop: Arc<AtomicBool>,
    fails: Option<usize>,
    lags: Option<usize>,
}

impl Run {
    fn new(name: &'static str, size: usize, timeout: &'static str) -> Run {
        Run::of(name, size..=size, timeout)
    }

    fn of(name: &'static str, sizes: RangeInclusive<usize>, timeout: &'static str) -> Run {
        let (least, size) = sizes.into_inner();
        let (port, stop) = (free_port(), Arc::new(AtomicBool::new(false)));
        let known = Credentials { secret: "secret".into(), job: name.into(), tls: false };
        let store = Store::bind("127.0.0.1", port, known, least..=size).unwrap();
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || store.serve(&stopped));
        let folder = std::env::temp_dir().join(format!("phalanx-elastic-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (say, heard) = channel();
        let (children, outcomes, fails, lags) = (vec![], vec![], None, None);
        Run {
            port,
            size,
            named: size,
            name,
            timeout,
            folder,
            children,
            say,
            heard,
            outcomes,
            stop,
            fails,
            lags,
        }
    }

    fn start(&self, rank: usize) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["elastic::member", "--exact", "--ignored", "--nocapture"]);
        command.envs([("RANK", rank.to_string()), ("WORLD_SIZE", self.named.to_string())]);
        command
            .envs([("PHALANX_STORE", format!("127.0.0.1:{}", self.port)), ("PHALANX_JOB", self.name.into())]);
        command.env("PHALANX_SECRET", "secret").env("FOLDER", &self.folder).env("TIMEOUT", self.timeout);
        let named = [("FAILS", self.fails), ("LAGS", self.lags)];
        command.envs(named.into_iter().filter_map(|(name, rank)| Some((name, rank?.to_string()))));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (output, pid, say) = (child.stdout.take().unwrap(), child.id(), self.say.clone());
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            for line in lines.filter_map(|line| Some(line.strip_prefix("> ")?.to_string())) {
                let _ = say.send((pid, line));
            }
        });
        child
    }

    fn start_all(&mut self) {
        self.children = (0..self.size).map(|rank| self.start(rank)).collect();
    }

    fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    fn kill(&mut self, rank: usize) {
        self.children[rank].kill().unwrap();
        self.children[rank].wait().unwrap();
    }

    /// Waits until the present processes of all ranks have said what they have got in one epoch after `last`.
    fn meet(&mut self, last: Option<u64>) -> Vec<Said> {
        let (mut all, end): (Vec<Said>, _) = (vec![], Instant::now() + LONG);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let heard = self.heard.recv_timeout(left);
            let (pid, line) = heard.unwrap_or_else(|_| panic!("{all:?}, {:?}", self.outcomes));
            let words: Vec<&str> = line.split(' ').collect();
            let number = |place: usize| words.get(place).and_then(|word| word.parse::<u64>().ok());
            let (Some(epoch), Some(rank), 6) = (number(0), number(1), words.len()) else {
                self.outcomes.push((pid, line));
                continue;
            };
            if last.is_some_and(|last| epoch <= last) || !self.pids().contains(&pid) {
                continue;
            }
            let (sum, of) = (words[3].parse().unwrap(), |place| number(place).unwrap() as usize);
            all.push(Said { epoch, rank: rank as usize, pid, sum, threads: of(4), sockets: of(5) });
            let newest: Vec<Said> = all.iter().filter(|said| said.epoch == epoch).cloned().collect();
            if newest.len() == self.size {
                let expected = (self.size * (self.size + 1) / 2) as f32;
                assert!(newest.iter().all(|said| said.sum == expected), "{newest:?}");
                return newest;
            }
        }
    }

    /// Lets all ranks end, which must be well.
    fn end(mut self) {
        std::fs::write(self.folder.join("end"), "").unwrap();
        for child in &mut self.children {
            let end = Instant::now() + LONG;
            while child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "a rank does not end");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let pids = self.pids();
        let mut well = self.outcomes.iter().filter(|(_, line)| line == "ended well").count();
        while well < pids.len() {
            let (pid, line) = self.heard.recv_timeout(LONG).unwrap();
            assert!(line == "ended well" || line.len() > 20 || !pids.contains(&pid), "{line}");
            well += usize::from(line == "ended well");
        }
    }

    /// The line with which a process has ended.
    fn outcome(&mut self, pid: u32) -> String {
        loop {
            if let Some((_, line)) = self.outcomes.iter().find(|(of, _)| *of == pid) {
                return line.clone();
            }
            let heard = self.heard.recv_timeout(LONG).expect("a process ends");
            if heard.1.split(' ').count() != 6 || heard.1.contains("ended") {
                self.outcomes.push(heard);
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.stop.store(true, Ordering::Relaxed);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn signal(name: &str, child: &Child) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

fn newest(said: &[Said]) -> Option<u64> {
    said.iter().map(|said| said.epoch).max()
}

#[test]
fn ranks_go_on_in_their_processes_when_others_are_killed_and_replaced() {
    let mut run = Run::new("killed", 3, "20");
    run.start_all();
    let first = run.meet(None);
    assert_eq!(newest(&first), Some(0));
    let mut last = newest(&first);
    // Each in turn, two at once, and one twice in a row.
    for killed in [&[0][..], &[1], &[2], &[0, 2], &[1], &[1]] {
        let before = run.pids();
        killed.iter().for_each(|&rank| run.kill(rank));
        for &rank in killed {
            run.children[rank] = run.start(rank);
        }
        let said = run.meet(last);
        for said in &said {
            assert_eq!(said.pid == before[said.rank], !killed.contains(&said.rank), "{killed:?}: {said:?}");
        }
        last = newest(&said);
        // Nothing of an old epoch is left in a process that has lived in all.
        for said in said.iter().filter(|said| first.iter().any(|first| first.pid == said.pid)) {
            let first = first.iter().find(|first| first.pid == said.pid).unwrap();
            assert_eq!((said.threads, said.sockets), (first.threads, first.sockets), "{said:?}");
        }
    }
    run.end();
}

#[test]
fn a_rank_that_is_killed_while_it_meets_the_others_is_replaced_once_more() {
    let mut run = Run::new("meeting", 3, "20");
    run.start_all();
    let mut last = newest(&run.meet(None));
    for after_ms in [0, 5, 20, 60] {
        run.kill(2);
        run.children[2] = run.start(2);
        std::thread::sleep(Duration::from_millis(after_ms));
        run.kill(2);
        run.children[2] = run.start(2);
        let pids = run.pids();
        let said = run.meet(last);
        assert!(said.iter().all(|said| pids.contains(&said.pid)));
        last = newest(&said);
    }
    run.end();
}

#[test]
fn a_process_that_was_stopped_and_replaced_does_no_harm_when_it_goes_on() {
    let mut run = Run::new("stale", 3, "1");
    run.start_all();
    let first = run.meet(None);
    signal("-STOP", &run.children[1]);
    // The others miss it, and wait for the process that has come in its place.
    let next = run.start(1);
    let mut stale = std::mem::replace(&mut run.children[1], next);
    let said = run.meet(newest(&first));
    signal("-CONT", &stale);
    let why = run.outcome(stale.id());
    assert!(why.contains("another process has been rank 1 since epoch"), "{why}");
    stale.wait().unwrap();
    // No epoch has begun since: the ranks still add.
    assert!(run.heard.recv_timeout(Duration::from_millis(300)).is_err());
    assert_eq!(
        said.iter().filter(|said| said.rank != 1 && first.iter().any(|f| f.pid == said.pid)).count(),
        2
    );
    run.end();
}

#[test]
fn a_process_that_was_stopped_and_not_replaced_takes_its_place_again() {
    let mut run = Run::new("paused", 2, "1");
    run.start_all();
    let first = run.meet(None);
    signal("-STOP", &run.children[1]);
    std::thread::sleep(Duration::from_millis(2500));
    signal("-CONT", &run.children[1]);
    let said = run.meet(newest(&first));
    assert!(said.iter().all(|said| first.iter().any(|first| first.pid == said.pid)), "{first:?} {said:?}");
    run.end();
}

#[test]
fn an_error_of_its_own_ends_a_process_and_the_others_wait_for_the_next_one() {
    let mut run = Run::new("own", 3, "20");
    run.fails = Some(1);
    run.start_all();
    let failed = run.children[1].id();
    assert!(run.outcome(failed).contains("rank 1 failed: it is its own mistake"), "{:?}", run.outcomes);
    run.children[1].wait().unwrap();
    let before = run.pids();
    run.children[1] = run.start(1);
    let said = run.meet(Some(0));
    assert!(said.iter().all(|said| (said.pid == before[said.rank]) == (said.rank != 1)), "{said:?}");
    run.end();
}

#[test]
fn a_rank_that_is_killed_at_the_end_is_replaced_before_others_end() {
    let mut run = Run::new("ends", 3, "20");
    run.lags = Some(0);
    run.start_all();
    run.meet(None);
    std::fs::write(run.folder.join("end"), "").unwrap();
    // The others have left the epoch, and wait for rank 0.
    std::thread::sleep(Duration::from_millis(500));
    run.kill(1);
    run.children[1] = run.start(1);
    run.meet(Some(0));
    run.end();
}

#[test]
fn a_run_that_ends_at_a_meeting_says_why_ranks_were_to_meet() {
    let mut run = Run::new("cause", 2, "20");
    run.start_all();
    run.meet(None);
    run.kill(1);
    let known = Credentials { secret: "secret".into(), job: "cause".into(), tls: false };
    assert!(Node::new(("127.0.0.1".into(), run.port), known, (0, 2)).end("rank 1 is not started again"));
    let first = run.children[0].id();
    let why = run.outcome(first);
    assert!(why.contains("rank 1 is not started again; before that, rank 1 is lost: "), "{why}");
}

/// A program that takes what it does from the number of ranks.
#[test]
fn ranks_go_on_with_fewer_and_with_more() {
    let mut run = Run::of("sizes", 2..=3, "20");
    run.start_all();
    let first = run.meet(None);
    // A launcher gives rank 0 up.
    let known = Credentials { secret: "secret".into(), job: "sizes".into(), tls: false };
    assert!(Node::new(("127.0.0.1".into(), run.port), known, (0, 3)).lose(0, "rank 0 failed for good"));
    run.kill(0);
    run.size = 2;
    let fewer = run.meet(newest(&first));
    assert!(
        fewer.iter().all(|said| first.iter().any(|first| first.pid == said.pid && first.rank > 0)),
        "{fewer:?}"
    );
    // Another process comes, and the ranks meet it at the end of a step.
    run.children[0] = run.start(0);
    run.size = 3;
    let more = run.meet(newest(&fewer));
    assert!(more.iter().all(|said| said.pid == run.children[said.rank].id()), "{more:?}");
    run.end();
}
