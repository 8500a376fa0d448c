//! Starts the ranks of this machine, waits for them, starts those that fail again, and stops them when one fails for good or a signal
//! comes.
//!
//! ```text
//! a thread a rank     waits for the process to end ------+
//! a thread a stream   copies its output (logs)           +--Event--> Launcher: counts, starts again, stops, says who failed first
//! a thread            waits for SIGINT and SIGTERM ------+
//! a thread            hears the store (link) ------------+
//! ```

use std::io::{stderr, stdout};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use phalanx_rendezvous::Absent;

use crate::link::{self, Heard, Link, Visitors};
use crate::options::Options;
use crate::{USAGE, logs, say, tied};

/// How long ranks may take to end by themselves after one has failed. The ranks of Phalanx do so as soon as they miss one, and say
/// why; a signal would keep them from saying it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Between two looks for ranks that are stopped while others have ended well.
const LOOK: Duration = Duration::from_secs(5);

/// What the launcher waits for.
enum Event {
    /// A rank's process has ended.
    Ended(usize, Result<ExitStatus, String>),
    /// The store says something.
    Heard(Heard),
    /// The launcher got this signal.
    #[cfg(unix)]
    Signal(Signal),
}

#[cfg(unix)]
use nix::sys::signal::Signal;

/// There are no signals: a process is only ended.
#[cfg(not(unix))]
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(clippy::upper_case_acronyms)]
enum Signal {
    SIGTERM,
    SIGKILL,
}

/// A rank of this machine, and its last process.
struct Rank {
    rank: usize,
    pid: u32,
    /// When it was started, or was ended because it did not meet the others.
    since: Instant,
    /// How often it was started again.
    restarts: usize,
    state: State,
}

enum State {
    Runs,
    /// The process has failed; the next one is started at this time.
    Waits(Instant, Result<ExitStatus, String>),
    Ended(Result<ExitStatus, String>),
}

/// Runs all ranks of this machine to their end. Returns the launcher's exit code.
///
/// # Errors
/// If a process or a log file cannot be made, or the store has no port; then no process is left.
pub(crate) fn run(options: &Options) -> Result<u8, String> {
    let (send, events) = channel();
    pass_on_signals(&send)?;
    let start = Instant::now();
    let visitors = link::serve(options)?.map(link::serve_on_a_thread);
    let heard = send.clone();
    let link = Link::new(options, move |what| drop(heard.send(Event::Heard(what))));
    let (ranks, copies) = Default::default();
    let mut launcher = Launcher {
        options,
        send,
        link,
        ranks,
        copies,
        first_failure: None,
        lost: None,
        next: None,
        look: None,
        ends: false,
    };
    for local_rank in 0..options.processes {
        match launcher.start(local_rank, 0) {
            Ok(rank) => launcher.ranks.push(rank),
            Err(why) => {
                launcher.signal_all(Signal::SIGKILL);
                return Err(why);
            }
        }
    }
    launcher.wait(&events);
    let is_well = |rank: &Rank| matches!(&rank.state, State::Ended(Ok(status)) if status.success());
    if !launcher.ranks.iter().any(is_well) {
        // No rank has gone on without the one that was lost.
        launcher.first_failure = launcher.first_failure.or(launcher.lost);
    }
    // All output first, then the verdict. A process that a rank has left behind may hold its streams open; the copies end with
    // the launcher then.
    let end = Instant::now() + Duration::from_secs(1);
    while launcher.copies.iter().any(|copy| !copy.is_finished()) && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    let code = match launcher.first_failure {
        Some(failed) => report(&launcher.ranks, failed, start.elapsed(), options),
        None => 0,
    };
    launcher.part(visitors.as_ref(), &events);
    Ok(code)
}

/// The launcher while its ranks run.
struct Launcher<'a> {
    options: &'a Options,
    send: Sender<Event>,
    /// To the store, if ranks meet at one.
    link: Option<Link>,
    /// By the rank on this machine.
    ranks: Vec<Rank>,
    copies: Vec<JoinHandle<()>>,
    /// The first rank that has failed for good.
    first_failure: Option<usize>,
    /// The first one without which the run goes on.
    lost: Option<usize>,
    /// The next signal to send to the ranks that are left, and when.
    next: Option<(Instant, Signal)>,
    /// The next look for ranks that are stopped, once one has ended well.
    look: Option<Instant>,
    /// Whether no rank is started any more.
    ends: bool,
}

