//! Resumed runs: from a run's folder, from a model's folder, after Ctrl-C; and the refusal of another run's folder.

#[cfg(unix)]
use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

#[cfg(unix)]
use crate::example;
use crate::{Folder, SMALL, gpt, losses, text};

/// Losses of a run with its files in `out`, from the text of all tests.
fn run(folder: &Folder, metrics: &str, args: &[&str]) -> Vec<String> {
    let (data, metrics) = (folder.file("text.txt", text()), folder.path(metrics));
    let common = ["train", "--quiet", "--context", "16", "--batch", "4", "--lr-schedule", "constant"];
    let output = gpt(&[&common[..], &["--data", &data, "--metrics", &metrics], args].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    losses(&metrics)
}

fn refused(folder: &Folder, args: &[&str], named: &str) {
    let data = folder.file("text.txt", text());
    let output = gpt(&[&SMALL[..], &["--data", &data], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains(named), "{args:?}: {said}");
}

#[test]
fn a_run_from_a_models_folder_resumes_bit_for_bit_with_the_dropout_that_was_asked_for() {
    let folder = Folder::new("from-folder");
    let (base, out) = (folder.path("base"), folder.path("out"));
    let small = ["--layers", "2", "--heads", "2", "--width", "16"];
    run(&folder, "m", &[&small[..], &["--steps", "2", "--out", &base]].concat());
    let model = format!("{base}/model");
    let from = |metrics: &str, more: &[&str]| run(&folder, metrics, &[&["--init", &model], more].concat());
    let whole = from("whole", &["--steps", "6", "--dropout", "0.3"]);
    assert_ne!(whole, from("dry", &["--steps", "6"]));
    assert_eq!(from("a", &["--steps", "3", "--dropout", "0.3", "--out", &out]), whole[..3]);
    let rest = run(&folder, "b", &["--steps", "6", "--dropout", "0.3", "--resume", &out]);
    assert_eq!(rest, whole[3..]);
    let data = folder.path("text.txt");
    let output =
        gpt(&["train", "--quiet", "--data", &data, "--context", "16", "--init", &model, "--heads", "4"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--heads is 4"), "{said}");
}

#[test]
fn what_is_another_run_is_refused() {
    let folder = Folder::new("another");
    let out = folder.path("out");
    let small = ["--layers", "2", "--heads", "2", "--width", "16", "--out", &out];
    run(&folder, "m", &[&small[..], &["--steps", "2"]].concat());
    refused(&folder, &["--out", &out], "holds a run");
    refused(&folder, &["--resume", &out, "--steps", "1"], "--steps 1");
    let other = ["--layers", "2", "--heads", "4", "--width", "16", "--steps", "3", "--resume", &out];
    let data = folder.path("text.txt");
    let output = gpt(&[
        &["train", "--quiet", "--batch", "4", "--context", "16", "--data", &data],
        &other[..],
    ]
    .concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--heads 2"), "{said}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_goes_on_by_the_command_that_it_prints() {
    let folder = Folder::new("interrupted");
    let (data, metrics) = (folder.file("text.txt", text()), folder.path("m.jsonl"));
    let rest = ["--data", &data, "--lr-schedule", "constant", "--dropout", "0.1", "--metrics", &metrics];
    for (with_out, signal) in [(false, "-INT"), (true, "-TERM")] {
        let mut run = example("gpt");
        run.args(SMALL).args(rest).args(["--steps", "1000000"]).current_dir(&folder.0);
        if with_out {
            run.args(["--out", "kept"]);
        }
        let child = run
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let begin = Instant::now();
        while losses(&metrics).len() < 3 && begin.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().expect("kill").success());
        let output = child.wait_with_output().expect("it ends");
        let (said, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{told}");
        assert!(told.contains("saving after this step"), "{told}");
        assert_eq!(told.contains("press Ctrl-C again to quit at once"), signal == "-INT", "{told}");
        let before = losses(&metrics);
        let command = said
            .lines()
            .find_map(|line| line.strip_prefix("go on with: cargo run --release --example gpt -- "));
        let command: Vec<&str> = command.unwrap_or_else(|| panic!("{said}")).split(' ').collect();
        let steps = (before.len() + 2).to_string();
        let on = |args: &[&str]| {
            let output = example("gpt")
                .args(args)
                .args(["--steps", &steps])
                .current_dir(&folder.0)
                .output()
                .expect("it starts");
            assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
            losses(&metrics)
        };
        let after = on(&command);
        assert_eq!(after.len(), 2);
        let whole = on(&[&SMALL[..], &rest].concat());
        assert_eq!([before, after].concat(), whole);
        fs::remove_file(&metrics).expect("a file");
    }
}

/// One command line, which a supervisor repeats: it begins a run, goes on with it after each SIGTERM, and ends it. The processes are two
/// ranks, of which one gets the signal.
#[cfg(unix)]
#[test]
fn a_command_that_is_repeated_goes_on_where_it_was_stopped() {
    let folder = Folder::new("auto");
    let data = folder.file("text.txt", text());
    let metrics = folder.path("out/metrics.jsonl");
    let start = |rank: &str, port: &str, steps: &str, out: &str| {
        let mut run = example("gpt");
        run.args(SMALL)
            .args(["--data", &data, "--dp", "2", "--steps", steps, "--out", out, "--resume", "auto"]);
        run.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]);
        run.current_dir(&folder.0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        run.spawn().expect("it starts")
    };
    let run = |steps: &str, out: &str, stop_at: Option<usize>| {
        let port = crate::port::free_port().to_string();
        let ranks = ["0", "1"].map(|rank| start(rank, &port, steps, out));
        let begin = Instant::now();
        if let Some(stop_at) = stop_at {
            while losses(&metrics).len() < stop_at && begin.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let pid = ranks[1].id().to_string();
            assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        }
        for rank in ranks {
            let output = rank.wait_with_output().expect("it ends");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    };
    run("1000000", "out", Some(3));
    let done = losses(&metrics).len();
    run("1000000", "out", Some(done + 2));
    let steps = (losses(&metrics).len() + 2).to_string();
    run(&steps, "out", None);
    run(&steps, "whole", None);
    assert_eq!(losses(&metrics), losses(&folder.path("whole/metrics.jsonl")));
}

#[test]
fn repeated_steps_are_compared_with_their_digests() {
    let folder = Folder::new("replay");
    let out = folder.path("out");
    let small = ["--layers", "1", "--heads", "2", "--width", "16", "--steps", "6", "--save-every", "2"];
    run(&folder, "m", &[&small[..], &["--keep-last", "3", "--digests", "1", "--out", &out]].concat());
    let from = folder.path("out/checkpoint-00000002");
    let replay = |more: &[&str]| {
        let output = gpt(&[&["replay", "--from", &from, "--steps", "3..6"], more].concat());
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let (code, said) = replay(&[]);
    assert!(code == Some(0) && said.contains("3 steps have the digests"), "{said}");
    let (code, said) = replay(&["--lr", "0.5"]);
    assert!(code == Some(1) && said.contains("step 3: the first difference is in"), "{said}");
}
