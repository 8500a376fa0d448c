//! The `gpt` example as a process with a command line.

#[path = "example/adapters.rs"]
mod adapters;
#[path = "example/configured.rs"]
mod configured;
#[path = "example/continued.rs"]
mod continued;
#[path = "example/conversations.rs"]
mod conversations;
#[path = "example/damage.rs"]
mod damage;
#[path = "example/formats.rs"]
mod formats;
#[path = "example/launched.rs"]
mod launched;
#[path = "../train/tests/launched/launcher.rs"]
mod launcher;
#[path = "example/layouts.rs"]
mod layouts;
#[path = "../parallel/tests/comm/port.rs"]
mod port;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

/// An example, built if need be.
fn example(name: &str) -> Command {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let mut build = launcher::cargo_build();
        build.args(["--example", "gpt", "--example", "gpipe_unet", "--example", "shapes"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        for (feature, on) in [("mpi", cfg!(feature = "mpi")), ("tls", cfg!(feature = "tls"))] {
            if on {
                build.args(["--features", feature]);
            }
        }
        if let Ok(features) = std::env::var("PHALANX_EXAMPLE_FEATURES") {
            build.args(["--features", &features]);
        }
        assert!(build.status().expect("cargo runs").success(), "the examples build");
        let tests = std::env::current_exe().expect("a test has a path");
        tests.parent().and_then(Path::parent).expect("target/PROFILE/deps").join("examples")
    });
    Command::new(folder.join(name))
}

fn gpt(args: &[&str]) -> Output {
    example("gpt").args(args).stdin(Stdio::null()).output().expect("the example starts")
}

/// A folder of the test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("phalanx-example-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("a temporary file");
        path.display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const SMALL: [&str; 14] = [
    "train",
    "--layers",
    "2",
    "--heads",
    "2",
    "--width",
    "16",
    "--context",
    "16",
    "--batch",
    "4",
    "--quiet",
    "--save-every",
    "2",
];

fn text() -> String {
    (0..4000u32).map(|i| char::from(b'a' + (i * i / 7 % 26) as u8)).collect()
}

/// Whether a run's folder has a complete checkpoint; that before, if the run was killed as it replaced one.
fn has_checkpoint(run: &str) -> bool {
    ["checkpoint", ".checkpoint.old"].iter().any(|name| Path::new(run).join(name).exists())
}

/// The loss of every step in a metrics file, as printed.
fn losses(path: &str) -> Vec<String> {
    let lines = fs::read_to_string(path).unwrap_or_default();
    let of = |line: &str| serde_json::from_str::<Value>(line).ok()?.get("loss").map(Value::to_string);
    lines.lines().filter_map(of).collect()
}

fn train(folder: &Folder, name: &str, more: &[&str]) -> Vec<String> {
    let (data, metrics) = (folder.file("text.txt", text()), folder.path(name));
    let mut args = SMALL.to_vec();
    args.extend(["--data", &data, "--metrics", &metrics]);
    args.extend(more);
    let output = gpt(&args);
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    losses(&metrics)
}

#[test]
fn losses_have_the_same_digits_at_any_thread_count_and_recompute_mode() {
    let folder = Folder::new("digits");
    let dropout = ["--steps", "4", "--dropout", "0.1"];
    let all = |name: &str, more: &[&str]| train(&folder, name, &[&dropout[..], more].concat());
    let reference = all("a", &["--threads", "1"]);
    assert_eq!(reference.len(), 4);
    assert_eq!(all("b", &["--threads", "2"]), reference);
    assert_eq!(all("c", &["--threads", "8"]), reference);
    assert_eq!(all("d", &["--recompute", "always"]), reference);
    assert_eq!(all("e", &["--recompute", "except-last"]), reference);
}