impl Launcher<'_> {
    /// Starts a process, and threads that wait for it and copy its output. To be called on the launcher's first thread.
    fn start(&mut self, local_rank: usize, restarts: usize) -> Result<Rank, String> {
        let options = self.options;
        let rank = options.node_rank * options.processes + local_rank;
        let program = options.program.as_deref().unwrap_or_default();
        let mut command = Command::new(program);
        command.args(&options.arguments).envs(options.variables(local_rank, restarts));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A signal from the terminal reaches the launcher alone, which passes it on once.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        tied::to_this_process(&mut command);
        let log = |name: &str| {
            let open = |folder| {
                logs::open(folder, rank, restarts, name).map_err(|e| format!("the logs of rank {rank}: {e}"))
            };
            options.log_dir.as_deref().map(open).transpose()
        };
        let (out_log, err_log) = (log("stdout")?, log("stderr")?);
        let failed = |error| format!("`{}` does not start: {error}", program.to_string_lossy());
        let mut child = command.spawn().map_err(failed)?;
        let width = (options.world_size() - 1).to_string().len();
        let prefix = format!("[{rank:width$}] ");
        let (from, to, before) = (child.stdout.take(), options.prints.then(stdout), prefix.clone());
        self.copies.extend(from.map(|from| thread::spawn(move || logs::copy(from, &before, to, out_log))));
        let (from, to) = (child.stderr.take(), options.prints.then(stderr));
        self.copies.extend(from.map(|from| thread::spawn(move || logs::copy(from, &prefix, to, err_log))));
        let (pid, events) = (child.id(), self.send.clone());
        thread::spawn(move || {
            let ended = Child::wait(&mut child).map_err(|error| format!("it cannot be waited for: {error}"));
            // The launcher may have ended already.
            let _ = events.send(Event::Ended(local_rank, ended));
        });
        Ok(Rank { rank, pid, since: Instant::now(), restarts, state: State::Runs })
    }

    /// Waits until all ranks have ended for good, and starts those that are to run again.
    fn wait(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(|rank| !matches!(rank.state, State::Ended(_))) {
            let due = |rank: &Rank| if let State::Waits(at, _) = rank.state { Some(at) } else { None };
            let wakes =
                self.ranks.iter().filter_map(due).chain(self.next.map(|(at, _)| at)).chain(self.look).min();
            let event = match wakes {
                Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(Event::Ended(local_rank, ended)) => self.ended(local_rank, ended),
                Ok(Event::Heard(Heard::Absent(absent))) => self.end_absent(&absent),
                Ok(Event::Heard(Heard::Over(why))) => {
                    if !self.ends {
                        say(&format!("the run is over: {why}"));
                    }
                    self.first_failure = self.first_failure.or(self.lost);
                    // A rank that hangs does not hear of it.
                    self.next = self.next.or(Some((Instant::now() + PATIENCE, Signal::SIGTERM)));
                    self.start_none();
                }
                // The second one is in earnest.
                #[cfg(unix)]
                Ok(Event::Signal(_)) if self.next.is_some() => {
                    self.next = Some((Instant::now(), Signal::SIGKILL))
                }
                #[cfg(unix)]
                Ok(Event::Signal(got)) => {
                    self.signal_all(got);
                    self.next = Some((Instant::now() + self.options.grace, Signal::SIGKILL));
                    self.end(format!("the launcher got {got}"));
                }
                Err(RecvTimeoutError::Timeout) => self.on_time(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the launcher holds a sender"),
            }
        }
    }

    /// A rank's process has ended: well, for good, or until it is started again.
    fn ended(&mut self, local_rank: usize, ended: Result<ExitStatus, String>) {
        let failed = !ended.as_ref().is_ok_and(ExitStatus::success);
        let (most, rank) = (self.options.max_restarts, &mut self.ranks[local_rank]);
        if failed && !self.ends && rank.restarts < most && code(&ended) != USAGE {
            let (pid, pause) = (rank.pid, self.options.backoff(rank.restarts));
            let (number, next, how) = (rank.rank, rank.restarts + 1, how(&ended));
            let seconds = pause.as_secs_f64();
            say(&format!(
                "rank {number} (process {pid}) failed: {how}; restart {next} of {most} in {seconds} s"
            ));
            rank.state = State::Waits(Instant::now() + pause, ended);
            if let Some(link) = &self.link {
                link.wait(pause);
            }
            return;
        }
        let (number, how) = (rank.rank, how(&ended));
        let may_shrink = self.options.least < self.options.world_size() && code(&ended) != USAGE;
        rank.state = State::Ended(ended);
        if !failed {
            self.look.get_or_insert(Instant::now() + LOOK);
        }
        if failed
            && !self.ends
            && may_shrink
            && let Some(link) = &self.link
        {
            say(&format!("rank {number} failed for good: {how}; the run goes on if enough ranks are left"));
            link.lose(number, format!("rank {number} failed for good: {how}"));
            self.lost.get_or_insert(local_rank);
            return;
        }
        if failed && self.first_failure.is_none() {
            self.first_failure = Some(local_rank);
            self.next = self.next.or(Some((Instant::now() + PATIENCE, Signal::SIGTERM)));
            self.end(format!("rank {number} failed for good: {how}"));
        }
    }

    /// Ends processes that do not meet the others, because they are stopped or hang.
    fn end_absent(&mut self, absent: &Absent) {
        let is_absent = |rank: &&mut Rank| {
            let waits = absent.ranks.contains(&rank.rank) && rank.since.elapsed() > absent.waited;
            waits && matches!(rank.state, State::Runs)
        };
        for rank in self.ranks.iter_mut().filter(is_absent).filter(|_| !self.ends) {
            let (number, pid, seconds) = (rank.rank, rank.pid, absent.waited.as_secs_f64());
            say(&format!(
                "rank {number} (process {pid}) has not come for {seconds:.1} s to meet the others: it is killed"
            ));
            rank.since = Instant::now();
            signal(rank, Signal::SIGKILL);
        }
    }

    /// The time has come for a signal, or for ranks that are to run again.
    fn on_time(&mut self) {
        let now = Instant::now();
        if let Some((_, signal)) = self.next.filter(|(at, _)| *at <= now) {
            self.signal_all(signal);
            self.next = Some((now + self.options.grace, Signal::SIGKILL));
        }
        if self.look.is_some_and(|at| at <= now) {
            self.look = Some(now + LOOK);
            self.go_on();
        }
        for local_rank in 0..self.ranks.len() {
            let rank = &self.ranks[local_rank];
            if !matches!(rank.state, State::Waits(at, _) if at <= now) {
                continue;
            }
            match self.start(local_rank, rank.restarts + 1) {
                Ok(rank) => self.ranks[local_rank] = rank,
                Err(why) => {
                    self.ranks[local_rank].restarts = self.options.max_restarts;
                    self.ended(local_rank, Err(why));
                }
            }
        }
    }

    /// Lets processes go on that are stopped though others have ended well: a stopped process does not end, and no rank waits for it that
    /// could miss it.
    fn go_on(&self) {
        for rank in self.ranks.iter().filter(|rank| matches!(rank.state, State::Runs) && is_stopped(rank.pid))
        {
            say(&format!(
                "rank {} (process {}) is stopped, and others have ended: it goes on",
                rank.rank, rank.pid
            ));
            #[cfg(unix)]
            signal(rank, Signal::SIGCONT);
        }
    }

    /// Tells all processes of the run that it ends.
    fn end(&mut self, why: String) {
        if let Some(link) = self.link.as_ref().filter(|_| !self.ends) {
            link.end(why);
        }
        self.start_none();
    }

    /// Starts no rank any more.
    fn start_none(&mut self) {
        self.ends = true;
        for (local_rank, rank) in self.ranks.iter_mut().enumerate() {
            if let State::Waits(_, ended) = &rank.state {
                rank.state = State::Ended(ended.clone());
                self.first_failure.get_or_insert(local_rank);
            }
        }
    }

    /// Stays until processes on other machines know that the run is over; or, if it goes on without this launcher's ranks, as long as
    /// there are any, if this launcher serves the store.
    fn part(&mut self, visitors: Option<&Visitors>, events: &Receiver<Event>) {
        if self.options.nodes == 1 {
            return;
        }
        if let Some(visitors) = visitors.filter(|_| !self.ends) {
            // The launcher itself visits the store no more.
            self.link = None;
            let mut is_first = true;
            while visitors.load(Ordering::Relaxed) > 0 {
                match events.recv_timeout(Duration::from_millis(50)) {
                    Err(RecvTimeoutError::Timeout) if is_first => {
                        say(
                            "the ranks of this machine have ended; it serves the store until those of others have",
                        );
                        is_first = false;
                    }
                    #[cfg(unix)]
                    Ok(Event::Signal(_)) => return,
                    _ => {}
                }
            }
            return;
        }
        if self.first_failure.is_none() {
            return;
        }
        let Some(link) = &self.link else { return };
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && (self.options.serves || !link.is_over()) {
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal_all(&self, which: Signal) {
        self.ranks
            .iter()
            .filter(|rank| matches!(rank.state, State::Runs))
            .for_each(|rank| signal(rank, which));
    }
}

/// Says which rank failed first, and what became of the others. Returns the exit code.
fn report(ranks: &[Rank], failed: usize, after: Duration, options: &Options) -> u8 {
    // All have ended.
    let outcome = |rank: &Rank| match &rank.state {
        State::Ended(ended) => (code(ended), how(ended)),
        _ => (1, "it has not ended".into()),
    };
    let others: Vec<String> = (ranks.iter().enumerate())
        .map(|(i, rank)| (i, rank.rank, outcome(rank)))
        .filter(|(i, _, (code, _))| *i != failed && *code != 0)
        .map(|(_, rank, (_, how))| format!("rank {rank}: {how}"))
        .collect();
    let Rank { rank, pid, restarts, .. } = &ranks[failed];
    let ((code, how), seconds) = (outcome(&ranks[failed]), after.as_secs_f64());
    let again = match restarts {
        0 => String::new(),
        1 => ", after 1 restart".into(),
        more => format!(", after {more} restarts"),
    };
    say(&format!("rank {rank} (process {pid}) failed first: {how}{again}; the run took {seconds:.1} s"));
    if !others.is_empty() {
        say(&format!("then {}", others.join(", ")));
    }
    if let Some(folder) = &options.log_dir {
        say(&format!("its output is in {}", folder.join(format!("rank{rank}")).display()));
    }
    code
}

/// How a rank's process ended.
fn how(ended: &Result<ExitStatus, String>) -> String {
    match ended {
        Ok(status) => status.to_string(),
        Err(why) => why.clone(),
    }
}

/// A process's exit code; 128 and the signal's number if a signal ended it.
fn code(ended: &Result<ExitStatus, String>) -> u8 {
    let Ok(status) = ended else { return 1 };
    #[cfg(unix)]
    let by_signal = std::os::unix::process::ExitStatusExt::signal(status).map(|signal| 128 + signal);
    #[cfg(not(unix))]
    let by_signal = None;
    let code = status.code().or(by_signal).unwrap_or(1);
    // Windows has codes beyond a byte; none of them may become a success.
    u8::try_from(code).unwrap_or(1)
}

/// Sends a signal to a rank and to the processes that it has started.
#[cfg(unix)]
fn signal(rank: &Rank, signal: Signal) {
    // It may have ended by now.
    let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(rank.pid.cast_signed()), signal);
}

#[cfg(not(unix))]
fn signal(rank: &Rank, _: Signal) {
    let _ = Command::new("taskkill").args(["/T", "/F", "/PID", &rank.pid.to_string()]).output();
}

/// Whether a process is stopped, by SIGSTOP or from a terminal; where the system says so in a file.
fn is_stopped(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    // The state follows the program's name, which is in parentheses and may have others in it.
    status
        .is_ok_and(|status| status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T')))
}

/// Turns SIGINT and SIGTERM into events.
#[cfg(unix)]
fn pass_on_signals(events: &Sender<Event>) -> Result<(), String> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]);
    let (mut signals, events) = (signals.map_err(|error| format!("signals: {error}"))?, events.clone());
    thread::spawn(move || {
        for got in signals.forever().filter_map(|got| Signal::try_from(got).ok()) {
            let _ = events.send(Event::Signal(got));
        }
    });
    Ok(())
}

/// Ctrl-C reaches every process of the console there.
#[cfg(not(unix))]
fn pass_on_signals(_: &Sender<Event>) -> Result<(), String> {
    Ok(())
}
