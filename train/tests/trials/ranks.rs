//! Ranks as processes: [`run`] starts them, brings a trial's faults at their moments, and collects how the processes end.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::launcher::launcher;
use crate::links::{cut, deafen};
use crate::port::free_port;
use crate::rank::{TIMEOUT, flags};
use crate::strangers::Stranger;
use crate::trial::{Fault, LAYOUTS, Moment};

/// How long after a fault, beyond the timeout, all processes may take to end on a busy machine. A process of a failed run waits a second
/// for others to end as well.
const MARGIN: Duration = Duration::from_secs(6);
/// How long a run may take to which nothing happens.
const UNDISTURBED: Duration = Duration::from_secs(180);

/// The files of a trial.
pub struct Folder {
    root: PathBuf,
    mounted: bool,
}

impl Folder {
    pub fn new(name: &str, mounts: bool) -> Folder {
        let root = std::env::temp_dir().join(format!("phalanx-trials-{}-{name}", std::process::id()));
        fs::create_dir_all(root.join("disk")).unwrap();
        let folder = Folder { root, mounted: mounts };
        if mounts {
            folder.mount("size=8m");
        }
        folder
    }

    fn disk(&self) -> PathBuf {
        self.root.join("disk")
    }

    /// The folder of the run.
    pub fn run(&self) -> PathBuf {
        self.disk().join("run")
    }

    fn mount(&self, options: &str) {
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "trials"]).arg(self.disk()).status();
        assert!(mount.unwrap().success(), "cannot mount {} with {options}", self.disk().display());
    }

    /// What remains of the disk is filled to the last byte.
    fn fill(&self) {
        if let Ok(mut file) = File::create(self.disk().join("filler")) {
            let _ = std::io::copy(&mut std::io::repeat(1), &mut file);
        }
    }

    /// There is room again, and the disk can be written to.
    pub fn mend(&self) {
        if self.mounted {
            self.mount("remount,rw");
            let _ = fs::remove_file(self.disk().join("filler"));
        }
    }

    /// The lines of the run's steps so far.
    pub fn steps(&self) -> u64 {
        let text = fs::read(self.run().join("metrics.jsonl")).unwrap_or_default();
        text.windows(8).filter(|word| word == b"{\"step\":").count() as u64
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg("--lazy").arg(self.disk()).status();
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// How a run ended.
pub struct Ended {
    /// How each process ended; none of one that had to be killed because it did not.
    pub statuses: Vec<Option<ExitStatus>>,
    pub said: Vec<String>,
    /// The faults that met something: a process that ran, a connection.
    pub met: Vec<Fault>,
}

impl Ended {
    pub fn well(&self) -> bool {
        self.statuses.iter().all(|status| status.is_some_and(|status| status.success()))
    }

    /// Whether a signal of the trial ended that process.
    pub fn was_killed(&self, rank: usize) -> bool {
        let signal = self.statuses[rank].and_then(|status| status.signal());
        let is_by = |fault: &Fault| match *fault {
            Fault::Kill(killed) => killed == rank && signal == Some(Signal::SIGKILL as i32),
            Fault::Interrupt(sent, to) => to.is_none_or(|to| to == rank) && signal == Some(sent as i32),
            _ => false,
        };
        self.met.iter().any(is_by)
    }
}

/// What a fault does, at one time.
#[derive(Clone, Copy)]
enum Act {
    Send(usize, Signal),
    Cut([usize; 2]),
    Deafen([usize; 2], bool),
    Fill,
    Visit(Stranger),
}

/// A fault's acts, each with its time after the fault's moment.
fn acts(fault: Fault, ranks: usize) -> Vec<(Duration, Act)> {
    let ms = Duration::from_millis;
    let now = |act| vec![(Duration::ZERO, act)];
    let send = |at, rank, signal| (at, Act::Send(rank, signal));
    match fault {
        Fault::Kill(rank) => now(Act::Send(rank, Signal::SIGKILL)),
        Fault::Stop(rank, None) => now(Act::Send(rank, Signal::SIGSTOP)),
        Fault::Stop(rank, Some(time)) => {
            vec![send(Duration::ZERO, rank, Signal::SIGSTOP), send(time, rank, Signal::SIGCONT)]
        }
        Fault::Slow(rank) => {
            let beat = |i: u64| {
                [send(ms(100 * i), rank, Signal::SIGSTOP), send(ms(100 * i + 80), rank, Signal::SIGCONT)]
            };
            (0..20).flat_map(beat).collect()
        }
        Fault::Interrupt(signal, Some(rank)) => now(Act::Send(rank, signal)),
        Fault::Interrupt(signal, None) => (0..ranks).map(|rank| send(Duration::ZERO, rank, signal)).collect(),
        Fault::Cut(ends) => now(Act::Cut(ends)),
        Fault::HalfOpen(ends, both) => now(Act::Deafen(ends, both)),
        Fault::FullDisk => now(Act::Fill),
        Fault::Stranger(stranger) => now(Act::Visit(stranger)),
        Fault::ReadOnlyDisk | Fault::FileLimit(_) | Fault::Unlike(..) => vec![],
    }
}

/// A run under way.
struct Running<'a> {
    folder: &'a Folder,
    port: u16,
    ranks: usize,
    /// Whether there is one process, the launcher, whose children the ranks are.
    is_launched: bool,
    processes: Vec<Child>,
    statuses: Vec<Option<ExitStatus>>,
    /// Stopped for good.
    stopped: Vec<usize>,
    met: Vec<Fault>,
    over: Arc<AtomicBool>,
}

