//! Starts the ranks of this machine, waits for them, and stops them when one fails or a signal comes.
//!
//! ```text
//! a thread a rank     waits for the process to end ------+
//! a thread a stream   copies its output (logs)           +--Event--> run: counts, stops the others, says who failed first
//! a thread            waits for SIGINT and SIGTERM ------+
//! ```

use std::io::{stderr, stdout};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::logs;
use crate::options::Options;
use crate::say;

/// How long ranks may take to end by themselves after one has failed. The ranks of Phalanx do so as soon as they miss one, and say
/// why; a signal would keep them from saying it.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the launcher waits for.
enum Event {
    /// A rank's process has ended.
    Ended(usize, Result<ExitStatus, String>),
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

/// A rank that was started.
struct Rank {
    rank: usize,
    pid: u32,
    ended: Option<Result<ExitStatus, String>>,
}

/// Runs all ranks of this machine to their end. Returns the launcher's exit code.
///
/// # Errors
/// If a process or a log file cannot be made; then no process is left.
pub(crate) fn run(options: &Options) -> Result<u8, String> {
    let (send, events) = channel();
    pass_on_signals(&send)?;
    let start = Instant::now();
    let (mut ranks, mut copies) = (Vec::new(), Vec::new());
    for local_rank in 0..options.processes {
        match start_rank(options, local_rank, &send, &mut copies) {
            Ok(rank) => ranks.push(rank),
            Err(why) => {
                ranks.iter().for_each(|rank| signal(rank, Signal::SIGKILL));
                return Err(why);
            }
        }
    }
    let first_failure = wait(&mut ranks, &events, options.grace);
    // All output first, then the verdict. A process that a rank has left behind may hold its streams open; the copies end with
    // the launcher then.
    let end = Instant::now() + Duration::from_secs(1);
    while copies.iter().any(|copy| !copy.is_finished()) && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    let Some(failed) = first_failure else { return Ok(0) };
    Ok(report(&ranks, failed, start.elapsed(), options))
}

/// Starts a process, and threads that wait for it and copy its output.
fn start_rank(
    options: &Options,
    local_rank: usize,
    events: &Sender<Event>,
    copies: &mut Vec<JoinHandle<()>>,
) -> Result<Rank, String> {
    let rank = options.node_rank * options.processes + local_rank;
    let mut command = Command::new(&options.program);
    command.args(&options.arguments).envs(options.variables(local_rank));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A signal from the terminal reaches the launcher alone, which passes it on once.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let log = |name: &str| {
        let create =
            |folder| logs::create(folder, rank, name).map_err(|e| format!("the logs of rank {rank}: {e}"));
        options.log_dir.as_deref().map(create).transpose()
    };
    let (out_log, err_log) = (log("stdout")?, log("stderr")?);
    let program = options.program.to_string_lossy();
    let mut child = command.spawn().map_err(|error| format!("`{program}` does not start: {error}"))?;
    let width = (options.world_size() - 1).to_string().len();
    let prefix = format!("[{rank:width$}] ");
    let (from, to, before) = (child.stdout.take(), options.prints.then(stdout), prefix.clone());
    copies.extend(from.map(|from| thread::spawn(move || logs::copy(from, &before, to, out_log))));
    let (from, to) = (child.stderr.take(), options.prints.then(stderr));
    copies.extend(from.map(|from| thread::spawn(move || logs::copy(from, &prefix, to, err_log))));
    let (pid, events) = (child.id(), events.clone());
    thread::spawn(move || {
        let ended = Child::wait(&mut child).map_err(|error| error.to_string());
        // The launcher may have ended already.
        let _ = events.send(Event::Ended(local_rank, ended));
    });
    Ok(Rank { rank, pid, ended: None })
}

/// Waits until all ranks have ended. Returns the one that failed first.
fn wait(ranks: &mut [Rank], events: &Receiver<Event>, grace: Duration) -> Option<usize> {
    let mut first_failure = None;
    // The next signal to send to the ranks that are left, and when.
    let mut next: Option<(Instant, Signal)> = None;
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        let event = match next {
            Some((at, _)) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match event {
            Ok(Event::Ended(local_rank, ended)) => {
                let failed = !ended.as_ref().is_ok_and(ExitStatus::success);
                ranks[local_rank].ended = Some(ended);
                if failed && first_failure.is_none() {
                    first_failure = Some(local_rank);
                    next = next.or(Some((Instant::now() + PATIENCE, Signal::SIGTERM)));
                }
            }
            // The second one is in earnest.
            #[cfg(unix)]
            Ok(Event::Signal(_)) if next.is_some() => next = Some((Instant::now(), Signal::SIGKILL)),
            #[cfg(unix)]
            Ok(Event::Signal(got)) => {
                left(ranks).for_each(|rank| signal(rank, got));
                next = Some((Instant::now() + grace, Signal::SIGKILL));
            }
            Err(RecvTimeoutError::Timeout) => {
                let Some((_, due)) = next else { continue };
                left(ranks).for_each(|rank| signal(rank, due));
                next = Some((Instant::now() + grace, Signal::SIGKILL));
            }
            Err(RecvTimeoutError::Disconnected) => unreachable!("`run` holds a sender"),
        }
    }
    first_failure
}

fn left(ranks: &[Rank]) -> impl Iterator<Item = &Rank> {
    ranks.iter().filter(|rank| rank.ended.is_none())
}

/// Says which rank failed first, and what became of the others. Returns the exit code.
fn report(ranks: &[Rank], failed: usize, after: Duration, options: &Options) -> u8 {
    let Rank { rank, pid, ended } = &ranks[failed];
    let others: Vec<String> = (ranks.iter().enumerate())
        .filter(|&(i, rank)| i != failed && code(rank) != 0)
        .map(|(_, rank)| format!("rank {}: {}", rank.rank, how(rank)))
        .collect();
    let seconds = after.as_secs_f64();
    let how = how(&ranks[failed]);
    say(&format!("rank {rank} (process {pid}) failed first: {how}; the run took {seconds:.1} s"));
    if !others.is_empty() {
        say(&format!("then {}", others.join(", ")));
    }
    if let Some(folder) = &options.log_dir {
        say(&format!("its output is in {}", folder.join(format!("rank{rank}")).display()));
    }
    if ended.is_none() { 1 } else { code(&ranks[failed]) }
}

/// How a rank's process ended.
fn how(rank: &Rank) -> String {
    match &rank.ended {
        Some(Ok(status)) => status.to_string(),
        Some(Err(why)) => format!("it cannot be waited for: {why}"),
        None => "it has not ended".into(),
    }
}

/// A process's exit code; 128 and the signal's number if a signal ended it.
fn code(rank: &Rank) -> u8 {
    let Some(Ok(status)) = &rank.ended else { return 1 };
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