#[test]
fn a_plan_is_made_and_followed_with_the_digits_of_one_rank() {
    let folder = Folder::new("plan");
    let (data, mut args) = (folder.file("text.txt", text()), SMALL.to_vec());
    args[0] = "plan";
    args.extend(["--data", &data, "--pp", "3", "--links", "3x1e6", "--micro-batches", "4"]);
    let made = gpt(&args);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let by_hand = "[[stage]]\nlayers = 3\nreplicas = 2\n[[stage]]\nlayers = 1\nreplicas = 1\n";
    let steps = ["--steps", "3", "--micro-batches", "4"];
    let wanted = train(&folder, "a", &steps);
    for plan in [made.stdout, by_hand.into()] {
        let plan = folder.file("plan.toml", plan);
        assert_eq!(train(&folder, "b", &[&steps[..], &["--plan", &plan]].concat()), wanted);
    }
    let (plan, mut args) = (folder.path("plan.toml"), SMALL.to_vec());
    args.extend(["--data", &data, "--plan", &plan, "--pp", "2"]);
    let error = String::from_utf8_lossy(&gpt(&args).stderr).into_owned();
    assert!(error.contains("plan.toml: replicas [2, 1] are 3 ranks, and --pp is 2"), "{error}");
}

#[test]
fn micro_batches_in_groups_add_up_to_the_same_model() {
    let folder = Folder::new("micro");
    let close = |a: &[String], b: &[String]| {
        let number = |s: &String| s.parse::<f64>().expect("a loss");
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (number(a) - number(b)).abs() < 1e-9)
    };
    let in_f64 = ["--steps", "4", "--dtype", "f64", "--dropout", "0.1"];
    let all = |name: &str, more: &[&str]| train(&folder, name, &[&in_f64[..], more].concat());
    let whole = all("a", &[]);
    for (name, more) in [
        ("b", &["--micro-batches", "2"][..]),
        ("c", &["--micro-batches", "3"]),
        ("d", &["--micro-batches", "4", "--emulate-dp", "2"]),
        ("e", &["--micro-batches", "4", "--emulate-dp", "4"]),
    ] {
        let cut = all(name, more);
        assert!(close(&whole, &cut), "{more:?}: {whole:?} {cut:?}");
    }
}

#[test]
fn ranks_have_the_digits_of_one_that_adds_in_their_order() {
    let folder = Folder::new("ranks");
    let all = |name: &str, more: &[&str]| train(&folder, name, &[&["--steps", "4"], more].concat());
    for more in [&["--dropout", "0.1", "--clip", "0.1"][..], &["--dtype", "bf16"], &["--recompute", "always"]]
    {
        let with = |name: &str, ranks: &[&str]| all(name, &[more, ranks].concat());
        let alone = with("a", &["--micro-batches", "2", "--emulate-dp", "2"]);
        assert_eq!(with("b", &["--dp", "2"]), alone, "{more:?}");
        let alone = with("c", &["--micro-batches", "4", "--emulate-dp", "2"]);
        assert_eq!(with("d", &["--ranks", "2", "--micro-batches", "2", "--threads", "1"]), alone, "{more:?}");
        let alone = with("e", &["--micro-batches", "4", "--emulate-dp", "4"]);
        assert_eq!(with("f", &["--dp", "4"]), alone, "{more:?}");
    }
    let lines = fs::read_to_string(folder.path("f")).expect("metrics");
    let first: Value = serde_json::from_str(lines.lines().next().expect("a step")).expect("JSON");
    assert_eq!(first["peak_bytes"].as_array().map(Vec::len), Some(4));
}

#[test]
fn a_run_goes_on_with_other_ranks_bit_for_bit() {
    let folder = Folder::new("regroup");
    let (out, more) = (folder.path("out"), ["--dropout", "0.1", "--lr-schedule", "constant"]);
    let run = |name: &str, steps: &str, layout: &[&str]| {
        train(&folder, name, &[&more[..], &["--steps", steps, "--out", &out], layout].concat())
    };
    let whole = train(&folder, "whole", &[&more[..], &["--steps", "6", "--dp", "2"]].concat());
    assert_eq!(run("a", "3", &["--dp", "2"]), whole[..3]);
    let alone = ["--resume", &out, "--micro-batches", "2", "--emulate-dp", "2"];
    assert_eq!(run("b", "6", &alone), whole[3..]);
}

