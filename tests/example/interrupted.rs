//! Ctrl-C: the run saves, and says by which command it goes on.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Folder, SMALL, example, losses, text};

#[test]
fn an_interrupted_run_goes_on_by_the_command_that_it_prints() {
    let folder = Folder::new("interrupted");
    let (data, metrics) = (folder.file("text.txt", text()), folder.path("m.jsonl"));
    let rest = ["--data", &data, "--lr-schedule", "constant", "--dropout", "0.1", "--metrics", &metrics];
    for with_out in [false, true] {
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
        assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
        let output = child.wait_with_output().expect("it ends");
        let (said, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{told}");
        assert!(told.contains("saving after this step; press Ctrl-C again to quit at once"), "{told}");
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
