//! Ranks that are started again: the launcher as a process, with ranks that meet at its store, or shells.
#![cfg(unix)]

#[path = "../../parallel/tests/comm/port.rs"]
mod port;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use phalanx_rendezvous::{Credentials, Member, Stream};

use port::free_port;

const LONG: Duration = Duration::from_secs(30);
/// How long a rank waits for others before their launcher is told.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a rank does that the tests below start: meets the others again and again, adds the ranks' numbers with them, says the sum,
/// and waits until one of them has gone, or a file tells it to end.
#[test]
#[ignore = "a part of other tests"]
fn rank() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let (rank, size) = (variable("RANK").parse().unwrap(), variable("WORLD_SIZE").parse().unwrap());
    let place = variable("PHALANX_STORE");
    let (host, port) = place.rsplit_once(':').unwrap();
    let known = Credentials::find(&|name: &str| std::env::var(name).ok()).unwrap();
    let mut member = Member::new(host.into(), port.parse().unwrap(), known).with_patience(PATIENCE);
    let end = PathBuf::from(variable("FOLDER")).join("end");
    loop {
        let met = match member.meet((rank, size), LONG) {
            Ok(met) => met,
            Err(why) => {
                println!("\n> refused: {why}");
                std::process::exit(1);
            }
        };
        // Where a rank was left out, this one may have another number than its launcher has given it.
        let rank = met.rank;
        if let Some(sum) = sum(rank, met.streams.iter().flatten().map(Stream::socket)) {
            let count = variable("TORCHELASTIC_RESTART_COUNT");
            println!("\n> {} {rank} {} {sum} {count}", met.epoch, std::process::id());
            let is_lost = |socket: &TcpStream| {
                let mut socket = socket;
                socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                matches!(socket.read(&mut [0]), Ok(0)) || socket.take_error().unwrap().is_some()
            };
            while !met.streams.iter().flatten().map(Stream::socket).any(is_lost) {
                if end.exists() {
                    std::process::exit(i32::from(!member.end(LONG)));
                }
            }
            if end.exists() {
                std::process::exit(0);
            }
        }
    }
}

/// The sum of all ranks' numbers; none if one has gone.
fn sum<'a>(rank: usize, sockets: impl Iterator<Item = &'a TcpStream> + Clone) -> Option<usize> {
    let mut sum = rank;
    for mut socket in sockets.clone() {
        socket.write_all(&rank.to_le_bytes()).ok()?;
    }
    for mut socket in sockets {
        let mut number = [0; 8];
        socket.read_exact(&mut number).ok()?;
        sum += usize::from_le_bytes(number);
    }
    Some(sum)
}

/// What a rank has said in an epoch.
#[derive(Clone, Debug)]
struct Said {
    epoch: u64,
    rank: usize,
    pid: u32,
    restarts: usize,
}

/// A folder, and launchers whose ranks end when a file is there.
struct Run {
    folder: PathBuf,
    size: usize,
    launchers: Vec<Child>,
    heard: Vec<Receiver<String>>,
}