#[test]
fn a_resumed_run_continues_bit_for_bit_after_a_kill_at_any_moment() {
    let folder = Folder::new("resume");
    let more = ["--steps", "12", "--dropout", "0.1", "--dtype", "bf16"];
    let whole = train(&folder, "whole", &more);
    assert_eq!(whole.len(), 12);
    let data = folder.file("text.txt", text());
    for (number, delay_ms) in [5u64, 15, 30, 45, 60, 90].into_iter().enumerate() {
        let out = folder.path(&format!("run{number}"));
        let mut args = SMALL.to_vec();
        args.extend(["--data", &data, "--out", &out]);
        args.extend(more);
        let mut child = example("gpt").args(&args).stderr(Stdio::null()).spawn().expect("the example starts");
        std::thread::sleep(Duration::from_millis(delay_ms));
        child.kill().expect("kill");
        child.wait().expect("wait");
        if has_checkpoint(&out) {
            args.extend(["--resume", &out]);
        }
        let output = gpt(&args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(losses(&format!("{out}/metrics.jsonl")), whole, "killed after {delay_ms} ms");
    }
}

#[test]
fn a_run_killed_while_it_writes_a_checkpoint_continues_bit_for_bit_and_leaves_no_scraps() {
    let folder = Folder::new("writing");
    let more = ["--steps", "10", "--dropout", "0.1"];
    let whole = train(&folder, "whole", &more);
    let (data, out) = (folder.path("text.txt"), folder.path("run"));
    let begin = [&SMALL[..], &["--data", &data, "--out", &out], &more].concat();
    let scraps = || {
        let names = fs::read_dir(&out).into_iter().flatten().flatten().map(|e| e.file_name());
        names.filter(|name| name.to_string_lossy().starts_with(".checkpoint")).collect::<Vec<_>>()
    };
    let resume = || if has_checkpoint(&out) { vec!["--resume", &out[..]] } else { vec![] };
    let mut caught = 0;
    for attempt in 0..60 {
        let args = [&begin[..], &resume()].concat();
        let mut child = example("gpt").args(&args).stderr(Stdio::null()).spawn().expect("the example starts");
        // The earlier run's checkpoint does not count: this run's first save removes it.
        let written = Path::new(&out).join(".checkpoint.saving");
        if attempt > 0 {
            while child.try_wait().expect("a child").is_none() && written.exists() {}
        }
        while child.try_wait().expect("a child").is_none() && !written.exists() {}
        child.kill().expect("kill");
        child.wait().expect("wait");
        caught += usize::from(!scraps().is_empty());
        if caught == 3 {
            break;
        }
        if losses(&format!("{out}/metrics.jsonl")).len() == whole.len() {
            fs::remove_dir_all(&out).expect("a run that came to its end");
        }
    }
    assert!(caught > 0, "no run was killed while it wrote");
    let output = gpt(&[&begin[..], &resume()].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(losses(&format!("{out}/metrics.jsonl")), whole);
    assert!(scraps().is_empty());
}

#[test]
fn a_trace_is_json_that_names_every_step() {
    let folder = Folder::new("trace");
    let trace = folder.path("trace.json");
    train(&folder, "m", &["--steps", "3", "--trace", &trace, "--out", &folder.path("run")]);
    let events: Value = serde_json::from_slice(&fs::read(&trace).expect("the trace")).expect("JSON");
    let of = |name: &str| {
        let named = events.as_array().expect("events").iter().filter(|e| e["name"] == name);
        named.map(|e| e["args"]["step"].as_u64().expect("a step")).collect::<Vec<_>>()
    };
    assert_eq!((of("step"), of("checkpoint")), (vec![0, 1, 2], vec![1, 2]));
}

#[test]
fn a_trained_model_is_a_hugging_face_folder_that_generates() {
    let folder = Folder::new("generate");
    let out = folder.path("run");
    train(&folder, "m", &["--steps", "3", "--out", &out]);
    for name in [
        "metrics.jsonl",
        "loss.svg",
        "checkpoint/checkpoint.json",
        "checkpoint/rank-0.safetensors",
        "model/config.json",
        "model/model.safetensors",
    ] {
        assert!(Path::new(&out).join(name).exists(), "{name}");
    }
    let args = ["generate", "--model", &out, "--prompt", "abc", "--tokens", "20", "--seed", "3"];
    let (first, again) = (gpt(&args), gpt(&args));
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    assert!(first.stdout.starts_with(b"abc") && first.stdout == again.stdout);
}

#[test]
fn meta_says_what_a_step_takes_on_a_cpu() {
    let folder = Folder::new("meta");
    let data = folder.file("text.txt", text());
    for more in [
        &[][..],
        &["--dtype", "bf16", "--recompute", "except-last"],
        &["--dtype", "bf16", "--grad-dtype", "bf16", "--dropout", "0.1"],
        &["--dtype", "f64", "--recompute", "always"],
        &["--recompute", "always", "--dropout", "0.1", "--clip", "0"],
        &["--micro-batches", "3"],
        &["--micro-batches", "4", "--emulate-dp", "2", "--dtype", "bf16"],
    ] {
        let metrics = folder.path("metrics");
        let mut args = SMALL.to_vec();
        args.extend(["--data", &data, "--steps", "3", "--metrics", &metrics]);
        args.extend(more);
        assert!(gpt(&args).status.success());
        let lines = fs::read_to_string(&metrics).expect("metrics");
        let last: Value = serde_json::from_str(lines.lines().last().expect("a summary")).expect("JSON");
        let on_cpu = last["summary"]["peak_bytes"][0].as_u64().expect("a number");
        args.extend(["--device", "meta"]);
        let output = gpt(&args);
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let total = printed.lines().find(|l| l.trim_start().starts_with("in all")).expect("a total");
        assert_eq!(total.split_whitespace().last(), Some(on_cpu.to_string().as_str()), "{more:?}: {printed}");
    }
}

// The U-Net example: torchgpipe's parameter counts, one device's bits, a picture.

#[test]
fn the_unet_has_torchgpipes_parameters_and_one_devices_losses_and_is_drawn() {
    let folder = Folder::new("unet");
    let picture = folder.path("timeline.svg");
    let mut run = example("gpipe_unet");
    let output = run.args([&picture, "2"]).stdin(Stdio::null()).output().expect("the example starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("one device's losses: equal, bit for bit"), "{text}");
    // Parameters, and the memory that torchgpipe measured, in GiB.
    let rows = [
        ("(6, 72)", 362_157_516u64, "362.2M", 20.3),
        ("(11, 128)", 2_213_834_176, "2.21B", 20.5),
        ("(24, 128)", 4_993_859_008, "4.99B", 43.4),
        ("(24, 160)", 7_802_903_600, "7.80B", 79.1),
        ("(48, 160)", 15_822_206_000, "15.82B", 154.1),
    ];
    for (net, parameters, short, theirs) in rows {
        let row = text.lines().find(|line| line.contains(net)).unwrap_or_default();
        assert!(row.contains(&parameters.to_string()) && row.contains(short), "{net}: {row:?}");
        let printed: Vec<f64> =
            row.split_whitespace().rev().take(2).map(|n| n.parse().expect("GiB")).collect();
        assert_eq!(printed[0], theirs, "{row:?}");
        // Weights and gradients at least; theirs has workspaces and the allocator's rest too. `tests/unet.rs` compares the same
        // count with the memory of CPUs.
        assert!(printed[1] > 8.0 * parameters as f64 / (1u64 << 30) as f64, "{row:?}");
        assert!((0.8 * theirs..theirs).contains(&printed[1]), "{row:?}");
    }
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
    for phase in ["Forward", "Recompute", "Backward", "Copy"] {
        assert!(drawn.contains(&format!("<title>{phase} 0, stage")), "{phase}");
    }
}

#[test]
fn senseless_numbers_of_steps_are_refused() {
    for steps in ["0", "-1", "many"] {
        let output = example("gpipe_unet").args(["unused.svg", steps]).output().expect("the example starts");
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.starts_with(&format!("gpipe_unet: got {steps:?} steps")), "{message}");
    }
}