/// How a run is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// As processes, anew.
    Anew,
    /// The same, going on with the run in the folder.
    Resumed,
    /// By `phalanx-launch`, which starts ranks again that have died.
    Launched,
}

/// Runs the ranks of a layout with these faults, to the end of all processes.
pub fn run(layout: usize, faults: &[(Fault, Moment)], folder: &Folder, how: Start) -> Ended {
    let ranks = LAYOUTS[layout].ranks;
    if faults.iter().any(|(fault, _)| matches!(fault, Fault::ReadOnlyDisk)) {
        folder.mount("remount,ro");
    }
    let port = free_port();
    let words = format!("{} {} --out {}", flags(), LAYOUTS[layout].flags, folder.run().display());
    let words = if how == Start::Anew { words } else { words + " --resume auto" };
    let log = |number: usize| folder.root.join(format!("{how:?}{number}.log"));
    let processes: Vec<Child> = match how {
        Start::Launched => vec![launch(ranks, port, &words, &log(0))],
        _ => (0..ranks).map(|rank| start(rank, ranks, port, &words, faults, &log(rank))).collect(),
    };
    let mut running = Running {
        folder,
        port,
        ranks,
        is_launched: how == Start::Launched,
        statuses: vec![None; processes.len()],
        processes,
        stopped: vec![],
        met: vec![],
        over: Arc::default(),
    };
    running.watch(faults);
    running.over.store(true, Ordering::Relaxed);
    let said = |process| String::from_utf8_lossy(&fs::read(log(process)).unwrap()).into_owned();
    let said = (0..running.processes.len()).map(said).collect();
    Ended { statuses: running.statuses, said, met: running.met }
}

/// Starts the launcher, whose ranks write what they say to its output.
fn launch(ranks: usize, port: u16, words: &str, log: &Path) -> Child {
    let mut command = Command::new(launcher());
    command.args(["--nproc-per-node", &ranks.to_string(), "--master-port", &port.to_string()]);
    command.args(["--max-restarts", "3", "--grace", "1"]).arg(std::env::current_exe().unwrap());
    command.args(CHILD).env("FLAGS", words);
    spawn(command, log)
}

/// The arguments by which this program is a rank.
const CHILD: [&str; 4] = ["child", "--exact", "--ignored", "--nocapture"];