impl Run {
    fn new(name: &str, size: usize) -> Run {
        let folder = std::env::temp_dir().join(format!("phalanx-restarts-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Run { folder, size, launchers: Vec::new(), heard: Vec::new() }
    }

    /// Starts a launcher with these options.
    fn launch(&mut self, options: &[&str]) {
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx-launch"));
        command.args(["--backoff", "0.05", "--grace", "5"]).args(options);
        if !options.contains(&"--serve") {
            command.arg(exe).args(["rank", "--exact", "--ignored", "--nocapture"]);
        }
        command.env("FOLDER", &self.folder).stdout(Stdio::piped()).stderr(Stdio::piped());
        if ["--nnodes", "--store"].iter().any(|name| options.contains(name)) {
            command.env("PHALANX_SECRET", "of all machines");
        }
        let mut launcher = command.spawn().unwrap();
        let (say, heard) = channel();
        let (out, err) = (launcher.stdout.take().unwrap(), launcher.stderr.take().unwrap());
        for from in [Box::new(out) as Box<dyn Read + Send>, Box::new(err)] {
            let say = say.clone();
            std::thread::spawn(move || {
                BufReader::new(from).lines().map_while(Result::ok).for_each(|line| drop(say.send(line)));
            });
        }
        self.launchers.push(launcher);
        self.heard.push(heard);
    }

    /// Waits until all ranks have said the sum of one epoch after `last`.
    fn meet(&self, last: Option<u64>) -> Vec<Said> {
        let (mut all, mut lines, end): (Vec<Said>, Vec<String>, _) = (vec![], vec![], Instant::now() + LONG);
        loop {
            assert!(Instant::now() < end, "{all:?} {lines:#?}");
            for line in self.heard.iter().flat_map(Receiver::try_iter) {
                let numbers = line.split_once("> ").map(|(_, rest)| rest.split(' ').map(str::parse::<u64>));
                let numbers = numbers.and_then(|numbers| numbers.collect::<Result<Vec<u64>, _>>().ok());
                lines.push(line.clone());
                let numbers: Option<[u64; 5]> = numbers.and_then(|numbers| numbers.try_into().ok());
                let Some([epoch, rank, pid, sum, restarts]) = numbers else { continue };
                assert_eq!(sum as usize, self.size * (self.size - 1) / 2, "{line}");
                if last.is_none_or(|last| epoch > last) {
                    let (rank, restarts) = (rank as usize, restarts as usize);
                    all.push(Said { epoch, rank, pid: pid as u32, restarts });
                }
                let mut met: Vec<Said> = all.iter().filter(|said| said.epoch == epoch).cloned().collect();
                if met.len() == self.size {
                    met.sort_by_key(|said| said.rank);
                    return met;
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets all ranks end. All launchers must end well.
    fn end(mut self) {
        std::fs::write(self.folder.join("end"), "").unwrap();
        for launcher in &mut self.launchers {
            assert!(ended(launcher).success());
        }
    }

    /// All lines of a launcher that has ended.
    fn lines(&self, launcher: usize) -> String {
        self.heard[launcher].iter().map(|line| line + "\n").collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for launcher in &mut self.launchers {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn ended(child: &mut Child) -> std::process::ExitStatus {
    let end = Instant::now() + LONG;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < end, "a launcher does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(signal: &str, pid: u32) -> bool {
    let status = Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status();
    status.unwrap().success()
}

/// Waits until a process is gone.
fn is_gone(pid: u32) -> bool {
    let end = Instant::now() + Duration::from_secs(5);
    while kill("-0", pid) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    !kill("-0", pid)
}

#[test]
fn a_killed_rank_is_started_again_and_the_others_keep_their_processes() {
    let mut run = Run::new("killed", 3);
    run.launch(&["-n", "3", "--max-restarts", "3"]);
    let mut said = run.meet(None);
    assert!(said.iter().all(|said| said.epoch == 0 && said.restarts == 0), "{said:?}");
    let mut restarts = [0; 3];
    for killed in [&[0][..], &[1], &[2], &[0, 1], &[1]] {
        for &rank in killed {
            assert!(kill("-KILL", said[rank].pid));
            restarts[rank] += 1;
        }
        let now = run.meet(Some(said[0].epoch));
        for (before, now) in said.iter().zip(&now) {
            assert_eq!(before.pid == now.pid, !killed.contains(&now.rank), "{killed:?}: {now:?}");
            assert_eq!(now.restarts, restarts[now.rank]);
        }
        said = now;
    }
    run.end();
}

#[test]
fn a_rank_that_is_stopped_for_good_is_killed_and_started_again_and_a_late_one_is_not() {
    let mut run = Run::new("stopped", 3);
    run.launch(&["-n", "3", "--max-restarts", "2"]);
    let first = run.meet(None);
    let lose = |stopped: usize, killed: usize, said: &[Said]| {
        assert!(kill("-STOP", said[stopped].pid));
        // By this rank 0 notices that something has happened.
        assert!(kill("-KILL", said[killed].pid));
    };
    lose(1, 2, &first);
    std::thread::sleep(PATIENCE / 4);
    assert!(kill("-CONT", first[1].pid));
    let late = run.meet(Some(first[0].epoch));
    assert_eq!([late[0].pid, late[1].pid], [first[0].pid, first[1].pid]);
    assert_eq!(late.iter().map(|said| said.restarts).collect::<Vec<_>>(), [0, 0, 1]);
    lose(2, 1, &late);
    let last = run.meet(Some(late[0].epoch));
    assert_eq!(last[0].pid, first[0].pid);
    assert_eq!(last.iter().map(|said| said.restarts).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(is_gone(late[2].pid));
    run.end();
}

#[test]
fn a_rank_that_dies_once_too_often_ends_the_run() {
    let mut run = Run::new("too-often", 3);
    run.launch(&["-n", "3", "--max-restarts", "1"]);
    let said = run.meet(None);
    assert!(kill("-KILL", said[1].pid));
    let said = run.meet(Some(0));
    let killed = Instant::now();
    assert!(kill("-KILL", said[1].pid));
    assert_eq!(ended(&mut run.launchers[0]).code(), Some(128 + 9));
    // The others were told by the store, and not ended by a signal after two seconds.
    assert!(killed.elapsed() < Duration::from_millis(1900), "{:?}", killed.elapsed());
    let lines = run.lines(0);
    for wanted in [
        "[0] > refused: ",
        "[2] > refused: ",
        "rank 1 failed for good: signal: 9",
        "failed first: signal: 9 (SIGKILL), after 1 restart;",
        "then rank 0: exit status: 1, rank 2: exit status: 1",
    ] {
        assert!(lines.contains(wanted), "{wanted} in {lines}");
    }
}

#[test]
fn a_run_goes_on_without_ranks_that_it_can_do_without() {
    let mut run = Run::new("fewer", 3);
    run.launch(&["-n", "2:3"]);
    let first = run.meet(None);
    assert!(kill("-KILL", first[0].pid));
    run.size = 2;
    let said = run.meet(Some(0));
    // Rank 1 has kept its number, and the last one has taken that of the rank that was lost.
    assert_eq!([said[0].pid, said[1].pid], [first[2].pid, first[1].pid]);
    // Without two of them it ends.
    assert!(kill("-KILL", said[1].pid));
    assert_eq!(ended(&mut run.launchers[0]).code(), Some(128 + 9));
    let lines = run.lines(0);
    for wanted in [
        "rank 1 failed for good: signal: 9 (SIGKILL); the run goes on if enough ranks are left",
        "rank 1 failed for good: signal: 9 (SIGKILL); of the ranks 1 are left, wanted 2",
        "rank 0 (process ",
        "failed first: signal: 9",
    ] {
        assert!(lines.contains(wanted), "{wanted} in {lines}");
    }
    let mut run = Run::new("fewer-well", 2);
    run.launch(&["-n", "1:2"]);
    let said = run.meet(None);
    assert!(kill("-KILL", said[1].pid));
    run.size = 1;
    run.meet(Some(0));
    run.end();
}

#[test]
fn a_launcher_without_ranks_serves_the_store_while_those_of_others_go_on() {
    let mut run = Run::new("serves-on", 2);
    let port = free_port().to_string();
    for node in ["0", "1"] {
        let place = ["--nnodes", "1:2", "--node-rank", node, "--master-addr", "127.0.0.1"];
        run.launch(&[&place[..], &["--master-port", &port]].concat());
    }
    let said = run.meet(None);
    assert!(kill("-KILL", said[0].pid));
    run.size = 1;
    run.meet(Some(0));
    std::thread::sleep(Duration::from_millis(2500));
    assert!(run.launchers[0].try_wait().unwrap().is_none());
    std::fs::write(run.folder.join("end"), "").unwrap();
    assert!(ended(&mut run.launchers[1]).success());
    assert_eq!(ended(&mut run.launchers[0]).code(), Some(128 + 9));
}

/// The launcher on these options, with a shell as each rank.
fn shells(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx-launch"));
    command.args(options).args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn restarts_are_counted_for_each_rank_and_wait_longer_each_time() {
    let run = Run::new("counted", 1);
    let logs = run.folder.to_str().unwrap();
    let script = "echo $RANK $PHALANX_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit $((RANK * 7))";
    let options = ["-n", "2", "--max-restarts", "2", "--backoff", "0.3", "--log-dir", logs];
    let begin = Instant::now();
    let output = shells(&options, script).output().unwrap();
    assert!(begin.elapsed() > Duration::from_millis(900), "{:?}", begin.elapsed());
    let said = text(&output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("restart 1 of 2 in 0.3 s") && said.contains("restart 2 of 2 in 0.6 s"), "{said}");
    assert!(said.contains("failed first: exit status: 7, after 2 restarts;"), "{said}");
    // The log has what all processes of the rank have written.
    let log =
        |rank: usize| std::fs::read_to_string(run.folder.join(format!("rank{rank}/stdout.log"))).unwrap();
    let both = "[1] 1 0 of 2\n[1] phalanx-launch: restart 1\n[1] 1 1 of 2\n[1] phalanx-launch: restart 2\n[1] 1 2 of 2\n";
    assert_eq!((log(0), log(1)), ("[0] 0 0 of 2\n".into(), both.into()));
}

#[test]
fn a_usage_error_is_no_reason_to_start_again() {
    let output = shells(&["-n", "2", "--max-restarts", "5"], "exit $((RANK * 2))").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(!text(&output).contains("restart"), "{}", text(&output));
}

#[test]
fn a_signal_ends_all_ranks_and_starts_none() {
    for (script, code) in [
        ("trap 'echo saved; exit 0' TERM; touch $FOLDER/$RANK; while true; do sleep 0.05; done", 0),
        ("trap 'echo saved; exit 3' TERM; touch $FOLDER/$RANK; while true; do sleep 0.05; done", 3),
        // Rank 1 has failed, and waits for its restart.
        (
            "touch $FOLDER/$RANK; [ $RANK = 1 ] && exit 7; trap 'echo saved; exit 0' TERM; while true; do sleep 0.05; done",
            7,
        ),
    ] {
        let run = Run::new(&format!("signal{code}"), 2);
        let mut command = shells(&["-n", "2", "--max-restarts", "5", "--backoff", "20"], script);
        let launcher = command.env("FOLDER", &run.folder).spawn().unwrap();
        let end = Instant::now() + LONG;
        while !["0", "1"].iter().all(|rank| run.folder.join(rank).exists()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        assert!(kill("-TERM", launcher.id()));
        let output = launcher.wait_with_output().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        assert_eq!(text(&output).matches("[0] saved").count(), 1, "{}", text(&output));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_end_with_a_launcher_that_is_killed() {
    let mut run = Run::new("orphans", 2);
    run.launch(&["-n", "2", "--max-restarts", "1"]);
    let said = run.meet(None);
    // One that was started again, too.
    assert!(kill("-KILL", said[0].pid));
    let said = run.meet(Some(0));
    run.launchers[0].kill().unwrap();
    for said in said {
        assert!(is_gone(said.pid), "{said:?}");
    }
}

/// Two launchers on this machine, of two ranks each, whose store is at the first one or apart. Each is killed, with its ranks, and
/// started again.
fn launchers_take_their_places_again(name: &str, apart: bool) {
    let mut run = Run::new(name, 4);
    let (port, store) = (free_port().to_string(), format!("127.0.0.1:{}", free_port()));
    let options = |node: &'static str| {
        let mut options = vec!["-n", "2", "--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1"];
        options.extend(["--master-port", &port, "--max-restarts", "1"]);
        if apart {
            options.extend(["--store", &store]);
        }
        options
    };
    run.launch(&options("0"));
    run.launch(&options("1"));
    if apart {
        run.launch(&["--serve", &store, "--nnodes", "2", "-n", "2"]);
    }
    let mut said = run.meet(None);
    for node in [1, 0] {
        run.launchers[node].kill().unwrap();
        run.launchers[node].wait().unwrap();
        for said in &said[2 * node..2 * node + 2] {
            assert!(is_gone(said.pid), "{said:?}");
        }
        run.launch(&options(["0", "1"][node]));
        let (launcher, heard) = (run.launchers.pop().unwrap(), run.heard.pop().unwrap());
        (run.launchers[node], run.heard[node]) = (launcher, heard);
        let now = run.meet(Some(said[0].epoch));
        for (before, now) in said.iter().zip(&now) {
            assert_eq!(before.pid == now.pid, now.rank / 2 != node, "{now:?}");
        }
        said = now;
    }
    if apart {
        // It serves until it is asked to end.
        assert!(kill("-TERM", run.launchers[2].id()) && ended(&mut run.launchers[2]).success());
    }
    run.end();
}

#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_was_killed_takes_its_place_again_with_new_ranks() {
    launchers_take_their_places_again("nodes", false);
}

#[test]
#[cfg(target_os = "linux")]
fn a_store_apart_outlives_every_launcher() {
    launchers_take_their_places_again("apart", true);
}

#[test]
fn a_rank_that_fails_for_good_ends_the_ranks_of_other_machines() {
    let mut run = Run::new("for-good", 2);
    let port = free_port().to_string();
    for (node, restarts) in [("0", "0"), ("1", "3")] {
        let store = format!("127.0.0.1:{port}");
        let place =
            ["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", &port];
        let more = ["--max-restarts", restarts, "--store", &store];
        // The first one has no restarts, but its ranks meet at the store.
        run.launch(&[&place[..], &more].concat());
    }
    run.launch(&["--serve", &format!("127.0.0.1:{port}"), "--nnodes", "2"]);
    let said = run.meet(None);
    assert!(kill("-KILL", said[0].pid));
    assert_eq!(ended(&mut run.launchers[0]).code(), Some(137));
    assert_eq!(ended(&mut run.launchers[1]).code(), Some(1));
    let lines = run.lines(1);
    assert!(lines.contains("the run is over: rank 0 failed for good: signal: 9"), "{lines}");
    assert!(lines.contains("[1] > refused: ") && !lines.contains("restart 3"), "{lines}");
}

#[test]
fn two_runs_do_not_mix_at_one_port() {
    let mut run = Run::new("two-runs", 2);
    let port = free_port().to_string();
    let options = ["-n", "2", "--master-port", &port, "--max-restarts", "1"];
    run.launch(&options);
    run.meet(None);
    // A second launcher has no store, and one that visits the first one's store is not of its run.
    run.launch(&options);
    assert_eq!(ended(&mut run.launchers[1]).code(), Some(1));
    let lines = run.lines(1);
    let place = format!("the store cannot listen at 127.0.0.1:{port}: another process has the port");
    assert!(lines.contains(&place), "{lines}");
    run.launch(&["-n", "2", "--store", &format!("127.0.0.1:{port}")]);
    assert_eq!(ended(&mut run.launchers[2]).code(), Some(1));
    let lines = run.lines(2);
    assert!(lines.contains("for the store: it is not of this run: another secret or job"), "{lines}");
    run.launchers.truncate(1);
    run.end();
}
