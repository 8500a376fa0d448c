//! The launcher as a process, with shells as ranks.
#![cfg(unix)]

#[path = "../../parallel/tests/comm/port.rs"]
mod port;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The launcher on these arguments, then `sh -c SCRIPT`.
fn launcher(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx-launch"));
    command.args(options).args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn launch(options: &[&str], script: &str) -> (Output, Duration) {
    let start = Instant::now();
    (launcher(options, script).output().unwrap(), start.elapsed())
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(String::from).collect();
    lines.sort();
    lines
}

/// A folder of its own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("phalanx-launch-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn each_rank_learns_its_number_and_its_lines_bear_it() {
    let (output, _) =
        launch(&["-n", "3"], "echo $RANK of $WORLD_SIZE at $MASTER_ADDR $LOCAL_RANK; echo e >&2");
    assert!(output.status.success());
    let wanted = [0, 1, 2].map(|rank| format!("[{rank}] {rank} of 3 at 127.0.0.1 {rank}"));
    assert_eq!(lines(&output.stdout), wanted);
    assert_eq!(lines(&output.stderr), ["[0] e", "[1] e", "[2] e"]);
}

#[test]
fn output_is_in_files_of_each_rank() {
    let folder = Folder::new("logs");
    let options = ["-n", "2", "--log-dir", folder.path(), "--quiet"];
    let (output, _) = launch(&options, "echo out $RANK; echo err $RANK >&2");
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    for rank in [0, 1] {
        assert_eq!(folder.read(&format!("rank{rank}/stdout.log")), format!("[{rank}] out {rank}\n"));
        assert_eq!(folder.read(&format!("rank{rank}/stderr.log")), format!("[{rank}] err {rank}\n"));
    }
}

#[test]
fn the_first_failure_ends_the_others_and_is_the_exit_code() {
    let script = "if [ $RANK = 1 ]; then exit 7; fi; sleep 60";
    let (output, took) = launch(&["-n", "3", "--grace", "1"], script);
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("rank 1 (process ") && said.contains("failed first: exit status: 7"), "{said}");
    assert!(said.contains("then rank 0: signal: 15") && said.contains("rank 2: signal: 15"), "{said}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn ranks_that_end_by_themselves_are_left_alone() {
    let script = "if [ $RANK = 1 ]; then exit 3; fi; sleep 0.3; echo I miss rank 1; exit 4";
    let (output, _) = launch(&["-n", "2"], script);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(lines(&output.stdout), ["[0] I miss rank 1"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("then rank 0: exit status: 4"));
}

#[test]
fn a_rank_that_ignores_the_request_to_end_is_killed_with_its_children() {
    let folder = Folder::new("deaf");
    let script = "trap '' TERM; if [ $RANK = 0 ]; then sleep 0.2; kill -9 $$; fi; \
                  (sleep 600 & echo $! > $0/child); while true; do sleep 0.1; done";
    let mut command = launcher(&["-n", "2", "--grace", "0.2"], script);
    let output = command.arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9));
    assert!(String::from_utf8_lossy(&output.stderr).contains("then rank 1: signal: 9"));
    let child = folder.read("child");
    let gone =
        || !Command::new("kill").args(["-0", child.trim()]).stderr(Stdio::null()).status().unwrap().success();
    let end = Instant::now() + Duration::from_secs(5);
    while !gone() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(gone(), "process {child} is left");
}

#[test]
fn signals_reach_the_ranks_which_may_end_well() {
    for (signal, name) in [("-TERM", "TERM"), ("-INT", "INT")] {
        let folder = Folder::new(name);
        let script =
            format!("trap 'echo saved; exit 0' {name}; touch $0/$RANK; while true; do sleep 0.05; done");
        let child = launcher(&["-n", "2"], &script).arg(folder.path()).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while !["0", "1"].iter().all(|rank| folder.0.join(rank).exists()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}");
        assert_eq!(lines(&output.stdout), ["[0] saved", "[1] saved"]);
    }
}

#[test]
fn mistakes_are_one_line_and_code_2_or_1() {
    let run = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_phalanx-launch")).args(arguments).output().unwrap()
    };
    let output = run(&["-n"]);
    assert_eq!((output.status.code(), lines(&output.stderr).len()), (Some(2), 1));
    let output = run(&["-n", "2", "/nowhere/program"]);
    assert_eq!((output.status.code(), lines(&output.stderr).len()), (Some(1), 1));
    assert!(run(&["--help"]).status.success());
}

#[test]
fn a_rank_that_hangs_is_ended_when_the_run_is_over_elsewhere() {
    let port = port::free_port().to_string();
    let launch = |node: &str, script: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx-launch"));
        command.args(["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1"]);
        command.args([
            "--master-port",
            &port,
            "--max-restarts",
            "1",
            "--backoff",
            "0.05",
            "sh",
            "-c",
            script,
        ]);
        command.env("PHALANX_SECRET", "of both").stderr(Stdio::piped()).spawn().unwrap()
    };
    let begin = Instant::now();
    let (first, hangs) = (launch("0", "sleep 0.5; exit 7"), launch("1", "exec sleep 50"));
    let (first, hangs) = (first.wait_with_output().unwrap(), hangs.wait_with_output().unwrap());
    assert_eq!((first.status.code(), hangs.status.code()), (Some(7), Some(128 + 15)));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

/// It was stopped after all that the others wanted of it, so that none of them misses it.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_stopped_when_others_have_ended_goes_on() {
    let (output, took) = launch(&["-n", "2"], "if [ $RANK = 1 ]; then kill -STOP $$; echo goes on; fi");
    assert!(output.status.success(), "{output:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert_eq!(lines(&output.stdout), ["[1] goes on"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is stopped, and others have ended: it goes on"), "{said}");
}