/// Starts a process, which writes what it says to a file.
fn spawn(mut command: Command, log: &Path) -> Child {
    let log = File::create(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// The process of a rank among a launcher's children.
fn child_of(launcher: u32, rank: usize) -> Option<u32> {
    let threads = fs::read_dir(format!("/proc/{launcher}/task")).ok()?.flatten();
    let children: Vec<String> =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect();
    let variable = format!("RANK={rank}");
    let is_rank = |process: &u32| {
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        variables.split(|&byte| byte == 0).any(|one| one == variable.as_bytes())
    };
    children
        .iter()
        .flat_map(|list| list.split_whitespace())
        .filter_map(|number| number.parse().ok())
        .find(is_rank)
}

/// Starts a rank.
fn start(rank: usize, ranks: usize, port: u16, words: &str, faults: &[(Fault, Moment)], log: &Path) -> Child {
    let mut command = Command::new("sh");
    let limit = faults.iter().find_map(|(fault, _)| match fault {
        // In blocks of 512 bytes.
        Fault::FileLimit(kib) => Some(format!("ulimit -f {}; ", 2 * kib)),
        _ => None,
    });
    command.args(["-c", &format!("{}exec \"$0\" \"$@\"", limit.unwrap_or_default())]);
    command.arg(std::env::current_exe().unwrap()).args(CHILD);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("PHALANX_SECRET", format!("trials at {port}"));
    let mut words = words.to_string();
    for (fault, _) in faults {
        if let Fault::Unlike(odd, unlike) = fault
            && *odd == rank
        {
            words = with(&words, unlike.flags);
            command.envs(unlike.variable);
        }
    }
    command.env("FLAGS", words);
    spawn(command, log)
}

/// Pairs of a flag and its value, with other values for some.
fn with(words: &str, others: &str) -> String {
    let pairs = |text: &str| {
        let words: Vec<String> = text.split_whitespace().map(String::from).collect();
        words.chunks(2).map(|pair| [pair[0].clone(), pair[1].clone()]).collect::<Vec<_>>()
    };
    let others = pairs(others);
    let mut all = pairs(words);
    all.retain(|[flag, _]| others.iter().all(|[other, _]| other != flag));
    [all, others].concat().concat().join(" ")
}

impl Running<'_> {
    fn watch(&mut self, faults: &[(Fault, Moment)]) {
        let begin = Instant::now();
        let mut deadline = begin + UNDISTURBED;
        let (mut waiting, mut due) = (faults.to_vec(), Vec::<(Instant, Fault, Act)>::new());
        loop {
            let steps = if waiting.is_empty() { 0 } else { self.folder.steps() };
            for (fault, Moment { then, .. }) in
                waiting.extract_if(.., |(_, at)| at.steps.is_none_or(|wanted| steps >= wanted))
            {
                let since = Instant::now() + then;
                due.extend(acts(fault, self.ranks).into_iter().map(|(at, act)| (since + at, fault, act)));
            }
            let now = Instant::now();
            for (_, fault, act) in due.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>() {
                // Ranks may make a connection anew before the first step, and an interrupted run ends its step and saves.
                let is_final = match fault {
                    Fault::Cut(_) => self.folder.steps() > 0,
                    Fault::Interrupt(..) => false,
                    _ => !fault.guilty(2).is_empty(),
                };
                if self.bring(fault, act) && is_final && !self.is_launched {
                    deadline = deadline.min(now + TIMEOUT + MARGIN);
                }
            }
            if self.collect() {
                deadline = deadline.min(now + TIMEOUT + MARGIN);
            }
            let left: Vec<usize> =
                (0..self.processes.len()).filter(|&rank| self.statuses[rank].is_none()).collect();
            if left.is_empty() {
                return;
            }
            if left.iter().all(|rank| self.stopped.contains(rank)) {
                // They find out that the run is over.
                for rank in left.iter().copied() {
                    self.send(rank, Signal::SIGCONT);
                }
                self.stopped.clear();
                deadline = now + TIMEOUT + MARGIN;
            }
            if now > deadline {
                for rank in left {
                    self.processes[rank].kill().unwrap();
                    self.processes[rank].wait().unwrap();
                }
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Notes which processes have ended. Returns whether one has failed.
    fn collect(&mut self) -> bool {
        let mut failed = false;
        for (process, status) in self.processes.iter_mut().zip(&mut self.statuses) {
            if status.is_none() {
                *status = process.try_wait().unwrap();
                failed |= status.is_some_and(|status| !status.success());
            }
        }
        failed
    }

    /// The process of a rank that has not ended.
    fn process(&self, rank: usize) -> Option<u32> {
        match self.is_launched {
            true => child_of(self.processes[0].id(), rank),
            false => self.statuses[rank].is_none().then(|| self.processes[rank].id()),
        }
    }

    /// Sends a signal. Returns whether there was a process to send it to.
    fn send(&self, rank: usize, signal: Signal) -> bool {
        // A process of ours has not been waited for, so its number is its own still.
        self.process(rank).is_some_and(|process| kill(Pid::from_raw(process as i32), signal).is_ok())
    }

    /// Brings a part of a fault. Returns whether it met something.
    fn bring(&mut self, fault: Fault, act: Act) -> bool {
        let both = |[a, b]: [usize; 2]| Some([self.process(a)?, self.process(b)?]);
        // A process that ends just then has no descriptors any more.
        let met = match act {
            Act::Send(rank, signal) => {
                let sent = self.send(rank, signal);
                if sent && matches!(fault, Fault::Stop(_, None)) && !self.is_launched {
                    self.stopped.push(rank);
                }
                sent
            }
            Act::Cut(ends) => both(ends).is_some_and(|ends| cut(ends).unwrap_or(false)),
            Act::Deafen(ends, all) => both(ends).is_some_and(|ends| deafen(ends, all).unwrap_or(false)),
            Act::Fill => {
                self.folder.fill();
                true
            }
            Act::Visit(Stranger::OtherRun) => {
                self.other_run();
                true
            }
            Act::Visit(stranger) => {
                stranger.visit(self.port, self.ranks, self.over.clone());
                true
            }
        };
        if met {
            self.met.push(fault);
        }
        met
    }

    /// A rank of another run, with its own secret, which comes to this one's port until it gives up.
    fn other_run(&self) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(CHILD).env("FLAGS", "--dp 2 --join-timeout 3");
        command.env("RANK", "1").env("WORLD_SIZE", self.ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command
            .env("PHALANX_SECRET", "another")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let (mut other, over) = (command.spawn().unwrap(), self.over.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = other.kill();
            let _ = other.wait();
        });
    }
}
