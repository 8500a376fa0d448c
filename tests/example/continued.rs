//! Runs that go on: from a run's folder, from a model's, and what must not be mixed up.

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
