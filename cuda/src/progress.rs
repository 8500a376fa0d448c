//! How the compilation of kernels goes on, for a person who waits for a first step.
//!
//! On a terminal one line is updated once compiling has taken longer than a second. When nothing has been compiled for two seconds, a
//! last line says how many kernels there were, how long that took, and where they are kept. Without a terminal it is the only line.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::context::lock;

/// What is quicker needs no line.
const QUIET: Duration = Duration::from_secs(1);
/// When nothing has been compiled for as long, compiling is over.
const PAUSE: Duration = Duration::from_secs(2);
/// Between two updates of the line.
const UPDATE: Duration = Duration::from_millis(200);

/// What this process has compiled since its last line.
#[derive(Debug)]
struct Progress {
    programs: usize,
    /// Compilations that are under way.
    running: usize,
    /// The time in which something was compiled, up to `since`.
    took: Duration,
    /// The last change: from then on compilations have been under way, or none.
    since: Option<Instant>,
    /// Whether a thread prints it.
    is_watched: bool,
}

impl Progress {
    const fn new() -> Progress {
        Progress { programs: 0, running: 0, took: Duration::ZERO, since: None, is_watched: false }
    }

    fn begin(&mut self, now: Instant) {
        self.took = self.took(now);
        self.since = Some(now);
        self.running += 1;
    }

    fn end(&mut self, now: Instant) {
        self.took = self.took(now);
        self.since = Some(now);
        self.running -= 1;
        self.programs += 1;
    }

    fn took(&self, now: Instant) -> Duration {
        let current = self.since.filter(|_| self.running > 0).map_or(Duration::ZERO, |since| now - since);
        self.took + current
    }

    fn is_over(&self, now: Instant) -> bool {
        self.running == 0 && self.since.is_none_or(|since| now - since >= PAUSE)
    }

    /// The line at this time; none if there is nothing to say yet.
    fn line(&self, kept: &str, now: Instant) -> Option<String> {
        let took = self.took(now);
        let what = if self.is_over(now) { "compiled" } else { "compiling" };
        let line = || format!("{what} CUDA kernels: {}, {:.1} s; {kept}", self.programs, took.as_secs_f64());
        (took > QUIET).then(line)
    }
}

static PROGRESS: Mutex<Progress> = Mutex::new(Progress::new());

/// Calls `compile`, and shows how long this and the compilations around it take. `folder` is where programs are kept.
pub(crate) fn shown<T>(folder: Option<PathBuf>, compile: impl FnOnce() -> T) -> T {
    {
        let mut progress = lock(&PROGRESS);
        progress.begin(Instant::now());
        // A system that starts no thread has no line.
        if !progress.is_watched {
            let watch = move || watch(folder);
            progress.is_watched = thread::Builder::new().name("cuda compilation".into()).spawn(watch).is_ok();
        }
    }
    let made = compile();
    lock(&PROGRESS).end(Instant::now());
    made
}

/// Prints until compiling is over.
fn watch(folder: Option<PathBuf>) {
    let kept = folder.map_or("not kept".into(), |folder| format!("kept in {}", folder.display()));
    let is_terminal = std::io::stderr().is_terminal();
    loop {
        thread::sleep(UPDATE);
        let mut progress = lock(&PROGRESS);
        let now = Instant::now();
        let (is_over, line) = (progress.is_over(now), progress.line(&kept, now));
        if is_over {
            *progress = Progress::new();
        }
        drop(progress);
        let text = match (line, is_terminal) {
            (Some(line), true) => format!("\r\x1b[K{line}{}", if is_over { "\n" } else { "" }),
            (Some(line), false) if is_over => format!("{line}\n"),
            _ => String::new(),
        };
        // In one write, so that lines of several ranks do not mix.
        let _ = std::io::stderr().write_all(text.as_bytes());
        if is_over {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_many_programs_took_how_long_and_no_time_counts_twice() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut progress = Progress::new();
        progress.begin(at(0));
        assert_eq!(progress.line("kept in x", at(900)), None);
        // Two threads at a time, then a pause that is too short to end it.
        progress.begin(at(500));
        progress.end(at(1000));
        progress.end(at(1500));
        let line = |progress: &Progress, ms| progress.line("kept in x", at(ms)).unwrap();
        assert_eq!(line(&progress, 2500), "compiling CUDA kernels: 2, 1.5 s; kept in x");
        progress.begin(at(3000));
        assert_eq!(line(&progress, 4000), "compiling CUDA kernels: 2, 2.5 s; kept in x");
        progress.end(at(5000));
        assert!(!progress.is_over(at(6900)));
        assert!(progress.is_over(at(7000)));
        assert_eq!(line(&progress, 7000), "compiled CUDA kernels: 3, 3.5 s; kept in x");
    }

    /// Set in the process that the test below starts.
    const SLOW: &str = "PHALANX_TEST_SLOW_COMPILATIONS";

    #[test]
    #[ignore = "a process of the test below"]
    fn compile_slowly() {
        let compile = || thread::sleep(Duration::from_millis(400));
        let number = std::env::var(SLOW).unwrap().parse().unwrap();
        (0..number).for_each(|_| shown(Some(PathBuf::from("somewhere")), compile));
        thread::sleep(PAUSE + 3 * UPDATE);
    }

    #[test]
    fn without_a_terminal_there_is_one_line_at_the_end_and_none_for_what_is_quick() {
        for (number, lines) in [("4", 1), ("1", 0)] {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "progress::tests::compile_slowly", "--ignored", "--nocapture"]);
            let said = command.env(SLOW, number).output().unwrap().stderr;
            let said = String::from_utf8_lossy(&said);
            assert_eq!(
                said.lines().filter(|line| line.starts_with("compiled CUDA kernels: 4, ")).count(),
                lines,
                "{said}"
            );
            assert_eq!(said.matches("CUDA kernels").count(), lines, "{said}");
            assert!(lines == 0 || said.contains(" s; kept in somewhere"), "{said}");
        }
    }
}
