//! Ranks as processes: over TCP by environment variables, and under `mpirun` if it is installed.

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::launcher::launcher;
use super::port::free_port;
use super::{Folder, SMALL, example, gpt, losses, text, train};

/// The output of each of `ranks` processes that connect over TCP.
fn over_tcp(ranks: usize, args: &[&str]) -> Vec<Output> {
    over_tcp_each(&vec![args.to_vec(); ranks])
}

/// The same, with arguments for each process.
fn over_tcp_each(args: &[Vec<&str>]) -> Vec<Output> {
    over_tcp_each_on(args, &|command| command)
}

/// The same, started as `on` changes it.
fn over_tcp_each_on(args: &[Vec<&str>], on: &dyn Fn(Command) -> Command) -> Vec<Output> {
    let ranks = args.len();
    let port = free_port();
    let start = |rank: usize| {
        let mut command = on(example("gpt"));
        let variables = [("RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_PORT", port.into())];
        command.args(&args[rank]).envs(variables.map(|(name, n)| (name, n.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).spawn().expect("the example starts")
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("the example ends")).collect()
}

/// `phalanx-launch` with two ranks of the example.
fn by_launcher(options: &[&str], args: &[&str]) -> Output {
    let mut command = Command::new(launcher());
    let gpt = example("gpt").get_program().to_owned();
    command.args(["-n", "2"]).args(options).arg(gpt).args(args).output().expect("the launcher starts")
}

#[test]
fn the_launcher_starts_ranks_that_meet_by_an_address_or_a_file() {
    let folder = Folder::new("launcher");
    let data = folder.file("text.txt", text());
    let threads = train(&folder, "threads", &["--steps", "3", "--dp", "2"]);
    let [metrics, logs, meeting] = ["metrics", "logs", "meeting"].map(|name| folder.path(name));
    let by_file = format!("file://{meeting}");
    let more = ["--data", &data, "--steps", "3", "--dp", "2", "--metrics", &metrics];
    for options in [&["--log-dir", &logs][..], &["--rendezvous", &by_file]] {
        let output = by_launcher(options, &[&SMALL[..], &more].concat());
        assert!(output.status.success(), "{output:?}");
        assert_eq!(losses(&metrics), threads);
        fs::remove_file(&metrics).expect("a file");
    }
    assert!(fs::exists(format!("{logs}/rank1/stderr.log")).expect("a folder"));
    assert!(!fs::exists(meeting).expect("a folder"));
    let output = by_launcher(&[], &[&SMALL[..], &["--data", &data, "--dp", "4"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.matches("wants 4 ranks, and the launcher has started 2").count(), 1, "{said}");
    assert!(said.contains("phalanx-launch: rank "), "{said}");
}

/// The example under `mpirun`, or the reason why it cannot run there.
fn mpirun(ranks: usize, args: &[&str]) -> Result<Command, &'static str> {
    if !cfg!(feature = "mpi") {
        return Err("the feature `mpi` is off");
    }
    Command::new("mpirun").arg("--version").output().map_err(|_| "there is no mpirun")?;
    let mut command = Command::new("mpirun");
    // Open MPI would refuse more ranks than cores, and root; other MPIs do not care.
    let allow =
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
    command.args(["-n", &ranks.to_string()]).arg(example("gpt").get_program()).args(args);
    command.envs(allow.map(|name| (name, "1")));
    Ok(command)
}

/// The output of `mpirun`. If it cannot run: none, and a line on the terminal.
fn under_mpirun(ranks: usize, args: &[&str]) -> Option<Output> {
    match mpirun(ranks, &[args, &["--backend", "mpi"]].concat()) {
        Ok(mut command) => return Some(command.output().expect("mpirun starts")),
        Err(absent) => skipped(ranks, absent),
    }
    None
}

/// Written directly, because the test harness hides the output of a test that passes.
fn skipped(ranks: usize, absent: &str) {
    let _ = writeln!(std::io::stderr(), "skipped under mpirun: the example on {ranks} ranks: {absent}");
}

/// The lines that the example has printed on stderr, whatever the launcher added.
fn complaints(outputs: &[Output]) -> Vec<String> {
    let of = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let all: String = outputs.iter().map(of).collect();
    all.lines().filter(|line| line.starts_with("gpt: ")).map(String::from).collect()
}

#[test]
fn ranks_that_are_processes_have_the_digits_of_threads() {
    let folder = Folder::new("processes");
    let more = ["--steps", "4", "--dropout", "0.1", "--clip", "0.1"];
    let data = folder.file("text.txt", text());
    let common = [&SMALL[..], &more, &["--data", &data]].concat();
    for (ranks, zero) in [2, 4].into_iter().flat_map(|ranks| ["0", "1", "2", "3"].map(|zero| (ranks, zero))) {
        let n = ranks.to_string();
        let threads = train(&folder, "threads", &[&more[..], &["--dp", &n]].concat());
        let alone = train(&folder, "a", &[&more[..], &["--micro-batches", &n, "--emulate-dp", &n]].concat());
        assert!(threads.len() == 4 && alone == threads);
        let [metrics, out] = ["metrics", "out"].map(|name| folder.path(&format!("{name}-{n}-{zero}")));
        let args = [&common[..], &["--dp", &n, "--zero", zero, "--metrics", &metrics]].concat();
        let outputs = over_tcp(ranks, &[&args[..], &["--out", &out]].concat());
        let ended = outputs.iter().all(|o| o.status.success() && o.stdout.is_empty() && o.stderr.is_empty());
        assert!(ended, "{outputs:?}");
        assert_eq!(losses(&metrics), threads);
        assert!(fs::exists(format!("{out}/model/model.safetensors")).expect("a folder"));
        fs::remove_file(&metrics).expect("a file");
        let Some(output) = under_mpirun(ranks, &args) else { continue };
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert_eq!(losses(&metrics), threads);
    }
}

#[test]
fn an_error_of_processes_is_said_once_with_its_rank() {
    let folder = Folder::new("launched");
    let data = folder.file("text.txt", text());
    let common = [&SMALL[..], &["--data", &data]].concat();
    for (more, named) in [
        // Of one rank, of all, and of the numbers.
        (&["--dp", "2", "--metrics", "/nowhere/m"][..], "rank 0 failed: /nowhere/m"),
        (&["--dp", "2", "--resume", "/nowhere/run"], "failed: /nowhere/run"),
        (&["--dp", "4"], "wants 4 ranks, and the launcher has started 2"),
    ] {
        let args = [&common[..], more].concat();
        let mut runs = vec![over_tcp(2, &args)];
        runs.extend(under_mpirun(2, &args).map(|output| vec![output]));
        for outputs in runs {
            assert!(outputs.iter().all(|o| o.status.code() == Some(2)), "{outputs:?}");
            let said = complaints(&outputs);
            assert!(said.len() == 1 && said[0].contains(named), "{more:?}: {said:?}");
        }
    }
}

#[test]
fn processes_that_were_told_different_things_are_refused() {
    let folder = Folder::new("unlike");
    let data = folder.file("text.txt", text());
    let seeds = ["1", "2"].map(|seed| [&SMALL[..], &["--data", &data, "--pp", "2", "--seed", seed]].concat());
    let outputs = over_tcp_each(&seeds);
    assert!(outputs.iter().all(|o| o.status.code() == Some(2)), "{outputs:?}");
    let said = complaints(&outputs);
    assert!(
        said.len() == 2 && said.iter().all(|said| said.contains("--seed is 1 on rank 0, and 2 on rank 1")),
        "{said:?}"
    );
}

/// On GPUs, or on the emulator: each process has a GPU, and NCCL is between them.
#[cfg(feature = "nccl")]
#[test]
fn processes_over_nccl_have_the_losses_of_threads() {
    use phalanx::tensor::cuda::{Library, require};
    let has_gpus = phalanx::Device::Cuda(1).gpu().is_ok();
    if !has_gpus {
        // The example, and what mpirun starts, inherit it.
        if let Err(why) = require(Library::Nvrtc) {
            let _ = writeln!(std::io::stderr(), "skipped: the example over NCCL: {why}");
            return;
        }
    }
    let folder = Folder::new("nccl");
    let (data, metrics) = (folder.file("text.txt", text()), folder.path("metrics"));
    let common = [&SMALL[..], &["--data", &data, "--steps", "2", "--dp", "2", "--zero", "1"]].concat();
    let args = [&common[..], &["--metrics", &metrics, "--device", "cuda", "--backend", "nccl"]].concat();
    let on_gpus = |mut command: Command| {
        if !has_gpus {
            command.envs([("PHALANX_CUDA", "emulator"), ("PHALANX_EMULATED_DEVICES", "2")]);
        }
        command
    };
    let run = |command: Command| {
        let output = on_gpus(command).output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        let found = losses(&metrics);
        fs::remove_file(&metrics).expect("a file");
        found
    };
    let mut threads = example("gpt");
    threads.args(&args);
    let wanted = run(threads);
    assert_eq!(wanted.len(), 2);
    let outputs = over_tcp_each_on(&[args.clone(), args.clone()], &on_gpus);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert_eq!(losses(&metrics), wanted);
    fs::remove_file(&metrics).expect("a file");
    match mpirun(2, &args) {
        Ok(command) => assert_eq!(run(command), wanted),
        Err(absent) => skipped(2, absent),
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn without_its_feature_mpi_is_refused_in_a_line_that_names_it() {
    let output = gpt(&["train", "--backend", "mpi"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.lines().count() == 1, "{output:?}");
    assert!(said.contains("--backend mpi") && said.contains("--features mpi"), "{said}");
}

/// The spans of a trace on one lane that have a name, as start and end, in microseconds.
fn spans(events: &Value, lane: u64, wanted: impl Fn(&Value) -> bool) -> Vec<(f64, f64)> {
    let on_lane = events.as_array().expect("events").iter().filter(|e| e["tid"] == lane && e["ph"] == "X");
    let times = |e: &Value| (e["ts"].as_f64().expect("a time"), e["dur"].as_f64().expect("a time"));
    on_lane.filter(|e| wanted(e)).map(times).map(|(start, took)| (start, start + took)).collect()
}

fn of(path: &str) -> Value {
    serde_json::from_slice(&fs::read(path).expect("the trace")).expect("JSON")
}

#[test]
fn a_trace_has_two_lanes_for_each_rank_wherever_it_runs() {
    let folder = Folder::new("lanes");
    let (data, trace) = (folder.file("text.txt", text()), folder.path("trace.json"));
    let args = [&SMALL[..], &["--data", &data, "--steps", "3", "--dp", "2", "--trace", &trace]].concat();
    for run in 0..3 {
        match run {
            0 => assert!(gpt(&args).status.success()),
            1 => assert!(over_tcp(2, &args).iter().all(|o| o.status.success())),
            _ => match under_mpirun(2, &args) {
                Some(output) => assert!(output.status.success()),
                None => return,
            },
        }
        let events = of(&trace);
        for (lane, name) in [(0, "rank 0"), (1, "rank 0 communication"), (2, "rank 1")] {
            let is_name = |e: &&Value| e["name"] == "thread_name" && e["tid"] == lane;
            let names = events.as_array().expect("events").iter().filter(is_name);
            assert_eq!(names.map(|e| &e["args"]["name"]).collect::<Vec<_>>(), [name]);
        }
        for rank in 0..2 {
            let phases = ["data", "forward", "backward", "optimizer", "step"];
            let count = |lane, name| spans(&events, lane, |e| e["name"] == name).len();
            assert_eq!(phases.map(|name| count(2 * rank, name)), [3; 5]);
            assert!(count(2 * rank + 1, "communication") > 3);
        }
        fs::remove_file(&trace).expect("a file");
    }
}

#[test]
fn most_bytes_of_the_buckets_are_on_their_way_before_backward_ends() {
    let folder = Folder::new("overlap");
    let (data, trace) = (folder.file("text.txt", text()), folder.path("trace.json"));
    let sizes = ["--layers", "12", "--heads", "4", "--width", "128", "--context", "64", "--batch", "8"];
    let run = ["train", "--quiet", "--steps", "4", "--dp", "2", "--data", &data, "--trace", &trace];
    let output = gpt(&[&run[..], &sizes].concat());
    assert!(output.status.success(), "{output:?}");
    let events = of(&trace);
    let (mut ended, mut started) = (0, 0);
    for rank in [0, 1] {
        let backward = spans(&events, 2 * rank, |e| e["name"] == "backward");
        assert_eq!(backward.len(), 4);
        let inside =
            |e: &Value| backward.iter().any(|b| (b.0..b.1).contains(&e["ts"].as_f64().unwrap_or(-1.0)));
        let buckets = spans(&events, 2 * rank + 1, |e| e["args"]["kind"] == "all_reduce");
        let ends_inside = |bucket: &&(f64, f64)| backward.iter().any(|b| b.0 <= bucket.0 && bucket.1 <= b.1);
        ended += buckets.iter().filter(ends_inside).count();
        started += buckets.len();
        let bytes = |keep: &dyn Fn(&Value) -> bool| -> u64 {
            let all = events.as_array().expect("events").iter();
            let buckets = all.filter(|e| e["tid"] == 2 * rank + 1 && e["args"]["kind"] == "all_reduce");
            buckets.filter(|e| keep(e)).filter_map(|e| e["args"]["bytes"].as_u64()).sum()
        };
        let (early, all) = (bytes(&inside), bytes(&|_| true));
        assert!(2 * early > all && all > 0, "rank {rank}: {early} of {all}");
    }
    // At least one in eight, on a machine that is as busy as it may be. `buckets_end_before_backward_does_on_threads` of phalanx-parallel has all of them, without times.
    assert!(8 * ended > started, "{ended} of {started} buckets ended before backward did");
}
